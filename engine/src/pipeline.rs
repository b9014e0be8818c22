//! A pipeline in one process: a thread a stage, ports between them, and the head's end of it.

mod device;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use pp_transport::local::{LocalPort, pair};
use pp_transport::relay::{Delay, slow_pair};
use pp_transport::{Arrival, Frame, FrameHeader, Port, PortError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::backend::DeviceError;
use crate::checkpoint::Checkpoint;
use crate::layout::{LayoutError, StageLayout, StageOptions, StageSpec};
use crate::message::{self, MessageError, MessageLimits, Outputs, Step};
use crate::stage::{Stage, StepError, message_limits};
use crate::trace::Recorder;
use crate::weights::{LoadError, LoadProgress};
use crate::worker::{self, Counters, WorkerError, panic_message};
pub use device::Device;

/// Micro-batches for each stage that may be in flight: one that it works on and one that waits for it.
const IN_FLIGHT_PER_STAGE: usize = 2;
/// What a stage may say before it waits for the head to listen: its progress while it loads, and how it ended.
const EVENTS_PER_STAGE: usize = 512;
/// A pipeline that is silent for so long with work in it is taken for dead.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(300);
/// How often a waiting head looks for failures and cancellation.
const LOOK: Duration = Duration::from_millis(20);

/// Where a failed stage was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageName {
    /// Place in the pipeline.
    pub index: usize,
    /// First layer and the one after the last.
    pub layers: (usize, usize),
    /// Device.
    pub device: String,
}

impl std::fmt::Display for StageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "stage {} (layers {}-{}, {})",
            self.index,
            self.layers.0,
            self.layers.1.saturating_sub(1),
            self.device
        )
    }
}

/// Why a pipeline does not run.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum PipelineError {
    #[error("{stage}: {error}")]
    Layout { stage: StageName, error: Box<LayoutError> },
    #[error("{stage} could not be loaded: {error}")]
    Load { stage: StageName, error: DeviceError },
    #[error("{stage} failed: {error}")]
    Stage { stage: StageName, error: WorkerError },
    #[error("the tail's answer was refused: {0}")]
    Message(#[from] MessageError),
    #[error("{stage}: the system starts no thread: {error}")]
    Thread { stage: StageName, error: std::io::Error },
    #[error("the tail answered step {found} where {expected:?} was due")]
    Order { expected: Option<u64>, found: u64 },
    #[error("no answer from the pipeline within {seconds} s")]
    Silent { seconds: u64 },
    #[error("cancelled")]
    Cancelled,
}

impl PipelineError {
    /// The user wanted it to end.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, PipelineError::Cancelled)
    }

    /// The device had no room.
    pub fn is_out_of_memory(&self) -> bool {
        let error = match self {
            PipelineError::Load { error, .. } => error,
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
    /// Device name.
    pub device: String,
    /// What `--device` calls it.
    pub device_id: String,
    /// Bytes read from the checkpoint.
    pub read_bytes: u64,
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
}

enum Event {
    Progress(usize, LoadProgress),
    Ready(usize, Box<StageReport>),
    LoadFailed(usize, LoadError),
    Failed(usize, WorkerError),
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
}

impl PipelineOptions {
    fn link(&self, hop: usize, frames: usize) -> std::io::Result<(LocalPort, LocalPort)> {
        match self.slow_hops.iter().find(|(slow, _)| *slow == hop) {
            Some((_, delay)) => slow_pair(frames, *delay),
            None => Ok(pair(frames)),
        }
    }
}

/// A running pipeline, as the head sees it.
pub struct Pipeline {
    stages: Vec<StageName>,
    reports: Vec<StageReport>,
    counters: Vec<Arc<Counters>>,
    recorder: Arc<Recorder>,
    to_first: Option<LocalPort>,
    from_tail: LocalPort,
    events: Receiver<Event>,
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
    limits: MessageLimits,
    /// Raised by the head alone; the stages drop what is older.
    epoch: Arc<AtomicU64>,
    next_step: u64,
    /// Steps that were sent and not answered, with the outputs that each asked for.
    in_flight: VecDeque<(u64, usize)>,
    /// When the tail was last heard, or work given to an empty pipe.
    heard: Instant,
    in_flight_max: usize,
}

/// A stage that is still loading: how far it is.
pub type OnProgress<'a> = &'a mut dyn FnMut(usize, LoadProgress);

impl Pipeline {
    /// Lays out, loads and starts a stage on each of `devices`, all at once.
    ///
    /// # Errors
    /// [`PipelineError`], also when `cancel` is set while loading.
    pub fn open(
        checkpoint: &Arc<Checkpoint>,
        specs: &[StageSpec],
        options: StageOptions,
        devices: &[Device],
        progress: OnProgress<'_>,
        cancel: &AtomicBool,
    ) -> Result<Pipeline, PipelineError> {
        Pipeline::open_with(checkpoint, specs, options, &PipelineOptions::default(), devices, progress, cancel)
    }

    /// As [`Pipeline::open`], with other links.
    ///
    /// # Errors
    /// As [`Pipeline::open`].
    ///
    /// # Panics
    /// When links are to hold no frame.
    pub fn open_with(
        checkpoint: &Arc<Checkpoint>,
        specs: &[StageSpec],
        options: StageOptions,
        between: &PipelineOptions,
        devices: &[Device],
        progress: OnProgress<'_>,
        cancel: &AtomicBool,
    ) -> Result<Pipeline, PipelineError> {
        assert_eq!(specs.len(), devices.len(), "a device for every stage");
        if let Err(error) = StageSpec::check_cover(specs, checkpoint.config.layers) {
            let stage = StageName { index: 0, layers: (0, checkpoint.config.layers), device: devices[0].name() };
            return Err(PipelineError::Layout { stage, error: Box::new(error) });
        }
        let mut stages = Vec::new();
        let mut layouts = Vec::new();
        for (spec, device) in specs.iter().zip(devices) {
            let stage =
                StageName { index: spec.index, layers: (spec.layers.start, spec.layers.end), device: device.name() };
            let layout = StageLayout::new(checkpoint, spec.clone(), options, device.profile(), device.limits());
            layouts
                .push(layout.map_err(|error| PipelineError::Layout { stage: stage.clone(), error: Box::new(error) })?);
            stages.push(stage);
        }
        let limits = message_limits(layouts.last().expect("a pipeline has stages"));
        // The tail answers every frame; its link holds all that may be in flight, and one answer that was on its way
        // when the head gave up what was in flight before: nobody waits for the head.
        let in_flight_max = IN_FLIGHT_PER_STAGE * specs.len() + 1;
        let link_frames = between.link_frames.unwrap_or(in_flight_max);
        let (mut senders, mut receivers) = (VecDeque::new(), VecDeque::new());
        for hop in 0..=specs.len() {
            let (stage, frames) = match stages.get(hop) {
                Some(stage) => (stage, link_frames),
                None => (&stages[hop - 1], in_flight_max + 1),
            };
            let link = between.link(hop, frames);
            let (from, to) = link.map_err(|error| PipelineError::Thread { stage: stage.clone(), error })?;
            senders.push_back(from);
            receivers.push_back(to);
        }
        let from_tail = receivers.pop_back().expect("a hop leads to the head");
        let (tell, events) = bounded(EVENTS_PER_STAGE * specs.len());
        let stop = Arc::new(AtomicBool::new(false));
        let recorder = Recorder::new(stages.iter().map(|stage| (stage.device.clone(), stage.layers)));
        let mut pipeline = Pipeline {
            stages,
            reports: Vec::new(),
            counters: Vec::new(),
            recorder,
            to_first: senders.pop_front(),
            from_tail,
            events,
            threads: Vec::new(),
            stop,
            limits,
            epoch: Arc::new(AtomicU64::new(1)),
            next_step: 0,
            in_flight: VecDeque::new(),
            heard: Instant::now(),
            in_flight_max,
        };
        let ports = receivers.into_iter().zip(senders);
        for (index, ((layout, device), (upstream, downstream))) in
            layouts.into_iter().zip(devices).zip(ports).enumerate()
        {
            let counters = Arc::<Counters>::default();
            pipeline.counters.push(counters.clone());
            let thread = StageThread {
                index,
                checkpoint: checkpoint.clone(),
                device: device.clone(),
                upstream,
                downstream,
                tell: tell.clone(),
                stop: pipeline.stop.clone(),
                counters,
                recorder: pipeline.recorder.clone(),
                epoch: pipeline.epoch.clone(),
            };
            let handle = std::thread::Builder::new().name(format!("stage-{index}")).spawn(move || thread.run(layout));
            match handle {
                Ok(handle) => pipeline.threads.push(handle),
                Err(error) => {
                    return Err(PipelineError::Thread { stage: pipeline.stages[index].clone(), error });
                }
            }
        }
        pipeline.wait_until_loaded(progress, cancel)?;
        Ok(pipeline)
    }

    fn wait_until_loaded(&mut self, progress: OnProgress<'_>, cancel: &AtomicBool) -> Result<(), PipelineError> {
        let mut reports: Vec<Option<StageReport>> = vec![None; self.stages.len()];
        while reports.iter().any(Option::is_none) {
            if cancel.load(Ordering::Relaxed) {
                return Err(PipelineError::Cancelled);
            }
            match self.events.recv_timeout(LOOK) {
                Ok(Event::Progress(stage, at)) => progress(stage, at),
                Ok(Event::Ready(stage, report)) => reports[stage] = Some(*report),
                Ok(Event::LoadFailed(_, LoadError::Cancelled)) => return Err(PipelineError::Cancelled),
                Ok(Event::LoadFailed(stage, LoadError::Device(error))) => {
                    return Err(PipelineError::Load { stage: self.stages[stage].clone(), error });
                }
                Ok(Event::Failed(stage, error)) => return Err(self.failure(stage, error)),
                Err(_) => {}
            }
        }
        self.reports = reports.into_iter().flatten().collect();
        Ok(())
    }

    fn failure(&self, stage: usize, error: WorkerError) -> PipelineError {
        // A stage that lost its neighbour is a consequence; the cause may be one event behind.
        let mut first = (stage, error);
        while matches!(first.1, WorkerError::Neighbour) {
            match self.events.recv_timeout(LOOK) {
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

    /// Micro-batches that may be sent before an answer must be taken.
    pub fn room(&self) -> usize {
        self.in_flight_max - self.in_flight.len()
    }

    /// Micro-batches sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sends a micro-batch of a decode group down the pipe; returns the number of the step.
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
        let frame = Frame { header, payload: message::encode_step(step, &[], &self.limits) };
        let port = self.to_first.as_mut().expect("open until dropped");
        if port.send(frame).is_err() {
            return Err(self.why_closed());
        }
        if self.in_flight.is_empty() {
            self.heard = Instant::now();
        }
        self.in_flight.push_back((number, step.outputs.len()));
        self.next_step += 1;
        Ok(number)
    }

    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Gives up all that is in flight, and every sequence: the stages finish the micro-batch they are at, drop what
    /// else was sent until now, and forget their page tables. Does not wait for them.
    pub fn abandon(&mut self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
        self.in_flight.clear();
        // Answers that nobody wants make room for those to come.
        while self.from_tail.receive(Duration::ZERO).is_ok() {}
    }

    /// The answer to the oldest micro-batch in flight.
    ///
    /// # Errors
    /// [`PipelineError`] when a stage failed, and when `cancel` is set.
    pub fn receive(&mut self, cancel: &AtomicBool) -> Result<Outputs, PipelineError> {
        loop {
            if let Some((outputs, _)) = self.receive_within(ANSWER_TIMEOUT, cancel)? {
                return Ok(outputs);
            }
        }
    }

    /// As [`Pipeline::receive`], with the instant at which the answer lay ready; nothing when none came within
    /// `patience`.
    ///
    /// # Errors
    /// As [`Pipeline::receive`].
    pub fn receive_within(
        &mut self,
        patience: Duration,
        cancel: &AtomicBool,
    ) -> Result<Option<(Outputs, Instant)>, PipelineError> {
        let until = Instant::now() + patience;
        loop {
            match self.from_tail.receive(LOOK.min(until.saturating_duration_since(Instant::now()))) {
                Ok(arrival) if arrival.frame.header.epoch != self.epoch() => {}
                Ok(Arrival { frame, at }) => {
                    self.heard = Instant::now();
                    let (step, wanted) = self.in_flight.pop_front().unzip();
                    if step != Some(frame.header.step) {
                        return Err(PipelineError::Order { expected: step, found: frame.header.step });
                    }
                    let outputs = message::decode_outputs(&frame.payload, &self.limits)?;
                    let (found, expected) = (outputs.outputs.len(), wanted.unwrap_or(0));
                    if found != expected {
                        return Err(MessageError::Count { what: "outputs", found, expected }.into());
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
                    if self.heard.elapsed() > ANSWER_TIMEOUT {
                        return Err(PipelineError::Silent { seconds: ANSWER_TIMEOUT.as_secs() });
                    }
                    if Instant::now() >= until {
                        return Ok(None);
                    }
                }
                Err(_) => return Err(self.why_closed()),
            }
        }
    }

    fn why_closed(&self) -> PipelineError {
        loop {
            match self.events.recv_timeout(Duration::from_secs(5)) {
                Ok(Event::Failed(stage, error)) => return self.failure(stage, error),
                Ok(_) => {}
                Err(_) => return PipelineError::Silent { seconds: 5 },
            }
        }
    }
}

impl Drop for Pipeline {
    /// Ends the stages and waits for them, so that devices are closed before the program ends.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.abandon();
        self.to_first = None;
        // Whoever waits to hand something on is let go.
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if let Err(PortError::Closed) = self.from_tail.receive(LOOK) {
                break;
            }
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// All that a stage's thread takes with it.
struct StageThread {
    index: usize,
    checkpoint: Arc<Checkpoint>,
    device: Device,
    upstream: LocalPort,
    downstream: LocalPort,
    tell: Sender<Event>,
    stop: Arc<AtomicBool>,
    counters: Arc<Counters>,
    recorder: Arc<Recorder>,
    epoch: Arc<AtomicU64>,
}

impl StageThread {
    fn run(mut self, layout: StageLayout) {
        let index = self.index;
        let tell = self.tell.clone();
        let work = std::panic::AssertUnwindSafe(|| {
            let mut stage = match self.open(layout) {
                Ok(stage) => stage,
                Err(error) => return self.say(Event::LoadFailed(index, error)),
            };
            let end = worker::run(
                &mut stage,
                &mut self.upstream,
                &mut self.downstream,
                &self.epoch,
                &self.counters,
                &self.recorder,
                &self.stop,
            );
            if let Err(error) = end {
                self.say(Event::Failed(index, error));
            }
        });
        if let Err(panic) = std::panic::catch_unwind(work) {
            let _ = tell.send(Event::Failed(index, WorkerError::Panic(panic_message(panic.as_ref()))));
        }
    }

    /// The head hears it, or is gone.
    fn say(&self, event: Event) {
        let _ = self.tell.send(event);
    }

    fn open(&self, layout: StageLayout) -> Result<Stage, LoadError> {
        let started = Instant::now();
        let spec = layout.spec.clone();
        let report = StageReport {
            spec,
            device: self.device.name(),
            device_id: self.device.id(),
            read_bytes: 0,
            weight_bytes: layout.weight_bytes(),
            kv_bytes: layout.kv_bytes(),
            work_bytes: layout.work_bytes(),
            allocated_bytes: 0,
            widened: layout.widened(),
            load_seconds: 0.0,
        };
        let backend = self.device.open()?;
        let mut told = 0;
        let mut progress = |at: LoadProgress| {
            // A bar needs no more than a few hundred updates.
            if at.read_bytes - told >= (at.total_bytes / 256).max(1) || at.read_bytes == at.total_bytes {
                told = at.read_bytes;
                self.say(Event::Progress(self.index, at));
            }
            !self.stop.load(Ordering::Relaxed)
        };
        let stage = Stage::open(&self.checkpoint, layout, backend, &mut progress)?;
        self.say(Event::Ready(
            self.index,
            Box::new(StageReport {
                read_bytes: stage.read_bytes(),
                allocated_bytes: stage.backend().allocated_bytes(),
                load_seconds: started.elapsed().as_secs_f64(),
                ..report
            }),
        ));
        Ok(stage)
    }
}
