//! Devices whose costs are known, measured; what is kept, and for whom.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pp_shaders::{Act, KvType, Profile};

use super::cache::ENTRIES_MAX;
use super::*;
use crate::backend::paced::Pace;
use crate::checkpoint::Checkpoint;
use crate::law::SIZES;

fn tiny() -> (Shape, Vec<usize>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny/llama-33");
    Shape::of(&Checkpoint::open(&path).unwrap(), Act::F32, KvType::F32)
}

fn paced(pace: Pace) -> Device {
    Device::Paced { pace, profile: Profile::CARD, hold: Default::default(), brake: Default::default() }
}

/// The same, but for the last bits of numbers that were written as text.
fn is_like(found: Option<Calibration>, wanted: &Calibration) -> bool {
    let numbers = |of: &Calibration| -> Vec<f64> {
        let curves = [of.fixed, of.first, of.last].into_iter().chain(of.kinds.clone());
        curves
            .flat_map(|curve| [&curve.seconds[..], &[curve.decode_position, curve.prefill_position]].concat())
            .collect()
    };
    let found = found.map_or(Vec::new(), |found| numbers(&found));
    let wanted = numbers(wanted);
    found.len() == wanted.len() && found.iter().zip(&wanted).all(|(a, b)| (a - b).abs() <= 1e-12 * b.abs())
}

fn measure(kept: &mut Calibrations, device: &Device, shape: &Shape) -> Calibration {
    kept.measure(device, shape, &mut |_, _| {}, &AtomicBool::new(false)).unwrap()
}

/// Every part is what it was set to, within what a sleep is late by; at the best of some times, as others may take the
/// processor away.
#[test]
fn the_parts_of_a_paced_device_are_what_they_were_set_to() {
    let micros = Duration::from_micros;
    let pace = Pace {
        alpha: micros(2000),
        beta: micros(50),
        layer_alpha: micros(800),
        layer_beta: micros(20),
        head_alpha: micros(3000),
        head_beta: micros(200),
    };
    let (shape, kinds) = tiny();
    assert_eq!((shape.kinds.len(), kinds.len()), (1, 33));
    let shape = Shape { layers: 9, ..shape };
    let wrong = || {
        let found = measure(&mut Calibrations::new(None), &paced(pace), &shape);
        assert!(found.is_of(&shape) && found.share == 1.0);
        let is_wrong = |(at, size): &(usize, usize)| {
            let seconds = |alpha: u64, beta: u64| (alpha + beta * *size as u64) as f64 * 1e-6;
            // Encoding a frame is part of it.
            let near = |found: f64, wanted: f64| (found - wanted).abs() < 0.1 * wanted + 5e-4;
            // Only rows that are drawn from go through the head: one of a chunk.
            let rows = if *size <= 8 { *size as u64 } else { 1 };
            !near(found.kinds[0].seconds[*at], seconds(800, 20))
                || !near(found.fixed.seconds[*at] + found.first.seconds[*at], seconds(2000, 50))
                || !near(found.last.seconds[*at], (3000 + 200 * rows) as f64 * 1e-6)
        };
        SIZES.into_iter().enumerate().find(is_wrong).map(|(_, size)| (size, found.clone()))
    };
    let found = (0..8).map(|_| wrong()).find(Option::is_none);
    assert!(found.is_some(), "{:?}", wrong());
}

#[test]
fn what_was_measured_is_kept_and_a_damaged_file_is_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("deep/calibration.json");
    let (shape, _) = tiny();
    let device = paced(Pace { alpha: Duration::from_micros(50), ..Pace::default() });
    let found = measure(&mut Calibrations::new(Some(file.clone())), &device, &shape);
    assert!(is_like(Calibrations::new(Some(file.clone())).known(&device, &shape), &found));
    // Another device, and another shape, are others.
    let other = paced(Pace { alpha: Duration::from_micros(51), ..Pace::default() });
    let kept = Calibrations::new(Some(file.clone()));
    assert_eq!(kept.known(&other, &shape), None);
    assert_eq!(kept.known(&device, &Shape { activations: Act::Q8, ..shape.clone() }), None);
    assert_eq!(kept.said("rig2", &device, &shape), None);
    for damage in ["", "{", "{\"version\":9,\"calibrations\":[]}", "{\"version\":1,\"calibrations\":[{}]}"] {
        std::fs::write(&file, damage).unwrap();
        let mut kept = Calibrations::new(Some(file.clone()));
        assert_eq!(kept.known(&device, &shape), None, "{damage}");
        kept.keep("rig2", &device, &shape, found.clone());
        assert!(is_like(Calibrations::new(Some(file.clone())).said("rig2", &device, &shape), &found), "{damage}");
    }
}

#[test]
fn the_file_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("calibration.json");
    let (shape, _) = tiny();
    let device = paced(Pace::default());
    let nothing = Curve::default();
    let said = Calibration { fixed: nothing, kinds: vec![nothing], first: nothing, last: nothing, share: 1.0 };
    let mut kept = Calibrations::new(None);
    for i in 0..ENTRIES_MAX + 3 {
        if i == ENTRIES_MAX + 2 {
            kept.0.write_to(file.clone());
        }
        kept.keep(&format!("rig{i}"), &device, &shape, said.clone());
    }
    let kept = Calibrations::new(Some(file));
    let knows = |i: usize| kept.said(&format!("rig{i}"), &device, &shape).is_some();
    assert!(!knows(2) && knows(3) && knows(ENTRIES_MAX + 2));
}

#[test]
fn what_cannot_be_measured_says_so_and_a_cancelled_one_ends() {
    let (shape, _) = tiny();
    let mut kept = Calibrations::new(None);
    let twins = Device::Reference { profile: Profile::SOFTWARE };
    let error = kept.measure(&twins, &shape, &mut |_, _| {}, &AtomicBool::new(false)).unwrap_err();
    assert!(error.to_string().contains("is not measured: it is there to be exact"), "{error}");
    let device = paced(Pace::default());
    let error = kept.measure(&device, &shape, &mut |_, _| {}, &AtomicBool::new(true)).unwrap_err();
    assert!(matches!(error, CalibrateError::Cancelled), "{error}");
    assert_eq!(kept.known(&device, &shape), None);
}

/// Shapes come from other hosts.
#[test]
fn shapes_that_make_no_sense_are_refused() {
    let (shape, _) = tiny();
    let device = paced(Pace::default());
    let refused = |wrong: Shape, wanted: &str| {
        let error = meter::measure(&device, &wrong, &mut |_, _| {}, &AtomicBool::new(false)).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    };
    refused(Shape { arch: "mamba".into(), ..shape.clone() }, "`mamba` is not supported");
    refused(Shape { kinds: vec![], ..shape.clone() }, "0 kinds of layers");
    refused(Shape { ends: vec![], ..shape.clone() }, "0 tensors");
    refused(Shape { vocab: usize::MAX, ..shape.clone() }, "vocabulary");
    refused(Shape { context: 0, ..shape.clone() }, "context");
    let mut long = shape.clone();
    long.kinds[0][0].name = "x".repeat(65);
    refused(long, "a tensor's name of 65 bytes");
    let mut huge = shape.clone();
    huge.ends[0].shape = vec![1 << 40, 1 << 20];
    refused(huge, "of no size");
    let mut missing = shape.clone();
    missing.kinds[0].clear();
    refused(missing, "0 tensors");
    let mut wrong = shape;
    wrong.kinds[0][0].shape.push(2);
    refused(wrong, "shape");
}

#[test]
fn calibrations_of_other_hosts_are_looked_at() {
    let (shape, _) = tiny();
    let nothing = Curve::default();
    let good = Calibration { fixed: nothing, kinds: vec![nothing], first: nothing, last: nothing, share: 1.0 };
    assert!(good.is_of(&shape));
    let mut bad = vec![Calibration { kinds: vec![], ..good.clone() }, Calibration { share: f64::NAN, ..good.clone() }];
    for number in [f64::NAN, -1.0, f64::INFINITY, 1e9] {
        bad.push(Calibration { fixed: Curve { decode_position: number, ..nothing }, ..good.clone() });
    }
    assert!(bad.iter().all(|bad| !bad.is_of(&shape)));
}

#[test]
fn a_hop_in_this_process_takes_next_to_nothing() {
    let hop = in_process_hop();
    assert!(hop > Duration::ZERO && hop < Duration::from_millis(100), "{hop:?}");
    assert_eq!(in_process_hop(), hop, "measured once");
}
