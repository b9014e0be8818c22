//! The verbs that programs are written in: one a kernel.
//!
//! A verb picks the variant for the bucket of the program and for the formats of its weights, and names the buffers.
//! A [`Bucket`] is a range of step sizes that one program serves.

use bytemuck::bytes_of;
use pp_shaders::params::{self, ADD_BIAS, ADD_TO_Y};
use pp_shaders::profile::{Product, TOP_K_CHUNK};
use pp_shaders::{Act, BLOCK, Kernel, KvType, Profile, SPLIT, Variant};

use super::{BufferId, Count, Grid, Op, Program};

/// Most tokens of a step that the kernels for few take at once: above, products are matmuls, and only who decodes attends on
/// its own.
pub const FEW_TOKENS: usize = 8;

/// Numbers of a model that programs are made of.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names of the field")]
pub struct Dims {
    pub hidden: usize,
    pub intermediate: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Rotated pairs of a head.
    pub rope_pairs: usize,
    pub rms_eps: f32,
    pub vocab: usize,
}

/// Which steps a program serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bucket {
    /// Few tokens, each attending on its own: decode.
    Few {
        /// Tokens at most: 1, 2, 4 or 8.
        cols: u32,
        /// Whether every context has one split of attention.
        short: bool,
    },
    /// Any number of tokens.
    Many {
        /// Which attend on their own; the others do in tiles of a sequence's tokens.
        alone: Alone,
    },
}

/// Which tokens of a step attend on their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Alone {
    /// None: prefill.
    None,
    /// The first of the step: prefill beside decode.
    First,
    /// All: decode of many sequences.
    All,
}

impl Bucket {
    /// The bucket for `tokens` tokens whose longest context has `splits` splits of attention.
    pub fn of(tokens: usize, splits: u32, alone: Alone) -> Bucket {
        if tokens <= FEW_TOKENS {
            Bucket::Few { cols: tokens.next_power_of_two() as u32, short: splits <= 1 }
        } else {
            Bucket::Many { alone }
        }
    }
}

/// Rows of a matrix that fit a binding.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// First row, and how many.
    pub first_row: usize,
    /// Rows.
    pub rows: usize,
    /// The streams of the format.
    pub streams: Vec<BufferId>,
    /// Added to the product.
    pub bias: Option<BufferId>,
}

/// A weight matrix on the device.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Tensors it was made of, for people.
    pub name: String,
    /// Its format.
    pub format: pp_shaders::Format,
    /// Rows of the product that stand before its own.
    pub y_offset: usize,
    /// Values of a row.
    pub cols: usize,
    /// Blocks of a row.
    pub blocks: usize,
    /// Its rows.
    pub chunks: Vec<Chunk>,
}

impl Matrix {
    /// The type of the activations it meets in a mode.
    pub fn act(&self, mode: Act) -> Act {
        if mode == Act::Q8 && self.format.is_quantised() { Act::Q8 } else { Act::F32 }
    }

    /// Its buffers.
    pub fn buffers(&self) -> impl Iterator<Item = BufferId> {
        self.chunks.iter().flat_map(|chunk| chunk.streams.iter().chain(&chunk.bias).copied())
    }

    /// Rows of all chunks.
    pub fn rows(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.rows).sum()
    }
}

/// A product of several matrices with the same input, one after the other in the output.
pub type Linear = Vec<Matrix>;

/// Keys and values of some kv heads of a layer.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names of the field")]
pub struct KvBuffers {
    pub first_kv: usize,
    pub kv_heads: usize,
    pub keys: BufferId,
    pub values: BufferId,
}

/// Words and scales of activations, for the types that a stage's matrices meet.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "named after the types")]
pub struct Activations {
    pub q8: Option<[BufferId; 2]>,
    pub f32: Option<[BufferId; 2]>,
}

impl Activations {
    fn of(&self, act: Act) -> [BufferId; 2] {
        let buffers = match act {
            Act::Q8 => self.q8,
            Act::F32 => self.f32,
        };
        buffers.expect("a stage makes the activation buffers that its matrices meet")
    }
}

/// The buffers between kernels; a stage has one set.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "shapes are at their allocation in `layout`")]
pub struct WorkBuffers {
    pub x: BufferId,
    pub act: Activations,
    /// One token's activations of the gated feed-forward net, beside those that it is made from.
    pub gated: [BufferId; 2],
    pub qkv: BufferId,
    pub q: BufferId,
    pub attention: BufferId,
    pub part_out: BufferId,
    pub part_stat: BufferId,
    pub gate_up: BufferId,
    pub tokens: BufferId,
    pub rotation: BufferId,
    pub pages: BufferId,
    pub tiles: BufferId,
    pub outputs: BufferId,
    pub logits: BufferId,
    pub best: BufferId,
    pub stats: BufferId,
    /// What is done to logits before top-k, and what comes of it for the raw ones.
    pub edits: BufferId,
    pub raw_logits: BufferId,
    pub raw_stats: BufferId,
    pub result: BufferId,
    /// Stands where a kernel binds something that it will not touch.
    pub nothing: BufferId,
}

/// A program in the making.
pub struct Ops<'a> {
    program: Program,
    profile: &'a Profile,
    dims: &'a Dims,
    work: &'a WorkBuffers,
    mode: Act,
    kv: KvType,
    splits_max: usize,
    bucket: Bucket,
    count: Count,
    scope: String,
}

impl<'a> Ops<'a> {
    /// An empty program for a bucket. `splits_max` is the number of attention splits of a full context.
    #[expect(clippy::too_many_arguments, reason = "all that a verb may need, once")]
    pub fn new(
        profile: &'a Profile,
        dims: &'a Dims,
        work: &'a WorkBuffers,
        mode: Act,
        kv: KvType,
        splits_max: usize,
        bucket: Bucket,
        count: Count,
    ) -> Ops<'a> {
        Ops {
            program: Program::default(),
            profile,
            dims,
            work,
            mode,
            kv,
            splits_max,
            bucket,
            count,
            scope: String::new(),
        }
    }

    /// The program.
    pub fn finish(self) -> Program {
        self.program
    }

    /// Names what the next verbs belong to.
    pub fn scope(&mut self, scope: impl Into<String>) {
        self.scope = scope.into();
    }

    /// Tokens that stand together in activations: 1 for matvec, a tile for matmul.
    fn act_lanes(&self) -> u32 {
        match self.bucket {
            Bucket::Few { .. } => 1,
            Bucket::Many { .. } => self.profile.act_lanes(),
        }
    }

    /// The activation types that a product's matrices meet.
    fn acts(&self, consumer: &Linear) -> Vec<Act> {
        let met = |act| consumer.iter().any(|matrix| matrix.act(self.mode) == act);
        [Act::Q8, Act::F32].into_iter().filter(|act| met(*act)).collect()
    }

    #[expect(clippy::too_many_arguments, reason = "one place that makes a dispatch")]
    fn push(
        &mut self,
        variant: Variant,
        params: &[u8],
        buffers: Vec<BufferId>,
        grid: Grid,
        what: &str,
        weight_bytes: usize,
        operations: usize,
    ) {
        let note = if self.scope.is_empty() { what.to_owned() } else { format!("{} {what}", self.scope) };
        let (weight_bytes, operations) = (weight_bytes as u64, operations as u64);
        self.program.ops.push(Op {
            variant,
            params: params.to_vec(),
            buffers,
            grid,
            count: self.count,
            note,
            weight_bytes,
            operations,
            split_operations: 0,
        });
    }

    /// The dispatch that was pushed last attends with so many heads.
    fn attends(&mut self, heads: usize) {
        let op = self.program.ops.last_mut().expect("a dispatch was pushed");
        op.split_operations = (4 * heads * self.dims.head_dim * SPLIT) as u64;
    }

    /// x = rows of the embedding.
    pub fn embed(&mut self, table: &Matrix) {
        for chunk in &table.chunks {
            let variant = self.profile.embed(table.format);
            let params = params::Embed {
                tokens: 0,
                blocks: table.blocks as u32,
                hidden: self.dims.hidden as u32,
                first_row: chunk.first_row as u32,
                rows: chunk.rows as u32,
            };
            let mut buffers = chunk.streams.clone();
            buffers.extend([self.work.tokens, self.work.x]);
            let grid = Grid::Flat { items: table.blocks as u32, workgroup: self.profile.flat };
            self.push(variant, bytes_of(&params), buffers, grid, &table.name, 0, 0);
        }
    }

    /// Activations for `consumer` = RMSNorm of x, of the rows in `outputs` where the program counts outputs.
    pub fn rmsnorm(&mut self, gain: BufferId, consumer: &Linear, what: &str) -> Activations {
        let hidden = self.dims.hidden;
        for act in self.acts(consumer) {
            let [words, scales] = self.work.act.of(act);
            let variant = self.profile.rmsnorm(act);
            let params = params::RmsNorm {
                tokens: 0,
                hidden: hidden as u32,
                blocks: hidden.div_ceil(BLOCK) as u32,
                act_lanes: self.act_lanes(),
                use_rows: u32::from(self.count == Count::Outputs),
                eps: self.dims.rms_eps,
            };
            let buffers = vec![self.work.x, gain, self.work.outputs, words, scales];
            self.push(variant, bytes_of(&params), buffers, Grid::Each, what, 0, 4 * hidden);
        }
        self.work.act
    }

    /// y = W a (+ bias), or y += W a, for every matrix of the product; a is `input`, `y_stride` a row of y.
    pub fn linear(&mut self, product: &Linear, input: Activations, y: BufferId, y_stride: usize, add: bool) {
        let flags = if add { ADD_TO_Y } else { 0 };
        for matrix in product {
            let act = matrix.act(self.mode);
            let product = match self.bucket {
                Bucket::Few { cols, .. } => self.profile.matvec(matrix.format, act, cols),
                Bucket::Many { .. } => self.profile.matmul(matrix.format, act),
            };
            self.product(matrix, &product, input, &[y], y_stride, flags);
        }
    }

    /// One dispatch for each chunk of a matrix.
    fn product(
        &mut self,
        matrix: &Matrix,
        product: &Product,
        input: Activations,
        outputs: &[BufferId],
        y_stride: usize,
        flags: u32,
    ) {
        let [words, scales] = input.of(matrix.act(self.mode));
        for chunk in &matrix.chunks {
            let params = params::Matmul {
                tokens: 0,
                blocks: matrix.blocks as u32,
                rows: chunk.rows as u32,
                y_stride: y_stride as u32,
                y_offset: (matrix.y_offset + chunk.first_row) as u32,
                flags: flags | if chunk.bias.is_some() { ADD_BIAS } else { 0 },
            };
            let mut buffers = chunk.streams.clone();
            buffers.extend([words, scales, chunk.bias.unwrap_or(self.work.nothing)]);
            buffers.extend(outputs);
            let grid = Grid::Rows { workgroups: (chunk.rows as u32).div_ceil(product.rows), tokens: product.tokens };
            let bytes = matrix.format.bytes(chunk.rows, matrix.blocks);
            let operations = 2 * chunk.rows * matrix.cols;
            self.push(product.variant.clone(), bytes_of(&params), buffers, grid, &matrix.name, bytes, operations);
        }
    }

    /// q = rotated and scaled queries; keys and values into their pages. `norms`: RMSNorm of q's and k's heads.
    pub fn rope_kv(&mut self, layer: &[KvBuffers], norms: Option<BufferId>) {
        let d = self.dims;
        for kv in layer {
            let variant = self.profile.rope_kv(self.kv, d.head_dim as u32);
            let params = params::RopeKv {
                tokens: 0,
                heads: d.heads as u32,
                kv_heads: d.kv_heads as u32,
                first_kv: kv.first_kv as u32,
                kv_heads_here: kv.kv_heads as u32,
                pairs: d.rope_pairs as u32,
                use_norms: u32::from(norms.is_some()),
                scale: 1.0 / (d.head_dim as f32).sqrt(),
                eps: d.rms_eps,
            };
            let w = self.work;
            let buffers =
                vec![w.qkv, norms.unwrap_or(w.nothing), w.tokens, w.pages, w.rotation, w.q, kv.keys, kv.values];
            let units = kv.kv_heads * (d.heads / d.kv_heads + 2);
            let items = units * (d.head_dim / 4 - d.rope_pairs / 4);
            let grid = Grid::Flat { items: items as u32, workgroup: self.profile.flat };
            self.push(variant, bytes_of(&params), buffers, grid, "rope, write kv", 0, 0);
        }
    }

    /// Activations for `consumer` = softmax(q K') V, causal.
    pub fn attention(&mut self, layer: &[KvBuffers], consumer: &Linear) -> Activations {
        let bucket = self.bucket;
        match bucket {
            Bucket::Few { short: true, .. } if self.attention_short(layer, consumer) => {}
            Bucket::Few { .. } => self.attention_in_splits(layer, consumer, Count::Tokens),
            Bucket::Many { alone } => {
                // Tiles make activations of all tokens, of which those that attend on their own are replaced.
                if alone != Alone::All {
                    self.attention_in_tiles(layer, consumer);
                }
                if alone != Alone::None {
                    self.attention_in_splits(layer, consumer, Count::Alone);
                }
            }
        }
        self.work.act
    }

    fn decode_params(&self, kv: &KvBuffers) -> params::AttnDecode {
        let d = self.dims;
        params::AttnDecode {
            tokens: 0,
            heads: d.heads as u32,
            kv_heads: d.kv_heads as u32,
            first_kv: kv.first_kv as u32,
            kv_heads_here: kv.kv_heads as u32,
            splits: self.splits_max as u32,
        }
    }

    /// One kernel where contexts have one split; false where the heads do not allow it.
    fn attention_short(&mut self, layer: &[KvBuffers], consumer: &Linear) -> bool {
        let (d, w) = (self.dims, self.work);
        let group = (d.heads / d.kv_heads) as u32;
        let [act] = self.acts(consumer)[..] else { return false };
        let Some((variant, heads)) = self.profile.attn_short(self.kv, act, d.head_dim as u32, group) else {
            return false;
        };
        let [words, scales] = w.act.of(act);
        for kv in layer {
            let buffers = vec![w.q, kv.keys, kv.values, w.tokens, w.pages, words, scales];
            let grid = Grid::Splits { x: kv.kv_heads as u32 * group / heads };
            self.push(variant.clone(), bytes_of(&self.decode_params(kv)), buffers, grid, "attention", 0, 0);
            self.attends(kv.kv_heads * group as usize);
        }
        true
    }

    /// Of the first `count` tokens of the step.
    fn attention_in_splits(&mut self, layer: &[KvBuffers], consumer: &Linear, count: Count) {
        let (d, w) = (self.dims, self.work);
        let whole = std::mem::replace(&mut self.count, count);
        let group = (d.heads / d.kv_heads) as u32;
        for kv in layer {
            let (variant, heads) = self.profile.attn_decode(self.kv, d.head_dim as u32, group);
            let buffers = vec![w.q, kv.keys, kv.values, w.tokens, w.pages, w.part_out, w.part_stat];
            let grid = Grid::Splits { x: kv.kv_heads as u32 * group / heads };
            self.push(variant, bytes_of(&self.decode_params(kv)), buffers, grid, "attention", 0, 0);
            self.attends(kv.kv_heads * group as usize);
        }
        for act in self.acts(consumer) {
            let [words, scales] = w.act.of(act);
            let blocks = (d.heads * d.head_dim).div_ceil(BLOCK) as u32;
            let variant = self.profile.attn_reduce(act, d.head_dim as u32);
            let params = params::AttnReduce {
                tokens: 0,
                heads: d.heads as u32,
                splits: self.splits_max as u32,
                blocks,
                act_lanes: self.act_lanes(),
            };
            let buffers = vec![w.part_out, w.part_stat, w.tokens, words, scales];
            let grid = Grid::Flat { items: blocks, workgroup: self.profile.flat };
            self.push(variant, bytes_of(&params), buffers, grid, "merge splits", 0, 0);
        }
        self.count = whole;
    }

    fn attention_in_tiles(&mut self, layer: &[KvBuffers], consumer: &Linear) {
        let (d, w) = (self.dims, self.work);
        let group = d.heads / d.kv_heads;
        for kv in layer {
            let variant = self.profile.attn_prefill(self.kv, d.head_dim as u32);
            let params = params::AttnPrefill {
                tokens: 0,
                heads: d.heads as u32,
                kv_heads: d.kv_heads as u32,
                first_kv: kv.first_kv as u32,
                kv_heads_here: kv.kv_heads as u32,
            };
            let buffers = vec![w.q, kv.keys, kv.values, w.tokens, w.pages, w.tiles, w.attention];
            let grid = Grid::Tiles { heads: (kv.kv_heads * group) as u32 };
            self.push(variant, bytes_of(&params), buffers, grid, "attention", 0, 0);
            self.attends(kv.kv_heads * group);
        }
        for act in self.acts(consumer) {
            let [words, scales] = w.act.of(act);
            let width = d.heads * d.head_dim;
            let blocks = width.div_ceil(BLOCK) as u32;
            let params = params::ToAct { tokens: 0, width: width as u32, blocks, act_lanes: self.act_lanes() };
            let grid = Grid::Flat { items: blocks, workgroup: self.profile.flat };
            let buffers = vec![w.attention, words, scales];
            self.push(self.profile.to_act(act), bytes_of(&params), buffers, grid, "to activations", 0, 0);
        }
    }

    /// Activations for `consumer` = silu(W_gate a) * (W_up a), a is `input`; `paired`: gates and ups stand in turns of 8
    /// rows.
    pub fn gated(&mut self, gate_up: &Linear, input: Activations, paired: bool, consumer: &Linear) -> Activations {
        let (d, w) = (self.dims, self.work);
        if let ([matrix], [act], true, Bucket::Few { cols: 1, .. }) =
            (gate_up.as_slice(), &self.acts(consumer)[..], paired, self.bucket)
            && let Some(product) = self.profile.matvec_swiglu(matrix.format, matrix.act(self.mode), *act)
        {
            self.product(matrix, &product, input, &w.gated, 2 * d.intermediate, 0);
            return match act {
                Act::Q8 => Activations { q8: Some(w.gated), f32: None },
                Act::F32 => Activations { q8: None, f32: Some(w.gated) },
            };
        }
        self.linear(gate_up, input, w.gate_up, 2 * d.intermediate, false);
        for act in self.acts(consumer) {
            let [words, scales] = w.act.of(act);
            let blocks = d.intermediate.div_ceil(BLOCK) as u32;
            let params = params::SwiGlu {
                tokens: 0,
                width: d.intermediate as u32,
                blocks,
                act_lanes: self.act_lanes(),
                paired: u32::from(paired),
            };
            let grid = Grid::Flat { items: blocks, workgroup: self.profile.flat };
            let buffers = vec![w.gate_up, words, scales];
            self.push(self.profile.swiglu(act), bytes_of(&params), buffers, grid, "silu(gate) * up", 0, 0);
        }
        w.act
    }

    /// raw_stats = shares of the log-sum-exp of each row of logits; then logits = edited logits, raw_logits = what they
    /// were.
    pub fn edit_logits(&mut self) {
        let w = self.work;
        let params = self.top_k_params();
        let (variant, grid) = (self.profile.top_k(Kernel::LseChunk), Grid::Chunks { chunks: params.chunks });
        self.push(variant, bytes_of(&params), vec![w.logits, w.raw_stats], grid, "log-sum-exp of chunks", 0, 0);
        let params = params::EditLogits { tokens: 0, zero: 0 };
        let grid = Grid::Rows { workgroups: 1, tokens: self.profile.flat };
        let outputs = std::mem::replace(&mut self.count, Count::Edits);
        let buffers = vec![w.edits, w.logits, w.raw_logits];
        self.push(self.profile.edit_logits(), bytes_of(&params), buffers, grid, "edits", 0, 0);
        self.count = outputs;
    }

    fn top_k_params(&self) -> params::TopK {
        let vocab = self.dims.vocab as u32;
        params::TopK { tokens: 0, vocab, chunks: vocab.div_ceil(TOP_K_CHUNK) }
    }

    /// result = the best candidates of each row of logits, with its log-sum-exps; that of the raw logits from
    /// raw_stats where they were `edited`.
    pub fn top_k(&mut self, edited: bool) {
        let w = self.work;
        let params = self.top_k_params();
        let chunks = params.chunks;
        let variant = self.profile.top_k(Kernel::TopkChunk);
        let buffers = vec![w.logits, w.outputs, w.best, w.stats];
        self.push(variant, bytes_of(&params), buffers, Grid::Chunks { chunks }, "top-k of chunks", 0, 0);
        let variant = self.profile.top_k(Kernel::TopkMerge);
        let raw_stats = if edited { w.raw_stats } else { w.stats };
        let buffers = vec![w.logits, w.outputs, w.best, w.stats, raw_stats, w.result];
        self.push(variant, bytes_of(&params), buffers, Grid::Each, "top-k", 0, 0);
    }

    /// The buffers between kernels.
    pub fn work(&self) -> &'a WorkBuffers {
        self.work
    }

    /// Numbers of the model.
    pub fn dims(&self) -> &'a Dims {
        self.dims
    }
}
