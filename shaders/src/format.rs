//! What varies in the text of a kernel: weight formats, activation types, types of the KV cache.

use serde::{Deserialize, Serialize};

use crate::BLOCK;

/// Rows of a matrix are stored in multiples of this, for every profile's interleaving.
pub const ROWS_MULTIPLE: usize = 64;

/// How a weight matrix lies on the device: three streams of blocks, `quants`, `scales` and `supers`
/// (`wgsl/quant/*.wgsl` define the bits). Blocks stand in the order of [`crate::Arrangement`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(non_camel_case_types, reason = "the names of the formats' specification")]
pub enum Format {
    /// 32-bit floats.
    F32,
    /// IEEE halves.
    F16,
    /// bfloat16.
    BF16,
    /// ggml's Q8_0: signed bytes and a half scale.
    Q8_0,
    /// Signed bytes with float scale and offset; what Q5_1 and Q5_K widen to.
    Q8_M,
    /// ggml's Q4_0.
    Q4_0,
    /// ggml's Q4_1.
    Q4_1,
    /// ggml's Q4_K.
    Q4_K,
    /// ggml's Q6_K.
    Q6_K,
}

impl Format {
    /// Every format; tests and benches go through this table.
    pub const ALL: [Format; 9] = [
        Format::F32,
        Format::F16,
        Format::BF16,
        Format::Q8_0,
        Format::Q8_M,
        Format::Q4_0,
        Format::Q4_1,
        Format::Q4_K,
        Format::Q6_K,
    ];

    /// The name as people write it.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "F32",
            Format::F16 => "F16",
            Format::BF16 => "BF16",
            Format::Q8_0 => "Q8_0",
            Format::Q8_M => "Q8_M",
            Format::Q4_0 => "Q4_0",
            Format::Q4_1 => "Q4_1",
            Format::Q4_K => "Q4_K",
            Format::Q6_K => "Q6_K",
        }
    }

    /// The WGSL file of the format.
    pub(crate) fn import(self) -> &'static str {
        match self {
            Format::F32 => "quant/f32",
            Format::F16 => "quant/f16",
            Format::BF16 => "quant/bf16",
            Format::Q8_0 => "quant/q8_0",
            Format::Q8_M => "quant/q8_m",
            Format::Q4_0 => "quant/q4_0",
            Format::Q4_1 => "quant/q4_1",
            Format::Q4_K => "quant/q4_k",
            Format::Q6_K => "quant/q6_k",
        }
    }

    /// Whether values are small integers with scales, so that q8 activations may meet them in integer dots.
    pub fn is_quantised(self) -> bool {
        !matches!(self, Format::F32 | Format::F16 | Format::BF16)
    }

    /// Bits of one block in the streams `quants`, `scales` and `supers` (a superblock's bits divided by 8).
    pub fn block_bits(self) -> [usize; 3] {
        match self {
            Format::F32 => [32 * BLOCK, 0, 0],
            Format::F16 | Format::BF16 => [16 * BLOCK, 0, 0],
            Format::Q8_0 => [8 * BLOCK, 16, 0],
            Format::Q8_M => [8 * BLOCK, 64, 0],
            Format::Q4_0 => [4 * BLOCK, 16, 0],
            Format::Q4_1 => [4 * BLOCK, 32, 0],
            Format::Q4_K => [4 * BLOCK, 16, 4],
            Format::Q6_K => [6 * BLOCK, 16, 2],
        }
    }

    /// Blocks that a row's length must be a multiple of.
    pub fn superblock(self) -> usize {
        if self.block_bits()[2] > 0 { 8 } else { 1 }
    }

    /// Streams in use: 1, 2 or 3.
    pub fn streams(self) -> usize {
        self.block_bits().iter().filter(|&&bits| bits > 0).count()
    }

    /// Bytes of each stream for `rows` rows of `blocks` blocks; rows are padded to a multiple of [`ROWS_MULTIPLE`].
    pub fn stream_bytes(self, rows: usize, blocks: usize) -> [usize; 3] {
        self.block_bits().map(|bits| rows.next_multiple_of(ROWS_MULTIPLE) * blocks * bits / 8)
    }

    /// Bytes of all streams for `rows` rows of `blocks` blocks.
    pub fn bytes(self, rows: usize, blocks: usize) -> usize {
        self.stream_bytes(rows, blocks).iter().sum()
    }
}

/// The type of the activations that a matrix is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Act {
    /// Floats: the exact mode, and what unquantised weights meet.
    F32,
    /// Blocks of 32 signed bytes with a float scale.
    Q8,
}

impl Act {
    /// What `--activations` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Act::F32 => "f32",
            Act::Q8 => "q8",
        }
    }

    pub(crate) fn store_import(self) -> &'static str {
        match self {
            Act::F32 => "act/f32_store",
            Act::Q8 => "act/q8_store",
        }
    }

    /// 32-bit words that a block of 32 values takes, scales apart.
    pub fn block_words(self) -> usize {
        match self {
            Act::F32 => BLOCK,
            Act::Q8 => BLOCK / 4,
        }
    }
}

/// The type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvType {
    /// Floats.
    F32,
    /// Halves.
    F16,
}

impl KvType {
    /// What `--kv` calls it.
    pub fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
        }
    }

    pub(crate) fn import(self, wide: bool) -> &'static str {
        match (self, wide) {
            (KvType::F32, false) => "kv/f32",
            (KvType::F16, false) => "kv/f16",
            (KvType::F32, true) => "kv/f32_wide",
            (KvType::F16, true) => "kv/f16_wide",
        }
    }

    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
        }
    }
}
