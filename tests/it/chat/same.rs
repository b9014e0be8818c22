//! A turn's answer is that of a single run of the same transcript: of another program, another process, without a cache.

use std::path::Path;

use serde_json::{Value, json};

use super::{data, saved, turns, turns_and_notes};
use crate::smollm2;
use crate::support::ids;

/// What is said, in few tokens each; some of it is hard: other scripts, marks that look like a template's, line ends.
const SAID: [&str; 20] = [
    "Hi!",
    "Name a colour.",
    "Why?",
    "Another one.",
    "1, 2, 3,",
    "Go on.",
    "日本語で?",
    "naïve café 🙂",
    "<|im_end|>",
    "<|im_start|>system",
    "And then?",
    "  spaces  ",
    "Yes \\\nor no?",
    "Who?",
    "Sing.",
    "Stop that.",
    "x = 2 ** 3",
    "`ls`",
    "Thanks.",
    "Bye.",
];

/// What a single run says to each beginning of a conversation: `batch`, one at a time, with nothing kept.
fn alone(folder: &Path, messages: &[(String, String)], options: &[&str]) -> Vec<Value> {
    let (requests, answers) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let message = |(role, content): &(String, String)| json!({"role": role, "content": content});
    let asked = (0..messages.len()).filter(|at| messages[*at].0 == "user");
    let lines = asked.map(|at| {
        let messages: Vec<Value> = messages[..=at].iter().map(message).collect();
        format!("{}\n", json!({"messages": messages}))
    });
    std::fs::write(&requests, lines.collect::<String>()).expect("writable");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pp-run"));
    command.arg("batch").arg(&requests).arg("-o").arg(&answers).args(options);
    command.args(["--no-prefix-cache", "--max-sequences", "1", "--quiet"]);
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&answers).expect("there are answers");
    let mut answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    answers.sort_by_key(|answer| answer["line"].as_u64());
    answers
}

/// Talks over each split; checks every turn against a single run. `spelt`: whether answers are texts that are cut into the
/// same tokens again.
fn check(model: &str, said: &[&str], sampling: &[&str], more: &[&str], splits: &[&str], spelt: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let talk = folder.path().join("talk.json");
    let options = [&["-m", model][..], sampling, more].concat();
    let lines = format!("{}\n/save {}\n", said.join("\n"), talk.display());
    let talks: Vec<(Vec<Value>, String)> = splits
        .iter()
        .map(|split| {
            let _ = std::fs::remove_file(&talk);
            turns_and_notes(&[&options[..], &["--split", split]].concat(), &lines)
        })
        .collect();
    let messages = saved(&talk);
    assert_eq!(messages.len(), 2 * said.len());
    let alone = alone(folder.path(), &messages, &options);
    for (split, (turns, told)) in splits.iter().zip(&talks) {
        assert_eq!(turns.len(), alone.len());
        let (mut before, mut lost) = (0, 0);
        for (turn, single) in turns.iter().zip(&alone) {
            let number = |value: &Value| value.as_u64().expect("a number");
            assert_eq!(turn["tokens"], single["tokens"], "turn {} over {split}", turn["turn"]);
            assert_eq!(turn["text"], single["text"]);
            assert_eq!(turn["prompt_tokens"], single["usage"]["prompt_tokens"]);
            assert_eq!(number(&single["usage"]["cached_tokens"]), 0, "nothing is kept");
            lost += usize::from(number(&turn["cached_tokens"]) < before);
            before = number(&turn["prompt_tokens"]) - 1;
        }
        // All that was computed before is found again, unless a machine that others need stood still for so long that the
        // pipeline was given up.
        let given_up = told.matches("the pipeline is opened again").count();
        assert!(!spelt || lost <= given_up, "{lost} turns over {split}:\n{told}");
    }
}

#[test]
fn twenty_greedy_turns_are_those_of_single_runs_over_one_stage_and_four() {
    let model = smollm2::file();
    let model = model.to_str().expect("UTF-8");
    check(model, &SAID, &["-t", "0", "-n", "6"], &["--ctx", "1024"], &["30", "8,8,7,7"], true);
}

#[test]
fn twenty_seeded_turns_are_those_of_single_runs_over_four_stages() {
    let model = smollm2::file();
    let model = model.to_str().expect("UTF-8");
    let sampling = ["-t", "0.9", "--top-p", "0.95", "--seed", "11", "-n", "6"];
    check(model, &SAID, &sampling, &["--ctx", "1024"], &["8,8,7,7"], true);
}

/// Every architecture and tokenizer, on twins: what they say is noise, hard to spell and to cut into tokens again.
#[test]
fn noise_is_answered_as_in_single_runs_by_every_model() {
    for (model, split) in [("llama3-rope", "1,1"), ("qwen2-tied", "2"), ("qwen3", "1,1"), ("llama-untied", "1,1")] {
        let path = data(&format!("tiny/{model}"));
        let more = ["--device", "reference", "--activations", "f32", "-n", "7", "-t", "2", "--seed", "3"];
        let said = ["</s> run", "of é 日 \u{1f642} a", "<|eot_id|><s>"];
        check(path.to_str().expect("UTF-8"), &said, &more, &[], &[split], false);
    }
}

#[test]
fn ids_of_a_turn_are_those_of_the_answer_before_and_what_is_new() {
    let turns =
        turns(&["-m", smollm2::file().to_str().expect("UTF-8"), "-t", "0", "-n", "16", "--ctx", "512"], "Hi!\nWhy?\n");
    let computed = [ids(&turns[0]["prompt_ids"]), ids(&turns[0]["tokens"])].concat();
    let next = ids(&turns[1]["prompt_ids"]);
    assert!(next.starts_with(&computed), "{computed:?} then {next:?}");
    // The last token of the answer was drawn and not computed.
    assert_eq!(turns[1]["cached_tokens"].as_u64(), Some(computed.len() as u64 - 1));
}
