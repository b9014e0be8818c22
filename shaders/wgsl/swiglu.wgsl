// h = silu(gate) * up, silu(g) = g / (1 + exp(-g)), written as activations for the down projection
// (Shazeer 2020, arXiv:2002.05202).
//
// x: [tokens, 2 * width] f32, width a multiple of 4: gates in the first half of a row and ups in the second, or, where
// `paired` is 1 and width a multiple of 8, in turns of 8. One thread writes one block of 32 values of one token.
#import act_store

struct Params {
    tokens: u32,
    width: u32,
    blocks: u32,
    act_lanes: u32,
    paired: u32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read_write> act_words: array<u32>;
@group(0) @binding(2) var<storage, read_write> act_scales: array<vec2<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let block = id.x;
    let token = id.y;
    if block >= p.blocks || token >= p.tokens {
        return;
    }
    let fours = p.width / 4u;
    let row = token * 2u * fours;
    var v: array<vec4<f32>, 8>;
    for (var i = 0u; i < 8u; i++) {
        let k = block * 8u + i;
        if k < fours {
            let in_turns = k / 2u * 4u + k % 2u;
            let at = row + select(k, in_turns, p.paired == 1u);
            let gate = x[at];
            v[i] = gate / (1.0 + exp(-gate)) * x[at + select(fours, 2u, p.paired == 1u)];
        }
    }
    act_store(token, block, p.blocks, p.act_lanes, v);
}
