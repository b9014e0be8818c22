//! A link between hosts is a port as any other.

use super::*;
use crate::port::Port;

const SOON: Duration = Duration::from_millis(30);

#[test]
fn frames_arrive_in_order_both_ways_and_what_was_sent_outlives_the_sender() {
    let Pair { mut here, mut there, peer, desk: _desk, rig: _rig, .. } = pair(LIMITS);
    here.send(frame(1)).unwrap();
    here.send(frame(2)).unwrap();
    there.send(frame(3)).unwrap();
    assert_eq!(taken(&here), frame(3));
    drop((here, peer));
    assert_eq!(taken(&there), frame(1));
    assert_eq!(taken(&there), frame(2));
    assert_eq!(there.receive(LONG), Err(PortError::Closed));
    assert_eq!(there.send(frame(4)), Err(PortError::Closed));
}

#[test]
fn what_was_sent_outlives_the_node_too() {
    let Pair { here, there, peer, desk, rig: _rig, .. } = pair(LIMITS);
    (0..4).for_each(|step| here.send_frame(sized(step, 1 << 20)).unwrap());
    drop((here, peer));
    drop(desk);
    (0..4).for_each(|step| assert_eq!(taken(&there), sized(step, 1 << 20)));
    assert_eq!(there.receive_frame(LONG), Err(PortError::Closed));
}

#[test]
fn a_full_link_makes_the_sender_wait() {
    let Pair { here, there, desk: _desk, rig: _rig, .. } = pair(LinkLimits { credits: 1, ..LIMITS });
    here.send_frame(frame(1)).unwrap();
    let sending = here.clone();
    let sender = std::thread::spawn(move || sending.send_frame(frame(2)));
    std::thread::sleep(SOON);
    assert!(!sender.is_finished(), "nobody has taken the first frame");
    let first = taken(&there);
    let second = taken(&there);
    assert_eq!((first, second), (frame(1), frame(2)));
    sender.join().unwrap().unwrap();
}

#[test]
fn silence_is_a_timeout() {
    let mut pair = pair(LIMITS);
    assert_eq!(pair.here.receive(SOON), Err(PortError::Timeout { timeout: SOON }));
    assert_eq!(pair.there.receive(Duration::ZERO), Err(PortError::Timeout { timeout: Duration::ZERO }));
    // Nor does a link that nobody uses die of it.
    std::thread::sleep(tuning::SILENCE + Duration::from_millis(300));
    check_moves(&pair.here, &pair.there, 1);
    let waits = pair.rig.expect(id(7), pair.desk.who().identity.name().clone(), LIMITS);
    assert_eq!(waits.receive_frame(SOON), Err(PortError::Timeout { timeout: SOON }));
    assert!(waits.state().is_none());
}

#[test]
fn frames_of_every_size_cross_both_ways_at_once() {
    let Pair { here, there, desk: _desk, rig: _rig, .. } = pair(LIMITS);
    let sizes = [0, 1, 39, 40, 41, 1199, 1200, 1500, 65_000, 1 << 16, (1 << 20) + 1, 4 << 20];
    let too_large = here.send_frame(sized(0, (4 << 20) + 1)).unwrap_err();
    assert!(too_large.to_string().contains("limit is 4194304"), "{too_large}");
    std::thread::scope(|scope| {
        for port in [&here, &there] {
            scope
                .spawn(move || (0..).zip(sizes).for_each(|(step, bytes)| port.send_frame(sized(step, bytes)).unwrap()));
            scope.spawn(move || (0..).zip(sizes).for_each(|(step, bytes)| assert_eq!(taken(port), sized(step, bytes))));
        }
    });
}

#[test]
fn large_frames_go_out_at_once_in_large_datagrams() {
    let Pair { here, there, peer, desk: _desk, rig: _rig, .. } = pair(PATIENT);
    soon("the loopback's datagrams are found out", || {
        check_moves(&here, &there, 1);
        peer.mtu() > 6000
    });
    let echo =
        std::thread::spawn(move || while there.receive_frame(LONG).map(|at| there.send_frame(at.frame)).is_ok() {});
    let median = |bytes: usize| {
        let mut times: Vec<Duration> = (0..21)
            .map(|step| {
                let began = Instant::now();
                here.send_frame(sized(step, bytes)).unwrap();
                assert_eq!(taken(&here).payload.len(), bytes);
                began.elapsed()
            })
            .collect();
        times.sort();
        times[10]
    };
    // Some five times as long when all is well; two thousand times when the system drops them, and a timer brings them.
    let (small, large) = (median(64), median(64 << 10));
    assert!(large < 200 * small, "{large:?} against {small:?}");
    assert!(peer.mtu() > 6000, "what was sent was not taken for lost");
    drop(here);
    echo.join().unwrap();
}

#[test]
fn several_links_share_a_connection_and_dialling_again_finds_it() {
    let Pair { here, there, peer, desk, rig, .. } = pair(LIMITS);
    let again = desk.dial(peer.name(), &address(rig.local_addr().unwrap()), LONG).unwrap();
    assert!(peer.is(&again));
    let name = desk.who().identity.name().clone();
    let links: Vec<_> =
        (2..40).map(|link| (rig.expect(id(link), name.clone(), LIMITS), again.open(id(link), LIMITS))).collect();
    (0..).step_by(2).zip(&links).for_each(|(step, (there, here))| check_moves(here, there, step));
    // The control link comes as a surprise.
    let control = again.open(LinkId { session: 9, link: CONTROL }, LIMITS);
    control.send_frame(frame(5)).unwrap();
    let joined = rig.joined(LONG).unwrap();
    assert_eq!((joined.session, joined.control.peer()), (9, &name));
    assert_eq!(taken(&joined.control), frame(5));
    check_moves(&control, &joined.control, 6);
    check_moves(&here, &there, 100);
}

#[test]
fn any_of_a_names_addresses_will_do() {
    let cluster = Cluster::new(&["rig"]);
    let who = |identity: &Identity| WhoAmI { identity: identity.clone(), members: cluster.members.clone() };
    let has_ipv6 = std::net::UdpSocket::bind("[::1]:0").is_ok();
    let any: SocketAddr = if has_ipv6 { "[::]:0" } else { "0.0.0.0:0" }.parse().unwrap();
    let rig = Node::start(who(&cluster.workers[0]), any, LIMITS).unwrap();
    let port = rig.local_addr().unwrap().port();
    let dial = |from: SocketAddr, to: &str| {
        let desk = Node::start(who(&cluster.desk), from, LIMITS).unwrap();
        desk.dial(cluster.workers[0].name(), &format!("{to}:{port}").parse().unwrap(), LONG).err()
    };
    for (from, to) in [(any, "127.0.0.1"), (LOOPBACK, "127.0.0.1"), (any, "localhost"), (LOOPBACK, "localhost")] {
        let error = dial(from, to);
        assert!(error.is_none(), "{from} to {to}: {}", error.unwrap());
    }
    let error = dial(LOOPBACK, "[::1]").unwrap().to_string();
    assert!(error.contains("no address of this socket's kind"), "{error}");
    if has_ipv6 {
        assert!(dial(any, "[::1]").is_none());
    }
}
