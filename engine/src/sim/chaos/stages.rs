//! What a host has of pipelines: stages that take steps one after the other and hand on what comes of them, and the shelf
//! where they wait for another pipeline. The rules are those of `pipeline/thread.rs`, `pipeline/shelf.rs` and `worker.rs`;
//! the model is the toy, a layer of it for each of the model's, so what follows a wrong page is a wrong token.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use pp_shaders::PAGE;
use pp_transport::{FrameHeader, LinkId};

use super::network::{HEAD, MS, Micros, Network};
use super::{LAYERS, Payload};
use crate::boundary::BoundaryLog;
use crate::random::Random;
use crate::schedule::{Batch, Kept};
use crate::sim::Model;
use crate::sim::toy::Toy;

/// How long a stage that is to stop may take for the step that it is at.
const END_PATIENCE: Micros = 10_000 * MS;

/// A pipeline as its head has planned it.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub session: u64,
    pub epoch: u64,
    /// The epoch of the pipeline before.
    pub after: Option<u64>,
    /// The host of each stage, and its layers.
    pub places: Vec<usize>,
    pub layers: Vec<Range<usize>>,
    pub pages: usize,
    pub sequences: usize,
    pub credits: u64,
    /// Bytes of what a stage has handed on.
    pub boundary_log: u64,
}

impl Plan {
    /// The hosts at the ends of a hop.
    pub fn ends(&self, hop: usize) -> (usize, usize) {
        let from = hop.checked_sub(1).map_or(HEAD, |stage| self.places[stage]);
        (from, self.places.get(hop).copied().unwrap_or(HEAD))
    }

    pub fn link(&self, hop: usize) -> LinkId {
        LinkId { session: self.session, link: hop as u32 }
    }

    /// Opens what a host has of the hops, those that it dials or the others. The head dials, or whoever is before.
    pub fn open_hops(&self, host: usize, dialled: bool, network: &mut Network) {
        for hop in 0..=self.places.len() {
            let (from, to) = self.ends(hop);
            if from != to && (host == from || host == to) {
                let peer = if host == from { to } else { from };
                let dials = host == HEAD || (peer != HEAD && host == from);
                if dials == dialled {
                    network.open(host, self.link(hop), peer, dials, self.credits);
                }
            }
        }
    }
}

/// A stage's weights, pages and log.
struct Stored {
    layers: Range<usize>,
    toy: Toy,
    log: Option<BoundaryLog>,
}

/// One on the shelf.
struct Shelved {
    pages: usize,
    stored: Stored,
    had: Had,
}

/// The epoch of the pipeline whose keys and values a stage has, and the layers that it has them of.
#[derive(Clone, Default)]
struct Had {
    epoch: Option<u64>,
    layers: Range<usize>,
}

/// A stage that runs.
struct Run {
    stage: usize,
    stored: Stored,
    had: Had,
    ready: Micros,
    is_told: bool,
    /// Its hops have carried something to it, and from it.
    proved: [bool; 2],
    is_linked: bool,
    current: u64,
    begun: u64,
    done: u64,
    /// The step on the device, with when it is done.
    work: Option<(FrameHeader, Payload, Micros)>,
    /// What waits for room on the hop.
    out: Option<(FrameHeader, Payload)>,
    is_failed: bool,
}

enum Received {
    Frame(FrameHeader, Payload),
    Nothing,
    Gone,
}

/// See above.
pub struct Station {
    host: usize,
    random: Random,
    plan: Option<Rc<Plan>>,
    runs: Vec<Run>,
    /// Hops within the host.
    local: BTreeMap<usize, VecDeque<(FrameHeader, Payload)>>,
    epoch: u64,
    is_started: bool,
    shelf: Vec<Shelved>,
    ending: Option<Micros>,
    /// What the head is to hear.
    pub news: VecDeque<Payload>,
    /// Seconds of a step and of each token.
    pub alpha: f64,
    pub beta: f64,
    /// Until when the device takes for ever.
    pub wedged: Micros,
    /// Steps dropped as they were of an older epoch.
    pub dropped: u64,
    /// Steps whose rows came out of the log.
    pub logged: u64,
}

impl Station {
    pub fn new(host: usize, mut random: Random) -> Station {
        Station {
            host,
            plan: None,
            runs: Vec::new(),
            local: BTreeMap::new(),
            epoch: 0,
            is_started: false,
            shelf: Vec::new(),
            ending: None,
            news: VecDeque::new(),
            alpha: 0.002 + 0.02 * random.unit(),
            beta: 2e-3 * random.unit().powi(2),
            wedged: 0,
            dropped: 0,
            logged: 0,
            random,
        }
    }

    /// Nothing is left but the host.
    pub fn lose(&mut self) {
        self.plan = None;
        self.runs.clear();
        self.local.clear();
        self.shelf.clear();
        self.news.clear();
        self.ending = None;
    }

    /// Whether nothing of any pipeline is here.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.shelf.is_empty() && self.plan.is_none()
    }

    /// Sequences that its stages know, if they are of that session: those of another one have not heard that it is over.
    pub fn tables(&self, session: Option<u64>) -> usize {
        if self.plan.as_ref().map(|plan| plan.session) != session {
            return 0;
        }
        self.runs.iter().flat_map(|run| run.stored.toy.tables()).sum()
    }

    /// Begun and done by each of its stages.
    pub fn progress(&self) -> Vec<(usize, u64, u64)> {
        self.runs.iter().map(|run| (run.stage, run.begun, run.done)).collect()
    }

    /// Whether nothing of it goes on by itself.
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty()
    }

    /// How its stages do, for the head.
    pub fn beat(&self) -> Option<Payload> {
        let plan = self.plan.as_ref().filter(|_| self.is_started)?;
        Some(Payload::Beat(plan.session, self.progress()))
    }

    /// Stages of a plan: from the shelf where they are there, else loaded.
    pub fn prepare(&mut self, plan: &Rc<Plan>, network: &mut Network) {
        self.drop_stages(network);
        let shelf = std::mem::take(&mut self.shelf);
        let is_mine = |(stage, _): &(usize, &Range<usize>)| plan.places[*stage] == self.host;
        let wanted: Vec<(usize, &Range<usize>)> = plan.layers.iter().enumerate().filter(is_mine).collect();
        let mut found = assign(shelf, plan.pages, &wanted);
        for ((stage, layers), kept) in wanted.into_iter().zip(&mut found) {
            let is_it = kept.as_ref().is_some_and(|kept| kept.stored.layers == *layers);
            let load = if is_it { 0 } else { self.random.between(50, 1500) as Micros * MS };
            let (mut stored, mut had) = match kept.take() {
                Some(kept) => (kept.stored.recut(layers), kept.had),
                None => {
                    (Stored { layers: layers.clone(), toy: Toy::new(LAYERS, plan.pages), log: None }, Had::default())
                }
            };
            if plan.after.is_none() || had.epoch != plan.after {
                had.layers = 0..0;
            }
            had.layers = common(layers, &had.layers);
            let is_wanted = plan.boundary_log > 0 && layers.end < LAYERS;
            if !is_wanted || had.layers.is_empty() {
                // Rows are known by their pages.
                stored.log = None;
            }
            if is_wanted && stored.log.is_none() {
                stored.log = Some(BoundaryLog::new(ROW, plan.boundary_log));
            }
            self.runs.push(Run {
                stage,
                stored,
                had,
                ready: network.now + load,
                is_told: false,
                proved: [false; 2],
                is_linked: false,
                current: plan.epoch,
                begun: 0,
                done: 0,
                work: None,
                out: None,
                is_failed: false,
            });
        }
        (self.plan, self.epoch, self.is_started) = (Some(plan.clone()), plan.epoch, false);
        let is_local = |hop: &usize| plan.ends(*hop) == (self.host, self.host);
        self.local = (0..=plan.places.len()).filter(is_local).map(|hop| (hop, VecDeque::new())).collect();
        plan.open_hops(self.host, false, network);
    }

    /// All stages everywhere are loaded.
    pub fn start(&mut self, network: &mut Network) {
        if let Some(plan) = self.plan.as_ref().filter(|_| self.ending.is_none()) {
            plan.open_hops(self.host, true, network);
            self.is_started = true;
        }
    }

    /// What is older is not wanted any more.
    pub fn raise(&mut self, epoch: u64) {
        self.epoch = self.epoch.max(epoch);
    }

    /// The stages stop, and go to the shelf where they are sound.
    pub fn pause(&mut self, network: &mut Network) {
        let busy = self.runs.iter().filter_map(|run| run.work.as_ref().map(|(_, _, done)| *done)).max();
        let end = busy.map_or(network.now, |done| done.min(network.now + END_PATIENCE));
        self.ending = Some(end);
        self.leave_hops(network);
    }

    /// The head is gone, or wants nothing of it any more.
    pub fn release(&mut self, network: &mut Network) {
        self.drop_stages(network);
        self.shelf.clear();
        self.news.clear();
    }

    fn leave_hops(&mut self, network: &mut Network) {
        let Some(plan) = self.plan.clone() else { return };
        for hop in 0..=plan.places.len() {
            network.leave(self.host, plan.link(hop));
        }
    }

    fn drop_stages(&mut self, network: &mut Network) {
        self.leave_hops(network);
        (self.plan, self.ending) = (None, None);
        self.runs.clear();
        self.local.clear();
    }

    fn put_away(&mut self, network: &mut Network) {
        let Some(plan) = self.plan.clone() else { return };
        let now = network.now;
        for mut run in std::mem::take(&mut self.runs) {
            if run.ready > now || run.work.as_ref().is_some_and(|(_, _, done)| *done > now) {
                // It is left to itself.
                continue;
            }
            if let Some((_, payload, _)) = run.work.take() {
                // What was begun is finished, and nobody gets it.
                self.compute(&mut run, &payload, &plan);
            }
            if run.begun > 0 {
                run.had = Had { epoch: Some(self.epoch), layers: run.stored.layers.clone() };
            }
            run.stored.toy.forget_sequences();
            self.shelf.push(Shelved { pages: plan.pages, stored: run.stored, had: run.had });
        }
        self.drop_stages(network);
        self.news.push_back(Payload::Paused);
    }

    /// When something is due.
    pub fn due(&self, now: Micros) -> Option<Micros> {
        let loading = self.runs.iter().filter(|run| !run.is_told).map(|run| run.ready);
        let working = self.runs.iter().filter_map(|run| run.work.as_ref().map(|(_, _, done)| *done));
        loading.chain(working).chain(self.ending).filter(|at| *at > now).min()
    }

    /// Does all that can be done now.
    pub fn work(&mut self, network: &mut Network) {
        if self.ending.is_some_and(|at| at <= network.now) {
            self.put_away(network);
        }
        if self.ending.is_some() {
            return;
        }
        let Some(plan) = self.plan.clone() else { return };
        for run in self.runs.iter_mut().filter(|run| !run.is_told && run.ready <= network.now) {
            run.is_told = true;
            let kept = Kept {
                layers: run.stored.layers.clone(),
                pages: run.had.layers.clone(),
                boundary: run.stored.log.as_ref().map_or(Vec::new(), BoundaryLog::pages),
            };
            self.news.push_back(Payload::Ready(plan.session, run.stage, kept));
        }
        if !self.is_started {
            return;
        }
        let mut runs = std::mem::take(&mut self.runs);
        while runs.iter_mut().map(|run| self.advance(run, &plan, network)).filter(|moved| *moved).count() > 0 {}
        self.runs = runs;
    }

    fn advance(&mut self, run: &mut Run, plan: &Plan, network: &mut Network) -> bool {
        if run.is_failed {
            return false;
        }
        let mut moved = false;
        if !run.proved[1] {
            run.proved[1] = self.send(plan, run.stage + 1, (proof(plan), Payload::Proof), network).is_none();
            moved |= run.proved[1];
        }
        if run.work.as_ref().is_some_and(|(_, _, done)| *done <= network.now) && run.out.is_none() {
            let (header, payload, _) = run.work.take().expect("it works");
            let result = self.compute(run, &payload, plan);
            run.done += 1;
            run.out = Some((header, result)).filter(|_| header.epoch >= self.epoch);
            moved = true;
        }
        if let Some(out) = run.out.take() {
            run.out = self.send(plan, run.stage + 1, out, network);
            moved |= run.out.is_none();
        }
        if run.work.is_none() && run.out.is_none() {
            match self.receive(plan, run.stage, network) {
                Received::Frame(_, Payload::Proof) => {
                    run.proved[0] = true;
                    moved = true;
                }
                Received::Frame(header, payload) => {
                    self.begin(run, header, payload, plan, network);
                    moved = true;
                }
                Received::Nothing => {}
                Received::Gone => self.fail(run, plan),
            }
        }
        if !run.is_linked && run.proved == [true; 2] {
            run.is_linked = true;
            self.news.push_back(Payload::Linked(plan.session, run.stage));
        }
        let behind = run.stage + 1;
        let (from, to) = plan.ends(behind);
        if !run.is_failed && from != to && network.is_over(self.host, plan.link(behind)) && run.out.is_some() {
            self.fail(run, plan);
        }
        moved
    }

    fn fail(&mut self, run: &mut Run, plan: &Plan) {
        run.is_failed = true;
        self.news.push_back(Payload::Failed(plan.session));
    }

    /// Sends; what the hop does not take comes back.
    fn send(
        &mut self,
        plan: &Plan,
        hop: usize,
        (header, payload): (FrameHeader, Payload),
        network: &mut Network,
    ) -> Option<(FrameHeader, Payload)> {
        let Some(queue) = self.local.get_mut(&hop) else {
            let is_sent = network.send(self.host, plan.link(hop), header, payload.clone());
            return (!is_sent).then_some((header, payload));
        };
        if queue.len() as u64 >= plan.credits {
            return Some((header, payload));
        }
        queue.push_back((header, payload));
        None
    }

    fn receive(&mut self, plan: &Plan, hop: usize, network: &mut Network) -> Received {
        let found = match self.local.get_mut(&hop) {
            Some(queue) => queue.pop_front(),
            None => network.take(self.host, plan.link(hop)),
        };
        match found {
            Some((header, payload)) => Received::Frame(header, payload),
            None if !self.local.contains_key(&hop) && network.is_over(self.host, plan.link(hop)) => Received::Gone,
            None => Received::Nothing,
        }
    }

    /// The head's end of a hop within its host.
    pub fn send_first(&mut self, plan: &Plan, frame: (FrameHeader, Payload), network: &mut Network) -> bool {
        self.send(plan, 0, frame, network).is_none()
    }

    /// The same for what the tail says; an error where it says nothing more.
    pub fn receive_last(&mut self, plan: &Plan, network: &mut Network) -> Result<Option<(FrameHeader, Payload)>, ()> {
        match self.receive(plan, plan.places.len(), network) {
            Received::Frame(header, payload) => Ok(Some((header, payload))),
            Received::Nothing => Ok(None),
            Received::Gone => Err(()),
        }
    }

    fn begin(&mut self, run: &mut Run, header: FrameHeader, payload: Payload, plan: &Plan, network: &Network) {
        if header.epoch < run.current.max(self.epoch) {
            self.dropped += 1;
            return;
        }
        if header.epoch > run.current {
            run.stored.toy.forget_sequences();
            run.current = header.epoch;
        }
        run.begun += 1;
        let Payload::Step { batch, .. } = &payload else { panic!("a stage takes steps") };
        let is_asked = !asked(batch, run.stage, &run.stored.layers).is_empty();
        let tokens: usize = if is_asked { batch.parts.iter().map(|part| part.ids.len()).sum() } else { 0 };
        let seconds = if tokens == 0 { 0.0 } else { self.alpha + self.beta * tokens as f64 };
        let done = network.now.max(self.wedged) + (seconds * 1e6) as Micros;
        // Its tables are changed at once, all else when it is done.
        run.work = Some((header, payload, done));
        let known = run.stored.toy.tables().max().unwrap_or(0);
        assert!(known <= plan.sequences, "stage {} knows {known} sequences, {} may run", run.stage, plan.sequences);
    }

    fn compute(&mut self, run: &mut Run, payload: &Payload, plan: &Plan) -> Payload {
        let Payload::Step { batch, data, seconds } = payload else { panic!("a stage takes steps") };
        let Stored { layers, toy, log } = &mut run.stored;
        let (asked, is_from) = (asked(batch, run.stage, layers), batch.from == Some(run.stage));
        let is_asked = !asked.is_empty();
        let parts = if is_asked || is_from { batch.parts.clone() } else { Vec::new() };
        let mut own = Batch { released: batch.released.clone(), parts, ..Batch::default() };
        let mut values = data.clone();
        for layer in layers.clone() {
            // Layers that are not asked for hear what is released and what pages there are.
            own.from = (is_from || !asked.contains(&layer)).then_some(layer);
            values = toy.forward(layer, &own, values);
        }
        if asked.end < layers.end && !is_from {
            // What was lost ends within the stage, or before it.
            values = Vec::new();
        }
        let table = |sequence: u64| toy.table(layers.start, sequence);
        let places = own.parts.iter().flat_map(|part| {
            let positions = part.start..part.start + part.ids.len();
            positions.map(move |position| (table(part.sequence)[position / PAGE], position))
        });
        if let Some(log) = log {
            if is_from {
                // What was handed on is what would be handed on, of every row that was asked for.
                let rows = places.map(|(page, position)| read(log, page, position).expect("the row was kept"));
                assert_eq!(rows.collect::<Vec<u64>>(), values, "the log of stage {}", run.stage);
                self.logged += 1;
            } else if asked.end == layers.end {
                places.zip(&values).for_each(|((page, position), value)| {
                    log.write(page, position, &row(*value), batch.until.is_none());
                });
            }
        }
        let took = if is_asked && !own.parts.is_empty() {
            self.alpha + self.beta * own.parts.iter().map(|part| part.ids.len()).sum::<usize>() as f64
        } else {
            0.0
        };
        let seconds = seconds.iter().copied().chain([took]).collect();
        if run.stage + 1 == plan.places.len() {
            return Payload::Outputs { values, seconds };
        }
        Payload::Step { batch: batch.clone(), data: values, seconds }
    }
}

/// What proves a hop is of no epoch.
pub fn proof(plan: &Plan) -> FrameHeader {
    FrameHeader { epoch: plan.epoch, ..FrameHeader::default() }
}

/// The layers of a stage that compute what is asked for.
fn asked(batch: &Batch, stage: usize, layers: &Range<usize>) -> Range<usize> {
    let end = batch.until.map_or(layers.end, |until| layers.end.min(until)).max(layers.start);
    if batch.from.is_none_or(|from| from < stage) { layers.start..end } else { layers.start..layers.start }
}

/// Layers in both.
fn common(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    let start = one.start.max(other.start);
    start..one.end.min(other.end).max(start)
}

/// For each stage that is wanted the best of the shelf: the very one, or one that has some of its layers.
fn assign(shelf: Vec<Shelved>, pages: usize, wanted: &[(usize, &Range<usize>)]) -> Vec<Option<Shelved>> {
    let mut shelf: Vec<Option<Shelved>> = shelf.into_iter().map(|kept| (kept.pages == pages).then_some(kept)).collect();
    let mut worths = Vec::new();
    for (at, kept) in shelf.iter().enumerate() {
        let Some(kept) = kept else { continue };
        for (place, (_, layers)) in wanted.iter().enumerate() {
            let worth =
                if kept.stored.layers == **layers { LAYERS + 1 } else { common(&kept.stored.layers, layers).len() };
            worths.push((worth, at, place));
        }
    }
    worths.sort_unstable();
    let mut found: Vec<Option<Shelved>> = wanted.iter().map(|_| None).collect();
    for (_, at, place) in worths.into_iter().rev().filter(|(worth, ..)| *worth > 0) {
        if found[place].is_none() {
            found[place] = shelf[at].take();
        }
    }
    found
}

impl Stored {
    /// Becomes a stage with other layers: what both have stays.
    fn recut(mut self, layers: &Range<usize>) -> Stored {
        (0..LAYERS)
            .filter(|layer| !common(&self.layers, layers).contains(layer))
            .for_each(|layer| self.toy.lose(layer));
        // What it hands on is of other layers then.
        self.log = self.log.filter(|_| self.layers.end == layers.end);
        self.layers = layers.clone();
        self
    }
}

/// Floats of a row.
const ROW: usize = 4;

fn row(value: u64) -> [f32; ROW] {
    std::array::from_fn(|i| (value >> (16 * i) & 0xffff) as f32)
}

fn read(log: &BoundaryLog, page: u32, position: usize) -> Option<u64> {
    let row = log.read(page, position)?;
    Some(row.iter().enumerate().map(|(i, part)| (*part as u64) << (16 * i)).sum())
}
