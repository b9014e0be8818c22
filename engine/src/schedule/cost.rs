//! What the stages cost, learnt from the steps they did, and what follows for the scheduler.
//!
//! A stage takes α + β·tokens + γ·attended seconds for a micro-batch, `attended` the positions that its tokens look at,
//! summed. The three are fitted by least squares that forget: the last hundred or so steps count.

/// Share of the weight that an older step keeps with each new one.
const FORGET: f64 = 0.99;
/// Pulls what the steps do not tell towards zero, relative to what they tell.
const RIDGE: f64 = 1e-4;
/// Steps before the fit is believed.
const ENOUGH: usize = 8;
/// Numbers of groups whose rounds differ by less are the same; then the one nearest the number of stages is taken.
const SAME: f64 = 1.01;

/// One stage's α, β, γ.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageCost {
    /// Seconds of a micro-batch however small: reading the weights, launching kernels.
    pub alpha: f64,
    /// Seconds a token.
    pub beta: f64,
    /// Seconds a position attended to.
    pub gamma: f64,
}

impl StageCost {
    /// Seconds for `tokens` tokens that look at `attended` positions in all.
    pub fn seconds(&self, tokens: f64, attended: f64) -> f64 {
        self.alpha + self.beta * tokens + self.gamma * attended
    }
}

/// Positions that `tokens` tokens of one sequence look at, the first of them at position `start`.
pub fn attended(start: usize, tokens: usize) -> usize {
    tokens * start + tokens * (tokens + 1) / 2
}

/// All stages' costs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// In the order of the pipeline.
    pub stages: Vec<StageCost>,
    /// Seconds of a round that no stage accounts for: hops, the head's sampling.
    pub overhead: f64,
}

impl Costs {
    /// Seconds until every one of `sequences` sequences in `groups` groups has its next token:
    /// max(L, Σ over groups of the slowest stage), L the time of one group around the ring.
    pub fn round(&self, sequences: usize, groups: usize) -> f64 {
        let largest = sequences.div_ceil(groups) as f64;
        let around: f64 = self.stages.iter().map(|s| s.seconds(largest, 0.0)).sum::<f64>() + self.overhead;
        let slowest = self.stages.iter().map(|s| groups as f64 * s.alpha + s.beta * sequences as f64);
        slowest.fold(around, f64::max)
    }

    /// The number of groups with the shortest [`Costs::round`].
    pub fn best_groups(&self, sequences: usize) -> usize {
        let most = sequences.max(1);
        let best = (1..=most).map(|groups| self.round(sequences, groups)).fold(f64::INFINITY, f64::min);
        let near = |groups: &usize| groups.abs_diff(self.stages.len());
        (1..=most).filter(|groups| self.round(sequences, *groups) <= best * SAME).min_by_key(near).unwrap_or(1)
    }

    /// Seconds from the first stage's start to the last stage's end for `tokens` tokens of prompt in `chunks` equal
    /// chunks, attention apart.
    pub fn prefill(&self, tokens: usize, chunks: usize) -> f64 {
        let size = tokens as f64 / chunks as f64;
        let times = self.stages.iter().map(|stage| stage.seconds(size, 0.0));
        times.clone().sum::<f64>() + (chunks - 1) as f64 * times.fold(0.0, f64::max)
    }

    /// Chunks that `tokens` tokens of prompt are best cut into: K that minimises [`Costs::prefill`]. No chunk is smaller
    /// than a page.
    pub fn prefill_chunks(&self, tokens: usize) -> usize {
        let most = tokens.div_ceil(pp_shaders::PAGE).clamp(1, 1024);
        (1..=most).min_by(|a, b| self.prefill(tokens, *a).total_cmp(&self.prefill(tokens, *b))).unwrap_or(1)
    }

    /// Tokens of a chunk that begins at position `start` and takes the slowest stage as long as one of `first` tokens at
    /// position 0: fewer, the more there is to attend to.
    pub fn chunk_at(&self, first: usize, start: usize) -> usize {
        let Some(stage) = self.stages.iter().max_by(|a, b| {
            let seconds = |s: &StageCost| s.seconds(first as f64, attended(0, first) as f64);
            seconds(a).total_cmp(&seconds(b))
        }) else {
            return first;
        };
        let seconds = |tokens: usize| stage.seconds(tokens as f64, attended(start, tokens) as f64);
        let wanted = stage.seconds(first as f64, attended(0, first) as f64);
        // The largest of 1..=first that is not slower; seconds grow with tokens.
        let (mut low, mut high) = (1, first.max(1));
        while low < high {
            let middle = (low + high).div_ceil(2);
            if seconds(middle) <= wanted { low = middle } else { high = middle - 1 }
        }
        low
    }
}

/// Least squares of one stage: sums of products of (1, tokens, attended) and seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    xx: [[f64; 3]; 3],
    xy: [f64; 3],
}

impl Sums {
    fn add(&mut self, x: [f64; 3], y: f64) {
        for i in 0..3 {
            for j in 0..3 {
                self.xx[i][j] = FORGET * self.xx[i][j] + x[i] * x[j];
            }
            self.xy[i] = FORGET * self.xy[i] + x[i] * y;
        }
    }

    /// The best of the fits in which no coefficient is negative: those that would be are left out.
    fn cost(&self) -> StageCost {
        let subsets = [[true, true, true], [true, true, false], [true, false, true], [false, true, true]];
        let singles = [[false, true, false], [false, false, true], [true, false, false]];
        let fits = subsets.into_iter().chain(singles).map(|used| self.solve(used));
        let valid = fits.filter(|c| c.iter().all(|c| *c >= 0.0 && c.is_finite()));
        let best = valid.min_by(|a, b| self.error(a).total_cmp(&self.error(b))).unwrap_or_default();
        StageCost { alpha: best[0], beta: best[1], gamma: best[2] }
    }

    /// Sum of squared errors, without the part that is the same for all.
    fn error(&self, c: &[f64; 3]) -> f64 {
        let linear: f64 = (0..3).map(|i| c[i] * self.xy[i]).sum();
        let square: f64 =
            (0..3).flat_map(|i| (0..3).map(move |j| (i, j))).map(|(i, j)| c[i] * c[j] * self.xx[i][j]).sum();
        square - 2.0 * linear
    }

    /// The least squares of the coefficients in use. Of tokens and attended positions that always were the same, α is
    /// told by the ridge: it is not pulled.
    fn solve(&self, used: [bool; 3]) -> [f64; 3] {
        let mut m = [[0.0; 4]; 3];
        for i in 0..3 {
            for j in 0..3 {
                m[i][j] = if used[i] && used[j] { self.xx[i][j] } else { 0.0 };
            }
            if !used[i] {
                m[i][i] = 1.0;
            } else if i > 0 {
                m[i][i] *= 1.0 + RIDGE;
            }
            m[i][3] = if used[i] { self.xy[i] } else { 0.0 };
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
        std::array::from_fn(|i| if m[i][i] == 0.0 { 0.0 } else { m[i][3] / m[i][i] })
    }
}

/// The fits of all stages.
#[derive(Clone, Debug)]
pub struct Fits {
    stages: Vec<Sums>,
    overhead: f64,
    steps: usize,
}

impl Fits {
    /// Nothing known of so many stages.
    pub fn new(stages: usize) -> Fits {
        Fits { stages: vec![Sums::default(); stages], overhead: 0.0, steps: 0 }
    }

    /// A micro-batch of `tokens` tokens, which looked at `attended` positions, took `seconds` on each stage, and
    /// `overhead` seconds beyond.
    pub fn add(&mut self, tokens: usize, attended: usize, seconds: &[f64], overhead: f64) {
        if tokens == 0 || seconds.len() != self.stages.len() {
            return;
        }
        for (sums, seconds) in self.stages.iter_mut().zip(seconds) {
            sums.add([1.0, tokens as f64, attended as f64], *seconds);
        }
        self.overhead = if self.steps == 0 { overhead } else { self.overhead + 0.05 * (overhead - self.overhead) };
        self.steps += 1;
    }

    /// The costs, once enough steps were seen.
    pub fn costs(&self) -> Option<Costs> {
        let costs = || Costs { stages: self.stages.iter().map(Sums::cost).collect(), overhead: self.overhead };
        (self.steps >= ENOUGH).then(costs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fitted(steps: impl IntoIterator<Item = (usize, usize)>, truth: StageCost) -> StageCost {
        let mut fits = Fits::new(1);
        for (tokens, attended) in steps {
            fits.add(tokens, attended, &[truth.seconds(tokens as f64, attended as f64)], 0.0);
        }
        fits.costs().expect("enough steps").stages[0]
    }

    #[test]
    fn the_fit_finds_what_the_steps_follow() {
        let truth = StageCost { alpha: 0.02, beta: 0.001, gamma: 2e-7 };
        let steps = (0..200usize).map(|i| (1 + i * 37 % 128, i * 7919 % 50_000));
        let found = fitted(steps, truth);
        assert!((found.alpha / truth.alpha - 1.0).abs() < 0.02, "{found:?}");
        assert!((found.beta / truth.beta - 1.0).abs() < 0.02, "{found:?}");
        assert!((found.gamma / truth.gamma - 1.0).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn steps_of_one_size_are_told_apart_as_nothing_but_remain_predicted() {
        let truth = StageCost { alpha: 0.02, beta: 0.001, gamma: 0.0 };
        let found = fitted((0..50).map(|_| (4, 400)), truth);
        let predicted = found.seconds(4.0, 400.0);
        assert!((predicted / truth.seconds(4.0, 400.0) - 1.0).abs() < 1e-3, "{found:?}");
        assert!(found.alpha >= 0.0 && found.beta >= 0.0 && found.gamma >= 0.0);
    }

    #[test]
    fn a_change_is_learnt() {
        let mut fits = Fits::new(1);
        let mut feed = |alpha: f64, n: usize| {
            (0..n).for_each(|i| fits.add(1 + i % 8, 0, &[alpha + 0.001 * (1 + i % 8) as f64], 0.0));
            fits.costs().expect("enough steps").stages[0].alpha
        };
        assert!((feed(0.02, 300) / 0.02 - 1.0).abs() < 0.01);
        assert!((feed(0.05, 600) / 0.05 - 1.0).abs() < 0.01);
    }

    #[test]
    fn chunks_shrink_as_there_is_more_to_attend_to() {
        let stage = StageCost { alpha: 0.01, beta: 1e-4, gamma: 1e-7 };
        let costs = Costs { stages: vec![stage; 4], overhead: 0.0 };
        let wanted = stage.seconds(256.0, attended(0, 256) as f64);
        let mut last = 256;
        for start in (0..8000).step_by(500) {
            let size = costs.chunk_at(256, start);
            assert!(size <= last && size > 0);
            let seconds = |n: usize| stage.seconds(n as f64, attended(start, n) as f64);
            assert!(seconds(size) <= wanted && seconds(size + 1) > wanted, "at {start}");
            last = size;
        }
        assert!(last < 64, "{last}");
    }

    /// T9, the number of chunks: T(K) = (K + P − 1)(α + β·S/K) on equal stages.
    #[test]
    fn the_number_of_chunks_is_the_best_one() {
        for (stages, alpha, beta, tokens) in [(2, 0.01, 1e-4, 4000), (4, 0.02, 1e-3, 2000), (8, 0.005, 2e-4, 8000)] {
            let costs = Costs { stages: vec![StageCost { alpha, beta, gamma: 0.0 }; stages], overhead: 0.0 };
            let law = |k: usize| (k + stages - 1) as f64 * (alpha + beta * tokens as f64 / k as f64);
            let most = tokens / pp_shaders::PAGE;
            let best = (1..=most).min_by(|a, b| law(*a).total_cmp(&law(*b))).unwrap();
            let root = ((stages - 1) as f64 * beta * tokens as f64 / alpha).sqrt().min(most as f64);
            assert!(costs.prefill_chunks(tokens).abs_diff(best) <= 1);
            assert!((best as f64 - root).abs() <= 1.0, "{best} {root}");
        }
    }
}
