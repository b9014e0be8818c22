//! What crosses a link for weights: the taker asks for pieces of tensors of a manifest, the source answers each in turn.
//! Nothing but those tensors can be asked for.
//!
//! A question is [`Ask`]; an answer is [`Reply`] with the bytes behind it. At most [`CREDITS`] questions are open at once,
//! each for at most [`PIECE_BYTES_MAX`]: that is what either end holds.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use memmap2::Mmap;
use pp_transport::quic::tuning;
use pp_transport::{Frame, FrameHeader, LinkLimits, Port, PortError};
use serde::{Deserialize, Serialize};

use super::control::ControlError;
use crate::checkpoint::Checkpoint;
use crate::manifest::Manifest;
use crate::tensor_cache::TensorCache;

/// Bytes of a piece at most.
pub const PIECE_BYTES_MAX: usize = 1 << 20;
/// Pieces that are on their way at once on a link.
pub const CREDITS: u64 = 16;
/// Workers that one is asked to get weights from, beside the head: what is on its way to it is at most 128 MiB.
pub const OTHERS_MAX: usize = 7;
/// Links for weights have numbers from here on; hops have smaller ones.
const FIRST_LINK: u32 = 1 << 31;
/// Places of a pipeline between which there may be links: the head's is 0, workers count from 1.
pub const PLACES_MAX: u32 = 1024;
/// What stands before the bytes of a piece takes no more.
const HEADER_BYTES_MAX: usize = 64;
/// How often a source looks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);
/// Tensors of the cache that a source keeps open.
const OPEN_MAX: usize = 8;

/// Bounds of a link for weights.
pub fn limits() -> LinkLimits {
    let payload_bytes = PIECE_BYTES_MAX + HEADER_BYTES_MAX;
    LinkLimits { credits: CREDITS, payload_bytes, silence: tuning::SILENCE }
}

/// The number of the link on which `taker` asks `source`, by their places.
pub fn link(source: u32, taker: u32) -> u32 {
    FIRST_LINK + (source % PLACES_MAX) * PLACES_MAX + taker % PLACES_MAX
}

/// Part of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ask {
    /// Which, by its place in the manifest.
    pub tensor: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes, at least one.
    pub bytes: u32,
}

impl Ask {
    /// Whether it is for a piece, not too large, of something that has so many bytes.
    pub(super) fn is_within(&self, whole: u64) -> bool {
        let end = self.offset.checked_add(u64::from(self.bytes));
        (1..=PIECE_BYTES_MAX).contains(&(self.bytes as usize)) && end.is_some_and(|end| end <= whole)
    }
}

/// The answer to the oldest question that has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// The bytes follow.
    Piece(Ask),
    /// The source does not have this tensor.
    Lacks(u32),
}

fn frame(payload: Vec<u8>) -> Frame {
    Frame { header: FrameHeader::default(), payload: payload.into() }
}

/// A question as a frame.
pub fn encode_ask(ask: &Ask) -> Frame {
    frame(postcard::to_stdvec(ask).expect("plain data always has an encoding"))
}

/// The question in a frame.
///
/// # Errors
/// [`ControlError::Malformed`].
pub fn decode_ask(frame: &Frame) -> Result<Ask, ControlError> {
    let malformed = |message: String| ControlError::Malformed { message };
    let (ask, left) = postcard::take_from_bytes(&frame.payload).map_err(|error| malformed(error.to_string()))?;
    if !left.is_empty() {
        return Err(malformed(format!("{} bytes too many", left.len())));
    }
    Ok(ask)
}

/// An answer as a frame.
pub fn encode_reply(reply: &Reply, bytes: &[u8]) -> Frame {
    let payload = postcard::to_extend(reply, Vec::with_capacity(HEADER_BYTES_MAX + bytes.len()));
    let mut payload = payload.expect("plain data always has an encoding");
    payload.extend_from_slice(bytes);
    frame(payload)
}

/// The answer in a frame, with as many bytes as it announces.
///
/// # Errors
/// [`ControlError::Malformed`].
pub fn decode_reply(frame: &Frame) -> Result<(Reply, Bytes), ControlError> {
    let malformed = |message: String| ControlError::Malformed { message };
    let (reply, left): (Reply, _) =
        postcard::take_from_bytes(&frame.payload).map_err(|error| malformed(error.to_string()))?;
    let announced = match reply {
        Reply::Piece(ask) => ask.bytes as usize,
        Reply::Lacks(_) => 0,
    };
    if left.len() != announced {
        return Err(malformed(format!("{} bytes follow where {announced} should", left.len())));
    }
    let begins = frame.payload.len() - left.len();
    Ok((reply, frame.payload.slice(begins..)))
}

/// Which tensors of a manifest somebody has: a bit each.
pub fn bits(has: impl Iterator<Item = bool>) -> Vec<u8> {
    let mut bits = Vec::new();
    for (at, has) in has.enumerate() {
        if at % 8 == 0 {
            bits.push(0u8);
        }
        bits[at / 8] |= u8::from(has) << (at % 8);
    }
    bits
}

/// Whether the bit of tensor `at` is set; beyond the end none is.
pub fn bit(bits: &[u8], at: usize) -> bool {
    bits.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1)
}

/// What a host gives others of a model.
#[derive(Clone, Debug)]
pub struct Stock {
    /// What the model is made of.
    pub manifest: Arc<Manifest>,
    /// Its files, where they are here.
    pub files: Option<Arc<Checkpoint>>,
    /// Where else tensors may be.
    pub cache: Option<TensorCache>,
}

impl Stock {
    /// Which tensors are here.
    pub fn holds(&self) -> Vec<u8> {
        bits(self.manifest.tensors.iter().map(|entry| {
            let bytes = entry.bytes() as u64;
            self.in_files(&entry.name, bytes).is_some()
                || self.cache.as_ref().is_some_and(|cache| cache.has(&entry.digest, bytes))
        }))
    }

    fn in_files(&self, name: &str, bytes: u64) -> Option<&[u8]> {
        let files = self.files.as_ref()?;
        let tensor = files.tensor(name).filter(|tensor| tensor.bytes() as u64 == bytes)?;
        Some(files.data(tensor))
    }

    /// Answers in a thread of its own until the taker goes or `stop` is set.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn serve(self, mut port: Box<dyn Port>, stop: Arc<AtomicBool>) -> std::io::Result<JoinHandle<()>> {
        let name = "weights-source".to_owned();
        std::thread::Builder::new().name(name).spawn(move || self.answer_all(port.as_mut(), &stop))
    }

    fn answer_all(&self, port: &mut dyn Port, stop: &AtomicBool) {
        let mut open = HashMap::new();
        answer_all(port, stop, &mut |ask| self.answer(ask, &mut open));
    }

    fn answer(&self, ask: Ask, open: &mut HashMap<u32, Mmap>) -> Frame {
        let lacks = || encode_reply(&Reply::Lacks(ask.tensor), &[]);
        let Some(entry) = self.manifest.tensors.get(ask.tensor as usize) else { return lacks() };
        let whole = entry.bytes() as u64;
        if !ask.is_within(whole) {
            return lacks();
        }
        let piece =
            |bytes: &[u8]| encode_reply(&Reply::Piece(ask), &bytes[ask.offset as usize..][..ask.bytes as usize]);
        if let Some(bytes) = self.in_files(&entry.name, whole) {
            return piece(bytes);
        }
        if !open.contains_key(&ask.tensor)
            && let Some(map) = self.cache.as_ref().and_then(|cache| cache.unverified(&entry.digest, whole))
        {
            if open.len() >= OPEN_MAX {
                open.clear();
            }
            open.insert(ask.tensor, map);
        }
        open.get(&ask.tensor).map_or_else(lacks, |map| piece(map))
    }
}

/// Answers the questions of a taker until it goes or `stop` is set.
pub(super) fn answer_all(port: &mut dyn Port, stop: &AtomicBool, answer: &mut dyn FnMut(Ask) -> Frame) {
    while !stop.load(Ordering::Relaxed) {
        let answered = match port.receive(LOOK) {
            Ok(arrival) => match decode_ask(&arrival.frame) {
                Ok(ask) => port.send(answer(ask)).is_ok(),
                Err(error) => {
                    tracing::warn!(%error, "a question for weights is not understood");
                    false
                }
            },
            Err(PortError::Timeout { .. }) => true,
            Err(_) => false,
        };
        if !answered {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn questions_and_answers_come_back() {
        let ask = Ask { tensor: 7, offset: 1 << 40, bytes: 5 };
        assert_eq!(decode_ask(&encode_ask(&ask)), Ok(ask));
        let (reply, bytes) = decode_reply(&encode_reply(&Reply::Piece(ask), &[1, 2, 3, 4, 5])).unwrap();
        assert_eq!((reply, &bytes[..]), (Reply::Piece(ask), &[1, 2, 3, 4, 5][..]));
        assert!(decode_reply(&encode_reply(&Reply::Piece(ask), &[1])).is_err(), "four are missing");
        assert!(decode_reply(&encode_reply(&Reply::Lacks(3), &[1])).is_err(), "one is too many");
        assert_eq!(decode_reply(&encode_reply(&Reply::Lacks(3), &[])).unwrap().0, Reply::Lacks(3));
    }

    #[test]
    fn the_largest_piece_fits_its_link() {
        let ask = Ask { tensor: u32::MAX, offset: u64::MAX, bytes: PIECE_BYTES_MAX as u32 };
        let reply = encode_reply(&Reply::Piece(ask), &vec![0; PIECE_BYTES_MAX]);
        assert!(reply.payload.len() <= limits().payload_bytes);
    }

    #[test]
    fn links_for_weights_are_no_hops_and_no_control() {
        let mut seen = std::collections::HashSet::new();
        for source in [0, 1, 2, PLACES_MAX - 1] {
            for taker in [1, 2, PLACES_MAX - 1] {
                let link = link(source, taker);
                assert!((FIRST_LINK..pp_transport::quic::CONTROL).contains(&link) && seen.insert(link));
            }
        }
    }

    proptest! {
        #[test]
        fn bits_say_what_they_were_made_of(has in prop::collection::vec(any::<bool>(), 0..50)) {
            let made = bits(has.iter().copied());
            prop_assert_eq!(made.len(), has.len().div_ceil(8));
            for at in 0..70 {
                prop_assert_eq!(bit(&made, at), has.get(at).copied().unwrap_or(false));
            }
        }

        #[test]
        fn any_bytes_are_a_question_or_an_answer_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let frame = frame(bytes);
            let _ = (decode_ask(&frame), decode_reply(&frame));
        }
    }
}
