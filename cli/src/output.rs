//! The only module that prints. Results go to stdout, everything else to stderr; text and JSON come from one struct.

pub mod live;
pub mod markdown;
pub mod progress;
pub mod terminal;

use std::io::{self, IsTerminal, Write};

use anstyle::{AnsiColor, Style};
use anyhow::Result;
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

/// A result that can be shown to people and to programs.
pub trait Report: Serialize {
    /// For people; ends without a newline.
    fn text(&self) -> String;
}

/// Where and how to print.
#[derive(Clone, Copy, Debug)]
pub struct Out {
    json: bool,
    quiet: bool,
}

impl Out {
    /// `json`: stdout is for one JSON object only. `quiet`: no notes.
    pub fn new(json: bool, quiet: bool) -> Out {
        Out { json, quiet }
    }

    /// The same without notes, if `quiet`.
    pub fn quiet_if(self, quiet: bool) -> Out {
        Out { quiet: self.quiet || quiet, ..self }
    }

    /// Whether stdout is for one JSON object only.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Prints a result to stdout, as text or as JSON on one line.
    ///
    /// # Errors
    /// When stdout does not take it.
    pub fn result(&self, report: &impl Report) -> Result<()> {
        if self.json {
            return self.object(report);
        }
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{}", report.text())?;
        Ok(stdout.flush()?)
    }

    /// Prints JSON on one line to stdout.
    ///
    /// # Errors
    /// When stdout does not take it.
    pub fn object(&self, value: &impl Serialize) -> Result<()> {
        let line = serde_json::to_string(value)?;
        let mut stdout = io::stdout().lock();
        writeln!(stdout, "{line}")?;
        Ok(stdout.flush()?)
    }

    /// Prints a piece of an answer to stdout at once. On a terminal it does nothing but show.
    ///
    /// # Errors
    /// When stdout does not take it.
    pub fn stream(&self, piece: &str) -> io::Result<()> {
        if io::stdout().is_terminal() { self.stream_styled(&shown(piece)) } else { self.stream_styled(piece) }
    }

    /// As [`Out::stream`], of what has been made fit for a terminal already.
    ///
    /// # Errors
    /// When stdout does not take it.
    pub fn stream_styled(&self, piece: &str) -> io::Result<()> {
        if self.json {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        stdout.write_all(piece.as_bytes())?;
        stdout.flush()
    }

    /// Ends a streamed answer: on a terminal the next thing begins on a new line.
    ///
    /// # Errors
    /// When stdout does not take it.
    pub fn end_stream(&self, text: &str) -> io::Result<()> {
        let wanted = !text.ends_with('\n') && io::stdout().is_terminal();
        if wanted { self.stream("\n") } else { Ok(()) }
    }

    /// Something to know, for people: to stderr.
    pub fn note(&self, text: &str) {
        if !self.quiet {
            say(&format!("{text}\n"));
        }
    }

    /// As [`Out::note`], less important than what is around it.
    pub fn aside(&self, text: &str) {
        let dim = if colours() { Style::new().dimmed() } else { Style::new() };
        self.note(&format!("{dim}{text}{dim:#}"));
    }

    /// What was asked for beside results: to stderr, also where notes are not wanted.
    pub fn tell(&self, text: &str) {
        say(&format!("{text}\n"));
    }
}

/// The prompt of somebody who types on a terminal without cursor control: to stderr.
pub fn ask() {
    say("> ");
}

/// What Ctrl-C at an empty prompt is answered with.
pub const LEAVES: &str = "(Ctrl-C again or Ctrl-D leaves; /help lists commands)";

/// The same prompt again, on a terminal without cursor control.
pub fn ask_again() {
    say(&format!("\n{LEAVES}\n> "));
}

/// Leaves the line of a prompt that is not answered.
pub fn end_prompt() {
    say("\n");
}

/// Whether a person sits at all three ends.
pub fn is_a_person_there() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal() && io::stderr().is_terminal()
}

/// Whether terminals here can move their cursor.
pub fn can_move_cursor() -> bool {
    std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb")
}

/// Says why the program ends, and what to do.
pub fn error(error: &anyhow::Error, advice: Option<&str>) {
    let mut text = chain(error);
    if let Some(advice) = advice {
        text.push('\n');
        text.push_str(advice);
    }
    error_text(&text);
}

/// An error and its causes; many errors quote theirs already.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Says what was wrong with the command line.
pub fn usage_error(rendered: &str) {
    // clap sets its lines apart and repeats the usage; the error and where to read more are enough.
    let lines = rendered.lines().map(str::trim_end).filter(|line| !line.is_empty());
    let usage = |line: &str| line.starts_with("Usage: ") || line.starts_with("       ");
    let text = lines.filter(|line| !usage(line)).collect::<Vec<_>>().join("\n");
    error_text(text.strip_prefix("error: ").unwrap_or(&text));
}

fn error_text(text: &str) {
    let red = if colours() { Style::new().bold().fg_color(Some(AnsiColor::Red.into())) } else { Style::new() };
    say(&format!("pp-run: {red}error:{red:#} {text}\n"));
}

/// Tells that Ctrl-C was heard.
pub fn stopping() {
    say("\npp-run: ending what is under way; press Ctrl-C again to leave at once\n");
}

/// Tells that it ended because the user wanted it to.
pub fn cancelled() {
    say("pp-run: cancelled\n");
}

/// Nobody is told when stderr is gone.
fn say(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Whether stderr takes colours.
pub fn colours() -> bool {
    takes_colours(&io::stderr())
}

fn takes_colours(stream: &impl IsTerminal) -> bool {
    let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && !refused
}

/// What pictures are drawn on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Canvas {
    /// Characters of a line.
    pub columns: usize,
    /// Whether there are colours.
    pub colours: bool,
}

impl Canvas {
    /// Without a terminal.
    pub const PLAIN: Canvas = Canvas { columns: 100, colours: false };

    /// Stdout.
    pub fn stdout() -> Canvas {
        let width = terminal_size::terminal_size_of(io::stdout()).map(|(width, _)| usize::from(width.0));
        Canvas { columns: width.unwrap_or(Canvas::PLAIN.columns), colours: takes_colours(&io::stdout()) }
    }
}

/// A text from a file, such that it does nothing to a terminal and stays on its line.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// A text of several lines, such that it does nothing to a terminal but show.
pub fn shown(text: &str) -> String {
    let harmless = |c: char| matches!(c, '\n' | '\t') || !c.is_control();
    text.chars().map(|c| if harmless(c) { c } else { char::REPLACEMENT_CHARACTER }).collect()
}

/// Rows in aligned columns under a header; columns after the first `left` are aligned to the right.
pub fn table(left: usize, header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec());
    for row in rows {
        table.add_row(row.clone());
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if index >= left {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

/// Bytes in decimal units.
pub fn bytes(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// A number with its thousands set apart.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!(
            [0, 999, 1_500, 98_300_000, 24_000_000_000].map(bytes),
            ["0 B", "999 B", "1.5 kB", "98.3 MB", "24.0 GB"]
        );
        assert_eq!([0, 999, 1000, 134_515_008].map(count), ["0", "999", "1,000", "134,515,008"]);
    }

    #[test]
    fn texts_from_files_do_nothing_to_a_terminal() {
        assert_eq!(printable("a\u{1b}[31m\nb ☃"), "a\u{fffd}[31m\u{fffd}b ☃");
    }

    #[test]
    fn answers_do_nothing_to_a_terminal_but_show() {
        assert_eq!(shown("a\u{1b}]0;x\u{7}\n\tb\u{9b}2J é"), "a\u{fffd}]0;x\u{fffd}\n\tb\u{fffd}2J é");
    }

    #[test]
    fn a_cause_is_told_once() {
        let error = anyhow::anyhow!("no such file").context("cannot read x");
        assert_eq!(chain(&error), "cannot read x: no such file");
        assert_eq!(chain(&error.context("failed: cannot read x: no such file")), "failed: cannot read x: no such file");
    }

    #[test]
    fn columns_are_aligned() {
        let rows =
            [vec!["0".into(), "llvmpipe".into(), "1.5 MB".into()], vec!["10".into(), "x".into(), "12.0 MB".into()]];
        let text = table(2, &["stage", "device", "weights"], &rows);
        assert_eq!(text, "stage  device    weights\n0      llvmpipe   1.5 MB\n10     x         12.0 MB");
    }
}
