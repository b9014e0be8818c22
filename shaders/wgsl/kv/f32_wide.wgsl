// Keys and values as floats, four in two long words (load/quad_u64.wgsl says why).
alias KvFour = vec2<u64>;

fn kv_unpack(v: KvFour) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(u32(v.x), u32(v.x >> 32u), u32(v.y), u32(v.y >> 32u)));
}

fn kv_pack(v: vec4<f32>) -> KvFour {
    let w = bitcast<vec4<u32>>(v);
    return vec2<u64>(u64(w.x) | (u64(w.y) << 32u), u64(w.z) | (u64(w.w) << 32u));
}
