//! What a head is told to keep to.

use crate::pipeline::Pipeline;
use crate::schedule::Limits;

/// Choices of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadOptions {
    /// Sequences that run at once; at most those that the stages were opened for.
    pub sequences: usize,
    /// Tokens of a micro-batch; at most those that the stages were opened for.
    pub batch_tokens: usize,
    /// Requests that may wait.
    pub queue: usize,
    /// Whether to remember the pages of what has ended.
    pub prefix_cache: bool,
    /// Decode groups, where the scheduler should not choose.
    pub groups: Option<usize>,
    /// Whether what was asked is kept when the pipeline fails, for another one ([`super::Head::recover`]).
    pub recovers: bool,
    /// Whether a worker's stage that takes much longer than it used to counts as lost, where it recovers.
    pub replaces_stragglers: bool,
}

impl HeadOptions {
    /// What a pipeline's scheduler keeps to.
    pub(super) fn limits(&self, pipeline: &Pipeline) -> Limits {
        let stages = pipeline.limits();
        Limits {
            stages: pipeline.reports().len(),
            sequences: self.sequences.clamp(1, stages.sequences),
            batch_tokens: self.batch_tokens.clamp(1, stages.tokens),
            outputs: stages.outputs,
            tile: pipeline.tile(),
            pages: stages.pages,
            context: stages.context,
            in_flight: pipeline.room(),
            queue: self.queue,
            prefix_cache: self.prefix_cache,
            groups: self.groups,
        }
    }
}

impl Default for HeadOptions {
    /// As much as the stages take.
    fn default() -> HeadOptions {
        HeadOptions {
            sequences: usize::MAX,
            batch_tokens: usize::MAX,
            queue: 1024,
            prefix_cache: true,
            groups: None,
            recovers: false,
            replaces_stragglers: false,
        }
    }
}
