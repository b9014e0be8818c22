// sum over k of W[n][k] * x[t][k] for few tokens, and what product_end makes of it; x as floats.
//
// W: [rows, 32 * blocks] of any format; x: float activations with act_lanes = 1. The exact counterpart of
// matvec_q8.wgsl: the same walk, the sums inside a block in float as well.
// SEGMENTS lanes share a row: each walks one segment of K for ROWS rows and COLS tokens at once, neighbouring lanes
// read neighbouring blocks, every weight is read once for all tokens, and the partial sums are added in order.
// A workgroup holds GROUPS such sets of lanes, which take rows in turn. With one segment nothing is shared.
#import quant
#import segments
#import product_end
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
@group(0) @binding(3) var<storage, read> x: array<Quad>;
@group(0) @binding(4) var<storage, read> x_scales: array<Pair>;

const OUTPUTS = ROWS * COLS;
var<workgroup> partial: array<f32, select(1u, GROUPS * OUTPUTS * SEGMENTS, SEGMENTS > 1u)>;

@compute @workgroup_size(GROUPS * SEGMENTS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let lane = thread % SEGMENTS;
    let group = thread / SEGMENTS;
    let row0 = (workgroup.y + workgroup.z * workgroups.y) * GROUPS * ROWS + group;
    let token0 = workgroup.x * COLS;
    let last_row = p.rows - 1u;
    let length = segment_length(p.blocks, lane);
    let first = segment_first(p.blocks, lane);

    var acc: array<f32, OUTPUTS>;
    for (var j = 0u; j < length; j++) {
        let position = j * SEGMENTS + lane;
        for (var c = 0u; c < COLS; c++) {
            let at = min(token0 + c, p.tokens - 1u) * p.blocks + position;
            var v: array<vec4<f32>, 8>;
            for (var i = 0u; i < 8u; i++) {
                v[i] = bitcast<vec4<f32>>(quad(x[8u * at + i]));
            }
            let xs = bitcast<vec2<f32>>(pair(x_scales[at]));
            for (var r = 0u; r < ROWS; r++) {
                let row = min(row0 + r * GROUPS, last_row);
                let index = block_index(row, p.blocks, position);
                var w = block_values(index);
                let scales = block_scales(index, super_index(row, p.blocks, first + j));
                var lo = 0.0;
                var hi = 0.0;
                for (var i = 0u; i < 4u; i++) {
                    lo = chain(w[i], v[i], lo);
                    hi = chain(w[i + 4u], v[i + 4u], hi);
                }
                acc[r * COLS + c] = block_sum(acc[r * COLS + c], lo, hi, scales, xs);
            }
        }
    }
    if SEGMENTS == 1u {
        for (var i = 0u; i < OUTPUTS; i++) {
            finish(row0 + i / COLS * GROUPS, token0 + i % COLS, 0.0 + acc[i]);
        }
        finish_workgroup(row0 - group, thread);
        return;
    }
    for (var i = 0u; i < OUTPUTS; i++) {
        partial[(group * OUTPUTS + i) * SEGMENTS + lane] = acc[i];
    }
    workgroupBarrier();
    for (var i = lane; i < OUTPUTS; i += SEGMENTS) {
        var sum = 0.0;
        for (var s = 0u; s < SEGMENTS; s++) {
            sum += partial[(group * OUTPUTS + i) * SEGMENTS + s];
        }
        finish(row0 + i / COLS * GROUPS, token0 + i % COLS, sum);
    }
    finish_workgroup(row0 - group, thread);
}
