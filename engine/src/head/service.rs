//! A head that many callers share. A thread of its own drives it; each request has somebody who hears what becomes of it.
//!
//! Whoever hears must not wait: what is slow keeps what it heard. That is at most what the request may come to: an event
//! for each of its tokens, one for each piece of text, and a few.
//!
//! When the pipeline fails, the service opens another one if it was told how. Where the head recovers
//! ([`super::HeadOptions::recovers`]), everything waits for that ([`Notice::Paused`]), and so does what is asked meanwhile.
//! Where it does not, or no other pipeline is to be had, everything that was asked ends ([`Notice::Failed`]), and until there
//! is one the service refuses everything with the reason.

mod driver;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, unbounded};
use thiserror::Error;

use super::{Event, Head, HeadError, Request, Slow};
use crate::pipeline::{Past, Pipeline, StageName, StageReport};
use crate::schedule::{Limits, Refused, RequestId, Status};
use crate::trace::{Recorder, Trace};
use crate::worker::Counters;
use driver::{Driver, View};

/// What callers may have asked that the driver has not looked at; it does so every few milliseconds.
const ASKED_MAX: usize = 4096;
/// How long [`Pipe::trace`] waits for stages elsewhere to tell of the latest, and how often it looks.
const SETTLE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

/// Opens another pipeline in the place of one that failed with that error, and says in words what it is. Called from a
/// thread of its own, when the old one has ended.
pub type Reopen = Box<dyn FnMut(&HeadError, &Past) -> Result<(Pipeline, String), NotReopened> + Send>;

/// Why there is no other pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotReopened {
    /// The program is to end: what was asked is not given up for it, but ends as the program does.
    #[error("cancelled")]
    Cancelled,
    /// In words.
    #[error("{0}")]
    Failed(String),
}

/// What befell a pipeline.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the pipeline is down: {reason}")]
pub struct Failure {
    /// The stage, where it was one.
    pub stage: Option<StageName>,
    /// What happened.
    pub reason: String,
}

impl Failure {
    fn of(error: &HeadError) -> Failure {
        let stage = match error {
            HeadError::Pipeline(error) => error.stage().cloned(),
            _ => None,
        };
        Failure { stage, reason: error.to_string() }
    }
}

/// Why the service does not do what it was asked.
#[derive(Clone, Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ServiceError {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("token id {id} is not in the vocabulary of {vocab}")]
    NoSuchToken { id: u32, vocab: usize },
    #[error(transparent)]
    Down(#[from] Failure),
    #[error("{stage} has had a micro-batch for longer than {} s, and nothing came through the pipe meanwhile", within.as_secs_f64())]
    Silent { stage: StageName, within: Duration },
    #[error("the service is stopping and takes nothing more")]
    Draining,
}

/// What becomes of a request.
#[derive(Clone, Debug)]
pub enum Notice {
    /// It waits or runs.
    Taken(RequestId),
    /// It never will. The last notice.
    Refused(ServiceError),
    /// The pipeline failed, and another one is sought to go on with.
    Paused(Failure),
    /// It goes on, with another pipeline: which, and what is computed again first.
    Resumed(String),
    /// The pipeline failed; what there is of its answers follows.
    Failed(Failure),
    /// It goes on. [`Event::Done`] of its last answer is the last notice.
    Event(Event),
}

/// Hears what becomes of a request.
type Hear = Box<dyn FnMut(Notice) + Send>;
/// Hears what became of a probe.
type HearProbe = Box<dyn FnOnce(Result<Probe, ServiceError>) + Send>;

/// What a probe found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// It crossed every stage, in so long.
    Crossed(Duration),
    /// It is still behind other micro-batches, which come out of the pipe.
    Moving,
}

/// What is asked of the driver.
enum Ask {
    Answer { request: Box<Request>, hear: Hear, gone: Arc<AtomicBool> },
    Probe { within: Duration, hear: HearProbe },
}

impl Ask {
    fn refuse(self, error: ServiceError) {
        match self {
            Ask::Answer { mut hear, .. } => hear(Notice::Refused(error)),
            Ask::Probe { hear, .. } => hear(Err(error)),
        }
    }
}

/// A pipeline that the service drives, or drove last: what others may look at while it runs.
#[derive(Debug)]
pub struct Pipe {
    /// How many there were before it.
    pub number: u64,
    /// What each stage said when it was ready.
    pub reports: Vec<StageReport>,
    /// What each stage has done so far.
    pub counters: Vec<Arc<Counters>>,
    /// What happened when.
    pub recorder: Arc<Recorder>,
    /// What the scheduler keeps to.
    pub limits: Limits,
}

impl Pipe {
    fn of(head: &Head, number: u64) -> Pipe {
        let pipeline = head.pipeline();
        Pipe {
            number,
            reports: pipeline.reports().to_vec(),
            counters: pipeline.counters().to_vec(),
            recorder: pipeline.recorder().clone(),
            limits: *head.scheduler().limits(),
        }
    }

    /// What happened when, of as long as the rings remember. Waits a moment for stages elsewhere to tell of the latest.
    pub fn trace(&self) -> Trace {
        let is_remote = self.reports.iter().any(|report| report.worker.is_some());
        let until = std::time::Instant::now() + SETTLE;
        while is_remote && !self.recorder.is_settled() && std::time::Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        self.recorder.snapshot()
    }
}

/// How the service stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// The pipeline.
    pub pipe: Arc<Pipe>,
    /// The scheduler of it.
    pub schedule: Status,
    /// Requests that were taken and are not answered.
    pub requests: usize,
    /// Stages that take much longer than they used to.
    pub stragglers: Vec<Slow>,
    /// Why the pipeline answers nothing now.
    pub down: Option<Failure>,
    /// Why the latest one that failed did, also when another one runs since.
    pub last_failure: Option<Failure>,
    /// Pipelines that failed.
    pub failures: u64,
    /// Pipelines that were opened in the place of failed ones.
    pub restarts: u64,
    /// Whether new requests are refused because it is stopping.
    pub is_draining: bool,
}

/// What service and driver share.
#[derive(Debug)]
struct Shared {
    view: Mutex<View>,
    /// Something was asked, or somebody has gone: the driver is to look at once.
    interrupt: AtomicBool,
    draining: AtomicBool,
    stop: AtomicBool,
    fault: OnceLock<Failure>,
}

impl Shared {
    fn view(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Serves many callers with one head. Dropping it cancels what runs and ends the stages.
pub struct Service {
    asks: Sender<Ask>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("shared", &self.shared).finish_non_exhaustive()
    }
}

/// A request that was asked; it is cancelled when this is dropped before the last answer is complete.
#[derive(Debug)]
#[must_use = "dropping it cancels the request"]
pub struct Ticket {
    gone: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Release);
        self.shared.interrupt.store(true, Ordering::Release);
    }
}

/// What becomes of a request, one notice after the other. Dropping it cancels the request.
#[derive(Debug)]
pub struct Notices {
    notices: Receiver<Notice>,
    _ticket: Ticket,
}

impl Iterator for Notices {
    type Item = Notice;

    /// Waits for the next one; nothing behind the last.
    fn next(&mut self) -> Option<Notice> {
        self.notices.recv().ok()
    }
}

impl Notices {
    /// The next one, where it comes in time.
    pub fn within(&self, patience: Duration) -> Option<Notice> {
        self.notices.recv_timeout(patience).ok()
    }
}

impl Service {
    /// Begins to drive a head. When its pipeline fails, the next one is had from `reopen`.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(head: Head, reopen: Option<Reopen>) -> std::io::Result<Service> {
        let (asks, asked) = bounded(ASKED_MAX);
        let shared = Arc::new(Shared {
            view: Mutex::new(View::new(&head)),
            interrupt: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            fault: OnceLock::new(),
        });
        let driver = Driver::new(head, reopen, asked, shared.clone());
        let thread = std::thread::Builder::new().name("head".to_owned()).spawn(move || driver.run())?;
        Ok(Service { asks, shared, thread: Some(thread) })
    }

    /// Asks for answers; does not wait. `hear` is called from the driver's thread and must return at once.
    pub fn submit(&self, request: Request, hear: impl FnMut(Notice) + Send + 'static) -> Ticket {
        let gone = Arc::new(AtomicBool::new(false));
        let ask = Ask::Answer { request: Box::new(request), hear: Box::new(hear), gone: gone.clone() };
        let busy = Refused::Busy { queued: ASKED_MAX, limit: ASKED_MAX, retry_seconds: 1.0 };
        match self.ask(ask) {
            Err(TrySendError::Full(Ask::Answer { mut hear, .. })) => hear(Notice::Refused(busy.into())),
            Err(TrySendError::Disconnected(Ask::Answer { mut hear, .. })) => {
                hear(Notice::Refused(ServiceError::Draining));
            }
            _ => {}
        }
        Ticket { gone, shared: self.shared.clone() }
    }

    /// As [`Service::submit`], for a caller that waits.
    pub fn notices(&self, request: Request) -> Notices {
        let (sender, notices) = unbounded();
        let ticket = self.submit(request, move |notice| {
            // Whoever asked may be gone.
            let _ = sender.send(notice);
        });
        Notices { notices, _ticket: ticket }
    }

    /// Sends an empty micro-batch through all stages, behind what is in the pipe, and tells `hear` what became of it
    /// after at most `within`; does not wait.
    pub fn probe(&self, within: Duration, hear: impl FnOnce(Result<Probe, ServiceError>) + Send + 'static) {
        // Where so much is asked at once, nobody hears: the caller finds its `hear` dropped.
        let _ = self.ask(Ask::Probe { within, hear: Box::new(hear) });
    }

    fn ask(&self, ask: Ask) -> Result<(), TrySendError<Ask>> {
        let sent = self.asks.try_send(ask);
        self.shared.interrupt.store(true, Ordering::Release);
        sent
    }

    /// How it stands, at most a few milliseconds ago.
    pub fn standing(&self) -> Standing {
        let is_draining = self.shared.draining.load(Ordering::Relaxed);
        self.shared.view().standing(is_draining)
    }

    /// The pipeline that runs, or ran last.
    pub fn pipe(&self) -> Arc<Pipe> {
        self.shared.view().pipe()
    }

    /// A fault of this program (a panic) that nothing goes on behind: everybody has heard it, and it is time to end.
    pub fn fault(&self) -> Option<&Failure> {
        self.shared.fault.get()
    }

    /// Takes no new requests; those that run go on. [`Standing::requests`] says when there are none.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::Release);
    }

    /// Cancels what runs and ends the stages; does not wait for them, as dropping the service does.
    pub fn end(&self) {
        self.drain();
        self.shared.stop.store(true, Ordering::Release);
        self.shared.interrupt.store(true, Ordering::Release);
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.end();
        if let Some(thread) = self.thread.take() {
            // What it panicked with has been printed.
            let _ = thread.join();
        }
    }
}
