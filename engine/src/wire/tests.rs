use super::*;
use proptest::prelude::*;

fn there_and_back(wire: Wire, rows: &[f32], hidden: usize) -> (usize, Vec<f32>) {
    let mut bytes = vec![1, 2, 3];
    wire.encode(rows, hidden, &mut bytes);
    assert_eq!(bytes[..3], [1, 2, 3], "what is there stays");
    let back = wire.decode(&bytes[3..], rows.len() / hidden, hidden).unwrap();
    (bytes.len() - 3, back)
}

/// What a hop may do to a row: at most so much to each value of a block.
fn bound(wire: Wire, block: &[f32], value: f32) -> f32 {
    let largest = block.iter().fold(0.0f32, |max, value| max.max(value.abs()));
    match wire {
        Wire::F32 => 0.0,
        Wire::F16 if largest > 65504.0 => 0.0,
        Wire::F16 => (value.abs() / 2048.0).max(2f32.powi(-25)),
        Wire::Q8 if largest > 1e38 => 0.0,
        // Half a scale, and what three roundings of floats add.
        Wire::Q8 => (largest / 254.0 * 1.0001).max(1e-36),
    }
}

/// Floats of every magnitude, mostly of one like those of activations.
fn value() -> impl Strategy<Value = f32> {
    prop_oneof![8 => -10f32..10.0, 2 => -5e4f32..5e4, 1 => -7e4f32..7e4, 1 => -1e-4f32..1e-4, 1 => any::<f32>()]
}

proptest! {
    #[test]
    fn rounding_keeps_its_bounds_and_other_rows_are_exact(
        (hidden, rows) in (1usize..100).prop_flat_map(|hidden| {
            (Just(hidden), prop::collection::vec(value(), hidden..=12 * hidden))
        }),
    ) {
        let rows = &rows[..rows.len() / hidden * hidden];
        for wire in Wire::ALL {
            let (bytes, back) = there_and_back(wire, rows, hidden);
            prop_assert!(bytes <= wire.bytes_max(rows.len() / hidden, hidden));
            for (row, found) in rows.chunks(hidden).zip(back.chunks(hidden)) {
                let is_exact = row.iter().zip(found).all(|(a, b)| a.to_bits() == b.to_bits());
                let blocks = row.chunks(BLOCK).zip(found.chunks(BLOCK));
                let mut is_close = blocks.flat_map(|(block, found)| {
                    block.iter().zip(found).map(|(a, b)| (a - b).abs() <= bound(wire, block, *a))
                });
                prop_assert!(is_exact || is_close.all(|one| one), "{wire} {row:?} {found:?}");
                prop_assert!(row.iter().any(|v| !v.is_finite()) || found.iter().all(|v| v.is_finite()));
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_company(rows in prop::collection::vec(value(), 5 * 40)) {
        for wire in Wire::ALL {
            let (_, together) = there_and_back(wire, &rows, 40);
            let alone: Vec<f32> = rows.chunks(40).flat_map(|row| there_and_back(wire, row, 40).1).collect();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&together), bits(&alone));
        }
    }

    #[test]
    fn any_bytes_are_rows_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..200), rows in 0usize..20, hidden in 4usize..40,
    ) {
        for wire in Wire::ALL {
            if let Ok(found) = wire.decode(&bytes, rows, hidden) {
                prop_assert_eq!(found.len(), rows * hidden);
            }
            // Flags that are in order, and the length that they announce, are rows whatever the rest is.
            let mut right = bytes.clone();
            if wire != Wire::F32 && rows > 0 && right.len() >= rows.div_ceil(8) {
                right[rows.div_ceil(8) - 1] &= 0xff >> ((8 - rows % 8) % 8);
                let floats: usize = right[..rows.div_ceil(8)].iter().map(|byte| byte.count_ones() as usize).sum();
                right.resize(wire.bytes(rows, hidden) + floats * (4 * hidden - wire.row_bytes(hidden)), 7);
                prop_assert_eq!(wire.decode(&right, rows, hidden).map(|found| found.len()), Ok(rows * hidden));
            }
        }
    }
}

#[test]
fn rows_take_the_bytes_that_are_promised() {
    let rows: Vec<f32> = (0..3 * 576).map(|i| (i as f32).sin()).collect();
    for (wire, bytes) in [(Wire::F32, 3 * 2304), (Wire::F16, 1 + 3 * 1152), (Wire::Q8, 1 + 3 * 648)] {
        assert_eq!(there_and_back(wire, &rows, 576).0, bytes);
        assert_eq!(wire.bytes(3, 576), bytes);
        assert_eq!(there_and_back(wire, &[], 576), (0, vec![]));
    }
    assert_eq!(Wire::F16.bytes(2048, 8192), (32 << 20) + 256);
}

#[test]
fn a_row_that_would_become_infinite_goes_as_floats() {
    #[track_caller]
    fn check(wire: Wire, value: f32, is_exact: bool) {
        let mut rows = vec![0.1f32; 3 * 64];
        rows.iter_mut().skip(1).step_by(32).for_each(|value| *value = 0.77);
        rows[64 + 40] = value;
        let (bytes, back) = there_and_back(wire, &rows, 64);
        assert_eq!(back[64 + 40].to_bits(), if is_exact { value.to_bits() } else { back[64 + 40].to_bits() });
        assert_eq!(back[64] == 0.1, is_exact, "the whole row");
        assert_ne!(back[0], 0.1, "no other row");
        let floats = if is_exact { 4 * 64 - wire.row_bytes(64) } else { 0 };
        assert_eq!(bytes, wire.bytes(3, 64) + floats);
        assert!(!value.is_finite() || back[64 + 40].is_finite());
    }
    for sign in [1.0, -1.0] {
        check(Wire::F16, 65504.0 * sign, false);
        check(Wire::F16, 65505.0 * sign, true);
        check(Wire::F16, 1e30 * sign, true);
        check(Wire::F16, f32::INFINITY * sign, true);
        check(Wire::F16, f32::NAN.copysign(sign), true);
        check(Wire::Q8, 9.9e37 * sign, false);
        check(Wire::Q8, 1.1e38 * sign, true);
        check(Wire::Q8, f32::MAX * sign, true);
        check(Wire::Q8, f32::INFINITY * sign, true);
        check(Wire::Q8, f32::NAN.copysign(sign), true);
    }
    // Nothing to divide by.
    let (_, back) = there_and_back(Wire::Q8, &[f32::from_bits(1), -1e-40, 0.0, 1e-37], 4);
    assert_eq!(back, [0.0; 4]);
}

#[test]
fn wrong_lengths_and_flags_are_told() {
    #[track_caller]
    fn refused(wire: Wire, bytes: &[u8], rows: usize, expected: &str) {
        assert_eq!(wire.decode(bytes, rows, 32).unwrap_err().to_string(), expected);
    }
    refused(Wire::F32, &[0; 127], 1, "1 rows of 32 activations in f32: 127 bytes where 128 were announced");
    refused(Wire::F16, &[0; 64], 1, "1 rows of 32 activations in f16: 64 bytes where 65 were announced");
    refused(Wire::F16, &[], 1, "1 rows of 32 activations in f16: 0 bytes where 65 were announced");
    refused(Wire::Q8, &[0; 38], 1, "1 rows of 32 activations in q8: 38 bytes where 37 were announced");
    refused(Wire::Q8, &[1; 37], 1, "1 rows of 32 activations in q8: 37 bytes where 129 were announced");
    refused(Wire::Q8, &[0b10; 37], 1, "activations in q8: a flag for row 1 of 1");
    // What only a peer says is not taken for a reason to allocate.
    assert!(Wire::F16.decode(&[0; 64], 1 << 40, 1 << 20).is_err());
}
