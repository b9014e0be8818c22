//! `--live`, on a terminal: rows at the foot of it, what is printed above them, and the terminal given back.

use serde_json::json;

use super::model;
use crate::smollm2;
use crate::terminal::{CTRL_C, Terminal};

/// The rows of the latest picture, by what they begin with.
const ROWS: [&str; 5] = ["stage 0", "stage 1", "pipe ", "queue ", "KV "];

/// What begins a picture.
const RULE: &str = "────";

#[test]
fn an_answer_scrolls_above_the_rows_and_they_stay_as_a_last_picture() {
    let home = tempfile::tempdir().expect("a folder");
    let model = smollm2::file();
    let model = model.to_str().expect("UTF-8");
    let arguments =
        ["-m", model, "--split", "15,15", "--ctx", "512", "-n", "120", "--live", "Count to fifty, in words."];
    let terminal = Terminal::start(&arguments, home.path(), &[]);
    terminal.until("a picture at work", |text| {
        ROWS.iter().all(|row| text.lines().any(|line| line.starts_with(row))) && text.contains("1 running")
    });
    let (code, text) = terminal.end();
    assert_eq!(code, 0, "{text}");
    let begin = |row: &'static str| move |line: &&str| line.starts_with(row);
    let above: Vec<&str> = text.lines().take_while(|line| !line.starts_with(RULE)).collect();
    // The bars that showed how it loaded stay whole, and the answer begins under them.
    let bars: Vec<&&str> =
        above.iter().filter(|line| line.starts_with("stage ") && line.trim_end().ends_with("MB")).collect();
    assert_eq!(bars.len(), 2, "{text}");
    assert!(
        above.len() > 3 && !above[2].starts_with("stage ") && !above[2].contains("MB"),
        "the answer is above:\n{text}"
    );
    assert_eq!(text.lines().filter(begin(RULE)).count(), 1, "one picture is left:\n{text}");
    let picture: Vec<&str> = text.lines().skip_while(|line| !line.starts_with(RULE)).skip(1).collect();
    for (row, wanted) in picture.iter().zip(ROWS) {
        assert!(row.starts_with(wanted), "{wanted}:\n{text}");
    }
    assert!(text.contains("fills 1/2 of the pipe") && text.contains("load "), "the closing table follows:\n{text}");
}

#[test]
fn another_size_and_ctrl_c_leave_a_terminal_as_it_was() {
    let home = tempfile::tempdir().expect("a folder");
    let m = model("tiny/llama-33");
    let requests: String = (0..64)
        .map(|i| format!("{}\n", json!({"id": i, "prompt": "Of run is a stage", "raw": true, "max_tokens": 180})))
        .collect();
    std::fs::write(home.path().join("in.jsonl"), requests).expect("writable");
    let arguments = ["batch", "in.jsonl", "-o", "out.jsonl", "-m", &m, "--stages", "2", "--live"];
    let terminal = Terminal::start(&arguments, home.path(), &[]);
    let at_work = |text: &str| text.lines().any(|line| line.starts_with("queue ") && line.contains("decoding"));
    terminal.until("a picture at work", at_work);
    for (rows, columns) in [(24, 80), (6, 40), (40, 100)] {
        terminal.resize(rows, columns);
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    terminal.until("a picture in the new size", at_work);
    terminal.keys(CTRL_C);
    let (code, text) = terminal.end();
    assert_eq!(code, 130, "{text}");
    assert!(text.contains("press Ctrl-C again to leave at once"), "{text}");
    // What is printed from now on scrolls through the whole screen again.
    let last = text.lines().last().expect("something");
    assert!(last.contains("left: run the same command again") || last.contains("tokens/s"), "{text}");
}
