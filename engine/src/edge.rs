//! The proof of a hop before anything is trusted to it: a block that both ends know goes there and back.
//!
//! Rivals have served garbage over links that carried most sizes well; so the block is longer than any buffer on the way
//! is likely to be, and no two of its parts are alike.

use std::time::{Duration, Instant};

use pp_transport::{Arrival, Frame, FrameHeader, Port, PortError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::random::Random;

/// Bytes of the block.
pub const BLOCK_BYTES: usize = 64 << 10;
/// The epoch of its frame; a pipeline's own begin at 1.
const EPOCH: u64 = 0;

/// What a hop did to the block.
#[derive(Clone, Debug, Error, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum EdgeError {
    #[error("the block that proves the hop did not come within {} s", seconds)]
    Silent { seconds: u64 },
    #[error("the hop was closed before the block that proves it came")]
    Closed,
    #[error(
        "the hop changed byte {at} of a block of {BLOCK_BYTES} from {expected:#04x} to {found:#04x}: the network or a driver damages data"
    )]
    Changed { at: usize, expected: u8, found: u8 },
    #[error("the hop made a block of {found} bytes of one of {BLOCK_BYTES}")]
    Length { found: usize },
}

/// The block of hop `hop`.
fn block(hop: usize) -> Vec<u8> {
    let mut random = Random::new(0xed6e + hop as u64);
    (0..BLOCK_BYTES / 8).flat_map(|_| random.bits().to_le_bytes()).collect()
}

/// Sends the block down hop `hop`.
///
/// # Errors
/// [`EdgeError::Closed`].
pub fn send(port: &mut dyn Port, hop: usize) -> Result<(), EdgeError> {
    let header = FrameHeader { epoch: EPOCH, step: hop as u64, micro_batch: 0 };
    port.send(Frame { header, payload: block(hop).into() }).map_err(|_| EdgeError::Closed)
}

/// Takes the block of hop `hop` and compares it.
///
/// # Errors
/// [`EdgeError`].
pub fn check(port: &mut dyn Port, hop: usize, patience: Duration) -> Result<(), EdgeError> {
    let until = Instant::now() + patience;
    let found = loop {
        match port.receive(until.saturating_duration_since(Instant::now())) {
            Ok(Arrival { frame, .. }) if frame.header.epoch == EPOCH => break frame.payload,
            Ok(_) => {}
            Err(PortError::Timeout { .. }) => return Err(EdgeError::Silent { seconds: patience.as_secs() }),
            Err(_) => return Err(EdgeError::Closed),
        }
    };
    let expected = block(hop);
    if found.len() != expected.len() {
        return Err(EdgeError::Length { found: found.len() });
    }
    match expected.iter().zip(found.iter()).position(|(a, b)| a != b) {
        Some(at) => Err(EdgeError::Changed { at, expected: expected[at], found: found[at] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use pp_transport::local::pair;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[test]
    fn a_block_arrives_and_a_changed_one_is_told() {
        let (mut a, mut b) = pair(2);
        send(&mut a, 3).unwrap();
        assert_eq!(check(&mut b, 3, SOON), Ok(()));
        send(&mut a, 3).unwrap();
        assert!(matches!(check(&mut b, 4, SOON), Err(EdgeError::Changed { at: 0, .. })), "every hop has its own");
        let mut bytes = block(3);
        bytes[40_000] ^= 1;
        let (expected, found) = (block(3)[40_000], bytes[40_000]);
        a.send(Frame { header: FrameHeader::default(), payload: bytes.into() }).unwrap();
        assert_eq!(check(&mut b, 3, SOON), Err(EdgeError::Changed { at: 40_000, expected, found }));
        a.send(Frame { header: FrameHeader::default(), payload: vec![1; 7].into() }).unwrap();
        assert_eq!(check(&mut b, 3, SOON), Err(EdgeError::Length { found: 7 }));
    }

    #[test]
    fn silence_and_closed_hops_are_told() {
        let (a, mut b) = pair(1);
        assert_eq!(check(&mut b, 0, Duration::ZERO), Err(EdgeError::Silent { seconds: 0 }));
        drop(a);
        assert_eq!(check(&mut b, 0, SOON), Err(EdgeError::Closed));
        assert_eq!(send(&mut b, 0), Err(EdgeError::Closed));
    }
}
