// Eight and sixteen bytes as long words: software drivers pay for every component they load.
alias Pair = u64;
alias Quad = vec2<u64>;

fn quad(v: Quad) -> vec4<u32> {
    return vec4<u32>(u32(v.x), u32(v.x >> 32u), u32(v.y), u32(v.y >> 32u));
}

fn pair(v: Pair) -> vec2<u32> {
    return vec2<u32>(u32(v), u32(v >> 32u));
}
