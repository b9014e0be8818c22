//! A stage's work as data: which kernels run, in which order, on which buffers.
//!
//! A [`Program`] is built once and replayed for every step; what differs from step to step is a [`Shape`] and what
//! the step writes into the input buffers.

pub mod ops;

use std::fmt;

use pp_shaders::Variant;

/// A buffer of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// What a dispatch counts in its `tokens` parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Count {
    /// Tokens of the step.
    Tokens,
    /// Those that attend on their own.
    Alone,
    /// Rows that logits are wanted for.
    Outputs,
    /// Edits of logits.
    Edits,
}

/// How many workgroups a dispatch takes, given a [`Shape`] and its count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grid {
    /// `items` threads in workgroups of `workgroup` along x, the count along y.
    Flat {
        /// Threads that have work.
        items: u32,
        /// Threads of a workgroup.
        workgroup: u32,
    },
    /// The count along x.
    Each,
    /// The count in tiles of `tokens` along x, `workgroups` along y (and z, beyond [`Grid::Y_MAX`]): what starts one
    /// after the other reads the same weights, which are in a cache then, and not the whole matrix for every tile.
    Rows {
        /// Workgroups that the rows take.
        workgroups: u32,
        /// Tokens of a tile.
        tokens: u32,
    },
    /// Attention tiles along x, query heads along y.
    Tiles {
        /// Query heads.
        heads: u32,
    },
    /// `x`, the context's splits, the count.
    Splits {
        /// Workgroups of a token and split.
        x: u32,
    },
    /// `chunks` along x, the count along y.
    Chunks {
        /// Chunks of a row.
        chunks: u32,
    },
}

impl Grid {
    /// Workgroups along y before z is used; every adapter takes 65535.
    pub const Y_MAX: u32 = 32768;
}

/// The numbers of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Rows that logits are wanted for.
    pub outputs: u32,
    /// Edits of logits, as many as the buffer of edits is filled with.
    pub edits: u32,
    /// Tokens, the first of the step, that are all of their sequence in it. They attend on their own where the step has many;
    /// of few tokens all do.
    pub alone: u32,
    /// Attention tiles of the others (prefill).
    pub tiles: u32,
    /// Splits of the longest context.
    pub splits: u32,
}

/// One dispatch.
#[derive(Clone, Debug)]
pub struct Op {
    /// The pipeline.
    pub variant: Variant,
    /// The kernel's parameters; `tokens`, the first four bytes, is set from the shape.
    pub params: Vec<u8>,
    /// In the order of [`Variant::bindings`].
    pub buffers: Vec<BufferId>,
    /// The dispatch's size.
    pub grid: Grid,
    /// What `tokens` is.
    pub count: Count,
    /// What it computes, for people: the layer and the tensor.
    pub note: String,
    /// Bytes of weights that it reads.
    pub weight_bytes: u64,
    /// Multiplications and additions a token.
    pub operations: u64,
    /// More of them for each split of the token's context.
    pub split_operations: u64,
}

/// Operations that a device does in the time that it reads a byte of weights in: 18 on the software driver that
/// benches/LOG.md measures. A program's weights are the same in every step, so that it decides little.
const OPERATIONS_PER_BYTE: f64 = 16.0;
/// Operations that a device does in the time that a dispatch takes at least.
const OPERATIONS_PER_DISPATCH: f64 = 1e5;

impl Op {
    /// A rough measure of a step's dispatch that its time goes with: operations, and as many as could be done while
    /// weights are read. Contexts count as if all were as long as the longest.
    pub fn work(&self, shape: &Shape) -> f64 {
        let each = self.operations as f64 + self.split_operations as f64 * f64::from(shape.splits);
        let weights = OPERATIONS_PER_BYTE * self.weight_bytes as f64;
        OPERATIONS_PER_DISPATCH + weights + each * f64::from(self.count(shape))
    }

    /// What `tokens` is in a step.
    pub fn count(&self, shape: &Shape) -> u32 {
        match self.count {
            Count::Tokens => shape.tokens,
            Count::Alone => shape.alone,
            Count::Outputs => shape.outputs,
            Count::Edits => shape.edits,
        }
    }

    /// The parameters for a step.
    pub fn params_for(&self, shape: &Shape) -> Vec<u8> {
        let mut params = self.params.clone();
        params[..4].copy_from_slice(&self.count(shape).to_le_bytes());
        params
    }

    /// Workgroups for a step; a zero means that there is nothing to do.
    pub fn workgroups(&self, shape: &Shape) -> [u32; 3] {
        let count = self.count(shape);
        match self.grid {
            Grid::Flat { items, workgroup } => [items.div_ceil(workgroup), count, 1],
            Grid::Each => [count, 1, 1],
            Grid::Rows { workgroups, tokens } => {
                [count.div_ceil(tokens), workgroups.min(Grid::Y_MAX), workgroups.div_ceil(Grid::Y_MAX)]
            }
            Grid::Tiles { heads } => [shape.tiles, heads, 1],
            Grid::Splits { x } => [x, shape.splits, count],
            Grid::Chunks { chunks } => [chunks, count, 1],
        }
    }
}

/// Dispatches in order.
#[derive(Clone, Debug, Default)]
pub struct Program {
    /// The dispatches.
    pub ops: Vec<Op>,
}

/// The text that snapshots of architectures are made of: a line a dispatch.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for op in &self.ops {
            writeln!(f, "{:<18} {}", op.variant.label(), op.note)?;
        }
        Ok(())
    }
}
