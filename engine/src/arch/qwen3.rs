//! Qwen3 (Yang et al. 2025, arXiv:2505.09388): Llama's block with an RMSNorm of every head of queries and keys before
//! they are rotated.

use super::{Arch, Bias, pre_norm_block};

pub(super) const ARCH: Arch = Arch { name: "qwen3", qkv_bias: Bias::Optional, qk_norm: true, layer: pre_norm_block };
