//! From the blocks of a file to the blocks of the device.
//!
//! Files follow ggml's block layouts; the device's are defined by `pp_shaders::Format` and its WGSL. Values do not
//! change: Q5_0 widens to Q8_0, Q5_1 and Q5_K to Q8_M, everything else keeps its bits.

use half::f16;
use pp_shaders::{Arrangement, BLOCK, Format, Profile};

use crate::checkpoint::DType;

/// The format that a file's type takes on the device.
pub fn device_format(dtype: DType) -> Format {
    match dtype {
        DType::F32 => Format::F32,
        DType::F16 => Format::F16,
        DType::BF16 => Format::BF16,
        DType::Q4_0 => Format::Q4_0,
        DType::Q4_1 => Format::Q4_1,
        DType::Q5_0 | DType::Q8_0 => Format::Q8_0,
        DType::Q5_1 | DType::Q5_K => Format::Q8_M,
        DType::Q4_K => Format::Q4_K,
        DType::Q6_K => Format::Q6_K,
    }
}

/// Blocks of 32 that a row of `cols` values takes.
pub fn row_blocks(cols: usize) -> usize {
    cols.div_ceil(BLOCK)
}

/// Bytes of a row of `cols` values in a file.
pub fn row_bytes(dtype: DType, cols: usize) -> usize {
    cols / dtype.block_elements() * dtype.block_bytes()
}

/// Device streams for some rows of a matrix.
pub struct Packed {
    format: Format,
    arrangement: Arrangement,
    /// `quants`, `scales`, `supers`; a stream that the format lacks is empty.
    pub streams: [Vec<u8>; 3],
}

impl Packed {
    /// Room for `rows` rows of `blocks` blocks as `profile` arranges them, all zero.
    pub fn new(format: Format, rows: usize, blocks: usize, profile: &Profile) -> Packed {
        let arrangement =
            Arrangement { blocks, segments: profile.segments as usize, interleave: profile.interleave as usize };
        Packed { format, arrangement, streams: format.stream_bytes(rows, blocks).map(|bytes| vec![0; bytes]) }
    }

    /// Sets row `row` from its bytes in the file.
    ///
    /// # Panics
    /// When `data` is not a row of `dtype` with the matrix's length, or `dtype` has another device format.
    pub fn set_row(&mut self, row: usize, dtype: DType, data: &[u8]) {
        assert_eq!(device_format(dtype), self.format, "{dtype:?} does not become {:?}", self.format);
        let disk_blocks = data.chunks_exact(dtype.block_bytes());
        match dtype {
            DType::F32 | DType::F16 | DType::BF16 => {
                for (block, values) in data.chunks(BLOCK * dtype.block_bytes()).enumerate() {
                    let index = self.index(row, block);
                    self.quants(index)[..values.len()].copy_from_slice(values);
                }
            }
            DType::Q4_0 | DType::Q8_0 => disk_blocks.enumerate().for_each(|(block, b)| {
                let index = self.index(row, block);
                self.scales(index).copy_from_slice(&b[..2]);
                self.quants(index).copy_from_slice(&b[2..]);
            }),
            DType::Q4_1 => disk_blocks.enumerate().for_each(|(block, b)| {
                let index = self.index(row, block);
                self.scales(index).copy_from_slice(&b[..4]);
                self.quants(index).copy_from_slice(&b[4..]);
            }),
            DType::Q5_0 => disk_blocks.enumerate().for_each(|(block, b)| {
                let index = self.index(row, block);
                self.scales(index).copy_from_slice(&b[..2]);
                let q = five_bits(&b[2..6], &b[6..]);
                self.quants(index).copy_from_slice(&q.map(|q| q.wrapping_sub(16)));
            }),
            DType::Q5_1 => disk_blocks.enumerate().for_each(|(block, b)| {
                let index = self.index(row, block);
                self.set_q8_m(index, half_at(b, 0), half_at(b, 2), five_bits(&b[4..8], &b[8..]));
            }),
            DType::Q4_K => disk_blocks.enumerate().for_each(|(superblock, b)| {
                self.super_of(row, superblock).copy_from_slice(&b[..4]);
                for part in 0..8 {
                    let index = self.index(row, 8 * superblock + part);
                    let (scale, min) = k_scale(&b[4..16], part);
                    self.scales(index).copy_from_slice(&[scale, min]);
                    let nibbles = k_nibbles(&b[16..144], part);
                    let quants = self.quants(index);
                    (0..16).for_each(|j| quants[j] = nibbles[j] | nibbles[j + 16] << 4);
                }
            }),
            DType::Q5_K => disk_blocks.enumerate().for_each(|(superblock, b)| {
                let (d, dmin) = (half_at(b, 0), half_at(b, 2));
                for part in 0..8 {
                    let index = self.index(row, 8 * superblock + part);
                    let (scale, min) = k_scale(&b[4..16], part);
                    let mut q = k_nibbles(&b[48..176], part);
                    (0..32).for_each(|l| q[l] |= (b[16 + l] >> part & 1) << 4);
                    self.set_q8_m(index, d * f32::from(scale), -(dmin * f32::from(min)), q);
                }
            }),
            DType::Q6_K => disk_blocks.enumerate().for_each(|(superblock, b)| {
                self.super_of(row, superblock).copy_from_slice(&b[208..210]);
                for part in 0..8 {
                    let index = self.index(row, 8 * superblock + part);
                    let (half, quarter) = (part / 4, part % 4);
                    self.scales(index).copy_from_slice(&b[192 + 2 * part..][..2]);
                    let low = &b[64 * half + 32 * (quarter % 2)..][..32];
                    let high = &b[128 + 32 * half..][..32];
                    let q: [u8; 32] = std::array::from_fn(|l| {
                        (low[l] >> (4 * (quarter / 2)) & 15) | (high[l] >> (2 * quarter) & 3) << 4
                    });
                    let quants = self.quants(index);
                    (0..16).for_each(|j| quants[j] = q[j] & 15 | (q[j + 16] & 15) << 4);
                    (0..8)
                        .for_each(|j| quants[16 + j] = (0..4).fold(0, |bits, i| bits | (q[j + 8 * i] >> 4) << (2 * i)));
                }
            }),
        }
    }

    fn index(&self, row: usize, block: usize) -> usize {
        self.arrangement.index(row, block)
    }

    fn stream(&mut self, stream: usize, index: usize, bits: usize) -> &mut [u8] {
        &mut self.streams[stream][index * bits / 8..][..bits / 8]
    }

    fn quants(&mut self, index: usize) -> &mut [u8] {
        self.stream(0, index, self.format.block_bits()[0])
    }

    fn scales(&mut self, index: usize) -> &mut [u8] {
        self.stream(1, index, self.format.block_bits()[1])
    }

    fn super_of(&mut self, row: usize, superblock: usize) -> &mut [u8] {
        self.stream(2, self.arrangement.super_index(row, superblock), 8 * self.format.block_bits()[2])
    }

    fn set_q8_m(&mut self, index: usize, d: f32, m: f32, q: [u8; 32]) {
        let scales = self.scales(index);
        scales[..4].copy_from_slice(&d.to_le_bytes());
        scales[4..].copy_from_slice(&m.to_le_bytes());
        self.quants(index).copy_from_slice(&q);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The 32 five-bit numbers of a Q5_0 or Q5_1 block.
fn five_bits(high: &[u8], nibbles: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes(std::array::from_fn(|i| high[i]));
    std::array::from_fn(|e| (nibbles[e % 16] >> (4 * (e / 16)) & 15) | ((high >> e & 1) as u8) << 4)
}

/// Scale and minimum of part `j` of a Q4_K or Q5_K superblock: six bits each out of twelve bytes.
fn k_scale(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    }
}

/// The 32 nibbles of part `part` of a Q4_K or Q5_K superblock.
fn k_nibbles(quants: &[u8], part: usize) -> [u8; 32] {
    std::array::from_fn(|l| quants[32 * (part / 2) + l] >> (4 * (part % 2)) & 15)
}

#[cfg(test)]
mod tests;
