//! Finding the texts of special tokens, and placeholders that stand for them while a template is rendered.

use std::hash::{BuildHasher, RandomState};

use tokenizers::AddedToken;

/// A special token and its id.
#[derive(Clone, Debug)]
pub(super) struct Special {
    pub(super) id: u32,
    pub(super) token: AddedToken,
}

/// The special tokens of a vocabulary, searchable by their text. `k` is a position in this list.
#[derive(Debug)]
pub(super) struct Specials {
    all: Vec<Special>,
    /// For each first byte, positions in `all`, longest text first.
    by_first: Vec<Vec<usize>>,
}

impl Specials {
    pub(super) fn new(all: Vec<Special>) -> Self {
        let mut by_first = vec![Vec::new(); 256];
        for (k, special) in all.iter().enumerate() {
            if let Some(first) = special.token.content.as_bytes().first() {
                by_first[usize::from(*first)].push(k);
            }
        }
        for list in &mut by_first {
            list.sort_by_key(|k| std::cmp::Reverse(all[*k].token.content.len()));
        }
        Self { all, by_first }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Special> {
        self.all.iter()
    }

    pub(super) fn text(&self, k: usize) -> &str {
        self.all.get(k).map_or("", |special| &special.token.content)
    }

    pub(super) fn by_id(&self, id: u32) -> Option<&str> {
        let k = self.all.binary_search_by_key(&id, |special| special.id).ok()?;
        Some(self.text(k))
    }

    pub(super) fn occur_in(&self, text: &str) -> bool {
        (0..text.len()).any(|at| self.at(text, at).is_some())
    }

    /// Rewrites every special text, leftmost first and longest where several begin.
    pub(super) fn replace(&self, text: &str, with: impl Fn(usize) -> String) -> String {
        let mut out = String::with_capacity(text.len());
        let (mut copied, mut at) = (0, 0);
        while at < text.len() {
            match self.at(text, at) {
                Some(k) => {
                    out.push_str(&text[copied..at]);
                    out.push_str(&with(k));
                    at += self.text(k).len();
                    copied = at;
                }
                None => at += 1,
            }
        }
        out.push_str(&text[copied..]);
        out
    }

    /// The special text that begins at a byte. One can only begin where a character does, as its own first byte does.
    fn at(&self, text: &str, at: usize) -> Option<usize> {
        let rest = &text.as_bytes()[at..];
        let candidates = &self.by_first[usize::from(*rest.first()?)];
        candidates.iter().copied().find(|k| rest.starts_with(self.text(*k).as_bytes()))
    }
}

/// First characters of the private use planes 15 and 16: no text has a use for them, no filter changes them.
const PLANE_15: u32 = 0xf_0000;
const PLANE_16: u32 = 0x10_0000;

/// Texts nobody can guess, one for each special token and each of two uses.
#[derive(Debug)]
pub(super) struct Placeholders {
    /// Four private characters, drawn once: a user who knew them could write special tokens.
    nonce: String,
}

impl Placeholders {
    /// The standard library's hash keys are drawn from the system's randomness.
    pub(super) fn new() -> Self {
        let bits = RandomState::new().hash_one(0_u8);
        Self { nonce: (0..4).map(|i| private(PLANE_15, (bits >> (16 * i)) as u32 & 0x7fff)).collect() }
    }

    /// Stands for a special token a template wrote.
    pub(super) fn template(&self, k: usize) -> String {
        self.make('t', k)
    }

    /// Stands for the same text inside a message.
    pub(super) fn user(&self, k: usize) -> String {
        self.make('u', k)
    }

    fn make(&self, purpose: char, k: usize) -> String {
        let purpose = private(PLANE_15, purpose as u32);
        let (high, low) = (private(PLANE_16, (k >> 15) as u32), private(PLANE_16, k as u32 & 0x7fff));
        format!("{}{purpose}{high}{low}", self.nonce)
    }

    /// Puts the texts back that [`Self::user`] stands for.
    pub(super) fn restore_user<'a>(&self, text: &str, of: impl Fn(usize) -> &'a str) -> String {
        let head = format!("{}{}", self.nonce, private(PLANE_15, 'u' as u32));
        let mut parts = text.split(head.as_str());
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let mut letters = part.chars();
            let mut digit = || letters.next().map_or(0, |letter| (letter as usize) & 0x7fff);
            let k = (digit() << 15) | digit();
            out.push_str(of(k));
            out.push_str(letters.as_str());
        }
        out
    }
}

fn private(plane: u32, offset: u32) -> char {
    char::from_u32(plane + (offset & 0x7fff)).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn specials(texts: &[&str]) -> Specials {
        let special = |(id, text): (u32, &&str)| Special { id, token: AddedToken::from(*text, true) };
        Specials::new((0..).zip(texts).map(special).collect())
    }

    #[test]
    fn the_longest_of_the_leftmost() {
        let specials = specials(&["<a>", "<a><b>", "日"]);
        assert_eq!(specials.replace("x<a><b>本日<a", |k| format!("[{k}]")), "x[1]本[2]<a");
        assert!(specials.occur_in("…<a>") && !specials.occur_in("<a <b>"));
        assert_eq!(specials.by_id(1), Some("<a><b>"));
        assert_eq!(specials.by_id(9), None);
    }

    #[test]
    fn placeholders_survive_a_round() {
        let placeholders = Placeholders::new();
        for k in [0, 1, 40_000, 1 << 20] {
            let text = format!("a{}b{}", placeholders.user(k), placeholders.template(k));
            let expected = format!("aXb{}", placeholders.template(k));
            let of = |found| if found == k { "X" } else { "wrong" };
            assert_eq!(placeholders.restore_user(&text, of), expected, "{k}");
        }
    }
}
