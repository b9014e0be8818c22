//! A pipeline in virtual time: what a load would get out of stages and hops of given costs.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};
use pp_engine::PAGE;
use pp_engine::law::{HopCost, StageCost};
use pp_engine::random::Random;
use pp_engine::sampler::Sampling;
use pp_engine::schedule::Limits;
use pp_engine::sim::load::{Distribution, End, Load, Outcome, Request};
use pp_engine::sim::{Nothing, Pipe};
use serde::Serialize;

use crate::args::SimArgs;
use crate::errors::usage;
use crate::output::{Out, Report, table};
use crate::report::Percentiles;
use crate::requests::{self, RequestLine};

/// Ids of made-up prompts.
const VOCAB: u32 = 1 << 15;

/// Stages at most.
const STAGES_MAX: usize = 1024;
/// Requests at most.
const COUNT_MAX: usize = 1_000_000;
/// Tokens, and what is counted like them, at most.
const TOKENS_MAX: usize = 1 << 26;
/// Seconds at most that requests may take to come.
const SECONDS_MAX: f64 = 1e9;

/// Simulates and tells.
pub fn run(args: &SimArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    for (name, value, max) in [
        ("--stages", args.stages.unwrap_or(1), STAGES_MAX),
        ("--count", args.count, COUNT_MAX),
        ("--max-sequences", args.max_sequences, TOKENS_MAX),
        ("--max-batch-tokens", args.max_batch_tokens, TOKENS_MAX),
        ("--kv-tokens", args.kv_tokens, TOKENS_MAX),
        ("--ctx", args.ctx, TOKENS_MAX),
        ("--groups", args.groups.unwrap_or(1), TOKENS_MAX),
    ] {
        if !(1..=max).contains(&value) {
            return Err(usage(format!("{name} {value}: expected 1 to {max}")));
        }
    }
    let pipe = pipe(args)?;
    let stages = pipe.stages.len();
    let requests = match &args.requests {
        Some(path) => replay(path, args.seed)?,
        None => distribution(args)?.requests(args.seed, VOCAB),
    };
    let limits = Limits {
        stages,
        sequences: args.max_sequences,
        batch_tokens: args.max_batch_tokens,
        tile: 1,
        outputs: args.max_sequences,
        pages: args.kv_tokens.div_ceil(PAGE),
        context: args.ctx,
        in_flight: 2 * stages + 1,
        queue: args.queue,
        prefix_cache: !args.no_prefix_cache,
        groups: args.groups,
    };
    let mut load = Load::new(limits, requests, VOCAB);
    let (trace, _) = match pp_engine::sim::run(&pipe, &mut load, &mut Nothing, u64::MAX) {
        Ok(done) => done,
        Err(stuck) => {
            bail!("the simulated pipeline stands still at {:.3} s: please report this", stuck.at as f64 * 1e-9)
        }
    };
    if let Some(path) = &args.trace {
        super::write_trace(&trace, path)?;
    }
    out.result(&SimReport::new(&pipe, &load, &trace))?;
    Ok(ExitCode::SUCCESS)
}

/// Milliseconds, comma-separated: at least one, at most `most`.
fn milliseconds(name: &str, text: &str, most: usize) -> Result<Vec<f64>> {
    let numbers: Option<Vec<f64>> =
        text.split(',').map(|n| n.trim().parse().ok().filter(|ms: &f64| (0.0..=1e6).contains(ms))).collect();
    match numbers {
        Some(numbers) if numbers.len() <= most => Ok(numbers.iter().map(|ms| ms * 1e-3).collect()),
        _ => Err(usage(format!(
            "{name} {text}: expected up to {most} numbers of milliseconds (0 to 1000000), comma-separated"
        ))),
    }
}

fn pipe(args: &SimArgs) -> Result<Pipe> {
    let mut stages = Vec::new();
    for text in &args.stage {
        let c = milliseconds("--stage", text, 3)?;
        let part = |i: usize| c.get(i).copied().unwrap_or(0.0);
        // x tokens behind L attend to Lx + x²/2 positions.
        stages.push(StageCost { alpha: part(0), beta: part(1), attention: part(2) * 1e-3 / 2.0 });
    }
    let count = args.stages.unwrap_or(stages.len());
    if stages.len() == 1 {
        stages = vec![stages[0]; count];
    }
    if stages.len() != count {
        return Err(usage(format!("--stages {count}, but --stage is given {} times: once, or for each", stages.len())));
    }
    let mut hops = Vec::new();
    for text in &args.hop {
        let c = milliseconds("--hop", text, 2)?;
        let part = |i: usize| c.get(i).copied().unwrap_or(0.0);
        hops.push(HopCost { latency: part(0), seconds_per_token: part(1) });
    }
    let hops = match hops.len() {
        0 => vec![HopCost::default(); count],
        1 => vec![hops[0]; count],
        n if n == count => hops,
        n => return Err(usage(format!("--hop is given {n} times: once, or for each of the {count} stages' hops"))),
    };
    let sampling = milliseconds("--sampling", &args.sampling, 1)?[0];
    let jitter = milliseconds("--jitter", &args.jitter, 1)?[0];
    Ok(Pipe { hops, jitter, sampling, seed: args.seed, ..Pipe::of(stages) })
}

fn distribution(args: &SimArgs) -> Result<Distribution> {
    let share = |name: &str, share: f64| {
        if (0.0..=1.0).contains(&share) { Ok(share) } else { Err(usage(format!("{name} {share}: expected 0 to 1"))) }
    };
    let ok = args.rate == 0.0 || args.rate > 0.0 && args.count as f64 / args.rate < SECONDS_MAX;
    if !(ok && args.rate.is_finite()) {
        return Err(usage(format!("--rate {}: expected requests a second, or 0 for all at once", args.rate)));
    }
    Ok(Distribution {
        requests: args.count,
        rate: args.rate,
        prompt: (args.prompt.least, args.prompt.most),
        output: (args.answer.least, args.answer.most),
        shared: share("--shared", args.shared)?,
        cancelled: (share("--cancelled", args.cancelled)?, 10.0),
        several: 0.0,
    })
}

/// The lengths and times of a file of requests; texts are not read as tokens here.
fn replay(path: &Path, seed: u64) -> Result<Vec<Request>> {
    let mut random = Random::new(seed);
    let mut requests = Vec::new();
    for line in requests::open(path)? {
        let (number, text) = line?;
        let bad = |message: String| usage(format!("{}, line {number}: {message}", path.display()));
        let line = text.and_then(|text| RequestLine::parse(&text)).map_err(bad)?;
        line.sampling(&Sampling::default(), VOCAB as usize).map_err(bad)?;
        let tokens = line.prompt_tokens.ok_or_else(|| {
            bad("prompt_tokens is missing: the simulator has no tokenizer to count a prompt with".to_owned())
        })?;
        if !(1..=1 << 20).contains(&tokens) {
            return Err(bad(format!("prompt_tokens {tokens}: expected 1 to {}", 1 << 20)));
        }
        requests.push(Request {
            at: (line.arrival_ms.unwrap_or(0.0).max(0.0) * 1e6) as u64,
            prompt: (0..tokens).map(|_| (random.bits() % u64::from(VOCAB)) as u32).collect(),
            choices: line.n.unwrap_or(1),
            output: line.max_tokens.unwrap_or(64).max(1),
            cancel: None,
            deadline: None,
        });
    }
    if requests.is_empty() {
        return Err(usage(format!("{} holds no requests", path.display())));
    }
    Ok(requests)
}

/// What came out.
#[derive(Debug, Serialize)]
struct SimReport {
    stages: usize,
    requests: usize,
    finished: usize,
    cancelled: usize,
    refused: usize,
    /// Virtual seconds from the first request to the last answer.
    seconds: f64,
    /// Tokens of answers.
    tokens: usize,
    tokens_per_s: f64,
    requests_per_s: f64,
    first_token_seconds: Option<Percentiles>,
    time_per_token_seconds: Option<Percentiles>,
    /// Mean share of time that the stages are busy, and the busiest one's.
    efficiency: f64,
    busiest: f64,
    /// Busy share of each stage.
    busy: Vec<f64>,
    micro_batches: usize,
    /// Mean number of micro-batches in the pipe.
    in_flight: f64,
    preemptions: u64,
    cached_tokens: u64,
    longest_wait_seconds: f64,
}

impl SimReport {
    fn new(pipe: &Pipe, load: &Load, trace: &pp_engine::trace::Trace) -> SimReport {
        let outcomes = load.outcomes();
        let begin = load.requests().iter().map(|r| r.at).min().unwrap_or(0);
        let end = trace.head.iter().map(|span| span.answered).max().unwrap_or(begin);
        let seconds = end.saturating_sub(begin) as f64 * 1e-9;
        let tokens = outcomes.iter().flat_map(|o| &o.answers).map(Vec::len).sum();
        let ended = |end: &End| outcomes.iter().filter(|o| o.end.as_ref() == Some(end)).count();
        let pairs = || load.requests().iter().zip(outcomes);
        let first = pairs().filter_map(|(r, o)| Some((o.first? - r.at) as f64 * 1e-9));
        let each = pairs().filter_map(|(_, o)| {
            let more = o.answers.iter().map(Vec::len).max()?.checked_sub(1).filter(|n| *n > 0)?;
            Some((o.last? - o.first?) as f64 * 1e-9 / more as f64)
        });
        let busy: Vec<f64> = trace
            .stages
            .iter()
            .map(|s| s.spans.iter().map(|x| x.finished - x.started).sum::<u64>() as f64 * 1e-9 / seconds.max(1e-12))
            .collect();
        let under_way: u64 = trace.head.iter().map(|span| span.answered.saturating_sub(span.sent)).sum();
        let status = load.scheduler().status();
        let refused = outcomes.iter().filter(|o: &&Outcome| matches!(o.end, Some(End::Refused(_)))).count();
        SimReport {
            stages: pipe.stages.len(),
            requests: outcomes.len(),
            finished: ended(&End::Finished),
            cancelled: ended(&End::Cancelled),
            refused,
            seconds,
            tokens,
            tokens_per_s: tokens as f64 / seconds.max(1e-12),
            requests_per_s: ended(&End::Finished) as f64 / seconds.max(1e-12),
            first_token_seconds: Percentiles::of(first),
            time_per_token_seconds: Percentiles::of(each),
            efficiency: busy.iter().sum::<f64>() / busy.len().max(1) as f64,
            busiest: busy.iter().copied().fold(0.0, f64::max),
            busy,
            micro_batches: trace.head.len(),
            in_flight: under_way as f64 * 1e-9 / seconds.max(1e-12),
            preemptions: status.preemptions,
            cached_tokens: status.spared_tokens,
            longest_wait_seconds: load.longest_wait as f64 * 1e-9,
        }
    }
}

impl Report for SimReport {
    fn text(&self) -> String {
        let ms = |p: &Option<Percentiles>| match p {
            Some(p) => [p.p50, p.p90, p.p99, p.max].map(|seconds| format!("{:.1}", seconds * 1e3)).to_vec(),
            None => vec!["-".to_owned(); 4],
        };
        let row = |name: &str, p: &Option<Percentiles>| std::iter::once(name.to_owned()).chain(ms(p)).collect();
        let times = [row("first token", &self.first_token_seconds), row("per token", &self.time_per_token_seconds)];
        let busy = self.busy.iter().map(|share| format!("{:.0} %", 100.0 * share)).collect::<Vec<_>>().join("  ");
        format!(
            "{} requests: {} finished, {} cancelled, {} refused; {} tokens in {:.2} s\n\
             {:.1} tokens/s, {:.2} requests/s; {} micro-batches, {:.1} in the pipe on average\n\
             busy: {busy}   efficiency {:.0} %\n\
             prompt tokens from the prefix cache {}, pre-emptions {}, longest wait {:.2} s\n\n{}",
            self.requests,
            self.finished,
            self.cancelled,
            self.refused,
            self.tokens,
            self.seconds,
            self.tokens_per_s,
            self.requests_per_s,
            self.micro_batches,
            self.in_flight,
            100.0 * self.efficiency,
            self.cached_tokens,
            self.preemptions,
            self.longest_wait_seconds,
            table(1, &["ms", "p50", "p90", "p99", "most"], &times)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milliseconds_are_read() {
        assert_eq!(milliseconds("--stage", "20, 0.5", 3).unwrap(), [0.02, 0.0005]);
        assert!(milliseconds("--stage", "1,2,3,4", 3).is_err() && milliseconds("--stage", "-1", 3).is_err());
    }
}
