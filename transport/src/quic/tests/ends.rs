//! Nobody waits for what has ended, and nothing of it remains.

use std::sync::{Arc, Weak};

use super::*;

/// Threads that wait for everything there is to wait for; each says how that ended.
fn waiting(pair: &Pair, idle: &LinkPort) -> Vec<std::thread::JoinHandle<PortError>> {
    let (sending, receiving, expecting, unsent) = (pair.here.clone(), pair.here.clone(), idle.clone(), idle.clone());
    vec![
        std::thread::spawn(move || (0..).find_map(|step| sending.send_frame(frame(step)).err()).unwrap()),
        std::thread::spawn(move || receiving.receive_frame(LONG).unwrap_err()),
        std::thread::spawn(move || expecting.receive_frame(LONG).unwrap_err()),
        std::thread::spawn(move || unsent.send_frame(frame(1)).unwrap_err()),
    ]
}

#[test]
fn whoever_waits_when_a_node_is_closed_hears_it() {
    let pair = pair(LIMITS);
    let idle = pair.desk.expect(id(9), pair.rig.who().identity.name().clone(), LIMITS);
    let waiting = waiting(&pair, &idle);
    std::thread::sleep(Duration::from_millis(50));
    let Pair { here, there, peer, desk, .. } = pair;
    drop(desk);
    for waits in waiting {
        assert_eq!(waits.join().unwrap(), PortError::Closed);
    }
    // What is opened then is born closed.
    assert_eq!(peer.open(id(10), LIMITS).send_frame(frame(1)), Err(PortError::Closed));
    assert_eq!(here.send_frame(frame(1)), Err(PortError::Closed));
    // The other end takes what had come, and hears at once that no more does: nobody has to be silent for that.
    let ended = (0..).find_map(|_| there.receive_frame(LONG).err()).unwrap();
    assert_eq!(ended, PortError::Closed);
}

#[test]
fn a_node_that_ends_says_why_the_links_to_it_do() {
    let Pair { here, peer, rig, desk: _desk, .. } = pair(LIMITS);
    drop(rig);
    assert_eq!(here.receive_frame(LONG), Err(PortError::Closed));
    assert!(peer.why_closed().unwrap().contains("the process ends"), "{:?}", peer.why_closed());
    assert_eq!(peer.open(id(2), LIMITS).send_frame(frame(1)), Err(PortError::Closed));
}

#[test]
fn links_outlive_the_peer_they_were_opened_with() {
    let Pair { here, there, peer, desk: _desk, rig: _rig, .. } = pair(LIMITS);
    drop(peer);
    std::thread::sleep(tuning::SILENCE + Duration::from_millis(300));
    check_moves(&here, &there, 1);
}

#[test]
fn nothing_remains_of_links_that_were_closed() {
    let Pair { here, there, peer, desk, rig, .. } = pair(LIMITS);
    let name = desk.who().identity.name().clone();
    check_moves(&here, &there, 1);
    let counts = || [desk.ports(), desk.tasks(), rig.ports(), rig.tasks()];
    let before = counts();
    for round in 0..20 {
        let there = rig.expect(id(2 + round % 3), name.clone(), LIMITS);
        let here = peer.open(id(2 + round % 3), LIMITS);
        check_moves(&here, &there, 1);
        drop((here, there));
        // One that nobody opens.
        drop(rig.expect(id(50), name.clone(), LIMITS));
    }
    soon("the links are forgotten", || counts() == before);
    check_moves(&here, &there, 5);
}

#[test]
fn nothing_remains_of_a_node() {
    let Pair { here, there, peer, desk, rig, .. } = pair(LIMITS);
    check_moves(&here, &there, 1);
    let idle = rig.expect(id(9), desk.who().identity.name().clone(), LIMITS);
    let (one, two): (Weak<_>, Weak<_>) = (Arc::downgrade(desk.inner()), Arc::downgrade(rig.inner()));
    let at = rig.local_addr().unwrap();
    drop((desk, rig));
    assert!(one.upgrade().is_some(), "ports have it");
    drop((here, there, peer, idle));
    assert!(one.upgrade().is_none() && two.upgrade().is_none(), "links and node hold each other");
    assert!(std::net::UdpSocket::bind(at).is_ok(), "the socket is free");
}

#[test]
fn a_second_link_of_a_name_ends_the_first() {
    let Pair { here, there, desk, rig, .. } = pair(LIMITS);
    check_moves(&here, &there, 1);
    let waits = rig.expect(id(1), desk.who().identity.name().clone(), LIMITS);
    assert_eq!(there.receive_frame(LONG), Err(PortError::Closed));
    assert_eq!(waits.receive_frame(Duration::ZERO), Err(PortError::Timeout { timeout: Duration::ZERO }));
}
