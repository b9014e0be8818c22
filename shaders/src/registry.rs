//! The table of kernels, and the variants that a program may ask for.

use crate::compose::{self, compose};
use crate::format::{Act, Format, KvType};
use crate::params;

/// A kernel: one file of WGSL, one twin in [`crate::reference`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "named after their WGSL files, which open with a description")]
pub enum Kernel {
    Embed,
    RmsNorm,
    ToAct,
    SwiGlu,
    MatvecQ8,
    MatvecF32,
    MatvecSwiGluQ8,
    MatvecSwiGluF32,
    MatmulF32,
    MatmulTileQ8,
    RopeKv,
    AttnDecode,
    AttnShort,
    AttnReduce,
    AttnPrefill,
    LseChunk,
    EditLogits,
    TopkChunk,
    TopkMerge,
}

/// How a kernel uses a binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read only.
    Read,
    /// Read and written.
    Write,
}

use Access::{Read, Write};

/// Facts about a kernel that do not vary.
pub struct Entry {
    /// The kernel.
    pub kernel: Kernel,
    /// Its file's name without the ending.
    pub name: &'static str,
    source: &'static str,
    /// Bindings after the streams of weights; the first of them is binding 3 where there are weights, else 0.
    bindings: &'static [Access],
    /// Which choices its text needs.
    weights: bool,
    act: bool,
    kv: bool,
    /// Names and offsets of the fields of its `Params`.
    pub fields: fn() -> Vec<(&'static str, usize)>,
}

/// Every kernel.
pub const KERNELS: &[Entry] = &[
    Entry {
        kernel: Kernel::Embed,
        name: "embed",
        source: include_str!("../wgsl/embed.wgsl"),
        bindings: &[Read, Write],
        weights: true,
        act: false,
        kv: false,
        fields: params::Embed::fields,
    },
    Entry {
        kernel: Kernel::RmsNorm,
        name: "rmsnorm",
        source: include_str!("../wgsl/rmsnorm.wgsl"),
        bindings: &[Read, Read, Read, Write, Write],
        weights: false,
        act: true,
        kv: false,
        fields: params::RmsNorm::fields,
    },
    Entry {
        kernel: Kernel::ToAct,
        name: "to_act",
        source: include_str!("../wgsl/to_act.wgsl"),
        bindings: &[Read, Write, Write],
        weights: false,
        act: true,
        kv: false,
        fields: params::ToAct::fields,
    },
    Entry {
        kernel: Kernel::SwiGlu,
        name: "swiglu",
        source: include_str!("../wgsl/swiglu.wgsl"),
        bindings: &[Read, Write, Write],
        weights: false,
        act: true,
        kv: false,
        fields: params::SwiGlu::fields,
    },
    Entry {
        kernel: Kernel::MatvecSwiGluQ8,
        name: "matvec_swiglu_q8",
        source: include_str!("../wgsl/matvec_q8.wgsl"),
        bindings: &[Read, Read, Read, Write, Write],
        weights: true,
        act: true,
        kv: false,
        fields: params::Matmul::fields,
    },
    Entry {
        kernel: Kernel::MatvecSwiGluF32,
        name: "matvec_swiglu_f32",
        source: include_str!("../wgsl/matvec_f32.wgsl"),
        bindings: &[Read, Read, Read, Write, Write],
        weights: true,
        act: true,
        kv: false,
        fields: params::Matmul::fields,
    },
    Entry {
        kernel: Kernel::MatvecQ8,
        name: "matvec_q8",
        source: include_str!("../wgsl/matvec_q8.wgsl"),
        bindings: &[Read, Read, Read, Write],
        weights: true,
        act: false,
        kv: false,
        fields: params::Matmul::fields,
    },
    Entry {
        kernel: Kernel::MatvecF32,
        name: "matvec_f32",
        source: include_str!("../wgsl/matvec_f32.wgsl"),
        bindings: &[Read, Read, Read, Write],
        weights: true,
        act: false,
        kv: false,
        fields: params::Matmul::fields,
    },
    Entry {
        kernel: Kernel::MatmulF32,
        name: "matmul_f32",
        source: include_str!("../wgsl/matmul_f32.wgsl"),
        bindings: &[Read, Read, Read, Write],
        weights: true,
        act: false,
        kv: false,
        fields: params::Matmul::fields,
    },
    Entry {
        kernel: Kernel::MatmulTileQ8,
        name: "matmul_tile_q8",
        source: include_str!("../wgsl/matmul_tile_q8.wgsl"),
        bindings: &[Read, Read, Read, Write],
        weights: true,
        act: false,
        kv: false,
        fields: params::Matmul::fields,
    },
    Entry {
        kernel: Kernel::RopeKv,
        name: "rope_kv",
        source: include_str!("../wgsl/rope_kv.wgsl"),
        bindings: &[Read, Read, Read, Read, Read, Write, Write, Write],
        weights: false,
        act: false,
        kv: true,
        fields: params::RopeKv::fields,
    },
    Entry {
        kernel: Kernel::AttnDecode,
        name: "attn_decode",
        source: include_str!("../wgsl/attn_decode.wgsl"),
        bindings: &[Read, Read, Read, Read, Read, Write, Write],
        weights: false,
        act: false,
        kv: true,
        fields: params::AttnDecode::fields,
    },
    Entry {
        kernel: Kernel::AttnShort,
        name: "attn_short",
        source: include_str!("../wgsl/attn_short.wgsl"),
        bindings: &[Read, Read, Read, Read, Read, Write, Write],
        weights: false,
        act: true,
        kv: true,
        fields: params::AttnDecode::fields,
    },
    Entry {
        kernel: Kernel::AttnReduce,
        name: "attn_reduce",
        source: include_str!("../wgsl/attn_reduce.wgsl"),
        bindings: &[Read, Read, Read, Write, Write],
        weights: false,
        act: true,
        kv: false,
        fields: params::AttnReduce::fields,
    },
    Entry {
        kernel: Kernel::AttnPrefill,
        name: "attn_prefill",
        source: include_str!("../wgsl/attn_prefill.wgsl"),
        bindings: &[Read, Read, Read, Read, Read, Read, Write],
        weights: false,
        act: false,
        kv: true,
        fields: params::AttnPrefill::fields,
    },
    Entry {
        kernel: Kernel::LseChunk,
        name: "lse_chunk",
        source: include_str!("../wgsl/lse_chunk.wgsl"),
        bindings: &[Read, Write],
        weights: false,
        act: false,
        kv: false,
        fields: params::TopK::fields,
    },
    Entry {
        kernel: Kernel::EditLogits,
        name: "edit_logits",
        source: include_str!("../wgsl/edit_logits.wgsl"),
        bindings: &[Read, Write, Write],
        weights: false,
        act: false,
        kv: false,
        fields: params::EditLogits::fields,
    },
    Entry {
        kernel: Kernel::TopkChunk,
        name: "topk_chunk",
        source: include_str!("../wgsl/topk_chunk.wgsl"),
        bindings: &[Read, Read, Write, Write],
        weights: false,
        act: false,
        kv: false,
        fields: params::TopK::fields,
    },
    Entry {
        kernel: Kernel::TopkMerge,
        name: "topk_merge",
        source: include_str!("../wgsl/topk_merge.wgsl"),
        bindings: &[Read, Read, Read, Read, Read, Write],
        weights: false,
        act: false,
        kv: false,
        fields: params::TopK::fields,
    },
];

impl Kernel {
    /// The kernel's row in [`KERNELS`].
    pub fn entry(self) -> &'static Entry {
        KERNELS.iter().find(|entry| entry.kernel == self).expect("every kernel has a row")
    }
}

/// A kernel with its choices made: what a compute pipeline is made of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The kernel.
    pub kernel: Kernel,
    /// Format of the weights it reads.
    pub format: Option<Format>,
    /// Type of the activations it writes.
    pub act: Option<Act>,
    /// Type of the keys and values it touches.
    pub kv: Option<KvType>,
    /// Whether it loads 64 bits at a time (Vulkan's shaderInt64).
    pub wide: bool,
    /// Whether lanes hand each other what all of them read; wants subgroups of 8.
    pub shared: bool,
    /// Sizes fixed in its text.
    pub constants: Vec<(&'static str, u32)>,
}

/// All WGSL text that kernels are made of: whoever keeps what kernels took hashes it.
pub fn texts() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|entry| entry.source).chain(compose::texts())
}

impl Variant {
    /// A variant; each kernel wants just the choices its text names.
    ///
    /// # Panics
    /// When a choice is missing or not wanted.
    pub fn new(
        kernel: Kernel,
        format: Option<Format>,
        act: Option<Act>,
        kv: Option<KvType>,
        constants: &[(&'static str, u32)],
    ) -> Variant {
        let entry = kernel.entry();
        assert_eq!(entry.weights, format.is_some(), "{}: weight format", entry.name);
        assert_eq!(entry.act, act.is_some(), "{}: activation type", entry.name);
        assert_eq!(entry.kv, kv.is_some(), "{}: KV type", entry.name);
        Variant { kernel, format, act, kv, wide: false, shared: false, constants: constants.to_vec() }
    }

    /// The same with loads of 64 bits, where it loads weights, keys or values.
    pub fn wide(self, wide: bool) -> Variant {
        let loads = self.format.is_some() || self.kv.is_some();
        Variant { wide: wide && loads, ..self }
    }

    /// The same with lanes that hand each other what all of them read, where it has such.
    pub fn shared(self, shared: bool) -> Variant {
        let several = self.kernel == Kernel::MatvecQ8 && self.constant("COLS") > Some(1);
        Variant { shared: shared && several, ..self }
    }

    /// The constant of that name.
    pub fn constant(&self, name: &str) -> Option<u32> {
        self.constants.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
    }

    /// The WGSL text.
    pub fn source(&self) -> String {
        let end = match self.kernel {
            Kernel::MatvecSwiGluQ8 | Kernel::MatvecSwiGluF32 => "shared/product_swiglu",
            _ => "shared/product_store",
        };
        let quad = if self.wide { "load/quad_u64" } else { "load/quad_u32" };
        let lanes = if self.shared { "lanes/shared" } else { "lanes/apart" };
        let mut choices = vec![("quad", quad), ("product_end", end), ("lanes", lanes)];
        if let Some(format) = self.format {
            choices.push(("quant", format.import()));
        }
        if let Some(act) = self.act {
            choices.push(("act_store", act.store_import()));
        }
        if let Some(kv) = self.kv {
            choices.push(("kv", kv.import(self.wide)));
        }
        compose(self.kernel.entry().source, &choices, &self.constants)
    }

    /// Binding numbers and accesses, in the order that buffers are given in.
    pub fn bindings(&self) -> Vec<(u32, Access)> {
        let streams = self.format.map_or(0, Format::streams);
        let first = if self.format.is_some() { 3 } else { 0 };
        let rest = self.kernel.entry().bindings.iter().enumerate();
        (0..streams as u32).map(|i| (i, Read)).chain(rest.map(|(i, access)| (first + i as u32, *access))).collect()
    }

    /// A short name for traces: kernel, format and types.
    pub fn label(&self) -> String {
        let mut label = self.kernel.entry().name.to_owned();
        if let Some(format) = self.format {
            label.push(' ');
            label.push_str(format.name());
        }
        if let Some(act) = self.act {
            label.push_str(if act == Act::Q8 { " q8" } else { " f32" });
        }
        label
    }
}
