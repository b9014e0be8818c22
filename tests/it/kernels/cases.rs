//! Dispatches to compare, with random inputs.

use std::cell::RefCell;

use pp_engine::checkpoint::DType;
use pp_engine::program::{Grid, Shape};
use pp_engine::quant::{Packed, device_format, row_blocks};
use pp_shaders::profile::{HEAD_DIMS, Product, TOP_K, TOP_K_CHUNK};
use pp_shaders::{Act, Edit, Format, Kernel, KvType, PAGE, Profile, SPLIT, Variant, params, reference};

/// How an output may differ.
#[derive(Clone, Debug)]
pub enum Compare {
    /// Floats, by a share of the largest.
    Relative(f64),
    /// Words, not at all.
    Equal,
    /// Signed bytes, by one.
    Bytes,
    /// Pairs of halves, by some units in the last place.
    Halves,
    /// top-k results: ids and logits equal, log-sum-exps close.
    TopK,
}

impl Compare {
    pub fn check(&self, expected: &[u32], found: &[u32]) -> Result<(), String> {
        let floats = |words: &[u32]| words.iter().map(|w| f64::from(f32::from_bits(*w))).collect::<Vec<_>>();
        match self {
            Compare::Relative(share) => {
                let (expected, found) = (floats(expected), floats(found));
                let bound = share * expected.iter().fold(0.0f64, |top, v| top.max(v.abs())) + 1e-30;
                match (0..expected.len()).find(|i| !within(expected[*i], found[*i], bound)) {
                    Some(i) => Err(format!("[{i}] is {} for {}, bound {bound:e}", found[i], expected[i])),
                    None => Ok(()),
                }
            }
            Compare::Equal => match (0..expected.len()).find(|i| expected[*i] != found[*i]) {
                Some(i) => Err(format!("[{i}] is {:#x} for {:#x}", found[i], expected[i])),
                None => Ok(()),
            },
            Compare::Bytes => {
                let bytes =
                    |w: &[u32]| w.iter().flat_map(|w| w.to_le_bytes()).map(|b| i32::from(b as i8)).collect::<Vec<_>>();
                let (expected, found) = (bytes(expected), bytes(found));
                match (0..expected.len()).find(|i| (expected[*i] - found[*i]).abs() > 1) {
                    Some(i) => Err(format!("byte {i} is {} for {}", found[i], expected[i])),
                    None => Ok(()),
                }
            }
            Compare::Halves => {
                let halves = |w: &[u32]| {
                    w.iter().flat_map(|w| [*w as u16, (*w >> 16) as u16]).map(half_to_f64).collect::<Vec<_>>()
                };
                let (expected, found) = (halves(expected), halves(found));
                match (0..expected.len()).find(|i| !within(expected[*i], found[*i], 2e-3 * expected[*i].abs() + 1e-4)) {
                    Some(i) => Err(format!("half {i} is {} for {}", found[i], expected[i])),
                    None => Ok(()),
                }
            }
            Compare::TopK => {
                let row = 2 * (TOP_K as usize + 2);
                for (e, f) in expected.chunks(row).zip(found.chunks(row)) {
                    Compare::Relative(1e-5).check(&e[..2], &f[..2])?;
                    Compare::Equal.check(&e[2..], &f[2..])?;
                }
                Ok(())
            }
        }
    }
}

/// Whether the two are that close; what is not a number is close to nothing.
fn within(expected: f64, found: f64, bound: f64) -> bool {
    (expected - found).abs() <= bound
}

fn half_to_f64(bits: u16) -> f64 {
    let (sign, exponent, fraction) = (bits >> 15, i32::from(bits >> 10 & 31), f64::from(bits & 1023) / 1024.0);
    let magnitude = if exponent == 0 { fraction * 2f64.powi(-14) } else { (1.0 + fraction) * 2f64.powi(exponent - 15) };
    if sign == 1 { -magnitude } else { magnitude }
}

/// One dispatch with its inputs.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub variant: Variant,
    pub params: Vec<u8>,
    pub buffers: Vec<Vec<u32>>,
    pub grid: Grid,
    pub shape: Shape,
    /// Buffers that it writes.
    pub outputs: Vec<(usize, Compare)>,
}

impl Case {
    /// Whether a very slow driver can be asked to do it.
    pub fn is_small(&self) -> bool {
        self.buffers.iter().map(Vec::len).sum::<usize>() < 60_000
    }
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

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// -1 .. 1
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.float().to_bits()).collect()
    }

    /// A row of a matrix as a file holds it: random quants, scales of sensible size.
    fn row(&mut self, dtype: DType, cols: usize) -> Vec<u8> {
        let half = |v: f32| half_bits(v).to_le_bytes();
        let mut row = Vec::new();
        for _ in 0..cols / dtype.block_elements() {
            let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| self.next() as u8).collect();
            let (d, m) = (0.01 + 0.05 * self.float().abs(), 0.3 * self.float());
            match dtype {
                DType::F32 => block = self.float().to_le_bytes().to_vec(),
                DType::F16 => block = half(self.float()).to_vec(),
                DType::BF16 => block = self.float().to_le_bytes()[2..].to_vec(),
                DType::Q6_K => block[208..210].copy_from_slice(&half(d * 0.05)),
                DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => block[..2].copy_from_slice(&half(d)),
                _ => {
                    block[..2].copy_from_slice(&half(d));
                    block[2..4].copy_from_slice(&half(if matches!(dtype, DType::Q4_K | DType::Q5_K) { d } else { m }));
                }
            }
            row.extend(block);
        }
        row
    }
}

/// A half of a float in the normal range, cut.
fn half_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    let exponent = (bits >> 23 & 255) as i32 - 112;
    if exponent <= 0 { 0 } else { (bits >> 16 & 0x8000) as u16 | (exponent as u16) << 10 | (bits >> 13 & 1023) as u16 }
}

/// A file type that becomes each device format.
fn dtype_of(format: Format) -> DType {
    DType::ALL
        .into_iter()
        .find(|dtype| device_format(*dtype) == format && *dtype != DType::Q5_0)
        .expect("a file type for every format")
}

fn streams(random: &mut Random, format: Format, rows: usize, cols: usize, profile: &Profile) -> Vec<Vec<u32>> {
    let mut packed = Packed::new(format, rows, row_blocks(cols), profile);
    for row in 0..rows {
        packed.set_row(row, dtype_of(format), &random.row(dtype_of(format), cols));
    }
    let used = packed.streams.iter().filter(|stream| !stream.is_empty());
    used.map(|bytes| {
        bytes.chunks(4).map(|b| u32::from_le_bytes(std::array::from_fn(|i| *b.get(i).unwrap_or(&0)))).collect()
    })
    .collect()
}

fn bytes<T: Copy>(params: &T) -> Vec<u8> {
    // SAFETY: every params block is plain words.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(params).cast::<u8>(), size_of::<T>()) }.to_vec()
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
    reference::run(&profile.to_act(act), &bytes(&p), &[&x, &words, &scales]);
    [words.into_inner(), scales.into_inner()]
}

/// Cases for every kernel as a profile asks for it.
pub fn all(profile: &Profile) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut random = Random(1);
    for format in Format::ALL {
        embed(&mut cases, &mut random, profile, format);
        for act in [Act::F32, Act::Q8] {
            if act == Act::F32 || format.is_quantised() {
                products(&mut cases, &mut random, profile, format, act);
                gated_products(&mut cases, &mut random, profile, format, act);
            }
        }
    }
    for act in [Act::F32, Act::Q8] {
        for (tokens, width) in [(1, 576), (3, 100), (19, 1536), (9, 8192)] {
            norm_and_activations(&mut cases, &mut random, profile, act, tokens, width);
        }
    }
    for head_dim in HEAD_DIMS {
        for kv in [KvType::F32, KvType::F16] {
            attention(&mut cases, &mut random, profile, kv, head_dim as usize);
        }
    }
    for vocab in [384, 49152, 151_936] {
        top_k(&mut cases, &mut random, profile, vocab);
    }
    // The last: about as many edits as a step may have.
    for (vocab, count) in [(384, 1), (5000, 700), (151_936, 32_000)] {
        edits(&mut cases, &mut random, profile, vocab, count);
    }
    cases
}

fn embed(cases: &mut Vec<Case>, random: &mut Random, profile: &Profile, format: Format) {
    let (rows, cols, tokens) = (37, if format.superblock() > 1 { 768 } else { 96 }, 5);
    let mut buffers = streams(random, format, rows, cols, profile);
    let ids = (0..tokens).flat_map(|_| [random.below(2 * rows) as u32, 0, 0, 0]).collect();
    let out = buffers.len() + 1;
    buffers.extend([ids, random.floats(tokens * cols)]);
    let blocks = row_blocks(cols) as u32;
    // The chunk holds the rows from 20 on: other ids are left alone.
    let p = params::Embed { tokens: 0, blocks, hidden: cols as u32, first_row: 20, rows: rows as u32 };
    cases.push(Case {
        name: format!("embed {}", format.name()),
        variant: profile.embed(format),
        params: bytes(&p),
        buffers,
        grid: Grid::Flat { items: blocks, workgroup: profile.flat },
        shape: Shape { tokens: tokens as u32, ..Shape::default() },
        outputs: vec![(out, Compare::Relative(2e-6))],
    });
}

fn products(cases: &mut Vec<Case>, random: &mut Random, profile: &Profile, format: Format, act: Act) {
    let widths: &[(usize, usize)] = if format.superblock() > 1 {
        &[(75, 256), (70, 2560), (10, 8192)]
    } else {
        &[(75, 576), (7, 96), (130, 1536), (10, 8192)]
    };
    for (rows, cols) in widths {
        let choices = [1, 2, 4, 8].map(|cols| (profile.matvec(format, act, cols), 1)).into_iter();
        for (product, lanes) in choices.chain([(profile.matmul(format, act), profile.act_lanes())]) {
            let counts: &[usize] = if lanes == 1 { &[product.tokens as usize, 8] } else { &[9, 70] };
            for tokens in counts {
                for flags in if rows % 2 == 1 { [params::ADD_BIAS | params::ADD_TO_Y] } else { [0] } {
                    let (product, tokens) = (product.clone(), *tokens);
                    cases.push(product_case(random, profile, format, act, product, lanes, tokens, *rows, *cols, flags));
                }
            }
        }
    }
}

/// A product of gates and ups that ends in activations; the second half of one that comes in two chunks.
fn gated_products(cases: &mut Vec<Case>, random: &mut Random, profile: &Profile, format: Format, act: Act) {
    for act_out in [Act::F32, Act::Q8] {
        let Some(product) = profile.matvec_swiglu(format, act, act_out) else { return };
        for (rows, cols) in [(80, 256), (192, 768)] {
            let (all_rows, y_offset) = (rows + 128, 128);
            let mut buffers = streams(random, format, rows, cols, profile);
            buffers.extend(activations(random, profile, act, 1, cols, 1));
            let out = buffers.len() + 1;
            let blocks = all_rows / 2 / 32 + usize::from(all_rows / 2 % 32 > 0);
            buffers.extend([random.floats(rows), vec![0; blocks * act_out.block_words()], vec![0; 2 * blocks]]);
            let p = params::Matmul {
                tokens: 0,
                blocks: row_blocks(cols) as u32,
                rows: rows as u32,
                y_stride: all_rows as u32,
                y_offset: y_offset as u32,
                flags: params::ADD_BIAS,
            };
            let words_like = if act_out == Act::Q8 { Compare::Bytes } else { Compare::Relative(2e-5) };
            cases.push(Case {
                name: format!("{} {rows} x {cols}", product.variant.label()),
                variant: product.variant.clone(),
                params: bytes(&p),
                buffers,
                grid: Grid::Rows { workgroups: (rows as u32).div_ceil(product.rows), tokens: 1 },
                shape: Shape { tokens: 1, ..Shape::default() },
                outputs: vec![(out, words_like), (out + 1, Compare::Relative(2e-3))],
            });
        }
    }
}

#[expect(clippy::too_many_arguments, reason = "a case has that many sides")]
fn product_case(
    random: &mut Random,
    profile: &Profile,
    format: Format,
    act: Act,
    product: Product,
    lanes: u32,
    tokens: usize,
    rows: usize,
    cols: usize,
    flags: u32,
) -> Case {
    let mut buffers = streams(random, format, rows, cols, profile);
    buffers.extend(activations(random, profile, act, tokens, cols, lanes));
    let stride = rows + 5;
    let out = buffers.len() + 1;
    buffers.extend([random.floats(rows), random.floats(tokens * stride)]);
    let p = params::Matmul {
        tokens: 0,
        blocks: row_blocks(cols) as u32,
        rows: rows as u32,
        y_stride: stride as u32,
        y_offset: 3,
        flags,
    };
    Case {
        name: format!("{} {tokens} tokens, {rows} x {cols}, flags {flags}", product.variant.label()),
        variant: product.variant,
        params: bytes(&p),
        buffers,
        grid: Grid::Rows { workgroups: (rows as u32).div_ceil(product.rows), tokens: product.tokens },
        shape: Shape { tokens: tokens as u32, ..Shape::default() },
        outputs: vec![(out, Compare::Relative(2e-5))],
    }
}

fn norm_and_activations(
    cases: &mut Vec<Case>,
    random: &mut Random,
    profile: &Profile,
    act: Act,
    tokens: usize,
    width: usize,
) {
    let blocks = row_blocks(width);
    let words = |lanes: u32| vec![0; tokens.next_multiple_of(lanes as usize) * blocks * act.block_words()];
    let scales = |lanes: u32| vec![0; 2 * tokens.next_multiple_of(lanes as usize) * blocks];
    let shape = Shape { tokens: tokens as u32, ..Shape::default() };
    let words_like = if act == Act::Q8 { Compare::Bytes } else { Compare::Relative(2e-5) };
    for lanes in [1, profile.act_lanes()] {
        for use_rows in [0, 1] {
            let rows = (0..tokens).flat_map(|_| [random.below(tokens) as u32, 0, 0, 0]).collect();
            let p = params::RmsNorm {
                tokens: 0,
                hidden: width as u32,
                blocks: blocks as u32,
                act_lanes: lanes,
                use_rows,
                eps: 1e-5,
            };
            cases.push(Case {
                name: format!("rmsnorm {act:?} {tokens} x {width}, lanes {lanes}"),
                variant: profile.rmsnorm(act),
                params: bytes(&p),
                buffers: vec![random.floats(tokens * width), random.floats(width), rows, words(lanes), scales(lanes)],
                grid: Grid::Each,
                shape,
                outputs: vec![(3, words_like.clone()), (4, Compare::Relative(2e-3))],
            });
        }
        let p = params::ToAct { tokens: 0, width: width as u32, blocks: blocks as u32, act_lanes: lanes };
        let mut gates = vec![(profile.to_act(act), 1, bytes(&p))];
        for paired in [0, u32::from(width.is_multiple_of(8))] {
            let p = params::SwiGlu { tokens: 0, width: width as u32, blocks: blocks as u32, act_lanes: lanes, paired };
            gates.push((profile.swiglu(act), 2, bytes(&p)));
        }
        for (variant, factor, params) in gates {
            cases.push(Case {
                name: format!("{} {tokens} x {width}, lanes {lanes}", variant.label()),
                variant,
                params,
                buffers: vec![random.floats(factor * tokens * width), words(lanes), scales(lanes)],
                grid: Grid::Flat { items: blocks as u32, workgroup: profile.flat },
                shape,
                outputs: vec![(1, words_like.clone()), (2, Compare::Relative(2e-3))],
            });
        }
    }
}

/// Sequences of a step: (first position, tokens).
const SPANS: [(usize, usize); 3] = [(300, 1), (0, 21), (31, 3)];

fn attention(cases: &mut Vec<Case>, random: &mut Random, profile: &Profile, kv: KvType, dim: usize) {
    let splits = 2;
    for (kv_heads, group) in [(3usize, 3usize), (1, 8)] {
        let heads = kv_heads * group;
        // The second of two KV buffers where there are several heads.
        let (first_kv, here) = if kv_heads > 1 { (1, kv_heads - 1) } else { (0, 1) };
        let per_sequence = splits * SPLIT / PAGE;
        let page_count = SPANS.len() * per_sequence;
        let mut pages: Vec<u32> = (0..page_count as u32).collect();
        (1..page_count).for_each(|i| pages.swap(i, random.below(i + 1)));
        let (mut tokens, mut tiles) = (Vec::new(), Vec::new());
        for (sequence, (start, count)) in SPANS.iter().enumerate() {
            for first in (0..*count).step_by(profile.prefill_tile as usize) {
                tiles.extend([
                    (tokens.len() / 4 + first) as u32,
                    (count - first).min(profile.prefill_tile as usize) as u32,
                    0,
                    0,
                ]);
            }
            (0..*count).for_each(|i| tokens.extend([0, (start + i) as u32, (sequence * per_sequence) as u32, 0]));
        }
        let count = tokens.len() / 4;
        let cache_words = page_count * PAGE * here * dim * kv.bytes() / 4;
        let cache = |random: &mut Random| match kv {
            KvType::F32 => random.floats(cache_words),
            KvType::F16 => (0..cache_words)
                .map(|_| u32::from(half_bits(random.float())) | u32::from(half_bits(random.float())) << 16)
                .collect(),
        };
        let (keys, values) = (cache(random), cache(random));
        let q: Vec<u32> = (0..count * heads * dim).map(|_| (random.float() / (dim as f32).sqrt()).to_bits()).collect();
        let shape =
            Shape { tokens: count as u32, tiles: (tiles.len() / 4) as u32, splits: splits as u32, ..Shape::default() };
        let name = |kernel: &str| format!("{kernel} {kv:?} head {dim}, {kv_heads} kv heads of {group}");
        let (heads_u, kv_u, first_u, here_u) = (heads as u32, kv_heads as u32, first_kv as u32, here as u32);

        let pairs = if dim == 64 { 16 } else { dim as u32 / 2 };
        for use_norms in [0, 1] {
            let rotation = (0..count * pairs as usize).flat_map(|_| {
                let angle = 3.0 * random.float();
                [angle.cos().to_bits(), angle.sin().to_bits()]
            });
            let rotation: Vec<u32> = rotation.collect();
            let p = params::RopeKv {
                tokens: 0,
                heads: heads_u,
                kv_heads: kv_u,
                first_kv: first_u,
                kv_heads_here: here_u,
                pairs,
                use_norms,
                scale: 0.125,
                eps: 1e-6,
            };
            let stored = if kv == KvType::F32 { Compare::Relative(2e-5) } else { Compare::Halves };
            cases.push(Case {
                name: name("rope_kv"),
                variant: profile.rope_kv(kv, dim as u32),
                params: bytes(&p),
                buffers: vec![
                    random.floats(count * (heads + 2 * kv_heads) * dim),
                    random.floats(2 * dim),
                    tokens.clone(),
                    pages.clone(),
                    rotation,
                    random.floats(count * heads * dim),
                    keys.clone(),
                    values.clone(),
                ],
                grid: Grid::Flat {
                    items: (here * (group + 2)) as u32 * (dim as u32 / 4 - pairs / 4),
                    workgroup: profile.flat,
                },
                shape,
                outputs: vec![(5, Compare::Relative(2e-5)), (6, stored.clone()), (7, stored)],
            });
        }

        let p =
            params::AttnPrefill { tokens: 0, heads: heads_u, kv_heads: kv_u, first_kv: first_u, kv_heads_here: here_u };
        cases.push(Case {
            name: name("attn_prefill"),
            variant: profile.attn_prefill(kv, dim as u32),
            params: bytes(&p),
            buffers: vec![
                q.clone(),
                keys.clone(),
                values.clone(),
                tokens.clone(),
                pages.clone(),
                tiles,
                vec![0; count * heads * dim],
            ],
            grid: Grid::Tiles { heads: (here * group) as u32 },
            shape,
            outputs: vec![(6, Compare::Relative(2e-5))],
        });

        let few = 4;
        let parts = few * heads * splits;
        let (variant, per_group) = profile.attn_decode(kv, dim as u32, group as u32);
        let p = params::AttnDecode {
            tokens: 0,
            heads: heads_u,
            kv_heads: kv_u,
            first_kv: first_u,
            kv_heads_here: here_u,
            splits: splits as u32,
        };
        let shape = Shape { tokens: few as u32, ..shape };
        let decode = Case {
            name: name("attn_decode"),
            variant,
            params: bytes(&p),
            buffers: vec![q, keys, values, tokens.clone(), pages, vec![0; parts * dim], vec![0; 2 * parts]],
            grid: Grid::Splits { x: (here * group) as u32 / per_group },
            shape,
            outputs: vec![(5, Compare::Relative(2e-5)), (6, Compare::Relative(2e-5))],
        };
        for act in [Act::F32, Act::Q8] {
            // The tokens of the second sequence: their contexts have one split.
            let Some((variant, per_group)) = profile.attn_short(kv, act, dim as u32, group as u32) else { break };
            let mut buffers = decode.buffers[..5].to_vec();
            buffers[3] = tokens[4..4 * (1 + few)].to_vec();
            let blocks = heads * dim / 32;
            buffers.extend([vec![0; few * blocks * act.block_words()], vec![0; 2 * few * blocks]]);
            let words_like = if act == Act::Q8 { Compare::Bytes } else { Compare::Relative(2e-5) };
            cases.push(Case {
                name: name("attn_short"),
                variant,
                params: decode.params.clone(),
                buffers,
                grid: Grid::Splits { x: (here * group) as u32 / per_group },
                shape: Shape { splits: 1, ..shape },
                outputs: vec![(5, words_like), (6, Compare::Relative(2e-3))],
            });
        }
        // Also in tiles, as for many sequences at once.
        for (act, lanes) in [Act::F32, Act::Q8].into_iter().flat_map(|act| [(act, 1), (act, profile.act_lanes())]) {
            let blocks = row_blocks(heads * dim);
            let padded = few.next_multiple_of(lanes as usize);
            let p = params::AttnReduce {
                tokens: 0,
                heads: heads_u,
                splits: splits as u32,
                blocks: blocks as u32,
                act_lanes: lanes,
            };
            let stat = (0..parts).flat_map(|_| [random.float().to_bits(), (1.5 + random.float()).to_bits()]).collect();
            cases.push(Case {
                name: name("attn_reduce"),
                variant: profile.attn_reduce(act, dim as u32),
                params: bytes(&p),
                buffers: vec![
                    random.floats(parts * dim),
                    stat,
                    tokens.clone(),
                    vec![0; padded * blocks * act.block_words()],
                    vec![0; 2 * padded * blocks],
                ],
                grid: Grid::Flat { items: blocks as u32, workgroup: profile.flat },
                shape,
                outputs: vec![
                    (3, if act == Act::Q8 { Compare::Bytes } else { Compare::Relative(2e-5) }),
                    (4, Compare::Relative(2e-3)),
                ],
            });
        }
        cases.push(decode);
    }
}

fn top_k(cases: &mut Vec<Case>, random: &mut Random, profile: &Profile, vocab: usize) {
    let chunks = vocab.div_ceil(TOP_K_CHUNK as usize);
    let k_max = TOP_K as usize;
    // Logits with many ties, so that the order of equals is tested.
    let logits: Vec<u32> = (0..3 * vocab).map(|_| ((random.below(400) as f32 - 200.0) / 16.0).to_bits()).collect();
    let outputs: Vec<u32> = [1u32, 5, k_max as u32]
        .into_iter()
        .flat_map(|k| [0, random.below(vocab) as u32, 1.25f32.to_bits(), k])
        .collect();
    let p = params::TopK { tokens: 3, vocab: vocab as u32, chunks: chunks as u32 };
    let shape = Shape { tokens: 3, ..Shape::default() };
    let first = Case {
        name: format!("topk_chunk of {vocab}"),
        variant: profile.top_k(Kernel::TopkChunk),
        params: bytes(&p),
        buffers: vec![logits.clone(), outputs.clone(), vec![0; 2 * 3 * chunks * k_max], vec![0; 4 * 3 * chunks]],
        grid: Grid::Chunks { chunks: chunks as u32 },
        shape,
        outputs: vec![(2, Compare::Equal), (3, Compare::Relative(1e-5))],
    };
    let buffers: Vec<RefCell<Vec<u32>>> = first.buffers.iter().cloned().map(RefCell::new).collect();
    reference::run(&first.variant, &first.params, &buffers.iter().collect::<Vec<_>>());
    let [best, stats] = [2, 3].map(|i| buffers[i].borrow().clone());
    cases.push(first);
    cases.push(Case {
        name: format!("topk_merge of {vocab}"),
        variant: profile.top_k(Kernel::TopkMerge),
        params: bytes(&p),
        buffers: vec![logits, outputs, best, stats.clone(), stats, vec![0; 2 * 3 * (k_max + 2)]],
        grid: Grid::Each,
        shape,
        outputs: vec![(5, Compare::TopK)],
    });
}

/// Edits of two rows, some of which ban; then top-k of what they leave, with the log-sum-exp of what there was.
fn edits(cases: &mut Vec<Case>, random: &mut Random, profile: &Profile, vocab: usize, count: usize) {
    let (rows, k_max) = (2, TOP_K as usize);
    let chunks = vocab.div_ceil(TOP_K_CHUNK as usize);
    // All of the first chunk of the second row is banned where that is not all there is.
    let banned = if chunks > 1 { vocab..vocab + TOP_K_CHUNK as usize } else { 0..0 };
    let mut logits: Vec<u32> = (0..rows * vocab).map(|_| (12.0 * random.float()).to_bits()).collect();
    logits[banned.clone()].fill(f32::NEG_INFINITY.to_bits());
    let mut places: Vec<usize> = (0..rows * vocab).collect();
    (0..count).for_each(|i| places.swap(i, i + random.below(rows * vocab - i)));
    let mut edits = Vec::new();
    for place in &places[..count] {
        let bias =
            [0.0, 5.0 * random.float(), 100.0, -100.0, -1e30, 1e30, f32::NEG_INFINITY, f32::MIN][random.below(8)];
        let repetition = [1.0, 1.0 + random.float().abs(), 1.0 / 3.0, 1e3, 1e-3][random.below(5)];
        let subtract = [0.0, 3.0 * random.float(), 1e30][random.below(3)];
        let edit = Edit { place: *place as u32, bias, repetition, reciprocal: 1.0 / repetition, subtract };
        edits.extend([Edit::NONE, edit]);
    }
    let words = |edits: &[Edit]| bytemuck::cast_slice(edits).to_vec();
    let p = params::TopK { tokens: rows as u32, vocab: vocab as u32, chunks: chunks as u32 };
    let shape = Shape { tokens: rows as u32, ..Shape::default() };
    let lse = Case {
        name: format!("lse_chunk of {vocab}"),
        variant: profile.top_k(Kernel::LseChunk),
        params: bytes(&p),
        buffers: vec![logits.clone(), vec![0; 4 * rows * chunks]],
        grid: Grid::Chunks { chunks: chunks as u32 },
        shape,
        outputs: vec![(1, Compare::Relative(1e-5))],
    };
    let edit = Case {
        name: format!("edit_logits, {} of {vocab}", edits.len()),
        variant: profile.edit_logits(),
        params: bytes(&params::EditLogits { tokens: 0, zero: 0 }),
        buffers: vec![words(&edits), logits, vec![7; edits.len()]],
        grid: Grid::Rows { workgroups: 1, tokens: profile.flat },
        shape: Shape { tokens: edits.len() as u32, ..shape },
        outputs: vec![(1, Compare::Equal), (2, Compare::Equal)],
    };
    let after = |case: &Case, tokens: u32, buffer: usize| {
        let buffers: Vec<RefCell<Vec<u32>>> = case.buffers.iter().cloned().map(RefCell::new).collect();
        let params: Vec<u8> = [&tokens.to_le_bytes()[..], &case.params[4..]].concat();
        reference::run(&case.variant, &params, &buffers.iter().collect::<Vec<_>>());
        buffers[buffer].borrow().clone()
    };
    let (raw_stats, edited) = (after(&lse, rows as u32, 1), after(&edit, edits.len() as u32, 1));
    let outputs: Vec<u32> =
        (0..rows).flat_map(|_| [0, random.below(vocab) as u32, 1.25f32.to_bits(), k_max as u32]).collect();
    let chunk = Case {
        name: format!("topk_chunk of {vocab}, edited"),
        variant: profile.top_k(Kernel::TopkChunk),
        params: bytes(&p),
        buffers: vec![edited, outputs, vec![0; 2 * rows * chunks * k_max], vec![0; 4 * rows * chunks]],
        grid: Grid::Chunks { chunks: chunks as u32 },
        shape,
        outputs: vec![(2, Compare::Equal), (3, Compare::Relative(1e-5))],
    };
    let [best, stats] = [2, 3].map(|buffer| after(&chunk, rows as u32, buffer));
    let mut buffers = chunk.buffers[..2].to_vec();
    buffers.extend([best, stats, raw_stats, vec![0; 2 * rows * (k_max + 2)]]);
    let merge = Case {
        name: format!("topk_merge of {vocab}, edited"),
        variant: profile.top_k(Kernel::TopkMerge),
        params: bytes(&p),
        buffers,
        grid: Grid::Each,
        shape,
        outputs: vec![(5, Compare::TopK)],
    };
    cases.extend([lse, edit, chunk, merge]);
}
