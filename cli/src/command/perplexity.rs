//! How well a model predicts a text.

use std::process::ExitCode;

use anyhow::Result;
use pp_engine::head::HeadError;
use pp_engine::tokenizer::Encode;
use serde::Serialize;

use crate::args::PerplexityArgs;
use crate::errors::{cancelled, usage};
use crate::output::progress::Steps;
use crate::output::{Out, Report, count};
use crate::report::{StageRow, stage_table};
use crate::{cancel, plan, report, settings};

/// Candidates of the last position that are shown.
const TOP: u32 = 8;

/// Scores the text.
pub fn run(args: &PerplexityArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let text = super::run::read_text(&args.text_file)?;
    settings::not_empty(&text, &args.text_file.display().to_string())?;
    let checkpoint = super::open(&args.model)?;
    let tokenizer = checkpoint.tokenizer()?;
    let mut ids = tokenizer.encode(&text, Encode { add_bos: true, parse_special: false })?;
    ids.truncate(args.tokens.unwrap_or(usize::MAX));
    if ids.len() < 2 {
        return Err(usage(format!("{} token(s) to score: at least 2 are needed", ids.len())));
    }
    let plan = plan::make(checkpoint, &args.pipeline, plan::Wanted::one(Some(ids.len())), &out)?;
    let context = plan.options.context;
    if ids.len() > context {
        return Err(usage(format!(
            "{} has {} tokens, the context holds {context}: score the first of them with --tokens {context}, or raise --ctx if the model allows",
            args.text_file.display(),
            ids.len()
        )));
    }
    let (mut head, load_seconds) = super::load(&plan, super::head_options(&args.pipeline), tokenizer.into(), &out)?;
    let started = std::time::Instant::now();
    let mut steps = Steps::new(&out, "scored", "tokens");
    let total = ids.len();
    let scored =
        head.score(&ids, plan.options.chunk, TOP, cancel::flag(), &mut |done| steps.update(done.min(total), total));
    steps.finish();
    let score = scored.map_err(|error| if HeadError::is_cancelled(&error) { cancelled() } else { error.into() })?;
    let nll = score.nll();
    let (activations, kv, wire) = super::precision(&plan);
    out.result(&PerplexityReport {
        model: plan.checkpoint.path.display().to_string(),
        nll,
        perplexity: (nll / (ids.len() - 1) as f64).exp(),
        token_logprobs: score.token_logprobs,
        top8: score.top,
        ids,
        context,
        activations,
        kv,
        wire,
        load_seconds,
        seconds: started.elapsed().as_secs_f64(),
        stages: report::stages(head.pipeline()),
    })?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct PerplexityReport {
    model: String,
    ids: Vec<u32>,
    /// Sum of -log p over all tokens but the first, nats.
    nll: f64,
    perplexity: f64,
    token_logprobs: Vec<f32>,
    /// The likeliest tokens after the last: [id, log-probability].
    top8: Vec<(u32, f32)>,
    context: usize,
    activations: &'static str,
    kv: &'static str,
    wire: &'static str,
    load_seconds: f64,
    seconds: f64,
    stages: Vec<StageRow>,
}

impl Report for PerplexityReport {
    fn text(&self) -> String {
        format!(
            "{}\n\n{} tokens in {:.2} s ({:.1} tokens/s)   activations {}   KV {}\nnegative log-likelihood {:.4} nats ({:.4} a token)\nperplexity {:.4}",
            stage_table(&self.stages, self.seconds),
            count(self.ids.len() as u64),
            self.seconds,
            self.ids.len() as f64 / self.seconds,
            self.activations,
            self.kv,
            self.nll,
            self.nll / self.token_logprobs.len() as f64,
            self.perplexity
        )
    }
}
