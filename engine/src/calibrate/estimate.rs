//! What a card should take for the parts of a model, from what its maker says of it. Pure.
//!
//! A part takes as long as its weights take to be read, or its operations to be done, whichever is more, at a share of
//! the card's figures; and something for every kernel that is started.

use super::{Calibration, Shape};
use crate::checkpoint::made_up::MadeUp;
use crate::law::{Curve, SIZES};
use pp_shaders::Act;

/// A card, by its figures.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// Bytes a second that its memory gives.
    pub bytes_per_s: f64,
    /// Multiplications and additions of floats a second.
    pub f32_flops: f64,
    /// The same of signed bytes.
    pub int8_ops: f64,
    /// Share of the bytes a second that kernels reach.
    pub bandwidth_efficiency: f64,
    /// Share of the operations a second that kernels reach.
    pub compute_efficiency: f64,
}

/// What kernels reach of a card's bytes a second unless told otherwise.
pub const BANDWIDTH_EFFICIENCY: f64 = 0.7;
/// What they reach of its operations a second: the tiles of these kernels use no matrix units.
pub const COMPUTE_EFFICIENCY: f64 = 0.35;
/// Seconds to start a kernel.
const KERNEL: f64 = 4e-6;
/// Kernels of a layer.
const LAYER_KERNELS: f64 = 9.0;
/// Kernels from the final norm to the candidates.
const HEAD_KERNELS: f64 = 5.0;
/// Seconds to submit a step, and to get its results.
const STEP: f64 = 1e-4;
/// Micro-batches of up to so many tokens decode: logits are wanted of all of their rows.
const DECODE_MAX: usize = 8;

/// What a card should take for the parts of a model of that shape.
pub fn estimate(shape: &Shape, card: &Card) -> Calibration {
    let bandwidth = card.bytes_per_s * card.bandwidth_efficiency;
    let kv_values = (2 * shape.kv_heads * shape.head_dim) as f64;
    let decode_position = kv_values * shape.kv.bytes() as f64 / bandwidth;
    let attention = (4 * shape.heads * shape.head_dim) as f64 / (card.f32_flops * card.compute_efficiency);
    let layer = |kind: &Vec<MadeUp>| {
        let seconds = SIZES.map(|size| {
            let own = attention * (size * size) as f64 / 2.0;
            products(shape, card, kind, size as f64)
                + LAYER_KERNELS * KERNEL
                + if size > DECODE_MAX { own } else { 0.0 }
        });
        Curve { seconds, decode_position, prefill_position: attention }
    };
    let end = |name: &str| shape.ends.iter().filter(|tensor| tensor.name == name).cloned().collect::<Vec<_>>();
    let embedding = end("token_embd.weight");
    let head = Some(end("output.weight")).filter(|head| !head.is_empty()).unwrap_or_else(|| embedding.clone());
    let last = SIZES.map(|size| {
        let rows = if size > DECODE_MAX { 1 } else { size };
        products(shape, card, &head, rows as f64) + HEAD_KERNELS * KERNEL
    });
    let of = |seconds| Curve { seconds, ..Curve::default() };
    Calibration {
        fixed: of([STEP; SIZES.len()]),
        kinds: shape.kinds.iter().map(layer).collect(),
        first: of([KERNEL; SIZES.len()]),
        last: of(last),
        share: 1.0,
    }
}

/// Seconds of the products of `tokens` rows with all matrices.
fn products(shape: &Shape, card: &Card, tensors: &[MadeUp], tokens: f64) -> f64 {
    let one = |tensor: &MadeUp| {
        let elements: f64 = tensor.shape.iter().map(|extent| *extent as f64).product();
        let bytes = tensor.bytes().unwrap_or(0) as f64;
        let is_int8 = shape.activations == Act::Q8 && tensor.dtype.block_elements() > 1;
        let rate = if is_int8 { card.int8_ops } else { card.f32_flops } * card.compute_efficiency;
        let operations = if tensor.shape.len() > 1 { 2.0 * elements * tokens } else { 0.0 };
        (bytes / (card.bytes_per_s * card.bandwidth_efficiency)).max(operations / rate)
    };
    tensors.iter().map(one).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::DType;
    use crate::config::{Rope, RopeScaling};
    use pp_shaders::KvType;

    #[test]
    fn few_tokens_are_bound_by_bytes_and_many_by_operations() {
        let matrix = |name: &str, rows| MadeUp { name: name.into(), dtype: DType::Q8_0, shape: vec![rows, 4096] };
        let shape = Shape {
            arch: "llama".into(),
            layers: 2,
            hidden: 4096,
            intermediate: 4096,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocab: 32000,
            context: 4096,
            rms_eps: 1e-5,
            rope: Rope { theta: 1e4, dims: 128, scaling: RopeScaling::None },
            kinds: vec![vec![matrix("ffn_up.weight", 40960)]],
            ends: vec![matrix("token_embd.weight", 32000)],
            activations: Act::Q8,
            kv: KvType::F16,
        };
        let card = Card {
            bytes_per_s: 1e12,
            f32_flops: 2e13,
            int8_ops: 1e14,
            bandwidth_efficiency: 0.5,
            compute_efficiency: 0.5,
        };
        let found = estimate(&shape, &card);
        let started = LAYER_KERNELS * KERNEL;
        // 40960 · 4096 values of 8.5 bits; half of 1 TB/s, and half of 100 TOP/s.
        let (bytes, operations) = (40960.0 * 4096.0 * 8.5 / 8.0 / 5e11, 2.0 * 40960.0 * 4096.0 / 5e13);
        let layer = &found.kinds[0].seconds;
        assert!((layer[0] - bytes - started).abs() < 1e-9 && (layer[3] - bytes - started).abs() < 1e-9, "{layer:?}");
        let own = found.kinds[0].prefill_position * 128.0 * 128.0 / 2.0;
        assert!((layer[5] - 128.0 * operations - started - own).abs() < 1e-9, "{layer:?}");
        // A position: 2 · 8 · 128 halves.
        assert!((found.kinds[0].decode_position - 4096.0 / 5e11).abs() < 1e-15);
        assert!(found.is_of(&shape));
        let twice = estimate(&shape, &Card { bytes_per_s: 2e12, int8_ops: 2e14, f32_flops: 4e13, ..card });
        assert!(twice.kinds[0].seconds[0] < 0.55 * layer[0]);
    }
}
