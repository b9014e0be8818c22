//! Every kernel in some formats, on the adapter that is used by default: one dispatch from submission to its end.
//! Shapes are those of a model of about 1.5 billion parameters; what the buffers hold does not change the work.

use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pp_engine::backend::gpu::Gpu;
use pp_engine::backend::gpu::adapter::Adapter;
use pp_engine::backend::{Backend, Run};
use pp_engine::program::{BufferId, Count, Grid, Op, Program, Shape};
use pp_engine::quant::row_blocks;
use pp_shaders::profile::{Product, TOP_K, TOP_K_CHUNK};
use pp_shaders::{Act, Edit, Format, Kernel, KvType, PAGE, Profile, SPLIT, Variant, params};

const HIDDEN: usize = 1536;
const HEAD_DIM: usize = 128;
const KV_HEADS: usize = 2;
const GROUP: usize = 6;
const HEADS: usize = KV_HEADS * GROUP;
const VOCAB: usize = 49152;
/// Edits of logits: the distinct tokens of a long prompt.
const EDITS: usize = 1024;
/// Tokens of the kernels that take many.
const MANY: usize = 64;
/// Position of the token in decode attention.
const DEPTH: usize = 511;
const FORMATS: [Format; 5] = [Format::F16, Format::Q8_0, Format::Q4_0, Format::Q4_K, Format::Q6_K];

/// A buffer of a case.
enum Buffer {
    /// So many bytes of zero.
    Zero(usize),
    /// These words.
    Words(Vec<u32>),
}

use Buffer::{Words, Zero};

struct Case {
    name: String,
    variant: Variant,
    params: Vec<u8>,
    buffers: Vec<Buffer>,
    grid: Grid,
    shape: Shape,
    weight_bytes: u64,
}

fn bytes_of<T: bytemuck::NoUninit>(params: &T) -> Vec<u8> {
    bytemuck::bytes_of(params).to_vec()
}

fn tokens(count: usize) -> Shape {
    Shape { tokens: count as u32, ..Shape::default() }
}

fn act_buffers(act: Act, tokens: usize, width: usize, lanes: u32) -> [Buffer; 2] {
    let blocks = tokens.next_multiple_of(lanes as usize) * row_blocks(width);
    [Zero(4 * blocks * act.block_words()), Zero(8 * blocks)]
}

fn all(profile: &Profile) -> Vec<Case> {
    let mut cases = Vec::new();
    for format in FORMATS {
        let act = if format.is_quantised() { Act::Q8 } else { Act::F32 };
        cases.push(product(format, act, profile.matvec(format, act, 1), 1, 1));
        cases.push(product(format, act, profile.matmul(format, act), profile.act_lanes(), MANY));
    }
    let format = Format::Q4_0;
    cases.extend(profile.matvec_swiglu(format, Act::Q8, Act::Q8).map(|made| gated_product(format, made)));
    cases.push(product(format, Act::F32, profile.matvec(format, Act::F32, 1), 1, 1));
    cases.push(product(format, Act::F32, profile.matmul(format, Act::F32), profile.act_lanes(), MANY));
    for act in [Act::F32, Act::Q8] {
        cases.extend(flat(profile, act));
    }
    cases.extend(attention(profile));
    cases.extend(top_k(profile));
    cases.push(edits(profile));
    cases
}

fn product(format: Format, act: Act, product: Product, lanes: u32, count: usize) -> Case {
    let (rows, blocks) = (HIDDEN, row_blocks(HIDDEN));
    let streams = format.stream_bytes(rows, blocks);
    let mut buffers: Vec<Buffer> = streams.into_iter().filter(|bytes| *bytes > 0).map(Zero).collect();
    buffers.extend(act_buffers(act, count, HIDDEN, lanes));
    buffers.extend([Zero(16), Zero(4 * count * rows)]);
    let p = params::Matmul { blocks: blocks as u32, rows: rows as u32, y_stride: rows as u32, ..Default::default() };
    Case {
        name: format!("{}, {count} tokens", product.variant.label()),
        grid: Grid::Rows { workgroups: (rows as u32).div_ceil(product.rows), tokens: product.tokens },
        variant: product.variant,
        params: bytes_of(&p),
        buffers,
        shape: tokens(count),
        weight_bytes: format.bytes(rows, blocks) as u64,
    }
}

/// Gates and ups for one token that end in activations.
fn gated_product(format: Format, product: Product) -> Case {
    let (rows, blocks) = (2 * HIDDEN, row_blocks(HIDDEN));
    let streams = format.stream_bytes(rows, blocks);
    let mut buffers: Vec<Buffer> = streams.into_iter().filter(|bytes| *bytes > 0).map(Zero).collect();
    buffers.extend(act_buffers(Act::Q8, 1, HIDDEN, 1));
    buffers.push(Zero(16));
    buffers.extend(act_buffers(Act::Q8, 1, HIDDEN, 1));
    let p = params::Matmul { blocks: blocks as u32, rows: rows as u32, y_stride: rows as u32, ..Default::default() };
    Case {
        name: format!("{}, 1 token", product.variant.label()),
        grid: Grid::Rows { workgroups: (rows as u32).div_ceil(product.rows), tokens: 1 },
        variant: product.variant,
        params: bytes_of(&p),
        buffers,
        shape: tokens(1),
        weight_bytes: format.bytes(rows, blocks) as u64,
    }
}

/// The kernels that go by element: embed, RMSNorm, to activations, SwiGLU.
fn flat(profile: &Profile, act: Act) -> Vec<Case> {
    let (blocks, lanes) = (row_blocks(HIDDEN), profile.act_lanes());
    let (b, hidden) = (blocks as u32, HIDDEN as u32);
    let grid = Grid::Flat { items: b, workgroup: profile.flat };
    let mut cases = Vec::new();
    if act == Act::Q8 {
        let streams = Format::Q8_0.stream_bytes(1024, blocks).into_iter().filter(|bytes| *bytes > 0);
        let p = params::Embed { blocks: b, hidden, rows: 1024, ..Default::default() };
        cases.push(Case {
            name: format!("embed Q8_0, {MANY} tokens"),
            variant: profile.embed(Format::Q8_0),
            params: bytes_of(&p),
            buffers: streams.map(Zero).chain([Zero(16 * MANY), Zero(4 * MANY * HIDDEN)]).collect(),
            grid,
            shape: tokens(MANY),
            weight_bytes: 0,
        });
    }
    let p = params::RmsNorm { hidden, blocks: b, act_lanes: 1, eps: 1e-6, ..Default::default() };
    let [words, scales] = act_buffers(act, 1, HIDDEN, 1);
    cases.push(Case {
        name: format!("{}, 1 token", profile.rmsnorm(act).label()),
        variant: profile.rmsnorm(act),
        params: bytes_of(&p),
        buffers: vec![Zero(4 * HIDDEN), Zero(4 * HIDDEN), Zero(16), words, scales],
        grid: Grid::Each,
        shape: tokens(1),
        weight_bytes: 0,
    });
    let to_act = params::ToAct { width: hidden, blocks: b, act_lanes: lanes, ..Default::default() };
    let swiglu = params::SwiGlu { width: hidden, blocks: b, act_lanes: lanes, paired: 1, ..Default::default() };
    for (variant, inputs, params) in
        [(profile.to_act(act), 1, bytes_of(&to_act)), (profile.swiglu(act), 2, bytes_of(&swiglu))]
    {
        let [words, scales] = act_buffers(act, MANY, HIDDEN, lanes);
        cases.push(Case {
            name: format!("{}, {MANY} tokens", variant.label()),
            variant,
            params,
            buffers: vec![Zero(4 * inputs * MANY * HIDDEN), words, scales],
            grid,
            shape: tokens(MANY),
            weight_bytes: 0,
        });
    }
    cases
}

/// The KV write, both ways to attend and the merge of splits.
fn attention(profile: &Profile) -> Vec<Case> {
    let (heads, kv_heads, dim) = (HEADS as u32, KV_HEADS as u32, HEAD_DIM as u32);
    let splits = (DEPTH + 1).div_ceil(SPLIT);
    let page_count = (DEPTH + 1).div_ceil(PAGE).max(MANY.div_ceil(PAGE));
    let pages = || Words((0..page_count as u32).collect());
    let cache = || Zero(page_count * PAGE * KV_HEADS * HEAD_DIM * 2);
    let rows = |count: usize| Zero(4 * count * HEADS * HEAD_DIM);
    let prompt = || Words((0..MANY as u32).flat_map(|i| [0, i, 0, 0]).collect());
    let deep = || Words(vec![0, DEPTH as u32, 0, 0]);
    let kv = KvType::F16;
    let pairs = dim / 2;
    let tiles: Vec<u32> = (0..MANY as u32)
        .step_by(profile.prefill_tile as usize)
        .flat_map(|first| [first, profile.prefill_tile.min(MANY as u32 - first), 0, 0])
        .collect();
    let many = Shape { tiles: tiles.len() as u32 / 4, ..tokens(MANY) };
    let one = Shape { splits: splits as u32, ..tokens(1) };
    let parts = HEADS * splits;

    let rope = params::RopeKv { heads, kv_heads, kv_heads_here: kv_heads, pairs, scale: 0.1, ..Default::default() };
    let prefill = params::AttnPrefill { heads, kv_heads, kv_heads_here: kv_heads, ..Default::default() };
    let splits = splits as u32;
    let decode = params::AttnDecode { heads, kv_heads, kv_heads_here: kv_heads, splits, ..Default::default() };
    let blocks = row_blocks(HEADS * HEAD_DIM) as u32;
    let reduce = params::AttnReduce { heads, splits, blocks, act_lanes: 1, ..Default::default() };
    let (decoder, per_group) = profile.attn_decode(kv, dim, GROUP as u32);
    let [words, scales] = act_buffers(Act::Q8, 1, HEADS * HEAD_DIM, 1);
    let short = profile.attn_short(kv, Act::Q8, dim, GROUP as u32).map(|(variant, _)| {
        let mut buffers = vec![rows(1), cache(), cache(), Words(vec![0, SPLIT as u32 - 1, 0, 0]), pages()];
        buffers.extend(act_buffers(Act::Q8, 1, HEADS * HEAD_DIM, 1));
        Case {
            name: format!("attn_short, at position {}", SPLIT - 1),
            variant,
            params: bytes_of(&decode),
            buffers,
            grid: Grid::Splits { x: heads / per_group },
            shape: Shape { splits: 1, ..tokens(1) },
            weight_bytes: 0,
        }
    });
    let case = |name: String, variant, params, buffers, grid, shape| Case {
        name,
        variant,
        params,
        buffers,
        grid,
        shape,
        weight_bytes: 0,
    };
    let cases = [
        case(
            format!("rope_kv, {MANY} tokens"),
            profile.rope_kv(kv, dim),
            bytes_of(&rope),
            vec![
                Zero(4 * MANY * (HEADS + 2 * KV_HEADS) * HEAD_DIM),
                Zero(16),
                prompt(),
                pages(),
                Zero(8 * MANY * pairs as usize),
                rows(MANY),
                cache(),
                cache(),
            ],
            Grid::Flat { items: kv_heads * (GROUP as u32 + 2) * (dim / 4 - pairs / 4), workgroup: profile.flat },
            many,
        ),
        case(
            format!("attn_prefill, {MANY} tokens"),
            profile.attn_prefill(kv, dim),
            bytes_of(&prefill),
            vec![rows(MANY), cache(), cache(), prompt(), pages(), Words(tiles), rows(MANY)],
            Grid::Tiles { heads },
            many,
        ),
        case(
            format!("attn_decode, at position {DEPTH}"),
            decoder,
            bytes_of(&decode),
            vec![rows(1), cache(), cache(), deep(), pages(), Zero(4 * parts * HEAD_DIM), Zero(8 * parts)],
            Grid::Splits { x: heads / per_group },
            one,
        ),
        case(
            format!("attn_reduce, at position {DEPTH}"),
            profile.attn_reduce(Act::Q8, dim),
            bytes_of(&reduce),
            vec![Zero(4 * parts * HEAD_DIM), Zero(8 * parts), deep(), words, scales],
            Grid::Flat { items: blocks, workgroup: profile.flat },
            one,
        ),
    ];
    cases.into_iter().chain(short).collect()
}

fn top_k(profile: &Profile) -> [Case; 3] {
    let chunks = VOCAB.div_ceil(TOP_K_CHUNK as usize);
    let p = params::TopK { tokens: 0, vocab: VOCAB as u32, chunks: chunks as u32 };
    let logits = || Words((0..VOCAB as u32).map(|i| ((i * 7919 % 10_007) as f32 / 500.0).to_bits()).collect());
    let outputs = || Words(vec![0, 1, 1.0f32.to_bits(), 1]);
    let [best, stats] = [8 * chunks * TOP_K as usize, 16 * chunks];
    let case = |kernel: Kernel, buffers, grid| Case {
        name: format!("{}, {VOCAB} logits", kernel.entry().name),
        variant: profile.top_k(kernel),
        params: bytes_of(&p),
        buffers,
        grid,
        shape: tokens(1),
        weight_bytes: 0,
    };
    [
        case(Kernel::LseChunk, vec![logits(), Zero(stats)], Grid::Chunks { chunks: chunks as u32 }),
        case(
            Kernel::TopkChunk,
            vec![logits(), outputs(), Zero(best), Zero(stats)],
            Grid::Chunks { chunks: chunks as u32 },
        ),
        case(
            Kernel::TopkMerge,
            vec![logits(), outputs(), Zero(best), Zero(stats), Zero(stats), Zero(8 * (TOP_K as usize + 2))],
            Grid::Each,
        ),
    ]
}

/// The penalties of an answer.
fn edits(profile: &Profile) -> Case {
    let edits: Vec<Edit> = (0..EDITS as u32).map(|i| Edit { place: i * 7919 % VOCAB as u32, ..Edit::NONE }).collect();
    Case {
        name: format!("edit_logits, {EDITS}"),
        variant: profile.edit_logits(),
        params: bytes_of(&params::EditLogits { tokens: 0, zero: 0 }),
        buffers: vec![Words(bytemuck::cast_slice(&edits).to_vec()), Zero(4 * VOCAB), Zero(4 * EDITS)],
        grid: Grid::Rows { workgroups: 1, tokens: profile.flat },
        shape: tokens(EDITS),
        weight_bytes: 0,
    }
}

fn kernels(c: &mut Criterion) {
    let adapter = Adapter::choose(&Adapter::all(), &[], 1).expect("a Vulkan adapter").remove(0);
    let mut gpu = Gpu::open(&adapter, adapter.profile(), false).expect("the adapter opens");
    let profile = *gpu.profile();
    let mut group = c.benchmark_group(format!("kernels, {} profile", profile.name));
    group.measurement_time(Duration::from_secs(3)).sample_size(20);
    for case in all(&profile) {
        let mut buffers = Vec::new();
        let mut writes: Vec<(BufferId, &[u8])> = Vec::new();
        for buffer in &case.buffers {
            let bytes = match buffer {
                Zero(bytes) => *bytes,
                Words(words) => 4 * words.len(),
            };
            let id = gpu.create(&case.name, bytes).expect("the device has room");
            buffers.push(id);
            if let Words(words) = buffer {
                writes.push((id, bytemuck::cast_slice(words)));
            }
        }
        let op = Op {
            variant: case.variant,
            params: case.params,
            buffers,
            grid: case.grid,
            count: Count::Tokens,
            note: String::new(),
            weight_bytes: case.weight_bytes,
            operations: 0,
            split_operations: 0,
        };
        let program = gpu.prepare(Program { ops: vec![op] }).expect("the driver takes the kernel");
        let programs = [(program, case.shape)];
        gpu.run(&Run { programs: &programs, writes: &writes, reads: &[], next: &[] }).expect("the device works");
        if case.weight_bytes > 0 {
            group.throughput(Throughput::Bytes(case.weight_bytes));
        } else {
            group.throughput(Throughput::Elements(case.shape.tokens.into()));
        }
        let again = Run { programs: &programs, writes: &[], reads: &[], next: &programs };
        group.bench_function(&case.name, |b| b.iter(|| gpu.run(&again).expect("the device works")));
    }
    group.finish();
}

criterion_group!(benches, kernels);
criterion_main!(benches);
