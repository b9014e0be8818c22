//! Twins of `lse_chunk.wgsl`, `topk_chunk.wgsl` and `topk_merge.wgsl`.

use super::Call;
use crate::params;

/// Stands for a logit where there is none.
const LOWEST: f32 = -3.0e38;

/// Whether top-k may return it: neither infinite, nor so low that it was banned, nor not a number.
pub fn is_candidate(logit: f32) -> bool {
    logit > LOWEST && logit < 3.4e38
}

/// The `k` best of (id, logit), by falling logit, then rising id.
fn best(mut candidates: Vec<(u32, f32)>, k: usize) -> Vec<(u32, f32)> {
    candidates.retain(|(_, logit)| is_candidate(*logit));
    candidates.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("numbers").then(a.0.cmp(&b.0)));
    candidates.truncate(k);
    candidates.resize(k, (u32::MAX, LOWEST));
    candidates
}

/// The best logit of a chunk, and the sums of exp of what the others lie below it, with each scale.
fn sums<const N: usize>(chunk: &[f32], scales: [f64; N]) -> (f32, [f32; N]) {
    let top = chunk.iter().copied().filter(|logit| is_candidate(*logit)).fold(LOWEST, f32::max);
    let sum = |scale: f64| chunk.iter().map(|&l| (f64::from(l - top) * scale).exp()).sum::<f64>() as f32;
    (top, scales.map(sum))
}

pub(super) fn lse(call: &Call) {
    let p: params::TopK = call.params();
    let (size, vocab, chunks) = (call.constant("CHUNK"), p.vocab as usize, p.chunks as usize);
    let (logits, mut stats) = (call.floats(0), call.floats_mut(1));
    for output in 0..p.tokens as usize {
        for (chunk, row) in logits[output * vocab..][..vocab].chunks(size).enumerate() {
            let (top, [sum]) = sums(row, [1.0]);
            stats[4 * (output * chunks + chunk)..][..4].copy_from_slice(&[top, sum, 0.0, 0.0]);
        }
    }
}

pub(super) fn chunk(call: &Call) {
    let p: params::TopK = call.params();
    let (k_max, size, vocab) = (call.constant("K"), call.constant("CHUNK"), p.vocab as usize);
    let (logits, outputs) = (call.floats(0), call.fours(1));
    let (mut to, mut stats) = (call.words_mut(2), call.floats_mut(3));
    for output in 0..p.tokens as usize {
        let k = (outputs[output][3] as usize).min(k_max);
        let inverse = f64::from(f32::from_bits(outputs[output][2]));
        for (chunk, row) in logits[output * vocab..][..vocab].chunks(size).enumerate() {
            let place = output * p.chunks as usize + chunk;
            let ids = (0..).map(|i| (chunk * size + i) as u32);
            for (i, (id, logit)) in best(ids.zip(row.iter().copied()).collect(), k).into_iter().enumerate() {
                to[2 * (place * k_max + i)] = id;
                to[2 * (place * k_max + i) + 1] = logit.to_bits();
            }
            let (top, [raw, scaled]) = sums(row, [1.0, inverse]);
            stats[4 * place..][..4].copy_from_slice(&[top, raw, scaled, 0.0]);
        }
    }
}

pub(super) fn merge(call: &Call) {
    let p: params::TopK = call.params();
    let (k_max, chunks, vocab) = (call.constant("K"), p.chunks as usize, p.vocab as usize);
    let (logits, outputs, from) = (call.floats(0), call.fours(1), call.words(2));
    let (stats, raw_stats, mut result) = (call.floats(3), call.floats(4), call.words_mut(5));
    for output in 0..p.tokens as usize {
        let [_, target, inverse, k] = outputs[output];
        let k = (k as usize).min(k_max);
        let inverse = f64::from(f32::from_bits(inverse));
        let lse = |stats: &[f32], scale: f64, i: usize| {
            let stats: Vec<&[f32]> = stats[4 * output * chunks..][..4 * chunks].chunks(4).collect();
            let top = stats.iter().map(|s| f64::from(s[0])).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = stats.iter().map(|s| f64::from(s[i]) * ((f64::from(s[0]) - top) * scale).exp()).sum();
            (top * scale + sum.ln()) as f32
        };
        let to = 2 * output * (k_max + 2);
        result[to] = lse(&raw_stats, 1.0, 1).to_bits();
        result[to + 1] = lse(&stats, inverse, 2).to_bits();
        result[to + 2] = logits[output * vocab + (target as usize).min(vocab - 1)].to_bits();
        result[to + 3] = k as u32;
        let candidates = (0..chunks).flat_map(|chunk| (0..k).map(move |i| 2 * ((output * chunks + chunk) * k_max + i)));
        let candidates = candidates.map(|at| (from[at], f32::from_bits(from[at + 1]))).collect();
        for (i, (id, logit)) in best(candidates, k).into_iter().enumerate() {
            result[to + 4 + 2 * i] = id;
            result[to + 5 + 2 * i] = logit.to_bits();
        }
    }
}
