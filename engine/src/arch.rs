//! Architectures: what tensors a layer has, and what it computes, written as verbs.

mod llama;
mod qwen2;
mod qwen3;

use thiserror::Error;

use crate::program::BufferId;
use crate::program::ops::{KvBuffers, Linear, Matrix, Ops};

/// Whether a layer's matrix may or must come with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    /// Added where the checkpoint has it.
    Optional,
    /// The checkpoint must have it.
    Required,
}

/// A family of models.
pub struct Arch {
    /// As GGUF's `general.architecture` and Hugging Face's `model_type` spell it.
    pub name: &'static str,
    /// Biases of the query, key and value projections.
    pub qkv_bias: Bias,
    /// Whether queries and keys are normalised head by head.
    pub qk_norm: bool,
    /// Appends one layer to a program.
    pub layer: fn(&mut Ops<'_>, &Layer),
}

/// The weights of a layer on the device, and its part of the KV cache.
pub struct Layer {
    /// Place in the model.
    pub index: usize,
    /// [hidden] f32
    pub attn_norm: BufferId,
    /// [(heads + 2 kv_heads) head_dim, hidden]
    pub qkv: Linear,
    /// [2, head_dim] f32
    pub qk_norms: Option<BufferId>,
    /// [hidden, heads head_dim]
    pub output: Linear,
    /// [hidden] f32
    pub ffn_norm: BufferId,
    /// [2 intermediate, hidden]: gates, then ups; in turns of 8 where `paired`.
    pub gate_up: Linear,
    /// How gates and ups stand.
    pub paired: bool,
    /// [hidden, intermediate]
    pub down: Linear,
    /// Keys and values.
    pub kv: Vec<KvBuffers>,
}

impl Layer {
    /// Its buffers.
    pub fn buffers(&self) -> impl Iterator<Item = BufferId> {
        let matrices = [&self.qkv, &self.output, &self.gate_up, &self.down].into_iter().flatten();
        let vectors = [self.attn_norm, self.ffn_norm].into_iter().chain(self.qk_norms);
        matrices.flat_map(Matrix::buffers).chain(vectors).chain(self.kv.iter().flat_map(|kv| [kv.keys, kv.values]))
    }
}

/// Every architecture.
pub const ARCHS: &[Arch] = &[llama::ARCH, qwen2::ARCH, qwen3::ARCH];

/// A model of an architecture that is not in [`ARCHS`].
#[derive(Debug, Error)]
#[error("architecture `{found}` is not supported; supported are: {known}")]
pub struct UnknownArch {
    found: String,
    known: String,
}

/// The architecture called `name`.
///
/// # Errors
/// [`UnknownArch`], which lists the known ones.
pub fn find(name: &str) -> Result<&'static Arch, UnknownArch> {
    ARCHS.iter().find(|arch| arch.name == name).ok_or_else(|| UnknownArch {
        found: name.to_owned(),
        known: ARCHS.iter().map(|arch| arch.name).collect::<Vec<_>>().join(", "),
    })
}

/// The block that the Llama family and its descendants share: attention and a gated feed-forward net, each behind
/// an RMSNorm and added to the residual stream x.
///
/// ```text
/// q, k, v = W_qkv norm(x) + b          x += W_o attention(rope(q), rope(k), v)
/// g, u    = W_gate_up norm(x)          x += W_down (silu(g) * u)
/// ```
fn pre_norm_block(ops: &mut Ops<'_>, layer: &Layer) {
    let (d, w) = (ops.dims(), ops.work());
    ops.scope(format!("blk.{}", layer.index));
    let a = ops.rmsnorm(layer.attn_norm, &layer.qkv, "attn_norm");
    ops.linear(&layer.qkv, a, w.qkv, (d.heads + 2 * d.kv_heads) * d.head_dim, false);
    ops.rope_kv(&layer.kv, layer.qk_norms);
    let a = ops.attention(&layer.kv, &layer.output);
    ops.linear(&layer.output, a, w.x, d.hidden, true);
    let a = ops.rmsnorm(layer.ffn_norm, &layer.gate_up, "ffn_norm");
    let a = ops.gated(&layer.gate_up, a, layer.paired, &layer.down);
    ops.linear(&layer.down, a, w.x, d.hidden, true);
    ops.scope("");
}
