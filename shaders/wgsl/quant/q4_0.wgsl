// Q4_0 (ggml): 32 values, value = d * (q - 8), q in 0..15, d a half.
// quants[i]: 16 bytes; byte j holds element j in its low and element j + 16 in its high nibble.
// scales: d of two blocks a word.
#import bytes
#import block_sum
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Quad>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

struct Words { lo: vec4<u32>, hi: vec4<u32> }

// Signed bytes of the block stored at `index`.
fn block_words(index: u32) -> Words {
    let w = quad(quants[index]);
    return Words(
        bytes_minus(w & vec4<u32>(0x0f0f0f0fu), 8u),
        bytes_minus((w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu), 8u),
    );
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    let d = half_of(scales[index >> 1u], index);
    return vec3<f32>(d, d, 0.0);
}
#import words_as_values
