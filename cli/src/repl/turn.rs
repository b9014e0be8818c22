//! How an answer came about, for people and for programs.

use pp_engine::head::{Answer, FinishReason};
use serde::Serialize;

use super::thoughts;
use crate::recovery::Recovered;

/// One turn of a conversation.
#[derive(Clone, Debug, Serialize)]
pub struct TurnReport {
    /// Its number since the program began, from 1.
    pub turn: usize,
    /// All of the answer, thoughts included.
    pub text: String,
    /// What of it was thought, without tags.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thoughts: Option<String>,
    pub finish_reason: &'static str,
    /// The ids of the answer.
    pub tokens: Vec<u32>,
    /// The ids of the whole conversation that was answered.
    pub prompt_ids: Vec<u32>,
    pub prompt_tokens: usize,
    /// Of the prompt: those whose keys and values were there already, …
    pub cached_tokens: usize,
    /// … and those that were computed.
    pub new_tokens: usize,
    /// Positions that a conversation can have.
    pub context: usize,
    /// Messages that were dropped so that it fits.
    pub dropped_messages: usize,
    pub seed: u64,
    pub timings: Timings,
    /// Stages that were lost meanwhile, and what became of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recoveries: Vec<Recovered>,
}

/// Rates are null where too few tokens were made to have one.
#[derive(Clone, Debug, Serialize)]
pub struct Timings {
    pub first_token_seconds: Option<f64>,
    /// Of the new tokens of the prompt.
    pub prefill_tokens_per_s: Option<f64>,
    pub decode_tokens_per_s: Option<f64>,
    pub total_seconds: f64,
}

/// What a report is made of beside the answer.
pub struct Asked {
    pub turn: usize,
    pub prompt_ids: Vec<u32>,
    pub context: usize,
    pub dropped_messages: usize,
    pub seed: u64,
    /// Whether the answer began within thoughts.
    pub open: bool,
}

impl TurnReport {
    /// Of an answer.
    pub fn of(answer: &Answer, asked: Asked, recoveries: Vec<Recovered>) -> TurnReport {
        let times = answer.timings;
        let first = (!answer.tokens.is_empty()).then_some(times.first_token_seconds);
        let new_tokens = answer.prompt_tokens - answer.cached_tokens;
        let rate = |tokens: usize, seconds: f64| (tokens > 0 && seconds > 0.0).then(|| tokens as f64 / seconds);
        TurnReport {
            turn: asked.turn,
            text: answer.text.clone(),
            thoughts: thoughts::divided(&answer.text, asked.open).0,
            finish_reason: answer.finish_reason.name(),
            tokens: answer.tokens.iter().map(|token| token.id).collect(),
            prompt_ids: asked.prompt_ids,
            prompt_tokens: answer.prompt_tokens,
            cached_tokens: answer.cached_tokens,
            new_tokens,
            context: asked.context,
            dropped_messages: asked.dropped_messages,
            seed: asked.seed,
            timings: Timings {
                first_token_seconds: first,
                prefill_tokens_per_s: first.and_then(|seconds| rate(new_tokens, seconds)),
                decode_tokens_per_s: rate(answer.tokens.len().saturating_sub(1), times.decode_seconds),
                total_seconds: times.total_seconds,
            },
            recoveries,
        }
    }

    /// Positions that are taken.
    fn used(&self) -> usize {
        self.prompt_tokens + self.tokens.len()
    }

    /// Whether the answer ended because the context did.
    pub fn is_full(&self) -> bool {
        self.finish_reason == FinishReason::Length.name() && self.used() > self.context
    }

    /// `cached 512, new 37`
    fn prompt(&self) -> String {
        format!("cached {}, new {}", self.cached_tokens, self.new_tokens)
    }

    /// One line, under the answer.
    pub fn line(&self) -> String {
        let (t, first) = (&self.timings, seconds(self.timings.first_token_seconds));
        let mut line = format!(
            "{}; {} tokens, {}; first after {first}; context {} of {}",
            self.prompt(),
            self.tokens.len(),
            rate(t.decode_tokens_per_s),
            self.used().min(self.context),
            self.context
        );
        if self.finish_reason != FinishReason::Stop.name() {
            line.push_str(&format!(" ({})", self.finish_reason));
        }
        line
    }

    /// Several lines, when it is asked for.
    pub fn lines(&self) -> String {
        let t = &self.timings;
        format!(
            "prompt   {} tokens: {}\nanswer   {} tokens ({}), seed {}\nspeed    prefill {}   decode {}   first token {}   \
             in all {:.2} s\ncontext  {} of {} tokens",
            self.prompt_tokens,
            self.prompt(),
            self.tokens.len(),
            self.finish_reason,
            self.seed,
            rate(t.prefill_tokens_per_s),
            rate(t.decode_tokens_per_s),
            seconds(t.first_token_seconds),
            t.total_seconds,
            self.used().min(self.context),
            self.context,
        )
    }
}

fn rate(rate: Option<f64>) -> String {
    rate.map_or("-".to_owned(), |rate| format!("{rate:.1} tokens/s"))
}

fn seconds(seconds: Option<f64>) -> String {
    seconds.map_or("-".to_owned(), |seconds| format!("{seconds:.2} s"))
}
