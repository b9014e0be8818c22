//! Hosts and what is between them, in virtual time: the real ends of links, on connections that break, stall, overlap and
//! are dialled again, over a network that may be divided. Frames are a number of what they stand for: transport does not
//! read payloads.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_transport::quic::tuning::SILENCE;
use pp_transport::{Frame, FrameHeader, Hello, Link, LinkId, LinkLimits, LinkState, Message};

use super::Payload;
use crate::random::Random;

/// Microseconds.
pub type Micros = u64;

pub const MS: Micros = 1000;
/// The host of the head.
pub const HEAD: usize = 0;
/// The link by which the head rules a worker; others are hops.
pub const CONTROL: u32 = u32::MAX;
/// A connection that is silent for so long is given up, and dialled again.
const IDLE: Micros = 1000 * MS;
/// How long what was left may take to be told.
const LINGER: Micros = 2000 * MS;

/// A host's monotonic clock.
#[derive(Clone, Default)]
struct Clock {
    value: Micros,
    anchor: Micros,
}

impl Clock {
    fn read(&self, now: Micros) -> Micros {
        self.value + now.saturating_sub(self.anchor)
    }

    /// When it will say `value`.
    fn when(&self, value: Micros) -> Micros {
        self.anchor + value.saturating_sub(self.value)
    }
}

enum Item {
    Message(Message),
    /// The writer has closed the connection; for good, if it has no use for the link.
    Gone {
        is_final: bool,
    },
}

/// A connection that carries one link. Side 0 has dialled it.
struct Wire {
    id: LinkId,
    generation: u64,
    hosts: [usize; 2],
    /// `pipes[i]` is what side i has written, with when it is there.
    pipes: [VecDeque<(Micros, Item)>; 2],
    /// Nothing that side i writes arrives any more.
    is_broken: [bool; 2],
    heard: [Micros; 2],
    is_open: [bool; 2],
    is_accepted: bool,
}

impl Wire {
    fn side(&self, host: usize) -> Option<usize> {
        self.hosts.iter().position(|other| *other == host)
    }
}

/// A host's end of a link.
struct End {
    id: LinkId,
    peer: usize,
    dials: bool,
    credits: u64,
    /// Nothing before the neighbour has come, at the end that waits for it.
    link: Option<Link>,
    /// An end went, or refused the other.
    is_ended: bool,
    left: Option<Micros>,
    redial: Option<Micros>,
    /// The connection that it began with.
    first: u64,
    /// Frames accepted and taken here.
    accepted: u64,
    taken: u64,
}

impl End {
    fn is_over(&self) -> bool {
        let is_final = |link: &Link| matches!(link.state(), LinkState::Lost { .. } | LinkState::Closed);
        self.is_ended || self.link.as_ref().is_some_and(is_final)
    }
}

#[derive(Default)]
struct Host {
    clock: Clock,
    is_dead: bool,
    frozen: Micros,
    ends: Vec<End>,
    /// When it is woken next.
    planned: Option<Micros>,
}

/// See above.
pub struct Network {
    start: Instant,
    pub now: Micros,
    random: Random,
    hosts: Vec<Host>,
    wires: Vec<Wire>,
    /// Nothing gets from one host to another until then.
    cut: Vec<Vec<Micros>>,
    /// Longest time on the way.
    pub delay: Micros,
    payloads: Vec<Payload>,
    /// How often what happened, so that the test knows that it does.
    pub redials: u64,
    pub refusals: u64,
    pub strays: u64,
}

impl Network {
    pub fn new(hosts: usize, random: Random) -> Network {
        Network {
            start: Instant::now(),
            now: 0,
            random,
            hosts: (0..hosts).map(|_| Host::default()).collect(),
            wires: Vec::new(),
            cut: vec![vec![0; hosts]; hosts],
            delay: 5 * MS,
            payloads: Vec::new(),
            redials: 0,
            refusals: 0,
            strays: 0,
        }
    }

    /// What a host's clock says.
    pub fn clock(&self, host: usize) -> Micros {
        self.hosts[host].clock.read(self.now)
    }

    fn instant(&self, host: usize) -> Instant {
        self.start + Duration::from_micros(self.clock(host))
    }

    pub fn is_dead(&self, host: usize) -> bool {
        self.hosts[host].is_dead
    }

    // What happens to hosts and to what is between them.

    /// A host's clock says suddenly that it is so much later.
    pub fn leap(&mut self, host: usize, by: Micros) {
        let value = self.clock(host) + by;
        self.hosts[host].clock = Clock { value, anchor: self.now };
        self.wake(host, self.now);
    }

    /// A host's clock stands still for so long.
    pub fn stand(&mut self, host: usize, time: Micros) {
        let value = self.clock(host);
        self.hosts[host].clock = Clock { value, anchor: self.now + time };
    }

    /// A host does nothing for so long; what comes waits at its door.
    pub fn freeze(&mut self, host: usize, time: Micros) {
        let until = self.now + time;
        self.hosts[host].frozen = self.hosts[host].frozen.max(until);
        self.hosts[host].planned = Some(self.hosts[host].frozen);
    }

    /// Everything that a host has is gone, and nobody is told.
    pub fn kill(&mut self, host: usize) {
        self.hosts[host].is_dead = true;
        self.hosts[host].ends.clear();
        for wire in &mut self.wires {
            if let Some(side) = wire.side(host) {
                (wire.is_open[side], wire.is_broken[side]) = (false, true);
                // What it wrote last may still be on its way.
                let kept = self.random.between(0, wire.pipes[side].len());
                wire.pipes[side].truncate(kept);
                wire.pipes[1 - side].clear();
            }
        }
    }

    /// A host begins anew.
    pub fn revive(&mut self, host: usize) {
        self.hosts[host].is_dead = false;
        self.wake(host, self.now);
    }

    /// Nothing gets from `from` to `to` for so long.
    pub fn cut(&mut self, from: usize, to: usize, time: Micros) {
        let until = self.now + time;
        self.cut[from][to] = self.cut[from][to].max(until);
        for wire in self.wires.iter_mut().filter(|wire| wire.hosts == [from, to] || wire.hosts == [to, from]) {
            let side = usize::from(wire.hosts[1] == from);
            if time > IDLE {
                wire.is_broken[side] = true;
                wire.pipes[side].clear();
            } else {
                wire.pipes[side].iter_mut().for_each(|(at, _)| *at += time);
            }
        }
    }

    /// What is on its way between two hosts is late.
    pub fn stall(&mut self, one: usize, other: usize, by: Micros) {
        for wire in self.wires.iter_mut().filter(|wire| wire.side(one).is_some() && wire.side(other).is_some()) {
            wire.pipes.iter_mut().flatten().for_each(|(at, _)| *at += by);
        }
    }

    /// The connections of two hosts are lost, with what is on its way from some moment on.
    pub fn lose(&mut self, one: usize, other: usize) {
        for index in 0..self.wires.len() {
            let wire = &mut self.wires[index];
            if wire.side(one).is_none() || wire.side(other).is_none() {
                continue;
            }
            for side in 0..2 {
                let kept = self.random.between(0, wire.pipes[side].len());
                wire.pipes[side].truncate(kept);
                wire.is_broken[side] = false;
            }
            // Both hear of it, or neither: then they miss each other.
            let is_told = self.random.between(0, 1) == 0;
            for side in 0..2 {
                if is_told {
                    self.push(index, side, Item::Gone { is_final: false });
                }
                self.wires[index].is_broken[side] = true;
            }
        }
    }

    /// A host dials those again that it has dialled, while the old connections go on.
    pub fn redial(&mut self, host: usize) {
        let now = self.now;
        self.hosts[host].ends.iter_mut().filter(|end| end.dials).for_each(|end| end.redial = Some(now));
        self.wake(host, now);
    }

    // What hosts do.

    fn end(&mut self, host: usize, id: LinkId) -> Option<&mut End> {
        self.hosts[host].ends.iter_mut().find(|end| end.id == id)
    }

    /// An end of a link to another host.
    pub fn open(&mut self, host: usize, id: LinkId, peer: usize, dials: bool, credits: u64) {
        assert!(self.end(host, id).is_none(), "there is an end of {id:?} on host {host}");
        let link = dials.then(|| Link::new(id, limits(credits), self.instant(host)));
        let redial = dials.then_some(self.now);
        let (left, is_ended) = (None, false);
        let end = End { id, peer, dials, credits, link, is_ended, left, redial, first: 1, accepted: 0, taken: 0 };
        self.hosts[host].ends.push(end);
    }

    /// Whether the neighbour has been there and is.
    pub fn is_up(&mut self, host: usize, id: LinkId) -> bool {
        self.end(host, id)
            .is_some_and(|end| !end.is_over() && end.link.as_ref().is_some_and(|link| link.state() == LinkState::Up))
    }

    /// Whether nothing will come any more of a link, and what came was taken.
    pub fn is_over(&mut self, host: usize, id: LinkId) -> bool {
        self.end(host, id).is_none_or(|end| {
            let has_ended = end.link.as_ref().is_none_or(Link::has_ended);
            end.is_over() && (has_ended || end.is_ended)
        })
    }

    /// The worker's end of the link by which it is ruled.
    pub fn control(&self, host: usize) -> Option<LinkId> {
        self.hosts[host].ends.iter().find(|end| end.id.link == CONTROL && end.left.is_none()).map(|end| end.id)
    }

    /// Sends; false where the link takes nothing now, or never again.
    pub fn send(&mut self, host: usize, id: LinkId, header: FrameHeader, payload: Payload) -> bool {
        let number = self.payloads.len() as u64;
        let Some(end) = self.end(host, id).filter(|end| !end.is_over()) else { return false };
        let Some(link) = end.link.as_mut().filter(|link| link.can_send()) else { return false };
        link.send(Frame { header, payload: number.to_le_bytes().to_vec().into() }).expect("it can be sent");
        end.accepted += 1;
        self.payloads.push(payload);
        true
    }

    /// What has come.
    pub fn take(&mut self, host: usize, id: LinkId) -> Option<(FrameHeader, Payload)> {
        let end = self.end(host, id)?;
        let frame = end.link.as_mut()?.take()?.frame;
        end.taken += 1;
        let number = u64::from_le_bytes(frame.payload[..].try_into().expect("payloads are numbers"));
        Some((frame.header, self.payloads[number as usize].clone()))
    }

    /// Lets go of a link: what was sent still arrives, if the neighbour takes it soon.
    pub fn leave(&mut self, host: usize, id: LinkId) {
        let now = self.now;
        if let Some(end) = self.end(host, id).filter(|end| end.left.is_none()) {
            end.left = Some(now);
            match end.link.as_mut() {
                Some(link) => link.close(),
                None => end.is_ended = true,
            }
        }
    }

    // How it goes on.

    /// Wakes a host then, or earlier.
    pub fn wake(&mut self, host: usize, at: Micros) {
        let host = &mut self.hosts[host];
        let at = at.max(self.now).max(host.frozen);
        if host.planned.is_none_or(|planned| at < planned) {
            host.planned = Some(at);
        }
    }

    /// The host that is woken next, and when.
    pub fn next(&self) -> Option<(Micros, usize)> {
        let planned = |(index, host): (usize, &Host)| host.planned.filter(|_| !host.is_dead).map(|at| (at, index));
        self.hosts.iter().enumerate().filter_map(planned).min()
    }

    /// A host is awake: it reads what has come, and learns what time it is. `is_free`: it takes a head that comes.
    pub fn arrive(&mut self, host: usize, is_free: bool) {
        self.hosts[host].planned = None;
        for wire in 0..self.wires.len() {
            let sides: Vec<usize> = (0..2).filter(|side| self.wires[wire].hosts[*side] == host).collect();
            for side in sides {
                self.read(wire, side, is_free);
                let is_silent = self.now >= self.wires[wire].heard[side] + IDLE;
                if self.wires[wire].is_open[side] && is_silent {
                    self.close(wire, side, false);
                }
            }
        }
        let instant = self.instant(host);
        for link in self.hosts[host].ends.iter_mut().filter_map(|end| end.link.as_mut()) {
            if link.poll_timeout().is_some_and(|at| at <= instant) {
                link.handle_timeout(instant);
            }
        }
        for index in 0..self.hosts[host].ends.len() {
            let end = &mut self.hosts[host].ends[index];
            if end.redial.is_some_and(|at| at <= self.now) {
                end.redial = None;
                self.dial(host, index);
            }
        }
    }

    fn dial(&mut self, host: usize, index: usize) {
        let instant = self.instant(host);
        let end = &mut self.hosts[host].ends[index];
        if end.is_over() {
            return;
        }
        let Some(link) = end.link.as_mut() else { return };
        let generation = link.next_generation();
        if link.connected(instant, generation) {
            self.redials += u64::from(generation > 1);
            let (id, peer) = (end.id, end.peer);
            let is_there = !self.hosts[peer].is_dead;
            self.wires.push(Wire {
                id,
                generation,
                hosts: [host, peer],
                pipes: [VecDeque::new(), VecDeque::new()],
                is_broken: [!is_there; 2],
                heard: [self.now; 2],
                is_open: [true, is_there],
                is_accepted: false,
            });
            self.wake(peer, self.now + IDLE);
        }
    }

    fn read(&mut self, index: usize, side: usize, is_free: bool) {
        while self.wires[index].pipes[1 - side].front().is_some_and(|(at, _)| *at <= self.now) {
            let Some((_, item)) = self.wires[index].pipes[1 - side].pop_front() else { return };
            if !self.wires[index].is_open[side] {
                continue;
            }
            match item {
                Item::Gone { is_final } => {
                    let (host, id) = (self.wires[index].hosts[side], self.wires[index].id);
                    if is_final && let Some(end) = self.end(host, id) {
                        end.is_ended = true;
                    }
                    self.close(index, side, is_final);
                }
                Item::Message(message) => self.hear(index, side, message, is_free),
            }
        }
    }

    fn hear(&mut self, index: usize, side: usize, message: Message, is_free: bool) {
        let now = self.now;
        let Wire { id, generation, hosts, is_accepted, .. } = self.wires[index];
        let (host, peer) = (hosts[side], hosts[1 - side]);
        self.wires[index].heard[side] = now;
        let instant = self.instant(host);
        if side == 1 && !is_accepted {
            let Message::Hello(Hello { generation, .. }) = message else { panic!("a connection opens with a hello") };
            if id.link == CONTROL && self.end(host, id).is_none() && is_free && self.control(host).is_none() {
                self.open(host, id, peer, false, CREDITS_OF_CONTROL);
                self.end(host, id).expect("it was opened").first = generation;
            }
            let Some(end) = self.end(host, id).filter(|end| !end.is_over()) else {
                self.refusals += 1;
                return self.close(index, 1, true);
            };
            let credits = end.credits;
            let link = end.link.get_or_insert_with(|| Link::new(id, limits(credits), instant));
            if !link.connected(instant, generation) {
                return self.close(index, 1, false);
            }
            self.wires[index].is_accepted = true;
        }
        let stray = self.random.between(0, 7);
        let Some(end) = self.end(host, id) else { return self.close(index, side, true) };
        let Some(link) = end.link.as_mut() else { return };
        if stray == 0 && link.generation() == Some(generation) {
            // What came on an earlier connection comes once more, and a stranger's words.
            let before = (link.state(), link.poll_timeout());
            assert_eq!(link.handle(instant, generation - 1, message.clone()), Ok(()));
            let other = LinkId { session: id.session ^ 1, ..id };
            let strange = Hello { id: other, generation, ack: pp_transport::Ack::default() };
            assert!(link.handle(instant, generation, Message::Hello(strange)).is_err());
            assert_eq!((link.state(), link.poll_timeout()), before);
            self.strays += 1;
        }
        let end = self.end(host, id).expect("it is there");
        let first = end.first;
        let link = end.link.as_mut().expect("it has a link");
        if let Err(error) = link.handle(instant, generation, message) {
            // A head that goes on where it was, with a worker that has begun anew or had given it up.
            let is_strange = first > 1 || self.end(peer, id).is_none_or(|end| end.first > 1);
            assert!(is_strange && id.link == CONTROL, "{id:?} of host {host} at {now} µs: {error}");
            self.close(index, side, true);
            if let Some(end) = self.end(host, id) {
                end.is_ended = true;
            }
        }
    }

    /// A side closes its connection, and says so if it can.
    fn close(&mut self, index: usize, side: usize, is_final: bool) {
        let Wire { id, generation, hosts, .. } = self.wires[index];
        self.push(index, side, Item::Gone { is_final });
        (self.wires[index].is_open[side], self.wires[index].is_broken[side]) = (false, true);
        let (instant, soon) = (self.instant(hosts[side]), self.now + self.random.between(0, 200) as Micros * MS);
        if let Some(end) = self.end(hosts[side], id)
            && let Some(link) = end.link.as_mut()
        {
            let was_current = link.generation() == Some(generation);
            link.disconnected(instant, generation);
            if was_current && end.dials {
                end.redial = Some(end.redial.map_or(soon, |at| at.min(soon)));
            }
        }
    }

    fn push(&mut self, index: usize, side: usize, item: Item) {
        let wire = &self.wires[index];
        let (from, to) = (wire.hosts[side], wire.hosts[1 - side]);
        if wire.is_broken[side] {
            return;
        }
        let until = self.cut[from][to];
        if until > self.now + IDLE {
            self.wires[index].is_broken[side] = true;
            return;
        }
        let late = self.random.between(0, self.delay as usize) as Micros;
        // A lost datagram is sent again, and holds up those behind it.
        let again = if self.random.between(0, 30) == 0 { 50 * MS } else { 0 };
        let pipe = &mut self.wires[index].pipes[side];
        let at = (self.now.max(until) + late + again).max(pipe.back().map_or(0, |(at, _)| *at));
        pipe.push_back((at, item));
        self.wake(to, at);
    }

    /// A host has done what it could: it writes, forgets what is over, and sleeps until something is due.
    pub fn depart(&mut self, host: usize) {
        for index in 0..self.wires.len() {
            for side in 0..2 {
                if self.wires[index].hosts[side] == host {
                    self.write(index, side);
                }
            }
        }
        let now = self.now;
        let is_done = |end: &End| end.left.is_some_and(|left| end.is_over() || now >= left + LINGER);
        let done: Vec<LinkId> = self.hosts[host].ends.iter().filter(|end| is_done(end)).map(|end| end.id).collect();
        for index in 0..self.wires.len() {
            let Wire { id, hosts, is_open, .. } = self.wires[index];
            if let Some(side) = (0..2).find(|side| hosts[*side] == host)
                && is_open[side]
                && done.contains(&id)
            {
                self.close(index, side, true);
            }
        }
        self.hosts[host].ends.retain(|end| !done.contains(&end.id));
        self.wires.retain(|wire| wire.is_open != [false; 2]);
        self.plan(host);
    }

    fn write(&mut self, index: usize, side: usize) {
        let Wire { id, generation, hosts, is_accepted, is_open, .. } = self.wires[index];
        if !is_open[side] || (side == 1 && !is_accepted) {
            return;
        }
        let instant = self.instant(hosts[side]);
        while self.wires[index].pipes[side].len() < 16 {
            let Some(end) = self.end(hosts[side], id) else { return };
            let Some(link) = end.link.as_mut().filter(|link| link.generation() == Some(generation)) else { return };
            let Some(message) = link.poll_transmit(instant) else { return };
            self.push(index, side, Item::Message(message));
        }
    }

    fn plan(&mut self, host: usize) {
        let clock = &self.hosts[host].clock;
        let micros = |at: Instant| at.duration_since(self.start).as_micros() as Micros;
        let of_end = |end: &End| {
            let timeout = end.link.as_ref().and_then(Link::poll_timeout).map(|at| clock.when(micros(at)));
            let linger = end.left.map(|left| left + LINGER);
            [timeout, linger, end.redial].into_iter().flatten().min()
        };
        let of_wire = |wire: &Wire| {
            let sides = (0..2).filter(|side| wire.hosts[*side] == host && wire.is_open[*side]);
            let due = |side: usize| {
                let piece = wire.pipes[1 - side].front().map(|(at, _)| *at);
                piece.into_iter().chain([wire.heard[side] + IDLE]).min()
            };
            sides.filter_map(due).min()
        };
        let ends = self.hosts[host].ends.iter().filter_map(of_end).min();
        let wires = self.wires.iter().filter_map(of_wire).min();
        if let Some(at) = ends.into_iter().chain(wires).min() {
            self.wake(host, at);
        }
    }

    // What must hold.

    /// What one end has accepted and the other not taken is within the credits.
    pub fn check(&self) {
        for host in &self.hosts {
            for end in &host.ends {
                let other = self.hosts[end.peer].ends.iter().find(|other| other.id == end.id);
                if let Some(other) = other {
                    let credits = end.credits.min(other.credits);
                    assert!(end.accepted <= other.taken + credits, "{:?} holds more than its credits", end.id);
                }
            }
        }
    }

    /// Ends and connections that there are.
    pub fn left(&self) -> Vec<(usize, LinkId)> {
        let ends = self.hosts.iter().enumerate().flat_map(|(at, host)| host.ends.iter().map(move |end| (at, end.id)));
        ends.chain(self.wires.iter().map(|wire| (wire.hosts[0], wire.id))).collect()
    }
}

/// Messages between head and worker that lie at an end.
pub const CREDITS_OF_CONTROL: u64 = 64;

fn limits(credits: u64) -> LinkLimits {
    LinkLimits { credits, payload_bytes: 8, silence: SILENCE }
}
