//! The thread of a stage: takes frames from upstream, does them, hands the result downstream. Two micro-batches may be
//! on the device, so that it need not wait for the host between them.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pp_transport::frame::HEADER_BYTES;
use pp_transport::{Arrival, Frame, FrameHeader, Port, PortError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cluster::control::Beat;
use crate::edge::EdgeError;
use crate::message::{self, MessageError, MessageLimits, Step};
use crate::stage::{Finished, Pending, Stage, StageOutput, StepError};
use crate::trace::{Recorder, StageSpan};

/// Micro-batches between two computations of the known token: at most a thousandth of what the stage does.
const CANARY_STEPS: u64 = 2048;
/// How often an idle worker looks whether it should stop.
const IDLE: Duration = Duration::from_millis(100);

/// What a stage has done so far; read by others while it works.
#[derive(Debug, Default)]
pub struct Counters {
    /// Nanoseconds that the device was busy: the union of its runs.
    pub busy_ns: AtomicU64,
    /// Micro-batches begun.
    pub begun: AtomicU64,
    /// Whether the latest is on its way to the device: a driver may compile kernels for a while.
    pub preparing: AtomicBool,
    /// Micro-batches done.
    pub steps: AtomicU64,
    /// Tokens done.
    pub tokens: AtomicU64,
    /// Bytes handed on, headers included.
    pub sent_bytes: AtomicU64,
    /// Sequences that the stage knows.
    pub sequences: AtomicU64,
}

impl Counters {
    /// As another process has counted.
    pub(crate) fn set(&self, beat: &Beat) {
        let pairs = [
            (&self.begun, beat.begun),
            (&self.steps, beat.steps),
            (&self.tokens, beat.tokens),
            (&self.busy_ns, beat.busy_ns),
            (&self.sent_bytes, beat.sent_bytes),
            (&self.sequences, beat.sequences),
        ];
        pairs.into_iter().for_each(|(counter, value)| counter.store(value, Ordering::Release));
        self.preparing.store(beat.preparing, Ordering::Release);
    }

    /// Micro-batches begun, and done.
    pub fn progress(&self) -> (u64, u64) {
        // In this order: what is done was begun before.
        let done = self.steps.load(Ordering::Acquire);
        (self.begun.load(Ordering::Acquire).max(done), done)
    }
}

/// Why a worker stopped.
#[derive(Clone, Debug, Error, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum WorkerError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("refused a message: {0}")]
    Message(#[from] MessageError),
    #[error("its neighbour is gone")]
    Neighbour,
    #[error("worker {worker} is lost: it was silent for {} s", *silent_ms as f64 * 1e-3)]
    Lost { worker: String, silent_ms: u64 },
    #[error("worker {worker} is gone{}", reason.as_ref().map_or(String::new(), |reason| format!(": {reason}")))]
    Gone { worker: String, reason: Option<String> },
    #[error("hop {hop}: {error}")]
    Edge { hop: usize, error: EdgeError },
    #[error(
        "after {steps} micro-batches it computed a known token differently from the first time: the device or its memory is failing"
    )]
    Canary { steps: u64 },
    #[error("it panicked: {0}")]
    Panic(String),
}

impl WorkerError {
    /// Whether it says nothing of the stage itself.
    pub fn is_elsewhere(&self) -> bool {
        matches!(self, WorkerError::Neighbour | WorkerError::Edge { .. })
    }
}

/// Runs `stage` between two ports until upstream closes or `stop` is set. While a micro-batch is on the device the
/// next one is taken and begun, when it has come and the device is one that has use for it
/// ([`crate::backend::Backend::runs_at_once`]). Each is recorded as that of the stage's index.
///
/// Now and then it computes one known token, in a page that no sequence has: the same bits every time, by the guarantee of
/// sameness, or the device is not trusted any more.
///
/// Frames of an epoch before `epoch`, which the head may raise at any time, are dropped without work; so is the
/// result of a step that became old while it ran. With the first frame of a newer epoch all sequences are forgotten.
///
/// # Errors
/// [`WorkerError`]; after one of those that [`WorkerError::is_elsewhere`] names the stage is as good as before.
pub fn run(
    stage: &mut Stage,
    upstream: &mut dyn Port,
    downstream: &mut dyn Port,
    epoch: &AtomicU64,
    counters: &Counters,
    recorder: &Recorder,
    stop: &AtomicBool,
) -> Result<(), WorkerError> {
    let (limits, current) = (stage.message_limits(), epoch.load(Ordering::Relaxed));
    let at_once = stage.backend().runs_at_once();
    recorder.timed_by(stage.layout().spec.index, stage.backend().timestamps());
    let canary = guarded(|| stage.canary())?;
    let mut worker = Worker { stage, limits, epoch, current, counters, recorder, begun: VecDeque::new() };
    let ended = worker.work(upstream, downstream, at_once, &canary, stop);
    // Another pipeline may go on with the stage.
    let settled = worker.begun.drain(..).try_for_each(|begun| guarded(|| worker.stage.finish(begun.pending)).map(drop));
    ended.and(settled)
}

struct Worker<'a> {
    stage: &'a mut Stage,
    limits: MessageLimits,
    epoch: &'a AtomicU64,
    /// The newest epoch that a frame was of.
    current: u64,
    counters: &'a Counters,
    recorder: &'a Recorder,
    /// Oldest first.
    begun: VecDeque<Begun>,
}

/// A micro-batch on the device.
struct Begun {
    header: FrameHeader,
    step: Step,
    pending: Pending,
    arrived: Instant,
    taken: Instant,
}

impl Worker<'_> {
    fn work(
        &mut self,
        upstream: &mut dyn Port,
        downstream: &mut dyn Port,
        at_once: usize,
        canary: &StageOutput,
        stop: &AtomicBool,
    ) -> Result<(), WorkerError> {
        let (mut closed, mut next_canary) = (false, CANARY_STEPS);
        while !stop.load(Ordering::Relaxed) {
            let steps = self.counters.steps.load(Ordering::Relaxed);
            if steps >= next_canary && self.begun.is_empty() {
                next_canary = steps + CANARY_STEPS;
                if guarded(|| self.stage.canary())? != *canary {
                    return Err(WorkerError::Canary { steps });
                }
            }
            while self.begun.len() < at_once && (steps < next_canary || self.begun.is_empty()) {
                let patience = if self.begun.is_empty() { IDLE } else { Duration::ZERO };
                match upstream.receive(patience) {
                    Ok(arrival) => self.begin(arrival)?,
                    Err(PortError::Timeout { .. }) => break,
                    Err(_) => {
                        closed = true;
                        break;
                    }
                }
            }
            match self.begun.pop_front() {
                Some(oldest) => self.finish(oldest, downstream)?,
                None if closed => break,
                None => {}
            }
        }
        Ok(())
    }

    fn begin(&mut self, arrival: Arrival) -> Result<(), WorkerError> {
        let (taken, header) = (Instant::now(), arrival.frame.header);
        let spec = &self.stage.layout().spec;
        if header.epoch < self.current.max(self.epoch.load(Ordering::Relaxed)) {
            tracing::debug!(stage = spec.index, epoch = header.epoch, "dropped a frame of an older epoch");
            return Ok(());
        }
        let (step, hidden) = message::decode_step(&arrival.frame.payload, &self.limits, spec.is_first())?;
        let (found, expected) = (hidden.len(), step.tokens() * self.limits.hidden);
        if found != expected && !spec.is_first() && step.is_computed_by(spec) {
            return Err(MessageError::Count { what: "activations".into(), found, expected }.into());
        }
        if header.epoch > self.current {
            self.stage.forget_sequences();
            self.current = header.epoch;
        }
        self.counters.preparing.store(true, Ordering::Release);
        self.counters.begun.fetch_add(1, Ordering::Release);
        let pending = guarded(|| self.stage.begin(&step, &hidden))?;
        self.counters.preparing.store(false, Ordering::Release);
        self.counters.sequences.store(self.stage.sequences() as u64, Ordering::Relaxed);
        self.begun.push_back(Begun { header, step, pending, arrived: arrival.at, taken });
        Ok(())
    }

    fn finish(&mut self, begun: Begun, downstream: &mut dyn Port) -> Result<(), WorkerError> {
        let Begun { header, step, pending, arrived, taken } = begun;
        let Finished { output, started, finished } = guarded(|| self.stage.finish(pending))?;
        let spec = &self.stage.layout().spec;
        let index = spec.index;
        let tokens = if step.is_computed_by(spec) { step.tokens() } else { 0 };
        let sequences = step.spans.len();
        // Also where it has nothing to do with it: whoever looks knows that it was not on the way.
        let restores = step.until.is_some();
        tracing::debug!(stage = index, step = header.step, requests = ?step.requests(), tokens, "done");
        let payload = match output {
            StageOutput::Hidden(hidden) => {
                let next = step.behind(spec);
                // Where the next stage has nothing to compute it needs nothing to compute with.
                let hidden = if next.spans.is_empty() { &[][..] } else { &hidden };
                message::encode_step(&next, hidden, &self.limits)
            }
            StageOutput::Outputs(outputs) => message::encode_outputs(&outputs),
        };
        self.counters.busy_ns.fetch_add((finished - started).as_nanos() as u64, Ordering::Relaxed);
        self.counters.steps.fetch_add(1, Ordering::Release);
        self.counters.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        self.counters.sent_bytes.fetch_add((HEADER_BYTES + payload.len()) as u64, Ordering::Relaxed);
        let send_started = Instant::now();
        // Recorded before it is sent: whoever gets it may look.
        if tokens > 0 || restores {
            let at = |instant| self.recorder.at(instant);
            let span = StageSpan {
                step: header.step,
                group: header.micro_batch,
                tokens: tokens as u32,
                sequences: sequences as u32,
                arrived: at(arrived),
                taken: at(taken),
                started: at(started),
                finished: at(finished),
                send_started: at(send_started),
                sent: at(send_started),
            };
            self.recorder.stage(index, span);
        }
        let is_old = header.epoch < self.epoch.load(Ordering::Relaxed);
        if !is_old && downstream.send(Frame { header, payload: payload.into() }).is_err() {
            return Err(WorkerError::Neighbour);
        }
        self.recorder.handed_on(index, header.step);
        Ok(())
    }
}

/// A driver's panic (wgpu panics on some device errors) is this stage's failure, not the program's.
fn guarded<T>(work: impl FnOnce() -> Result<T, StepError>) -> Result<T, WorkerError> {
    std::panic::catch_unwind(AssertUnwindSafe(work))
        .map_err(|panic| WorkerError::Panic(panic_message(panic.as_ref())))?
        .map_err(WorkerError::from)
}

/// What a caught panic said.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
