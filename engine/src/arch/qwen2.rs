//! Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama's block with biases on queries, keys and values.

use super::{Arch, Bias, pre_norm_block};

pub(super) const ARCH: Arch = Arch { name: "qwen2", qkv_bias: Bias::Required, qk_norm: false, layer: pre_norm_block };
