//! The best division: dynamic programming over contiguous ranges of layers, and over which devices are used so far.
//!
//! What counts of the stages so far is a few sums and maxima ([`Label`]), of which whatever is no better in any and worse
//! in one is dropped; the worth of a whole pipeline falls with none of them, so nothing better is lost. Devices that are
//! alike count as one kind, and a state says how many of each kind are used and which is the last. With too many states
//! the devices are taken in a few orders only: as given, fastest first, slowest first, and by place; each order's best
//! division is exact still.

use std::collections::BTreeMap;

use super::{Device, Load, Objective, Problem, Stage, Wish};
use crate::law::crowding;

/// States, beyond which not every order is looked at: 8 devices that are all different, or many of few kinds.
const STATES_MAX: usize = 256;
/// Groups of sequences that are tried one by one; more are tried by doubling.
const GROUPS_EACH: usize = 16;

/// What one step of a device's parts is worth: seconds on a token's way, and seconds that the device is kept busy.
type Seconds = [f64; 2];

fn add(a: Seconds, b: Seconds) -> Seconds {
    [a[0] + b[0], a[1] + b[1]]
}

/// A device as the search sees it.
struct Kind {
    /// Those that are alike.
    devices: Vec<usize>,
    /// Sums over the first layers.
    layers: Vec<Seconds>,
    fixed: Seconds,
    first: Seconds,
    last: Seconds,
    /// What it can hold, keys and values counted.
    limit: u128,
    /// Index among the groups that several devices share, and the share.
    group: Option<(usize, f64)>,
}

/// What is counted of several devices that share what computes, by [`crate::law::Share::seconds`]. None of it falls with
/// more stages.
struct Crowd {
    group: usize,
    /// Share of those that are looked at here.
    share: f64,
}

/// Numbers of a crowd in a label: what its devices lose to all others, themselves among them, and the busiest of them.
const OF_CROWD: usize = 2;

impl Crowd {
    fn add(&self, cost: &mut [f64], share: f64, busy: f64) {
        cost[0] += crowding(self.share, share) * busy;
        if share == self.share {
            cost[1] = cost[1].max(busy);
        }
    }

    fn seconds(&self, cost: &[f64]) -> f64 {
        cost[0] + (1.0 - crowding(self.share, self.share)) * cost[1]
    }
}

/// How the parts of a pipeline make its worth, which is to be small.
enum Worth {
    /// The largest of: the sum, any device's busy time, any shared one's. Seconds of a round.
    Round,
    /// The sum, and so many times the largest busy time.
    Request(f64),
    /// All that fits is alike.
    Any,
}

impl Worth {
    fn of(&self, cost: &[f64], crowds: &[Crowd]) -> f64 {
        let (alone, crowded) = cost.split_at(cost.len() - OF_CROWD * crowds.len());
        let crowded = crowds.iter().zip(crowded.chunks(OF_CROWD)).map(|(crowd, cost)| crowd.seconds(cost));
        let busy = alone[1..].iter().copied().chain(crowded).fold(0.0, f64::max);
        match self {
            Worth::Round => cost[0].max(busy),
            Worth::Request(times) => cost[0] + times * busy,
            Worth::Any => 0.0,
        }
    }
}

/// What is asked of the parts of a pipeline.
struct Ask<'a> {
    problem: &'a Problem,
    wish: &'a Wish,
    worth: Worth,
    /// Decode: (sequences, groups). Of a request: nothing.
    groups: Option<usize>,
}

impl Ask<'_> {
    /// Seconds of a part of a device.
    fn part(&self, curve: &crate::law::Curve) -> Seconds {
        let Load { concurrency, answer, .. } = self.wish.load;
        match (&self.worth, self.groups) {
            (Worth::Any, _) => [0.0; 2],
            (_, Some(groups)) => {
                let context = self.wish.load.context();
                let (small, larger) = (concurrency / groups, concurrency % groups);
                let busy = (groups - larger) as f64 * curve.decode(small, context)
                    + if larger > 0 { larger as f64 * curve.decode(small + 1, context) } else { 0.0 };
                [curve.decode(concurrency.div_ceil(groups), context), busy]
            }
            (_, None) => {
                let (_, tokens) = self.wish.load.chunks();
                let chunk = curve.at(tokens, self.wish.load.prompt / 2);
                [chunk + answer as f64 * curve.decode(1, self.wish.load.context()), chunk]
            }
        }
    }

    /// Seconds of a hop, on the way and on the line.
    fn hop(&self, from: Option<usize>, to: Option<usize>) -> Seconds {
        let hop = self.problem.hop(from, to);
        let Load { concurrency, answer, .. } = self.wish.load;
        match (&self.worth, self.groups) {
            (Worth::Any, _) => [0.0; 2],
            (_, Some(groups)) => [hop.seconds(concurrency.div_ceil(groups) as f64), hop.occupied(concurrency as f64)],
            (_, None) => {
                let (_, tokens) = self.wish.load.chunks();
                let chunk = tokens as f64;
                [hop.seconds(chunk) + answer as f64 * hop.seconds(1.0), hop.occupied(chunk)]
            }
        }
    }

    /// Seconds of the way to or from the head, which carries no activations, once for each time round.
    fn way(&self, from: Option<usize>, to: Option<usize>) -> f64 {
        let latency = self.problem.hop(from, to).latency;
        match (&self.worth, self.groups) {
            (Worth::Any, _) => 0.0,
            (_, Some(_)) => latency,
            (_, None) => latency * (1 + self.wish.load.answer) as f64,
        }
    }

    fn sampling(&self) -> Seconds {
        let sampling = self.problem.sampling;
        match (&self.worth, self.groups) {
            (Worth::Any, _) => [0.0; 2],
            // Every group is drawn for once a round; a pace that the head sets is kept by each.
            (_, Some(groups)) => [sampling, groups as f64 * sampling],
            (_, None) => [sampling * (1 + self.wish.load.answer) as f64, 0.0],
        }
    }

    fn kind(&self, device: &Device, limit: u128, group: Option<(usize, f64)>) -> Kind {
        let mut layers = vec![[0.0; 2]];
        for layer in &device.layers {
            layers.push(add(layers[layers.len() - 1], self.part(layer)));
        }
        let part = |curve| self.part(curve);
        let (fixed, first, last) = (part(&device.fixed), part(&device.first), part(&device.last));
        Kind { devices: Vec::new(), layers, fixed, first, last, limit, group }
    }
}

/// The best split, if one fits.
pub(super) fn best(problem: &Problem, wish: &Wish) -> Option<Vec<Stage>> {
    each_division_of_memory(problem, wish, |limits| {
        let mut best: Option<(f64, Vec<Stage>)> = None;
        let mut ask = |worth, groups| {
            let most = best.as_ref().map_or(f64::INFINITY, |(worth, _)| *worth);
            let found = Ask { problem, wish, worth, groups }.solve(limits, most);
            if found.as_ref().is_some_and(|found| found.0 < most) {
                best = found;
            }
        };
        match wish.objective {
            Objective::Latency => ask(Worth::Request((wish.load.chunks().0 - 1) as f64), None),
            _ => groups(wish.load.concurrency).into_iter().for_each(|groups| ask(Worth::Round, Some(groups))),
        }
        best.map(|(_, stages)| stages)
    })
}

/// A split that fits, if there is one.
pub(super) fn any(problem: &Problem, wish: &Wish) -> Option<Vec<Stage>> {
    each_division_of_memory(problem, wish, |limits| {
        let ask = Ask { problem, wish, worth: Worth::Any, groups: None };
        ask.solve(limits, f64::INFINITY).map(|(_, stages)| stages)
    })
}

/// Numbers of groups to try.
pub(super) fn groups(sequences: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(2 * GROUPS_EACH), |groups| Some(2 * groups));
    (1..=sequences.min(GROUPS_EACH)).chain(doubled.take_while(|groups| *groups <= sequences)).collect()
}

/// Where several devices have one memory, each is first let have all of it, which may turn out too much together, and
/// then an equal part. Devices with a memory of their own have all of it.
fn each_division_of_memory(
    problem: &Problem,
    wish: &Wish,
    solve: impl Fn(&[u128]) -> Option<Vec<Stage>>,
) -> Option<Vec<Stage>> {
    let limits = |divided: bool| -> Vec<u128> {
        let sharers = |pool| problem.devices.iter().filter(|device| device.pool == pool).count();
        let part = |device: &Device| if divided { sharers(device.pool) as u128 } else { 1 };
        let limit =
            |device: &Device| problem.pools[device.pool].map_or(u128::MAX, |limit| u128::from(limit) / part(device));
        problem.devices.iter().map(limit).collect()
    };
    let fits = |stages: &Vec<Stage>| problem.fits(stages, wish.kv_tokens);
    solve(&limits(false)).filter(fits).or_else(|| solve(&limits(true)).filter(fits))
}

/// Stages so far: a token's seconds, the busiest device's or line's, those of each shared one, and what crowds count.
#[derive(Clone)]
struct Label {
    cost: Vec<f64>,
    node: usize,
}

/// A stage on a way that was gone.
struct Node {
    before: Option<usize>,
    kind: usize,
    to: usize,
}

/// What is used of each kind, and the last kind; labels by the first layer that is not placed.
type Frontier = BTreeMap<(Vec<usize>, usize), Vec<Vec<Label>>>;

struct Search<'a> {
    ask: &'a Ask<'a>,
    kinds: Vec<Kind>,
    /// Kinds only in this order.
    ordered: bool,
    groups: usize,
    crowds: Vec<Crowd>,
    nodes: Vec<Node>,
    /// The best whole pipeline.
    best: (f64, Option<usize>),
}

impl Ask<'_> {
    /// The best split below `most`, and its worth.
    fn solve(&self, limits: &[u128], most: f64) -> Option<(f64, Vec<Stage>)> {
        let devices: Vec<usize> = (0..self.problem.devices.len()).collect();
        if self.wish.ordered {
            return self.solve_kinds(self.kinds(limits, &devices, false), true, most);
        }
        let kinds = self.kinds(limits, &devices, true);
        let states: usize = kinds.iter().fold(1, |states, kind| states.saturating_mul(kind.devices.len() + 1));
        if states <= STATES_MAX {
            return self.solve_kinds(kinds, false, most);
        }
        let mut best: Option<(f64, Vec<Stage>)> = None;
        for order in self.orders(&devices) {
            let most = best.as_ref().map_or(most, |(worth, _)| *worth);
            best = self.solve_kinds(self.kinds(limits, &order, false), true, most).or(best);
        }
        best
    }

    fn orders(&self, devices: &[usize]) -> [Vec<usize>; 4] {
        let problem = self.problem;
        let slowness = |device: &usize| problem.devices[*device].layers.iter().map(|layer| layer.step(1)).sum::<f64>();
        let mut fastest = devices.to_vec();
        fastest.sort_by(|a, b| slowness(a).total_cmp(&slowness(b)));
        let slowest = fastest.iter().rev().copied().collect();
        let mut by_place = fastest.clone();
        by_place.sort_by_key(|device| problem.devices[*device].place);
        [devices.to_vec(), fastest, slowest, by_place]
    }

    fn solve_kinds(&self, kinds: Vec<Kind>, ordered: bool, most: f64) -> Option<(f64, Vec<Stage>)> {
        let groups = kinds.iter().filter_map(|kind| kind.group).map(|(group, _)| group + 1).max().unwrap_or(0);
        let crowds = crowds(&kinds);
        let search = Search { ask: self, kinds, ordered, groups, crowds, nodes: Vec::new(), best: (most, None) };
        search.run()
    }

    /// The kinds of `devices`; with `joined`, those that are alike are one.
    fn kinds(&self, limits: &[u128], devices: &[usize], joined: bool) -> Vec<Kind> {
        let problem = self.problem;
        let sharers = |group| {
            let same = |device: &&Device| device.compute.is_some_and(|compute| compute.group == group);
            problem.devices.iter().filter(same).count()
        };
        let mut shared: Vec<usize> = Vec::new();
        let mut group = |device: &Device| {
            let compute = device.compute.filter(|compute| sharers(compute.group) > 1)?;
            let known = shared.iter().position(|group| *group == compute.group);
            let at = known.unwrap_or_else(|| {
                shared.push(compute.group);
                shared.len() - 1
            });
            Some((at, compute.share))
        };
        let mut kinds: Vec<Kind> = Vec::new();
        for index in devices {
            let device = &problem.devices[*index];
            let group = group(device);
            let is_like = |kind: &&mut Kind| {
                let other = &problem.devices[kind.devices[0]];
                let alike =
                    Device { name: other.name.clone(), pool: other.pool, compute: other.compute, ..device.clone() };
                kind.group == group && kind.limit == limits[*index] && alike == *other
            };
            match kinds.iter_mut().find(is_like).filter(|_| joined) {
                Some(kind) => kind.devices.push(*index),
                None => {
                    let kind = self.kind(device, limits[*index], group);
                    kinds.push(Kind { devices: vec![*index], ..kind });
                }
            }
        }
        kinds
    }
}

/// Those of each group that take a part of what there is, beside others that take more than is left.
fn crowds(kinds: &[Kind]) -> Vec<Crowd> {
    let mut crowds: Vec<Crowd> = Vec::new();
    for (group, share) in kinds.iter().filter_map(|kind| kind.group) {
        let crowded = |(other, with): (usize, f64)| other == group && crowding(share, with) > 0.0;
        let is_new = !crowds.iter().any(|crowd| crowd.group == group && crowd.share == share);
        // Who takes all of it has, with others, the sum that is counted for the group.
        if share < 1.0 && is_new && kinds.iter().filter_map(|kind| kind.group).any(crowded) {
            crowds.push(Crowd { group, share });
        }
    }
    crowds
}

impl Search<'_> {
    fn run(mut self) -> Option<(f64, Vec<Stage>)> {
        let all: usize = self.kinds.iter().map(|kind| kind.devices.len()).sum();
        let most = self.ask.wish.stages.unwrap_or(all).min(self.ask.problem.layers());
        let mut frontier = self.begin();
        for stages in 1..=most {
            self.finish(&frontier, stages);
            if stages < most {
                frontier = self.advance(&frontier);
            }
        }
        let (worth, node) = self.best;
        Some((worth, self.way(node?)))
    }

    /// Pipelines of one stage so far.
    fn begin(&mut self) -> Frontier {
        let layers = self.ask.problem.layers();
        let mut frontier = Frontier::new();
        for kind in 0..self.kinds.len() {
            let from = vec![self.ask.way(None, Some(self.kinds[kind].devices[0]))];
            let mut start = [from, vec![0.0; 1 + self.groups + OF_CROWD * self.crowds.len()]].concat();
            let [sum, busy] = self.ask.sampling();
            (start[0], start[1]) = (start[0] + sum, busy);
            let start = Label { cost: start, node: 0 };
            let cells = frontier.entry(self.used(&[], kind)).or_insert_with(|| vec![Vec::new(); layers + 1]);
            for (to, cell) in cells.iter_mut().enumerate().skip(1) {
                self.place(&start, None, kind, 0, to, cell);
            }
        }
        frontier
    }

    fn used(&self, before: &[usize], kind: usize) -> (Vec<usize>, usize) {
        if self.ordered {
            return (Vec::new(), kind);
        }
        let mut used = if before.is_empty() { vec![0; self.kinds.len()] } else { before.to_vec() };
        used[kind] += 1;
        (used, kind)
    }

    /// One stage more.
    fn advance(&mut self, frontier: &Frontier) -> Frontier {
        let layers = self.ask.problem.layers();
        let mut next = Frontier::new();
        for ((used, last), cells) in frontier {
            for kind in 0..self.kinds.len() {
                let is_free = if self.ordered { kind > *last } else { used[kind] < self.kinds[kind].devices.len() };
                if !is_free {
                    continue;
                }
                let hop = self.ask.hop(Some(self.kinds[*last].devices[0]), Some(self.kinds[kind].devices[0]));
                let to_cells = next.entry(self.used(used, kind)).or_insert_with(|| vec![Vec::new(); layers + 1]);
                for (from, labels) in cells.iter().enumerate().take(layers) {
                    for label in labels {
                        let mut over = label.clone();
                        over.cost[0] += hop[0];
                        over.cost[1] = over.cost[1].max(hop[1]);
                        for (to, cell) in to_cells.iter_mut().enumerate().skip(from + 1) {
                            self.place(&over, Some(label.node), kind, from, to, cell);
                        }
                    }
                }
            }
        }
        next
    }

    /// Puts layers `from` .. `to` on a device of `kind`, if that may become the best.
    fn place(
        &mut self,
        label: &Label,
        before: Option<usize>,
        kind: usize,
        from: usize,
        to: usize,
        cell: &mut Vec<Label>,
    ) {
        let (problem, wish) = (self.ask.problem, self.ask.wish);
        let at = &self.kinds[kind];
        let stage = Stage { device: at.devices[0], layers: from..to };
        if problem.needed(&stage, wish.kv_tokens) > at.limit {
            return;
        }
        let layers = [at.layers[to][0] - at.layers[from][0], at.layers[to][1] - at.layers[from][1]];
        let mut seconds = add(layers, at.fixed);
        if from == 0 {
            seconds = add(seconds, at.first);
        }
        if to == problem.layers() {
            seconds = add(seconds, at.last);
        }
        let mut cost = label.cost.clone();
        cost[0] += seconds[0];
        cost[1] = cost[1].max(seconds[1]);
        if let Some((group, share)) = at.group {
            cost[2 + group] += share * seconds[1];
            for (crowd, cost) in self.crowds.iter().zip(cost[2 + self.groups..].chunks_mut(OF_CROWD)) {
                if crowd.group == group {
                    crowd.add(cost, share, seconds[1]);
                }
            }
        }
        let may_win = self.ask.worth.of(&cost, &self.crowds) < self.best.0;
        let is_beaten = |other: &Label| other.cost.iter().zip(&cost).all(|(other, this)| other <= this);
        if !may_win || cell.iter().any(is_beaten) {
            return;
        }
        cell.retain(|other| other.cost.iter().zip(&cost).any(|(other, this)| other < this));
        self.nodes.push(Node { before, kind, to });
        cell.push(Label { cost, node: self.nodes.len() - 1 });
    }

    /// Pipelines that hold all layers now.
    fn finish(&mut self, frontier: &Frontier, stages: usize) {
        if self.ask.wish.stages.is_some_and(|wanted| wanted != stages) {
            return;
        }
        let layers = self.ask.problem.layers();
        for ((_, last), cells) in frontier {
            let back = self.ask.way(Some(self.kinds[*last].devices[0]), None);
            for label in &cells[layers] {
                let mut cost = label.cost.clone();
                cost[0] += back;
                let worth = self.ask.worth.of(&cost, &self.crowds);
                if worth < self.best.0 {
                    self.best = (worth, Some(label.node));
                }
            }
        }
    }

    /// The stages that lead to `node`, each on a device of its own.
    fn way(&self, node: usize) -> Vec<Stage> {
        let mut steps: Vec<(usize, usize)> = Vec::new();
        let mut at = Some(node);
        while let Some(node) = at {
            steps.push((self.nodes[node].kind, self.nodes[node].to));
            at = self.nodes[node].before;
        }
        steps.reverse();
        let mut taken = vec![0; self.kinds.len()];
        let mut from = 0;
        let stages = steps.into_iter().map(|(kind, to)| {
            taken[kind] += 1;
            let stage = Stage { device: self.kinds[kind].devices[taken[kind] - 1], layers: from..to };
            from = to;
            stage
        });
        stages.collect()
    }
}
