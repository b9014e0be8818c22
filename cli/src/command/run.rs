//! One answer to one prompt.

use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use pp_engine::chat_template::Message;
use pp_engine::constraint::Grammar;
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadError, Request};
use pp_engine::schedule::Refused;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::args::{FormArgs, PromptArgs, RunArgs};
use crate::errors::{Exit, usage};
use crate::output::Out;
use crate::output::live::Live;
use crate::output::progress::Steps;
use crate::plan::{self, Wanted};
use crate::prompts::{Form, Prompts};
use crate::recovery::{Recovered, Recovery, Straggler};
use crate::report::{StageRow, TokenRow, stage_table};
use crate::settings::{self, PromptSource};
use crate::{cancel, report};

/// How long the head waits for the pipe before `--live` may draw again.
const PATIENCE: Duration = Duration::from_millis(100);

/// Reads the prompt, answers it, and says how it went.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, args.quiet);
    let candidates = settings::logprobs(args.logprobs, args.output.json)?;
    let template_args = settings::template_args(&args.prompt.template_arg)?;
    let grammar = grammar(&args.form)?;
    let prompt = prompt(&args.prompt)?;
    let checkpoint = super::open(&args.model)?;
    let sampling = settings::sampling(&args.sampling, &checkpoint.generation, seed(), candidates)?;
    let plan = plan::make(checkpoint.clone(), &args.pipeline, Wanted::one(None), &out)?;
    let prompts = Prompts::new(&checkpoint, chat_template(args.prompt.chat_template.as_deref())?)?;
    let ids = encode(&prompts, &prompt, &args.prompt, &template_args)?;
    let constraint = prompts.constraint(&Form::of_grammar(grammar, "response_format"), None);
    let constraint = constraint.map_err(|invalid| usage(invalid.message))?;
    let context = plan.options.context;
    if ids.len() > context {
        return Err(HeadError::from(Refused::PromptTooLong { tokens: ids.len(), context }).into());
    }
    let (mut recovery, mut head, load_seconds) =
        Recovery::load(plan, &args.pipeline, super::head_options(&args.pipeline), prompts.tokenizer().clone(), &out)?;
    let request = Request {
        prompt: ids,
        choices: 1,
        max_tokens: args.sampling.max_tokens,
        sampling,
        stop: args.sampling.stop.clone(),
        stop_at_eos: true,
        deadline: None,
        constraint,
        ..Request::default()
    };
    let started = Instant::now();
    let mut live = Live::new(args.live, &out);
    let mut prefill = Steps::new(&out.quiet_if(live.is_on()), "prompt", "tokens");
    let mut broken: Option<io::Error> = None;
    prefill.update(0, request.prompt.len());
    let answer = answer(&mut head, request.clone(), &mut recovery, &mut live, &mut |event| match event {
        Event::Prefill { done, total, .. } => {
            prefill.update(done, total);
            if done == total {
                prefill.finish();
            }
        }
        Event::Text { text, .. } => {
            if let Err(error) = out.stream(&text) {
                // Nobody reads: the rest need not be computed.
                broken = Some(error);
                cancel::flag().store(true, Ordering::Relaxed);
            }
        }
        Event::Token { .. } | Event::Done { .. } => {}
    });
    prefill.finish();
    let mut answer = answer?;
    answer.timings.total_seconds = started.elapsed().as_secs_f64();
    if let Some(error) = broken {
        return Err(error.into());
    }
    out.end_stream(&answer.text)?;
    drop(live);
    let stages = report::stages(head.pipeline());
    if let Some(path) = &args.trace {
        super::write_trace(&head.trace(), path)?;
    }
    let result = RunReport::new(&recovery, request, answer, stages, load_seconds, args.logprobs.is_some());
    if out.json() {
        out.object(&result)?;
    }
    out.note(&result.closing());
    let cancelled = result.finish_reason == FinishReason::Cancelled.name();
    Ok(if cancelled { ExitCode::from(Exit::Cancelled as u8) } else { ExitCode::SUCCESS })
}

/// The answer to a request, alone in the pipe; when the user wants it to end, what there is so far.
///
/// # Errors
/// When it is refused, or the pipeline fails and no other takes its place.
pub fn answer(
    head: &mut Head,
    request: Request,
    recovery: &mut Recovery,
    live: &mut Live,
    say: &mut dyn FnMut(Event),
) -> Result<Answer> {
    let id = head.submit(request)?;
    let mut answer = None;
    loop {
        if let Some(answer) = answer {
            return Ok(answer);
        }
        live.tick(head);
        let mut hear = |event| match event {
            Event::Done { answer: done, .. } => answer = Some(done),
            event => say(event),
        };
        if cancel::flag().load(Ordering::Relaxed) {
            head.cancel(id, &mut hear);
            continue;
        }
        match head.turn(PATIENCE, cancel::flag(), &mut hear) {
            Err(error) if error.is_cancelled() => {}
            Err(error) => recovery.recover(head, error, &mut hear)?,
            Ok(_) => recovery.tick(head),
        }
    }
}

/// What the options say of how an answer must look.
fn grammar(args: &FormArgs) -> Result<Option<Grammar>> {
    Ok(match (&args.json_schema, &args.grammar, &args.regex) {
        (Some(schema), _, _) => {
            let text =
                if schema.trim_start().starts_with('{') { schema.clone() } else { read_text(Path::new(schema))? };
            let parsed = serde_json::from_str(&text);
            let schema = parsed.map_err(|error| usage(format!("--json-schema is no JSON: {error}")))?;
            Some(Grammar::JsonSchema(schema))
        }
        (_, Some(path), _) => Some(Grammar::Lark(read_text(path)?)),
        (_, _, Some(pattern)) => Some(Grammar::Regex(pattern.clone())),
        _ => args.json_object.then_some(Grammar::JsonObject),
    })
}

/// A seed from the clock.
pub fn seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

fn prompt(args: &PromptArgs) -> Result<String> {
    let (text, origin) = match settings::prompt_source(args, io::stdin().is_terminal())? {
        PromptSource::Typed(text) => (text, "as typed".to_owned()),
        PromptSource::File(path) => (read_text(&path)?, path.display().to_string()),
        PromptSource::Stdin => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes).context("cannot read stdin")?;
            (settings::text(bytes, "stdin")?, "from stdin".to_owned())
        }
    };
    settings::not_empty(&text, &origin)?;
    Ok(text)
}

/// A text file, verbatim.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|error| usage(format!("cannot read {}: {error}", path.display())))?;
    settings::text(bytes, &path.display().to_string())
}

fn encode(prompts: &Prompts, prompt: &str, args: &PromptArgs, extra: &Map<String, Value>) -> Result<Vec<u32>> {
    if args.raw {
        return prompts.raw(prompt);
    }
    let system = args.system.iter().map(|text| Message::new("system", text.clone()));
    prompts.chat(&system.chain([Message::new("user", prompt)]).collect::<Vec<_>>(), extra)
}

/// The template that `--chat-template` names, and its name.
///
/// # Errors
/// When it cannot be read.
pub fn chat_template(path: Option<&Path>) -> Result<Option<(String, String)>> {
    path.map(|path| Ok((read_text(path)?, path.display().to_string()))).transpose()
}

/// All that is known of an answer.
#[derive(Debug, Serialize)]
struct RunReport {
    model: String,
    prompt_ids: Vec<u32>,
    tokens: Vec<u32>,
    text: String,
    finish_reason: &'static str,
    timings: Timings,
    context: usize,
    activations: &'static str,
    kv: &'static str,
    wire: &'static str,
    split: Vec<usize>,
    seed: u64,
    stages: Vec<StageRow>,
    /// Stages that were lost, and what took their places.
    recoveries: Vec<Recovered>,
    /// Stages that took much longer than they used to.
    stragglers: Vec<Straggler>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<TokenRow>>,
}

/// Rates are null where too few tokens were made to have one.
#[derive(Debug, Serialize)]
struct Timings {
    load_seconds: f64,
    first_token_seconds: Option<f64>,
    prefill_tokens_per_s: Option<f64>,
    decode_tokens_per_s: Option<f64>,
    total_seconds: f64,
}

impl RunReport {
    fn new(
        recovery: &Recovery,
        request: Request,
        answer: Answer,
        stages: Vec<StageRow>,
        load_seconds: f64,
        logprobs: bool,
    ) -> RunReport {
        let plan = recovery.plan();
        let (activations, kv, wire) = super::precision(plan);
        let times = answer.timings;
        let first = (!answer.tokens.is_empty()).then_some(times.first_token_seconds);
        let rate = |tokens: usize, seconds: f64| (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds);
        RunReport {
            model: plan.checkpoint.path.display().to_string(),
            tokens: answer.tokens.iter().map(|token| token.id).collect(),
            finish_reason: answer.finish_reason.name(),
            timings: Timings {
                load_seconds,
                first_token_seconds: first,
                prefill_tokens_per_s: first.and_then(|seconds| rate(request.prompt.len(), seconds)),
                decode_tokens_per_s: rate(answer.tokens.len().saturating_sub(1), times.decode_seconds),
                total_seconds: times.total_seconds,
            },
            context: plan.options.context,
            activations,
            kv,
            wire,
            split: plan.counts.clone(),
            seed: request.sampling.seed,
            stages,
            recoveries: recovery.happened().to_vec(),
            stragglers: recovery.stragglers().to_vec(),
            logprobs: logprobs.then(|| answer.tokens.iter().map(TokenRow::of).collect()),
            prompt_ids: request.prompt,
            text: answer.text,
        }
    }

    /// The closing table.
    fn closing(&self) -> String {
        let times = &self.timings;
        let rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.1} tokens/s"));
        let first = times.first_token_seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.2} s"));
        let mut text = format!(
            "\n{}\n{} + {} tokens ({})   prefill {}   decode {}   first token {first}   load {:.2} s",
            stage_table(&self.stages, times.total_seconds),
            self.prompt_ids.len(),
            self.tokens.len(),
            self.finish_reason,
            rate(times.prefill_tokens_per_s),
            rate(times.decode_tokens_per_s),
            times.load_seconds,
        );
        if self.stages.len() > 1 {
            text.push_str(&format!("\nsingle-stream mode: one request fills 1/{} of the pipe", self.stages.len()));
        }
        text
    }
}
