// attn_decode.wgsl and attn_reduce.wgsl in one, for contexts of one split: softmax(q K') V of single queries as
// activations, one workgroup a (kv head, token).
//
// q: [tokens, heads, HEAD_DIM] f32, scaled; keys, values: [page, kv_heads_here, 32, HEAD_DIM]
// tokens: [tokens] (id, position, first entry of the page table, -); pages: page of each 32 positions
// HEADS * HEAD_DIM is a multiple of 32; the activations have act_lanes = 1.
#import attend
#import act_store

@group(0) @binding(5) var<storage, read_write> act_words: array<u32>;
@group(0) @binding(6) var<storage, read_write> act_scales: array<vec2<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = p.heads / p.kv_heads;
    let local = workgroup.x / (group / HEADS);
    let token = workgroup.z;
    let head0 = (p.first_kv + local) * group + workgroup.x % (group / HEADS) * HEADS;
    attend(token, head0, local, 0u, thread);
    let blocks = p.heads * FOURS / 8u;
    for (var block = thread; block < HEADS * FOURS / 8u; block += WORKGROUP) {
        var v: array<vec4<f32>, 8>;
        for (var i = 0u; i < 8u; i++) {
            let head = (block * 8u + i) / FOURS;
            let m = merge(LOWEST, 0.0, top_of(token, 0u, head), weight_sums[head]);
            v[i] = fma(vec4<f32>(0.0), vec4<f32>(m.keep), sums[block * 8u + i] * m.add) / m.sum;
        }
        act_store(token, head0 * FOURS / 8u + block, blocks, 1u, v);
    }
}
