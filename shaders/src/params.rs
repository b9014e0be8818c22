//! The `Params` block of each kernel, mirrored from its WGSL; a test compares the two field by field.
//! `tokens` comes first everywhere, so that a step can set it without knowing the kernel.

use bytemuck::{Pod, Zeroable};

/// Adds `bias[row]` to a matrix product.
pub const ADD_BIAS: u32 = 1;
/// Adds the product to what the output holds.
pub const ADD_TO_Y: u32 = 2;

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
            #[expect(missing_docs, reason = "the fields are described in the kernel's WGSL")]
            pub struct $name { $(pub $field: $type),* }

            impl $name {
                /// Names and byte offsets of the fields.
                pub fn fields() -> Vec<(&'static str, usize)> {
                    vec![$((stringify!($field), std::mem::offset_of!($name, $field))),*]
                }
            }
        )*
    };
}

params! {
    /// `embed.wgsl`
    Embed { tokens: u32, blocks: u32, hidden: u32, first_row: u32, rows: u32 }
    /// `rmsnorm.wgsl`
    RmsNorm { tokens: u32, hidden: u32, blocks: u32, act_lanes: u32, use_rows: u32, eps: f32 }
    /// `to_act.wgsl`
    ToAct { tokens: u32, width: u32, blocks: u32, act_lanes: u32 }
    /// `swiglu.wgsl`
    SwiGlu { tokens: u32, width: u32, blocks: u32, act_lanes: u32, paired: u32 }
    /// The matvec and matmul kernels.
    Matmul { tokens: u32, blocks: u32, rows: u32, y_stride: u32, y_offset: u32, flags: u32 }
    /// `rope_kv.wgsl`
    RopeKv {
        tokens: u32, heads: u32, kv_heads: u32, first_kv: u32, kv_heads_here: u32,
        pairs: u32, use_norms: u32, scale: f32, eps: f32,
    }
    /// `attn_decode.wgsl` and `attn_short.wgsl`
    AttnDecode { tokens: u32, heads: u32, kv_heads: u32, first_kv: u32, kv_heads_here: u32, splits: u32 }
    /// `attn_reduce.wgsl`
    AttnReduce { tokens: u32, heads: u32, splits: u32, blocks: u32, act_lanes: u32 }
    /// `attn_prefill.wgsl`
    AttnPrefill { tokens: u32, heads: u32, kv_heads: u32, first_kv: u32, kv_heads_here: u32 }
    /// `lse_chunk.wgsl`, `topk_chunk.wgsl` and `topk_merge.wgsl`
    TopK { tokens: u32, vocab: u32, chunks: u32 }
    /// `edit_logits.wgsl`
    EditLogits { tokens: u32, zero: u32 }
}
