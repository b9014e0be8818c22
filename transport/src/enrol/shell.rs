//! The two ends of an enrolment over a quinn connection.

use std::error::Error as StdError;
use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use quinn::{ApplicationClose, Connection, ConnectionError, RecvStream, SendStream, VarInt};
use rustls_pki_types::UnixTime;
use thiserror::Error;

use super::message::{EXPORTER_LABEL, Exporter};
use super::{Code, Enrolment, GRANT_BYTES, Grant, Judged, MessageError, OFFER_BYTES, Offer, Shut, WRONG_PROOFS_MAX};
use crate::identity::{
    Authority, CaCertificate, Fingerprint, HostCertificate, Identity, IdentityError, Key, Name, PeerName, Role,
};
use crate::members::{Member, Members, MembersError, SignedMembers};
use crate::tls::{ENROL_ALPN, TlsError, check_alpn, enrolling_key_of};

/// How long each end waits for the other's next word.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a worker closes the connection with, and the head.
mod closed {
    pub(super) const KEPT: u32 = 0;
    pub(super) const SHUT: u32 = 1;
    pub(super) const WRONG_PROOF: u32 = 2;
    pub(super) const BAD_GRANT: u32 = 3;
    pub(super) const NOT_KEPT: u32 = 4;
    pub(super) const HEAD_REFUSES: u32 = 5;
}

/// Who asks to be enrolled: its key is proved, and it has the code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its key.
    pub fingerprint: Fingerprint,
    /// What it would like to be called.
    pub name: Option<Name>,
}

/// The head's end: proves `code`, and signs the worker's key once the worker has proved it too. `enlist` gives the
/// worker its name and adds it to the stored member list; it is called before the certificate is sent, so that no
/// host has one that the list does not know. `head` is the head's own entry in the list.
///
/// Returns the certificate once the worker has said that it keeps it.
///
/// # Errors
/// [`AskError`]. After [`AskError::Unconfirmed`] and [`AskError::Refused`] the worker is in the list already.
pub async fn ask<E: Into<Box<dyn StdError + Send + Sync>>>(
    connection: &Connection,
    code: &Code,
    authority: &Authority,
    head: &Member,
    enlist: impl FnOnce(&Host) -> Result<Name, E>,
) -> Result<HostCertificate, AskError> {
    let asked = ask_open(connection, code, authority, head, enlist).await;
    let (code, reason) = match &asked {
        Ok(_) => (closed::KEPT, &b"enrolled"[..]),
        Err(_) => (closed::HEAD_REFUSES, &b"the head refuses"[..]),
    };
    // Of no effect where the worker has closed it.
    connection.close(VarInt::from_u32(code), reason);
    asked
}

async fn ask_open<E: Into<Box<dyn StdError + Send + Sync>>>(
    connection: &Connection,
    code: &Code,
    authority: &Authority,
    head: &Member,
    enlist: impl FnOnce(&Host) -> Result<Name, E>,
) -> Result<HostCertificate, AskError> {
    let key = enrolling_key_of(connection)?;
    let fingerprint = key.fingerprint();
    if !code.is_for(&fingerprint) {
        return Err(AskError::OtherKey { found: fingerprint });
    }
    let exporter = exporter(connection)?;
    let code = code.clone();
    let is_preset = code.is_preset();
    // A preset code takes a processor for some tenths of a second, in which the connection has to live.
    let secret = tokio::task::spawn_blocking(move || code.secret(&fingerprint)).await.map_err(|_| AskError::Stopped)?;

    let (mut send, mut receive) = soon(connection.accept_bi()).await?.map_err(AskError::from_worker)?;
    let offer = read::<OFFER_BYTES>(&mut receive).await?.map_err(|_| AskError::from_close(connection))?;
    let offer = Offer::decode(&offer, &secret, &exporter)?;
    if offer.is_preset != is_preset {
        return Err(AskError::Kind { is_preset: offer.is_preset });
    }

    let name = enlist(&Host { fingerprint, name: offer.name }).map_err(|error| AskError::Enlist(error.into()))?;
    let peer = PeerName { cluster: authority.cluster(), role: Role::Worker, name: name.clone() };
    let certificate = authority.issue_now(&key, &peer, UnixTime::now())?;
    let grant = Grant {
        name,
        authority: authority.certificate().der().clone(),
        certificate: certificate.der().clone(),
        members: SignedMembers::sign(&Members::founding(authority.cluster(), head.clone()), authority)?,
    };
    let grant = grant.encode(&secret, &exporter)?;
    write(&mut send, &grant).await?.map_err(|()| AskError::from_close(connection))?;
    match soon(connection.closed()).await? {
        ConnectionError::ApplicationClosed(close) if code_of(&close) == closed::KEPT => Ok(certificate),
        ConnectionError::ApplicationClosed(close) => Err(AskError::Refused { reason: reason(&close) }),
        _ => Err(AskError::Unconfirmed { name: Box::new(peer) }),
    }
}

/// The worker's end: proves the code that `enrolment` is open for, checks what the head grants, and hands it to `keep`,
/// which stores it. Only when that has succeeded the head is told that the worker is enrolled.
///
/// # Errors
/// [`AnswerError`]. Unless [`Enrolment::check`] says otherwise the code is still valid.
pub async fn answer<E: Into<Box<dyn StdError + Send + Sync>>>(
    connection: &Connection,
    enrolment: &Mutex<Enrolment>,
    key: &Key,
    name: Option<&Name>,
    keep: impl FnOnce(&Identity, &SignedMembers) -> Result<(), E>,
) -> Result<Identity, AnswerError> {
    let answered = answer_open(connection, enrolment, key, name, keep).await;
    let (code, reason) = match &answered {
        Ok(_) => (closed::KEPT, "enrolled"),
        Err(AnswerError::Shut(_)) => (closed::SHUT, "the code is not valid any more"),
        Err(AnswerError::WrongCode { .. }) => (closed::WRONG_PROOF, "wrong code"),
        Err(AnswerError::Keep(_)) => (closed::NOT_KEPT, "not stored"),
        Err(_) => (closed::BAD_GRANT, "not taken"),
    };
    connection.close(VarInt::from_u32(code), reason.as_bytes());
    answered
}

async fn answer_open<E: Into<Box<dyn StdError + Send + Sync>>>(
    connection: &Connection,
    enrolment: &Mutex<Enrolment>,
    key: &Key,
    name: Option<&Name>,
    keep: impl FnOnce(&Identity, &SignedMembers) -> Result<(), E>,
) -> Result<Identity, AnswerError> {
    check_alpn(connection, ENROL_ALPN)?;
    let exporter = exporter(connection)?;
    let offer = {
        let enrolment = lock(enrolment);
        enrolment.check(Instant::now())?;
        enrolment.offer(&exporter, name)
    };
    let (mut send, mut receive) = soon(connection.open_bi()).await?.map_err(|_| AnswerError::Gone)?;
    write(&mut send, &offer).await?.map_err(|()| AnswerError::Gone)?;
    let grant = read::<GRANT_BYTES>(&mut receive).await?.map_err(|length| match length {
        Some(found) => AnswerError::Length { found },
        None => AnswerError::Gone,
    })?;
    let grant = judge(enrolment, &grant, &exporter).await?;
    let identity = granted(&grant, key, UnixTime::now())?;
    keep(&identity, &grant.members).map_err(|error| AnswerError::Keep(error.into()))?;
    Ok(identity)
}

/// Waits where a wrong proof came just before: the head is not to be turned away for a stranger's guess. Wrong proofs
/// are few, so this ends.
async fn judge(
    enrolment: &Mutex<Enrolment>,
    grant: &[u8; GRANT_BYTES],
    exporter: &Exporter,
) -> Result<Grant, AnswerError> {
    loop {
        let judged = lock(enrolment).judge(grant, exporter, Instant::now());
        match judged {
            Err(Judged::TooSoon { until }) => tokio::time::sleep_until(until.into()).await,
            judged => return Ok(judged?),
        }
    }
}

/// The identity that a proved grant gives: its certificate is for this key and the granted name, a worker's, by the
/// authority in it, and so is the list, which knows a head.
pub(crate) fn granted(grant: &Grant, key: &Key, now: UnixTime) -> Result<Identity, AnswerError> {
    let authority = CaCertificate::parse(&grant.authority)?;
    let certificate = HostCertificate::parse(&grant.certificate)?;
    let mine = PeerName { cluster: authority.cluster(), role: Role::Worker, name: grant.name.clone() };
    if *certificate.name() != mine {
        let (found, mine) = (Box::new(certificate.name().clone()), Box::new(mine));
        return Err(IdentityError::OtherName { found, mine }.into());
    }
    authority.verify(&certificate, now)?;
    let members = grant.members.verify(&authority)?;
    if !members.members().iter().any(|member| member.role == Role::Head) {
        return Err(AnswerError::NoHead);
    }
    Ok(Identity::new(key.clone(), certificate, authority)?)
}

fn exporter(connection: &Connection) -> Result<Exporter, NoExporter> {
    let mut exporter = [0; 32];
    connection.export_keying_material(&mut exporter, EXPORTER_LABEL, &[]).map_err(|_| NoExporter)?;
    Ok(exporter)
}

async fn soon<F: Future>(future: F) -> Result<F::Output, Silence> {
    tokio::time::timeout(PATIENCE, future).await.map_err(|_| Silence)
}

/// The whole message and the end of the stream, or how long another message was, where it was one.
async fn read<const N: usize>(stream: &mut RecvStream) -> Result<Result<[u8; N], Option<usize>>, Silence> {
    let message = match soon(stream.read_to_end(N)).await? {
        Ok(message) => message,
        Err(quinn::ReadToEndError::TooLong) => return Ok(Err(Some(N + 1))),
        Err(quinn::ReadToEndError::Read(_)) => return Ok(Err(None)),
    };
    Ok(message.try_into().map_err(|message: Vec<u8>| Some(message.len())))
}

async fn write(stream: &mut SendStream, message: &[u8]) -> Result<Result<(), ()>, Silence> {
    let written = soon(stream.write_all(message)).await?;
    Ok(written.map_err(drop).and_then(|()| stream.finish().map_err(drop)))
}

/// A panic elsewhere leaves the state as it was: all its changes are single assignments.
fn lock(enrolment: &Mutex<Enrolment>) -> MutexGuard<'_, Enrolment> {
    enrolment.lock().unwrap_or_else(PoisonError::into_inner)
}

fn code_of(close: &ApplicationClose) -> u32 {
    u32::try_from(close.error_code.into_inner()).unwrap_or(u32::MAX)
}

/// The other end has not said a word within ten seconds.
#[derive(Debug)]
pub(super) struct Silence;

/// TLS derives no key for this connection.
#[derive(Debug)]
pub(super) struct NoExporter;

/// Why a worker could not be enrolled, on the head.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum AskError {
    #[error("the worker has key {found}, the code is for another: the address is wrong, or somebody sits in between")]
    OtherKey { found: Fingerprint },
    #[error("the worker does not have this code: compare it with what the worker has printed, or its PP_JOIN_CODE")]
    WrongCode,
    #[error("the worker's code is {}, the one given here is not", if *is_preset { "preset" } else { "a printed one" })]
    Kind { is_preset: bool },
    #[error("the worker takes no code any more, or not just now: {}", reason)]
    Closed { reason: &'static str },
    #[error(
        "the worker did not take the certificate ({reason}); it is in the member list: add it again with a new \
        code, or remove it"
    )]
    Refused { reason: &'static str },
    #[error(
        "{name} was sent its certificate and has not said that it keeps it: if it does not serve, start it \
        again and add it with its new code"
    )]
    Unconfirmed { name: Box<PeerName> },
    #[error("the worker says nothing for {} s", PATIENCE.as_secs())]
    Silence,
    #[error("the connection to the worker broke: {0}")]
    Gone(ConnectionError),
    #[error("the worker could not be listed: {0}")]
    Enlist(#[source] Box<dyn StdError + Send + Sync>),
    #[error("{0}")]
    Message(MessageError),
    #[error("the program ends")]
    Stopped,
    #[error("TLS derives no key for this connection")]
    NoExporter,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Members(#[from] MembersError),
}

impl AskError {
    /// Why a connection ended before the certificate was sent.
    fn from_worker(error: ConnectionError) -> AskError {
        match &error {
            ConnectionError::ApplicationClosed(close) => AskError::Closed { reason: reason(close) },
            _ => AskError::Gone(error),
        }
    }

    fn from_close(connection: &Connection) -> AskError {
        connection.close_reason().map_or(AskError::Message(MessageError::Form), AskError::from_worker)
    }
}

/// What a worker's code means. The text that came with it is the worker's, and not shown.
fn reason(close: &ApplicationClose) -> &'static str {
    match code_of(close) {
        closed::SHUT => "its code has expired, was used, or was guessed at too often: start it again for another",
        closed::WRONG_PROOF => "it says that the code is wrong",
        closed::NOT_KEPT => "it could not store it; its own messages say why",
        _ => "its own messages say why",
    }
}

impl From<MessageError> for AskError {
    fn from(error: MessageError) -> AskError {
        if error == MessageError::Proof { AskError::WrongCode } else { AskError::Message(error) }
    }
}

impl From<Silence> for AskError {
    fn from(Silence: Silence) -> AskError {
        AskError::Silence
    }
}

impl From<NoExporter> for AskError {
    fn from(NoExporter: NoExporter) -> AskError {
        AskError::NoExporter
    }
}

/// Why a worker was not enrolled, on the worker.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum AnswerError {
    #[error(transparent)]
    Shut(#[from] Shut),
    #[error("somebody dialled without the right code; after {left} more of {WRONG_PROOFS_MAX} the code is void")]
    WrongCode { left: u32 },
    #[error("the head says nothing for {} s", PATIENCE.as_secs())]
    Silence,
    #[error("the head has closed the connection: the code that it was given may be wrong")]
    Gone,
    #[error("a grant of {found} bytes, it has {GRANT_BYTES}")]
    Length { found: usize },
    #[error("the member list in the grant has no head")]
    NoHead,
    #[error("what the head granted could not be stored: {0}")]
    Keep(#[source] Box<dyn StdError + Send + Sync>),
    #[error(transparent)]
    Message(MessageError),
    #[error("TLS derives no key for this connection")]
    NoExporter,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Members(#[from] MembersError),
}

impl From<Judged> for AnswerError {
    fn from(judged: Judged) -> AnswerError {
        match judged {
            Judged::Shut(shut) => AnswerError::Shut(shut),
            // Not met: it is waited for.
            Judged::TooSoon { .. } => AnswerError::Silence,
            Judged::WrongProof { left } => AnswerError::WrongCode { left },
            Judged::Message(error) => AnswerError::Message(error),
        }
    }
}

impl From<Silence> for AnswerError {
    fn from(Silence: Silence) -> AnswerError {
        AnswerError::Silence
    }
}

impl From<NoExporter> for AnswerError {
    fn from(NoExporter: NoExporter) -> AnswerError {
        AnswerError::NoExporter
    }
}
