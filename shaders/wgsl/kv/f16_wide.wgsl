// Keys and values as halves, four in a long word (load/quad_u64.wgsl says why).
alias KvFour = u64;

fn kv_unpack(v: KvFour) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(u32(v)), unpack2x16float(u32(v >> 32u)));
}

fn kv_pack(v: vec4<f32>) -> KvFour {
    return u64(pack2x16float(v.xy)) | (u64(pack2x16float(v.zw)) << 32u);
}
