// Attention of HEADS query heads of one kv head over one split of the keys of one token, by a workgroup; the results are
// in `sums`, `weight_sums` and `tops` when it returns.
//
// Keys are scored by KEY_LANES threads each, KEYS at a time; then come the maxima of pages, the weights, and the sums,
// with a thread for each four dimensions of COLUMN_HEADS heads.
#import kv
#import quad
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
@group(0) @binding(0) var<storage, read> q: array<Quad>;
@group(0) @binding(1) var<storage, read> keys: array<KvFour>;
@group(0) @binding(2) var<storage, read> values: array<KvFour>;
@group(0) @binding(3) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;

// Keys that a thread scores, and the four shares of a score that it makes.
const KEYS = (PAGE * KEY_LANES + WORKGROUP - 1u) / WORKGROUP;
const SHARES = 4u / KEY_LANES;
const COLUMNS = FOURS * HEADS / COLUMN_HEADS;
const OWNED = (COLUMNS + WORKGROUP - 1u) / WORKGROUP;
const SPLIT = PAGE * SPLIT_PAGES;
var<workgroup> shares: array<f32, select(1u, HEADS * PAGE * 4u, KEY_LANES > 1u)>;
// Scores, then weights, of each head's keys; the maximum up to each page, and what shrinks the sums made before it.
var<workgroup> scores: array<f32, HEADS * SPLIT>;
var<workgroup> tops: array<f32, HEADS * SPLIT_PAGES>;
var<workgroup> shrinks: array<f32, HEADS * SPLIT_PAGES>;
// What comes out: weighted sums of values, not divided, and sums of weights.
var<workgroup> sums: array<vec4<f32>, HEADS * FOURS>;
var<workgroup> weight_sums: array<f32, HEADS>;

// head0: the first query head, of the kv head `local` of this buffer; the split has a key.
fn attend(token: u32, head0: u32, local: u32, split: u32, thread: u32) {
    let length = tokens[token].y + 1u;
    let table = tokens[token].z;
    let first_page = split * SPLIT_PAGES;
    let last_page = min(first_page + SPLIT_PAGES, (length + PAGE - 1u) / PAGE);
    let q0 = (token * p.heads + head0) * FOURS;
    let page_count = last_page - first_page;
    let key_count = min(SPLIT, length - first_page * PAGE);
    let lane = thread % KEY_LANES;

    for (var page = 0u; page < page_count; page++) {
        let base = (pages[table + first_page + page] * p.kv_heads_here + local) * PAGE * FOURS;
        let count = min(PAGE, key_count - page * PAGE);
        // Share by share, so that a query is loaded once for all keys of a thread.
        var score: array<vec4<f32>, KEYS * HEADS>;
        for (var c = 0u; c < SHARES; c++) {
            var acc: array<vec4<f32>, KEYS * HEADS>;
            for (var d = 0u; d < FOURS; d += 4u) {
                let at = d + c * KEY_LANES + lane;
                var query: array<vec4<f32>, HEADS>;
                for (var h = 0u; h < HEADS; h++) {
                    query[h] = bitcast<vec4<f32>>(quad(q[q0 + h * FOURS + at]));
                }
                for (var i = 0u; i < KEYS; i++) {
                    let key = min(thread / KEY_LANES + i * (WORKGROUP / KEY_LANES), count - 1u);
                    let k = kv_unpack(keys[base + key * FOURS + at]);
                    for (var h = 0u; h < HEADS; h++) {
                        acc[i * HEADS + h] = fma(query[h], k, acc[i * HEADS + h]);
                    }
                }
            }
            for (var i = 0u; i < KEYS * HEADS; i++) {
                score[i] = vec4<f32>(score[i].yzw, share_sum(acc[i]));
            }
        }
        for (var i = 0u; i < KEYS; i++) {
            let key = thread / KEY_LANES + i * (WORKGROUP / KEY_LANES);
            for (var h = 0u; h < HEADS; h++) {
                if key < PAGE {
                    if KEY_LANES == 1u {
                        let s = score[i * HEADS + h];
                        scores[h * SPLIT + page * PAGE + key] = select(LOWEST, (s.x + s.y) + (s.z + s.w), key < count);
                    } else {
                        shares[(h * PAGE + key) * 4u + lane] = score[i * HEADS + h].w;
                    }
                }
            }
        }
        if KEY_LANES > 1u {
            workgroupBarrier();
            for (var i = thread; i < HEADS * PAGE; i += WORKGROUP) {
                let s = (shares[4u * i] + shares[4u * i + 1u]) + (shares[4u * i + 2u] + shares[4u * i + 3u]);
                scores[i / PAGE * SPLIT + page * PAGE + i % PAGE] = select(LOWEST, s, i % PAGE < count);
            }
            workgroupBarrier();
        }
    }
    workgroupBarrier();

    for (var i = thread; i < HEADS * page_count; i += WORKGROUP) {
        let at = i / page_count * SPLIT + i % page_count * PAGE;
        var top = LOWEST;
        for (var key = 0u; key < PAGE; key++) {
            top = max(top, scores[at + key]);
        }
        tops[i / page_count * SPLIT_PAGES + i % page_count] = top;
    }
    workgroupBarrier();
    for (var h = thread; h < HEADS; h += WORKGROUP) {
        var top = LOWEST;
        for (var page = 0u; page < page_count; page++) {
            let new_top = max(top, tops[h * SPLIT_PAGES + page]);
            shrinks[h * SPLIT_PAGES + page] = exp(top - new_top);
            tops[h * SPLIT_PAGES + page] = new_top;
            top = new_top;
        }
    }
    workgroupBarrier();
    for (var h = 0u; h < HEADS; h++) {
        for (var key = thread; key < page_count * PAGE; key += WORKGROUP) {
            scores[h * SPLIT + key] = exp(scores[h * SPLIT + key] - tops[h * SPLIT_PAGES + key / PAGE]);
        }
    }
    workgroupBarrier();

    for (var h = thread; h < HEADS; h += WORKGROUP) {
        var sum = 0.0;
        for (var page = 0u; page < page_count; page++) {
            var page_sum = 0.0;
            for (var key = page * PAGE; key < min(key_count, (page + 1u) * PAGE); key++) {
                page_sum += scores[h * SPLIT + key];
            }
            sum = fma(sum, shrinks[h * SPLIT_PAGES + page], page_sum);
        }
        weight_sums[h] = sum;
    }
    var out: array<vec4<f32>, OWNED * COLUMN_HEADS>;
    for (var page = 0u; page < page_count; page++) {
        let base = (pages[table + first_page + page] * p.kv_heads_here + local) * PAGE * FOURS;
        let count = min(PAGE, key_count - page * PAGE);
        for (var i = 0u; i < OWNED; i++) {
            let h0 = column_of(thread, i) / FOURS * COLUMN_HEADS;
            for (var h = 0u; h < COLUMN_HEADS; h++) {
                out[i * COLUMN_HEADS + h] = out[i * COLUMN_HEADS + h] * shrinks[(h0 + h) * SPLIT_PAGES + page];
            }
        }
        for (var key = 0u; key < count; key++) {
            // All columns of a thread share their heads, or each has one: both load a weight once.
            var w: array<f32, COLUMN_HEADS>;
            for (var i = 0u; i < OWNED; i++) {
                let column = column_of(thread, i);
                let h0 = column / FOURS * COLUMN_HEADS;
                if i == 0u || COLUMN_HEADS < HEADS {
                    for (var h = 0u; h < COLUMN_HEADS; h++) {
                        w[h] = scores[(h0 + h) * SPLIT + page * PAGE + key];
                    }
                }
                let v = kv_unpack(values[base + key * FOURS + column % FOURS]);
                for (var h = 0u; h < COLUMN_HEADS; h++) {
                    out[i * COLUMN_HEADS + h] = fma(vec4<f32>(w[h]), v, out[i * COLUMN_HEADS + h]);
                }
            }
        }
    }
    for (var i = 0u; i < OWNED; i++) {
        let column = thread + i * WORKGROUP;
        if column < COLUMNS {
            for (var h = 0u; h < COLUMN_HEADS; h++) {
                sums[(column / FOURS * COLUMN_HEADS + h) * FOURS + column % FOURS] = out[i * COLUMN_HEADS + h];
            }
        }
    }
    workgroupBarrier();
}

// Column i of a thread; the last ones are worked on twice where they do not divide.
fn column_of(thread: u32, i: u32) -> u32 {
    return min(thread + i * WORKGROUP, COLUMNS - 1u);
}

// The maximum score of a head, when `attend` has returned.
fn top_of(token: u32, split: u32, head: u32) -> f32 {
    let keys_left = tokens[token].y + 1u - split * SPLIT;
    return tops[head * SPLIT_PAGES + (min(keys_left, SPLIT) + PAGE - 1u) / PAGE - 1u];
}
