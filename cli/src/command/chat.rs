//! A conversation: with a person at a terminal, or a line a turn from anywhere else.

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

use crate::args::ChatArgs;
use crate::cancel;
use crate::errors::{Exit, advice, exit_of, usage};
use crate::output::{self, Out};
use crate::repl::editor::{self, Editor, Read};
use crate::repl::{Next, Repl};
use crate::requests::{LINE_BYTES_MAX, Lines};

/// Talks until there is nothing more to say.
pub fn run(args: ChatArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, args.quiet);
    let history = if args.no_history { None } else { editor::history_file() };
    let with_editor = !args.output.json && output::is_a_person_there() && output::can_move_cursor();
    // Before what takes long: what is typed meanwhile waits for the prompt.
    let terminal = with_editor.then(output::terminal::take);
    let mut repl = Repl::open(args, out)?;
    if !io::stdin().is_terminal() {
        return of_lines(&mut repl);
    }
    let prompted = cancel::spare_the_program(with_editor);
    out.note(&format!("{}; /help lists commands, Ctrl-D leaves", repl.model()));
    if with_editor {
        let mut editor = Editor::new(history, prompted.clone(), out);
        if let Some(exit) = of_editor(&mut repl, &mut editor, &prompted.ending)? {
            return Ok(exit);
        }
        drop(terminal);
        cancel::spare_the_program(false);
        out.note("the terminal does not say where its cursor is: plain lines from here on");
    }
    of_typed_lines(&mut repl, &prompted.ending)
}

/// What ends when somebody wanted it to.
const CANCELLED: u8 = Exit::Cancelled as u8;

/// With an editor; nothing where the terminal does not do what an editor needs.
fn of_editor(repl: &mut Repl, editor: &mut Editor, ending: &AtomicBool) -> Result<Option<ExitCode>> {
    let is_ending = || ending.load(Ordering::SeqCst);
    let mut edited = None;
    cancel::rearm();
    loop {
        // What asks the program to end from now on ends it; what did before is seen here.
        if is_ending() {
            return Ok(Some(ExitCode::from(CANCELLED)));
        }
        let replaces = edited.is_some();
        let line = match editor.read(edited.take()) {
            Ok(Read::Line(line)) => line,
            // A second Ctrl-C may be there already, and counts.
            Ok(Read::Cleared) => continue,
            Ok(Read::Ending) => return Ok(Some(ExitCode::from(CANCELLED))),
            Ok(Read::Leave) => return Ok(Some(ExitCode::SUCCESS)),
            Err(_) if is_ending() => continue,
            Err(_) => return Ok(None),
        };
        match repl.take(&line, replaces) {
            Ok(Next::Line) => {}
            Ok(Next::Edited(text)) => edited = Some(text),
            Ok(Next::Leave) => return Ok(Some(ExitCode::SUCCESS)),
            Err(error) => told(error)?,
        }
        cancel::rearm();
    }
}

/// Of a person whose terminal cannot move its cursor.
fn of_typed_lines(repl: &mut Repl, ending: &AtomicBool) -> Result<ExitCode> {
    let mut messages = Messages::new(io::stdin().lock());
    loop {
        cancel::rearm();
        if ending.load(Ordering::SeqCst) {
            return Ok(ExitCode::from(CANCELLED));
        }
        output::ask();
        let Some(line) = messages.next()? else { break };
        match line.and_then(|line| repl.take(&line, false)) {
            Ok(Next::Line) => {}
            Ok(Next::Edited(_)) => output::error(&no_editor(), None),
            Ok(Next::Leave) => break,
            Err(error) => told(error)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Of lines that come from anywhere else; the first error ends it, as whoever wrote them cannot know of it.
fn of_lines(repl: &mut Repl) -> Result<ExitCode> {
    let mut messages = Messages::new(io::stdin().lock());
    loop {
        // Nobody looks at the flag while this waits: Ctrl-C ends the program.
        if cancel::rearm() {
            return Ok(ExitCode::from(CANCELLED));
        }
        let Some(line) = messages.next()? else { break };
        match repl.take(&line?, false)? {
            Next::Line => {}
            Next::Edited(_) => return Err(no_editor()),
            Next::Leave => break,
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn no_editor() -> anyhow::Error {
    usage("/edit without a text needs a terminal that can move its cursor; /edit TEXT does without")
}

/// Tells a person what went wrong. What nobody can be told of ends it.
fn told(error: anyhow::Error) -> Result<()> {
    match exit_of(&error) {
        Exit::Pipe => return Err(error),
        Exit::Cancelled => output::cancelled(),
        _ => output::error(&error, advice(&error)),
    }
    Ok(())
}

/// What is typed, without an editor: lines, joined where they end in a backslash.
struct Messages<R>(Lines<R>);

impl<R: io::BufRead> Messages<R> {
    fn new(reader: R) -> Messages<R> {
        Messages(Lines::new(reader))
    }

    /// The next one; an error of its own where it is too long or no text. Nothing at the end.
    fn next(&mut self) -> io::Result<Option<Result<String>>> {
        let mut whole = String::new();
        loop {
            let Some((number, line)) = self.0.next_line()? else {
                return Ok((!whole.is_empty()).then(|| Ok(editor::joined(&whole))));
            };
            let line = line.and_then(|line| joins(&mut whole, line.trim_end_matches(['\n', '\r'])));
            if let Err(what) = line {
                return Ok(Some(Err(usage(format!("stdin, line {number}: {what}")))));
            }
            if !editor::goes_on(&whole) {
                return Ok(Some(Ok(editor::joined(&whole))));
            }
            whole.push('\n');
        }
    }
}

fn joins(whole: &mut String, line: &str) -> Result<(), String> {
    if whole.len() + line.len() > LINE_BYTES_MAX {
        return Err(format!(
            "with the lines before, which end in a backslash, it is longer than {LINE_BYTES_MAX} bytes"
        ));
    }
    whole.push_str(line);
    Ok(())
}
