//! Several requests at once: made up, a row a level, or replayed from a file.

use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadError, HeadOptions, Request, Turn};
use pp_engine::layout::SEQUENCES_MAX;
use pp_engine::sampler::Sampling;
use pp_engine::schedule::{Refused, RequestId};
use serde::Serialize;

use super::{error_percent, made_up_id};
use crate::args::BenchArgs;
use crate::errors::{cancelled, usage};
use crate::measured::Forecast;
use crate::output::live::Live;
use crate::output::{Out, Report, table};
use crate::plan::{self, Plan, Wanted};
use crate::prompts::Prompts;
use crate::report::{Percentiles, Spread, StageRow, stage_table};
use crate::requests::{self, Defaults, RequestLine};
use crate::settings::SEQUENCES;
use crate::{cancel, report};

/// How long the head waits for the pipe before it looks whether a request is due.
const PATIENCE: Duration = Duration::from_millis(5);

/// Measures and tells.
pub fn run(args: &BenchArgs, out: &Out) -> Result<ExitCode> {
    if let Some(level) = args.concurrency.iter().find(|level| !(1..=SEQUENCES_MAX).contains(*level)) {
        return Err(usage(format!("--concurrency {level}: expected 1 to {SEQUENCES_MAX} requests at once")));
    }
    let checkpoint = crate::command::open(&args.model)?;
    let vocab = checkpoint.config.vocab;
    let prompts = Prompts::new(&checkpoint, None)?;
    let replay = args.requests.as_deref().map(|path| replay(path, &prompts, vocab)).transpose()?;
    let (context, sequences) = match &replay {
        Some(requests) => {
            let longest = requests.iter().map(|(_, r)| r.prompt.len().saturating_add(r.max_tokens)).max();
            let answers = requests.iter().map(|(_, r)| r.choices as usize).sum::<usize>();
            (longest.unwrap_or(1), answers.clamp(1, SEQUENCES))
        }
        None => (
            args.prompt_tokens.least.saturating_add(args.gen_tokens.least).saturating_add(1),
            args.concurrency.iter().copied().max().unwrap_or(1),
        ),
    };
    let plan = plan::make(checkpoint, &args.pipeline, Wanted::several(Some(context), sequences), out)?;
    if context > plan.options.context {
        return Err(usage(format!("{context} tokens do not fit the context of {}", plan.options.context)));
    }
    // Devices are measured before they have anything else to do.
    let forecast = if replay.is_some() { None } else { Forecast::wanted(&plan, &args.pipeline, out)? };
    // Made-up prompts are alike from run to run: they must be computed every time.
    let prefix_cache = replay.is_some() && !args.pipeline.no_prefix_cache;
    let options = HeadOptions { prefix_cache, ..crate::command::head_options(&args.pipeline) };
    let (mut head, load_seconds) = crate::command::load(&plan, options, prompts.tokenizer().clone(), out)?;
    let mut levels = Vec::new();
    let started = Instant::now();
    let mut live = Live::new(args.live, out);
    match replay {
        Some(requests) => {
            out.note(&format!("{} requests", requests.len()));
            levels.push(Level::of(requests.len(), &[once(&mut head, requests, &mut live)?], &head));
        }
        None => {
            for level in &args.concurrency {
                out.note(&format!("{level} at once: 1 warm-up and {} repetitions", args.reps));
                let requests = || (0..*level).map(|i| (0.0, made_up(args, i, vocab))).collect();
                once(&mut head, requests(), &mut live)?;
                let runs =
                    (0..args.reps).map(|_| once(&mut head, requests(), &mut live)).collect::<Result<Vec<_>>>()?;
                let measured = Level::of(*level, &runs, &head);
                levels.push(measured.beside(forecast.as_ref(), args));
            }
        }
    }
    drop(live);
    let seconds = started.elapsed().as_secs_f64();
    if let Some(path) = &args.trace {
        crate::command::write_trace(&head.trace(), path)?;
    }
    out.result(&ConcurrencyReport::new(&plan, args, levels, load_seconds, seconds, report::stages(head.pipeline())))?;
    Ok(ExitCode::SUCCESS)
}

fn made_up(args: &BenchArgs, index: usize, vocab: usize) -> Request {
    Request {
        prompt: (0..args.prompt_tokens.least).map(|place| made_up_id(place + 1009 * index, vocab)).collect(),
        choices: 1,
        // The first token belongs to the prompt's time.
        max_tokens: args.gen_tokens.least + 1,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_at_eos: false,
        deadline: None,
        ..Request::default()
    }
}

/// Requests of a file, with the seconds at which they come.
fn replay(path: &Path, prompts: &Prompts, vocab: usize) -> Result<Vec<(f64, Request)>> {
    let defaults = Defaults { sampling: Sampling::default(), max_tokens: 64, stop: Vec::new() };
    let mut requests = Vec::new();
    for line in requests::open(path)? {
        let (number, text) = line?;
        let bad = |message: String| usage(format!("{}, line {number}: {message}", path.display()));
        let line = text.and_then(|text| RequestLine::parse(&text)).map_err(bad)?;
        // What is out of range is told before what is missing.
        let request = line.request(Vec::new(), &defaults, vocab).map_err(bad)?;
        let tools = line.tools().map_err(bad)?;
        let form = line.form(prompts, tools.as_ref()).map_err(bad)?;
        let constraint = prompts.constraint(&form, tools.as_ref()).map_err(|invalid| bad(invalid.to_string()))?;
        let prompt = match (line.prompt_tokens, line.prompt.is_some() || line.messages.is_some()) {
            (Some(tokens), false) if (1..=1 << 20).contains(&tokens) => {
                (0..tokens).map(|place| made_up_id(place + 1009 * number, vocab)).collect()
            }
            (None, true) => line.ids(prompts, tools.as_ref()).map_err(bad)?,
            _ => return Err(bad("one of prompt_tokens, prompt and messages is expected".to_owned())),
        };
        let stop_at_eos = line.prompt_tokens.is_none();
        let request = Request { prompt, stop_at_eos, constraint, shown_specials: form.shown_specials, ..request };
        requests.push((line.arrival_ms.unwrap_or(0.0) * 1e-3, request));
    }
    if requests.is_empty() {
        return Err(usage(format!("{} holds no requests", path.display())));
    }
    requests.sort_by(|a, b| a.0.total_cmp(&b.0));
    Ok(requests)
}

/// One repetition.
struct Run {
    /// Tokens a second of all requests: of requests that are alike from the last first token to the first end, else from
    /// start to end.
    rate: f64,
    /// Share of that time that the stages were busy.
    busy: f64,
    first: Vec<f64>,
    each: Vec<f64>,
    refused: usize,
}

/// Makes requests go through, each from its second on.
fn once(head: &mut Head, requests: Vec<(f64, Request)>, live: &mut Live) -> Result<Run> {
    let alike = requests.windows(2).all(|pair| {
        let key = |(at, request): &(f64, Request)| (*at, request.prompt.len(), request.max_tokens, request.stop_at_eos);
        key(&pair[0]) == key(&pair[1])
    });
    let mut to_come: std::collections::VecDeque<_> = requests.into();
    let begin = head.pipeline().recorder().now();
    let started = Instant::now();
    let mut answers: Vec<Answer> = Vec::new();
    let mut firsts: HashMap<RequestId, u64> = HashMap::new();
    let mut first_end = None;
    let mut refused = 0;
    loop {
        while to_come.front().is_some_and(|(at, _)| started.elapsed().as_secs_f64() >= *at) {
            let (_, request) = to_come.pop_front().expect("there is one");
            match head.submit(request) {
                Ok(_) => {}
                Err(HeadError::Refused(Refused::Busy { .. })) => refused += 1,
                Err(error) => return Err(error.into()),
            }
        }
        live.tick(head);
        let recorder = head.pipeline().recorder().clone();
        let turn = head.turn(PATIENCE, cancel::flag(), &mut |event| match event {
            Event::Prefill { request, done, total } if done == total => {
                firsts.entry(request).or_insert_with(|| recorder.now());
            }
            Event::Done { answer, .. } => {
                first_end.get_or_insert_with(|| recorder.now());
                answers.push(answer);
            }
            _ => {}
        });
        match turn {
            Err(error) if error.is_cancelled() => return Err(cancelled()),
            other => match other? {
                Turn::Idle if to_come.is_empty() => break,
                Turn::Idle => std::thread::sleep(PATIENCE),
                Turn::Progress | Turn::Quiet => {}
            },
        }
    }
    if answers.iter().any(|answer| answer.finish_reason == FinishReason::Cancelled) {
        return Err(cancelled());
    }
    let end = head.pipeline().recorder().now();
    // Alike and all at once: the time in which all decode. Else: all of it.
    let all_began = firsts.values().copied().max().unwrap_or(begin);
    let (from, to) = match first_end {
        Some(first_end) if alike && first_end > all_began => (all_began, first_end),
        _ => (begin, end),
    };
    let trace = head.trace();
    let within = trace.head.iter().filter(|span| span.sampled > from && span.sampled <= to);
    let tokens: u64 = within.map(|span| u64::from(span.decode_tokens)).sum();
    let seconds = (to - from) as f64 * 1e-9;
    let busy: u64 = trace
        .stages
        .iter()
        .flat_map(|stage| &stage.spans)
        .map(|span| span.finished.min(to).saturating_sub(span.started.max(from)))
        .sum();
    Ok(Run {
        rate: tokens as f64 / seconds,
        busy: busy as f64 * 1e-9 / (seconds * trace.stages.len() as f64),
        first: answers.iter().map(|answer| answer.timings.first_token_seconds).collect(),
        each: answers
            .iter()
            .filter(|answer| answer.tokens.len() > 1)
            .map(|answer| answer.timings.decode_seconds / (answer.tokens.len() - 1) as f64)
            .collect(),
        refused,
    })
}

/// Measurements with so many requests at once.
#[derive(Clone, Debug, Serialize)]
struct Level {
    concurrency: usize,
    /// Of all requests together.
    decode_tokens_per_s: Spread,
    per_request_tokens_per_s: f64,
    first_token_seconds: Percentiles,
    time_per_token_seconds: Percentiles,
    /// Decode groups.
    groups: usize,
    /// Share of time that the stages were busy while all decoded, and what the law says for these stages and groups.
    efficiency: f64,
    efficiency_by_law: Option<f64>,
    /// What the costs of the stages predict, as the scheduler fitted them in this run.
    predicted_tokens_per_s: Option<f64>,
    /// What was predicted before anything was loaded, and by how many percent it is more than what was measured.
    planned_tokens_per_s: Option<f64>,
    planned_error_percent: Option<f64>,
    planned_first_token_seconds: Option<f64>,
    planned_first_token_error_percent: Option<f64>,
    refused: usize,
}

impl Level {
    fn of(concurrency: usize, runs: &[Run], head: &Head) -> Level {
        let rate = Spread::of(runs.iter().map(|run| run.rate)).expect("there are runs");
        let all = |values: fn(&Run) -> &Vec<f64>| Percentiles::of(runs.iter().flat_map(values).copied());
        let zero = Percentiles { p50: 0.0, p90: 0.0, p99: 0.0, max: 0.0 };
        let at_once = concurrency.min(head.scheduler().limits().sequences);
        let groups = head.scheduler().groups_for(at_once);
        let law = head.scheduler().costs().map(|costs| {
            let stages = costs.at_context();
            let ring = costs.ring(&stages);
            let b = at_once as f64 / groups as f64;
            (at_once as f64 / costs.round(at_once, groups), ring.efficiency(groups as f64, b))
        });
        Level {
            concurrency,
            decode_tokens_per_s: rate,
            per_request_tokens_per_s: rate.median / at_once as f64,
            first_token_seconds: all(|run| &run.first).unwrap_or(zero),
            time_per_token_seconds: all(|run| &run.each).unwrap_or(zero),
            groups,
            efficiency: runs.iter().map(|run| run.busy).sum::<f64>() / runs.len() as f64,
            efficiency_by_law: law.map(|(_, efficiency)| efficiency),
            predicted_tokens_per_s: law.map(|(rate, _)| rate),
            planned_tokens_per_s: None,
            planned_error_percent: None,
            planned_first_token_seconds: None,
            planned_first_token_error_percent: None,
            refused: runs.iter().map(|run| run.refused).sum(),
        }
    }

    /// With what a forecast says of it.
    fn beside(self, forecast: Option<&Forecast>, args: &BenchArgs) -> Level {
        let Some(forecast) = forecast else { return self };
        let found = forecast.predict(self.concurrency, args.prompt_tokens.least, args.gen_tokens.least);
        let (rate, first) = (found.tokens_per_second, found.first_token_seconds);
        Level {
            planned_tokens_per_s: Some(rate),
            planned_error_percent: Some(error_percent(rate, self.decode_tokens_per_s.median)),
            planned_first_token_seconds: Some(first),
            planned_first_token_error_percent: Some(error_percent(first, self.first_token_seconds.p50)),
            ..self
        }
    }
}

#[derive(Debug, Serialize)]
struct ConcurrencyReport {
    model: String,
    prompt_tokens: usize,
    gen_tokens: usize,
    reps: usize,
    activations: &'static str,
    kv: &'static str,
    wire: &'static str,
    split: Vec<usize>,
    max_batch_tokens: usize,
    kv_tokens: usize,
    context: usize,
    load_seconds: f64,
    concurrency: Vec<Level>,
    seconds: f64,
    stages: Vec<StageRow>,
}

impl ConcurrencyReport {
    fn new(
        plan: &Plan,
        args: &BenchArgs,
        concurrency: Vec<Level>,
        load_seconds: f64,
        seconds: f64,
        stages: Vec<StageRow>,
    ) -> ConcurrencyReport {
        let (activations, kv, wire) = crate::command::precision(plan);
        ConcurrencyReport {
            model: plan.checkpoint.path.display().to_string(),
            prompt_tokens: args.prompt_tokens.least,
            gen_tokens: args.gen_tokens.least,
            reps: args.reps,
            activations,
            kv,
            wire,
            split: plan.counts.clone(),
            max_batch_tokens: plan.options.chunk,
            kv_tokens: plan.options.kv_tokens,
            context: plan.options.context,
            load_seconds,
            concurrency,
            seconds,
            stages,
        }
    }
}

/// `81.2 (+3 %)`
fn planned(value: Option<f64>, error: Option<f64>, scale: f64) -> String {
    let both = value.zip(error);
    both.map_or("-".to_owned(), |(value, error)| format!("{:.1} ({error:+.0} %)", value * scale))
}

impl Report for ConcurrencyReport {
    fn text(&self) -> String {
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
        let rows: Vec<Vec<String>> = self
            .concurrency
            .iter()
            .map(|level| {
                let rate = &level.decode_tokens_per_s;
                vec![
                    level.concurrency.to_string(),
                    format!("{:.1} ({:.1}-{:.1})", rate.median, rate.min, rate.max),
                    planned(level.planned_tokens_per_s, level.planned_error_percent, 1.0),
                    level.predicted_tokens_per_s.map_or("-".to_owned(), |rate| format!("{rate:.1}")),
                    format!("{:.1}", level.per_request_tokens_per_s),
                    ms(level.first_token_seconds.p50),
                    planned(level.planned_first_token_seconds, level.planned_first_token_error_percent, 1e3),
                    ms(level.time_per_token_seconds.p50),
                    level.groups.to_string(),
                    percent(level.efficiency),
                    level.efficiency_by_law.map_or("-".to_owned(), percent),
                ]
            })
            .collect();
        let header = [
            "at once",
            "decode tokens/s",
            "predicted",
            "fitted",
            "per request",
            "first token ms",
            "predicted",
            "per token ms",
            "groups M",
            "busy",
            "by the law",
        ];
        format!(
            "{}\nprompt {} tokens, answer {} tokens, {} repetitions: median (min-max)   activations {}   KV {}\n\n{}\n\n{}",
            self.model,
            self.prompt_tokens,
            self.gen_tokens,
            self.reps,
            self.activations,
            self.kv,
            table(0, &header, &rows),
            stage_table(&self.stages, self.seconds)
        )
    }
}
