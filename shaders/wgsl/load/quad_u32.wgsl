// Eight and sixteen bytes as words.
alias Pair = vec2<u32>;
alias Quad = vec4<u32>;

fn quad(v: Quad) -> vec4<u32> {
    return v;
}

fn pair(v: Pair) -> vec2<u32> {
    return v;
}
