//! Ids in, text out, as soon as a character is whole.

use std::sync::Arc;

use super::pieces::Pieces;

/// An incremental detokenizer.
///
/// Holds back bytes that begin a character and do not yet end it: at most three. A token costs its own bytes.
#[derive(Clone, Debug)]
pub struct TokenStream {
    pieces: Arc<Pieces>,
    pending: Vec<u8>,
    /// The next text is the first one, and the encoder put a space in front of it.
    strip: bool,
    keep_special: bool,
}

impl TokenStream {
    pub(super) fn new(pieces: Arc<Pieces>, from_start: bool) -> Self {
        let strip = pieces.strip && from_start;
        Self { pieces, pending: Vec::new(), strip, keep_special: false }
    }

    /// Also gives the text of special tokens, which are otherwise left out.
    #[must_use]
    pub fn keep_special(mut self) -> Self {
        self.keep_special = true;
        self
    }

    /// Takes the next id; gives the text that is complete with it, if there is any.
    ///
    /// Bytes that can never become a character are given as U+FFFD, those that still can are held back.
    pub fn push(&mut self, id: u32) -> Option<String> {
        if self.pieces.is_special(id) && !self.keep_special {
            return None;
        }
        self.pending.extend_from_slice(self.pieces.bytes(id));
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    break;
                }
                Err(e) => {
                    let (valid, rest) = self.pending.split_at(e.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let Some(bad) = e.error_len() else {
                        self.pending = rest.to_vec();
                        break;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    self.pending = rest[bad..].to_vec();
                }
            }
        }
        self.stripped(text)
    }

    fn stripped(&mut self, mut text: String) -> Option<String> {
        if self.strip && !text.is_empty() {
            self.strip = false;
            if text.starts_with(' ') {
                text.remove(0);
            }
        }
        (!text.is_empty()).then_some(text)
    }

    /// Ends the text. Every whole character has been given already: what is left is part of one, and is dropped.
    pub fn finish(self) -> String {
        String::new()
    }

    /// Ends the text as `decode` does: part of a character that is left becomes U+FFFD.
    pub fn finish_lossy(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
