//! The next best action, in words.
//!
//! Each candidate is valued by the law: by how much sooner the next micro-batch would come.

use serde::Serialize;

use super::{Measured, Summary, mean, period, ratio};
use crate::law::{HopCost, Ring, StageCost};
use crate::schedule::cost::Costs;
use crate::trace::causes::Cause;

/// What gains less than this is not worth a word.
const GAIN_MIN: f64 = 1.05;
/// Starving and waiting for pages in between are told from this share on.
const LACKING: f64 = 0.1;
/// Every number of groups is tried; more sequences than this nobody runs.
const SEQUENCES_MAX: usize = 1 << 16;
/// A stage that takes so many times the mean is told even when no layer can be moved.
const UNEVEN: f64 = 1.2;

/// What helps against a lack of KV pages.
const MORE_PAGES: &str = "raise --kv-tokens, or shorten --ctx, or leave the tightest stage fewer layers";

/// What to do.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Action {
    /// What kind.
    pub kind: ActionKind,
    /// The speed after it, at most, over the speed now.
    pub gain: f64,
    /// For people.
    pub words: String,
}

/// Kinds of actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ActionKind {
    /// Ask for more at once.
    Requests,
    /// Give the cache of keys and values more room.
    KvRoom,
    /// Cut what runs into more micro-batches.
    Groups,
    /// Move layers between stages.
    Layers,
    /// Put a faster device where no move of layers helps.
    Device,
    /// Make hops shorter.
    Hops,
    /// Relieve the head.
    Head,
    /// Relieve a stage of its work around the device.
    Overhead,
    /// Fill and drain less often.
    Job,
    /// Run copies of the model in place of a pipeline.
    Replicas,
    /// Nothing: the pipe is full.
    None,
}

/// All that help, the best first.
pub(super) fn of(summary: &Summary, measured: &Measured, fits_one_device: bool) -> Vec<Action> {
    if summary.micro_batches == 0 || summary.stages.is_empty() {
        return Vec::new();
    }
    let case = Case { summary, measured, ring: measured.ring() };
    let candidates = [
        case.more_in_flight(),
        case.layers(),
        case.hops(),
        case.head(),
        case.overhead(),
        case.job(),
        fits_one_device.then(|| case.replicas()).flatten(),
    ];
    let mut actions: Vec<Action> = candidates.into_iter().flatten().filter(|action| action.gain >= GAIN_MIN).collect();
    actions.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    if actions.is_empty() {
        actions.push(case.full());
    }
    actions
}

struct Case<'a> {
    summary: &'a Summary,
    measured: &'a Measured,
    ring: Ring<'a>,
}

impl Case<'_> {
    fn action(&self, kind: ActionKind, gain: f64, words: String) -> Option<Action> {
        Some(Action { kind, gain, words })
    }

    /// The gain of another ring with as many micro-batches in flight.
    fn gain(&self, ring: &Ring) -> f64 {
        ratio(self.summary.law.period_seconds, period(ring, self.summary.groups))
    }

    fn share(&self, cause: Cause) -> f64 {
        mean(self.summary.stages.iter().map(|stage| stage.shares.of(cause)))
    }

    fn more_in_flight(&self) -> Option<Action> {
        let (m, knee, p) = (self.summary.groups.max(1), self.summary.law.knee, self.summary.stages.len());
        let (starved, kv_wait) = (self.share(Cause::Starved), self.share(Cause::KvWait));
        if m >= knee {
            return if self.is_taken() { None } else { self.at_times(starved, kv_wait) };
        }
        let gain = ratio(self.summary.law.period_seconds, period(&self.ring, knee));
        let fill = if knee == p { format!("P = {p}") } else { format!("M* = {knee}") };
        if kv_wait > starved {
            let words = format!(
                "requests wait for KV pages {} of the time, and M = {m} < {fill}: {MORE_PAGES}",
                percent(kv_wait)
            );
            return self.action(ActionKind::KvRoom, gain, words);
        }
        if let Some(groups) = self.groups() {
            return Some(groups);
        }
        let more = knee - m;
        let requests = if more == 1 { "request" } else { "requests" };
        let words = format!("M = {m} < {fill}: {} more concurrent {requests} would fill the pipe", number(more));
        self.action(ActionKind::Requests, gain, words)
    }

    /// Whether what stages share is taken by fewer micro-batches than would fill stages of their own.
    fn is_taken(&self) -> bool {
        self.summary.law.knee < self.ring.knee(1.0)
    }

    /// Where the pipe is full for half of the time, and empty for a good part of it.
    fn at_times(&self, starved: f64, kv_wait: f64) -> Option<Action> {
        let lacking = starved + kv_wait;
        let gain = 1.0 + ratio(lacking, self.summary.busy);
        if lacking < LACKING {
            None
        } else if kv_wait > starved {
            let words = format!("requests wait for KV pages {} of the time: {MORE_PAGES}", percent(kv_wait));
            self.action(ActionKind::KvRoom, gain, words)
        } else {
            let words = format!(
                "stages starve {} of the time, though M = {} fills the pipe when it is there: steadier requests",
                percent(starved),
                self.summary.groups
            );
            self.action(ActionKind::Requests, gain, words)
        }
    }

    /// More micro-batches of the sequences that run already, where the law favours them.
    fn groups(&self) -> Option<Action> {
        let (m, s) = (self.summary.groups.max(1), self.summary);
        let sequences = (s.answer_tokens as f64 / s.micro_batches as f64 * m as f64).round() as usize;
        if !(2 * m..SEQUENCES_MAX).contains(&sequences) || s.stages.iter().any(|stage| !stage.fitted) {
            return None;
        }
        let stages: Vec<StageCost> = s.stages.iter().map(|stage| stage.cost()).collect();
        // As the scheduler counts it.
        let costs = Costs {
            prompts: stages.clone(),
            stages,
            shares: self.measured.shares.clone(),
            attended: 0.0,
            overhead: s.hop_seconds.iter().sum::<f64>() + self.measured.sampling,
        };
        let groups = costs.best_groups(sequences);
        let gain = ratio(costs.round(sequences, m), costs.round(sequences, groups));
        if groups <= m || gain < GAIN_MIN {
            return None;
        }
        let words = format!("the {sequences} sequences that run would go faster as {groups} micro-batches than as {m}");
        self.action(ActionKind::Groups, gain, words)
    }

    fn layers(&self) -> Option<Action> {
        let times: Vec<f64> = self.measured.stages.iter().map(|stage| stage.alpha).collect();
        let from = self.summary.bottleneck;
        let times_mean = ratio(times[from], mean(times.iter().copied()));
        let uneven = format!("stage {from} is {times_mean:.1}× the mean");
        if let Some((count, to)) = self.best_move(&times) {
            let gain = self.gain_of(&moved(&times, &self.per_layer(&times), from, to, count));
            if gain >= GAIN_MIN {
                let layers = if count == 1 { "layer" } else { "layers" };
                let way = if from.abs_diff(to) > 1 { ", by way of those between" } else { "" };
                let words = format!("{uneven}: move {} {layers} to stage {to}{way}", number(count));
                return self.action(ActionKind::Layers, gain, words);
            }
        }
        let gain = self.gain_of(&vec![mean(times.iter().copied()); times.len()]);
        let words = format!("{uneven}, and no move of whole layers helps: it wants a faster device");
        (times_mean >= UNEVEN).then(|| self.action(ActionKind::Device, gain, words)).flatten()
    }

    fn gain_of(&self, times: &[f64]) -> f64 {
        let stages: Vec<StageCost> =
            times.iter().map(|alpha| StageCost { alpha: *alpha, ..StageCost::default() }).collect();
        self.gain(&Ring { stages: &stages, ..self.ring })
    }

    fn per_layer(&self, times: &[f64]) -> Vec<f64> {
        let count = |layers: (usize, usize)| layers.1.saturating_sub(layers.0) as f64;
        times.iter().zip(&self.summary.stages).map(|(time, stage)| ratio(*time, count(stage.layers))).collect()
    }

    /// Layers to take from the bottleneck and the stage to give them to, such that the slowest stage is the fastest.
    fn best_move(&self, times: &[f64]) -> Option<(usize, usize)> {
        let (from, per_layer) = (self.summary.bottleneck, self.per_layer(times));
        let layers = self.summary.stages[from].layers;
        let counts = 1..layers.1.saturating_sub(layers.0).min(1 << 10);
        let moves = counts.flat_map(|count| (0..times.len()).filter(|to| *to != from).map(move |to| (count, to)));
        let slowest = |(count, to): (usize, usize)| {
            let times = moved(times, &per_layer, from, to, count);
            (times.into_iter().fold(0.0, f64::max), count, from.abs_diff(to))
        };
        moves.min_by(|a, b| slowest(*a).partial_cmp(&slowest(*b)).unwrap_or(std::cmp::Ordering::Equal))
    }

    fn hops(&self) -> Option<Action> {
        let none = vec![HopCost::default(); self.measured.hops.len()];
        let gain = self.gain(&Ring { hops: &none, back: HopCost::default(), ..self.ring });
        let seconds = &self.summary.hop_seconds;
        let all: f64 = seconds.iter().sum();
        let longest = super::largest(seconds.iter().copied());
        let name = match longest {
            0 => "the head to stage 0".to_owned(),
            hop if hop == self.summary.stages.len() => format!("stage {} to the head", hop - 1),
            hop => format!("stage {} to stage {hop}", hop - 1),
        };
        let words = format!(
            "hops take {} of the {} of a round, {} of it from {name}: a faster link there, or enough in flight to hide \
             it (M* = {})",
            time(all),
            time(self.summary.law.loop_seconds),
            time(seconds[longest]),
            self.summary.law.knee
        );
        self.action(ActionKind::Hops, gain, words)
    }

    fn head(&self) -> Option<Action> {
        let gain = self.gain(&Ring { sampling: 0.0, ..self.ring });
        let words = format!(
            "the head takes {} a micro-batch to form it and to draw its tokens, the slowest stage {}: the stages wait \
             for it",
            time(self.measured.sampling),
            time(self.measured.stages[self.summary.bottleneck].alpha)
        );
        self.action(ActionKind::Head, gain, words)
    }

    fn overhead(&self) -> Option<Action> {
        let stage = self.summary.bottleneck;
        let shares = &self.summary.stages[stage].shares;
        let gain = 1.0 + ratio(shares.of(Cause::Overhead), shares.of(Cause::Busy));
        let words = format!(
            "stage {stage} spends {} of its time around the device: larger micro-batches, or fewer stages",
            percent(shares.of(Cause::Overhead))
        );
        self.action(ActionKind::Overhead, gain, words)
    }

    fn job(&self) -> Option<Action> {
        let s = self.summary;
        let share = self.share(Cause::FillDrain);
        // As if micro-batches had come without end at the pace of these.
        let endless = ratio(s.seconds, s.micro_batches as f64 * s.law.period_seconds);
        let gain = endless.min(ratio(1.0, 1.0 - share));
        let cut = if s.prompt_tokens > s.answer_tokens { "a longer job, or a smaller --chunk" } else { "a longer job" };
        let words = format!(
            "filling and draining takes {} of the time, with {} micro-batches through {} stages: {cut}",
            percent(share),
            s.micro_batches,
            s.stages.len()
        );
        self.action(ActionKind::Job, gain, words)
    }

    /// Every device with a model of its own and its share of what is in flight.
    fn replicas(&self) -> Option<Action> {
        let (s, p) = (self.summary, self.summary.stages.len());
        let tokens = s.batch * (s.groups as f64 / p as f64).max(1.0);
        let alone: f64 = s.stages.iter().map(|stage| stage.cost().step(tokens)).sum();
        let gain = ratio(s.groups.max(1) as f64 * s.law.period_seconds, alone);
        let words = if s.groups > 1 {
            format!("the model fits on one card: {} replicas would give more than this pipeline", number(p))
        } else {
            "the model fits on one card, which would answer sooner without hops".to_owned()
        };
        (p > 1).then(|| self.action(ActionKind::Replicas, gain, words)).flatten()
    }

    fn full(&self) -> Action {
        let (s, stage) = (self.summary, self.summary.bottleneck);
        let alpha = ratio(s.stages[stage].alpha, s.stages[stage].cost().step(s.batch));
        let mut words = if self.is_taken() {
            let many = if s.law.knee == 1 {
                "one micro-batch".to_owned()
            } else {
                format!("{} micro-batches", number(s.law.knee))
            };
            format!("stages share what they compute on, and {many} at a time take all of it")
        } else if s.law.bottleneck_busy - s.bottleneck_busy > 0.1 {
            format!("the law allows {} of stage {stage}; see where its time went", percent(s.law.bottleneck_busy))
        } else {
            format!("the pipe is full: stage {stage} is busy {} of the time", percent(s.bottleneck_busy))
        };
        if s.stages[stage].fitted && alpha > 0.5 {
            words.push_str(&format!(
                "; {} of that is reading weights, which more sequences at once would share",
                percent(alpha)
            ));
        }
        Action { kind: ActionKind::None, gain: 1.0, words }
    }
}

/// Times of stages after `count` layers went from one to another.
fn moved(times: &[f64], per_layer: &[f64], from: usize, to: usize, count: usize) -> Vec<f64> {
    let mut times = times.to_vec();
    times[from] -= count as f64 * per_layer[from];
    times[to] += count as f64 * per_layer[to];
    times
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// Small numbers as words.
fn number(count: usize) -> String {
    let words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"];
    words.get(count).map_or_else(|| count.to_string(), |word| (*word).to_owned())
}

/// Seconds for people, three digits.
pub fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s < 1e-3 => (s * 1e6, "µs"),
        s if s < 1.0 => (s * 1e3, "ms"),
        s => (s, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}
