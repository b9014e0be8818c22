//! An edit of one logit, as `edit_logits.wgsl` reads it.

use bytemuck::{Pod, Zeroable};

/// An element of the kernel's `edits`; its fields are described there.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[expect(missing_docs, reason = "the fields are described in the kernel's WGSL")]
pub struct Edit {
    pub place: u32,
    pub bias: f32,
    pub repetition: f32,
    pub reciprocal: f32,
    pub subtract: f32,
}

impl Edit {
    /// One that does nothing.
    pub const NONE: Edit = Edit { place: u32::MAX, bias: 0.0, repetition: 1.0, reciprocal: 1.0, subtract: 0.0 };
    /// Its size in the kernel's buffer.
    pub const BYTES: usize = size_of::<Edit>();

    /// What becomes of a logit: the kernel's bits, since each operation rounds on its own there too.
    pub fn apply(&self, logit: f32) -> f32 {
        let biased = logit + self.bias;
        let factor = if biased > 0.0 { self.reciprocal } else { self.repetition };
        let scaled = biased * factor;
        scaled - self.subtract
    }
}
