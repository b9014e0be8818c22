//! Llama 2 and 3 (Touvron et al. 2023, arXiv:2302.13971 and 2307.09288; Grattafiori et al. 2024, arXiv:2407.21783),
//! SmolLM2 and what else is shaped like them; attention biases where the checkpoint has them.

use super::{Arch, Bias, pre_norm_block};

pub(super) const ARCH: Arch = Arch { name: "llama", qkv_bias: Bias::Optional, qk_norm: false, layer: pre_norm_block };
