// The share of each chunk of a row in its log-sum-exp, of logits that edit_logits.wgsl will change.
//
// logits: [outputs, vocab] f32
// stats: [outputs, chunks] (maximum, sum of exp(l - maximum), -, -)
// One workgroup a chunk. Order of additions: that of topk_chunk.wgsl, so that a row's log-sum-exp has the same bits
// whether its logits are edited or not.

struct Params {
    tokens: u32,
    vocab: u32,
    chunks: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read_write> stats: array<vec4<f32>>;

const HIGHEST = 3.4e38;
const LOWEST = -3.0e38;
var<workgroup> tops: array<f32, WORKGROUP>;
var<workgroup> sums: array<f32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = workgroup.x * CHUNK;
    let end = min(first + CHUNK, p.vocab);
    let row = workgroup.y * p.vocab;

    var mine = LOWEST;
    for (var id = first + thread; id < end; id += WORKGROUP) {
        let l = logits[row + id];
        if l < HIGHEST && l > mine {
            mine = l;
        }
    }
    tops[thread] = mine;
    workgroupBarrier();
    var top = tops[0];
    for (var t = 1u; t < WORKGROUP; t++) {
        if tops[t] > top {
            top = tops[t];
        }
    }
    var sum = 0.0;
    for (var id = first + thread; id < end; id += WORKGROUP) {
        let l = logits[row + id] - top;
        sum += exp(l);
    }
    sums[thread] = sum;
    workgroupBarrier();
    if thread == 0u {
        var all = 0.0;
        for (var t = 0u; t < WORKGROUP; t++) {
            all += sums[t];
        }
        stats[workgroup.y * p.chunks + workgroup.x] = vec4<f32>(top, all, 0.0, 0.0);
    }
}
