// Q4_K (ggml): superblocks of 256 values, value = d * s * q - dmin * m, q in 0..15; s and m have six bits and
// belong to a block of 32, d and dmin are halves.
// quants[i]: 16 bytes; byte j holds element j in its low and element j + 16 in its high nibble.
// scales: s | m << 8 of two blocks a word. supers: (d, dmin).
#import bytes
#import block_sum
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Quad>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@group(0) @binding(2) var<storage, read> supers: array<u32>;

struct Words { lo: vec4<u32>, hi: vec4<u32> }

fn block_words(index: u32) -> Words {
    let w = quad(quants[index]);
    return Words(w & vec4<u32>(0x0f0f0f0fu), (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu));
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    let sm = scales[index >> 1u] >> ((index & 1u) * 16u);
    let d = unpack2x16float(supers[super_at]);
    let s = d.x * f32(sm & 0x3fu);
    return vec3<f32>(s, s, -(d.y * f32((sm >> 8u) & 0x3fu)));
}
#import words_as_values
