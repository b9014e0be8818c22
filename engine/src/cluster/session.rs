//! A head's visit to a worker: what it asks is answered; the stages that it wants are loaded, linked and run.

use std::collections::HashMap;
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

use super::control::{self, Beat, ECHO_BYTES_MAX, Neighbour, Plan, SPANS_MAX, Task, ToHead, ToWorker};
use super::worker::Server;
use crate::checkpoint::Checkpoint;
use crate::contract::{Contract, ModelFacts};
use crate::layout::{StageLayout, StageSpec};
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
pub(super) struct Session<'a> {
    server: &'a Server,
    control: LinkPort,
    /// Whether the head may have stages here.
    is_lease: bool,
    origin: Instant,
    running: Option<Running>,
}

/// The stages of a pipeline that are here.
struct Running {
    plan: Plan,
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
        // Whoever waits for a neighbour is let go.
        self.waiting.clear();
        self.expected.clear();
        if !thread::join(&mut self.threads) {
            tracing::error!(
                "a stage does not end: its device hangs, and its memory is not free until this process ends"
            );
        }
    }
}

impl<'a> Session<'a> {
    pub(super) fn new(server: &'a Server, control: LinkPort, is_lease: bool) -> Session<'a> {
        Session { server, control, is_lease, origin: Instant::now(), running: None }
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
        let nothing = crossbeam_channel::never();
        let mut beaten = Instant::now();
        while !self.server.stop.load(Ordering::Relaxed) {
            let events = self.running.as_ref().map_or(&nothing, |running| &running.events).clone();
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
                default(BEAT) => {}
            }
            if beaten.elapsed() >= BEAT {
                beaten = Instant::now();
                self.beat();
            }
        }
        stop.store(true, Ordering::Relaxed);
        // Frees what the stages hold before somebody else may come.
        self.running = None;
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
            ToWorker::Prepare(plan) if self.is_lease => self.prepare(*plan),
            ToWorker::Start => self.start(),
            ToWorker::Epoch(epoch) => {
                if let Some(running) = &self.running {
                    running.epoch.fetch_max(epoch, Ordering::Relaxed);
                }
            }
            ToWorker::Release if self.is_lease => {
                self.running = None;
                self.server.holds(Vec::new());
            }
            ToWorker::Release => {}
            ToWorker::Greeting(_) | ToWorker::Echo(_) | ToWorker::Prepare(_) => {
                self.say(&ToHead::Done(Err("this is not the time for that".to_owned())));
            }
        }
    }

    fn pass_on(&mut self, event: Event) {
        let message = match event {
            Event::Progress(stage, at) => ToHead::Progress(stage, at),
            Event::Ready(stage, report) => ToHead::Ready(stage, report),
            Event::Linked(stage) => ToHead::Linked(stage),
            Event::LoadFailed(stage, error) => ToHead::LoadFailed(stage, error),
            Event::Failed(stage, error) => ToHead::Failed(stage, error),
        };
        self.say(&message);
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

    /// Finds the model, compares what this worker makes of it with what the head wants, and begins to load.
    fn prepare(&mut self, plan: Plan) {
        self.running = None;
        let first = plan.tasks.first().map_or(0, |task| task.spec.index);
        match self.load(plan) {
            Ok(running) => {
                let stages = running.plan.tasks.iter().map(|task| {
                    let layers = &task.spec.layers;
                    (task.spec.index, (layers.start, layers.end), task.device.clone())
                });
                self.server.holds(stages.collect());
                self.running = Some(running);
            }
            Err(Refusal::Mismatch(ours)) => self.say(&ToHead::Mismatch(ours)),
            Err(Refusal::Load(error)) => self.say(&ToHead::LoadFailed(first, error)),
        }
    }

    fn load(&self, plan: Plan) -> Result<Running, Refusal> {
        let (specs, devices) = self.check(&plan)?;
        let refused = |message: String| Refusal::Load(LoadError::Refused { message });
        let contract = &plan.contract;
        let path =
            self.server.host.model(&contract.model.digest, plan.model_bytes, &plan.model_name).map_err(&refused)?;
        let checkpoint = Checkpoint::open(&path).map_err(|error| refused(error.to_string()))?;
        let checkpoint = Arc::new(checkpoint);
        let facts = ModelFacts::of(&checkpoint, contract.model.digest);
        let mut ours = contract.clone();
        for (task, device) in plan.tasks.iter().zip(&devices) {
            let seen = ours.seen_by(task.spec.index, facts.clone(), device.profile());
            ours = seen.map_err(|error| refused(error.to_string()))?;
        }
        if ours != *contract {
            return Err(Refusal::Mismatch(Box::new(ours)));
        }
        let mut layouts = Vec::new();
        for (task, device) in plan.tasks.iter().zip(&devices) {
            let layout =
                StageLayout::new(&checkpoint, task.spec.clone(), contract.options, device.profile(), device.limits());
            layouts.push(layout.map_err(|error| refused(error.to_string()))?);
        }
        let names = specs.iter().map(|spec| (String::new(), (spec.layers.start, spec.layers.end)));
        let (tell, events) = bounded(EVENTS_PER_STAGE * plan.tasks.len());
        let mut running = Running {
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
        for (index, (layout, device)) in layouts.into_iter().zip(devices).enumerate() {
            let (give, ports) = bounded(1);
            let thread = StageThread {
                checkpoint: checkpoint.clone(),
                device,
                ports,
                tell: tell.clone(),
                stop: running.stop.clone(),
                counters: running.counters[index].clone(),
                recorder: running.recorder.clone(),
                epoch: running.epoch.clone(),
            };
            running.waiting.push(give);
            running.threads.push(thread.start(layout).map_err(|error| refused(error.to_string()))?);
        }
        Ok(running)
    }

    /// Everything that a head could say wrongly; returns the stages of the pipeline and the device of each task.
    fn check(&self, plan: &Plan) -> Result<(Vec<StageSpec>, Vec<Device>), Refusal> {
        let wrong = |message: String| Refusal::Load(LoadError::Refused { message });
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
        let specs = plan.contract.check().map_err(|error| wrong(error.to_string()))?;
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
        Ok((specs, devices))
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
        let members = self.server.node().who().members;
        let member = name.parse().ok().and_then(|name: Name| members.get(&name).cloned());
        let (peer, address) = self
            .peer(name)
            .zip(member.and_then(|member| member.address))
            .ok_or_else(|| format!("worker {name}, which is next, is not in the member list"))?;
        let dialled = self
            .server
            .node()
            .dial(&peer, &address, DIAL)
            .map_err(|error| format!("worker {name}, which is next, is not reached: {error}"))?;
        let port = dialled.open(hop_id(&running.plan, task.spec.index + 1), hop_limits(&running.plan));
        running.peers.push(dialled);
        Ok(Box::new(port))
    }
}

/// Why a plan is not carried out.
enum Refusal {
    Mismatch(Box<Contract>),
    Load(LoadError),
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
