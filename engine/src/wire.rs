//! How activations cross a hop: rows of floats to bytes and back. Pure.
//!
//! A row is rounded by itself, so what becomes of it does not depend on its company. [`Wire::F32`] is the rows as they
//! are. Otherwise the bytes begin with a bitmap, bit r of byte r / 8 for row r: it is set where the row would not
//! survive the rounding and follows as floats, exactly. Then come the rows, each of its own length, little-endian.

use half::f16;
use half::slice::HalfFloatSliceExt;
use pp_shaders::BLOCK;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Bits of the largest magnitude that a half holds. Magnitudes of floats are in the order of their bits, and those of
/// infinities and NaN are above all others.
const HALF_MAX: u32 = 65504f32.to_bits();
/// Bits of the largest magnitude that goes in 8 bits: 127 times its scale must not become infinite.
const QUANT_MAX: u32 = 1e38f32.to_bits();
/// Blocks of smaller magnitudes are sent as zeros: the inverse of their scale would be infinite.
const QUANT_MIN: u32 = 1e-36f32.to_bits();
/// Largest quant.
const QUANTS: f32 = 127.0;
/// 1.5 · 2²³: added to a small float it leaves the nearest integer (ties to even) in the lowest bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// The type of activations between stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Wire {
    /// Floats, unchanged: 4 bytes a value.
    #[default]
    F32,
    /// IEEE halves, to nearest: 2 bytes a value, off by at most 2⁻¹¹ of it or 2⁻²⁵. A row with a value beyond ±65504
    /// goes as floats.
    F16,
    /// Blocks of 32 signed bytes with a float scale: 1.125 bytes a value, off by at most 1/254 of the largest of its
    /// block. A row with a value beyond ±10³⁸ goes as floats.
    Q8,
}

/// The bytes are not so many rows.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum WireError {
    #[error("{rows} rows of {hidden} activations in {wire}: {found} bytes where {expected} were announced")]
    Bytes { wire: Wire, rows: usize, hidden: usize, found: usize, expected: usize },
    #[error("activations in {wire}: a flag for row {row} of {rows}")]
    Flag { wire: Wire, row: usize, rows: usize },
}

impl Wire {
    /// Every type.
    pub const ALL: [Wire; 3] = [Wire::F32, Wire::F16, Wire::Q8];

    /// What `--wire` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Wire::F32 => "f32",
            Wire::F16 => "f16",
            Wire::Q8 => "q8",
        }
    }

    /// Bytes of `rows` rows of `hidden` values when no row needs floats.
    pub fn bytes(self, rows: usize, hidden: usize) -> usize {
        self.bitmap_bytes(rows) + rows * self.row_bytes(hidden)
    }

    /// Bytes of `rows` rows of `hidden` values at most.
    pub fn bytes_max(self, rows: usize, hidden: usize) -> usize {
        self.bitmap_bytes(rows) + rows * self.row_bytes(hidden).max(4 * hidden)
    }

    fn bitmap_bytes(self, rows: usize) -> usize {
        if self == Wire::F32 { 0 } else { rows.div_ceil(8) }
    }

    fn row_bytes(self, hidden: usize) -> usize {
        match self {
            Wire::F32 => 4 * hidden,
            Wire::F16 => 2 * hidden,
            Wire::Q8 => 4 * hidden.div_ceil(BLOCK) + hidden,
        }
    }

    /// Appends rows of activations, [rows, hidden], to `out`.
    ///
    /// # Panics
    /// When the last row is not whole.
    pub fn encode(self, activations: &[f32], hidden: usize, out: &mut Vec<u8>) {
        if self == Wire::F32 || activations.is_empty() {
            return out.extend_from_slice(bytemuck::cast_slice(activations));
        }
        assert!(activations.len().is_multiple_of(hidden), "{} activations in rows of {hidden}", activations.len());
        let rows = activations.len() / hidden;
        out.reserve(self.bytes(rows, hidden));
        let bitmap = out.len();
        out.resize(bitmap + self.bitmap_bytes(rows), 0);
        let mut scratch = Scratch::new(hidden);
        for (r, row) in activations.chunks_exact(hidden).enumerate() {
            let fits = if self == Wire::F16 { scratch.put_halves(row, out) } else { scratch.put_quants(row, out) };
            if !fits {
                out[bitmap + r / 8] |= 1 << (r % 8);
                out.extend_from_slice(bytemuck::cast_slice(row));
            }
        }
    }

    /// `rows` rows of `hidden` activations, [rows, hidden]. The number of bytes is checked before anything is
    /// allocated; any bits are activations.
    ///
    /// # Errors
    /// [`WireError`] when there are more or fewer bytes than these rows take.
    pub fn decode(self, bytes: &[u8], rows: usize, hidden: usize) -> Result<Vec<f32>, WireError> {
        let wire = self;
        let expect = |expected: usize| {
            let found = bytes.len();
            if found == expected { Ok(()) } else { Err(WireError::Bytes { wire, rows, hidden, found, expected }) }
        };
        if self == Wire::F32 {
            expect(self.bytes(rows, hidden))?;
            return Ok(floats(bytes).collect());
        }
        let Some((bitmap, mut rest)) = bytes.split_at_checked(self.bitmap_bytes(rows)) else {
            expect(self.bytes(rows, hidden))?;
            return Ok(Vec::new());
        };
        let is_float = |row: usize| bitmap[row / 8] >> (row % 8) & 1 == 1;
        if let Some(row) = (rows..8 * bitmap.len()).find(|row| is_float(*row)) {
            return Err(WireError::Flag { wire, row, rows });
        }
        let lengths = |row| if is_float(row) { 4 * hidden } else { self.row_bytes(hidden) };
        expect(bitmap.len() + (0..rows).map(lengths).sum::<usize>())?;
        let mut activations = vec![0.0; rows * hidden];
        let mut scratch = Scratch::new(hidden);
        for (r, row) in activations.chunks_exact_mut(hidden.max(1)).enumerate() {
            let (bytes, behind) = rest.split_at(lengths(r));
            rest = behind;
            match self {
                _ if is_float(r) => row.iter_mut().zip(floats(bytes)).for_each(|(to, value)| *to = value),
                Wire::F16 => scratch.take_halves(bytes, row),
                _ => take_quants(bytes, row),
            }
        }
        Ok(activations)
    }
}

impl std::fmt::Display for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value))
}

/// The bits of the largest magnitude.
fn largest(values: &[f32]) -> u32 {
    // Signed, since that is what vector units compare.
    values.iter().fold(0i32, |max, value| max.max((value.to_bits() & 0x7fff_ffff) as i32)) as u32
}

/// A row on its way: payloads are not aligned.
struct Scratch {
    halves: Vec<f16>,
    scales: Vec<f32>,
    quants: Vec<i8>,
}

impl Scratch {
    fn new(hidden: usize) -> Scratch {
        Scratch { halves: vec![f16::ZERO; hidden], scales: vec![0.0; hidden.div_ceil(BLOCK)], quants: vec![0; hidden] }
    }

    /// Appends a row as halves, if it can be.
    fn put_halves(&mut self, row: &[f32], out: &mut Vec<u8>) -> bool {
        if largest(row) > HALF_MAX {
            return false;
        }
        self.halves.convert_from_f32_slice(row);
        out.extend_from_slice(bytemuck::cast_slice(&self.halves));
        true
    }

    fn take_halves(&mut self, bytes: &[u8], row: &mut [f32]) {
        bytemuck::cast_slice_mut(&mut self.halves).copy_from_slice(bytes);
        self.halves.convert_to_f32_slice(row);
    }

    /// Appends a row as the scales of its blocks and then its quants, if it can be. A value is quant · scale.
    fn put_quants(&mut self, row: &[f32], out: &mut Vec<u8>) -> bool {
        let blocks = row.chunks(BLOCK).zip(self.quants.chunks_mut(BLOCK)).zip(&mut self.scales);
        for ((values, quants), scale) in blocks {
            let max = largest(values);
            if max > QUANT_MAX {
                return false;
            }
            let max = if max < QUANT_MIN { 0.0 } else { f32::from_bits(max) };
            *scale = max / QUANTS;
            let inverse = if max == 0.0 { 0.0 } else { QUANTS / max };
            for (quant, value) in quants.iter_mut().zip(values) {
                *quant = (value * inverse + ROUND).to_bits() as i8;
            }
        }
        out.extend_from_slice(bytemuck::cast_slice(&self.scales));
        out.extend_from_slice(bytemuck::cast_slice(&self.quants));
        true
    }
}

fn take_quants(bytes: &[u8], row: &mut [f32]) {
    let (scales, quants) = bytes.split_at(bytes.len() - row.len());
    for ((values, quants), scale) in row.chunks_mut(BLOCK).zip(quants.chunks(BLOCK)).zip(floats(scales)) {
        for (value, quant) in values.iter_mut().zip(quants) {
            *value = f32::from(*quant as i8) * scale;
        }
    }
}

#[cfg(test)]
mod tests;
