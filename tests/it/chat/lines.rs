//! Conversations that are piped in, a line a turn.

use std::io::{BufReader, Read, Write};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{piped, saved, toy, turns};
use crate::support::ids;

fn usual(toy: &str) -> [&str; 8] {
    ["-m", toy, "--device", "reference", "--activations", "f32", "-n", "6"]
}

#[test]
fn every_line_is_a_turn_and_a_line_of_json() {
    let toy = toy();
    let turns = turns(&usual(&toy), "run\n\n/system Of run.\nof a \\\nstage\n//run\n");
    assert_eq!(turns.len(), 3);
    for (at, turn) in turns.iter().enumerate() {
        assert_eq!(turn["turn"], at + 1);
        let number = |name: &str| turn[name].as_u64().unwrap_or_else(|| panic!("{name}: {turn}")) as usize;
        assert_eq!(number("cached_tokens") + number("new_tokens"), number("prompt_tokens"));
        assert_eq!(number("prompt_tokens"), ids(&turn["prompt_ids"]).len());
        assert_eq!((ids(&turn["tokens"]).len(), &turn["finish_reason"]), (6, &"length".into()));
        assert!(turn["timings"]["first_token_seconds"].as_f64() > Some(0.0), "{turn}");
    }
    let cached = |at: usize| turns[at]["cached_tokens"].as_u64().expect("a number");
    assert!(cached(0) == 0 && cached(2) > cached(1), "a new system message is a new beginning: {turns:?}");
}

#[test]
fn answers_go_to_stdout_and_all_else_to_stderr() {
    let toy = toy();
    let output = piped(&usual(&toy), b"run\nof a stage\n/stats\n");
    let texts: Vec<String> = turns(&usual(&toy), "run\nof a stage\n")
        .iter()
        .map(|t| format!("{}\n", t["text"].as_str().expect("a text")))
        .collect();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stdout).expect("UTF-8"), texts.concat());
    let told = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(told.contains("cached 0, new ") && told.contains("speed ") && !told.contains('\u{1b}'), "{told}");
    let quiet = piped(&[&usual(&toy)[..], &["--quiet"]].concat(), b"run\n");
    assert_eq!(String::from_utf8(quiet.stderr).expect("UTF-8"), "");
}

#[test]
fn the_first_error_ends_it_with_its_exit_code() {
    let toy = toy();
    let check = |more: &[&str], lines: &[u8], code: i32, wanted: &str| {
        let output = piped(&[&usual(&toy)[..], more].concat(), lines);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert!(told.contains(wanted), "{wanted:?} in {told}");
    };
    check(&[], b"run\n/stat\nnever\n", 2, "did you mean /stats?");
    check(&[], b"run\n\xff\n", 2, "stdin, line 2: the line is not valid UTF-8");
    check(
        &["--ctx", "64"],
        b"run of a stage of a run of a stage of a run of a stage of a run of a stage\n",
        2,
        "the context is full",
    );
    check(&["--top-p", "0"], b"run\n", 2, "--top-p");
    check(&["--template-arg", "x"], b"run\n", 2, "--template-arg x");
    check(&["--chat-template", "/no/such"], b"run\n", 2, "/no/such");
    check(&["--transcript", "/no/such/file"], b"run\n", 2, "--transcript /no/such/file");
    check(&["--context-policy", "forget"], b"run\n", 2, "drop-oldest");
    check(&[], b"/edit\n", 2, "/edit without a text needs a terminal");
    check(&[], b"/load /no/such\n", 2, "cannot read /no/such");
}

#[test]
fn a_transcript_grows_and_is_its_owners() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("talk.md");
    let (toy, path) = (toy(), file.to_str().expect("UTF-8"));
    let run = |lines: &[u8]| piped(&[&usual(&toy)[..], &["--transcript", path]].concat(), lines);
    let first = String::from_utf8(run(b"run\n").stdout).expect("UTF-8");
    assert!(run(b"of a stage\n/undo\n").status.success());
    let text = std::fs::read_to_string(&file).expect("there");
    assert!(
        text.starts_with(&format!("# llama-tied\n\n## user\n\nrun\n\n## assistant\n\n{first}\n# llama-tied\n")),
        "{text}"
    );
    assert!(
        text.contains("## user\n\nof a stage\n\n") && text.ends_with("(the last message was taken back)\n\n"),
        "{text}"
    );
    assert_eq!(std::fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o600);
}

#[test]
fn old_turns_are_dropped_where_that_is_wanted() {
    let toy = toy();
    let lines = "run of a stage\n".repeat(8);
    let turns = turns(&[&usual(&toy)[..], &["--ctx", "128", "--context-policy", "drop-oldest"]].concat(), &lines);
    assert_eq!(turns.len(), 8);
    let dropped: Vec<u64> = turns.iter().map(|turn| turn["dropped_messages"].as_u64().expect("a number")).collect();
    assert!(dropped.iter().any(|count| *count > 0) && dropped[0] == 0, "{dropped:?}");
    assert!(turns.iter().all(|turn| ids(&turn["prompt_ids"]).len() <= 128));
}

/// A template that itself opens the thoughts, as those of models that always think do, and leaves them out of what was
/// said before.
const THINKING: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] if m.role == 'assistant' \
                        else m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% if \
                        enable_thinking is not defined or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n\
                        {% endif %}{% endif %}";

#[test]
fn thoughts_are_told_apart_hidden_and_left_to_the_template() {
    let dir = tempfile::tempdir().expect("a folder");
    let (template, talk) = (dir.path().join("thinking.jinja"), dir.path().join("talk.json"));
    std::fs::write(&template, THINKING).expect("writable");
    let toy = toy();
    let usual = [&usual(&toy)[..], &["--chat-template", template.to_str().expect("UTF-8")]].concat();
    let save = format!("run\n/save {}\nof a stage\n", talk.display());
    let turns = turns(&usual, &save);
    // A toy never ends its thoughts.
    let text = turns[0]["text"].as_str().expect("a text");
    assert_eq!(turns[0]["thoughts"].as_str(), Some(text.trim()));
    let messages = saved(&talk);
    assert_eq!(messages[1], ("assistant".to_owned(), format!("<think>\n{text}")), "as the model saw it");
    let hidden = piped(&[&usual[..], &["--thoughts", "hide"]].concat(), b"run\n");
    assert_eq!(String::from_utf8(hidden.stdout).expect("UTF-8"), "\n");
    let shown = piped(&usual, b"run\n");
    assert_eq!(String::from_utf8(shown.stdout).expect("UTF-8"), format!("{text}\n"));
    let without = super::turns(&[&usual[..], &["--template-arg", "enable_thinking=false"]].concat(), "run\n");
    assert_eq!(without[0].get("thoughts"), None::<&Value>);
    assert!(ids(&without[0]["prompt_ids"]).len() > ids(&turns[0]["prompt_ids"]).len());
}

/// As `nohup` starts it: a hang-up is not heard. Else it ends what waits.
#[test]
fn a_hang_up_is_heard_unless_whoever_started_it_does_not_want_it() {
    for (trap, code) in [("trap '' HUP; ", 0), ("", 130)] {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{trap}exec \"$0\" chat \"$@\""), env!("CARGO_BIN_EXE_pp-run")]);
        let toy = toy();
        command.args(usual(&toy)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("sh is there");
        let mut stdin = child.stdin.take().expect("piped");
        stdin.write_all(b"run\n").expect("it reads");
        let mut stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut first = [0];
        stdout.read_exact(&mut first).expect("it answers");
        let sent = Command::new("kill").args(["-s", "HUP", &child.id().to_string()]).status().expect("kill is there");
        assert!(sent.success());
        // Where it hears that, nothing else may tell it to end.
        let waits = if trap.is_empty() {
            Some(stdin)
        } else {
            stdin.write_all(b"run\n").expect("it goes on");
            drop(stdin);
            None
        };
        stdout.read_to_end(&mut Vec::new()).expect("it ends");
        assert_eq!(child.wait().expect("it ends").code(), Some(code), "{trap}");
        drop(waits);
    }
}
