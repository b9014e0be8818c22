//! Two ends and a network in virtual time: bytes are late, stall and come in pieces; connections are lost at any moment
//! with what is on its way, fail to come about, and overlap with the ones that replace them.

use std::collections::VecDeque;

use super::*;

/// Microseconds since the start.
type Micros = u64;

const MS: Micros = 1000;
/// Nothing of what is below takes that long, unless the network is down.
const PATIENCE: Micros = 3_600_000 * MS;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `low ..= high`.
    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.bits() % (high - low + 1)
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.bits().is_multiple_of(n)
    }
}

/// Bytes one way, in the order they were written.
struct Pipe {
    /// With when they arrive.
    pieces: VecDeque<(Micros, Vec<u8>)>,
    /// Nothing written from now on arrives.
    is_dead: bool,
    decoder: Decoder,
}

/// A connection. End 0 dials, end 1 accepts when it has read a hello.
struct Wire {
    generation: u64,
    /// `pipes[i]` is written by end `i`.
    pipes: [Pipe; 2],
    /// Whether the end does not know it to be gone.
    is_open: [bool; 2],
    is_accepted: bool,
    /// When an end hears that it is gone.
    learns: [Option<Micros>; 2],
}

/// An engine at its end of the link.
struct End {
    link: Link,
    /// The epochs of the frames that were accepted; a frame's step is its place.
    accepted: Vec<u64>,
    /// What it wants to send.
    frames: u64,
    epoch: u64,
    forgot: u64,
    /// The last step that came, of how many.
    came: u64,
    count: u64,
    next_send: Micros,
    next_take: Micros,
    closes: Option<Micros>,
    was_lost: Option<Micros>,
}

struct Network {
    seed: u64,
    random: Random,
    start: Instant,
    now: Micros,
    ends: [End; 2],
    wires: Vec<Wire>,
    /// Longest time a piece takes, an engine waits, and from one fault to the next.
    delay: Micros,
    pace: Micros,
    fault_every: Micros,
    next_fault: Micros,
    redials: Option<Micros>,
    /// From when on nothing arrives.
    dies: Option<Micros>,
    forgets: bool,
    /// How often what happened, so that the test knows that it does.
    happened: [u64; 6],
}

/// What the engine at `end` says in a step.
fn payload(end: usize, step: u64) -> Vec<u8> {
    (0..step * 7 % 90).map(|i| (i + step + 100 * end as u64) as u8).collect()
}

impl Network {
    fn new(seed: u64) -> Network {
        let mut random = Random(seed);
        let start = Instant::now();
        let limits = |credits| LinkLimits { credits, payload_bytes: 100, silence: Duration::from_secs(10) };
        let credits = random.between(1, 6);
        let frames = random.between(20, 120);
        let ends = [0, 1].map(|i| End {
            // The ends need not agree.
            link: Link::new(ID, limits(credits + i * random.between(0, 1)), start),
            accepted: Vec::new(),
            frames: if random.one_in(3) { 0 } else { frames },
            epoch: 1,
            forgot: 0,
            came: 0,
            count: 0,
            next_send: 0,
            next_take: 0,
            closes: None,
            was_lost: None,
        });
        let (delay, pace) = (random.between(1, 60) * MS, random.between(0, 60) * MS);
        let fault_every = random.between(20, 3000) * MS;
        Network {
            seed,
            start,
            now: 0,
            ends,
            wires: Vec::new(),
            delay,
            pace,
            fault_every,
            next_fault: random.between(0, fault_every),
            redials: Some(0),
            dies: None,
            forgets: random.one_in(3),
            happened: [0; 6],
            random,
        }
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_micros(self.now)
    }

    fn micros(&self, instant: Instant) -> Micros {
        instant.duration_since(self.start).as_micros() as u64
    }

    fn is_dead(&self) -> bool {
        self.dies.is_some_and(|dies| self.now >= dies)
    }

    fn dial(&mut self) {
        let (now, link) = (self.instant(), &mut self.ends[0].link);
        let generation = link.next_generation();
        if !link.connected(now, generation) {
            return;
        }
        let fails = self.is_calm() && self.random.one_in(5);
        self.happened[0] += u64::from(fails);
        let is_dead = fails || self.is_dead();
        let pipe = || Pipe { pieces: VecDeque::new(), is_dead, decoder: Decoder::new(100) };
        let learns = is_dead.then(|| self.now + self.random.between(0, 200) * MS);
        let pipes = [pipe(), pipe()];
        let wire = Wire { generation, pipes, is_open: [true; 2], is_accepted: false, learns: [learns, None] };
        self.wires.push(wire);
    }

    /// Whether another fault leaves time to come back before the silence is too long.
    fn is_calm(&self) -> bool {
        self.ends.iter().all(|end| self.now < self.micros(end.link.heard) + 5000 * MS)
    }

    /// What is on its way from some moment on is lost; the ends hear of it some time later.
    fn lose(&mut self, wire: usize) {
        let Network { random, now, wires, .. } = self;
        let wire = &mut wires[wire];
        for (pipe, learns) in wire.pipes.iter_mut().zip(&mut wire.learns) {
            let kept = random.between(0, pipe.pieces.len() as u64);
            pipe.pieces.truncate(kept as usize);
            pipe.is_dead = true;
            learns.get_or_insert(*now + random.between(0, 300) * MS);
        }
    }

    fn fault(&mut self) {
        self.next_fault = self.now + self.random.between(0, self.fault_every);
        if !self.is_calm() || self.wires.is_empty() {
            return;
        }
        let last = self.wires.len() - 1;
        match self.random.between(0, 3) {
            // Another connection, while this one goes on for a while.
            0 => {
                self.happened[1] += 1;
                self.redials = Some(self.now);
                if self.random.one_in(2) {
                    self.lose(last);
                }
            }
            1 => {
                self.happened[2] += 1;
                let stall = self.random.between(0, 1000) * MS;
                let pipe = self.random.between(0, 1) as usize;
                self.wires[last].pipes[pipe].pieces.iter_mut().for_each(|(at, _)| *at += stall);
            }
            _ => {
                self.happened[3] += 1;
                self.lose(last);
            }
        }
    }

    fn hear_of_losses(&mut self) {
        for i in 0..self.wires.len() {
            for end in [0, 1] {
                let wire = &mut self.wires[i];
                if !wire.is_open[end] || wire.learns[end].is_none_or(|learns| learns > self.now) {
                    continue;
                }
                wire.is_open[end] = false;
                let generation = wire.generation;
                let now = self.instant();
                self.ends[end].link.disconnected(now, generation);
                if end == 0 && i + 1 == self.wires.len() && !self.ends[0].link.is_lost() {
                    let soon = self.now + self.random.between(0, 200) * MS;
                    self.redials = Some(self.redials.map_or(soon, |at| at.min(soon)));
                }
            }
        }
    }

    /// Hands what has arrived on `wire` to the reader of what `writer` wrote.
    fn deliver(&mut self, wire: usize, writer: usize) {
        let (now, seed, reader) = (self.instant(), self.seed, 1 - writer);
        let (wire, link) = (&mut self.wires[wire], &mut self.ends[reader].link);
        let pipe = &mut wire.pipes[writer];
        while pipe.pieces.front().is_some_and(|(at, _)| *at <= self.now) {
            let Some((_, piece)) = pipe.pieces.pop_front() else { return };
            if !wire.is_open[reader] {
                continue;
            }
            if wire.is_accepted || reader == 0 {
                link.heard(now, wire.generation);
            }
            let mut piece = &piece[..];
            while let Some(message) = pipe.decoder.feed(&mut piece).unwrap() {
                if let (1, false, Message::Hello(hello)) = (reader, wire.is_accepted, &message) {
                    assert_eq!(hello.generation, wire.generation);
                    if !link.connected(now, hello.generation) {
                        self.happened[4] += 1;
                        wire.is_open[1] = false;
                        wire.learns[0].get_or_insert(self.now + self.delay);
                        break;
                    }
                    wire.is_accepted = true;
                }
                let result = link.handle(now, wire.generation, message);
                assert_eq!(result, Ok(()), "seed {seed} at {} µs, end {reader}", self.now);
            }
        }
    }

    /// The engine at `end`: takes, checks, and sends.
    fn engine(&mut self, i: usize) {
        let seed = self.seed;
        if self.now >= self.ends[i].next_take {
            self.ends[i].next_take = self.now + self.random.between(0, self.pace) + 1;
            if let Some(arrival) = self.ends[i].link.take() {
                let step = arrival.frame.header.step;
                let before = std::mem::replace(&mut self.ends[i].came, step);
                self.ends[i].count += 1;
                let sender = &self.ends[1 - i];
                assert!(
                    before < step && step <= sender.accepted.len() as u64,
                    "seed {seed}: step {step} after {before}"
                );
                let skipped = &sender.accepted[before as usize..step as usize - 1];
                assert!(skipped.iter().all(|epoch| *epoch < sender.forgot), "seed {seed}: step {step} after {before}");
                assert_eq!(arrival.frame.header.epoch, sender.accepted[step as usize - 1]);
                assert!(arrival.frame.payload == payload(1 - i, step) && self.start <= arrival.at, "seed {seed}");
            }
        }
        let end = &mut self.ends[i];
        if self.now >= end.next_send && (end.accepted.len() as u64) < end.frames && end.link.can_send() {
            end.next_send = self.now + self.random.between(0, self.pace);
            let step = end.accepted.len() as u64 + 1;
            let header = FrameHeader { epoch: end.epoch, step, micro_batch: i as u32 };
            end.link.send(Frame { header, payload: payload(i, step).into() }).unwrap();
            end.accepted.push(end.epoch);
            if self.forgets && self.random.one_in(10) {
                end.epoch += 1;
                end.forgot = end.epoch - self.random.between(0, 1);
                end.link.forget_before(end.forgot);
            }
        }
        if end.closes.is_some_and(|closes| closes <= self.now) {
            end.link.close();
        }
    }

    /// Writes while there is room, in pieces that end anywhere.
    fn transmit(&mut self, end: usize) {
        let now = self.instant();
        let Some(wire) = self.wires.iter_mut().rfind(|wire| end == 0 || wire.is_accepted) else { return };
        let link = &mut self.ends[end].link;
        let pipe = &mut wire.pipes[end];
        if !wire.is_open[end] || link.generation() != Some(wire.generation) {
            return;
        }
        while pipe.pieces.len() < 8 {
            let Some(message) = link.poll_transmit(now) else { return };
            let bytes = [&message.header()[..], &message.payload()].concat();
            let mut rest = &bytes[..];
            while !rest.is_empty() && !pipe.is_dead {
                let (piece, after) = rest.split_at(self.random.between(1, 80).min(rest.len() as u64) as usize);
                let before = pipe.pieces.back().map_or(0, |(at, _)| *at);
                let at = before.max(self.now + self.random.between(0, self.delay));
                pipe.pieces.push_back((at, piece.to_vec()));
                rest = after;
            }
        }
    }

    /// When something happens next. Engines that cannot go on wait for what else happens.
    fn next_event(&self) -> Option<Micros> {
        let open = self.wires.iter().flat_map(|wire| {
            let learns = wire.learns.iter().zip(wire.is_open).filter_map(|(at, is_open)| at.filter(|_| is_open));
            learns.chain(wire.pipes.iter().filter_map(|pipe| pipe.pieces.front().map(|(at, _)| *at)))
        });
        let ends = self.ends.iter().flat_map(|end| {
            let sends = (end.link.can_send() && (end.accepted.len() as u64) < end.frames).then_some(end.next_send);
            let takes = (!end.link.incoming.untaken.is_empty()).then_some(end.next_take);
            let timeout = end.link.poll_timeout().map(|at| self.micros(at));
            [sends, takes, timeout, end.closes.filter(|at| *at > self.now)].into_iter().flatten()
        });
        open.chain(ends).chain(self.redials).min()
    }

    /// Until nothing happens any more, or both ends are through.
    fn run(&mut self) {
        loop {
            if self.redials.is_some_and(|at| at <= self.now) {
                self.redials = None;
                self.dial();
            }
            self.hear_of_losses();
            for wire in 0..self.wires.len() {
                (0..2).for_each(|writer| self.deliver(wire, writer));
            }
            for end in 0..2 {
                self.engine(end);
                let now = self.instant();
                let link = &mut self.ends[end].link;
                if link.poll_timeout().is_some_and(|at| at <= now) {
                    link.handle_timeout(now);
                }
                if link.is_lost() && self.ends[end].was_lost.is_none() {
                    self.ends[end].was_lost = Some(self.now);
                }
                self.transmit(end);
                let Link { incoming, outgoing, limits, .. } = &self.ends[end].link;
                assert!(incoming.untaken.len() as u64 <= limits.credits, "seed {}", self.seed);
                assert!(outgoing.kept.len() as u64 <= limits.credits, "seed {}", self.seed);
            }
            if self.ends.iter().all(|end| end.link.has_ended() && end.link.poll_timeout().is_none()) {
                return;
            }
            if self.now >= self.next_fault && !self.is_dead() {
                self.fault();
            }
            if self.dies.is_some_and(|dies| dies <= self.now)
                && let Some(last) = self.wires.iter().rposition(|wire| wire.learns[0].is_none())
            {
                self.lose(last);
            }
            let fault = if self.is_dead() { None } else { Some(self.next_fault) };
            let dies = self.dies.filter(|at| *at > self.now);
            let Some(next) = self.next_event().into_iter().chain(fault).chain(dies).min() else { return };
            self.now = self.now.max(next);
            // A step of time for what could go on at once, so that a fault can come between.
            self.now += u64::from(self.random.one_in(4));
            assert!(self.now < PATIENCE, "seed {}: {:?}", self.seed, self.ends.each_ref().map(|end| end.link.state()));
        }
    }
}

/// Connections come back: all that was accepted is taken exactly once and in order, and both ends close.
fn closes(seed: u64) -> [u64; 6] {
    let mut network = Network::new(seed);
    let both = network.random.one_in(3);
    for end in 0..2 {
        // Some in the middle of it, others when long nothing happens any more.
        let at = network.random.between(0, 20_000) * MS;
        network.ends[end].closes = (both || end as u64 == seed % 2).then_some(at);
    }
    network.run();
    for end in 0..2 {
        let (here, there) = (&network.ends[end], &network.ends[1 - end]);
        assert_eq!(here.link.state(), LinkState::Closed, "seed {seed}, end {end}");
        let forgotten = there.accepted.iter().filter(|epoch| **epoch < there.forgot).count() as u64;
        let accepted = there.accepted.len() as u64;
        assert!(here.count <= accepted && here.count >= accepted - forgotten, "seed {seed}, end {end}");
        let rest = &there.accepted[here.came as usize..];
        assert!(rest.iter().all(|epoch| *epoch < there.forgot), "seed {seed}: nothing after step {}", here.came);
    }
    network.happened[5] = network.ends.iter().map(|end| end.count).sum();
    network.happened
}

/// They do not come back: both ends say so after as long as the limits say, and what was taken is right so far.
fn is_lost(seed: u64) {
    let mut network = Network::new(seed);
    network.dies = Some(network.random.between(0, 5000) * MS);
    network.run();
    for (i, end) in network.ends.iter().enumerate() {
        // Time goes on by a microsecond now and then, see `run`.
        let just = |at: Duration, due: Duration| at >= due && at <= due + Duration::from_micros(1);
        let LinkState::Lost { silent } = end.link.state() else { panic!("seed {seed}: {:?}", end.link.state()) };
        assert!(just(silent, end.link.limits.silence), "seed {seed}, end {i}: {silent:?}");
        let heard = network.micros(end.link.heard);
        // What was on its way when the network died may have come a stall later.
        assert!(heard <= network.dies.unwrap() + 2000 * MS, "seed {seed}, end {i}");
        let lost = Duration::from_micros(end.was_lost.unwrap() - heard);
        assert!(just(lost, end.link.limits.silence), "seed {seed}, end {i}: {lost:?}");
    }
}

#[test]
fn every_frame_arrives_once_and_in_order_and_both_ends_close() {
    let happened = (0..300).map(closes).fold([0; 6], |sum, of_one| std::array::from_fn(|i| sum[i] + of_one[i]));
    let [dials, overlaps, stalls, losses, stale, frames] = happened;
    assert!(dials > 200 && overlaps > 500 && stalls > 500 && losses > 1000 && stale > 20, "{happened:?}");
    assert!(frames > 10_000, "{happened:?}");
}

#[test]
fn without_a_network_both_ends_are_lost() {
    (0..200).for_each(is_lost);
}

/// As many seeds as PP_SOAK says (none unless asked for), from PP_SOAK_FROM.
#[test]
fn soak_as_long_as_asked() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let from = number("PP_SOAK_FROM");
    for seed in from..from + number("PP_SOAK") {
        closes(seed);
        is_lost(seed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_seed_ends_well(seed in 0u64..1 << 40) {
        closes(seed);
        is_lost(seed);
    }
}
