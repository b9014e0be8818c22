//! What a stage takes, known at a few sizes of a micro-batch.

use serde::{Deserialize, Serialize};

use super::{Fit, StageCost};
use crate::program::ops::FEW_TOKENS;

/// Tokens of a micro-batch at which curves are known.
pub const SIZES: [usize; 6] = [1, 2, 4, 8, 32, 128];

/// Tokens that a micro-batch of `tokens` tokens takes as long as: kernels are for 1, 2, 4 and 8 tokens, or for many.
pub fn padded(tokens: usize) -> usize {
    if tokens <= FEW_TOKENS { tokens.next_power_of_two() } else { tokens }
}

/// What a stage, or a part of one, takes for micro-batches of any size: known at [`SIZES`], in between and beyond on
/// straight lines; up to 8 tokens at the next of these sizes, which kernels are made for. Kernels for few tokens and for
/// many are different ones, which α + βb alone tells poorly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Seconds at each of [`SIZES`], for tokens with nothing before them but each other.
    pub seconds: [f64; SIZES.len()],
    /// Seconds for each decoded token and position before it.
    pub decode_position: f64,
    /// The same for tokens of prompts.
    pub prefill_position: f64,
}

impl Curve {
    /// The curve of α + βb and of an attention that costs what [`StageCost`] says.
    pub fn of(cost: StageCost) -> Curve {
        let seconds = SIZES.map(|size| cost.step(size as f64) + cost.attention * (size * size) as f64);
        let position = 2.0 * cost.attention;
        Curve { seconds, decode_position: position, prefill_position: position }
    }

    /// `f` of the numbers of two curves.
    fn map(&self, other: &Curve, f: impl Fn(f64, f64) -> f64) -> Curve {
        Curve {
            seconds: std::array::from_fn(|i| f(self.seconds[i], other.seconds[i])),
            decode_position: f(self.decode_position, other.decode_position),
            prefill_position: f(self.prefill_position, other.prefill_position),
        }
    }

    /// Both one after the other.
    pub fn plus(&self, other: &Curve) -> Curve {
        self.map(other, |a, b| a + b)
    }

    /// What is left without `other`, nothing of it negative.
    pub fn minus(&self, other: &Curve) -> Curve {
        self.map(other, |a, b| (a - b).max(0.0))
    }

    /// So many times.
    pub fn times(&self, factor: f64) -> Curve {
        self.map(self, |a, _| a * factor)
    }

    /// Seconds for a token of each of `sequences` sequences that decode, each with `context` positions before it. They attend
    /// on their own, however many there are.
    pub fn decode(&self, sequences: usize, context: usize) -> f64 {
        self.step(sequences) + self.decode_position * sequences as f64 * context as f64
    }

    /// Seconds for `tokens` tokens of a prompt, each with `context` positions before the micro-batch.
    pub fn at(&self, tokens: usize, context: usize) -> f64 {
        let position = if tokens <= FEW_TOKENS { self.decode_position } else { self.prefill_position };
        self.step(tokens) + position * tokens as f64 * context as f64
    }

    /// Seconds for `tokens` tokens at the beginning of a context.
    pub fn step(&self, tokens: usize) -> f64 {
        let tokens = padded(tokens);
        let after = SIZES.iter().position(|size| *size >= tokens).unwrap_or(SIZES.len() - 1).max(1);
        let (x, y) = (SIZES[after - 1] as f64, SIZES[after] as f64);
        let (from, to) = (self.seconds[after - 1], self.seconds[after]);
        (from + (to - from) * (tokens as f64 - x) / (y - x)).max(0.0)
    }

    /// α, β and a that fit the curve best.
    pub fn law(&self) -> StageCost {
        self.fit().cost()
    }

    /// The same for micro-batches that decode.
    pub fn decode_law(&self) -> StageCost {
        self.fit().cost_of(1..=FEW_TOKENS)
    }

    fn fit(&self) -> Fit {
        let mut fit = Fit::default();
        for (size, seconds) in SIZES.into_iter().zip(self.seconds) {
            fit.add(size, (size * size) as f64, seconds);
            // What is behind a context costs more by that position's share.
            let context = 1024;
            fit.add(size, (2 * context * size + size * size) as f64, self.at(size, context));
        }
        fit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_of_a_law_is_that_law() {
        let law = StageCost { alpha: 0.004, beta: 3e-4, attention: 2e-8 };
        let curve = Curve::of(law);
        for (tokens, context) in [(1, 0), (4, 100), (8, 4000), (20, 64), (128, 700), (400, 0)] {
            let wanted = law.seconds(tokens as f64, context as f64);
            assert!((curve.at(tokens, context) / wanted - 1.0).abs() < 0.03, "{tokens} behind {context}");
        }
        assert_eq!(curve.step(3), curve.step(4), "kernels are made for four");
        // Few tokens of a prompt attend as those that decode do, many in tiles.
        let tiled = Curve { prefill_position: curve.decode_position / 8.0, ..curve };
        assert_eq!(tiled.decode(8, 4000), tiled.at(8, 4000));
        let (alone, in_tiles) = (tiled.decode(16, 4000) - tiled.step(16), tiled.at(16, 4000) - tiled.step(16));
        assert!((alone / in_tiles - 8.0).abs() < 1e-9);
        let found = curve.law();
        assert!((found.alpha / law.alpha - 1.0).abs() < 0.02 && (found.beta / law.beta - 1.0).abs() < 0.02);
    }

    #[test]
    fn curves_add_up_and_nothing_becomes_negative() {
        let (a, b) = (Curve::of(StageCost { alpha: 1.0, ..StageCost::default() }), Curve::default());
        assert_eq!(a.plus(&a), a.times(2.0));
        assert_eq!((a.minus(&b), b.minus(&a)), (a, b));
        let falling = Curve { seconds: [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], ..Curve::default() };
        assert_eq!(falling.step(100_000), 0.0);
    }
}
