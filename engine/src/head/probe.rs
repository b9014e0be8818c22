//! A micro-batch of nothing that crosses every stage: whether the pipe is alive, at the cost of a few bytes a hop.

use super::{Head, HeadError, InFlight};
use crate::message::Step;

/// What has come through the pipe.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Crossings {
    /// A probe is to be sent.
    wanted: bool,
    /// Micro-batches that were answered.
    answered: u64,
    /// Probes among them.
    probes: u64,
}

impl Crossings {
    pub(super) fn answered(&mut self, is_probe: bool) {
        self.answered += 1;
        self.probes += u64::from(is_probe);
    }

    /// What was in the pipe was given up, with a probe in it.
    pub(super) fn lost(&mut self, with_probe: bool) {
        self.wanted |= with_probe;
    }
}

impl Head {
    /// Sends an empty micro-batch down the pipe with the next [`Head::turn`], behind what is in it. It has come back when
    /// [`Head::probed`] has risen.
    pub fn probe(&mut self) {
        self.crossings.wanted = true;
    }

    /// Probes that have crossed every stage so far.
    pub fn probed(&self) -> u64 {
        self.crossings.probes
    }

    /// Whether a probe is in the pipe, or to be sent.
    pub(super) fn is_probing(&self) -> bool {
        self.crossings.wanted || self.in_flight.iter().any(|flight| flight.is_probe)
    }

    /// Micro-batches of any kind that have crossed every stage so far.
    pub fn crossed(&self) -> u64 {
        self.crossings.answered
    }

    /// Looks whether a stage has failed while nothing was asked of it; if so, nothing is taken until [`Head::recover`].
    ///
    /// # Errors
    /// [`HeadError::Pipeline`].
    pub fn check(&mut self) -> Result<(), HeadError> {
        self.pipeline.check().map_err(|error| {
            self.lost(error.to_string());
            error.into()
        })
    }

    /// Sends the probe that is wanted. True while a probe takes the room that the scheduler counts on.
    pub(super) fn must_wait_for_probe(&mut self) -> Result<bool, HeadError> {
        if self.crossings.wanted && self.pipeline.has_room() {
            let sent = self.recorder.now();
            let step = self.pipeline.send(&Step::default(), 0)?;
            self.crossings.wanted = false;
            self.in_flight.push_back(InFlight {
                step,
                tokens: 0,
                attended: 0.0,
                expected: Some(0.0),
                prefilled: Vec::new(),
                sent,
                forming: 0.0,
                restores: false,
                is_probe: true,
            });
        }
        Ok(self.pipeline.room() == 0 && self.in_flight.iter().any(|flight| flight.is_probe))
    }
}
