// Activations as floats: blocks of 32 with their sum.
//
// Tokens stand in tiles of `act_lanes`; element k of the block at a position, token t of tile T:
// act_words[((T * blocks + position) * 32 + k) * act_lanes + t]; act_scales likewise without k: (1, sum).
#import segments

fn act_store(token: u32, block: u32, blocks: u32, act_lanes: u32, v: array<vec4<f32>, 8>) {
    let base = (token / act_lanes) * blocks + block_position(blocks, block);
    let lane = token % act_lanes;
    let at = base * 32u * act_lanes + lane;
    let step = 4u * act_lanes;
    var sum = act_four(at, act_lanes, v[0]);
    sum += act_four(at + step, act_lanes, v[1]);
    sum += act_four(at + 2u * step, act_lanes, v[2]);
    sum += act_four(at + 3u * step, act_lanes, v[3]);
    sum += act_four(at + 4u * step, act_lanes, v[4]);
    sum += act_four(at + 5u * step, act_lanes, v[5]);
    sum += act_four(at + 6u * step, act_lanes, v[6]);
    sum += act_four(at + 7u * step, act_lanes, v[7]);
    act_scales[base * act_lanes + lane] = vec2<f32>(1.0, sum);
}

// Writes four values; returns their sum.
fn act_four(at: u32, act_lanes: u32, v: vec4<f32>) -> f32 {
    act_words[at] = bitcast<u32>(v.x);
    act_words[at + act_lanes] = bitcast<u32>(v.y);
    act_words[at + 2u * act_lanes] = bitcast<u32>(v.z);
    act_words[at + 3u * act_lanes] = bitcast<u32>(v.w);
    return (v.x + v.y) + (v.z + v.w);
}
