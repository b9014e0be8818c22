//! `pp-run trace`, on the sample of tests/data/trace.

use super::bad_input::{USAGE, refused};
use super::{model, object, run, stderr, stdout, succeeded};
use crate::support::data;

fn sample() -> String {
    model("trace/four-stages.json")
}

#[test]
fn the_picture_the_shares_and_the_words() {
    let text = stdout(&succeeded(&["trace", &sample()]));
    let rows: Vec<&str> = text.lines().filter(|line| line.contains('│')).collect();
    assert_eq!(rows.len(), 4, "{text}");
    for (stage, row) in rows.iter().enumerate() {
        assert!(row.starts_with(&format!("stage {stage} │")) && row.ends_with('│'), "{row}");
        assert_eq!(row.chars().count(), 100, "without a terminal: {row}");
    }
    let cells: String = rows.concat();
    for sign in "012345·uhbsk".chars() {
        assert!(cells.contains(sign), "{sign} in {text}");
    }
    assert!(!text.contains('\u{1b}'), "no colours without a terminal");
    for wanted in ["0-9 A-Z busy with", "b back-pressure", "k KV wait", "0 ms", "100 ms", "\nnext: ", "card 2", "16-24"]
    {
        assert!(text.contains(wanted), "{wanted} in {text}");
    }
    assert!(text.lines().take(10).all(|line| line.chars().count() <= 100), "{text}");
}

#[test]
fn shares_add_up_for_programs() {
    let found = object(&["trace", &sample()]);
    let stages = found["stages"].as_array().expect("an array");
    assert_eq!(stages.len(), 4);
    for stage in stages {
        let shares = stage["shares"].as_object().expect("an object");
        assert_eq!(shares.len(), 10);
        let sum: f64 = shares.values().filter_map(|share| share.as_f64()).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{shares:?}");
        assert_eq!(shares["unattributed"], 0.0);
    }
    for key in ["seconds", "tokens_per_second", "in_flight", "batch", "busy", "bottleneck_busy"] {
        assert!(found[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {found}");
    }
    assert_eq!((&found["bottleneck"], &found["from_seconds"], &found["svg"]), (&2.into(), &0.0.into(), &().into()));
    assert!(found["law"]["busy"].as_f64() > Some(0.0) && found["law"]["knee"].as_u64() >= Some(4), "{found}");
    assert!(found["actions"][0]["words"].as_str().is_some_and(|words| !words.is_empty()));
}

#[test]
fn a_part_is_looked_at_alone() {
    let all = object(&["trace", &sample()]);
    let end = all["to_seconds"].as_f64().expect("a number");
    let part = object(&["trace", &sample(), "--from", "0.14", "--to", "0.22"]);
    assert_eq!((&part["from_seconds"], &part["to_seconds"]), (&0.14.into(), &0.22.into()));
    assert!(part["micro_batches"].as_u64() < all["micro_batches"].as_u64());
    assert_eq!(part["stages"][0]["shares"]["fill_drain"], 0.0);
    let rest = object(&["trace", &sample(), "--from", "0.3", "--to", "99"]);
    assert_eq!(rest["to_seconds"], end);
    let text = stdout(&succeeded(&["trace", &sample(), "--from", "0.14", "--to", "0.22"]));
    assert!(text.contains("160 ms") && !text.contains("260 ms"), "{text}");
    for (from, to) in [("0.2", "0.1"), ("-1", "0.1"), ("9", "10"), ("nan", "1"), ("0.1", "nan")] {
        refused(&["trace", &sample(), "--from", from, "--to", to], USAGE, &["--from", "--to", "s long"]);
    }
}

#[test]
fn a_picture_is_well_formed() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("trace.svg");
    let path = file.to_str().expect("UTF-8");
    let found = object(&["trace", &sample(), "--svg", path]);
    assert_eq!(found["svg"], path);
    let text = std::fs::read_to_string(&file).expect("it was written");
    let document = roxmltree::Document::parse(&text).expect("well-formed");
    let titles = document.descendants().filter(|node| node.tag_name().name() == "title").count();
    assert!(titles > 4 * 30, "{titles} things say what they are");
    assert!(text.len() < 300_000);
    let output = run(&["trace", &sample(), "--svg", "/nonexistent/x.svg"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("cannot write /nonexistent/x.svg"));
}

#[test]
fn files_that_are_no_traces() {
    refused(&["trace", "/nonexistent/trace.json"], USAGE, &["cannot read /nonexistent/trace.json"]);
    refused(&["trace"], USAGE, &["FILE"]);
    refused(
        &["trace", &model("tiny/llama-tied/config.json")],
        USAGE,
        &["config.json", "not a trace that pp-run wrote"],
    );
    refused(&["trace", &model("tiny/llama-tied/model.safetensors")], USAGE, &["not the JSON of a trace", "line 1"]);
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("cut.json");
    let text = std::fs::read_to_string(data("trace/four-stages.json")).expect("it is there");
    let path = file.to_str().expect("UTF-8").to_owned();
    std::fs::write(&file, &text[..text.len() / 2]).expect("writable");
    refused(&["trace", &path], USAGE, &["cut.json", "EOF", "line "]);
    std::fs::write(&file, text.replace("\"version\":1", "\"version\":9")).expect("writable");
    refused(&["trace", &path], USAGE, &["version 9", "reads version 1"]);
    std::fs::write(&file, text.replacen("\"finished\":", "\"ended\":", 1)).expect("writable");
    refused(&["trace", &path], USAGE, &["event ", "args.finished"]);
    let (header, _) = text.split_once("\"traceEvents\":[").expect("a list");
    std::fs::write(&file, format!("{header}\"traceEvents\":[]}}")).expect("writable");
    refused(&["trace", &path], USAGE, &["no micro-batch"]);
}
