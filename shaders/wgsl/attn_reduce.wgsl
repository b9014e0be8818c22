// Merges the splits of attn_decode.wgsl and writes the result as activations for the output projection.
//
// part_out: [tokens, heads, splits, HEAD_DIM] f32; part_stat: [tokens, heads, splits] (max, sum)
// tokens: [tokens] (id, position, -, -). One thread writes one block of 32 values of one token; HEAD_DIM is a
// multiple of 16, so each half of a block lies in one head.
#import attention
#import act_store

struct Params {
    tokens: u32,
    heads: u32,
    splits: u32,
    blocks: u32,
    act_lanes: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> part_out: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> part_stat: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> act_words: array<u32>;
@group(0) @binding(4) var<storage, read_write> act_scales: array<vec2<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let block = id.x;
    let token = id.y;
    if block >= p.blocks || token >= p.tokens {
        return;
    }
    let used = tokens[token].y / (PAGE * SPLIT_PAGES) + 1u;
    var v: array<vec4<f32>, 8>;
    for (var half = 0u; half < 2u; half++) {
        let k = block * 8u + half * 4u;
        let head = k / FOURS;
        if head < p.heads {
            let part0 = (token * p.heads + head) * p.splits;
            var top = LOWEST;
            var sum = 0.0;
            for (var split = 0u; split < used; split++) {
                let stat = part_stat[part0 + split];
                let m = merge(top, sum, stat.x, stat.y);
                top = m.top;
                sum = m.sum;
                for (var i = 0u; i < 4u; i++) {
                    let o = part_out[(part0 + split) * FOURS + k % FOURS + i];
                    v[half * 4u + i] = fma(v[half * 4u + i], vec4<f32>(m.keep), o * m.add);
                }
            }
            for (var i = 0u; i < 4u; i++) {
                v[half * 4u + i] = v[half * 4u + i] / sum;
            }
        }
    }
    act_store(token, block, p.blocks, p.act_lanes, v);
}
