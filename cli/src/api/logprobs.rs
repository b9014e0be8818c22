//! Log-probabilities in the shapes of both APIs, for the tokens whose text is part of an answer.

use std::collections::VecDeque;
use std::sync::Arc;

use pp_engine::head::Token;
use pp_engine::tokenizer::Tokenizer;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// Of a token that is not among those that are known.
const UNKNOWN: f32 = -9999.0;

/// Tokens that wait for their text. A token is given out with the text that it begins in; what a stop text cuts off,
/// and special tokens, never are.
pub struct Waiting {
    tokenizer: Arc<Tokenizer>,
    /// Special tokens whose text is part of the answer's.
    shown_specials: Vec<u32>,
    tokens: VecDeque<Placed>,
    /// Bytes of the tokens so far.
    token_bytes: usize,
    /// Text so far, and how much of it was counted: bytes and characters.
    text: String,
    counted: (usize, usize),
}

/// A token, and where its text begins in the answer's.
pub struct Placed {
    token: Token,
    start: usize,
    /// In characters.
    offset: usize,
}

impl Waiting {
    pub fn new(tokenizer: Arc<Tokenizer>, shown_specials: &[u32]) -> Waiting {
        let (shown_specials, tokens) = (shown_specials.to_vec(), VecDeque::new());
        Waiting { tokenizer, shown_specials, tokens, token_bytes: 0, text: String::new(), counted: (0, 0) }
    }

    /// The next token.
    pub fn token(&mut self, token: Token) {
        if !self.tokenizer.is_special(token.id) || self.shown_specials.contains(&token.id) {
            let start = self.token_bytes;
            self.token_bytes += self.tokenizer.token_bytes(token.id).len();
            self.tokens.push_back(Placed { token, start, offset: 0 });
        }
    }

    /// More text; the tokens that begin in it.
    pub fn text(&mut self, text: &str) -> Vec<Placed> {
        self.text.push_str(text);
        let mut begun = Vec::new();
        while self.tokens.front().is_some_and(|placed| placed.start < self.text.len()) {
            let Some(placed) = self.tokens.pop_front() else { break };
            let offset = self.characters(placed.start);
            begun.push(Placed { offset, ..placed });
        }
        begun
    }

    /// Characters before a byte of the text; asked for rising ones.
    fn characters(&mut self, at: usize) -> usize {
        let (bytes, characters) = self.counted;
        let more = &self.text.as_bytes()[bytes..at];
        // Bytes that begin a character.
        let begun = more.iter().filter(|byte| (**byte & 0xc0) != 0x80).count();
        self.counted = (at, characters + begun);
        self.counted.1
    }

    /// Of a whole answer.
    pub fn all(tokenizer: &Arc<Tokenizer>, shown_specials: &[u32], tokens: &[Token], text: &str) -> Vec<Placed> {
        let mut waiting = Waiting::new(tokenizer.clone(), shown_specials);
        tokens.iter().for_each(|token| waiting.token(token.clone()));
        waiting.text(text)
    }
}

/// Of the chat API.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatLogprobs {
    pub content: Vec<ChatToken>,
    /// Always null.
    pub refusal: Option<String>,
}

/// A token with its log-probability and those of the likeliest in its place.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ChatToken {
    #[serde(flatten)]
    pub shown: ShownToken,
    pub top_logprobs: Vec<ShownToken>,
}

/// A token with its log-probability.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ShownToken {
    /// Its text; bytes that are no whole character as U+FFFD.
    pub token: String,
    /// Natural logarithm of its probability by the model's own logits.
    pub logprob: f32,
    /// Its text, byte by byte.
    pub bytes: Vec<u8>,
}

impl ShownToken {
    fn new(tokenizer: &Tokenizer, id: u32, logprob: Option<f32>) -> ShownToken {
        let (token, bytes) = spelt(tokenizer, id);
        ShownToken { token, logprob: finite(logprob), bytes }
    }
}

/// JSON has no infinities.
fn finite(logprob: Option<f32>) -> f32 {
    logprob.filter(|logprob| logprob.is_finite()).unwrap_or(UNKNOWN)
}

/// The text of a token, and its bytes; of special ones too.
fn spelt(tokenizer: &Tokenizer, id: u32) -> (String, Vec<u8>) {
    if tokenizer.is_special(id) {
        let text = tokenizer.decode(&[id], false);
        return (text.clone(), text.into_bytes());
    }
    let bytes = tokenizer.token_bytes(id);
    (String::from_utf8_lossy(&bytes).into_owned(), bytes)
}

impl ChatLogprobs {
    pub fn new(tokenizer: &Tokenizer, tokens: &[Placed]) -> ChatLogprobs {
        let one = |Placed { token, .. }: &Placed| ChatToken {
            shown: ShownToken::new(tokenizer, token.id, token.logprob),
            top_logprobs: token
                .candidates
                .iter()
                .map(|(id, logprob)| ShownToken::new(tokenizer, *id, Some(*logprob)))
                .collect(),
        };
        ChatLogprobs { content: tokens.iter().map(one).collect(), refusal: None }
    }
}

/// Texts with their log-probabilities, likeliest first: a map in JSON.
#[derive(Clone, Debug, Default)]
pub struct Ranking(Vec<(String, f32)>);

impl Serialize for Ranking {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// Of the completions API: lists of equal length.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<f32>,
    /// For each token the likeliest in its place, and the token itself.
    #[schema(value_type = Vec<HashMap<String, f32>>)]
    pub top_logprobs: Vec<Ranking>,
    /// Where each begins in the text, in characters.
    pub text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    pub fn new(tokenizer: &Tokenizer, tokens: &[Placed]) -> CompletionLogprobs {
        let mut all = CompletionLogprobs::default();
        for Placed { token, offset, .. } in tokens {
            let (text, logprob) = (spelt(tokenizer, token.id).0, finite(token.logprob));
            let candidates =
                token.candidates.iter().map(|(id, logprob)| (spelt(tokenizer, *id).0, finite(Some(*logprob))));
            let mut top = Ranking::default();
            for (text, logprob) in candidates.chain([(text.clone(), logprob)]) {
                // Tokens that are not whole characters may look alike: the likeliest counts.
                if !top.0.iter().any(|(known, _)| *known == text) {
                    top.0.push((text, logprob));
                }
            }
            all.tokens.push(text);
            all.token_logprobs.push(logprob);
            all.top_logprobs.push(top);
            all.text_offset.push(*offset);
        }
        all
    }
}
