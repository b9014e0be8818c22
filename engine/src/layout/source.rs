//! Where a stage's tensors are in a checkpoint, and which of them are one matrix.

use super::{HeadLayout, LayerLayout, LayoutError, MatrixLayout, Part};
use crate::arch::{Arch, Bias};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::program::ops::Dims;
use crate::quant::{device_format, row_blocks};

/// Finds tensors and joins them into matrices.
pub struct Source<'a> {
    pub checkpoint: &'a Checkpoint,
    pub dims: &'a Dims,
    pub limit: usize,
}

impl Source<'_> {
    fn vector(&self, name: &str, len: usize) -> Result<TensorInfo, LayoutError> {
        let tensor = self.checkpoint.require(name, &[len])?;
        if tensor.dtype.block_elements() > 1 {
            return Err(LayoutError::Vector { tensor: name.to_owned(), found: tensor.dtype.name() });
        }
        Ok(tensor.clone())
    }

    /// A matrix with a bias where the checkpoint has one.
    fn part(&self, name: &str, rows: usize, cols: usize, bias: Bias) -> Result<Part, LayoutError> {
        let tensor = self.checkpoint.require(&format!("{name}.weight"), &[rows, cols])?.clone();
        let bias_name = format!("{name}.bias");
        let bias = match bias {
            Bias::Optional if self.checkpoint.tensor(&bias_name).is_none() => None,
            _ => Some(self.vector(&bias_name, rows)?),
        };
        Ok(Part { tensor, bias, interleaved: None })
    }

    pub fn layer(&self, arch: &Arch, index: usize) -> Result<LayerLayout, LayoutError> {
        let d = self.dims;
        let name = |what: &str| format!("blk.{index}.{what}");
        let interleaved = self.checkpoint.rope_interleaved().then_some(d.head_dim);
        let mut q = self.part(&name("attn_q"), d.heads * d.head_dim, d.hidden, arch.qkv_bias)?;
        let mut k = self.part(&name("attn_k"), d.kv_heads * d.head_dim, d.hidden, arch.qkv_bias)?;
        let v = self.part(&name("attn_v"), d.kv_heads * d.head_dim, d.hidden, arch.qkv_bias)?;
        q.interleaved = interleaved;
        k.interleaved = interleaved;
        let qk_norms = if arch.qk_norm {
            Some([
                self.vector(&name("attn_q_norm.weight"), d.head_dim)?,
                self.vector(&name("attn_k_norm.weight"), d.head_dim)?,
            ])
        } else {
            None
        };
        let optional = |what: &str, rows, cols| self.part(&name(what), rows, cols, Bias::Optional);
        let mut gate_up = self.join(vec![
            optional("ffn_gate", d.intermediate, d.hidden)?,
            optional("ffn_up", d.intermediate, d.hidden)?,
        ])?;
        // In turns of 8, what belongs together comes out of one workgroup.
        if let [matrix] = gate_up.as_mut_slice() {
            matrix.paired = d.intermediate.is_multiple_of(8);
        }
        Ok(LayerLayout {
            index,
            attn_norm: self.vector(&name("attn_norm.weight"), d.hidden)?,
            qkv: self.join(vec![q, k, v])?,
            qk_norms,
            output: self.join(vec![optional("attn_output", d.hidden, d.heads * d.head_dim)?])?,
            ffn_norm: self.vector(&name("ffn_norm.weight"), d.hidden)?,
            gate_up,
            down: self.join(vec![optional("ffn_down", d.hidden, d.intermediate)?])?,
        })
    }

    pub fn embedding(&self) -> Result<MatrixLayout, LayoutError> {
        let tensor = self.checkpoint.require("token_embd.weight", &[self.dims.vocab, self.dims.hidden])?.clone();
        self.matrix(vec![Part { tensor, bias: None, interleaved: None }], 0)
    }

    /// The LM head; a checkpoint without one uses the embedding, whatever its configuration says.
    pub fn head(&self, holds_embedding: bool) -> Result<HeadLayout, LayoutError> {
        let norm = self.vector("output_norm.weight", self.dims.hidden)?;
        let own = self.checkpoint.tensor("output.weight").is_some()
            || self.checkpoint.unsupported().iter().any(|(name, _)| name == "output.weight");
        if !own {
            if !self.checkpoint.config.tie_embeddings {
                tracing::warn!(
                    "the configuration says that embedding and LM head are not tied, but there is no `output.weight`: the embedding is used for both"
                );
            }
            return Ok(HeadLayout { norm, matrix: self.embedding()?, shares_embedding: holds_embedding });
        }
        let matrix = self.matrix(vec![self.part("output", self.dims.vocab, self.dims.hidden, Bias::Optional)?], 0)?;
        Ok(HeadLayout { norm, matrix, shares_embedding: false })
    }

    /// Neighbours of one format become one matrix.
    fn join(&self, parts: Vec<Part>) -> Result<Vec<MatrixLayout>, LayoutError> {
        let mut groups: Vec<Vec<Part>> = Vec::new();
        for part in parts {
            match groups.last_mut() {
                Some(group) if device_format(group[0].tensor.dtype) == device_format(part.tensor.dtype) => {
                    group.push(part)
                }
                _ => groups.push(vec![part]),
            }
        }
        let mut y_offset = 0;
        let mut matrices = Vec::new();
        for group in groups {
            let matrix = self.matrix(group, y_offset)?;
            y_offset += matrix.rows;
            matrices.push(matrix);
        }
        Ok(matrices)
    }

    fn matrix(&self, parts: Vec<Part>, y_offset: usize) -> Result<MatrixLayout, LayoutError> {
        let format = device_format(parts[0].tensor.dtype);
        let cols = parts[0].tensor.row_elements();
        let rows = parts.iter().map(|part| part.tensor.shape[0]).sum();
        // Chunks begin at multiples of 64 rows: streams of half words stay aligned.
        let row = format.stream_bytes(64, row_blocks(cols)).into_iter().max().unwrap_or(0);
        let most = self.limit / row.max(1) * 64;
        if most == 0 {
            return Err(LayoutError::Binding { tensor: parts[0].tensor.name.clone(), bytes: row, limit: self.limit });
        }
        let chunks = (0..rows).step_by(most).map(|first| first..rows.min(first + most)).collect();
        Ok(MatrixLayout { parts, format, y_offset, rows, cols, paired: false, chunks })
    }
}
