// Activations as floats: blocks of 32 with their sum.
//
// Tokens stand in tiles of `act_lanes`; element k of the block at a position, token t of tile T:
// act_words[((T * blocks + position) * 32 + k) * act_lanes + t]; act_scales likewise without k: (1, sum).
#import segments

fn act_store(token: u32, block: u32, blocks: u32, act_lanes: u32, v: array<vec4<f32>, 8>) {
    var x = v;
    let base = (token / act_lanes) * blocks + block_position(blocks, block);
    let lane = token % act_lanes;
    var sum = 0.0;
    for (var i = 0u; i < 8u; i++) {
        for (var c = 0u; c < 4u; c++) {
            sum += x[i][c];
            act_words[(base * 32u + 4u * i + c) * act_lanes + lane] = bitcast<u32>(x[i][c]);
        }
    }
    act_scales[base * act_lanes + lane] = vec2<f32>(1.0, sum);
}
