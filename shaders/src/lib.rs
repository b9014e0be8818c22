//! The WGSL kernels of pp-run: their text, their layouts, and a plain Rust twin of each.
//!
//! A leaf: it knows neither wgpu nor the engine. [`registry`] is the table of kernels; a [`Variant`] is one
//! kernel with its choices made, and gives the text ([`Variant::source`]), the bindings and the twin.

pub mod compose;
pub mod edit;
pub mod format;
pub mod params;
pub mod profile;
pub mod reference;
pub mod registry;

pub use edit::Edit;
pub use format::{Act, Format, KvType};
pub use profile::Profile;
pub use registry::{Access, Kernel, Variant};

/// Version of the order in which kernels add and of how they round: raised with every change that gives other bits for
/// the same profile, so that ends which would differ do not work together.
pub const KERNEL_ORDER_VERSION: u32 = 1;
/// Values in a quantisation block, of weights and of activations.
pub const BLOCK: usize = 32;
/// Positions in a KV page.
pub const PAGE: usize = 32;
/// Positions in a split of attention.
pub const SPLIT: usize = 256;

/// Where the blocks of a matrix stand (`wgsl/shared/segments.wgsl`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrangement {
    /// Blocks of a row.
    pub blocks: usize,
    /// Contiguous parts of a row that are walked side by side.
    pub segments: usize,
    /// Rows whose blocks stand side by side.
    pub interleave: usize,
}

impl Arrangement {
    /// The position of `block` in its row.
    pub fn position(&self, block: usize) -> usize {
        let (short, longer) = (self.blocks / self.segments, self.blocks % self.segments);
        let edge = longer * (short + 1);
        if block < edge {
            return (block % (short + 1)) * self.segments + block / (short + 1);
        }
        let rest = block - edge;
        (rest % short) * self.segments + longer + rest / short
    }

    /// Where `block` of `row` is stored, counted in blocks.
    pub fn index(&self, row: usize, block: usize) -> usize {
        let i = self.interleave;
        (row / i * self.blocks + self.position(block)) * i + row % i
    }

    /// Where `superblock` of `row` is stored, counted in superblocks.
    pub fn super_index(&self, row: usize, superblock: usize) -> usize {
        let i = self.interleave;
        (row / i * (self.blocks / 8) + superblock) * i + row % i
    }
}

#[cfg(test)]
mod tests;
