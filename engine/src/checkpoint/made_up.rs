//! A checkpoint in memory whose weights are made up, for measurements that only shapes and formats matter to.

use std::collections::BTreeMap;
use std::path::PathBuf;

use memmap2::MmapMut;
use serde::{Deserialize, Serialize};

use super::{Checkpoint, CheckpointError, Container, DType, GenerationDefaults, Mapped, Source, TensorInfo};
use crate::config::ModelConfig;

/// Most bytes of made-up weights.
const BYTES_MAX: usize = 16 << 30;
/// Alignment of tensors, in bytes.
const ALIGNMENT: usize = 64;

/// A tensor to be made up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MadeUp {
    /// Canonical name; of a layer's tensor without the layer.
    pub name: String,
    /// Format.
    pub dtype: DType,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
}

impl MadeUp {
    /// Bytes on disk; nothing where rows are no whole blocks, or it is all too large.
    pub fn bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent))?;
        let row = self.shape.last().copied().unwrap_or(1);
        let blocks = row.is_multiple_of(self.dtype.block_elements()).then(|| elements / self.dtype.block_elements())?;
        blocks.checked_mul(self.dtype.block_bytes()).filter(|bytes| (1..=BYTES_MAX).contains(bytes))
    }
}

/// Where the halves of a block are: its scales.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => &[],
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
    }
}

/// Fills a tensor with small finite values, of which neighbours differ.
fn fill(dtype: DType, bytes: &mut [u8]) {
    const SMALL: [u8; 2] = 0x1400u16.to_le_bytes();
    for (at, block) in bytes.chunks_exact_mut(dtype.block_bytes()).enumerate() {
        let value = |i: usize| ((at * 31 + i) as u32).wrapping_mul(0x9e37_79b1) >> 24;
        match dtype {
            DType::F32 => block.copy_from_slice(&((value(0) as f32 + 1.0) * 1e-4).to_le_bytes()),
            DType::F16 => block.copy_from_slice(&(0x1400 + value(0) as u16).to_le_bytes()),
            DType::BF16 => block.copy_from_slice(&(0x3b00 + value(0) as u16 % 128).to_le_bytes()),
            _ => {
                block.iter_mut().enumerate().for_each(|(i, byte)| *byte = value(i) as u8);
                halves(dtype).iter().for_each(|half| block[*half..half + 2].copy_from_slice(&SMALL));
            }
        }
    }
}

impl Checkpoint {
    /// A model of `layers`, each of which is a list of tensors, and of `ends`, the tensors that are of no layer. Layers
    /// that are the same list share their bytes.
    ///
    /// # Errors
    /// [`CheckpointError`] when a tensor has no size or all of them are too large, and when there is no memory.
    pub fn made_up(config: ModelConfig, layers: &[&[MadeUp]], ends: &[MadeUp]) -> Result<Checkpoint, CheckpointError> {
        let path = PathBuf::from("made-up weights");
        config.validate(&path)?;
        let refused = |found: String| CheckpointError::NotAModel { path: path.clone(), found };
        let mut lists: Vec<&[MadeUp]> = vec![ends];
        for layer in layers {
            if !lists[1..].contains(layer) {
                lists.push(layer);
            }
        }
        let mut end = 0usize;
        let mut places: Vec<Vec<(usize, usize)>> = Vec::new();
        for list in &lists {
            let mut its = Vec::new();
            for tensor in *list {
                let bytes = tensor.bytes().ok_or_else(|| refused(format!("a tensor {} of no size", tensor.name)))?;
                its.push((end, bytes));
                end = (end + bytes).next_multiple_of(ALIGNMENT);
                if end > BYTES_MAX {
                    return Err(refused(format!("more than {BYTES_MAX} bytes of weights")));
                }
            }
            places.push(its);
        }
        let io = |source| CheckpointError::Io { path: path.clone(), source };
        let mut map = MmapMut::map_anon(end.max(1)).map_err(io)?;
        for (list, places) in lists.iter().zip(&places) {
            for (tensor, (offset, bytes)) in list.iter().zip(places) {
                fill(tensor.dtype, &mut map[*offset..offset + bytes]);
            }
        }
        let mut tensors = BTreeMap::new();
        let mut add = |prefix: &str, list: usize| {
            for (tensor, (offset, bytes)) in lists[list].iter().zip(&places[list]) {
                let name = format!("{prefix}{}", tensor.name);
                let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                let (source_name, offset, bytes) = (name.clone(), *offset, *bytes);
                tensors.insert(name.clone(), TensorInfo { name, source_name, dtype, shape, file: 0, offset, bytes });
            }
        };
        add("", 0);
        for (index, layer) in layers.iter().enumerate() {
            let list = 1 + lists[1..].iter().position(|list| list == layer).expect("every layer has its list");
            add(&format!("blk.{index}."), list);
        }
        Ok(Checkpoint {
            config: ModelConfig { layers: layers.len(), ..config },
            container: Container::Safetensors,
            generation: GenerationDefaults::default(),
            files: vec![Mapped { path: path.clone(), map: map.make_read_only().map_err(io)? }],
            source: Source::Folder(path.clone()),
            unsupported: Vec::new(),
            tensors,
            path,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_format_are_small_and_finite() {
        for dtype in DType::ALL {
            let mut bytes = vec![0xffu8; 4 * dtype.block_bytes()];
            fill(dtype, &mut bytes);
            let half = |at: usize| half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
            let found: Vec<f32> = match dtype {
                DType::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
                DType::F16 => (0..4).map(|i| half(2 * i)).collect(),
                DType::BF16 => {
                    (0..4).map(|i| half::bf16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f32()).collect()
                }
                _ => (0..4)
                    .flat_map(|b| halves(dtype).iter().map(move |at| b * dtype.block_bytes() + at))
                    .map(half)
                    .collect(),
            };
            assert!(found.iter().all(|value| *value > 0.0 && *value < 0.05), "{dtype}: {found:?}");
        }
    }

    #[test]
    fn tensors_without_a_size_are_refused() {
        let tensor = |shape: &[usize], dtype| MadeUp { name: "t".into(), dtype, shape: shape.into() };
        assert_eq!(tensor(&[3, 64], DType::Q4_1).bytes(), Some(120));
        for wrong in [tensor(&[3, 63], DType::Q4_1), tensor(&[0, 32], DType::F32), tensor(&[usize::MAX, 2], DType::F32)]
        {
            assert_eq!(wrong.bytes(), None, "{wrong:?}");
        }
    }
}
