//! Packed rows, read back by the twins' decoder, against values that the `gguf` package decoded (tests/data/quants).

use std::cell::RefCell;

use pp_shaders::reference::quant::Streams;

use super::*;

fn recorded(dtype: DType) -> Vec<(Vec<u8>, Vec<f32>)> {
    let path = format!("{}/../tests/data/quants/{}.json", env!("CARGO_MANIFEST_DIR"), dtype.name());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let blocks = file["blocks"].as_array().unwrap().iter();
    let hex =
        |text: &str| (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect();
    blocks
        .map(|block| {
            let values = block["values_u32"].as_array().unwrap().iter();
            (hex(block["hex"].as_str().unwrap()), values.map(|v| f32::from_bits(v.as_u64().unwrap() as u32)).collect())
        })
        .collect()
}

#[test]
fn every_quantised_type_decodes_as_the_reference_does() {
    for dtype in DType::ALL.into_iter().filter(|dtype| dtype.block_elements() > 1) {
        let blocks = recorded(dtype);
        // Rows of several blocks, so that every stored position is used; more rows than stand side by side.
        let per_row = 4;
        let rows: Vec<Vec<&(Vec<u8>, Vec<f32>)>> =
            (0..11).map(|row| (0..per_row).map(|i| &blocks[(row * 5 + i * 3) % blocks.len()]).collect()).collect();
        let cols = per_row * dtype.block_elements();
        for profile in Profile::ALL {
            let format = device_format(dtype);
            let mut packed = Packed::new(format, rows.len(), row_blocks(cols), &profile);
            for (row, blocks) in rows.iter().enumerate() {
                let data: Vec<u8> = blocks.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
                assert_eq!(data.len(), row_bytes(dtype, cols));
                packed.set_row(row, dtype, &data);
            }
            let words = |bytes: &Vec<u8>| {
                RefCell::new(bytes.chunks(4).map(|b| u32::from_le_bytes(std::array::from_fn(|i| b[i]))).collect())
            };
            let streams: Vec<RefCell<Vec<u32>>> = packed.streams.iter().map(words).collect();
            let streams: Vec<&RefCell<Vec<u32>>> = streams.iter().collect();
            let decoded = Streams::new(format, packed.arrangement, &streams);
            for (row, blocks) in rows.iter().enumerate() {
                let expected: Vec<f32> = blocks.iter().flat_map(|(_, values)| values.clone()).collect();
                for (i, (found, expected)) in decoded.row(row).iter().zip(&expected).enumerate() {
                    // A product and a difference may be rounded together or apart.
                    let bound = 1e-6 * expected.abs().max(1e-30) + 4.0 * f32::EPSILON * expected.abs();
                    let close = (found - expected).abs() <= bound.max(1e-6 * expected.abs()) || found == expected;
                    assert!(close, "{dtype} row {row} value {i}: {found} for {expected}");
                }
            }
        }
    }
}

#[test]
fn unquantised_rows_are_padded_to_whole_blocks() {
    let values: Vec<u8> = (0..40).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut packed = Packed::new(Format::F32, 1, row_blocks(40), &Profile::CARD);
    packed.set_row(0, DType::F32, &values);
    let found: Vec<f32> =
        packed.streams[0][..256].chunks(4).map(|b| f32::from_le_bytes(std::array::from_fn(|i| b[i]))).collect();
    assert_eq!(found[..40], (0..40).map(|i| i as f32).collect::<Vec<_>>());
    assert!(found[40..].iter().all(|v| *v == 0.0));
}
