// y[t][n] = sum over k of W[n][k] * x[t][k] (+ bias[n]) (+ y[t][n]), for many tokens; x as floats.
//
// W: [rows, 32 * blocks] of any format; x: float activations in tiles of act_lanes = LANES * COLS tokens.
// A lane holds COLS tokens, a workgroup ROWS rows: weights are the same for all lanes, activations of
// neighbouring lanes are neighbours, nothing is shared and nothing is reduced across lanes. The segments of K
// are walked one after the other and flushed at their ends, so the bits are those of matvec_f32.wgsl.
#import quant
#import segments
#import product_store
#import chain

struct Params {
    tokens: u32,
    blocks: u32,
    rows: u32,
    y_stride: u32,
    y_offset: u32,
    flags: u32,
}

var<immediate> p: Params;
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read> x_scales: array<vec2<f32>>;

const OUTPUTS = ROWS * COLS;
const ACT_LANES = LANES * COLS;

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row0 = (workgroup.y + workgroup.z * workgroups.y) * ROWS;
    let tile = workgroup.x;
    let last_row = p.rows - 1u;

    var sum: array<f32, OUTPUTS>;
    for (var segment = 0u; segment < SEGMENTS; segment++) {
        let length = segment_length(p.blocks, segment);
        let first = segment_first(p.blocks, segment);
        var acc: array<f32, OUTPUTS>;
        for (var j = 0u; j < length; j++) {
            let position = j * SEGMENTS + segment;
            let at = (tile * p.blocks + position) * ACT_LANES + lane;
            let at_k = (tile * p.blocks + position) * 32u * ACT_LANES + lane;
            for (var r = 0u; r < ROWS; r++) {
                let row = min(row0 + r, last_row);
                let index = block_index(row, p.blocks, position);
                var w = block_values(index);
                let scales = block_scales(index, super_index(row, p.blocks, first + j));
                for (var c = 0u; c < COLS; c++) {
                    var lo = 0.0;
                    var hi = 0.0;
                    for (var i = 0u; i < 4u; i++) {
                        let l = at_k + 4u * i * ACT_LANES + c * LANES;
                        let h = l + 16u * ACT_LANES;
                        lo = chain(w[i], vec4<f32>(x[l], x[l + ACT_LANES], x[l + 2u * ACT_LANES], x[l + 3u * ACT_LANES]), lo);
                        hi = chain(w[i + 4u], vec4<f32>(x[h], x[h + ACT_LANES], x[h + 2u * ACT_LANES], x[h + 3u * ACT_LANES]), hi);
                    }
                    acc[r * COLS + c] = block_sum(acc[r * COLS + c], lo, hi, scales, x_scales[at + c * LANES]);
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
