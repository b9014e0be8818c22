//! Twin of the matvec and matmul kernels, which differ in who does the work, not in what is computed.

use super::quant::Streams;
use super::{Call, act};
use crate::format::Act;
use crate::params::{self, ADD_BIAS, ADD_TO_Y};
use crate::registry::Kernel;

pub(super) fn run(call: &Call) {
    let p: params::Matmul = call.params();
    let (act, lanes) = match call.variant.kernel {
        Kernel::MatvecQ8 => (Act::Q8, 1),
        Kernel::MatvecF32 => (Act::F32, 1),
        Kernel::MatmulQ8 => (Act::Q8, call.constant("LANES") * call.constant("COLS")),
        Kernel::MatmulF32 => (Act::F32, call.constant("LANES") * call.constant("COLS")),
        Kernel::MatmulTileQ8 => (Act::Q8, call.constant("TILE")),
        other => unreachable!("{other:?} is no matrix product"),
    };
    let weights =
        Streams::new(call.variant.format.expect("a format"), call.arrangement(p.blocks as usize), call.buffers);
    let (words, scales, bias) = (call.words(0), call.floats(1), call.floats(2));
    let mut y = call.floats_mut(3);
    let layout = act::Layout { arrangement: call.arrangement(p.blocks as usize), lanes };
    let x: Vec<Vec<f32>> = (0..p.tokens as usize).map(|token| act::load(act, token, layout, &words, &scales)).collect();
    for row in 0..p.rows as usize {
        let w = weights.row(row);
        for (token, x) in x.iter().enumerate() {
            let mut sum = dot(&w, x);
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
