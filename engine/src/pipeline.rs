//! A pipeline in one process: a thread a stage, ports between them, and the head's end of it.

mod device;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use pp_transport::local::{LocalPort, pair};
use pp_transport::{Frame, FrameHeader, Port, PortError};
use thiserror::Error;

use crate::backend::DeviceError;
use crate::checkpoint::Checkpoint;
use crate::layout::{LayoutError, StageLayout, StageOptions, StageSpec};
use crate::message::{self, MessageError, MessageLimits, Outputs, Step};
use crate::stage::{Stage, StepError, message_limits};
use crate::weights::{LoadError, LoadProgress};
use crate::worker::{self, Counters, WorkerError, panic_message};
pub use device::Device;

/// Frames that a link holds before its sender waits.
const LINK_FRAMES: usize = 2;
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
#[derive(Clone, Debug)]
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
    pub widened: Vec<(&'static str, &'static str, usize)>,
    /// Seconds from start to ready.
    pub load_seconds: f64,
}

enum Event {
    Progress(usize, LoadProgress),
    Ready(usize, Box<StageReport>),
    LoadFailed(usize, LoadError),
    Failed(usize, WorkerError),
}

/// A running pipeline, as the head sees it.
pub struct Pipeline {
    stages: Vec<StageName>,
    reports: Vec<StageReport>,
    counters: Vec<Arc<Counters>>,
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
        assert_eq!(specs.len(), devices.len(), "a device for every stage");
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
        let in_flight_max = LINK_FRAMES * specs.len() + 1;
        let (to_first, mut upstream) = pair(LINK_FRAMES);
        let (to_head, from_tail) = pair(in_flight_max + 1);
        let mut to_head = Some(to_head);
        let (tell, events) = bounded(EVENTS_PER_STAGE * specs.len());
        let stop = Arc::new(AtomicBool::new(false));
        let mut pipeline = Pipeline {
            stages,
            reports: Vec::new(),
            counters: Vec::new(),
            to_first: Some(to_first),
            from_tail,
            events,
            threads: Vec::new(),
            stop,
            limits,
            epoch: Arc::new(AtomicU64::new(1)),
            next_step: 0,
            in_flight: VecDeque::new(),
            in_flight_max,
        };
        let last = layouts.len() - 1;
        for (index, (layout, device)) in layouts.into_iter().zip(devices).enumerate() {
            let (downstream, next_upstream) = if index == last {
                (to_head.take().expect("one tail"), None)
            } else {
                let (downstream, next) = pair(LINK_FRAMES);
                (downstream, Some(next))
            };
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
                epoch: pipeline.epoch.clone(),
            };
            let handle = std::thread::Builder::new().name(format!("stage-{index}")).spawn(move || thread.run(layout));
            match handle {
                Ok(handle) => pipeline.threads.push(handle),
                Err(error) => {
                    return Err(PipelineError::Thread { stage: pipeline.stages[index].clone(), error });
                }
            }
            match next_upstream {
                Some(next) => upstream = next,
                None => break,
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

    /// Micro-batches that may be sent before an answer must be taken.
    pub fn room(&self) -> usize {
        self.in_flight_max - self.in_flight.len()
    }

    /// Micro-batches sent and not answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Sends a micro-batch down the pipe.
    ///
    /// # Errors
    /// [`PipelineError`] when a stage is gone.
    ///
    /// # Panics
    /// When there is no [`Pipeline::room`].
    pub fn send(&mut self, step: &Step) -> Result<(), PipelineError> {
        assert!(self.room() > 0, "more micro-batches than the pipe holds");
        let header = FrameHeader { epoch: self.epoch(), step: self.next_step, micro_batch: 0 };
        let frame = Frame { header, payload: message::encode(step, &[]) };
        let port = self.to_first.as_mut().expect("open until dropped");
        if port.send(frame).is_err() {
            return Err(self.why_closed());
        }
        self.in_flight.push_back((self.next_step, step.outputs.len().max(step.fetch_rows.len())));
        self.next_step += 1;
        Ok(())
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
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match self.from_tail.receive(LOOK) {
                Ok(frame) if frame.header.epoch != self.epoch() => {}
                Ok(frame) => {
                    let (step, wanted) = self.in_flight.pop_front().unzip();
                    if step != Some(frame.header.step) {
                        return Err(PipelineError::Order { expected: step, found: frame.header.step });
                    }
                    let outputs = message::decode_outputs(&frame.payload, &self.limits)?;
                    let (found, expected) = (outputs.outputs.len(), wanted.unwrap_or(0));
                    if found != expected {
                        return Err(MessageError::Count { what: "outputs", found, expected }.into());
                    }
                    return Ok(outputs);
                }
                Err(PortError::Timeout { .. }) => {
                    if let Ok(Event::Failed(stage, error)) = self.events.try_recv() {
                        return Err(self.failure(stage, error));
                    }
                    if cancel.load(Ordering::Relaxed) {
                        return Err(PipelineError::Cancelled);
                    }
                    if Instant::now() > deadline {
                        return Err(PipelineError::Silent { seconds: ANSWER_TIMEOUT.as_secs() });
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
