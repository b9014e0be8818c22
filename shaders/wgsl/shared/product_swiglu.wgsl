// The end of a product whose rows are gates and ups in turns of 8: h = silu(gate) * up as activations, a block of 32
// from the 64 rows of a workgroup. One token, stored as act_lanes = 1. y_stride: rows of the whole product; y_offset:
// rows before this part of it.
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> act_words: array<u32>;
@group(0) @binding(7) var<storage, read_write> act_scales: array<vec2<f32>>;

#import act_store

const ADD_BIAS = 1u;
var<workgroup> products: array<f32, 64>;

fn finish(row: u32, token: u32, sum: f32) {
    var out = sum;
    if (p.flags & ADD_BIAS) != 0u && row < p.rows {
        out += bias[row];
    }
    products[row % 64u] = out;
}

fn finish_workgroup(first_row: u32, thread: u32) {
    workgroupBarrier();
    if thread == 0u {
        var v: array<vec4<f32>, 8>;
        for (var i = 0u; i < 8u; i++) {
            let at = i / 2u * 16u + i % 2u * 4u;
            if first_row + at < p.rows {
                let gate = vec4<f32>(products[at], products[at + 1u], products[at + 2u], products[at + 3u]);
                let up = vec4<f32>(products[at + 8u], products[at + 9u], products[at + 10u], products[at + 11u]);
                v[i] = gate / (1.0 + exp(-gate)) * up;
            }
        }
        act_store(0u, (p.y_offset + first_row) / 64u, (p.y_stride + 63u) / 64u, 1u, v);
    }
}
