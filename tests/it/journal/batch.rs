//! A batch that is killed in the middle of its answers.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use pp_engine::journal;
use serde_json::{Value, json};

use super::Desk;
use crate::cli::{model, program, stderr};

struct Batch {
    model: &'static str,
    desk: Desk,
    answers: PathBuf,
}

impl Batch {
    fn of(lines: &[Value]) -> Batch {
        let desk = Desk::new();
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(desk.dir.path().join("requests"), text).unwrap();
        let answers = desk.dir.path().join("answers");
        Batch { model: super::MODEL, desk, answers }
    }

    fn command(&self, has_journal: bool, options: &[&str]) -> std::process::Command {
        let m = model(self.model);
        let common = ["-m", &m, "--device", "reference", "--max-sequences", "4", "-t", "1"];
        let mut command = program(&["batch"]);
        command.arg(self.desk.dir.path().join("requests")).arg("-o").arg(&self.answers).args(common).args(options);
        if has_journal {
            command.arg("--journal").arg(self.desk.path());
        }
        command
    }

    /// The answers by line, without what times and caches say.
    fn answers(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.answers).unwrap();
        let mut answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        answers.sort_by_key(|answer| answer["line"].as_u64());
        for answer in &mut answers {
            let answer = answer.as_object_mut().unwrap();
            answer.shift_remove("timings");
            answer["usage"].as_object_mut().unwrap().shift_remove("cached_tokens");
        }
        answers
    }

    /// Kills it as soon as the journal has so many tokens of one line and the file so many answers.
    fn kill(&self, tokens: usize, answers: usize) {
        let mut child = self.command(true, &["--quiet"]).stdout(Stdio::null()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let has_begun = || {
            let found = journal::read(&self.desk.path()).map(|contents| contents.requests).unwrap_or_default();
            found.values().any(|found| found.tokens.values().any(|some| some.len() >= tokens))
        };
        let written = || std::fs::read_to_string(&self.answers).unwrap_or_default().lines().count();
        while written() < answers || !has_begun() {
            assert!(Instant::now() < until && child.try_wait().unwrap().is_none(), "it is in the middle of an answer");
            std::thread::sleep(Duration::from_millis(5));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

fn lines() -> Vec<Value> {
    let form = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {
        "type": "array", "items": {"enum": ["run", "stage", 17]}, "minItems": 6, "maxItems": 9}}});
    let line = |i: usize| {
        let mut line = json!({"id": i, "prompt": "run of a stage", "raw": true, "seed": i, "max_tokens": 60});
        match i % 4 {
            0 => line["n"] = 2.into(),
            1 => line["logprobs"] = 2.into(),
            2 => line["response_format"] = form.clone(),
            _ => line["repetition_penalty"] = 1.3.into(),
        }
        line
    };
    (0..8).map(line).collect()
}

#[test]
fn a_batch_that_is_killed_goes_on_in_the_middle_of_its_answers() {
    let undisturbed = Batch::of(&lines());
    assert!(undisturbed.command(false, &[]).output().unwrap().status.success());
    let batch = Batch::of(&lines());
    batch.kill(12, 0);
    batch.kill(25, 2);
    // Torn where it was written.
    let length = std::fs::metadata(batch.desk.path()).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(batch.desk.path()).unwrap().set_len(length - 3).unwrap();
    let output = batch.command(true, &[]).output().unwrap();
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("goes on from its middle") && said.contains("are dropped"), "{said}");
    assert_eq!(batch.answers(), undisturbed.answers());
    assert!(journal::read(&batch.desk.path()).unwrap().requests.is_empty(), "what is answered is forgotten");
}

/// A line that says something else now, or other options, is another request.
#[test]
fn lines_that_have_changed_begin_again() {
    let batch = Batch::of(&lines()[..4]);
    batch.kill(5, 0);
    let m = model(super::MODEL);
    let served = program(&["serve", "-m", &m, "--resume", "--journal"]).arg(batch.desk.path()).output().unwrap();
    assert!(stderr(&served).contains("is not of a server"), "{}", stderr(&served));
    let changed = Batch::of(&lines()[..4]);
    let output = changed.command(false, &["--top-k", "3"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let output = batch.command(true, &["--top-k", "3"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("from its middle"), "{}", stderr(&output));
    let answers = batch.answers();
    // Those that were written before the options changed stay.
    for (found, expected) in answers.iter().zip(changed.answers()) {
        assert_eq!(found, &expected);
    }
}

/// A journal that holds one line at a time, with all that it may come to: the others wait.
#[test]
fn lines_wait_for_room_in_the_journal() {
    let line = |i: usize| json!({"prompt": "run", "raw": true, "seed": i, "max_tokens": 150, "n": 4, "logprobs": 64});
    let lines: Vec<Value> = (0..3).map(line).collect();
    let batch = || Batch { model: "tiny/llama-tied", ..Batch::of(&lines) };
    let (undisturbed, batch) = (batch(), batch());
    assert!(undisturbed.command(false, &[]).output().unwrap().status.success());
    let output = batch.command(true, &["--journal-bytes", "1048576"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(!stderr(&output).contains("the journal is full"), "{}", stderr(&output));
    assert_eq!(batch.answers(), undisturbed.answers());
}
