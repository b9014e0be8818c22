//! What `fuzz/` feeds with arbitrary bytes, one function a target. The corpus goes through the same functions in
//! `cargo test`.
//!
//! Each panics when something is wrong: that is what a fuzzer looks for.

#[cfg(test)]
mod tests;

use pp_transport::{Frame, FrameHeader};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::checkpoint::Checkpoint;
use crate::cluster::control::{self, ToHead, ToWorker};
use crate::cluster::weights::{decode_ask, decode_reply, encode_ask, encode_reply};
use crate::manifest::{Entry, Manifest};
use crate::message::{MessageLimits, decode_outputs, decode_step, encode_outputs, encode_step};
use crate::wire::Wire;

const LIMITS: MessageLimits = MessageLimits {
    tokens: 8,
    sequences: 4,
    context: 300,
    pages: 10,
    outputs: 4,
    edits: 6,
    vocab: 100,
    hidden: 40,
    wire: Wire::F32,
};

/// What heads and workers say to each other.
pub fn control(bytes: &[u8]) {
    check_message::<ToWorker>(bytes);
    check_message::<ToHead>(bytes);
    let frame = Frame { header: FrameHeader::default(), payload: bytes.to_vec().into() };
    if let Ok(ToHead::Whole(Ok(Some(inventory)))) = control::decode(&frame) {
        let _ = (inventory.check(), inventory.bytes());
    }
}

fn check_message<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let frame = Frame { header: FrameHeader::default(), payload: bytes.to_vec().into() };
    if let Ok(found) = control::decode::<T>(&frame) {
        let said = control::encode(&found);
        // Not a value, but how it is written: what is in it need not be equal to itself.
        let again: T = control::decode(&said).expect("what was taken can be said again");
        assert_eq!(control::encode(&again), said);
    }
}

/// What crosses links for weights, and manifests. The first byte says which.
pub fn weights(bytes: &[u8]) {
    let Some((kind, bytes)) = bytes.split_first() else { return };
    let frame = Frame { header: FrameHeader::default(), payload: bytes.to_vec().into() };
    match kind % 3 {
        0 => {
            if let Ok(ask) = decode_ask(&frame) {
                assert_eq!(decode_ask(&encode_ask(&ask)), Ok(ask));
            }
        }
        1 => {
            if let Ok((reply, piece)) = decode_reply(&frame) {
                assert_eq!(decode_reply(&encode_reply(&reply, &piece)), Ok((reply, piece)));
            }
        }
        _ => {
            if let Ok(manifest) = Manifest::decode(bytes) {
                let said = manifest.encode();
                // Floats in it need not be equal to themselves.
                assert_eq!(Manifest::decode(&said).expect("what was taken can be said again").encode(), said);
                // Laid out as a worker would, whatever it lists.
                let bytes: usize = manifest.tensors.iter().map(Entry::bytes).sum();
                let model = Checkpoint::supplied(&manifest, "fuzzed", None);
                assert_eq!(model.tensors().map(|tensor| tensor.bytes()).sum::<usize>(), bytes);
            }
        }
    }
}

/// Payloads of frames: steps in every type of activations, and answers. The first byte says which.
pub fn payload(bytes: &[u8]) {
    let Some((kind, payload)) = bytes.split_first() else { return };
    let limits = MessageLimits { wire: Wire::ALL[usize::from(*kind) % 3], ..LIMITS };
    let is_first = kind % 2 == 1;
    if let Ok((step, activations)) = decode_step(payload, &limits, is_first) {
        let tokens: usize = step.spans.iter().map(|span| span.count as usize).sum();
        assert!(tokens <= limits.tokens && step.spans.len() <= limits.sequences);
        // Where a log has them that is still to come, none.
        let is_without = is_first || (step.from.is_some() && activations.is_empty());
        assert_eq!(activations.len(), if is_without { 0 } else { tokens * limits.hidden });
        let (again, same) = decode_step(&encode_step(&step, &activations, &limits), &limits, is_first)
            .expect("what was taken can be sent on");
        assert_eq!((again.spans.len(), same.len()), (step.spans.len(), activations.len()));
        // Floats as they are keep their bits.
        if limits.wire == Wire::F32 {
            assert!(same.iter().map(|value| value.to_bits()).eq(activations.iter().map(|value| value.to_bits())));
        }
    }
    if let Ok(outputs) = decode_outputs(payload, &limits) {
        let said = encode_outputs(&outputs);
        let again = decode_outputs(&said, &limits).expect("what was taken can be said again");
        assert_eq!(encode_outputs(&again), said);
    }
}
