//! What the payload of a frame says: the work of a micro-batch on its way down the pipe, and what comes back.
//!
//! A payload is the length of its description (u32), the description (postcard), and then activations, row by row, as
//! [`Wire`] has them. Everything is checked against [`MessageLimits`] before it is used; a description cannot make a
//! reader allocate more than the bytes that it came in.

use std::borrow::Cow;

use pp_shaders::Edit;
use pp_shaders::profile::TOP_K;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::layout::StageSpec;
use crate::wire::{Wire, WireError};

/// Version of what a payload says: raised whenever one of an older version would be misread.
pub const MESSAGE_VERSION: u32 = 3;

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The request that it belongs to, for logs.
    pub request: u64,
    /// The sequence.
    pub sequence: u64,
    /// Position of the first token.
    pub start: u32,
    /// Tokens.
    pub count: u32,
    /// Pages that the sequence got since its last step.
    pub new_pages: Vec<u32>,
}

/// A change to one logit l of a row: it becomes (l + bias) f - subtract, where f is 1 / repetition for a positive
/// l + bias, else repetition. Each operation is rounded to a float.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogitEdit {
    /// Whose logit.
    pub id: u32,
    /// Added; -inf bans the token.
    pub bias: f32,
    /// Divides what is positive and multiplies the rest; 1 does nothing.
    pub repetition: f32,
    /// Subtracted last.
    pub subtract: f32,
}

impl LogitEdit {
    /// Largest bias and subtrahend: logits stay finite, also divided by the lowest temperature.
    pub const TERM_MAX: f32 = 1e30;
    /// Largest factor, and the inverse of the smallest.
    pub const REPETITION_MAX: f32 = 1e3;

    /// An edit, with its numbers brought into their ranges; what is not a number does nothing.
    pub fn new(id: u32, bias: f32, repetition: f32, subtract: f32) -> LogitEdit {
        let or = |value: f32, nothing: f32| if value.is_nan() { nothing } else { value };
        let (term, factor) = (LogitEdit::TERM_MAX, LogitEdit::REPETITION_MAX);
        LogitEdit {
            id,
            bias: or(bias, 0.0).min(term),
            repetition: or(repetition, 1.0).clamp(1.0 / factor, factor),
            subtract: or(subtract, 0.0).clamp(-term, term),
        }
    }

    /// What becomes of a logit: the same bits here and on a device.
    pub fn apply(&self, logit: f32) -> f32 {
        self.at(0).apply(logit)
    }

    /// As the device takes it, for the logit at `place`.
    pub fn at(&self, place: u32) -> Edit {
        let LogitEdit { bias, repetition, subtract, .. } = *self;
        Edit { place, bias, repetition, reciprocal: 1.0 / repetition, subtract }
    }

    fn is_in_range(&self) -> bool {
        *self == LogitEdit::new(self.id, self.bias, self.repetition, self.subtract)
    }
}

/// A row that logits are wanted for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputRequest {
    /// Its token, counted through the spans of the micro-batch.
    pub row: u32,
    /// A token whose logit is wanted in any case.
    pub target: u32,
    /// Best candidates wanted, of the edited logits.
    pub top_k: u32,
    /// 1 / temperature, for the second log-sum-exp; 1 where it does not matter.
    pub inverse_temperature: f32,
    /// Whether all logits of the row are wanted, as they are before the edits.
    pub whole_row: bool,
    /// What is done to the row first, by rising id.
    pub edits: Vec<LogitEdit>,
}

/// A micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Sequences whose pages are free again; before anything else happens.
    pub released: Vec<u64>,
    /// Tokens of each sequence.
    pub spans: Vec<Span>,
    /// Token ids of all spans, for the stage that embeds.
    pub ids: Vec<u32>,
    /// Rows that logits are wanted for.
    pub outputs: Vec<OutputRequest>,
    /// Where it only restores keys and values that were lost: it is computed in so many of the model's layers. Stages behind
    /// these hear what is released, and nothing else.
    pub until: Option<u32>,
    /// The stage that has what it hands on in its log, where it restores: it computes nothing, nor do those before it.
    pub from: Option<u32>,
}

impl Step {
    /// Whether a stage computes it.
    pub fn is_computed_by(&self, stage: &StageSpec) -> bool {
        self.from.is_none_or(|from| (from as usize) < stage.index) && self.layers_of(stage) > 0
    }

    /// How many of a stage's layers it concerns, from the first one on.
    pub fn layers_of(&self, stage: &StageSpec) -> usize {
        let end = self.until.map_or(stage.layers.end, |until| stage.layers.end.min(until as usize));
        end.saturating_sub(stage.layers.start)
    }

    /// What the stage behind `stage` is told.
    pub fn behind(self, stage: &StageSpec) -> Step {
        if self.until.is_some_and(|until| until as usize <= stage.layers.end) {
            return Step { released: self.released, until: self.until, ..Step::default() };
        }
        Step { ids: Vec::new(), ..self }
    }

    /// Requests that the spans belong to, for logs.
    pub fn requests(&self) -> Vec<u64> {
        self.spans.iter().map(|span| span.request).collect()
    }

    /// Tokens of all spans.
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.count as usize).sum()
    }
}

/// A token that may come next.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// The token.
    pub id: u32,
    /// Its logit, edited; not divided by the temperature.
    pub logit: f32,
    /// Its logit before the edits.
    pub raw: f32,
}

/// What the tail found for one [`OutputRequest`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Log-sum-exp of the raw logits.
    pub lse: f32,
    /// Log-sum-exp of the edited logits divided by the temperature.
    pub lse_processed: f32,
    /// The raw logit of the target.
    pub target_logit: f32,
    /// The best, by falling edited logit, then rising id. Fewer than wanted where no others are left.
    pub best: Vec<Candidate>,
    /// Of the edited tokens that are not among the best, the first by falling raw logit, as many as `best` may have.
    pub beside: Vec<Candidate>,
    /// All raw logits, where they were asked for.
    pub row: Option<Vec<f32>>,
}

/// What the tail sends back for every micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outputs {
    /// One for each request, in order.
    pub outputs: Vec<Output>,
}

/// Bounds of a message and the type of its activations, agreed on before a pipeline runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageLimits {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Sequences that hold pages.
    pub sequences: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Pages of a stage.
    pub pages: usize,
    /// Rows of logits of a micro-batch.
    pub outputs: usize,
    /// Edits of all its rows together.
    pub edits: usize,
    /// Ids of tokens.
    pub vocab: usize,
    /// Values of a row of activations.
    pub hidden: usize,
    /// How activations are sent.
    pub wire: Wire,
}

impl MessageLimits {
    /// Bytes of the largest payload of either kind: what a hop must be able to carry. A number of postcard takes at most
    /// five bytes for 32 bits and ten for 64.
    pub fn payload_bytes_max(&self) -> usize {
        let spans = self.sequences * (10 + 10 + 5 + 5 + 5 + 10) + 5 * self.pages;
        let requests = self.outputs * (5 + 5 + 5 + 4 + 1 + 5) + self.edits * (5 + 12);
        let step = spans + requests + 5 * self.tokens + self.wire.bytes_max(self.tokens, self.hidden);
        let candidates = 2 * (TOP_K as usize * (5 + 8) + 5);
        let outputs = self.outputs * (12 + candidates + 6 + 4 * self.vocab);
        64 + step.max(outputs)
    }
}

/// Why a payload is refused.
#[derive(Clone, Debug, Error, PartialEq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum MessageError {
    #[error("payload of {bytes} bytes is cut short")]
    Short { bytes: usize },
    #[error("payload's description is malformed: {message}")]
    Malformed { message: String },
    #[error("{what} {found} is over the limit of {limit}")]
    Limit { what: Cow<'static, str>, found: usize, limit: usize },
    #[error("{what}: {found} where {expected} were announced")]
    Count { what: Cow<'static, str>, found: usize, expected: usize },
    #[error(transparent)]
    Activations(#[from] WireError),
}

/// The payload of a step and the activations of its tokens, [tokens, hidden]; none for the stage that embeds.
///
/// # Panics
/// When the last row of activations is not whole.
pub fn encode_step(step: &Step, activations: &[f32], limits: &MessageLimits) -> Vec<u8> {
    let mut payload = describe(step, limits.wire.bytes(activations.len() / limits.hidden.max(1), limits.hidden));
    limits.wire.encode(activations, limits.hidden, &mut payload);
    payload
}

/// The payload of the tail's answer.
pub fn encode_outputs(outputs: &Outputs) -> Vec<u8> {
    describe(outputs, 0)
}

/// The beginning of a payload, with room for so many bytes of activations.
fn describe<T: Serialize>(description: &T, room: usize) -> Vec<u8> {
    let description = postcard::to_stdvec(description).expect("plain data always has an encoding");
    let mut payload = Vec::with_capacity(4 + description.len() + room);
    payload.extend((description.len() as u32).to_le_bytes());
    payload.extend(description);
    payload
}

/// A payload's description, and the bytes behind it.
fn split<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<(T, &'a [u8]), MessageError> {
    let short = || MessageError::Short { bytes: payload.len() };
    let (length, rest) = payload.split_first_chunk::<4>().ok_or_else(short)?;
    let (description, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(short)?;
    let (value, left) =
        postcard::take_from_bytes(description).map_err(|e| MessageError::Malformed { message: e.to_string() })?;
    if !left.is_empty() {
        return Err(MessageError::Malformed { message: format!("{} bytes too many", left.len()) });
    }
    Ok((value, rest))
}

fn at_most(what: &'static str, found: usize, limit: usize) -> Result<(), MessageError> {
    if found > limit { Err(MessageError::Limit { what: what.into(), found, limit }) } else { Ok(()) }
}

fn exactly(what: &'static str, found: usize, expected: usize) -> Result<(), MessageError> {
    if found == expected { Ok(()) } else { Err(MessageError::Count { what: what.into(), found, expected }) }
}

/// A step and the activations that came with it, checked: counts and positions are within the limits, every page id
/// exists, ids are tokens. `first` says whether this stage embeds, and so gets ids in place of activations.
///
/// # Errors
/// [`MessageError`].
pub fn decode_step(payload: &[u8], limits: &MessageLimits, first: bool) -> Result<(Step, Vec<f32>), MessageError> {
    let (step, activations): (Step, &[u8]) = split(payload)?;
    at_most("number of sequences", step.spans.len(), limits.sequences)?;
    at_most("number of released sequences", step.released.len(), limits.sequences)?;
    at_most("number of outputs", step.outputs.len(), limits.outputs)?;
    let mut tokens = 0;
    for span in &step.spans {
        at_most("position", span.start as usize + span.count as usize, limits.context)?;
        for page in &span.new_pages {
            at_most("page", *page as usize + 1, limits.pages)?;
        }
        tokens += span.count as usize;
        at_most("number of tokens", tokens, limits.tokens)?;
    }
    for output in &step.outputs {
        at_most("output row", output.row as usize + 1, tokens)?;
        at_most("target id", output.target as usize + 1, limits.vocab)?;
    }
    check_edits(&step.outputs, limits)?;
    if first {
        exactly("token ids", step.ids.len(), tokens)?;
        for id in &step.ids {
            at_most("token id", *id as usize + 1, limits.vocab)?;
        }
        exactly("bytes of activations", activations.len(), 0)?;
        return Ok((step, Vec::new()));
    }
    if step.from.is_some() && activations.is_empty() {
        // Nobody has computed it yet.
        return Ok((step, Vec::new()));
    }
    let activations = limits.wire.decode(activations, tokens, limits.hidden)?;
    Ok((step, activations))
}

/// Ids rise, so that no logit is edited twice.
fn check_edits(outputs: &[OutputRequest], limits: &MessageLimits) -> Result<(), MessageError> {
    at_most("number of edits", outputs.iter().map(|output| output.edits.len()).sum(), limits.edits)?;
    let malformed = |message: String| Err(MessageError::Malformed { message });
    for edits in outputs.iter().map(|output| &output.edits) {
        if let Some(pair) = edits.windows(2).find(|pair| pair[0].id >= pair[1].id) {
            return malformed(format!("an edit of token {} behind one of {}", pair[1].id, pair[0].id));
        }
        if let Some(edit) = edits.iter().find(|edit| !edit.is_in_range()) {
            return malformed(format!("out of range: {edit:?}"));
        }
        at_most("edited id", edits.last().map_or(0, |edit| edit.id as usize + 1), limits.vocab)?;
    }
    Ok(())
}

/// The tail's answer, checked for its size.
///
/// # Errors
/// [`MessageError`].
pub fn decode_outputs(payload: &[u8], limits: &MessageLimits) -> Result<Outputs, MessageError> {
    let (outputs, activations): (Outputs, &[u8]) = split(payload)?;
    at_most("number of outputs", outputs.outputs.len(), limits.outputs)?;
    for output in &outputs.outputs {
        if let Some(row) = &output.row {
            exactly("logits of a row", row.len(), limits.vocab)?;
        }
        for candidate in output.best.iter().chain(&output.beside) {
            at_most("candidate id", candidate.id as usize + 1, limits.vocab)?;
        }
    }
    exactly("bytes of activations", activations.len(), 0)?;
    Ok(outputs)
}

#[cfg(test)]
mod tests;
