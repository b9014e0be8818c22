//! Bad input ends with a clear error, an exit code that says what kind it is, and nothing on stdout.

use std::process::Output;

use super::{PROMPT, copied, model, no_vulkan, patch, program, run, run_with_stdin, stderr};
use crate::support::data;

pub(super) const USAGE: i32 = 2;
const DEVICE: i32 = 3;
const MODEL: i32 = 4;

#[track_caller]
fn check(output: &Output, exit: i32, wanted: &[&str]) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(exit), "{message}");
    assert!(output.stdout.is_empty(), "stdout: {}", String::from_utf8_lossy(&output.stdout));
    assert!(!message.contains("panicked"), "{message}");
    let error =
        message.find("pp-run: error: ").map(|at| &message[at..]).unwrap_or_else(|| panic!("no error: {message}"));
    assert!(error.lines().count() <= 4, "short: {error}");
    for wanted in wanted {
        assert!(error.contains(wanted), "{wanted:?} in {error}");
    }
}

/// With --json as well: errors are never on stdout.
#[track_caller]
pub(super) fn refused(arguments: &[&str], exit: i32, wanted: &[&str]) {
    check(&run(arguments), exit, wanted);
    check(&run(&[arguments, &["--json"]].concat()), exit, wanted);
}

#[test]
fn splits_that_do_not_fit() {
    let m = model("tiny/llama-33");
    let refused = |options: &[&str], wanted: &[&str]| {
        refused(&[&["-m", &m, "--prompt", PROMPT], options].concat(), USAGE, wanted);
    };
    refused(&["--stages", "4", "--split", "8,8,8,8"], &["8+8+8+8 = 32 ≠ 33", "9,8,8,8"]);
    refused(&["--split", "33,0"], &["33,0", "at least one layer"]);
    refused(&["--split", "34,-1"], &["34,-1", "at least one layer"]);
    refused(&["--split", "many"], &["many", "9:8:8:8"]);
    refused(&["--stages", "34"], &["33 layers", "at most 33 stages"]);
    refused(&["--stages", "0"], &["--stages", "at least one stage"]);
    refused(&["--stages", "-2"], &["--stages", "at least one stage"]);
    refused(&["--stages", "3", "--split", "17,16"], &["disagree", "names 2 stages"]);
}

#[test]
fn prompts_that_are_none() {
    let m = model("tiny/llama-tied");
    refused(&["-m", &m, "--prompt", ""], USAGE, &["empty"]);
    check(&run_with_stdin(&["-m", &m], b""), USAGE, &["empty"]);
    check(&run_with_stdin(&["-m", &m], b"good \xf0\x9f bad"), USAGE, &["stdin", "UTF-8", "byte 5"]);
    refused(&["-m", &m, "--prompt", "a", "--prompt-file", "b"], USAGE, &["more than one prompt"]);
    refused(&["-m", &m, "--prompt-file", "/nonexistent/prompt"], USAGE, &["/nonexistent/prompt"]);
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("latin1.txt");
    std::fs::write(&file, b"caf\xe9").expect("writable");
    refused(&["-m", &m, "-f", file.to_str().expect("UTF-8")], USAGE, &["latin1.txt", "byte 3", "0xe9"]);
}

#[test]
fn a_prompt_longer_than_the_context() {
    let m = model("tiny/llama-tied");
    let long = "run of a stage ".repeat(40);
    refused(&["-m", &m, "--ctx", "64", "--prompt", &long], USAGE, &["tokens", "the context holds 64", "--ctx"]);
    refused(&["-m", &m, "--ctx", "100000", "--prompt", "a"], USAGE, &["--ctx 100000", "at most 256"]);
}

#[test]
fn options_out_of_range_or_in_conflict() {
    let m = model("tiny/llama-tied");
    let refused = |options: &[&str], wanted: &[&str]| {
        refused(&[&["-m", &m, "--prompt", "a"], options].concat(), USAGE, wanted);
    };
    refused(&["-t", "-0.5"], &["--temperature -0.5"]);
    refused(&["--top-p", "2"], &["--top-p 2"]);
    refused(&["--activations", "f32", "--kv", "f16"], &["exact mode"]);
    refused(&["--activations", "f8"], &["--activations", "auto"]);
    refused(&["--wire", "int8"], &["--wire", "f32, f16, q8"]);
    refused(&["--raw", "--system", "x"], &["--raw", "--system"]);
    refused(&["--template-arg", "x"], &["KEY=VALUE"]);
    refused(&["--no-such-option"], &["--no-such-option"]);
    check(&run(&["-m", &m, "What", "is", "it"]), USAGE, &["`is`", "put it in quotes"]);
    check(&run(&["-m", &m, "plan"]), USAGE, &["`plan` is a verb", "--prompt plan"]);
}

#[test]
fn plans_of_what_makes_no_sense() {
    let m = model("tiny/llama-tied");
    let refused =
        |options: &[&str], code, wanted: &[&str]| refused(&[&["plan", "-m", &m], options].concat(), code, wanted);
    refused(&["--concurrency", "0"], USAGE, &["--concurrency 0"]);
    refused(&["--prompt-tokens", "0"], USAGE, &["--prompt-tokens 0"]);
    refused(&["--optimize", "speed"], USAGE, &["--optimize", "throughput, latency, context"]);
    refused(&["--hardware", "no-such.toml"], USAGE, &["--hardware no-such.toml"]);
    refused(&["--hardware", "x.toml", "--device", "0"], USAGE, &["--hardware", "--device"]);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let path = file.path().to_str().expect("UTF-8");
    let write = |text: &str| std::fs::write(file.path(), text).expect("writable");
    write("[[card]]\nname = 'a'\nmemory_gb = -1\nbandwidth_gb_s = 1\nf32_tflops = 1\n");
    refused(&["--hardware", path], USAGE, &["line 3", "memory_gb = -1"]);
    write("[[card]]\nname = 'a'\nmemory = 1\n");
    refused(&["--hardware", path], USAGE, &["line 3", "memory"]);
    write("[[card]]\nname = 'a'\nmemory_gb = 0.1\nbandwidth_gb_s = 1\nf32_tflops = 1\n");
    refused(&["--hardware", path, "--split", "1,1"], USAGE, &["2 stages", "1 card"]);
    refused(
        &["--hardware", path, "--kv-tokens", "100000000"],
        DEVICE,
        &["no split fits", "100,000,000 tokens", "95.0 MB", "--ctx"],
    );
}

#[test]
fn devices_that_are_not_there() {
    let m = model("tiny/llama-tied");
    refused(&["-m", &m, "--device", "no such card", "--prompt", "a"], USAGE, &["--device no such card", "there are:"]);
    refused(&["-m", &m, "--device", "99", "--prompt", "a"], USAGE, &["--device 99"]);
    refused(&["-m", &m, "--device", "0,0", "--prompt", "a"], USAGE, &["2 devices for 1 stage"]);
    for arguments in [&["-m", &m, "--prompt", "a"][..], &["devices"], &["plan", "-m", &m]] {
        check(
            &no_vulkan(&mut program(arguments)).output().expect("starts"),
            DEVICE,
            &["no Vulkan adapter", "mesa-vulkan-drivers"],
        );
    }
}

#[test]
fn models_that_are_not_there() {
    refused(&["-m", "no-such-model", "--prompt", "a"], MODEL, &["`no-such-model`", "models folder", "scripts/demo.sh"]);
    refused(&["--prompt", "a"], USAGE, &["-m", "scripts/demo.sh"]);
    refused(&["inspect", "/nonexistent/model.gguf"], MODEL, &["/nonexistent/model.gguf"]);
    let dir = tempfile::tempdir().expect("a folder");
    let empty = dir.path().to_str().expect("UTF-8");
    refused(&["-m", empty, "--prompt", "a"], MODEL, &["is no model", "config.json"]);
}

#[test]
fn truncated_files() {
    let dir = tempfile::tempdir().expect("a folder");
    let bytes = std::fs::read(data("tiny-gguf/llama-q4_0.gguf")).expect("it is there");
    let file = dir.path().join("cut.gguf");
    for (length, wanted) in [(bytes.len() - 100, "tensor `"), (bytes.len() / 20, "truncated"), (6, "truncated")] {
        std::fs::write(&file, &bytes[..length]).expect("writable");
        refused(&["-m", file.to_str().expect("UTF-8"), "--prompt", "a"], MODEL, &["cut.gguf", wanted]);
    }
    let (_dir, path) = copied("tiny/llama-tied");
    let file = path.join("model.safetensors");
    let bytes = std::fs::read(&file).expect("it is there");
    for length in [bytes.len() - 100, 100, 4] {
        std::fs::write(&file, &bytes[..length]).expect("writable");
        refused(&["-m", path.to_str().expect("UTF-8"), "--prompt", "a"], MODEL, &["model.safetensors"]);
    }
    // A header that claims to be larger than any memory.
    std::fs::write(&file, [&u64::MAX.to_le_bytes()[..], &bytes[8..]].concat()).expect("writable");
    refused(&["-m", path.to_str().expect("UTF-8"), "--prompt", "a"], MODEL, &["model.safetensors"]);
}

#[test]
fn tensors_that_are_missing_or_wrong() {
    let (_dir, path) = copied("tiny/llama-tied");
    let m = path.to_str().expect("UTF-8");
    let (weights, config) = (path.join("model.safetensors"), path.join("config.json"));
    let original = std::fs::read_to_string(&config).expect("readable");
    std::fs::write(&config, original.replace("\"intermediate_size\": 128", "\"intermediate_size\": 160"))
        .expect("writable");
    refused(&["-m", m, "--prompt", "a"], MODEL, &["ffn_", "[128, 96]", "[160, 96]"]);
    std::fs::write(&config, &original).expect("writable");
    patch(&weights, b"model.norm.weight", b"model.nurm.weight");
    refused(&["-m", m, "--prompt", "a"], MODEL, &["output_norm.weight"]);
    refused(&["plan", "-m", m], MODEL, &["output_norm.weight"]);
}

#[test]
fn a_tensor_type_that_is_not_known() {
    let (_dir, path) = copied("tiny/llama-tied");
    let weights = path.join("model.safetensors");
    let bytes = std::fs::read(&weights).expect("readable");
    let header = String::from_utf8_lossy(&bytes[..4096]).into_owned();
    let dtype = ["\"F32\"", "\"BF16\"", "\"F16\""].into_iter().find(|d| header.contains(d)).expect("a known type");
    let other = if dtype.len() == 6 {
        "\"I16\" "
    } else if dtype == "\"F32\"" {
        "\"I32\""
    } else {
        "\"I16\""
    };
    patch(&weights, dtype.as_bytes(), other.as_bytes());
    refused(
        &["-m", path.to_str().expect("UTF-8"), "--prompt", "a"],
        MODEL,
        &["supported: F32, F16, BF16", other.trim().trim_matches('"')],
    );
}

#[test]
fn a_configuration_that_is_not_json() {
    let (_dir, path) = copied("tiny/llama-tied");
    std::fs::write(path.join("config.json"), "{ \"hidden_size\": ").expect("writable");
    let m = path.to_str().expect("UTF-8");
    refused(&["-m", m, "--prompt", "a"], MODEL, &["config.json", "not valid JSON", "line 1"]);
    let message = stderr(&run(&["-m", m, "--prompt", "a"]));
    assert_eq!(message.matches("EOF while parsing").count(), 1, "told once: {message}");
}

#[test]
fn an_architecture_that_is_not_known() {
    let (_dir, path) = copied("tiny/llama-tied");
    let config = path.join("config.json");
    let text = std::fs::read_to_string(&config).expect("readable").replace("\"llama\"", "\"mamba\"");
    std::fs::write(&config, text).expect("writable");
    refused(&["-m", path.to_str().expect("UTF-8"), "--prompt", "a"], MODEL, &["`mamba`", "llama, qwen2, qwen3"]);
}

#[test]
fn tokenizers_and_templates_that_cannot_be_used() {
    let (_dir, path) = copied("tiny/llama-untied");
    let m = path.to_str().expect("UTF-8");
    let template = path.join("chat_template.jinja");
    std::fs::write(&template, "fine\n{% if %}\n").expect("writable");
    refused(&["-m", m, "--prompt", "a"], MODEL, &["line 2", "--chat-template"]);
    refused(
        &["-m", &model("tiny/llama-tied"), "--chat-template", template.to_str().expect("UTF-8"), "--prompt", "a"],
        MODEL,
        &["chat_template.jinja", "line 2"],
    );
    std::fs::write(&template, "{{ raise_exception('no users here') }}").expect("writable");
    refused(&["-m", m, "--prompt", "a"], USAGE, &["no users here"]);
    std::fs::remove_file(&template).expect("it was there");
    refused(&["-m", m, "--prompt", "a"], MODEL, &["no chat template", "--raw"]);
    std::fs::remove_file(path.join("tokenizer.json")).expect("it was there");
    refused(&["-m", m, "--prompt", "a"], MODEL, &["tokenizer.json"]);
}

#[test]
fn texts_that_cannot_be_scored() {
    let m = model("tiny/llama-tied");
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("text.txt");
    let path = file.to_str().expect("UTF-8").to_owned();
    let arguments = ["perplexity", "-m", &m, "--text-file", &path];
    refused(&arguments, USAGE, &["text.txt"]);
    std::fs::write(&file, "").expect("writable");
    refused(&arguments, USAGE, &["empty"]);
    std::fs::write(&file, "run of a stage ".repeat(200)).expect("writable");
    refused(&arguments, USAGE, &["the context holds 256", "--tokens 256"]);
    refused(&[&arguments[..], &["--tokens", "1"]].concat(), USAGE, &["at least 2"]);
}
