// One block's share of a dot product.
//
// lo, hi: sums of q * x over elements 0..15 and 16..31; scales: (scale of lo, scale of hi, offset) of the
// weight block, whose values are scale * q + offset; xs: (scale, scale * sum) of the activation block.
fn block_sum(acc: f32, lo: f32, hi: f32, scales: vec3<f32>, xs: vec2<f32>) -> f32 {
    return fma(scales.z, xs.y, fma(scales.x * xs.x, lo + hi, acc));
}
