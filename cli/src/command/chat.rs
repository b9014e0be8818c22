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
use crate::requests::Lines;

/// Talks until there is nothing more to say.
pub fn run(args: ChatArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, args.quiet);
    let history = if args.no_history { None } else { editor::history_file() };
    let with_person = !args.output.json && output::is_a_person_there();
    let mut repl = Repl::open(args, out)?;
    if with_person {
        out.note(&format!("{}; /help lists commands, Ctrl-D leaves", repl.model()));
        let ending = cancel::spare_the_program()?;
        let mut editor = Editor::new(history, ending.clone(), out);
        if let Some(exit) = with_editor(&mut repl, &mut editor, &ending)? {
            return Ok(exit);
        }
        out.note("the terminal does not say where its cursor is: plain lines from here on");
    }
    with_lines(&mut repl)
}

/// Reads with an editor; nothing where the terminal does not do what an editor needs.
fn with_editor(repl: &mut Repl, editor: &mut Editor, ending: &AtomicBool) -> Result<Option<ExitCode>> {
    let is_ending = || ending.load(Ordering::Relaxed);
    let mut edited = None;
    loop {
        if is_ending() {
            return Ok(Some(ExitCode::from(Exit::Cancelled as u8)));
        }
        let replaces = edited.is_some();
        let line = match editor.read(edited.take()) {
            Ok(Read::Line(line)) => line,
            Ok(Read::Cleared) => continue,
            Ok(Read::Ending) => return Ok(Some(ExitCode::from(Exit::Cancelled as u8))),
            Ok(Read::Leave) => return Ok(Some(ExitCode::SUCCESS)),
            Err(_) if is_ending() => continue,
            Err(_) => return Ok(None),
        };
        match repl.take(&line, replaces) {
            Ok(Next::Line) => {}
            Ok(Next::Edited(text)) => edited = Some(text),
            Ok(Next::Leave) => return Ok(Some(ExitCode::SUCCESS)),
            Err(error) if exit_of(&error) == Exit::Pipe => return Err(error),
            Err(error) if exit_of(&error) == Exit::Cancelled => output::cancelled(),
            Err(error) => output::error(&error, advice(&error)),
        }
    }
}

/// Reads lines; the first error ends it, as whoever wrote them cannot know of it.
fn with_lines(repl: &mut Repl) -> Result<ExitCode> {
    let asks = io::stdin().is_terminal();
    let mut lines = Lines::new(io::stdin().lock());
    let mut whole = String::new();
    loop {
        // Nobody looks at the flag while this waits: Ctrl-C ends the program.
        cancel::rearm();
        if asks {
            output::ask();
        }
        let Some(line) = lines.next() else { break };
        let (number, line) = line?;
        let line = line.map_err(|what| usage(format!("stdin, line {number}: {what}")))?;
        whole.push_str(line.trim_end_matches(['\n', '\r']));
        if editor::goes_on(&whole) {
            whole.push('\n');
            continue;
        }
        let line = editor::joined(&std::mem::take(&mut whole));
        match repl.take(&line, false) {
            Ok(Next::Line) if repl.was_cancelled() => return Ok(ExitCode::from(Exit::Cancelled as u8)),
            Ok(Next::Line) => {}
            Ok(Next::Edited(_)) => return Err(usage("/edit needs a terminal, or a text: /edit TEXT")),
            Ok(Next::Leave) => break,
            Err(error) if asks && exit_of(&error) != Exit::Pipe => output::error(&error, advice(&error)),
            Err(error) => return Err(error),
        }
    }
    Ok(ExitCode::SUCCESS)
}
