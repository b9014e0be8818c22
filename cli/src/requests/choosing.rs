//! How tokens are chosen, as requests and options say it: one place for the ranges.

use std::fmt;

use pp_engine::sampler::Sampling;
use serde_json::{Map, Value};

/// Tokens that a bias may be given for.
pub const BIASES_MAX: usize = 4096;
/// The largest temperature and penalties: beyond it nothing changes any more.
const MOST: f32 = 100.0;
/// The smallest `top_p` and `repetition_penalty`: 0 means nothing.
const LEAST: f32 = 1e-6;
/// Most candidates that the last stage returns with a token.
pub const LOGPROBS_MAX: u32 = 64;

/// A field of a request that says what cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The field, as a path: `messages[0].content`.
    pub param: String,
    /// What is wrong.
    pub message: String,
}

impl Invalid {
    /// A field with what is wrong with it.
    pub fn new(param: impl Into<String>, message: impl Into<String>) -> Invalid {
        Invalid { param: param.into(), message: message.into() }
    }

    /// A field that is not as it must be.
    pub fn unless(ok: bool, param: &str, expected: &str) -> Result<(), Invalid> {
        if ok { Ok(()) } else { Err(Invalid::new(param, format!("expected {expected}"))) }
    }
}

/// `temperature: expected 0 to 100`
impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.param, self.message)
    }
}

impl std::error::Error for Invalid {}

/// A number that is out of its range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OutOfRange {
    /// As requests call it.
    pub name: &'static str,
    /// What it is.
    pub value: f32,
    /// What it should be.
    pub expected: &'static str,
}

/// Whether all numbers are in their ranges.
///
/// # Errors
/// Names the first that is not.
pub fn check(sampling: &Sampling) -> Result<(), OutOfRange> {
    let s = sampling;
    let range = |name, value: f32, ok: bool, expected| {
        if ok && value.is_finite() { Ok(()) } else { Err(OutOfRange { name, value, expected }) }
    };
    range("temperature", s.temperature, (0.0..=MOST).contains(&s.temperature), "0 to 100")?;
    range("top_p", s.top_p, (LEAST..=1.0).contains(&s.top_p), "0.000001 to 1")?;
    range("min_p", s.min_p, (0.0..=1.0).contains(&s.min_p), "0 to 1")?;
    let repetition = (LEAST..=MOST).contains(&s.repetition_penalty);
    range("repetition_penalty", s.repetition_penalty, repetition, "0.000001 to 100")?;
    let penalty = -MOST..=MOST;
    range("presence_penalty", s.presence_penalty, penalty.contains(&s.presence_penalty), "-100 to 100")?;
    range("frequency_penalty", s.frequency_penalty, penalty.contains(&s.frequency_penalty), "-100 to 100")
}

/// What a request says of it; the rest is as elsewhere.
#[derive(Clone, Copy, Debug, Default)]
pub struct Choosing<'a> {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// By token id.
    pub logit_bias: Option<&'a Map<String, Value>>,
    pub seed: Option<u64>,
    /// Candidates with their log-probabilities.
    pub candidates: u32,
}

impl Choosing<'_> {
    /// `defaults` with what the request says, for a vocabulary of so many tokens.
    ///
    /// # Errors
    /// Names the field that is out of range.
    pub fn sampling(&self, defaults: &Sampling, vocab: usize) -> Result<Sampling, Invalid> {
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            logit_bias: self.logit_bias.map_or(Ok(Vec::new()), |biases| logit_bias(biases, vocab))?,
            repetition_penalty: self.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: self.seed.unwrap_or(defaults.seed),
            candidates: self.candidates,
        };
        let invalid = |range: OutOfRange| Invalid::new(range.name, format!("expected {}", range.expected));
        check(&sampling).map_err(invalid)?;
        Invalid::unless(sampling.top_k <= i32::MAX as u32, "top_k", "0 to 2147483647")?;
        Invalid::unless(sampling.candidates <= LOGPROBS_MAX, "logprobs", "0 to 64")?;
        Ok(sampling)
    }
}

/// Biases by token id, ascending.
fn logit_bias(biases: &Map<String, Value>, vocab: usize) -> Result<Vec<(u32, f32)>, Invalid> {
    let invalid = |message: String| Invalid::new("logit_bias", message);
    if biases.len() > BIASES_MAX {
        return Err(invalid(format!("it names {} tokens, at most {BIASES_MAX} may be", biases.len())));
    }
    let mut known = Vec::with_capacity(biases.len());
    for (id, bias) in biases {
        let token = id.parse::<u32>().ok().filter(|token| (*token as usize) < vocab);
        let token = token.ok_or_else(|| invalid(format!("{id:?} is no token id below {vocab}")))?;
        let bias = bias.as_f64().map(|bias| bias as f32).filter(|bias| bias.is_finite());
        known.push((token, bias.ok_or_else(|| invalid(format!("that of token {token} is not a number")))?));
    }
    known.sort_by_key(|(token, _)| *token);
    known.dedup_by_key(|(token, _)| *token);
    Ok(known)
}
