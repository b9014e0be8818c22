//! What a network does to connections, and what links make of it.

use super::relay::Relay;
use super::*;
use crate::link::LinkState;

fn pair_in_weather(limits: LinkLimits) -> (Relay, Pair) {
    let mut relay = None;
    let pair = pair_via(limits, |at| relay.insert(Relay::start(at)).address);
    (relay.unwrap(), pair)
}

/// Sends frames both ways while something happens: every one arrives, once and in order.
fn check_survives(pair: &Pair, frames: u64, happens: impl FnOnce()) {
    let bytes = |step: u64| (step as usize * 7919) % 40_000;
    std::thread::scope(|scope| {
        for port in [&pair.here, &pair.there] {
            scope.spawn(move || {
                for step in 0..frames {
                    port.send_frame(sized(step, bytes(step))).unwrap();
                    // The whole takes longer than what happens.
                    std::thread::sleep(Duration::from_millis(4));
                }
            });
            scope.spawn(move || (0..frames).for_each(|step| assert_eq!(taken(port), sized(step, bytes(step)))));
        }
        happens();
    });
}

#[test]
fn delay_and_loss_lose_nothing() {
    let (relay, pair) = pair_in_weather(PATIENT);
    (relay.weather().delay, relay.weather().loses_one_in) = (Duration::from_millis(3), 30);
    check_survives(&pair, 150, || {});
    assert_eq!(pair.peer.connections(), 1);
}

#[test]
fn half_a_second_of_darkness_is_borne() {
    let (relay, pair) = pair_in_weather(LIMITS);
    check_survives(&pair, 200, || {
        std::thread::sleep(Duration::from_millis(100));
        relay.weather().is_dark = true;
        std::thread::sleep(Duration::from_millis(500));
        relay.weather().is_dark = false;
    });
}

#[test]
fn a_router_that_forgets_us_is_not_noticed() {
    let (relay, pair) = pair_in_weather(PATIENT);
    check_survives(&pair, 60, || {
        std::thread::sleep(Duration::from_millis(80));
        relay.rebind();
    });
    assert_eq!(pair.peer.connections(), 1, "the connection went on from another port");
}

#[test]
fn a_lost_connection_is_dialled_again_and_goes_on_where_it_was() {
    let (relay, pair) = pair_in_weather(PATIENT);
    check_survives(&pair, 150, || {
        for connections in 2..4 {
            std::thread::sleep(Duration::from_millis(100));
            relay.weather().is_dark = true;
            // Until both ends have given the connection up.
            soon("a lost connection", || pair.peer.why_closed().is_some());
            soon("its other end", || pair.rig.connections() == 0);
            relay.weather().is_dark = false;
            soon("another connection", || pair.peer.connections() == connections);
        }
    });
    assert_eq!(pair.peer.why_closed(), None);
}

#[test]
fn a_network_that_is_gone_means_that_both_ends_are_lost_in_time() {
    // The promise, as far as it is a matter of numbers.
    const { assert!(tuning::SILENCE.as_millis() + 100 < 2000) };
    let (relay, pair) = pair_in_weather(LIMITS);
    check_moves(&pair.here, &pair.there, 1);
    relay.weather().is_dark = true;
    let began = Instant::now();
    std::thread::scope(|scope| {
        for port in [&pair.here, &pair.there] {
            let sending = port.clone();
            scope.spawn(move || {
                let error = port.receive_frame(LONG).unwrap_err();
                assert!(matches!(error, PortError::Lost { silent } if silent >= tuning::SILENCE), "{error}");
            });
            // A sender that waits for credits hears it as well.
            scope.spawn(move || {
                let error = (0..).find_map(|step| sending.send_frame(frame(step)).err()).unwrap();
                assert!(matches!(error, PortError::Lost { .. }), "{error}");
            });
        }
    });
    let took = began.elapsed();
    assert!(took < 3 * tuning::SILENCE, "{took:?}");
    assert!(matches!(pair.here.state(), Some(LinkState::Lost { .. })));
    assert!(pair.peer.why_closed().is_some());
}

#[test]
fn a_peer_without_links_is_dialled_again_for_the_next() {
    let (relay, pair) = pair_in_weather(PATIENT);
    let Pair { here, there, peer, desk, rig, .. } = pair;
    drop((here, there));
    relay.weather().is_dark = true;
    soon("a lost connection", || peer.why_closed().is_some());
    relay.weather().is_dark = false;
    let there = rig.expect(id(2), desk.who().identity.name().clone(), PATIENT);
    let here = peer.open(id(2), PATIENT);
    check_moves(&here, &there, 1);
    assert_eq!(peer.connections(), 2);
}

#[test]
fn an_end_that_was_kept_from_its_work_takes_nobody_for_dead() {
    let impatient = LinkLimits { silence: Duration::from_millis(400), ..LIMITS };
    let cluster = Cluster::new(&["rig"]);
    let (desk, rigs) = cluster.nodes();
    // The neighbour speaks more often than this end has to hear of it.
    let talkative = LinkLimits { silence: Duration::from_secs(1), ..LIMITS };
    let there = rigs[0].expect(id(1), cluster.desk.name().clone(), talkative);
    let peer = desk.dial(cluster.workers[0].name(), &address(rigs[0].local_addr().unwrap()), LONG).unwrap();
    let here = peer.open(id(1), impatient);
    check_moves(&here, &there, 1);
    desk.block(Duration::from_millis(700));
    check_moves(&here, &there, 3);
}

#[test]
fn who_is_not_there_is_asked_for_as_long_as_was_said() {
    let cluster = Cluster::new(&["rig"]);
    let desk = cluster.start(&cluster.desk);
    let nobody = std::net::UdpSocket::bind(LOOPBACK).unwrap();
    let (at, patience) = (address(nobody.local_addr().unwrap()), Duration::from_millis(1500));
    let begun = Instant::now();
    let error = desk.dial(cluster.workers[0].name(), &at, patience).err().unwrap();
    assert!(begun.elapsed() >= patience, "{:?}", begun.elapsed());
    assert!(error.may_pass());
    assert!(error.to_string().contains("within 1.5 s: is it running"), "{error}");
}
