//! Enrolment for programs without a runtime: a worker's endpoint that speaks nothing else, and a head's call.
//!
//! A [`super::Node`] is started on the same address once the worker is enrolled, so that no endpoint ever speaks both
//! protocols.

use std::error::Error as StdError;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use quinn::{ConnectionError, Endpoint, EndpointConfig, Incoming, TransportErrorCode};
use thiserror::Error;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::NodeError;
use crate::enrol::{AnswerError, AskError, Code, CodeError, Enrolment, Host, Shut, answer, ask};
use crate::identity::{Address, Authority, HostCertificate, Identity, IdentityError, Key, Name};
use crate::members::{Member, SignedMembers};
use crate::tls::{self, ENROL_SERVER_NAME, TlsError};

/// How long a handshake may take, and a worker to answer a head's call.
const GREETING: Duration = Duration::from_secs(5);
/// Diallers that are spoken with at once; more are turned away. Each shows that it receives at its address first.
const AT_ONCE: usize = 64;
/// How often a waiting worker looks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);
/// How long the last word of an enrolment may take to arrive.
const LINGER: Duration = Duration::from_millis(500);
/// What TLS says when two ends have no protocol in common (RFC 8446, no_application_protocol).
const NO_PROTOCOL: u8 = 120;

/// What a worker that waits for its enrolment has to tell.
#[derive(Debug)]
pub enum Waiting<'a> {
    /// It listens at `address`; whoever has `code` may enrol it until the code expires.
    Code {
        /// Where, with the port that the system has chosen where none was asked for.
        address: SocketAddr,
        /// The code.
        code: &'a Code,
        /// Why there is a new one.
        again: Option<Shut>,
    },
    /// Somebody dialled and was not taken for the head.
    Refused {
        /// From where.
        from: SocketAddr,
        /// Why.
        error: &'a AnswerError,
    },
}

/// Why a worker is not enrolled, or a head could not enrol it.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum JoinError {
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("{0}; the code was preset, so no other is made")]
    Preset(Shut),
    #[error(transparent)]
    Answer(AnswerError),
    #[error(transparent)]
    Code(#[from] CodeError),
    #[error("{address} is not known: {error}")]
    Resolve { address: String, error: std::io::Error },
    #[error(
        "nobody answers at {address} within {} s: is the worker running, is the address right, and does its firewall let UDP in?",
        GREETING.as_secs()
    )]
    Timeout { address: String },
    #[error(
        "the worker at {address} is in a cluster already and enrols no more: if it is to change clusters, stop it, remove its cluster folder and start it again"
    )]
    Enrolled { address: String },
    #[error("the connection to {address} failed: {error}")]
    Connection { address: String, error: ConnectionError },
    #[error(transparent)]
    Ask(#[from] AskError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Listens at `listen` for a head that has the code, and for nothing else, until one has enrolled this worker: returns
/// its identity and where it listened; nothing when `cancel` was set before. `name` is what the worker would like to be
/// called. Where no code is preset one is made, and another whenever it is not valid any more; `tell` hears of it.
/// `keep` stores what the head has granted.
///
/// # Errors
/// [`JoinError`]: the address is taken, a preset code has expired, what was granted could not be stored.
pub fn wait_for_enrolment<E: Into<Box<dyn StdError + Send + Sync>> + 'static>(
    listen: SocketAddr,
    key: &Key,
    name: Option<&Name>,
    preset: Option<&Code>,
    cancel: &AtomicBool,
    tell: &mut dyn FnMut(Waiting<'_>),
    keep: impl Fn(&Identity, &SignedMembers) -> Result<(), E> + Send + Sync + 'static,
) -> Result<Option<(Identity, SocketAddr)>, JoinError> {
    let bind = |error| NodeError::Bind { address: listen, error };
    let socket = UdpSocket::bind(listen).map_err(bind)?;
    let address = socket.local_addr().map_err(bind)?;
    let config = tls::enrol_server_config(key)?;
    let keep: Keep = Arc::new(move |identity, members| keep(identity, members).map_err(Into::into));
    runtime()?.block_on(async {
        let io = Arc::new(quinn::TokioRuntime);
        let endpoint = Endpoint::new(EndpointConfig::default(), Some(config), socket, io).map_err(bind)?;
        let mut waiting = Desk { endpoint: &endpoint, key, name, keep, talks: JoinSet::new() };
        let mut again = None;
        let identity = loop {
            let code = match preset {
                Some(code) => code.clone(),
                None => Code::generate(&key.fingerprint())?,
            };
            tell(Waiting::Code { address, code: &code, again });
            let enrolment = Arc::new(Mutex::new(Enrolment::open(&code, key, Instant::now())));
            match waiting.attend(&enrolment, cancel, tell).await? {
                Attended::Enrolled(identity) => break Some(*identity),
                Attended::Cancelled => break None,
                Attended::Shut(shut) if preset.is_some() => return Err(JoinError::Preset(shut)),
                Attended::Shut(shut) => again = Some(shut),
            }
        };
        endpoint.close(0u32.into(), b"enrolment is over");
        let _ = tokio::time::timeout(LINGER, endpoint.wait_idle()).await;
        Ok(identity.map(|identity| (identity, address)))
    })
}

type Keep = Arc<dyn Fn(&Identity, &SignedMembers) -> Result<(), Box<dyn StdError + Send + Sync>> + Send + Sync>;

/// Where diallers are spoken with.
struct Desk<'a> {
    endpoint: &'a Endpoint,
    key: &'a Key,
    name: Option<&'a Name>,
    keep: Keep,
    talks: JoinSet<(SocketAddr, Option<Result<Identity, AnswerError>>)>,
}

/// What came of a code.
enum Attended {
    Enrolled(Box<Identity>),
    Cancelled,
    Shut(Shut),
}

impl Desk<'_> {
    /// Speaks with whoever comes, as long as the code is valid.
    async fn attend(
        &mut self,
        enrolment: &Arc<Mutex<Enrolment>>,
        cancel: &AtomicBool,
        tell: &mut dyn FnMut(Waiting<'_>),
    ) -> Result<Attended, JoinError> {
        loop {
            if cancel.load(Ordering::Relaxed) {
                return Ok(Attended::Cancelled);
            }
            let found = enrolment.lock().unwrap_or_else(PoisonError::into_inner).check(Instant::now());
            // A code that was used is being proved right now, by somebody whose talk is not over.
            if let Err(shut) = found
                && (shut != Shut::Used || self.talks.is_empty())
            {
                return Ok(Attended::Shut(shut));
            }
            tokio::select! {
                Some(incoming) = self.endpoint.accept() => self.greet(incoming, enrolment),
                Some(Ok((from, Some(answered)))) = self.talks.join_next() => match answered {
                    Ok(identity) => return Ok(Attended::Enrolled(Box::new(identity))),
                    Err(error @ AnswerError::Keep(_)) => return Err(JoinError::Answer(error)),
                    Err(error) => tell(Waiting::Refused { from, error: &error }),
                },
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    fn greet(&mut self, incoming: Incoming, enrolment: &Arc<Mutex<Enrolment>>) {
        if !incoming.remote_address_validated() {
            // It fails only for addresses that are validated.
            let _ = incoming.retry();
            return;
        }
        if self.talks.len() >= AT_ONCE {
            return incoming.refuse();
        }
        let (enrolment, key, name, keep) = (enrolment.clone(), self.key.clone(), self.name.cloned(), self.keep.clone());
        self.talks.spawn(async move {
            let from = incoming.remote_address();
            let Ok(connecting) = incoming.accept() else { return (from, None) };
            let Ok(Ok(connection)) = tokio::time::timeout(GREETING, connecting).await else { return (from, None) };
            let keep = |identity: &Identity, members: &SignedMembers| keep(identity, members);
            (from, Some(answer(&connection, &enrolment, &key, name.as_ref(), keep).await))
        });
    }
}

/// Enrols the worker at `address` that has printed `code`: `enlist` names it and adds it to the stored member list;
/// `head` is the head's own entry there. Returns the worker's certificate once the worker keeps it.
///
/// # Errors
/// [`JoinError`]; after some of [`AskError`]'s the worker is in the list already.
pub fn enrol_worker<E: Into<Box<dyn StdError + Send + Sync>>>(
    address: &Address,
    code: &Code,
    authority: &Authority,
    head: &Member,
    enlist: impl FnOnce(&Host) -> Result<Name, E>,
) -> Result<HostCertificate, JoinError> {
    let config = tls::enrol_client_config()?;
    let text = address.to_string();
    runtime()?.block_on(async {
        let unknown = |error| JoinError::Resolve { address: text.clone(), error };
        let mut found = tokio::net::lookup_host(address.as_str()).await.map_err(unknown)?;
        let to = found.next().ok_or_else(|| unknown(std::io::Error::other("the name has no address")))?;
        let from = match to {
            SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        };
        let endpoint = Endpoint::client(from).map_err(|error| NodeError::Bind { address: from, error })?;
        let connecting = endpoint.connect_with(config, to, ENROL_SERVER_NAME).map_err(|error| JoinError::Resolve {
            address: text.clone(),
            error: std::io::Error::other(error.to_string()),
        })?;
        let connection = match tokio::time::timeout(GREETING, connecting).await {
            Err(_) | Ok(Err(ConnectionError::TimedOut)) => return Err(JoinError::Timeout { address: text }),
            Ok(Err(error)) if has_other_protocol(&error) => return Err(JoinError::Enrolled { address: text }),
            Ok(Err(error)) => return Err(JoinError::Connection { address: text, error }),
            Ok(Ok(connection)) => connection,
        };
        let asked = ask(&connection, code, authority, head, enlist).await;
        endpoint.close(0u32.into(), b"enrolment is over");
        let _ = tokio::time::timeout(LINGER, endpoint.wait_idle()).await;
        Ok(asked?)
    })
}

/// The other end speaks the cluster's protocol.
fn has_other_protocol(error: &ConnectionError) -> bool {
    let code = TransportErrorCode::crypto(NO_PROTOCOL);
    match error {
        ConnectionError::ConnectionClosed(close) => close.error_code == code,
        ConnectionError::TransportError(error) => error.code == code,
        _ => false,
    }
}

fn runtime() -> Result<Runtime, JoinError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(NodeError::Thread)?)
}

#[cfg(test)]
mod tests;
