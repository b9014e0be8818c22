//! The verbs.

use serde_json::Value;

use super::{model, object, stdout, succeeded};
use crate::support::{ids, json};

fn floats(value: &Value) -> Vec<f64> {
    crate::support::floats(value)
}

#[test]
fn perplexity_is_that_of_transformers() {
    let case = &json("tiny/llama-tied/golden.json")["cases"][0];
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("text.txt");
    std::fs::write(&file, case["text"].as_str().expect("a text")).expect("writable");
    let (m, file) = (model("tiny/llama-tied"), file.to_str().expect("UTF-8").to_owned());
    let arguments = ["perplexity", "-m", &m, "--text-file", &file, "--activations", "f32", "--stages", "2"];
    let found = object(&arguments);
    assert_eq!(ids(&found["ids"]), ids(&case["ids"]));
    let (nll, expected) = (found["nll"].as_f64().expect("a number"), case["nll"].as_f64().expect("a number"));
    assert!((nll - expected).abs() <= 1e-3 * expected, "{nll} for {expected}");
    let logprobs = floats(&found["token_logprobs"]);
    assert_eq!(logprobs.len() + 1, ids(&found["ids"]).len());
    assert!((nll + logprobs.iter().sum::<f64>()).abs() < 1e-4);
    let perplexity = found["perplexity"].as_f64().expect("a number");
    assert!((perplexity.ln() * logprobs.len() as f64 - nll).abs() < 1e-6);
    let top: Vec<f64> = found["top8"].as_array().expect("an array").iter().map(|p| p[1].as_f64().unwrap()).collect();
    assert_eq!(top.len(), 8);
    assert!(top.is_sorted_by(|a, b| a >= b));
    let short = object(&[&arguments[..], &["--tokens", "3"]].concat());
    assert_eq!(ids(&short["ids"]), ids(&case["ids"])[..3]);
    assert!(stdout(&succeeded(&arguments)).contains("perplexity "));
}

#[test]
fn a_plan_tells_what_a_run_will_take() {
    let m = model("tiny/llama-33");
    let options = ["-m", &m, "--split", "9,8,8,8", "--ctx", "128"];
    let plan = object(&[&["plan"], &options[..]].concat());
    let run = object(&[&options[..], &["-n", "2", "hello"]].concat());
    let stages = |value: &Value| value["stages"].as_array().expect("an array").clone();
    assert_eq!(stages(&plan).len(), 4);
    for (planned, ran) in stages(&plan).iter().zip(stages(&run)) {
        let (planned_bytes, bytes) = (planned["device_bytes"].as_f64().unwrap(), ran["device_bytes"].as_f64().unwrap());
        assert!((planned_bytes - bytes).abs() <= 0.02 * bytes, "{planned} {ran}");
        for key in ["layers", "file_bytes", "weight_bytes", "kv_bytes", "work_bytes"] {
            assert_eq!(planned[key], ran[key], "{key}");
        }
    }
    assert_eq!(plan["hop_bytes_decode"], 4 * json("tiny/llama-33/config.json")["hidden_size"].as_u64().unwrap());
    assert_eq!(plan["kv_tokens"], 128);
    let half = object(&[&["plan", "--wire", "f16"], &options[..]].concat());
    assert_eq!(half["hop_bytes_decode"].as_u64(), plan["hop_bytes_decode"].as_u64().map(|bytes| bytes / 2 + 1));
    assert_eq!((&plan["wire"], &half["wire"]), (&"f32".into(), &"f16".into()));
    let text = stdout(&succeeded(&[&["plan"], &options[..]].concat()));
    for wanted in ["0-8 +embedding", "25-32 +head", "KV", "between stages"] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn inspect_describes_a_model() {
    let found = object(&["inspect", &model("tiny-gguf/llama-q5_1.gguf")]);
    assert_eq!(
        (&found["arch"], &found["container"], &found["supported"]),
        (&"llama".into(), &"GGUF".into(), &true.into())
    );
    assert!(found["layer_bytes"].as_array().is_some_and(|layers| layers.len() as u64 == found["layers"]));
    assert!(found["tensor_types"].as_array().is_some_and(|types| types.iter().any(|t| t["type"] == "Q5_1")));
    assert!(found["parameters"].as_u64() > Some(0));
    let digest = found["digest"].as_str().expect("a text").to_owned();
    assert!(digest.len() == 64 && digest.bytes().all(|digit| digit.is_ascii_hexdigit()), "{digest}");
    let again = stdout(&succeeded(&["inspect", &model("tiny-gguf/llama-q5_1.gguf")]));
    assert!(again.contains(&format!("digest         {digest} (BLAKE3)")), "{again}");
    let text = stdout(&succeeded(&["inspect", &model("tiny/llama3-rope")]));
    for wanted in ["architecture   llama", "llama3, factor", "BOS", "EOS", "chat template", "supported"] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn inspect_says_what_is_not_supported() {
    let (_dir, path) = super::copied("tiny/llama-tied");
    let config = std::fs::read_to_string(path.join("config.json")).expect("readable");
    std::fs::write(path.join("config.json"), config.replace("\"llama\"", "\"mamba\"")).expect("writable");
    std::fs::remove_file(path.join("tokenizer.json")).expect("it was there");
    let found = object(&["inspect", path.to_str().expect("UTF-8")]);
    assert_eq!(found["supported"], false);
    let why = found["unsupported"].to_string();
    assert!(why.contains("`mamba` is not supported") && why.contains("tokenizer.json"), "{why}");
}

#[test]
fn bench_tells_rates_at_every_depth() {
    let m = model("tiny/llama-tied");
    let arguments = [
        "bench",
        "-m",
        &m,
        "--prompt-tokens",
        "16",
        "--gen-tokens",
        "4",
        "--depths",
        "0,32",
        "--reps",
        "2",
        "--chunk",
        "16",
    ];
    let found = object(&arguments);
    for value in [&found, &found["depths"][1]] {
        for key in ["prefill_tokens_per_s", "decode_tokens_per_s", "first_token_seconds", "time_per_token_seconds"] {
            let spread = ["min", "median", "max"].map(|part| value[key][part].as_f64().expect("a number"));
            assert!(spread[0] > 0.0 && spread.is_sorted(), "{key}: {spread:?}");
        }
    }
    assert_eq!((&found["depths"][1]["depth"], &found["depths"][1]["prefill_from"]), (&32.into(), &32.into()));
    assert!(found["stages"].is_array());
    let roofline = &found["roofline"];
    for key in ["copy_bytes_per_s", "read_bytes_per_s", "int8_ops_per_s", "f32_flops_per_s"] {
        assert!(roofline[key].as_f64() > Some(1e6), "{key}: {roofline}");
    }
    assert_eq!((&roofline["decode_position"], &roofline["prefill_tokens"]), (&16.into(), &16.into()));
    for step in ["decode", "prefill"] {
        let kernels = roofline[step].as_array().expect("an array");
        // Some drivers have no clock for single dispatches.
        assert_eq!(roofline["timestamps"] == true, !kernels.is_empty());
        for kernel in kernels {
            assert!(kernel["calls"].as_u64() > Some(0) && kernel["seconds"].as_f64() >= Some(0.0), "{kernel}");
            assert_eq!(kernel["floor_seconds"].is_null(), kernel["weight_bytes"] == 0, "{kernel}");
        }
        let calls = |role: &str| {
            let of_role = kernels.iter().filter(|kernel| kernel["role"] == role);
            of_role.map(|kernel| kernel["calls"].as_u64().unwrap()).sum::<u64>()
        };
        assert!(kernels.is_empty() || calls("ffn_down") == 2, "one a layer: {roofline}");
    }
    let text = stdout(&succeeded(&[&arguments[..], &["--no-roofline"]].concat()));
    assert!(text.contains("decode tokens/s") && !text.contains("at most"), "{text}");
}

#[test]
fn devices_lists_every_adapter() {
    let found = object(&["devices", "--no-selftest"]);
    let devices = found["devices"].as_array().expect("an array");
    assert!(!devices.is_empty());
    assert!(devices.iter().any(|device| device["used_by_default"] == true), "{found}");
    for device in devices {
        for key in ["id", "name", "type", "driver", "profile", "why"] {
            assert!(device[key].is_string(), "{key}: {device}");
        }
        assert!(device["limits"]["binding_bytes"].as_u64() > Some(0), "{device}");
        let has_clock = device["features"].as_array().expect("an array").contains(&"TIMESTAMP_QUERY".into());
        assert_eq!(device["timestamps"], if has_clock { "device" } else { "host" }, "{device}");
    }
    let text = stdout(&succeeded(&["devices", "--no-selftest"]));
    assert!(text.contains("type ") && text.contains("driver ") && text.contains("self-test  not done"), "{text}");
    assert!(text.contains("timestamps "), "{text}");
    // Ids are what --device takes.
    let id = devices[0]["id"].as_str().expect("a text");
    let ran = object(&["-m", &model("tiny/llama-tied"), "-n", "1", "--device", id, "hello"]);
    assert_eq!(ran["stages"][0]["device_id"], id);
}

#[test]
fn every_adapter_passes_the_self_test() {
    let found = object(&["devices"]);
    for device in found["devices"].as_array().expect("an array") {
        let selftest = &device["selftest"];
        assert_eq!((&selftest["ok"], &selftest["error"]), (&true.into(), &Value::Null), "{device}");
        assert!(selftest["checked"].as_u64() > Some(15) && selftest["seconds"].as_f64() > Some(0.0), "{device}");
    }
}

#[test]
fn help_has_examples_and_exit_codes() {
    let help = stdout(&succeeded(&["--help"]));
    for wanted in ["Examples:", "Exit codes:", "130", "scripts", "PP_MODELS"].iter().filter(|w| **w != "scripts") {
        assert!(help.contains(wanted), "{wanted}");
    }
    for verb in ["devices", "inspect", "plan", "perplexity", "bench", "batch", "sim", "trace", "doctor", "net-bench"] {
        assert!(help.contains(&format!("\n  {verb} ")), "{verb}");
        assert!(stdout(&succeeded(&["help", verb])).contains("Usage: pp-run"), "{verb}");
    }
    assert!(stdout(&succeeded(&["help", "plan"])).contains("--split"));
}
