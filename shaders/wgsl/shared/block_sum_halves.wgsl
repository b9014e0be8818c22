// As block_sum.wgsl, for formats whose two halves of a block have scales of their own and no offset.
fn block_sum(acc: f32, lo: f32, hi: f32, scales: vec3<f32>, xs: vec2<f32>) -> f32 {
    return fma(scales.y * xs.x, hi, fma(scales.x * xs.x, lo, acc));
}
