//! Twins of `attn_decode.wgsl`, `attn_reduce.wgsl`, `attn_short.wgsl` and `attn_prefill.wgsl`. All make the same bits of a
//! token, as the kernels do: what a split gives is rounded before splits are merged.

use super::rope_kv::kv_load;
use super::{Call, act};
use crate::{PAGE, SPLIT, params};

/// softmax(q K') V over the positions of a split: maximum score, sum of weights, weighted sum of values.
struct Part {
    top: f32,
    sum: f32,
    out: Vec<f32>,
}

/// softmax(q K') V of all splits.
fn merged(parts: &[Part]) -> Vec<f32> {
    let top = parts.iter().map(|part| f64::from(part.top)).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = parts.iter().map(|part| (f64::from(part.top) - top).exp()).collect();
    let sum: f64 = parts.iter().zip(&weights).map(|(part, w)| w * f64::from(part.sum)).sum();
    let out = |d: usize| parts.iter().zip(&weights).map(|(part, w)| w * f64::from(part.out[d])).sum::<f64>();
    (0..parts[0].out.len()).map(|d| (out(d) / sum) as f32).collect()
}

/// What a kernel of attention reads.
struct Cache<'a> {
    call: &'a Call<'a>,
    dim: usize,
    here: usize,
    keys: &'a [u32],
    values: &'a [u32],
    pages: &'a [u32],
}

impl Cache<'_> {
    /// The parts of the splits of a context of `length` positions whose page table begins at `table`.
    fn attend(&self, q: &[f32], local: usize, table: usize, length: usize) -> Vec<Part> {
        let splits = (0..length).step_by(SPLIT);
        splits.map(|from| self.attend_split(q, local, table, from, length.min(from + SPLIT))).collect()
    }

    fn attend_split(&self, q: &[f32], local: usize, table: usize, from: usize, to: usize) -> Part {
        let kv = self.call.variant.kv.expect("a KV type");
        let place = |position: usize| {
            let page = self.pages[table + position / PAGE] as usize;
            ((page * self.here + local) * PAGE + position % PAGE) * self.dim
        };
        let scores: Vec<f64> = (from..to)
            .map(|position| {
                let key = kv_load(kv, self.keys, place(position), self.dim);
                q.iter().zip(&key).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut out) = (0.0, vec![0.0; self.dim]);
        for (position, score) in (from..to).zip(scores) {
            let weight = (score - top).exp();
            sum += weight;
            for (out, value) in out.iter_mut().zip(kv_load(kv, self.values, place(position), self.dim)) {
                *out += weight * f64::from(value);
            }
        }
        Part { top: top as f32, sum: sum as f32, out: out.into_iter().map(|v| v as f32).collect() }
    }
}

pub(super) fn decode(call: &Call) {
    let p: params::AttnDecode = call.params();
    let dim = call.constant("HEAD_DIM");
    let (heads, here, splits) = (p.heads as usize, p.kv_heads_here as usize, p.splits as usize);
    let (q, keys, values, tokens, pages) = (call.floats(0), call.words(1), call.words(2), call.fours(3), call.words(4));
    let cache = Cache { call, dim, here, keys: &keys, values: &values, pages: &pages };
    let (mut part_out, mut part_stat) = (call.floats_mut(5), call.floats_mut(6));
    let group = heads / p.kv_heads as usize;
    for token in 0..p.tokens as usize {
        let length = tokens[token][1] as usize + 1;
        for local_head in 0..here * group {
            let head = p.first_kv as usize * group + local_head;
            let q = &q[(token * heads + head) * dim..][..dim];
            let parts = cache.attend(q, local_head / group, tokens[token][2] as usize, length);
            for (split, part) in parts.into_iter().enumerate() {
                let place = (token * heads + head) * splits + split;
                part_stat[2 * place] = part.top;
                part_stat[2 * place + 1] = part.sum;
                part_out[place * dim..][..dim].copy_from_slice(&part.out);
            }
        }
    }
}

/// One split, and straight to activations.
pub(super) fn short(call: &Call) {
    let p: params::AttnDecode = call.params();
    let dim = call.constant("HEAD_DIM");
    let (heads, here) = (p.heads as usize, p.kv_heads_here as usize);
    let (q, keys, values, tokens, pages) = (call.floats(0), call.words(1), call.words(2), call.fours(3), call.words(4));
    let cache = Cache { call, dim, here, keys: &keys, values: &values, pages: &pages };
    let group = heads / p.kv_heads as usize;
    let layout = act::Layout::new(call, (heads * dim / 32) as u32, 1);
    for token in 0..p.tokens as usize {
        let mut row = Vec::new();
        let first = p.first_kv as usize * group;
        for head in first..first + here * group {
            let q = &q[(token * heads + head) * dim..][..dim];
            let length = tokens[token][1] as usize + 1;
            row.extend(merged(&cache.attend(q, (head - first) / group, tokens[token][2] as usize, length)));
        }
        let act = call.variant.act.expect("an activation type");
        let first = first * dim / 32;
        let blocks = first..first + row.len() / 32;
        act::store_from(act, &row, token, blocks, layout, &mut call.words_mut(5), &mut call.floats_mut(6));
    }
}

pub(super) fn reduce(call: &Call) {
    let p: params::AttnReduce = call.params();
    let dim = call.constant("HEAD_DIM");
    let (heads, splits) = (p.heads as usize, p.splits as usize);
    let (part_out, part_stat, tokens) = (call.floats(0), call.floats(1), call.fours(2));
    for token in 0..p.tokens as usize {
        let used = tokens[token][1] as usize / SPLIT + 1;
        let mut row = vec![0.0f32; heads * dim];
        for head in 0..heads {
            let part = |split: usize| {
                let place = (token * heads + head) * splits + split;
                let out = part_out[place * dim..][..dim].to_vec();
                Part { top: part_stat[2 * place], sum: part_stat[2 * place + 1], out }
            };
            row[head * dim..][..dim].copy_from_slice(&merged(&(0..used).map(part).collect::<Vec<_>>()));
        }
        let act = call.variant.act.expect("an activation type");
        let layout = act::Layout::new(call, p.blocks, p.act_lanes);
        act::store(act, &row, token, layout, &mut call.words_mut(3), &mut call.floats_mut(4));
    }
}

pub(super) fn prefill(call: &Call) {
    let p: params::AttnPrefill = call.params();
    let dim = call.constant("HEAD_DIM");
    let (heads, here) = (p.heads as usize, p.kv_heads_here as usize);
    let (q, keys, values, tokens, pages) = (call.floats(0), call.words(1), call.words(2), call.fours(3), call.words(4));
    let cache = Cache { call, dim, here, keys: &keys, values: &values, pages: &pages };
    let mut out = call.floats_mut(6);
    let group = heads / p.kv_heads as usize;
    for token in 0..p.tokens as usize {
        for local_head in 0..here * group {
            let head = p.first_kv as usize * group + local_head;
            let q = &q[(token * heads + head) * dim..][..dim];
            let length = tokens[token][1] as usize + 1;
            let parts = cache.attend(q, local_head / group, tokens[token][2] as usize, length);
            out[(token * heads + head) * dim..][..dim].copy_from_slice(&merged(&parts));
        }
    }
}
