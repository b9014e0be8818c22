//! Models against logits that Hugging Face transformers computed (tests/data/make_tiny.py).

use std::sync::atomic::AtomicBool;

use pp_engine::Wire;
use pp_engine::backend::Backend;
use pp_engine::backend::reference::Reference;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Head, HeadOptions};
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::message::{OutputRequest, Span, Step};
use pp_engine::pipeline::Pipeline;
use pp_engine::stage::{Stage, StageOutput};
use pp_shaders::Profile;

use crate::support::{checkpoint, data, exact, floats, gpu, head, ids, json, swiftshader, tokenizer, twins};

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

/// The bits of all logits of a recorded case.
fn bits(model: &str, split: &[usize], device: &pp_engine::pipeline::Device, chunk: usize) -> Vec<Vec<u32>> {
    let checkpoint = checkpoint(model);
    let mut head = head(&checkpoint, split, exact(128), device);
    let ids = ids(&json(&format!("{model}/golden.json"))["cases"][1]["ids"]);
    let rows = head.logits(&ids, chunk).unwrap();
    rows.iter().map(|row| row.iter().map(|logit| logit.to_bits()).collect()).collect()
}

#[test]
fn a_33_layer_model_is_the_same_in_any_number_of_stages() {
    let model = "tiny/llama-33";
    for device in [twins(), gpu(Profile::SOFTWARE), gpu(Profile::CARD)] {
        let one = bits(model, &[33], &device, 128);
        for split in [vec![9, 8, 8, 8], vec![30, 1, 1, 1]] {
            assert!(bits(model, &split, &device, 128) == one, "{split:?} on {}", device.name());
        }
        assert!(bits(model, &[16, 17], &device, 7) == one, "chunks of 7 on {}", device.name());
    }
    assert!(bits(model, &[1; 33], &twins(), 128) == bits(model, &[33], &twins(), 128));
}

/// Rounding on three hops moves logits, and by how much at most; what is exact moves none.
#[test]
fn rounding_on_hops_stays_close() {
    let model = "tiny/llama-33";
    let checkpoint = checkpoint(model);
    let ids = ids(&json(&format!("{model}/golden.json"))["cases"][1]["ids"]);
    let logits = |wire| {
        let options = StageOptions { wire, ..exact(128) };
        head(&checkpoint, &[9, 8, 8, 8], options, &twins()).logits(&ids, 128).unwrap()
    };
    let exact = logits(Wire::F32);
    // transformers in f16 is off by 0.15 here, in bf16 by 0.8.
    for (wire, bound) in [(Wire::F32, 0.0), (Wire::F16, 0.02), (Wire::Q8, 0.4)] {
        let found = logits(wire);
        let pairs = exact.iter().flatten().zip(found.iter().flatten());
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst <= bound && (worst > 0.0 || wire == Wire::F32), "{wire}: max |Δ logit| {worst}");
    }
}

/// What `plan` says is what a stage allocates.
#[test]
fn stages_allocate_what_was_planned() {
    for (model, split) in [("tiny/llama-33", vec![9, 8, 8, 8]), ("tiny-gguf/mixed-k-qwen2.gguf", vec![1, 1])] {
        let checkpoint = checkpoint(model);
        assert_eq!(split.iter().sum::<usize>(), layers(&checkpoint), "{model}");
        let head = head(&checkpoint, &split, exact(512), &gpu(Profile::SOFTWARE));
        for report in head.pipeline().reports() {
            let planned = report.weight_bytes + report.kv_bytes + report.work_bytes;
            let allocated = report.allocated_bytes;
            assert!(
                planned.abs_diff(allocated) * 50 <= planned,
                "{model} stage {}: {allocated} for {planned}",
                report.spec.index
            );
        }
    }
}

/// Two stages on two drivers that share nothing but the host: one Mesa's, one SwiftShader.
#[test]
fn a_pipeline_may_mix_drivers() {
    let checkpoint = checkpoint("tiny/qwen3");
    let swiftshader = swiftshader().expect("SwiftShader was not found; scripts/test.sh installs it");
    let devices = [
        gpu(Profile::SOFTWARE),
        pp_engine::pipeline::Device::Gpu { adapter: swiftshader, profile: Profile::CARD, checked: true },
    ];
    assert_ne!(devices[0].name(), devices[1].name());
    let layers = checkpoint.config.layers;
    let specs = StageSpec::pipeline(&[1, layers - 1]);
    let pipeline = Pipeline::open(&checkpoint, &specs, exact(128), &devices, &mut |_, _| {}, &AtomicBool::new(false));
    let mut head = Head::new(pipeline.unwrap(), tokenizer(&checkpoint), HeadOptions::default());
    for case in json("tiny/qwen3/golden.json")["cases"].as_array().unwrap() {
        let rows = head.logits(&ids(&case["ids"]), 128).unwrap();
        let expected = floats(&case["logits_last"]);
        let bound = TOLERANCE * case["max_abs_logit"].as_f64().unwrap();
        let worst =
            expected.iter().zip(rows.last().unwrap()).map(|(e, f)| (e - f64::from(*f)).abs()).fold(0.0, f64::max);
        assert!(worst <= bound, "max |Δ logit| {worst:.2e} over {bound:.2e}");
    }
}

/// A binding limit far below the tensors' sizes: matrices and caches come in several buffers.
#[test]
fn tensors_larger_than_a_binding_are_cut() {
    let model = "tiny/llama-untied";
    let checkpoint = checkpoint(model);
    let case = &json(&format!("{model}/golden.json"))["cases"][1];
    let ids = ids(&case["ids"]);
    let options = StageOptions { chunk: ids.len(), ..exact(192) };
    let run = |limit: usize| {
        let specs = StageSpec::pipeline(&[checkpoint.config.layers]);
        let backend = Box::new(Reference::new(Profile::CARD, limit));
        let layout =
            StageLayout::new(&checkpoint, specs[0].clone(), options, &Profile::CARD, backend.limits()).unwrap();
        let cut = layout.kv_groups.len() > 1 && layout.embedding.as_ref().unwrap().chunks.len() > 1;
        let mut stage = Stage::open(&checkpoint, layout, backend, &mut |_| true).unwrap();
        let outputs = vec![OutputRequest {
            row: ids.len() as u32 - 1,
            target: 0,
            top_k: 1,
            inverse_temperature: 1.0,
            whole_row: true,
            edits: Vec::new(),
        }];
        let spans = vec![Span { request: 0, sequence: 1, start: 0, count: ids.len() as u32, new_pages: vec![0, 1] }];
        let step = Step { spans, ids: ids.clone(), outputs, ..Step::default() };
        let StageOutput::Outputs(outputs) = stage.step(&step, &[]).unwrap() else {
            panic!("the stage is the last one")
        };
        (cut, outputs.outputs[0].row.clone().unwrap())
    };
    let (whole_is_cut, whole) = run(1 << 30);
    // Room for the buffers between kernels, but neither for the embedding nor for the keys of both heads.
    let (cut, found) = run(65_000);
    assert!(!whole_is_cut && cut, "the small limit cuts, the large one does not");
    assert_eq!(whole, found);
}
