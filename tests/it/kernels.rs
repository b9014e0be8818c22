//! Every kernel against its twin, on shapes that are multiples of nothing.
//!
//! One tolerance table: what may differ between a device and its twin, and why.
//!
//! | what | bound | why |
//! |---|---|---|
//! | products | 2e-5 of the sum of \|w x\| | float sums of up to some thousand terms against f64 |
//! | embedding, rotation, activations as floats | 2e-6 of the largest | a few roundings, and drivers' division |
//! | RMSNorm, SwiGLU, softmax | 2e-5 of the largest | drivers' exp, sqrt and division are good to some ulp |
//! | activations as q8 | one step of the scale | a value between two steps may round either way |
//! | keys and values as halves | one half ulp | rounding of the rotated value |
//! | top-k ids and logits, edited logits | equal | comparisons and single operations are exact |
//! | log-sum-exp | 1e-5 | sums of exp of up to a vocabulary |

mod cases;

use std::collections::HashSet;

use pp_engine::backend::gpu::Gpu;
use pp_engine::backend::gpu::adapter::Adapter;
use pp_engine::backend::reference::Reference;
use pp_engine::backend::{Backend, Run};
use pp_engine::program::{Op, Program};
use pp_shaders::registry::KERNELS;
use pp_shaders::{Kernel, Profile};

use crate::support::{adapter, swiftshader};
use cases::{Case, Compare};

/// Runs a case's dispatch on a backend; returns its buffers afterwards.
fn run(backend: &mut dyn Backend, case: &Case) -> Vec<Vec<u32>> {
    let ids: Vec<_> = case.buffers.iter().map(|words| backend.create("test", 4 * words.len()).unwrap()).collect();
    let op = Op {
        variant: case.variant.clone(),
        params: case.params.clone(),
        buffers: ids.clone(),
        grid: case.grid,
        count: pp_engine::program::Count::Tokens,
        note: String::new(),
        weight_bytes: 0,
        operations: 0,
        split_operations: 0,
    };
    let program = backend.prepare(Program { ops: vec![op] }).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    let writes: Vec<_> = ids.iter().zip(&case.buffers).map(|(id, words)| (*id, bytemuck_bytes(words))).collect();
    let writes: Vec<_> = writes.iter().map(|(id, bytes)| (*id, bytes.as_slice())).collect();
    let reads: Vec<_> = ids.iter().zip(&case.buffers).map(|(id, words)| (*id, 4 * words.len())).collect();
    let data = backend.run(&Run { programs: &[(program, case.shape)], writes: &writes, reads: &reads, next: &[] });
    let data = data.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    data.iter()
        .map(|bytes| bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        .collect()
}

fn bytemuck_bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn check(device: &mut dyn Backend, case: &Case) {
    let found = run(device, case);
    let expected = run(&mut Reference::new(*device.profile(), 1 << 30), case);
    for (buffer, compare) in &case.outputs {
        if let Err(message) = compare.check(&expected[*buffer], &found[*buffer]) {
            panic!("{} on {}, buffer {buffer}: {message}", case.name, device.name());
        }
    }
    for (buffer, (found, before)) in found.iter().zip(&case.buffers).enumerate() {
        if !case.outputs.iter().any(|(output, _)| *output == buffer) {
            assert_eq!(found, before, "{}: buffer {buffer} is only read", case.name);
        }
    }
}

fn check_all(adapter: &Adapter, profile: Profile, checked: bool, wanted: impl Fn(&Case) -> bool) -> HashSet<Kernel> {
    let mut kernels = HashSet::new();
    let mut device = Gpu::open(adapter, profile, checked).unwrap();
    let profile = *device.profile();
    let mut count = 0;
    for case in cases::all(&profile).iter().filter(|case| wanted(case)) {
        check(&mut device, case);
        kernels.insert(case.variant.kernel);
        count += 1;
    }
    assert!(count > 0, "some cases were wanted");
    kernels
}

#[test]
fn the_software_profile_agrees_with_the_twins() {
    check_all(&adapter(), Profile::SOFTWARE, true, |_| true);
}

#[test]
fn the_software_profile_agrees_without_bounds_checks_and_wide_loads() {
    let apart = Profile { wide: false, shared: false, ..Profile::SOFTWARE };
    check_all(&adapter(), apart, false, |_| true);
    check_all(&adapter(), Profile::SOFTWARE, false, |_| true);
}

#[test]
fn the_card_profile_agrees_with_the_twins() {
    let mut kernels = check_all(&adapter(), Profile::CARD, true, |_| true);
    let only_software = [Kernel::MatvecSwiGluQ8, Kernel::MatvecSwiGluF32];
    kernels.extend(check_all(&adapter(), Profile::SOFTWARE, true, |case| only_software.contains(&case.variant.kernel)));
    assert_eq!(kernels.len(), KERNELS.len(), "the cases go through every kernel");
}

/// SwiftShader: subgroups of 4, no halves, no long words, 256 invocations. It is slow: small cases.
#[test]
fn swiftshader_agrees_with_the_twins() {
    let Some(adapter) = swiftshader() else {
        panic!("SwiftShader was not found; scripts/test.sh installs it");
    };
    check_all(&adapter, Profile::CARD, true, |case| case.is_small());
    check_all(&adapter, Profile::SOFTWARE, false, |case| case.is_small());
}

/// Steps with edits take the raw log-sum-exp from a kernel of its own: the same bits.
#[test]
fn sums_have_the_same_bits_in_both_kernels_that_make_them() {
    let swiftshader = swiftshader().expect("SwiftShader was not found; scripts/test.sh installs it");
    for (adapter, profile) in [adapter(), swiftshader].iter().flat_map(|a| Profile::ALL.map(|profile| (a, profile))) {
        let mut device = Gpu::open(adapter, profile, false).unwrap();
        let all = cases::all(&profile);
        let of = |kernel: Kernel| all.iter().filter(move |case| case.variant.kernel == kernel);
        let sums = |buffer: &[u32]| buffer.chunks(4).map(|stats| [stats[0], stats[1]]).collect::<Vec<_>>();
        for lse in of(Kernel::LseChunk) {
            let alike = |case: &&Case| case.buffers[0].len() == lse.buffers[0].len();
            let mut topk = of(Kernel::TopkChunk).find(alike).expect("a case of as many logits").clone();
            topk.buffers[0] = lse.buffers[0].clone();
            let (one, other) = (run(&mut device, lse), run(&mut device, &topk));
            assert_eq!(sums(&one[1]), sums(&other[3]), "{} on {}, {}", lse.name, device.name(), profile.name);
        }
    }
}

#[test]
fn comparisons_notice_what_they_should() {
    let one = 1.0f32.to_bits();
    let off = 1.001f32.to_bits();
    assert!(Compare::Relative(1e-4).check(&[one, one], &[one, off]).is_err());
    assert!(Compare::Relative(1e-2).check(&[one, one], &[one, off]).is_ok());
    assert!(Compare::Relative(1e-2).check(&[one], &[f32::NAN.to_bits()]).is_err());
    assert!(Compare::Equal.check(&[1], &[2]).is_err());
    assert!(Compare::Bytes.check(&[0x01020304], &[0x01020405]).is_ok());
    assert!(Compare::Bytes.check(&[0x01020304], &[0x01020306]).is_err());
    assert!(Compare::Halves.check(&[0x3c00_3c00], &[0x3c00_3c01]).is_ok());
    assert!(Compare::Halves.check(&[0x3c00_3c00], &[0x3c00_3c09]).is_err());
}
