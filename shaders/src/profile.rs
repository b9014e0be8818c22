//! Sizes of workgroups and register tiles for two kinds of adapters. Within a profile every kernel adds in the same
//! order (`wgsl/shared/segments.wgsl`, `wgsl/shared/attention.wgsl`), whoever does the work.

use crate::format::{Act, Format, KvType};
use crate::registry::{Kernel, Variant};

/// Head sizes that the attention kernels are made for.
pub const HEAD_DIMS: [u32; 5] = [64, 80, 96, 128, 256];

/// The choices that a kind of adapter wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Profile {
    /// What `--profile` calls it.
    pub name: &'static str,
    /// Contiguous parts of K that a dot product is the ordered sum of: the lanes that share a row in matvec.
    pub segments: u32,
    /// Rows whose blocks stand side by side: the lanes that walk a row each in matvec.
    pub interleave: u32,
    /// Whether to load 64 bits at a time where the adapter can.
    pub wide: bool,
    /// Whether lanes may hand each other what all of them read, where subgroups have 8 lanes.
    pub shared: bool,
    /// Most accumulators of a lane of matvec: rows times tokens.
    pub matvec_sums: u32,
    /// Threads of the kernels that go by element or block.
    pub flat: u32,
    /// Threads that normalise one token.
    pub norm: u32,
    /// Sets of lanes in a matvec workgroup.
    pub matvec_groups: u32,
    /// Rows that a lane of matvec works on at once.
    pub matvec_rows: u32,
    /// Token lanes of a matmul workgroup; 1: matvec does it, for `matmul_cols` tokens at once.
    pub matmul_lanes: u32,
    /// Tokens a lane of it holds.
    pub matmul_cols: u32,
    /// Rows a workgroup of it holds.
    pub matmul_rows: u32,
    /// Threads of decode attention, and threads that score one key there.
    pub decode_threads: u32,
    /// Threads that score one key in decode attention (1 or 4).
    pub key_lanes: u32,
    /// Heads whose values one thread sums in decode attention; 0 means all that share the workgroup.
    pub column_heads: u32,
    /// Tokens of a prefill attention tile.
    pub prefill_tile: u32,
    /// Threads that work on one query of it (1 or 4).
    pub row_lanes: u32,
    /// Threads of top-k.
    pub topk: u32,
    /// Tokens of the largest micro-batch that a stage takes unless told otherwise.
    pub chunk: usize,
}

impl Profile {
    /// For hardware: wide workgroups, neighbouring lanes read neighbouring words, tiles in workgroup memory.
    pub const CARD: Profile = Profile {
        name: "card",
        segments: 8,
        interleave: 1,
        wide: false,
        shared: false,
        matvec_sums: 16,
        flat: 64,
        norm: 128,
        matvec_groups: 8,
        matvec_rows: 2,
        matmul_lanes: 32,
        matmul_cols: 2,
        matmul_rows: 8,
        decode_threads: 128,
        key_lanes: 4,
        column_heads: 1,
        prefill_tile: 16,
        row_lanes: 4,
        topk: 128,
        chunk: 512,
    };

    /// For software Vulkan: one SIMD vector a workgroup, no barriers where they can be avoided.
    pub const SOFTWARE: Profile = Profile {
        name: "software",
        segments: 1,
        interleave: 32,
        wide: true,
        shared: true,
        matvec_sums: 32,
        flat: 8,
        norm: 8,
        matvec_groups: 8,
        matvec_rows: 8,
        matmul_lanes: 1,
        matmul_cols: 8,
        matmul_rows: 1,
        decode_threads: 8,
        key_lanes: 1,
        column_heads: 0,
        prefill_tile: 8,
        row_lanes: 1,
        topk: 8,
        chunk: 128,
    };

    /// Every profile.
    pub const ALL: [Profile; 2] = [Profile::CARD, Profile::SOFTWARE];

    /// The profile of that name.
    pub fn named(name: &str) -> Option<Profile> {
        Profile::ALL.into_iter().find(|profile| profile.name == name)
    }
}

/// Side of the tiles of the staged matmul, and the rows and tokens a thread makes of it.
const TILE: u32 = 64;
const TILE_SIDE: u32 = 4;
/// Candidates that top-k returns at most.
pub const TOP_K: u32 = 64;
/// Logits that one workgroup of top-k looks at.
pub const TOP_K_CHUNK: u32 = 4096;
/// Query heads that share the reading of keys in decode attention, at most.
const DECODE_HEADS_MAX: u32 = 8;
/// Workgroup memory that every Vulkan device has, bytes.
const WORKGROUP_BYTES_MAX: u32 = 16 << 10;

/// A matrix product's kernel, with what one workgroup makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// The kernel.
    pub variant: Variant,
    /// Rows of a workgroup.
    pub rows: u32,
    /// Tokens of a workgroup.
    pub tokens: u32,
}

/// The variants that a profile asks for.
impl Profile {
    fn variant(
        &self,
        kernel: Kernel,
        format: Option<Format>,
        act: Option<Act>,
        kv: Option<KvType>,
        constants: &[(&'static str, u32)],
    ) -> Variant {
        Variant::new(kernel, format, act, kv, constants).wide(self.wide).shared(self.shared)
    }

    /// Tokens that stand together in activations for matmul; matvec takes 1.
    pub fn act_lanes(&self) -> u32 {
        if self.matmul_lanes > 1 { self.matmul_lanes * self.matmul_cols } else { 1 }
    }

    /// Tokens that a workgroup of [`Profile::matmul`] makes at once: as many take as long as the next multiple.
    pub fn token_tile(&self, act: Act) -> u32 {
        match act {
            _ if self.matmul_lanes == 1 => self.matmul_cols,
            Act::Q8 => TILE,
            Act::F32 => self.act_lanes(),
        }
    }

    /// `embed.wgsl`
    pub fn embed(&self, format: Format) -> Variant {
        self.variant(
            Kernel::Embed,
            Some(format),
            None,
            None,
            &[("WORKGROUP", self.flat), ("SEGMENTS", self.segments), ("INTERLEAVE", self.interleave)],
        )
    }

    /// `rmsnorm.wgsl`
    pub fn rmsnorm(&self, act: Act) -> Variant {
        self.variant(
            Kernel::RmsNorm,
            None,
            Some(act),
            None,
            &[("WORKGROUP", self.norm), ("SEGMENTS", self.segments), ("INTERLEAVE", self.interleave)],
        )
    }

    /// `to_act.wgsl`
    pub fn to_act(&self, act: Act) -> Variant {
        self.variant(
            Kernel::ToAct,
            None,
            Some(act),
            None,
            &[("WORKGROUP", self.flat), ("SEGMENTS", self.segments), ("INTERLEAVE", self.interleave)],
        )
    }

    /// `swiglu.wgsl`
    pub fn swiglu(&self, act: Act) -> Variant {
        self.variant(
            Kernel::SwiGlu,
            None,
            Some(act),
            None,
            &[("WORKGROUP", self.flat), ("SEGMENTS", self.segments), ("INTERLEAVE", self.interleave)],
        )
    }

    /// A matvec for `cols` tokens at once.
    pub fn matvec(&self, format: Format, act: Act, cols: u32) -> Product {
        let kernel = if act == Act::Q8 { Kernel::MatvecQ8 } else { Kernel::MatvecF32 };
        let rows = self.matvec_rows.min((self.matvec_sums / cols).max(1));
        let sizes = [
            ("GROUPS", self.matvec_groups),
            ("ROWS", rows),
            ("COLS", cols),
            ("SEGMENTS", self.segments),
            ("INTERLEAVE", self.interleave),
        ];
        Product {
            variant: self.variant(kernel, Some(format), None, None, &sizes),
            rows: self.matvec_groups * rows,
            tokens: cols,
        }
    }

    /// A matvec of gates and ups for one token that ends in activations of silu(gate) * up, where the profile's
    /// workgroups make whole blocks of them.
    pub fn matvec_swiglu(&self, format: Format, act: Act, act_out: Act) -> Option<Product> {
        if self.segments > 1 || self.matvec_groups * self.matvec_rows != 64 {
            return None;
        }
        let kernel = if act == Act::Q8 { Kernel::MatvecSwiGluQ8 } else { Kernel::MatvecSwiGluF32 };
        let sizes = [
            ("GROUPS", self.matvec_groups),
            ("ROWS", self.matvec_rows),
            ("COLS", 1),
            ("SEGMENTS", self.segments),
            ("INTERLEAVE", self.interleave),
        ];
        Some(Product { variant: self.variant(kernel, Some(format), Some(act_out), None, &sizes), rows: 64, tokens: 1 })
    }

    /// A matmul for any number of tokens.
    pub fn matmul(&self, format: Format, act: Act) -> Product {
        if self.matmul_lanes == 1 {
            return self.matvec(format, act, self.matmul_cols);
        }
        if act == Act::Q8 {
            let sizes =
                [("TILE", TILE), ("SIDE", TILE_SIDE), ("SEGMENTS", self.segments), ("INTERLEAVE", self.interleave)];
            let variant = self.variant(Kernel::MatmulTileQ8, Some(format), None, None, &sizes);
            return Product { variant, rows: TILE, tokens: self.token_tile(act) };
        }
        let sizes = [
            ("LANES", self.matmul_lanes),
            ("COLS", self.matmul_cols),
            ("ROWS", self.matmul_rows),
            ("SEGMENTS", self.segments),
            ("INTERLEAVE", self.interleave),
        ];
        Product {
            variant: self.variant(Kernel::MatmulF32, Some(format), None, None, &sizes),
            rows: self.matmul_rows,
            tokens: self.token_tile(act),
        }
    }

    /// `rope_kv.wgsl`
    pub fn rope_kv(&self, kv: KvType, head_dim: u32) -> Variant {
        self.variant(Kernel::RopeKv, None, None, Some(kv), &[("WORKGROUP", self.flat), ("HEAD_DIM", head_dim)])
    }

    /// `attn_decode.wgsl` for `group` query heads a kv head, and the heads of a workgroup.
    pub fn attn_decode(&self, kv: KvType, head_dim: u32, group: u32) -> (Variant, u32) {
        let (sizes, heads) = self.attend_sizes(head_dim, group);
        (self.variant(Kernel::AttnDecode, None, None, Some(kv), &sizes), heads)
    }

    /// `attn_short.wgsl` likewise, where the heads of a workgroup make whole blocks of activations.
    pub fn attn_short(&self, kv: KvType, act: Act, head_dim: u32, group: u32) -> Option<(Variant, u32)> {
        let (mut sizes, heads) = self.attend_sizes(head_dim, group);
        sizes.extend([("SEGMENTS", self.segments), ("INTERLEAVE", self.interleave)]);
        let variant = (heads * head_dim)
            .is_multiple_of(32)
            .then(|| self.variant(Kernel::AttnShort, None, Some(act), Some(kv), &sizes));
        Some((variant?, heads))
    }

    fn attend_sizes(&self, head_dim: u32, group: u32) -> (Vec<(&'static str, u32)>, u32) {
        // A head's scores, maxima, sums and shares in workgroup memory (`wgsl/shared/attend.wgsl`).
        let shares = if self.key_lanes > 1 { 4 * 32 } else { 0 };
        let head_bytes = 4 * (shares + 256 + 2 * 8 + head_dim + 1);
        let heads = largest_divisor(group, DECODE_HEADS_MAX.min(WORKGROUP_BYTES_MAX / head_bytes));
        let column_heads = if self.column_heads == 0 { heads } else { largest_divisor(heads, self.column_heads) };
        let sizes = vec![
            ("WORKGROUP", self.decode_threads),
            ("KEY_LANES", self.key_lanes),
            ("HEAD_DIM", head_dim),
            ("HEADS", heads),
            ("COLUMN_HEADS", column_heads),
        ];
        (sizes, heads)
    }

    /// `attn_reduce.wgsl`
    pub fn attn_reduce(&self, act: Act, head_dim: u32) -> Variant {
        let sizes = [
            ("WORKGROUP", self.flat),
            ("HEAD_DIM", head_dim),
            ("SEGMENTS", self.segments),
            ("INTERLEAVE", self.interleave),
        ];
        self.variant(Kernel::AttnReduce, None, Some(act), None, &sizes)
    }

    /// `attn_prefill.wgsl`
    pub fn attn_prefill(&self, kv: KvType, head_dim: u32) -> Variant {
        let sizes = [("TILE", self.prefill_tile), ("ROW_LANES", self.row_lanes), ("HEAD_DIM", head_dim)];
        self.variant(Kernel::AttnPrefill, None, None, Some(kv), &sizes)
    }

    /// `edit_logits.wgsl`
    pub fn edit_logits(&self) -> Variant {
        self.variant(Kernel::EditLogits, None, None, None, &[("WORKGROUP", self.flat)])
    }

    /// `lse_chunk.wgsl`, `topk_chunk.wgsl` or `topk_merge.wgsl`
    pub fn top_k(&self, kernel: Kernel) -> Variant {
        self.variant(kernel, None, None, None, &[("WORKGROUP", self.topk), ("CHUNK", TOP_K_CHUNK), ("K", TOP_K)])
    }

    /// Every variant that some model may ask for.
    pub fn variants(&self) -> Vec<Variant> {
        let mut all = Vec::new();
        for format in Format::ALL {
            all.push(self.embed(format));
            for act in [Act::F32, Act::Q8].into_iter().filter(|act| *act == Act::F32 || format.is_quantised()) {
                all.extend([1, 2, 4, 8].map(|cols| self.matvec(format, act, cols).variant));
                let gated =
                    [Act::F32, Act::Q8].into_iter().filter_map(|act_out| self.matvec_swiglu(format, act, act_out));
                all.extend(gated.map(|product| product.variant));
                all.push(self.matmul(format, act).variant);
            }
        }
        for head_dim in HEAD_DIMS {
            for act in [Act::F32, Act::Q8] {
                all.push(self.attn_reduce(act, head_dim));
            }
            for kv in [KvType::F32, KvType::F16] {
                all.extend([self.rope_kv(kv, head_dim), self.attn_prefill(kv, head_dim)]);
                for group in [1, 3, 4, 7, 8] {
                    all.push(self.attn_decode(kv, head_dim, group).0);
                    let short =
                        [Act::F32, Act::Q8].into_iter().filter_map(|act| self.attn_short(kv, act, head_dim, group));
                    all.extend(short.map(|(variant, _)| variant));
                }
            }
        }
        all.extend(
            [Act::F32, Act::Q8].into_iter().flat_map(|act| [self.rmsnorm(act), self.to_act(act), self.swiglu(act)]),
        );
        all.push(self.edit_logits());
        all.extend([Kernel::LseChunk, Kernel::TopkChunk, Kernel::TopkMerge].map(|kernel| self.top_k(kernel)));
        all.sort_by_key(|variant| format!("{variant:?}"));
        all.dedup();
        all
    }
}

/// The largest divisor of `n` that is at most `limit`.
fn largest_divisor(n: u32, limit: u32) -> u32 {
    (1..=n.min(limit)).rev().find(|d| n.is_multiple_of(*d)).unwrap_or(1)
}
