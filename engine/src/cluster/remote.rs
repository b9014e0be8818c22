//! A worker, as the head sees it: leased, told what to run, listened to.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Sender;
use pp_shaders::Profile;
use pp_transport::identity::{HostCertificate, PeerName, Role};
use pp_transport::members::Member;
use pp_transport::quic::{CONTROL, DialError, LinkPort, Node, Peer};
use pp_transport::{LinkId, LinkLimits, Port, PortError};
use thiserror::Error;

use super::clock::Alignment;
use super::control::{self, ControlError, DeviceInfo, Greeting, Holder, Plan, Purpose, ToHead, ToWorker, Welcome};
use super::whole::Offered;
use super::{control_limits, health, measure, weights, whole};
use crate::backend::DeviceLimits;
use crate::calibrate::{Calibration, Shape};
use crate::contract::{Build, Contract};
use crate::pipeline::thread::{Event, WeightsEvent};
use crate::trace::{Nanos, Recorder, StageSpan};
use crate::weights::LoadError;
use crate::worker::{Counters, WorkerError};

/// How long a worker may take to answer what costs it nothing.
const ANSWER: Duration = Duration::from_secs(5);
/// How long it may take to measure a device.
const CALIBRATED: Duration = Duration::from_secs(120);
/// How long it may take to stop its stages: a micro-batch that is on a device is finished first.
const PAUSED: Duration = Duration::from_secs(12);
/// How often the clocks are compared, and somebody who waits looks at it.
const PING: Duration = Duration::from_millis(300);

/// Why a worker is not ours.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LeaseError {
    #[error("worker {worker}: {error}")]
    Dial { worker: String, error: DialError },
    #[error("worker {worker} is busy: held by {} since {}", .holder.head, time_of_day(.holder.since))]
    Busy { worker: String, holder: Holder },
    #[error("worker {worker} is being drained and takes nothing new")]
    Draining { worker: String },
    #[error("worker {worker}: {error}")]
    Control { worker: String, error: ControlError },
    #[error("worker {worker} went away while it was greeted{}", why(.reason))]
    Gone { worker: String, reason: Option<String> },
    #[error("worker {worker} did not answer within {seconds} s")]
    Silent { worker: String, seconds: u64 },
    #[error("worker {worker} refused: {reason}")]
    Refused { worker: String, reason: String },
}

impl LeaseError {
    /// Whether it may be otherwise in a moment.
    pub fn may_pass(&self) -> bool {
        match self {
            LeaseError::Dial { error, .. } => error.may_pass(),
            LeaseError::Busy { .. } | LeaseError::Gone { reason: None, .. } | LeaseError::Silent { .. } => true,
            _ => false,
        }
    }
}

fn why(reason: &Option<String>) -> String {
    reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"))
}

/// `HH:MM:SS UTC` of Unix seconds.
fn time_of_day(unix: u64) -> String {
    let (hours, minutes, seconds) = (unix / 3600 % 24, unix / 60 % 60, unix % 60);
    format!("{hours:02}:{minutes:02}:{seconds:02} UTC")
}

/// Numbers that nobody else draws.
pub(crate) fn draw() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Who hears what a worker says of a pipeline's stages.
pub(crate) struct Listener {
    pub(crate) events: Sender<Event>,
    pub(crate) recorder: Arc<Recorder>,
    /// Of the stages that are the worker's.
    pub(crate) stages: Vec<(usize, Arc<Counters>)>,
    /// What the worker must make of the model and the plan.
    pub(crate) contract: Contract,
}

/// Why a pipeline is to be another one, though nothing has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Going {
    /// The worker is to be rid of its stages.
    Away,
    /// The layers are to be divided otherwise.
    Split(Vec<usize>),
}

/// A worker that is connected. Dropping it gives it back.
pub struct Worker {
    name: String,
    welcome: Welcome,
    peer: Peer,
    control: LinkPort,
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
    /// The endpoint lives as long as somebody needs the worker.
    _node: Arc<Node>,
}

/// What the reader of the control link shares.
struct Shared {
    name: String,
    is_lease: bool,
    listener: Mutex<Option<Listener>>,
    /// The latest answer to something that has one.
    answer: Mutex<Option<ToHead>>,
    answered: Condvar,
    alignment: Mutex<Alignment>,
    /// Why it is gone.
    gone: Mutex<Option<WorkerError>>,
    /// It wants to be rid of its stages.
    draining: AtomicBool,
    /// Somebody wants the layers to be divided so: the number of the wish, and the split.
    wish: Mutex<Option<(u64, Vec<u32>)>>,
    /// Whether anybody looks for it.
    watched: AtomicBool,
    /// Why the pipeline is to be another one, once that is prepared.
    going: Mutex<Option<Going>>,
    stop: AtomicBool,
    origin: Instant,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// Connects to `member` and introduces this process as `head`; with [`Purpose::Lease`] it is ours from then on.
    ///
    /// # Errors
    /// [`LeaseError`].
    ///
    /// # Panics
    /// When the member has no address: it is a head.
    pub fn connect(
        node: &Arc<Node>,
        member: &Member,
        head: &str,
        purpose: Purpose,
        patience: Duration,
    ) -> Result<Worker, LeaseError> {
        let name = member.name.to_string();
        let address = member.address.as_ref().expect("workers have addresses");
        let cluster = node.who().members.cluster();
        let peer_name = PeerName { cluster, role: Role::Worker, name: member.name.clone() };
        let peer = node
            .dial(&peer_name, address, patience)
            .map_err(|error| LeaseError::Dial { worker: name.clone(), error })?;
        let control = peer.open(LinkId { session: draw(), link: CONTROL }, control_limits());
        let gone = |peer: &Peer| LeaseError::Gone { worker: name.clone(), reason: peer.why_closed() };
        let greeting = Greeting { build: Build::this(), head: head.to_owned(), purpose };
        if control.send_frame(control::encode(&ToWorker::Greeting(greeting))).is_err() {
            return Err(gone(&peer));
        }
        let answer = match control.receive_frame(ANSWER) {
            Ok(arrival) => {
                control::decode(&arrival.frame).map_err(|error| LeaseError::Control { worker: name.clone(), error })?
            }
            Err(PortError::Timeout { timeout }) if peer.why_closed().is_none() => {
                return Err(LeaseError::Silent { worker: name, seconds: timeout.as_secs() });
            }
            Err(_) => return Err(gone(&peer)),
        };
        let welcome = match answer {
            ToHead::Welcome(welcome) => *welcome,
            ToHead::Busy(holder) => return Err(LeaseError::Busy { worker: name, holder }),
            ToHead::Draining => return Err(LeaseError::Draining { worker: name }),
            _ => {
                let error = ControlError::Malformed { message: "it does not answer the greeting".to_owned() };
                return Err(LeaseError::Control { worker: name, error });
            }
        };
        Build::this().warn_if_different(&welcome.build, &format!("worker {name}"));
        let shared = Arc::new(Shared {
            name: name.clone(),
            is_lease: purpose == Purpose::Lease,
            listener: Mutex::default(),
            answer: Mutex::default(),
            answered: Condvar::new(),
            alignment: Mutex::default(),
            gone: Mutex::default(),
            draining: AtomicBool::new(false),
            wish: Mutex::default(),
            watched: AtomicBool::new(false),
            going: Mutex::default(),
            stop: AtomicBool::new(false),
            origin: Instant::now(),
        });
        let (reading, hears, at) = (shared.clone(), control.clone(), peer.clone());
        let reader = std::thread::Builder::new()
            .name(format!("worker-{name}"))
            .spawn(move || reading.listen(&hears, &at))
            .map_err(|error| LeaseError::Refused { worker: name.clone(), reason: error.to_string() })?;
        Ok(Worker { name, welcome, peer, control, shared, reader: Some(reader), _node: node.clone() })
    }

    /// Its member's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it said when it was greeted.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// The certificate that it has shown, to be renewed.
    pub fn certificate(&self) -> Option<HostCertificate> {
        self.peer.certificate()
    }

    /// The shortest round trip of a small message through both programs, so far.
    pub fn round_trip(&self) -> Option<Duration> {
        locked(&self.shared.alignment).round_trip().map(Duration::from_nanos)
    }

    /// The largest UDP payload that passes.
    pub fn mtu(&self) -> u16 {
        self.peer.mtu()
    }

    /// Bytes a second that go there and back at once, measured with `blocks` blocks of [`control::ECHO_BYTES_MAX`].
    ///
    /// # Errors
    /// [`LeaseError`] when it does not answer.
    pub fn bandwidth(&self, blocks: usize) -> Result<f64, LeaseError> {
        let started = Instant::now();
        for _ in 0..blocks {
            match self.ask(&ToWorker::Echo(vec![0x5a; control::ECHO_BYTES_MAX]))? {
                ToHead::Echo(bytes) if bytes.len() == control::ECHO_BYTES_MAX => {}
                _ => {
                    let error = ControlError::Malformed { message: "an echo came back changed".to_owned() };
                    return Err(LeaseError::Control { worker: self.name.clone(), error });
                }
            }
        }
        Ok((2 * blocks * control::ECHO_BYTES_MAX) as f64 / started.elapsed().as_secs_f64())
    }

    /// What a model of that shape takes on one of its devices, which it measures if it has not before. Seldom longer than
    /// half a minute.
    ///
    /// # Errors
    /// [`LeaseError::Refused`] with its reason, and when it does not answer or `cancel` is set.
    pub fn calibrate(&self, device: &str, shape: &Shape, cancel: &AtomicBool) -> Result<Calibration, LeaseError> {
        let refused = |reason: String| LeaseError::Refused { worker: self.name.clone(), reason };
        let question = ToWorker::Calibrate(device.to_owned(), Box::new(shape.clone()));
        match self.ask_within(&question, CALIBRATED, cancel)? {
            ToHead::Calibrated(Ok(found)) if found.is_of(shape) => Ok(*found),
            ToHead::Calibrated(Ok(_)) => Err(refused("what it says its device takes makes no sense".to_owned())),
            ToHead::Calibrated(Err(reason)) | ToHead::Done(Err(reason)) => Err(refused(reason)),
            _ => Err(refused("it answers another question".to_owned())),
        }
    }

    /// Gives it a member list, a certificate, or says that it is to be drained.
    ///
    /// # Errors
    /// [`LeaseError`], [`LeaseError::Refused`] with its reason.
    pub fn tell(&self, message: &ToWorker) -> Result<(), LeaseError> {
        match self.ask(message)? {
            ToHead::Done(Ok(())) => Ok(()),
            ToHead::Done(Err(reason)) => Err(LeaseError::Refused { worker: self.name.clone(), reason }),
            _ => Err(self.other_answer()),
        }
    }

    /// How its host is, and by how much its clock is ahead of ours, give or take half the round trip.
    ///
    /// # Errors
    /// [`LeaseError`] when it does not answer.
    pub fn health(&self, models: &[health::Model]) -> Result<(health::Health, f64), LeaseError> {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let asked = now();
        match self.ask(&ToWorker::Examine(models.iter().take(health::MODELS_MAX).cloned().collect()))? {
            ToHead::Health(health) => {
                let way = self.round_trip().unwrap_or_default().as_secs_f64() / 2.0;
                let ahead = health.unix_ms as f64 * 1e-3 - asked - way;
                Ok((*health, ahead))
            }
            _ => Err(self.other_answer()),
        }
    }

    /// A link to it that is only for measuring: it serves ([`pp_transport::measure::serve`]) until the link or this
    /// worker is dropped. A worker that runs stages refuses.
    ///
    /// # Errors
    /// [`LeaseError`].
    pub fn measure(&self, payload_bytes: usize) -> Result<Box<dyn Port>, LeaseError> {
        let session = draw();
        self.tell(&ToWorker::Measure(session, payload_bytes as u64))?;
        Ok(Box::new(self.peer.open(measure::id(session), measure::limits(payload_bytes))))
    }

    /// The model that is called so there, if there is any. Where nobody has
    /// asked for it before, the worker reads all of it first.
    ///
    /// # Errors
    /// [`LeaseError::Refused`] with its reason, and when it does not answer or `cancel` is set.
    pub fn whole(&self, name: &str, cancel: &AtomicBool) -> Result<Option<Offered>, LeaseError> {
        let session = draw();
        match self.ask_within(&ToWorker::Whole(session, name.to_owned()), whole::PATIENCE, cancel)? {
            ToHead::Whole(Ok(None)) => Ok(None),
            ToHead::Whole(Ok(Some(found))) => {
                let malformed = |message| ControlError::Malformed { message };
                found.check().map_err(|message| self.control_error(malformed(message)))?;
                let port = Box::new(self.peer.open(whole::id(session), weights::limits()));
                Ok(Some(Offered { inventory: *found, port }))
            }
            ToHead::Whole(Err(reason)) | ToHead::Done(Err(reason)) => {
                Err(LeaseError::Refused { worker: self.name.clone(), reason })
            }
            _ => Err(self.other_answer()),
        }
    }

    fn control_error(&self, error: ControlError) -> LeaseError {
        LeaseError::Control { worker: self.name.clone(), error }
    }

    fn other_answer(&self) -> LeaseError {
        self.control_error(ControlError::Malformed { message: "an answer to another question".to_owned() })
    }

    /// A question and its answer, one at a time.
    fn ask(&self, message: &ToWorker) -> Result<ToHead, LeaseError> {
        self.ask_within(message, ANSWER, &AtomicBool::new(false))
    }

    fn ask_within(&self, message: &ToWorker, patience: Duration, cancel: &AtomicBool) -> Result<ToHead, LeaseError> {
        *locked(&self.shared.answer) = None;
        let gone = || LeaseError::Gone { worker: self.name.clone(), reason: self.peer.why_closed() };
        self.send(message).map_err(|_| gone())?;
        let until = Instant::now() + patience;
        let mut answer = locked(&self.shared.answer);
        loop {
            if let Some(answer) = answer.take() {
                return Ok(answer);
            }
            if locked(&self.shared.gone).is_some() {
                return Err(gone());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || cancel.load(Ordering::Relaxed) {
                return Err(LeaseError::Silent { worker: self.name.clone(), seconds: patience.as_secs() });
            }
            answer =
                self.shared.answered.wait_timeout(answer, left.min(PING)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn send(&self, message: &ToWorker) -> Result<(), PortError> {
        self.control.send_frame(control::encode(message))
    }

    /// Tells it what to run, and who listens from now on.
    pub(crate) fn prepare(&self, plan: Plan, listener: Listener) -> Result<(), WorkerError> {
        *locked(&self.shared.listener) = Some(listener);
        match locked(&self.shared.gone).clone() {
            Some(error) => Err(error),
            None => self.send(&ToWorker::Prepare(Box::new(plan))).map_err(|_| self.shared.lost(None, &self.peer)),
        }
    }

    /// Tells it something; if it is gone, the reader says so.
    pub(crate) fn say(&self, message: &ToWorker) {
        let _ = self.send(message);
    }

    /// This end of the link on which it asks for weights.
    pub(crate) fn weights(&self, id: LinkId) -> LinkPort {
        self.peer.open(id, weights::limits())
    }

    /// The links may be opened.
    pub(crate) fn start(&self) {
        // If it is gone, the reader says so.
        let _ = self.send(&ToWorker::Start);
    }

    /// Frames of older epochs are to be dropped.
    pub(crate) fn epoch(&self, epoch: u64) {
        let _ = self.send(&ToWorker::Epoch(epoch));
    }

    /// The pipeline is not wanted any more.
    pub(crate) fn release(&self) {
        *locked(&self.shared.listener) = None;
        let _ = self.send(&ToWorker::Release);
    }

    /// As [`Worker::release`], but what is loaded stays for the next pipeline. All that it had to say of this one was heard
    /// then, or it is gone.
    pub(crate) fn pause(&self) {
        let _ = self.ask_within(&ToWorker::Pause, PAUSED, &AtomicBool::new(false));
        *locked(&self.shared.listener) = None;
    }

    /// Whether somebody has begun to drain it since it was connected.
    pub fn is_draining(&self) -> bool {
        self.shared.draining.load(Ordering::Relaxed)
    }

    /// The split that somebody has asked the worker for, and the number of that wish; once.
    pub fn wish(&self) -> Option<(u64, Vec<u32>)> {
        locked(&self.shared.wish).take()
    }

    /// Tells what has come of a wish, for whoever has uttered it.
    pub fn came(&self, number: u64, outcome: Result<String, String>) {
        self.say(&ToWorker::Outcome(number, outcome));
    }

    /// The pipeline that it is in is to be another one: its head ends it with the next turn.
    pub fn go(&self, why: Going) {
        *locked(&self.shared.going) = Some(why);
    }

    /// The pipeline that it is in need not go any more.
    pub fn stay(&self) {
        *locked(&self.shared.going) = None;
    }

    /// Somebody looks for wishes ([`Worker::wish`]) from now on; until then they are refused.
    pub fn watched(&self) {
        self.shared.watched.store(true, Ordering::Relaxed);
    }

    /// What [`Worker::go`] was told last; once.
    pub(crate) fn going(&self) -> Option<Going> {
        locked(&self.shared.going).take()
    }

    /// Asks whoever has the worker to divide the layers so; returns the number of the wish.
    ///
    /// # Errors
    /// [`LeaseError::Refused`] where nobody has it, and when it does not answer.
    pub fn rebalance(&self, split: &[u32]) -> Result<u64, LeaseError> {
        match self.ask(&ToWorker::Rebalance(split.to_vec()))? {
            ToHead::Rebalance(number, _) => Ok(number),
            ToHead::Done(Err(reason)) => Err(LeaseError::Refused { worker: self.name.clone(), reason }),
            _ => Err(self.other_answer()),
        }
    }

    /// What has come of a wish; nothing as long as that is not known.
    ///
    /// # Errors
    /// When the worker does not answer.
    pub fn rebalanced(&self, number: u64) -> Result<Option<Result<String, String>>, LeaseError> {
        match self.ask(&ToWorker::Rebalanced(number))? {
            ToHead::Rebalanced(outcome) => Ok(outcome),
            _ => Err(self.other_answer()),
        }
    }

    /// Whether it has gone.
    pub fn is_gone(&self) -> bool {
        locked(&self.shared.gone).is_some()
    }

    /// This end of a hop to or from one of its stages.
    pub(crate) fn hop(&self, id: LinkId, limits: LinkLimits) -> Box<dyn Port> {
        Box::new(self.peer.open(id, limits))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.send(&ToWorker::Release);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn now(&self) -> Nanos {
        self.origin.elapsed().as_nanos() as Nanos
    }

    fn lost(&self, error: Option<&PortError>, peer: &Peer) -> WorkerError {
        let worker = self.name.clone();
        match error {
            Some(PortError::Lost { silent }) => WorkerError::Lost { worker, silent_ms: silent.as_millis() as u64 },
            _ => WorkerError::Gone { worker, reason: peer.why_closed() },
        }
    }

    /// Hears the worker until it is gone or nobody has it any more.
    fn listen(&self, link: &LinkPort, peer: &Peer) {
        let mut pinged = Instant::now() - PING;
        while !self.stop.load(Ordering::Relaxed) {
            if pinged.elapsed() >= PING {
                pinged = Instant::now();
                let _ = link.send_frame(control::encode(&ToWorker::Ping(self.now())));
            }
            match link.receive_frame(PING / 3) {
                Ok(arrival) => {
                    let back = self.now();
                    match control::decode(&arrival.frame) {
                        Ok(message) => self.hear(message, back, link),
                        Err(error) => {
                            let reason = Some(error.to_string());
                            return self.end(WorkerError::Gone { worker: self.name.clone(), reason });
                        }
                    }
                }
                Err(PortError::Timeout { .. }) => {}
                Err(error) => return self.end(self.lost(Some(&error), peer)),
            }
        }
    }

    fn end(&self, error: WorkerError) {
        *locked(&self.gone) = Some(error.clone());
        self.answered.notify_all();
        if let Some(listener) = locked(&self.listener).as_ref() {
            for (stage, _) in &listener.stages {
                let _ = listener.events.send(Event::Failed(*stage, error.clone()));
            }
        }
    }

    fn hear(&self, message: ToHead, back: Nanos, link: &LinkPort) {
        match message {
            ToHead::Pong(sent, there) => return locked(&self.alignment).add(sent, there, back),
            ToHead::Draining => return self.draining.store(true, Ordering::Relaxed),
            ToHead::Serving => {
                self.draining.store(false, Ordering::Relaxed);
                locked(&self.going).take_if(|going| *going == Going::Away);
                return;
            }
            ToHead::Welcome(_) | ToHead::Busy(_) => return,
            // The answer to whoever asks for it, and the wish to whoever has the worker.
            ToHead::Rebalance(number, split) if self.is_lease => {
                if self.watched.load(Ordering::Relaxed) {
                    *locked(&self.wish) = Some((number, split));
                } else {
                    let reason = "what runs there does not move its layers while it runs".to_owned();
                    let _ = link.send_frame(control::encode(&ToWorker::Outcome(number, Err(reason))));
                }
                return;
            }
            ToHead::Done(_)
            | ToHead::Echo(_)
            | ToHead::Health(_)
            | ToHead::Calibrated(_)
            | ToHead::Whole(_)
            | ToHead::Rebalance(..)
            | ToHead::Rebalanced(_) => {
                *locked(&self.answer) = Some(message);
                return self.answered.notify_all();
            }
            _ => {}
        }
        let listener = locked(&self.listener);
        let Some(listener) = listener.as_ref() else { return };
        let counters = |stage: usize| listener.stages.iter().find(|(index, _)| *index == stage);
        let is_ours = |stage: usize| counters(stage).is_some();
        let event = match message {
            ToHead::Progress(stage, at) if is_ours(stage) => Event::Progress(stage, at),
            ToHead::Ready(stage, mut report) if is_ours(stage) => {
                report.worker = Some(self.name.clone());
                listener.recorder.timed_by(stage, report.timestamps);
                Event::Ready(stage, report)
            }
            ToHead::Linked(stage) if is_ours(stage) => Event::Linked(stage),
            ToHead::LoadFailed(stage, error) if is_ours(stage) => Event::LoadFailed(stage, error),
            ToHead::Failed(stage, error) if is_ours(stage) => Event::Failed(stage, error),
            ToHead::HasModel(has) => Event::Weights(self.name.clone(), WeightsEvent::HasModel(has)),
            ToHead::Holds(holds) => Event::Weights(self.name.clone(), WeightsEvent::Holds(holds)),
            ToHead::Mismatch(theirs) => {
                let stage = listener.stages.first().map_or(0, |(stage, _)| *stage);
                let differences = listener.contract.differences(&theirs);
                let text: Vec<String> = differences.iter().map(|difference| difference.to_string()).collect();
                let message = format!("worker {} does not agree: {}", self.name, text.join("; "));
                Event::LoadFailed(stage, LoadError::Refused { message })
            }
            ToHead::Spans(stage, spans) if is_ours(stage) => {
                let alignment = locked(&self.alignment).clone();
                let ahead = listener.recorder.ahead_of(self.origin);
                for span in spans {
                    let ours = |at| (i128::from(alignment.ours(at)) + ahead).max(0) as Nanos;
                    listener.recorder.stage_done(stage, moved(span, ours));
                }
                return;
            }
            ToHead::Beats(beats) => {
                for beat in beats {
                    if let Some((_, counters)) = counters(beat.stage) {
                        counters.set(&beat);
                    }
                }
                return;
            }
            // Of a stage that it does not have.
            _ => return,
        };
        let _ = listener.events.send(event);
    }
}

pub(super) fn moved(span: StageSpan, ours: impl Fn(Nanos) -> Nanos) -> StageSpan {
    StageSpan {
        arrived: ours(span.arrived),
        taken: ours(span.taken),
        started: ours(span.started),
        finished: ours(span.finished),
        send_started: ours(span.send_started),
        sent: ours(span.sent),
        ..span
    }
}

/// A device of a worker, as the head plans with it.
#[derive(Clone)]
pub struct RemoteDevice {
    worker: Arc<Worker>,
    info: DeviceInfo,
    profile: Profile,
}

impl RemoteDevice {
    /// The device `id` of a worker; without an id the worker's first.
    ///
    /// # Errors
    /// [`LeaseError::Refused`] when there is no such device, or it has a profile that this program does not know.
    pub fn of(worker: &Arc<Worker>, id: Option<&str>) -> Result<RemoteDevice, LeaseError> {
        let refused = |reason: String| LeaseError::Refused { worker: worker.name.clone(), reason };
        let devices = &worker.welcome.devices;
        let found = match id {
            Some(id) => devices.iter().find(|device| device.id == id),
            None => devices.first(),
        };
        let info = found.cloned().ok_or_else(|| {
            let known: Vec<&str> = devices.iter().map(|device| device.id.as_str()).collect();
            refused(format!("it has no device {:?}; it has {}", id.unwrap_or("at all"), known.join(", ")))
        })?;
        let profile = Profile::named(&info.profile)
            .ok_or_else(|| refused(format!("its profile {:?} is unknown", info.profile)))?;
        Ok(RemoteDevice { worker: worker.clone(), info, profile })
    }

    /// The worker.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// What the worker says of it.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Sizes of workgroups and tiles.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Limits of its buffers.
    pub fn limits(&self) -> DeviceLimits {
        self.info.limits
    }
}

impl fmt::Debug for RemoteDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.worker.name, self.info.id)
    }
}
