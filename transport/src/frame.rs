//! The unit that crosses a link: a fixed header and a payload that transport does not read.

use thiserror::Error;

/// Version of the header's layout.
pub const WIRE_VERSION: u16 = 1;
/// Bytes of an encoded header.
pub const HEADER_BYTES: usize = 28;
/// Largest payload that is accepted: a prefill chunk of 4096 tokens of 16384 floats.
pub const PAYLOAD_BYTES_MAX: usize = 256 << 20;

/// What stands before a payload, little-endian, in this order behind the version and two bytes of zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameHeader {
    /// The pipeline that the frame belongs to; frames of an older one are dropped.
    pub epoch: u64,
    /// The step that the payload takes part in.
    pub step: u64,
    /// The micro-batch within the step.
    pub micro_batch: u32,
}

/// A header with its payload.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Routing.
    pub header: FrameHeader,
    /// The engine's bytes.
    pub payload: Vec<u8>,
}

/// Why bytes are not a frame's header.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum FrameError {
    #[error(
        "frame header speaks wire version {found}, this program speaks {WIRE_VERSION}: both ends must run the same release"
    )]
    Version { found: u16 },
    #[error("frame header has non-zero reserved bytes {found:#06x}")]
    Reserved { found: u16 },
    #[error("frame announces a payload of {found} bytes, the limit is {PAYLOAD_BYTES_MAX}")]
    TooLarge { found: usize },
}

impl FrameHeader {
    /// The header's bytes for a payload of that many bytes.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`]: the peer would refuse it.
    pub fn encode(&self, payload_bytes: usize) -> Result<[u8; HEADER_BYTES], FrameError> {
        if payload_bytes > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLarge { found: payload_bytes });
        }
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&WIRE_VERSION.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.step.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.micro_batch.to_le_bytes());
        bytes[24..28].copy_from_slice(&(payload_bytes as u32).to_le_bytes());
        Ok(bytes)
    }

    /// The header in `bytes` and the number of payload bytes that follow it, which is within
    /// [`PAYLOAD_BYTES_MAX`]: a reader may allocate them.
    ///
    /// # Errors
    /// [`FrameError`]: the bytes are not a header of this version.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<(FrameHeader, usize), FrameError> {
        let short = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if short(0) != WIRE_VERSION {
            return Err(FrameError::Version { found: short(0) });
        }
        if short(2) != 0 {
            return Err(FrameError::Reserved { found: short(2) });
        }
        let payload = word(24) as usize;
        if payload > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLarge { found: payload });
        }
        Ok((FrameHeader { epoch: long(4), step: long(12), micro_batch: word(20) }, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive_the_wire(epoch: u64, step: u64, micro_batch: u32, payload in 0..=PAYLOAD_BYTES_MAX) {
            let header = FrameHeader { epoch, step, micro_batch };
            prop_assert_eq!(FrameHeader::decode(&header.encode(payload).unwrap()), Ok((header, payload)));
        }

        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes: [u8; HEADER_BYTES]) {
            if let Ok((_, payload)) = FrameHeader::decode(&bytes) {
                prop_assert!(payload <= PAYLOAD_BYTES_MAX);
            }
        }
    }

    #[test]
    fn oversized_payloads_and_other_versions_are_refused() {
        assert_eq!(
            FrameHeader::default().encode(PAYLOAD_BYTES_MAX + 1),
            Err(FrameError::TooLarge { found: PAYLOAD_BYTES_MAX + 1 })
        );
        let mut bytes = FrameHeader::default().encode(0).unwrap();
        bytes[27] = 0xff;
        assert!(matches!(FrameHeader::decode(&bytes), Err(FrameError::TooLarge { .. })));
        bytes[0] = 9;
        assert_eq!(FrameHeader::decode(&bytes), Err(FrameError::Version { found: 9 }));
    }
}
