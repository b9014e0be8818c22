// Q8_0 (ggml): 32 values, value = d * q, q a signed byte, d a half.
// quants[2 i], quants[2 i + 1]: elements 0..15 and 16..31. scales: d of two blocks a word.
#import bytes
#import block_sum
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Quad>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

struct Words { lo: vec4<u32>, hi: vec4<u32> }

fn block_words(index: u32) -> Words {
    return Words(quad(quants[2u * index]), quad(quants[2u * index + 1u]));
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    let d = half_of(scales[index >> 1u], index);
    return vec3<f32>(d, d, 0.0);
}
#import words_as_values
