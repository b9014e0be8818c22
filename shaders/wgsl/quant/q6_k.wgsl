// Q6_K (ggml): superblocks of 256 values, value = d * s * (q - 32), q in 0..63; s is a signed byte and belongs
// to 16 values, d is a half.
// quants[3 i .. 3 i + 2]: 16 bytes of low nibbles (byte j: elements j and j + 16), then 8 bytes of high bits (byte
// j: elements j, j + 8, j + 16 and j + 24, two bits each from the lowest).
// scales: the two s of two blocks a word. supers: d of two superblocks a word.
#import bytes
#import block_sum_halves
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Pair>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@group(0) @binding(2) var<storage, read> supers: array<u32>;

struct Words { lo: vec4<u32>, hi: vec4<u32> }

fn block_words(index: u32) -> Words {
    let a = pair(quants[3u * index]);
    let b = pair(quants[3u * index + 1u]);
    let h = pair(quants[3u * index + 2u]);
    let low = vec4<u32>(a, b);
    let mask = vec2<u32>(0x03030303u);
    let high_lo = vec4<u32>(h & mask, (h >> vec2<u32>(2u)) & mask);
    let high_hi = vec4<u32>((h >> vec2<u32>(4u)) & mask, (h >> vec2<u32>(6u)) & mask);
    return Words(
        bytes_minus((low & vec4<u32>(0x0f0f0f0fu)) | (high_lo << vec4<u32>(4u)), 32u),
        bytes_minus(((low >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu)) | (high_hi << vec4<u32>(4u)), 32u),
    );
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    let s = unpack4xI8(scales[index >> 1u] >> ((index & 1u) * 16u));
    let d = half_of(supers[super_at >> 1u], super_at);
    return vec3<f32>(d * f32(s.x), d * f32(s.y), 0.0);
}
#import words_as_values
