// y[t][n] = sum over k of W[n][k] * x[t][k] (+ bias[n]) (+ y[t][n]), for many tokens; x as q8; for cards.
//
// W: [rows, 32 * blocks] of a quantised format; x: q8 activations in tiles of act_lanes = TILE tokens.
// A workgroup makes TILE rows of TILE tokens. It unpacks one block of each row and of each token into workgroup
// memory at a time; a thread multiplies SIDE rows by SIDE tokens out of it. The segments of K are walked one
// after the other and flushed at their ends, so the bits are those of matvec_q8.wgsl.
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

const ACROSS = TILE / SIDE;
const THREADS = ACROSS * ACROSS;
const OUTPUTS = SIDE * SIDE;
var<workgroup> w_lo: array<vec4<u32>, TILE>;
var<workgroup> w_hi: array<vec4<u32>, TILE>;
var<workgroup> w_scales: array<vec3<f32>, TILE>;
var<workgroup> x_words: array<u32, TILE * 8u>;
var<workgroup> xs: array<vec2<f32>, TILE>;

fn dot4x4(a: vec4<u32>, b: vec4<u32>) -> f32 {
    return f32(dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w));
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row0 = (workgroup.y + workgroup.z * workgroups.y) * TILE;
    let tile = workgroup.x;
    let my_row = thread / ACROSS;
    let my_token = thread % ACROSS;

    var sum: array<f32, OUTPUTS>;
    for (var segment = 0u; segment < SEGMENTS; segment++) {
        let length = segment_length(p.blocks, segment);
        let first = segment_first(p.blocks, segment);
        var acc: array<f32, OUTPUTS>;
        for (var j = 0u; j < length; j++) {
            let position = j * SEGMENTS + segment;
            for (var i = thread; i < TILE; i += THREADS) {
                let row = min(row0 + i, p.rows - 1u);
                let index = block_index(row, p.blocks, position);
                let words = block_words(index);
                w_lo[i] = words.lo;
                w_hi[i] = words.hi;
                w_scales[i] = block_scales(index, super_index(row, p.blocks, first + j));
                xs[i] = x_scales[(tile * p.blocks + position) * TILE + i];
            }
            for (var i = thread; i < TILE * 8u; i += THREADS) {
                x_words[i] = x[(tile * p.blocks + position) * 8u * TILE + i];
            }
            workgroupBarrier();
            for (var c = 0u; c < SIDE; c++) {
                let t = my_token + c * ACROSS;
                let lo = vec4<u32>(x_words[t], x_words[TILE + t], x_words[2u * TILE + t], x_words[3u * TILE + t]);
                let hi = vec4<u32>(x_words[4u * TILE + t], x_words[5u * TILE + t], x_words[6u * TILE + t], x_words[7u * TILE + t]);
                for (var r = 0u; r < SIDE; r++) {
                    let n = my_row + r * ACROSS;
                    let o = r * SIDE + c;
                    acc[o] = block_sum(acc[o], dot4x4(w_lo[n], lo), dot4x4(w_hi[n], hi), w_scales[n], xs[t]);
                }
            }
            workgroupBarrier();
        }
        for (var i = 0u; i < OUTPUTS; i++) {
            sum[i] += acc[i];
        }
    }
    for (var i = 0u; i < OUTPUTS; i++) {
        let row = row0 + my_row + (i / SIDE) * ACROSS;
        let token = tile * TILE + my_token + (i % SIDE) * ACROSS;
        finish(row, token, sum[i]);
    }
}
