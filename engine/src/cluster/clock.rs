//! Two hosts' clocks, aligned by messages that go there and back.

use std::collections::VecDeque;

use crate::trace::Nanos;

/// Round trips that are remembered: the clocks of two hosts drift by microseconds in the time that these take.
const REMEMBERED: usize = 32;

/// One message there and back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Trip {
    round: Nanos,
    /// Their clock less ours.
    offset: i128,
}

/// How the clock of another host stands to ours. Of the latest round trips the shortest counts: what it says is wrong by
/// at most half of what it took.
#[derive(Clone, Debug, Default)]
pub struct Alignment {
    trips: VecDeque<Trip>,
}

impl Alignment {
    /// A message left here at `sent`, was answered there at `there`, and the answer was here at `back`.
    pub fn add(&mut self, sent: Nanos, there: Nanos, back: Nanos) {
        if back < sent {
            return;
        }
        if self.trips.len() == REMEMBERED {
            self.trips.pop_front();
        }
        let middle = i128::from(sent) + i128::from(back - sent) / 2;
        self.trips.push_back(Trip { round: back - sent, offset: i128::from(there) - middle });
    }

    fn best(&self) -> Option<Trip> {
        self.trips.iter().copied().min_by_key(|trip| trip.round)
    }

    /// The shortest round trip of the latest.
    pub fn round_trip(&self) -> Option<Nanos> {
        self.best().map(|trip| trip.round)
    }

    /// Their clock less ours, and by how much that may be wrong.
    pub fn offset(&self) -> Option<(i128, Nanos)> {
        self.best().map(|trip| (trip.offset, trip.round / 2))
    }

    /// A time of theirs on our clock; as it is while nothing is known. Before our clock began it is 0.
    pub fn ours(&self, theirs: Nanos) -> Nanos {
        let offset = self.best().map_or(0, |trip| trip.offset);
        (i128::from(theirs) - offset).clamp(0, i128::from(Nanos::MAX)) as Nanos
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_shortest_trip_counts() {
        let mut alignment = Alignment::default();
        assert_eq!(alignment.ours(7), 7);
        // Their clock is 1000 ahead. A slow way back makes it look like less.
        alignment.add(0, 1010, 500);
        assert_eq!(alignment.offset(), Some((760, 250)));
        alignment.add(600, 1610, 620);
        assert_eq!((alignment.offset(), alignment.round_trip()), (Some((1000, 10)), Some(20)));
        assert_eq!(alignment.ours(1610), 610);
        assert_eq!(alignment.ours(3), 0, "before our clock began");
    }

    proptest! {
        #[test]
        fn it_is_never_wrong_by_more_than_it_says(
            ahead in -1_000_000i64..1_000_000,
            trips in prop::collection::vec((0u64..10_000, 1u64..5_000, 1u64..5_000), 1..40),
        ) {
            let mut alignment = Alignment::default();
            let mut now = 10_000_000u64;
            for (pause, there, back) in trips {
                now += pause;
                alignment.add(now, (now + there).checked_add_signed(ahead).unwrap(), now + there + back);
                now += there + back;
            }
            let (offset, wrong) = alignment.offset().unwrap();
            prop_assert!((offset - i128::from(ahead)).unsigned_abs() <= u128::from(wrong) + 1);
        }
    }
}
