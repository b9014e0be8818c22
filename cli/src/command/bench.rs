//! How fast a model runs.
//!
//! A repetition at depth d is one request: a prompt of d + prompt tokens, of which those after position d are timed,
//! then the answer, greedy and not ended by the model. Ids are made up; what they are does not change the work.

mod concurrency;
mod load;
mod roofline;

use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Result;
use pp_engine::head::{Event, FinishReason, Head, HeadOptions, Request};
use pp_engine::sampler::Sampling;
use serde::Serialize;

use crate::args::BenchArgs;
use crate::errors::{cancelled, usage};
use crate::measured::Forecast;
use crate::output::{Out, Report, table};
use crate::plan::{self, Plan, Wanted};
use crate::report::{Spread, StageRow, stage_table};
use crate::{cancel, report};
use roofline::Roofline;

/// Measures and tells.
pub fn run(args: &BenchArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    if args.load.url.is_some() {
        return load::run(args, &out);
    }
    for (name, lengths) in [("--prompt-tokens", args.prompt_tokens), ("--gen-tokens", args.gen_tokens)] {
        if lengths.least != lengths.most {
            return Err(usage(format!("{name} {lengths}: a range goes with --url; here a number is expected")));
        }
    }
    for (name, value) in
        [("--prompt-tokens", args.prompt_tokens.least), ("--gen-tokens", args.gen_tokens.least), ("--reps", args.reps)]
    {
        if value == 0 {
            return Err(usage(format!("{name} 0: expected at least 1")));
        }
    }
    if args.requests.is_some() || !args.concurrency.is_empty() {
        return concurrency::run(args, &out);
    }
    if args.live || args.trace.is_some() {
        return Err(usage("--live and --trace go with --concurrency or --requests"));
    }
    let deepest = args.depths.iter().copied().max().unwrap_or(0);
    let wanted = [args.prompt_tokens.least, args.gen_tokens.least, 1].into_iter().fold(deepest, usize::saturating_add);
    let checkpoint = super::open(&args.model)?;
    let tokenizer = checkpoint.tokenizer()?;
    let plan = plan::make(checkpoint, &args.pipeline, Wanted::one(Some(wanted)), &out)?;
    if wanted > plan.options.context {
        return Err(usage(format!(
            "depth {deepest} + {} + {} tokens do not fit the context of {}",
            args.prompt_tokens.least, args.gen_tokens.least, plan.options.context
        )));
    }
    // Devices are measured before they have anything else to do.
    let forecast = Forecast::wanted(&plan, &args.pipeline, &out)?;
    // Repetitions have one prompt: it must be computed every time.
    let options = HeadOptions { prefix_cache: false, ..super::head_options(&args.pipeline) };
    let (mut head, load_seconds) = super::load(&plan, options, tokenizer.into(), &out)?;
    let started = Instant::now();
    let mut depths = Vec::new();
    for depth in &args.depths {
        out.note(&format!("depth {depth}: 1 warm-up and {} repetitions", args.reps));
        let bench = Bench { plan: &plan, depth: *depth, args };
        let measured = bench.measure(&mut head)?;
        depths.push(measured.beside(forecast.as_ref(), args));
    }
    let seconds = started.elapsed().as_secs_f64();
    let report = BenchReport::new(&plan, args, depths, load_seconds, seconds, report::stages(head.pipeline()));
    drop(head);
    let roofline = if args.no_roofline { None } else { measure_roofline(&plan, args.prompt_tokens.least, &out)? };
    out.result(&BenchReport { roofline, ..report })?;
    Ok(ExitCode::SUCCESS)
}

/// The roofline; what was measured before is not lost when it fails.
fn measure_roofline(plan: &Plan, prompt: usize, out: &Out) -> Result<Option<Roofline>> {
    match roofline::measure(plan, prompt, out) {
        Err(_) if cancel::flag().load(Ordering::Relaxed) => Err(cancelled()),
        Err(error) => {
            out.note(&format!("roofline: given up: {error:#}"));
            Ok(None)
        }
        measured => measured,
    }
}

/// The id at a place of a made-up prompt: multiples of a prime, so that none repeats soon.
fn made_up_id(place: usize, vocab: usize) -> u32 {
    ((place as u64 * 7919 + 13) % vocab as u64) as u32
}

struct Bench<'a> {
    plan: &'a Plan,
    depth: usize,
    args: &'a BenchArgs,
}

/// One repetition.
struct Run {
    prefill_rate: f64,
    decode_rate: f64,
    first_token_seconds: f64,
}

impl Bench<'_> {
    fn measure(&self, head: &mut Head) -> Result<Depth> {
        self.once(head)?;
        let runs = (0..self.args.reps).map(|_| self.once(head)).collect::<Result<Vec<Run>>>()?;
        let spread = |value: fn(&Run) -> f64| Spread::of(runs.iter().map(value)).expect("there are repetitions");
        Ok(Depth {
            depth: self.depth,
            prefill_from: self.timed_from(),
            prefill_tokens_per_s: spread(|run| run.prefill_rate),
            decode_tokens_per_s: spread(|run| run.decode_rate),
            first_token_seconds: spread(|run| run.first_token_seconds),
            time_per_token_seconds: spread(|run| 1.0 / run.decode_rate),
            predicted: None,
        })
    }

    /// Where the timed part of the prompt begins: the last boundary of chunks up to the depth.
    fn timed_from(&self) -> usize {
        self.depth / self.plan.options.chunk * self.plan.options.chunk
    }

    fn once(&self, head: &mut Head) -> Result<Run> {
        let vocab = self.plan.checkpoint.config.vocab;
        let (total, from) = (self.depth + self.args.prompt_tokens.least, self.timed_from());
        let request = Request {
            prompt: (0..total).map(|place| made_up_id(place, vocab)).collect(),
            // The first token belongs to the prompt's time.
            max_tokens: self.args.gen_tokens.least + 1,
            sampling: Sampling::default(),
            stop: Vec::new(),
            stop_at_eos: false,
            choices: 1,
            deadline: None,
            ..Request::default()
        };
        let (mut begin, mut end) = (Instant::now(), Instant::now());
        let answer = head.generate(request, cancel::flag(), &mut |event| match event {
            Event::Prefill { done, .. } if done <= from => begin = Instant::now(),
            Event::Prefill { done, total, .. } if done == total => end = Instant::now(),
            _ => {}
        })?;
        if answer.finish_reason == FinishReason::Cancelled {
            return Err(cancelled());
        }
        Ok(Run {
            prefill_rate: (total - from) as f64 / (end - begin).as_secs_f64(),
            decode_rate: self.args.gen_tokens.least as f64 / answer.timings.decode_seconds,
            first_token_seconds: answer.timings.first_token_seconds,
        })
    }
}

/// Measurements at one depth.
#[derive(Clone, Debug, Serialize)]
struct Depth {
    depth: usize,
    /// Position that the timed part of the prompt begins at: the depth, rounded down to a chunk.
    prefill_from: usize,
    prefill_tokens_per_s: Spread,
    decode_tokens_per_s: Spread,
    first_token_seconds: Spread,
    time_per_token_seconds: Spread,
    /// What was predicted before; null where nothing was measured for it.
    predicted: Option<Predicted>,
}

/// A prediction, and by how much it is more (or less) than what was measured.
#[derive(Clone, Copy, Debug, Serialize)]
struct Predicted {
    decode_tokens_per_s: f64,
    decode_error_percent: f64,
    first_token_seconds: f64,
    first_token_error_percent: f64,
}

/// By how many percent a prediction is off.
fn error_percent(predicted: f64, measured: f64) -> f64 {
    100.0 * (predicted / measured - 1.0)
}

impl Depth {
    /// With what a forecast says of it.
    fn beside(self, forecast: Option<&Forecast>, args: &BenchArgs) -> Depth {
        let predicted = forecast.map(|forecast| {
            let found = forecast.predict(1, self.depth + args.prompt_tokens.least, args.gen_tokens.least);
            Predicted {
                decode_tokens_per_s: found.tokens_per_second,
                decode_error_percent: error_percent(found.tokens_per_second, self.decode_tokens_per_s.median),
                first_token_seconds: found.first_token_seconds,
                first_token_error_percent: error_percent(found.first_token_seconds, self.first_token_seconds.median),
            }
        });
        Depth { predicted, ..self }
    }
}

#[derive(Debug, Serialize)]
struct BenchReport {
    model: String,
    prompt_tokens: usize,
    gen_tokens: usize,
    reps: usize,
    activations: &'static str,
    kv: &'static str,
    wire: &'static str,
    split: Vec<usize>,
    chunk: usize,
    context: usize,
    load_seconds: f64,
    /// Of the first depth.
    prefill_tokens_per_s: Spread,
    decode_tokens_per_s: Spread,
    first_token_seconds: Spread,
    time_per_token_seconds: Spread,
    depths: Vec<Depth>,
    /// Seconds of all repetitions, which the stages' busy time is a share of.
    seconds: f64,
    stages: Vec<StageRow>,
    /// What the devices could do at most; null on request, and without a GPU.
    roofline: Option<Roofline>,
}

impl BenchReport {
    fn new(
        plan: &Plan,
        args: &BenchArgs,
        depths: Vec<Depth>,
        load_seconds: f64,
        seconds: f64,
        stages: Vec<StageRow>,
    ) -> BenchReport {
        let (activations, kv, wire) = super::precision(plan);
        let first = depths.first().expect("at least one depth is measured").clone();
        BenchReport {
            model: plan.checkpoint.path.display().to_string(),
            prompt_tokens: args.prompt_tokens.least,
            gen_tokens: args.gen_tokens.least,
            reps: args.reps,
            activations,
            kv,
            wire,
            split: plan.counts.clone(),
            chunk: plan.options.chunk,
            context: plan.options.context,
            load_seconds,
            prefill_tokens_per_s: first.prefill_tokens_per_s,
            decode_tokens_per_s: first.decode_tokens_per_s,
            first_token_seconds: first.first_token_seconds,
            time_per_token_seconds: first.time_per_token_seconds,
            depths,
            seconds,
            stages,
            roofline: None,
        }
    }
}

const HEADER: [&str; 7] = [
    "depth",
    "prefill tokens/s",
    "decode tokens/s",
    "first token ms",
    "per token ms",
    "decode predicted",
    "first token predicted",
];

impl Report for BenchReport {
    fn text(&self) -> String {
        let spread =
            |s: &Spread, scale: f64| format!("{:.1} ({:.1}-{:.1})", s.median * scale, s.min * scale, s.max * scale);
        let rows: Vec<Vec<String>> = self
            .depths
            .iter()
            .map(|depth| {
                vec![
                    depth.depth.to_string(),
                    spread(&depth.prefill_tokens_per_s, 1.0),
                    spread(&depth.decode_tokens_per_s, 1.0),
                    spread(&depth.first_token_seconds, 1e3),
                    spread(&depth.time_per_token_seconds, 1e3),
                    depth.predicted.map_or("-".to_owned(), |p| {
                        format!("{:.1} ({:+.0} %)", p.decode_tokens_per_s, p.decode_error_percent)
                    }),
                    depth.predicted.map_or("-".to_owned(), |p| {
                        format!("{:.1} ({:+.0} %)", p.first_token_seconds * 1e3, p.first_token_error_percent)
                    }),
                ]
            })
            .collect();
        let roofline = self.roofline.as_ref().map_or(String::new(), |roofline| format!("\n\n{}", roofline.text()));
        format!(
            "{}\nprompt {} tokens, answer {} tokens, {} repetitions: median (min-max)   activations {}   KV {}\n\n{}\n\n{}{roofline}",
            self.model,
            self.prompt_tokens,
            self.gen_tokens,
            self.reps,
            self.activations,
            self.kv,
            table(0, &HEADER, &rows),
            stage_table(&self.stages, self.seconds)
        )
    }
}
