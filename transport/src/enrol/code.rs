//! The code that a worker prints and a person carries to the head.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use ring::pbkdf2;
use ring::rand::{SecureRandom, SystemRandom};
use thiserror::Error;

use crate::identity::{Fingerprint, IdentityError, text};

/// Bytes of the key's fingerprint in a code, and of its secret: 80 bits each. Nobody finds another key with the first,
/// nor guesses the second, offline as well.
const HALF_BYTES: usize = 10;
/// Bits at the end that find typing errors, and tell a printed code from a preset one: 20, four characters.
const CHECK_SYMBOLS: usize = 4;
const SYMBOLS: usize = 2 * HALF_BYTES * 8 / 5 + CHECK_SYMBOLS;
const GROUP: usize = 4;

/// Fewest letters and digits of a preset code: 20 random ones have more than 100 bits.
pub const PRESET_CHARACTERS_MIN: usize = 20;
/// Most letters and digits of a preset code.
pub const PRESET_CHARACTERS_MAX: usize = 256;
/// A preset code of fewer different characters is a pattern.
const PRESET_DIFFERENT_MIN: usize = 8;
/// What OWASP advises for PBKDF2 with SHA-256 (2023). An offer is a hash of the code that any dialler may have, and a
/// preset code may be a phrase.
const PRESET_ROUNDS: NonZeroU32 = NonZeroU32::new(600_000).unwrap();

const SECRET_CONTEXT: &str = "pp-run 2026 enrolment code";
const CHECK_CONTEXT: &str = "pp-run 2026 enrolment code, check characters";

/// A code: the fingerprint of the worker's key and a secret that is used once, or a text that was preset on both ends.
#[derive(Clone, PartialEq, Eq)]
pub struct Code {
    /// Without dashes, in capitals.
    normal: String,
    /// The first 80 bits of the key's fingerprint; none in a preset code.
    fingerprint: Option<[u8; HALF_BYTES]>,
}

/// What both ends derive from the code, and all that is kept of it.
#[derive(Clone)]
pub(crate) struct Secret(pub(crate) [u8; 32]);

impl Code {
    /// A new code for the key of that fingerprint.
    ///
    /// # Errors
    /// [`IdentityError::Random`]: the system has no randomness.
    pub fn generate(key: &Fingerprint) -> Result<Code, IdentityError> {
        let (mut fingerprint, mut secret) = ([0; HALF_BYTES], [0; HALF_BYTES]);
        fingerprint.copy_from_slice(&key.0[..HALF_BYTES]);
        SystemRandom::new().fill(&mut secret).map_err(|_| IdentityError::Random)?;
        let symbols = text::encode(&[fingerprint, secret].concat());
        let check = check(&symbols);
        Ok(Code { normal: symbols + &check, fingerprint: Some(fingerprint) })
    }

    /// A code that was chosen beforehand, for installations without a person (`PP_JOIN_CODE`). It should be random, for
    /// example `openssl rand -hex 20`, and another for each worker.
    ///
    /// # Errors
    /// [`CodeError`]: it is too short, too long, or has the form of a printed code.
    pub fn preset(text: &str) -> Result<Code, CodeError> {
        let code: Code = text.parse()?;
        if code.is_preset() { Ok(code) } else { Err(CodeError::Printed) }
    }

    /// Whether it was chosen beforehand, so that it says nothing of the worker's key.
    pub fn is_preset(&self) -> bool {
        self.fingerprint.is_none()
    }

    /// Whether the code may be that of a worker with this key: a preset one may be anybody's.
    pub fn is_for(&self, key: &Fingerprint) -> bool {
        self.fingerprint.is_none_or(|fingerprint| key.0.starts_with(&fingerprint))
    }

    /// The code to print, in groups of four. It is a secret until it has been used.
    pub fn reveal(&self) -> String {
        let symbols = self.normal.as_bytes().chunks(GROUP);
        let groups: Vec<_> = symbols.map(String::from_utf8_lossy).collect();
        groups.join("-")
    }

    /// What the code and the worker's key make together: a text that was preset on several workers is another secret on
    /// each.
    pub(crate) fn secret(&self, key: &Fingerprint) -> Secret {
        let mut material = [0; 32];
        match self.fingerprint {
            Some(_) => material = *blake3::hash(self.normal.as_bytes()).as_bytes(),
            None => {
                let text = self.normal.as_bytes();
                pbkdf2::derive(pbkdf2::PBKDF2_HMAC_SHA256, PRESET_ROUNDS, &key.0, text, &mut material);
            }
        }
        Secret(blake3::derive_key(SECRET_CONTEXT, &[material, key.0].concat()))
    }
}

impl FromStr for Code {
    type Err = CodeError;

    /// Takes capitals and small letters, with or without spaces and dashes, and in a printed code O for 0, I and L for
    /// 1.
    fn from_str(typed: &str) -> Result<Code, CodeError> {
        let mut normal = String::new();
        for character in typed.chars().filter(|c| !c.is_whitespace() && !"-_\u{2010}\u{2011}\u{2013}".contains(*c)) {
            if !character.is_ascii_alphanumeric() {
                return Err(CodeError::Character { found: character.escape_default().to_string() });
            }
            if normal.len() == PRESET_CHARACTERS_MAX {
                return Err(CodeError::Long);
            }
            normal.push(character.to_ascii_uppercase());
        }
        if let Some(printed) = printed(&normal) {
            return Ok(printed);
        }
        if normal.len() < PRESET_CHARACTERS_MIN {
            return Err(CodeError::Short { found: normal.len() });
        }
        let different: std::collections::BTreeSet<u8> = normal.bytes().collect();
        if different.len() < PRESET_DIFFERENT_MIN {
            return Err(CodeError::Pattern { found: different.len() });
        }
        Ok(Code { normal, fingerprint: None })
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Code(not shown)")
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(not shown)")
    }
}

/// The code that a worker printed, if it is one and was typed right.
fn printed(normal: &str) -> Option<Code> {
    if normal.len() != SYMBOLS {
        return None;
    }
    let (symbols, check_symbols) = normal.split_at_checked(SYMBOLS - CHECK_SYMBOLS)?;
    let bytes = text::decode(symbols)?;
    // One spelling from here on: both ends hash it.
    let symbols = text::encode(&bytes);
    let check = check(&symbols);
    let typed_check = text::normal(check_symbols)?;
    let fingerprint = bytes.get(..HALF_BYTES)?.try_into().ok()?;
    (check == typed_check).then(|| Code { normal: symbols + &check, fingerprint: Some(fingerprint) })
}

/// What follows these symbols in a printed code. It says nothing of the secret that the symbols do not.
fn check(symbols: &str) -> String {
    let hash = blake3::derive_key(CHECK_CONTEXT, symbols.as_bytes());
    text::encode(&hash[..5])[..CHECK_SYMBOLS].to_owned()
}

/// Why a text is not a code. The text is not in the message: it may be a code with a typing error.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum CodeError {
    #[error("{found} does not occur in a code, which has letters, digits and dashes")]
    Character { found: String },
    #[error(
        "code has {found} letters and digits: one that a worker prints has {SYMBOLS}, a preset one at least \
        {PRESET_CHARACTERS_MIN}"
    )]
    Short { found: usize },
    #[error("code has more than {PRESET_CHARACTERS_MAX} letters and digits")]
    Long,
    #[error("code has only {found} different characters: make a random one, for example with `openssl rand -hex 20`")]
    Pattern { found: usize },
    #[error(
        "a preset code must not be one that a worker has printed: make a random one, for example with `openssl \
        rand -hex 20`"
    )]
    Printed,
}
