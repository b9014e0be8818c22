// Keys and values as floats, four a vector.
alias KvFour = vec4<f32>;

fn kv_unpack(v: KvFour) -> vec4<f32> {
    return v;
}

fn kv_pack(v: vec4<f32>) -> KvFour {
    return v;
}
