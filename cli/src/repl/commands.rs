//! What may be typed beside messages: one table, from which help, completion and suggestions are made.

use crate::errors::usage;
use crate::output::table;

/// What begins a command.
const SLASH: char = '/';
/// How alike a word must be to be suggested, from 0 to 1.
const ALIKE: f64 = 0.6;

/// A command, with its argument as typed; empty where there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Help,
    System,
    Reset,
    Retry,
    Undo,
    Edit,
    Save,
    Load,
    Model,
    Stages,
    Stats,
    Trace,
    Set,
    Exit,
}

/// A row of the table.
pub struct Entry {
    /// Which.
    pub command: Command,
    /// Its name, without the slash.
    pub name: &'static str,
    /// What follows it.
    pub argument: &'static str,
    /// What it does.
    pub help: &'static str,
    /// Whether it means nothing without an argument.
    needs_argument: bool,
}

const fn entry(command: Command, name: &'static str, argument: &'static str, help: &'static str) -> Entry {
    let needs_argument = !argument.is_empty() && argument.as_bytes()[0] != b'[';
    Entry { command, name, argument, help, needs_argument }
}

/// All commands.
pub const COMMANDS: [Entry; 14] = [
    entry(Command::Help, "help", "", "this list"),
    entry(Command::System, "system", "[TEXT]", "show the system message, or set it; \"\" removes it"),
    entry(Command::Reset, "reset", "", "begin anew; the system message stays"),
    entry(Command::Retry, "retry", "", "answer the last message again, with another seed"),
    entry(Command::Undo, "undo", "", "take the last message and its answer back"),
    entry(Command::Edit, "edit", "[TEXT]", "change the last message and send it again"),
    entry(Command::Save, "save", "FILE", "write the conversation to FILE, as JSON with OpenAI's names"),
    entry(Command::Load, "load", "FILE", "go on with a conversation that was saved"),
    entry(Command::Model, "model", "[NAME]", "show the model, or go on with another one"),
    entry(Command::Stages, "stages", "", "the pipe: stages, devices, layers, memory"),
    entry(Command::Stats, "stats", "", "the last answer: speed, time to the first token, what the cache spared"),
    entry(Command::Trace, "trace", "FILE", "write what every stage did when, for pp-run trace"),
    entry(Command::Set, "set", "[NAME=VALUE]", "show what can be set, or set it: /set temperature=0.7"),
    entry(Command::Exit, "exit", "", "leave, as Ctrl-D does"),
];

/// What a line is.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    /// Nothing but space.
    Nothing,
    /// For the model.
    Message(String),
    /// For the program.
    Command(Command, String),
}

/// What was typed. A message that begins with a slash is typed with two.
///
/// # Errors
/// When it is no command that there is: names the one that is most like it. Nothing that looks like a command is ever
/// taken for a message.
pub fn parse(line: &str) -> anyhow::Result<Input> {
    let text = line.trim();
    let Some(rest) = text.strip_prefix(SLASH) else {
        let message = line.trim_end_matches(['\n', '\r']);
        return Ok(if text.is_empty() { Input::Nothing } else { Input::Message(message.to_owned()) });
    };
    if rest.starts_with(SLASH) {
        return Ok(Input::Message(rest.to_owned()));
    }
    let (name, argument) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    let (name, argument) = (name.to_lowercase(), argument.trim().to_owned());
    let Some(entry) = COMMANDS.iter().find(|entry| entry.name == name) else {
        let like =
            nearest(&name, COMMANDS.iter().map(|entry| entry.name)).map(|name| format!("did you mean /{name}? "));
        return Err(usage(format!(
            "there is no command /{}; {}/help lists them. A message that begins with a slash is typed with two",
            shortened(&name),
            like.unwrap_or_default()
        )));
    };
    match (entry.argument, argument.is_empty()) {
        ("", false) => Err(usage(format!("/{name} takes nothing behind it, and found `{}`", shortened(&argument)))),
        (wanted, true) if entry.needs_argument => Err(usage(format!("/{name} needs {wanted}: /{name} {wanted}"))),
        _ => Ok(Input::Command(entry.command, argument)),
    }
}

/// The name that is most like `word`, if any is.
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let likeness =
        |name: &&str| strsim::jaro_winkler(word, name).max(strsim::normalized_damerau_levenshtein(word, name));
    let best = names.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&best) >= ALIKE).then_some(best)
}

/// The beginning of what was typed, for an error.
pub fn shortened(text: &str) -> String {
    const MOST: usize = 40;
    let line = crate::output::printable(text.lines().next().unwrap_or_default());
    let short: String = line.chars().take(MOST).collect();
    if short.len() < text.len() { format!("{short}…") } else { short }
}

/// For people.
pub fn help() -> String {
    let row = |entry: &Entry| vec![format!("/{} {}", entry.name, entry.argument), entry.help.to_owned()];
    let rows: Vec<Vec<String>> = COMMANDS.iter().map(row).collect();
    format!(
        "{}\n\nAlt-Enter or a backslash at the end: another line   Tab: complete   Ctrl-R: search what was typed   Ctrl-O: \
         $EDITOR\nCtrl-C: end the answer   Ctrl-D, or Ctrl-C twice at an empty prompt: leave   //: a message that begins \
         with a slash",
        table(2, &["command", "what it does"], &rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_messages_or_commands() {
        let check = |line: &str, expected: Input| assert_eq!(parse(line).unwrap(), expected, "{line:?}");
        let message = |text: &str| Input::Message(text.to_owned());
        check("hello\n", message("hello"));
        check("  two\n lines \n", message("  two\n lines "));
        check(" \n\t", Input::Nothing);
        check("//usr/bin", message("/usr/bin"));
        check("1/2", message("1/2"));
        check("/help", Input::Command(Command::Help, String::new()));
        check(" /SAVE  a b.json ", Input::Command(Command::Save, "a b.json".to_owned()));
        check("/system Be\nbrief.", Input::Command(Command::System, "Be\nbrief.".to_owned()));
        check("/set", Input::Command(Command::Set, String::new()));
    }

    #[test]
    fn what_is_no_command_is_told_with_the_nearest() {
        let check = |line: &str, wanted: &str| {
            let message = parse(line).unwrap_err().to_string();
            assert!(message.contains(wanted), "{line}: {message}");
        };
        check("/rest", "did you mean /reset?");
        check("/stage", "did you mean /stages?");
        check("/temperature 1", "there is no command /temperature");
        check("/stat", "/stats");
        check("/rtery", "/retry");
        check("/", "/help lists them");
        check("/usr/bin/ls is it?", "typed with two");
        check("/save", "/save needs FILE");
        check("/undo 2", "takes nothing behind it, and found `2`");
        let long = parse(&format!("/{}", "x".repeat(1000))).unwrap_err().to_string();
        assert!(long.len() < 200 && !long.contains("did you mean"), "{long}");
    }

    #[test]
    fn help_lists_them_all() {
        let help = help();
        assert!(COMMANDS.iter().all(|entry| help.contains(&format!("/{}", entry.name)) && help.contains(entry.help)));
    }
}
