// Activations as q8: blocks of 32 signed bytes with scale amax / 127.
//
// Tokens stand in tiles of `act_lanes`; word w of the block at a position, token t of tile T:
// act_words[((T * blocks + position) * 8 + w) * act_lanes + t]; act_scales likewise without w: (d, d * sum q).
#import segments

fn act_store(token: u32, block: u32, blocks: u32, act_lanes: u32, v: array<vec4<f32>, 8>) {
    let a = max(max(abs(v[0]), abs(v[1])), max(abs(v[2]), abs(v[3])));
    let b = max(max(abs(v[4]), abs(v[5])), max(abs(v[6]), abs(v[7])));
    let top = max(a, b);
    let amax = max(max(top.x, top.y), max(top.z, top.w));
    let inverse = select(0.0, 127.0 / amax, amax > 0.0);
    let base = (token / act_lanes) * blocks + block_position(blocks, block);
    let lane = token % act_lanes;
    let at = base * 8u * act_lanes + lane;
    var sum = act_word(at, v[0] * inverse);
    sum += act_word(at + act_lanes, v[1] * inverse);
    sum += act_word(at + 2u * act_lanes, v[2] * inverse);
    sum += act_word(at + 3u * act_lanes, v[3] * inverse);
    sum += act_word(at + 4u * act_lanes, v[4] * inverse);
    sum += act_word(at + 5u * act_lanes, v[5] * inverse);
    sum += act_word(at + 6u * act_lanes, v[6] * inverse);
    sum += act_word(at + 7u * act_lanes, v[7] * inverse);
    let d = amax / 127.0;
    act_scales[base * act_lanes + lane] = vec2<f32>(d, d * f32(sum));
}

// Writes four values rounded to bytes; returns their sum.
fn act_word(at: u32, v: vec4<f32>) -> i32 {
    let q = vec4<i32>(round(v));
    act_words[at] = pack4xI8(q);
    return (q.x + q.y) + (q.z + q.w);
}
