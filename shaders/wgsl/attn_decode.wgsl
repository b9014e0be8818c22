// Attention of single queries over long contexts: softmax(q K') V, one workgroup a (kv head, split, token).
//
// q: [tokens, heads, HEAD_DIM] f32, scaled; keys, values: [page, kv_heads_here, 32, HEAD_DIM]
// tokens: [tokens] (id, position, first entry of the page table, -); pages: page of each 32 positions
// part_out: [tokens, heads, splits, HEAD_DIM] f32, not divided; part_stat: [tokens, heads, splits] (max, sum)
// HEADS query heads of one kv head share the reading of keys and values. A page is scored by KEY_LANES threads
// a key, then weighed, then summed with a thread for each four dimensions of each head.
#import kv
#import attention

struct Params {
    tokens: u32,
    heads: u32,
    kv_heads: u32,
    first_kv: u32,
    kv_heads_here: u32,
    splits: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> keys: array<KvFour>;
@group(0) @binding(2) var<storage, read> values: array<KvFour>;
@group(0) @binding(3) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
@group(0) @binding(5) var<storage, read_write> part_out: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> part_stat: array<vec2<f32>>;

const OWNED = (HEADS * FOURS + WORKGROUP - 1u) / WORKGROUP;
var<workgroup> shares: array<f32, HEADS * PAGE * 4u>;
var<workgroup> scores: array<f32, HEADS * PAGE>;
var<workgroup> weights: array<f32, HEADS * PAGE>;
var<workgroup> running: array<f32, HEADS>;

fn top_score(head: u32, start: f32) -> f32 {
    var top = start;
    for (var key = 0u; key < PAGE; key++) {
        top = max(top, scores[head * PAGE + key]);
    }
    return top;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let parts = (p.heads / p.kv_heads) / HEADS;
    let local = workgroup.x / parts;
    let split = workgroup.y;
    let token = workgroup.z;
    let head0 = (p.first_kv + local) * (p.heads / p.kv_heads) + (workgroup.x % parts) * HEADS;
    let length = tokens[token].y + 1u;
    let table = tokens[token].z;
    let first_page = split * SPLIT_PAGES;
    let last_page = min(first_page + SPLIT_PAGES, (length + PAGE - 1u) / PAGE);

    var out: array<vec4<f32>, OWNED>;
    var tops: array<f32, OWNED>;
    var sums: array<f32, OWNED>;
    for (var i = 0u; i < OWNED; i++) {
        tops[i] = LOWEST;
    }
    for (var h = thread; h < HEADS; h += WORKGROUP) {
        running[h] = LOWEST;
    }
    for (var page = first_page; page < last_page; page++) {
        let base = (pages[table + page] * p.kv_heads_here + local) * PAGE * FOURS;
        let count = min(PAGE, length - page * PAGE);
        for (var i = thread; i < PAGE * KEY_LANES; i += WORKGROUP) {
            let key = i / KEY_LANES;
            for (var c = i % KEY_LANES; c < 4u; c += KEY_LANES) {
                var acc: array<vec4<f32>, HEADS>;
                if key < count {
                    for (var d = c; d < FOURS; d += 4u) {
                        let k = kv_unpack(keys[base + key * FOURS + d]);
                        for (var h = 0u; h < HEADS; h++) {
                            acc[h] = fma(q[(token * p.heads + head0 + h) * FOURS + d], k, acc[h]);
                        }
                    }
                }
                for (var h = 0u; h < HEADS; h++) {
                    shares[(h * PAGE + key) * 4u + c] = share_sum(acc[h]);
                }
            }
        }
        workgroupBarrier();
        for (var i = thread; i < HEADS * PAGE; i += WORKGROUP) {
            let s = (shares[4u * i] + shares[4u * i + 1u]) + (shares[4u * i + 2u] + shares[4u * i + 3u]);
            scores[i] = select(LOWEST, s, i % PAGE < count);
        }
        workgroupBarrier();
        // Every thread keeps the running maximum of the heads whose dimensions it owns; those that weigh keys
        // read the maximum so far from shared memory. All are maxima of the same scores.
        for (var i = thread; i < HEADS * PAGE; i += WORKGROUP) {
            weights[i] = exp(scores[i] - top_score(i / PAGE, running[i / PAGE]));
        }
        for (var i = 0u; i < OWNED; i++) {
            let head = min((thread + i * WORKGROUP) / FOURS, HEADS - 1u);
            let top = top_score(head, tops[i]);
            let shrink = exp(tops[i] - top);
            out[i] = out[i] * shrink;
            sums[i] = sums[i] * shrink;
            tops[i] = top;
        }
        workgroupBarrier();
        for (var i = 0u; i < OWNED; i++) {
            let item = thread + i * WORKGROUP;
            if item < HEADS * FOURS {
                let head = item / FOURS;
                for (var key = 0u; key < count; key++) {
                    let w = weights[head * PAGE + key];
                    sums[i] += w;
                    out[i] = fma(vec4<f32>(w), kv_unpack(values[base + key * FOURS + item % FOURS]), out[i]);
                }
                if item % FOURS == 0u {
                    running[head] = tops[i];
                }
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < OWNED; i++) {
        let item = thread + i * WORKGROUP;
        if item < HEADS * FOURS && first_page < last_page {
            let part = (token * p.heads + head0 + item / FOURS) * p.splits + split;
            part_out[part * FOURS + item % FOURS] = out[i];
            if item % FOURS == 0u {
                part_stat[part] = vec2<f32>(tops[i], sums[i]);
            }
        }
    }
}
