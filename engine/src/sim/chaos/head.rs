//! The head: the real scheduler, and what `head.rs`, `pipeline.rs` and the program's recovery do around it. It rules the
//! workers by links of their own, notices what goes wrong, ends the pipeline, and opens another one in its place.

mod recovery;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use pp_transport::{FrameHeader, LinkId};

use super::network::{CONTROL, CREDITS_OF_CONTROL, HEAD, MS, Micros, Network};
use super::stages::{Plan, Station};
use super::{End, Payload, VOCAB};
use crate::random::{Random, mix};
use crate::schedule::cost::attended;
use crate::schedule::{Batch, Choice, Job, Kept, Limits, Next, RequestId, Scheduler};
use crate::sim::load::Request;
use crate::trace::Nanos;
pub use recovery::divide;

/// As in `head.rs` and `pipeline.rs`.
const WEDGED: Micros = 5000 * MS;
const SILENT_TIMES: Micros = 4;
/// How long another pipeline may take to come about, once it is planned.
const OPEN_PATIENCE: Micros = 20_000 * MS;
const PAUSE_PATIENCE: Micros = 15_000 * MS;
/// Between two looks.
const AGAIN: Micros = 100 * MS;
/// How long workers are sought at most; whoever comes back is back sooner.
pub const GIVE_UP: Micros = 60_000 * MS;

/// A request and what became of it.
pub struct Asked {
    pub request: Request,
    pub id: Option<RequestId>,
    pub answers: Vec<Vec<u32>>,
    pub end: Option<End>,
}

enum State {
    /// Looks for workers.
    Seeking {
        since: Micros,
    },
    /// Stages load, then their hops are proved.
    Opening {
        until: Micros,
        ready: Vec<Option<Kept>>,
        linked: Vec<bool>,
        proved: [bool; 2],
        is_started: bool,
    },
    Running,
    /// Stages stop.
    Pausing {
        until: Micros,
        waits: Vec<usize>,
    },
    /// There is nobody to go on with.
    Down,
}

struct Control {
    id: Option<LinkId>,
    again: Micros,
    to_say: VecDeque<Payload>,
}

struct InFlight {
    step: u64,
    tokens: usize,
    attended: f64,
    restores: bool,
}

/// See above.
pub struct Head {
    random: Random,
    pub scheduler: Scheduler,
    pub asked: Vec<Asked>,
    /// Requests to come and users to go, earliest last.
    events: Vec<(Micros, usize, bool)>,
    state: State,
    plan: Option<Rc<Plan>>,
    /// Of the latest pipeline that was there.
    past: Option<u64>,
    limits: Limits,
    /// Pages of the first cut.
    pages: usize,
    epoch: u64,
    next_step: u64,
    in_flight: VecDeque<InFlight>,
    /// What waits for room on the first hop.
    to_send: VecDeque<(FrameHeader, Payload)>,
    controls: Vec<Control>,
    leases: u64,
    /// Layers that each host has room for.
    pub room: Vec<usize>,
    first: (Vec<usize>, Vec<Range<usize>>),
    bad: Vec<usize>,
    seen: Vec<(u64, u64, Micros)>,
    heard: Micros,
    /// How long the lost are waited for before others take their places, and before those that are left divide the layers.
    patience: (Micros, Micros),
    boundary_log: u64,
    tightens: bool,
    draws: u64,
    /// What happened.
    pub losses: BTreeMap<&'static str, u64>,
    pub opened: u64,
    pub restored: u64,
    pub recuts: u64,
    pub abandoned: u64,
    /// What a sequence may reach, in the tightest pipeline and in the widest.
    pub capacity: (usize, usize),
    /// When another pipeline is planned next: chaos likes that.
    pub has_planned: bool,
    /// When something is to be restored.
    pub restores: bool,
}

impl Head {
    pub fn new(
        requests: Vec<Request>,
        limits: Limits,
        first: (Vec<usize>, Vec<Range<usize>>),
        room: Vec<usize>,
        boundary_log: u64,
        mut random: Random,
    ) -> Head {
        let asked = |request: Request| {
            let answers = vec![Vec::new(); request.choices.max(1) as usize];
            Asked { request, id: None, answers, end: None }
        };
        let asked: Vec<Asked> = requests.into_iter().map(asked).collect();
        let come = asked.iter().enumerate().map(|(i, asked)| (asked.request.at / 1000, i, false));
        let go = asked.iter().enumerate().filter_map(|(i, a)| a.request.cancel.map(|at| (at / 1000, i, true)));
        let mut events: Vec<_> = come.chain(go).collect();
        events.sort_by_key(|event| std::cmp::Reverse((event.0, event.2, event.1)));
        let control = |_| Control { id: None, again: 0, to_say: VecDeque::new() };
        let patience = |random: &mut Random| random.between(0, 4000) as Micros * MS;
        Head {
            scheduler: Scheduler::new(limits),
            asked,
            events,
            state: State::Seeking { since: 0 },
            plan: None,
            past: None,
            limits,
            pages: limits.pages,
            epoch: 0,
            next_step: 0,
            in_flight: VecDeque::new(),
            to_send: VecDeque::new(),
            controls: (0..room.len()).map(control).collect(),
            leases: 0,
            room,
            first,
            bad: Vec::new(),
            seen: Vec::new(),
            heard: 0,
            patience: (patience(&mut random), 2000 * MS + patience(&mut random)),
            boundary_log,
            tightens: random.between(0, 2) == 0,
            draws: 0,
            losses: BTreeMap::new(),
            opened: 0,
            restored: 0,
            recuts: 0,
            abandoned: 0,
            capacity: (limits.capacity(), limits.capacity()),
            has_planned: false,
            restores: false,
            random,
        }
    }

    /// Whether there is nothing left to do.
    pub fn is_done(&self) -> bool {
        let is_idle = self.in_flight.is_empty() && matches!(self.state, State::Running | State::Down);
        self.events.is_empty() && self.asked.iter().all(|asked| asked.end.is_some()) && is_idle
    }

    /// The pipeline that runs.
    pub fn session(&self) -> Option<u64> {
        self.plan.as_ref().map(|plan| plan.session)
    }

    pub fn is_down(&self) -> bool {
        matches!(self.state, State::Down)
    }

    /// All that runs is cancelled.
    pub fn cancel_all(&mut self, now: Micros) {
        let open = self.asked.iter().enumerate().filter(|(_, asked)| asked.id.is_some() && asked.end.is_none());
        self.events.extend(open.map(|(index, _)| (now, index, true)));
    }

    /// The hosts of the pipeline other than its own.
    pub fn workers(&self) -> Vec<usize> {
        let Some(plan) = &self.plan else { return Vec::new() };
        let mut hosts: Vec<usize> = plan.places.iter().copied().filter(|host| *host != HEAD).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    /// Asks for something more.
    pub fn ask(&mut self, request: Request, now: Micros) {
        self.events.insert(0, (now, self.asked.len(), false));
        self.asked.push(Asked { request, id: None, answers: vec![Vec::new()], end: None });
    }

    /// Ends the pipeline for good.
    pub fn release(&mut self, network: &mut Network, station: &mut Station) {
        self.leave_hops(network);
        station.release(network);
        for control in &mut self.controls {
            if let Some(id) = control.id.take() {
                network.leave(HEAD, id);
            }
        }
        self.state = State::Down;
    }

    pub fn due(&self, network: &Network) -> Option<Micros> {
        let event = self.events.last().map(|(at, ..)| *at);
        let deadline =
            self.scheduler.next_deadline().map(|at| network.now + (at / 1000).saturating_sub(network.clock(HEAD)));
        let again = match self.state {
            State::Down => None,
            State::Running if self.in_flight.is_empty() => None,
            _ => Some(network.now + AGAIN),
        };
        [event, deadline, again].into_iter().flatten().min().map(|at| at.max(network.now + 1))
    }

    /// Does all that can be done now.
    pub fn work(&mut self, network: &mut Network, station: &mut Station) {
        self.callers(network, station);
        self.hear_workers(network, station);
        loop {
            station.work(network);
            while let Some(said) = station.news.pop_front() {
                self.told(HEAD, said, network, station);
            }
            if !self.go_on(network, station) {
                break;
            }
        }
    }

    fn nanos(network: &Network) -> Nanos {
        network.clock(HEAD) * 1000
    }

    /// Requests come, users go, deadlines pass.
    fn callers(&mut self, network: &Network, station: &mut Station) {
        let now = Head::nanos(network);
        while let Some((_, index, goes)) = self.events.pop_if(|(at, ..)| *at <= network.now) {
            let asked = &mut self.asked[index];
            if goes {
                if let Some(id) = asked.id.filter(|_| asked.end.is_none()) {
                    self.cancel(id, station);
                }
                continue;
            }
            if matches!(self.state, State::Down) {
                asked.end = Some(End::Failed);
                continue;
            }
            let Request { prompt, choices, deadline, at, .. } = &asked.request;
            let deadline = deadline.map(|deadline| now + (deadline - at));
            match self.scheduler.submit(Job { prompt: prompt.clone(), choices: *choices, deadline }, now) {
                Ok(id) => asked.id = Some(id),
                Err(_) => asked.end = Some(End::Refused),
            }
        }
        for id in self.scheduler.expire(now) {
            self.end(id, End::Expired);
        }
    }

    fn end(&mut self, id: RequestId, end: End) {
        let asked = self.asked.iter_mut().find(|asked| asked.id == Some(id)).expect("it was asked");
        assert!(asked.end.is_none(), "request {id:?} ends as {end:?} after it has ended");
        asked.end = Some(end);
    }

    fn cancel(&mut self, id: RequestId, station: &mut Station) {
        self.end(id, End::Cancelled);
        self.scheduler.cancel(id);
        let nobody = self.asked.iter().all(|asked| asked.id.is_none() || asked.end.is_some());
        // As `Head::give_up_all` and `Pipeline::abandon`.
        if nobody && !self.in_flight.is_empty() && matches!(self.state, State::Running) {
            self.abandoned += 1;
            self.epoch += 1;
            station.raise(self.epoch);
            for host in self.workers() {
                self.controls[host].to_say.push_back(Payload::Epoch(self.epoch));
            }
            self.in_flight.clear();
            self.scheduler.restart();
        }
    }

    // Workers.

    /// Gets hold of workers, says what there is to say, and hears them.
    fn hear_workers(&mut self, network: &mut Network, station: &mut Station) {
        for host in 1..self.controls.len() {
            while let Some(id) = self.controls[host].id
                && let Some((_, said)) = network.take(HEAD, id)
            {
                self.told(host, said, network, station);
            }
            let control = &mut self.controls[host];
            match control.id {
                Some(id) if network.is_over(HEAD, id) => {
                    network.leave(HEAD, id);
                    (control.id, control.again) = (None, network.now + AGAIN);
                    control.to_say.clear();
                    if self.workers().contains(&host) {
                        self.lost("a worker is lost", network, station);
                    }
                }
                Some(id) => {
                    while let Some(said) = control.to_say.pop_front() {
                        if !network.send(HEAD, id, FrameHeader::default(), said.clone()) {
                            control.to_say.push_front(said);
                            break;
                        }
                    }
                }
                None if control.again <= network.now && !matches!(self.state, State::Down) => {
                    self.leases += 1;
                    let id = LinkId { session: self.leases, link: CONTROL };
                    network.open(HEAD, id, host, true, CREDITS_OF_CONTROL);
                    control.id = Some(id);
                    network.wake(HEAD, network.now);
                }
                None => {}
            }
        }
    }

    fn told(&mut self, host: usize, said: Payload, network: &mut Network, station: &mut Station) {
        let session = self.plan.as_ref().map(|plan| plan.session);
        match (said, &mut self.state) {
            (Payload::Ready(of, stage, kept), State::Opening { ready, .. }) if Some(of) == session => {
                ready[stage] = Some(kept);
            }
            (Payload::Linked(of, stage), State::Opening { linked, .. }) if Some(of) == session => linked[stage] = true,
            (Payload::Failed(of), _) if Some(of) == session => {
                self.lost("a stage has lost its neighbour", network, station)
            }
            (Payload::Paused, State::Pausing { waits, .. }) => waits.retain(|other| *other != host),
            (Payload::Beat(of, stages), State::Running) if Some(of) == session => {
                for (stage, begun, done) in stages {
                    self.saw(stage, begun, done, network);
                }
            }
            _ => {}
        }
    }

    /// As `Pipeline::check_progress`.
    fn saw(&mut self, stage: usize, begun: u64, done: u64, network: &Network) {
        let seen = &mut self.seen[stage];
        if begun == done || done != seen.1 {
            seen.2 = seen.2.max(network.clock(HEAD));
        }
        (seen.0, seen.1) = (begun, done);
    }

    // Pipelines.

    fn leave_hops(&mut self, network: &mut Network) {
        if let Some(plan) = &self.plan {
            (0..=plan.places.len()).for_each(|hop| network.leave(HEAD, plan.link(hop)));
        }
    }

    /// A step on whatever way there is; whether something came of it.
    fn go_on(&mut self, network: &mut Network, station: &mut Station) -> bool {
        match &mut self.state {
            State::Down => false,
            State::Pausing { until, waits } => {
                let controls = &self.controls;
                waits.retain(|host| *host == HEAD || controls[*host].id.is_some());
                if waits.is_empty() || *until <= network.now {
                    self.state = State::Seeking { since: network.now };
                    return true;
                }
                false
            }
            State::Seeking { since } => {
                let since = *since;
                if let Some(found) = self.seek(since, network) {
                    self.begin(found, network, station);
                    return true;
                }
                if network.now >= since + GIVE_UP {
                    self.fail();
                    return true;
                }
                false
            }
            State::Opening { .. } => self.open(network, station),
            State::Running => self.run(network, station),
        }
    }

    fn run(&mut self, network: &mut Network, station: &mut Station) -> bool {
        let plan = self.plan.clone().expect("a pipeline runs");
        let now = Head::nanos(network);
        let mut moved = false;
        while let Next::Send(batch) = self.scheduler.next(now) {
            self.send(batch, network);
            moved = true;
        }
        while let Some(frame) = self.to_send.pop_front() {
            if !station.send_first(&plan, frame.clone(), network) {
                self.to_send.push_front(frame);
                break;
            }
            moved = true;
        }
        match station.receive_last(&plan, network) {
            Ok(Some((header, _))) if header.epoch != self.epoch => {
                return true;
            }
            Ok(Some((header, Payload::Outputs { values, seconds }))) => {
                self.heard = network.clock(HEAD);
                let flight = self.in_flight.pop_front().expect("the pipe answers what was sent");
                assert_eq!(header.step, flight.step, "the tail answers in order");
                self.answered(&flight, &values, &seconds);
                return true;
            }
            Ok(Some((_, payload))) => panic!("the tail says {payload:?}"),
            Ok(None) => {}
            Err(()) => {
                self.lost("the tail is gone", network, station);
                return true;
            }
        }
        for (stage, begun, done) in station.progress() {
            self.saw(stage, begun, done, network);
        }
        self.check(&plan, network, station) || moved
    }

    /// As `Pipeline::check_progress`: true where the pipeline is given up.
    fn check(&mut self, plan: &Plan, network: &mut Network, station: &mut Station) -> bool {
        let clock = network.clock(HEAD);
        if self.in_flight.is_empty() {
            self.heard = clock;
            return false;
        }
        let is_wedged =
            |(begun, done, since): &(u64, u64, Micros)| begun > done && clock > WEDGED + self.heard.max(*since);
        if let Some(stage) = self.seen.iter().position(is_wedged) {
            self.bad.push(plan.places[stage]);
            self.bad.retain(|host| *host != HEAD);
            self.lost("a stage is wedged", network, station);
            return true;
        }
        let is_computing = self.seen.iter().any(|(begun, done, _)| begun > done);
        // Nothing that is in the pipe is ever lost, unless a link says so.
        assert!(is_computing || clock <= self.heard + SILENT_TIMES * WEDGED, "the pipeline is silent");
        false
    }

    fn send(&mut self, batch: Batch, network: &Network) {
        let header = FrameHeader { epoch: self.epoch, step: self.next_step, micro_batch: batch.group };
        self.next_step += 1;
        let tokens = batch.parts.iter().map(|part| part.ids.len()).sum();
        let seen = batch.parts.iter().map(|part| attended(part.start, part.ids.len())).sum();
        if self.in_flight.is_empty() {
            self.heard = network.clock(HEAD);
        }
        self.in_flight.push_back(InFlight {
            step: header.step,
            tokens,
            attended: seen,
            restores: batch.until.is_some(),
        });
        self.to_send.push_back((header, Payload::Step { batch, data: Vec::new(), seconds: Vec::new() }));
    }

    fn answered(&mut self, flight: &InFlight, values: &[u64], seconds: &[f64]) {
        let choices = self.scheduler.answered();
        assert_eq!(choices.len(), values.len(), "a result for every draw");
        for (choice, value) in choices.into_iter().zip(values) {
            if let Some(choice) = choice {
                self.draw(choice, *value);
            }
        }
        if flight.tokens > 0 && !flight.restores {
            self.scheduler.measured(flight.tokens, flight.attended, seconds, 0.0);
        }
    }

    fn draw(&mut self, choice: Choice, value: u64) {
        self.draws += 1;
        if mix(self.draws).is_multiple_of(11) {
            return self.scheduler.needs_row(choice);
        }
        let Some(asked) = self.asked.iter_mut().find(|asked| asked.id == Some(choice.request)) else { return };
        let answer = &mut asked.answers[choice.index as usize];
        let token = (value % u64::from(VOCAB)) as u32;
        answer.push(token);
        let is_last = answer.len() >= asked.request.output;
        self.scheduler.drawn(choice, token, is_last);
        if !self.scheduler.knows(choice.request) {
            self.end(choice.request, End::Finished);
        }
    }
}
