//! What is asked of a head, and what it says.

use std::time::Duration;

use crate::constraint::Constraint;
use crate::sampler::Sampling;
use crate::schedule::{Choice, RequestId};

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it, or a stop string came.
    Stop,
    /// The wanted number of tokens, or the end of the context.
    Length,
    /// The user cancelled it.
    Cancelled,
    /// Its deadline passed.
    Deadline,
    /// The pipeline failed.
    Failed,
    /// Its constraint became too complex to go on.
    Constraint,
}

impl FinishReason {
    /// As OpenAI's API spells it (`cancelled`, `deadline`, `error` and `constraint` are ours).
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
            FinishReason::Deadline => "deadline",
            FinishReason::Failed => "error",
            FinishReason::Constraint => "constraint",
        }
    }
}

/// What is wanted.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Answers wanted; 0 is 1.
    pub choices: u32,
    /// Tokens of an answer at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end an answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether the end-of-sequence tokens end an answer.
    pub stop_at_eos: bool,
    /// What an answer must look like. It then ends where nothing can follow, or with an end-of-sequence token.
    pub constraint: Option<Constraint>,
    /// Special tokens whose text is part of the answer's, such as those that begin a call of a tool.
    pub shown_specials: Vec<u32>,
    /// What there is of its answers already, of as many as have begun: they go on behind it, and say what they would
    /// have said without the interruption.
    pub begun: Vec<Vec<Token>>,
    /// How long it may take, from submission.
    pub deadline: Option<Duration>,
}

/// One token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Log-probability under the raw logits, where the candidates show it.
    pub logprob: Option<f32>,
    /// Best candidates with their log-probabilities.
    pub candidates: Vec<(u32, f32)>,
}

/// Seconds that parts of a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From submission to the first token.
    pub first_token_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
    /// From submission to the end.
    pub total_seconds: f64,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its tokens; an end-of-sequence token is the last one.
    pub tokens: Vec<Token>,
    /// Its text, without special tokens and stop strings.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those that were found in the prefix cache.
    pub cached_tokens: usize,
    /// How long it took.
    pub timings: Timings,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// So much of a prompt is done.
    Prefill {
        /// Whose.
        request: RequestId,
        /// Tokens done.
        done: usize,
        /// Tokens in all.
        total: usize,
    },
    /// The next token of an answer. Its text follows as soon as that is certain, which may be with a later token.
    Token {
        /// Whose.
        choice: Choice,
        /// The token.
        token: Token,
    },
    /// More text of an answer; never half a character.
    Text {
        /// Whose.
        choice: Choice,
        /// The text.
        text: String,
    },
    /// An answer is complete.
    Done {
        /// Whose.
        choice: Choice,
        /// The answer.
        answer: Answer,
    },
}

/// What a [`Head::turn`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// An answer of the pipe was taken.
    Progress,
    /// None came in time.
    Quiet,
    /// Nothing is asked for.
    Idle,
}
