//! What a stage will hold on its device, computed before anything is loaded.
//!
//! The same numbers make the answer of `pp-run plan` and the buffers of an opened stage, so the two agree.

mod source;

use std::ops::Range;

use pp_shaders::profile::{HEAD_DIMS, TOP_K, TOP_K_CHUNK};
use pp_shaders::{Act, BLOCK, Edit, Format, KvType, PAGE, Profile, SPLIT};
use pp_transport::frame::PAYLOAD_BYTES_MAX;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::arch::{self, Arch, UnknownArch};
use crate::backend::DeviceLimits;
use crate::checkpoint::{Checkpoint, CheckpointError, TensorInfo};
use crate::program::ops::{Dims, FEW_TOKENS};
use crate::quant::{device_format, row_blocks};
use crate::wire::Wire;
use source::Source;

/// Most tokens of a micro-batch: beyond this, buffers between kernels dwarf the weights.
pub const CHUNK_MAX: usize = 8192;
/// Most sequences at once.
pub const SEQUENCES_MAX: usize = 1024;
/// Largest KV cache, in tokens.
pub const KV_TOKENS_MAX: usize = 1 << 32;
/// Logits of one pass take at most so many bytes; more rows go in several passes.
const LOGITS_BYTES_MAX: usize = 32 << 20;
/// Bytes of what attention has of each split of a context, where more than [`FEW_TOKENS`] tokens attend on their own.
const PARTS_BYTES_MAX: usize = 32 << 20;
/// Edits of logits of one pass at most: 256 tokens with penalties for each of 128 answers. They are 0.8 MiB on the device
/// and 0.6 MiB in a message; a row with more is edited by the head.
const EDITS_MAX: usize = 32768;

/// One stage of a pipeline: which layers it holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSpec {
    /// Place in the pipeline, from 0.
    pub index: usize,
    /// Stages of the pipeline.
    pub stages: usize,
    /// Layers held.
    pub layers: Range<usize>,
}

impl StageSpec {
    /// Whether it embeds tokens.
    pub fn is_first(&self) -> bool {
        self.index == 0
    }

    /// Whether it makes logits.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.stages
    }

    /// Layers that both hold.
    pub fn overlap(&self, other: &StageSpec) -> Range<usize> {
        self.common(&other.layers)
    }

    /// Its layers among those.
    pub fn common(&self, layers: &Range<usize>) -> Range<usize> {
        let start = self.layers.start.max(layers.start);
        start..self.layers.end.min(layers.end).max(start)
    }

    /// Whether stages hold every one of `layers` layers once, in order.
    ///
    /// # Errors
    /// [`LayoutError::Cover`].
    pub fn check_cover(specs: &[StageSpec], layers: usize) -> Result<(), LayoutError> {
        let mut next = 0;
        for (index, spec) in specs.iter().enumerate() {
            let fits = spec.layers.start == next
                && spec.layers.end > next
                && (spec.index, spec.stages) == (index, specs.len());
            if !fits {
                return Err(LayoutError::Cover { index, found: spec.layers.clone(), next, layers });
            }
            next = spec.layers.end;
        }
        if next == layers {
            return Ok(());
        }
        Err(LayoutError::Cover { index: specs.len(), found: next..next, next, layers })
    }

    /// The stages of a pipeline with so many layers on each.
    pub fn pipeline(counts: &[usize]) -> Vec<StageSpec> {
        let mut first = 0;
        let ranges = counts.iter().map(|count| {
            first += count;
            first - count..first
        });
        ranges.enumerate().map(|(index, layers)| StageSpec { index, stages: counts.len(), layers }).collect()
    }
}

/// Choices that all stages of a pipeline share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageOptions {
    /// Activations that quantised matrices meet; [`Act::F32`] is the exact mode.
    pub activations: Act,
    /// Type of cached keys and values.
    pub kv: KvType,
    /// Positions of the longest sequence.
    pub context: usize,
    /// Sequences that may hold pages at once.
    pub sequences: usize,
    /// Positions of all sequences together.
    pub kv_tokens: usize,
    /// Tokens of the largest micro-batch.
    pub chunk: usize,
    /// How activations cross from stage to stage; [`Wire::F32`] changes nothing.
    pub wire: Wire,
}

impl StageOptions {
    /// Pages of a sequence of full length.
    pub fn pages_per_sequence(&self) -> usize {
        self.context.div_ceil(PAGE)
    }

    /// Pages of a stage.
    pub fn pages(&self) -> usize {
        self.kv_tokens.div_ceil(PAGE)
    }
}

/// Why a stage cannot hold what it should.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LayoutError {
    #[error(transparent)]
    Arch(#[from] UnknownArch),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(
        "stage {index} holds layers {found:?} where layer {next} of {layers} is next: every layer must be on one stage, in order"
    )]
    Cover { index: usize, found: Range<usize>, next: usize, layers: usize },
    #[error("heads of {found} values are not supported; supported are {HEAD_DIMS:?}")]
    HeadDim { found: usize },
    #[error("a {what} of {found} is not supported: it must be a multiple of 4")]
    Width { what: &'static str, found: usize },
    #[error(
        "{dims} rotated dimensions of a head of {head_dim} are not supported: they must be a multiple of 8 and at most the head (all of it in a GGUF of this architecture)"
    )]
    RopeDims { dims: usize, head_dim: usize },
    #[error("tensor `{tensor}` is a vector and stored as {found}; vectors are read as F32, F16 or BF16")]
    Vector { tensor: String, found: &'static str },
    #[error(
        "{tokens} tokens of {hidden} floats are {bytes} bytes, a frame between stages carries at most {PAYLOAD_BYTES_MAX}: use --max-batch-tokens of at most {fits}"
    )]
    Frame { tokens: usize, hidden: usize, bytes: usize, fits: usize },
    #[error(
        "the buffer `{buffer}` between kernels takes {bytes} bytes, but the device binds at most {limit} at a time: use a smaller {option}"
    )]
    Work { buffer: &'static str, bytes: usize, limit: usize, option: &'static str },
    #[error("one row of `{tensor}` takes {bytes} bytes, but the device binds at most {limit} at a time")]
    Binding { tensor: String, bytes: usize, limit: usize },
    #[error(
        "a cache of {tokens} tokens takes {bytes} bytes for one head of keys, but the device binds at most {limit} at a time: use --kv-tokens or --ctx of at most {fits}"
    )]
    KvBinding { tokens: usize, bytes: usize, limit: usize, fits: usize },
}

/// Rows of a matrix that come from one tensor.
#[derive(Clone, Debug)]
pub struct Part {
    /// The rows.
    pub tensor: TensorInfo,
    /// Their biases, one a row.
    pub bias: Option<TensorInfo>,
    /// Heads of so many rows whose rotated pairs stand side by side in the file and half a head apart here.
    pub interleaved: Option<usize>,
}

/// A matrix to be made on the device.
#[derive(Clone, Debug)]
pub struct MatrixLayout {
    /// Tensors of one format, one under the other.
    pub parts: Vec<Part>,
    /// Format on the device.
    pub format: Format,
    /// Rows of the product before its own.
    pub y_offset: usize,
    /// Rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// Whether its two parts, gate and up, stand in turns of 8 rows.
    pub paired: bool,
    /// Row ranges that fit a binding each.
    pub chunks: Vec<Range<usize>>,
}

impl MatrixLayout {
    /// Blocks of a row.
    pub fn blocks(&self) -> usize {
        row_blocks(self.cols)
    }

    /// Names of its tensors.
    pub fn name(&self) -> String {
        self.parts.iter().map(|part| part.tensor.name.trim_end_matches(".weight")).collect::<Vec<_>>().join("+")
    }

    /// Whether any of its parts has a bias.
    pub fn has_bias(&self) -> bool {
        self.parts.iter().any(|part| part.bias.is_some())
    }

    /// Bytes on the device.
    pub fn device_bytes(&self) -> usize {
        let bias = if self.has_bias() { 4 * self.rows } else { 0 };
        self.chunks.iter().map(|rows| self.format.bytes(rows.len(), self.blocks())).sum::<usize>() + bias
    }

    fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.parts.iter().flat_map(|part| std::iter::once(&part.tensor).chain(&part.bias))
    }
}

/// The weights of one layer.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "as in `arch::Layer`")]
pub struct LayerLayout {
    pub index: usize,
    pub attn_norm: TensorInfo,
    pub qkv: Vec<MatrixLayout>,
    pub qk_norms: Option<[TensorInfo; 2]>,
    pub output: Vec<MatrixLayout>,
    pub ffn_norm: TensorInfo,
    pub gate_up: Vec<MatrixLayout>,
    pub down: Vec<MatrixLayout>,
}

impl LayerLayout {
    fn matrices(&self) -> impl Iterator<Item = &MatrixLayout> {
        self.qkv.iter().chain(&self.output).chain(&self.gate_up).chain(&self.down)
    }

    fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.vectors().chain(self.matrices().flat_map(MatrixLayout::tensors))
    }

    fn vectors(&self) -> impl Iterator<Item = &TensorInfo> {
        [&self.attn_norm, &self.ffn_norm].into_iter().chain(self.qk_norms.iter().flatten())
    }
}

/// The final norm and the LM head.
#[derive(Clone, Debug)]
pub struct HeadLayout {
    /// [hidden]
    pub norm: TensorInfo,
    /// [vocab, hidden]
    pub matrix: MatrixLayout,
    /// Whether it is the stage's own embedding, held once.
    pub shares_embedding: bool,
}

/// A buffer between kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkBuffer {
    /// Its name.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
}

/// What is there of a stage's weights before it is loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Whether the embedding is.
    pub embedding: bool,
    /// Which layers are.
    pub layers: Range<usize>,
    /// Whether final norm and LM head are.
    pub head: bool,
}

/// Everything that a stage holds.
pub struct StageLayout {
    /// Which layers.
    pub spec: StageSpec,
    /// The choices it was made for.
    pub options: StageOptions,
    /// The architecture.
    pub arch: &'static Arch,
    /// Numbers of the model.
    pub dims: Dims,
    /// The embedding, on the first stage.
    pub embedding: Option<MatrixLayout>,
    /// The layers.
    pub layers: Vec<LayerLayout>,
    /// Norm and LM head, on the last stage.
    pub head: Option<HeadLayout>,
    /// (first kv head, kv heads) of each pair of KV buffers of a layer.
    pub kv_groups: Vec<(usize, usize)>,
    /// Buffers between kernels, by name.
    pub work: Vec<WorkBuffer>,
    /// Rows of logits of one pass.
    pub outputs_max: usize,
    /// Edits of logits of one pass.
    pub edits_max: usize,
}

impl StageLayout {
    /// Lays out one stage of `checkpoint` for a device with those limits.
    ///
    /// # Errors
    /// [`LayoutError`]: a tensor is missing or of the wrong shape or type, or the model is of a kind that the kernels
    /// are not made for.
    pub fn new(
        checkpoint: &Checkpoint,
        spec: StageSpec,
        options: StageOptions,
        profile: &Profile,
        limits: DeviceLimits,
    ) -> Result<StageLayout, LayoutError> {
        let config = &checkpoint.config;
        let arch = arch::find(&config.arch)?;
        if !HEAD_DIMS.contains(&(config.head_dim as u32)) {
            return Err(LayoutError::HeadDim { found: config.head_dim });
        }
        for (what, width) in [("hidden size", config.hidden), ("intermediate size", config.intermediate)] {
            if !width.is_multiple_of(4) {
                return Err(LayoutError::Width { what, found: width });
            }
        }
        // Any row may have to go as floats. The description of a step is small beside its activations: a sixteenth is
        // more than it ever takes.
        let (bytes, limit) = (4 * options.chunk * config.hidden, PAYLOAD_BYTES_MAX / 16 * 15);
        if bytes > limit {
            let fits = limit / (4 * config.hidden);
            return Err(LayoutError::Frame { tokens: options.chunk, hidden: config.hidden, bytes, fits });
        }
        let partial = config.rope.dims != config.head_dim;
        if !config.rope.dims.is_multiple_of(8)
            || config.rope.dims > config.head_dim
            || (partial && checkpoint.rope_interleaved())
        {
            return Err(LayoutError::RopeDims { dims: config.rope.dims, head_dim: config.head_dim });
        }
        let dims = Dims {
            hidden: config.hidden,
            intermediate: config.intermediate,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            rope_pairs: config.rope.dims / 2,
            rms_eps: config.rms_eps,
            vocab: config.vocab,
        };
        let source = Source { checkpoint, dims: &dims, limit: limits.binding_bytes };
        let embedding = if spec.is_first() { Some(source.embedding()?) } else { None };
        let layers = spec.layers.clone().map(|index| source.layer(arch, index)).collect::<Result<Vec<_>, _>>()?;
        let head = if spec.is_last() { Some(source.head(spec.is_first())?) } else { None };
        let kv_groups = kv_groups(&dims, &options, limits.binding_bytes)?;
        let outputs_max = (LOGITS_BYTES_MAX / (4 * dims.vocab)).clamp(1, options.chunk.max(FEW_TOKENS));
        let edits_max = EDITS_MAX.min(outputs_max * dims.vocab).min(limits.binding_bytes / Edit::BYTES);
        let mut layout = StageLayout {
            spec,
            options,
            arch,
            dims,
            embedding,
            layers,
            head,
            kv_groups,
            work: Vec::new(),
            outputs_max,
            edits_max,
        };
        layout.work = layout.work_buffers(profile);
        for buffer in &layout.work {
            if buffer.bytes > limits.binding_bytes {
                let option = if buffer.name.starts_with("part_") { "--ctx" } else { "--max-batch-tokens" };
                let (bytes, limit) = (buffer.bytes, limits.binding_bytes);
                return Err(LayoutError::Work { buffer: buffer.name, bytes, limit, option });
            }
        }
        Ok(layout)
    }

    fn matrices(&self) -> impl Iterator<Item = &MatrixLayout> {
        let head = self.head.iter().filter(|head| !head.shares_embedding).map(|head| &head.matrix);
        self.embedding.iter().chain(self.layers.iter().flat_map(LayerLayout::matrices)).chain(head)
    }

    /// Every tensor that the stage reads.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        let vectors = self.layers.iter().flat_map(LayerLayout::vectors);
        self.matrices().flat_map(MatrixLayout::tensors).chain(vectors).chain(self.head.iter().map(|head| &head.norm))
    }

    /// Those of them that are to be loaded beside what is `held`, in that order.
    pub fn tensors_beside(&self, held: &Held) -> impl Iterator<Item = &TensorInfo> {
        let Held { embedding, head, ref layers } = *held;
        let layers = layers.clone();
        let head = self.head.iter().filter(move |_| !head).flat_map(|head| {
            let own = (!head.shares_embedding).then_some(&head.matrix);
            std::iter::once(&head.norm).chain(own.into_iter().flat_map(MatrixLayout::tensors))
        });
        self.embedding
            .iter()
            .filter(move |_| !embedding)
            .flat_map(MatrixLayout::tensors)
            .chain(
                self.layers.iter().filter(move |layer| !layers.contains(&layer.index)).flat_map(LayerLayout::tensors),
            )
            .chain(head)
    }

    /// What a stage of that layout has of this one's weights.
    pub fn held_by(&self, other: &StageLayout) -> Held {
        let shares = |layout: &StageLayout| layout.head.as_ref().map(|head| head.shares_embedding);
        Held {
            embedding: self.embedding.is_some() && other.embedding.is_some(),
            layers: self.spec.overlap(&other.spec),
            head: shares(self).is_some() && shares(self) == shares(other),
        }
    }

    /// Bytes that the stage reads from the checkpoint.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes_beside(&Held::default())
    }

    /// The same where it holds some of its weights already.
    pub fn file_bytes_beside(&self, held: &Held) -> u64 {
        self.tensors_beside(held).map(|tensor| tensor.bytes() as u64).sum()
    }

    /// Bytes of weights on the device.
    pub fn weight_bytes(&self) -> u64 {
        let norms = self.layers.iter().flat_map(LayerLayout::vectors).chain(self.head.iter().map(|head| &head.norm));
        let norms: usize = norms.map(|tensor| 4 * tensor.elements()).sum();
        (self.matrices().map(MatrixLayout::device_bytes).sum::<usize>() + norms) as u64
    }

    /// The page of the known token ([`crate::stage::Stage::canary`]), behind those that sequences may have.
    pub fn canary_page(&self) -> u32 {
        self.options.pages() as u32
    }

    /// Bytes of one buffer of keys (or of values) for `kv_heads` heads.
    pub fn kv_buffer_bytes(&self, kv_heads: usize) -> usize {
        pages_held(&self.options) * PAGE * kv_heads * self.dims.head_dim * self.options.kv.bytes()
    }

    /// Bytes of cached keys and values.
    pub fn kv_bytes(&self) -> u64 {
        let layer: usize = self.kv_groups.iter().map(|(_, heads)| 2 * self.kv_buffer_bytes(*heads)).sum();
        (layer * self.layers.len()) as u64
    }

    /// Bytes of its host's memory that a log of what it hands on takes at most, where it may have `bytes`
    /// ([`crate::boundary::BoundaryLog`]); the last stage has none.
    pub fn boundary_log_bytes(&self, bytes: u64) -> u64 {
        let all = 4 * (self.options.pages() * PAGE * self.dims.hidden) as u64;
        if self.head.is_some() { 0 } else { bytes.min(all) }
    }

    /// Bytes of keys and values of one token.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.layers.len() * self.dims.kv_heads * self.dims.head_dim * self.options.kv.bytes()) as u64
    }

    /// Bytes of the buffers between kernels.
    pub fn work_bytes(&self) -> u64 {
        self.work.iter().map(|buffer| buffer.bytes as u64).sum()
    }

    /// Bytes of everything.
    pub fn device_bytes(&self) -> u64 {
        self.weight_bytes() + self.kv_bytes() + self.work_bytes()
    }

    /// Tensors that take another format on the device than in the file, as (file, device) names with their number.
    pub fn widened(&self) -> Vec<(String, String, usize)> {
        let mut found: Vec<(String, String, usize)> = Vec::new();
        for part in self.matrices().flat_map(|matrix| &matrix.parts) {
            let (from, to) = (part.tensor.dtype.name(), device_format(part.tensor.dtype).name());
            if from != to {
                match found.iter_mut().find(|(f, t, _)| (f.as_str(), t.as_str()) == (from, to)) {
                    Some((_, _, count)) => *count += 1,
                    None => found.push((from.to_owned(), to.to_owned(), 1)),
                }
            }
        }
        found
    }

    /// Positions of attention's splits in a full context.
    pub fn splits_max(&self) -> usize {
        self.options.context.div_ceil(SPLIT)
    }

    /// Tokens of a step that may attend on their own where there are many: there is room for what they have of each split.
    pub fn alone_max(&self) -> usize {
        let each = 4 * self.dims.heads * self.dims.head_dim * self.splits_max();
        (PARTS_BYTES_MAX / each).min(self.options.sequences).min(self.options.chunk).max(FEW_TOKENS)
    }

    fn meets(&self, act: Act) -> bool {
        let head = self.head.iter().map(|head| &head.matrix);
        let products = self.layers.iter().flat_map(LayerLayout::matrices).chain(head);
        products
            .map(
                |matrix| {
                    if self.options.activations == Act::Q8 && matrix.format.is_quantised() { Act::Q8 } else { Act::F32 }
                },
            )
            .any(|met| met == act)
    }

    fn work_buffers(&self, profile: &Profile) -> Vec<WorkBuffer> {
        let d = &self.dims;
        let tokens = self.options.chunk.max(FEW_TOKENS);
        let tile = profile.act_lanes() as usize;
        let heads = d.heads * d.head_dim;
        let blocks = row_blocks(d.hidden).max(row_blocks(heads)).max(row_blocks(d.intermediate));
        let padded = tokens.next_multiple_of(tile);
        let mut buffers = Vec::new();
        let mut add = |name, bytes: usize| buffers.push(WorkBuffer { name, bytes: bytes.next_multiple_of(4).max(16) });
        add("x", 4 * tokens * d.hidden);
        if self.meets(Act::Q8) {
            add("act_q8", padded * blocks * BLOCK);
            add("act_q8_scales", 8 * padded * blocks);
        }
        if self.meets(Act::F32) {
            add("act_f32", 4 * padded * blocks * BLOCK);
            add("act_f32_scales", 8 * padded * blocks);
        }
        add("gated", 4 * row_blocks(d.intermediate) * BLOCK);
        add("gated_scales", 8 * row_blocks(d.intermediate));
        add("qkv", 4 * tokens * (d.heads + 2 * d.kv_heads) * d.head_dim);
        add("q", 4 * tokens * heads);
        add("attention", 4 * tokens * heads);
        add("part_out", 4 * self.alone_max() * heads * self.splits_max());
        add("part_stat", 8 * self.alone_max() * d.heads * self.splits_max());
        add("gate_up", 4 * tokens * 2 * d.intermediate);
        add("tokens", 16 * tokens);
        add("rotation", 8 * tokens * d.rope_pairs);
        add("pages", 4 * self.options.sequences * self.options.pages_per_sequence());
        add("tiles", 16 * tokens);
        add("outputs", 16 * self.outputs_max);
        let (outputs, edits) = if self.head.is_some() { (self.outputs_max, self.edits_max) } else { (0, 0) };
        let chunks = d.vocab.div_ceil(TOP_K_CHUNK as usize);
        add("logits", 4 * outputs * d.vocab);
        add("best", 8 * outputs * chunks * TOP_K as usize);
        add("stats", 16 * outputs * chunks);
        add("edits", edits * Edit::BYTES);
        add("raw_logits", 4 * edits);
        add("raw_stats", 16 * outputs * chunks);
        add("result", 8 * outputs * (TOP_K as usize + 2));
        add("nothing", 16);
        buffers
    }
}

/// Pages that a stage takes: those that sequences may have, and the canary's.
fn pages_held(options: &StageOptions) -> usize {
    options.pages() + 1
}

fn kv_groups(dims: &Dims, options: &StageOptions, limit: usize) -> Result<Vec<(usize, usize)>, LayoutError> {
    let head = PAGE * dims.head_dim * options.kv.bytes();
    let bytes = pages_held(options) * head;
    let fit = limit / bytes.max(1);
    if fit == 0 {
        let fits = (limit / head).saturating_sub(1) * PAGE;
        return Err(LayoutError::KvBinding { tokens: options.kv_tokens, bytes, limit, fits });
    }
    Ok((0..dims.kv_heads).step_by(fit).map(|first| (first, fit.min(dims.kv_heads - first))).collect())
}
