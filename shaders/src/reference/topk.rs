//! Twins of `topk_chunk.wgsl` and `topk_merge.wgsl`.

use super::Call;
use crate::params;

/// The `k` best of (id, logit), by falling logit, then rising id.
fn best(mut candidates: Vec<(u32, f32)>, k: usize) -> Vec<(u32, f32)> {
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    candidates.truncate(k);
    candidates.resize(k, (u32::MAX, -3.0e38));
    candidates
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
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum = |scale: f64| row.iter().map(|&l| (f64::from(l - top) * scale).exp()).sum::<f64>() as f32;
            stats[4 * place..][..4].copy_from_slice(&[top, sum(1.0), sum(inverse), 0.0]);
        }
    }
}

pub(super) fn merge(call: &Call) {
    let p: params::TopK = call.params();
    let (k_max, chunks, vocab) = (call.constant("K"), p.chunks as usize, p.vocab as usize);
    let (logits, outputs, from, stats) = (call.floats(0), call.fours(1), call.words(2), call.floats(3));
    let mut result = call.words_mut(4);
    for output in 0..p.tokens as usize {
        let [_, target, inverse, k] = outputs[output];
        let k = (k as usize).min(k_max);
        let inverse = f64::from(f32::from_bits(inverse));
        let stats: Vec<&[f32]> = stats[4 * output * chunks..][..4 * chunks].chunks(4).collect();
        let top = stats.iter().map(|s| f64::from(s[0])).fold(f64::NEG_INFINITY, f64::max);
        let lse = |scale: f64, i: usize| {
            let sum: f64 = stats.iter().map(|s| f64::from(s[i]) * ((f64::from(s[0]) - top) * scale).exp()).sum();
            (top * scale + sum.ln()) as f32
        };
        let to = 2 * output * (k_max + 2);
        result[to] = lse(1.0, 1).to_bits();
        result[to + 1] = lse(inverse, 2).to_bits();
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
