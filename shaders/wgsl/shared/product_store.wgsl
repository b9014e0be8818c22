// The end of a product: y[token][row] = sum (+ bias[row]) (+ y[token][row]).
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

const ADD_BIAS = 1u;
const ADD_TO_Y = 2u;

fn finish(row: u32, token: u32, sum: f32) {
    if row < p.rows && token < p.tokens {
        let at = token * p.y_stride + p.y_offset + row;
        var out = sum;
        if (p.flags & ADD_BIAS) != 0u {
            out += bias[row];
        }
        if (p.flags & ADD_TO_Y) != 0u {
            out += y[at];
        }
        y[at] = out;
    }
}

fn finish_workgroup(first_row: u32, thread: u32) {}
