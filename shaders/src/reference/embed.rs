//! Twin of `embed.wgsl`.

use super::Call;
use super::quant::Streams;
use crate::params;

pub(super) fn run(call: &Call) {
    let p: params::Embed = call.params();
    let table = Streams::new(call.variant.format.expect("a format"), call.arrangement(p.blocks as usize), call.buffers);
    let hidden = p.hidden as usize;
    let tokens = call.fours(0);
    let mut x = call.floats_mut(1);
    for token in 0..p.tokens as usize {
        let row = tokens[token][0].wrapping_sub(p.first_row);
        if row < p.rows {
            x[token * hidden..][..hidden].copy_from_slice(&table.row(row as usize)[..hidden]);
        }
    }
}
