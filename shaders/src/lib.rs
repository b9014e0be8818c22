//! The WGSL kernels of pp-run: their text, their layouts, and a plain Rust twin of each.
//!
//! A leaf: it knows neither wgpu nor the engine. [`registry`] is the table of kernels; a [`Variant`] is one
//! kernel with its choices made, and gives the text ([`Variant::source`]), the bindings and the twin.

pub mod compose;
pub mod format;
pub mod params;
pub mod profile;
pub mod reference;
pub mod registry;

pub use format::{Act, Format, KvType};
pub use profile::Profile;
pub use registry::{Access, Kernel, Variant};

/// Values in a quantisation block, of weights and of activations.
pub const BLOCK: usize = 32;
/// Contiguous parts of K that a dot product is the ordered sum of (`wgsl/shared/segments.wgsl`).
pub const SEGMENTS: usize = 8;
/// Positions in a KV page.
pub const PAGE: usize = 32;
/// Positions in a split of attention.
pub const SPLIT: usize = 256;

/// The stored position of `block` in a row of `blocks` (`wgsl/shared/segments.wgsl`).
pub fn block_position(blocks: usize, block: usize) -> usize {
    let (short, longer) = (blocks / SEGMENTS, blocks % SEGMENTS);
    let edge = longer * (short + 1);
    if block < edge {
        return (block % (short + 1)) * SEGMENTS + block / (short + 1);
    }
    let rest = block - edge;
    (rest % short) * SEGMENTS + longer + rest / short
}

#[cfg(test)]
mod tests;
