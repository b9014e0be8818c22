// sum over k of W[n][k] * x[t][k] for few tokens, and what product_end makes of it; x as q8.
//
// W: [rows, 32 * blocks] of a quantised format; x: q8 activations with act_lanes = 1.
// SEGMENTS lanes share a row: each walks one segment of K for ROWS rows and COLS tokens at once, neighbouring lanes
// read neighbouring blocks, every weight is read once for all tokens, and the partial sums are added in order.
// A workgroup holds GROUPS such sets of lanes, which take rows in turn. With one segment nothing is shared.
#import quant
#import segments
#import product_end

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

fn dot4x4(a: vec4<u32>, b: vec4<u32>) -> f32 {
    return f32(dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w));
}

// A block of a token: 32 signed bytes, and (scale, scale * sum).
struct Column {
    lo: vec4<u32>,
    hi: vec4<u32>,
    xs: vec2<f32>,
}

const COLUMNS = 8;

fn column(token: u32, position: u32) -> Column {
    let at = min(token, p.tokens - 1u) * p.blocks + position;
    return Column(quad(x[2u * at]), quad(x[2u * at + 1u]), bitcast<vec2<f32>>(pair(x_scales[at])));
}

#import lanes

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
        let x_columns = columns(token0, position, thread);
        for (var r = 0u; r < ROWS; r++) {
            let row = min(row0 + r * GROUPS, last_row);
            let index = block_index(row, p.blocks, position);
            let words = block_words(index);
            let scales = block_scales(index, super_index(row, p.blocks, first + j));
            for (var c = 0u; c < COLS; c++) {
                let i = r * COLS + c;
                let x_c = x_columns[c];
                acc[i] = block_sum(acc[i], dot4x4(words.lo, x_c.lo), dot4x4(words.hi, x_c.hi), scales, x_c.xs);
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
