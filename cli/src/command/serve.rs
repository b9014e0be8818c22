//! Answers many clients over HTTP.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::digest::Digest;
use pp_engine::head::service::{NotReopened, Reopen, Service};
use pp_engine::head::{Head, HeadOptions};
use pp_engine::journal::{Contents, Journal};
use pp_engine::tokenizer::Tokenizer;
use serde::Serialize;
use tokio::sync::watch;

use crate::api::guard::Key;
use crate::api::kept::{Kept, is_of_a_server};
use crate::api::metrics::Metrics;
use crate::api::pipeline::Facts;
use crate::api::{self, Compiling, Model, Settings, Shared, State};
use crate::args::{PipelineArgs, SamplingArgs, ServeArgs};
use crate::errors::usage;
use crate::output::{Out, Report};
use crate::plan::{self, Wanted};
use crate::prompts::Prompts;
use crate::recovery::Recovery;
use crate::report::StageRow;
use crate::settings::{self, SEQUENCES};
use crate::{cancel, journaled, report};

/// How often it is looked whether the program should end, and whether what runs has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Threads that talk to clients; what computes has its own.
const THREADS: usize = 2;
/// How often it is looked which answers have been kept for long enough.
const SWEEP: Duration = Duration::from_secs(1);
/// How long connections may take to end when nothing is answered on them any more.
const FAREWELL: Duration = Duration::from_secs(2);

/// Serves until it is told to stop.
pub fn run(args: &ServeArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, args.quiet);
    let key = args.api_key.as_deref().map(Key::read).transpose()?;
    if key.is_none() && !args.host.is_loopback() {
        return Err(usage(format!(
            "--host {} lets other machines in, and without a key anybody there could use the model: give --api-key FILE, or leave --host away",
            args.host
        )));
    }
    // Before minutes are spent on loading.
    let listener = listen(SocketAddr::new(args.host, args.port))?;
    let checkpoint = super::open(&args.model)?;
    let opened = args.journal.as_deref().map(|path| open_journal(args, path, &checkpoint, &out)).transpose()?;
    let template = super::run::chat_template(args.chat_template.as_deref())?;
    let prompts = Prompts::new(&checkpoint, template)?.with_tool_format(args.tool_format.map(settings::tool_format));
    let sampling =
        settings::sampling(&SamplingArgs { max_tokens: 1, ..SamplingArgs::default() }, &checkpoint.generation, 0, 0)?;
    let loader = Loader {
        checkpoint: checkpoint.clone(),
        pipeline: args.pipeline.clone(),
        options: super::head_options(&args.pipeline),
        tokenizer: prompts.tokenizer().clone(),
        out,
    };
    let (mut recovery, head, load_seconds) = loader.load()?;
    let precision = super::precision(recovery.plan());
    let reopen: Reopen =
        Box::new(move |error, past| recovery.replace(error, past).map_err(|error| not_reopened(&error)));
    let context = head.scheduler().limits().capacity();
    let stages = report::stages(head.pipeline());
    let service = Service::start(head, Some(reopen))?;
    let id = args.model_name.clone().unwrap_or_else(|| model_name(&checkpoint.path));
    let (activations, kv, wire) = precision;
    let metrics = Arc::new(Metrics::new());
    let (kept, found) = match opened {
        Some(Opened { journal, found, model }) => {
            let conditions = journaled::conditions(precision, context, &stages);
            journaled::note_conditions(&found, &conditions, &out);
            let keep = Duration::from_secs(args.keep_answers);
            let kept = Kept::new(journal, model, conditions, context, keep, metrics.clone());
            (Some(Arc::new(kept)), found)
        }
        None => (None, Contents::default()),
    };
    let state: Shared = Arc::new(State {
        service,
        prompts,
        facts: Arc::new(Facts { model: id.clone(), context, wire, activations, kv }),
        model: Model { id, created: created(&checkpoint.path), context, vocab: checkpoint.config.vocab },
        settings: Settings {
            key,
            is_loopback: args.host.is_loopback(),
            allowed_hosts: args.allow_host.clone(),
            body_bytes_max: args.max_body_bytes as usize,
            sampling,
            max_tokens: args.max_tokens.map(|tokens| tokens as usize),
            log_prompts: args.log_prompts,
        },
        metrics,
        kept,
        compiling: Compiling::new(),
    });
    let address = listener.local_addr()?;
    out.result(&Ready {
        url: format!("http://{address}/v1"),
        address: address.to_string(),
        model: state.model.id.clone(),
        context,
        load_seconds,
        stages,
    })?;
    let drain = Duration::from_secs(args.drain);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build()?;
    let served = runtime.block_on(serve(listener, state, found, args.max_connections as usize, drain, out));
    runtime.shutdown_timeout(FAREWELL);
    served.map(|()| ExitCode::SUCCESS)
}

/// Listens, so that a port that is taken is told at once.
fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => usage(format!("{address} is in use by another program: give another --port")),
        _ => usage(format!("cannot listen on {address}: {error}")),
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Opens the journal; what it holds is to go on with `--resume`, and an error without.
fn open_journal(args: &ServeArgs, path: &Path, checkpoint: &Checkpoint, out: &Out) -> Result<Opened> {
    let (journal, mut found) = journaled::open(path, args.journal_bytes, out)?;
    if !is_of_a_server(&found) {
        return Err(usage(format!("the journal {} is not of a server: give another --journal", path.display())));
    }
    let unfinished = found.requests.values().filter(|found| !found.is_complete).count();
    if !args.resume && unfinished > 0 {
        return Err(usage(format!(
            "the journal {} holds what is not finished ({unfinished}): let it go on with --resume, or move the file away",
            path.display()
        )));
    }
    if !args.resume {
        found.requests.keys().for_each(|number| journal.forget(*number));
        found.requests.clear();
    }
    let model = crate::models::digest_of(checkpoint, out)?;
    journaled::check_model(&found, model, path)?;
    if unfinished > 0 {
        out.note(&format!("what the journal holds unfinished goes on: {unfinished}"));
    }
    Ok(Opened { journal, found, model })
}

/// A journal, and what it held.
struct Opened {
    journal: Journal,
    found: Contents,
    model: Digest,
}

/// Answers until Ctrl-C or SIGTERM; then what has begun may end within `drain`.
async fn serve(
    listener: TcpListener,
    state: Shared,
    found: Contents,
    connections_max: usize,
    drain: Duration,
    out: Out,
) -> Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener).context("cannot listen")?;
    if let Some(kept) = state.kept.clone() {
        // Before anybody is heard: who comes back finds what was asked.
        let resumed = kept.take_up(&state, found).await;
        tokio::spawn(kept.clone().resume(state.clone(), resumed));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(SWEEP).await;
                kept.sweep();
            }
        });
    }
    let (stop, stopping) = watch::channel(false);
    let router = api::router(&state);
    let serving = tokio::spawn(api::server::serve(listener, router, connections_max, stopping));
    while !cancel::flag().load(Ordering::Relaxed) && state.service.fault().is_none() {
        tokio::time::sleep(LOOK).await;
    }
    state.service.drain();
    let until = Instant::now() + drain;
    let requests = state.service.standing().requests;
    tracing::info!(requests, "draining");
    if requests > 0 {
        let seconds = drain.as_secs();
        out.note(&format!("no more requests are taken; the {requests} under way may take {seconds} s to end"));
    }
    while state.service.standing().requests > 0 && Instant::now() < until {
        tokio::time::sleep(LOOK).await;
    }
    // Connections end with the answer that they are at.
    let _ = stop.send(true);
    state.service.end();
    let _ = tokio::time::timeout(FAREWELL, serving).await;
    match state.service.fault() {
        Some(fault) => {
            Err(anyhow!("{}: please report it with what was said above; start the server again", fault.reason))
        }
        None => Ok(()),
    }
}

/// Loads the pipeline.
struct Loader {
    checkpoint: Arc<Checkpoint>,
    pipeline: PipelineArgs,
    options: HeadOptions,
    tokenizer: Arc<Tokenizer>,
    out: Out,
}

impl Loader {
    fn load(&self) -> Result<(Recovery, Head, f64)> {
        let wanted = Wanted::several(None, SEQUENCES);
        let plan = plan::make(self.checkpoint.clone(), &self.pipeline, wanted, &self.out)?;
        Recovery::load(plan, &self.pipeline, self.options, self.tokenizer.clone(), &self.out)
    }
}

/// Why there is no other pipeline, to the service.
fn not_reopened(error: &anyhow::Error) -> NotReopened {
    if cancel::flag().load(Ordering::Relaxed) {
        NotReopened::Cancelled
    } else {
        NotReopened::Failed(format!("{error:#}"))
    }
}

/// What a model is called after its file or folder.
fn model_name(path: &Path) -> String {
    let name =
        if path.extension().is_some_and(|extension| extension == "gguf") { path.file_stem() } else { path.file_name() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn created(path: &Path) -> u64 {
    let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    modified.ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map_or(0, |at| at.as_secs())
}

/// Where it listens.
#[derive(Debug, Serialize)]
struct Ready {
    /// What clients take as base URL.
    url: String,
    address: String,
    model: String,
    /// Positions of a sequence.
    context: usize,
    load_seconds: f64,
    stages: Vec<StageRow>,
}

impl Report for Ready {
    fn text(&self) -> String {
        format!(
            "{} at {} (context {} tokens); the page: http://{}/; Ctrl-C stops",
            self.model, self.url, self.context, self.address
        )
    }
}
