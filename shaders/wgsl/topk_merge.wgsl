// Merges the chunks of topk_chunk.wgsl, a workgroup an output.
//
// logits: [outputs, vocab] f32; outputs: (-, target id, temperature's inverse as bits, k)
// best: [outputs, chunks, K] (id, logit as bits); stats: [outputs, chunks] (maximum, two sums, -)
// raw_stats: the same of the logits before they were edited, by lse_chunk.wgsl; `stats` itself where they were not
// result: [outputs, K + 2] : (log-sum-exp of raw l, log-sum-exp of l / temperature) as bits; (logit of the target as
// bits, k); then the k best (id, logit as bits)

struct Params {
    tokens: u32,
    vocab: u32,
    chunks: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> logits: array<f32>;
@group(0) @binding(1) var<storage, read> outputs: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> best: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read> stats: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> raw_stats: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> result: array<vec2<u32>>;

const NONE = 0xffffffffu;
const LOWEST = -3.0e38;
var<workgroup> top_logits: array<f32, WORKGROUP>;
var<workgroup> top_ids: array<u32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let output = workgroup.x;
    let k = min(outputs[output].w, K);
    let place = output * p.chunks * K;
    let to = output * (K + 2u);

    var last_logit = 3.4e38;
    var last_id = 0u;
    var mine = LOWEST;
    var mine_id = NONE;
    var search = true;
    for (var i = 0u; i < k; i++) {
        if search {
            mine = LOWEST;
            mine_id = NONE;
            for (var c = thread; c < p.chunks; c += WORKGROUP) {
                for (var j = 0u; j < k; j++) {
                    let entry = best[place + c * K + j];
                    let l = bitcast<f32>(entry.y);
                    let open = l < last_logit || (l == last_logit && entry.x > last_id);
                    if open && (l > mine || (l == mine && entry.x < mine_id)) {
                        mine = l;
                        mine_id = entry.x;
                    }
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
            result[to + 2u + i] = vec2<u32>(id, bitcast<u32>(logit));
        }
        search = id == mine_id;
        last_logit = logit;
        last_id = id;
        workgroupBarrier();
    }
    if thread == 0u {
        let inverse = bitcast<f32>(outputs[output].z);
        // Of the raw logits, and of those that the candidates are of.
        var top = vec2<f32>(LOWEST);
        for (var c = 0u; c < p.chunks; c++) {
            let at = output * p.chunks + c;
            top = max(top, vec2<f32>(raw_stats[at].x, stats[at].x));
        }
        var sum = vec2<f32>(0.0);
        for (var c = 0u; c < p.chunks; c++) {
            let r = raw_stats[output * p.chunks + c];
            let s = stats[output * p.chunks + c];
            sum += vec2<f32>(r.y, s.z) * vec2<f32>(exp(r.x - top.x), exp((s.x - top.y) * inverse));
        }
        let lse = vec2<f32>(top.x + log(sum.x), top.y * inverse + log(sum.y));
        result[to] = bitcast<vec2<u32>>(lse);
        result[to + 1u] = vec2<u32>(bitcast<u32>(logits[target_place(output)]), k);
    }
}

// Where the target's logit stands.
fn target_place(output: u32) -> u32 {
    return output * p.vocab + min(outputs[output].y, p.vocab - 1u);
}
