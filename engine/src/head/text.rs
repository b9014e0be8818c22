//! From ids to the text of an answer.

use std::sync::Arc;

use super::stop::StopScanner;
use crate::tokenizer::{TokenStream, Tokenizer};

/// Turns ids into the answer's text as they come, up to a stop string.
pub(super) struct AnswerText {
    tokenizer: Arc<Tokenizer>,
    stream: TokenStream,
    scanner: StopScanner,
    shown_specials: Vec<u32>,
    text: String,
}

impl AnswerText {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, stop: &[String], shown_specials: &[u32]) -> AnswerText {
        AnswerText {
            // Which special tokens are text is decided here.
            stream: tokenizer.stream_continuing().keep_special(),
            tokenizer,
            scanner: StopScanner::new(stop),
            shown_specials: shown_specials.to_vec(),
            text: String::new(),
        }
    }

    /// What has become certain with `id`, and whether a stop string came.
    pub(super) fn push(&mut self, id: u32) -> (String, bool) {
        if self.tokenizer.is_special(id) && !self.shown_specials.contains(&id) {
            return (String::new(), false);
        }
        let Some(piece) = self.stream.push(id) else { return (String::new(), false) };
        let (certain, stopped) = self.scanner.push(&piece);
        self.text += &certain;
        (certain, stopped)
    }

    /// What was held back, when no more comes.
    pub(super) fn finish(&mut self) -> String {
        let certain = self.scanner.finish();
        self.text += &certain;
        certain
    }

    /// The text so far.
    pub(super) fn text(&self) -> &str {
        &self.text
    }
}
