//! The bytes every token stands for.

use tokenizers::tokenizer::Tokenizer as Inner;

/// How a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's alphabet: one printable character for each byte.
    ByteLevel,
    /// SentencePiece: `▁` for a space, `<0xE2>` for a byte without a token.
    Spaced {
        /// The first space of a text was put there by the encoder and is taken away.
        strip: bool,
    },
}

impl Spelling {
    /// Reads it off the decoder of a `tokenizer.json`; the name of what is not known on failure.
    pub(super) fn of_decoder(inner: &Inner) -> Result<Self, String> {
        let decoder = serde_json::to_value(inner.get_decoder()).map_err(|e| e.to_string())?;
        let steps = match decoder["decoders"].as_array() {
            Some(steps) => steps.clone(),
            None => vec![decoder],
        };
        let mut spelling = None;
        let mut strip = false;
        for step in &steps {
            match step["type"].as_str() {
                Some("ByteLevel") => spelling = Some(Self::ByteLevel),
                Some("Replace") if step["pattern"]["String"] == "▁" && step["content"] == " " => {
                    spelling = Some(Self::Spaced { strip: false });
                }
                Some("Metaspace") if step["replacement"] == "▁" => {
                    spelling = Some(Self::Spaced { strip: false });
                    strip = step["prepend_scheme"] != "never" && step["add_prefix_space"] != false;
                }
                Some("Strip") if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => strip = true,
                Some("ByteFallback" | "Fuse") => {}
                Some(other) => return Err(other.into()),
                None => return Err("none".into()),
            }
        }
        match spelling {
            Some(Self::Spaced { .. }) => Ok(Self::Spaced { strip }),
            Some(Self::ByteLevel) => Ok(Self::ByteLevel),
            None => Err("Sequence".into()),
        }
    }
}

/// The bytes of all tokens, end to end.
#[derive(Debug)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// One past the last byte of each token.
    ends: Vec<usize>,
    special: Vec<bool>,
    /// A space in front of a whole text is the encoder's.
    pub(super) strip: bool,
}

impl Pieces {
    /// `texts` in the order of ids; the flag says that a token was added to the vocabulary and is spelt as it reads.
    pub(super) fn new<'a>(
        spelling: Spelling,
        texts: impl Iterator<Item = (&'a str, bool)>,
        special: impl Fn(u32) -> bool,
    ) -> Self {
        let strip = spelling == Spelling::Spaced { strip: true };
        let mut pieces = Self { bytes: Vec::new(), ends: Vec::new(), special: Vec::new(), strip };
        for (id, (text, added)) in (0..).zip(texts) {
            match spelling {
                Spelling::ByteLevel if added => pieces.bytes.extend(text.as_bytes()),
                Spelling::ByteLevel => push_byte_level(text, &mut pieces.bytes),
                Spelling::Spaced { .. } => match byte_token(text) {
                    Some(byte) if !added => pieces.bytes.push(byte),
                    _ => pieces.bytes.extend(text.replace('▁', " ").as_bytes()),
                },
            }
            pieces.ends.push(pieces.bytes.len());
            pieces.special.push(special(id));
        }
        pieces
    }

    pub(super) fn count(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let start = id.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.ends.get(id).map_or(&[], |end| &self.bytes[start..*end])
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// A token outside the alphabet is spelt as it reads, as in the `tokenizers` crate.
fn push_byte_level(text: &str, out: &mut Vec<u8>) {
    let start = out.len();
    for letter in text.chars() {
        match byte_of(letter) {
            Some(byte) => out.push(byte),
            None => {
                out.truncate(start);
                out.extend(text.as_bytes());
                return;
            }
        }
    }
}

/// GPT-2's `bytes_to_unicode`, backwards: printable Latin-1 is itself, the other bytes follow U+0100 in order.
fn byte_of(letter: char) -> Option<u8> {
    match letter as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// The byte of `<0xE2>`.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_letter() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn bytes_of_tokens() {
        let texts = [("Ġt", false), ("", false), ("é x", true), ("日", false)];
        let pieces = Pieces::new(Spelling::ByteLevel, texts.into_iter(), |id| id == 2);
        assert_eq!(pieces.bytes(0), b" t");
        assert_eq!(pieces.bytes(1), b"");
        assert_eq!(pieces.bytes(2), "é x".as_bytes());
        assert_eq!(pieces.bytes(3), "日".as_bytes());
        assert_eq!(pieces.bytes(4), b"");
        assert!(pieces.is_special(2) && !pieces.is_special(3) && !pieces.is_special(u32::MAX));
        let texts = [("▁a", false), ("<0xE6>", false), ("<0xE6>", true), ("<0x+6>", false)];
        let pieces = Pieces::new(Spelling::Spaced { strip: true }, texts.into_iter(), |_| false);
        assert_eq!(pieces.bytes(0), b" a");
        assert_eq!(pieces.bytes(1), &[0xe6]);
        assert_eq!(pieces.bytes(2), b"<0xE6>");
        assert_eq!(pieces.bytes(3), b"<0x+6>");
    }
}
