//! What a journal's records say, as bytes and back.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Asked, Found, Number};
use crate::head::Token;

/// Tokens of a record at most, where a file is written anew.
const TOKENS_MAX: usize = 1 << 16;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Record {
    /// Something was asked.
    Asked(Number, Asked),
    /// The next tokens of an answer.
    Tokens {
        number: Number,
        answer: u32,
        /// How many there were before.
        from: u64,
        ids: Vec<u32>,
        /// Of each token, where log-probabilities were asked for.
        scores: Vec<Score>,
    },
    /// All answers are there.
    Complete(Number),
    /// Nobody wants to know of it any more.
    Forgotten(Number),
}

/// A token's log-probability, and those of the likeliest in its place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Score {
    logprob: Option<f32>,
    candidates: Vec<(u32, f32)>,
}

impl Record {
    pub(super) fn tokens(number: Number, answer: u32, from: usize, tokens: &[Token], is_scored: bool) -> Record {
        let score = |token: &Token| Score { logprob: token.logprob, candidates: token.candidates.clone() };
        Record::Tokens {
            number,
            answer,
            from: from as u64,
            ids: tokens.iter().map(|token| token.id).collect(),
            scores: if is_scored { tokens.iter().map(score).collect() } else { Vec::new() },
        }
    }

    /// Appends it.
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        let encoded = postcard::to_extend(self, std::mem::take(bytes));
        *bytes = encoded.expect("plain data always has a form, and memory grows");
    }

    /// The records of a commit; nothing where they are none.
    pub(super) fn all(mut bytes: &[u8]) -> Option<Vec<Record>> {
        let mut records = Vec::new();
        while !bytes.is_empty() {
            let (record, rest) = postcard::take_from_bytes(bytes).ok()?;
            records.push(record);
            bytes = rest;
        }
        Some(records)
    }

    /// Lets it happen to what is known; false where it cannot follow that.
    #[must_use]
    pub(super) fn apply(self, requests: &mut BTreeMap<Number, Found>) -> bool {
        match self {
            Record::Asked(number, asked) => {
                let is_next = requests.last_key_value().is_none_or(|(last, _)| *last < number);
                let found = Found { asked, tokens: BTreeMap::new(), is_complete: false };
                is_next && requests.insert(number, found).is_none()
            }
            Record::Tokens { number, answer, from, ids, scores } => {
                if !scores.is_empty() && scores.len() != ids.len() {
                    return false;
                }
                // Of what is forgotten some may still be under way.
                let Some(found) = requests.get_mut(&number) else { return true };
                let known = found.tokens.entry(answer).or_default();
                if from != known.len() as u64 {
                    return false;
                }
                let mut scores = scores.into_iter();
                known.extend(ids.into_iter().map(|id| {
                    let score = scores.next();
                    let (logprob, candidates) = score.map_or((None, Vec::new()), |s| (s.logprob, s.candidates));
                    Token { id, logprob, candidates }
                }));
                true
            }
            Record::Complete(number) => {
                if let Some(found) = requests.get_mut(&number) {
                    found.is_complete = true;
                }
                true
            }
            Record::Forgotten(number) => {
                requests.remove(&number);
                true
            }
        }
    }
}

/// Records that make what is known of a request.
pub(super) fn of(number: Number, found: &Found) -> impl Iterator<Item = Record> {
    let asked = std::iter::once(Record::Asked(number, found.asked.clone()));
    let is_scored = found.asked.candidates.is_some();
    let tokens = found.tokens.iter().flat_map(move |(answer, tokens)| {
        let chunks = tokens.chunks(TOKENS_MAX).enumerate();
        chunks.map(move |(i, chunk)| Record::tokens(number, *answer, i * TOKENS_MAX, chunk, is_scored))
    });
    asked.chain(tokens).chain(found.is_complete.then_some(Record::Complete(number)))
}
