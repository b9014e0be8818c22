//! Answers that have begun elsewhere, or before: they go on as if they had begun here.

use super::{Event, Head, Token};
use crate::schedule::{Choice, RequestId};

impl Head {
    /// Brings answers to where they were: every token goes the way of one that was just drawn.
    pub(super) fn replay(&mut self, request: RequestId, begun: Vec<Vec<Token>>) {
        let mut events = std::mem::take(&mut self.replayed);
        for (index, tokens) in (0..).zip(begun) {
            let choice = Choice { request, index };
            for token in tokens {
                self.take(choice, token, &mut |event| events.push(event));
            }
        }
        self.replayed = events;
    }

    /// Says what has come of that and was not said yet.
    pub(super) fn say_replayed(&mut self, say: &mut dyn FnMut(Event)) {
        std::mem::take(&mut self.replayed).into_iter().for_each(say);
    }
}
