//! Links between threads of one process.

use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Select, Sender, TrySendError, bounded};

use crate::frame::{Frame, FrameError, PAYLOAD_BYTES_MAX};
use crate::port::{Arrival, Port, PortError};

/// One end of a link made by [`pair`] or [`crate::relay::slow_pair`].
pub struct LocalPort {
    pub(crate) to: Sender<Arrival>,
    pub(crate) from: Receiver<Arrival>,
}

/// The two ends of a link that holds at most `frames` frames each way.
///
/// # Panics
/// When `frames` is zero: nothing could ever be sent ahead.
pub fn pair(frames: usize) -> (LocalPort, LocalPort) {
    assert!(frames > 0, "a link holds at least one frame");
    let (there, from_here) = bounded(frames);
    let (back, from_there) = bounded(frames);
    (LocalPort { to: there, from: from_there }, LocalPort { to: back, from: from_here })
}

impl Port for LocalPort {
    fn send(&mut self, frame: Frame) -> Result<(), PortError> {
        if frame.payload.len() > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLarge { found: frame.payload.len(), limit: PAYLOAD_BYTES_MAX }.into());
        }
        let mut arrival = Arrival { frame, at: Instant::now() };
        // This end is the channel's only sender: room that it has seen stays.
        while let Err(error) = self.to.try_send(arrival) {
            let TrySendError::Full(waiting) = error else { return Err(PortError::Closed) };
            let mut room = Select::new();
            room.send(&self.to);
            room.ready();
            arrival = Arrival { at: Instant::now(), ..waiting };
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        let mut room = Select::new();
        room.send(&self.to);
        room.try_ready().is_ok()
    }

    fn receive(&mut self, timeout: Duration) -> Result<Arrival, PortError> {
        self.from.recv_timeout(timeout).map_err(|e| match e {
            RecvTimeoutError::Timeout => PortError::Timeout { timeout },
            RecvTimeoutError::Disconnected => PortError::Closed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::FrameHeader;

    const SOON: Duration = Duration::from_millis(20);

    fn frame(step: u64) -> Frame {
        Frame { header: FrameHeader { epoch: 1, step, micro_batch: 0 }, payload: vec![step as u8; 3].into() }
    }

    #[test]
    fn frames_arrive_in_order_both_ways_and_what_was_sent_outlives_the_sender() {
        let (mut a, mut b) = pair(2);
        a.send(frame(1)).unwrap();
        a.send(frame(2)).unwrap();
        b.send(frame(3)).unwrap();
        assert_eq!(a.receive(SOON).unwrap().frame, frame(3));
        drop(a);
        assert_eq!(b.receive(SOON).unwrap().frame, frame(1));
        assert_eq!(b.receive(SOON).unwrap().frame, frame(2));
        assert_eq!(b.receive(SOON), Err(PortError::Closed));
        assert_eq!(b.send(frame(4)), Err(PortError::Closed));
    }

    #[test]
    fn a_full_link_makes_the_sender_wait() {
        let (mut a, mut b) = pair(1);
        assert!(a.has_room());
        a.send(frame(1)).unwrap();
        assert!(!a.has_room());
        let sender = std::thread::spawn(move || a.send(frame(2)));
        let room = Instant::now();
        let first = b.receive(SOON).unwrap();
        let second = b.receive(Duration::from_secs(5)).unwrap();
        assert_eq!((first.frame, second.frame), (frame(1), frame(2)));
        assert!(first.at <= room && room <= second.at, "a frame arrives when the link has room for it");
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn a_link_that_is_gone_is_not_waited_for() {
        let (mut a, b) = pair(1);
        a.send(frame(1)).unwrap();
        drop(b);
        assert!(a.has_room());
        assert_eq!(a.send(frame(2)), Err(PortError::Closed));
    }

    #[test]
    fn silence_is_a_timeout() {
        let (mut a, _b) = pair(1);
        assert_eq!(a.receive(SOON), Err(PortError::Timeout { timeout: SOON }));
        assert_eq!(a.receive(Duration::ZERO), Err(PortError::Timeout { timeout: Duration::ZERO }));
    }
}
