//! The messages of a link, as bytes and back. A message is a header of [`HEADER_BYTES`] and, of a frame, its payload.

use bytemuck::{Pod, Zeroable};
use bytes::Bytes;

use super::LinkId;
use crate::frame::{Frame, FrameError, FrameHeader, HEADER_BYTES, Kind, WireFrame, WireOpening, header_bytes};

/// What one end of a link writes to the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Who speaks and where to go on: the first message of every connection, and only that.
    Hello(Hello),
    /// A frame with its number on this link and in this direction, from 1 without gaps.
    Frame {
        /// Its number.
        sequence: u64,
        /// What is delivered.
        frame: Frame,
    },
    /// In the place of a frame that the sender was told to forget. It is counted and not delivered.
    Forgotten {
        /// The frame's number.
        sequence: u64,
    },
    /// What has arrived and what may come. Also a sign of life.
    Ack(Ack),
    /// Its sender accepts no more frames: none follows. It is acknowledged as a frame would be.
    Bye {
        /// The number after the last frame's.
        sequence: u64,
    },
}

/// The first message of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The link that the connection is for.
    pub id: LinkId,
    /// Which connection of this link it is; the dialling side raises it, the accepting side answers with the same.
    pub generation: u64,
    /// Where the writer stands as a receiver: the other end resends what comes after.
    pub ack: Ack,
}

/// Where a receiver stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ack {
    /// Everything up to and including this number has arrived: its sender may let go of it.
    pub received: u64,
    /// Frames up to and including this number may be sent.
    pub granted: u64,
}

/// A hello as it lies on the wire.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WireHello {
    opening: WireOpening,
    link: u32,
    session: u64,
    generation: u64,
    received: u64,
    granted: u64,
}

/// Every message that is a number or two, as it lies on the wire.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WireNumbers {
    opening: WireOpening,
    reserved: u32,
    /// `received`, or a sequence number.
    first: u64,
    /// `granted`, else zero.
    second: u64,
    reserved_too: [u64; 2],
}

const _: () = assert!(size_of::<WireHello>() == HEADER_BYTES && size_of::<WireNumbers>() == HEADER_BYTES);

/// A message of which the header has come.
enum Begun {
    Whole(Message),
    /// A frame whose payload of so many bytes, at least one, follows.
    Frame(FrameHeader, u64, usize),
}

impl Message {
    /// The bytes that stand before [`Message::payload`].
    ///
    /// # Panics
    /// When a frame's payload is over [`crate::frame::PAYLOAD_BYTES_MAX`], which no link accepts.
    pub fn header(&self) -> [u8; HEADER_BYTES] {
        match self {
            Message::Hello(Hello { id, generation, ack }) => header_bytes(&WireHello {
                opening: WireOpening::new(Kind::Hello),
                link: id.link.to_le(),
                session: id.session.to_le(),
                generation: generation.to_le(),
                received: ack.received.to_le(),
                granted: ack.granted.to_le(),
            }),
            Message::Frame { sequence, frame } => WireFrame::encode(frame.header, *sequence, frame.payload.len()),
            Message::Forgotten { sequence } => numbers(Kind::Forgotten, *sequence, 0),
            Message::Ack(Ack { received, granted }) => numbers(Kind::Ack, *received, *granted),
            Message::Bye { sequence } => numbers(Kind::Bye, *sequence, 0),
        }
    }

    /// The bytes that follow the header; none but of a frame.
    pub fn payload(&self) -> Bytes {
        match self {
            Message::Frame { frame, .. } => frame.payload.clone(),
            _ => Bytes::new(),
        }
    }
}

fn numbers(kind: Kind, first: u64, second: u64) -> [u8; HEADER_BYTES] {
    header_bytes(&WireNumbers {
        opening: WireOpening::new(kind),
        reserved: 0,
        first: first.to_le(),
        second: second.to_le(),
        reserved_too: [0; 2],
    })
}

/// Reads a header; `limit` bounds the payload that it may announce, before anything is allocated for it.
fn begin(bytes: &[u8; HEADER_BYTES], limit: usize) -> Result<Begun, FrameError> {
    let kind = WireOpening::read(bytes)?;
    let message = match kind {
        Kind::Frame => {
            let (header, sequence, payload_bytes) = WireFrame::decode(bytes, limit)?;
            if payload_bytes > 0 {
                return Ok(Begun::Frame(header, sequence, payload_bytes));
            }
            Message::Frame { sequence, frame: Frame { header, payload: Bytes::new() } }
        }
        Kind::Hello => {
            let wire: WireHello = bytemuck::pod_read_unaligned(bytes);
            Message::Hello(Hello {
                id: LinkId { session: u64::from_le(wire.session), link: u32::from_le(wire.link) },
                generation: u64::from_le(wire.generation),
                ack: Ack { received: u64::from_le(wire.received), granted: u64::from_le(wire.granted) },
            })
        }
        Kind::Forgotten | Kind::Ack | Kind::Bye => {
            let wire: WireNumbers = bytemuck::pod_read_unaligned(bytes);
            let (first, second) = (u64::from_le(wire.first), u64::from_le(wire.second));
            let unused = if kind == Kind::Ack { 0 } else { second };
            let reserved = u64::from(u32::from_le(wire.reserved)) | unused;
            let reserved = wire.reserved_too.iter().fold(reserved, |all, word| all | u64::from_le(*word));
            if reserved != 0 {
                return Err(FrameError::Reserved { found: reserved });
            }
            match kind {
                Kind::Ack => Message::Ack(Ack { received: first, granted: second }),
                Kind::Forgotten => Message::Forgotten { sequence: first },
                _ => Message::Bye { sequence: first },
            }
        }
    };
    Ok(Begun::Whole(message))
}

/// Makes messages of a stream that comes in pieces. Holds at most one message: a header and, of a frame, a payload
/// within the limit.
///
/// After an error nobody knows where the next message begins: the decoder stays at the error.
#[derive(Debug)]
pub struct Decoder {
    payload_bytes: usize,
    header: [u8; HEADER_BYTES],
    /// The frame whose payload is being read.
    frame: Option<(FrameHeader, u64, Vec<u8>)>,
    /// Bytes of the payload that are there, or else of the header.
    filled: usize,
    failed: Option<FrameError>,
}

impl Decoder {
    /// For a fresh stream, whose payloads have at most so many bytes.
    pub fn new(payload_bytes: usize) -> Decoder {
        Decoder { payload_bytes, header: [0; HEADER_BYTES], frame: None, filled: 0, failed: None }
    }

    /// Where the next bytes of the stream belong, at least one: a reader may put them there itself.
    pub fn space(&mut self) -> &mut [u8] {
        match &mut self.frame {
            Some((_, _, payload)) => &mut payload[self.filled..],
            None => &mut self.header[self.filled..],
        }
    }

    /// The first `count` bytes of [`Decoder::space`] have been written. The message that they complete, if they do.
    ///
    /// # Errors
    /// [`FrameError`]: they are no message of this version, or its payload is over the limit.
    ///
    /// # Panics
    /// When there was no space for so many.
    pub fn advance(&mut self, count: usize) -> Result<Option<Message>, FrameError> {
        let space = self.space().len();
        assert!(count <= space, "{count} bytes written to a space of {space}");
        if let Some(error) = self.failed {
            return Err(error);
        }
        if count < space {
            self.filled += count;
            return Ok(None);
        }
        self.filled = 0;
        if let Some((header, sequence, payload)) = self.frame.take() {
            return Ok(Some(Message::Frame { sequence, frame: Frame { header, payload: payload.into() } }));
        }
        match begin(&self.header, self.payload_bytes) {
            Ok(Begun::Whole(message)) => Ok(Some(message)),
            Ok(Begun::Frame(header, sequence, payload_bytes)) => {
                self.frame = Some((header, sequence, vec![0; payload_bytes]));
                Ok(None)
            }
            Err(error) => {
                self.failed = Some(error);
                Err(error)
            }
        }
    }

    /// Takes bytes from the front of `bytes` until they complete a message or are used up.
    ///
    /// # Errors
    /// As [`Decoder::advance`].
    pub fn feed(&mut self, bytes: &mut &[u8]) -> Result<Option<Message>, FrameError> {
        while !bytes.is_empty() {
            let space = self.space();
            let (piece, rest) = bytes.split_at(space.len().min(bytes.len()));
            space[..piece.len()].copy_from_slice(piece);
            *bytes = rest;
            if let Some(message) = self.advance(piece.len())? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }
}
