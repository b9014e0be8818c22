//! What goes into the scheduler and what comes out of it.

use pp_shaders::PAGE;
use thiserror::Error;

use crate::trace::Nanos;

/// A request, in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One of the answers that a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Choice {
    /// The request.
    pub request: RequestId,
    /// Which of its answers.
    pub index: u32,
}

/// Bounds that the scheduler keeps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Stages of the pipeline.
    pub stages: usize,
    /// Sequences that run at once: they hold pages on every stage.
    pub sequences: usize,
    /// Tokens of a micro-batch.
    pub batch_tokens: usize,
    /// Tokens that kernels compute at once: a micro-batch of a prompt takes as long as one of the next multiple.
    pub tile: usize,
    /// Rows of logits of a micro-batch.
    pub outputs: usize,
    /// KV pages of the stage that has fewest.
    pub pages: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Micro-batches that the pipe takes before one must come back.
    pub in_flight: usize,
    /// Answers that wait for a place at once; those that have one are not counted.
    pub queue: usize,
    /// Whether pages of ended sequences are kept for prompts that begin alike.
    pub prefix_cache: bool,
    /// Decode groups, in place of those that the measured costs suggest.
    pub groups: Option<usize>,
}

impl Limits {
    /// Tokens of a chunk at least, unless less is left: two tiles, and no more than a page.
    pub(super) fn least_chunk(&self) -> usize {
        if self.tile > 1 { PAGE.min(2 * self.tile) } else { PAGE }
    }

    /// Tokens that rather go along than be a chunk of their own: less than a tile, and no more than half a page.
    pub(super) fn left_over(&self) -> usize {
        if self.tile > 1 { (PAGE / 2).min(self.tile - 1) } else { PAGE / 2 }
    }

    /// Positions that one sequence can reach.
    pub fn capacity(&self) -> usize {
        self.context.min(self.pages * PAGE)
    }
}

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Answers wanted, each a sequence of its own that shares the prompt's full pages.
    pub choices: u32,
    /// When it is given up.
    pub deadline: Option<Nanos>,
}

/// Why a request is not taken.
#[derive(Clone, Debug, Error, PartialEq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Refused {
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error("no token was asked for: max_tokens is 0")]
    NothingWanted,
    #[error(
        "the prompt has {tokens} tokens, the context holds {context}: shorten it, or raise --ctx if the model allows"
    )]
    PromptTooLong { tokens: usize, context: usize },
    #[error("the prompt has {tokens} tokens, the KV cache holds {capacity}: shorten it, or raise --kv-tokens")]
    NeverFits { tokens: usize, capacity: usize },
    #[error("busy: {queued} requests wait already, at most {limit} may; try again in {retry_seconds:.0} s")]
    Busy { queued: usize, limit: usize, retry_seconds: f64 },
    #[error("{choices} answers were asked for, at most {limit} run at once (--max-sequences)")]
    TooManyChoices { choices: usize, limit: usize },
}

/// Consecutive tokens of one sequence, in a micro-batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Whose.
    pub choice: Choice,
    /// The sequence's name on the stages: new each time that it is admitted.
    pub sequence: u64,
    /// Position of the first token.
    pub start: usize,
    /// The tokens.
    pub ids: Vec<u32>,
    /// Pages that the sequence got since its last part.
    pub new_pages: Vec<u32>,
    /// Whether a token is to be drawn after the last one.
    pub draws: bool,
    /// Whether the draw needs all logits: an earlier one could not be decided without.
    pub whole_row: bool,
}

/// A micro-batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// The decode group: no other micro-batch in flight has it.
    pub group: u32,
    /// Sequences whose tables the stages may forget.
    pub released: Vec<u64>,
    /// What is computed.
    pub parts: Vec<Part>,
    /// Tokens of prompts in it.
    pub prefill_tokens: usize,
    /// Sequences that decode in it.
    pub decode_tokens: usize,
    /// Restores what stages have lost ([`super::Scheduler::recover`]): it is computed in so many of the model's layers, and
    /// nothing is drawn from it.
    pub until: Option<usize>,
    /// The stage that has its rows in the log of what it handed on: it and those before compute nothing.
    pub from: Option<usize>,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Send this.
    Send(Batch),
    /// Take an answer first.
    Wait {
        /// Whether requests wait for pages.
        for_pages: bool,
    },
    /// Nothing is running and nothing waits.
    Idle,
}

/// Numbers for people.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// Requests and answers that wait for admission.
    pub waiting: usize,
    /// Sequences that hold pages.
    pub running: usize,
    /// Those of them that decode.
    pub decoding: usize,
    /// Decode groups.
    pub groups: usize,
    /// Micro-batches in the pipe.
    pub in_flight: usize,
    /// Pages held, idle with remembered contents, and all.
    pub held_pages: usize,
    /// As above.
    pub idle_pages: usize,
    /// As above.
    pub pages: usize,
    /// Sequences that lost their pages to older ones, so far.
    pub preemptions: u64,
    /// Prompt tokens that the prefix cache spared, so far.
    pub spared_tokens: u64,
}

impl Status {
    /// Whether one sequence has the pipe for itself: it then keeps one stage at a time busy.
    pub fn single_stream(&self) -> bool {
        self.running == 1 && self.waiting == 0
    }
}
