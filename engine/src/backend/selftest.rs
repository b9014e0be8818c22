//! A quick look at whether a device computes what the kernels say: each kernel once or twice, on small fixed inputs,
//! against its twin. The tests of the kernels are wider; this one is for drivers that nobody has tested.

mod cases;

use std::time::Instant;

use pp_shaders::profile::TOP_K;
use thiserror::Error;

use super::reference::Reference;
use super::{Backend, DeviceError, Run};
use crate::program::{BufferId, Count, Op, Program};
use cases::Case;

/// What a self-test that found nothing wrong has done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    /// Dispatches compared.
    pub checked: usize,
    /// Seconds that it took, kernels compiled.
    pub seconds: f64,
}

/// What a self-test found wrong.
#[derive(Clone, Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum SelfTestError {
    #[error("{device} could not run kernel `{kernel}`: {error}")]
    Device { kernel: String, device: String, error: DeviceError },
    #[error("{device} computes kernel `{kernel}` wrongly: value {index} is {found}, expected {expected}")]
    Mismatch { kernel: String, device: String, index: usize, expected: f64, found: f64 },
}

/// Runs every kernel on `backend`, as its profile asks for it, and compares the results with those of the twins.
///
/// # Errors
/// [`SelfTestError`], at the first kernel that fails.
pub fn run(backend: &mut dyn Backend) -> Result<Report, SelfTestError> {
    let started = Instant::now();
    let profile = *backend.profile();
    let cases = cases::all(&profile);
    for case in &cases {
        check(backend, case)?;
    }
    Ok(Report { checked: cases.len(), seconds: started.elapsed().as_secs_f64() })
}

fn check(backend: &mut dyn Backend, case: &Case) -> Result<(), SelfTestError> {
    let (kernel, device) = (case.variant.label(), backend.name().to_owned());
    let twin = &mut Reference::new(*backend.profile(), 1 << 30);
    let found = dispatch(backend, case).map_err(|error| SelfTestError::Device {
        kernel: kernel.clone(),
        device: device.clone(),
        error,
    })?;
    let expected = dispatch(twin, case).expect("the twins have room for small buffers");
    for ((_, compare), (expected, found)) in case.outputs.iter().zip(expected.iter().zip(&found)) {
        if let Some(Difference { index, expected, found }) = compare.differ(expected, found) {
            return Err(SelfTestError::Mismatch { kernel, device, index, expected, found });
        }
    }
    Ok(())
}

/// What a case's outputs hold afterwards.
fn dispatch(backend: &mut dyn Backend, case: &Case) -> Result<Vec<Vec<u32>>, DeviceError> {
    let mut buffers = Vec::new();
    for words in &case.buffers {
        buffers.push(backend.create("self-test", 4 * words.len())?);
    }
    let op = Op {
        variant: case.variant.clone(),
        params: case.params.clone(),
        buffers: buffers.clone(),
        grid: case.grid,
        count: Count::Tokens,
        note: "self-test".to_owned(),
        weight_bytes: 0,
        operations: 0,
        split_operations: 0,
    };
    let program = backend.prepare(Program { ops: vec![op] })?;
    let writes: Vec<(BufferId, &[u8])> =
        buffers.iter().zip(&case.buffers).map(|(id, words)| (*id, bytemuck::cast_slice(words.as_slice()))).collect();
    let reads: Vec<(BufferId, usize)> =
        case.outputs.iter().map(|(output, _)| (buffers[*output], 4 * case.buffers[*output].len())).collect();
    let data = backend.run(&Run { programs: &[(program, case.shape)], writes: &writes, reads: &reads, next: &[] })?;
    Ok(data.iter().map(|bytes| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()).collect())
}

/// How an output may differ from the twin's.
#[derive(Clone, Copy, Debug)]
enum Compare {
    /// Floats, by a share of the largest.
    Relative(f64),
    /// Words, not at all.
    Equal,
    /// Signed bytes, by one: a value between two steps may round either way.
    Bytes,
    /// Pairs of halves, by some units in the last place.
    Halves,
    /// Rows of top-k results: ids and logits equal, log-sum-exps close.
    TopK,
}

/// Where two outputs differ, and what they hold there.
#[derive(Debug, PartialEq)]
struct Difference {
    index: usize,
    expected: f64,
    found: f64,
}

impl Compare {
    fn differ(self, expected: &[u32], found: &[u32]) -> Option<Difference> {
        match self {
            Compare::Relative(share) => {
                let (expected, found) = (floats(expected), floats(found));
                let bound = share * expected.iter().fold(0.0f64, |top, value| top.max(value.abs())) + 1e-30;
                first(&expected, &found, |e, f| (e - f).abs() <= bound)
            }
            Compare::Equal => first(&values(expected), &values(found), |e, f| e == f),
            Compare::Bytes => first(&bytes(expected), &bytes(found), |e, f| (e - f).abs() <= 1.0),
            Compare::Halves => first(&halves(expected), &halves(found), |e, f| (e - f).abs() <= 2e-3 * e.abs() + 1e-4),
            Compare::TopK => {
                let row = 2 * (TOP_K as usize + 2);
                let rows = expected.chunks(row).zip(found.chunks(row)).enumerate();
                rows.flat_map(|(i, (e, f))| {
                    let sums = Compare::Relative(1e-5).differ(&e[..2], &f[..2]);
                    let at = |first| move |d: Difference| Difference { index: i * row + first + d.index, ..d };
                    sums.map(at(0)).or_else(|| Compare::Equal.differ(&e[2..], &f[2..]).map(at(2)))
                })
                .next()
            }
        }
    }
}

fn first(expected: &[f64], found: &[f64], same: impl Fn(f64, f64) -> bool) -> Option<Difference> {
    let index = (0..expected.len()).find(|i| !found.get(*i).is_some_and(|found| same(expected[*i], *found)))?;
    Some(Difference { index, expected: expected[index], found: found.get(index).copied().unwrap_or(f64::NAN) })
}

fn values(words: &[u32]) -> Vec<f64> {
    words.iter().map(|word| f64::from(*word)).collect()
}

fn floats(words: &[u32]) -> Vec<f64> {
    words.iter().map(|word| f64::from(f32::from_bits(*word))).collect()
}

fn bytes(words: &[u32]) -> Vec<f64> {
    words.iter().flat_map(|word| word.to_le_bytes()).map(|byte| f64::from(byte as i8)).collect()
}

fn halves(words: &[u32]) -> Vec<f64> {
    let halves = words.iter().flat_map(|word| [*word as u16, (*word >> 16) as u16]);
    halves.map(|bits| half::f16::from_bits(bits).to_f64()).collect()
}

#[cfg(test)]
mod tests;
