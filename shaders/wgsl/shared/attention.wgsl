// What every attention kernel does to one query and one split of its keys, so that all give the same bits.
//
// A score is the sum of four lanes' shares; lane c takes the vectors c, c + 4, c + 8, … of the head. Keys go in
// pages of 32 with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), pages in splits of 256
// absolute positions, and splits are merged in order.

const PAGE = 32u;
const SPLIT_PAGES = 8u;
const FOURS = HEAD_DIM / 4u;
const LOWEST = -3.0e38;

fn share_sum(v: vec4<f32>) -> f32 {
    return (v.x + v.y) + (v.z + v.w);
}

// Running (maximum, sum) of the splits merged so far, and what scales the old and the new part.
struct Merge { top: f32, sum: f32, keep: f32, add: f32 }

fn merge(top: f32, sum: f32, split_top: f32, split_sum: f32) -> Merge {
    let m = max(top, split_top);
    let keep = exp(top - m);
    let add = exp(split_top - m);
    return Merge(m, fma(sum, keep, split_sum * add), keep, add);
}
