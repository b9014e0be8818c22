//! A member that breaks the protocol loses its own connection, and nobody else anything.

use bytes::Bytes;
use quinn::{Connection, ConnectionError, Endpoint, SendStream};

use super::*;
use crate::frame::HEADER_BYTES;
use crate::link::{Ack, Hello, LinkState, Message};

/// A worker's link to a head that goes on, whatever a third one does to the worker.
struct Scene {
    pair: Pair,
    rogue: Identity,
    runtime: tokio::runtime::Handle,
    /// Ends the thread that drives the rogue's connections.
    _stop: tokio::sync::oneshot::Sender<()>,
}

/// A connection of the rogue's.
struct Rogue {
    connection: Connection,
    _endpoint: Endpoint,
}

impl Scene {
    fn new() -> Scene {
        let pair = pair(LIMITS);
        let rogue = host(&pair.cluster.authority, Role::Worker, "rogue");
        let mut members = pair.cluster.members.clone();
        members.add(member(&rogue)).unwrap();
        pair.rig.set_members(members);
        let driven = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let runtime = driven.handle().clone();
        let (_stop, stopped) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || driven.block_on(stopped));
        Scene { pair, rogue, runtime, _stop }
    }

    fn come(&self) -> Rogue {
        self.runtime.block_on(async {
            let endpoint = Endpoint::client(LOOPBACK).unwrap();
            let config = crate::tls::client_config(&self.rogue).unwrap();
            let (at, name) = (self.pair.rig.local_addr().unwrap(), self.pair.rig.who().identity.name().to_string());
            let connection = endpoint.connect_with(config, at, &name).unwrap().await.unwrap();
            connection.accept_uni().await.expect("to be let in");
            Rogue { connection, _endpoint: endpoint }
        })
    }

    /// The rogue writes that on a stream of its own, and is cut off with words like those; the others go on.
    fn check_cut(&self, written: &[u8], is_two_way: bool, expected: &str) {
        let rogue = self.come();
        let why = self.runtime.block_on(async {
            let mut stream = if is_two_way {
                rogue.connection.open_bi().await.unwrap().0
            } else {
                rogue.connection.open_uni().await.unwrap()
            };
            stream.write_all(written).await.unwrap();
            tokio::time::timeout(LONG, rogue.connection.closed()).await.expect("to be cut off")
        });
        let ConnectionError::ApplicationClosed(close) = &why else { panic!("{why}") };
        assert_eq!(close.error_code, super::line::Close::Protocol.code());
        let reason = String::from_utf8_lossy(&close.reason);
        assert!(reason.contains(expected), "{reason}\nshould say {expected}");
        self.check_others();
    }

    fn check_others(&self) {
        check_moves(&self.pair.here, &self.pair.there, 1);
        assert_eq!(self.pair.peer.connections(), 1);
    }

    /// A link that the rogue may open, with 100 bytes in a frame.
    fn its_own(&self) -> LinkPort {
        self.pair.rig.expect(id(5), self.rogue.name().clone(), LinkLimits { payload_bytes: 100, ..LIMITS })
    }
}

fn hello(link: u32, received: u64) -> Vec<u8> {
    Message::Hello(Hello { id: id(link), generation: 1, ack: Ack { received, granted: received + 4 } })
        .header()
        .to_vec()
}

fn framed(sequence: u64, bytes: usize) -> Vec<u8> {
    let message = Message::Frame { sequence, frame: sized(1, bytes) };
    [&message.header()[..], &message.payload()].concat()
}

#[test]
fn what_no_end_of_a_link_says_costs_the_connection() {
    let scene = Scene::new();
    let own = scene.its_own();
    let mut other_version = hello(5, 0);
    other_version[0] ^= 0x40;
    let mut endless = framed(1, 100);
    endless[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut foreign = hello(5, 0);
    foreign[8] ^= 1;
    scene.check_cut(&[0x5a; 4096], false, "wire version 23130");
    scene.check_cut(&other_version, false, "both ends must run the same release");
    scene.check_cut(&framed(1, 0), false, "no hello");
    scene.check_cut(&framed(1, 100), false, "limit is 0");
    scene.check_cut(&hello(1, 0), false, "the link belongs to another host");
    scene.check_cut(&hello(5, 0), true, "control has a bidirectional stream");
    scene.check_cut(&hello(CONTROL, 0), true, "only heads open control links");
    scene.check_cut(&hello(CONTROL, 0), false, "control has a bidirectional stream");
    // Each on a link of its own, which ends with it.
    drop(own);
    for (then, expected) in [
        (endless, "4294967295 bytes, the limit is 100"),
        (hello(5, 0), "hello twice"),
        (framed(2, 0), "number 2, 1 was next"),
        ((1..=5).flat_map(|sequence| framed(sequence, 10)).collect(), "it has credits up to"),
        (Message::Ack(Ack { received: 9, granted: 9 }).header().to_vec(), "acknowledges up to 9, 0 is the last"),
        (vec![0; HEADER_BYTES], "wire version 0"),
    ] {
        let own = scene.its_own();
        scene.check_cut(&[hello(5, 0), then].concat(), false, expected);
        let ended = (0..).find_map(|_| own.receive_frame(LONG).err()).unwrap();
        assert_eq!(ended, PortError::Closed, "a peer that is cut off does not come back");
    }
    let own = scene.its_own();
    scene.check_cut(&hello(5, 7), false, "acknowledges up to 7, 0 is the last");
    drop(own);
}

#[test]
fn what_is_only_late_or_gone_costs_nothing() {
    let scene = Scene::new();
    let own = scene.its_own();
    let rogue = scene.come();
    let live = scene.runtime.block_on(async {
        // A link that nobody here knows, a stream that says nothing and ends, one that is given up at once.
        let mut unknown = rogue.connection.open_uni().await.unwrap();
        unknown.write_all(&hello(77, 0)).await.unwrap();
        rogue.connection.open_uni().await.unwrap().finish().unwrap();
        rogue.connection.open_uni().await.unwrap().reset(0u32.into()).unwrap();
        let mut live = open(&rogue, &hello(5, 0)).await;
        // The same connection of the same link once more.
        let again = open(&rogue, &hello(5, 0)).await;
        assert!(again.stopped().await.is_ok(), "it is not wanted");
        // The next one replaces it, whatever it was in the middle of.
        live.write_all(&framed(1, 100)[..HEADER_BYTES + 50]).await.unwrap();
        let mut next = hello(5, 0);
        next[16..24].copy_from_slice(&2u64.to_le_bytes());
        let next = open(&rogue, &next).await;
        let replaced = tokio::time::timeout(LONG, live.stopped()).await.expect("to be let go of");
        assert!(replaced.is_ok());
        next
    });
    soon("the link is up", || own.state().is_some());
    assert!(rogue.connection.close_reason().is_none());
    drop(live);
    scene.check_others();
}

#[test]
fn a_stream_that_ends_before_its_connection_is_the_end_of_the_link_when_that_closes() {
    let scene = Scene::new();
    let own = scene.pair.rig.expect(id(5), scene.rogue.name().clone(), PATIENT);
    let rogue = scene.come();
    let mut stream = scene.runtime.block_on(open(&rogue, &hello(5, 0)));
    soon("the link is up", || own.state() == Some(LinkState::Up));
    stream.reset(0u32.into()).unwrap();
    soon("the link is down", || own.state() != Some(LinkState::Up));
    assert_eq!(own.receive_frame(Duration::ZERO), Err(PortError::Timeout { timeout: Duration::ZERO }));
    rogue.connection.close(0u32.into(), b"enough");
    assert_eq!(own.receive_frame(LONG), Err(PortError::Closed));
}

async fn open(rogue: &Rogue, bytes: &[u8]) -> SendStream {
    let mut stream = rogue.connection.open_uni().await.unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

#[test]
fn streams_without_a_word_are_few_and_cost_the_connection_in_the_end() {
    let scene = Scene::new();
    let rogue = scene.come();
    let begun = Instant::now();
    let (streams, why) = scene.runtime.block_on(async {
        let mut streams = Vec::new();
        let more = Duration::from_millis(300);
        while let Ok(Ok(mut stream)) = tokio::time::timeout(more, rogue.connection.open_uni()).await {
            stream.write_all(b"1").await.unwrap();
            streams.push(stream);
        }
        (streams.len(), tokio::time::timeout(LONG, rogue.connection.closed()).await.expect("to be cut off"))
    });
    assert!((64..1000).contains(&streams), "{streams} streams are held");
    assert!(why.to_string().contains("without a hello"), "{why}");
    assert!(begun.elapsed() > Duration::from_secs(1), "a slow network is no misdeed");
    scene.check_others();
}

#[test]
fn a_peer_that_reads_nothing_holds_up_nobody_else() {
    let scene = Scene::new();
    let limits = LinkLimits { credits: 8, payload_bytes: 32 << 20, ..LIMITS };
    let stalled = scene.pair.rig.expect(id(5), scene.rogue.name().clone(), limits);
    let rogue = scene.come();
    let _live = scene.runtime.block_on(async {
        let mut stream = open(&rogue, &hello(5, 0)).await;
        // More credits than there are windows for.
        let grant = Message::Ack(Ack { received: 0, granted: 100 });
        stream.write_all(&grant.header()).await.unwrap();
        stream
    });
    let payload = Bytes::from(vec![1; 32 << 20]);
    for _ in 0..8 {
        stalled.send_frame(Frame { payload: payload.clone(), ..Frame::default() }).unwrap();
    }
    (1..20).for_each(|step| check_moves(&scene.pair.here, &scene.pair.there, step));
    // Its end is let go of all the same.
    drop(stalled);
    soon("the link is forgotten", || scene.pair.rig.ports() == 1);
    scene.check_others();
}

#[test]
fn handshakes_that_never_end_keep_nobody_out() {
    let scene = Scene::new();
    let at = scene.pair.rig.local_addr().unwrap();
    let (config, name) =
        (crate::tls::client_config(&scene.rogue).unwrap(), scene.pair.rig.who().identity.name().to_string());
    // The first datagrams of many handshakes, from as many places, where nobody goes on with them.
    scene.runtime.block_on(async {
        let caught = tokio::net::UdpSocket::bind(LOOPBACK).await.unwrap();
        let endpoint = Endpoint::client(LOOPBACK).unwrap();
        for _ in 0..3 * 64 {
            let mut first = [0; 1500];
            let connecting = endpoint.connect_with(config.clone(), caught.local_addr().unwrap(), &name).unwrap();
            let (count, _) = caught.recv_from(&mut first).await.unwrap();
            drop(connecting);
            let nobody = std::net::UdpSocket::bind(LOOPBACK).unwrap();
            nobody.send_to(&first[..count], at).unwrap();
        }
    });
    let rogue = scene.come();
    assert!(rogue.connection.close_reason().is_none());
    scene.check_others();
}
