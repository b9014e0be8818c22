// F32: a block is 32 floats, quants[8 i .. 8 i + 7].
#import block_sum
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Quad>;

fn block_values(index: u32) -> array<vec4<f32>, 8> {
    let i = 8u * index;
    return array<vec4<f32>, 8>(
        bitcast<vec4<f32>>(quad(quants[i])), bitcast<vec4<f32>>(quad(quants[i + 1u])),
        bitcast<vec4<f32>>(quad(quants[i + 2u])), bitcast<vec4<f32>>(quad(quants[i + 3u])),
        bitcast<vec4<f32>>(quad(quants[i + 4u])), bitcast<vec4<f32>>(quad(quants[i + 5u])),
        bitcast<vec4<f32>>(quad(quants[i + 6u])), bitcast<vec4<f32>>(quad(quants[i + 7u])),
    );
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    return vec3<f32>(1.0, 1.0, 0.0);
}
