//! Dialling: a neighbour, and how it is reached again when the connection to it is lost.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use quinn::{Connection, ConnectionError, TransportErrorCode};
use thiserror::Error;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::line::{Close, Line, is_final, words};
use super::node::{Inner, locked};
use super::port::{LINGER, LinkPort, Shared};
use super::tuning;
use crate::identity::{Address, HostCertificate, PeerName};
use crate::link::{LinkId, LinkLimits};
use crate::members::Refusal;
use crate::tls::{self, TlsError};

/// Between two tries to dial again.
const AGAIN: Duration = Duration::from_millis(50);
/// How long a connection that is dialled again may take to come about.
const REDIAL: Duration = tuning::SILENCE;
/// Addresses of one name that are tried.
const ADDRESSES: usize = 8;
/// An address has so much time before the next is tried beside it.
const HEAD_START: Duration = Duration::from_millis(200);

/// Why a peer was not reached.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DialError {
    #[error("{address} is not known: {error}")]
    Resolve { address: String, error: String },
    #[error("{peer} does not answer at {address} within {:.1} s: is it running, and does its firewall let UDP in?", timeout.as_secs_f32())]
    Timeout { peer: String, address: String, timeout: Duration },
    #[error("{peer} at {address} was refused, or refused us: {error}")]
    Handshake { peer: String, address: String, error: String },
    #[error("{peer} at {address} has as many connections from this host as it takes")]
    Busy { peer: String, address: String },
    #[error(transparent)]
    NotMember(#[from] Refusal),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("this node is closed")]
    Closed,
}

impl DialError {
    /// Whether trying again may help.
    pub fn may_pass(&self) -> bool {
        matches!(self, DialError::Resolve { .. } | DialError::Timeout { .. } | DialError::Busy { .. })
    }
}

/// A neighbour that this node has dialled.
#[derive(Clone)]
pub struct Peer(Arc<Dialled>);

/// A neighbour, as long as somebody has it or a link to it.
pub(super) struct Dialled {
    node: Arc<Inner>,
    name: PeerName,
    address: Address,
    now: Mutex<Now>,
    /// There is a link that wants a connection.
    wanted: Arc<Notify>,
}

struct Now {
    line: Arc<Line>,
    /// Counts the connections: the generation of the links on it.
    number: u64,
    links: Vec<Arc<Shared>>,
    /// Why it is not dialled again.
    over: Option<String>,
}

impl Peer {
    /// Who it is.
    pub fn name(&self) -> &PeerName {
        &self.0.name
    }

    /// The certificate that it has shown.
    pub fn certificate(&self) -> Option<HostCertificate> {
        tls::peer_of(&locked(&self.0.now).line.connection).ok()
    }

    /// The round trip as QUIC has measured it.
    pub fn rtt(&self) -> Duration {
        locked(&self.0.now).line.connection.rtt()
    }

    /// Why there is no connection, if there is none: in the other end's words, where it said some.
    pub fn why_closed(&self) -> Option<String> {
        let now = locked(&self.0.now);
        now.over.clone().or_else(|| now.line.why_closed())
    }

    /// The largest UDP payload that was found to pass.
    pub fn mtu(&self) -> u16 {
        locked(&self.0.now).line.connection.stats().path.current_mtu
    }

    /// Opens a link that the neighbour expects; the control link comes as a surprise.
    pub fn open(&self, id: LinkId, limits: LinkLimits) -> LinkPort {
        let node = &self.0.node;
        let shared = Shared::new(id, limits, self.0.name.clone(), true, node);
        node.keep_port(&shared);
        let mut now = locked(&self.0.now);
        now.links.retain(|link| !link.is_over());
        if now.over.is_some() {
            shared.end();
        } else {
            now.links.push(shared.clone());
            node.spawn(node.clone().open(shared.clone(), now.line.clone(), now.number));
        }
        drop(now);
        self.0.wanted.notify_one();
        LinkPort::new(shared, Some(self.0.clone()), node.clone())
    }

    pub(super) fn downgrade(&self) -> Weak<Dialled> {
        Arc::downgrade(&self.0)
    }

    /// That one, if its connection lives.
    pub(super) fn alive(dialled: &Weak<Dialled>, address: &Address) -> Option<Peer> {
        let dialled = dialled.upgrade().filter(|dialled| dialled.address == *address)?;
        let is_closed = locked(&dialled.now).line.is_closed();
        (!is_closed).then_some(Peer(dialled))
    }

    /// A neighbour whose connection has just come about.
    pub(super) fn new(node: &Arc<Inner>, address: Address, line: Arc<Line>) -> Peer {
        let now = Now { line: line.clone(), number: 1, links: Vec::new(), over: None };
        let (name, wanted) = (line.peer.clone(), Arc::new(Notify::new()));
        let dialled = Arc::new(Dialled { node: node.clone(), name, address, now: Mutex::new(now), wanted });
        node.spawn(node.clone().keep(Arc::downgrade(&dialled), dialled.wanted.clone(), line));
        Peer(dialled)
    }
}

/// For tests.
#[cfg(test)]
impl Peer {
    pub(super) fn connections(&self) -> u64 {
        locked(&self.0.now).number
    }

    pub(super) fn is(&self, other: &Peer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Dialled {
    fn is_wanted(&self) -> bool {
        locked(&self.now).links.iter().any(|link| !link.is_over())
    }

    fn renew(&self, line: &Arc<Line>) {
        let mut now = locked(&self.now);
        (now.line, now.number) = (line.clone(), now.number + 1);
        now.links.retain(|link| !link.is_over());
        for link in &now.links {
            self.node.spawn(self.node.clone().open(link.clone(), line.clone(), now.number));
        }
    }

    fn give_up(&self, why: String) {
        let links = {
            let mut now = locked(&self.now);
            now.over.get_or_insert(why);
            std::mem::take(&mut now.links)
        };
        links.iter().for_each(|link| link.end());
    }
}

impl Drop for Dialled {
    /// The connection ends when its links have said what they had to.
    fn drop(&mut self) {
        let now = self.now.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (links, line) = (std::mem::take(&mut now.links), now.line.clone());
        self.wanted.notify_one();
        self.node.spawn(async move {
            let told = async {
                for link in links {
                    link.settled().await;
                }
            };
            let _ = tokio::time::timeout(LINGER, told).await;
            line.connection.close(Close::Done.code(), b"nothing is left to do");
        });
    }
}

impl Inner {
    pub(super) async fn connect(
        &self,
        peer: &PeerName,
        address: &Address,
        timeout: Duration,
    ) -> Result<Arc<Line>, DialError> {
        let mut refused = None;
        let text = || address.to_string();
        match tokio::time::timeout(timeout, self.reach(peer, address, &mut refused)).await {
            Ok(line) => line,
            Err(_) => Err(match refused {
                Some(why) => refusal(&why, peer, address),
                None => DialError::Timeout { peer: peer.to_string(), address: text(), timeout },
            }),
        }
    }

    /// Tries all addresses of a name until one is it. `refused` is what one that answered has said.
    async fn reach(
        &self,
        peer: &PeerName,
        address: &Address,
        refused: &mut Option<ConnectionError>,
    ) -> Result<Arc<Line>, DialError> {
        let config = {
            let who = self.who();
            who.members.knows(peer)?;
            let mut config = tls::client_config(&who.identity)?;
            config.transport_config(tuning::members());
            config
        };
        let unknown = |error: String| DialError::Resolve { address: address.to_string(), error };
        let found = tokio::net::lookup_host(address.as_str()).await.map_err(|error| unknown(error.to_string()))?;
        let ours = self.endpoint.local_addr().map_err(|error| unknown(error.to_string()))?;
        // An IPv4 socket reaches no IPv6 address.
        let found = found.filter(|found| ours.is_ipv6() || found.is_ipv4());
        let mut tries = JoinSet::new();
        for (at, found) in (0..).zip(found.take(ADDRESSES)) {
            let (endpoint, config, name) = (self.endpoint.clone(), config.clone(), peer.to_string());
            tries.spawn(async move {
                tokio::time::sleep(HEAD_START * at).await;
                call(&endpoint, config, found, &name).await
            });
        }
        if tries.is_empty() {
            return Err(unknown("it has no address of this socket's kind".to_owned()));
        }
        while let Some(tried) = tries.join_next().await {
            match tried {
                Ok(Ok(connection)) => return self.admit(connection, Some(peer)),
                Ok(Err(Failed::Refused(why))) => *refused = Some(why),
                Ok(Err(Failed::Unable(error))) => {
                    let (peer, address) = (peer.to_string(), address.to_string());
                    return Err(DialError::Handshake { peer, address, error });
                }
                Err(_) => {}
            }
        }
        Err(refused.take().map_or(DialError::Closed, |why| refusal(&why, peer, address)))
    }

    /// Serves a connection that was dialled, and dials again when it is lost and a link wants it.
    async fn keep(self: Arc<Inner>, dialled: Weak<Dialled>, wanted: Arc<Notify>, mut line: Arc<Line>) {
        loop {
            self.clone().serve(line.clone()).await;
            line = loop {
                let Some(dialled) = dialled.upgrade() else { return };
                if self.is_closed() {
                    return dialled.give_up(DialError::Closed.to_string());
                }
                if let Some(why) = line.why_closed().filter(|_| line.is_over()) {
                    return dialled.give_up(why);
                }
                if !dialled.is_wanted() {
                    drop(dialled);
                    wanted.notified().await;
                    continue;
                }
                tracing::info!(peer = %dialled.name, "dials again");
                let begun = Instant::now();
                match self.connect(&dialled.name, &dialled.address, REDIAL).await {
                    Ok(line) => {
                        dialled.renew(&line);
                        break line;
                    }
                    Err(error) if error.may_pass() => {
                        tracing::debug!(peer = %dialled.name, %error, elapsed = ?begun.elapsed(), "not yet");
                        drop(dialled);
                        tokio::time::sleep(AGAIN).await;
                    }
                    Err(error) => {
                        tracing::warn!(peer = %dialled.name, %error, "is not dialled again");
                        return dialled.give_up(error.to_string());
                    }
                }
            };
        }
    }
}

enum Failed {
    /// It answered, and there is no connection.
    Refused(ConnectionError),
    /// It cannot be asked.
    Unable(String),
}

/// Knocks until somebody answers. In TLS 1.3 the dialler is done before the other end has looked at its certificate;
/// what says that it is let in is an empty stream from there.
async fn call(
    endpoint: &quinn::Endpoint,
    config: quinn::ClientConfig,
    address: SocketAddr,
    name: &str,
) -> Result<Connection, Failed> {
    loop {
        let connecting =
            endpoint.connect_with(config.clone(), address, name).map_err(|error| Failed::Unable(error.to_string()))?;
        let found = match connecting.await {
            Ok(connection) => connection.accept_uni().await.map(|_| connection),
            Err(error) => Err(error),
        };
        match found {
            Ok(connection) => return Ok(connection),
            // So many come that some are turned away unseen.
            Err(ConnectionError::ConnectionClosed(why)) if why.error_code == TransportErrorCode::CONNECTION_REFUSED => {
                tokio::time::sleep(AGAIN).await;
            }
            Err(ConnectionError::TimedOut | ConnectionError::Reset) => tokio::time::sleep(AGAIN).await,
            Err(why) => return Err(Failed::Refused(why)),
        }
    }
}

fn refusal(why: &ConnectionError, peer: &PeerName, address: &Address) -> DialError {
    let (peer, address) = (peer.to_string(), address.to_string());
    if is_final(why) {
        DialError::Handshake { peer, address, error: words(why) }
    } else {
        DialError::Busy { peer, address }
    }
}
