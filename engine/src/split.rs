//! Layers per stage. Pure.

use thiserror::Error;

/// How the user wants the layers divided.
#[derive(Clone, Debug, PartialEq)]
pub enum Split {
    /// Exactly so many layers on each stage: `9,8,8,8`.
    Counts(Vec<usize>),
    /// In these proportions: `9:8:8:8`.
    Ratios(Vec<f64>),
    /// By what devices were measured to take ([`crate::planner`]), as [`Split::Bytes`] where they were not.
    Auto,
    /// By bytes, embedding and LM head counted.
    Bytes,
}

/// Bytes that the parts of a model take on a stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Of each layer.
    pub layers: Vec<u64>,
    /// Of what the first stage holds beside its layers.
    pub first: u64,
    /// Of what the last stage holds beside its layers.
    pub last: u64,
}

/// Why layers cannot be divided so.
#[derive(Clone, Debug, PartialEq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum SplitError {
    #[error("--split {found}: expected layer counts (9,8,8,8), ratios (9:8:8:8), auto or bytes")]
    Syntax { found: String },
    #[error("--split {found}: every stage needs at least one layer")]
    Zero { found: String },
    #[error("--split: {sum_text} = {sum} ≠ {layers}, the layers of this model; a split that fits: {suggestion}")]
    Sum { sum_text: String, sum: usize, layers: usize, suggestion: String },
    #[error(
        "--stages {stages} and --split {split} disagree: the split names {named} stages; give one of them, or make them agree"
    )]
    Stages { stages: usize, split: String, named: usize },
    #[error("--stages {stages}: this model has {layers} layers, so at most {layers} stages")]
    TooMany { stages: usize, layers: usize },
    #[error("--stages 0: a pipeline has at least one stage")]
    NoStages,
    #[error(
        "no division of {needed} bytes into {stages} stages stays within what each can hold, {available} bytes in all"
    )]
    DoesNotFit { stages: usize, needed: u128, available: u128 },
}

impl Split {
    /// Reads `9,8,8,8`, `9:8:8:8`, `auto` or `bytes`.
    ///
    /// # Errors
    /// [`SplitError::Syntax`] and [`SplitError::Zero`].
    pub fn parse(text: &str) -> Result<Split, SplitError> {
        let syntax = || SplitError::Syntax { found: text.to_owned() };
        match text.trim() {
            "auto" => return Ok(Split::Auto),
            "bytes" => return Ok(Split::Bytes),
            _ => {}
        }
        if text.contains(':') {
            let ratios: Vec<f64> =
                text.split(':').map(|part| part.trim().parse()).collect::<Result<_, _>>().map_err(|_| syntax())?;
            if ratios.iter().any(|ratio| !ratio.is_finite()) {
                return Err(syntax());
            }
            if ratios.iter().any(|ratio| *ratio <= 0.0) {
                return Err(SplitError::Zero { found: text.to_owned() });
            }
            return Ok(Split::Ratios(ratios));
        }
        let counts: Vec<i64> =
            text.split(',').map(|part| part.trim().parse()).collect::<Result<_, _>>().map_err(|_| syntax())?;
        if counts.iter().any(|count| *count <= 0) {
            return Err(SplitError::Zero { found: text.to_owned() });
        }
        Ok(Split::Counts(counts.into_iter().map(|count| count as usize).collect()))
    }

    /// Layers of each stage, `auto` by bytes. `stages` is what was asked for, if anything was; without it the split
    /// tells, and `auto` and `bytes` mean one stage.
    ///
    /// # Errors
    /// [`SplitError`].
    pub fn resolve(&self, stages: Option<usize>, costs: &Costs) -> Result<Vec<usize>, SplitError> {
        let layers = costs.layers.len();
        let named = match self {
            Split::Counts(counts) => Some(counts.len()),
            Split::Ratios(ratios) => Some(ratios.len()),
            Split::Auto | Split::Bytes => None,
        };
        if let (Some(stages), Some(named)) = (stages, named)
            && stages != named
        {
            return Err(SplitError::Stages { stages, split: self.to_string(), named });
        }
        let stages = stages.or(named).unwrap_or(1);
        if stages == 0 {
            return Err(SplitError::NoStages);
        }
        if let Split::Counts(counts) = self {
            let sum = counts.iter().fold(0usize, |sum, count| sum.saturating_add(*count));
            if sum == layers {
                return Ok(counts.clone());
            }
            if stages <= layers {
                let ratios: Vec<f64> = counts.iter().map(|count| *count as f64).collect();
                let sum_text = counts.iter().map(usize::to_string).collect::<Vec<_>>().join("+");
                return Err(SplitError::Sum { sum_text, sum, layers, suggestion: join(&apportion(&ratios, layers)) });
            }
        }
        if stages > layers {
            return Err(SplitError::TooMany { stages, layers });
        }
        Ok(match self {
            Split::Ratios(ratios) => apportion(ratios, layers),
            _ => balance(costs, &vec![u64::MAX; stages]).expect("without limits every division fits"),
        })
    }
}

/// The division by bytes among those in which stage i holds at most `limits[i]` bytes.
///
/// # Errors
/// [`SplitError::DoesNotFit`] where there is none, [`SplitError::NoStages`] and [`SplitError::TooMany`].
pub fn auto_within(costs: &Costs, limits: &[u64]) -> Result<Vec<usize>, SplitError> {
    let (stages, layers) = (limits.len(), costs.layers.len());
    if stages == 0 {
        return Err(SplitError::NoStages);
    }
    if stages > layers {
        return Err(SplitError::TooMany { stages, layers });
    }
    balance(costs, limits).ok_or_else(|| SplitError::DoesNotFit {
        stages,
        needed: costs.layers.iter().chain([&costs.first, &costs.last]).map(|bytes| u128::from(*bytes)).sum(),
        available: limits.iter().map(|bytes| u128::from(*bytes)).sum(),
    })
}

impl std::fmt::Display for Split {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Split::Counts(counts) => f.write_str(&join(counts)),
            Split::Ratios(ratios) => f.write_str(&ratios.iter().map(f64::to_string).collect::<Vec<_>>().join(":")),
            Split::Auto => f.write_str("auto"),
            Split::Bytes => f.write_str("bytes"),
        }
    }
}

/// `9,8,8,8`
pub fn join(counts: &[usize]) -> String {
    counts.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

/// Whole layers in proportion to `ratios`, by the largest remainder, at least one each.
fn apportion(ratios: &[f64], layers: usize) -> Vec<usize> {
    let total: f64 = ratios.iter().sum();
    let shares: Vec<f64> = ratios.iter().map(|ratio| ratio / total * layers as f64).collect();
    let mut counts: Vec<usize> = shares.iter().map(|share| (share.floor() as usize).max(1)).collect();
    while counts.iter().sum::<usize>() != layers {
        let missing = counts.iter().sum::<usize>() < layers;
        let gap = |i: &usize| shares[*i] - counts[*i] as f64;
        let stages = 0..counts.len();
        // Ties go to the earlier stage when layers are added, to the later one when they are taken.
        let stage = if missing {
            stages.rev().max_by(|a, b| gap(a).total_cmp(&gap(b)))
        } else {
            stages.filter(|i| counts[*i] > 1).min_by(|a, b| gap(a).total_cmp(&gap(b)))
        };
        let Some(stage) = stage else { break };
        counts[stage] = if missing { counts[stage] + 1 } else { counts[stage] - 1 };
    }
    counts
}

/// The contiguous division with the smallest largest stage, by bytes; of those the one with the smallest sum of squares,
/// and of equal ones that whose earlier stages hold more; none where every division has a stage beyond its limit. Dynamic
/// programming over (stages, layers), twice: O(stages · layers²).
fn balance(costs: &Costs, limits: &[u64]) -> Option<Vec<usize>> {
    let (stages, layers) = (limits.len(), costs.layers.len());
    let mut sums = vec![0u64; layers + 1];
    for (i, bytes) in costs.layers.iter().enumerate() {
        sums[i + 1] = sums[i].saturating_add(*bytes);
    }
    let stage_bytes = |stage: usize, from: usize, to: usize| {
        let first = if stage == 0 { costs.first } else { 0 };
        let last = if stage + 1 == stages { costs.last } else { 0 };
        match u128::from(sums[to] - sums[from]) + u128::from(first) + u128::from(last) {
            bytes if limits[stage] < u64::MAX && bytes > u128::from(limits[stage]) => u128::MAX,
            bytes => bytes,
        }
    };
    let (largest, _) = cheapest(stages, layers, stage_bytes, u128::max);
    if largest == u128::MAX {
        return None;
    }
    let square = |stage, from, to| match stage_bytes(stage, from, to) {
        bytes if bytes > largest => u128::MAX,
        bytes => bytes.saturating_mul(bytes),
    };
    Some(cheapest(stages, layers, square, u128::saturating_add).1)
}

/// The cheapest contiguous division and its cost: `join` of `cost(stage, first layer, end)` over the stages.
fn cheapest(
    stages: usize,
    layers: usize,
    cost: impl Fn(usize, usize, usize) -> u128,
    join: fn(u128, u128) -> u128,
) -> (u128, Vec<usize>) {
    // best[stage][to]: (cost, first layer of `stage`) when stages 0..=stage hold layers 0..to.
    let mut best = vec![vec![(u128::MAX, 0usize); layers + 1]; stages];
    for (to, entry) in best[0].iter_mut().enumerate().skip(1) {
        *entry = (cost(0, 0, to), 0);
    }
    for stage in 1..stages {
        for to in stage + 1..=layers {
            let choices = (stage..to).map(|from| (join(best[stage - 1][from].0, cost(stage, from, to)), from));
            let choice = choices.min_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
            best[stage][to] = choice.unwrap_or((u128::MAX, 0));
        }
    }
    let mut counts = vec![0; stages];
    let mut to = layers;
    for stage in (0..stages).rev() {
        let from = best[stage][to].1;
        counts[stage] = to - from;
        to = from;
    }
    (best[stages - 1][layers].0, counts)
}

#[cfg(test)]
mod tests;
