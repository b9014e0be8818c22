//! A prompt in chunks that take equally long.

use pp_shaders::PAGE;

use super::StageCost;

/// T(K) = (K + P − 1)(α + W/K): seconds for a prompt in K chunks of equal time on P equal stages, where W is the time
/// of the whole prompt on one stage without α (ρS, and attention).
pub fn prefill(stages: usize, chunks: usize, alpha: f64, work: f64) -> f64 {
    (chunks + stages - 1) as f64 * (alpha + work / chunks as f64)
}

/// The K of 1 to `most` with the least T(K): one of the two beside K* = √((P − 1)W/α).
pub fn best_chunks(stages: usize, alpha: f64, work: f64, most: usize) -> usize {
    let most = most.max(1);
    let ideal = ((stages.saturating_sub(1)) as f64 * work / alpha).sqrt();
    let below = (ideal as usize).clamp(1, most);
    let above = (below + 1).min(most);
    let seconds = |chunks| prefill(stages.max(1), chunks, alpha, work);
    if seconds(above) < seconds(below) { above } else { below }
}

/// Cuts a prompt of `tokens` tokens behind `start` others into chunks for a pipeline of `stages` stages, of which the
/// slowest costs `cost`. Their number is that of [`best_chunks`], at most that of the prompt's pages, and more where
/// `max_chunk` binds; they take equally long, so later ones are shorter where attention grows.
///
/// # Panics
/// When `max_chunk` is 0.
pub fn chunks(tokens: usize, start: usize, stages: usize, cost: StageCost, max_chunk: usize) -> Vec<usize> {
    assert!(max_chunk > 0, "a chunk has tokens");
    if tokens == 0 {
        return Vec::new();
    }
    let work = Work::new(start, cost);
    let all = work.seconds(tokens as f64);
    let best = if work.known { best_chunks(stages, cost.alpha, all, tokens.div_ceil(PAGE)) } else { 1 };
    let least = (all / work.seconds(max_chunk as f64)).ceil() as usize;
    for count in best.max(least).min(tokens)..tokens {
        let sizes = work.divide(tokens, count);
        if sizes.iter().all(|size| *size <= max_chunk) {
            return sizes;
        }
    }
    vec![1; tokens]
}

/// Seconds of the first n tokens of a prompt, α left out: F(n) = (β + 2aL)n + an².
struct Work {
    linear: f64,
    square: f64,
    /// False when nothing is known of the cost, and tokens are counted instead.
    known: bool,
}

impl Work {
    fn new(start: usize, cost: StageCost) -> Work {
        let linear = cost.beta + 2.0 * cost.attention * start as f64;
        let known = linear > 0.0 || cost.attention > 0.0;
        if known { Work { linear, square: cost.attention, known } } else { Work { linear: 1.0, square: 0.0, known } }
    }

    fn seconds(&self, tokens: f64) -> f64 {
        (self.linear + self.square * tokens) * tokens
    }

    /// Tokens that take `seconds`.
    fn tokens(&self, seconds: f64) -> f64 {
        2.0 * seconds / (self.linear + (self.linear * self.linear + 4.0 * self.square * seconds).sqrt())
    }

    /// `count` sizes of equal time, none of them 0.
    fn divide(&self, tokens: usize, count: usize) -> Vec<usize> {
        let all = self.seconds(tokens as f64);
        let mut sizes = Vec::with_capacity(count);
        let mut done = 0;
        for chunk in 1..=count {
            let end = self.tokens(all * chunk as f64 / count as f64).round() as usize;
            let end = if chunk == count { tokens } else { end.clamp(done + 1, tokens - (count - chunk)) };
            sizes.push(end - done);
            done = end;
        }
        sizes
    }
}
