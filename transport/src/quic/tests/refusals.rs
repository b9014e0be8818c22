//! Who is not let in, or not any more, and what it hears.

use super::*;
use crate::identity::tests::peer;
use crate::identity::{Key, Name, UnixTime};

fn refusal(node: &Node, to: &Node, name: &crate::identity::PeerName) -> String {
    let error = node.dial(name, &address(to.local_addr().unwrap()), LONG).err().expect("to be refused");
    assert!(!error.may_pass(), "{error}");
    error.to_string()
}

fn check(error: &str, expected: &str) {
    assert!(error.contains(expected), "{error}\nshould say {expected}");
}

#[test]
fn strangers_are_refused_and_hear_why() {
    let (mine, other) = (Cluster::new(&["rig", "rig2"]), Cluster::new(&["rig"]));
    let (desk, rigs) = mine.nodes();
    let (stranger, _) = other.nodes();
    // A worker of another cluster is none of ours, by its certificate already.
    check(&refusal(&stranger, &rigs[0], other.workers[0].name()), "UnknownIssuer");
    // A name that is on no list is not dialled.
    check(&refusal(&stranger, &rigs[0], mine.workers[0].name()), "peer belongs to cluster");
    // A worker is not another.
    check(&refusal(&desk, &rigs[0], mine.workers[1].name()), "not valid for name");
    let unknown = peer(&mine.authority, Role::Worker, "rig9");
    check(&refusal(&desk, &rigs[0], &unknown), "rig9 is not a member");
    // Who is let in by one side only.
    let guest = host(&mine.authority, Role::Worker, "guest");
    let guest = mine.start(&guest);
    check(
        &refusal(&guest, &rigs[0], mine.workers[0].name()),
        "it closed the connection: guest is not a member (list 2)",
    );
    // Nobody but members got a connection.
    assert_eq!([rigs[0].connections(), rigs[1].connections()], [0, 0]);
}

#[test]
fn certificates_out_of_their_time_are_refused() {
    let cluster = Cluster::new(&["rig"]);
    let now = UnixTime::now().as_secs();
    for (name, not_before, seconds) in [("rig7", now - 1000, 500), ("rig8", now + 1000, 500)] {
        let key = Key::generate().unwrap();
        let not_before = UnixTime::since_unix_epoch(Duration::from_secs(not_before));
        let named = peer(&cluster.authority, Role::Worker, name);
        let certificate =
            cluster.authority.issue(key.public(), &named, not_before, Duration::from_secs(seconds)).unwrap();
        let odd = Identity::new(key, certificate, cluster.authority.certificate().clone()).unwrap();
        let mut members = cluster.members.clone();
        members.add(member(&odd)).unwrap();
        let start = |identity: &Identity| {
            Node::start(WhoAmI { identity: identity.clone(), members: members.clone() }, LOOPBACK, LIMITS).unwrap()
        };
        let (odd, rig) = (start(&odd), start(&cluster.workers[0]));
        let ours = if name == "rig7" { "our certificate has expired" } else { "our certificate" };
        check(&refusal(&odd, &rig, cluster.workers[0].name()), ours);
        check(&refusal(&rig, &odd, &named), if name == "rig7" { "expired" } else { "not valid yet" });
    }
}

/// A list without that member.
fn without(members: &Members, name: &str) -> Members {
    let mut members = members.clone();
    members.remove(&name.parse::<Name>().unwrap()).unwrap();
    members
}

#[test]
fn a_member_that_is_removed_is_cut_off_at_once_by_whoever_was_dialled() {
    let cluster = Cluster::new(&["rig", "rig2"]);
    let (_desk, rigs) = cluster.nodes();
    let there = rigs[0].expect(id(1), cluster.workers[1].name().clone(), PATIENT);
    let idle = rigs[0].expect(id(2), cluster.workers[1].name().clone(), PATIENT);
    let at = address(rigs[0].local_addr().unwrap());
    let peer = rigs[1].dial(cluster.workers[0].name(), &at, LONG).unwrap();
    let here = peer.open(id(1), PATIENT);
    check_moves(&here, &there, 1);
    rigs[0].set_members(without(&cluster.members, "rig2"));
    // Long before anybody could have been silent for too long.
    for port in [&here, &there, &idle] {
        assert_eq!(port.receive_frame(LONG), Err(PortError::Closed));
    }
    check(&peer.why_closed().unwrap(), "rig2 is not a member (list 3)");
    assert_eq!(peer.open(id(1), LIMITS).send_frame(frame(1)), Err(PortError::Closed));
    check(&rigs[1].dial(cluster.workers[0].name(), &at, LONG).err().unwrap().to_string(), "rig2 is not a member");
    soon("no connection", || rigs[0].connections() == 0 && rigs[1].connections() == 0);
}

#[test]
fn a_member_that_is_removed_is_cut_off_at_once_by_whoever_dialled() {
    let cluster = Cluster::new(&["rig", "rig2"]);
    let (_desk, rigs) = cluster.nodes();
    let there = rigs[0].expect(id(1), cluster.workers[1].name().clone(), PATIENT);
    let peer = rigs[1].dial(cluster.workers[0].name(), &address(rigs[0].local_addr().unwrap()), LONG).unwrap();
    let here = peer.open(id(1), PATIENT);
    check_moves(&here, &there, 1);
    rigs[1].set_members(without(&cluster.members, "rig"));
    for port in [&here, &there] {
        assert_eq!(port.receive_frame(LONG), Err(PortError::Closed));
    }
    check(&peer.why_closed().unwrap(), "rig is not a member");
    check(&refusal(&rigs[1], &rigs[0], cluster.workers[0].name()), "rig is not a member");
}

#[test]
fn another_certificate_serves_from_the_next_connection_on() {
    let Pair { here, there, desk, rig, cluster, .. } = pair(LIMITS);
    let mut renewed = cluster.workers[0].clone();
    let later = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs() + 60));
    let certificate = cluster.authority.renew(renewed.certificate(), later).unwrap();
    renewed.replace_certificate(certificate, UnixTime::now()).unwrap();
    rig.set_identity(renewed.clone()).unwrap();
    check_moves(&here, &there, 1);
    assert_eq!(rig.who().identity.certificate(), renewed.certificate());
    let second = cluster.start(&cluster.desk);
    assert!(second.dial(renewed.name(), &address(rig.local_addr().unwrap()), LONG).is_ok());
    drop(desk);
}

#[test]
fn a_member_has_so_many_connections_and_no_more() {
    let cluster = Cluster::new(&["rig"]);
    let rig = cluster.start(&cluster.workers[0]);
    let at = address(rig.local_addr().unwrap());
    let mut programs = Vec::new();
    let error = loop {
        let desk = cluster.start(&cluster.desk);
        match desk.dial(cluster.workers[0].name(), &at, LONG) {
            Ok(peer) => programs.push((peer, desk)),
            Err(error) => break error,
        }
        assert!(programs.len() < 100, "there is no bound");
    };
    check(&error.to_string(), "as many connections from this host as it takes");
    assert!(error.may_pass(), "one of them may end");
    programs.pop();
    let desk = cluster.start(&cluster.desk);
    soon("room", || desk.dial(cluster.workers[0].name(), &at, LONG).is_ok());
}
