//! A head's visit to a worker: what it asks is answered; the stages that it wants are loaded, linked and run.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select};
use pp_transport::frame::PAYLOAD_BYTES_MAX;
use pp_transport::identity::{Name, PeerName, Role};
use pp_transport::local::pair;
use pp_transport::quic::{LinkPort, Peer, tuning};
use pp_transport::{LinkId, LinkLimits, Port, PortError};

use super::control::{self, Beat, ECHO_BYTES_MAX, Fellow, Neighbour, Plan, SPANS_MAX, Source, Task, ToHead, ToWorker};
use super::fetch::{Fetcher, Offer};
use super::health::MODELS_MAX;
use super::measure::Serving;
use super::weights::{self, OTHERS_MAX, PLACES_MAX, Stock};
use super::worker::Server;
use crate::calibrate::Shape;
use crate::checkpoint::Checkpoint;
use crate::contract::{Contract, ModelFacts};
use crate::layout::{StageLayout, StageSpec};
use crate::manifest::Manifest;
use crate::pipeline::Device;
use crate::pipeline::thread::{self, EVENTS_PER_STAGE, Event, Ports, StageThread};
use crate::trace::Recorder;
use crate::weights::LoadError;
use crate::worker::Counters;

/// How often the head hears how the stages do.
const BEAT: Duration = Duration::from_millis(100);
/// How long a neighbour may take to be reached.
const DIAL: Duration = Duration::from_secs(5);
/// Stages of one worker in one pipeline.
const TASKS_MAX: usize = 64;
/// Frames that a hop may hold.
const CREDITS_MAX: u64 = 4096;

/// What the thread of a visit waits for.
enum Heard {
    Said(ToWorker),
    /// The head is gone, for that reason.
    Gone(String),
}

/// A visit.
pub(super) struct Session {
    server: Arc<Server>,
    control: LinkPort,
    /// Whether the head may have stages here.
    is_lease: bool,
    origin: Instant,
    pending: Option<Pending>,
    running: Option<Running>,
    lending: Option<Lending>,
    measuring: Option<Serving>,
    /// Set when the visit ends: whoever measures stops.
    ended: Arc<AtomicBool>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}

/// A plan for which the model is looked for, or is not here.
struct Pending {
    plan: Plan,
    devices: Vec<Device>,
    /// What came of looking for the model.
    found: Receiver<Result<Option<PathBuf>, String>>,
    /// The link on which the head may be asked for weights.
    head: LinkPort,
    /// The model, once the head has said what it is made of.
    manifest: Option<Arc<Manifest>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Gives other workers of the pipeline what they want of the model.
struct Lending {
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        thread::join(&mut self.threads);
    }
}

/// Gets the weights of the stages from other hosts.
struct Fetching {
    fetcher: Arc<Fetcher>,
    threads: Vec<JoinHandle<()>>,
    /// Workers that were dialled for it.
    _peers: Vec<Peer>,
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.fetcher.stop();
        thread::join(&mut self.threads);
    }
}

/// The stages of a pipeline that are here.
struct Running {
    plan: Plan,
    /// The model's files, where they are here.
    files: Option<Arc<Checkpoint>>,
    /// As long as stages load whose weights are elsewhere.
    fetching: Option<Fetching>,
    /// Stages that are loaded.
    loaded: usize,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    events: Receiver<Event>,
    counters: Vec<Arc<Counters>>,
    recorder: Arc<Recorder>,
    epoch: Arc<AtomicU64>,
    /// Of each task: who waits for its ports.
    waiting: Vec<Sender<Ports>>,
    /// Ends of hops that others open, by hop.
    expected: HashMap<usize, LinkPort>,
    /// Neighbours that were dialled.
    peers: Vec<Peer>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Whoever waits for weights or a neighbour is let go.
        self.fetching = None;
        self.waiting.clear();
        self.expected.clear();
        if !thread::join(&mut self.threads) {
            tracing::error!(
                "a stage does not end: its device hangs, and its memory is not free until this process ends"
            );
        }
    }
}

impl Session {
    pub(super) fn new(server: Arc<Server>, control: LinkPort, is_lease: bool) -> Session {
        Session {
            server,
            control,
            is_lease,
            origin: Instant::now(),
            pending: None,
            running: None,
            lending: None,
            measuring: None,
            ended: Arc::default(),
        }
    }

    /// Until the head goes, or the worker ends.
    pub(super) fn run(mut self) {
        let (tell, heard) = bounded(16);
        let (control, stop) = (self.control.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let listen = move || {
            while !stopped.load(Ordering::Relaxed) {
                let said = match control.receive_frame(BEAT) {
                    Ok(arrival) => match control::decode(&arrival.frame) {
                        Ok(message) => Heard::Said(message),
                        Err(error) => Heard::Gone(error.to_string()),
                    },
                    Err(PortError::Timeout { .. }) => continue,
                    Err(error) => Heard::Gone(error.to_string()),
                };
                let is_last = matches!(said, Heard::Gone(_));
                if tell.send(said).is_err() || is_last {
                    return;
                }
            }
        };
        let Ok(listener) = std::thread::Builder::new().name("control".to_owned()).spawn(listen) else { return };
        let (nothing, nobody) = (crossbeam_channel::never(), crossbeam_channel::never());
        let mut beaten = Instant::now();
        while !self.server.stop.load(Ordering::Relaxed) {
            let events = self.running.as_ref().map_or(&nothing, |running| &running.events).clone();
            let found = self.pending.as_ref().map_or(&nobody, |pending| &pending.found).clone();
            select! {
                recv(heard) -> said => match said {
                    Ok(Heard::Said(message)) => self.answer(message),
                    Ok(Heard::Gone(reason)) => {
                        tracing::info!(reason, "the head is gone");
                        break;
                    }
                    Err(_) => break,
                },
                recv(events) -> event => match event {
                    Ok(event) => self.pass_on(event),
                    // All stages have ended; what they said was passed on.
                    Err(_) => self.quiet(),
                },
                recv(found) -> found => if let Ok(found) = found { self.looked(found) } else { self.looked_in_vain() },
                default(BEAT) => {}
            }
            if beaten.elapsed() >= BEAT {
                beaten = Instant::now();
                self.beat();
            }
        }
        stop.store(true, Ordering::Relaxed);
        // Frees what the stages hold before somebody else may come.
        self.release();
        drop(heard);
        let _ = listener.join();
    }

    fn say(&self, message: &ToHead) {
        // A head that is gone is noticed by the listener.
        let _ = self.control.send_frame(control::encode(message));
    }

    fn answer(&mut self, message: ToWorker) {
        match message {
            ToWorker::Ping(sent) => self.say(&ToHead::Pong(sent, self.origin.elapsed().as_nanos() as u64)),
            ToWorker::Echo(bytes) if bytes.len() <= ECHO_BYTES_MAX => self.say(&ToHead::Echo(bytes)),
            ToWorker::Members(signed) => self.say(&ToHead::Done(self.server.take_members(signed))),
            ToWorker::Certificate(der) => self.say(&ToHead::Done(self.server.take_certificate(&der))),
            ToWorker::Drain(draining) => {
                self.server.drain(draining);
                self.say(&ToHead::Done(Ok(())));
            }
            ToWorker::Examine(models) if models.len() <= MODELS_MAX => {
                self.say(&ToHead::Health(Box::new(self.server.health(&models))));
            }
            ToWorker::Measure(session, payload_bytes) => {
                self.measuring = None;
                let begun = Serving::start(&self.server, &self.control, session, payload_bytes);
                let answer = begun.map(|serving| self.measuring = Some(serving));
                self.say(&ToHead::Done(answer));
            }
            ToWorker::Prepare(plan) if self.is_lease => self.prepare(*plan),
            ToWorker::Start => self.start(),
            ToWorker::Epoch(epoch) => {
                if let Some(running) = &self.running {
                    running.epoch.fetch_max(epoch, Ordering::Relaxed);
                }
            }
            ToWorker::Manifest { manifest, takers } if self.is_lease => self.lend(&manifest, &takers),
            ToWorker::Fetch(sources) if self.is_lease => self.fetch(&sources),
            ToWorker::Release if self.is_lease => {
                self.release();
                self.server.holds(Vec::new());
            }
            ToWorker::Release => {}
            ToWorker::Calibrate(device, shape) => self.calibrate(device, *shape),
            ToWorker::Greeting(_)
            | ToWorker::Echo(_)
            | ToWorker::Prepare(_)
            | ToWorker::Manifest { .. }
            | ToWorker::Fetch(_)
            | ToWorker::Examine(_) => {
                self.say(&ToHead::Done(Err("this is not the time for that".to_owned())));
            }
        }
    }

    /// Answers when it is known, meanwhile the visit goes on.
    fn calibrate(&self, device: String, shape: Shape) {
        let (server, control, is_lease) = (self.server.clone(), self.control.clone(), self.is_lease);
        let ended = self.ended.clone();
        let measure = move || {
            let found = server.calibrate(&device, &shape, is_lease, &ended).map(Box::new);
            let _ = control.send_frame(control::encode(&ToHead::Calibrated(found)));
        };
        if let Err(error) = std::thread::Builder::new().name("calibrate".to_owned()).spawn(measure) {
            self.say(&ToHead::Calibrated(Err(error.to_string())));
        }
    }

    fn pass_on(&mut self, event: Event) {
        let message = match event {
            Event::Progress(stage, at) => ToHead::Progress(stage, at),
            Event::Ready(stage, report) => {
                self.loaded();
                ToHead::Ready(stage, report)
            }
            Event::Linked(stage) => ToHead::Linked(stage),
            Event::LoadFailed(stage, error) => ToHead::LoadFailed(stage, error),
            Event::Failed(stage, error) => ToHead::Failed(stage, error),
            // Only a head hears of these.
            Event::Weights(..) | Event::Hashing(..) | Event::Manifest(_) => return,
        };
        self.say(&message);
    }

    /// One more stage is loaded; with the last, nothing is fetched any more.
    fn loaded(&mut self) {
        if let Some(running) = &mut self.running {
            running.loaded += 1;
            if running.loaded == running.plan.tasks.len() {
                running.fetching = None;
            }
        }
    }

    /// The stages' threads have ended by themselves: nothing more comes of them.
    fn quiet(&mut self) {
        if let Some(running) = &mut self.running {
            running.events = crossbeam_channel::never();
        }
    }

    /// What the stages did since the last time, and how they do.
    fn beat(&mut self) {
        let Some(running) = &self.running else { return };
        let now = self.origin;
        let ahead = running.recorder.at(now) as i128;
        for task in &running.plan.tasks {
            let spans = running.recorder.take(task.spec.index);
            for some in spans.chunks(SPANS_MAX) {
                let on_our_clock =
                    some.iter().map(|span| super::remote::moved(*span, |at| (i128::from(at) - ahead).max(0) as u64));
                self.say(&ToHead::Spans(task.spec.index, on_our_clock.collect()));
            }
        }
        let beats = running.plan.tasks.iter().zip(&running.counters).map(|(task, counters)| {
            let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let (begun, steps) = counters.progress();
            Beat {
                stage: task.spec.index,
                begun,
                preparing: counters.preparing.load(Ordering::Relaxed),
                steps,
                tokens: load(&counters.tokens),
                busy_ns: load(&counters.busy_ns),
                sent_bytes: load(&counters.sent_bytes),
                sequences: load(&counters.sequences),
            }
        });
        self.say(&ToHead::Beats(beats.collect()));
    }

    /// Nothing is left of a plan.
    fn release(&mut self) {
        (self.pending, self.lending, self.running) = (None, None, None);
    }

    /// Begins to look for the model.
    fn prepare(&mut self, plan: Plan) {
        self.release();
        let first = first_stage(&plan);
        match self.look(plan) {
            Ok(pending) => self.pending = Some(pending),
            Err(refusal) => self.refused(first, refusal),
        }
    }

    fn refused(&self, stage: usize, refusal: Refusal) {
        match refusal {
            Refusal::Mismatch(ours) => self.say(&ToHead::Mismatch(ours)),
            Refusal::Load(error) => self.say(&ToHead::LoadFailed(stage, error)),
        }
    }

    fn look(&self, plan: Plan) -> Result<Pending, Refusal> {
        let devices = self.check(&plan)?;
        let (tell, found) = bounded(1);
        let stop = Arc::new(AtomicBool::new(false));
        let (server, stopped) = (self.server.clone(), stop.clone());
        let (digest, bytes) = (plan.contract.model.digest, plan.model_bytes);
        let look = move || drop(tell.send(server.host.model(&digest, bytes, &stopped)));
        std::thread::Builder::new().name("look-for-model".to_owned()).spawn(look).map_err(refused)?;
        let id = LinkId { session: plan.session, link: weights::link(0, plan.place) };
        let head = self.server.node().expect(id, self.control.peer().clone(), weights::limits());
        Ok(Pending { plan, devices, found, head, manifest: None, stop })
    }

    /// It is known whether the model is here.
    fn looked(&mut self, found: Result<Option<PathBuf>, String>) {
        let Some(mut pending) = self.pending.take() else { return };
        pending.found = crossbeam_channel::never();
        let first = first_stage(&pending.plan);
        match found {
            Ok(Some(path)) => {
                self.say(&ToHead::HasModel(true));
                match self.load_files(&pending, path) {
                    Ok(running) => self.runs(running),
                    Err(refusal) => self.refused(first, refusal),
                }
            }
            Ok(None) if self.server.host.tensors().is_some() => {
                self.say(&ToHead::HasModel(false));
                self.pending = Some(pending);
            }
            Ok(None) => {
                let Plan { model_name, .. } = &pending.plan;
                let message = format!(
                    "it has no copy of {model_name}, and no folder to keep tensors in (set HOME or XDG_CACHE_HOME)"
                );
                self.refused(first, refused(message));
            }
            Err(message) => self.refused(first, refused(message)),
        }
    }

    fn looked_in_vain(&mut self) {
        self.looked(Err("looking for the model has failed; the worker's log says more".to_owned()));
    }

    fn runs(&mut self, running: Running) {
        let stages = running.plan.tasks.iter().map(|task| {
            let layers = &task.spec.layers;
            (task.spec.index, (layers.start, layers.end), task.device.clone())
        });
        self.server.holds(stages.collect());
        self.running = Some(running);
    }

    /// Others may come for tensors of the model.
    fn lend(&mut self, manifest: &[u8], takers: &[Fellow]) {
        let plan = self.pending.as_ref().map(|pending| &pending.plan);
        let Some(plan) = plan.or(self.running.as_ref().map(|running| &running.plan)).cloned() else {
            // What it had could not be loaded, which was said.
            return self.say(&ToHead::Holds(Vec::new()));
        };
        match self.lending(&plan, manifest, takers) {
            Ok((lending, holds)) => {
                self.lending = Some(lending);
                self.say(&ToHead::Holds(holds));
            }
            Err(refusal) => self.refused(first_stage(&plan), refusal),
        }
    }

    fn lending(&mut self, plan: &Plan, manifest: &[u8], takers: &[Fellow]) -> Result<(Lending, Vec<u8>), Refusal> {
        let manifest = Arc::new(Manifest::decode(manifest).map_err(refused)?);
        if manifest.model != plan.contract.model.digest {
            return Err(refused("the manifest is another model's"));
        }
        if takers.len() >= PLACES_MAX as usize || takers.iter().any(|taker| taker.place >= PLACES_MAX) {
            return Err(refused(format!("links to more than {PLACES_MAX} workers")));
        }
        let files = self.running.as_ref().and_then(|running| running.files.clone());
        let stock = Stock { manifest: manifest.clone(), files, cache: self.server.host.tensors() };
        let mut lending = Lending { threads: Vec::new(), stop: Arc::default() };
        for taker in takers {
            let Some(peer) = self.peer(&taker.name) else { continue };
            let id = LinkId { session: plan.session, link: weights::link(plan.place, taker.place) };
            let port = self.server.node().expect(id, peer, weights::limits());
            lending.threads.push(stock.clone().serve(Box::new(port), lending.stop.clone()).map_err(refused)?);
        }
        if let Some(pending) = &mut self.pending {
            pending.manifest = Some(manifest);
        }
        Ok((lending, stock.holds()))
    }

    /// The weights are to come from elsewhere.
    fn fetch(&mut self, sources: &[Source]) {
        let Some(pending) = self.pending.take() else { return };
        let first = first_stage(&pending.plan);
        match self.load_from_others(&pending, sources) {
            Ok(running) => self.runs(running),
            Err(refusal) => self.refused(first, refusal),
        }
    }

    fn load_files(&self, pending: &Pending, path: PathBuf) -> Result<Running, Refusal> {
        let checkpoint = Arc::new(Checkpoint::open(&path).map_err(refused)?);
        let layouts = self.lay_out(pending, &checkpoint)?;
        let checkpoints = vec![checkpoint.clone(); layouts.len()];
        let mut running = self.load(pending, layouts, checkpoints, None)?;
        running.files = Some(checkpoint);
        Ok(running)
    }

    fn load_from_others(&self, pending: &Pending, sources: &[Source]) -> Result<Running, Refusal> {
        let manifest = pending.manifest.clone().ok_or_else(|| refused("no manifest has come"))?;
        let cache = self.server.host.tensors().ok_or_else(|| refused("there is no tensor cache"))?;
        let name = &pending.plan.model_name;
        let layouts = self.lay_out(pending, &Checkpoint::supplied(&manifest, name, None))?;
        let positions: HashMap<&str, usize> =
            manifest.tensors.iter().enumerate().map(|(at, entry)| (entry.name.as_str(), at)).collect();
        let wanted: Vec<Vec<usize>> = layouts
            .iter()
            .map(|layout| layout.tensors_in_order().map(|tensor| positions[tensor.name.as_str()]).collect())
            .collect();
        let fetcher = Fetcher::new(manifest.clone(), cache, &wanted).map_err(|error| Refusal::Load(error.into()))?;
        let checkpoints = (0..layouts.len())
            .map(|stage| Arc::new(Checkpoint::supplied(&manifest, name, Some(fetcher.for_stage(stage)))))
            .collect();
        let head =
            Offer { name: self.control.peer().name.to_string(), port: Box::new(pending.head.clone()), holds: None };
        let (mut offers, mut peers) = (vec![head], Vec::new());
        for source in sources.iter().take(OTHERS_MAX).filter(|_| !fetcher.is_complete()) {
            match self.dial(&source.fellow.name) {
                Ok(peer) => {
                    let link = weights::link(source.fellow.place, pending.plan.place);
                    let port = peer.open(LinkId { session: pending.plan.session, link }, weights::limits());
                    let (name, holds) = (source.fellow.name.clone(), Some(source.holds.clone()));
                    offers.push(Offer { name, port: Box::new(port), holds });
                    peers.push(peer);
                }
                Err(error) => tracing::warn!(source = source.fellow.name, error, "is not asked for weights"),
            }
        }
        let threads = fetcher.start(offers).map_err(refused)?;
        self.load(pending, layouts, checkpoints, Some(Fetching { fetcher, threads, _peers: peers }))
    }

    /// Compares what this worker makes of the model and the plan with what the head wants, and lays out its stages.
    fn lay_out(&self, pending: &Pending, checkpoint: &Checkpoint) -> Result<Vec<StageLayout>, Refusal> {
        let Pending { plan, devices, .. } = pending;
        let contract = &plan.contract;
        let facts = ModelFacts::of(checkpoint, contract.model.digest);
        let mut ours = contract.clone();
        for (task, device) in plan.tasks.iter().zip(devices) {
            ours = ours.seen_by(task.spec.index, facts.clone(), device.profile()).map_err(refused)?;
        }
        if ours != *contract {
            return Err(Refusal::Mismatch(Box::new(ours)));
        }
        let lay_out = |(task, device): (&Task, &Device)| {
            StageLayout::new(checkpoint, task.spec.clone(), contract.options, device.profile(), device.limits())
        };
        plan.tasks.iter().zip(devices).map(lay_out).collect::<Result<_, _>>().map_err(refused)
    }

    /// Begins to load stages, each from its checkpoint.
    fn load(
        &self,
        pending: &Pending,
        layouts: Vec<StageLayout>,
        checkpoints: Vec<Arc<Checkpoint>>,
        fetching: Option<Fetching>,
    ) -> Result<Running, Refusal> {
        let plan = pending.plan.clone();
        let specs = plan.contract.check().map_err(refused)?;
        let names = specs.iter().map(|spec| (String::new(), (spec.layers.start, spec.layers.end)));
        let (tell, events) = bounded(EVENTS_PER_STAGE * plan.tasks.len());
        let mut running = Running {
            files: None,
            fetching,
            loaded: 0,
            stop: Arc::default(),
            threads: Vec::new(),
            events,
            counters: plan.tasks.iter().map(|_| Arc::default()).collect(),
            recorder: Recorder::new(names),
            epoch: Arc::new(AtomicU64::new(plan.epoch)),
            waiting: Vec::new(),
            expected: self.expect(&plan),
            peers: Vec::new(),
            plan,
        };
        let stages = layouts.into_iter().zip(checkpoints).zip(&pending.devices);
        for (index, ((layout, checkpoint), device)) in stages.enumerate() {
            let (give, ports) = bounded(1);
            let thread = StageThread {
                checkpoint,
                device: device.clone(),
                ports,
                tell: tell.clone(),
                stop: running.stop.clone(),
                counters: running.counters[index].clone(),
                recorder: running.recorder.clone(),
                epoch: running.epoch.clone(),
            };
            running.waiting.push(give);
            running.threads.push(thread.start(layout).map_err(refused)?);
        }
        Ok(running)
    }

    /// Everything that a head could say wrongly; returns the device of each task.
    fn check(&self, plan: &Plan) -> Result<Vec<Device>, Refusal> {
        let wrong = |message: String| refused(message);
        let tasks = &plan.tasks;
        if tasks.is_empty() || tasks.len() > TASKS_MAX {
            return Err(wrong(format!("{} stages for one worker; 1 to {TASKS_MAX} are taken", tasks.len())));
        }
        if plan.credits == 0 || plan.credits > CREDITS_MAX {
            return Err(wrong(format!("{} frames on a hop; 1 to {CREDITS_MAX} are taken", plan.credits)));
        }
        if plan.payload_bytes > PAYLOAD_BYTES_MAX as u64 {
            return Err(wrong(format!(
                "frames of {} bytes; at most {PAYLOAD_BYTES_MAX} are taken",
                plan.payload_bytes
            )));
        }
        if !(1..PLACES_MAX).contains(&plan.place) {
            return Err(wrong(format!("place {} of a pipeline; 1 to {} are taken", plan.place, PLACES_MAX - 1)));
        }
        let specs: Vec<StageSpec> = plan.contract.check().map_err(refused)?;
        let mut devices = Vec::new();
        for (at, task) in tasks.iter().enumerate() {
            if specs.get(task.spec.index) != Some(&task.spec) {
                return Err(wrong(format!("stage {} is not as the split says", task.spec.index)));
            }
            let follows = |before: usize, after: usize| {
                tasks.get(before).zip(tasks.get(after)).is_some_and(|(a, b)| a.spec.index + 1 == b.spec.index)
            };
            let alone = at.checked_sub(1).is_none_or(|before| !follows(before, at));
            if alone == (task.upstream == Neighbour::Same)
                || follows(at, at + 1) != (task.downstream == Neighbour::Same)
            {
                return Err(wrong(format!("stage {} has neighbours that are not there", task.spec.index)));
            }
            let device = self.server.devices.iter().find(|device| device.id() == task.device);
            devices.push(device.cloned().ok_or_else(|| wrong(format!("no device {:?}", task.device)))?);
        }
        Ok(devices)
    }

    /// The ends of the hops that the head and neighbours before us will open.
    fn expect(&self, plan: &Plan) -> HashMap<usize, LinkPort> {
        let mut expected = HashMap::new();
        for task in &plan.tasks {
            let hops = [(task.spec.index, &task.upstream, true), (task.spec.index + 1, &task.downstream, false)];
            for (hop, neighbour, is_upstream) in hops {
                let peer = match neighbour {
                    Neighbour::Head => self.control.peer().clone(),
                    Neighbour::Worker(name) if is_upstream => match self.peer(name) {
                        Some(peer) => peer,
                        None => continue,
                    },
                    _ => continue,
                };
                expected.insert(hop, self.server.node().expect(hop_id(plan, hop), peer, hop_limits(plan)));
            }
        }
        expected
    }

    fn peer(&self, name: &str) -> Option<PeerName> {
        let name: Name = name.parse().ok()?;
        Some(PeerName { cluster: self.server.node().who().members.cluster(), role: Role::Worker, name })
    }

    /// All stages are loaded: opens the hops to workers behind ours and gives every stage its ports.
    fn start(&mut self) {
        let Some(mut running) = self.running.take() else { return };
        let mut upstream: Option<Box<dyn Port>> = None;
        let waiting: Vec<Sender<Ports>> = running.waiting.drain(..).collect();
        let tasks = running.plan.tasks.clone();
        for (task, waiting) in tasks.iter().zip(waiting) {
            let before = upstream.take().or_else(|| boxed(running.expected.remove(&task.spec.index)));
            let after: Result<Box<dyn Port>, String> = match &task.downstream {
                Neighbour::Same => {
                    let (here, there) = pair(running.plan.credits as usize);
                    upstream = Some(Box::new(there));
                    Ok(Box::new(here))
                }
                Neighbour::Head => boxed(running.expected.remove(&(task.spec.index + 1)))
                    .ok_or_else(|| "no hop to the head".to_owned()),
                Neighbour::Worker(name) => self.reach(&mut running, task, name),
            };
            match (before, after) {
                (Some(upstream), Ok(downstream)) => drop(waiting.send(Ports { upstream, downstream })),
                (None, _) => self.refuse(task, "nobody is before it".to_owned()),
                (_, Err(reason)) => self.refuse(task, reason),
            }
        }
        self.running = Some(running);
    }

    fn refuse(&self, task: &Task, message: String) {
        self.say(&ToHead::LoadFailed(task.spec.index, LoadError::Refused { message }));
    }

    /// The hop behind a stage, to another worker.
    fn reach(&self, running: &mut Running, task: &Task, name: &str) -> Result<Box<dyn Port>, String> {
        let dialled = self.dial(name).map_err(|error| format!("worker {name}, which is next, {error}"))?;
        let port = dialled.open(hop_id(&running.plan, task.spec.index + 1), hop_limits(&running.plan));
        running.peers.push(dialled);
        Ok(Box::new(port))
    }

    /// Another worker.
    fn dial(&self, name: &str) -> Result<Peer, String> {
        let members = self.server.node().who().members;
        let member = name.parse().ok().and_then(|name: Name| members.get(&name).cloned());
        let found = self.peer(name).zip(member.and_then(|member| member.address));
        let (peer, address) = found.ok_or("is not in the member list")?;
        self.server.node().dial(&peer, &address, DIAL).map_err(|error| format!("is not reached: {error}"))
    }
}

/// Why a plan is not carried out.
enum Refusal {
    Mismatch(Box<Contract>),
    Load(LoadError),
}

fn refused(why: impl ToString) -> Refusal {
    Refusal::Load(LoadError::Refused { message: why.to_string() })
}

fn first_stage(plan: &Plan) -> usize {
    plan.tasks.first().map_or(0, |task| task.spec.index)
}

fn boxed(port: Option<LinkPort>) -> Option<Box<dyn Port>> {
    port.map(|port| Box::new(port) as Box<dyn Port>)
}

/// The link of hop `hop`.
pub(super) fn hop_id(plan: &Plan, hop: usize) -> LinkId {
    LinkId { session: plan.session, link: hop as u32 }
}

pub(super) fn hop_limits(plan: &Plan) -> LinkLimits {
    LinkLimits { credits: plan.credits, payload_bytes: plan.payload_bytes as usize, silence: tuning::SILENCE }
}
