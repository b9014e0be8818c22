// Activations as q8: blocks of 32 signed bytes with scale amax / 127.
//
// Tokens stand in tiles of `act_lanes`; word w of the block at a position, token t of tile T:
// act_words[((T * blocks + position) * 8 + w) * act_lanes + t]; act_scales likewise without w: (d, d * sum q).
#import segments

fn act_store(token: u32, block: u32, blocks: u32, act_lanes: u32, v: array<vec4<f32>, 8>) {
    var x = v;
    var top = vec4<f32>(0.0);
    for (var i = 0u; i < 8u; i++) {
        top = max(top, abs(x[i]));
    }
    let amax = max(max(top.x, top.y), max(top.z, top.w));
    let d = amax / 127.0;
    let inverse = select(0.0, 127.0 / amax, amax > 0.0);
    let base = (token / act_lanes) * blocks + block_position(blocks, block);
    let lane = token % act_lanes;
    var sum = 0;
    for (var i = 0u; i < 8u; i++) {
        let q = vec4<i32>(round(x[i] * inverse));
        sum += (q.x + q.y) + (q.z + q.w);
        act_words[(base * 8u + i) * act_lanes + lane] = pack4xI8(q);
    }
    act_scales[base * act_lanes + lane] = vec2<f32>(d, d * f32(sum));
}
