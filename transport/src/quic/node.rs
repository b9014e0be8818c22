//! A host's endpoint: whom it lets in, and which links lie on which connection.

use std::collections::HashMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};
use quinn::{Connection, Endpoint, Incoming, RecvStream, SendStream};
use thiserror::Error;
use tokio::runtime::{Handle, Runtime};
use tokio::sync::{Semaphore, watch};

use super::drive::Drive;
use super::line::{Close, Line};
use super::peer::{DialError, Dialled, Peer};
use super::port::{LINGER, LinkPort, Shared, Turn};
use super::tuning;
use crate::identity::{Address, Identity, PeerName, Role};
use crate::link::{Decoder, Hello, LinkId, LinkLimits, Message};
use crate::members::Members;
use crate::tls::{self, TlsError};

/// The link of a session that carries control: opened by a head, on a bidirectional stream.
pub const CONTROL: u32 = u32::MAX;

/// How long a peer has for a handshake, and for the first message on a stream.
const GREETING: Duration = Duration::from_secs(5);
/// Handshakes under way at once; more wait, and are few (`tuning::listening`).
const HANDSHAKES: usize = 64;
/// With more of them under way, who comes has to show first that its address is its own.
const HANDSHAKES_UNPROVED: usize = 16;
/// Connections with one member at once. A process has one to each neighbour, and a host may run several programs; one
/// that was lost and dialled again counts twice for a moment.
const LINES: usize = 16;
/// Control links that nobody has taken yet.
const JOINED: usize = 16;
/// How long the system may take to end what it looks up, and the other ends to hear that this one is gone.
const FAREWELL: Duration = Duration::from_millis(500);

/// What a node proves itself with, and whom it lets in.
#[derive(Clone)]
pub struct WhoAmI {
    /// Key and certificate.
    pub identity: Identity,
    /// The cluster's members.
    pub members: Members,
}

/// Why a node cannot be started.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum NodeError {
    #[error("cannot listen on UDP {address}: {error}")]
    Bind { address: SocketAddr, error: std::io::Error },
    #[error("the system starts no I/O thread: {0}")]
    Thread(std::io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A head that has come: its control link.
pub struct Joined {
    /// The link.
    pub control: LinkPort,
    /// Which session it speaks of.
    pub session: u64,
    /// From where.
    pub from: SocketAddr,
}

/// A host's endpoint. Dropping it closes all links; those whose ports were dropped before say what they have to.
pub struct Node {
    inner: Arc<Inner>,
    joined: Receiver<Joined>,
    thread: Option<JoinHandle<()>>,
}

/// What threads and tasks share. Locks are taken in the order of the fields; that of a link comes last, and none is held
/// while a task waits.
pub(super) struct Inner {
    runtime: Handle,
    pub(super) drive: Arc<Drive>,
    pub(super) endpoint: Endpoint,
    dialled: Mutex<HashMap<PeerName, Weak<Dialled>>>,
    ports: Mutex<HashMap<LinkId, Arc<Shared>>>,
    /// Connections that are there.
    lines: Mutex<Vec<Arc<Line>>>,
    who: Mutex<WhoAmI>,
    joined: Sender<Joined>,
    control: LinkLimits,
    close: watch::Sender<bool>,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Node {
    /// Starts an endpoint; a worker's listens at `listen`, a head's only dials, from any port of that address. `control`
    /// bounds control links that heads open.
    ///
    /// # Errors
    /// [`NodeError`].
    pub fn start(who: WhoAmI, listen: SocketAddr, control: LinkLimits) -> Result<Node, NodeError> {
        let server = match who.identity.name().role {
            Role::Worker => Some(server_config(&who.identity)?),
            Role::Head => None,
        };
        let socket = tuning::socket(listen).map_err(|error| NodeError::Bind { address: listen, error })?;
        let (tell, joined) = bounded(JOINED);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(NodeError::Thread)?;
        let inner = Inner::start(runtime, who, socket, server, tell, control).map_err(NodeError::Thread)?;
        let life = inner.clone();
        let run = move || life.drive.keep(life.runtime.spawn(life.clone().run()));
        let thread = std::thread::Builder::new().name("quic".to_owned()).spawn(run).map_err(NodeError::Thread)?;
        Ok(Node { inner, joined, thread: Some(thread) })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.inner.endpoint.local_addr()
    }

    /// What it proves itself with and whom it lets in.
    pub fn who(&self) -> WhoAmI {
        self.inner.who()
    }

    /// Another member list; who is not on it any more is cut off.
    pub fn set_members(&self, members: Members) {
        // Under the lock, so that a handshake that is done now asks this list or is seen here.
        let lines = locked(&self.inner.lines);
        for line in lines.iter() {
            if let Err(refusal) = members.allows(&line.peer, &line.fingerprint) {
                line.cut(Close::NotMember, &refusal);
            }
        }
        locked(&self.inner.who).members = members.clone();
        drop(lines);
        // Those that have no connection, too.
        let ports: Vec<Arc<Shared>> = locked(&self.inner.ports).values().cloned().collect();
        for port in ports {
            if members.knows(&port.peer).is_err() {
                port.end();
            }
        }
    }

    /// Another certificate of the same key, for connections from now on.
    ///
    /// # Errors
    /// [`TlsError`].
    pub fn set_identity(&self, identity: Identity) -> Result<(), TlsError> {
        if identity.name().role == Role::Worker {
            self.inner.endpoint.set_server_config(Some(server_config(&identity)?));
        }
        locked(&self.inner.who).identity = identity;
        Ok(())
    }

    /// The next head that comes within `timeout`.
    pub fn joined(&self, timeout: Duration) -> Option<Joined> {
        self.joined.recv_timeout(timeout).ok()
    }

    /// Connects to a member, or says that it is connected: there is one connection from here to each. It is dialled
    /// again when the network has lost it, as long as somebody has a link on it that is not lost. What the other end
    /// thinks of this one is known when this returns.
    ///
    /// # Errors
    /// [`DialError`].
    pub fn dial(&self, peer: &PeerName, address: &Address, timeout: Duration) -> Result<Peer, DialError> {
        let known = locked(&self.inner.dialled).get(peer).and_then(|known| Peer::alive(known, address));
        if let Some(peer) = known.filter(|_| !self.inner.is_closed()) {
            return Ok(peer);
        }
        let (tell, told) = bounded(1);
        let (inner, name, at) = (self.inner.clone(), peer.clone(), address.clone());
        self.inner.spawn(async move {
            let _ = tell.send(inner.connect(&name, &at, timeout).await);
        });
        let line = told.recv().map_err(|_| DialError::Closed)??;
        let peer = Peer::new(&self.inner, address.clone(), line);
        let mut dialled = locked(&self.inner.dialled);
        dialled.retain(|_, known| known.strong_count() > 0);
        dialled.insert(peer.name().clone(), peer.downgrade());
        Ok(peer)
    }

    /// This end of a link that `peer` will open.
    pub fn expect(&self, id: LinkId, peer: PeerName, limits: LinkLimits) -> LinkPort {
        let shared = Shared::new(id, limits, peer, false, &self.inner);
        self.inner.keep_port(&shared);
        LinkPort::new(shared, None, self.inner.clone())
    }
}

/// For tests.
#[cfg(test)]
impl Node {
    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    pub(super) fn connections(&self) -> usize {
        locked(&self.inner.lines).len()
    }

    pub(super) fn ports(&self) -> usize {
        locked(&self.inner.ports).len()
    }

    pub(super) fn tasks(&self) -> usize {
        self.inner.runtime.metrics().num_alive_tasks()
    }

    /// Keeps whoever does the node's work from it.
    pub(super) fn block(&self, time: Duration) {
        self.inner.spawn(async move { std::thread::sleep(time) });
        std::thread::sleep(time);
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.inner.close.send_replace(true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn start(
        runtime: Runtime,
        who: WhoAmI,
        socket: UdpSocket,
        server: Option<quinn::ServerConfig>,
        joined: Sender<Joined>,
        control: LinkLimits,
    ) -> std::io::Result<Arc<Inner>> {
        let handle = runtime.handle().clone();
        let drive = Arc::new(Drive::new(runtime));
        let entered = handle.enter();
        let endpoint = Endpoint::new(tuning::endpoint(), server, socket, Arc::new(quinn::TokioRuntime))?;
        drop(entered);
        Ok(Arc::new(Inner {
            runtime: handle,
            drive,
            endpoint,
            dialled: Mutex::default(),
            ports: Mutex::default(),
            lines: Mutex::default(),
            who: Mutex::new(who),
            joined,
            control,
            close: watch::Sender::new(false),
        }))
    }

    /// The life of the node.
    async fn run(self: Arc<Inner>) {
        self.spawn(self.clone().accept());
        let _ = self.close.subscribe().wait_for(|closed| *closed).await;
        // Whoever waits for a link need not any more. What was sent by ports that are dropped still goes out.
        let ports: Vec<Arc<Shared>> = locked(&self.ports).values().cloned().collect();
        let (leaving, held): (Vec<_>, Vec<_>) = ports.into_iter().partition(|port| port.is_leaving());
        held.iter().for_each(|port| port.end());
        let told = async {
            for port in &leaving {
                port.settled().await;
            }
        };
        let _ = tokio::time::timeout(LINGER, told).await;
        self.endpoint.close(Close::Done.code(), b"the process ends");
        let _ = tokio::time::timeout(FAREWELL, self.endpoint.wait_idle()).await;
        leaving.iter().for_each(|port| port.end());
        // They have this value, and this value has them.
        locked(&self.ports).clear();
        locked(&self.lines).clear();
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    pub(super) fn is_closed(&self) -> bool {
        *self.close.borrow()
    }

    pub(super) fn who(&self) -> WhoAmI {
        locked(&self.who).clone()
    }

    /// A link is there for the streams that name it. One of the same name that was there before is over.
    pub(super) fn keep_port(self: &Arc<Inner>, port: &Arc<Shared>) {
        let before = locked(&self.ports).insert(port.id, port.clone());
        if let Some(before) = before {
            before.end();
        }
        self.spawn(port.clone().live(self.clone()));
    }

    /// The link is over.
    pub(super) fn forget(&self, port: &Arc<Shared>) {
        let mut ports = locked(&self.ports);
        if ports.get(&port.id).is_some_and(|found| Arc::ptr_eq(found, port)) {
            ports.remove(&port.id);
        }
    }

    async fn accept(self: Arc<Inner>) {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        while let Some(incoming) = self.endpoint.accept().await {
            let is_crowded = handshakes.available_permits() < HANDSHAKES - HANDSHAKES_UNPROVED;
            if is_crowded && incoming.may_retry() && !incoming.remote_address_validated() {
                let _ = incoming.retry();
                continue;
            }
            let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
            let inner = self.clone();
            self.spawn(async move {
                let address = incoming.remote_address();
                let greeted = inner.greet(incoming).await;
                drop(permit);
                match greeted {
                    Ok(line) => {
                        inner.spawn(welcome(line.clone()));
                        inner.serve(line).await;
                    }
                    Err(error) => tracing::info!(%address, error, "refused a connection"),
                }
            });
        }
    }

    /// A handshake with somebody who has come. The error says why there is no connection.
    async fn greet(&self, incoming: Incoming) -> Result<Arc<Line>, String> {
        let connecting = incoming.accept().map_err(|error| error.to_string())?;
        let done = tokio::time::timeout(GREETING, connecting).await;
        let connection = done.map_err(|_| "no handshake in time".to_owned())?.map_err(|error| error.to_string())?;
        self.admit(connection, None).map_err(|error| error.to_string())
    }

    /// Lets a connection live whose handshake is done, if its other end is a member, and the one that was asked for.
    pub(super) fn admit(&self, connection: Connection, asked: Option<&PeerName>) -> Result<Arc<Line>, DialError> {
        let certificate = tls::peer_of(&connection).inspect_err(|error| {
            connection.close(Close::NotMember.code(), error.to_string().as_bytes());
        })?;
        let (peer, fingerprint) = (certificate.name().clone(), certificate.fingerprint());
        let address = connection.remote_address().to_string();
        let line = Arc::new(Line::new(connection, peer.clone(), fingerprint));
        let mut lines = locked(&self.lines);
        if let Err(refusal) = locked(&self.who).members.allows(&peer, &fingerprint) {
            line.cut(Close::NotMember, &refusal);
            return Err(refusal.into());
        }
        if lines.iter().filter(|other| other.peer == peer).count() >= LINES {
            line.cut(Close::Busy, &"you have too many connections to this host");
            return Err(DialError::Busy { peer: peer.to_string(), address });
        }
        debug_assert!(asked.is_none_or(|asked| *asked == peer), "TLS compares the name that was dialled");
        lines.push(line.clone());
        Ok(line)
    }

    /// Takes what the other end opens on a connection, until that is closed.
    pub(super) async fn serve(self: Arc<Inner>, line: Arc<Line>) {
        let connection = &line.connection;
        loop {
            let opened = tokio::select! {
                stream = connection.accept_uni() => stream.map(|stream| (stream, None)),
                both = connection.accept_bi() => both.map(|(send, stream)| (stream, Some(send))),
            };
            let Ok((stream, answer)) = opened else { break };
            self.spawn(self.clone().greeted(line.clone(), stream, answer));
        }
        tracing::debug!(peer = %line.peer, why = line.why_closed(), "a connection is gone");
        locked(&self.lines).retain(|other| !Arc::ptr_eq(other, &line));
        let ports: Vec<Arc<Shared>> = locked(&self.ports).values().cloned().collect();
        ports.iter().for_each(|port| port.line_closed(&line));
    }

    /// A stream that the other end has opened: reads its first message and gives it to the link that it names.
    async fn greeted(self: Arc<Inner>, line: Arc<Line>, mut stream: RecvStream, answer: Option<SendStream>) {
        let hello = match tokio::time::timeout(GREETING, read_hello(&mut stream)).await {
            Ok(Ok(Some(hello))) => hello,
            // It says nothing and never will.
            Ok(Ok(None)) => return,
            Ok(Err(error)) => return line.cut(Close::Protocol, &error),
            Err(_) => return line.cut(Close::Protocol, &"a stream without a hello"),
        };
        match self.link_of(&line, &hello, answer.is_some()) {
            Ok(Some(port)) if port.dials => port.read(line, stream, hello.generation, Some(hello)).await,
            Ok(Some(port)) => {
                let Some(turn) = port.connected(hello.generation, &line) else { return };
                self.spawn(answer_on(port.clone(), line.clone(), answer, turn));
                port.read(line, stream, hello.generation, Some(hello)).await;
            }
            // The link was given up here. The other end hears no more of it.
            Ok(None) => drop(stream.stop(Close::Done.code())),
            Err(error) => line.cut(Close::Protocol, &error),
        }
    }

    /// The link that a hello names. A peer that names none of its own is in error.
    fn link_of(
        self: &Arc<Inner>,
        line: &Line,
        hello: &Hello,
        is_two_way: bool,
    ) -> Result<Option<Arc<Shared>>, &'static str> {
        let is_control = hello.id.link == CONTROL;
        if is_control != is_two_way {
            return Err("control has a bidirectional stream, and nothing else has");
        }
        if is_control && (line.peer.role != Role::Head) {
            return Err("only heads open control links");
        }
        let found = locked(&self.ports).get(&hello.id).cloned();
        match found {
            Some(port) if port.peer != line.peer => Err("the link belongs to another host"),
            Some(port) if port.dials && is_two_way => Err("the link was opened from here"),
            Some(port) => Ok(Some(port)),
            // One that has heard of this end before is the rest of a link that is over.
            None if is_control && hello.ack.received == 0 => self.join(line, hello.id).map(Some),
            None => Ok(None),
        }
    }

    /// A head has come.
    fn join(self: &Arc<Inner>, line: &Line, id: LinkId) -> Result<Arc<Shared>, &'static str> {
        let port = Shared::new(id, self.control, line.peer.clone(), false, self);
        self.keep_port(&port);
        let control = LinkPort::new(port.clone(), None, self.clone());
        let joined = Joined { control, session: id.session, from: line.connection.remote_address() };
        match self.joined.try_send(joined) {
            Ok(()) => Ok(port),
            Err(_) => Err("too many heads at once"),
        }
    }

    /// Opens the streams of a link on a connection that was dialled, the one of that number.
    pub(super) async fn open(self: Arc<Inner>, port: Arc<Shared>, line: Arc<Line>, number: u64) {
        let Some(turn) = port.connected(number, &line) else { return };
        if port.id.link != CONTROL {
            match line.connection.open_uni().await {
                Ok(send) => port.write(line, send, turn).await,
                Err(_) => port.disconnected(number, &line),
            }
            return;
        }
        match line.connection.open_bi().await {
            Ok((send, stream)) => {
                prefer(&send, port.id);
                self.spawn(port.clone().write(line.clone(), send, turn));
                port.read(line, stream, number, None).await;
            }
            Err(_) => port.disconnected(number, &line),
        }
    }
}

/// Tells a dialler that it is in, by an empty stream.
async fn welcome(line: Arc<Line>) {
    match tokio::time::timeout(GREETING, line.connection.open_uni()).await {
        Ok(Ok(mut stream)) => drop(stream.finish()),
        // It has gone.
        Ok(Err(_)) => {}
        Err(_) => line.cut(Close::Protocol, &"you take no streams"),
    }
}

/// Writes on a link that the other end has opened.
async fn answer_on(port: Arc<Shared>, line: Arc<Line>, answer: Option<SendStream>, turn: Turn) {
    let send = match answer {
        Some(send) => send,
        None => match line.connection.open_uni().await {
            Ok(send) => send,
            // The reader finds the same.
            Err(_) => return,
        },
    };
    prefer(&send, port.id);
    port.write(line, send, turn).await;
}

/// Control goes before data.
fn prefer(stream: &SendStream, id: LinkId) {
    if id.link == CONTROL {
        let _ = stream.set_priority(1);
    }
}

/// The first message of a stream; nothing if the stream, or the connection, ends before it.
async fn read_hello(stream: &mut RecvStream) -> Result<Option<Hello>, String> {
    // Only a header: a payload has no place in a first message.
    let mut decoder = Decoder::new(0);
    loop {
        let Ok(Some(count)) = stream.read(decoder.space()).await else { return Ok(None) };
        match decoder.advance(count) {
            Ok(Some(Message::Hello(hello))) => return Ok(Some(hello)),
            Ok(Some(_)) => return Err("the first message on a stream is no hello".to_owned()),
            Ok(None) => {}
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn server_config(identity: &Identity) -> Result<quinn::ServerConfig, TlsError> {
    let mut config = tls::server_config(identity)?;
    tuning::listening(&mut config);
    Ok(config)
}
