//! A device's clock on the host's.
//!
//! What a tick lasts is known, when ticks began is not. Each run bounds it from both sides: the device has not begun
//! before the host submitted, and had ended when the host saw the results. The tightest bounds of all runs count; they
//! widen with time by what two clocks may drift apart, so that newer ones replace them. What is in their middle is
//! wrong by at most half of what is between them: the shortest ways to the device and back. On Mesa's software driver,
//! whose clock is the host's, it was wrong by 0.13 ms on a busy machine.

use std::time::{Duration, Instant};

/// What two clocks may drift apart, seconds a second: crystals are good for half of it each.
const DRIFT: f64 = 1e-4;
/// Runs that a clock is to agree with after one that it contradicted, before it is believed again: one that does not run
/// as it is said to seldom agrees with so many.
const PROOF: u32 = 8;

/// What is known of a device's clock. Times are nanoseconds, in 64-bit floats after a beginning: exact for 104 days.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    /// Nanoseconds a tick.
    period: f64,
    known: Option<Known>,
    /// Runs that it is still to agree with.
    doubted: u32,
}

/// Tick `tick` was between `earliest` and `latest` after `host`.
#[derive(Clone, Copy, Debug)]
struct Known {
    tick: u64,
    host: Instant,
    earliest: f64,
    latest: f64,
    /// As of when; later the bounds are wider.
    at: Instant,
}

impl Clock {
    /// A clock of which nothing is known but what a tick lasts.
    pub fn new(period_nanos: f64) -> Clock {
        Clock { period: period_nanos, known: None, doubted: 0 }
    }

    /// When a run began and ended on the host's clock, by its two ticks; it was submitted and its results were seen at
    /// known times, and the answer is within them. None where the ticks say nothing: they were not written, the clock
    /// stands still, or began anew, or does not run as it is said to. Runs are told in order.
    pub fn place(&mut self, [begin, end]: [u64; 2], submitted: Instant, seen: Instant) -> Option<(Instant, Instant)> {
        let took = self.after(begin, end);
        if begin == 0 || end == 0 || took <= 0.0 {
            return None;
        }
        let fresh =
            Known { tick: begin, host: submitted, earliest: f64::NEG_INFINITY, latest: f64::INFINITY, at: seen };
        let bounded = |known: Known| {
            let widened = DRIFT * nanos(known.at, seen);
            let began = self.after(known.tick, begin);
            let earliest = (nanos(known.host, submitted) - began).max(known.earliest - widened);
            let latest = (nanos(known.host, seen) - began - took).min(known.latest + widened);
            (earliest <= latest).then_some(Known { earliest, latest, at: seen, ..known })
        };
        let Some(known) = bounded(self.known.unwrap_or(fresh)) else {
            // What contradicts itself is given up; the bounds of this run alone may hold.
            (self.known, self.doubted) = (bounded(fresh), PROOF);
            return None;
        };
        self.known = Some(known);
        if self.doubted > 0 {
            self.doubted -= 1;
            return None;
        }
        let offset = known.earliest + (known.latest - known.earliest) / 2.0;
        let begin = Duration::from_nanos((self.after(known.tick, begin) + offset).max(0.0) as u64);
        let begin = (known.host + begin).clamp(submitted, seen);
        Some((begin, (begin + Duration::from_nanos(took as u64)).min(seen)))
    }

    /// Nanoseconds from one tick to another.
    fn after(&self, from: u64, to: u64) -> f64 {
        to.wrapping_sub(from) as i64 as f64 * self.period
    }
}

/// From one instant to a later one.
fn nanos(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_nanos() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    const MICRO: f64 = 1e3;
    const MILLI: f64 = 1e6;
    const SECOND: f64 = 1e9;

    /// A device and its host, in virtual time: nanoseconds since `zero`.
    struct World {
        zero: Instant,
        now: f64,
        /// Ticks at `zero`, nanoseconds a tick, how many bits ticks have.
        first: u64,
        period: f64,
        bits: u32,
        random: Random,
    }

    /// A run as it was, and as the clock has it.
    struct Ran {
        submitted: Instant,
        seen: Instant,
        placed: Option<(Instant, Instant)>,
        /// Nanoseconds that the clock is off at the beginning and at the end.
        off: [f64; 2],
    }

    impl World {
        fn new(period: f64) -> World {
            // NVIDIA's cards count nanoseconds since 1970: more than a float counts exactly.
            let (first, random) = (1_764_000_000_000_000_000, Random::new(7));
            World { zero: Instant::now(), now: 0.0, first, period, bits: 64, random }
        }

        fn ticks(&self, at: f64) -> u64 {
            self.first.wrapping_add((at / self.period) as u64) & (u64::MAX >> (64 - self.bits))
        }

        /// A run of `takes` that the host looks for `late` after it ended, at the earliest.
        fn run(&mut self, clock: &mut Clock, takes: f64, late: f64) -> Ran {
            let submitted = self.now;
            let begin = submitted + 20.0 * MICRO + self.random.exponential(30.0 * MICRO);
            let end = begin + takes;
            self.now = end + late + 10.0 * MICRO + self.random.exponential(50.0 * MICRO);
            let instant = |at: f64| self.zero + Duration::from_nanos(at as u64);
            let (submitted, seen) = (instant(submitted), instant(self.now));
            let placed = clock.place([self.ticks(begin), self.ticks(end)], submitted, seen);
            let off = placed.map_or([0.0; 2], |(from, to)| {
                [(from, begin), (to, end)].map(|(found, true_at)| nanos(self.zero, found) - true_at)
            });
            Ran { submitted, seen, placed, off }
        }
    }

    fn worst(ran: &Ran) -> f64 {
        ran.off[0].abs().max(ran.off[1].abs())
    }

    #[test]
    fn runs_are_where_they_were_though_clocks_drift() {
        // As fast as it is said to be, and 40 millionths faster and slower; 10 ns and 83 ns a tick as some cards have.
        for (said, real) in [(1.0, 1.0), (1.0, 1.000_04), (10.0, 9.999_6), (83.333, 83.333)] {
            let (mut world, mut clock) = (World::new(real), Clock::new(said));
            for i in 0..20_000 {
                let ran = world.run(&mut clock, 2.0 * MILLI, 0.0);
                let (from, to) = ran.placed.expect("the ticks are good");
                assert!(ran.submitted <= from && from < to && to <= ran.seen);
                assert!(i < 20 || worst(&ran) < 60.0 * MICRO, "run {i} at {real} ns: {:?}", ran.off);
            }
        }
    }

    #[test]
    fn who_looks_late_finds_when_a_run_ended() {
        let (mut world, mut clock) = (World::new(1.0), Clock::new(1.0));
        let first = world.run(&mut clock, MILLI, 0.0);
        assert!(worst(&first) < 100.0 * MICRO, "{:?}", first.off);
        for _ in 0..20 {
            let ran = world.run(&mut clock, MILLI, 300.0 * MILLI);
            // All this time is known only what the first run said, and from which side.
            assert!(ran.placed.is_some() && worst(&ran) < MILLI, "{:?}", ran.off);
        }
    }

    #[test]
    fn after_an_idle_hour_one_run_is_as_good_as_the_first() {
        let (mut world, mut clock) = (World::new(1.000_04), Clock::new(1.0));
        world.run(&mut clock, MILLI, 0.0);
        world.now += 3600.0 * SECOND;
        let ran = world.run(&mut clock, MILLI, 0.0);
        assert!(ran.placed.is_some() && worst(&ran) < 200.0 * MICRO, "{:?}", ran.off);
    }

    #[test]
    fn ticks_that_begin_anew_cost_a_few_runs() {
        // 36 bits of 1 ns: every 69 seconds.
        let (mut world, mut clock) = (World { bits: 36, ..World::new(1.0) }, Clock::new(1.0));
        let mut missed = Vec::new();
        while world.now < 200.0 * SECOND {
            let ran = world.run(&mut clock, 10.0 * MILLI, 0.0);
            match ran.placed {
                None => missed.push(world.now),
                Some(_) => assert!(world.now < SECOND || worst(&ran) < 300.0 * MICRO, "{:?}", ran.off),
            }
        }
        // Three times: the run after, those that prove it, and the run that saw it happen, if one did.
        let few = PROOF as usize + 1;
        assert!((3 * few..=3 * few + 3).contains(&missed.len()), "{missed:?}");
    }

    #[test]
    fn ticks_that_say_nothing_are_not_believed() {
        let zero = Instant::now();
        let later = |micros| zero + Duration::from_micros(micros);
        let mut clock = Clock::new(1.0);
        for (what, ticks) in [
            ("not written", [0, 0]),
            ("the beginning was not written", [0, 5000]),
            ("the end was not written", [5000, 0]),
            ("the clock stands still", [5000, 5000]),
            ("the clock went back", [5000, 4000]),
        ] {
            assert_eq!(clock.place(ticks, zero, later(200)), None, "{what}");
        }
        assert!(clock.place([5000, 15_000], zero, later(200)).is_some(), "none of them left a trace");
        assert_eq!(clock.place([5000, 205_001], zero, later(200)), None, "longer than the host has waited");
        assert_eq!(clock.place([5000, 15_000], zero, later(200)), None, "now it is doubted");
    }

    #[test]
    fn a_clock_that_does_not_run_as_it_is_said_to_is_soon_found_out() {
        for wrong in [0.5, 0.97, 1.03, 2.0] {
            let (mut world, mut clock) = (World::new(1.0), Clock::new(wrong));
            let placed = (0..1000).filter(|_| world.run(&mut clock, 10.0 * MILLI, 0.0).placed.is_some());
            let placed = placed.count();
            assert!(placed < 20, "{wrong} ns a tick in place of 1: {placed} of 1000 believed");
        }
    }

    proptest::proptest! {
        #[test]
        fn whatever_the_ticks_the_answer_is_within_the_bounds(
            period in 0.01f64..1000.0,
            runs in proptest::collection::vec((proptest::prelude::any::<[u64; 2]>(), 0u64..1 << 40, 0u64..1 << 40), 1..20),
        ) {
            let (mut clock, mut now) = (Clock::new(period), Instant::now());
            for (ticks, idle, took) in runs {
                let submitted = now + Duration::from_nanos(idle);
                now = submitted + Duration::from_nanos(took);
                if let Some((from, to)) = clock.place(ticks, submitted, now) {
                    proptest::prop_assert!(submitted <= from && from <= to && to <= now);
                }
            }
        }
    }
}
