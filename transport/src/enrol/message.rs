//! The two messages, each of a fixed size: what they hold, where it stands, and the proof over all of it.

use rustls_pki_types::CertificateDer;
use thiserror::Error;

use super::code::Secret;
use crate::identity::{CERTIFICATE_BYTES_MAX, NAME_BYTES_MAX, Name};
use crate::members::SignedMembers;

/// Bytes of an [`Offer`].
pub const OFFER_BYTES: usize = 128;
/// Bytes of a [`Grant`]: two certificates of about 500 bytes and a list of one member, with room to grow.
pub const GRANT_BYTES: usize = 4096;

/// What only the two ends of one TLS connection know.
pub(crate) type Exporter = [u8; 32];

/// The label that [`Exporter`]s are derived with.
pub(crate) const EXPORTER_LABEL: &[u8] = b"EXPORTER-pp-run-enrol-1";

const VERSION: u8 = 1;
/// A proof stands first and covers all behind it.
const PROOF_BYTES: usize = 32;
/// Says which of the two messages a proof is for, so that none is sent back to its sender.
pub(super) const OFFER: &[u8; 16] = b"pp-run offer 1\0\0";
pub(super) const GRANT: &[u8; 16] = b"pp-run grant 1\0\0";

/// What a worker says first.
///
/// Proof, version, whether the code was preset, length of the name, name; zeros to the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Whether the code was chosen beforehand and hence says nothing of the worker's key.
    pub is_preset: bool,
    /// What the worker would like to be called.
    pub name: Option<Name>,
}

impl Offer {
    pub(crate) fn encode(&self, secret: &Secret, exporter: &Exporter) -> [u8; OFFER_BYTES] {
        let mut message = Writer::new();
        message.byte(VERSION);
        message.byte(u8::from(self.is_preset));
        message.name(self.name.as_ref());
        // A version, a flag and a name of at most 40 bytes.
        message.proved(OFFER, secret, exporter).unwrap_or([0; OFFER_BYTES])
    }

    /// The offer, if its sender has the code and is at the other end of this connection.
    pub(crate) fn decode(
        bytes: &[u8; OFFER_BYTES],
        secret: &Secret,
        exporter: &Exporter,
    ) -> Result<Offer, MessageError> {
        if !is_proved(bytes, OFFER, secret, exporter) {
            return Err(MessageError::Proof);
        }
        let mut message = Reader(&bytes[PROOF_BYTES..]);
        message.version()?;
        let is_preset = match message.byte()? {
            0 => false,
            1 => true,
            _ => return Err(MessageError::Form),
        };
        let name = message.name()?;
        message.end()?;
        Ok(Offer { is_preset, name })
    }
}

/// What the head answers.
///
/// Proof, version, length of the name, name, and each after its length (u16, little-endian) the certificate of the
/// authority, the worker's certificate, and a signed member list; zeros to the end. The cluster is in the certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// What the worker is called from now on.
    pub name: Name,
    /// The certificate of the cluster's authority, to be pinned.
    pub authority: CertificateDer<'static>,
    /// The worker's certificate.
    pub certificate: CertificateDer<'static>,
    /// The founding list: who the head is.
    pub members: SignedMembers,
}

impl Grant {
    pub(crate) fn encode(&self, secret: &Secret, exporter: &Exporter) -> Result<[u8; GRANT_BYTES], MessageError> {
        let mut message = Writer::new();
        message.byte(VERSION);
        message.name(Some(&self.name));
        for part in [&self.authority[..], &self.certificate, self.members.as_bytes()] {
            message.part(part)?;
        }
        message.proved(GRANT, secret, exporter)
    }

    /// Whether the sender has the code and is at the other end of this connection. Takes the same time whatever is
    /// wrong.
    pub(crate) fn is_proved(bytes: &[u8; GRANT_BYTES], secret: &Secret, exporter: &Exporter) -> bool {
        is_proved(bytes, GRANT, secret, exporter)
    }

    /// What is in a grant whose proof is right.
    pub(crate) fn decode(bytes: &[u8; GRANT_BYTES]) -> Result<Grant, MessageError> {
        let mut message = Reader(&bytes[PROOF_BYTES..]);
        message.version()?;
        let name = message.name()?.ok_or(MessageError::Form)?;
        let authority = message.certificate()?;
        let certificate = message.certificate()?;
        let members = message.part(GRANT_BYTES)?.to_vec();
        let members = SignedMembers::from_bytes(members).map_err(|_| MessageError::Form)?;
        message.end()?;
        Ok(Grant { name, authority, certificate, members })
    }
}

pub(super) fn proof(label: &[u8; 16], rest: &[u8], secret: &Secret, exporter: &Exporter) -> blake3::Hash {
    let mut hash = blake3::Hasher::new_keyed(&secret.0);
    hash.update(label).update(exporter).update(rest);
    hash.finalize()
}

fn is_proved(bytes: &[u8], label: &[u8; 16], secret: &Secret, exporter: &Exporter) -> bool {
    let Some((found, rest)) = bytes.split_first_chunk::<PROOF_BYTES>() else { return false };
    // Hashes are compared in constant time.
    proof(label, rest, secret, exporter) == blake3::Hash::from_bytes(*found)
}

/// Collects what stands behind the proof.
struct Writer(Vec<u8>);

impl Writer {
    fn new() -> Writer {
        Writer(vec![0; PROOF_BYTES])
    }

    fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    fn name(&mut self, name: Option<&Name>) {
        let name = name.map_or("", Name::as_str);
        self.byte(name.len() as u8);
        self.0.extend_from_slice(name.as_bytes());
    }

    fn part(&mut self, part: &[u8]) -> Result<(), MessageError> {
        let length = u16::try_from(part.len()).map_err(|_| MessageError::Long)?;
        self.0.extend_from_slice(&length.to_le_bytes());
        self.0.extend_from_slice(part);
        Ok(())
    }

    fn proved<const N: usize>(
        mut self,
        label: &[u8; 16],
        secret: &Secret,
        exporter: &Exporter,
    ) -> Result<[u8; N], MessageError> {
        if self.0.len() > N {
            return Err(MessageError::Long);
        }
        self.0.resize(N, 0);
        let proof = proof(label, &self.0[PROOF_BYTES..], secret, exporter);
        self.0[..PROOF_BYTES].copy_from_slice(proof.as_bytes());
        self.0.try_into().map_err(|_| MessageError::Long)
    }
}

/// What is left of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], MessageError> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(MessageError::Form)?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, MessageError> {
        Ok(self.take(1)?[0])
    }

    fn version(&mut self) -> Result<(), MessageError> {
        match self.byte()? {
            VERSION => Ok(()),
            found => Err(MessageError::Version { found }),
        }
    }

    fn name(&mut self) -> Result<Option<Name>, MessageError> {
        let length = usize::from(self.byte()?);
        if length > NAME_BYTES_MAX {
            return Err(MessageError::Form);
        }
        let name = std::str::from_utf8(self.take(length)?).map_err(|_| MessageError::Form)?;
        if name.is_empty() { Ok(None) } else { name.parse().map(Some).map_err(|_| MessageError::Form) }
    }

    fn part(&mut self, most: usize) -> Result<&'a [u8], MessageError> {
        let length = self.take(2)?;
        let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
        if length > most { Err(MessageError::Form) } else { self.take(length) }
    }

    fn certificate(&mut self) -> Result<CertificateDer<'static>, MessageError> {
        Ok(CertificateDer::from(self.part(CERTIFICATE_BYTES_MAX)?.to_vec()))
    }

    fn end(self) -> Result<(), MessageError> {
        if self.0.iter().all(|byte| *byte == 0) { Ok(()) } else { Err(MessageError::Form) }
    }
}

/// What is wrong with a message.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum MessageError {
    #[error("the other end does not have the code, or sits between the two that have it")]
    Proof,
    #[error(
        "enrolment message speaks version {found}, this program speaks {VERSION}: both ends must run the same release"
    )]
    Version { found: u8 },
    #[error("enrolment message is not in its form")]
    Form,
    #[error("certificates and member list do not fit {GRANT_BYTES} bytes")]
    Long,
}

/// A grant of these bytes with a right proof, and zeros to the end.
#[cfg(any(test, fuzzing))]
pub(crate) fn proved_grant(bytes: &[u8], secret: &Secret, exporter: &Exporter) -> [u8; GRANT_BYTES] {
    Writer([&[0; PROOF_BYTES], bytes].concat()).proved(GRANT, secret, exporter).unwrap()
}

/// An offer of these bytes with a right proof.
#[cfg(any(test, fuzzing))]
pub(crate) fn proved_offer(bytes: &[u8], secret: &Secret, exporter: &Exporter) -> [u8; OFFER_BYTES] {
    Writer([&[0; PROOF_BYTES], bytes].concat()).proved(OFFER, secret, exporter).unwrap()
}
