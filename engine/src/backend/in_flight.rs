//! Runs between submission and collection, for every backend.

use std::collections::VecDeque;
use std::time::Instant;

use super::{RUNS_MAX, Ticket};

/// Runs that were submitted and not collected, oldest first.
pub(super) struct InFlight<T> {
    runs: VecDeque<(Instant, T)>,
    /// Tickets given so far.
    given: u64,
    /// When the run that was collected last had finished.
    finished: Option<Instant>,
}

impl<T> Default for InFlight<T> {
    fn default() -> InFlight<T> {
        InFlight { runs: VecDeque::new(), given: 0, finished: None }
    }
}

impl<T> InFlight<T> {
    /// Whether every run has been collected.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Panics where a run has not been collected.
    pub fn assert_empty(&self) {
        assert!(self.runs.is_empty(), "{} runs wait to be collected, none may", self.runs.len());
    }

    /// Panics where one run more would be too many.
    pub fn assert_room(&self) {
        assert!(self.runs.len() < RUNS_MAX, "{} runs wait to be collected, at most {RUNS_MAX} may", self.runs.len());
    }

    /// Remembers a run that was submitted at an instant.
    pub fn push(&mut self, submitted: Instant, run: T) -> Ticket {
        self.assert_room();
        self.runs.push_back((submitted, run));
        self.given += 1;
        Ticket(self.given - 1)
    }

    /// The oldest run, which must be the ticket's, and when the device could begin it: it was submitted by then, and
    /// the one before it had finished.
    pub fn pop(&mut self, ticket: Ticket) -> (Instant, T) {
        let oldest = self.given - self.runs.len() as u64;
        let (submitted, run) = self.runs.pop_front().expect("a ticket is collected once");
        assert_eq!(ticket.0, oldest, "runs are collected in the order they were submitted in");
        (self.finished.map_or(submitted, |finished| finished.max(submitted)), run)
    }

    /// The run that was popped last finished at an instant.
    pub fn finish(&mut self, finished: Instant) {
        self.finished = Some(finished);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_run_starts_when_it_is_submitted_and_the_one_before_is_done() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let mut runs = InFlight::default();
        let a = runs.push(at(0), 'a');
        let b = runs.push(at(1), 'b');
        assert_eq!(runs.pop(a), (at(0), 'a'));
        runs.finish(at(5));
        let c = runs.push(at(9), 'c');
        assert_eq!(runs.pop(b), (at(5), 'b'));
        runs.finish(at(7));
        assert_eq!(runs.pop(c), (at(9), 'c'));
        assert!(runs.is_empty());
    }

    #[test]
    #[should_panic(expected = "at most 2")]
    fn a_third_run_is_too_many() {
        let mut runs = InFlight::default();
        let _tickets = [(); 3].map(|()| runs.push(Instant::now(), ()));
    }

    #[test]
    #[should_panic(expected = "in the order")]
    fn runs_are_not_collected_out_of_order() {
        let mut runs = InFlight::default();
        let (_first, second) = (runs.push(Instant::now(), ()), runs.push(Instant::now(), ()));
        runs.pop(second);
    }
}
