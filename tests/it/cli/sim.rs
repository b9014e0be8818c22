//! `sim`: a pipeline in virtual time.

use serde_json::Value;

use super::{object, run, stderr, stdout, succeeded};

const LOAD: [&str; 13] =
    ["sim", "--stages", "3", "--stage", "20,1", "--hop", "0.5,0.01", "--jitter", "1", "--count", "12", "--rate", "4"];

#[test]
fn a_seed_repeats_a_simulation() {
    let with = |seed: &str| object(&[&LOAD[..], &["--seed", seed, "--cancelled", "0.2", "--shared", "0.5"]].concat());
    let found = with("1");
    assert_eq!(found, with("1"));
    assert_ne!(found, with("2"));
    let number = |key: &str| found[key].as_f64().unwrap_or_else(|| panic!("{key}: {found}"));
    assert_eq!((number("stages"), number("requests")), (3.0, 12.0));
    assert_eq!(number("finished") + number("cancelled") + number("refused"), 12.0);
    for key in ["seconds", "tokens", "tokens_per_s", "requests_per_s", "efficiency", "micro_batches", "in_flight"] {
        assert!(number(key) > 0.0, "{key}: {found}");
    }
    assert!(number("efficiency") <= number("busiest") + 1e-9 && number("busiest") <= 1.0, "{found}");
    assert_eq!(found["busy"].as_array().map(Vec::len), Some(3));
    for key in ["first_token_seconds", "time_per_token_seconds"] {
        assert!(["p50", "p90", "p99", "max"].iter().all(|part| found[key][*part].as_f64() > Some(0.0)), "{found}");
    }
    let text = stdout(&succeeded(&LOAD));
    for wanted in ["12 requests: 12 finished", "tokens/s", "efficiency", "first token", "p99"] {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
}

#[test]
fn a_simulation_writes_its_trace() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("sim.json");
    let name = file.to_str().expect("UTF-8");
    let found = object(&[&LOAD[..], &["--trace", name]].concat());
    assert_eq!(found, object(&LOAD), "it changes nothing");
    let trace: Value = serde_json::from_slice(&std::fs::read(&file).expect("it was written")).expect("JSON");
    assert!(trace["traceEvents"].as_array().is_some_and(|events| events.len() > 100), "{trace}");
    let output = run(&[&LOAD[..], &["--trace", "/nonexistent/sim.json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write the trace to /nonexistent/sim.json"), "{}", stderr(&output));
}

#[test]
fn requests_are_replayed() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("load.jsonl");
    let name = file.to_str().expect("UTF-8");
    let lines = "{\"prompt_tokens\": 64, \"max_tokens\": 10}\n\n\
                 {\"prompt_tokens\": 8, \"max_tokens\": 5, \"n\": 2, \"arrival_ms\": 40}\n";
    std::fs::write(&file, lines).expect("writable");
    let found = object(&["sim", "--requests", name]);
    assert_eq!((&found["requests"], &found["finished"], &found["tokens"]), (&2.into(), &2.into(), &20.into()));
    let refused = |text: &str, wanted: &str| {
        std::fs::write(&file, text).expect("writable");
        refused(&["--requests", name], &["load.jsonl", wanted]);
    };
    refused("{\"prompt_tokens\": 4}\n{\"prompt\": \"x\"}", "line 2: prompt_tokens is missing");
    refused("{\"prompt_tokens\": 0}", "line 1: prompt_tokens 0: expected 1 to");
    refused("{\"prompt_tokens\": 4, \"n\": 0}", "line 1: n: expected at least 1");
    refused("{\"prompt_tokens\": 4, \"arrival_ms\": -1}", "line 1: arrival_ms");
    refused("nonsense", "line 1: ");
    refused("\n", "holds no requests");
}

#[track_caller]
fn refused(options: &[&str], wanted: &[&str]) {
    for json in [&[][..], &["--json"]] {
        let arguments = [&["sim"], options, json].concat();
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{}", stdout(&output));
        for wanted in wanted {
            assert!(stderr(&output).contains(wanted), "{wanted:?} in {}", stderr(&output));
        }
    }
}

#[test]
fn options_that_are_bad_are_named() {
    for (option, value) in [
        ("--stages", "2000"),
        ("--stage", "a"),
        ("--stage", "1,2,3,4"),
        ("--stage", "1e9"),
        ("--hop", "1,2,3"),
        ("--jitter", "x"),
        ("--sampling", "1,2"),
        ("--count", "0"),
        ("--count", "1000000000000"),
        ("--rate", "1e-300"),
        ("--rate", "inf"),
        ("--prompt", "9..3"),
        ("--answer", "0"),
        ("--shared", "1.5"),
        ("--cancelled", "nan"),
        ("--max-sequences", "0"),
        ("--max-batch-tokens", "0"),
        ("--kv-tokens", "0"),
        ("--kv-tokens", "18446744073709551615"),
        ("--ctx", "0"),
        ("--groups", "0"),
        ("--requests", "/nonexistent/load.jsonl"),
    ] {
        let name = if option == "--requests" { value } else { option };
        refused(&[option, value], &[name]);
    }
    refused(&["--stages", "3", "--stage", "1", "--stage", "2"], &["--stages 3", "--stage is given 2 times"]);
    refused(&["--stages", "3", "--hop", "1", "--hop", "2"], &["--hop is given 2 times", "3 stages"]);
    refused(&["--no-such-option"], &["--no-such-option"]);
}
