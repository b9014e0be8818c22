//! The verbs.

use serde_json::Value;

use super::{model, no_vulkan, object, program, stderr, stdout, succeeded};
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
fn a_plan_predicts_says_why_and_measures_once() {
    let (m, cache) = (model("tiny/llama-33"), tempfile::tempdir().expect("a folder"));
    let plan = |options: &[&str]| {
        let mut command = program(&[&["plan", "-m", &m, "--stages", "2", "--json"], options].concat());
        let output = command.env("XDG_CACHE_HOME", cache.path()).output().expect("the program starts");
        assert!(output.status.success(), "{}", stderr(&output));
        let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        (found, stderr(&output))
    };
    let (found, told) = plan(&[]);
    assert!(told.contains("measuring ") && told.contains("once for models of this shape"), "{told}");
    assert_eq!((&found["split_by"], &found["forecast"]["source"]), (&"bytes".into(), &"measured".into()));
    let rows = found["forecast"]["concurrency"].as_array().expect("an array");
    let levels: Vec<u64> = rows.iter().filter_map(|row| row["concurrency"].as_u64()).collect();
    assert_eq!(levels, [1, 2, 4, 8, 16]);
    for row in rows {
        for key in ["groups", "tokens_per_s", "time_per_token_seconds", "first_token_seconds"] {
            assert!(row[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {row}");
        }
    }
    let reasons = found["forecast"]["reasons"].as_array().expect("an array");
    assert_eq!(reasons.len(), 2);
    assert!(reasons.iter().all(|reason| reason["step_seconds"].as_f64().is_some_and(|seconds| seconds > 0.0)));
    // Known from now on, whatever the split; a damaged file is made anew.
    let (auto, told) = plan(&["--split", "auto", "--concurrency", "3"]);
    assert!(!told.contains("measuring "), "{told}");
    assert_eq!(auto["split_by"], "measured");
    assert_eq!(auto["split"].as_array().expect("an array").iter().filter_map(Value::as_u64).sum::<u64>(), 33);
    assert!(
        auto["split_reason"].as_str().is_some_and(|text| text.contains("by measured times, for 3 requests at once"))
    );
    for (options, wanted) in [
        (&[][..], "for one request"),
        (&["--optimize", "throughput"], "for 16 requests at once"),
        (&["--concurrency", "3,5", "--max-sequences", "2"], "for 2 requests at once"),
    ] {
        let (found, _) = plan(&[&["--split", "auto"], options].concat());
        assert!(found["split_reason"].as_str().is_some_and(|text| text.contains(wanted)), "{options:?}: {found}");
    }
    let file = cache.path().join("pp-run/calibration.json");
    std::fs::write(&file, "{").expect("writable");
    assert!(plan(&[]).1.contains("measuring "));
    assert!(std::fs::metadata(&file).expect("it is there").len() > 100);
    let (bytes, told) = plan(&["--split", "auto", "--no-measure"]);
    assert_eq!((&bytes["split_by"], &bytes["forecast"], told.as_str()), (&"bytes".into(), &Value::Null, ""));
    let text = stdout(&succeeded(&["plan", "-m", &m, "--stages", "2"]));
    for wanted in
        ["predicted, from measured times", "at once", "first token ms", "why, at 1 at once:", "ms a step, busy"]
    {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn what_is_not_measured_is_not_predicted() {
    let m = model("tiny/llama-33");
    let output = succeeded(&["plan", "-m", &m, "--split", "20,13", "--device", "reference", "--json"]);
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!((&found["split_by"], &found["forecast"]), (&"typed".into(), &Value::Null));
    assert!(stderr(&output).contains("nothing is predicted: the reference"), "{}", stderr(&output));
}

const CARDS: &str = "\
[[card]]
name = 'card'
count = 2
memory_gb = 8
bandwidth_gb_s = 400
f32_tflops = 20

[[card]]
name = 'slow'
memory_gb = 4
bandwidth_gb_s = 1
f32_tflops = 0.05
host = 'rig2'

[network]
latency_us = 20000
bandwidth_gbit_s = 0.1
";

#[test]
fn cards_that_are_not_here_are_planned_with() {
    let (m, file) = (model("tiny/llama-33"), tempfile::NamedTempFile::new().expect("a file"));
    std::fs::write(file.path(), CARDS).expect("writable");
    let path = file.path().to_str().expect("UTF-8");
    let options = ["plan", "-m", &m, "--hardware", path, "--concurrency", "1,8"];
    // It needs no driver.
    let mut command = program(&[&options[..], &["--json"]].concat());
    let output = no_vulkan(&mut command).output().expect("the program starts");
    let found: Value = serde_json::from_str(&stdout(&output)).unwrap_or_else(|e| panic!("{e}: {}", stderr(&output)));
    assert_eq!(found["forecast"]["source"], "estimated");
    assert_eq!(found["forecast"]["concurrency"].as_array().map(Vec::len), Some(2));
    let cards = |found: &Value| -> Vec<String> {
        let stages = found["stages"].as_array().expect("an array");
        stages.iter().map(|stage| stage["card"].as_str().expect("a name").to_owned()).collect()
    };
    assert!(!cards(&found).contains(&"slow".to_owned()), "{found}");
    assert!(found["forecast"]["left_out"].as_array().is_some_and(|left| left.contains(&"slow".into())));
    let all = object(&[&options[..], &["--use-all"]].concat());
    assert_eq!(all["split"].as_array().map(Vec::len), Some(3));
    let rate = |found: &Value| found["forecast"]["concurrency"][1]["tokens_per_s"].as_f64().expect("a number");
    assert!(rate(&all) < rate(&found), "{} {}", rate(&all), rate(&found));
    let typed = object(&[&options[..], &["--split", "20,13"]].concat());
    assert_eq!(
        (&typed["split"], cards(&typed)),
        (&serde_json::json!([20, 13]), vec!["card #1".into(), "card #2".into()])
    );
    let text = stdout(&succeeded(&options));
    for wanted in ["estimated from the cards' figures, simulated", "card #1", "KV room for", "left out: "] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn a_bench_prints_what_was_predicted_beside() {
    let m = model("tiny/llama-tied");
    let common = ["bench", "-m", &m, "--reps", "1", "--prompt-tokens", "8", "--gen-tokens", "4", "--no-roofline"];
    let found = object(&common);
    for key in ["decode_tokens_per_s", "decode_error_percent", "first_token_seconds", "first_token_error_percent"] {
        assert!(found["depths"][0]["predicted"][key].is_f64(), "{key}: {}", found["depths"][0]);
    }
    let found = object(&[&common[..], &["--concurrency", "2"]].concat());
    let level = &found["concurrency"][0];
    for key in ["planned_tokens_per_s", "planned_error_percent", "planned_first_token_seconds"] {
        assert!(level[key].is_f64(), "{key}: {level}");
    }
    let without = object(&[&common[..], &["--no-measure"]].concat());
    assert_eq!(without["depths"][0]["predicted"], Value::Null);
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
