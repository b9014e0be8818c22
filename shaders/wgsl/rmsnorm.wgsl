// y = x / sqrt(mean(x²) + eps) * g, written as activations for the matrices that follow
// (Zhang and Sennrich 2019, arXiv:1910.07467).
//
// x: [tokens, hidden] f32, g: [hidden] f32, hidden a multiple of 4; rows: [tokens] (row of x, …), read where use_rows is 1.
// A workgroup takes one token: every thread sums squares of its strided share, one adds the shares in
// order, then every thread writes blocks of 32.
#import act_store

struct Params {
    tokens: u32,
    hidden: u32,
    blocks: u32,
    act_lanes: u32,
    use_rows: u32,
    eps: f32,
}

var<immediate> p: Params;
@group(0) @binding(0) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> rows: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> act_words: array<u32>;
@group(0) @binding(4) var<storage, read_write> act_scales: array<vec2<f32>>;

var<workgroup> shares: array<f32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let token = group.x;
    var row = token;
    if p.use_rows == 1u {
        row = rows[token].x;
    }
    let fours = p.hidden / 4u;
    let base = row * fours;
    var share = vec4<f32>(0.0);
    for (var k = thread; k < fours; k += WORKGROUP) {
        let v = x[base + k];
        share = fma(v, v, share);
    }
    shares[thread] = (share.x + share.y) + (share.z + share.w);
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < WORKGROUP; i++) {
        sum += shares[i];
    }
    let scale = 1.0 / sqrt(sum / f32(p.hidden) + p.eps);
    for (var block = thread; block < p.blocks; block += WORKGROUP) {
        var v: array<vec4<f32>, 8>;
        for (var i = 0u; i < 8u; i++) {
            let k = block * 8u + i;
            if k < fours {
                v[i] = x[base + k] * scale * g[k];
            }
        }
        act_store(token, block, p.blocks, p.act_lanes, v);
    }
}
