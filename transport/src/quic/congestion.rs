//! How many bytes may be in flight, for networks between workstations: a datagram that a bad cable or a radio loses is no
//! reason to send less; many that are lost at once are, and so is a way that becomes longer.
//!
//! As long as less than [`TOLERATED`] of what was sent lately is lost, the window stays. It grows while the round trip is
//! close to the shortest that was seen, so that it fills no buffer on the way.
//!
//! quinn spreads a window over the round trip. A frame that is as large as the window, and goes alone, would be on its way
//! for another round trip, and one that is smaller is never held up by the window, which would not grow. So what counts as
//! use of a window is a part of it ([`USED`]): it becomes some times what is sent in a round trip, and a frame leaves in as
//! small a part of one.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use quinn::congestion::{Controller, ControllerFactory};
use quinn_proto::RttEstimator;

/// The share of bytes whose loss is not taken for congestion.
const TOLERATED: f64 = 0.02;
/// Datagrams after which half of what is known of losses is forgotten.
const MEMORY: u64 = 512;
/// What is left of a window when there is congestion.
const DECREASE: f64 = 0.7;
/// What it grows by in a round trip, once it is known what is too much: a part of itself.
const INCREASE: u64 = 16;
/// A round trip that is so much longer than the shortest, and a quarter, has a queue in it.
const QUEUE: Duration = Duration::from_millis(2);
/// The part of a window that counts as all of it, where it arrives in a round trip (a frame, then silence).
const USED: u64 = 8;
/// Datagrams that may always be in flight.
const LEAST: u64 = 2;

/// Makes them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tolerant {
    /// Bytes in flight before anything is known.
    pub(super) initial: u64,
    /// Bytes in flight at most.
    pub(super) most: u64,
}

impl ControllerFactory for Tolerant {
    fn build(self: Arc<Self>, now: Instant, current_mtu: u16) -> Box<dyn Controller> {
        Box::new(Window::new(*self, now, current_mtu))
    }
}

/// The window of a connection.
#[derive(Clone, Debug)]
struct Window {
    limits: Tolerant,
    mtu: u64,
    bytes: u64,
    /// Below, a window doubles in a round trip.
    threshold: u64,
    /// What was sent before it was made smaller says nothing of it.
    since: Instant,
    /// Bytes that arrived lately, and that were lost.
    arrived: u64,
    lost: u64,
    round: Round,
}

/// What arrives of what is sent in a round trip ("pipeACK" of RFC 7661).
#[derive(Clone, Copy, Debug)]
struct Round {
    since: Instant,
    bytes: u64,
    /// Of the one before.
    before: u64,
}

impl Round {
    fn arrived(&mut self, now: Instant, sent: Instant, bytes: u64) {
        self.bytes += bytes;
        if sent >= self.since {
            *self = Round { since: now, bytes: 0, before: self.bytes };
        }
    }

    fn most(&self) -> u64 {
        self.bytes.max(self.before)
    }
}

impl Window {
    fn new(limits: Tolerant, now: Instant, mtu: u16) -> Window {
        let mtu = u64::from(mtu);
        // A beginning without losses is taken for granted.
        let arrived = MEMORY / 2 * mtu;
        let round = Round { since: now, bytes: 0, before: 0 };
        Window { limits, mtu, bytes: limits.initial, threshold: u64::MAX, since: now, arrived, lost: 0, round }
    }

    fn arrived(&mut self, now: Instant, sent: Instant, bytes: u64, rtt: Duration, shortest: Duration) {
        self.round.arrived(now, sent, bytes);
        self.arrived += bytes;
        if self.arrived + self.lost > MEMORY * self.mtu {
            (self.arrived, self.lost) = (self.arrived / 2, self.lost / 2);
        }
        if sent <= self.since || self.round.most() < self.bytes / USED {
            return;
        }
        let has_queue = rtt > shortest + shortest / 4 + QUEUE;
        match self.bytes < self.threshold {
            true if has_queue => self.threshold = self.bytes,
            true => self.bytes += bytes,
            false if has_queue => {}
            false => self.bytes += (bytes / INCREASE).max(bytes * self.mtu / self.bytes),
        }
        self.bytes = self.bytes.min(self.limits.most);
    }

    fn lost(&mut self, now: Instant, sent: Instant, is_all: bool, bytes: u64) {
        self.lost += bytes;
        let is_little = (self.lost as f64) <= TOLERATED * (self.arrived + self.lost) as f64;
        // A router that says so itself loses nothing.
        let is_told = bytes == 0;
        if !is_all && (sent <= self.since || (is_little && !is_told)) {
            return;
        }
        (self.since, self.lost) = (now, 0);
        self.threshold = ((self.bytes as f64 * DECREASE) as u64).max(self.least());
        self.bytes = if is_all { self.least() } else { self.threshold };
    }

    fn least(&self) -> u64 {
        LEAST * self.mtu
    }
}

impl Controller for Window {
    fn on_ack(&mut self, now: Instant, sent: Instant, bytes: u64, _app_limited: bool, rtt: &RttEstimator) {
        self.arrived(now, sent, bytes, rtt.get(), rtt.min());
    }

    fn on_congestion_event(&mut self, now: Instant, sent: Instant, is_persistent_congestion: bool, lost_bytes: u64) {
        self.lost(now, sent, is_persistent_congestion, lost_bytes);
    }

    fn on_mtu_update(&mut self, new_mtu: u16) {
        self.mtu = u64::from(new_mtu);
        self.bytes = self.bytes.max(self.least());
    }

    fn window(&self) -> u64 {
        self.bytes
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(self.clone())
    }

    fn initial_window(&self) -> u64 {
        self.limits.initial
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MTU: u16 = 1000;
    const LIMITS: Tolerant = Tolerant { initial: 10_000, most: 1_000_000 };
    const RTT: Duration = Duration::from_millis(1);

    fn window() -> (Window, Instant) {
        let now = Instant::now();
        (Window::new(LIMITS, now, MTU), now + RTT)
    }

    #[test]
    fn it_doubles_until_there_is_a_queue_and_then_grows_slowly() {
        let (mut window, sent) = window();
        let now = sent + RTT;
        for wanted in [20_000, 40_000, 80_000] {
            window.arrived(now, sent, window.bytes, RTT, RTT);
            assert_eq!(window.bytes, wanted);
        }
        let slow = RTT + RTT / 4 + QUEUE + Duration::from_nanos(1);
        window.arrived(now, sent, 80_000, slow, RTT);
        assert_eq!(window.bytes, 80_000, "a queue is not made longer");
        window.arrived(now, sent, 80_000, RTT, RTT);
        assert_eq!(window.bytes, 85_000, "a sixteenth");
        (0..100).for_each(|_| window.arrived(now, sent, 1_000_000, RTT, RTT));
        assert_eq!(window.bytes, LIMITS.most);
    }

    #[test]
    fn frames_that_go_alone_make_it_some_times_what_they_are() {
        let (mut window, mut sent) = window();
        for _ in 0..100 {
            // A frame in datagrams that leave together, and arrive; then nothing for a while.
            let now = sent + RTT;
            (0..20).for_each(|_| window.arrived(now, sent, 1000, RTT, RTT));
            sent = now + 5 * RTT;
        }
        assert!((20 * USED..=20 * USED + 1).contains(&(window.bytes / 1000)), "{window:?}");
        let before = window.bytes;
        for _ in 0..100 {
            window.arrived(sent + RTT, sent, 1000, RTT, RTT);
            sent += 5 * RTT;
        }
        assert_eq!(window.bytes, before, "who has little to send learns nothing");
    }

    #[test]
    fn few_losses_change_nothing_and_many_do_once_for_a_window() {
        let (mut window, sent) = window();
        window.bytes = 100_000;
        // One in a hundred, for long.
        for _ in 0..1000 {
            window.arrived(sent + RTT, sent, 99_000, RTT + 2 * QUEUE, RTT);
            window.lost(sent + RTT, sent, false, 1000);
        }
        assert_eq!(window.bytes, 100_000);
        // A buffer that is full loses a tenth at once.
        let now = sent + 2 * RTT;
        (0..40).for_each(|_| window.lost(now, sent, false, 1000));
        assert_eq!(window.bytes, 70_000);
        (0..40).for_each(|_| window.lost(now + RTT, now, false, 1000));
        assert_eq!(window.bytes, 70_000, "those were sent before");
    }

    #[test]
    fn a_router_that_says_so_is_heard_and_a_silent_network_begins_anew() {
        let (mut window, sent) = window();
        window.bytes = 100_000;
        window.lost(sent + RTT, sent, false, 0);
        assert_eq!(window.bytes, 70_000);
        window.lost(sent + 3 * RTT, sent, true, 70_000);
        assert_eq!((window.bytes, window.threshold), (2000, 49_000));
    }

    proptest! {
        #[test]
        fn whatever_happens_it_stays_within_its_limits(
            events in prop::collection::vec((0..4u8, 0..100_000u64, 0..20u64), 0..200),
        ) {
            let (mut window, mut now) = window();
            for (kind, bytes, ms) in events {
                let sent = now;
                now += Duration::from_millis(ms);
                match kind {
                    0 => window.arrived(now, sent, bytes, Duration::from_millis(ms), RTT),
                    1 => window.arrived(now, sent, bytes, RTT, RTT),
                    2 => window.lost(now, sent, false, bytes),
                    _ => window.lost(now, sent, true, bytes),
                }
                prop_assert!((window.least()..=LIMITS.most).contains(&window.bytes), "{window:?}");
            }
        }
    }
}
