//! The thread of a service: turns the head, and looks what is asked of it in between.

use std::any::Any;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::{Ask, Failure, Hear, HearProbe, NotReopened, Notice, Pipe, Probe, Reopen, ServiceError, Shared, Standing};
use crate::head::{Event, FinishReason, Head, HeadError, Request, Slow, Turn};
use crate::pipeline::{Past, Pipeline};
use crate::schedule::{RequestId, Status};
use crate::worker::panic_message;

/// How long a turn waits for the pipe when nothing interrupts it.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often an idle driver looks whether a stage has failed.
const IDLE: Duration = Duration::from_millis(100);
/// How long after a pipeline that could not be opened the next is tried: twice as long each time, up to the second.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Pipelines that are opened without a token drawn in between before what was asked is given up.
const FRUITLESS_MAX: u32 = 5;

/// What is seen of the driver from outside.
#[derive(Debug)]
pub(super) struct View {
    pipe: Arc<Pipe>,
    schedule: Status,
    requests: usize,
    stragglers: Vec<Slow>,
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
            stragglers: Vec::new(),
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
            stragglers: self.stragglers.clone(),
            down: self.down.clone(),
            last_failure: self.last_failure.clone(),
            failures: self.failures,
            restarts: self.restarts,
            is_draining,
        }
    }

    fn failed(&mut self, failure: &Failure, is_wanted: bool) {
        self.schedule = Status { pages: self.schedule.pages, ..Status::default() };
        self.stragglers.clear();
        self.down = Some(failure.clone());
        self.last_failure = Some(failure.clone());
        self.failures += u64::from(!is_wanted);
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

/// How far the next pipeline is.
struct Reopening {
    failure: Failure,
    error: Arc<HeadError>,
    past: Past,
    /// What is being opened.
    next: Option<Receiver<Opened>>,
    wait: Duration,
    retry_at: Option<Instant>,
    /// Whether what was asked waits for it.
    is_awaited: bool,
}

/// What came of opening another pipeline; and who is asked for the next.
struct Opened {
    reopen: Reopen,
    pipeline: Result<(Pipeline, String), NotReopened>,
}

pub(super) struct Driver {
    head: Box<Head>,
    /// Set while there is no pipeline.
    down: Option<Reopening>,
    /// Pipelines that failed since a token was last drawn, and tokens drawn until then.
    fruitless: u32,
    drawn: u64,
    /// Not there while it is asked.
    reopen: Option<Reopen>,
    asked: Receiver<Ask>,
    shared: Arc<Shared>,
    running: HashMap<RequestId, Running>,
    probing: Vec<Probing>,
}

impl Driver {
    pub(super) fn new(head: Head, reopen: Option<Reopen>, asked: Receiver<Ask>, shared: Arc<Shared>) -> Driver {
        let (head, running) = (Box::new(head), HashMap::new());
        Driver { head, down: None, fruitless: 0, drawn: 0, reopen, asked, shared, running, probing: Vec::new() }
    }

    /// Until the service is stopped.
    pub(super) fn run(mut self) {
        match std::panic::catch_unwind(AssertUnwindSafe(|| self.drive())) {
            Ok(()) => self.end(),
            Err(panic) => self.broke(panic.as_ref()),
        }
    }

    fn drive(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            // Before it is looked at what was asked: what is asked from now on interrupts the turn.
            if self.shared.interrupt.swap(false, Ordering::AcqRel) {
                self.forget_gone();
            }
            while let Ok(ask) = self.asked.try_recv() {
                self.take(ask);
            }
            let mut events = Vec::new();
            let is_idle = if self.down.is_none() {
                let turned = self.head.turn(PATIENCE, &self.shared.interrupt, &mut |event| events.push(event));
                self.turned(turned, events)
            } else {
                self.head.meanwhile(&mut |event| events.push(event));
                events.into_iter().for_each(|event| self.tell(event));
                self.shared.view().requests = self.head.running();
                self.look_at_next();
                true
            };
            if is_idle {
                self.wait();
            }
        }
    }

    /// A fault of this program: what the head knows cannot be relied upon. Everybody hears it, also those who ask until
    /// the service is ended.
    fn broke(mut self, panic: &(dyn Any + Send)) {
        let failure = fault(panic);
        tracing::error!(reason = %failure.reason, "the head has panicked");
        {
            let mut view = self.shared.view();
            view.failed(&failure, false);
            view.requests = 0;
        }
        for mut running in std::mem::take(&mut self.running).into_values() {
            quietly(|| (running.hear)(Notice::Failed(failure.clone())));
        }
        for probing in std::mem::take(&mut self.probing) {
            quietly(|| (probing.hear)(Err(failure.clone().into())));
        }
        let _ = self.shared.fault.set(failure.clone());
        while !self.shared.stop.load(Ordering::Acquire) {
            match self.asked.recv_timeout(IDLE) {
                Ok(ask) => quietly(|| ask.refuse(failure.clone().into())),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        self.asked.try_iter().for_each(|ask| quietly(|| ask.refuse(failure.clone().into())));
    }

    /// Waits for something to do.
    fn wait(&mut self) {
        match self.asked.recv_timeout(IDLE) {
            Ok(ask) => self.take(ask),
            Err(RecvTimeoutError::Timeout) => {
                if self.down.is_none()
                    && let Err(error) = self.head.check()
                {
                    self.failed(error, Vec::new());
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
        let down = self.down.as_ref();
        if let Some(reopening) = down.filter(|reopening| !reopening.is_awaited) {
            return hear(Notice::Refused(reopening.failure.clone().into()));
        }
        let answers_left = request.choices.max(1);
        match std::panic::catch_unwind(AssertUnwindSafe(|| self.head.submit(request))) {
            Ok(Ok(id)) => {
                hear(Notice::Taken(id));
                self.running.insert(id, Running { hear, gone, answers_left });
            }
            Ok(Err(error)) => hear(Notice::Refused(refusal(error))),
            // It is not among those that run, which are told.
            Err(panic) => {
                quietly(|| hear(Notice::Failed(fault(panic.as_ref()))));
                std::panic::resume_unwind(panic);
            }
        }
    }

    fn probe(&mut self, within: Duration, hear: HearProbe) {
        if let Some(reopening) = &self.down {
            return hear(Err(reopening.failure.clone().into()));
        }
        self.head.probe();
        // One that is under way already may have passed stages that have failed since.
        let under_way = u64::from(!self.probing.is_empty());
        let (probes, crossed) = (self.head.probed() + 1 + under_way, self.head.crossed());
        self.probing.push(Probing { since: Instant::now(), within, hear, probes, crossed });
    }

    /// What a turn came to; true where there is nothing to do.
    fn turned(&mut self, turned: Result<Turn, HeadError>, events: Vec<Event>) -> bool {
        match turned {
            Err(error) if !error.is_cancelled() => {
                self.failed(error, events);
                return false;
            }
            _ => events.into_iter().for_each(|event| self.tell(event)),
        }
        self.look_at_probes();
        let mut view = self.shared.view();
        (view.schedule, view.requests) = (self.head.status(), self.head.running());
        let stragglers = self.head.stragglers();
        let is_in = |slow: &Slow, all: &[Slow]| all.iter().any(|other| other.stage == slow.stage);
        stragglers.iter().filter(|slow| !is_in(slow, &view.stragglers)).for_each(|slow| tracing::warn!("{slow}"));
        for Slow { stage, .. } in view.stragglers.iter().filter(|slow| !is_in(slow, &stragglers)) {
            tracing::info!("{stage} takes what it used to again");
        }
        view.stragglers = stragglers;
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
            // Nobody wants to know.
            self.head.cancel(request, &mut |_| {});
        }
    }

    fn look_at_probes(&mut self) {
        let (head, now) = (&self.head, Instant::now());
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
            self.head.probe();
        }
    }

    /// The pipeline has failed: everybody hears it, and the next one is opened.
    fn failed(&mut self, error: HeadError, events: Vec<Event>) {
        let failure = Failure::of(&error);
        if error.is_wanted() {
            tracing::warn!(reason = %failure.reason, "the pipeline is to be another one");
        } else {
            tracing::error!(reason = %failure.reason, "the pipeline is down");
        }
        if self.drawn != self.head.drawn() {
            self.fruitless = 0;
        } else if !error.is_wanted() {
            self.fruitless += 1;
        }
        self.drawn = self.head.drawn();
        let is_worth_it = error.may_be_recovered() && self.fruitless < FRUITLESS_MAX;
        let is_awaited = self.head.recovers() && self.reopen.is_some() && is_worth_it;
        // Whoever hears of it finds it in the view.
        self.shared.view().failed(&failure, error.is_wanted());
        if is_awaited {
            events.into_iter().for_each(|event| self.tell(event));
            self.tell_all(&Notice::Paused(failure.clone()));
        } else {
            self.give_up(&failure, events);
        }
        for probing in std::mem::take(&mut self.probing) {
            (probing.hear)(Err(failure.clone().into()));
        }
        // Its devices and workers are wanted again.
        let past = self.head.suspend();
        let (error, next) = (Arc::new(error), None);
        let mut reopening = Reopening { failure, error, past, next, wait: RETRY, retry_at: None, is_awaited };
        if self.fruitless > 1 {
            // It did not help the last time.
            reopening.retry_at = Some(Instant::now() + RETRY * self.fruitless);
        }
        let is_time = reopening.retry_at.is_none();
        self.down = Some(reopening);
        if is_time {
            self.open_next();
        }
    }

    fn tell_all(&mut self, notice: &Notice) {
        self.running.values_mut().for_each(|running| (running.hear)(notice.clone()));
    }

    /// What was asked ends with what there is of it.
    fn give_up(&mut self, failure: &Failure, mut events: Vec<Event>) {
        // Whoever has ended before has not failed.
        let first = events.iter().position(has_failed).unwrap_or(events.len());
        let mut failed = events.split_off(first);
        events.into_iter().for_each(|event| self.tell(event));
        self.tell_all(&Notice::Failed(failure.clone()));
        self.head.fail(&mut |event| failed.push(event));
        failed.into_iter().for_each(|event| self.tell(event));
        self.running.clear();
        self.shared.view().requests = 0;
    }

    /// Begins to open another pipeline.
    fn open_next(&mut self) {
        let (Some(reopening), Some(mut reopen)) = (&mut self.down, self.reopen.take()) else { return };
        let (sender, next) = bounded(1);
        let (error, past) = (reopening.error.clone(), reopening.past.clone());
        let open = move || {
            let opened = std::panic::catch_unwind(AssertUnwindSafe(|| reopen(&error, &past)));
            let panicked =
                |panic: &(dyn Any + Send)| format!("opening the pipeline again panicked: {}", panic_message(panic));
            let pipeline = opened.unwrap_or_else(|panic| Err(NotReopened::Failed(panicked(panic.as_ref()))));
            // The service may have been stopped.
            let _ = sender.send(Opened { reopen, pipeline });
        };
        reopening.retry_at = None;
        reopening.next = Some(next);
        if let Err(error) = std::thread::Builder::new().name("reopen".to_owned()).spawn(open) {
            tracing::error!(%error, "the system starts no thread: no other pipeline will be opened");
        }
    }

    fn look_at_next(&mut self) {
        let Some(reopening) = &mut self.down else { return };
        let pipeline = match &reopening.next {
            Some(next) => match next.try_recv() {
                Ok(opened) => {
                    self.reopen = Some(opened.reopen);
                    opened.pipeline
                }
                Err(error) if error.is_empty() => return,
                Err(_) => Err(NotReopened::Failed("nobody opens the pipeline again".to_owned())),
            },
            None => {
                if reopening.retry_at.is_some_and(|at| at <= Instant::now()) {
                    self.open_next();
                }
                return;
            }
        };
        match pipeline {
            Ok((pipeline, text)) => self.reopened(pipeline, &text),
            Err(error) => {
                tracing::error!(%error, "the pipeline could not be opened again");
                reopening.next = None;
                reopening.retry_at = Some(Instant::now() + reopening.wait);
                reopening.wait = (reopening.wait * 2).min(RETRY_MAX);
                if error != NotReopened::Cancelled && std::mem::take(&mut reopening.is_awaited) {
                    let failure = reopening.failure.clone();
                    self.give_up(&failure, Vec::new());
                }
            }
        }
    }

    /// Another pipeline is there: what was asked goes on.
    fn reopened(&mut self, pipeline: Pipeline, text: &str) {
        let mut events = Vec::new();
        let rebuild = self.head.recover(pipeline, &mut |event| events.push(event));
        tracing::warn!(tokens = rebuild.tokens, stage = rebuild.stage, "another pipeline runs, {text}");
        self.down = None;
        self.shared.view().reopened(&self.head);
        self.tell_all(&Notice::Resumed(format!("{text}; {rebuild}")));
        events.into_iter().for_each(|event| self.tell(event));
    }

    /// Cancels what runs.
    fn end(mut self) {
        let mut events = Vec::new();
        let running: Vec<RequestId> = self.running.keys().copied().collect();
        running.into_iter().for_each(|request| self.head.cancel(request, &mut |event| events.push(event)));
        events.into_iter().for_each(|event| self.tell(event));
        self.asked.try_iter().for_each(|ask| ask.refuse(ServiceError::Draining));
        for probing in self.probing {
            (probing.hear)(Err(ServiceError::Draining));
        }
    }
}

fn has_failed(event: &Event) -> bool {
    matches!(event, Event::Done { answer, .. } if answer.finish_reason == FinishReason::Failed)
}

/// What a panic is to those who are told.
fn fault(panic: &(dyn Any + Send)) -> Failure {
    Failure { stage: None, reason: format!("a fault in pp-run: {}", panic_message(panic)) }
}

/// Tells somebody, who may be what panicked.
fn quietly(tell: impl FnOnce()) {
    let _ = std::panic::catch_unwind(AssertUnwindSafe(tell));
}

fn refusal(error: HeadError) -> ServiceError {
    match error {
        HeadError::Refused(refused) => refused.into(),
        HeadError::NoSuchToken { id, vocab } => ServiceError::NoSuchToken { id, vocab },
        error => Failure::of(&error).into(),
    }
}
