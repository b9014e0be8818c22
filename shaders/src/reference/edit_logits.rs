//! Twin of `edit_logits.wgsl`.

use super::Call;
use crate::edit::Edit;
use crate::params;

pub(super) fn run(call: &Call) {
    let p: params::EditLogits = call.params();
    let edits = call.words(0);
    let edits: &[Edit] = bytemuck::cast_slice(&edits[..p.tokens as usize * Edit::BYTES / 4]);
    let (mut logits, mut raw) = (call.floats_mut(1), call.floats_mut(2));
    for (i, edit) in edits.iter().enumerate().filter(|(_, edit)| edit.place != Edit::NONE.place) {
        let logit = &mut logits[edit.place as usize];
        raw[i] = *logit;
        *logit = edit.apply(*logit);
    }
}
