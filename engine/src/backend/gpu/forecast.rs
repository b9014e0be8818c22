//! How long programs will take, learned from those that ran, so that no submission is long: drivers take a device
//! for dead, or a desktop freezes, when one submission keeps it for seconds.

use std::collections::HashMap;

use crate::backend::ProgramId;

/// Seconds for a unit of [`crate::program::Op::work`] before anything was measured: those of a slow processor. For a
/// card that is hundreds of times too long, and its first run of a program goes in many submissions.
const SLOW: f64 = 1e-10;
/// Share of a measurement that was faster than forecast in the next forecast …
const FASTER_SHARE: f64 = 1.0 / 8.0;
/// … after so many runs of a program. The first one may compile and clear what it uses, and says little.
const FIRST_RUNS: u32 = 2;

/// Seconds for a unit of work of each program that has run. Kernels differ in what they make of a device, so that a
/// program says little of another; within one, time goes with work to about a factor of two.
#[derive(Default)]
pub(super) struct Forecast {
    known: HashMap<ProgramId, Known>,
}

struct Known {
    /// Seconds for a unit of work.
    seconds: f64,
    runs: u32,
}

impl Forecast {
    /// Seconds that `work` of a program will take.
    pub fn seconds(&self, program: ProgramId, work: f64) -> f64 {
        work * self.known.get(&program).map_or(SLOW, |known| known.seconds)
    }

    /// Programs that did so much work have taken `seconds` together, or at most so much. A run that was slower than
    /// forecast counts at once, one that was faster little by little, but for the first ones; one of no time at all says
    /// nothing.
    pub fn learn(&mut self, run: &[(ProgramId, f64)], seconds: f64, at_most: bool) {
        let expected: f64 = run.iter().map(|(program, work)| self.seconds(*program, *work)).sum();
        if expected == 0.0 || seconds == 0.0 || (at_most && seconds >= expected) {
            return;
        }
        let ratio = seconds / expected;
        for (program, _) in run {
            let known = self.known.entry(*program).or_insert(Known { seconds: SLOW, runs: 0 });
            let share = if ratio > 1.0 || known.runs < FIRST_RUNS { 1.0 } else { FASTER_SHARE };
            known.seconds *= 1.0 + share * (ratio - 1.0);
            known.runs += 1;
        }
    }
}

/// Cuts dispatches of so many seconds into pieces that take at most `target` seconds, or are one dispatch; returns
/// how many there are in each. There is always a piece.
pub(super) fn cut(seconds: impl Iterator<Item = f64>, target: f64) -> Vec<usize> {
    let (mut pieces, mut piece) = (vec![0], 0.0);
    for seconds in seconds {
        if pieces.last() != Some(&0) && piece + seconds > target {
            pieces.push(0);
            piece = 0.0;
        }
        *pieces.last_mut().expect("there is a piece") += 1;
        piece += seconds;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: ProgramId = ProgramId(0);
    const B: ProgramId = ProgramId(1);

    #[test]
    fn pieces_are_as_long_as_they_may_be() {
        assert_eq!(cut([1.0; 7].into_iter(), 3.0), [3, 3, 1]);
        assert_eq!(cut([1.0, 9.0, 1.0, 1.0].into_iter(), 3.0), [1, 1, 2]);
        assert_eq!(cut([1.0; 3].into_iter(), 0.0), [1, 1, 1]);
        assert_eq!(cut([].into_iter(), 3.0), [0]);
    }

    #[test]
    fn what_has_run_is_forecast_within_a_factor_of_two() {
        let mut forecast = Forecast::default();
        // A device for which a token costs as much as 40 units of work beside its bytes, and half of what B takes.
        let took = |tokens: f64| (1e9 + 1e7 * tokens) * 2e-12;
        for tokens in [512.0, 512.0, 100.0, 9.0, 64.0, 512.0] {
            forecast.learn(&[(A, 1e9 + 2e7 * tokens)], took(tokens), false);
            forecast.learn(&[(B, 1e9)], 0.25, false);
        }
        for tokens in [9.0, 33.0, 200.0, 512.0] {
            let ratio = forecast.seconds(A, 1e9 + 2e7 * tokens) / took(tokens);
            assert!((0.5..=2.0).contains(&ratio), "{tokens} tokens: {ratio}");
        }
        assert!((forecast.seconds(B, 2e9) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn slower_counts_at_once_faster_little_by_little() {
        let mut forecast = Forecast::default();
        assert_eq!(forecast.seconds(A, 1e10), 1.0, "before anything is known");
        for first in [0.7, 0.1] {
            forecast.learn(&[(A, 1e10)], first, false);
            assert!((forecast.seconds(A, 1e10) - first).abs() < 1e-9, "the first measurements replace it");
        }
        forecast.learn(&[(A, 1e10)], 0.4, false);
        assert!((forecast.seconds(A, 1e10) - 0.4).abs() < 1e-9);
        forecast.learn(&[(A, 1e10)], 0.2, false);
        assert!((forecast.seconds(A, 1e10) - 0.375).abs() < 1e-9);
        forecast.learn(&[(A, 1e10)], 9.0, true);
        assert!((forecast.seconds(A, 1e10) - 0.375).abs() < 1e-9, "at most nine says nothing");
    }
}
