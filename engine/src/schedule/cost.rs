//! What the stages cost, learnt from the steps they did, and what follows for the scheduler.

use std::ops::Range;

use pp_shaders::PAGE;

use crate::law::{self, Fit, HopCost, Ring, Share, StageCost, padded};
use crate::program::ops::FEW_TOKENS;

/// Steps before the fit is believed.
const ENOUGH: usize = 8;
/// Numbers of groups whose rounds differ by less are the same; then the one nearest the number of stages that can
/// compute at once is taken.
const SAME: f64 = 1.01;
/// The same where stages share what they compute on. More groups than can compute at once then cost what no law counts:
/// on two cores, four stages of one thread each reached 16 % less than the law in four groups, 4 % less in two.
const SAME_SHARED: f64 = 1.08;
/// Weight of the latest step in what is averaged over steps.
const LATEST: f64 = 0.05;
/// The same for what no stage accounts for, where a step had more or less of it than so far. What is above the usual is
/// a kernel that was compiled, or waiting for a processor: more micro-batches would be no remedy.
const LATEST_ABOVE: f64 = 0.02;
const LATEST_BELOW: f64 = 0.25;

/// 2Lx + x² of x `tokens` tokens of one sequence behind L others: what attention costs grows with it.
pub fn attended(start: usize, tokens: usize) -> f64 {
    let (l, x) = (start as f64, tokens as f64);
    2.0 * l * x + x * x
}

/// Seconds of a round of `ring` of so many sequences in so many groups that are as equal as can be.
fn round(ring: &Ring<'_>, sequences: usize, groups: usize) -> f64 {
    let (each, larger) = (sequences / groups, sequences % groups);
    let of = |tokens: usize| if tokens == 0 { 0 } else { padded(tokens) };
    ring.round_of(larger * of(each + 1) + (groups - larger) * of(each), groups)
}

/// All stages' costs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Costs {
    /// In decode, in the order of the pipeline, each alone.
    pub stages: Vec<StageCost>,
    /// The same for chunks of prompts.
    pub prompts: Vec<StageCost>,
    /// What they take from each other.
    pub shares: Vec<Share>,
    /// [`attended`] for each token, lately.
    pub attended: f64,
    /// Seconds of a round that no stage accounts for: hops, the head's sampling.
    pub overhead: f64,
}

impl Costs {
    /// The stages at the contexts that sequences have lately: attention is in β.
    pub fn at_context(&self) -> Vec<StageCost> {
        let at = |stage: &StageCost| StageCost { beta: stage.beta + stage.attention * self.attended, ..*stage };
        self.stages.iter().map(at).collect()
    }

    /// A ring of `stages` ([`Costs::at_context`]); all that no stage accounts for is on the way back.
    pub fn ring<'a>(&'a self, stages: &'a [StageCost]) -> Ring<'a> {
        let back = HopCost { latency: self.overhead, ..HopCost::default() };
        Ring { stages, hops: &[], back, sampling: 0.0, shares: &self.shares }
    }

    /// The number of groups in which `sequences` sequences get round soonest; of equally good ones the nearest to the
    /// number of stages that can compute at once.
    pub fn best_groups(&self, sequences: usize) -> usize {
        let stages = self.at_context();
        let ring = self.ring(&stages);
        let most = sequences.max(1);
        let round = |groups: usize| round(&ring, sequences, groups);
        let best = (1..=most).map(round).fold(f64::INFINITY, f64::min);
        let same = best * if self.shares.is_empty() { SAME } else { SAME_SHARED };
        let abreast = self.abreast();
        (1..=most).filter(|groups| round(*groups) <= same).min_by_key(|groups| groups.abs_diff(abreast)).unwrap_or(1)
    }

    /// Seconds of a round of so many sequences in so many groups.
    pub fn round(&self, sequences: usize, groups: usize) -> f64 {
        round(&self.ring(&self.at_context()), sequences, groups)
    }

    /// How many stages can compute at once at full speed.
    fn abreast(&self) -> usize {
        let waiting = |share: &Share| share.stages.len().saturating_sub(share.at_full_speed());
        self.stages.len().saturating_sub(self.shares.iter().map(waiting).sum()).max(1)
    }

    /// Seconds that each stage takes for a micro-batch of `tokens` tokens which attend as [`attended`] says.
    fn seconds(&self, tokens: usize, attended: f64) -> impl Iterator<Item = f64> {
        let stages = if tokens <= FEW_TOKENS { &self.stages } else { &self.prompts };
        stages.iter().map(move |stage| stage.alpha + stage.beta * tokens as f64 + stage.attention * attended)
    }

    /// The same of the slowest stage.
    fn slowest_seconds(&self, tokens: usize, attended: f64) -> f64 {
        self.seconds(tokens, attended).fold(0.0, f64::max)
    }

    fn slowest(&self, tokens: usize) -> StageCost {
        let seconds = |stage: &StageCost| stage.seconds(tokens as f64, 0.0);
        self.prompts.iter().copied().max_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or_default()
    }

    /// Tokens of a chunk that begins at position `start` and takes the slowest stage as long as one of `first` tokens at
    /// position 0: fewer, the more there is to attend to.
    pub fn chunk_at(&self, first: usize, start: usize) -> usize {
        let stage = self.slowest(first);
        let wanted = stage.seconds(first as f64, 0.0);
        // The largest of 1..=first that is not slower; seconds grow with tokens.
        let (mut low, mut high) = (1, first.max(1));
        while low < high {
            let middle = (low + high).div_ceil(2);
            if stage.seconds(middle as f64, start as f64) <= wanted { low = middle } else { high = middle - 1 }
        }
        low
    }
}

/// A stage's layers, and what they are on.
pub type Held<'a> = (Range<usize>, &'a str);

impl Costs {
    /// What stages will about cost that have other layers: as much a layer as those `before` on the same device, or on all
    /// devices where there was none on it. Embedding and LM head are counted with the layers beside them.
    pub fn elsewhere(&self, before: &[Held<'_>], now: &[Held<'_>], shares: &[Share]) -> Costs {
        let of = |costs: &[StageCost]| -> Vec<StageCost> {
            let a_layer = |device: Option<&str>| {
                let stages = before.iter().zip(costs).filter(|((_, on), _)| device.is_none_or(|device| device == *on));
                let sum = stages.fold((0, StageCost::default()), |(layers, sum), ((range, _), cost)| {
                    (layers + range.len(), sum.plus(cost))
                });
                (sum.0 > 0).then(|| sum.1.times(1.0 / sum.0 as f64))
            };
            let cost = |(range, device): &Held<'_>| {
                let layer = a_layer(Some(device)).or_else(|| a_layer(None)).unwrap_or_default();
                layer.times(range.len() as f64)
            };
            now.iter().map(cost).collect()
        };
        Costs { stages: of(&self.stages), prompts: of(&self.prompts), shares: shares.to_vec(), ..*self }
    }
}

/// The fits of all stages.
#[derive(Clone, Debug)]
pub struct Fits {
    stages: Vec<Fit>,
    overhead: f64,
    /// [`attended`] for each token, lately.
    attended: f64,
    steps: usize,
    shares: Vec<Share>,
    /// Of the largest micro-batch so far.
    tokens: usize,
    costs: Option<Costs>,
}

impl Fits {
    /// What the stages take from each other.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// Nothing known of so many stages, but what they take from each other, and how many tokens kernels compute at once
    /// ([`Fit::of_tile`]).
    pub fn new(stages: usize, shares: Vec<Share>, tile: usize) -> Fits {
        Fits {
            stages: vec![Fit::of_tile(tile); stages],
            overhead: 0.0,
            attended: 0.0,
            steps: 0,
            shares,
            tokens: 0,
            costs: None,
        }
    }

    /// A micro-batch of `tokens` tokens took `seconds` on each stage, and `overhead` seconds beyond; `attended` is the sum
    /// of [`attended`] over its parts.
    pub fn add(&mut self, tokens: usize, attended: f64, seconds: &[f64], overhead: f64) {
        self.learn(tokens, attended, seconds, overhead, &vec![true; seconds.len()]);
    }

    /// The same, from which only some stages learn.
    pub fn learn(&mut self, tokens: usize, attended: f64, seconds: &[f64], overhead: f64, learns: &[bool]) {
        if tokens == 0 || seconds.len() != self.stages.len() {
            return;
        }
        for ((fit, seconds), _) in self.stages.iter_mut().zip(seconds).zip(learns).filter(|(_, learns)| **learns) {
            fit.add(padded(tokens), attended, *seconds);
        }
        let each = attended / tokens as f64;
        if self.steps == 0 {
            (self.overhead, self.attended) = (overhead, each);
        }
        let latest = if overhead > self.overhead { LATEST_ABOVE } else { LATEST_BELOW };
        self.overhead += latest * (overhead - self.overhead);
        self.attended += LATEST * (each - self.attended);
        self.steps += 1;
        self.tokens = self.tokens.max(tokens);
        let costs = || Costs {
            stages: self.stages.iter().map(|fit| fit.cost_of(1..=FEW_TOKENS)).collect(),
            prompts: self.stages.iter().map(|fit| fit.cost_of(PAGE..=usize::MAX)).collect(),
            shares: self.shares.clone(),
            attended: self.attended,
            overhead: self.overhead,
        };
        self.costs = (self.steps >= ENOUGH).then(costs);
    }

    /// Seconds that the slowest stage should take for a micro-batch of `tokens` tokens which attend as [`attended`] says,
    /// once enough steps were seen. For one much larger than any so far, at most what as many of one token take.
    pub fn expected(&self, tokens: usize, attended: f64) -> Option<f64> {
        let costs = self.costs.as_ref()?;
        let fitted = costs.slowest_seconds(tokens, attended);
        let is_known = tokens <= 2 * self.tokens;
        Some(if is_known { fitted } else { fitted.max(tokens as f64 * costs.slowest_seconds(1, 1.0)) })
    }

    /// Seconds that a stage should take alone for a micro-batch of `tokens` tokens, once enough steps were seen.
    pub fn expected_of(&self, stage: usize, tokens: usize, attended: f64) -> Option<f64> {
        self.costs.as_ref()?.seconds(tokens, attended).nth(stage)
    }

    /// Tokens of the first of the chunks that `tokens` tokens of prompt are best cut into, none larger than `most`.
    pub fn first_chunk(&self, tokens: usize, most: usize) -> usize {
        let guess = || self.stages.first().map_or(StageCost::default(), Fit::guess);
        let slowest = self.costs.as_ref().map_or_else(guess, |costs| costs.slowest(tokens));
        law::chunks(tokens, 0, self.stages.len(), slowest, most).first().copied().unwrap_or(most)
    }

    /// The costs, once enough steps were seen.
    pub fn costs(&self) -> Option<&Costs> {
        self.costs.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_costs_as_much_a_layer_as_before() {
        let cost = |alpha: f64| StageCost { alpha, beta: alpha / 10.0, attention: alpha / 100.0 };
        let costs =
            Costs { stages: vec![cost(10.0), cost(30.0)], prompts: vec![cost(20.0), cost(60.0)], ..Costs::default() };
        let before = [(0..10, "slow"), (10..40, "fast")];
        let check = |now: &[Held<'_>], stages: &[f64]| {
            let found = costs.elsewhere(&before, now, &[]);
            for (found, expected) in found.stages.iter().zip(stages).chain(found.prompts.iter().zip(stages.iter())) {
                let times = found.alpha / expected;
                assert!((times - 1.0).abs() < 1e-9 || (times - 2.0).abs() < 1e-9, "{found:?}, {expected}");
                assert!((found.attention - found.alpha / 100.0).abs() < 1e-9);
            }
        };
        check(&[(0..12, "slow"), (12..40, "fast")], &[12.0, 28.0]);
        check(&[(0..5, "slow"), (5..40, "another")], &[5.0, 35.0]);
        let unlike = Costs { stages: vec![cost(10.0), cost(60.0)], ..costs.clone() };
        let found = unlike.elsewhere(&before, &[(0..20, "fast"), (20..40, "another")], &[]);
        assert_eq!([found.stages[0].alpha, found.stages[1].alpha], [40.0, 35.0]);
    }

    #[test]
    fn chunks_shrink_as_there_is_more_to_attend_to() {
        let stage = StageCost { alpha: 0.01, beta: 1e-4, attention: 5e-8 };
        let costs = Costs { prompts: vec![stage; 4], ..Costs::default() };
        let wanted = stage.seconds(256.0, 0.0);
        let mut last = 256;
        for start in (0..8000).step_by(500) {
            let size = costs.chunk_at(256, start);
            assert!(size <= last && size > 0);
            let seconds = |n: usize| stage.seconds(n as f64, start as f64);
            assert!(seconds(size) <= wanted && seconds(size + 1) > wanted, "at {start}");
            last = size;
        }
        assert!(last < 64, "{last}");
    }

    #[test]
    fn what_is_larger_than_any_so_far_is_expected_to_take_as_many_single_tokens() {
        let mut fits = Fits::new(2, Vec::new(), 1);
        assert_eq!(fits.expected(1, 1.0), None);
        for _ in 0..2 * ENOUGH {
            fits.add(1, 1.0, &[0.03, 0.02], 0.0);
        }
        let close = |tokens, wanted: f64| {
            let found = fits.expected(tokens, 0.0).unwrap();
            assert!((found / wanted - 1.0).abs() < 0.1, "{tokens}: {found}");
        };
        close(1, 0.03);
        close(2, 0.03);
        close(100, 3.0);
    }

    #[test]
    fn equally_good_numbers_of_groups_are_as_many_as_stages() {
        // Nothing but weights to read: any number up to that of the stages is as good.
        let flat = Costs { stages: vec![StageCost { alpha: 0.01, beta: 0.0, attention: 0.0 }; 4], ..Costs::default() };
        assert_eq!([1, 3, 8].map(|sequences| flat.best_groups(sequences)), [1, 3, 4]);
        // A head that takes long wants one more in the pipe.
        let slow = Costs {
            overhead: 0.01,
            stages: vec![StageCost { alpha: 1e-4, beta: 0.01, attention: 0.0 }; 4],
            ..Costs::default()
        };
        assert!(slow.best_groups(20) > 4);
    }

    #[test]
    fn stages_that_share_have_as_many_groups_as_can_compute_at_once() {
        // Weights that count a little: by the law four groups and two are almost as good as each other.
        let share = |weight: f64| Share { capacity: 2.0, stages: (0..4).map(|stage| (stage, weight)).collect() };
        let costs = |weight: f64, sequences: usize| {
            let stages = vec![StageCost { alpha: 0.001, beta: 0.01, attention: 0.0 }; 4];
            Costs { stages, shares: vec![share(weight)], overhead: 1e-3, ..Costs::default() }.best_groups(sequences)
        };
        assert_eq!([costs(1.0, 8), costs(2.0, 8), costs(1.0, 1)], [2, 1, 1]);
        assert_eq!(costs(1e-3, 8), 4, "there is enough for all");
    }

    #[test]
    fn three_tokens_take_as_long_as_four() {
        let costs = Costs { stages: vec![StageCost { alpha: 1e-4, beta: 0.01, attention: 0.0 }], ..Costs::default() };
        let close = |sequences, groups, wanted: f64| assert!((costs.round(sequences, groups) - wanted).abs() < 1e-9);
        close(3, 1, 0.0401);
        close(8, 3, 0.1003);
        close(9, 1, 0.0901);
    }

    #[test]
    fn prompts_and_answers_have_costs_of_their_own() {
        let mut fits = Fits::new(1, Vec::new(), 1);
        for step in 0..64 {
            let (few, many) = (1 << (step % 4), 32 << (step % 3));
            fits.add(few, 0.0, &[0.01 + 0.002 * few as f64], 0.0);
            fits.add(many, 0.0, &[0.001 + 0.004 * many as f64], 0.0);
        }
        let costs = fits.costs().unwrap();
        let close = |found: StageCost, alpha: f64, beta: f64| {
            assert!((found.alpha - alpha).abs() < 0.1 * alpha && (found.beta - beta).abs() < 0.1 * beta, "{found:?}");
        };
        close(costs.stages[0], 0.01, 0.002);
        assert!((costs.prompts[0].beta - 0.004).abs() < 2e-4 && costs.prompts[0].alpha < 0.004, "{costs:?}");
    }

    #[test]
    fn attention_counts_at_the_context_that_there_is() {
        let mut fits = Fits::new(1, Vec::new(), 1);
        let stage = StageCost { alpha: 0.01, beta: 0.001, attention: 1e-6 };
        for step in 0..400 {
            let (tokens, context) = (1 + step % 4, 500 * (step % 3));
            let seen = tokens as f64 * attended(context, 1);
            let computed = padded(tokens) as f64;
            fits.add(tokens, seen, &[stage.alpha + stage.beta * computed + stage.attention * seen], 0.0);
        }
        let costs = fits.costs().unwrap();
        let each = stage.beta + stage.attention * costs.attended;
        assert!((costs.at_context()[0].beta / each - 1.0).abs() < 0.02, "{costs:?}");
        assert!((costs.attended / attended(500, 1) - 1.0).abs() < 0.1, "{costs:?}");
    }

    #[test]
    fn one_step_that_took_long_beyond_the_stages_is_soon_forgotten() {
        let mut fits = Fits::new(1, Vec::new(), 1);
        (0..24).for_each(|step| fits.add(1, 1.0, &[0.01], if step == 0 { 3.0 } else { 0.001 }));
        assert!(fits.costs().unwrap().overhead < 0.01);
        fits.add(1, 1.0, &[0.01], 3.0);
        assert!(fits.costs().unwrap().overhead < 0.1);
    }
}
