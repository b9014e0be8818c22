//! Stages that take much longer than they used to, by what their own steps have told so far. Pure.
//!
//! A step is slow that takes a stage more than [`TIMES`] times what its fit says for as many tokens over as much context,
//! and [`STEPS`] of them in a row make a straggler. The fit does not learn from slow steps: it would get used to them. Steps
//! of a kind that is not known yet are learnt from and say nothing: of sizes that were hardly seen, whose kernels may be
//! compiled first, or over much more context than so far.

use super::cost::Fits;
use crate::law::padded;

/// A step is slow beyond so many times what it should take. Sharing a device or its cores with another program makes two
/// of it, a hot processor less; and what a fit does not know of context makes less than two ([`BEYOND`]).
pub const TIMES: f64 = 3.0;
/// So many in a row make a straggler, and as many that are not slow end it: seconds of an answer, as long as it takes to
/// load another stage, and longer than another program needs to start.
pub const STEPS: usize = 32;
/// Seconds beyond what a step should take that are nobody's concern.
const FLOOR: f64 = 0.005;
/// Steps of a size until it is known.
const ENOUGH: usize = 8;
/// Up to so many times as much context as was seen is known: a step then takes at most so many times as long as one that
/// was seen, whatever its attention costs.
const BEYOND: f64 = 2.0;
/// Classes of sizes: powers of two, as those of a fit.
const CLASSES: usize = 32;

/// A stage that takes much longer than it used to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Straggler {
    /// Which.
    pub stage: usize,
    /// How many times what it should, over the slow steps.
    pub times: f64,
    /// Slow steps since it was well.
    pub steps: usize,
}

/// What is known of steps of a size.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    steps: usize,
    /// The most that one attended to.
    attended: f64,
}

/// A stage under watch.
#[derive(Clone, Debug, Default)]
struct Watch {
    known: [Known; CLASSES],
    /// Slow steps since it was well, those that were not since one was slow, and seconds of the slow ones: taken, and due.
    slow: usize,
    well: usize,
    took: f64,
    due: f64,
    is_straggler: bool,
}

/// All stages of a pipeline.
#[derive(Clone, Debug)]
pub(super) struct Watches(Vec<Watch>);

impl Watches {
    /// Nothing known of so many stages.
    pub(super) fn new(stages: usize) -> Watches {
        Watches(vec![Watch::default(); stages])
    }

    /// The stages are others' successors: how they did is forgotten, what their kind takes is not.
    pub(super) fn forget(&mut self) {
        self.0.iter_mut().for_each(|watch| *watch = Watch { known: watch.known, ..Watch::default() });
    }

    /// A step of `tokens` tokens took each stage `seconds`, alone; says which stages' fits should learn from it.
    pub(super) fn look(&mut self, fits: &Fits, tokens: usize, attended: f64, seconds: &[f64]) -> Vec<bool> {
        let mut look = |(stage, watch): (usize, &mut Watch)| {
            let due = fits.expected_of(stage, padded(tokens), attended);
            watch.look(tokens, attended, seconds.get(stage).copied().unwrap_or(0.0), due)
        };
        self.0.iter_mut().enumerate().map(&mut look).collect()
    }

    /// Those that straggle now.
    pub(super) fn stragglers(&self) -> Vec<Straggler> {
        let straggler = |(stage, watch): (usize, &Watch)| {
            let times = watch.took / watch.due.max(f64::MIN_POSITIVE);
            watch.is_straggler.then_some(Straggler { stage, times, steps: watch.slow })
        };
        self.0.iter().enumerate().filter_map(straggler).collect()
    }
}

impl Watch {
    fn look(&mut self, tokens: usize, attended: f64, seconds: f64, due: Option<f64>) -> bool {
        let known = &mut self.known[tokens.max(1).ilog2().min(CLASSES as u32 - 1) as usize];
        let is_known = known.steps >= ENOUGH && attended <= BEYOND * known.attended;
        if let Some(due) = due.filter(|_| is_known) {
            if seconds > TIMES * due && seconds > due + FLOOR {
                (self.slow, self.well) = (self.slow + 1, 0);
                (self.took, self.due) = (self.took + seconds, self.due + due);
                self.is_straggler |= self.slow >= STEPS;
                return false;
            }
            self.well += 1;
            if !self.is_straggler || self.well >= STEPS {
                *self = Watch { known: self.known, ..Watch::default() };
            }
        } else if self.is_straggler {
            return false;
        }
        let known = &mut self.known[tokens.max(1).ilog2().min(CLASSES as u32 - 1) as usize];
        // A single step tells little: much more context is known after some of them.
        let most = if known.steps == 0 { attended } else { BEYOND * known.attended };
        known.attended = known.attended.max(attended.min(most));
        known.steps += 1;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::cost::attended;
    use super::*;
    use crate::law::StageCost;
    use crate::random::Random;

    const STAGE: StageCost = StageCost { alpha: 0.02, beta: 0.002, attention: 1e-6 };

    struct Pipe {
        fits: Fits,
        watches: Watches,
    }

    impl Pipe {
        fn new() -> Pipe {
            Pipe { fits: Fits::new(2, Vec::new(), 1), watches: Watches::new(2) }
        }

        /// `tokens` sequences decode over `context` positions; stage 1 takes so many times what it should.
        fn step(&mut self, tokens: usize, context: usize, times: f64) -> Vec<Straggler> {
            let seen = tokens as f64 * attended(context, 1);
            let seconds = STAGE.alpha + STAGE.beta * padded(tokens) as f64 + STAGE.attention * seen;
            self.took(tokens, seen, seconds, times)
        }

        fn took(&mut self, tokens: usize, seen: f64, seconds: f64, times: f64) -> Vec<Straggler> {
            let seconds = [seconds, times * seconds];
            let learns = self.watches.look(&self.fits, tokens, seen, &seconds);
            self.fits.learn(tokens, seen, &seconds, 0.0, &learns);
            self.watches.stragglers()
        }

        fn known() -> Pipe {
            let mut pipe = Pipe::new();
            (0..60).for_each(|step| assert_eq!(pipe.step(1 + step % 4, 100 + step, 1.0), []));
            pipe
        }
    }

    #[test]
    fn a_stage_that_slows_down_is_found_after_so_many_steps_and_no_sooner() {
        let mut pipe = Pipe::known();
        for step in 1..200 {
            let found = pipe.step(1 + step % 4, 160, 4.0);
            if step < STEPS {
                assert_eq!(found, [], "after {step} steps");
                continue;
            }
            let [Straggler { stage: 1, times, steps }] = found[..] else { panic!("{found:?} after {step} steps") };
            assert!((times - 4.0).abs() < 0.3 && steps == step, "{times} after {steps} steps of {step}");
        }
        // What it should take has not moved.
        let due = pipe.fits.expected_of(1, 1, 2.0 * 160.0).unwrap();
        assert!((due / 0.022 - 1.0).abs() < 0.2, "{due}");
    }

    #[test]
    fn who_gets_well_is_none_any_more_and_begins_anew() {
        let mut pipe = Pipe::known();
        for _ in 0..3 {
            (1..STEPS).for_each(|_| assert_eq!(pipe.step(1, 160, 5.0), []));
            assert_eq!(pipe.step(1, 160, 5.0).len(), 1);
            // Now and then a step that is not slow does not end it.
            assert_eq!(pipe.step(1, 160, 1.0).len(), 1);
            assert_eq!(pipe.step(1, 160, 5.0).len(), 1);
            (1..STEPS).for_each(|_| assert_eq!(pipe.step(1, 160, 1.0).len(), 1));
            assert_eq!(pipe.step(1, 160, 1.0), []);
        }
        (1..STEPS).for_each(|_| assert_eq!(pipe.step(1, 160, 5.0), []));
        pipe.watches.forget();
        (1..STEPS).for_each(|_| assert_eq!(pipe.step(1, 160, 5.0), [], "another pipeline begins anew"));
        assert_eq!(pipe.step(1, 160, 5.0).len(), 1);
    }

    #[test]
    fn noise_hiccups_and_small_steps_are_none() {
        let mut pipe = Pipe::known();
        let mut random = Random::new(3);
        for step in 0..2000 {
            // A hiccup of seconds every thirty steps, and up to twice as long as it should take otherwise.
            let times = if step % 30 == 0 { 50.0 } else { 0.7 + 1.3 * random.unit() };
            assert_eq!(pipe.step(1 + step % 4, 100 + step % 200, times), [], "step {step}");
        }
        let mut small = Pipe::new();
        (0..60).for_each(|_| assert_eq!(small.took(1, 1.0, 0.0005, 1.0), []));
        (0..200).for_each(|_| assert_eq!(small.took(1, 1.0, 0.0005, 8.0), [], "less than {FLOOR} s more"));
        (0..STEPS).for_each(|_| drop(small.took(1, 1.0, 0.0005, 20.0)));
        assert_eq!(small.watches.stragglers().len(), 1);
    }

    #[test]
    fn more_context_and_larger_steps_are_none() {
        // Attention is most of it in the end, and nothing told of it at the beginning.
        let mut grows = Pipe::known();
        for context in (160..60_000).step_by(37) {
            assert_eq!(grows.step(1, context, 1.0), [], "{context} positions");
        }
        let mut jumps = Pipe::known();
        for context in [50_000, 200, 9_000, 60_000] {
            (0..100).for_each(|_| assert_eq!(jumps.step(1, context, 1.0), [], "{context} positions at once"));
        }
        let mut larger = Pipe::known();
        for tokens in [1, 8, 64, 512, 2048, 1, 512] {
            (0..100).for_each(|_| assert_eq!(larger.step(tokens, 100, 1.0), [], "{tokens} tokens"));
        }
    }

    #[test]
    fn what_was_slow_from_the_beginning_is_as_it_is() {
        let mut pipe = Pipe::new();
        (0..500).for_each(|step| assert_eq!(pipe.step(1 + step % 8, 100 + step, 10.0), []));
    }
}
