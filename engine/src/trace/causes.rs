//! Where a stage's time went: intervals with a cause each, which tile the wall time exactly.
//!
//! Before a stage's first micro-batch and after its last it fills and drains. Between two, p and then n, what comes
//! first in this list decides:
//!
//! 1. busy: the union of the device's intervals;
//! 2. outage: a stage was lost, from the last answer before it until another pipeline was there;
//! 3. back-pressure: a result waits for the hop to take it;
//! 4. overhead: from the end of p to its being ready for the hop, and from the arrival of n to its start;
//! 5. upstream: some stage is at work while the next micro-batch queues for it, and so sets the pace;
//! 6. hop, or upstream: of the micro-batches that nobody computes each leaves one stage idle. It is charged to the
//!    next idle stage on its way: as hop when it is on one, as upstream when the head forms it or draws its tokens;
//! 7. starved: none is left, for fewer are under way than there are stages. KV wait, while requests waited that found
//!    no free pages.
//!
//! That is exact: stages that compute are as many as micro-batches that are computed, so idle stages are as many as
//! micro-batches that are not, and those that are missing. Where records are missing (a ring has forgotten) time is
//! left over: unattributed.

mod charge;

use serde::{Deserialize, Serialize};

use super::{HeadSpan, HeadState, Nanos, StageSpan, Trace};
use charge::charges;

/// What a stage was doing, or why it did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its device worked.
    Busy,
    /// Before its first micro-batch, or after its last.
    FillDrain,
    /// Another stage, or the head, was at work and set the pace.
    Upstream,
    /// A micro-batch was on a link that could have been computed.
    Hop,
    /// The hop did not take its result: what is downstream is behind.
    BackPressure,
    /// Nothing was asked for, or fewer micro-batches were in the pipe than it has stages.
    Starved,
    /// As `Starved`, while requests waited that found no free pages.
    KvWait,
    /// Its own work around the device's.
    Overhead,
    /// A stage was lost, and there was no pipeline.
    Outage,
    /// The trace does not tell.
    Unattributed,
}

impl Cause {
    /// All of them, in the order of reports.
    pub const ALL: [Cause; 10] = [
        Cause::Busy,
        Cause::FillDrain,
        Cause::Upstream,
        Cause::Hop,
        Cause::BackPressure,
        Cause::Starved,
        Cause::KvWait,
        Cause::Overhead,
        Cause::Outage,
        Cause::Unattributed,
    ];

    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Busy => "busy",
            Cause::FillDrain => "fill/drain",
            Cause::Upstream => "upstream",
            Cause::Hop => "hop",
            Cause::BackPressure => "back-pressure",
            Cause::Starved => "starved",
            Cause::KvWait => "KV wait",
            Cause::Overhead => "overhead",
            Cause::Outage => "outage",
            Cause::Unattributed => "unattributed",
        }
    }
}

/// A part of a trace's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// From.
    pub from: Nanos,
    /// Until.
    pub to: Nanos,
}

impl Window {
    /// From the first micro-batch that the head sent until the last answer. Where the head's records are missing the
    /// stages' stand in.
    pub fn of(trace: &Trace) -> Window {
        let spans = || trace.stages.iter().flat_map(|stage| &stage.spans);
        let sent = trace.head.iter().map(|span| span.sent).min();
        let from = sent.or_else(|| spans().map(|span| span.arrived).min()).unwrap_or(0);
        let answered = trace.head.iter().map(|span| span.answered).filter(|at| *at > 0).max();
        let to = answered.or_else(|| spans().map(|span| span.sent.max(span.finished)).max()).unwrap_or(from);
        Window { from, to: to.max(from) }
    }

    /// Nanoseconds.
    pub fn nanos(&self) -> Nanos {
        self.to.saturating_sub(self.from)
    }

    /// Seconds.
    pub fn seconds(&self) -> f64 {
        self.nanos() as f64 * 1e-9
    }
}

/// A cause and how long it lasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interval {
    /// What.
    pub cause: Cause,
    /// From.
    pub from: Nanos,
    /// Until.
    pub to: Nanos,
}

impl Interval {
    /// Nanoseconds.
    pub fn nanos(&self) -> Nanos {
        self.to - self.from
    }
}

/// A stage's time, divided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageCauses {
    /// In order of time; each begins where the one before ends, and two neighbours have different causes.
    pub intervals: Vec<Interval>,
    totals: [Nanos; Cause::ALL.len()],
}

impl StageCauses {
    /// Nanoseconds of a cause.
    pub fn total(&self, cause: Cause) -> Nanos {
        self.totals[cause as usize]
    }

    /// Nanoseconds of all causes: the window's.
    pub fn wall(&self) -> Nanos {
        self.totals.iter().sum()
    }

    /// The share of a cause, 0 to 1.
    pub fn share(&self, cause: Cause) -> f64 {
        self.total(cause) as f64 / self.wall().max(1) as f64
    }

    /// Adds time that follows on what is there, as far as it is inside the window.
    fn push(&mut self, window: Window, cause: Cause, from: Nanos, to: Nanos) {
        let (from, to) = (from.max(window.from), to.min(window.to));
        if from >= to {
            return;
        }
        self.totals[cause as usize] += to - from;
        match self.intervals.last_mut() {
            Some(last) if last.cause == cause => last.to = to,
            _ => self.intervals.push(Interval { cause, from, to }),
        }
    }
}

/// Every stage's time from the first micro-batch to the last answer, see [`Window::of`].
pub fn causes(trace: &Trace) -> Vec<StageCauses> {
    causes_within(trace, Window::of(trace))
}

/// Every stage's time in a window.
pub fn causes_within(trace: &Trace, window: Window) -> Vec<StageCauses> {
    let stages = trace.stages.iter().map(|stage| by_start(&stage.spans)).zip(charges(trace));
    let outages: Vec<Interval> = trace
        .states
        .iter()
        .filter(|state| state.state == HeadState::Outage)
        .map(|state| Interval { cause: Cause::Outage, from: state.from, to: state.to })
        .collect();
    stages.map(|(spans, charges)| divide(&spans, &outages, &charges, window)).collect()
}

fn by_start(spans: &[StageSpan]) -> Vec<StageSpan> {
    let mut spans = spans.to_vec();
    spans.sort_by_key(|span| (span.started, span.finished));
    spans
}

/// A stage's time, whose idle time is charged as `charges` say unless the stage itself is the cause, or an outage.
fn divide(spans: &[StageSpan], outages: &[Interval], charges: &[Interval], window: Window) -> StageCauses {
    let sends = union(spans.iter().map(|span| (span.send_started, span.sent)).collect());
    let mut causes = StageCauses::default();
    let mut previous: Option<&StageSpan> = None;
    let mut done = 0;
    for span in spans {
        match previous {
            None => causes.push(window, Cause::FillDrain, 0, span.started),
            Some(previous) if done < span.started.min(window.to) && span.started > window.from => {
                let mut gap = Gap::new(done, span.started);
                gap.take(outages);
                gap.take(&sends);
                gap.take_one(Cause::Overhead, previous.finished, previous.send_started);
                gap.take_one(Cause::Overhead, span.arrived, span.started);
                gap.take(charges);
                for part in gap.finish(Cause::Unattributed) {
                    causes.push(window, part.cause, part.from, part.to);
                }
            }
            Some(_) => {}
        }
        causes.push(window, Cause::Busy, span.started.max(done), span.finished);
        done = done.max(span.started).max(span.finished);
        previous = Some(span);
    }
    causes.push(window, Cause::FillDrain, done, window.to);
    causes
}

/// How long the head had to do with a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Life {
    pub step: u64,
    pub formed: Nanos,
    pub sent: Nanos,
    /// [`Nanos::MAX`] when there is no answer yet.
    pub answered: Nanos,
    pub sampled: Nanos,
}

/// By `sent`. A micro-batch without an answer, where a later one has one, was given up before that one was formed.
pub(super) fn lives(head: &[HeadSpan]) -> Vec<Life> {
    let mut spans: Vec<&HeadSpan> = head.iter().collect();
    spans.sort_by_key(|span| (span.sent, span.formed));
    let mut given_up = Nanos::MAX;
    let mut lives = Vec::with_capacity(spans.len());
    for span in spans.into_iter().rev() {
        let answered = if span.answered > 0 { span.answered } else { given_up };
        let sampled = if span.sampled > 0 { span.sampled } else { answered };
        lives.push(Life { step: span.step, formed: span.formed, sent: span.sent, answered, sampled });
        if span.answered > 0 {
            given_up = span.formed;
        }
    }
    lives.reverse();
    lives
}

/// Claims of back-pressure for the union of some intervals, by time.
fn union(mut intervals: Vec<(Nanos, Nanos)>) -> Vec<Interval> {
    intervals.retain(|(from, to)| from < to);
    intervals.sort_unstable();
    let mut claims: Vec<Interval> = Vec::new();
    for (from, to) in intervals {
        match claims.last_mut() {
            Some(last) if from <= last.to => last.to = last.to.max(to),
            _ => claims.push(Interval { cause: Cause::BackPressure, from, to }),
        }
    }
    claims
}

/// Time that is given to causes bit by bit; what is taken once is not taken again.
struct Gap {
    /// By time, none of them empty.
    left: Vec<(Nanos, Nanos)>,
    taken: Vec<Interval>,
}

impl Gap {
    fn new(from: Nanos, to: Nanos) -> Gap {
        let left = if from < to { vec![(from, to)] } else { Vec::new() };
        Gap { left, taken: Vec::new() }
    }

    /// Takes what one cause claims.
    fn take_one(&mut self, cause: Cause, from: Nanos, to: Nanos) {
        self.take(&[Interval { cause, from, to }]);
    }

    /// Takes what claims ask for, which are by time and do not overlap.
    fn take(&mut self, claims: &[Interval]) {
        let Some((first, _)) = self.left.first() else { return };
        let mut at = claims.partition_point(|claim| claim.to <= *first);
        for (mut begin, end) in std::mem::take(&mut self.left) {
            while at < claims.len() && claims[at].to <= begin {
                at += 1;
            }
            for claim in claims[at..].iter().take_while(|claim| claim.from < end) {
                let (a, b) = (claim.from.max(begin), claim.to.min(end));
                if a < b {
                    if begin < a {
                        self.left.push((begin, a));
                    }
                    self.taken.push(Interval { cause: claim.cause, from: a, to: b });
                    begin = b;
                }
            }
            if begin < end {
                self.left.push((begin, end));
            }
        }
    }

    /// Gives what is left to `rest`; all of it, by time.
    fn finish(self, rest: Cause) -> Vec<Interval> {
        let mut all = self.taken;
        all.extend(self.left.iter().map(|(from, to)| Interval { cause: rest, from: *from, to: *to }));
        all.sort_by_key(|interval| interval.from);
        all
    }
}

#[cfg(test)]
mod tests;
