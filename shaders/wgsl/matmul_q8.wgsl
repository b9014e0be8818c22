// y[t][n] = sum over k of W[n][k] * x[t][k] (+ bias[n]) (+ y[t][n]), for many tokens; x as q8.
//
// W: [rows, 32 * blocks] of a quantised format; x: q8 activations in tiles of act_lanes = LANES * COLS tokens.
// A lane holds COLS tokens, a workgroup ROWS rows: weights are the same for all lanes, activations of
// neighbouring lanes are neighbours, nothing is shared and nothing is reduced across lanes. The segments of K
// are walked one after the other and flushed at their ends, so the bits are those of matvec_q8.wgsl.
#import quant
#import segments
#import product_store

struct Params {
    tokens: u32,
    blocks: u32,
    rows: u32,
    y_stride: u32,
    y_offset: u32,
    flags: u32,
}

var<immediate> p: Params;
@group(0) @binding(3) var<storage, read> x: array<u32>;
@group(0) @binding(4) var<storage, read> x_scales: array<vec2<f32>>;

const OUTPUTS = ROWS * COLS;
const ACT_LANES = LANES * COLS;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row0 = (workgroup.x + workgroup.z * workgroups.x) * ROWS;
    let tile = workgroup.y;
    let last_row = p.rows - 1u;

    var sum: array<f32, OUTPUTS>;
    for (var segment = 0u; segment < SEGMENTS; segment++) {
        let length = segment_length(p.blocks, segment);
        let first = segment_first(p.blocks, segment);
        var acc: array<f32, OUTPUTS>;
        for (var j = 0u; j < length; j++) {
            let position = j * SEGMENTS + segment;
            let at = (tile * p.blocks + position) * ACT_LANES + lane;
            let at_word = (tile * p.blocks + position) * 8u * ACT_LANES + lane;
            var xs: array<vec2<f32>, COLS>;
            for (var c = 0u; c < COLS; c++) {
                xs[c] = x_scales[at + c * LANES];
            }
            var x_words: array<u32, 8u * COLS>;
            for (var i = 0u; i < 8u * COLS; i++) {
                x_words[i] = x[at_word + (i / COLS) * ACT_LANES + (i % COLS) * LANES];
            }
            for (var r = 0u; r < ROWS; r++) {
                let row = min(row0 + r, last_row);
                let index = block_index(row, p.blocks, position);
                let w = block_words(index);
                let scales = block_scales(index, super_index(row, p.blocks, first + j));
                for (var c = 0u; c < COLS; c++) {
                    let lo = dot4I8Packed(w.lo.x, x_words[c]) + dot4I8Packed(w.lo.y, x_words[COLS + c])
                        + dot4I8Packed(w.lo.z, x_words[2u * COLS + c]) + dot4I8Packed(w.lo.w, x_words[3u * COLS + c]);
                    let hi = dot4I8Packed(w.hi.x, x_words[4u * COLS + c]) + dot4I8Packed(w.hi.y, x_words[5u * COLS + c])
                        + dot4I8Packed(w.hi.z, x_words[6u * COLS + c]) + dot4I8Packed(w.hi.w, x_words[7u * COLS + c]);
                    acc[r * COLS + c] = block_sum(acc[r * COLS + c], f32(lo), f32(hi), scales, xs[c]);
                }
            }
        }
        for (var i = 0u; i < OUTPUTS; i++) {
            sum[i] += acc[i];
        }
    }
    for (var i = 0u; i < OUTPUTS; i++) {
        let row = row0 + i / COLS;
        let token = tile * ACT_LANES + (i % COLS) * LANES + lane;
        finish(row, token, sum[i]);
    }
}
