// Causal attention of many queries (Dao et al. 2022, arXiv:2205.14135, without the backward pass): one workgroup a
// (tile of at most TILE tokens of one sequence, query head).
//
// q: [tokens, heads, HEAD_DIM] f32, scaled; keys, values: [page, kv_heads_here, 32, HEAD_DIM]
// tiles: (first token, tokens, -, -); tokens: (id, position, first entry of the page table, -)
// out: [tokens, heads, HEAD_DIM] f32
// A token is worked on by ROW_LANES threads, each with its share of the dimensions (shared/attention.wgsl); all tokens
// of a tile read the same key at a time.
#import kv
#import attention

struct Params {
    tokens: u32,
    heads: u32,
    kv_heads: u32,
    first_kv: u32,
    kv_heads_here: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> keys: array<KvFour>;
@group(0) @binding(2) var<storage, read> values: array<KvFour>;
@group(0) @binding(3) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
@group(0) @binding(5) var<storage, read> tiles: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> out: array<vec4<f32>>;

// Lane c of a token owns the vectors c + 4 i (all four shares when ROW_LANES is 1).
const SHARES = 4u / ROW_LANES;
const OWNED = FOURS / ROW_LANES;
var<workgroup> shares: array<f32, select(1u, TILE * PAGE * 4u, ROW_LANES > 1u)>;

@compute @workgroup_size(TILE * ROW_LANES)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = p.heads / p.kv_heads;
    let head = p.first_kv * group + workgroup.y;
    let local = workgroup.y / group;
    let tile = tiles[workgroup.x];
    let slot = thread / ROW_LANES;
    let lane = thread % ROW_LANES;
    let token = tile.x + min(slot, tile.y - 1u);
    let position = tokens[token].y;
    let table = tokens[tile.x].z;
    let length = tokens[tile.x].y + tile.y;
    let page_count = (length + PAGE - 1u) / PAGE;
    let row = (token * p.heads + head) * FOURS + lane;

    var query: array<vec4<f32>, OWNED>;
    var total: array<vec4<f32>, OWNED>;
    var part: array<vec4<f32>, OWNED>;
    for (var i = 0u; i < OWNED; i++) {
        query[i] = q[row + i * ROW_LANES];
    }
    var total_top = LOWEST;
    var total_sum = 0.0;
    var top = LOWEST;
    var sum = 0.0;
    for (var page = 0u; page < page_count; page++) {
        let base = (pages[table + page] * p.kv_heads_here + local) * PAGE * FOURS + lane;
        let count = min(PAGE, length - page * PAGE);
        var scores: array<f32, PAGE>;
        for (var key = 0u; key < count; key++) {
            var acc: array<vec4<f32>, SHARES>;
            for (var i = 0u; i < OWNED; i += SHARES) {
                for (var s = 0u; s < SHARES; s++) {
                    let k = kv_unpack(keys[base + key * FOURS + (i + s) * ROW_LANES]);
                    acc[s] = fma(query[i + s], k, acc[s]);
                }
            }
            if ROW_LANES == 1u {
                scores[key] = (share_sum(acc[0]) + share_sum(acc[1u % SHARES]))
                    + (share_sum(acc[2u % SHARES]) + share_sum(acc[3u % SHARES]));
            } else {
                shares[(slot * PAGE + key) * 4u + lane] = share_sum(acc[0]);
            }
        }
        if ROW_LANES > 1u {
            workgroupBarrier();
            for (var key = 0u; key < count; key++) {
                let s = (slot * PAGE + key) * 4u;
                scores[key] = (shares[s] + shares[s + 1u]) + (shares[s + 2u] + shares[s + 3u]);
            }
            workgroupBarrier();
        }
        if page * PAGE <= position {
            let seen = min(count, position - page * PAGE + 1u);
            var new_top = top;
            for (var key = 0u; key < seen; key++) {
                new_top = max(new_top, scores[key]);
            }
            let shrink = exp(top - new_top);
            for (var i = 0u; i < OWNED; i++) {
                part[i] = part[i] * shrink;
            }
            var page_sum = 0.0;
            top = new_top;
            for (var key = 0u; key < seen; key++) {
                let w = exp(scores[key] - top);
                page_sum += w;
                for (var i = 0u; i < OWNED; i++) {
                    let v = kv_unpack(values[base + key * FOURS + i * ROW_LANES]);
                    part[i] = fma(vec4<f32>(w), v, part[i]);
                }
            }
            sum = fma(sum, shrink, page_sum);
            // A split ends with its last page or with the query itself.
            if page % SPLIT_PAGES == SPLIT_PAGES - 1u || (page + 1u) * PAGE > position {
                let m = merge(total_top, total_sum, top, sum);
                total_top = m.top;
                total_sum = m.sum;
                for (var i = 0u; i < OWNED; i++) {
                    total[i] = fma(total[i], vec4<f32>(m.keep), part[i] * m.add);
                    part[i] = vec4<f32>(0.0);
                }
                top = LOWEST;
                sum = 0.0;
            }
        }
    }
    if slot < tile.y {
        for (var i = 0u; i < OWNED; i++) {
            out[row + i * ROW_LANES] = total[i] / total_sum;
        }
    }
}
