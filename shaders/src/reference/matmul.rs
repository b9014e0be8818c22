//! Twin of the matvec and matmul kernels, which differ in who does the work, not in what is computed.

use super::quant::Streams;
use super::{Call, act};
use crate::format::Act;
use crate::params::{self, ADD_BIAS, ADD_TO_Y};
use crate::registry::Kernel;

pub(super) fn run(call: &Call) {
    let p: params::Matmul = call.params();
    let bias = call.floats(2);
    let mut y = call.floats_mut(3);
    for (token, sums) in products(call, &p).into_iter().enumerate() {
        for (row, mut sum) in sums.into_iter().enumerate() {
            let at = token * p.y_stride as usize + p.y_offset as usize + row;
            if p.flags & ADD_BIAS != 0 {
                sum += bias[row];
            }
            if p.flags & ADD_TO_Y != 0 {
                sum += y[at];
            }
            y[at] = sum;
        }
    }
}

/// Gates and ups in turns of 8, and activations of silu(gate) * up.
pub(super) fn swiglu(call: &Call) {
    let p: params::Matmul = call.params();
    let bias = call.floats(2);
    let mut sums = products(call, &p).remove(0);
    if p.flags & ADD_BIAS != 0 {
        sums.iter_mut().zip(bias.iter()).for_each(|(sum, bias)| *sum += bias);
    }
    let h = act::gated(&sums, true);
    let out = call.variant.act.expect("an activation type");
    let layout = act::Layout::new(call, p.y_stride.div_ceil(64), 1);
    let first = p.y_offset as usize / 64;
    act::store_from(
        out,
        &h,
        0,
        first..first + h.len().div_ceil(32),
        layout,
        &mut call.words_mut(3),
        &mut call.floats_mut(4),
    );
}

/// W x of every token: [tokens][rows].
fn products(call: &Call, p: &params::Matmul) -> Vec<Vec<f32>> {
    let (act, lanes) = match call.variant.kernel {
        Kernel::MatvecQ8 | Kernel::MatvecSwiGluQ8 => (Act::Q8, 1),
        Kernel::MatvecF32 | Kernel::MatvecSwiGluF32 => (Act::F32, 1),
        Kernel::MatmulF32 => (Act::F32, call.constant("LANES") * call.constant("COLS")),
        Kernel::MatmulTileQ8 => (Act::Q8, call.constant("TILE")),
        other => unreachable!("{other:?} is no matrix product"),
    };
    let arrangement = call.arrangement(p.blocks as usize);
    let weights = Streams::new(call.variant.format.expect("a format"), arrangement, call.buffers);
    let (words, scales) = (call.words(0), call.floats(1));
    let layout = act::Layout { arrangement, lanes };
    let load = |token| act::load(act, token, layout, &words, &scales);
    let x: Vec<Vec<f32>> = (0..p.tokens as usize).map(load).collect();
    let mut y = vec![Vec::with_capacity(p.rows as usize); x.len()];
    for row in 0..p.rows as usize {
        let w = weights.row(row);
        x.iter().zip(&mut y).for_each(|(x, y)| y.push(dot(&w, x)));
    }
    y
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight sums, so that a compiler may keep them in a vector.
    let mut sums = [0.0f64; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    sums.iter().sum::<f64>() as f32
}
