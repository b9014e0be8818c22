// Q4_1 (ggml): 32 values, value = d * q + m, q in 0..15, d and m halves.
// quants[i]: 16 bytes; byte j holds element j in its low and element j + 16 in its high nibble.
// scales[i]: (d, m).
#import bytes
#import block_sum
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Quad>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;

struct Words { lo: vec4<u32>, hi: vec4<u32> }

fn block_words(index: u32) -> Words {
    let w = quad(quants[index]);
    return Words(w & vec4<u32>(0x0f0f0f0fu), (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu));
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    let dm = unpack2x16float(scales[index]);
    return vec3<f32>(dm.x, dm.x, dm.y);
}
#import words_as_values
