//! How a pipeline comes to run: layouts, then loading on all stages at once, then the hops and their proof.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use pp_shaders::Profile;
use pp_transport::quic::tuning;
use pp_transport::{LinkId, LinkLimits, Port};

use super::shelf::{Kept, Key};
use super::supply::{self, Supply};
use super::thread::{EDGE_PATIENCE, EVENTS_PER_STAGE, Event, Home, Ports, StageThread};
use super::{
    Device, IN_FLIGHT_PER_STAGE, LOOK, Model, OnProgress, PATIENCE, Pipeline, PipelineError, PipelineOptions, Running,
    Seen, StageName, StageReport,
};
use crate::checkpoint::Checkpoint;
use crate::cluster::control::{Neighbour, Plan, Task};
use crate::cluster::remote::{Listener, Worker, draw};
use crate::contract::{Contract, ModelFacts};
use crate::edge;
use crate::law::shares;
use crate::layout::{StageLayout, StageOptions, StageSpec};
use crate::message::MessageLimits;
use crate::stage::message_limits;
use crate::trace::Recorder;
use crate::weights::{LoadError, LoadProgress};
use crate::worker::Counters;

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

    /// As [`Pipeline::open`], with other links. Workers that do not find the model where they are get the tensors of
    /// their stages from here and from each other.
    ///
    /// # Errors
    /// As [`Pipeline::open`].
    ///
    /// # Panics
    /// When links are to hold no frame, or there are workers and the options name no model.
    pub fn open_with(
        checkpoint: &Arc<Checkpoint>,
        specs: &[StageSpec],
        options: StageOptions,
        between: &PipelineOptions,
        devices: &[Device],
        progress: OnProgress<'_>,
        cancel: &AtomicBool,
    ) -> Result<Pipeline, PipelineError> {
        between.past.iter().for_each(|past| past.settle());
        let Draft { stages, layouts, limits, in_flight_max, links } =
            Draft::new(checkpoint, specs, options, between, devices)?;
        let (tell, events) = bounded(EVENTS_PER_STAGE * specs.len());
        let uses: Vec<_> = devices.iter().map(Device::uses).collect();
        let shares = shares(uses.iter().map(Vec::as_slice));
        let places = stages.iter().map(|stage| (stage.place(), stage.layers));
        let (recorder, epoch, next_step) = match &between.past {
            Some(past) => (Recorder::after(&past.recorder, places, &shares), past.epoch + 1, past.next_step),
            None => (Recorder::new(places), 1, 0),
        };
        recorder.shared(&shares);
        let epoch = Arc::new(AtomicU64::new(epoch));
        let digest = between.model.as_ref().map(|model| model.digest);
        let mut opening = Opening::new(stages, specs, devices, workers(devices), between, events);
        let after = opening.after;
        let mut supply = opening.supply(checkpoint, between, &links, &tell);
        opening.prepare(checkpoint, between.model.as_ref(), specs, options, &links, &tell, &recorder, &epoch)?;
        let here: Vec<_> = layouts.into_iter().zip(devices).filter(|(_, device)| device.worker().is_none()).collect();
        let keys: Vec<Key> = here.iter().map(|(layout, device)| Key::new(checkpoint, digest, layout, device)).collect();
        let nothing = || keys.iter().map(|_| None).collect();
        let kept: Vec<Option<Kept>> = between.shelf.as_ref().map_or_else(nothing, |shelf| shelf.assign(&keys, after));
        for (((layout, device), key), kept) in here.into_iter().zip(keys).zip(kept) {
            let index = layout.spec.index;
            let (give, ports) = bounded(1);
            let thread = StageThread {
                checkpoint: checkpoint.clone(),
                device: device.clone(),
                ports,
                tell: tell.clone(),
                stop: opening.running.stop.clone(),
                counters: opening.counters[index].clone(),
                recorder: recorder.clone(),
                epoch: epoch.clone(),
                kept,
                home: opening.running.home.clone(),
                key,
            };
            let started = thread.start(layout);
            opening.running.threads.push(started.map_err(|error| opening.no_thread(index, error))?);
            opening.waiting[index] = Some(give);
        }
        let reports = opening.wait_until_loaded(supply.as_mut(), progress, cancel)?;
        drop(supply);
        let (mut to_first, mut from_tail) = opening.link(between, &links, in_flight_max)?;
        opening.prove(to_first.as_mut(), from_tail.as_mut(), cancel)?;
        opening.running.keeps = false;
        let now = Instant::now();
        Ok(Pipeline {
            shares,
            tile: Device::tile(devices, options.activations),
            seen: vec![Seen { done: 0, is_computing: false, since: now }; opening.stages.len()],
            stages: opening.stages,
            reports,
            counters: opening.counters,
            recorder,
            to_first,
            from_tail,
            events: opening.events,
            running: opening.running,
            is_closed: false,
            limits,
            epoch,
            next_step,
            in_flight: VecDeque::new(),
            heard: now,
            in_flight_max,
            patience: PATIENCE,
            given_up: Duration::ZERO,
        })
    }
}

impl Pipeline {
    /// Has workers load stages of a pipeline that is to come, while another one runs elsewhere: they wait there, on these
    /// workers, to be opened with the rest ([`Pipeline::open_with`]). Workers that have stages of the running one may not be
    /// among them.
    ///
    /// # Errors
    /// As [`Pipeline::open`].
    ///
    /// # Panics
    /// As [`Pipeline::open_with`].
    #[expect(clippy::too_many_arguments, reason = "those of a pipeline, and which of it")]
    pub fn preload(
        checkpoint: &Arc<Checkpoint>,
        specs: &[StageSpec],
        options: StageOptions,
        between: &PipelineOptions,
        devices: &[Device],
        on: &[Arc<Worker>],
        progress: OnProgress<'_>,
        cancel: &AtomicBool,
    ) -> Result<(), PipelineError> {
        let Draft { stages, links, .. } = Draft::new(checkpoint, specs, options, between, devices)?;
        let (tell, events) = bounded(EVENTS_PER_STAGE * specs.len());
        let recorder = Recorder::new(stages.iter().map(|stage| (stage.place(), stage.layers)));
        let mut opening = Opening::new(stages, specs, devices, on.to_vec(), between, events);
        // They stay, whatever comes of the others.
        opening.running.keeps = true;
        let mut supply = opening.supply(checkpoint, between, &links, &tell);
        let epoch = AtomicU64::new(0);
        opening.prepare(checkpoint, between.model.as_ref(), specs, options, &links, &tell, &recorder, &epoch)?;
        let loaded = opening.wait_until_loaded(supply.as_mut(), progress, cancel);
        // Nobody waits for what is not wanted any more.
        opening.running.keeps = !cancel.load(Ordering::Relaxed);
        loaded.map(drop)
    }
}

/// A pipeline that nothing was done for yet.
struct Draft {
    stages: Vec<StageName>,
    layouts: Vec<StageLayout>,
    limits: MessageLimits,
    in_flight_max: usize,
    links: Links,
}

impl Draft {
    fn new(
        checkpoint: &Checkpoint,
        specs: &[StageSpec],
        options: StageOptions,
        between: &PipelineOptions,
        devices: &[Device],
    ) -> Result<Draft, PipelineError> {
        assert_eq!(specs.len(), devices.len(), "a device for every stage");
        let stages: Vec<StageName> = specs.iter().zip(devices).map(|(spec, device)| name(spec, device)).collect();
        if let Err(error) = StageSpec::check_cover(specs, checkpoint.config.layers) {
            return Err(PipelineError::Layout { stage: stages[0].clone(), error: Box::new(error) });
        }
        let mut layouts = Vec::new();
        for ((spec, device), stage) in specs.iter().zip(devices).zip(&stages) {
            let layout = StageLayout::new(checkpoint, spec.clone(), options, device.profile(), device.limits());
            layouts
                .push(layout.map_err(|error| PipelineError::Layout { stage: stage.clone(), error: Box::new(error) })?);
        }
        let limits = message_limits(layouts.last().expect("a pipeline has stages"));
        let in_flight_max = IN_FLIGHT_PER_STAGE * specs.len() + 1 + remote_hops(devices);
        let links = Links {
            session: draw(),
            // The tail answers every frame; its link holds all that may be in flight, and one answer that was on its
            // way when the head gave up what was in flight before: nobody waits for the head.
            frames: between.link_frames.unwrap_or(in_flight_max + 1),
            payload_bytes: limits.payload_bytes_max().max(edge::BLOCK_BYTES),
        };
        Ok(Draft { stages, layouts, limits, in_flight_max, links })
    }
}

fn name(spec: &StageSpec, device: &Device) -> StageName {
    let layers = (spec.layers.start, spec.layers.end);
    StageName { index: spec.index, layers, device: device.name().into(), worker: device.worker().map(Into::into) }
}

/// The head's ends of the hop to the first stage, and of the one from the tail.
type Ends = (Box<dyn Port>, Box<dyn Port>);

/// Workers of these devices, each once.
fn workers(devices: &[Device]) -> Vec<Arc<Worker>> {
    let mut found: Vec<Arc<Worker>> = Vec::new();
    for device in devices {
        if let Device::Remote(device) = device
            && !found.iter().any(|worker| Arc::ptr_eq(worker, device.worker()))
        {
            found.push(device.worker().clone());
        }
    }
    found
}

/// Hops that cross hosts: what is on them is in no stage.
fn remote_hops(devices: &[Device]) -> usize {
    let home = |device: Option<&Device>| device.and_then(Device::worker);
    (0..=devices.len()).filter(|hop| home(devices.get(*hop)) != home(hop.checked_sub(1).map(|i| &devices[i]))).count()
}

/// What hops between hosts have in common.
struct Links {
    session: u64,
    frames: usize,
    payload_bytes: usize,
}

impl Links {
    fn id(&self, hop: usize) -> LinkId {
        LinkId { session: self.session, link: hop as u32 }
    }

    fn limits(&self) -> LinkLimits {
        LinkLimits { credits: self.frames as u64, payload_bytes: self.payload_bytes, silence: tuning::SILENCE }
    }
}

/// A pipeline whose stages are there and not linked yet.
struct Opening {
    stages: Vec<StageName>,
    specs: Vec<StageSpec>,
    counters: Vec<Arc<Counters>>,
    events: Receiver<Event>,
    /// The last epoch of the pipeline in whose place it is.
    after: Option<u64>,
    devices: Vec<Device>,
    /// Of each stage of this process: who waits for its ports.
    waiting: Vec<Option<Sender<Ports>>>,
    running: Running,
}

impl Opening {
    fn new(
        stages: Vec<StageName>,
        specs: &[StageSpec],
        devices: &[Device],
        workers: Vec<Arc<Worker>>,
        between: &PipelineOptions,
        events: Receiver<Event>,
    ) -> Opening {
        Opening {
            specs: specs.to_vec(),
            counters: stages.iter().map(|_| Arc::default()).collect(),
            running: Running {
                stop: Arc::default(),
                threads: Vec::new(),
                sources: Vec::new(),
                workers,
                home: Home { shelf: between.shelf.clone(), boundary_log: between.boundary_log, closed: Arc::default() },
                // What is loaded already is not loaded again by the next attempt.
                keeps: between.past.is_some(),
            },
            waiting: stages.iter().map(|_| None).collect(),
            after: between.past.as_ref().map(|past| past.epoch),
            devices: devices.to_vec(),
            events,
            stages,
        }
    }

    /// Where workers without a copy of the model get what they need.
    fn supply(
        &self,
        checkpoint: &Arc<Checkpoint>,
        between: &PipelineOptions,
        links: &Links,
        tell: &Sender<Event>,
    ) -> Option<Supply> {
        let Running { stop, workers, .. } = &self.running;
        let model = between.model.as_ref().filter(|_| !workers.is_empty())?;
        Some(Supply::new(checkpoint, model, links.session, workers, tell, stop))
    }

    /// Whether a stage is of those that are opened: here, or at a worker that was asked.
    fn is_wanted(&self, stage: usize) -> bool {
        let asked = |worker: &Arc<Worker>| self.running.workers.iter().any(|other| Arc::ptr_eq(other, worker));
        self.worker(stage).map_or(self.waiting[stage].is_some(), asked)
    }

    fn no_thread(&self, stage: usize, error: std::io::Error) -> PipelineError {
        PipelineError::Thread { stage: self.stages[stage].clone(), error }
    }

    /// What a stage says that goes wrong; nothing for all else.
    fn wrong(&self, event: Event) -> Result<Event, PipelineError> {
        let stage = |index: usize| self.stages[index].clone();
        match event {
            Event::LoadFailed(_, LoadError::Cancelled) => Err(PipelineError::Cancelled),
            Event::LoadFailed(index, error) => Err(PipelineError::Load { stage: stage(index), error }),
            Event::Failed(index, error) => Err(PipelineError::Stage { stage: stage(index), error }),
            event => Ok(event),
        }
    }

    fn wait_until_loaded(
        &mut self,
        mut supply: Option<&mut Supply>,
        progress: OnProgress<'_>,
        cancel: &AtomicBool,
    ) -> Result<Vec<StageReport>, PipelineError> {
        let wanted = (0..self.stages.len()).filter(|stage| self.is_wanted(*stage)).count();
        let mut reports: BTreeMap<usize, StageReport> = BTreeMap::new();
        while reports.len() < wanted {
            if cancel.load(Ordering::Relaxed) {
                return Err(PipelineError::Cancelled);
            }
            let Ok(event) = self.events.recv_timeout(LOOK) else { continue };
            match self.wrong(event)? {
                Event::Progress(stage, at) => progress(stage, at),
                Event::Ready(stage, report) => {
                    // Which layers it has is not for a worker to say.
                    let spec = self.specs[stage].clone();
                    let kept = spec.common(&report.kept);
                    reports.insert(stage, StageReport { spec, kept, ..*report });
                }
                Event::Hashing(done, total) => {
                    for stage in self.without_model(supply.as_deref()) {
                        progress(stage, LoadProgress { hashing: Some((done, total)), ..LoadProgress::default() });
                    }
                }
                Event::Manifest(made) => supply.as_mut().map_or(Ok(()), |supply| supply.made(made))?,
                Event::Weights(worker, said) => {
                    let threads = &mut self.running.sources;
                    supply.as_mut().map_or(Ok(()), |supply| supply.hear(&worker, said, threads))?;
                }
                _ => {}
            }
        }
        Ok(reports.into_values().collect())
    }

    /// Stages on workers that have no copy of the model.
    fn without_model(&self, supply: Option<&Supply>) -> Vec<usize> {
        let lacks = |stage: &usize| {
            supply.is_some_and(|supply| self.worker(*stage).is_some_and(|worker| supply.lacks_model(worker)))
        };
        (0..self.stages.len()).filter(lacks).collect()
    }

    /// Tells every worker which stages are its.
    #[expect(clippy::too_many_arguments, reason = "all that a plan is made of")]
    fn prepare(
        &self,
        checkpoint: &Checkpoint,
        model: Option<&Model>,
        specs: &[StageSpec],
        options: StageOptions,
        links: &Links,
        tell: &Sender<Event>,
        recorder: &Arc<Recorder>,
        epoch: &AtomicU64,
    ) -> Result<(), PipelineError> {
        if self.running.workers.is_empty() {
            return Ok(());
        }
        let model = model.expect("a pipeline over workers says which model it is");
        let profiles: Vec<Profile> = self.devices.iter().map(|device| *device.profile()).collect();
        let contract = Contract::new(ModelFacts::of(checkpoint, model.digest), specs, options, &profiles);
        for (at, worker) in self.running.workers.iter().enumerate() {
            let is_its = |index: &usize| self.worker(*index).is_some_and(|other| Arc::ptr_eq(other, worker));
            let mine: Vec<usize> = (0..specs.len()).filter(is_its).collect();
            let neighbour = |index: Option<usize>| match index.and_then(|index| self.worker(index)) {
                None => Neighbour::Head,
                Some(other) if Arc::ptr_eq(other, worker) => Neighbour::Same,
                Some(other) => Neighbour::Worker(other.name().to_owned()),
            };
            let task = |index: &usize| Task {
                spec: specs[*index].clone(),
                device: self.devices[*index].id(),
                upstream: neighbour(index.checked_sub(1)),
                downstream: neighbour(Some(index + 1)),
            };
            let plan = Plan {
                session: links.session,
                epoch: epoch.load(Ordering::Relaxed),
                after: self.after,
                boundary_log: self.running.home.boundary_log,
                contract: contract.clone(),
                model_bytes: model.bytes,
                model_name: model.name.clone(),
                place: supply::place(at),
                tasks: mine.iter().map(task).collect(),
                credits: links.frames as u64,
                payload_bytes: links.payload_bytes as u64,
            };
            let listener = Listener {
                events: tell.clone(),
                recorder: recorder.clone(),
                stages: mine.iter().map(|index| (*index, self.counters[*index].clone())).collect(),
                contract: contract.clone(),
            };
            let told = worker.prepare(plan, listener);
            told.map_err(|error| PipelineError::Stage { stage: self.stages[mine[0]].clone(), error })?;
        }
        Ok(())
    }

    /// The worker that a stage is on; none: this process, or the head.
    fn worker(&self, stage: usize) -> Option<&Arc<Worker>> {
        match self.devices.get(stage) {
            Some(Device::Remote(device)) => Some(device.worker()),
            _ => None,
        }
    }

    /// Makes the hops; returns the head's ends.
    fn link(&mut self, between: &PipelineOptions, links: &Links, in_flight_max: usize) -> Result<Ends, PipelineError> {
        self.running.workers.iter().for_each(|worker| worker.start());
        let hops = self.stages.len();
        // The ends of this process, by hop.
        let mut from: Vec<Option<Box<dyn Port>>> = (0..=hops).map(|_| None).collect();
        let mut to: Vec<Option<Box<dyn Port>>> = (0..=hops).map(|_| None).collect();
        for hop in 0..=hops {
            match (hop.checked_sub(1).and_then(|stage| self.worker(stage)), self.worker(hop)) {
                (None, None) => {
                    let frames = if hop == hops { in_flight_max + 1 } else { links.frames };
                    let link = between.link(hop, frames).map_err(|error| self.no_thread(hop.min(hops - 1), error))?;
                    from[hop] = Some(Box::new(link.0));
                    to[hop] = Some(Box::new(link.1));
                }
                (None, Some(worker)) => from[hop] = Some(worker.hop(links.id(hop), links.limits())),
                (Some(worker), None) => to[hop] = Some(worker.hop(links.id(hop), links.limits())),
                (Some(_), Some(_)) => {}
            }
        }
        for (stage, waiting) in self.waiting.drain(..).enumerate() {
            if let Some(waiting) = waiting {
                let upstream = to[stage].take().expect("a stage here has both its ports here");
                let downstream = from[stage + 1].take().expect("a stage here has both its ports here");
                // Whoever is gone has said why.
                let _ = waiting.send(Ports { upstream, downstream });
            }
        }
        let ends = from[0].take().zip(to[hops].take());
        Ok(ends.expect("the head is one end of the first and the last hop"))
    }

    /// The head's part of the proof of the hops ([`crate::edge`]), and that all stages have done theirs.
    fn prove(
        &self,
        to_first: &mut dyn Port,
        from_tail: &mut dyn Port,
        cancel: &AtomicBool,
    ) -> Result<(), PipelineError> {
        let hops = self.stages.len();
        let found = edge::send(to_first, 0)
            .and_then(|()| edge::check(from_tail, hops, EDGE_PATIENCE))
            .and_then(|()| edge::send(from_tail, hops))
            .and_then(|()| edge::check(to_first, 0, EDGE_PATIENCE));
        let mut linked = vec![false; hops];
        let until = Instant::now() + if found.is_ok() { EDGE_PATIENCE } else { Duration::from_secs(1) };
        while linked.contains(&false) && Instant::now() < until {
            if cancel.load(Ordering::Relaxed) {
                return Err(PipelineError::Cancelled);
            }
            let Ok(event) = self.events.recv_timeout(LOOK) else { continue };
            if let Event::Linked(stage) = self.wrong(event)? {
                linked[stage] = true;
            }
        }
        found.map_err(PipelineError::Edge)?;
        match linked.iter().position(|linked| !linked) {
            Some(stage) => {
                Err(PipelineError::Silent { stage: self.stages[stage].clone(), seconds: EDGE_PATIENCE.as_secs() })
            }
            None => Ok(()),
        }
    }
}
