// Attention of single queries over long contexts: softmax(q K') V, one workgroup a (kv head, split, token).
//
// q: [tokens, heads, HEAD_DIM] f32, scaled; keys, values: [page, kv_heads_here, 32, HEAD_DIM]
// tokens: [tokens] (id, position, first entry of the page table, -); pages: page of each 32 positions
// part_out: [tokens, heads, splits, HEAD_DIM] f32, not divided; part_stat: [tokens, heads, splits] (max, sum)
// HEADS query heads of one kv head share the reading of keys and values (shared/attend.wgsl).
#import attend

@group(0) @binding(5) var<storage, read_write> part_out: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> part_stat: array<vec2<f32>>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let group = p.heads / p.kv_heads;
    let local = workgroup.x / (group / HEADS);
    let split = workgroup.y;
    let token = workgroup.z;
    let head0 = (p.first_kv + local) * group + workgroup.x % (group / HEADS) * HEADS;
    if split * SPLIT > tokens[token].y {
        return;
    }
    attend(token, head0, local, split, thread);
    for (var i = thread; i < HEADS * FOURS; i += WORKGROUP) {
        let part = (token * p.heads + head0 + i / FOURS) * p.splits + split;
        part_out[part * FOURS + i % FOURS] = sums[i];
        if i % FOURS == 0u {
            part_stat[part] = vec2<f32>(top_of(token, split, i / FOURS), weight_sums[i / FOURS]);
        }
    }
}
