//! Reads a stage's tensors, repacks them and puts them on its device, a bounded piece at a time.

use std::ops::Range;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::arch::Layer;
use crate::backend::{Backend, DeviceError};
use crate::checkpoint::supplied::{Bound, Origins, SupplyError, TensorBytes};
use crate::checkpoint::{Checkpoint, DType, TensorInfo};
use crate::layout::{Held, LayerLayout, MatrixLayout, StageLayout};
use crate::program::BufferId;
use crate::program::ops::{Chunk, KvBuffers, Linear, Matrix};
use crate::quant::Packed;

/// Device bytes that are repacked before they are written.
const PIECE_BYTES: usize = 4 << 20;

/// How much of a stage is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadProgress {
    /// Bytes read from the checkpoint so far.
    pub read_bytes: u64,
    /// Bytes that will have been read in the end.
    pub total_bytes: u64,
    /// Where the bytes were that are at hand.
    pub origins: Origins,
    /// While the head reads the model to know each tensor by its content: bytes done, and in all.
    pub hashing: Option<(u64, u64)>,
}

impl LoadProgress {
    /// Bytes of [`LoadProgress::total_bytes`] that are at hand or on the device.
    pub fn at_hand(&self) -> u64 {
        self.origins.total().max(self.read_bytes).min(self.total_bytes)
    }
}

/// Why loading stopped.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LoadError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("loading was cancelled")]
    Cancelled,
    #[error("the device is not trusted: {message}")]
    Untrusted { message: String },
    #[error("{message}")]
    Refused { message: String },
    #[error("{}", no_room(folder, *needed, *room, *bound))]
    NoRoom { folder: String, needed: u64, room: u64, bound: Bound },
    #[error("its weights do not come: {message}")]
    Weights { message: String },
}

fn no_room(folder: &str, needed: u64, room: u64, bound: Bound) -> String {
    let what = match bound {
        Bound::Cap => "may hold",
        Bound::Disk => "has, with what the disk has free,",
    };
    format!("the worker's tensors take {needed} bytes, and its cache at {folder} {what} {room}")
}

impl From<SupplyError> for LoadError {
    fn from(error: SupplyError) -> LoadError {
        match error {
            SupplyError::Cancelled => LoadError::Cancelled,
            SupplyError::NoRoom { folder, needed, room, bound } => LoadError::NoRoom { folder, needed, room, bound },
            SupplyError::Failed { message } => LoadError::Weights { message },
        }
    }
}

/// The weights of a stage on its device; none by default.
#[derive(Default)]
pub struct Weights {
    /// The embedding, on the first stage.
    pub embedding: Option<Matrix>,
    /// The layers.
    pub layers: Vec<Layer>,
    /// Final norm and LM head, on the last stage.
    pub head: Option<(BufferId, Linear)>,
    /// Bytes read from the checkpoint.
    pub read_bytes: u64,
    /// Where they were.
    pub origins: Origins,
}

impl Weights {
    /// Lets go of what is not `held` for another layout, with keys and values; returns the buffers, which may be freed.
    pub fn keep_only(&mut self, held: &Held) -> Vec<BufferId> {
        let mut gone = Vec::new();
        if let Some((norm, linear)) = self.head.take_if(|_| !held.head) {
            gone.push(norm);
            let embedding: Vec<BufferId> = self.embedding.iter().flat_map(Matrix::buffers).collect();
            gone.extend(linear.iter().flat_map(Matrix::buffers).filter(|buffer| !embedding.contains(buffer)));
        }
        gone.extend(self.embedding.take_if(|_| !held.embedding).iter().flat_map(Matrix::buffers));
        for layer in self.layers.extract_if(.., |layer| !held.layers.contains(&layer.index)) {
            gone.extend(layer.buffers());
        }
        gone
    }
}

/// Loads what `layout` lists, and is not among the weights that are there already: those that [`Weights::keep_only`] left of
/// another layout. `progress` returns false to stop.
///
/// # Errors
/// [`LoadError::Device`] when memory runs out or the device is lost, [`LoadError::Cancelled`]; what a [`SupplyError`] says
/// where the weights come from elsewhere.
pub fn load(
    checkpoint: &Checkpoint,
    layout: &StageLayout,
    there: Weights,
    held: &Held,
    backend: &mut dyn Backend,
    progress: &mut dyn FnMut(LoadProgress) -> bool,
) -> Result<Weights, LoadError> {
    let at = LoadProgress { total_bytes: layout.file_bytes_beside(held), ..LoadProgress::default() };
    let mut loader = Loader { checkpoint, backend, progress, at };
    let embedding = match &layout.embedding {
        Some(matrix) if there.embedding.is_none() => Some(loader.matrix(matrix)?),
        _ => there.embedding,
    };
    let mut there_layers = there.layers.into_iter().peekable();
    let mut layers = Vec::with_capacity(layout.layers.len());
    for layer in &layout.layers {
        layers.push(match there_layers.next_if(|there| there.index == layer.index) {
            Some(layer) => layer,
            None => loader.layer(layer, layout)?,
        });
    }
    let head = match &layout.head {
        None => None,
        Some(_) if there.head.is_some() => there.head,
        Some(head) => {
            let norm = loader.vector("output_norm", &[&head.norm])?;
            let matrix = match &embedding {
                Some(embedding) if head.shares_embedding => embedding.clone(),
                _ => loader.matrix(&head.matrix)?,
            };
            Some((norm, vec![matrix]))
        }
    };
    let LoadProgress { read_bytes, origins, .. } = loader.at;
    Ok(Weights { embedding, layers, head, read_bytes, origins })
}

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    backend: &'a mut dyn Backend,
    progress: &'a mut dyn FnMut(LoadProgress) -> bool,
    at: LoadProgress,
}

impl<'a> Loader<'a> {
    fn read(&mut self, bytes: usize) -> Result<(), LoadError> {
        self.at.read_bytes += bytes as u64;
        self.at.origins = self.checkpoint.origins(self.at.read_bytes);
        if (self.progress)(self.at) { Ok(()) } else { Err(LoadError::Cancelled) }
    }

    /// The bytes of a tensor, waited for where they come from elsewhere.
    fn bytes(&mut self, tensor: &TensorInfo) -> Result<TensorBytes<'a>, LoadError> {
        let Loader { checkpoint, progress, at, .. } = self;
        let mut go_on = |origins| {
            at.origins = origins;
            progress(*at)
        };
        Ok(checkpoint.read(tensor, &mut go_on)?)
    }

    fn layer(&mut self, layer: &LayerLayout, layout: &StageLayout) -> Result<Layer, LoadError> {
        let name = |what: &str| format!("blk.{}.{what}", layer.index);
        let linear = |loader: &mut Self, parts: &[MatrixLayout]| {
            parts.iter().map(|matrix| loader.matrix(matrix)).collect::<Result<Linear, _>>()
        };
        let mut kv = Vec::new();
        for (first_kv, kv_heads) in &layout.kv_groups {
            let bytes = layout.kv_buffer_bytes(*kv_heads);
            let keys = self.backend.create(&name("keys"), bytes)?;
            let values = self.backend.create(&name("values"), bytes)?;
            kv.push(KvBuffers { first_kv: *first_kv, kv_heads: *kv_heads, keys, values });
        }
        Ok(Layer {
            index: layer.index,
            attn_norm: self.vector(&name("attn_norm"), &[&layer.attn_norm])?,
            qkv: linear(self, &layer.qkv)?,
            qk_norms: layer.qk_norms.as_ref().map(|[q, k]| self.vector(&name("attn_qk_norm"), &[q, k])).transpose()?,
            output: linear(self, &layer.output)?,
            ffn_norm: self.vector(&name("ffn_norm"), &[&layer.ffn_norm])?,
            paired: layer.gate_up.iter().all(|matrix| matrix.paired),
            gate_up: linear(self, &layer.gate_up)?,
            down: linear(self, &layer.down)?,
            kv,
        })
    }

    /// Vectors of floats, one after the other.
    fn vector(&mut self, label: &str, tensors: &[&TensorInfo]) -> Result<BufferId, LoadError> {
        let mut values = Vec::new();
        for tensor in tensors {
            values.extend(floats(tensor.dtype, &self.bytes(tensor)?));
            self.read(tensor.bytes())?;
        }
        let buffer = self.backend.create(label, 4 * values.len())?;
        self.backend.write(buffer, 0, bytemuck::cast_slice(&values))?;
        Ok(buffer)
    }

    fn matrix(&mut self, layout: &MatrixLayout) -> Result<Matrix, LoadError> {
        let name = layout.name();
        let blocks = layout.blocks();
        let mut parts = Vec::new();
        for part in &layout.parts {
            let bias = part.bias.as_ref().map(|bias| self.bytes(bias)).transpose()?;
            parts.push(PartBytes { rows: self.bytes(&part.tensor)?, bias });
        }
        let mut chunks = Vec::new();
        for rows in &layout.chunks {
            let mut streams = Vec::new();
            for bytes in layout.format.stream_bytes(rows.len(), blocks).into_iter().filter(|bytes| *bytes > 0) {
                streams.push(self.backend.create(&name, bytes)?);
            }
            // Pieces begin at multiples of 64 rows, where every stream is aligned to a word.
            let piece = (PIECE_BYTES / layout.format.bytes(64, blocks).max(1)).max(1) * 64;
            for first in rows.clone().step_by(piece) {
                let last = rows.end.min(first + piece);
                let (packed, bytes) = self.pack(layout, &parts, first, last);
                let offsets = layout.format.stream_bytes(first - rows.start, blocks);
                for ((buffer, stream), offset) in streams.iter().zip(&packed.streams).zip(offsets) {
                    self.backend.write(*buffer, offset, stream)?;
                }
                self.read(bytes)?;
            }
            let bias = if layout.has_bias() { Some(self.bias(layout, &parts, rows, &name)?) } else { None };
            chunks.push(Chunk { first_row: rows.start, rows: rows.len(), streams, bias });
        }
        Ok(Matrix { name, format: layout.format, y_offset: layout.y_offset, cols: layout.cols, blocks, chunks })
    }

    /// Rows `first..last` of a matrix in the device's format, and the bytes read for them.
    fn pack(&self, layout: &MatrixLayout, parts: &[PartBytes<'_>], first: usize, last: usize) -> (Packed, usize) {
        let mut packed = Packed::new(layout.format, last - first, layout.blocks(), self.backend.profile());
        let mut read = 0;
        for (row, part, part_row) in rows_of(layout, first, last) {
            let tensor = &layout.parts[part].tensor;
            let bytes = tensor.row_bytes();
            packed.set_row(row - first, tensor.dtype, &parts[part].rows[part_row * bytes..][..bytes]);
            read += bytes;
        }
        (packed, read)
    }

    fn bias(
        &mut self,
        layout: &MatrixLayout,
        parts: &[PartBytes<'_>],
        rows: &Range<usize>,
        name: &str,
    ) -> Result<BufferId, LoadError> {
        let mut values = vec![0.0f32; rows.len()];
        for part in &layout.parts {
            if let (Some(bias), 0) = (&part.bias, rows.start) {
                self.read(bias.bytes())?;
            }
        }
        for (row, part, part_row) in rows_of(layout, rows.start, rows.end) {
            if let (Some(bias), Some(data)) = (&layout.parts[part].bias, &parts[part].bias) {
                let bytes = bias.dtype.block_bytes();
                values[row - rows.start] = floats(bias.dtype, &data[part_row * bytes..][..bytes])[0];
            }
        }
        let buffer = self.backend.create(&format!("{name}.bias"), 4 * values.len())?;
        self.backend.write(buffer, 0, bytemuck::cast_slice(&values))?;
        Ok(buffer)
    }
}

/// A part of a matrix as it lies on disk.
struct PartBytes<'a> {
    rows: TensorBytes<'a>,
    bias: Option<TensorBytes<'a>>,
}

/// The rows of a matrix with the part, by its place, and the part's row that each comes from.
fn rows_of(layout: &MatrixLayout, first: usize, last: usize) -> impl Iterator<Item = (usize, usize, usize)> {
    (first..last).map(move |row| {
        if layout.paired {
            return (row, row / 8 % 2, row / 16 * 8 + row % 8);
        }
        let mut begins = 0;
        let part = layout.parts.iter().position(|part| {
            let here = row < begins + part.tensor.shape[0];
            begins += if here { 0 } else { part.tensor.shape[0] };
            here
        });
        let part = part.expect("a matrix has the rows of its parts");
        (row, part, file_row(row - begins, layout.parts[part].interleaved))
    })
}

/// The row of the file that becomes row `row`: where a head's rotated pairs stand side by side in the file, dimension i
/// of the first half is row 2 i of its head, of the second half row 2 i + 1.
fn file_row(row: usize, interleaved: Option<usize>) -> usize {
    let Some(head) = interleaved else { return row };
    let (base, d) = (row / head * head, row % head);
    base + 2 * (d % (head / 2)) + d / (head / 2)
}

/// The values of an unquantised tensor.
///
/// # Panics
/// When the type is quantised: norms and biases are checked when the stage is laid out.
fn floats(dtype: DType, data: &[u8]) -> Vec<f32> {
    let halves = || data.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]));
    match dtype {
        DType::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes(std::array::from_fn(|i| b[i]))).collect(),
        DType::F16 => halves().map(|bits| f16::from_bits(bits).to_f32()).collect(),
        DType::BF16 => halves().map(|bits| bf16::from_bits(bits).to_f32()).collect(),
        other => panic!("a vector of {other}"),
    }
}
