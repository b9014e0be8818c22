//! The unit that crosses a link: a fixed header and a payload that transport does not read.

use bytemuck::{Pod, Zeroable};
use bytes::Bytes;
use thiserror::Error;

/// Version of the layout of headers.
pub const WIRE_VERSION: u16 = 2;
/// Bytes of an encoded header, of a frame and of every other message of a link.
pub const HEADER_BYTES: usize = 40;
/// Largest payload that any link accepts: a prefill chunk of 4096 tokens of 16384 floats.
pub const PAYLOAD_BYTES_MAX: usize = 256 << 20;

/// What the engine says of a payload, and transport carries without a look at it.
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
    /// The engine's bytes. Clones share them, so a frame that is kept until it has arrived costs no copy.
    pub payload: Bytes,
}

/// Why bytes are not a header.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum FrameError {
    #[error(
        "header speaks wire version {found}, this program speaks {WIRE_VERSION}: both ends must run the same release"
    )]
    Version { found: u16 },
    #[error("header is of unknown kind {found}")]
    Kind { found: u16 },
    #[error("header has non-zero reserved bytes {found:#x}")]
    Reserved { found: u64 },
    #[error("frame has a payload of {found} bytes, the limit is {limit}")]
    TooLarge { found: usize, limit: usize },
}

/// What a message is. A number that no kind has is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    Hello = 1,
    Frame = 2,
    Forgotten = 3,
    Ack = 4,
    Bye = 5,
}

/// The version and the kind that a header opens with, as they lie on the wire.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WireOpening {
    version: u16,
    kind: u16,
}

impl WireOpening {
    pub(crate) fn new(kind: Kind) -> WireOpening {
        WireOpening { version: WIRE_VERSION.to_le(), kind: (kind as u16).to_le() }
    }

    /// The kind of the message whose header `bytes` are.
    pub(crate) fn read(bytes: &[u8; HEADER_BYTES]) -> Result<Kind, FrameError> {
        let WireOpening { version, kind } = bytemuck::pod_read_unaligned(&bytes[..size_of::<WireOpening>()]);
        if u16::from_le(version) != WIRE_VERSION {
            return Err(FrameError::Version { found: u16::from_le(version) });
        }
        let kinds = [Kind::Hello, Kind::Frame, Kind::Forgotten, Kind::Ack, Kind::Bye];
        let found = u16::from_le(kind);
        kinds.into_iter().find(|kind| *kind as u16 == found).ok_or(FrameError::Kind { found })
    }
}

/// The header of a frame as it lies on the wire: every number little-endian.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct WireFrame {
    opening: WireOpening,
    payload_bytes: u32,
    epoch: u64,
    step: u64,
    sequence: u64,
    micro_batch: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<WireFrame>() == HEADER_BYTES);

impl WireFrame {
    /// The header's bytes before a payload of so many, which no caller has over [`PAYLOAD_BYTES_MAX`].
    pub(crate) fn encode(header: FrameHeader, sequence: u64, payload_bytes: usize) -> [u8; HEADER_BYTES] {
        assert!(payload_bytes <= PAYLOAD_BYTES_MAX, "payload of {payload_bytes} bytes, at most {PAYLOAD_BYTES_MAX}");
        header_bytes(&WireFrame {
            opening: WireOpening::new(Kind::Frame),
            payload_bytes: (payload_bytes as u32).to_le(),
            epoch: header.epoch.to_le(),
            step: header.step.to_le(),
            sequence: sequence.to_le(),
            micro_batch: header.micro_batch.to_le(),
            reserved: 0,
        })
    }

    /// The header, the sequence number and the bytes of payload that follow, which are within `limit`: a reader may
    /// allocate them.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES], limit: usize) -> Result<(FrameHeader, u64, usize), FrameError> {
        let wire: WireFrame = bytemuck::pod_read_unaligned(bytes);
        if wire.reserved != 0 {
            return Err(FrameError::Reserved { found: u32::from_le(wire.reserved).into() });
        }
        let payload_bytes = u32::from_le(wire.payload_bytes) as usize;
        let limit = limit.min(PAYLOAD_BYTES_MAX);
        if payload_bytes > limit {
            return Err(FrameError::TooLarge { found: payload_bytes, limit });
        }
        let header = FrameHeader {
            epoch: u64::from_le(wire.epoch),
            step: u64::from_le(wire.step),
            micro_batch: u32::from_le(wire.micro_batch),
        };
        Ok((header, u64::from_le(wire.sequence), payload_bytes))
    }
}

/// A header, which has [`HEADER_BYTES`], as bytes.
pub(crate) fn header_bytes<T: Pod>(wire: &T) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes.copy_from_slice(bytemuck::bytes_of(wire));
    bytes
}
