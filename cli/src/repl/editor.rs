//! A line of input from a person at a terminal: editing, history, completion, hints. Everything about it is reedline's.

use std::borrow::Cow;
use std::fs::{DirBuilder, OpenOptions};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use nu_ansi_term::{Color, Style};
use reedline::{
    ColumnarMenu, Completer, DefaultHinter, EditCommand, Emacs, FileBackedHistory, Highlighter, Hinter, History,
    KeyCode, KeyModifiers, MenuBuilder, Prompt, PromptEditMode, PromptHistorySearch, Reedline, ReedlineEvent,
    ReedlineMenu, Signal, Span, StyledText, Suggestion, ValidationResult, Validator, default_emacs_keybindings,
};
use tempfile::TempDir;

use super::choices::NAMES;
use super::commands::COMMANDS;
use super::conversation::path;
use crate::cancel::{self, Prompted};
use crate::models::{Places, models_in};
use crate::output::{self, LEAVES, Out};

/// Entries of the history.
const ENTRIES: usize = 10_000;
/// Bytes of the history's file at most; a larger one is not ours.
const HISTORY_BYTES_MAX: u64 = 32 << 20;
/// Files and models that are offered at most.
const OFFERS: usize = 200;
const MENU: &str = "completions";

/// What a person did.
pub enum Read {
    /// Typed this.
    Line(String),
    /// Took back what was being typed.
    Cleared,
    /// Wants to leave.
    Leave,
    /// Nothing: the program is to end.
    Ending,
}

/// Reads lines.
pub struct Editor {
    line: Reedline,
    /// Whether nothing is typed.
    is_empty: Arc<AtomicBool>,
    /// Whether the latest thing was Ctrl-C at an empty prompt.
    warned: bool,
    ending: Arc<AtomicBool>,
    /// Of what is given to the user's own editor.
    #[expect(dead_code, reason = "held, not read: it goes with this")]
    folder: Option<TempDir>,
    out: Out,
}

impl Editor {
    /// Without a file the history is forgotten with the program.
    pub fn new(history: Option<PathBuf>, prompted: Prompted, out: Out) -> Editor {
        let is_empty = Arc::new(AtomicBool::new(true));
        let mut keys = default_emacs_keybindings();
        keys.add_binding(
            KeyModifiers::NONE,
            KeyCode::Tab,
            ReedlineEvent::UntilFound(vec![ReedlineEvent::Menu(MENU.to_owned()), ReedlineEvent::MenuNext]),
        );
        keys.add_binding(KeyModifiers::SHIFT, KeyCode::BackTab, ReedlineEvent::MenuPrevious);
        let menu = ColumnarMenu::default().with_name(MENU);
        let hinter = Hints { history: DefaultHinter::default().with_style(hint_style()), hint: String::new() };
        let mut line = Reedline::create()
            .use_bracketed_paste(true)
            .with_edit_mode(Box::new(Emacs::new(keys)))
            .with_validator(Box::new(Continuation))
            .with_highlighter(Box::new(Commands { is_empty: is_empty.clone() }))
            .with_completer(Box::new(Completions))
            .with_quick_completions(true)
            .with_partial_completions(true)
            .with_menu(ReedlineMenu::EngineCompleter(Box::new(menu)))
            .with_hinter(Box::new(hinter))
            .with_history_exclusion_prefix(Some(" ".to_owned()))
            .with_ansi_colors(output::colours())
            .with_break_signal(prompted.wake);
        if let Some(file) = history {
            match open_history(&file) {
                Ok(history) => line = line.with_history(Box::new(history)),
                Err(error) => out.note(&format!("the history {} is left alone: {error}", file.display())),
            }
        }
        let external = external();
        let mut folder = None;
        if let Some((editor, file, of)) = external {
            line = line.with_buffer_editor(editor, file);
            folder = Some(of);
        }
        Editor { line, is_empty, warned: false, ending: prompted.ending, folder, out }
    }

    /// What is typed next; it begins as `text`.
    ///
    /// # Errors
    /// When the terminal does not do what it should.
    pub fn read(&mut self, text: Option<String>) -> Result<Read> {
        if let Some(text) = text {
            self.line.run_edit_commands(&[EditCommand::InsertString(text)]);
        }
        loop {
            let signal = self.line.read_line(&Ask)?;
            let was_warned = std::mem::take(&mut self.warned);
            match signal {
                Signal::Success(line) => {
                    // What is not kept now would be lost with the program.
                    if let Err(error) = self.line.sync_history() {
                        self.out.note(&format!("the history is not kept: {error}"));
                    }
                    return Ok(Read::Line(joined(&line)));
                }
                Signal::ExternalBreak(_) => {
                    output::end_prompt();
                    // In this order: what asks for the end behind it wakes the editor anew.
                    cancel::rearm();
                    if self.ending.load(Ordering::SeqCst) {
                        return Ok(Read::Ending);
                    }
                    self.line.run_edit_commands(&[EditCommand::Clear]);
                }
                Signal::CtrlC => {}
                _ => return Ok(Read::Leave),
            }
            // Ctrl-C, as a key or as a signal.
            if !self.is_empty.swap(true, Ordering::Relaxed) {
                return Ok(Read::Cleared);
            }
            if was_warned {
                return Ok(Read::Leave);
            }
            self.warned = true;
            self.out.tell(LEAVES);
        }
    }
}

/// Where what is typed is kept: `$XDG_STATE_HOME/pp-run/history`, else in `~/.local/state`.
pub fn history_file() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = var("XDG_STATE_HOME").or_else(|| Some(var("HOME")?.join(".local/state")))?;
    Some(state.join("pp-run/history"))
}

/// The history of a file that only its owner reads.
fn open_history(file: &Path) -> std::io::Result<FileBackedHistory> {
    if let Some(folder) = file.parent() {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let bytes = OpenOptions::new().create(true).append(true).mode(0o600).open(file)?.metadata()?.len();
    if bytes > HISTORY_BYTES_MAX {
        return Err(std::io::Error::other(format!("it has {bytes} bytes, at most {HISTORY_BYTES_MAX} are read")));
    }
    FileBackedHistory::with_file(ENTRIES, file.to_owned()).map_err(|error| std::io::Error::other(error.to_string()))
}

/// The user's own editor, and the file through which it gets a text, in a folder that only its owner reads.
fn external() -> Option<(Process, PathBuf, TempDir)> {
    let named = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let editor = named("VISUAL").or_else(|| named("EDITOR"))?;
    let folder = tempfile::Builder::new().prefix("pp-run-").tempdir().ok()?;
    let file = folder.path().join("message.md");
    let mut words = editor.split_whitespace();
    let mut process = Process::new(words.next()?);
    process.args(words).arg(&file);
    Some((process, file, folder))
}

/// Lines that end in a backslash, joined.
pub fn joined(line: &str) -> String {
    line.replace("\\\n", "\n")
}

/// Whether a line goes on in the next one.
pub fn goes_on(line: &str) -> bool {
    line.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1
}

struct Continuation;

impl Validator for Continuation {
    fn validate(&self, line: &str) -> ValidationResult {
        if goes_on(line) { ValidationResult::Incomplete } else { ValidationResult::Complete }
    }
}

/// `> `, and dots for further lines.
struct Ask;

impl Prompt for Ask {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        "".into()
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        "".into()
    }

    fn render_prompt_indicator(&self, _: PromptEditMode) -> Cow<'_, str> {
        "> ".into()
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        ". ".into()
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        format!("(search: {}) ", search.term).into()
    }
}

fn hint_style() -> Style {
    Style::new().fg(Color::DarkGray)
}

/// Shows commands as such, and knows whether there is anything.
struct Commands {
    is_empty: Arc<AtomicBool>,
}

impl Highlighter for Commands {
    fn highlight(&self, line: &str, _: usize) -> StyledText {
        self.is_empty.store(line.is_empty(), Ordering::Relaxed);
        let mut text = StyledText::new();
        let end = line.find(char::is_whitespace).unwrap_or(line.len());
        let known = line.strip_prefix('/').is_some_and(|_| COMMANDS.iter().any(|entry| entry.name == &line[1..end]));
        if known {
            text.push((Style::new().bold().fg(Color::Cyan), line[..end].to_owned()));
            text.push((Style::new(), line[end..].to_owned()));
        } else {
            text.push((Style::new(), line.to_owned()));
        }
        text
    }
}

/// What a command wants behind it; else what the history has.
struct Hints {
    history: DefaultHinter,
    hint: String,
}

impl Hinter for Hints {
    fn handle(&mut self, line: &str, pos: usize, history: &dyn History, colours: bool, cwd: &str) -> String {
        self.hint = line.strip_prefix('/').map_or(String::new(), hint);
        if self.hint.is_empty() {
            return self.history.handle(line, pos, history, colours, cwd);
        }
        if colours { hint_style().paint(&self.hint).to_string() } else { self.hint.clone() }
    }

    fn complete_hint(&self) -> String {
        // What a command wants is not to be taken as it stands there.
        if self.hint.is_empty() { self.history.complete_hint() } else { String::new() }
    }

    fn next_hint_token(&self) -> String {
        if self.hint.is_empty() { self.history.next_hint_token() } else { String::new() }
    }
}

/// What follows a command that has been typed so far, without its slash.
fn hint(typed: &str) -> String {
    let entry = COMMANDS.iter().find(|entry| entry.name == typed.trim_end() && !entry.argument.is_empty());
    let space = if typed.ends_with(' ') { "" } else { " " };
    entry.map_or(String::new(), |entry| format!("{space}{}", entry.argument))
}

/// Commands, and what they take.
struct Completions;

impl Completer for Completions {
    fn complete(&mut self, line: &str, pos: usize) -> Vec<Suggestion> {
        let typed = line.get(..pos).unwrap_or_default();
        let Some(rest) = typed.strip_prefix('/').filter(|rest| !rest.contains('\n')) else { return Vec::new() };
        let (begin, offers) = match rest.split_once(' ') {
            None => (1, commands(rest)),
            Some((name, argument)) => {
                let argument = argument.trim_start();
                (pos - argument.len(), arguments(name, argument))
            }
        };
        let suggestion = |(value, description, ends): (String, Option<String>, bool)| Suggestion {
            value,
            description,
            span: Span::new(begin, pos),
            append_whitespace: ends,
            ..Suggestion::default()
        };
        offers.into_iter().take(OFFERS).map(suggestion).collect()
    }
}

/// What may stand somewhere, what it means, and whether a space follows.
type Offer = (String, Option<String>, bool);

fn commands(typed: &str) -> Vec<Offer> {
    let found = COMMANDS.iter().filter(|entry| entry.name.starts_with(typed));
    found.map(|entry| (entry.name.to_owned(), Some(entry.help.to_owned()), !entry.argument.is_empty())).collect()
}

fn arguments(command: &str, typed: &str) -> Vec<Offer> {
    let plain = |values: Vec<String>| values.into_iter().map(|value| (value, None, false)).collect();
    match command {
        "save" | "load" | "trace" => plain(files(typed)),
        "set" => plain(NAMES.iter().filter(|name| name.starts_with(typed)).map(|name| format!("{name}=")).collect()),
        "model" => {
            let models = Places::from_env().folder.map(|folder| models_in(&folder)).unwrap_or_default();
            plain(models.into_iter().filter(|name| name.starts_with(typed)).collect())
        }
        _ => Vec::new(),
    }
}

/// Files that begin with what was typed; folders end in a slash.
fn files(typed: &str) -> Vec<String> {
    let (folder, begin) =
        typed.rsplit_once('/').map_or(("", typed), |(_, begin)| (&typed[..typed.len() - begin.len()], begin));
    let at = if folder.is_empty() { PathBuf::from(".") } else { path(folder) };
    let entries = std::fs::read_dir(at).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let hidden = name.starts_with('.') && !begin.starts_with('.');
        let slash = if entry.path().is_dir() { "/" } else { "" };
        (name.starts_with(begin) && !hidden).then(|| format!("{folder}{name}{slash}"))
    });
    let mut names: Vec<String> = names.take(OFFERS).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offered(line: &str) -> Vec<String> {
        Completions
            .complete(line, line.len())
            .into_iter()
            .map(|s| format!("{}{}", &line[..s.span.start], s.value))
            .collect()
    }

    #[test]
    fn commands_and_what_they_take_are_completed() {
        assert_eq!(offered("/sta"), ["/stages", "/stats"]);
        assert_eq!(offered("/set te"), ["/set temperature=", "/set template_arg="]);
        assert_eq!(offered("/").len(), COMMANDS.len());
        assert!(
            offered("hello /st").is_empty() && offered("/reset x").is_empty() && offered("/system\n/st").is_empty()
        );
        let dir = tempfile::tempdir().unwrap();
        for name in ["talk.json", "tale.json", ".tab"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        std::fs::create_dir(dir.path().join("tables")).unwrap();
        let begin = format!("/load {}/", dir.path().display());
        let all = ["tables/", "tale.json", "talk.json"].map(|name| format!("{begin}{name}"));
        assert_eq!(offered(&format!("{begin}ta")), all);
    }

    #[test]
    fn a_command_that_is_complete_hints_at_what_it_takes() {
        let check = |typed: &str, expected: &str| assert_eq!(hint(typed), expected);
        check("save", " FILE");
        check("set ", "[NAME=VALUE]");
        check("reset", "");
        check("sa", "");
        check("save x", "");
    }

    #[test]
    fn a_backslash_at_the_end_goes_on() {
        assert!(goes_on("a\\") && !goes_on("a\\\\") && !goes_on("a") && !goes_on("\\\n"));
        assert_eq!(joined("a\\\nb\nc"), "a\nb\nc");
    }

    #[test]
    fn the_history_is_its_owners_and_a_strange_one_is_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("state/pp-run/history");
        let mut history = open_history(&file).unwrap();
        history.save(reedline::HistoryItem::from_command_line("two\nlines")).unwrap();
        history.sync().unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            open_history(&file).unwrap().load(reedline::HistoryItemId::new(0)).unwrap().command_line,
            "two\nlines"
        );
        std::fs::write(&file, b"\xff\xfe").unwrap();
        assert!(open_history(&file).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"\xff\xfe");
    }
}
