//! One answer to one prompt.

use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use pp_engine::chat_template::{ChatTemplate, Message, RenderOptions};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Answer, FinishReason, HeadError, Progress, Request, Token};
use pp_engine::tokenizer::{Encode, Tokenizer};
use serde::Serialize;

use crate::args::{PromptArgs, RunArgs};
use crate::errors::{Exit, model, usage};
use crate::output::Out;
use crate::output::progress::Steps;
use crate::plan::{self, Plan};
use crate::report::{StageRow, stage_table};
use crate::settings::{self, PromptSource};
use crate::{cancel, report};

/// Reads the prompt, answers it, and says how it went.
pub fn run(args: &RunArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, args.quiet);
    let candidates = settings::logprobs(args.logprobs, args.output.json)?;
    let template_args = settings::template_args(&args.prompt.template_arg)?;
    let prompt = prompt(&args.prompt)?;
    let checkpoint = super::open(&args.model)?;
    let sampling = settings::sampling(&args.sampling, &checkpoint.generation, seed(), candidates)?;
    let plan = plan::make(checkpoint.clone(), &args.pipeline, None)?;
    let tokenizer = checkpoint.tokenizer()?;
    let ids = encode(&checkpoint, &tokenizer, &prompt, &args.prompt, template_args)?;
    let context = plan.options.context;
    if ids.len() > context {
        return Err(HeadError::PromptTooLong { tokens: ids.len(), context }.into());
    }
    let (mut head, load_seconds) = super::load(&plan, &out)?;
    let request = Request {
        prompt: ids,
        max_tokens: args.sampling.max_tokens,
        sampling,
        stop: args.sampling.stop.clone(),
        stop_at_eos: true,
        chunk: plan.options.chunk,
    };
    let started = Instant::now();
    let mut prefill = Steps::new(&out, "prompt");
    let mut broken: Option<io::Error> = None;
    let answer = head.generate(&request, &tokenizer, cancel::flag(), &mut |progress| match progress {
        Progress::Prefill { done, total } => {
            prefill.update(done, total);
            if done == total {
                prefill.finish();
            }
        }
        Progress::Text(piece) => {
            if let Err(error) = out.stream(piece) {
                // Nobody reads: the rest need not be computed.
                broken = Some(error);
                cancel::flag().store(true, Ordering::Relaxed);
            }
        }
    });
    prefill.finish();
    let mut answer = answer?;
    answer.timings.total_seconds = started.elapsed().as_secs_f64();
    if let Some(error) = broken {
        return Err(error.into());
    }
    out.end_stream(&answer.text)?;
    let stages = report::stages(head.pipeline());
    let result = RunReport::new(&plan, request, answer, stages, load_seconds, args.logprobs.is_some());
    if out.json() {
        out.object(&result)?;
    }
    out.note(&result.closing());
    let cancelled = result.finish_reason == FinishReason::Cancelled.name();
    Ok(if cancelled { ExitCode::from(Exit::Cancelled as u8) } else { ExitCode::SUCCESS })
}

fn seed() -> u64 {
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

fn encode(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    prompt: &str,
    args: &PromptArgs,
    extra: serde_json::Map<String, serde_json::Value>,
) -> Result<Vec<u32>> {
    if args.raw {
        return Ok(tokenizer.encode(prompt, Encode { add_bos: true, parse_special: false })?);
    }
    let (source, origin) = match &args.chat_template {
        Some(path) => (read_text(path)?, path.display().to_string()),
        None => {
            let origin = checkpoint.path.display().to_string();
            let source = checkpoint.chat_template()?.ok_or_else(|| {
                model(format!(
                    "{origin} has no chat template: use --raw to continue plain text, or --chat-template FILE"
                ))
            })?;
            (source, origin)
        }
    };
    let template = ChatTemplate::new(&source, &origin)?;
    let system = args.system.iter().map(|text| Message::new("system", text.clone()));
    let messages: Vec<Message> = system.chain([Message::new("user", prompt)]).collect();
    let options = RenderOptions {
        add_generation_prompt: true,
        bos_token: tokenizer.bos_text(),
        eos_token: tokenizer.eos_text(),
        extra,
        ..RenderOptions::default()
    };
    Ok(tokenizer.encode_chat(&template.render(&messages, &options)?)?)
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
    split: Vec<usize>,
    seed: u64,
    stages: Vec<StageRow>,
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

#[derive(Debug, Serialize)]
struct TokenRow {
    id: u32,
    logprob: Option<f32>,
    top: Vec<(u32, f32)>,
}

impl RunReport {
    fn new(
        plan: &Plan,
        request: Request,
        answer: Answer,
        stages: Vec<StageRow>,
        load_seconds: f64,
        logprobs: bool,
    ) -> RunReport {
        let (activations, kv) = super::precision(plan);
        let times = answer.timings;
        let first = (!answer.tokens.is_empty()).then_some(times.first_token_seconds);
        let rate = |tokens: usize, seconds: f64| (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds);
        let row = |token: &Token| TokenRow { id: token.id, logprob: token.logprob, top: token.candidates.clone() };
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
            split: plan.counts.clone(),
            seed: request.sampling.seed,
            stages,
            logprobs: logprobs.then(|| answer.tokens.iter().map(row).collect()),
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
