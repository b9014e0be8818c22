// The 32 unscaled values of a block, as floats.
fn block_values(index: u32) -> array<vec4<f32>, 8> {
    let w = block_words(index);
    return array<vec4<f32>, 8>(
        signed_bytes(w.lo.x), signed_bytes(w.lo.y), signed_bytes(w.lo.z), signed_bytes(w.lo.w),
        signed_bytes(w.hi.x), signed_bytes(w.hi.y), signed_bytes(w.hi.z), signed_bytes(w.hi.w),
    );
}
