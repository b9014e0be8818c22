//! Twin of `rmsnorm.wgsl`.

use super::{Call, act};
use crate::params;

pub(super) fn run(call: &Call) {
    let p: params::RmsNorm = call.params();
    let hidden = p.hidden as usize;
    let (x, g, rows) = (call.floats(0), call.floats(1), call.fours(2));
    for token in 0..p.tokens as usize {
        let row = if p.use_rows == 1 { rows[token][0] as usize } else { token };
        let row = &x[row * hidden..][..hidden];
        let y = normalised(row, &g, p.eps);
        let act = call.variant.act.expect("an activation type");
        let layout = act::Layout::new(call, p.blocks, p.act_lanes);
        act::store(act, &y, token, layout, &mut call.words_mut(3), &mut call.floats_mut(4));
    }
}

/// x / sqrt(mean(x²) + eps) * g
pub(super) fn normalised(x: &[f32], g: &[f32], eps: f32) -> Vec<f32> {
    let squares: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    let scale = 1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter().zip(g).map(|(&v, &g)| (f64::from(v) * scale * f64::from(g)) as f32).collect()
}
