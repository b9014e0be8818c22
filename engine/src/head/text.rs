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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::Encode;

    /// A tokenizer of every family, of both kinds of file.
    fn tokenizers() -> &'static [Arc<Tokenizer>] {
        static ALL: OnceLock<Vec<Arc<Tokenizer>>> = OnceLock::new();
        ALL.get_or_init(|| {
            let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tokenizers");
            let open = |family: &str| Tokenizer::from_hf_dir(&root.join(family)).unwrap().into();
            ["smollm", "llama2", "llama3", "qwen2"].map(open).into()
        })
    }

    /// Says an answer's ids one by one: what came out after each, and whether a stop text ended it.
    fn said(tokenizer: &Arc<Tokenizer>, ids: &[u32], stop: &[String]) -> (Vec<String>, bool) {
        let mut text = AnswerText::new(tokenizer.clone(), stop, &[]);
        let mut pieces = Vec::new();
        for id in ids {
            let (piece, stopped) = text.push(*id);
            pieces.push(piece);
            if stopped {
                break;
            }
        }
        let stopped = pieces.len() < ids.len() || text.scanner.push("").1;
        pieces.push(text.finish());
        assert_eq!(pieces.concat(), text.text(), "what streams is what is told at the end");
        (pieces, stopped)
    }

    proptest! {
        /// Whatever is answered, in characters of any length and wherever tokens cut them and the stop texts: all that
        /// streams is whole characters, nothing of a stop text, and the answer up to it.
        #[test]
        fn stop_texts_and_characters_that_straddle_tokens_never_leak(
            text in "[a-c é日𝄞\u{1f642}\u{301}\n]{1,24}",
            from in 0usize..20,
            length in 1usize..6,
            other in "[a-cé日]{1,2}",
        ) {
            let letters: Vec<char> = text.chars().collect();
            let from = from.min(letters.len() - 1);
            let stop: String = letters[from..(from + length).min(letters.len())].iter().collect();
            for tokenizer in tokenizers() {
                let ids = tokenizer.encode(&text, Encode::default()).unwrap();
                let (whole, stopped) = said(tokenizer, &ids, &[]);
                prop_assert!(!stopped);
                let whole = whole.concat();
                // SentencePiece says the space that it put in front; qwen2 composes what it can.
                prop_assert!(!whole.contains(char::REPLACEMENT_CHARACTER), "{whole:?}");
                let stops = [stop.clone(), other.clone()];
                let first = stops.iter().filter_map(|stop| Some((whole.find(stop)? + stop.len(), whole.find(stop)?))).min();
                let (pieces, stopped) = said(tokenizer, &ids, &stops);
                let expected = first.map_or(whole.as_str(), |(_, begin)| &whole[..begin]);
                prop_assert_eq!(pieces.concat(), expected);
                prop_assert_eq!(stopped, first.is_some());
                // Cut off anywhere, as by a limit of tokens: whole characters still, and the beginning of the answer.
                for count in 0..ids.len() {
                    let cut = said(tokenizer, &ids[..count], &[]).0.concat();
                    prop_assert!(whole.starts_with(&cut), "{cut:?} of {whole:?}");
                }
            }
        }
    }
}
