//! The thread of a service: turns the head, and looks what is asked of it in between.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::{Ask, Failure, Hear, HearProbe, Notice, Pipe, Probe, Reopen, ServiceError, Shared, Standing};
use crate::head::{Event, Head, HeadError, Request, Turn};
use crate::schedule::{RequestId, Status};

/// How long a turn waits for the pipe when nothing interrupts it.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often an idle driver looks whether a stage has failed.
const IDLE: Duration = Duration::from_millis(100);
/// How long after a pipeline that could not be opened the next is tried: twice as long each time, up to the second.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// What is seen of the driver from outside.
#[derive(Debug)]
pub(super) struct View {
    pipe: Arc<Pipe>,
    schedule: Status,
    requests: usize,
    down: Option<Failure>,
    last_failure: Option<Failure>,
    failures: u64,
    restarts: u64,
}

impl View {
    pub(super) fn new(head: &Head) -> View {
        View {
            pipe: Arc::new(Pipe::of(head, 0)),
            schedule: head.status(),
            requests: 0,
            down: None,
            last_failure: None,
            failures: 0,
            restarts: 0,
        }
    }

    pub(super) fn pipe(&self) -> Arc<Pipe> {
        self.pipe.clone()
    }

    pub(super) fn standing(&self, is_draining: bool) -> Standing {
        Standing {
            pipe: self.pipe.clone(),
            schedule: self.schedule,
            requests: self.requests,
            down: self.down.clone(),
            last_failure: self.last_failure.clone(),
            failures: self.failures,
            restarts: self.restarts,
            is_draining,
        }
    }

    fn failed(&mut self, failure: &Failure) {
        self.schedule = Status { pages: self.schedule.pages, ..Status::default() };
        self.requests = 0;
        self.down = Some(failure.clone());
        self.last_failure = Some(failure.clone());
        self.failures += 1;
    }

    fn reopened(&mut self, head: &Head) {
        self.restarts += 1;
        self.pipe = Arc::new(Pipe::of(head, self.restarts));
        self.schedule = head.status();
        self.down = None;
    }
}

/// A request that runs or waits.
struct Running {
    hear: Hear,
    gone: Arc<AtomicBool>,
    answers_left: u32,
}

struct Probing {
    since: Instant,
    within: Duration,
    hear: HearProbe,
    /// It is back when the head has seen so many probes, …
    probes: u64,
    /// … and the pipe moves where more than so many micro-batches have come out of it.
    crossed: u64,
}

enum Pipeline {
    Up(Box<Head>),
    Down(Reopening),
}

/// How far the next pipeline is.
struct Reopening {
    failure: Failure,
    /// What is being opened.
    next: Option<Receiver<Result<Head, String>>>,
    wait: Duration,
    retry_at: Option<Instant>,
}

pub(super) struct Driver {
    pipeline: Pipeline,
    reopen: Option<Reopen>,
    asked: Receiver<Ask>,
    shared: Arc<Shared>,
    running: HashMap<RequestId, Running>,
    probing: Vec<Probing>,
}

impl Driver {
    pub(super) fn new(head: Head, reopen: Option<Reopen>, asked: Receiver<Ask>, shared: Arc<Shared>) -> Driver {
        let pipeline = Pipeline::Up(Box::new(head));
        Driver { pipeline, reopen, asked, shared, running: HashMap::new(), probing: Vec::new() }
    }

    /// Until the service is stopped.
    pub(super) fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            // Before it is looked at what was asked: what is asked from now on interrupts the turn.
            if self.shared.interrupt.swap(false, Ordering::AcqRel) {
                self.forget_gone();
            }
            while let Ok(ask) = self.asked.try_recv() {
                self.take(ask);
            }
            let is_idle = match &mut self.pipeline {
                Pipeline::Up(head) => {
                    let mut events = Vec::new();
                    let turned = head.turn(PATIENCE, &self.shared.interrupt, &mut |event| events.push(event));
                    self.turned(turned, events)
                }
                Pipeline::Down(_) => {
                    self.look_at_next();
                    true
                }
            };
            if is_idle {
                self.wait();
            }
        }
        self.end();
    }

    /// Waits for something to do.
    fn wait(&mut self) {
        match self.asked.recv_timeout(IDLE) {
            Ok(ask) => self.take(ask),
            Err(RecvTimeoutError::Timeout) => {
                if let Pipeline::Up(head) = &mut self.pipeline
                    && let Err(error) = head.check()
                {
                    self.failed(&error, Vec::new());
                }
            }
            Err(RecvTimeoutError::Disconnected) => self.shared.stop.store(true, Ordering::Release),
        }
    }

    fn take(&mut self, ask: Ask) {
        match ask {
            Ask::Answer { request, hear, gone } => self.submit(*request, hear, gone),
            Ask::Probe { within, hear } => self.probe(within, hear),
        }
    }

    fn submit(&mut self, request: Request, mut hear: Hear, gone: Arc<AtomicBool>) {
        if gone.load(Ordering::Acquire) {
            return;
        }
        if self.shared.draining.load(Ordering::Acquire) {
            return hear(Notice::Refused(ServiceError::Draining));
        }
        let head = match &mut self.pipeline {
            Pipeline::Up(head) => head,
            Pipeline::Down(reopening) => return hear(Notice::Refused(reopening.failure.clone().into())),
        };
        let answers_left = request.choices.max(1);
        match head.submit(request) {
            Ok(id) => {
                hear(Notice::Taken(id));
                self.running.insert(id, Running { hear, gone, answers_left });
            }
            Err(error) => hear(Notice::Refused(refusal(error))),
        }
    }

    fn probe(&mut self, within: Duration, hear: HearProbe) {
        match &mut self.pipeline {
            Pipeline::Up(head) => {
                head.probe();
                // One that is under way already may have passed stages that have failed since.
                let under_way = u64::from(!self.probing.is_empty());
                let (probes, crossed) = (head.probed() + 1 + under_way, head.crossed());
                self.probing.push(Probing { since: Instant::now(), within, hear, probes, crossed });
            }
            Pipeline::Down(reopening) => hear(Err(reopening.failure.clone().into())),
        }
    }

    /// What a turn came to; true where there is nothing to do.
    fn turned(&mut self, turned: Result<Turn, HeadError>, events: Vec<Event>) -> bool {
        match turned {
            Err(error) if !error.is_cancelled() => {
                self.failed(&error, events);
                return false;
            }
            _ => events.into_iter().for_each(|event| self.tell(event)),
        }
        self.look_at_probes();
        let Pipeline::Up(head) = &self.pipeline else { return false };
        let mut view = self.shared.view();
        (view.schedule, view.requests) = (head.status(), head.running());
        matches!(turned, Ok(Turn::Idle))
    }

    fn tell(&mut self, event: Event) {
        let (request, is_done) = match &event {
            Event::Prefill { request, .. } => (*request, false),
            Event::Token { choice, .. } | Event::Text { choice, .. } => (choice.request, false),
            Event::Done { choice, .. } => (choice.request, true),
        };
        let Some(running) = self.running.get_mut(&request) else { return };
        running.answers_left -= u32::from(is_done);
        let is_last = running.answers_left == 0;
        (running.hear)(Notice::Event(event));
        if is_last {
            self.running.remove(&request);
        }
    }

    /// Cancels the requests of those who have gone.
    fn forget_gone(&mut self) {
        let is_gone = |running: &Running| running.gone.load(Ordering::Acquire);
        let gone: Vec<RequestId> =
            self.running.iter().filter(|(_, running)| is_gone(running)).map(|(request, _)| *request).collect();
        for request in gone {
            self.running.remove(&request);
            if let Pipeline::Up(head) = &mut self.pipeline {
                // Nobody wants to know.
                head.cancel(request, &mut |_| {});
            }
        }
    }

    fn look_at_probes(&mut self) {
        let Pipeline::Up(head) = &self.pipeline else { return };
        let now = Instant::now();
        for probing in std::mem::take(&mut self.probing) {
            let waited = now - probing.since;
            if head.probed() >= probing.probes {
                (probing.hear)(Ok(Probe::Crossed(waited)));
            } else if waited < probing.within {
                self.probing.push(probing);
            } else if head.crossed() > probing.crossed {
                (probing.hear)(Ok(Probe::Moving));
            } else {
                let stage = head.pipeline().holding().clone();
                (probing.hear)(Err(ServiceError::Silent { stage, within: probing.within }));
            }
        }
        // One at a time is in the pipe.
        if self.probing.iter().any(|probing| probing.probes > head.probed()) && !head.is_probing() {
            let Pipeline::Up(head) = &mut self.pipeline else { return };
            head.probe();
        }
    }

    /// The pipeline has failed: everybody hears it, and the next one is opened.
    fn failed(&mut self, error: &HeadError, events: Vec<Event>) {
        let failure = Failure::of(error);
        tracing::error!(reason = %failure.reason, "the pipeline is down");
        // Whoever hears of it finds it in the view.
        self.shared.view().failed(&failure);
        for running in self.running.values_mut() {
            (running.hear)(Notice::Failed(failure.clone()));
        }
        events.into_iter().for_each(|event| self.tell(event));
        self.running.clear();
        for probing in std::mem::take(&mut self.probing) {
            (probing.hear)(Err(failure.clone().into()));
        }
        let reopening = Reopening { failure, next: None, wait: RETRY, retry_at: None };
        let Pipeline::Up(head) = std::mem::replace(&mut self.pipeline, Pipeline::Down(reopening)) else { return };
        self.open_next(Some(head));
    }

    /// Begins to open another pipeline, once the dead one is gone: its devices and workers are wanted again.
    fn open_next(&mut self, dead: Option<Box<Head>>) {
        let Pipeline::Down(reopening) = &mut self.pipeline else { return };
        let reopen = self.reopen.clone();
        let (sender, next) = bounded(1);
        let spawned = std::thread::Builder::new().name("reopen".to_owned()).spawn(move || {
            drop(dead);
            if let Some(reopen) = reopen {
                // The service may have been stopped.
                let _ = sender.send(reopen());
            }
        });
        (reopening.retry_at, reopening.next) = match (&self.reopen, spawned) {
            (None, _) => (None, None),
            (Some(_), Ok(_)) => (None, Some(next)),
            (Some(_), Err(_)) => (Some(Instant::now() + reopening.wait), None),
        };
    }

    fn look_at_next(&mut self) {
        let Pipeline::Down(reopening) = &mut self.pipeline else { return };
        let opened = match &reopening.next {
            Some(next) => match next.try_recv() {
                Ok(opened) => opened,
                Err(error) if error.is_empty() => return,
                Err(_) => Err("opening the pipeline again panicked".to_owned()),
            },
            None => {
                if reopening.retry_at.is_some_and(|at| at <= Instant::now()) {
                    self.open_next(None);
                }
                return;
            }
        };
        match opened {
            Ok(head) => {
                tracing::warn!("another pipeline runs in the place of the one that failed");
                self.shared.view().reopened(&head);
                self.pipeline = Pipeline::Up(Box::new(head));
            }
            Err(error) => {
                tracing::error!(%error, "the pipeline could not be opened again");
                reopening.next = None;
                reopening.retry_at = Some(Instant::now() + reopening.wait);
                reopening.wait = (reopening.wait * 2).min(RETRY_MAX);
            }
        }
    }

    /// Cancels what runs.
    fn end(mut self) {
        if let Pipeline::Up(head) = &mut self.pipeline {
            let mut events = Vec::new();
            let running: Vec<RequestId> = self.running.keys().copied().collect();
            running.into_iter().for_each(|request| head.cancel(request, &mut |event| events.push(event)));
            events.into_iter().for_each(|event| self.tell(event));
        }
        for ask in self.asked.try_iter() {
            match ask {
                Ask::Answer { mut hear, .. } => hear(Notice::Refused(ServiceError::Draining)),
                Ask::Probe { hear, .. } => hear(Err(ServiceError::Draining)),
            }
        }
        for probing in self.probing {
            (probing.hear)(Err(ServiceError::Draining));
        }
    }
}

fn refusal(error: HeadError) -> ServiceError {
    match error {
        HeadError::Refused(refused) => refused.into(),
        HeadError::NoSuchToken { id, vocab } => ServiceError::NoSuchToken { id, vocab },
        error => Failure::of(&error).into(),
    }
}
