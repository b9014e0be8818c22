//! What the pipe is and what it does: `/v1/pipeline` as one object, `/v1/pipeline/events` as it happens.
//!
//! Whoever watches has a place of its own; without watchers nothing is computed. Events are small and come a few times
//! a second, and what a watcher does not take in time holds up nobody else.

mod live;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State as Given;
use axum::response::sse::{Event as Message, Sse};
use axum::response::{IntoResponse, Response};
use pp_engine::head::service::{Pipe, Standing};
use pp_engine::schedule::Status;
use pp_engine::trace::causes::Window;
use pp_engine::trace::summary::{Options, Summary};
use pp_engine::trace::{Nanos, Recorder};
use serde::Serialize;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Interval, MissedTickBehavior, interval};
use utoipa::ToSchema;

use super::Shared;
use super::errors::{ApiError, ErrorBody};
use crate::output::printable;
use live::{Live, StagePiece};

/// Between two events.
const EVERY: Duration = Duration::from_millis(330);
/// Who may watch at once.
const WATCHERS_MAX: usize = 32;
static WATCHERS: Semaphore = Semaphore::const_new(WATCHERS_MAX);

/// What the summary is of: the last so many seconds in which the pipe worked.
const SUMMED: Nanos = 10_000_000_000;
/// What rates and busy shares are taken over.
const WINDOW: Duration = Duration::from_secs(2);

/// What the pipe is, and what it has done lately.
#[utoipa::path(get, path = "/v1/pipeline", tag = "Watching", security(("key" = [])), responses(
    (status = 200, body = Pipeline),
    (status = 401, description = "The key is missing or wrong", body = ErrorBody),
))]
pub async fn show(Given(state): Given<Shared>) -> Result<Json<Pipeline>, ApiError> {
    let made = tokio::task::spawn_blocking(move || {
        let standing = state.service.standing();
        let trace = summary(&standing.pipe.recorder);
        Pipeline::of(&state.facts, &standing, trace)
    });
    made.await.map(Json).map_err(|error| ApiError::internal(format!("the pipeline could not be described: {error}")))
}

/// What the pipe does, as it does it: server-sent events, JSON with a `type` each, about three a second. `pipeline` is
/// what `/v1/pipeline` says; `tick` says what each stage did since the last one, in microseconds of the pipe's clock:
/// `spans` of [began, ended, group, tokens, sequences, step] and `idle` of [from, until, cause]. It replaces what was
/// said of the time after `from`.
#[utoipa::path(get, path = "/v1/pipeline/events", tag = "Watching", security(("key" = [])), responses(
    (status = 200, description = "Events, for as long as somebody listens", content_type = "text/event-stream", body = Object),
    (status = 401, description = "The key is missing or wrong", body = ErrorBody),
    (status = 429, description = "Too many watch already", body = ErrorBody),
))]
pub async fn events(Given(state): Given<Shared>) -> Result<Response, ApiError> {
    let Ok(place) = WATCHERS.try_acquire() else {
        return Err(ApiError::too_many(format!("{WATCHERS_MAX} watch the pipeline already"), 10));
    };
    let mut clock = interval(EVERY);
    // Who was kept from watching is not told more often later.
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watch = Watch::new(state.facts.clone(), &state.service.pipe());
    let watcher = Watcher { state, watch, clock, ready: VecDeque::new(), _place: place };
    let events = futures_util::stream::unfold(watcher, |mut watcher| async {
        let event = watcher.next().await?;
        Some((Ok::<_, Infallible>(event), watcher))
    });
    Ok(Sse::new(events).into_response())
}

/// A connection that watches.
struct Watcher {
    state: Shared,
    watch: Watch,
    clock: Interval,
    /// To be sent.
    ready: VecDeque<Message>,
    _place: SemaphorePermit<'static>,
}

impl Watcher {
    /// The next event, when it is due; none once the server has nothing more to do.
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            self.clock.tick().await;
            let standing = self.state.service.standing();
            if standing.is_draining && standing.requests == 0 {
                return None;
            }
            let events = self.watch.events(&standing);
            self.ready.extend(events.iter().filter_map(|event| Message::default().json_data(event).ok()));
        }
    }
}

/// What does not change while the server runs.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Facts {
    /// The model's name.
    pub model: String,
    /// Positions of a sequence at most.
    pub context: usize,
    /// How activations cross hops.
    pub wire: &'static str,
    /// How activations meet quantised weights.
    pub activations: &'static str,
    /// How keys and values are kept.
    pub kv: &'static str,
}

/// `/v1/pipeline`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct Pipeline {
    pub object: &'static str,
    /// Pipelines that there were before this one.
    pub epoch: u64,
    #[serde(flatten)]
    pub facts: Facts,
    /// Layers of each stage.
    pub split: Vec<usize>,
    pub state: State,
    /// Why it is down.
    pub reason: Option<String>,
    /// Pipelines that were opened in the place of failed ones, and why the latest of these failed.
    pub restarts: u64,
    pub last_failure: Option<String>,
    pub stages: Vec<Stage>,
    pub requests: Requests,
    pub kv_pages: Pages,
    /// What the last seconds say in which it worked; null while it has done nothing.
    #[schema(value_type = Option<Object>)]
    pub trace: Option<Summary>,
}

/// How it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = PipelineState)]
pub enum State {
    /// It answers.
    Running,
    /// A stage has failed.
    Down,
    /// It answers what it has, and takes nothing more.
    Draining,
}

/// A stage.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = PipelineStage)]
pub struct Stage {
    pub index: usize,
    /// Where it is; null: here.
    pub worker: Option<String>,
    pub device: String,
    pub device_id: String,
    /// First layer and the one after the last.
    pub layers: [usize; 2],
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub work_bytes: u64,
    /// Of all buffers on the device.
    pub device_bytes: u64,
    pub busy_seconds: f64,
    pub steps: u64,
    pub tokens: u64,
    pub sent_bytes: u64,
    pub sequences: u64,
    /// How many times what it used to take, while that is more than three for 32 micro-batches and more; null else.
    pub slow_times: Option<f64>,
    /// `running` or `lost`.
    pub state: &'static str,
    /// Why it is lost.
    pub reason: Option<String>,
}

/// Requests.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = PipelineRequests)]
pub struct Requests {
    /// That were taken and are not answered.
    pub open: usize,
    /// Sequences that hold pages, and those of them that decode.
    pub running: usize,
    pub decoding: usize,
    /// Answers that wait for room.
    pub waiting: usize,
    /// Micro-batches in the pipe, and decode groups.
    pub in_flight: usize,
    pub groups: usize,
}

/// Pages of keys and values.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = PipelinePages)]
pub struct Pages {
    /// In use.
    pub held: usize,
    /// With remembered contents, and free otherwise.
    pub cached: usize,
    pub all: usize,
    /// Positions of a page.
    pub page_tokens: usize,
}

impl Pipeline {
    /// As it stands.
    pub fn of(facts: &Facts, standing: &Standing, trace: Option<Summary>) -> Pipeline {
        let Standing { pipe, schedule, requests, down, last_failure, restarts, is_draining, stragglers, .. } = standing;
        let state = match (down, is_draining) {
            (Some(_), _) => State::Down,
            (None, true) => State::Draining,
            (None, false) => State::Running,
        };
        let lost = down.as_ref().and_then(|failure| failure.stage.as_ref()).map(|stage| stage.index);
        let reason = down.as_ref().map(|failure| printable(&failure.reason));
        let slow = |index: usize| stragglers.iter().find(|slow| slow.stage.index == index).map(|slow| slow.times);
        let stage = |index: usize| Stage {
            slow_times: slow(index),
            ..stage(pipe, index, (lost == Some(index)).then(|| reason.clone().unwrap_or_default()))
        };
        Pipeline {
            object: "pipeline",
            epoch: pipe.number,
            facts: facts.clone(),
            split: pipe.reports.iter().map(|report| report.spec.layers.len()).collect(),
            state,
            stages: (0..pipe.reports.len()).map(stage).collect(),
            reason,
            restarts: *restarts,
            last_failure: last_failure.as_ref().map(|failure| printable(&failure.reason)),
            requests: Requests {
                open: *requests,
                running: schedule.running,
                decoding: schedule.decoding,
                waiting: schedule.waiting,
                in_flight: schedule.in_flight,
                groups: schedule.groups,
            },
            kv_pages: Pages {
                held: schedule.held_pages,
                cached: schedule.idle_pages,
                all: schedule.pages,
                page_tokens: pp_engine::PAGE,
            },
            trace,
        }
    }
}

fn stage(pipe: &Pipe, index: usize, lost: Option<String>) -> Stage {
    let (report, counters) = (&pipe.reports[index], &pipe.counters[index]);
    Stage {
        index,
        worker: report.worker.clone(),
        // What a worker calls its devices is its own affair: nothing of it is obeyed.
        device: printable(&report.device),
        device_id: printable(&report.device_id),
        layers: [report.spec.layers.start, report.spec.layers.end],
        weight_bytes: report.weight_bytes,
        kv_bytes: report.kv_bytes,
        work_bytes: report.work_bytes,
        device_bytes: report.allocated_bytes,
        busy_seconds: counters.busy_ns.load(Ordering::Relaxed) as f64 * 1e-9,
        steps: counters.steps.load(Ordering::Relaxed),
        tokens: counters.tokens.load(Ordering::Relaxed),
        sent_bytes: counters.sent_bytes.load(Ordering::Relaxed),
        sequences: counters.sequences.load(Ordering::Relaxed),
        slow_times: None,
        state: if lost.is_some() { "lost" } else { "running" },
        reason: lost,
    }
}

/// What the last seconds say in which the pipe worked.
pub fn summary(recorder: &Recorder) -> Option<Summary> {
    let lately = recorder.since(recorder.now().saturating_sub(SUMMED));
    // It has done nothing lately: what it did before.
    let has_answers = lately.head.iter().any(|span| span.answered > 0);
    let trace = if has_answers { lately } else { recorder.snapshot() };
    let whole = Window::of(&trace);
    let window = Window { from: whole.from.max(whole.to.saturating_sub(SUMMED)), to: whole.to };
    let summary = Summary::of(&trace, Options { window: Some(window), ..Options::default() });
    (summary.micro_batches > 0).then_some(summary)
}

/// An event.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event {
    /// What the pipe is: at first, when that changes, and now and then.
    Pipeline { pipeline: Box<Pipeline> },
    /// What it did since the last one.
    Tick(Tick),
}

/// What the pipe did lately. Times are microseconds of its clock.
#[derive(Clone, Debug, Serialize)]
pub struct Tick {
    pub now: u64,
    /// It replaces what was said of the time after this.
    pub from: u64,
    pub stages: Vec<StageTick>,
    pub counters: Counters,
}

/// What a stage did lately.
#[derive(Clone, Debug, Serialize)]
pub struct StageTick {
    /// Share of the last seconds.
    pub busy: f64,
    #[serde(flatten)]
    pub piece: StagePiece,
}

/// How it stands and how fast it is.
#[derive(Clone, Debug, Serialize)]
pub struct Counters {
    #[serde(flatten)]
    pub requests: Requests,
    pub held_pages: usize,
    pub idle_pages: usize,
    pub pages: usize,
    /// Of all answers, and of all prompts, over the last seconds.
    pub tokens_per_s: f64,
    pub prompt_tokens_per_s: f64,
}

/// Between two events that say what the pipe is.
const TELL: Duration = Duration::from_secs(2);

/// One who watches.
pub struct Watch {
    facts: Arc<Facts>,
    live: Live,
    /// What was last told.
    told: Option<Told>,
    /// When, and nanoseconds that each stage was busy until then.
    samples: VecDeque<(Instant, Vec<u64>)>,
    summary: Option<Summary>,
}

/// What decides whether there is something new to tell of the pipe.
struct Told {
    at: Instant,
    epoch: u64,
    state: State,
    /// The latest micro-batch that was answered.
    answered: Nanos,
}

impl Watch {
    /// Begins.
    pub fn new(facts: Arc<Facts>, pipe: &Pipe) -> Watch {
        let live = Live::new(pipe.reports.len(), pipe.recorder.now());
        Watch { facts, live, told: None, samples: VecDeque::new(), summary: None }
    }

    /// What there is to tell now.
    pub fn events(&mut self, standing: &Standing) -> Vec<Event> {
        let pipe = &standing.pipe;
        if self.told.as_ref().is_some_and(|told| told.epoch != pipe.number) {
            *self = Watch::new(self.facts.clone(), pipe);
        }
        let mut events = Vec::new();
        if let Some(pipeline) = self.pipeline(standing) {
            events.push(Event::Pipeline { pipeline: Box::new(pipeline) });
        }
        events.push(Event::Tick(self.tick(standing)));
        events
    }

    /// What the pipe is, where that is new or has not been told for a while in which it worked.
    fn pipeline(&mut self, standing: &Standing) -> Option<Pipeline> {
        let recorder = &standing.pipe.recorder;
        let mut pipeline = Pipeline::of(&self.facts, standing, None);
        let answered = self.told.as_ref().map_or(0, |told| told.answered);
        let lately = recorder.since(answered + 1).head.iter().map(|span| span.answered).max();
        let latest = lately.unwrap_or(0).max(answered);
        let has_worked = latest > answered;
        let is_due = |told: &Told| told.state != pipeline.state || has_worked && told.at.elapsed() >= TELL;
        if !self.told.as_ref().is_none_or(is_due) {
            return None;
        }
        if has_worked {
            self.summary = summary(recorder);
        }
        pipeline.trace = self.summary.clone();
        self.told = Some(Told { at: Instant::now(), epoch: pipeline.epoch, state: pipeline.state, answered: latest });
        Some(pipeline)
    }

    fn tick(&mut self, standing: &Standing) -> Tick {
        let Standing { pipe, schedule, requests, down, .. } = standing;
        // Of a pipe that is down nothing is known.
        let is_idle = *requests == 0 && down.is_none();
        let now = pipe.recorder.now();
        let piece = self.live.piece(&pipe.recorder, now, is_idle);
        let busy = self.busy(pipe);
        let seconds = WINDOW.as_secs_f64();
        let (prompt, answer) = pipe.recorder.tokens_since(now.saturating_sub(WINDOW.as_nanos() as Nanos));
        let Status { held_pages, idle_pages, pages, .. } = *schedule;
        Tick {
            now: piece.now,
            from: piece.from,
            stages: piece.stages.into_iter().zip(busy).map(|(piece, busy)| StageTick { busy, piece }).collect(),
            counters: Counters {
                requests: Pipeline::of(&self.facts, standing, None).requests,
                held_pages,
                idle_pages,
                pages,
                tokens_per_s: answer as f64 / seconds,
                prompt_tokens_per_s: prompt as f64 / seconds,
            },
        }
    }

    /// Shares of the last seconds that stages were busy.
    fn busy(&mut self, pipe: &Pipe) -> Vec<f64> {
        let now = Instant::now();
        let busy: Vec<u64> = pipe.counters.iter().map(|counters| counters.busy_ns.load(Ordering::Relaxed)).collect();
        while self.samples.len() > 1 && now - self.samples[1].0 > WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back((now, busy.clone()));
        let (since, before) = &self.samples[0];
        let seconds = (now - *since).as_secs_f64();
        let share = |(busy, before): (&u64, &u64)| busy.saturating_sub(*before) as f64 * 1e-9 / seconds.max(0.1);
        busy.iter().zip(before).map(share).map(|share| share.min(1.0)).collect()
    }
}
