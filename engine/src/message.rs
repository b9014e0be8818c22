//! What the payload of a frame says: the work of a micro-batch on its way down the pipe, and what comes back.
//!
//! A payload is the length of its description (u32), the description (postcard), and then activations as
//! little-endian floats, row by row. Everything is checked against [`MessageLimits`] before it is used; a description
//! cannot make a reader allocate more than the bytes that it came in.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::kv::SequenceId;

/// Consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The sequence.
    pub sequence: u64,
    /// Position of the first token.
    pub start: u32,
    /// Tokens.
    pub count: u32,
    /// Pages that the sequence got since its last step.
    pub new_pages: Vec<u32>,
}

/// A row that logits are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutputRequest {
    /// Its token, counted through the spans of the micro-batch.
    pub row: u32,
    /// A token whose logit is wanted in any case.
    pub target: u32,
    /// Best candidates wanted.
    pub top_k: u32,
    /// 1 / temperature, for the second log-sum-exp; 1 where it does not matter.
    pub inverse_temperature: f32,
    /// Whether all logits of the row are wanted.
    pub whole_row: bool,
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
    /// Rows of the previous micro-batch's outputs that are wanted whole after all; no spans then.
    pub fetch_rows: Vec<u32>,
}

impl Step {
    /// Tokens of all spans.
    pub fn tokens(&self) -> usize {
        self.spans.iter().map(|span| span.count as usize).sum()
    }
}

/// What the tail found for one [`OutputRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Output {
    /// Log-sum-exp of the logits.
    pub lse: f32,
    /// Log-sum-exp of the logits divided by the temperature.
    pub lse_scaled: f32,
    /// The logit of the target.
    pub target_logit: f32,
    /// The best (id, logit), by falling logit, then rising id.
    pub best: Vec<(u32, f32)>,
    /// All logits, where they were asked for.
    pub row: Option<Vec<f32>>,
}

/// What the tail sends back for every micro-batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outputs {
    /// One for each request, in order.
    pub outputs: Vec<Output>,
}

/// Bounds of a message, agreed on before a pipeline runs.
#[derive(Clone, Copy, Debug)]
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
    /// Ids of tokens.
    pub vocab: usize,
    /// Floats of a row of activations.
    pub hidden: usize,
}

/// Why a payload is refused.
#[derive(Clone, Debug, Error, PartialEq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum MessageError {
    #[error("payload of {bytes} bytes is cut short")]
    Short { bytes: usize },
    #[error("payload's description is malformed: {message}")]
    Malformed { message: String },
    #[error("{what} {found} is over the limit of {limit}")]
    Limit { what: &'static str, found: usize, limit: usize },
    #[error("{what}: {found} where {expected} were announced")]
    Count { what: &'static str, found: usize, expected: usize },
}

/// A payload of a description and activations.
pub fn encode<T: Serialize>(description: &T, activations: &[f32]) -> Vec<u8> {
    let description = postcard::to_stdvec(description).expect("plain data always has an encoding");
    let mut payload = Vec::with_capacity(4 + description.len() + 4 * activations.len());
    payload.extend((description.len() as u32).to_le_bytes());
    payload.extend(description);
    payload.extend_from_slice(bytemuck::cast_slice(activations));
    payload
}

fn decode<'a, T: Deserialize<'a>>(payload: &'a [u8]) -> Result<(T, Vec<f32>), MessageError> {
    let short = || MessageError::Short { bytes: payload.len() };
    let (length, rest) = payload.split_first_chunk::<4>().ok_or_else(short)?;
    let length = u32::from_le_bytes(*length) as usize;
    let description = rest.get(..length).ok_or_else(short)?;
    let (value, left) =
        postcard::take_from_bytes(description).map_err(|e| MessageError::Malformed { message: e.to_string() })?;
    if !left.is_empty() {
        return Err(MessageError::Malformed { message: format!("{} bytes too many", left.len()) });
    }
    let floats = rest[length..].chunks_exact(4);
    if !floats.remainder().is_empty() {
        return Err(short());
    }
    Ok((value, floats.map(|b| f32::from_le_bytes(std::array::from_fn(|i| b[i]))).collect()))
}

fn at_most(what: &'static str, found: usize, limit: usize) -> Result<(), MessageError> {
    if found > limit { Err(MessageError::Limit { what, found, limit }) } else { Ok(()) }
}

fn exactly(what: &'static str, found: usize, expected: usize) -> Result<(), MessageError> {
    if found == expected { Ok(()) } else { Err(MessageError::Count { what, found, expected }) }
}

/// A step and the activations that came with it, checked: counts and positions are within the limits, every page id
/// exists, ids are tokens. `first` says whether this stage embeds, and so gets ids in place of activations.
///
/// # Errors
/// [`MessageError`].
pub fn decode_step(payload: &[u8], limits: &MessageLimits, first: bool) -> Result<(Step, Vec<f32>), MessageError> {
    let (step, activations): (Step, Vec<f32>) = decode(payload)?;
    at_most("number of sequences", step.spans.len(), limits.sequences)?;
    at_most("number of released sequences", step.released.len(), limits.sequences)?;
    at_most("number of outputs", step.outputs.len(), limits.outputs)?;
    at_most("number of rows to fetch", step.fetch_rows.len(), limits.outputs)?;
    for row in &step.fetch_rows {
        at_most("row to fetch", *row as usize + 1, limits.outputs)?;
    }
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
    if first {
        exactly("token ids", step.ids.len(), tokens)?;
        for id in &step.ids {
            at_most("token id", *id as usize + 1, limits.vocab)?;
        }
        exactly("activations", activations.len(), 0)?;
    } else {
        exactly("activations", activations.len(), tokens * limits.hidden)?;
    }
    Ok((step, activations))
}

/// The tail's answer, checked for its size.
///
/// # Errors
/// [`MessageError`].
pub fn decode_outputs(payload: &[u8], limits: &MessageLimits) -> Result<Outputs, MessageError> {
    let (outputs, activations): (Outputs, Vec<f32>) = decode(payload)?;
    at_most("number of outputs", outputs.outputs.len(), limits.outputs)?;
    for output in &outputs.outputs {
        if let Some(row) = &output.row {
            exactly("logits of a row", row.len(), limits.vocab)?;
        }
        for (id, _) in &output.best {
            at_most("candidate id", *id as usize + 1, limits.vocab)?;
        }
    }
    exactly("activations", activations.len(), 0)?;
    Ok(outputs)
}

/// A sequence id on the wire.
impl From<SequenceId> for u64 {
    fn from(id: SequenceId) -> u64 {
        id.0
    }
}

#[cfg(test)]
mod tests;
