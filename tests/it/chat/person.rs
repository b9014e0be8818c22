//! The program in a pseudo-terminal, with keys as a person presses them.

use std::os::unix::fs::PermissionsExt;

use super::{CLOSING, Home, said, save, saved, spared, toy};
use crate::terminal::{ALT_ENTER, CTRL_D, ENTER, TAB, Terminal, UP};

#[test]
fn the_second_turn_computes_only_what_is_new() {
    let home = Home::new();
    let terminal = home.talk(&["--split", "1,1"]);
    terminal.line("run of a stage");
    terminal.see(CLOSING, 1);
    terminal.line("and run again");
    let text = terminal.see(CLOSING, 2);
    let turns = spared(&text);
    assert_eq!(turns[0].0, 0, "{text}");
    let (before, (cached, new)) = (turns[0].1 + 8, turns[1]);
    assert!(cached >= before - 8 && cached < before && new > 0 && new < cached, "{turns:?}");
    terminal.line("/stages");
    terminal.see("one conversation fills 1/2 of the pipe", 1);
    terminal.line("/stats");
    let text = terminal.see("prefill", 1);
    assert!(text.contains(&format!("cached {cached}, new {new}\n")), "{text}");
    terminal.see("decode", 1);
    terminal.keys(CTRL_D);
    let (code, text) = terminal.end();
    assert_eq!(code, 0, "{text}");
    for part in ["stage", "layers", "0-0", "1-1", "first token", "KV cache"] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
}

#[test]
fn without_a_prompt_a_terminal_is_for_talking() {
    let home = Home::new();
    let toy = toy();
    let options = ["-m", toy.as_str(), "--device", "reference", "-n", "4"];
    for term in ["xterm-256color", "dumb"] {
        let terminal = Terminal::start(&options, home.folder(), &[("TERM", term)]);
        terminal.prompt();
        terminal.line("run");
        terminal.see(CLOSING, 1);
        terminal.line("/exit");
        let (code, text) = terminal.end();
        assert!(code == 0 && text.contains("/help lists commands"), "{text}");
    }
    let terminal =
        Terminal::start(&[&options[..], &["a prompt is answered and that is all"]].concat(), home.folder(), &[]);
    let (code, text) = terminal.end();
    assert!(code == 0 && text.contains("load ") && !text.contains("/help"), "{text}");
}

#[test]
fn an_unknown_command_is_never_sent_to_the_model() {
    let home = Home::new();
    let terminal = home.talk(&[]);
    terminal.line("/rest");
    terminal.see("did you mean /reset?", 1);
    terminal.line("/usr/bin/ls lists files");
    terminal.see("is typed with two", 2);
    terminal.line("/set temprature=1");
    terminal.see("did you mean temperature?", 1);
    assert!(!terminal.text().contains(CLOSING));
    terminal.line("//usr/bin/ls lists files");
    terminal.see(CLOSING, 1);
    save(&terminal, "talk.json");
    assert_eq!(said(&home.path("talk.json")), ["/usr/bin/ls lists files"]);
}

#[test]
fn lines_are_joined_by_paste_alt_enter_and_backslash() {
    let home = Home::new();
    let terminal = home.talk(&[]);
    let long: String = (0..12).map(|i| format!("pasted line {i} é\n")).collect();
    terminal.paste(long.trim_end());
    terminal.see("pasted line 11", 1);
    assert!(!terminal.text().contains(CLOSING), "a paste is not sent by itself");
    terminal.keys(ENTER);
    terminal.see(CLOSING, 1);
    save(&terminal, "pasted.json");
    terminal.line("/reset");
    terminal.see("begins anew", 1);
    terminal.keys("one");
    terminal.keys(ALT_ENTER);
    terminal.line("two");
    terminal.see(CLOSING, 2);
    save(&terminal, "two.json");
    terminal.line("/reset");
    terminal.see("begins anew", 2);
    terminal.line("three\\");
    terminal.line("four");
    terminal.see(CLOSING, 3);
    save(&terminal, "three.json");
    terminal.line("/edit");
    terminal.see(". four", 2);
    terminal.line(" and five");
    terminal.see(CLOSING, 4);
    save(&terminal, "four.json");
    assert_eq!(said(&home.path("pasted.json")), [long.trim_end()]);
    assert_eq!(said(&home.path("two.json")), ["one\ntwo"]);
    assert_eq!(said(&home.path("three.json")), ["three\nfour"]);
    assert_eq!(said(&home.path("four.json")), ["three\nfour and five"], "the last message was changed in place");
    terminal.keys(UP);
    terminal.keys(UP);
    terminal.see(". four and five", 2);
}

#[test]
fn what_was_saved_can_be_gone_on_with_taken_back_and_answered_again() {
    let home = Home::new();
    let terminal = home.talk(&["--system", "Of stages.", "-t", "1.5", "--seed", "7"]);
    for (turn, message) in ["run", "run of a"].iter().enumerate() {
        terminal.line(message);
        terminal.see(CLOSING, turn + 1);
    }
    save(&terminal, "two.json");
    terminal.line("/retry");
    terminal.see("seed 8", 1);
    terminal.see(CLOSING, 3);
    save(&terminal, "again.json");
    terminal.line("/undo");
    terminal.see("the last message was taken back", 1);
    save(&terminal, "one.json");
    let (two, again, one) =
        (saved(&home.path("two.json")), saved(&home.path("again.json")), saved(&home.path("one.json")));
    assert_eq!((two.len(), again.len(), one.len()), (5, 5, 3), "{two:?}");
    assert_eq!(two[0], ("system".to_owned(), "Of stages.".to_owned()));
    assert_eq!((&two[..4], &two[..3]), (&again[..4], &one[..]));
    assert_ne!(two[4], again[4], "another seed, another answer");
    terminal.keys(CTRL_D);
    assert_eq!(terminal.end().0, 0);
    // Another program goes on where the first stopped: with the first's seed it says what the first said.
    let terminal = home.talk(&["-t", "1.5", "--seed", "7"]);
    terminal.line("/load one.json");
    terminal.see("3 messages read", 1);
    terminal.line("run of a");
    terminal.see(CLOSING, 1);
    save(&terminal, "copy.json");
    assert_eq!(saved(&home.path("copy.json")), two);
    terminal.line("/load again");
    terminal.see("cannot read again", 1);
    std::fs::write(home.path("notes"), "my notes").expect("writable");
    terminal.line("/save notes");
    terminal.see("choose another name", 1);
    assert_eq!(std::fs::read(home.path("notes")).expect("there"), b"my notes");
}

#[test]
fn greedy_answers_are_the_same_again_and_that_is_said() {
    let home = Home::new();
    let terminal = home.talk(&["-t", "0"]);
    terminal.line("/retry");
    terminal.see("nothing was said", 1);
    terminal.line("run");
    terminal.see(CLOSING, 1);
    save(&terminal, "first.json");
    terminal.line("/retry");
    terminal.see("the answer is the same", 1);
    terminal.see(CLOSING, 2);
    save(&terminal, "second.json");
    assert_eq!(saved(&home.path("first.json")), saved(&home.path("second.json")));
    terminal.line("/set temperature=0.5");
    terminal.see("temperature is 0.5", 1);
    terminal.line("/set");
    terminal.until("the new temperature", |text| {
        text.lines().any(|line| line.split_whitespace().eq(["temperature", "0.5"]))
    });
}

#[test]
fn the_history_is_there_the_next_time_and_nobody_else_reads_it() {
    let home = Home::new();
    let terminal = home.talk(&[]);
    terminal.line("remember this");
    terminal.see(CLOSING, 1);
    terminal.line(" but not this");
    terminal.see(CLOSING, 2);
    terminal.keys(CTRL_D);
    assert_eq!(terminal.end().0, 0);
    let file = home.path(".local/state/pp-run/history");
    assert_eq!(std::fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::read_to_string(&file).expect("text"), "remember this\n");
    let terminal = home.talk(&[]);
    terminal.keys(UP);
    terminal.see("> remember this", 1);
    terminal.keys(ENTER);
    terminal.see(CLOSING, 1);
    save(&terminal, "talk.json");
    assert_eq!(said(&home.path("talk.json")), ["remember this"]);
    let terminal = home.talk(&["--no-history"]);
    terminal.line("a secret");
    terminal.see(CLOSING, 1);
    terminal.keys(CTRL_D);
    assert_eq!(terminal.end().0, 0);
    assert!(!std::fs::read_to_string(&file).expect("text").contains("secret"));
}

#[test]
fn a_full_context_is_told_and_old_turns_can_be_dropped() {
    let home = Home::new();
    let terminal = home.talk(&["--ctx", "128"]);
    let mut turns = 0;
    let text = loop {
        terminal.line("run of a stage of a run");
        let text = terminal.until("a turn or a refusal", |text| {
            text.matches(CLOSING).count() > turns || text.contains("context is full")
        });
        if text.contains("the context is full: the conversation has") {
            break text;
        }
        turns = text.matches(CLOSING).count();
    };
    for part in ["the context holds 128", "/reset", "context_policy=drop-oldest", "/retry asks again"] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    save(&terminal, "full.json");
    let before = saved(&home.path("full.json"));
    terminal.line("/set context_policy=drop-oldest");
    terminal.line("/retry");
    terminal.see("oldest messages were dropped", 1);
    terminal.see(CLOSING, turns + 1);
    save(&terminal, "dropped.json");
    let after = saved(&home.path("dropped.json"));
    assert!(after.len() < before.len() && after.last().expect("one").0 == "assistant", "{after:?}");
    assert_eq!(after[0].0, "user");
    terminal.line("/reset");
    terminal.see("begins anew", 1);
    terminal.line("run");
    terminal.see(CLOSING, turns + 2);
}

#[test]
fn another_size_of_the_terminal_breaks_nothing() {
    let home = Home::new();
    let terminal = home.talk(&[]);
    terminal.keys("a message that is long enough to be wrapped when the terminal becomes narrow");
    terminal.see("becomes narrow", 1);
    for (rows, columns) in [(20, 30), (3, 10), (40, 120)] {
        terminal.resize(rows, columns);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    terminal.line(" and wide again");
    terminal.see(CLOSING, 1);
    save(&terminal, "talk.json");
    let expected = "a message that is long enough to be wrapped when the terminal becomes narrow and wide again";
    assert_eq!(said(&home.path("talk.json")), [expected]);
}

#[test]
fn commands_are_completed_and_listed() {
    let home = Home::new();
    let terminal = home.talk(&[]);
    terminal.keys("/hel");
    terminal.keys(TAB);
    terminal.keys(ENTER);
    let text = terminal.see("Ctrl-C: end the answer", 1);
    for command in ["/system [TEXT]", "/reset", "/retry", "/save FILE", "/trace FILE", "/set [NAME=VALUE]"] {
        assert!(text.contains(command), "{command}:\n{text}");
    }
    terminal.line("/trace run.json");
    terminal.see("pp-run trace run.json draws it", 1);
    assert!(home.path("run.json").is_file());
    terminal.line("/system Of run.");
    terminal.see("the system message is: Of run.", 1);
    terminal.line("/model no-such-model");
    terminal.see("no model of that name", 1);
    terminal.line("run");
    terminal.see(CLOSING, 1);
    terminal.line(&format!("/model {}", super::data("tiny/llama-linear-rope").display()));
    terminal.see("the model is llama-linear-rope", 1);
    terminal.line("run of a");
    terminal.see(CLOSING, 2);
    save(&terminal, "talk.json");
    assert_eq!(said(&home.path("talk.json")), ["run", "run of a"]);
}
