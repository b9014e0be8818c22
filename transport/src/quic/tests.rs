//! Two hosts and more on the loopback, each a [`Node`] with a key and a certificate of its own.

mod ends;
mod misdeeds;
mod network;
mod ports;
mod refusals;
mod relay;
mod turns;

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use super::*;
use crate::frame::{Frame, FrameHeader};
use crate::identity::tests::{authority, host, member};
use crate::identity::{Address, Authority, Identity, Role};
use crate::link::{LinkId, LinkLimits};
use crate::members::Members;
use crate::port::PortError;

const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
/// Far more than anything takes that does come.
const LONG: Duration = Duration::from_secs(20);
const SESSION: u64 = 0x5e55;
const LIMITS: LinkLimits = LinkLimits { credits: 4, payload_bytes: 4 << 20, silence: tuning::SILENCE };
/// For links that have to outlive what is done to their connections, on a machine that is busy.
const PATIENT: LinkLimits = LinkLimits { silence: Duration::from_secs(15), ..LIMITS };

fn id(link: u32) -> LinkId {
    LinkId { session: SESSION, link }
}

fn frame(step: u64) -> Frame {
    sized(step, step as usize % 50)
}

/// A frame whose payload says which one it is, wherever it is cut.
fn sized(step: u64, bytes: usize) -> Frame {
    let payload: Vec<u8> = (0..bytes).map(|at| (step as usize * 31 + at * 7) as u8).collect();
    Frame { header: FrameHeader { epoch: 1, step, micro_batch: 0 }, payload: payload.into() }
}

/// A cluster: `desk`, its head, and workers by name.
struct Cluster {
    authority: Authority,
    members: Members,
    desk: Identity,
    workers: Vec<Identity>,
}

impl Cluster {
    fn new(workers: &[&str]) -> Cluster {
        let authority = authority();
        let desk = host(&authority, Role::Head, "desk");
        let mut members = Members::founding(authority.cluster(), member(&desk));
        let workers: Vec<Identity> = workers.iter().map(|name| host(&authority, Role::Worker, name)).collect();
        workers.iter().for_each(|worker| members.add(member(worker)).unwrap());
        Cluster { authority, members, desk, workers }
    }

    fn start(&self, identity: &Identity) -> Node {
        let who = WhoAmI { identity: identity.clone(), members: self.members.clone() };
        Node::start(who, LOOPBACK, LIMITS).unwrap()
    }

    /// The head's node, and that of each worker.
    fn nodes(&self) -> (Node, Vec<Node>) {
        (self.start(&self.desk), self.workers.iter().map(|worker| self.start(worker)).collect())
    }
}

/// Two hosts and a link between them.
struct Pair {
    here: LinkPort,
    there: LinkPort,
    peer: Peer,
    desk: Node,
    rig: Node,
    cluster: Cluster,
}

fn address(at: SocketAddr) -> Address {
    at.to_string().parse().unwrap()
}

/// `desk` dials `rig` at `via` of its address.
fn pair_via(limits: LinkLimits, via: impl FnOnce(SocketAddr) -> SocketAddr) -> Pair {
    let cluster = Cluster::new(&["rig"]);
    let (desk, mut rigs) = cluster.nodes();
    let rig = rigs.remove(0);
    let there = rig.expect(id(1), desk.who().identity.name().clone(), limits);
    let at = via(rig.local_addr().unwrap());
    let peer = desk.dial(rig.who().identity.name(), &address(at), LONG).unwrap();
    let here = peer.open(id(1), limits);
    Pair { here, there, peer, desk, rig, cluster }
}

fn pair(limits: LinkLimits) -> Pair {
    pair_via(limits, |at| at)
}

/// What one takes next.
fn taken(port: &LinkPort) -> Frame {
    port.receive_frame(LONG).unwrap().frame
}

/// That frames cross, both ways.
fn check_moves(here: &LinkPort, there: &LinkPort, step: u64) {
    here.send_frame(frame(step)).unwrap();
    assert_eq!(taken(there), frame(step));
    there.send_frame(frame(step + 1)).unwrap();
    assert_eq!(taken(here), frame(step + 1));
}

/// Waits for what will be so.
fn soon(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
