//! What is read of the service when somebody asks: queue, pages, stages, hops.

use std::sync::atomic::{AtomicU64, Ordering};

use pp_engine::head::service::{Pipe, Standing};
use pp_engine::journal;
use pp_engine::trace::causes::{Cause, Window};
use pp_engine::trace::summary::{Options, Summary};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Of the trace, the latest nanoseconds that shares and hops are about.
const LATEST: u64 = 30_000_000_000;

type Level = Gauge<f64, AtomicU64>;
type Sum = Counter<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabels {
    stage: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    stage: u64,
    cause: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HopLabels {
    hop: u64,
}

/// How the service stands, as metrics.
pub fn registry(standing: &Standing) -> Registry {
    let mut registry = Registry::with_prefix("pp_run");
    let Standing { pipe, schedule, .. } = standing;
    let levels = [
        ("up", "Whether the pipeline answers", f64::from(u8::from(standing.down.is_none()))),
        ("requests", "Requests that are not answered", standing.requests as f64),
        ("queue", "Answers that wait for a place", schedule.waiting as f64),
        ("running", "Sequences that hold pages", schedule.running as f64),
        ("decoding", "Those of them that decode", schedule.decoding as f64),
        ("micro_batches", "Micro-batches in the pipe", schedule.in_flight as f64),
        ("kv_pages", "KV pages of 32 positions", schedule.pages as f64),
        ("kv_pages_held", "Those that sequences hold", schedule.held_pages as f64),
        ("kv_pages_idle", "Those that the prefix cache remembers", schedule.idle_pages as f64),
    ];
    for (name, help, value) in levels {
        let level = Level::default();
        level.set(value);
        registry.register(name, help, level);
    }
    let sums = [
        ("pipeline_failures", "Pipelines that failed", standing.failures),
        ("pipeline_restarts", "Pipelines opened in the place of failed ones", standing.restarts),
        ("preemptions", "Sequences that lost their pages to older ones", schedule.preemptions),
        ("prefix_cache_hit_tokens", "Prompt tokens that the prefix cache spared", schedule.spared_tokens),
    ];
    for (name, help, value) in sums {
        let sum = Sum::default();
        sum.inc_by(value as f64);
        registry.register(name, help, sum);
    }
    stages(&mut registry, pipe);
    stragglers(&mut registry, standing);
    latest(&mut registry, pipe);
    registry
}

/// How the journal stands, as metrics.
pub fn journal(standing: &journal::Standing) -> Registry {
    let mut registry = Registry::with_prefix("pp_run_journal");
    let levels = [
        ("up", "Whether the journal can be written", f64::from(u8::from(standing.failing.is_none()))),
        ("bytes", "Bytes of the journal's file", standing.bytes as f64),
        (
            "reserved_bytes",
            "Bytes kept free for what is asked, with all that it may come to",
            standing.reserved_bytes as f64,
        ),
        ("requests", "Requests in the journal that are not forgotten", standing.requests as f64),
    ];
    for (name, help, value) in levels {
        let level = Level::default();
        level.set(value);
        registry.register(name, help, level);
    }
    let commits = Sum::default();
    commits.inc_by(standing.commits as f64);
    registry.register("commits", "Writes of the journal", commits);
    registry
}

/// What each stage has done since its pipeline was opened.
fn stages(registry: &mut Registry, pipe: &Pipe) {
    let (busy, tokens) = (Family::<StageLabels, Sum>::default(), Family::<StageLabels, Sum>::default());
    let sent = Family::<HopLabels, Sum>::default();
    for (stage, counters) in (0..).zip(&pipe.counters) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let labels = StageLabels { stage };
        busy.get_or_create(&labels).inc_by(read(&counters.busy_ns) * 1e-9);
        tokens.get_or_create(&labels).inc_by(read(&counters.tokens));
        // The hop behind it.
        sent.get_or_create(&HopLabels { hop: stage + 1 }).inc_by(read(&counters.sent_bytes));
    }
    registry.register("stage_busy_seconds", "Time that a stage's device worked", busy);
    registry.register("stage_tokens", "Tokens that a stage computed", tokens);
    registry.register("hop_bytes", "Bytes that a stage handed on; hop i leads to stage i, the last to the head", sent);
}

/// What stages take against what they used to.
fn stragglers(registry: &mut Registry, standing: &Standing) {
    let times = Family::<StageLabels, Level>::default();
    for (stage, _) in (0..).zip(&standing.pipe.counters) {
        let slow = standing.stragglers.iter().find(|slow| slow.stage.index as u64 == stage);
        times.get_or_create(&StageLabels { stage }).set(slow.map_or(0.0, |slow| slow.times));
    }
    let help = "How many times what it used to take, of a stage that takes much longer than that; 0 else";
    registry.register("stage_slow_ratio", help, times);
}

/// Where the latest time went.
fn latest(registry: &mut Registry, pipe: &Pipe) {
    let now = pipe.recorder.now();
    let window = Window { from: now.saturating_sub(LATEST), to: now };
    let trace = pipe.recorder.since(window.from);
    if trace.head.is_empty() {
        return;
    }
    let summary = Summary::of(&trace, Options { window: Some(window), ..Options::default() });
    let shares = Family::<CauseLabels, Level>::default();
    for (stage, summary) in (0..).zip(&summary.stages) {
        for cause in Cause::ALL {
            let name = cause.name().to_lowercase().replace(['/', '-', ' '], "_");
            shares.get_or_create(&CauseLabels { stage, cause: name }).set(summary.shares.of(cause));
        }
    }
    registry.register("stage_time_ratio", "Busy share of a stage in the latest 30 s, and why it was idle else", shares);
    let hops = Family::<HopLabels, Level>::default();
    for (hop, seconds) in (0..).zip(&summary.hop_seconds) {
        hops.get_or_create(&HopLabels { hop }).set(*seconds);
    }
    registry.register("hop_seconds", "From one end of a hop to the other in the latest 30 s: the median", hops);
}
