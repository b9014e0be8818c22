// What a device can do at most. Three kernels with the same bindings; each does nothing but one kind of work.
//
// n[0]: rounds of a thread. Every thread leaves one word, so that no compiler can leave its work out.
@group(0) @binding(0) var<storage, read> n: array<u32>;
@group(0) @binding(1) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> sink: array<u32>;

// Reads n[0] vectors of 16 bytes a thread; a workgroup reads one contiguous range, neighbouring lanes neighbouring
// vectors.
@compute @workgroup_size(64)
fn read_all(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
    @builtin(global_invocation_id) thread: vec3<u32>,
) {
    let rounds = n[0];
    let first = workgroup.x * rounds * 64u + lane;
    var sum = vec4<u32>();
    for (var i = 0u; i < rounds; i += 4u) {
        let at = first + i * 64u;
        sum += (source[at] ^ source[at + 64u]) + (source[at + 128u] ^ source[at + 192u]);
    }
    sink[thread.x] = sum.x ^ sum.y ^ sum.z ^ sum.w;
}

fn dots(w: u32, x: vec4<u32>) -> vec4<i32> {
    return vec4<i32>(dot4I8Packed(w, x.x), dot4I8Packed(w, x.y), dot4I8Packed(w, x.z), dot4I8Packed(w, x.w));
}

// Sixteen independent sums of dots of four bytes, for each of n[0] words: 16 * 8 operations a round.
@compute @workgroup_size(64)
fn int8_dots(@builtin(global_invocation_id) thread: vec3<u32>) {
    let rounds = n[0];
    let x0 = source[thread.x % 64u];
    let x1 = source[thread.x % 64u + 1u];
    let x2 = source[thread.x % 64u + 2u];
    let x3 = source[thread.x % 64u + 3u];
    var w = thread.x;
    var a0 = vec4<i32>();
    var a1 = vec4<i32>();
    var a2 = vec4<i32>();
    var a3 = vec4<i32>();
    for (var i = 0u; i < rounds; i++) {
        a0 += dots(w, x0);
        a1 += dots(w, x1);
        a2 += dots(w, x2);
        a3 += dots(w, x3);
        w += 0x01030507u;
    }
    let sum = a0 + a1 + a2 + a3;
    sink[thread.x] = bitcast<u32>(sum.x ^ sum.y ^ sum.z ^ sum.w);
}

// Sixteen independent chains of multiply-adds: 16 * 2 operations a round.
@compute @workgroup_size(64)
fn float_fmas(@builtin(global_invocation_id) thread: vec3<u32>) {
    let rounds = n[0];
    // Near 1 and near 0: the chains neither vanish nor overflow.
    let m = vec4<f32>(1.0) - vec4<f32>(source[thread.x % 64u] & vec4<u32>(255u)) * 1e-6;
    let b = vec4<f32>(source[thread.x % 64u + 1u] & vec4<u32>(255u)) * 1e-6;
    var a0 = vec4<f32>(0.1);
    var a1 = vec4<f32>(0.2);
    var a2 = vec4<f32>(0.3);
    var a3 = vec4<f32>(0.4);
    for (var i = 0u; i < rounds; i++) {
        a0 = fma(a0, m, b);
        a1 = fma(a1, m, b);
        a2 = fma(a2, m, b);
        a3 = fma(a3, m, b);
    }
    let sum = a0 + a1 + a2 + a3;
    sink[thread.x] = bitcast<u32>(sum.x + sum.y + sum.z + sum.w);
}
