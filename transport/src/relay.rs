//! Links that are slow on purpose: a relay between two local ports hands frames on late. For tests and measurements of
//! what a hop costs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Select, Sender, TryRecvError, TrySendError, bounded};

use crate::frame::HEADER_BYTES;
use crate::local::LocalPort;
use crate::port::Arrival;

/// How slow a link is, each way.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Delay {
    /// From when the link has taken a frame to its arrival. Frames on the way overlap.
    pub latency: Duration,
    /// Bytes a second that the link takes, one frame after the other; at least 1, any number where there is none.
    pub bytes_per_s: Option<f64>,
}

/// The two ends of a slow link. Each way at most `frames` frames wait to be sent, as many are on the way, and as many have
/// arrived. What was sent arrives although its sender is gone; the relay ends when either end is.
///
/// # Errors
/// When the system starts no thread.
///
/// # Panics
/// When `frames` is zero, or the link takes less than a byte a second.
pub fn slow_pair(frames: usize, delay: Delay) -> std::io::Result<(LocalPort, LocalPort)> {
    assert!(frames > 0, "a link holds at least one frame");
    assert!(delay.bytes_per_s.is_none_or(|rate| rate >= 1.0), "a link takes at least a byte a second");
    let way = || {
        let (to_relay, from) = bounded(frames);
        let (to, from_relay) = bounded(frames);
        let now = Instant::now();
        let wire = Wire { delay, free: now };
        (to_relay, Way { from, to, wire, on_way: VecDeque::new(), frames, room: now, is_open: true }, from_relay)
    };
    let ((here_to, there, there_from), (there_to, back, here_from)) = (way(), way());
    std::thread::Builder::new().name("relay".to_owned()).spawn(move || relay([there, back]))?;
    Ok((LocalPort { to: here_to, from: here_from }, LocalPort { to: there_to, from: there_from }))
}

/// When frames arrive.
struct Wire {
    delay: Delay,
    /// When the link can take another frame.
    free: Instant,
}

impl Wire {
    /// When a frame of so many bytes arrives that was there at `at`.
    fn arrival(&mut self, at: Instant, bytes: usize) -> Instant {
        let takes = self.delay.bytes_per_s.map_or(0.0, |rate| bytes as f64 / rate);
        self.free = at.max(self.free) + Duration::from_secs_f64(takes);
        self.free + self.delay.latency
    }
}

/// One direction.
struct Way {
    from: Receiver<Arrival>,
    to: Sender<Arrival>,
    wire: Wire,
    /// With when they arrive, oldest first.
    on_way: VecDeque<(Instant, Arrival)>,
    frames: usize,
    /// Since when there was room on the way.
    room: Instant,
    /// Whether its sender is there.
    is_open: bool,
}

impl Way {
    fn has_room(&self) -> bool {
        self.is_open && self.on_way.len() < self.frames
    }

    fn take(&mut self) {
        match self.from.try_recv() {
            Ok(arrival) => {
                let bytes = HEADER_BYTES + arrival.frame.payload.len();
                self.on_way.push_back((self.wire.arrival(arrival.at.max(self.room), bytes), arrival));
            }
            Err(TryRecvError::Disconnected) => self.is_open = false,
            Err(TryRecvError::Empty) => {}
        }
    }

    fn deliver(&mut self) {
        let Some((due, arrival)) = self.on_way.pop_front() else { return };
        let now = Instant::now();
        match self.to.try_send(Arrival { at: now, ..arrival }) {
            Ok(()) if self.on_way.len() + 1 == self.frames => self.room = now,
            Ok(()) => {}
            Err(TrySendError::Full(arrival)) => self.on_way.push_front((due, arrival)),
            Err(TrySendError::Disconnected(_)) => {
                self.is_open = false;
                self.on_way.clear();
            }
        }
    }
}

/// What a way waits for.
enum Wait {
    Take(usize),
    Deliver(usize),
}

fn relay(mut ways: [Way; 2]) {
    // An end that is gone neither sends nor receives: once what it sent has arrived, nothing is left to do.
    while ways.iter().all(|way| way.is_open || !way.on_way.is_empty()) {
        let now = Instant::now();
        let (mut select, mut waits, mut next) = (Select::new(), Vec::new(), None);
        for (i, way) in ways.iter().enumerate() {
            if way.has_room() {
                select.recv(&way.from);
                waits.push(Wait::Take(i));
            }
            match way.on_way.front() {
                Some((due, _)) if *due <= now => {
                    select.send(&way.to);
                    waits.push(Wait::Deliver(i));
                }
                Some((due, _)) => next = Some(next.map_or(*due, |at: Instant| at.min(*due))),
                None => {}
            }
        }
        let ready = match next {
            Some(at) => select.ready_deadline(at).ok(),
            None => Some(select.ready()),
        };
        match ready.map(|ready| &waits[ready]) {
            Some(Wait::Take(i)) => ways[*i].take(),
            Some(Wait::Deliver(i)) => ways[*i].deliver(),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{Frame, FrameHeader};
    use crate::port::{Port, PortError};

    const LATENCY: Duration = Duration::from_millis(5);
    const PATIENCE: Duration = Duration::from_secs(20);

    fn frame(step: u64) -> Frame {
        Frame { header: FrameHeader { epoch: 1, step, micro_batch: 0 }, payload: vec![step as u8; 1000].into() }
    }

    #[test]
    fn latency_overlaps_and_bandwidth_does_not() {
        let zero = Instant::now();
        let at = |ms| zero + Duration::from_millis(ms);
        let delay = Delay { latency: LATENCY, bytes_per_s: None };
        let mut wire = Wire { delay, free: zero };
        assert_eq!([0, 0, 3].map(|ms| wire.arrival(at(ms), 1 << 20)), [5, 5, 8].map(at));
        let mut wire = Wire { delay: Delay { bytes_per_s: Some(1e6), ..delay }, free: zero };
        assert_eq!([0, 0, 9].map(|ms| wire.arrival(at(ms), 2000)), [7, 9, 16].map(at));
    }

    #[test]
    fn frames_arrive_late_in_order_and_outlive_their_sender() {
        let (mut a, mut b) = slow_pair(2, Delay { latency: LATENCY, bytes_per_s: Some(1e6) }).unwrap();
        let sent = Instant::now();
        // More than the link holds: the sender waits.
        let sender = std::thread::spawn(move || (1..20).for_each(|step| a.send(frame(step)).unwrap()));
        for step in 1..20 {
            let arrival = b.receive(PATIENCE).unwrap();
            assert_eq!(arrival.frame, frame(step));
            assert!(arrival.at - sent >= LATENCY + Duration::from_millis(step));
        }
        sender.join().unwrap();
        assert_eq!(b.receive(PATIENCE), Err(PortError::Closed));
    }

    #[test]
    fn both_ends_may_send_more_than_the_link_holds() {
        let (mut a, mut b) = slow_pair(1, Delay { latency: Duration::from_micros(50), ..Delay::default() }).unwrap();
        let echo = std::thread::spawn(move || {
            while let Ok(arrival) = b.receive(PATIENCE) {
                b.send(arrival.frame).unwrap();
            }
        });
        for step in 0..100 {
            a.send(frame(step)).unwrap();
            if step >= 2 {
                assert_eq!(a.receive(PATIENCE).unwrap().frame, frame(step - 2));
            }
        }
        assert_eq!([98, 99].map(|_| a.receive(PATIENCE).unwrap().frame), [98, 99].map(frame));
        drop(a);
        echo.join().unwrap();
    }

    #[test]
    fn a_receiver_that_is_gone_ends_the_relay() {
        let (mut a, b) = slow_pair(1, Delay { latency: PATIENCE, ..Delay::default() }).unwrap();
        a.send(frame(0)).unwrap();
        drop(b);
        assert_eq!(a.receive(PATIENCE), Err(PortError::Closed));
        assert_eq!(a.send(frame(1)), Err(PortError::Closed));
    }
}
