//! What a trace says about a pipeline: how busy it was, what the law allows, and what to do next.

mod actions;

use std::collections::HashMap;

use serde::{Serialize, Serializer};

use super::causes::{self, Cause, Life, StageCauses, Window};
use super::{HeadSpan, HeadState, Nanos, StageSpan, StageTrace, Trace};
use crate::law::{self, Fit, HopCost, Ring, Share, StageCost};

pub use actions::{Action, ActionKind, time};

/// What the trace itself does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The part to look at; all of it unless told otherwise.
    pub window: Option<Window>,
    /// One device could hold the whole model.
    pub fits_one_device: bool,
}

/// A pipeline in numbers. Shares are 0 to 1, times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Length of the window.
    pub seconds: f64,
    /// Micro-batches that were answered in it.
    pub micro_batches: usize,
    /// Tokens of prompts in these.
    pub prompt_tokens: u64,
    /// Tokens of answers in these.
    pub answer_tokens: u64,
    /// Both, a second.
    pub tokens_per_second: f64,
    /// Micro-batches between the head's sending and its having the answer, on average.
    pub in_flight: f64,
    /// M: micro-batches in the pipe or in the head's hands; the median of the time in which there were any.
    pub groups: usize,
    /// b: tokens of a micro-batch, on average.
    pub batch: f64,
    /// Of the time, in which the head worked.
    pub head_working: f64,
    /// Of the time, in which nothing was asked for.
    pub head_idle: f64,
    /// The stages in order.
    pub stages: Vec<StageSummary>,
    /// Medians from one end of a hop to the other: head to first stage, between stages, tail to head.
    pub hop_seconds: Vec<f64>,
    /// The stage that takes longest for a micro-batch.
    pub bottleneck: usize,
    /// Busy share of all stages, on average.
    pub busy: f64,
    /// Busy share of the bottleneck.
    pub bottleneck_busy: f64,
    /// What the law says of such stages and hops.
    pub law: Law,
    /// What to do, the best first.
    pub actions: Vec<Action>,
    /// Micro-batches that were forgotten before the trace was taken.
    pub dropped: u64,
}

/// A stage in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageSummary {
    /// Device.
    pub device: String,
    /// First layer and the one after the last.
    pub layers: (usize, usize),
    /// Micro-batches that it finished.
    pub micro_batches: usize,
    /// Their tokens.
    pub tokens: u64,
    /// Where its time went.
    pub shares: Shares,
    /// t: of a micro-batch on the device, on average.
    pub step_seconds: f64,
    /// The same without the company that it had on what it computes on.
    pub alone_seconds: f64,
    /// α, as fitted.
    pub alpha: f64,
    /// β, as fitted: a token.
    pub beta: f64,
    /// Whether micro-batches of several sizes were seen; else how α and β share t is a guess.
    pub fitted: bool,
}

/// A share for every cause; they add up to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Shares([f64; Cause::ALL.len()]);

impl Shares {
    fn new(causes: &StageCauses) -> Shares {
        Shares(Cause::ALL.map(|cause| causes.share(cause)))
    }

    /// Of a cause.
    pub fn of(&self, cause: Cause) -> f64 {
        self.0[cause as usize]
    }
}

impl Serialize for Shares {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(Cause::ALL.map(|cause| (cause, self.of(cause))))
    }
}

/// What [`crate::law`] says of the measured stages and hops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Law {
    /// L: a micro-batch's way round when nothing is in its way.
    pub loop_seconds: f64,
    /// Between two micro-batches at best.
    pub pace_seconds: f64,
    /// Between two micro-batches with M in flight: max(L/M, pace).
    pub period_seconds: f64,
    /// M*: micro-batches in flight that fill the pipe.
    pub knee: usize,
    /// Busy share of all stages, with as many micro-batches in flight at every moment as there were; where the window
    /// is the whole trace, filling counted.
    pub busy: f64,
    /// Busy share of the bottleneck.
    pub bottleneck_busy: f64,
    /// S(B) for the B = M·b tokens in flight: at most so many times the speed of one device that holds everything.
    /// None until every stage has seen several sizes of micro-batches.
    pub speedup_max: Option<f64>,
}

impl Summary {
    /// Of a trace.
    pub fn of(trace: &Trace, options: Options) -> Summary {
        let whole = Window::of(trace);
        let window = options.window.unwrap_or(whole);
        let inside = |at: Nanos| at > window.from && at <= window.to;
        let answered: Vec<&HeadSpan> = trace.head.iter().filter(|head| inside(head.answered)).collect();
        let stages: Vec<StageSummary> = trace
            .stages
            .iter()
            .zip(causes::causes_within(trace, window))
            .enumerate()
            .map(|(index, (stage, causes))| {
                // Those without tokens only passed.
                let counts = |span: &&StageSpan| inside(span.finished) && span.tokens > 0;
                let spans: Vec<&StageSpan> = stage.spans.iter().filter(counts).collect();
                StageSummary::new(stage, &causes, &spans, |span| alone(trace, index, span))
            })
            .collect();
        let lives = causes::lives(&trace.head);
        let tokens = |count: fn(&HeadSpan) -> u32| answered.iter().map(|head| u64::from(count(head))).sum::<u64>();
        let (prompt_tokens, answer_tokens) = (tokens(|head| head.prefill_tokens), tokens(|head| head.decode_tokens));
        let bottleneck = largest(stages.iter().map(|stage| stage.step_seconds));
        let busy = |stage: &StageSummary| stage.shares.of(Cause::Busy);
        let all = (prompt_tokens + answer_tokens) as f64;
        let mut summary = Summary {
            seconds: window.seconds(),
            micro_batches: answered.len(),
            prompt_tokens,
            answer_tokens,
            tokens_per_second: ratio(all, window.seconds()),
            in_flight: in_flight(&lives, window),
            groups: groups(&alive(&lives, window)),
            batch: ratio(all, answered.len() as f64),
            head_working: state_share(trace, HeadState::Working, window),
            head_idle: state_share(trace, HeadState::Idle, window),
            hop_seconds: hops(trace, window),
            bottleneck,
            busy: mean(stages.iter().map(busy)),
            bottleneck_busy: stages.get(bottleneck).map_or(0.0, busy),
            law: Law::default(),
            actions: Vec::new(),
            dropped: trace.dropped,
            stages,
        };
        let measured = Measured::new(&summary, &answered, &trace.shares);
        let filling =
            if window.from <= whole.from && window.to >= whole.to { measured.filling(&lives, window) } else { 0.0 };
        summary.law = measured.law(&summary, &alive(&lives, window), filling);
        summary.actions = actions::of(&summary, &measured, options.fits_one_device);
        summary
    }
}

impl StageSummary {
    /// `alone` is how long a span would have taken with nobody else on what it computes on.
    fn new(
        stage: &StageTrace,
        causes: &StageCauses,
        spans: &[&StageSpan],
        alone: impl Fn(&StageSpan) -> f64,
    ) -> StageSummary {
        let mut fit = Fit::default();
        let alone: Vec<f64> = spans.iter().map(|span| alone(span)).collect();
        for (span, seconds) in spans.iter().zip(&alone) {
            fit.add(span.tokens as usize, 0.0, *seconds);
        }
        let StageCost { alpha, beta, .. } = fit.cost();
        StageSummary {
            device: stage.device.clone(),
            layers: stage.layers,
            micro_batches: spans.len(),
            tokens: spans.iter().map(|span| u64::from(span.tokens)).sum(),
            shares: Shares::new(causes),
            step_seconds: mean(spans.iter().map(|span| seconds(span))),
            alone_seconds: mean(alone.into_iter()),
            alpha,
            beta,
            fitted: fit.is_determined(),
        }
    }

    fn cost(&self) -> StageCost {
        StageCost { alpha: self.alpha, beta: self.beta, attention: 0.0 }
    }
}

/// Seconds that a micro-batch was on a device.
fn seconds(span: &StageSpan) -> f64 {
    span.finished.saturating_sub(span.started) as f64 * 1e-9
}

/// [`seconds`] as they would have been had nobody else computed on the same.
fn alone(trace: &Trace, stage: usize, span: &StageSpan) -> f64 {
    if trace.shares.is_empty() {
        return seconds(span);
    }
    // Runs of a stage do not overlap.
    let beside = |other: &StageTrace| {
        let first = other.spans.partition_point(|other| other.finished <= span.started);
        let beside = other.spans[first..].iter().take_while(|other| other.started < span.finished);
        beside.map(|other| (other.started, other.finished)).collect()
    };
    let busy: Vec<Vec<(Nanos, Nanos)>> = trace.stages.iter().map(beside).collect();
    law::alone_seconds(stage, (span.started, span.finished), &busy, &trace.shares)
}

/// The ring with the times that were measured; a micro-batch is one token to it.
#[derive(Debug)]
struct Measured {
    stages: Vec<StageCost>,
    /// The same, each without the others, and what they take from each other.
    alone: Vec<StageCost>,
    shares: Vec<Share>,
    hops: Vec<HopCost>,
    back: HopCost,
    sampling: f64,
}

impl Measured {
    fn new(summary: &Summary, answered: &[&HeadSpan], shares: &[Share]) -> Measured {
        let between = |from: Nanos, to: Nanos| to.saturating_sub(from) as f64 * 1e-9;
        let form = answered.iter().map(|head| between(head.formed, head.sent)).collect();
        let draw =
            answered.iter().filter(|head| head.sampled > 0).map(|head| between(head.answered, head.sampled)).collect();
        let working = summary.head_working * summary.seconds;
        let hop = |latency: f64| HopCost { latency, seconds_per_token: 0.0 };
        let last = summary.hop_seconds.len() - 1;
        let back = summary.hop_seconds[0] + if last == 0 { 0.0 } else { summary.hop_seconds[last] };
        let costs = |seconds: fn(&StageSummary) -> f64| {
            summary.stages.iter().map(|stage| StageCost { alpha: seconds(stage), ..StageCost::default() }).collect()
        };
        Measured {
            stages: costs(|stage| stage.step_seconds),
            alone: costs(|stage| stage.alone_seconds),
            shares: shares.to_vec(),
            hops: summary.hop_seconds.get(1..last).unwrap_or_default().iter().copied().map(hop).collect(),
            back: hop(back),
            // An answer may wait for the head, and the head for a hop: neither is its work.
            sampling: (median(form) + median(draw)).min(ratio(working, answered.len() as f64)),
        }
    }

    fn ring(&self) -> Ring<'_> {
        Ring { stages: &self.stages, hops: &self.hops, back: self.back, sampling: self.sampling, shares: &[] }
    }

    /// M*: of stages that take from each other fewer than of those that do not.
    fn knee(&self) -> usize {
        Ring { stages: &self.alone, shares: &self.shares, ..self.ring() }.knee(1.0)
    }

    fn law(&self, summary: &Summary, alive: &[Nanos], filling: f64) -> Law {
        let ring = self.ring();
        let busy = |(count, nanos): (usize, &Nanos)| *nanos as f64 * 1e-9 * ring.efficiency(count as f64, 1.0);
        let busy = ratio(alive.iter().enumerate().map(busy).sum::<f64>() - filling, summary.seconds).clamp(0.0, 1.0);
        let times = || self.stages.iter().map(|stage| stage.alpha);
        let costs: Vec<StageCost> = summary.stages.iter().map(StageSummary::cost).collect();
        let known = !costs.is_empty() && summary.stages.iter().all(|stage| stage.fitted);
        Law {
            loop_seconds: ring.loop_seconds(1.0),
            pace_seconds: ring.pace(1.0),
            period_seconds: period(&ring, summary.groups),
            knee: self.knee(),
            busy,
            bottleneck_busy: ratio(busy * times().fold(0.0, f64::max), mean(times())).min(1.0),
            speedup_max: known.then(|| law::ceiling(&costs, summary.groups as f64 * summary.batch)),
        }
    }

    /// Seconds that a stage lacks, on average, against a pipe that was in full swing from the beginning: of the m
    /// micro-batches that came at once, stage i has not seen m − (P − i) when the first one has left the tail.
    fn filling(&self, lives: &[Life], window: Window) -> f64 {
        let p = self.stages.len();
        let through = (self.ring().loop_seconds(1.0) - self.sampling) * 1e9;
        let first = lives.iter().filter(|life| life.formed.saturating_sub(window.from) < through as Nanos).count();
        let missing: usize = (0..p).map(|stage| first.min(p).saturating_sub(p - stage)).sum();
        ratio(missing as f64 * mean(self.stages.iter().map(|stage| stage.alpha)), p as f64)
    }
}

/// Seconds between two micro-batches with `groups` in flight.
fn period(ring: &Ring, groups: usize) -> f64 {
    let groups = groups.max(1) as f64;
    ring.round(groups, 1.0) / groups
}

/// Micro-batches between sending and answer, on average over a window.
fn in_flight(lives: &[Life], window: Window) -> f64 {
    let clipped = |life: &Life| life.answered.min(window.to).saturating_sub(life.sent.max(window.from));
    ratio(lives.iter().map(|life| clipped(life) as f64).sum(), window.nanos() as f64)
}

/// How long, in a window, so many micro-batches were in the pipe or in the head's hands: by their number.
fn alive(lives: &[Life], window: Window) -> Vec<Nanos> {
    let clipped = lives.iter().map(|life| (life.formed.max(window.from), life.sampled.min(window.to)));
    let mut changes: Vec<(Nanos, bool)> =
        clipped.filter(|(from, to)| from < to).flat_map(|(from, to)| [(from, true), (to, false)]).collect();
    changes.sort_unstable();
    let mut lasted: Vec<Nanos> = vec![0];
    let (mut count, mut since) = (0, window.from);
    for (at, more) in changes.into_iter().chain([(window.to, false)]) {
        lasted[count] += at - since;
        since = at;
        count = if more { count + 1 } else { count.saturating_sub(1) };
        lasted.resize(lasted.len().max(count + 1), 0);
    }
    lasted
}

/// The median number of micro-batches, over the time in which there were any.
fn groups(alive: &[Nanos]) -> usize {
    let half = alive.iter().skip(1).sum::<Nanos>() / 2;
    let mut passed = 0;
    let median = alive.iter().enumerate().skip(1).find(|(_, nanos)| {
        passed += **nanos;
        passed > half
    });
    median.map_or(0, |(count, _)| count)
}

fn state_share(trace: &Trace, state: HeadState, window: Window) -> f64 {
    let wanted = trace.states.iter().filter(|interval| interval.state == state);
    let clipped = wanted.map(|interval| interval.to.min(window.to).saturating_sub(interval.from.max(window.from)));
    ratio(clipped.sum::<Nanos>() as f64, window.nanos() as f64)
}

/// Medians of what hops took: head to first stage, between stages, tail to head. One more than there are stages.
fn hops(trace: &Trace, window: Window) -> Vec<f64> {
    let mut medians = Vec::new();
    let mut left: HashMap<u64, Nanos> = trace.head.iter().map(|head| (head.step, head.sent)).collect();
    let mut took = |left: &HashMap<u64, Nanos>, arrivals: &mut dyn Iterator<Item = (u64, Nanos)>| {
        let inside = arrivals.filter(|(_, at)| *at > window.from && *at <= window.to);
        let seconds = inside.filter_map(|(step, at)| Some(at.saturating_sub(*left.get(&step)?) as f64 * 1e-9));
        medians.push(median(seconds.collect()));
    };
    for stage in &trace.stages {
        took(&left, &mut stage.spans.iter().map(|span| (span.step, span.arrived)));
        left = stage.spans.iter().map(|span| (span.step, span.sent)).collect();
    }
    if !trace.stages.is_empty() {
        took(&left, &mut trace.head.iter().map(|head| (head.step, head.answered)));
    }
    if medians.is_empty() { vec![0.0] } else { medians }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    ratio(sum, count)
}

fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

/// The place of the largest value; 0 when there is none.
fn largest(values: impl Iterator<Item = f64>) -> usize {
    values.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(0, |(place, _)| place)
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

#[cfg(test)]
mod tests;
