//! How a worker becomes a member: a code that it prints, and one message each way.
//!
//! The worker listens for [`crate::tls::ENROL_ALPN`] while its code is valid, and shows nothing but a key. The head
//! dials, and each proves to the other that it has the code: by a keyed hash of its message and of what only the two
//! ends of this TLS connection can derive (an exporter, RFC 8446 section 7.5). Someone in between has two connections
//! with two exporters, and can hand on neither proof.
//!
//! ```text
//! worker → head   Offer   proof, whether the code was preset, a name it would like
//! head → worker   Grant   proof, name, the authority's certificate, the worker's, the founding member list
//! worker → head   closes the connection with a code: it keeps the certificate, or why not
//! ```
//!
//! The head looks at the key, then at the offer, and only then signs. [`Code`], [`Offer`] and
//! [`Grant`], and [`Enrolment`], which is when a worker listens at all, are values. [`ask`] and [`answer`] are the two
//! ends over quinn.

mod code;
mod message;
mod shell;

#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use thiserror::Error;

pub use code::{Code, CodeError, PRESET_CHARACTERS_MAX, PRESET_CHARACTERS_MIN};
pub use message::{GRANT_BYTES, Grant, MessageError, OFFER_BYTES, Offer};
pub use shell::{AnswerError, AskError, Host, answer, ask};

#[cfg(any(test, fuzzing))]
pub(crate) use message::{proved_grant, proved_offer};
#[cfg(any(test, fuzzing))]
pub(crate) use shell::granted;

use crate::identity::Key;
pub(crate) use code::Secret;
use message::Exporter;

/// How long a code is valid: time to walk to the other machine, not to leave a door open.
pub const CODE_VALIDITY: Duration = Duration::from_secs(10 * 60);
/// So many wrong proofs, and the code is void. One would do for 80 bits; the others are for typing errors in preset
/// codes.
pub const WRONG_PROOFS_MAX: u32 = 5;
/// After a wrong proof the next is looked at no sooner. Only wrong proofs count, so that nobody keeps the head out by
/// connecting often.
pub const WRONG_PROOF_PAUSE: Duration = Duration::from_secs(1);

/// A worker's side of a code: whether it is open, and whether a proof is right. Of the code only a hash is kept.
#[derive(Debug)]
pub struct Enrolment {
    secret: Secret,
    is_preset: bool,
    expires: Instant,
    wrong: u32,
    not_before: Instant,
    is_used: bool,
}

impl Enrolment {
    /// Opens for [`CODE_VALIDITY`] from `now`. For a preset code this takes some tenths of a second of a processor: the
    /// code may be one that a person has made up, and guesses are to be dear.
    pub fn open(code: &Code, key: &Key, now: Instant) -> Enrolment {
        Enrolment {
            secret: code.secret(&key.fingerprint()),
            is_preset: code.is_preset(),
            expires: now + CODE_VALIDITY,
            wrong: 0,
            not_before: now,
            is_used: false,
        }
    }

    /// Whether the code is valid, so that the endpoint should listen.
    ///
    /// # Errors
    /// [`Shut`]: why not; it stays so.
    pub fn check(&self, now: Instant) -> Result<(), Shut> {
        if self.is_used {
            Err(Shut::Used)
        } else if self.wrong >= WRONG_PROOFS_MAX {
            Err(Shut::Guessed)
        } else if now >= self.expires {
            Err(Shut::Expired)
        } else {
            Ok(())
        }
    }

    /// When the code expires.
    pub fn expires(&self) -> Instant {
        self.expires
    }

    /// The offer with its proof for one connection.
    fn offer(&self, exporter: &Exporter, name: Option<&crate::identity::Name>) -> [u8; OFFER_BYTES] {
        Offer { is_preset: self.is_preset, name: name.cloned() }.encode(&self.secret, exporter)
    }

    /// Looks at a grant. The first whose proof is right uses the code up, whatever else is wrong with it.
    fn judge(&mut self, grant: &[u8; GRANT_BYTES], exporter: &Exporter, now: Instant) -> Result<Grant, Judged> {
        self.check(now)?;
        if now < self.not_before {
            return Err(Judged::TooSoon { until: self.not_before });
        }
        if !Grant::is_proved(grant, &self.secret, exporter) {
            self.wrong += 1;
            self.not_before = now + WRONG_PROOF_PAUSE;
            return Err(Judged::WrongProof { left: WRONG_PROOFS_MAX - self.wrong });
        }
        self.is_used = true;
        Ok(Grant::decode(grant)?)
    }
}

/// Why a code is not valid any more.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Shut {
    #[error("the code has been used: start the worker again for another")]
    Used,
    #[error("the code has expired after {} minutes: start the worker again for another", CODE_VALIDITY.as_secs() / 60)]
    Expired,
    #[error(
        "the code is void after {WRONG_PROOFS_MAX} wrong ones: somebody may be guessing; start the worker again \
        for another"
    )]
    Guessed,
}

/// Why a grant is not taken.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
enum Judged {
    #[error(transparent)]
    Shut(#[from] Shut),
    #[error("a wrong code came less than a second ago")]
    TooSoon { until: Instant },
    #[error("the other end does not have the code; {left} more wrong ones and it is void")]
    WrongProof { left: u32 },
    #[error(transparent)]
    Message(#[from] MessageError),
}
