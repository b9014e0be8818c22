//! Which micro-batch an idle stage is charged to, at every moment.

use std::collections::HashMap;

use super::{Cause, Interval, Life, Nanos, StageSpan, Trace, by_start, lives};
use crate::trace::HeadState;

/// For each stage, by time, what it is charged with while it does nothing and holds nothing.
pub(super) fn charges(trace: &Trace) -> Vec<Vec<Interval>> {
    let mut events = Events::new(trace.stages.len());
    events.micro_batches(trace);
    events.queues(trace);
    for state in &trace.states {
        events.during(Place::State(state.state), state.from, state.to);
    }
    events.changes.sort_unstable();
    let mut board = Board::new(events.stages);
    let mut lines = vec![Vec::new(); events.stages];
    let mut open: Vec<Option<(Cause, Nanos)>> = vec![None; events.stages];
    for together in events.changes.chunk_by(|a, b| a.0 == b.0) {
        for (_, slot, change) in together {
            board.counts[*slot as usize] += change;
        }
        board.charge();
        for ((charge, open), line) in board.charged.iter().zip(&mut open).zip(&mut lines) {
            if open.map(|(cause, _)| cause) != *charge {
                let now = together[0].0;
                line.extend(open.map(|(cause, from)| Interval { cause, from, to: now }));
                *open = charge.map(|cause| (cause, now));
            }
        }
    }
    lines
}

/// Where a micro-batch is, and what else is counted.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In the head's hands.
    Head,
    /// Under way, but who knows where.
    Unknown,
    /// On the hop to this stage, or from the tail to the head.
    Hop(usize),
    /// Arrived at a stage and not begun.
    Waiting(usize),
    Computing(usize),
    /// Computed, and not on the hop.
    Leaving(usize),
    /// Stages for which micro-batches queue while they work.
    Queue,
    State(HeadState),
}

/// Slots before those of the stages.
const FIRST: usize = 8;

impl Place {
    fn slot(self) -> usize {
        match self {
            Place::Head => 0,
            Place::Unknown => 1,
            Place::Queue => 2,
            Place::State(HeadState::Working) => 3,
            Place::State(HeadState::Waiting) => 4,
            Place::State(HeadState::KvWait) => 5,
            Place::State(HeadState::Idle) => 6,
            Place::State(HeadState::Outage) => 7,
            Place::Hop(stage) => FIRST + 4 * stage,
            Place::Waiting(stage) => FIRST + 4 * stage + 1,
            Place::Computing(stage) => FIRST + 4 * stage + 2,
            Place::Leaving(stage) => FIRST + 4 * stage + 3,
        }
    }
}

/// What comes and goes when.
struct Events {
    stages: usize,
    /// (time, slot, one more or one less).
    changes: Vec<(Nanos, u32, i32)>,
}

impl Events {
    fn new(stages: usize) -> Events {
        Events { stages, changes: Vec::new() }
    }

    fn during(&mut self, place: Place, from: Nanos, to: Nanos) {
        if from < to {
            let slot = place.slot() as u32;
            self.changes.extend([(from, slot, 1), (to, slot, -1)]);
        }
    }

    fn micro_batches(&mut self, trace: &Trace) {
        let mut spans: Vec<HashMap<u64, &StageSpan>> =
            trace.stages.iter().map(|stage| stage.spans.iter().map(|span| (span.step, span)).collect()).collect();
        let formed = sorted(trace.head.iter().map(|head| (head.formed, head.formed)));
        let working = trace.states.iter().filter(|state| state.state == HeadState::Working);
        let working = sorted(working.map(|state| (state.to, state.from)));
        for life in lives(&trace.head) {
            let visits: Vec<Option<&StageSpan>> = spans.iter_mut().map(|spans| spans.remove(&life.step)).collect();
            self.way(&visits, Some(&life));
            if life.answered < Nanos::MAX {
                self.during(Place::Head, life.answered, with_the_head_until(life.sampled, &working, &formed));
            }
        }
        // Micro-batches that only stages remember.
        for stage in 0..self.stages {
            let steps: Vec<u64> = spans[stage].keys().copied().collect();
            for step in steps {
                let visits: Vec<Option<&StageSpan>> = spans.iter_mut().map(|spans| spans.remove(&step)).collect();
                self.way(&visits, None);
            }
        }
    }

    /// A micro-batch's way through the stages.
    fn way(&mut self, visits: &[Option<&StageSpan>], life: Option<&Life>) {
        if let Some(life) = life {
            self.during(Place::Head, life.formed, life.sent);
        }
        // Since when it is somewhere, and whether that is the hop before the next stage.
        let mut left = life.map(|life| (life.sent, true));
        for (stage, span) in visits.iter().enumerate() {
            let Some(span) = span else {
                left = left.map(|(since, _)| (since, false));
                continue;
            };
            if let Some((since, known)) = left {
                self.during(if known { Place::Hop(stage) } else { Place::Unknown }, since, span.arrived);
            }
            self.during(Place::Waiting(stage), span.arrived, span.started);
            self.during(Place::Computing(stage), span.started, span.finished);
            self.during(Place::Leaving(stage), span.finished, span.sent);
            left = Some((span.sent, true));
        }
        if let (Some((since, known)), Some(life)) = (left, life) {
            self.during(if known { Place::Hop(self.stages) } else { Place::Unknown }, since, life.answered);
        }
    }

    /// From the start of a micro-batch to that of the next, where that one came before this one was done.
    fn queues(&mut self, trace: &Trace) {
        for stage in &trace.stages {
            for pair in by_start(&stage.spans).windows(2).filter(|pair| pair[1].arrived < pair[0].finished) {
                self.during(Place::Queue, pair[0].started, pair[1].started);
            }
        }
    }
}

fn sorted(pairs: impl Iterator<Item = (Nanos, Nanos)>) -> Vec<(Nanos, Nanos)> {
    let mut pairs: Vec<_> = pairs.collect();
    pairs.sort_unstable();
    pairs
}

/// Sequences whose tokens are drawn stay in the head's hands while it works, until it forms a micro-batch.
fn with_the_head_until(sampled: Nanos, working: &[(Nanos, Nanos)], formed: &[(Nanos, Nanos)]) -> Nanos {
    let work = working.get(working.partition_point(|(to, _)| *to <= sampled)).filter(|(_, from)| *from <= sampled);
    let next = formed.get(formed.partition_point(|(at, _)| *at < sampled));
    let until = work.map_or(sampled, |(to, _)| *to);
    next.map_or(until, |(at, _)| until.min(*at))
}

/// How many micro-batches are where, and what that means for stages that are idle.
struct Board {
    counts: Vec<i32>,
    charged: Vec<Option<Cause>>,
    /// Micro-batches that nobody computes and no stage is charged with yet; the last one is the nearest.
    waiting: Vec<Cause>,
}

impl Board {
    fn new(stages: usize) -> Board {
        Board { counts: vec![0; FIRST + 4 * stages + 1], charged: vec![None; stages], waiting: Vec::new() }
    }

    fn count(&self, place: Place) -> usize {
        self.counts[place.slot()].max(0) as usize
    }

    fn put(&mut self, cause: Cause, count: usize) {
        // No more can be charged than there are stages.
        self.waiting.extend(std::iter::repeat_n(cause, count.min(self.charged.len())));
    }

    fn charge(&mut self) {
        let stages = self.charged.len();
        if self.count(Place::Queue) > 0 {
            for stage in 0..stages {
                self.charged[stage] = self.is_empty(stage).then_some(Cause::Upstream);
            }
            return;
        }
        self.waiting.clear();
        self.put(Cause::Unattributed, self.count(Place::Unknown));
        self.put(Cause::Hop, self.count(Place::Hop(stages)));
        // A head that works has something in its hands, even before it is a micro-batch.
        let working = self.count(Place::State(HeadState::Working)).min(1);
        self.put(Cause::Upstream, self.count(Place::Head).max(working));
        for stage in 0..stages {
            self.put(Cause::Hop, self.count(Place::Hop(stage)));
            self.charged[stage] = if self.is_empty(stage) { self.waiting.pop() } else { None };
            if self.count(Place::Computing(stage)) > 0 {
                self.put(Cause::Upstream, self.count(Place::Waiting(stage)));
                self.put(Cause::Hop, self.count(Place::Leaving(stage)));
            }
        }
        // What is left has passed the tail, and comes round.
        let missing = self.missing();
        for stage in 0..stages {
            if self.is_empty(stage) && self.charged[stage].is_none() {
                self.charged[stage] = Some(self.waiting.pop().unwrap_or(missing));
            }
        }
    }

    /// Whether a stage computes nothing and holds nothing.
    fn is_empty(&self, stage: usize) -> bool {
        [Place::Waiting(stage), Place::Computing(stage), Place::Leaving(stage)].iter().all(|at| self.count(*at) == 0)
    }

    /// Why there are fewer micro-batches than stages.
    fn missing(&self) -> Cause {
        let is = |state| self.count(Place::State(state)) > 0;
        if is(HeadState::Outage) {
            Cause::Outage
        } else if is(HeadState::KvWait) {
            Cause::KvWait
        } else if is(HeadState::Working) || is(HeadState::Waiting) || is(HeadState::Idle) {
            Cause::Starved
        } else {
            Cause::Unattributed
        }
    }
}
