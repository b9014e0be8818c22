// BF16: a block is 32 bfloats (the upper halves of floats), quants[4 i .. 4 i + 3].
#import block_sum
#import quad

@group(0) @binding(0) var<storage, read> quants: array<Quad>;

fn four(a: u32, b: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(a << 16u, a & 0xffff0000u, b << 16u, b & 0xffff0000u));
}

fn block_values(index: u32) -> array<vec4<f32>, 8> {
    let a = quad(quants[4u * index]);
    let b = quad(quants[4u * index + 1u]);
    let c = quad(quants[4u * index + 2u]);
    let d = quad(quants[4u * index + 3u]);
    return array<vec4<f32>, 8>(
        four(a.x, a.y), four(a.z, a.w), four(b.x, b.y), four(b.z, b.w),
        four(c.x, c.y), four(c.z, c.w), four(d.x, d.y), four(d.z, d.w),
    );
}

fn block_scales(index: u32, super_at: u32) -> vec3<f32> {
    return vec3<f32>(1.0, 1.0, 0.0);
}
