//! Which layers on which device, and what comes of it. Pure.
//!
//! Each device has a cost for each layer and for what the first and the last stage have beside ([`Device`]); links join
//! their places. [`best`] finds the split that serves an objective best: exactly, over all contiguous divisions, all
//! orders of the devices and all choices of those that are left out, as long as there are few enough of them.
//! [`predict`] says what a split should reach.

mod predict;
mod search;
mod simulated;

use std::ops::Range;

use thiserror::Error;

use crate::law::{Curve, HopCost};

pub use predict::{Prediction, StageShare, expected, first_token, kv_tokens, predict, replicas, share};
pub use simulated::simulate;

/// A device that layers may be put on.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// For people.
    pub name: String,
    /// Its process: an index into [`Problem::hops`]. 0 is the head's.
    pub place: usize,
    /// What every stage takes beside its layers.
    pub fixed: Curve,
    /// What each layer of the model takes.
    pub layers: Vec<Curve>,
    /// What the first stage takes beside: the embedding.
    pub first: Curve,
    /// What the last stage takes beside: final norm, LM head, top-k.
    pub last: Curve,
    /// What they hold.
    pub memory: Memory,
    /// Which memory it has: an index into [`Problem::pools`].
    pub pool: usize,
    /// What else computes where it computes.
    pub compute: Option<Compute>,
}

/// Bytes that the parts of a model take on a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Weights of each layer.
    pub layers: Vec<u64>,
    /// What the first stage holds beside.
    pub first: u64,
    /// What the last stage holds beside.
    pub last: u64,
    /// What a stage that is first and last holds beside.
    pub both: u64,
    /// What every stage holds beside.
    pub work: u64,
    /// Keys and values of one token in one layer.
    pub kv_per_token: u64,
}

/// Devices that share what computes: software devices a processor, stages on one card the card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Compute {
    /// Those with the same number share.
    pub group: usize,
    /// The share that it takes while it computes: 1 where nobody else gets on meanwhile.
    pub share: f64,
}

/// What there is to plan with.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    /// The devices.
    pub devices: Vec<Device>,
    /// Bytes that each memory can give, where that is known.
    pub pools: Vec<Option<u64>>,
    /// From process to process.
    pub hops: Vec<Vec<HopCost>>,
    /// Seconds of the head for each micro-batch.
    pub sampling: f64,
}

/// What is wanted of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Tokens a second with so many requests at once as the load has.
    Throughput,
    /// One request from its start to its end.
    Latency,
    /// Tokens whose keys and values there is room for; of equal ones the fastest.
    Context,
}

/// What the pipeline is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Requests at once.
    pub concurrency: usize,
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Tokens of an answer.
    pub answer: usize,
    /// Tokens of the largest micro-batch.
    pub chunk: usize,
    /// Tokens of prompts that kernels compute at once; 1 where that is not known.
    pub tile: usize,
}

impl Load {
    /// Positions before the token in the middle of an answer.
    fn context(&self) -> usize {
        self.prompt + self.answer / 2
    }

    /// The micro-batches of a prompt: their number, and tokens of each.
    fn chunks(&self) -> (usize, usize) {
        let count = self.prompt.div_ceil(self.chunk.max(1)).max(1);
        (count, self.prompt.div_ceil(count).max(1))
    }
}

/// A wish for a split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// What for.
    pub objective: Objective,
    /// Under which load.
    pub load: Load,
    /// Tokens of the KV cache that there must be room for.
    pub kv_tokens: u64,
    /// Exactly so many stages.
    pub stages: Option<usize>,
    /// No device is left out.
    pub use_all: bool,
    /// Devices come in the order in which they are given.
    pub ordered: bool,
}

/// A stage of a split.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Index into [`Problem::devices`].
    pub device: usize,
    /// Its layers.
    pub layers: Range<usize>,
}

/// Why there is no split.
#[derive(Clone, Debug, PartialEq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum PlanError {
    #[error("there is no device to put layers on")]
    NoDevice,
    #[error(
        "{stages} stages are wanted of {devices} device(s) and {layers} layers: there is one stage a device at most, and one layer a stage at least"
    )]
    TooMany { stages: usize, devices: usize, layers: usize },
    #[error(
        "no split fits the memory: with room for the keys and values of {kv_tokens} tokens the model takes {needed} bytes on one device and {each} more on each further one, the device(s) can give {available} in all; the largest layer takes {layer}, the roomiest device gives {roomiest}"
    )]
    DoesNotFit { kv_tokens: u64, needed: u128, each: u64, available: u128, layer: u64, roomiest: u64 },
}

impl Problem {
    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.devices.first().map_or(0, |device| device.layers.len())
    }

    /// Bytes of a stage on a device, without keys and values.
    pub fn held(&self, device: usize, layers: &Range<usize>) -> u64 {
        let memory = &self.devices[device].memory;
        let ends = match (layers.start == 0, layers.end == self.layers()) {
            (true, true) => memory.both,
            (true, false) => memory.first,
            (false, true) => memory.last,
            (false, false) => 0,
        };
        memory.layers[layers.clone()].iter().sum::<u64>() + ends + memory.work
    }

    /// What a stage takes on a device.
    pub fn curve(&self, stage: &Stage) -> Curve {
        let device = &self.devices[stage.device];
        let mut sum = device.layers[stage.layers.clone()].iter().fold(device.fixed, |sum, layer| sum.plus(layer));
        if stage.layers.start == 0 {
            sum = sum.plus(&device.first);
        }
        if stage.layers.end == self.layers() { sum.plus(&device.last) } else { sum }
    }

    /// Whether every memory has room for its stages with keys and values of so many tokens.
    pub fn fits(&self, stages: &[Stage], kv_tokens: u64) -> bool {
        self.pools.iter().enumerate().all(|(pool, limit)| {
            let its = stages.iter().filter(|stage| self.devices[stage.device].pool == pool);
            let needed: u128 = its.map(|stage| self.needed(stage, kv_tokens)).sum();
            limit.is_none_or(|limit| needed <= u128::from(limit))
        })
    }

    fn needed(&self, stage: &Stage, kv_tokens: u64) -> u128 {
        let kv = u128::from(self.devices[stage.device].memory.kv_per_token) * u128::from(kv_tokens);
        u128::from(self.held(stage.device, &stage.layers)) + kv * stage.layers.len() as u128
    }

    /// A hop between the devices of two stages; `None` is the head.
    fn hop(&self, from: Option<usize>, to: Option<usize>) -> HopCost {
        let place = |device: Option<usize>| device.map_or(0, |device| self.devices[device].place);
        self.hops[place(from)][place(to)]
    }

    fn does_not_fit(&self, kv_tokens: u64) -> PlanError {
        let whole = |device: usize| self.needed(&Stage { device, layers: 0..self.layers() }, kv_tokens);
        let all = 0..self.devices.len();
        let limit = |device: usize| self.pools[self.devices[device].pool].unwrap_or(u64::MAX);
        let largest = |device: usize| {
            let memory = &self.devices[device].memory;
            let layer = memory.layers.iter().max().copied().unwrap_or(0);
            layer.saturating_add(memory.kv_per_token.saturating_mul(kv_tokens))
        };
        PlanError::DoesNotFit {
            kv_tokens,
            needed: all.clone().map(whole).min().unwrap_or(0),
            each: self.devices.iter().map(|device| device.memory.work).min().unwrap_or(0),
            available: self.pools.iter().flatten().map(|limit| u128::from(*limit)).sum(),
            layer: all.clone().map(largest).min().unwrap_or(0),
            roomiest: all.map(limit).max().unwrap_or(0),
        }
    }
}

/// The split that serves the wish best.
///
/// # Errors
/// [`PlanError`].
pub fn best(problem: &Problem, wish: &Wish) -> Result<Vec<Stage>, PlanError> {
    let (devices, layers) = (problem.devices.len(), problem.layers());
    if devices == 0 || layers == 0 {
        return Err(PlanError::NoDevice);
    }
    let wanted = if wish.use_all { wish.stages.unwrap_or(devices).max(devices) } else { wish.stages.unwrap_or(1) };
    if wanted == 0 || wanted > devices.min(layers) {
        return Err(PlanError::TooMany { stages: wanted, devices, layers });
    }
    let wish = Wish { stages: if wish.use_all { Some(devices) } else { wish.stages }, ..*wish };
    let found = match wish.objective {
        Objective::Context => {
            let most = most_tokens(problem, &wish);
            let wish = Wish { objective: Objective::Throughput, kv_tokens: most.max(wish.kv_tokens), ..wish };
            search::best(problem, &wish)
        }
        _ => search::best(problem, &wish),
    };
    found.ok_or_else(|| problem.does_not_fit(wish.kv_tokens))
}

/// The most tokens whose keys and values any split has room for; 0 where none has any.
pub fn most_tokens(problem: &Problem, wish: &Wish) -> u64 {
    let fits = |kv_tokens| search::any(problem, &Wish { kv_tokens, ..*wish }).is_some();
    let bytes: u64 = problem.pools.iter().flatten().copied().max().unwrap_or(0);
    let each = problem.devices.iter().map(|device| device.memory.kv_per_token).min().unwrap_or(0);
    // Without limits, or without keys and values, there is room for any number.
    if each == 0 || problem.pools.iter().any(Option::is_none) && fits(TOKENS_MAX) {
        return TOKENS_MAX;
    }
    let (mut low, mut high) = (0, (bytes / each).saturating_add(1).min(TOKENS_MAX));
    if problem.pools.iter().any(Option::is_none) {
        high = TOKENS_MAX;
    }
    // `low` fits or is 0, `high` does not fit.
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    low
}

/// More tokens of keys and values than anybody has room for.
const TOKENS_MAX: u64 = 1 << 40;

#[cfg(test)]
mod tests;
