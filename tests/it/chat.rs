//! Conversations: with a person on a terminal, and a line a turn.

mod ends;
mod lines;
mod person;
mod same;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::support::data;
use crate::terminal::Terminal;

/// Of two layers and 256 positions, with a template of the usual kind.
const TOY: &str = "tiny/llama-tied";

fn toy() -> String {
    data(TOY).to_str().expect("a path in UTF-8").to_owned()
}

/// What every turn ends with on a terminal.
const CLOSING: &str = "first after";

/// Where a person is at home.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn folder(&self) -> &Path {
        self.0.path()
    }

    /// `chat` with a toy model and no driver, on a terminal.
    fn talk(&self, more: &[&str]) -> Terminal {
        let toy = toy();
        let usual = ["chat", "-m", &toy, "--device", "reference", "--activations", "f32", "-n", "8"];
        let terminal = Terminal::start(&[&usual[..], more].concat(), self.folder(), &[]);
        terminal.prompt();
        terminal
    }
}

/// Saves under a name, and waits until that was said.
#[track_caller]
fn save(terminal: &Terminal, name: &str) {
    terminal.line(&format!("/save {name}"));
    terminal.see(&format!("messages written to {name}"), 1);
}

/// The numbers behind `cached` and `new` of each turn.
fn spared(text: &str) -> Vec<(usize, usize)> {
    let number = |text: &str| text.split([',', ';']).next().and_then(|n| n.trim().parse().ok()).expect("a number");
    text.lines()
        .filter_map(|line| line.strip_prefix("cached "))
        .map(|rest| (number(rest), number(rest.split_once("new ").expect("both").1)))
        .collect()
}

/// `chat` with lines on stdin.
fn piped(arguments: &[&str], lines: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pp-run"));
    command.arg("chat").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for name in ["PP_MODEL", "PP_LOG", "PP_CHECKED"] {
        command.env_remove(name);
    }
    command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
    let mut child = command.spawn().expect("the program starts");
    let mut stdin = child.stdin.take().expect("piped");
    let lines = lines.to_vec();
    let writer = std::thread::spawn(move || {
        // It may end without reading.
        let _ = std::io::Write::write_all(&mut stdin, &lines);
    });
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("it only writes");
    output
}

/// The JSON of each turn of a conversation that goes well.
#[track_caller]
fn turns(arguments: &[&str], lines: &str) -> Vec<Value> {
    turns_and_notes(arguments, lines).0
}

/// The same, and what was told beside.
#[track_caller]
fn turns_and_notes(arguments: &[&str], lines: &str) -> (Vec<Value>, String) {
    let output = piped(&[arguments, &["--json"]].concat(), lines.as_bytes());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {}\n{told}", output.status);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let turns = text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")));
    (turns.collect(), told)
}

/// The messages of a saved conversation: role and content of each.
#[track_caller]
fn saved(file: &Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let field = |message: &Value, name: &str| message[name].as_str().expect("a text").to_owned();
    let messages = value["messages"].as_array().expect("an array").iter();
    messages.map(|message| (field(message, "role"), field(message, "content"))).collect()
}

/// What the user said, of a saved conversation.
#[track_caller]
fn said(file: &Path) -> Vec<String> {
    saved(file).into_iter().filter(|(role, _)| role == "user").map(|(_, content)| content).collect()
}
