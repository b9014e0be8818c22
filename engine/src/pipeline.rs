//! A pipeline as the head sees it: stages in threads of this process or on workers elsewhere, and the ends of the hops
//! that lead from the head to the first stage and from the last to the head.

mod device;
mod open;
pub mod shelf;
mod supply;
pub(crate) mod thread;
mod uses;

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use pp_transport::local::{LocalPort, pair};
use pp_transport::quic::tuning::SILENCE;
use pp_transport::relay::{Delay, slow_pair};
use pp_transport::{Arrival, Frame, FrameHeader, Port, PortError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::backend::DeviceError;
use crate::checkpoint::supplied::Origins;
use crate::cluster::remote::{Going, Worker};
use crate::digest::Digest;
use crate::edge::EdgeError;
use crate::law::Share;
use crate::layout::{LayoutError, StageSpec};
use crate::manifest::ManifestError;
use crate::message::{self, MessageError, MessageLimits, Outputs, Step};
use crate::stage::StepError;
use crate::trace::{Recorder, Timestamps};
use crate::weights::{LoadError, LoadProgress};
use crate::worker::{Counters, WorkerError};
pub use device::Device;
use shelf::Shelf;
use thread::{Event, Home};

/// Micro-batches for each stage that may be in flight: one that it works on and one that waits for it.
const IN_FLIGHT_PER_STAGE: usize = 2;
/// How long a stage may compute one micro-batch while nothing is known of what it costs, and how long a driver may compile
/// kernels for it.
const PATIENCE: Duration = Duration::from_secs(120);
/// Nobody computes and nothing comes for so many times what a stage may take: something was lost.
const SILENT_TIMES: u32 = 4;
/// How long stages elsewhere may take to tell what they did.
const SETTLE: Duration = Duration::from_secs(1);
/// How long the cause of a failure may be behind its first consequence.
const LOOK: Duration = Duration::from_millis(20);
/// How often a waiting head looks for failures and cancellation, and whoever drives it for what else is asked.
const GLANCE: Duration = Duration::from_millis(2);

/// Where a failed stage was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageName {
    /// Place in the pipeline.
    pub index: usize,
    /// First layer and the one after the last.
    pub layers: (usize, usize),
    /// Device.
    pub device: Arc<str>,
    /// The worker that it is on; none: this process.
    pub worker: Option<Arc<str>>,
}

impl StageName {
    /// The device, with its worker.
    fn place(&self) -> String {
        let worker = self.worker.iter().map(|worker| format!("{worker}: "));
        worker.chain([self.device.to_string()]).collect()
    }
}

impl std::fmt::Display for StageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "stage {}", self.index)?;
        if let Some(worker) = &self.worker {
            write!(f, " on {worker}")?;
        }
        write!(f, " (layers {}-{}, {})", self.layers.0, self.layers.1.saturating_sub(1), self.device)
    }
}

/// Why a pipeline does not run.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum PipelineError {
    #[error("{stage}: {error}")]
    Layout { stage: StageName, error: Box<LayoutError> },
    #[error("{stage} could not be loaded: {error}")]
    Load { stage: StageName, error: LoadError },
    #[error("{stage} failed: {error}")]
    Stage { stage: StageName, error: WorkerError },
    #[error("the tail's answer was refused: {0}")]
    Message(#[from] MessageError),
    #[error("{stage}: the system starts no thread: {error}")]
    Thread { stage: StageName, error: std::io::Error },
    #[error("the tail answered step {found} where {expected:?} was due")]
    Order { expected: Option<u64>, found: u64 },
    #[error("the hop from the tail to the head: {0}")]
    Edge(EdgeError),
    #[error("{stage} is wedged: it has computed one micro-batch for {seconds} s")]
    Wedged { stage: StageName, seconds: u64 },
    #[error("the pipeline is silent: a micro-batch that {stage} should have is not answered within {seconds} s")]
    Silent { stage: StageName, seconds: u64 },
    #[error("{stage} has taken {times:.1} times what it used to for {steps} micro-batches")]
    Straggler { stage: StageName, times: f64, steps: usize },
    #[error("{stage} is to go elsewhere: its worker is being drained")]
    Leaving { stage: StageName },
    #[error("the layers are to be divided as {}", crate::split::join(split))]
    Rebalance { split: Vec<usize> },
    #[error("the system starts no thread: {0}")]
    NoThread(std::io::Error),
    #[error("workers without a copy of the model get no weights: {0}")]
    Manifest(ManifestError),
    #[error("cancelled")]
    Cancelled,
}

impl PipelineError {
    /// The user wanted it to end.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, PipelineError::Cancelled)
    }

    /// Whether nothing has failed: somebody wants it to be another one.
    pub fn is_wanted(&self) -> bool {
        matches!(self, PipelineError::Leaving { .. } | PipelineError::Rebalance { .. })
    }

    /// Whether another pipeline may do better with the same: not where a stage was sent, or found, what makes no sense.
    pub fn may_be_recovered(&self) -> bool {
        let makes_sense = |error: &WorkerError| match error {
            WorkerError::Message(_) => false,
            WorkerError::Step(error) => matches!(error, StepError::Device(_)),
            _ => true,
        };
        match self {
            PipelineError::Stage { error, .. } => makes_sense(error) && !self.is_out_of_memory(),
            PipelineError::Message(_) | PipelineError::Order { .. } | PipelineError::Cancelled => false,
            _ => !self.is_out_of_memory(),
        }
    }

    /// The stage that it is about, where it is about one.
    pub fn stage(&self) -> Option<&StageName> {
        match self {
            PipelineError::Layout { stage, .. }
            | PipelineError::Load { stage, .. }
            | PipelineError::Stage { stage, .. }
            | PipelineError::Thread { stage, .. }
            | PipelineError::Wedged { stage, .. }
            | PipelineError::Straggler { stage, .. }
            | PipelineError::Leaving { stage }
            | PipelineError::Silent { stage, .. } => Some(stage),
            _ => None,
        }
    }

    /// The device had no room.
    pub fn is_out_of_memory(&self) -> bool {
        let error = match self {
            PipelineError::Load { error: LoadError::Device(error), .. } => error,
            PipelineError::Stage { error: WorkerError::Step(StepError::Device(error)), .. } => error,
            _ => return false,
        };
        matches!(error, DeviceError::OutOfMemory { .. } | DeviceError::TooLarge { .. })
    }
}

/// What a stage said when it was ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageReport {
    /// Which layers.
    pub spec: StageSpec,
    /// The worker that it is on; none: this process.
    pub worker: Option<String>,
    /// Device name.
    pub device: String,
    /// What `--device` calls it.
    pub device_id: String,
    /// Bytes read from the checkpoint.
    pub read_bytes: u64,
    /// Where they were.
    pub origins: Origins,
    /// Bytes of weights on the device.
    pub weight_bytes: u64,
    /// Bytes of keys and values.
    pub kv_bytes: u64,
    /// Bytes of buffers between kernels.
    pub work_bytes: u64,
    /// Bytes of all buffers that were made.
    pub allocated_bytes: u64,
    /// Formats that were widened: (file, device, tensors).
    pub widened: Vec<(String, String, usize)>,
    /// Seconds from start to ready.
    pub load_seconds: f64,
    /// Whose clock times the device.
    pub timestamps: Timestamps,
    /// Layers of which it has the keys and values of the pipeline before ([`Shelf`]).
    pub kept: Range<usize>,
    /// What it has then of what it handed on: pages, with a bit for each row ([`PipelineOptions::boundary_log`]).
    pub boundary: Vec<(u32, u32)>,
}

/// What is between stages, where it is not the usual.
#[derive(Clone, Debug, Default)]
pub struct PipelineOptions {
    /// Frames that a link to a stage holds before its sender waits; at least 1. By default as many as may be in flight,
    /// so that a stage waits for room only when the head has sent too much. A frame holds at most
    /// [`MessageLimits::tokens`] rows of activations; as nothing but what is in flight is on the links, they hold
    /// that many such frames together, however many links there are.
    pub link_frames: Option<usize>,
    /// Hops that are made slow. Hop i leads to stage i, the one after the last stage from the tail to the head. A slow
    /// hop holds up to three times as many frames: those to be sent, on the way, and arrived.
    pub slow_hops: Vec<(usize, Delay)>,
    /// The model, where workers have stages.
    pub model: Option<Model>,
    /// Where stages of this process come from that were those of a pipeline before, and where they go when this one ends.
    pub shelf: Option<Arc<Shelf>>,
    /// The pipeline in whose place this one is.
    pub past: Option<Past>,
    /// Bytes of what each stage has handed on that it keeps, to restore the stage behind it from; at most.
    pub boundary_log: u64,
}

/// What a pipeline leaves to the one in its place.
#[derive(Clone)]
pub struct Past {
    recorder: Arc<Recorder>,
    epoch: u64,
    next_step: u64,
    /// Its stages, until they have ended.
    ending: Arc<Mutex<Option<Running>>>,
}

impl std::fmt::Debug for Past {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Past").field("epoch", &self.epoch).field("next_step", &self.next_step).finish_non_exhaustive()
    }
}

impl Past {
    /// Waits until its stages have ended, and are on the shelf where they are sound.
    pub fn settle(&self) {
        if let Some(mut running) = self.ending.lock().unwrap_or_else(PoisonError::into_inner).take() {
            running.end(true);
        }
    }
}

impl PipelineOptions {
    fn link(&self, hop: usize, frames: usize) -> std::io::Result<(LocalPort, LocalPort)> {
        match self.slow_hops.iter().find(|(slow, _)| *slow == hop) {
            Some((_, delay)) => slow_pair(frames, *delay),
            None => Ok(pair(frames)),
        }
    }
}

/// The model that a pipeline runs, for workers to find where they are, or to get what they need of it.
#[derive(Clone, Debug)]
pub struct Model {
    /// Of its content.
    pub digest: Digest,
    /// Bytes of its files.
    pub bytes: u64,
    /// For people.
    pub name: String,
    /// The folder in which manifests are remembered, if they may be.
    pub manifests: Option<PathBuf>,
}

/// A running pipeline, as the head sees it.
pub struct Pipeline {
    stages: Vec<StageName>,
    reports: Vec<StageReport>,
    counters: Vec<Arc<Counters>>,
    recorder: Arc<Recorder>,
    shares: Vec<Share>,
    tile: usize,
    // Dropped before the stages are waited for: whoever waits to hand something on is let go.
    to_first: Box<dyn Port>,
    from_tail: Box<dyn Port>,
    events: Receiver<Event>,
    running: Running,
    is_closed: bool,
    limits: MessageLimits,
    /// Raised by the head alone; the stages drop what is older.
    epoch: Arc<AtomicU64>,
    next_step: u64,
    /// Steps that were sent and not answered, with the outputs that each asked for.
    in_flight: VecDeque<(u64, usize)>,
    /// When the tail was last heard, or work given to an empty pipe.
    heard: Instant,
    in_flight_max: usize,
    /// What was seen of each stage.
    seen: Vec<Seen>,
    /// How long a stage may compute one micro-batch, …
    patience: Duration,
    /// … and one that was given up, while there may be such.
    given_up: Duration,
}

/// Since when a stage computes what it is at.
#[derive(Clone, Copy, Debug)]
struct Seen {
    done: u64,
    is_computing: bool,
    since: Instant,
}

/// A stage that is still loading: how far it is.
pub type OnProgress<'a> = &'a mut dyn FnMut(usize, LoadProgress);

impl Pipeline {
    fn failure(&self, stage: usize, error: WorkerError) -> PipelineError {
        // A stage that lost its neighbour is a consequence; the cause may be one event behind.
        let mut first = (stage, error);
        // Of a host that is gone its neighbours hear sooner than the head, or later.
        let until = Instant::now() + if self.running.workers.is_empty() { LOOK } else { 2 * SILENCE };
        while matches!(first.1, WorkerError::Neighbour) {
            match self.events.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Event::Failed(stage, error)) => first = (stage, error),
                Ok(_) => {}
                Err(_) => break,
            }
        }
        PipelineError::Stage { stage: self.stages[first.0].clone(), error: first.1 }
    }

    /// Bounds of what may be sent.
    pub fn limits(&self) -> &MessageLimits {
        &self.limits
    }

    /// Where the stages are.
    pub fn stages(&self) -> &[StageName] {
        &self.stages
    }

    /// What each stage said when it was ready.
    pub fn reports(&self) -> &[StageReport] {
        &self.reports
    }

    /// What each stage has done so far.
    pub fn counters(&self) -> &[Arc<Counters>] {
        &self.counters
    }

    /// Where the stages write what they did when; its clock began when the pipeline was opened.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Tokens that the stages' kernels for prompts compute at once; the most of any stage.
    pub fn tile(&self) -> usize {
        self.tile
    }

    /// What stages take from each other.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Micro-batches that may be sent before an answer must be taken.
    pub fn room(&self) -> usize {
        self.in_flight_max - self.in_flight.len()
    }

    /// Whether [`Pipeline::send`] would not wait: on the way to the first stage there may lie what was given up, too.
    pub fn has_room(&self) -> bool {
        self.room() > 0 && self.to_first.has_room()
    }

    /// Micro-batches sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sends a micro-batch of a decode group down the pipe; returns the number of the step. Waits while the link to the
    /// first stage is full ([`Pipeline::has_room`]).
    ///
    /// # Errors
    /// [`PipelineError`] when a stage is gone.
    ///
    /// # Panics
    /// When there is no [`Pipeline::room`].
    pub fn send(&mut self, step: &Step, group: u32) -> Result<u64, PipelineError> {
        assert!(self.room() > 0, "more micro-batches than the pipe holds");
        let number = self.next_step;
        let header = FrameHeader { epoch: self.epoch(), step: number, micro_batch: group };
        let frame = Frame { header, payload: message::encode_step(step, &[], &self.limits).into() };
        if self.to_first.send(frame).is_err() {
            return Err(self.why_closed());
        }
        if self.in_flight.is_empty() {
            self.heard = Instant::now();
            // Nobody has looked while the pipe was empty.
            self.look();
        }
        // What was expected of other micro-batches says nothing of this one.
        self.patience = PATIENCE;
        self.in_flight.push_back((number, step.outputs.len()));
        self.next_step += 1;
        Ok(number)
    }

    /// When the tail was last heard, or an empty pipe was given work.
    pub(crate) fn heard(&self) -> Instant {
        self.heard
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Gives up all that is in flight, and every sequence: the stages finish the micro-batch they are at, drop what
    /// else was sent until now, and forget their page tables. Does not wait for them.
    pub fn abandon(&mut self) {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        self.running.workers.iter().for_each(|worker| worker.epoch(epoch));
        if !self.in_flight.is_empty() {
            self.in_flight.clear();
            self.given_up = self.given_up.max(self.patience);
        }
        // Answers that nobody wants make room for those to come.
        while self.from_tail.receive(Duration::ZERO).is_ok() {}
    }

    /// Ends it for another one in its place, and says what that one needs to know: sound stages go to the shelf, here and at
    /// workers. What was sent is given up. Does not wait for the stages; whoever opens the other pipeline does.
    pub fn close(&mut self) -> Past {
        self.is_closed = true;
        self.in_flight.clear();
        // Whoever waits to hand something on is let go.
        (self.to_first, self.from_tail) = (Box::new(pair(1).0), Box::new(pair(1).0));
        self.running.stop.store(true, Ordering::Relaxed);
        let running = std::mem::take(&mut self.running);
        let ending = Arc::new(Mutex::new(Some(running)));
        Past { recorder: self.recorder.clone(), epoch: self.epoch(), next_step: self.next_step, ending }
    }

    /// The answer to the oldest micro-batch in flight, with the instant at which it lay ready; nothing when none came within
    /// `patience`, or when something can be sent that could not before.
    ///
    /// # Errors
    /// [`PipelineError`] when a stage failed, and when `cancel` is set.
    pub fn receive_within(
        &mut self,
        patience: Duration,
        cancel: &AtomicBool,
    ) -> Result<Option<(Outputs, Instant)>, PipelineError> {
        let until = Instant::now() + patience;
        let was_full = self.room() > 0 && !self.has_room();
        loop {
            match self.from_tail.receive(GLANCE.min(until.saturating_duration_since(Instant::now()))) {
                Ok(arrival) if arrival.frame.header.epoch != self.epoch() => {}
                Ok(Arrival { frame, at }) => {
                    self.heard = Instant::now();
                    self.look();
                    // What was sent before has crossed every stage, or was dropped.
                    self.given_up = Duration::ZERO;
                    let (step, wanted) = self.in_flight.pop_front().unzip();
                    if step != Some(frame.header.step) {
                        return Err(PipelineError::Order { expected: step, found: frame.header.step });
                    }
                    let outputs = message::decode_outputs(&frame.payload, &self.limits)?;
                    let (found, expected) = (outputs.outputs.len(), wanted.unwrap_or(0));
                    if found != expected {
                        return Err(MessageError::Count { what: "outputs".into(), found, expected }.into());
                    }
                    return Ok(Some((outputs, at)));
                }
                Err(PortError::Timeout { .. }) => {
                    if let Ok(Event::Failed(stage, error)) = self.events.try_recv() {
                        return Err(self.failure(stage, error));
                    }
                    if cancel.load(Ordering::Relaxed) {
                        return Err(PipelineError::Cancelled);
                    }
                    self.check_progress()?;
                    if Instant::now() >= until || was_full && self.has_room() {
                        return Ok(None);
                    }
                }
                Err(_) => return Err(self.why_closed()),
            }
        }
    }

    /// Waits a moment until stages elsewhere have told of all that the head has answers to.
    pub(crate) fn settle(&self) {
        if self.running.workers.is_empty() {
            return;
        }
        let until = Instant::now() + SETTLE;
        while !self.recorder.is_settled() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
    }

    /// How long a stage may compute one micro-batch before it is taken for wedged, until the next one is sent.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Sees which stages have gone on.
    fn look(&mut self) {
        let now = Instant::now();
        for (counters, seen) in self.counters.iter().zip(&mut self.seen) {
            let (begun, done) = counters.progress();
            if !seen.is_computing || done != seen.done {
                seen.since = now;
            }
            (seen.done, seen.is_computing) = (done, begun > done);
        }
    }

    /// Whether what is in flight moves, and what was given up.
    ///
    /// # Errors
    /// [`PipelineError::Wedged`] when a stage computes one micro-batch for too long, [`PipelineError::Silent`] when
    /// none computes and nothing comes.
    fn check_progress(&mut self) -> Result<(), PipelineError> {
        self.look();
        let patience = self.patience.max(self.given_up);
        for ((counters, seen), stage) in self.counters.iter().zip(&self.seen).zip(&self.stages) {
            let is_preparing = counters.preparing.load(Ordering::Relaxed);
            let (busy, patience) = (seen.since.elapsed(), if is_preparing { patience.max(PATIENCE) } else { patience });
            if seen.is_computing && busy > patience {
                return Err(PipelineError::Wedged { stage: stage.clone(), seconds: busy.as_secs() });
            }
        }
        let (is_computing, waited) = (self.seen.iter().any(|seen| seen.is_computing), self.heard.elapsed());
        if self.in_flight.is_empty() || is_computing || waited <= SILENT_TIMES * patience {
            return Ok(());
        }
        Err(PipelineError::Silent { stage: self.holding().clone(), seconds: waited.as_secs() })
    }

    /// The stage that has, or should have, the oldest micro-batch in flight: the last one that computes; where none does,
    /// it was lost on the hop to the first stage that has had fewer than the one before.
    pub fn holding(&self) -> &StageName {
        let progress = || self.counters.iter().map(|counters| counters.progress()).enumerate();
        let computing = progress().rfind(|(_, (begun, done))| begun > done).map(|(index, _)| index);
        let behind = || progress().min_by_key(|(_, (begun, _))| *begun).map_or(0, |(index, _)| index);
        &self.stages[computing.unwrap_or_else(behind)]
    }

    /// Why it is to be another one, though nothing has failed: as [`Worker::go`] was told; once.
    pub fn going(&self) -> Option<PipelineError> {
        self.running.workers.iter().find_map(|worker| match worker.going()? {
            Going::Split(split) => Some(PipelineError::Rebalance { split }),
            Going::Away => {
                let stage = self.stages.iter().find(|stage| stage.worker.as_deref() == Some(worker.name()))?;
                Some(PipelineError::Leaving { stage: stage.clone() })
            }
        })
    }

    /// Looks whether a stage has failed while nothing was asked of it.
    ///
    /// # Errors
    /// [`PipelineError::Stage`].
    pub fn check(&self) -> Result<(), PipelineError> {
        match self.events.try_recv() {
            Ok(Event::Failed(stage, error)) => Err(self.failure(stage, error)),
            _ => Ok(()),
        }
    }

    fn why_closed(&self) -> PipelineError {
        let seconds = 5;
        loop {
            match self.events.recv_timeout(Duration::from_secs(seconds)) {
                Ok(Event::Failed(stage, error)) => return self.failure(stage, error),
                Ok(_) => {}
                Err(_) => return PipelineError::Silent { stage: self.stages[0].clone(), seconds },
            }
        }
    }
}

impl Drop for Pipeline {
    /// Ends the stages; they are waited for, so that devices are closed before the program ends.
    fn drop(&mut self) {
        if !self.is_closed {
            self.running.stop.store(true, Ordering::Relaxed);
            self.abandon();
        }
    }
}

/// The stages' threads, and workers that have stages. Dropping it ends the stages and waits for those of this process.
#[derive(Default)]
struct Running {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// Give weights to workers, until those have them.
    sources: Vec<JoinHandle<()>>,
    workers: Vec<Arc<Worker>>,
    home: Home,
    /// Whether stages of workers stay there for another attempt to open the pipeline.
    keeps: bool,
}

impl Running {
    /// Ends the stages; those of workers, where they are to be `kept`, stay there for the next pipeline.
    fn end(&mut self, kept: bool) {
        self.stop.store(true, Ordering::Relaxed);
        let workers = std::mem::take(&mut self.workers);
        if kept {
            std::thread::scope(|scope| workers.iter().for_each(|worker| drop(scope.spawn(|| worker.pause()))));
        } else {
            workers.iter().for_each(|worker| worker.release());
        }
        thread::join(&mut self.threads);
        self.home.closed.store(true, Ordering::Release);
        thread::join(&mut self.sources);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end(self.keeps);
    }
}
