// Keys and values as halves, four in two words.
alias KvFour = vec2<u32>;

fn kv_unpack(v: KvFour) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(v.x), unpack2x16float(v.y));
}

fn kv_pack(v: vec4<f32>) -> KvFour {
    return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
}
