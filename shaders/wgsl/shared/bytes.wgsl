// The four signed bytes of a word, as floats.
fn signed_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xI8(word));
}

// The four unsigned bytes of a word, as floats.
fn unsigned_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(unpack4xU8(word));
}

// Subtracts n (1..127) from each of four bytes that are below 128; the results are signed bytes.
fn bytes_minus(words: vec4<u32>, n: u32) -> vec4<u32> {
    return ((words | vec4<u32>(0x80808080u)) - vec4<u32>(n * 0x01010101u)) ^ vec4<u32>(0x80808080u);
}

// Half number i of a buffer of packed halves, given its word.
fn half_of(word: u32, i: u32) -> f32 {
    let pair = unpack2x16float(word);
    return select(pair.x, pair.y, (i & 1u) == 1u);
}
