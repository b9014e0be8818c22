// Rotary position embedding of queries and keys (Su et al. 2021, arXiv:2104.09864; the half-split pairing of
// GPT-NeoX), with RMSNorm of each head before it where the model has one (Qwen3), and the write of keys and
// values into their pages.
//
// qkv: [tokens, (heads + 2 * kv_heads) * HEAD_DIM] f32; norms: [2, HEAD_DIM] f32, of q and k
// tokens: [tokens] (id, position, first entry of the page table, -); pages: page of each 32 positions
// rotation: [tokens, pairs] (cos, sin); q: [tokens, heads, HEAD_DIM] f32, scaled by `scale`
// keys, values: [page, kv_heads_here, 32, HEAD_DIM]
// One dispatch serves the kv heads first_kv .. first_kv + kv_heads_here, whose pages fit one binding, and the
// query heads that read them. One thread writes four rotated pairs, or four dimensions that pass through.
#import kv

struct Params {
    tokens: u32,
    heads: u32,
    kv_heads: u32,
    first_kv: u32,
    kv_heads_here: u32,
    pairs: u32,
    use_norms: u32,
    scale: f32,
    eps: f32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> norms: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> pages: array<u32>;
@group(0) @binding(4) var<storage, read> rotation: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> q: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> keys: array<KvFour>;
@group(0) @binding(7) var<storage, read_write> values: array<KvFour>;

const FOURS = HEAD_DIM / 4u;
const PAGE = 32u;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let token = id.y;
    let rotated = p.pairs / 4u;
    let items = FOURS - rotated;
    let unit = id.x / items;
    let item = id.x % items;
    let group = p.heads / p.kv_heads;
    let queries = group * p.kv_heads_here;
    if token >= p.tokens || unit >= queries + 2u * p.kv_heads_here {
        return;
    }
    let is_query = unit < queries;
    let is_key = !is_query && unit < queries + p.kv_heads_here;

    // The head's place in a row of qkv.
    var column = p.first_kv * group + unit;
    var local = 0u;
    if is_key {
        local = unit - queries;
        column = p.heads + p.first_kv + local;
    } else if !is_query {
        local = unit - queries - p.kv_heads_here;
        column = p.heads + p.kv_heads + p.first_kv + local;
    }
    let row = (token * (p.heads + 2u * p.kv_heads) + column) * FOURS;

    // Rotated items take the vectors item and item + rotated, the others one vector behind the rotated part.
    let rotates = item < rotated;
    let low = select(item + rotated, item, rotates);
    let high = item + rotated;
    var a = qkv[row + low];
    var b = qkv[row + high];
    if p.use_norms == 1u && (is_query || is_key) {
        var squares = vec4<f32>(0.0);
        for (var i = 0u; i < FOURS; i++) {
            let v = qkv[row + i];
            squares = fma(v, v, squares);
        }
        let mean = ((squares.x + squares.y) + (squares.z + squares.w)) / f32(HEAD_DIM);
        let n = 1.0 / sqrt(mean + p.eps);
        let norm = select(FOURS, 0u, is_query);
        a = a * n * norms[norm + low];
        b = b * n * norms[norm + high];
    }
    if rotates && (is_query || is_key) {
        let r0 = rotation[(token * p.pairs + 4u * item) / 2u];
        let r1 = rotation[(token * p.pairs + 4u * item) / 2u + 1u];
        let cosine = vec4<f32>(r0.x, r0.z, r1.x, r1.z);
        let sine = vec4<f32>(r0.y, r0.w, r1.y, r1.w);
        let rotated_a = fma(a, cosine, -(b * sine));
        b = fma(b, cosine, a * sine);
        a = rotated_a;
    }
    if is_query {
        let base = (token * p.heads + column) * FOURS;
        q[base + low] = a * p.scale;
        if rotates {
            q[base + high] = b * p.scale;
        }
        return;
    }
    let position = tokens[token].y;
    let page = pages[tokens[token].z + position / PAGE];
    let base = ((page * p.kv_heads_here + local) * PAGE + position % PAGE) * FOURS;
    if is_key {
        keys[base + low] = kv_pack(a);
        if rotates {
            keys[base + high] = kv_pack(b);
        }
    } else {
        values[base + low] = kv_pack(a);
        if rotates {
            values[base + high] = kv_pack(b);
        }
    }
}
