//! A server under load: any that speaks OpenAI's protocol, through its streamed answers.
//!
//! With --concurrency as many requests are under way as it says, the next one begins when one ends. With --rate requests
//! come when they are due (Poisson), however slow the answers are, and what they take is counted from when they were
//! due: a server that falls behind shows it.

mod arrivals;
mod client;
mod figures;
mod plot;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::args::{BenchArgs, LoadArgs};
use crate::cancel;
use crate::errors::{cancelled, usage};
use crate::output::Out;
use arrivals::{Ask, Asks};
use client::{Sample, Target};
use figures::{Goal, Level, LoadReport};

/// Requests of a row, where nothing else is said.
const COUNT: usize = 64;
/// Requests of a row at most.
const COUNT_MAX: usize = 1_000_000;
/// Requests under way at once at most: each holds a connection.
const AT_ONCE_MAX: usize = 4096;
/// Requests a second at most.
const RATE_MAX: f64 = 1e5;
/// Seconds that a row or a request may be given at most.
const SECONDS_MAX: f64 = 1e6;
/// How often Ctrl-C is looked for.
const HEED: Duration = Duration::from_millis(50);

/// Measures and tells.
pub fn run(args: &BenchArgs, out: &Out) -> Result<ExitCode> {
    let rows = rows(args)?;
    let target = target(args)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let flag = cancel::flag();
    let report = runtime.block_on(async {
        tokio::select! {
            report = measure(args, &rows, target, out) => report,
            () = async { while !flag.load(Ordering::Relaxed) { sleep(HEED).await } } => Err(cancelled()),
        }
    })?;
    if let Some(path) = &args.load.svg {
        std::fs::write(path, plot::draw(&report))
            .with_context(|| format!("cannot write the picture to {}", path.display()))?;
    }
    out.result(&report)?;
    match report.levels.iter().find(|level| level.ok > 0) {
        Some(_) => Ok(ExitCode::SUCCESS),
        None => bail!("no request was answered: {}", report.first_error().unwrap_or("none was sent")),
    }
}

/// How requests of a row come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Come {
    /// As many at once.
    AtOnce(usize),
    /// So many a second.
    Rate(f64),
}

fn rows(args: &BenchArgs) -> Result<Vec<Come>> {
    let LoadArgs { rate, count, duration, timeout, slo_ttft, slo_tpot, slo_e2e, .. } = &args.load;
    for level in &args.concurrency {
        if !(1..=AT_ONCE_MAX).contains(level) {
            return Err(usage(format!("--concurrency {level}: expected 1 to {AT_ONCE_MAX} requests at once")));
        }
    }
    for rate in rate {
        if !(*rate > 0.0 && *rate <= RATE_MAX) {
            return Err(usage(format!("--rate {rate}: expected requests a second, more than 0, at most {RATE_MAX}")));
        }
    }
    if let Some(count) = count.filter(|count| !(1..=COUNT_MAX).contains(count)) {
        return Err(usage(format!("--count {count}: expected 1 to {COUNT_MAX} requests")));
    }
    let times = [
        ("--duration", *duration, 1.0),
        ("--timeout", Some(*timeout), 1.0),
        ("--slo-ttft", *slo_ttft, 1e-3),
        ("--slo-tpot", *slo_tpot, 1e-3),
        ("--slo-e2e", *slo_e2e, 1e-3),
    ];
    for (name, value, unit) in times {
        if let Some(value) = value.filter(|value| !(*value > 0.0 && value * unit <= SECONDS_MAX)) {
            return Err(usage(format!("{name} {value}: expected a time of more than 0")));
        }
    }
    Ok(match (rate.as_slice(), args.concurrency.as_slice()) {
        ([], []) => vec![Come::AtOnce(1), Come::AtOnce(8)],
        ([], levels) => levels.iter().copied().map(Come::AtOnce).collect(),
        (rates, _) => rates.iter().copied().map(Come::Rate).collect(),
    })
}

fn target(args: &BenchArgs) -> Result<Target> {
    let load = &args.load;
    let url = load.url.as_deref().expect("it was typed");
    let key = load.api_key.as_deref().map(key).transpose()?;
    let more = match load.body.as_deref().map(serde_json::from_str::<Map<String, Value>>) {
        None => Map::new(),
        Some(Ok(more)) => more,
        Some(Err(error)) => return Err(usage(format!("--body: not a JSON object: {error}"))),
    };
    Target::new(url, key.as_deref(), load.api, more, Duration::from_secs_f64(load.timeout))
}

/// The first line of a file.
fn key(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| usage(format!("--api-key: cannot read {}: {error}", path.display())))?;
    match text.lines().next().map(str::trim).filter(|line| !line.is_empty()) {
        Some(line) => Ok(line.to_owned()),
        None => Err(usage(format!("--api-key: the first line of {} is empty", path.display()))),
    }
}

async fn measure(args: &BenchArgs, rows: &[Come], mut target: Target, out: &Out) -> Result<LoadReport> {
    let load = &args.load;
    target.model = match &args.model.model {
        Some(model) => model.clone(),
        None => target.only_model().await?,
    };
    let target = Arc::new(target);
    let asks = Asks { prompt: args.prompt_tokens, answer: args.gen_tokens, seed: load.load_seed };
    // Also tells whether there is a server at all, before anything is measured.
    let warm_up = target.ask(&asks.at(usize::MAX), Instant::now()).await;
    if let Err(failure) = &warm_up.outcome {
        bail!("{}: {}", target.endpoint(), failure.message);
    }
    let goal = Goal { ttft: load.slo_ttft, tpot: load.slo_tpot, e2e: load.slo_e2e };
    let mut levels = Vec::new();
    for (index, come) in rows.iter().enumerate() {
        let row = Row {
            target: target.clone(),
            asks: Asks { seed: asks.seed.wrapping_add(index as u64), ..asks },
            count: load.count.unwrap_or(if load.duration.is_some() { COUNT_MAX } else { COUNT }),
            duration: load.duration.map(Duration::from_secs_f64),
        };
        out.note(&match come {
            Come::AtOnce(count) => format!("{count} at once"),
            Come::Rate(rate) => format!("{rate} a second"),
        });
        let (samples, seconds) = match *come {
            Come::AtOnce(count) => row.at_once(count).await,
            Come::Rate(rate) => row.at_rate(rate).await,
        };
        levels.push(Level::of(*come, &samples, seconds, goal));
    }
    Ok(LoadReport {
        url: target.endpoint().to_owned(),
        model: target.model.clone(),
        prompt_tokens: args.prompt_tokens.to_string(),
        gen_tokens: args.gen_tokens.to_string(),
        seed: asks.seed,
        slo: goal,
        levels,
    })
}

/// The requests of a row.
struct Row {
    target: Arc<Target>,
    asks: Asks,
    count: usize,
    duration: Option<Duration>,
}

impl Row {
    /// Each of so many users asks again once it has its answer.
    async fn at_once(self, users: usize) -> (Vec<Sample>, f64) {
        let begin = Instant::now();
        let until = self.duration.map(|duration| begin + duration);
        let row = Arc::new((self, AtomicUsize::new(0), Mutex::new(Vec::new())));
        let mut tasks = JoinSet::new();
        for _ in 0..users {
            let row = row.clone();
            tasks.spawn(async move {
                let (Row { target, asks, count, .. }, next, samples) = &*row;
                while until.is_none_or(|until| Instant::now() < until) {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= *count {
                        break;
                    }
                    let sample = target.ask(&asks.at(number), Instant::now()).await;
                    samples.lock().expect("nobody panics with it").push(sample);
                }
            });
        }
        tasks.join_all().await;
        let samples = std::mem::take(&mut *row.2.lock().expect("nobody panics with it"));
        (samples, begin.elapsed().as_secs_f64())
    }

    /// Requests come when they are due.
    async fn at_rate(self, rate: f64) -> (Vec<Sample>, f64) {
        let begin = Instant::now();
        let mut tasks = JoinSet::new();
        let mut samples = Vec::new();
        for (number, at) in self.asks.arrivals(rate).take(self.count).enumerate() {
            if self.duration.is_some_and(|duration| at > duration) {
                break;
            }
            let due = begin + at;
            sleep_until(due).await;
            while let Some(done) = tasks.try_join_next() {
                samples.push(done.expect("no request panics"));
            }
            if tasks.len() >= AT_ONCE_MAX {
                samples.push(Sample::not_sent(AT_ONCE_MAX));
                continue;
            }
            let (target, ask): (_, Ask) = (self.target.clone(), self.asks.at(number));
            tasks.spawn(async move { target.ask(&ask, due).await });
        }
        samples.extend(tasks.join_all().await);
        (samples, begin.elapsed().as_secs_f64())
    }
}

/// How often each kind of failure came, and the first of them.
pub type Failures = BTreeMap<String, figures::Failed>;
