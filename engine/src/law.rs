//! The laws of a pipeline in closed form: how long it takes, what fills it, and how work is best cut. Pure.
//!
//! P stages, M micro-batches, b tokens in each. A stage takes t = α + βb; a hop takes c = λ + s, of which the latency λ
//! overlaps with other micro-batches and s, bytes over bandwidth, does not. All times are seconds.

mod chunks;
mod curve;
mod fit;
mod share;

use serde::{Deserialize, Serialize};

pub use chunks::{best_chunks, chunks, prefill};
pub use curve::{Curve, SIZES, padded};
pub use fit::Fit;
pub use share::{Share, Use, alone_seconds, crowding, shares};

/// What a stage takes for x tokens behind a context of L: α + βx + a(2Lx + x²).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageCost {
    /// α, seconds: what every step takes, mostly reading weights.
    pub alpha: f64,
    /// β, seconds a token.
    pub beta: f64,
    /// a, seconds for each unit of 2Lx + x²: attention.
    pub attention: f64,
}

impl StageCost {
    /// Seconds for `tokens` tokens behind a context of `context`.
    pub fn seconds(&self, tokens: f64, context: f64) -> f64 {
        self.alpha + self.beta * tokens + self.attention * (2.0 * context * tokens + tokens * tokens)
    }

    /// Seconds for `tokens` tokens, attention left out: α + βb.
    pub fn step(&self, tokens: f64) -> f64 {
        self.alpha + self.beta * tokens
    }

    /// What both take, one after the other.
    pub fn plus(&self, other: &StageCost) -> StageCost {
        let StageCost { alpha, beta, attention } = *other;
        StageCost { alpha: self.alpha + alpha, beta: self.beta + beta, attention: self.attention + attention }
    }

    /// What so many times of it takes.
    pub fn times(&self, times: f64) -> StageCost {
        StageCost { alpha: self.alpha * times, beta: self.beta * times, attention: self.attention * times }
    }
}

/// What a hop takes for b tokens: λ + s, s = b · `seconds_per_token`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HopCost {
    /// λ, seconds: overlaps with other micro-batches.
    pub latency: f64,
    /// Seconds a token occupies the link.
    pub seconds_per_token: f64,
}

impl HopCost {
    /// s: seconds that the link is occupied.
    pub fn occupied(&self, tokens: f64) -> f64 {
        self.seconds_per_token * tokens
    }

    /// c = λ + s: seconds from one end to the other.
    pub fn seconds(&self, tokens: f64) -> f64 {
        self.latency + self.occupied(tokens)
    }
}

/// Slots of a job of M micro-batches on P equal stages without hops: M + P − 1.
pub fn slots(stages: usize, micro_batches: usize) -> usize {
    if micro_batches == 0 { 0 } else { micro_batches + stages.saturating_sub(1) }
}

/// The share of these slots that stages are busy in: M/(M + P − 1). The bubble is the rest, (P − 1)/(M + P − 1).
pub fn job_efficiency(stages: usize, micro_batches: usize) -> f64 {
    if micro_batches == 0 { 0.0 } else { micro_batches as f64 / slots(stages, micro_batches) as f64 }
}

/// Seconds of a job of M micro-batches of `tokens` tokens: Σt + Σc + (M − 1)·max(t_max, s_max).
///
/// Hops are asynchronous: a stage hands on and goes on. `hops` are those between stages.
pub fn makespan(stages: &[StageCost], hops: &[HopCost], tokens: f64, micro_batches: usize) -> f64 {
    let (Some(again), true) = (micro_batches.checked_sub(1), !stages.is_empty()) else { return 0.0 };
    through(stages, hops, tokens) + again as f64 * pace(stages, hops, tokens)
}

/// As [`makespan`], where a stage waits until the next one has what it sends: Σ(t + c) + (M − 1)·max(t + c).
pub fn makespan_blocking(stages: &[StageCost], hops: &[HopCost], tokens: f64, micro_batches: usize) -> f64 {
    let Some(again) = micro_batches.checked_sub(1) else { return 0.0 };
    let hop = |stage: usize| hops.get(stage).map_or(0.0, |hop| hop.seconds(tokens));
    let held = stages.iter().enumerate().map(|(stage, cost)| cost.step(tokens) + hop(stage));
    held.clone().sum::<f64>() + again as f64 * held.fold(0.0, f64::max)
}

/// Σt + Σc.
fn through(stages: &[StageCost], hops: &[HopCost], tokens: f64) -> f64 {
    let stages: f64 = stages.iter().map(|stage| stage.step(tokens)).sum();
    stages + hops.iter().map(|hop| hop.seconds(tokens)).sum::<f64>()
}

/// max(t_max, s_max): seconds between two micro-batches at best.
fn pace(stages: &[StageCost], hops: &[HopCost], tokens: f64) -> f64 {
    let stages = stages.iter().map(|stage| stage.step(tokens));
    stages.chain(hops.iter().map(|hop| hop.occupied(tokens))).fold(0.0, f64::max)
}

/// Decode: a sequence's next token enters the first stage only after the last one left the tail, so M groups of b
/// sequences go round and round.
#[derive(Clone, Copy, Debug)]
pub struct Ring<'a> {
    /// The stages.
    pub stages: &'a [StageCost],
    /// The hops between stages.
    pub hops: &'a [HopCost],
    /// The way from the tail over the head to the first stage.
    pub back: HopCost,
    /// t_s: seconds that the head works on a group, between its answer and its next step.
    pub sampling: f64,
    /// Stages that take what they compute on from each other. Their costs are those of each alone.
    pub shares: &'a [Share],
}

impl Ring<'_> {
    /// L = Σt + Σc + c_r + t_s: seconds of a group's way round when nothing is in its way.
    pub fn loop_seconds(&self, b: f64) -> f64 {
        through(self.stages, self.hops, b) + self.back.seconds(b) + self.sampling
    }

    /// max(t_max, s_max, t_s, each [`Share::seconds`]): seconds between two groups at best.
    pub fn pace(&self, b: f64) -> f64 {
        let shared = self.shared(|stage| stage.step(b)).fold(self.sampling, f64::max);
        pace(self.stages, self.hops, b).max(self.back.occupied(b)).max(shared)
    }

    /// Seconds that what is shared takes for all its stages' work, where each takes `seconds` alone.
    fn shared(&self, seconds: impl Fn(&StageCost) -> f64) -> impl Iterator<Item = f64> {
        self.shares.iter().map(move |share| share.seconds(|stage| self.stages.get(stage).map_or(0.0, &seconds)))
    }

    /// R = max(L, M·pace): seconds of a round, which is the time per token of every sequence.
    pub fn round(&self, groups: f64, b: f64) -> f64 {
        self.loop_seconds(b).max(groups * self.pace(b))
    }

    /// M·b/R.
    pub fn tokens_per_second(&self, groups: f64, b: f64) -> f64 {
        ratio(groups * b, self.round(groups, b))
    }

    /// MΣt/(P·R): the share of time that stages are busy. Equal stages: min(1, M·t/(P(t + c))).
    pub fn efficiency(&self, groups: f64, b: f64) -> f64 {
        let busy: f64 = self.stages.iter().map(|stage| stage.step(b)).sum();
        ratio(groups * busy, self.stages.len() as f64 * self.round(groups, b))
    }

    /// M* = ⌈L/pace⌉: the groups beyond which a round only gets longer.
    pub fn knee(&self, b: f64) -> usize {
        // An exact quotient must not become one more for the last bit of a sum.
        let groups = ratio(self.loop_seconds(b), self.pace(b));
        (groups * (1.0 - 1e-12)).ceil().max(1.0) as usize
    }

    /// R = max(L(⌈D/M⌉), max(Mα + βD), sD, each [`Share::seconds`] of Mα + βD): seconds of a round of D `sequences` in M
    /// `groups` that are as equal as can be; the largest goes round the slowest.
    pub fn round_of(&self, sequences: usize, groups: usize) -> f64 {
        let (d, m) = (sequences as f64, groups as f64);
        let all_groups = |stage: &StageCost| m * stage.alpha + d * stage.beta;
        let stages = self.stages.iter().map(all_groups).chain(self.shared(all_groups));
        let lines = self.hops.iter().chain([&self.back]).map(|hop| hop.occupied(d));
        stages.chain(lines).fold(self.loop_seconds(sequences.div_ceil(groups) as f64), f64::max)
    }
}

/// S(B) = P(α + βB)/(Pα + βB): how much faster P equal stages are than one device that holds all, with B tokens in
/// P micro-batches and no hops. 1 while reading weights binds, P when computing does.
pub fn speedup(alpha: f64, beta: f64, stages: usize, tokens: f64) -> f64 {
    let p = stages as f64;
    ratio(p * (alpha + beta * tokens), p * alpha + beta * tokens)
}

/// [`speedup`] of unequal stages: Σt(B)/(P·t_max(B/P)).
pub fn ceiling(stages: &[StageCost], tokens: f64) -> f64 {
    let p = stages.len() as f64;
    let alone: f64 = stages.iter().map(|stage| stage.step(tokens)).sum();
    ratio(alone, p * pace(stages, &[], tokens / p))
}

/// What a stage's memory is taken by, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageRoom {
    /// All that may be taken.
    pub memory: u64,
    /// Weights, activations and staging.
    pub taken: u64,
    /// Keys and values of one token in all layers of the stage.
    pub kv_per_token: u64,
}

/// Tokens whose keys and values the pipeline has room for: min over stages of (memory − taken)/(layers · KV bytes).
pub fn kv_tokens(stages: &[StageRoom]) -> u64 {
    let room = |stage: &StageRoom| stage.memory.saturating_sub(stage.taken).checked_div(stage.kv_per_token);
    stages.iter().filter_map(room).min().unwrap_or(0)
}

/// 0 where there is nothing to divide by.
fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

#[cfg(test)]
mod tests;
