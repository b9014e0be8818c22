//! Twins of the kernels: the plainest Rust that could be right, and their specification.
//!
//! A twin works on whole buffers of 32-bit words, given in the order of [`Variant::bindings`], and covers every
//! token of the dispatch. Sums are taken in f64, so a device differs from its twin by its own rounding only.

mod act;
mod attention;
mod edit_logits;
mod embed;
mod matmul;
pub mod quant;
mod rmsnorm;
mod rope_kv;
mod topk;

use std::cell::{Ref, RefCell, RefMut};

use bytemuck::Pod;
pub use topk::is_candidate;

use crate::Arrangement;
use crate::registry::{Kernel, Variant};

/// Runs the twin of `variant`'s kernel.
///
/// # Panics
/// When `params` or `buffers` are not what the kernel declares, or an index lies outside a buffer.
pub fn run(variant: &Variant, params: &[u8], buffers: &[&RefCell<Vec<u32>>]) {
    let call = Call { variant, params, buffers };
    match variant.kernel {
        Kernel::Embed => embed::run(&call),
        Kernel::RmsNorm => rmsnorm::run(&call),
        Kernel::ToAct => act::to_act(&call),
        Kernel::SwiGlu => act::swiglu(&call),
        Kernel::MatvecQ8 | Kernel::MatvecF32 | Kernel::MatmulF32 | Kernel::MatmulTileQ8 => matmul::run(&call),
        Kernel::MatvecSwiGluQ8 | Kernel::MatvecSwiGluF32 => matmul::swiglu(&call),
        Kernel::RopeKv => rope_kv::run(&call),
        Kernel::AttnDecode => attention::decode(&call),
        Kernel::AttnShort => attention::short(&call),
        Kernel::AttnReduce => attention::reduce(&call),
        Kernel::AttnPrefill => attention::prefill(&call),
        Kernel::LseChunk => topk::lse(&call),
        Kernel::EditLogits => edit_logits::run(&call),
        Kernel::TopkChunk => topk::chunk(&call),
        Kernel::TopkMerge => topk::merge(&call),
    }
}

/// One dispatch, as a twin sees it.
struct Call<'a> {
    variant: &'a Variant,
    params: &'a [u8],
    buffers: &'a [&'a RefCell<Vec<u32>>],
}

impl<'a> Call<'a> {
    fn params<T: Pod>(&self) -> T {
        bytemuck::pod_read_unaligned(self.params)
    }

    fn constant(&self, name: &str) -> usize {
        self.variant.constant(name).unwrap_or_else(|| panic!("constant {name}")) as usize
    }

    /// Where blocks stand in rows of `blocks` blocks.
    fn arrangement(&self, blocks: usize) -> Arrangement {
        Arrangement { blocks, segments: self.constant("SEGMENTS"), interleave: self.constant("INTERLEAVE") }
    }

    /// Number of buffers that hold weights.
    fn streams(&self) -> usize {
        self.variant.format.map_or(0, |format| format.streams())
    }

    /// Buffer `i` after those of the weights, as words.
    fn words(&self, i: usize) -> Ref<'a, Vec<u32>> {
        self.buffers[self.streams() + i].borrow()
    }

    fn floats(&self, i: usize) -> Ref<'a, [f32]> {
        Ref::map(self.words(i), |words| bytemuck::cast_slice(words.as_slice()))
    }

    fn fours(&self, i: usize) -> Ref<'a, [[u32; 4]]> {
        Ref::map(self.words(i), |words| bytemuck::cast_slice(words.as_slice()))
    }

    fn words_mut(&self, i: usize) -> RefMut<'a, Vec<u32>> {
        self.buffers[self.streams() + i].borrow_mut()
    }

    fn floats_mut(&self, i: usize) -> RefMut<'a, [f32]> {
        RefMut::map(self.words_mut(i), |words| bytemuck::cast_slice_mut(words.as_mut_slice()))
    }
}
