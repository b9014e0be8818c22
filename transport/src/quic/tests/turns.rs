//! Who does a node's work, and that it is always done.

use std::thread::ThreadId;

use crossbeam_channel::bounded;

use super::*;

/// The thread that does the node's work now, and what it is called.
fn worker(node: &Node) -> (ThreadId, Option<String>) {
    let (tell, told) = bounded(1);
    node.inner().spawn(async move {
        let thread = std::thread::current();
        let _ = tell.send((thread.id(), thread.name().map(str::to_owned)));
    });
    told.recv_timeout(LONG).expect("the work is always done")
}

fn is_its_own(node: &Node) -> bool {
    worker(node).1.as_deref() == Some("quic")
}

/// A thread that sends back what comes.
fn echo(port: LinkPort) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || while port.receive_frame(LONG).map(|at| port.send_frame(at.frame)).is_ok() {})
}

#[test]
fn who_waits_alone_does_the_work_and_the_nodes_own_thread_does_it_for_nobody_or_for_several() {
    let Pair { here, there, peer, desk, rig, .. } = pair(PATIENT);
    assert!(is_its_own(&rig), "nobody waits");
    let first = echo(there);
    soon("a thread waits, and had a frame just now", || {
        check_echo(&here, 1);
        worker(&rig).0 == first.thread().id()
    });
    let second = echo(rig.expect(id(2), desk.who().identity.name().clone(), PATIENT));
    let other = peer.open(id(2), PATIENT);
    soon("two threads wait", || {
        check_echo(&here, 2);
        check_echo(&other, 3);
        is_its_own(&rig)
    });
    drop((here, other));
    first.join().unwrap();
    second.join().unwrap();
    soon("nobody waits any more", || is_its_own(&rig));
}

/// That a frame comes back.
fn check_echo(port: &LinkPort, step: u64) {
    port.send_frame(frame(step)).unwrap();
    assert_eq!(taken(port), frame(step));
}

#[test]
fn who_goes_away_leaves_the_work_to_the_nodes_own_thread() {
    let Pair { here, there, desk, rig, .. } = pair(PATIENT);
    let moment = Duration::from_millis(5);
    for step in 0..20 {
        // Both drive for some time: what they leave behind is taken up without them.
        assert!(there.receive_frame(moment).is_err());
        assert!(here.receive_frame(moment).is_err());
        here.send_frame(sized(step, 3 << 20)).unwrap();
        soon("all that was sent arrives while nobody waits for it", || there.receive_frame(Duration::ZERO).is_ok());
    }
    assert!(is_its_own(&desk) && is_its_own(&rig));
}

#[test]
fn a_node_ends_though_another_thread_does_its_work() {
    let Pair { here, there, desk, rig, .. } = pair(PATIENT);
    let first = echo(there);
    soon("a thread waits, and had a frame just now", || {
        check_echo(&here, 1);
        worker(&rig).0 == first.thread().id()
    });
    drop(rig);
    first.join().unwrap();
    assert_eq!(here.receive_frame(LONG), Err(PortError::Closed));
    drop(desk);
    assert_eq!(here.send_frame(frame(2)), Err(PortError::Closed));
}

#[test]
fn threads_of_other_runtimes_wait_without_doing_the_work() {
    let Pair { here, there, desk: _desk, rig, .. } = pair(PATIENT);
    let other = tokio::runtime::Builder::new_current_thread().build().unwrap();
    other.block_on(async {
        (0..5).for_each(|step| check_moves(&here, &there, 2 * step));
        assert!(there.receive_frame(Duration::from_millis(5)).is_err());
    });
    assert!(is_its_own(&rig));
}

/// Numbers that look random (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % most
    }
}

/// Links of both kinds, with a thread at either end of each for each direction, all of which wait, send, tarry and look
/// at random. One end of every third link goes away in the middle.
#[test]
fn links_with_random_waits_lose_nothing_and_never_hang() {
    (0..3).for_each(|seed| [1, 2, 6].into_iter().for_each(|links| run_at_random(links, seed)));
}

fn run_at_random(count: u32, seed: u64) {
    let Pair { here, there, peer, desk, rig, .. } = pair(PATIENT);
    let name = desk.who().identity.name().clone();
    let mut links = vec![(here, there)];
    links.extend((2..=count).map(|link| {
        let there = rig.expect(id(link), name.clone(), PATIENT);
        (peer.open(id(link), PATIENT), there)
    }));
    let control = peer.open(LinkId { session: 9, link: CONTROL }, PATIENT);
    links.push((control, rig.joined(LONG).unwrap().control));
    std::thread::scope(|scope| {
        for (number, (here, there)) in (0..).zip(links) {
            let goes = if number % 3 == 2 { FRAMES / 2 } else { FRAMES };
            for (end, port, sends, gets) in [(0, here, goes, goes), (1, there, FRAMES, goes)] {
                let (port, sending) = (port.clone(), port);
                scope.spawn(move || send_all(&sending, sends, &mut Random((seed << 32) | (2 * number + end))));
                scope.spawn(move || take_all(&port, gets, &mut Random(!((seed << 32) | (2 * number + end)))));
            }
        }
    });
    drop(peer);
    soon("links without ports are forgotten", || desk.ports() == 0 && rig.ports() == 0);
}

/// Frames each way of a link, unless an end goes.
const FRAMES: u64 = 150;

fn send_all(port: &LinkPort, frames: u64, random: &mut Random) {
    for step in 0..frames {
        tarry(random);
        match port.send_frame(sized(step, random.below(9000) as usize)) {
            Err(PortError::Closed) if step >= FRAMES / 2 => return,
            sent => sent.unwrap(),
        }
    }
}

fn take_all(port: &LinkPort, frames: u64, random: &mut Random) {
    for step in 0..frames {
        tarry(random);
        let found = patiently(port, random);
        assert_eq!(found, sized(step, found.payload.len()));
    }
}

/// What a stage does between frames: nothing, much, or something in between.
fn tarry(random: &mut Random) {
    match random.below(8) {
        0 => std::thread::sleep(Duration::from_micros(random.below(3000))),
        1 => std::thread::yield_now(),
        _ => {}
    }
}

/// The next frame, by whatever waits.
fn patiently(port: &LinkPort, random: &mut Random) -> Frame {
    let begun = Instant::now();
    loop {
        let timeout = match random.below(4) {
            0 => Duration::ZERO,
            1 => Duration::from_micros(random.below(2000)),
            2 => Duration::from_millis(random.below(20)),
            _ => LONG,
        };
        match port.receive_frame(timeout) {
            Ok(arrival) => return arrival.frame,
            Err(PortError::Timeout { .. }) => assert!(begun.elapsed() < LONG, "no frame comes"),
            Err(error) => panic!("{error}"),
        }
    }
}
