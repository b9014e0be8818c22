//! The dispatches of the self-test. Shapes are multiples of nothing where a format allows it.

use std::cell::RefCell;

use bytemuck::bytes_of;
use half::f16;
use pp_shaders::profile::{TOP_K, TOP_K_CHUNK};
use pp_shaders::{Act, Edit, Format, Kernel, KvType, PAGE, Profile, SPLIT, Variant, params, reference};

use super::Compare;
use crate::checkpoint::DType;
use crate::program::{Grid, Shape};
use crate::quant::{Packed, device_format, row_blocks};

/// One dispatch with its inputs.
pub(super) struct Case {
    pub(super) variant: Variant,
    pub(super) params: Vec<u8>,
    pub(super) buffers: Vec<Vec<u32>>,
    pub(super) grid: Grid,
    pub(super) shape: Shape,
    /// Buffers that it writes.
    pub(super) outputs: Vec<(usize, Compare)>,
}

/// Head size of the attention cases; the commonest.
const HEAD_DIM: usize = 64;
/// Their heads: three query heads share a kv head.
const KV_HEADS: usize = 2;
const GROUP: usize = 3;
const HEADS: usize = KV_HEADS * GROUP;

/// Every kernel, as `profile` asks for it.
pub(super) fn all(profile: &Profile) -> Vec<Case> {
    let mut random = Random(1);
    let mut cases = vec![embed(&mut random, profile)];
    for dtype in [DType::Q4_0, DType::Q4_K, DType::Q6_K, DType::Q8_0, DType::F16] {
        let quantised = device_format(dtype).is_quantised();
        cases.extend(products(&mut random, profile, dtype, if quantised { Act::Q8 } else { Act::F32 }));
    }
    cases.extend(products(&mut random, profile, DType::Q4_K, Act::F32));
    cases.extend(gated_product(&mut random, profile, DType::Q4_0, Act::Q8));
    cases.extend(gated_product(&mut random, profile, DType::F16, Act::F32));
    cases.push(rmsnorm(&mut random, profile));
    cases.extend(activations_of(&mut random, profile));
    cases.extend(attention(&mut random, profile));
    cases.extend(top_k(&mut random, profile));
    cases.extend(edits(&mut random, profile));
    cases
}

fn embed(random: &mut Random, profile: &Profile) -> Case {
    let (rows, cols, tokens) = (21, 96, 5);
    let mut buffers = random.matrix(DType::Q8_0, rows, cols, profile);
    let out = buffers.len() + 1;
    buffers.push((0..tokens).flat_map(|_| [random.below(rows), 0, 0, 0]).collect());
    buffers.push(vec![0; tokens * cols]);
    let blocks = row_blocks(cols) as u32;
    let p = params::Embed { tokens: 0, blocks, hidden: cols as u32, first_row: 0, rows: rows as u32 };
    Case {
        variant: profile.embed(Format::Q8_0),
        params: bytes_of(&p).to_vec(),
        buffers,
        grid: Grid::Flat { items: blocks, workgroup: profile.flat },
        shape: tokens_only(tokens),
        outputs: vec![(out, Compare::Relative(2e-6))],
    }
}

/// A product for one token and one for many.
fn products(random: &mut Random, profile: &Profile, dtype: DType, act: Act) -> [Case; 2] {
    let format = device_format(dtype);
    let (rows, cols) = (35, 512);
    [(profile.matvec(format, act, 1), 1, 1), (profile.matmul(format, act), profile.act_lanes(), 13)].map(
        |(product, lanes, tokens)| {
            let mut buffers = random.matrix(dtype, rows, cols, profile);
            buffers.extend(activations(random, profile, act, tokens, cols, lanes));
            let out = buffers.len() + 1;
            let stride = rows + 3;
            buffers.extend([random.floats(rows), random.floats(tokens * stride)]);
            let p = params::Matmul {
                tokens: 0,
                blocks: row_blocks(cols) as u32,
                rows: rows as u32,
                y_stride: stride as u32,
                y_offset: 2,
                flags: params::ADD_BIAS | params::ADD_TO_Y,
            };
            Case {
                grid: Grid::Rows { workgroups: (rows as u32).div_ceil(product.rows), tokens: product.tokens },
                variant: product.variant,
                params: bytes_of(&p).to_vec(),
                buffers,
                shape: tokens_only(tokens),
                outputs: vec![(out, Compare::Relative(2e-5))],
            }
        },
    )
}

/// Gates and ups for one token that end in activations, where the profile has such a kernel.
fn gated_product(random: &mut Random, profile: &Profile, dtype: DType, act: Act) -> Option<Case> {
    let format = device_format(dtype);
    let (rows, cols) = (80, 256);
    let product = profile.matvec_swiglu(format, act, Act::Q8)?;
    let mut buffers = random.matrix(dtype, rows, cols, profile);
    buffers.extend(activations(random, profile, act, 1, cols, 1));
    let out = buffers.len() + 1;
    let blocks = row_blocks(rows / 2);
    buffers.extend([random.floats(rows), vec![0; blocks * Act::Q8.block_words()], vec![0; 2 * blocks]]);
    let p = params::Matmul {
        tokens: 0,
        blocks: row_blocks(cols) as u32,
        rows: rows as u32,
        y_stride: rows as u32,
        y_offset: 0,
        flags: params::ADD_BIAS,
    };
    Some(Case {
        grid: Grid::Rows { workgroups: (rows as u32).div_ceil(product.rows), tokens: 1 },
        variant: product.variant,
        params: bytes_of(&p).to_vec(),
        buffers,
        shape: tokens_only(1),
        outputs: vec![(out, Compare::Bytes), (out + 1, Compare::Relative(2e-3))],
    })
}

fn rmsnorm(random: &mut Random, profile: &Profile) -> Case {
    let (tokens, width) = (3, 576);
    let blocks = row_blocks(width);
    let p = params::RmsNorm {
        tokens: 0,
        hidden: width as u32,
        blocks: blocks as u32,
        act_lanes: 1,
        use_rows: 0,
        eps: 1e-5,
    };
    Case {
        variant: profile.rmsnorm(Act::Q8),
        params: bytes_of(&p).to_vec(),
        buffers: vec![
            random.floats(tokens * width),
            random.floats(width),
            vec![0; 4],
            vec![0; tokens * blocks * Act::Q8.block_words()],
            vec![0; 2 * tokens * blocks],
        ],
        grid: Grid::Each,
        shape: tokens_only(tokens),
        outputs: vec![(3, Compare::Bytes), (4, Compare::Relative(2e-3))],
    }
}

/// To activations, straight and through SwiGLU.
fn activations_of(random: &mut Random, profile: &Profile) -> [Case; 2] {
    let (tokens, width) = (9usize, 160);
    let (blocks, lanes) = (row_blocks(width), profile.act_lanes());
    let padded = tokens.next_multiple_of(lanes as usize);
    let (w, b) = (width as u32, blocks as u32);
    let to_act = params::ToAct { tokens: 0, width: w, blocks: b, act_lanes: lanes };
    let swiglu = params::SwiGlu { tokens: 0, width: w, blocks: b, act_lanes: lanes, paired: 1 };
    let cases = [
        (profile.to_act(Act::F32), bytes_of(&to_act).to_vec(), Act::F32, 1),
        (profile.swiglu(Act::Q8), bytes_of(&swiglu).to_vec(), Act::Q8, 2),
    ];
    cases.map(|(variant, params, act, inputs)| {
        let words = if act == Act::Q8 { Compare::Bytes } else { Compare::Relative(2e-5) };
        Case {
            variant,
            params,
            buffers: vec![
                random.floats(inputs * tokens * width),
                vec![0; padded * blocks * act.block_words()],
                vec![0; 2 * padded * blocks],
            ],
            grid: Grid::Flat { items: blocks as u32, workgroup: profile.flat },
            shape: tokens_only(tokens),
            outputs: vec![(1, words), (2, Compare::Relative(2e-3))],
        }
    })
}

/// The KV write, both ways to attend, and the merge of splits, for two tokens deep in one sequence and five at the
/// start of another.
fn attention(random: &mut Random, profile: &Profile) -> Vec<Case> {
    const SPLITS: usize = 2;
    let per_sequence = SPLITS * SPLIT / PAGE;
    let page_count = 2 * per_sequence;
    let mut pages: Vec<u32> = (0..page_count as u32).collect();
    (1..page_count).for_each(|i| pages.swap(i, random.below(i + 1) as usize));
    let places = [(290, 2), (0, 5)];
    let (mut tokens, mut tiles) = (Vec::new(), Vec::new());
    for (sequence, (start, count)) in places.into_iter().enumerate() {
        tiles.extend([(tokens.len() / 4) as u32, count, 0, 0]);
        (0..count).for_each(|i| tokens.extend([0, start + i, (sequence * per_sequence) as u32, 0]));
    }
    let count = tokens.len() / 4;
    let cache = page_count * PAGE * KV_HEADS * HEAD_DIM / 2;
    let (keys, values) = (random.halves(cache), random.halves(cache));
    let q: Vec<u32> = (0..count * HEADS * HEAD_DIM).map(|_| (random.float() / 8.0).to_bits()).collect();
    let shape =
        Shape { tokens: count as u32, tiles: (tiles.len() / 4) as u32, splits: SPLITS as u32, ..Shape::default() };
    let (heads, kv_heads) = (HEADS as u32, KV_HEADS as u32);
    let kv = KvType::F16;

    let pairs = HEAD_DIM as u32 / 2;
    let rotation = (0..count * pairs as usize).flat_map(|_| {
        let angle = 3.0 * random.float();
        [angle.cos().to_bits(), angle.sin().to_bits()]
    });
    let rotation: Vec<u32> = rotation.collect();
    let p = params::RopeKv {
        tokens: 0,
        heads,
        kv_heads,
        first_kv: 0,
        kv_heads_here: kv_heads,
        pairs,
        use_norms: 1,
        scale: 0.125,
        eps: 1e-6,
    };
    let rope = Case {
        variant: profile.rope_kv(kv, HEAD_DIM as u32),
        params: bytes_of(&p).to_vec(),
        buffers: vec![
            random.floats(count * (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            random.floats(2 * HEAD_DIM),
            tokens.clone(),
            pages.clone(),
            rotation,
            vec![0; count * HEADS * HEAD_DIM],
            keys.clone(),
            values.clone(),
        ],
        grid: Grid::Flat {
            items: kv_heads * (GROUP as u32 + 2) * (HEAD_DIM as u32 / 4 - pairs / 4),
            workgroup: profile.flat,
        },
        shape,
        outputs: vec![(5, Compare::Relative(2e-5)), (6, Compare::Halves), (7, Compare::Halves)],
    };

    let p = params::AttnPrefill { tokens: 0, heads, kv_heads, first_kv: 0, kv_heads_here: kv_heads };
    let prefill = Case {
        variant: profile.attn_prefill(kv, HEAD_DIM as u32),
        params: bytes_of(&p).to_vec(),
        buffers: vec![
            q.clone(),
            keys.clone(),
            values.clone(),
            tokens.clone(),
            pages.clone(),
            tiles,
            vec![0; count * HEADS * HEAD_DIM],
        ],
        grid: Grid::Tiles { heads },
        shape,
        outputs: vec![(6, Compare::Relative(2e-5))],
    };

    let parts = count * HEADS * SPLITS;
    let (variant, per_group) = profile.attn_decode(kv, HEAD_DIM as u32, GROUP as u32);
    let splits = SPLITS as u32;
    let p = params::AttnDecode { tokens: 0, heads, kv_heads, first_kv: 0, kv_heads_here: kv_heads, splits };
    let params = bytes_of(&p).to_vec();
    let grid = Grid::Splits { x: heads / per_group };
    let buffers = vec![q, keys, values, tokens.clone(), pages];
    // The tokens of the second sequence: their context has one split.
    let short = profile.attn_short(kv, Act::Q8, HEAD_DIM as u32, GROUP as u32).map(|(variant, _)| {
        let (few, blocks) = (count - 2, row_blocks(HEADS * HEAD_DIM));
        let mut buffers = buffers.clone();
        buffers[3] = tokens[4 * 2..].to_vec();
        buffers.extend([vec![0; few * blocks * Act::Q8.block_words()], vec![0; 2 * few * blocks]]);
        let shape = Shape { splits: 1, ..tokens_only(few) };
        let outputs = vec![(5, Compare::Bytes), (6, Compare::Relative(2e-3))];
        Case { variant, params: params.clone(), buffers, grid, shape, outputs }
    });
    let decode = Case {
        variant,
        params,
        buffers: buffers.into_iter().chain([vec![0; parts * HEAD_DIM], vec![0; 2 * parts]]).collect(),
        grid,
        shape,
        outputs: vec![(5, Compare::Relative(2e-5)), (6, Compare::Relative(2e-5))],
    };

    let blocks = row_blocks(HEADS * HEAD_DIM);
    // In tiles, as for many sequences at once.
    let act_lanes = profile.act_lanes();
    let padded = count.next_multiple_of(act_lanes as usize);
    let p = params::AttnReduce { tokens: 0, heads, splits, blocks: blocks as u32, act_lanes };
    let stat = (0..parts).flat_map(|_| [random.float().to_bits(), (1.5 + random.float()).to_bits()]).collect();
    let reduce = Case {
        variant: profile.attn_reduce(Act::Q8, HEAD_DIM as u32),
        params: bytes_of(&p).to_vec(),
        buffers: vec![
            random.floats(parts * HEAD_DIM),
            stat,
            tokens,
            vec![0; padded * blocks * Act::Q8.block_words()],
            vec![0; 2 * padded * blocks],
        ],
        grid: Grid::Flat { items: blocks as u32, workgroup: profile.flat },
        shape,
        outputs: vec![(3, Compare::Bytes), (4, Compare::Relative(2e-3))],
    };
    [rope, prefill, decode, reduce].into_iter().chain(short).collect()
}

fn top_k(random: &mut Random, profile: &Profile) -> [Case; 2] {
    let (vocab, k_max) = (TOP_K_CHUNK as usize + 900, TOP_K as usize);
    let chunks = vocab.div_ceil(TOP_K_CHUNK as usize);
    // Many ties, so that the order of equals shows.
    let logits: Vec<u32> = (0..vocab).map(|_| ((random.below(400) as f32 - 200.0) / 16.0).to_bits()).collect();
    let outputs = vec![0, random.below(vocab), 1.25f32.to_bits(), k_max as u32];
    let p = params::TopK { tokens: 1, vocab: vocab as u32, chunks: chunks as u32 };
    let p = bytes_of(&p).to_vec();
    let chunk = Case {
        variant: profile.top_k(Kernel::TopkChunk),
        params: p.clone(),
        buffers: vec![logits.clone(), outputs.clone(), vec![0; 2 * chunks * k_max], vec![0; 4 * chunks]],
        grid: Grid::Chunks { chunks: chunks as u32 },
        shape: tokens_only(1),
        outputs: vec![(2, Compare::Equal), (3, Compare::Relative(1e-5))],
    };
    let buffers: Vec<RefCell<Vec<u32>>> = chunk.buffers.iter().cloned().map(RefCell::new).collect();
    reference::run(&chunk.variant, &p, &buffers.iter().collect::<Vec<_>>());
    let [best, stats] = [2, 3].map(|i| buffers[i].borrow().clone());
    let merge = Case {
        variant: profile.top_k(Kernel::TopkMerge),
        params: p,
        buffers: vec![logits, outputs, best, stats.clone(), stats, vec![0; 2 * (k_max + 2)]],
        grid: Grid::Each,
        shape: tokens_only(1),
        outputs: vec![(5, Compare::TopK)],
    };
    [chunk, merge]
}

/// Edits of logits, and the log-sum-exp that is taken before them.
fn edits(random: &mut Random, profile: &Profile) -> [Case; 2] {
    let vocab = TOP_K_CHUNK as usize + 900;
    let chunks = vocab.div_ceil(TOP_K_CHUNK as usize) as u32;
    let logits: Vec<u32> = (0..vocab).map(|_| (12.0 * random.float()).to_bits()).collect();
    let edits = (0..vocab as u32).step_by(37).map(|place| {
        let repetition = 1.5 + random.float();
        let (bias, subtract) = (9.0 * random.float(), random.float());
        Edit { place, bias, repetition, reciprocal: 1.0 / repetition, subtract }
    });
    let edits: Vec<Edit> = edits.collect();
    let p = params::TopK { tokens: 0, vocab: vocab as u32, chunks };
    let lse = Case {
        variant: profile.top_k(Kernel::LseChunk),
        params: bytes_of(&p).to_vec(),
        buffers: vec![logits.clone(), vec![0; 4 * chunks as usize]],
        grid: Grid::Chunks { chunks },
        shape: tokens_only(1),
        outputs: vec![(1, Compare::Relative(1e-5))],
    };
    let edit = Case {
        variant: profile.edit_logits(),
        params: bytes_of(&params::EditLogits { tokens: 0, zero: 0 }).to_vec(),
        buffers: vec![bytemuck::cast_slice(&edits).to_vec(), logits, vec![0; edits.len()]],
        grid: Grid::Rows { workgroups: 1, tokens: profile.flat },
        shape: tokens_only(edits.len()),
        outputs: vec![(1, Compare::Equal), (2, Compare::Equal)],
    };
    [lse, edit]
}

fn tokens_only(tokens: usize) -> Shape {
    Shape { tokens: tokens as u32, ..Shape::default() }
}

/// Activations of `tokens` rows of `width` random values, made by the twin: (words, scales).
fn activations(
    random: &mut Random,
    profile: &Profile,
    act: Act,
    tokens: usize,
    width: usize,
    lanes: u32,
) -> [Vec<u32>; 2] {
    let blocks = row_blocks(width);
    let padded = tokens.next_multiple_of(lanes as usize);
    let x = RefCell::new(random.floats(tokens * width));
    let words = RefCell::new(vec![0; padded * blocks * act.block_words()]);
    let scales = RefCell::new(vec![0; 2 * padded * blocks]);
    let p = params::ToAct { tokens: tokens as u32, width: width as u32, blocks: blocks as u32, act_lanes: lanes };
    reference::run(&profile.to_act(act), bytes_of(&p), &[&x, &words, &scales]);
    [words.into_inner(), scales.into_inner()]
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> u32 {
        (self.next() % n as u64) as u32
    }

    /// -1 .. 1
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.float().to_bits()).collect()
    }

    /// `n` words of two halves each.
    fn halves(&mut self, n: usize) -> Vec<u32> {
        let half = |v: f32| u32::from(f16::from_f32(v).to_bits());
        (0..n).map(|_| half(self.float()) | half(self.float()) << 16).collect()
    }

    /// The streams of a matrix with random quants and scales of sensible size.
    fn matrix(&mut self, dtype: DType, rows: usize, cols: usize, profile: &Profile) -> Vec<Vec<u32>> {
        let mut packed = Packed::new(device_format(dtype), rows, row_blocks(cols), profile);
        for row in 0..rows {
            let blocks = cols / dtype.block_elements();
            let data: Vec<u8> = (0..blocks).flat_map(|_| self.block(dtype)).collect();
            packed.set_row(row, dtype, &data);
        }
        let words = |bytes: &Vec<u8>| {
            let word = |b: &[u8]| u32::from_le_bytes(std::array::from_fn(|i| b.get(i).copied().unwrap_or(0)));
            bytes.chunks(4).map(word).collect()
        };
        packed.streams.iter().filter(|stream| !stream.is_empty()).map(words).collect()
    }

    /// A block as a file holds it.
    fn block(&mut self, dtype: DType) -> Vec<u8> {
        let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| self.next() as u8).collect();
        let scale = 0.01 + 0.05 * self.float().abs();
        let half = |v: f32| f16::from_f32(v).to_bits().to_le_bytes();
        match dtype {
            DType::F16 => block.copy_from_slice(&half(self.float())),
            DType::Q6_K => block[208..210].copy_from_slice(&half(0.05 * scale)),
            DType::Q4_K => {
                block[..2].copy_from_slice(&half(scale));
                block[2..4].copy_from_slice(&half(scale));
            }
            _ => block[..2].copy_from_slice(&half(scale)),
        }
        block
    }
}
