//! What each verb does.

mod batch;
mod bench;
mod chat;
mod cluster;
mod devices;
mod doctor;
mod inspect;
mod net_bench;
mod perplexity;
mod plan;
mod pull;
pub mod run;
mod serve;
mod sim;
mod trace;
mod worker;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Head, HeadOptions};
use pp_engine::pipeline::shelf::Shelf;
use pp_engine::pipeline::{Device, Past, Pipeline, PipelineError, PipelineOptions, StageName};
use pp_engine::tokenizer::Tokenizer;
use pp_engine::trace::{Trace, chrome};
use pp_engine::weights::LoadError;

use crate::args::{ChatArgs, Cli, ModelArgs, PipelineArgs, Verb};
use crate::memory::{self, Room};
use crate::models::Places;
use crate::output::Out;
use crate::output::progress::Loading;
use crate::plan::Plan;
use crate::report::{Widened, layer_range, place};
use crate::{cancel, errors, output, settings};

/// Does what was asked.
///
/// # Errors
/// [`errors::exit_of`] says what they mean.
pub fn run(cli: Cli) -> Result<ExitCode> {
    match cli.verb {
        None if output::is_a_person_there() => match ChatArgs::of(cli.run) {
            Ok(args) => chat::run(args),
            Err(args) => run::run(&args),
        },
        None => run::run(&cli.run),
        Some(Verb::Chat(args)) => chat::run(*args),
        Some(Verb::Devices(args)) => devices::run(&args),
        Some(Verb::Inspect(args)) => inspect::run(&args),
        Some(Verb::Plan(args)) => plan::run(&args),
        Some(Verb::Pull(args)) => pull::run(&args),
        Some(Verb::Perplexity(args)) => perplexity::run(&args),
        Some(Verb::Bench(args)) => bench::run(&args),
        Some(Verb::Batch(args)) => batch::run(&args),
        Some(Verb::Serve(args)) => serve::run(&args),
        Some(Verb::Sim(args)) => sim::run(&args),
        Some(Verb::Trace(args)) => trace::run(&args),
        Some(Verb::Worker(args)) => worker::run(&args),
        Some(Verb::Cluster(args)) => cluster::run(&args),
        Some(Verb::Doctor(args)) => doctor::run(&args),
        Some(Verb::NetBench(args)) => net_bench::run(&args),
        Some(Verb::NetBenchEnd(args)) => net_bench::ends::run(&args),
    }
}

/// The model that is wanted.
///
/// # Errors
/// When it is not there or cannot be read.
pub fn open(args: &ModelArgs) -> Result<Arc<Checkpoint>> {
    let path = Places::from_env().find(args.model.as_deref())?;
    Ok(Arc::new(Checkpoint::open(&path)?))
}

/// Loads a plan's stages, with a bar each. Returns the seconds it took.
///
/// # Errors
/// When a stage does not load, or the user wants it to end.
pub fn load(plan: &Plan, options: HeadOptions, tokenizer: Arc<Tokenizer>, out: &Out) -> Result<(Head, f64)> {
    let started = std::time::Instant::now();
    plan.notes().iter().for_each(|note| out.note(note));
    let pipeline = open_pipeline(plan, Keep::default(), out)?;
    Ok((Head::new(pipeline, tokenizer, options), started.elapsed().as_secs_f64()))
}

/// What a pipeline has of one before, and keeps for one after.
#[derive(Clone, Copy, Default)]
pub struct Keep<'a> {
    /// Where stages are, and go.
    pub shelf: Option<&'a Arc<Shelf>>,
    /// The pipeline before.
    pub past: Option<&'a Past>,
    /// Bytes of each stage for what it hands on.
    pub boundary_log: u64,
}

/// Opens a plan's stages, with a bar each.
///
/// # Errors
/// When a stage does not load, or the user wants it to end.
pub fn open_pipeline(plan: &Plan, keep: Keep<'_>, out: &Out) -> Result<Pipeline> {
    let stages = plan.layouts.iter().zip(&plan.devices).map(|(layout, device)| {
        let layers = (layout.spec.layers.start, layout.spec.layers.end);
        let name = format!("stage {}  layers {}  {}", layout.spec.index, layer_range(layers), place(device));
        (name, layout.file_bytes())
    });
    let is_remote = plan.devices.iter().any(|device| device.worker().is_some());
    let model = is_remote.then(|| crate::cluster::model::of(&plan.checkpoint, out)).transpose()?;
    let (shelf, past, boundary_log) = (keep.shelf.cloned(), keep.past.cloned(), keep.boundary_log);
    let between = PipelineOptions { model, shelf, past, boundary_log, ..PipelineOptions::default() };
    let mut loading = Loading::new(out, stages.collect());
    let mut progress = |stage, at| loading.update(stage, at);
    let opened = Pipeline::open_with(
        &plan.checkpoint,
        &plan.specs,
        plan.options,
        &between,
        &plan.devices,
        &mut progress,
        cancel::flag(),
    );
    let pipeline = match opened {
        Ok(pipeline) => pipeline,
        Err(error) => {
            loading.abandon();
            return Err(match error {
                PipelineError::Cancelled => errors::cancelled(),
                PipelineError::Load { ref stage, error: LoadError::NoRoom { folder, needed, room, bound } } => {
                    errors::worker(no_room(plan, stage, Room { folder, needed, room, bound }))
                }
                error => error.into(),
            });
        }
    };
    loading.finish();
    for report in pipeline.reports() {
        for widened in Widened::of(&report.widened) {
            out.note(&format!("stage {}: {}", report.spec.index, widened.text()));
        }
    }
    Ok(pipeline)
}

/// A worker has no room for its tensors: how much was needed, and what would fit.
fn no_room(plan: &Plan, stage: &StageName, room: Room) -> String {
    let workers: Vec<Option<String>> = plan.devices.iter().map(Device::worker).collect();
    let worker = stage.worker.as_deref().unwrap_or_default();
    memory::no_room_for_tensors(worker, &workers, &plan.counts, &settings::costs(&plan.checkpoint), room)
}

/// What was typed for the head.
pub fn head_options(args: &PipelineArgs) -> HeadOptions {
    HeadOptions {
        prefix_cache: !args.no_prefix_cache,
        groups: args.groups,
        queue: args.max_queue,
        ..HeadOptions::default()
    }
}

/// Writes a trace for `pp-run trace` and Perfetto.
///
/// # Errors
/// When the file cannot be written.
pub fn write_trace(trace: &Trace, path: &Path) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        chrome::write(trace, &mut file)?;
        file.flush()
    };
    write().with_context(|| format!("cannot write the trace to {}", path.display()))
}

/// As `--activations`, `--kv` and `--wire` spell them.
fn precision(plan: &Plan) -> (&'static str, &'static str, &'static str) {
    (plan.options.activations.name(), plan.options.kv.name(), plan.options.wire.name())
}
