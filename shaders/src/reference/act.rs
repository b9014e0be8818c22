//! Twins of `to_act.wgsl`, `swiglu.wgsl` and of the activation layouts in `wgsl/act`.

use std::ops::Range;

use crate::format::Act;
use crate::params;
use crate::{Arrangement, BLOCK};

use super::Call;

/// Where the blocks of tokens stand (`wgsl/act`).
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub arrangement: Arrangement,
    pub lanes: usize,
}

impl Layout {
    pub(super) fn new(call: &Call, blocks: u32, lanes: u32) -> Layout {
        Layout { arrangement: call.arrangement(blocks as usize), lanes: lanes as usize }
    }
}

/// Writes the values of one token as activations into `words` and `scales`.
pub(super) fn store(act: Act, values: &[f32], token: usize, layout: Layout, words: &mut [u32], scales: &mut [f32]) {
    store_from(act, values, token, 0..layout.arrangement.blocks, layout, words, scales);
}

/// The same for some of the token's blocks; `values` begins with the first of them.
pub(super) fn store_from(
    act: Act,
    values: &[f32],
    token: usize,
    blocks: Range<usize>,
    layout: Layout,
    words: &mut [u32],
    scales: &mut [f32],
) {
    let Layout { arrangement, lanes } = layout;
    for block in blocks.clone() {
        let first = (block - blocks.start) * BLOCK;
        let x: [f32; BLOCK] = std::array::from_fn(|k| values.get(first + k).copied().unwrap_or(0.0));
        let base = token / lanes * arrangement.blocks + arrangement.position(block);
        let lane = token % lanes;
        let mut put = |i: usize, word: u32| words[(base * act.block_words() + i) * lanes + lane] = word;
        let (scale, sum) = match act {
            Act::F32 => {
                (0..BLOCK).for_each(|k| put(k, x[k].to_bits()));
                (1.0, x.iter().sum())
            }
            Act::Q8 => {
                let amax = x.iter().fold(0.0f32, |top, v| top.max(v.abs()));
                let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
                let q = x.map(|v| (v * inverse).round_ties_even() as i8);
                (0..BLOCK / 4).for_each(|i| put(i, u32::from_le_bytes(std::array::from_fn(|c| q[4 * i + c] as u8))));
                let d = amax / 127.0;
                (d, d * q.iter().map(|&q| i32::from(q)).sum::<i32>() as f32)
            }
        };
        scales[2 * (base * lanes + lane)] = scale;
        scales[2 * (base * lanes + lane) + 1] = sum;
    }
}

/// The values of one token, read back from activations.
pub(super) fn load(act: Act, token: usize, layout: Layout, words: &[u32], scales: &[f32]) -> Vec<f32> {
    let Layout { arrangement, lanes } = layout;
    let blocks = arrangement.blocks;
    let mut values = Vec::with_capacity(blocks * BLOCK);
    for block in 0..blocks {
        let base = token / lanes * blocks + arrangement.position(block);
        let lane = token % lanes;
        let word = |i: usize| words[(base * act.block_words() + i) * lanes + lane];
        let d = scales[2 * (base * lanes + lane)];
        values.extend((0..BLOCK).map(|k| match act {
            Act::F32 => f32::from_bits(word(k)),
            Act::Q8 => d * f32::from(word(k / 4).to_le_bytes()[k % 4] as i8),
        }));
    }
    values
}

pub(super) fn to_act(call: &Call) {
    let p: params::ToAct = call.params();
    let width = p.width as usize;
    let x = call.floats(0);
    for token in 0..p.tokens as usize {
        store_row(call, &x[token * width..][..width], token, p);
    }
}

pub(super) fn swiglu(call: &Call) {
    let p: params::SwiGlu = call.params();
    let width = p.width as usize;
    let x = call.floats(0);
    for token in 0..p.tokens as usize {
        let h = gated(&x[token * 2 * width..][..2 * width], p.paired == 1);
        let p = params::ToAct { tokens: p.tokens, width: p.width, blocks: p.blocks, act_lanes: p.act_lanes };
        store_row(call, &h, token, p);
    }
}

/// silu(gate) * up, of gates before ups, or of both in turns of 8.
pub(super) fn gated(row: &[f32], paired: bool) -> Vec<f32> {
    let width = row.len() / 2;
    let place = |k: usize| if paired { (k / 8 * 16 + k % 8, k / 8 * 16 + 8 + k % 8) } else { (k, width + k) };
    (0..width).map(place).map(|(gate, up)| row[gate] / (1.0 + (-row[gate]).exp()) * row[up]).collect()
}

fn store_row(call: &Call, row: &[f32], token: usize, p: params::ToAct) {
    let act = call.variant.act.expect("an activation type");
    let layout = Layout::new(call, p.blocks, p.act_lanes);
    store(act, row, token, layout, &mut call.words_mut(1), &mut call.floats_mut(2));
}
