//! Chaos: a head, workers and a network in virtual time, and all that may befall them, by a seed. The scheduler is the real
//! one, so are the ends of links and the logs of what was handed on; what a head and a worker do around them is done in
//! the same way. Hosts are killed and come back, freeze and go on with what they had, their clocks leap or stand still,
//! connections break and overlap, the network is divided, devices hang: each also while another pipeline comes about.
//!
//! Every request ends, with the tokens that it has alone, or with a beginning of them and a reason; nothing stands still;
//! nothing is left. `PP_SOAK=10000 cargo test --release -p pp-engine --lib chaos` goes through as many seeds, from
//! `PP_SOAK_FROM` on.

mod head;
mod network;
mod stages;

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use self::head::{Head, divide};
use self::network::{HEAD, MS, Micros, Network};
use self::stages::{Plan, Station};
use super::load::{Distribution, Request};
use super::toy::Toy;
use crate::random::{Random, mix};
use crate::schedule::{Batch, Kept, Limits, Status};

/// Layers of the model.
const LAYERS: usize = 6;
const VOCAB: u32 = 300;
/// Nothing takes as long, or it stands still.
const HANG: Micros = 1200 * 1000 * MS;
/// A worker's head hears how it does so often.
const BEAT: Micros = 250 * MS;

/// What frames stand for.
#[derive(Clone, Debug)]
enum Payload {
    Step { batch: Batch, data: Vec<u64>, seconds: Vec<f64> },
    Outputs { values: Vec<u64>, seconds: Vec<f64> },
    Proof,
    // From head to worker.
    Prepare(Rc<Plan>),
    Start,
    Epoch(u64),
    Pause,
    // From worker to head: of a session.
    Ready(u64, usize, Kept),
    Linked(u64, usize),
    Failed(u64),
    Paused,
    Beat(u64, Vec<(usize, u64, u64)>),
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Finished,
    Cancelled,
    Expired,
    Refused,
    /// Another pipeline has no room for it.
    TooLong,
    /// There is no other pipeline.
    Failed,
}

/// What befalls them.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill(usize, Option<Micros>),
    Revive(usize),
    Freeze(usize, Micros),
    Leap(usize, Micros),
    Stand(usize, Micros),
    Wedge(usize, Micros),
    Lose(usize, usize),
    Redial(usize),
    Stall(usize, usize, Micros),
    Cut(usize, usize, Micros),
    /// A host from all others.
    Isolate(usize, Micros),
    /// All users go.
    Go,
}

struct Worker {
    station: Station,
    beaten: Micros,
    /// What waits for room on the link to the head.
    to_say: VecDeque<Payload>,
}

struct World {
    random: Random,
    network: Network,
    head: Head,
    /// The head's own host is the first.
    workers: Vec<Worker>,
    /// Latest first.
    faults: Vec<(Micros, Fault)>,
    /// How many more may be thrown in while another pipeline comes about.
    tricks: usize,
    /// All that happened, so that the same seed is known to be the same life.
    print: u64,
    wakes: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random::new(seed);
        let hosts = random.between(2, 6);
        let own = |random: &mut Random| Random::new(random.bits());
        let room: Vec<usize> =
            (0..hosts).map(|host| if host == HEAD { random.between(0, 3) } else { random.between(2, 4) }).collect();
        // The first pipeline is over some hosts, the others are spare.
        let mut used: Vec<usize> = (0..hosts).filter(|_| random.unit() < 0.7).collect();
        while used.iter().map(|host| room[*host]).sum::<usize>() < LAYERS {
            let Some(other) = (1..hosts).find(|host| !used.contains(host)) else { break };
            used.push(other);
        }
        let room = if used.iter().map(|host| room[*host]).sum::<usize>() < LAYERS { vec![LAYERS; hosts] } else { room };
        let first = divide(&used, &room);
        let limits = Limits {
            stages: first.0.len(),
            sequences: random.between(1, 6),
            batch_tokens: random.between(8, 96),
            tile: 1 << random.between(0, 4),
            outputs: random.between(2, 8),
            pages: random.between(4, 30),
            context: random.between(48, 320),
            in_flight: 1,
            queue: random.between(4, 20),
            prefix_cache: random.unit() < 0.8,
            groups: (random.unit() < 0.3).then(|| random.between(1, 4)),
        };
        let distribution = Distribution {
            requests: random.between(4, 40),
            rate: 0.5 + 4.0 * random.unit(),
            prompt: (1, limits.capacity() + 2),
            output: (1, 90),
            shared: 0.5,
            cancelled: (0.2, 6.0),
            several: 0.2,
        };
        let mut requests = distribution.requests(random.bits(), VOCAB);
        for request in &mut requests {
            if random.unit() < 0.1 {
                request.deadline = Some(request.at + (random.exponential(8.0) * 1e9) as u64);
            }
        }
        if random.unit() < 0.2 {
            // All users go at once.
            let at = (random.between(1, 9) * 1_000_000_000) as u64;
            requests.iter_mut().filter(|request| request.at < at).for_each(|request| request.cancel = Some(at));
        }
        let boundary_log = if random.unit() < 0.5 { 0 } else { 512 * random.between(1, 40) as u64 };
        let mut network = Network::new(hosts, own(&mut random));
        network.delay = random.between(1, 40) as Micros * MS;
        let worker = |host| Worker {
            station: Station::new(host, Random::new(mix(seed ^ host as u64))),
            beaten: 0,
            to_say: VecDeque::new(),
        };
        let mut world = World {
            network,
            head: Head::new(requests, limits, first, room, boundary_log, own(&mut random)),
            workers: (0..hosts).map(worker).collect(),
            faults: Vec::new(),
            tricks: random.between(0, 8),
            print: 0,
            wakes: 0,
            random,
        };
        world.network.wake(HEAD, 0);
        for _ in 0..world.random.between(0, 16) {
            let at = world.random.between(0, 20_000) as Micros * MS;
            let fault = world.fault();
            world.plan(at, fault);
        }
        world
    }

    fn plan(&mut self, at: Micros, fault: Fault) {
        let place = self.faults.partition_point(|(other, _)| *other > at);
        self.faults.insert(place, (at, fault));
    }

    fn fault(&mut self) -> Fault {
        let hosts = self.workers.len();
        let random = &mut self.random;
        let worker = random.between(1, hosts - 1);
        let any = random.between(0, hosts - 1);
        let other = (any + random.between(1, hosts - 1)) % hosts;
        // As often too short to be noticed as too long to be borne.
        let time = (10.0 * 1000f64.powf(random.unit())) as Micros * MS;
        match random.between(0, 13) {
            0 | 1 => Fault::Kill(worker, (random.unit() < 0.8).then_some(time)),
            2 | 3 => Fault::Freeze(worker, time),
            // A head may freeze, too.
            4 => Fault::Freeze(any, time),
            5 => Fault::Leap(any, time),
            6 => Fault::Stand(any, time),
            7 => Fault::Wedge(any, 2 * time),
            8 => Fault::Redial(any),
            9 => Fault::Stall(any, other, time / 4),
            10 => Fault::Cut(any, other, time),
            11 => Fault::Isolate(worker, time),
            _ => Fault::Lose(any, other),
        }
    }

    fn happen(&mut self, fault: Fault) {
        let now = self.network.now;
        let network = &mut self.network;
        match fault {
            Fault::Kill(host, back) => {
                network.kill(host);
                self.workers[host].station.lose();
                self.workers[host].to_say.clear();
                if let Some(time) = back {
                    self.plan(now + time, Fault::Revive(host));
                }
            }
            Fault::Revive(host) => network.revive(host),
            Fault::Freeze(host, time) => network.freeze(host, time),
            Fault::Leap(host, time) => network.leap(host, time),
            Fault::Stand(host, time) => network.stand(host, time),
            Fault::Wedge(host, time) => self.workers[host].station.wedged = now + time,
            Fault::Redial(host) => network.redial(host),
            Fault::Stall(one, other, time) => network.stall(one, other, time),
            Fault::Cut(from, to, time) => network.cut(from, to, time),
            Fault::Isolate(host, time) => {
                for other in (0..self.workers.len()).filter(|other| *other != host) {
                    network.cut(host, other, time);
                    network.cut(other, host, time);
                }
            }
            Fault::Lose(one, other) => network.lose(one, other),
            Fault::Go => {
                self.head.cancel_all(now);
                network.wake(HEAD, now);
            }
        }
    }

    /// Until all is answered and nothing is under way.
    fn run(&mut self) {
        while !self.head.is_done() {
            self.step();
        }
    }

    fn step(&mut self) {
        let next = self.network.next();
        let fault = self.faults.last().map(|(at, _)| *at);
        assert!(next.is_some() || fault.is_some(), "nothing is due, and {} requests have not ended", self.open());
        if let Some(at) = fault.filter(|at| next.is_none_or(|(next, _)| *at <= next)) {
            self.network.now = at.max(self.network.now);
            let (_, fault) = self.faults.pop().expect("there is one");
            self.happen(fault);
            return;
        }
        let (at, host) = next.expect("a host is due");
        self.network.now = self.network.now.max(at);
        assert!(self.network.now < HANG, "it hangs: {} requests have not ended", self.open());
        self.wakes += 1;
        self.print = mix(self.print ^ at ^ (host as u64) << 56);
        if host == HEAD {
            self.wake_head()
        } else {
            self.wake_worker(host)
        }
        if self.wakes.is_multiple_of(64) {
            self.network.check();
        }
    }

    fn open(&self) -> usize {
        self.head.asked.iter().filter(|asked| asked.end.is_none()).count()
    }

    fn wake_head(&mut self) {
        let World { network, head, workers, .. } = self;
        network.arrive(HEAD, false);
        head.work(network, &mut workers[HEAD].station);
        network.depart(HEAD);
        let due = head.due(network).into_iter().chain(workers[HEAD].station.due(network.now)).min();
        if let Some(at) = due {
            network.wake(HEAD, at);
        }
        if std::mem::take(&mut self.head.has_planned) && self.tricks > 0 && self.random.unit() < 0.6 {
            self.tricks -= 1;
            let at = self.network.now + self.random.between(0, 1500) as Micros * MS;
            let fault = self.fault();
            self.plan(at, fault);
        }
        if std::mem::take(&mut self.head.restores) && self.tricks > 0 {
            self.tricks -= 1;
            let workers = self.head.workers();
            let at = self.network.now + self.random.between(0, 400) as Micros * MS;
            let fault = match self.random.between(0, workers.len() + 1) {
                index if index < workers.len() => Fault::Kill(workers[index], Some(1000 * MS)),
                _ => Fault::Go,
            };
            self.plan(at, fault);
        }
    }

    fn wake_worker(&mut self, host: usize) {
        let World { network, workers, .. } = self;
        let Worker { station, beaten, to_say } = &mut workers[host];
        network.arrive(host, station.is_empty());
        let control = network.control(host);
        let is_over = control.is_none_or(|id| network.is_over(host, id));
        if is_over {
            // A worker whose head is gone is free.
            station.release(network);
            to_say.clear();
        }
        if let Some(id) = control {
            while let Some((_, said)) = network.take(host, id).filter(|_| !is_over) {
                match said {
                    Payload::Prepare(plan) => station.prepare(&plan, network),
                    Payload::Start => station.start(network),
                    Payload::Epoch(epoch) => station.raise(epoch),
                    Payload::Pause => station.pause(network),
                    said => panic!("a worker is told {said:?}"),
                }
            }
            if is_over {
                network.leave(host, id);
            }
        }
        station.work(network);
        if network.now >= *beaten + BEAT {
            *beaten = network.now;
            station.news.extend(station.beat());
        }
        to_say.extend(station.news.drain(..));
        while let Some(said) = to_say.pop_front() {
            let header = pp_transport::FrameHeader::default();
            if control.is_none_or(|id| !network.send(host, id, header, said.clone())) {
                to_say.push_front(said);
                break;
            }
        }
        network.depart(host);
        let beat = (!station.is_idle()).then_some(*beaten + BEAT);
        if let Some(at) = station.due(network.now).into_iter().chain(beat).min() {
            network.wake(host, at);
        }
    }

    /// Every request has its tokens, or a beginning of them and a reason; and nothing is held.
    fn check(&mut self) {
        self.network.check();
        let head = &self.head;
        for (i, asked) in head.asked.iter().enumerate() {
            let end = asked.end.unwrap_or_else(|| panic!("request {i} never ended"));
            let prompt = &asked.request.prompt;
            for answer in &asked.answers {
                assert_eq!(*answer, alone(prompt, answer.len()), "request {i} ({end:?})");
                if end == End::Finished {
                    let full = |capacity: usize| asked.request.output.min((capacity + 1).saturating_sub(prompt.len()));
                    let (least, most) = head.capacity;
                    assert!((full(least)..=full(most)).contains(&answer.len()), "request {i} has {}", answer.len());
                }
            }
        }
        let Status { running, waiting, held_pages, .. } = head.scheduler.status();
        assert_eq!((running, waiting, held_pages), (0, 0, 0), "something is held");
        if head.is_down() {
            let is_there = |host: &usize| *host == HEAD || !self.network.is_dead(*host);
            let room: usize = (0..self.workers.len()).filter(is_there).map(|host| head.room[host]).sum();
            assert!(room < LAYERS, "those that are there have room for {room} layers, and nobody goes on");
        }
    }

    /// What is over leaves nothing on any host.
    fn end(&mut self) {
        if !self.head.is_down() {
            // A last word: whoever still knows a sequence of before is told.
            let at = self.network.now * 1000;
            let last = Request { at, prompt: vec![7; 3], choices: 1, output: 2, ..Request::default() };
            self.head.ask(last, self.network.now);
            let now = self.network.now;
            self.network.wake(HEAD, now);
            self.faults.retain(|(_, fault)| matches!(fault, Fault::Revive(_)));
            self.tricks = 0;
            self.run();
            let last = self.head.asked.last().expect("it was asked");
            assert!(matches!(last.end, Some(End::Finished | End::Failed)), "the last word ends as {:?}", last.end);
            self.check();
        }
        if !self.head.is_down() {
            let status = self.head.scheduler.status();
            assert_eq!(status.in_flight, 0);
            let session = self.head.session();
            let known: usize = self.workers.iter().map(|worker| worker.station.tables(session)).sum();
            assert_eq!(known, 0, "stages know {known} sequences");
            self.head.scheduler.reset();
            assert_eq!(self.head.scheduler.status().idle_pages, 0);
        }
        let World { network, head, workers, .. } = self;
        head.release(network, &mut workers[HEAD].station);
        network.wake(HEAD, network.now);
        while let Some((at, host)) = self.network.next() {
            self.network.now = self.network.now.max(at);
            assert!(self.network.now < 2 * HANG, "it does not end");
            if host == HEAD { self.wake_head() } else { self.wake_worker(host) }
        }
        for (host, worker) in self.workers.iter().enumerate().filter(|(host, _)| !self.network.is_dead(*host)) {
            assert!(worker.station.is_empty(), "host {host} holds something");
        }
        assert_eq!(self.network.left(), [], "ends and connections are left");
    }
}

thread_local! {
    static ALONE: RefCell<HashMap<Vec<u32>, Vec<u32>>> = RefCell::default();
}

/// The first tokens of an answer when nothing else runs.
fn alone(prompt: &[u32], count: usize) -> Vec<u32> {
    ALONE.with_borrow_mut(|known| {
        let answer = known.entry(prompt.to_vec()).or_default();
        if answer.len() < count {
            *answer = Toy::alone(LAYERS, prompt, count, VOCAB);
        }
        answer[..count].to_vec()
    })
}

mod tests;
