//! Weight blocks as they lie on the device, decoded to floats (`wgsl/quant/*.wgsl`).

use std::cell::RefCell;

use half::{bf16, f16};

use crate::{Arrangement, BLOCK, Format};

/// The streams of one matrix.
pub struct Streams<'a> {
    /// How they are to be read.
    pub format: Format,
    /// Where blocks stand.
    pub arrangement: Arrangement,
    /// `quants`, then `scales` and `supers` where the format has them.
    pub streams: Vec<std::cell::Ref<'a, Vec<u32>>>,
}

impl<'a> Streams<'a> {
    /// Borrows the first buffers of a call.
    pub fn new(format: Format, arrangement: Arrangement, buffers: &[&'a RefCell<Vec<u32>>]) -> Streams<'a> {
        Streams { format, arrangement, streams: buffers[..format.streams()].iter().map(|b| b.borrow()).collect() }
    }

    /// Row `row`: 32 values a block.
    pub fn row(&self, row: usize) -> Vec<f32> {
        let a = self.arrangement;
        (0..a.blocks).flat_map(|block| self.block(a.index(row, block), a.super_index(row, block / 8))).collect()
    }

    /// The values of the block stored at `index`, in the superblock stored at `super_index`.
    fn block(&self, index: usize, super_index: usize) -> [f32; BLOCK] {
        let quants = &self.streams[0];
        let byte = |i: usize| quants[i / 4].to_le_bytes()[i % 4];
        let half_at =
            |stream: usize, i: usize| f16::from_bits((self.streams[stream][i / 2] >> (16 * (i % 2))) as u16).to_f32();
        // Element e of a block of nibbles: the low ones of 16 bytes, then the high ones.
        let nibble = |start: usize, e: usize| (byte(start + e % 16) >> (4 * (e / 16))) & 15;
        std::array::from_fn(|e| match self.format {
            Format::F32 => f32::from_bits(quants[index * 32 + e]),
            Format::F16 => f16::from_bits((quants[index * 16 + e / 2] >> (16 * (e % 2))) as u16).to_f32(),
            Format::BF16 => bf16::from_bits((quants[index * 16 + e / 2] >> (16 * (e % 2))) as u16).to_f32(),
            Format::Q8_0 => half_at(1, index) * f32::from(byte(index * 32 + e) as i8),
            Format::Q8_M => {
                let [d, m] = [0, 1].map(|i| f32::from_bits(self.streams[1][2 * index + i]));
                d * f32::from(byte(index * 32 + e) as i8) + m
            }
            Format::Q4_0 => half_at(1, index) * (f32::from(nibble(index * 16, e)) - 8.0),
            Format::Q4_1 => half_at(1, 2 * index) * f32::from(nibble(index * 16, e)) + half_at(1, 2 * index + 1),
            Format::Q4_K => {
                let sm = self.streams[1][index / 2] >> (16 * (index % 2));
                let (s, m) = ((sm & 63) as f32, (sm >> 8 & 63) as f32);
                half_at(2, 2 * super_index) * s * f32::from(nibble(index * 16, e)) - half_at(2, 2 * super_index + 1) * m
            }
            Format::Q6_K => {
                let s = (self.streams[1][index / 2] >> (16 * (index % 2) + 8 * (e / 16))) as u8 as i8;
                let high = (byte(index * 24 + 16 + e % 8) >> (2 * (e / 8))) & 3;
                let q = i32::from(nibble(index * 24, e) | high << 4) - 32;
                half_at(2, super_index) * f32::from(s) * q as f32
            }
        })
    }
}
