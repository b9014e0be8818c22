//! Twin of `rope_kv.wgsl`.

use half::f16;

use super::{Call, rmsnorm};
use crate::format::KvType;
use crate::{PAGE, params};

pub(super) fn run(call: &Call) {
    let p: params::RopeKv = call.params();
    let dim = call.constant("HEAD_DIM");
    let kv = call.variant.kv.expect("a KV type");
    let (heads, kv_heads, here) = (p.heads as usize, p.kv_heads as usize, p.kv_heads_here as usize);
    let (first_kv, pairs, group) = (p.first_kv as usize, p.pairs as usize, heads / kv_heads);
    let (qkv, norms, tokens, pages, rotation) =
        (call.floats(0), call.floats(1), call.fours(2), call.words(3), call.floats(4));
    for token in 0..p.tokens as usize {
        let head = |column: usize| &qkv[(token * (heads + 2 * kv_heads) + column) * dim..][..dim];
        let rotated = |column: usize, norm: usize| {
            let mut v = head(column).to_vec();
            if p.use_norms == 1 {
                v = rmsnorm::normalised(&v, &norms[norm * dim..][..dim], p.eps);
            }
            for i in 0..pairs {
                let (cos, sin) = (rotation[2 * (token * pairs + i)], rotation[2 * (token * pairs + i) + 1]);
                (v[i], v[i + pairs]) = (v[i] * cos - v[i + pairs] * sin, v[i + pairs] * cos + v[i] * sin);
            }
            v
        };
        for column in first_kv * group..(first_kv + here) * group {
            let scaled: Vec<f32> = rotated(column, 0).iter().map(|v| v * p.scale).collect();
            call.floats_mut(5)[(token * heads + column) * dim..][..dim].copy_from_slice(&scaled);
        }
        let [_, position, table, _] = tokens[token];
        let (position, page) = (position as usize, pages[table as usize + position as usize / PAGE] as usize);
        for local in 0..here {
            let at = ((page * here + local) * PAGE + position % PAGE) * dim;
            kv_store(kv, &mut call.words_mut(6), at, &rotated(heads + first_kv + local, 1));
            kv_store(kv, &mut call.words_mut(7), at, head(heads + kv_heads + first_kv + local));
        }
    }
}

fn kv_store(kv: KvType, words: &mut [u32], at: usize, values: &[f32]) {
    match kv {
        KvType::F32 => bytemuck::cast_slice_mut(words)[at..][..values.len()].copy_from_slice(values),
        KvType::F16 => {
            let halves: &mut [u16] = bytemuck::cast_slice_mut(words);
            for (half, value) in halves[at..].iter_mut().zip(values) {
                *half = f16::from_f32(*value).to_bits();
            }
        }
    }
}

/// `count` elements of a KV buffer from element `at`.
pub(super) fn kv_load(kv: KvType, words: &[u32], at: usize, count: usize) -> Vec<f32> {
    match kv {
        KvType::F32 => bytemuck::cast_slice(words)[at..][..count].to_vec(),
        KvType::F16 => {
            let halves: &[u16] = bytemuck::cast_slice(words);
            halves[at..][..count].iter().map(|&bits| f16::from_bits(bits).to_f32()).collect()
        }
    }
}
