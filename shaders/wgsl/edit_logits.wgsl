// Changes some logits in place, and keeps what they were.
//
// l becomes (l + bias) f - subtract, f = 1 / repetition where l + bias is positive, else repetition.
// edits: [edits] (place, bias, repetition, 1 / repetition, subtract)
// logits: [outputs, vocab] f32, `place` counts through all of it; raw: [edits] f32
// One thread an edit. No two have the same place; one whose place is 0xffffffff does nothing.

struct Params {
    tokens: u32,
    zero: u32,
}

struct Edit {
    place: u32,
    bias: f32,
    repetition: f32,
    reciprocal: f32,
    subtract: f32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> edits: array<Edit>;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> raw: array<f32>;

const NONE = 0xffffffffu;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let i = workgroup.x * WORKGROUP + thread;
    if i >= p.tokens {
        return;
    }
    let edit = edits[i];
    if edit.place == NONE {
        return;
    }
    let logit = logits[edit.place];
    raw[i] = logit;
    let biased = logit + edit.bias;
    let factor = select(edit.repetition, edit.reciprocal, biased > 0.0);
    // The host must get the same bits, so the product is rounded before the subtraction. Drivers may make one fma of
    // the two, and may make two operations of an fma; `zero` is 0, but they cannot know, and so cannot join them.
    let scaled = bitcast<f32>(bitcast<u32>(biased * factor) ^ p.zero);
    logits[edit.place] = scaled - edit.subtract;
}
