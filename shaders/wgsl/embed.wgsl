// x[t][k] = E[token t][k]: one row of the embedding a token, dequantised.
//
// tokens: [tokens] (id, position, first entry of the page table, -)
// x: [tokens, hidden] f32, hidden a multiple of 4
// One thread writes one block of 32. Tables larger than a binding come in row chunks: an id outside this
// chunk is left to another dispatch.
#import quant
#import segments

struct Params {
    tokens: u32,
    blocks: u32,
    hidden: u32,
    first_row: u32,
    rows: u32,
}

var<immediate> p: Params;
@group(0) @binding(3) var<storage, read> tokens: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> x: array<vec4<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let block = id.x;
    let token = id.y;
    if block >= p.blocks || token >= p.tokens {
        return;
    }
    let row = tokens[token].x - p.first_row;
    if row >= p.rows {
        return;
    }
    let index = block_index(row, p.blocks, block_position(p.blocks, block));
    let scales = block_scales(index, super_index(row, p.blocks, block));
    var v = block_values(index);
    let fours = p.hidden / 4u;
    for (var i = 0u; i < 8u; i++) {
        if block * 8u + i < fours {
            let scale = select(scales.x, scales.y, i >= 4u);
            x[token * fours + block * 8u + i] = fma(vec4<f32>(scale), v[i], vec4<f32>(scales.z));
        }
    }
}
