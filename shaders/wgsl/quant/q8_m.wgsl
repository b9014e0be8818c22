// Q8_M (of this project): 32 values, value = d * q + m, q a signed byte, d and m floats.
// Q5_1 and Q5_K are widened to it when they are loaded.
// quants[2 i], quants[2 i + 1]: elements 0..15 and 16..31. scales[2 i], scales[2 i + 1]: d and m.
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
    let d = bitcast<f32>(scales[2u * index]);
    return vec3<f32>(d, d, bitcast<f32>(scales[2u * index + 1u]));
}
#import words_as_values
