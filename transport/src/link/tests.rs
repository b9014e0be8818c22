mod network;

use proptest::prelude::*;

use super::*;
use crate::frame::{FrameError, FrameHeader, HEADER_BYTES};

const ID: LinkId = LinkId { session: 0x5e55, link: 3 };
const LIMITS: LinkLimits = LinkLimits { credits: 3, payload_bytes: 100, silence: Duration::from_secs(2) };

fn frame(epoch: u64, step: u64) -> Frame {
    let header = FrameHeader { epoch, step, micro_batch: step as u32 % 4 };
    Frame { header, payload: vec![step as u8; step as usize % 50].into() }
}

fn hello(generation: u64, received: u64, granted: u64) -> Message {
    Message::Hello(Hello { id: ID, generation, ack: Ack { received, granted } })
}

/// All that an end writes at that time.
fn written(link: &mut Link, now: Instant) -> Vec<Message> {
    std::iter::from_fn(|| link.poll_transmit(now)).collect()
}

/// What `from` writes goes to `to`, both on a connection of that generation.
fn carry(from: &mut Link, to: &mut Link, now: Instant, generation: u64) -> usize {
    let messages = written(from, now);
    messages.into_iter().map(|message| to.handle(now, generation, message).unwrap()).count()
}

/// Until neither end has anything to write.
fn settle(a: &mut Link, b: &mut Link, now: Instant, generation: u64) {
    while carry(a, b, now, generation) + carry(b, a, now, generation) > 0 {}
}

/// Two ends with a connection of that generation, which have greeted each other.
fn connect(a: &mut Link, b: &mut Link, now: Instant, generation: u64) {
    assert!(a.connected(now, generation) && b.connected(now, generation));
    settle(a, b, now, generation);
    assert_eq!([a.state(), b.state()], [LinkState::Up; 2]);
}

fn pair(now: Instant) -> (Link, Link) {
    let (mut a, mut b) = (Link::new(ID, LIMITS, now), Link::new(ID, LIMITS, now));
    connect(&mut a, &mut b, now, 1);
    (a, b)
}

fn steps_taken(link: &mut Link) -> Vec<u64> {
    std::iter::from_fn(|| link.take()).map(|arrival| arrival.frame.header.step).collect()
}

fn sequences(messages: &[Message]) -> Vec<u64> {
    messages
        .iter()
        .filter_map(|message| match message {
            Message::Frame { sequence, .. } | Message::Forgotten { sequence } | Message::Bye { sequence } => {
                Some(*sequence)
            }
            Message::Hello(_) | Message::Ack(_) => None,
        })
        .collect()
}

#[test]
fn a_sender_waits_for_credits_and_taking_gives_them_back() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    (1..=3).for_each(|step| a.send(frame(1, step)).unwrap());
    assert!(!a.can_send());
    assert_eq!(a.send(frame(1, 4)), Err(SendError::Full { sequence: 4, granted: 3 }));
    settle(&mut a, &mut b, now, 1);
    assert!(!a.can_send(), "what nobody took is in the way");
    let later = now + Duration::from_millis(5);
    let first = b.take().unwrap();
    assert_eq!((first.frame, first.at), (frame(1, 1), now));
    settle(&mut a, &mut b, later, 1);
    assert!(!b.has_ack_due() && !a.can_send(), "one credit of three is not worth a message");
    assert_eq!(b.take().unwrap().frame, frame(1, 2));
    assert!(b.has_ack_due());
    settle(&mut a, &mut b, later, 1);
    assert!(a.can_send());
    (4..=5).for_each(|step| a.send(frame(1, step)).unwrap());
    assert!(!a.can_send());
    settle(&mut a, &mut b, later, 1);
    assert_eq!(steps_taken(&mut b), [3, 4, 5]);
}

#[test]
fn a_credit_goes_back_with_a_frame_or_a_sign_of_life() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    a.send(frame(1, 1)).unwrap();
    settle(&mut a, &mut b, now, 1);
    b.take().unwrap();
    assert_eq!(written(&mut b, now), []);
    b.send(frame(1, 7)).unwrap();
    let wanted = Message::Ack(Ack { received: 1, granted: 4 });
    assert_eq!(written(&mut b, now), [wanted, Message::Frame { sequence: 1, frame: frame(1, 7) }]);
    a.send(frame(1, 2)).unwrap();
    settle(&mut a, &mut b, now, 1);
    b.take().unwrap();
    assert_eq!(written(&mut b, now), []);
    let beat = now + LIMITS.silence / BEATS;
    b.handle_timeout(beat);
    assert_eq!(written(&mut b, beat), [Message::Ack(Ack { received: 2, granted: 5 })]);
}

#[test]
fn links_of_one_credit_give_it_back_at_once() {
    let now = Instant::now();
    let limits = LinkLimits { credits: 1, ..LIMITS };
    let mut link = Link::new(ID, limits, now);
    assert!(link.connected(now, 1));
    written(&mut link, now);
    link.handle(now, 1, hello(1, 0, 1)).unwrap();
    link.handle(now, 1, Message::Frame { sequence: 1, frame: frame(1, 1) }).unwrap();
    link.take().unwrap();
    assert_eq!(written(&mut link, now), [Message::Ack(Ack { received: 1, granted: 2 })]);
}

#[test]
fn the_smaller_number_of_credits_counts_whatever_is_granted() {
    let now = Instant::now();
    let mut link = Link::new(ID, LIMITS, now);
    assert!(link.connected(now, 1) && !link.can_send());
    link.handle(now, 1, hello(1, 0, u64::MAX)).unwrap();
    (1..=3).for_each(|step| link.send(frame(1, step)).unwrap());
    assert_eq!(link.send(frame(1, 4)), Err(SendError::Full { sequence: 4, granted: 3 }));
    written(&mut link, now);
    link.handle(now, 1, Message::Ack(Ack { received: 2, granted: u64::MAX })).unwrap();
    (4..=5).for_each(|step| link.send(frame(1, step)).unwrap());
    assert!(!link.can_send());
}

#[test]
fn what_is_over_the_limit_is_not_sent() {
    let (mut a, _) = pair(Instant::now());
    let large = Frame { payload: vec![0; 101].into(), ..Frame::default() };
    assert_eq!(a.send(large), Err(SendError::TooLarge { found: 101, limit: 100 }));
    let largest = Frame { payload: vec![0; 100].into(), ..Frame::default() };
    assert_eq!(a.send(largest), Ok(()));
}

#[test]
fn after_a_reconnection_exactly_the_rest_is_sent_again() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    (1..=3).for_each(|step| a.send(frame(1, step)).unwrap());
    let mut lost = written(&mut a, now).into_iter();
    b.handle(now, 1, lost.next().unwrap()).unwrap();
    a.disconnected(now, 1);
    b.disconnected(now, 1);
    assert_eq!(a.state(), LinkState::Down { since: now });
    assert!(a.poll_transmit(now).is_none());

    assert!(a.connected(now, 2) && b.connected(now, 2));
    let greeting = written(&mut a, now);
    assert_eq!(greeting, [hello(2, 0, 3)], "nothing else before the neighbour has said where it stands");
    b.handle(now, 2, greeting[0].clone()).unwrap();
    carry(&mut b, &mut a, now, 2);
    let rest = written(&mut a, now);
    assert_eq!(sequences(&rest), [2, 3]);
    rest.into_iter().for_each(|message| b.handle(now, 2, message).unwrap());
    assert_eq!(steps_taken(&mut b), [1, 2, 3]);
}

#[test]
fn an_older_connection_is_ignored_and_does_not_come_back() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    a.send(frame(1, 1)).unwrap();
    let old = written(&mut a, now);
    connect(&mut a, &mut b, now, 2);
    assert_eq!(steps_taken(&mut b), [1]);
    b.handle(now, 1, old[0].clone()).unwrap();
    b.handle(now, 1, Message::Ack(Ack { received: 9, granted: 0 })).unwrap();
    b.disconnected(now, 1);
    assert_eq!(b.state(), LinkState::Up);
    assert!(b.take().is_none());
    for stale in 0..=2 {
        assert!(!b.connected(now, stale), "generation {stale} after 2");
    }
    assert_eq!(b.next_generation(), 3);
}

#[test]
fn forgotten_frames_are_counted_and_not_delivered() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    (1..=3).for_each(|step| a.send(frame(step, step)).unwrap());
    a.forget_before(3);
    assert!(a.outgoing.kept.iter().filter(|kept| kept.is_some()).count() == 1, "payloads are let go of");
    settle(&mut a, &mut b, now, 1);
    // The two have given their credits back although nobody took anything.
    (4..=5).for_each(|step| a.send(frame(step, step)).unwrap());
    assert!(!a.can_send());
    settle(&mut a, &mut b, now, 1);
    assert_eq!(steps_taken(&mut b), [3, 4, 5]);
}

#[test]
fn a_bye_comes_after_all_frames_each_way_and_survives_its_connection() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    a.send(frame(1, 1)).unwrap();
    b.send(frame(1, 7)).unwrap();
    a.close();
    assert_eq!(a.send(frame(1, 2)), Err(SendError::Closed));
    // Lost with all that was written on it.
    assert_eq!(sequences(&written(&mut a, now)), [1, 2]);
    connect_and_close(&mut a, &mut b, now);
    assert_eq!(b.send(frame(1, 8)), Err(SendError::Closed));
    assert!(!a.has_ended() && !b.has_ended());
    assert_eq!((steps_taken(&mut a), steps_taken(&mut b)), (vec![7], vec![1]));
    assert!(a.has_ended() && b.has_ended());
    assert_eq!((a.poll_timeout(), b.poll_timeout()), (None, None));
}

fn connect_and_close(a: &mut Link, b: &mut Link, now: Instant) {
    assert!(a.connected(now, 2) && b.connected(now, 2));
    settle(a, b, now, 2);
    assert_eq!([a.state(), b.state()], [LinkState::Closed; 2]);
}

/// The end that closed last does not know whether the other one heard its bye. It asks again while that one is there;
/// when all frames have arrived and it never answers, that was its farewell.
#[test]
fn a_lost_farewell_is_asked_for_again() {
    let now = Instant::now();
    for comes_back in [true, false] {
        let (mut a, mut b) = pair(now);
        a.close();
        carry(&mut a, &mut b, now, 1);
        carry(&mut b, &mut a, now, 1);
        assert_eq!(a.state(), LinkState::Closed);
        assert_eq!(b.state(), LinkState::Up, "its bye is not acknowledged");
        b.disconnected(now, 1);
        if comes_back {
            connect_and_close(&mut a, &mut b, now);
        }
        b.handle_timeout(now + LIMITS.silence);
        assert_eq!(b.state(), LinkState::Closed);
    }
}

#[test]
fn frames_that_may_not_have_arrived_are_lost_with_the_neighbour() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    b.send(frame(1, 1)).unwrap();
    a.close();
    carry(&mut a, &mut b, now, 1);
    b.handle_timeout(now + LIMITS.silence);
    assert_eq!(b.state(), LinkState::Lost { silent: LIMITS.silence });
}

#[test]
fn silence_is_death_and_final() {
    let now = Instant::now();
    let (mut a, mut b) = pair(now);
    b.send(frame(1, 1)).unwrap();
    carry(&mut b, &mut a, now, 1);
    a.send(frame(1, 2)).unwrap();
    let almost = now + LIMITS.silence - Duration::from_millis(1);
    a.handle_timeout(almost);
    assert_eq!(a.state(), LinkState::Up);
    let late = now + LIMITS.silence + Duration::from_millis(40);
    a.handle_timeout(late);
    let silent = LIMITS.silence + Duration::from_millis(40);
    assert_eq!(a.state(), LinkState::Lost { silent });
    assert_eq!(a.send(frame(1, 3)), Err(SendError::Lost { silent }));
    assert!(!a.connected(late, 2) && !a.can_send() && a.outgoing.kept.is_empty());
    assert_eq!((a.handle(late, 1, Message::Ack(Ack::default())), a.poll_timeout()), (Ok(()), None));
    assert_eq!(a.state(), LinkState::Lost { silent });
    assert!(!a.has_ended(), "what arrived can be taken");
    assert_eq!(steps_taken(&mut a), [1]);
    assert!(a.has_ended());
}

#[test]
fn who_comes_late_to_its_timeouts_takes_nobody_for_dead_who_has_spoken() {
    let now = Instant::now();
    let (mut a, _) = pair(now);
    let late = now + 3 * LIMITS.silence;
    a.handle(late, 1, Message::Ack(Ack { received: 0, granted: 3 })).unwrap();
    a.handle_timeout(late);
    assert_eq!(a.state(), LinkState::Up);
}

/// Connections that a host accepts for a link that is gone would keep a neighbour alive for ever.
#[test]
fn a_connection_alone_is_no_sign_of_life() {
    let now = Instant::now();
    let (mut a, _) = pair(now);
    assert!(a.connected(now + LIMITS.silence / 2, 2));
    a.handle_timeout(now + LIMITS.silence);
    assert_eq!(a.state(), LinkState::Lost { silent: LIMITS.silence });
}

#[test]
fn an_idle_link_lives_on_signs_of_life() {
    let start = Instant::now();
    let (mut a, mut b) = pair(start);
    let mut beats = 0;
    while let Some(now) = a.poll_timeout().into_iter().chain(b.poll_timeout()).min() {
        if now > start + Duration::from_secs(60) {
            break;
        }
        a.handle_timeout(now);
        b.handle_timeout(now);
        assert!(a.poll_timeout() > Some(now), "a shell that cannot write need not spin");
        beats += carry(&mut a, &mut b, now, 1);
        carry(&mut b, &mut a, now, 1);
    }
    assert_eq!([a.state(), b.state()], [LinkState::Up; 2]);
    assert_eq!(beats, 180, "every third of a second");
}

#[test]
fn who_sends_a_large_frame_is_alive() {
    let mut now = Instant::now();
    let (mut a, _) = pair(now);
    for _ in 0..10 {
        now += LIMITS.silence / 2;
        a.heard(now, 1);
        a.heard(now + LIMITS.silence, 9);
        a.handle_timeout(now);
    }
    assert_eq!(a.state(), LinkState::Up);
}

#[test]
fn every_violation_has_its_error_and_changes_nothing() {
    let now = Instant::now();
    let ack = |received, granted| Message::Ack(Ack { received, granted });
    let sent = |sequence| Message::Frame { sequence, frame: frame(1, sequence) };
    let other = LinkId { link: 4, ..ID };
    let stranger = Message::Hello(Hello { id: other, generation: 2, ack: Ack::default() });
    let large = Message::Frame { sequence: 2, frame: Frame { payload: vec![0; 101].into(), ..Frame::default() } };

    // An end that has frame 1, was granted 4 more, and sent frames 1 to 3, of which the neighbour has two.
    let greeted = || {
        let mut link = Link::new(ID, LIMITS, now);
        assert!(link.connected(now, 1));
        link.handle(now, 1, hello(1, 0, 5)).unwrap();
        (1..=3).for_each(|step| link.send(frame(1, step)).unwrap());
        written(&mut link, now);
        link.handle(now, 1, sent(1)).unwrap();
        link.handle(now, 1, ack(2, 5)).unwrap();
        link
    };
    let ended = || {
        let mut link = greeted();
        link.handle(now, 1, Message::Bye { sequence: 2 }).unwrap();
        link
    };
    // Connected again, not greeted yet.
    let fresh = || {
        let mut link = greeted();
        assert!(link.connected(now, 2));
        link
    };
    // Connected again, greeted, and nothing sent again yet.
    let resuming = || {
        let mut link = fresh();
        link.handle(now, 2, hello(2, 2, 5)).unwrap();
        link
    };

    let check = |make: &dyn Fn() -> Link, message: Message, error: LinkError| {
        let mut link = make();
        let generation = link.generation;
        assert_eq!(link.handle(now, generation, message.clone()), Err(error), "{message:?}");
        let mut untouched = make();
        assert_eq!(link.state(), untouched.state(), "after {error}");
        assert_eq!(written(&mut link, now), written(&mut untouched, now), "after {error}");
        assert_eq!(steps_taken(&mut link), steps_taken(&mut untouched), "after {error}");
    };
    check(&fresh, stranger, LinkError::OtherLink { expected: ID, found: other });
    check(&fresh, hello(3, 2, 5), LinkError::OtherGeneration { expected: 2, found: 3 });
    check(&fresh, hello(2, 4, 5), LinkError::AckOfUnsent { sent: 3, found: 4 });
    check(&fresh, hello(2, 1, 5), LinkError::AckGoesBack { before: 2, found: 1 });
    check(&fresh, hello(2, 2, 4), LinkError::GrantGoesBack { before: 5, found: 4 });
    check(&fresh, sent(2), LinkError::NoHello { generation: 2 });
    check(&fresh, ack(2, 5), LinkError::NoHello { generation: 2 });
    check(&fresh, Message::Bye { sequence: 2 }, LinkError::NoHello { generation: 2 });
    check(&resuming, ack(3, 5), LinkError::AckOfUnsent { sent: 2, found: 3 });
    check(&greeted, hello(1, 2, 5), LinkError::SecondHello { generation: 1 });
    check(&greeted, sent(1), LinkError::Gap { expected: 2, found: 1 });
    check(&greeted, sent(0), LinkError::Gap { expected: 2, found: 0 });
    check(&greeted, sent(3), LinkError::Gap { expected: 2, found: 3 });
    check(&greeted, Message::Forgotten { sequence: 3 }, LinkError::Gap { expected: 2, found: 3 });
    check(&greeted, Message::Bye { sequence: u64::MAX }, LinkError::Gap { expected: 2, found: u64::MAX });
    check(&greeted, large, LinkError::TooLarge { limit: 100, found: 101 });
    check(&greeted, ack(4, 5), LinkError::AckOfUnsent { sent: 3, found: 4 });
    check(&greeted, ack(1, 5), LinkError::AckGoesBack { before: 2, found: 1 });
    check(&greeted, ack(2, 4), LinkError::GrantGoesBack { before: 5, found: 4 });
    check(&ended, sent(3), LinkError::AfterBye { bye: 2, found: 3 });
    check(&ended, Message::Bye { sequence: 3 }, LinkError::AfterBye { bye: 2, found: 3 });
    let full = || {
        let mut link = greeted();
        (2..=3).for_each(|sequence| link.handle(now, 1, sent(sequence)).unwrap());
        link
    };
    check(&full, sent(4), LinkError::BeyondCredits { granted: 3, found: 4 });
    check(&full, Message::Forgotten { sequence: 4 }, LinkError::BeyondCredits { granted: 3, found: 4 });
    // A credit counts from when it is granted, not from when it could be.
    let taken = || {
        let mut link = full();
        link.take().unwrap();
        link
    };
    check(&taken, sent(4), LinkError::BeyondCredits { granted: 3, found: 4 });
}

fn any_message() -> impl Strategy<Value = Message> {
    let number = prop_oneof![8 => 0u64..8, 1 => any::<u64>()];
    let ack = (number.clone(), number.clone()).prop_map(|(received, granted)| Ack { received, granted });
    prop_oneof![
        (any::<bool>(), number.clone(), ack.clone()).prop_map(|(other, generation, ack)| {
            Message::Hello(Hello { id: LinkId { link: ID.link + u32::from(other), ..ID }, generation, ack })
        }),
        (number.clone(), 0usize..120, any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
            |(sequence, bytes, epoch, step, micro_batch)| {
                let header = FrameHeader { epoch, step, micro_batch };
                Message::Frame { sequence, frame: Frame { header, payload: vec![sequence as u8; bytes].into() } }
            }
        ),
        number.clone().prop_map(|sequence| Message::Forgotten { sequence }),
        ack.prop_map(Message::Ack),
        number.prop_map(|sequence| Message::Bye { sequence }),
    ]
}

/// What may befall an end.
#[derive(Clone, Debug)]
enum Event {
    Comes(Message),
    /// A message that is in order, so that others get further.
    NextFrame,
    Connected(u64),
    Disconnected(u64),
    Send,
    Write,
    Take,
    Forget(u64),
    Close,
    Wait(u64),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => any_message().prop_map(Event::Comes),
        4 => Just(Event::NextFrame),
        2 => (0u64..8).prop_map(Event::Connected),
        1 => (0u64..8).prop_map(Event::Disconnected),
        4 => Just(Event::Send),
        4 => Just(Event::Write),
        3 => Just(Event::Take),
        1 => (0u64..8).prop_map(Event::Forget),
        1 => Just(Event::Close),
        1 => (0u64..1000).prop_map(Event::Wait),
    ]
}

proptest! {
    /// Whatever a neighbour and a shell do in whatever order: no panic, and no more held than the limits say.
    #[test]
    fn any_events_are_borne_within_the_limits(events in prop::collection::vec(any_event(), 0..120)) {
        let mut now = Instant::now();
        let mut link = Link::new(ID, LIMITS, now);
        let mut is_final = false;
        for event in events {
            match event {
                Event::Comes(Message::Hello(hello)) => {
                    // Mostly of the right generation, else nothing is ever said.
                    let generation = if hello.generation % 4 == 0 { hello.generation } else { link.generation };
                    let _ = link.handle(now, link.generation, Message::Hello(Hello { generation, ..hello }));
                }
                Event::Comes(message) => { let _ = link.handle(now, link.generation, message); }
                Event::NextFrame => {
                    let sequence = link.incoming.received + 1;
                    let _ = link.handle(now, link.generation, Message::Frame { sequence, frame: frame(1, sequence) });
                }
                Event::Connected(generation) => { link.connected(now, generation); }
                Event::Disconnected(generation) => link.disconnected(now, generation),
                Event::Send => {
                    let could = link.can_send();
                    let epoch = link.outgoing.accepted;
                    prop_assert_eq!(link.send(frame(epoch, 1)).is_ok(), could);
                }
                Event::Write => { link.poll_transmit(now); }
                Event::Take => { link.take(); }
                Event::Forget(epoch) => link.forget_before(epoch),
                Event::Close => link.close(),
                Event::Wait(ms) => {
                    now += Duration::from_millis(ms);
                    link.handle_timeout(now);
                }
            }
            prop_assert!(link.incoming.untaken.len() as u64 <= LIMITS.credits);
            prop_assert!(link.outgoing.kept.len() as u64 <= LIMITS.credits);
            let is_over = matches!(link.state(), LinkState::Lost { .. } | LinkState::Closed);
            prop_assert!(is_over || !is_final, "{:?} after the end", link.state());
            prop_assert_eq!(link.poll_timeout().is_none(), is_over);
            is_final = is_over;
        }
    }

    /// However a stream is cut, its messages come out of it.
    #[test]
    fn messages_survive_the_wire(
        messages in prop::collection::vec(any_message(), 0..12),
        cuts in prop::collection::vec(1usize..90, 1..40),
    ) {
        let bytes: Vec<u8> =
            messages.iter().flat_map(|message| [&message.header()[..], &message.payload()].concat()).collect();
        let mut decoder = Decoder::new(200);
        let (mut found, mut rest, mut cuts) = (Vec::new(), &bytes[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (mut piece, after) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            while let Some(message) = decoder.feed(&mut piece).unwrap() {
                found.push(message);
            }
            prop_assert!(piece.is_empty());
            rest = after;
        }
        prop_assert_eq!(found, messages);
    }

    /// Any bytes are messages or an error, and what is held of them is within the limit.
    #[test]
    fn any_bytes_are_messages_or_an_error(
        opening in prop_oneof![Just(vec![]), (0u8..7).prop_map(|kind| vec![2, 0, kind, 0]), Just(vec![2, 0, 2, 0, 9, 0, 0, 0])],
        bytes in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..300),
    ) {
        let bytes = [opening, bytes].concat();
        let mut decoder = Decoder::new(64);
        let mut rest = &bytes[..];
        loop {
            match decoder.feed(&mut rest) {
                Ok(Some(message)) => {
                    prop_assert!(message.payload().len() <= 64);
                    // The only bytes that mean it.
                    let again = [&message.header()[..], &message.payload()].concat();
                    prop_assert_eq!(&bytes[bytes.len() - rest.len() - again.len()..bytes.len() - rest.len()], again);
                }
                Ok(None) => break,
                Err(error) => {
                    prop_assert_eq!(decoder.feed(&mut &[2; HEADER_BYTES][..]), Err(error), "an error stays");
                    break;
                }
            }
            prop_assert!(decoder.space().len() <= 64);
        }
    }
}

/// The layout, byte by byte: a change of it is another wire version.
#[test]
fn headers_lie_on_the_wire_as_documented() {
    let header = FrameHeader { epoch: 0x0a09_0807_0605_0403, step: 0x1413_1211, micro_batch: 0x2423_2221 };
    let message = Message::Frame { sequence: 0x31, frame: Frame { header, payload: vec![7; 0x0102].into() } };
    let mut expected = vec![2, 0, 2, 0, 2, 1, 0, 0];
    expected.extend([3, 4, 5, 6, 7, 8, 9, 10, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 0]);
    expected.extend([0x31, 0, 0, 0, 0, 0, 0, 0, 0x21, 0x22, 0x23, 0x24, 0, 0, 0, 0]);
    assert_eq!(message.header()[..], expected);

    let eight = |number: u64| number.to_le_bytes();
    let said = hello(4, 5, 6).header();
    assert_eq!(said[..], [&[2, 0, 1, 0, 3, 0, 0, 0], &eight(0x5e55)[..], &eight(4), &eight(5), &eight(6)].concat());
    let ack = Message::Ack(Ack { received: 5, granted: 6 }).header();
    assert_eq!(ack[..], [&[2, 0, 4, 0, 0, 0, 0, 0], &eight(5)[..], &eight(6), &[0; 16]].concat());
    for (message, kind) in [(Message::Forgotten { sequence: 9 }, 3), (Message::Bye { sequence: 9 }, 5)] {
        assert_eq!(message.header()[..], [&[2, 0, kind, 0, 0, 0, 0, 0], &eight(9)[..], &[0; 24]].concat());
    }
}

#[test]
fn oversized_payloads_and_other_versions_are_refused() {
    let refused = |bytes: [u8; HEADER_BYTES]| Decoder::new(100).feed(&mut &bytes[..]).unwrap_err();
    let with = |at: usize, value: u8, message: &Message| {
        let mut bytes = message.header();
        bytes[at] = value;
        refused(bytes)
    };
    let frame = Message::Frame { sequence: 1, frame: frame(1, 1) };
    assert_eq!(with(4, 101, &frame), FrameError::TooLarge { found: 101, limit: 100 });
    assert_eq!(with(7, 0xff, &frame), FrameError::TooLarge { found: 0xff00_0001, limit: 100 });
    assert_eq!(with(0, 1, &frame), FrameError::Version { found: 1 });
    assert_eq!(with(2, 0, &frame), FrameError::Kind { found: 0 });
    assert_eq!(with(2, 6, &frame), FrameError::Kind { found: 6 });
    assert_eq!(with(39, 1, &frame), FrameError::Reserved { found: 1 << 24 });
    assert_eq!(with(16, 1, &Message::Bye { sequence: 1 }), FrameError::Reserved { found: 1 });
    assert_eq!(with(31, 1, &Message::Ack(Ack::default())), FrameError::Reserved { found: 1 << 56 });
    // A decoder never takes more than any link may.
    let mut bytes = frame.header();
    bytes[4..8].copy_from_slice(&(PAYLOAD_BYTES_MAX as u32 + 1).to_le_bytes());
    let error = Decoder::new(usize::MAX).feed(&mut &bytes[..]).unwrap_err();
    assert_eq!(error, FrameError::TooLarge { found: PAYLOAD_BYTES_MAX + 1, limit: PAYLOAD_BYTES_MAX });
}
