//! What the last stage reads back of each row that logits are wanted for.

use pp_shaders::profile::TOP_K;

use crate::message::{Candidate, Output, OutputRequest};

/// Bytes of a row of results.
pub(super) const RESULT_BYTES: usize = 8 * (TOP_K as usize + 2);

/// One row of `topk_merge.wgsl`'s result.
pub(super) fn parse_output(data: &[u8]) -> Output {
    let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| data[4 * i + b]));
    let float = |i: usize| f32::from_bits(word(i));
    let candidates = (0..(word(3) as usize).min(TOP_K as usize)).map(|i| (word(4 + 2 * i), float(5 + 2 * i)));
    Output {
        lse: float(0),
        lse_processed: float(1),
        target_logit: float(2),
        best: candidates
            .take_while(|(id, _)| *id != u32::MAX)
            .map(|(id, logit)| Candidate { id, logit, raw: logit })
            .collect(),
        beside: Vec::new(),
        row: None,
    }
}

/// Puts back what the edits of `request` changed and should not have, from the next of the `raw` logits.
pub(super) fn restore_raw(output: &mut Output, request: &OutputRequest, raw: &mut impl Iterator<Item = f32>) {
    for (edit, raw) in request.edits.iter().zip(raw) {
        if edit.id == request.target {
            output.target_logit = raw;
        }
        if let Some(row) = &mut output.row {
            row[edit.id as usize] = raw;
        }
        match output.best.iter_mut().find(|candidate| candidate.id == edit.id) {
            Some(candidate) => candidate.raw = raw,
            None => output.beside.push(Candidate { id: edit.id, logit: edit.apply(raw), raw }),
        }
    }
    output.beside.sort_by(|a, b| b.raw.total_cmp(&a.raw).then(a.id.cmp(&b.id)));
    output.beside.truncate(request.top_k.clamp(1, TOP_K) as usize);
}
