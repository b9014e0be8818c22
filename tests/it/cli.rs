//! The program as a user runs it, on the small models of tests/data.

mod bad_input;
mod formed;
mod live;
mod load;
mod many;
mod pull;
mod sim;
mod trace;
mod verbs;

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::support::{data, ids};

/// The program with a clean environment; no models folder, and nothing on stdin.
pub(crate) fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pp-run"));
    command.args(arguments).stdin(Stdio::null());
    for name in ["PP_MODEL", "PP_LOG", "PP_CHECKED"] {
        command.env_remove(name);
    }
    command.env("PP_MODELS", data("no-such-folder"));
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    command
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    program(arguments).output().expect("the program starts")
}

fn run_with_stdin(arguments: &[&str], stdin: &[u8]) -> Output {
    let mut command = program(arguments);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    // It may end without reading.
    let _ = child.stdin.take().expect("piped").write_all(stdin);
    child.wait_with_output().expect("it ends")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn succeeded(arguments: &[&str]) -> Output {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {}\n{}", output.status, stderr(&output));
    output
}

/// The JSON of a run that succeeds: one line, nothing else on stdout.
#[track_caller]
pub(crate) fn object(arguments: &[&str]) -> Value {
    let text = stdout(&succeeded(&[arguments, &["--json"]].concat()));
    assert_eq!(text.matches('\n').count(), 1, "one line: {text}");
    assert!(text.ends_with('\n'));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// A model of tests/data, as an argument.
pub(crate) fn model(name: &str) -> String {
    data(name).to_str().expect("a path in UTF-8").to_owned()
}

/// A copy of a model folder that may be changed.
pub(crate) fn copied(name: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    for entry in std::fs::read_dir(data(name)).expect("the model is there") {
        let entry = entry.expect("readable");
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("room for a copy");
    }
    let path = dir.path().to_owned();
    (dir, path)
}

/// Replaces bytes of a file by as many others.
#[track_caller]
fn patch(file: &Path, from: &[u8], to: &[u8]) {
    assert_eq!(from.len(), to.len(), "nothing moves");
    let mut bytes = std::fs::read(file).expect("readable");
    let at = bytes.windows(from.len()).position(|window| window == from).expect("it is in there");
    bytes[at..at + to.len()].copy_from_slice(to);
    std::fs::write(file, bytes).expect("writable");
}

pub(crate) const PROMPT: &str = "Of run is a stage";

#[test]
fn json_of_an_answer_holds_all_that_is_known() {
    let found = object(&["-m", &model("tiny/llama-tied"), "--stages", "2", "-n", "6", "--logprobs", "3", PROMPT]);
    let keys: Vec<&str> = found.as_object().expect("an object").keys().map(String::as_str).collect();
    for key in [
        "model",
        "prompt_ids",
        "tokens",
        "text",
        "finish_reason",
        "timings",
        "context",
        "activations",
        "kv",
        "stages",
        "logprobs",
    ] {
        assert!(keys.contains(&key), "{key} in {keys:?}");
    }
    assert_eq!(ids(&found["tokens"]).len(), 6);
    assert_eq!(found["finish_reason"], "length");
    assert_eq!((&found["activations"], &found["kv"], &found["context"]), (&"f32".into(), &"f16".into(), &256.into()));
    for key in ["load_seconds", "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_seconds", "total_seconds"] {
        assert!(found["timings"][key].as_f64().is_some_and(|value| value > 0.0), "{key}: {}", found["timings"]);
    }
    let stages = found["stages"].as_array().expect("an array");
    assert_eq!(stages.len(), 2);
    assert_eq!(stages[1]["layers"], serde_json::json!([1, 2]));
    for key in ["index", "layer_count", "file_bytes", "weight_bytes", "kv_bytes", "work_bytes", "device_bytes", "steps"]
    {
        assert!(stages[1][key].as_u64().is_some_and(|value| value > 0), "{key}: {}", stages[1]);
    }
    assert_eq!(stages[0]["tokens"], stages[1]["tokens"]);
    assert!(stages[0]["device"].is_string() && stages[0]["device_id"].is_string() && stages[0]["widened"].is_array());
    let logprobs = found["logprobs"].as_array().expect("an array");
    for (row, id) in logprobs.iter().zip(ids(&found["tokens"])) {
        assert_eq!(row["id"], id);
        assert_eq!(row["top"][0][0], id, "a greedy token is the best");
        assert_eq!(row["top"][0][1], row["logprob"]);
        assert_eq!(row["top"].as_array().map(Vec::len), Some(3));
    }
}

#[test]
fn text_goes_to_stdout_and_the_table_to_stderr() {
    let m = model("tiny/llama-tied");
    let arguments = ["-m", &m, "-n", "12", "--stages", "2", PROMPT];
    let output = succeeded(&arguments);
    let table = stderr(&output);
    for wanted in ["stage", "layers", "weights", "busy", "0-0", "1-1", "decode", "prefill", "fills 1/2 of the pipe"] {
        assert!(table.contains(wanted), "{wanted} in {table}");
    }
    assert_eq!(stdout(&output), object(&arguments)["text"].as_str().expect("a text"));
    let quiet = succeeded(&[&arguments[..], &["--quiet"]].concat());
    assert_eq!((stdout(&quiet), stderr(&quiet)), (stdout(&output), String::new()));
}

#[test]
fn tokens_are_the_same_for_every_split() {
    let m = model("tiny/llama-33");
    let tokens = |options: &[&str]| {
        let found = object(&[&["-m", &m, "-n", "10", "--activations", "f32", PROMPT], options].concat());
        (ids(&found["tokens"]), found["stages"].as_array().map(Vec::len))
    };
    let (one, count) = tokens(&["--stages", "1"]);
    assert_eq!(count, Some(1));
    for (options, stages) in [
        (&["--stages", "2"][..], 2),
        (&["--stages", "4", "--split", "9,8,8,8"], 4),
        (&["--split", "30,1,1,1"], 4),
        (&["--split", "1:2"], 2),
        (&["--split", "auto", "--stages", "3", "--chunk", "3"], 3),
    ] {
        assert_eq!(tokens(options), (one.clone(), Some(stages)), "{options:?}");
    }
}

#[test]
fn the_reference_device_needs_no_adapter() {
    let m = model("tiny/llama-tied");
    let arguments = ["-m", &m, "-n", "4", "--activations", "f32", "--json", PROMPT];
    let gpu: Value = serde_json::from_str(&stdout(&succeeded(&arguments))).expect("JSON");
    let mut twins = program(&[&arguments[..], &["--device", "reference"]].concat());
    let output = no_vulkan(&mut twins).output().expect("it starts");
    let twins: Value = serde_json::from_str(&stdout(&output)).unwrap_or_else(|e| panic!("{e}: {}", stderr(&output)));
    assert_eq!(twins["tokens"], gpu["tokens"]);
    assert_eq!(twins["stages"][0]["device_id"], "reference");
}

/// Hides every driver.
fn no_vulkan(command: &mut Command) -> &mut Command {
    command.env("VK_ICD_FILENAMES", "/nonexistent").env("VK_DRIVER_FILES", "/nonexistent")
}

#[test]
fn a_prompt_may_come_from_anywhere_and_is_verbatim() {
    let m = model("tiny/llama-tied");
    let base = ["-m", &m, "-n", "1", "--raw", "--json"];
    let prompt_ids = |output: Output| -> Value {
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["prompt_ids"].clone()
    };
    let text = "  run of\n\n";
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, text).expect("writable");
    let typed = prompt_ids(run(&[&base[..], &["--", text]].concat()));
    let option = prompt_ids(run(&[&base[..], &["--prompt", text]].concat()));
    let read = prompt_ids(run(&[&base[..], &["--prompt-file", file.to_str().expect("UTF-8")]].concat()));
    let piped = prompt_ids(run_with_stdin(&base, text.as_bytes()));
    let ignored = prompt_ids(run_with_stdin(&[&base[..], &["--", text]].concat(), b"\xff not read"));
    assert!([&option, &read, &piped, &ignored].into_iter().all(|ids| *ids == typed), "{typed} {option} {read} {piped}");
    let trimmed = prompt_ids(run(&[&base[..], &["--prompt", text.trim()]].concat()));
    assert_ne!(trimmed, typed);
    let verb = prompt_ids(run(&[&base[..], &["--", "devices"]].concat()));
    assert!(verb.as_array().is_some_and(|ids| !ids.is_empty()));
}

#[test]
fn the_chat_template_is_used_unless_raw() {
    let m = model("tiny/llama-untied");
    let prompt_ids =
        |options: &[&str]| object(&[&["-m", &m, "-n", "1", "hello"], options].concat())["prompt_ids"].clone();
    let (chat, raw, system) = (prompt_ids(&[]), prompt_ids(&["--raw"]), prompt_ids(&["--system", "Be brief."]));
    assert!(chat.as_array().map(Vec::len) > raw.as_array().map(Vec::len));
    assert_ne!(system, chat);
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("template.jinja");
    std::fs::write(&file, "{{ messages[0].content }}{% if shout %}!{% endif %}").expect("writable");
    let template = file.to_str().expect("UTF-8");
    assert_ne!(prompt_ids(&["--chat-template", template, "--template-arg", "shout=true"]), chat);
    assert_eq!(
        prompt_ids(&["--chat-template", template, "--template-arg", "shout=false"]),
        prompt_ids(&["--chat-template", template])
    );
}

#[test]
fn a_seed_repeats_an_answer() {
    let m = model("tiny/llama-tied");
    let tokens = |seed: &str| {
        object(&["-m", &m, "-n", "8", "-t", "1.5", "--top-p", "0.95", "--seed", seed, PROMPT])["tokens"].clone()
    };
    assert_eq!(tokens("1"), tokens("1"));
    assert_ne!(tokens("1"), tokens("2"));
}

#[test]
fn a_stop_text_ends_an_answer() {
    let m = model("tiny/llama-tied");
    let whole = object(&["-m", &m, "-n", "16", PROMPT])["text"].as_str().expect("a text").to_owned();
    let stop: String = whole.chars().skip(2).take(2).collect();
    let found = object(&["-m", &m, "-n", "16", "--stop", &stop, PROMPT]);
    assert_eq!(found["finish_reason"], "stop");
    assert_eq!(found["text"].as_str(), whole.split(&stop).next());
}

#[test]
fn a_name_is_looked_up_in_the_models_folder() {
    let run = |arguments: &[&str], variable: (&str, &str)| {
        let mut command = program(&[&["-n", "1", "--quiet", PROMPT], arguments].concat());
        let output = command.env("PP_MODELS", data("tiny-gguf")).env(variable.0, variable.1).output().expect("starts");
        assert!(output.status.success(), "{}", stderr(&output));
    };
    run(&["-m", "llama-q8_0"], ("PP_MODEL", "no-such-model"));
    run(&[], ("PP_MODEL", "llama-q4_0.gguf"));
}

#[test]
fn widened_formats_are_told() {
    let output = succeeded(&["-m", &model("tiny-gguf/llama-q5_1.gguf"), "-n", "1", PROMPT]);
    assert!(stderr(&output).contains("Q5_1 kept as Q8_M (8-bit) for "), "{}", stderr(&output));
    let found = object(&["-m", &model("tiny-gguf/llama-q5_1.gguf"), "-n", "1", PROMPT]);
    assert_eq!(found["stages"][0]["widened"][0]["from"], "Q5_1");
    assert_eq!(found["activations"], "q8");
}

#[test]
fn ctrl_c_keeps_the_answer_so_far_and_exits_130() {
    let m = model("tiny/llama-33");
    // The twins are slow enough for a signal to come in time.
    let mut child = program(&["-m", &m, "--device", "reference", "-n", "250", "--raw", PROMPT])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut first = [0];
    let mut stdout = child.stdout.take().expect("piped");
    stdout.read_exact(&mut first).expect("the answer begins");
    let signal = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill is there");
    assert!(signal.success());
    std::io::copy(&mut stdout, &mut std::io::sink()).expect("the rest can be read");
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("(cancelled)"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let m = model("tiny/llama-tied");
    let mut child = program(&["-m", &m, "-n", "200", "--raw", PROMPT])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(141), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked") && !stderr(&output).contains("error"), "{}", stderr(&output));
}
