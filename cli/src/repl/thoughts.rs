//! Tells what a model thinks aloud, between `<think>` and `</think>`, from what it says, as both stream.
//!
//! Thoughts stand at the beginning of an answer. Some templates write the opening tag themselves, at the end of what the
//! answer is asked for with.

/// What begins thoughts.
pub const OPEN: &str = "<think>";
/// What ends them.
const CLOSE: &str = "</think>";

/// What a part of an answer is; tags belong to the thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Thought.
    Thought,
    /// Said.
    Said,
}

/// An answer as it streams.
#[derive(Debug)]
pub struct Thoughts {
    state: State,
    /// What may be the beginning of a tag.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Begin,
    Thinking,
    Said,
}

impl Thoughts {
    /// `open`: the answer begins within thoughts.
    pub fn new(open: bool) -> Thoughts {
        Thoughts { state: if open { State::Thinking } else { State::Begin }, held: String::new() }
    }

    /// What has become certain with `piece`, in order; together it is what was pushed.
    pub fn push(&mut self, piece: &str) -> Vec<(Kind, String)> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        if self.state == State::Begin {
            let text = self.held.trim_start();
            if text.starts_with(OPEN) {
                self.state = State::Thinking;
            } else if !OPEN.starts_with(text) {
                self.state = State::Said;
            }
        }
        if self.state == State::Thinking {
            let (certain, ends) = match self.held.find(CLOSE) {
                Some(at) => (at + CLOSE.len(), true),
                None => (self.held.len() - held_back(&self.held), false),
            };
            let rest = self.held.split_off(certain);
            parts.push((Kind::Thought, std::mem::replace(&mut self.held, rest)));
            if ends {
                self.state = State::Said;
            }
        }
        if self.state == State::Said {
            parts.push((Kind::Said, std::mem::take(&mut self.held)));
        }
        parts.retain(|(_, text)| !text.is_empty());
        parts
    }

    /// What was held back, when no more comes.
    pub fn finish(&mut self) -> Option<(Kind, String)> {
        let kind = if self.state == State::Thinking { Kind::Thought } else { Kind::Said };
        Some((kind, std::mem::take(&mut self.held))).filter(|(_, text)| !text.is_empty())
    }
}

/// Bytes at the end of a text that may be the beginning of the closing tag.
fn held_back(text: &str) -> usize {
    (1..CLOSE.len()).rev().find(|length| text.ends_with(&CLOSE[..*length])).unwrap_or(0)
}

/// Thoughts, without tags, and what was said, of a whole answer.
pub fn divided(text: &str, open: bool) -> (Option<String>, String) {
    let mut thoughts = Thoughts::new(open);
    let parts: Vec<(Kind, String)> = thoughts.push(text).into_iter().chain(thoughts.finish()).collect();
    let all = |kind| parts.iter().filter(|(k, _)| *k == kind).map(|(_, text)| text.as_str()).collect::<String>();
    if parts.iter().all(|(kind, _)| *kind == Kind::Said) {
        return (None, all(Kind::Said));
    }
    let thought = all(Kind::Thought);
    let thought = thought.trim();
    let inner = thought.strip_prefix(OPEN).unwrap_or(thought);
    (Some(inner.strip_suffix(CLOSE).unwrap_or(inner).trim().to_owned()), all(Kind::Said).trim_start().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(pieces: &[&str], open: bool) -> Vec<(Kind, String)> {
        let mut thoughts = Thoughts::new(open);
        let mut all: Vec<(Kind, String)> = Vec::new();
        let found: Vec<_> = pieces.iter().flat_map(|piece| thoughts.push(piece)).collect();
        for (kind, text) in found.into_iter().chain(thoughts.finish()) {
            match all.last_mut() {
                Some((last, all)) if *last == kind => all.push_str(&text),
                _ => all.push((kind, text)),
            }
        }
        all
    }

    #[test]
    fn thoughts_are_told_from_what_is_said() {
        let check = |text: &str, open: bool, thought: &str, said: &str| {
            let expected = [(Kind::Thought, thought), (Kind::Said, said)];
            let expected: Vec<_> = expected.into_iter().filter(|(_, text)| !text.is_empty()).collect();
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            for pieces in [&[text][..], &letters] {
                let found = parts(pieces, open);
                let found: Vec<_> = found.iter().map(|(kind, text)| (*kind, text.as_str())).collect();
                assert_eq!(found, expected, "{pieces:?}");
            }
        };
        check("<think>\na < b\n</think>\n\nYes.", false, "<think>\na < b\n</think>", "\n\nYes.");
        check("hm</think>Yes. </think>", true, "hm</think>", "Yes. </think>");
        check("\n<think>cut </thi", false, "\n<think>cut </thi", "");
        check("<thinking> aloud", false, "", "<thinking> aloud");
        check("So <think>not at the beginning</think>", false, "", "So <think>not at the beginning</think>");
        check("<thi", false, "", "<thi");
        check("é</think>日", true, "é</think>", "日");
    }

    #[test]
    fn a_whole_answer_is_divided_without_tags() {
        let check = |text: &str, open, thought: Option<&str>, said: &str| {
            assert_eq!(divided(text, open), (thought.map(str::to_owned), said.to_owned()), "{text}");
        };
        check("<think>\nhm\n</think>\n\nYes.", false, Some("hm"), "Yes.");
        check("hm\n</think>\nYes.", true, Some("hm"), "Yes.");
        check("<think>only", false, Some("only"), "");
        check(" Yes.", false, None, " Yes.");
    }
}
