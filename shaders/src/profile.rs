//! Sizes of workgroups and register tiles for two kinds of adapters. Every profile adds in the same order
//! (`wgsl/shared/segments.wgsl`, `wgsl/shared/attention.wgsl`); they differ in who does the work.

/// The choices that a kind of adapter wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Profile {
    /// What `--profile` calls it.
    pub name: &'static str,
    /// Threads of the kernels that go by element or block.
    pub flat: u32,
    /// Threads that normalise one token.
    pub norm: u32,
    /// Sets of lanes in a matvec workgroup.
    pub matvec_groups: u32,
    /// Rows that a lane of matvec works on at once.
    pub matvec_rows: u32,
    /// Token lanes of a matmul workgroup that shares nothing.
    pub matmul_lanes: u32,
    /// Tokens a lane of it holds.
    pub matmul_cols: u32,
    /// Rows a workgroup of it holds.
    pub matmul_rows: u32,
    /// Whether q8 matmuls stage tiles in workgroup memory.
    pub tiled: bool,
    /// Threads of decode attention, and threads that score one key there.
    pub decode_threads: u32,
    /// Threads that score one key in decode attention (1 or 4).
    pub key_lanes: u32,
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
        flat: 64,
        norm: 128,
        matvec_groups: 8,
        matvec_rows: 2,
        matmul_lanes: 32,
        matmul_cols: 2,
        matmul_rows: 8,
        tiled: true,
        decode_threads: 128,
        key_lanes: 4,
        prefill_tile: 16,
        row_lanes: 4,
        topk: 128,
        chunk: 512,
    };

    /// For software Vulkan: one SIMD vector a workgroup, no barriers where they can be avoided.
    pub const SOFTWARE: Profile = Profile {
        name: "software",
        flat: 8,
        norm: 8,
        matvec_groups: 1,
        matvec_rows: 4,
        matmul_lanes: 8,
        matmul_cols: 1,
        matmul_rows: 8,
        tiled: false,
        decode_threads: 32,
        key_lanes: 1,
        prefill_tile: 8,
        row_lanes: 1,
        topk: 8,
        chunk: 128,
    };

    /// Every profile.
    pub const ALL: [Profile; 2] = [Profile::CARD, Profile::SOFTWARE];
}
