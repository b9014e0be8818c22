//! A head's visit to a worker: what it asks is answered; the stages that it wants are loaded, linked and run.

mod loading;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, select};
use pp_transport::identity::{Name, PeerName, Role};
use pp_transport::local::pair;
use pp_transport::quic::{LinkPort, Peer, tuning};
use pp_transport::{LinkId, LinkLimits, Port, PortError};

use super::control::{self, Beat, ECHO_BYTES_MAX, Neighbour, Plan, SPANS_MAX, Task, ToHead, ToWorker};
use super::health::MODELS_MAX;
use super::measure::Serving;
use super::whole::Giving;
use super::worker::Server;
use crate::calibrate::Shape;
use crate::checkpoint::Checkpoint;
use crate::pipeline::shelf::Shelf;
use crate::pipeline::thread::{self, Event, Ports};
use crate::trace::Recorder;
use crate::weights::LoadError;
use crate::worker::Counters;
use loading::{Fetching, Lending, Pending};

/// How often the head hears how the stages do.
const BEAT: Duration = Duration::from_millis(100);
/// How long a neighbour may take to be reached.
const DIAL: Duration = Duration::from_secs(5);

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
    /// The head has heard that the worker drains, …
    told_draining: bool,
    /// … and the wish of this number.
    told_wish: u64,
    /// Stages that wait for another pipeline.
    shelf: Arc<Shelf>,
    giving: Option<Giving>,
    /// Set when the visit ends: whoever measures stops.
    ended: Arc<AtomicBool>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
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
    home: thread::Home,
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
        self.home.closed.store(true, Ordering::Release);
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
            told_draining: false,
            told_wish: 0,
            shelf: Arc::default(),
            giving: None,
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
            ToWorker::Pause if self.is_lease => {
                self.end_stages();
                self.say(&ToHead::Done(Ok(())));
            }
            ToWorker::Rebalance(split) => self.say(&match self.server.wish(split.clone()) {
                Ok(number) => ToHead::Rebalance(number, split),
                Err(reason) => ToHead::Done(Err(reason)),
            }),
            ToWorker::Rebalanced(number) => self.say(&ToHead::Rebalanced(self.server.outcome(number))),
            ToWorker::Outcome(number, outcome) if self.is_lease => self.server.came(number, outcome),
            ToWorker::Release | ToWorker::Outcome(..) => {}
            ToWorker::Calibrate(device, shape) => self.calibrate(device, *shape),
            ToWorker::Whole(session, name) => {
                self.giving = None;
                match Giving::start(&self.server, &self.control, session, name) {
                    Ok(giving) => self.giving = Some(giving),
                    Err(error) => self.say(&ToHead::Whole(Err(error.to_string()))),
                }
            }
            ToWorker::Greeting(_)
            | ToWorker::Echo(_)
            | ToWorker::Prepare(_)
            | ToWorker::Manifest { .. }
            | ToWorker::Fetch(_)
            | ToWorker::Pause
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
        if self.server.is_draining() != self.told_draining {
            self.told_draining = !self.told_draining;
            self.say(if self.told_draining { &ToHead::Draining } else { &ToHead::Serving });
        }
        if let Some((number, split)) = self.server.wished().filter(|(number, _)| *number > self.told_wish) {
            self.told_wish = number;
            self.say(&ToHead::Rebalance(number, split));
        }
        let ahead = running.recorder.ahead_of(self.origin);
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
        self.end_stages();
        self.shelf.clear();
    }

    /// The stages stop; those that are sound go to the shelf.
    fn end_stages(&mut self) {
        (self.pending, self.lending, self.running) = (None, None, None);
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
