//! Many requests at once: `batch`, and `bench` with several.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{PROMPT, model, object, program, run, stderr, stdout, succeeded};
use crate::support::ids;

/// A folder with a file of requests.
struct Files {
    dir: tempfile::TempDir,
}

impl Files {
    fn new(requests: &str) -> Files {
        let files = Files { dir: tempfile::tempdir().expect("a folder") };
        std::fs::write(files.path("requests.jsonl"), requests).expect("writable");
        files
    }

    fn of(requests: &[Value]) -> Files {
        Files::new(&requests.iter().map(|request| format!("{request}\n")).collect::<String>())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn name(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    fn arguments<'a>(&'a self, options: &[&'a str]) -> Vec<String> {
        let start = ["batch".to_owned(), self.name("requests.jsonl"), "-o".to_owned(), self.name("answers.jsonl")];
        start.into_iter().chain(options.iter().map(|option| (*option).to_owned())).collect()
    }

    /// The report of a batch that succeeds.
    #[track_caller]
    fn batch(&self, options: &[&str]) -> Value {
        let arguments = self.arguments(options);
        object(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path("answers.jsonl")).expect("there are answers")
    }

    /// The answers in the order of their lines; every byte belongs to a whole one.
    #[track_caller]
    fn answers(&self) -> Vec<Value> {
        let text = String::from_utf8(self.bytes()).expect("UTF-8");
        assert!(text.is_empty() || text.ends_with('\n'), "whole lines");
        let line = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let mut answers: Vec<Value> = text.lines().map(line).collect();
        answers.sort_by_key(|answer| answer["line"].as_u64());
        answers
    }
}

fn numbers(answers: &[Value]) -> Vec<u64> {
    answers.iter().map(|answer| answer["line"].as_u64().expect("a number")).collect()
}

const PROMPTS: [&str; 6] = [PROMPT, "run", "stage of a stage", "a a a", "Of run", "is a run of"];

fn requests(max_tokens: usize) -> Vec<Value> {
    let request =
        |(i, prompt): (usize, &&str)| json!({"id": i, "prompt": prompt, "raw": true, "max_tokens": max_tokens});
    PROMPTS.iter().enumerate().map(request).collect()
}

#[test]
fn answers_of_a_batch_are_those_of_single_runs() {
    let m = model("tiny/llama-33");
    let files = Files::of(&requests(8));
    let report = files.batch(&["-m", &m, "--stages", "2", "--activations", "f32"]);
    assert_eq!((&report["lines"], &report["answers"], &report["errors"]), (&6.into(), &6.into(), &0.into()));
    assert_eq!((&report["left"], &report["tokens"]), (&0.into(), &48.into()));
    let answers = files.answers();
    assert_eq!(numbers(&answers), [1, 2, 3, 4, 5, 6]);
    for (i, (answer, prompt)) in answers.iter().zip(PROMPTS).enumerate() {
        let single = object(&["-m", &m, "--activations", "f32", "--raw", "-n", "8", "--prompt", prompt]);
        assert_eq!(answer["id"], i);
        for key in ["tokens", "text", "finish_reason"] {
            assert_eq!(answer[key], single[key], "{key} of {prompt}");
        }
        let usage = &answer["usage"];
        assert_eq!(usage["prompt_tokens"], ids(&single["prompt_ids"]).len());
        assert_eq!(
            (&usage["completion_tokens"], answer.get("choices"), answer.get("logprobs")),
            (&8.into(), None, None)
        );
        assert!(answer["timings"]["total_seconds"].as_f64() > Some(0.0));
    }
}

#[test]
fn a_bad_line_is_an_error_and_the_others_run() {
    let m = model("tiny/llama-tied");
    let long = "run of a stage ".repeat(200);
    let lines = [
        json!({"prompt": "run", "raw": true, "max_tokens": 2}).to_string(),
        "{\"prompt\": ".to_owned(),
        String::new(),
        json!({"prompt": "run", "temprature": 1}).to_string(),
        json!({"id": "x", "prompt": "run", "temperature": -1}).to_string(),
        json!({"prompt": long, "raw": true}).to_string(),
        json!({"prompt": "run", "raw": true, "max_tokens": u64::MAX}).to_string(),
        json!({"id": 8}).to_string(),
    ];
    let files = Files::new(&lines.join("\n"));
    let report = files.batch(&["-m", &m, "--ctx", "64"]);
    assert_eq!((&report["answers"], &report["errors"], &report["left"]), (&2.into(), &5.into(), &0.into()));
    let answers = files.answers();
    assert_eq!(numbers(&answers), [1, 2, 4, 5, 6, 7, 8]);
    let check = |index: usize, wanted: &str| {
        let message = answers[index]["error"]["message"].as_str().unwrap_or_else(|| panic!("{}", answers[index]));
        assert!(message.contains(wanted), "{wanted:?} in {message}");
        assert_eq!(answers[index]["error"]["type"], "invalid_request_error");
    };
    check(1, "EOF");
    check(2, "temprature");
    check(3, "temperature: expected 0 to 100");
    check(4, "the context holds 64");
    check(6, "prompt or messages are missing");
    assert_eq!(answers[3]["id"], "x");
    assert_eq!((ids(&answers[0]["tokens"]).len(), &answers[5]["finish_reason"]), (2, &"length".into()));
}

#[test]
fn one_request_may_have_several_answers() {
    let m = model("tiny/llama-tied");
    let request = json!({"prompt": PROMPT, "raw": true, "n": 3, "max_tokens": 6, "temperature": 1.5, "seed": 7});
    let files = Files::of(&[request]);
    files.batch(&["-m", &m]);
    let answer = &files.answers()[0];
    let choices = answer["choices"].as_array().unwrap_or_else(|| panic!("{answer}"));
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], ids(&choice["tokens"]).len()), (&index.into(), 6));
    }
    assert!(choices.iter().any(|choice| choice["tokens"] != choices[0]["tokens"]), "{answer}");
    assert_eq!((&answer["tokens"], &answer["usage"]["completion_tokens"]), (&choices[0]["tokens"], &18.into()));
    let limited = Files::of(&[json!({"prompt": PROMPT, "n": 3})]);
    limited.batch(&["-m", &m, "--max-sequences", "2"]);
    let message = limited.answers()[0]["error"]["message"].to_string();
    assert!(message.contains("3 answers") && message.contains("--max-sequences"), "{message}");
}

#[test]
fn biases_logprobs_and_stops_of_a_request_count() {
    let m = model("tiny/llama-tied");
    let plain = object(&["-m", &m, "--raw", "-n", "6", "--logprobs", "2", "--prompt", PROMPT]);
    let text = plain["text"].as_str().expect("a text");
    let stop: String = text.chars().skip(2).take(2).collect();
    let first = ids(&plain["tokens"])[0];
    let base = json!({"prompt": PROMPT, "raw": true, "max_tokens": 6});
    let with = |key: &str, value: Value| {
        let mut request = base.clone();
        request[key] = value;
        request
    };
    let files = Files::of(&[
        with("logit_bias", json!({first.to_string(): -100})),
        with("logprobs", 2.into()),
        with("stop", stop.clone().into()),
        base.clone(),
    ]);
    files.batch(&["-m", &m, "--stop", &stop]);
    let answers = files.answers();
    assert!(!ids(&answers[0]["tokens"]).contains(&first), "{first} is banned: {}", answers[0]);
    let rows = |value: &Value| value["logprobs"].as_array().expect("an array").clone();
    for (found, expected) in rows(&answers[1]).iter().zip(rows(&plain)) {
        assert_eq!((&found["id"], &found["top"]), (&expected["id"], &expected["top"]));
    }
    for answer in &answers[2..] {
        assert_eq!(
            (answer["finish_reason"].as_str(), answer["text"].as_str()),
            (Some("stop"), text.split(&stop).next())
        );
    }
}

#[test]
fn a_batch_goes_on_behind_half_a_line() {
    let m = model("tiny/llama-tied");
    let files = Files::of(&requests(6));
    let options = ["-m", m.as_str(), "--activations", "f32"];
    files.batch(&options);
    let (whole, expected) = (files.bytes(), files.answers());
    let ends: Vec<usize> = (0..whole.len()).filter(|at| whole[*at] == b'\n').map(|at| at + 1).collect();
    for (cut, kept) in [(ends[2] + 20, 3_usize), (ends[2] + 1, 3), (ends[2], 3), (ends[5] - 1, 5), (3, 0)] {
        std::fs::write(files.path("answers.jsonl"), &whole[..cut]).expect("writable");
        let report = files.batch(&options);
        assert_eq!((&report["answers"], &report["left"], &report["lines"]), (&(6 - kept).into(), &0.into(), &6.into()));
        let bytes = files.bytes();
        let keep = kept.checked_sub(1).map_or(0, |last| ends[last]);
        assert_eq!(bytes[..keep], whole[..keep], "what was written stays");
        let found = files.answers();
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((&found["line"], &found["tokens"]), (&expected["line"], &expected["tokens"]));
        }
        assert_eq!(numbers(&found), [1, 2, 3, 4, 5, 6]);
    }
    let before = files.bytes();
    assert_eq!(files.batch(&options)["answers"], 0);
    assert_eq!(files.bytes(), before, "nothing is left to do");
}

#[test]
fn ctrl_c_leaves_whole_lines_and_the_rest_for_later() {
    let m = model("tiny/llama-33");
    let prompts = PROMPTS.iter().cycle().take(24).enumerate();
    let lines: Vec<Value> =
        prompts.map(|(i, p)| json!({"id": i, "prompt": p, "raw": true, "max_tokens": 4 + 2 * (i % 4)})).collect();
    let files = Files::of(&lines);
    // The twins are slow enough for a signal to come in time.
    let options = ["-m", m.as_str(), "--max-sequences", "2", "--activations", "f32", "--device", "reference", "-q"];
    let arguments = files.arguments(&options);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut command = program(&arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let started = Instant::now();
    while std::fs::read(files.path("answers.jsonl")).map_or(0, |bytes| bytes.len()) == 0 {
        assert!(started.elapsed() < Duration::from_secs(120), "an answer comes");
        std::thread::sleep(Duration::from_millis(5));
    }
    let signal = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill is there");
    assert!(signal.success());
    let output = child.wait_with_output().expect("it ends");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stdout(&output).contains("left: run the same command again"), "{}", stdout(&output));
    let (before, done) = (files.bytes(), files.answers());
    assert!(!done.is_empty() && done.len() < 24, "{} answers", done.len());
    assert!(done.iter().all(|answer| answer["finish_reason"] != "cancelled"));
    let report = files.batch(&options);
    assert_eq!(report["answers"], 24 - done.len());
    assert_eq!(numbers(&files.answers()), (1..=24).collect::<Vec<u64>>());
    assert!(files.bytes().starts_with(&before), "what was written stays");
}

#[track_caller]
fn refused(arguments: &[&str], wanted: &[&str]) {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
    assert!(output.stdout.is_empty() && !stderr(&output).contains("panicked"), "{}", stderr(&output));
    for wanted in wanted {
        assert!(stderr(&output).contains(wanted), "{wanted:?} in {}", stderr(&output));
    }
}

#[test]
fn a_file_that_holds_no_answers_is_left_alone() {
    let m = model("tiny/llama-tied");
    let files = Files::of(&requests(2)[..2]);
    let (requests, answers) = (files.name("requests.jsonl"), files.name("answers.jsonl"));
    for text in ["Dear diary", "Dear diary\n", "{\"id\": 1", "{\"id\": 1}\n", "{\"line\":1,\"id\":0}\nDear"] {
        std::fs::write(&answers, text).expect("writable");
        refused(&["batch", &requests, "-o", &answers, "-m", &m], &["answers.jsonl is not a file of answers", "-o"]);
        assert_eq!(files.bytes(), text.as_bytes());
    }
    refused(&["batch", &requests, "-o", &requests, "-m", &m], &["is not a file of answers"]);
}

#[test]
fn files_of_a_batch_that_cannot_be_used() {
    let m = model("tiny/llama-tied");
    let files = Files::of(&requests(2));
    let (requests, answers, missing) = (files.name("requests.jsonl"), files.name("a.jsonl"), files.name("no/a.jsonl"));
    let folder = files.dir.path().to_str().expect("UTF-8");
    refused(&["batch", &missing, "-o", &answers, "-m", &m], &["cannot read", "no/a.jsonl"]);
    refused(&["batch", folder, "-o", &answers, "-m", &m], &["cannot read", folder]);
    refused(&["batch", &requests, "-o", &missing, "-m", &m], &["cannot write", "no/a.jsonl"]);
    refused(&["batch", &requests, "-o", folder, "-m", &m], &["cannot read", folder]);
    refused(&["batch", &requests, "-m", &m], &["--out"]);
    assert!(!files.path("a.jsonl").exists());
}

#[test]
fn sizes_of_the_pipe_out_of_range() {
    let m = model("tiny/llama-tied");
    let files = Files::of(&requests(2)[..2]);
    let (requests, answers) = (files.name("requests.jsonl"), files.name("answers.jsonl"));
    for (option, value) in [
        ("--max-sequences", "0"),
        ("--max-sequences", "1025"),
        ("--kv-tokens", "0"),
        ("--kv-tokens", "18446744073709551615"),
        ("--groups", "0"),
        ("--max-batch-tokens", "0"),
        ("--ctx", "0"),
    ] {
        let wanted = format!("{option} {value}: ");
        refused(&["batch", &requests, "-o", &answers, "-m", &m, option, value], &[&wanted]);
        refused(&["bench", "--concurrency", "1", "-m", &m, option, value], &[&wanted]);
    }
    refused(&["bench", "-m", &m, "--concurrency", "0"], &["--concurrency 0: expected 1 to"]);
    refused(&["bench", "-m", &m, "--concurrency", "2,9999"], &["--concurrency 9999: expected 1 to"]);
    let bench = ["bench", "-m", &m, "--concurrency", "1", "--gen-tokens"];
    refused(&[&bench[..], &["1048576"]].concat(), &["do not fit the context of 256"]);
    refused(&[&bench[..], &[&u64::MAX.to_string()]].concat(), &["--gen-tokens", "1 to 1048576"]);
    refused(&["bench", "-m", &m, "--live"], &["--live", "--concurrency"]);
    assert!(!files.path("answers.jsonl").exists());
    // As many pages as one request can fill are enough.
    files.batch(&["-m", &m, "--kv-tokens", "1"]);
    assert_eq!(numbers(&files.answers()), [1, 2]);
}

#[test]
fn bench_tells_rates_of_several_requests_at_once() {
    let m = model("tiny/llama-tied");
    let files = Files::of(&[]);
    let trace = files.name("trace.json");
    let arguments = ["bench", "-m", &m, "--stages", "2", "--concurrency", "1,2", "--reps", "1"];
    let sizes = ["--prompt-tokens", "8", "--gen-tokens", "6"];
    let found = object(&[&arguments[..], &sizes[..], &["--trace", &trace]].concat());
    let rows = found["concurrency"].as_array().expect("an array");
    assert_eq!(rows.iter().map(|row| row["concurrency"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(2)]);
    for row in rows {
        let rate = &row["decode_tokens_per_s"];
        assert!(["min", "median", "max"].iter().all(|part| rate[*part].as_f64() > Some(0.0)), "{row}");
        for key in ["per_request_tokens_per_s", "predicted_tokens_per_s"] {
            assert!(row[key].as_f64() > Some(0.0), "{key}: {row}");
        }
        for key in ["efficiency", "efficiency_by_law"] {
            assert!(row[key].as_f64().is_some_and(|share| share > 0.0 && share <= 1.01), "{key}: {row}");
        }
        for key in ["first_token_seconds", "time_per_token_seconds"] {
            assert!(["p50", "p90", "p99", "max"].iter().all(|part| row[key][*part].as_f64() > Some(0.0)), "{row}");
        }
        assert_eq!(row["refused"], 0);
        assert!((1..=row["concurrency"].as_u64().unwrap()).contains(&row["groups"].as_u64().expect("a number")));
    }
    assert_eq!(found["stages"].as_array().map(Vec::len), Some(2));
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).expect("readable")).expect("JSON");
    assert!(trace["traceEvents"].as_array().is_some_and(|events| !events.is_empty()));
    let text = stdout(&succeeded(&[&arguments[..], &sizes[..]].concat()));
    assert!(text.contains("at once") && text.contains("groups M") && text.contains("by the law"), "{text}");
}

#[test]
fn bench_replays_a_file_of_requests() {
    let m = model("tiny/llama-tied");
    let files = Files::of(&[
        json!({"prompt_tokens": 8, "max_tokens": 5}),
        json!({"prompt": PROMPT, "raw": true, "max_tokens": 3, "arrival_ms": 20}),
        json!({"prompt_tokens": 4, "max_tokens": 4, "n": 2, "arrival_ms": 10}),
    ]);
    let requests = files.name("requests.jsonl");
    let found = object(&["bench", "-m", &m, "--requests", &requests]);
    let row = &found["concurrency"][0];
    assert_eq!((&row["concurrency"], &row["refused"]), (&3.into(), &0.into()), "{found}");
    assert!(row["decode_tokens_per_s"]["median"].as_f64() > Some(0.0), "{row}");
    for (line, wanted) in [
        ("{\"prompt_tokens\": 0}", "line 1: one of prompt_tokens, prompt and messages"),
        ("{\"prompt_tokens\": 4, \"n\": 0}", "line 1: n: expected at least 1"),
        ("\n{", "line 2: "),
        ("", "holds no requests"),
    ] {
        std::fs::write(&requests, line).expect("writable");
        refused(&["bench", "-m", &m, "--requests", &requests], &["requests.jsonl", wanted]);
    }
    refused(&["bench", "-m", &m, "--requests", &files.name("none")], &["cannot read", "none"]);
}

#[test]
fn a_picture_needs_a_terminal() {
    let m = model("tiny/llama-tied");
    let arguments = ["-m", &m, "--raw", "-n", "3", "--prompt", PROMPT];
    let live = succeeded(&[&arguments[..], &["--live"]].concat());
    assert!(stderr(&live).contains("--live needs a terminal"), "{}", stderr(&live));
    assert!(!stderr(&live).contains('\x1b'), "{}", stderr(&live));
    assert_eq!(stdout(&live), stdout(&succeeded(&arguments)));
}
