//! The thread of a stage in this process: opens it, proves its hops, and lets the worker run. Whoever started it hears
//! how it goes: the pipeline of the same process, or a session for a head elsewhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use pp_transport::Port;

use super::shelf::{Kept, Key, Shelf};
use super::{Device, StageReport};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::supplied::Origins;
use crate::edge::{self, EdgeError};
use crate::layout::StageLayout;
use crate::manifest::{Manifest, ManifestError};
use crate::stage::Stage;
use crate::trace::{Recorder, Timestamps};
use crate::weights::{LoadError, LoadProgress};
use crate::worker::{self, Counters, WorkerError, panic_message};

/// What a stage may say before it waits for somebody to listen: its progress while it loads, and how it ended.
pub const EVENTS_PER_STAGE: usize = 512;
/// How long a hop may take to carry the block that proves it.
pub const EDGE_PATIENCE: Duration = Duration::from_secs(30);
/// How long a stage may take to end: the micro-batch that is on its device is finished first.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// How often a stage that waits for its hops looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);

/// What a stage says.
pub enum Event {
    /// It has loaded so much.
    Progress(usize, LoadProgress),
    /// It is loaded, and waits for its hops.
    Ready(usize, Box<StageReport>),
    /// Its hops are proved; it takes micro-batches.
    Linked(usize),
    /// It could not be loaded.
    LoadFailed(usize, LoadError),
    /// It stopped.
    Failed(usize, WorkerError),
    /// What a worker says of the model's weights, by its name.
    Weights(String, WeightsEvent),
    /// The head has read so much of the model to know its tensors: bytes done, and in all.
    Hashing(u64, u64),
    /// The head knows its tensors, or why not.
    Manifest(Result<Arc<Manifest>, ManifestError>),
}

/// A worker's answer about a model's weights.
pub enum WeightsEvent {
    /// Whether it has the whole model.
    HasModel(bool),
    /// Which tensors of the manifest it has: a bit each.
    Holds(Vec<u8>),
}

/// The ends of the hops that a stage stands between.
pub struct Ports {
    /// Micro-batches come from here.
    pub upstream: Box<dyn Port>,
    /// Results go here.
    pub downstream: Box<dyn Port>,
}

/// Where stages go when their pipeline ends.
#[derive(Clone, Default)]
pub struct Home {
    /// The shelf, where they are wanted again.
    pub shelf: Option<Arc<Shelf>>,
    /// Bytes of what it hands on that a stage keeps.
    pub boundary_log: u64,
    /// Set when nobody waits for those any more that have not ended.
    pub closed: Arc<AtomicBool>,
}

/// Waits for threads of stages that were told to stop; one that a device keeps is left to itself. Says whether all ended.
pub fn join(threads: &mut Vec<JoinHandle<()>>) -> bool {
    let until = Instant::now() + END_PATIENCE;
    while threads.iter().any(|thread| !thread.is_finished()) && Instant::now() < until {
        std::thread::sleep(LOOK / 10);
    }
    let before = threads.len();
    let ended = threads.extract_if(.., |thread| thread.is_finished()).filter_map(|thread| thread.join().ok()).count();
    threads.clear();
    ended == before
}

/// All that a stage's thread takes with it.
pub struct StageThread {
    /// The model.
    pub checkpoint: Arc<Checkpoint>,
    /// What it runs on, a device of this process.
    pub device: Device,
    /// Where its hops come from once they are there.
    pub ports: Receiver<Ports>,
    /// Who listens.
    pub tell: Sender<Event>,
    /// Ends it.
    pub stop: Arc<AtomicBool>,
    /// What it has done.
    pub counters: Arc<Counters>,
    /// Where it writes what it did when.
    pub recorder: Arc<Recorder>,
    /// Frames of an older epoch are dropped.
    pub epoch: Arc<AtomicU64>,
    /// A stage of a pipeline before, which it goes on with.
    pub kept: Option<Kept>,
    /// Where the stage goes.
    pub home: Home,
    /// What stands for it there.
    pub key: Key,
}

impl StageThread {
    /// Starts the thread of the stage that `layout` describes.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(self, layout: StageLayout) -> std::io::Result<JoinHandle<()>> {
        let name = format!("stage-{}", layout.spec.index);
        std::thread::Builder::new().name(name).spawn(move || self.run(layout))
    }

    fn run(mut self, layout: StageLayout) {
        let index = layout.spec.index;
        let tell = self.tell.clone();
        let work = std::panic::AssertUnwindSafe(|| {
            let loaded = match self.kept.take() {
                Some(kept) if kept.stage.layout().spec == layout.spec => Ok(kept),
                Some(kept) => self.recut(kept, layout),
                None => self.open(layout),
            };
            let mut kept = match loaded {
                Ok(kept) => kept,
                Err(error) => return self.say(Event::LoadFailed(index, error)),
            };
            if kept.report.kept.is_empty() {
                // Rows are known by their pages: those of another pipeline mean nothing here.
                kept.stage.keep_boundary(0);
            }
            kept.stage.keep_boundary(self.home.boundary_log);
            kept.report.boundary = kept.stage.kept_boundary();
            self.say(Event::Ready(index, Box::new(kept.report.clone())));
            let ended = self.serve(&mut kept.stage);
            if ended.as_ref().err().is_none_or(WorkerError::is_elsewhere) {
                self.put_away(kept);
            }
            if let Err(error) = ended {
                self.say(Event::Failed(index, error));
            }
        });
        if let Err(panic) = std::panic::catch_unwind(work) {
            let _ = tell.send(Event::Failed(index, WorkerError::Panic(panic_message(panic.as_ref()))));
        }
    }

    /// The stage may go on in another pipeline.
    fn put_away(&self, mut kept: Kept) {
        if self.counters.progress().0 > 0 {
            kept.pages_of = Some(self.epoch.load(Ordering::Relaxed));
            kept.pages = kept.stage.layout().spec.layers.clone();
        }
        if let Some(shelf) = self.home.shelf.as_ref().filter(|_| !self.home.closed.load(Ordering::Acquire)) {
            shelf.put(self.key.clone(), kept);
        }
    }

    /// Somebody hears it, or nobody is interested any more.
    fn say(&self, event: Event) {
        let _ = self.tell.send(event);
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// A stage that knows nothing.
    fn open(&self, layout: StageLayout) -> Result<Kept, LoadError> {
        let started = Instant::now();
        let report = self.report(&layout);
        // Beside the loading, which mostly waits for files.
        let device = self.device.clone();
        let trusted = std::thread::Builder::new().name("self-test".to_owned()).spawn(move || device.trusted());
        let backend = self.device.open()?;
        let stage = Stage::open(&self.checkpoint, layout, backend, &mut self.progress(report.spec.index))?;
        match trusted.map(JoinHandle::join) {
            Ok(Ok(found)) => found?,
            Ok(Err(panic)) => return Err(LoadError::Untrusted { message: panic_message(panic.as_ref()) }),
            Err(error) => return Err(LoadError::Untrusted { message: error.to_string() }),
        }
        Ok(Kept { report: loaded(report, &stage, started), stage, pages_of: None, pages: 0..0 })
    }

    /// A stage that has some of the layers becomes this one.
    fn recut(&self, kept: Kept, layout: StageLayout) -> Result<Kept, LoadError> {
        let started = Instant::now();
        let Kept { stage, pages_of, pages, .. } = kept;
        let report = StageReport { kept: pages.clone(), ..self.report(&layout) };
        let stage = stage.recut(&self.checkpoint, layout, &mut self.progress(report.spec.index))?;
        Ok(Kept { report: loaded(report, &stage, started), stage, pages_of, pages })
    }

    /// What there is to say of a stage before it is loaded.
    fn report(&self, layout: &StageLayout) -> StageReport {
        StageReport {
            spec: layout.spec.clone(),
            device: self.device.name(),
            device_id: self.device.id(),
            worker: None,
            read_bytes: 0,
            origins: Origins::default(),
            weight_bytes: layout.weight_bytes(),
            kv_bytes: layout.kv_bytes(),
            work_bytes: layout.work_bytes(),
            allocated_bytes: 0,
            widened: layout.widened().iter().map(|(from, to, n)| ((*from).to_owned(), (*to).to_owned(), *n)).collect(),
            load_seconds: 0.0,
            timestamps: Timestamps::default(),
            kept: 0..0,
            boundary: Vec::new(),
        }
    }

    /// Tells how far loading is, and whether to go on.
    fn progress(&self, index: usize) -> impl FnMut(LoadProgress) -> bool {
        let mut told = 0;
        move |at: LoadProgress| {
            // A bar needs no more than a few hundred updates.
            let is_far = |done: u64| done >= told + (at.total_bytes / 128).max(1);
            let done = at.at_hand() + at.read_bytes;
            if is_far(done) || at.read_bytes == at.total_bytes {
                told = done;
                self.say(Event::Progress(index, at));
            }
            !self.stopped()
        }
    }

    /// Takes its hops, proves them and works until it is stopped.
    fn serve(&self, stage: &mut Stage) -> Result<(), WorkerError> {
        let mut ports = loop {
            match self.ports.recv_timeout(LOOK) {
                Ok(ports) => break ports,
                Err(RecvTimeoutError::Timeout) if !self.stopped() => {}
                Err(_) => return Ok(()),
            }
        };
        let index = stage.layout().spec.index;
        match prove(&mut ports, index) {
            Ok(()) => self.say(Event::Linked(index)),
            Err(_) if self.stopped() => return Ok(()),
            Err((hop, error)) => return Err(WorkerError::Edge { hop, error }),
        }
        worker::run(
            stage,
            ports.upstream.as_mut(),
            ports.downstream.as_mut(),
            &self.epoch,
            &self.counters,
            &self.recorder,
            &self.stop,
        )
    }
}

/// What there is to say of a stage that is loaded, beside what was known before.
fn loaded(report: StageReport, stage: &Stage, started: Instant) -> StageReport {
    StageReport {
        read_bytes: stage.read_bytes(),
        origins: stage.origins(),
        allocated_bytes: stage.backend().allocated_bytes(),
        load_seconds: started.elapsed().as_secs_f64(),
        timestamps: stage.backend().timestamps(),
        ..report
    }
}

/// Sends the block of the hop behind the stage, hands that of the hop before it back, and takes its own back. All
/// stages do it at once, and so do both ends of the head.
fn prove(ports: &mut Ports, index: usize) -> Result<(), (usize, EdgeError)> {
    let at = |hop: usize| move |error| (hop, error);
    edge::send(ports.downstream.as_mut(), index + 1).map_err(at(index + 1))?;
    edge::check(ports.upstream.as_mut(), index, EDGE_PATIENCE).map_err(at(index))?;
    edge::send(ports.upstream.as_mut(), index).map_err(at(index))?;
    edge::check(ports.downstream.as_mut(), index + 1, EDGE_PATIENCE).map_err(at(index + 1))
}
