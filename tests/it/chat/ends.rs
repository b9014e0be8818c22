//! How answers and the program end: Ctrl-C, Ctrl-D, signals, and a terminal that is gone.

use std::process::Command;

use super::{CLOSING, Home, save, saved, spared, toy};
use crate::smollm2;
use crate::terminal::{CTRL_C, CTRL_D, ENTER, Terminal};

const STORY: &str = "Write a very long story about the sea, in ten chapters.";

/// What a conversation with a real model is opened with; its answers take long.
fn slow() -> Vec<String> {
    let model = smollm2::file();
    let model = model.to_str().expect("UTF-8");
    ["chat", "-m", model, "--ctx", "1024"].map(str::to_owned).to_vec()
}

fn start(arguments: &[String], home: &Home) -> Terminal {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let terminal = Terminal::start(&arguments, home.folder(), &[]);
    terminal.prompt();
    terminal
}

/// Asks for a story, and waits until some of it is there.
#[track_caller]
fn ask_for_a_story(terminal: &Terminal, turn: usize) {
    terminal.keys(STORY);
    let asked = terminal.see("ten chapters.", turn).len();
    terminal.keys(ENTER);
    terminal.until("an answer", |text| text.len() > asked + 40);
}

fn signal(terminal: &Terminal, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &terminal.id().to_string()]).status().expect("kill is there");
    assert!(sent.success());
}

#[test]
fn ctrl_c_ends_an_answer_and_never_the_program() {
    let home = Home::new();
    let terminal = start(&slow(), &home);
    for turn in 1..=2 {
        ask_for_a_story(&terminal, turn);
        terminal.keys(CTRL_C);
        if turn == 2 {
            terminal.keys(CTRL_C);
        }
        terminal.see("(cancelled)", turn);
    }
    save(&terminal, "story.json");
    let messages = saved(&home.path("story.json"));
    assert_eq!(messages.len(), 4, "{messages:?}");
    assert!(messages[1].1.len() > 10 && messages[3].1.len() > 10, "what was answered until then is kept: {messages:?}");
    terminal.line("/set max_tokens=4");
    terminal.line("Say hello.");
    let text = terminal.see(CLOSING, 3);
    assert!(spared(&text)[2].0 > 32, "full pages of what was cancelled are found again:\n{text}");
    terminal.keys("half a line");
    terminal.see("half a line", 1);
    terminal.keys(CTRL_C);
    terminal.prompt();
    terminal.keys(CTRL_C);
    terminal.see("Ctrl-C again or Ctrl-D leaves", 1);
    terminal.line("Say hello again.");
    terminal.see(CLOSING, 4);
    terminal.prompt();
    terminal.keys(CTRL_C);
    terminal.see("Ctrl-C again or Ctrl-D leaves", 2);
    terminal.keys(CTRL_C);
    assert_eq!(terminal.end().0, 0, "twice at an empty prompt");
}

#[test]
fn ctrl_c_counts_where_it_comes_as_a_signal() {
    // As it does while the editor has not yet taken the terminal, between two of its lines.
    let home = Home::new();
    let quick = ["chat", "-m", &toy(), "--device", "reference", "-n", "4"].map(str::to_owned);
    let terminal = start(&quick, &home);
    terminal.keys("half a line");
    terminal.see("half a line", 1);
    signal(&terminal, "INT");
    terminal.prompt();
    signal(&terminal, "INT");
    terminal.see("Ctrl-C again or Ctrl-D leaves", 1);
    terminal.prompt();
    terminal.line("run");
    terminal.see(CLOSING, 1);
    terminal.prompt();
    signal(&terminal, "INT");
    terminal.see("Ctrl-C again or Ctrl-D leaves", 2);
    signal(&terminal, "INT");
    let (code, text) = terminal.end();
    assert_eq!((code, text.contains("cancelled")), (0, false), "{text}");
}

#[test]
fn what_is_typed_while_an_answer_comes_waits_for_the_prompt() {
    let home = Home::new();
    let terminal = start(&[slow(), vec!["-n".to_owned(), "80".to_owned()]].concat(), &home);
    ask_for_a_story(&terminal, 1);
    terminal.line("/stats");
    // Time for an echo, if there were one: more of the answer.
    let before = terminal.text().len();
    let text = terminal.until("more of it", |text| text.len() > before + 40);
    assert!(!text.contains("/stats") && !text.contains(CLOSING), "{text}");
    terminal.see("> /stats", 1);
    terminal.see("answer   80 tokens (length)", 1);
    ask_for_a_story(&terminal, 2);
    terminal.keys(CTRL_D);
    let (code, text) = terminal.end();
    assert_eq!((code, text.matches(CLOSING).count()), (0, 2), "{text}");
}

#[test]
fn sigterm_ends_it_at_the_prompt_and_in_an_answer_and_the_terminal_is_given_back() {
    let home = Home::new();
    for answering in [false, true] {
        let arguments = slow();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut terminal = Terminal::start(&arguments, home.folder(), &[]);
        let modes = terminal.modes();
        terminal.prompt();
        if answering {
            ask_for_a_story(&terminal, 1);
        } else {
            terminal.keys("half a line");
            terminal.see("half a line", 1);
        }
        assert_ne!(terminal.modes(), modes);
        signal(&terminal, "TERM");
        let (code, text) = terminal.ended();
        assert_eq!(code, 130, "{text}");
        assert_eq!(terminal.modes(), modes, "{text}");
        assert!(!text.contains("error"), "{text}");
    }
}

#[test]
fn a_terminal_that_goes_ends_it_whether_a_signal_tells_or_not() {
    let home = Home::new();
    let toy = toy();
    let quick = ["chat", "-m", &toy, "--device", "reference", "-n", "4"];
    for controlling in [true, false] {
        for term in ["xterm-256color", "dumb"] {
            let terminal = Terminal::open(&quick, home.folder(), &[("TERM", term)], controlling);
            terminal.prompt();
            terminal.line("run");
            terminal.see(CLOSING, 1);
            terminal.prompt();
            terminal.hang_up().code(|| format!("controlling: {controlling}, on {term}"));
        }
        let slow = slow();
        let slow: Vec<&str> = slow.iter().map(String::as_str).collect();
        let transcript = [&slow[..], &["--transcript", "talk.md"]].concat();
        let terminal = Terminal::open(&transcript, home.folder(), &[], controlling);
        terminal.prompt();
        ask_for_a_story(&terminal, 1);
        terminal.hang_up().code(|| format!("controlling: {controlling}, in an answer"));
        let talk = std::fs::read_to_string(home.path("talk.md")).expect("written");
        assert!(talk.contains(STORY), "{talk}");
    }
}

#[test]
fn sigterm_ends_it_where_the_terminal_takes_nothing_any_more() {
    const STOP: &str = "\x13";
    let home = Home::new();
    let mut terminal = start(&slow(), &home);
    ask_for_a_story(&terminal, 1);
    terminal.keys(STOP);
    signal(&terminal, "TERM");
    assert_eq!(terminal.ended().0, 130);
}

#[test]
fn a_terminal_without_a_cursor_gets_plain_lines() {
    let home = Home::new();
    let arguments = slow();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let terminal = Terminal::start(&arguments, home.folder(), &[("TERM", "dumb")]);
    terminal.prompt();
    terminal.line("/set max_tokens=4");
    terminal.line("two \\");
    terminal.line("lines");
    terminal.see(CLOSING, 1);
    terminal.prompt();
    terminal.line("");
    terminal.line("/rest");
    terminal.see("did you mean /reset?", 1);
    terminal.line("/edit");
    terminal.see("/edit TEXT", 1);
    save(&terminal, "talk.json");
    assert_eq!(saved(&home.path("talk.json"))[0].1, "two \nlines");
    terminal.line("/set max_tokens=900");
    terminal.prompt();
    ask_for_a_story(&terminal, 1);
    terminal.keys(CTRL_C);
    terminal.see("(cancelled)", 1);
    terminal.prompt();
    terminal.keys(CTRL_C);
    terminal.see("Ctrl-C again or Ctrl-D leaves", 1);
    terminal.line("/set max_tokens=4");
    terminal.line("And now?");
    terminal.see(CLOSING, 3);
    terminal.prompt();
    terminal.keys(CTRL_C);
    terminal.see("Ctrl-C again or Ctrl-D leaves", 2);
    terminal.keys(CTRL_C);
    assert_eq!(terminal.end().0, 130, "twice at a prompt");
    let terminal = Terminal::start(&arguments, home.folder(), &[("TERM", "dumb")]);
    terminal.prompt();
    terminal.keys(CTRL_D);
    assert_eq!(terminal.end().0, 0);
}
