// The k largest logits of each chunk of a row, and the chunk's share of the log-sum-exp.
//
// logits: [outputs, vocab] f32; outputs: (-, -, temperature's inverse as bits, k)
// best: [outputs, chunks, K] (id, logit as bits), by falling logit, then rising id
// stats: [outputs, chunks] (maximum, sum of exp(l - maximum), the same of l / temperature, -)
// A thread knows the best of its strided share; k times the best of all is taken, and its owner looks for its
// next. An id of 0xffffffff means that there was no finite logit left.

struct Params {
    tokens: u32,
    vocab: u32,
    chunks: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> outputs: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> best: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read_write> stats: array<vec4<f32>>;

const NONE = 0xffffffffu;
const LOWEST = -3.0e38;
var<workgroup> top_logits: array<f32, WORKGROUP>;
var<workgroup> top_ids: array<u32, WORKGROUP>;
var<workgroup> sums: array<vec2<f32>, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let output = workgroup.y;
    let first = workgroup.x * CHUNK;
    let end = min(first + CHUNK, p.vocab);
    let row = output * p.vocab;
    let k = min(outputs[output].w, K);
    let place = (output * p.chunks + workgroup.x) * K;

    // The last one taken; what is still to be taken stands behind it.
    var last_logit = 3.4e38;
    var last_id = 0u;
    var mine = LOWEST;
    var mine_id = NONE;
    var search = true;
    for (var i = 0u; i < k; i++) {
        if search {
            mine = LOWEST;
            mine_id = NONE;
            for (var id = first + thread; id < end; id += WORKGROUP) {
                let l = logits[row + id];
                if (l < last_logit || (l == last_logit && id > last_id)) && l > mine {
                    mine = l;
                    mine_id = id;
                }
            }
        }
        top_logits[thread] = mine;
        top_ids[thread] = mine_id;
        workgroupBarrier();
        var logit = top_logits[0];
        var id = top_ids[0];
        for (var t = 1u; t < WORKGROUP; t++) {
            let l = top_logits[t];
            if l > logit || (l == logit && top_ids[t] < id) {
                logit = l;
                id = top_ids[t];
            }
        }
        if thread == 0u {
            best[place + i] = vec2<u32>(id, bitcast<u32>(logit));
        }
        search = id == mine_id;
        last_logit = logit;
        last_id = id;
        if i == 0u {
            let inverse = bitcast<f32>(outputs[output].z);
            var sum = vec2<f32>(0.0);
            for (var e = first + thread; e < end; e += WORKGROUP) {
                let l = logits[row + e] - logit;
                sum += vec2<f32>(exp(l), exp(l * inverse));
            }
            sums[thread] = sum;
        }
        workgroupBarrier();
        if i == 0u && thread == 0u {
            var sum = vec2<f32>(0.0);
            for (var t = 0u; t < WORKGROUP; t++) {
                sum += sums[t];
            }
            stats[output * p.chunks + workgroup.x] = vec4<f32>(logit, sum, 0.0);
        }
    }
}
