//! Models against logits that Hugging Face transformers computed (tests/data/make_tiny.py).

use pp_engine::checkpoint::Checkpoint;
use pp_shaders::Profile;

use crate::support::{checkpoint, data, exact, floats, gpu, head, ids, json, twins};

/// max |Δ logit| of the exact mode, as a share of max |logit|: float32 rounding in another order.
const TOLERANCE: f64 = 1e-4;

fn layers(checkpoint: &Checkpoint) -> usize {
    checkpoint.config.layers
}

#[track_caller]
fn check(model: &str, golden: &str, device: &pp_engine::pipeline::Device) {
    let checkpoint = checkpoint(model);
    let mut head = head(&checkpoint, &[layers(&checkpoint)], exact(128), device);
    for (i, case) in json(golden)["cases"].as_array().unwrap().iter().enumerate() {
        let ids = ids(&case["ids"]);
        let expected = floats(&case["logits_last"]);
        let rows = head.logits(&ids, 128).unwrap();
        let found = rows.last().unwrap();
        let bound = TOLERANCE * case["max_abs_logit"].as_f64().unwrap();
        let worst = expected.iter().zip(found).map(|(e, f)| (e - f64::from(*f)).abs()).fold(0.0, f64::max);
        assert!(worst <= bound, "{model} case {i}: max |Δ logit| {worst:.2e} over {bound:.2e}");
        let nll: f64 =
            rows.iter().zip(&ids[1..]).map(|(row, id)| log_sum_exp(row) - f64::from(row[*id as usize])).sum();
        let expected_nll = case["nll"].as_f64().unwrap();
        assert!((nll - expected_nll).abs() <= 1e-3 * expected_nll, "{model} case {i}: nll {nll} for {expected_nll}");
    }
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let top = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    top + row.iter().map(|l| (f64::from(*l) - top).exp()).sum::<f64>().ln()
}

fn tiny() -> Vec<(String, String)> {
    let mut models = Vec::new();
    for entry in std::fs::read_dir(data("tiny")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        models.push((format!("tiny/{name}"), format!("tiny/{name}/golden.json")));
    }
    for entry in std::fs::read_dir(data("tiny-gguf")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(stem) = name.strip_suffix(".gguf") {
            let golden = if stem.starts_with("split-") { "split" } else { stem };
            models.push((format!("tiny-gguf/{name}"), format!("tiny-gguf/{golden}.golden.json")));
        }
    }
    models.sort();
    assert!(models.len() >= 28, "every recorded model is here");
    models
}

#[test]
fn twins_compute_what_transformers_does() {
    tiny().iter().for_each(|(model, golden)| check(model, golden, &twins()));
}

#[test]
fn the_software_profile_computes_what_transformers_does() {
    tiny().iter().for_each(|(model, golden)| check(model, golden, &gpu(Profile::SOFTWARE)));
}

#[test]
fn the_card_profile_computes_what_transformers_does() {
    tiny().iter().for_each(|(model, golden)| check(model, golden, &gpu(Profile::CARD)));
}
