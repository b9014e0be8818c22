//! What a stage costs, learnt from what it took.

use std::ops::RangeInclusive;

use super::StageCost;

/// Steps of a class of sizes that count; older ones fade.
const MEMORY: f64 = 64.0;
/// Weight of the prior, in steps.
const PRIOR: f64 = 1e-3;
/// Tokens that are assumed to cost as much as reading the weights, where nothing is known of the kernels.
const BREAK_EVEN: f64 = 16.0;
/// Classes of sizes: powers of two.
const CLASSES: usize = 32;
/// What a step counts that is one class away from those that are asked about.
const AWAY: f64 = 0.25;
/// Which of α, β, a may be other than 0, in the order in which equally good fits are taken.
const SUBSETS: [[bool; 3]; 7] = [
    [true, true, false],
    [true, true, true],
    [true, false, false],
    [false, true, false],
    [true, false, true],
    [false, true, true],
    [false, false, true],
];

/// α, β and a of a stage by least squares of relative errors, with exponential forgetting.
///
/// Sizes are forgotten by class (1, 2–3, 4–7, … tokens), so that a long answer does not wipe out what a prompt told.
/// A faint prior, α = β · so many tokens (16 by default) and a = 0, decides what the steps do not. None is ever negative.
#[derive(Clone, Debug)]
pub struct Fit {
    break_even: f64,
    classes: [Sums; CLASSES],
    sizes: Option<(usize, usize)>,
}

/// Faded sums over steps of y seconds, each weighing 1/y², of products of x = (1, tokens, 2Lx + x²) and y.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    count: f64,
    xx: [[f64; 3]; 3],
    xy: [f64; 3],
}

impl Sums {
    fn map(self, other: Sums, f: impl Fn(f64, f64) -> f64) -> Sums {
        Sums {
            count: f(self.count, other.count),
            xx: std::array::from_fn(|i| std::array::from_fn(|j| f(self.xx[i][j], other.xx[i][j]))),
            xy: std::array::from_fn(|i| f(self.xy[i], other.xy[i])),
        }
    }

    /// The least squares with only `used` coefficients other than 0, and the sum of squared errors, less what all share.
    fn solve(&self, used: [bool; 3]) -> ([f64; 3], f64) {
        // Rows and columns are scaled to a diagonal of ones: tokens and their squares differ by orders of magnitude.
        let scale: [f64; 3] =
            std::array::from_fn(|i| if self.xx[i][i] > 0.0 { self.xx[i][i].sqrt().recip() } else { 0.0 });
        let mut m = [[0.0; 4]; 3];
        for i in 0..3 {
            for j in 0..3 {
                m[i][j] = match used[i] && used[j] {
                    true => self.xx[i][j] * scale[i] * scale[j],
                    false => f64::from(u8::from(i == j)),
                };
            }
            m[i][3] = if used[i] { self.xy[i] * scale[i] } else { 0.0 };
        }
        for i in 0..3 {
            let pivot = (i..3).max_by(|a, b| m[*a][i].abs().total_cmp(&m[*b][i].abs())).unwrap_or(i);
            m.swap(i, pivot);
            for r in 0..3 {
                if r != i && m[i][i] != 0.0 {
                    let factor = m[r][i] / m[i][i];
                    (0..4).for_each(|k| m[r][k] -= factor * m[i][k]);
                }
            }
        }
        let c: [f64; 3] = std::array::from_fn(|i| if used[i] { m[i][3] / m[i][i] * scale[i] } else { 0.0 });
        let linear: f64 = (0..3).map(|i| c[i] * self.xy[i]).sum();
        let square: f64 =
            (0..3).flat_map(|i| (0..3).map(move |j| (i, j))).map(|(i, j)| c[i] * c[j] * self.xx[i][j]).sum();
        (c, square - 2.0 * linear)
    }
}

impl Default for Fit {
    fn default() -> Fit {
        Fit::of_tile(1)
    }
}

impl Fit {
    /// Nothing yet, for kernels that compute `tile` tokens at once (1: it is not known). A tile is chosen such that a few of
    /// them outweigh the reading of weights: a quarter of one is assumed to cost as much.
    pub fn of_tile(tile: usize) -> Fit {
        let break_even = if tile > 1 { tile as f64 / 4.0 } else { BREAK_EVEN };
        Fit { break_even, classes: Default::default(), sizes: None }
    }

    /// The shape of the cost before the first step.
    pub fn guess(&self) -> StageCost {
        StageCost { alpha: self.break_even, beta: 1.0, attention: 0.0 }
    }

    /// A step of `tokens` tokens took `seconds`; `attended` is Σ(2Lx + x²) over its sequences. Steps without tokens or time
    /// tell nothing and are left out.
    pub fn add(&mut self, tokens: usize, attended: f64, seconds: f64) {
        if tokens == 0 || !seconds.is_finite() || seconds < 1e-9 {
            return;
        }
        let (x, w) = ([1.0, tokens as f64, attended], 1.0 / (seconds * seconds));
        let step = Sums {
            count: 1.0,
            xx: std::array::from_fn(|i| std::array::from_fn(|j| w * x[i] * x[j])),
            xy: std::array::from_fn(|i| w * x[i] * seconds),
        };
        let class = &mut self.classes[tokens.ilog2().min(CLASSES as u32 - 1) as usize];
        *class = class.map(step, |old, new| old * (1.0 - 1.0 / MEMORY) + new);
        let (small, large) = self.sizes.unwrap_or((tokens, tokens));
        self.sizes = Some((small.min(tokens), large.max(tokens)));
    }

    /// Whether steps of different sizes were seen; until then how α and β share the time is a guess.
    pub fn is_determined(&self) -> bool {
        self.sizes.is_some_and(|(small, large)| small < large)
    }

    /// The cost that fits best; all zero before the first step.
    pub fn cost(&self) -> StageCost {
        self.cost_of(1..=usize::MAX)
    }

    /// The cost that best fits steps of so many tokens. Kernels for few tokens and for many are different ones, and one
    /// line through both fits neither; so other steps count less, the further away the less, and decide only what
    /// these do not.
    pub fn cost_of(&self, tokens: RangeInclusive<usize>) -> StageCost {
        let class = |tokens: usize| tokens.max(1).ilog2().min(CLASSES as u32 - 1) as usize;
        let (first, last) = (class(*tokens.start()), class(*tokens.end()));
        let add = |sum: Sums, (at, class): (usize, &Sums)| {
            let away = first.saturating_sub(at) + at.saturating_sub(last);
            let weight = AWAY.powi(away as i32);
            sum.map(*class, |a, b| a + weight * b)
        };
        let mut s = self.classes.iter().enumerate().fold(Sums::default(), add);
        if s.count == 0.0 {
            return StageCost::default();
        }
        let prior = PRIOR * s.xx[0][0] / s.count;
        let towards = [1.0, -self.break_even];
        for i in 0..2 {
            (0..2).for_each(|j| s.xx[i][j] += prior * towards[i] * towards[j]);
        }
        s.xx[2][2] *= 1.0 + PRIOR / s.count;
        let fits = SUBSETS.iter().map(|used| s.solve(*used));
        let valid = fits.filter(|(c, _)| c.iter().all(|c| *c >= 0.0 && c.is_finite()));
        let (best, _) = valid.reduce(|best, next| if next.1 < best.1 { next } else { best }).unwrap_or_default();
        StageCost { alpha: best[0], beta: best[1], attention: best[2] }
    }
}
