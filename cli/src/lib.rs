//! The library behind the `pp-run` command: arguments, the terminal, and every print.
//!
//! [`args`] is what was typed; [`settings`], [`models`] and [`plan`] make of it what the program needs; [`command`]
//! does it; [`output`] prints it. The engine sees none of these.

mod api;
mod args;
mod cancel;
mod cluster;
mod command;
mod errors;
mod hardware;
mod hub;
mod journaled;
mod logging;
mod measured;
mod memory;
mod models;
mod output;
mod plan;
mod prompts;
mod recovery;
mod repl;
mod report;
mod requests;
mod settings;

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use args::Cli;
use errors::Exit;

/// Runs the program with the arguments of the process.
pub fn main() -> ExitCode {
    set_up_mesa();
    let cli = match parse() {
        Ok(cli) => cli,
        Err(error) if error.use_stderr() => {
            output::usage_error(&error.render().to_string());
            return ExitCode::from(Exit::Usage as u8);
        }
        Err(help) => {
            // Help and version; a reader that went away has read enough.
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
    };
    logging::install(&cli);
    cancel::install();
    match command::run(cli) {
        Ok(exit) => exit,
        Err(error) => {
            let exit = errors::exit_of(&error);
            match exit {
                Exit::Pipe => {}
                Exit::Cancelled => output::cancelled(),
                _ => output::error(&error, errors::advice(&error)),
            }
            ExitCode::from(exit as u8)
        }
    }
}

/// Mesa's layer that orders devices complains on stderr where there is no `XDG_RUNTIME_DIR` (containers, cron); it
/// orders nothing for us, so it is switched off there.
///
/// Its software driver, told to compute with one thread, hands that thread every dispatch and waits for it to wake. Told
/// to do without, it computes on the thread that waited: one thread as before, and a third more tokens a second where one
/// request decodes.
fn set_up_mesa() {
    const THREADS: &str = "LP_NUM_THREADS";
    let set = |name, value| {
        // SAFETY: the first thing the program does; there is no other thread yet.
        unsafe { std::env::set_var(name, value) }
    };
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        set("NODEVICE_SELECT", "1");
    }
    if std::env::var(THREADS).is_ok_and(|threads| threads.trim() == "1") {
        set(THREADS, "0");
    }
}

fn parse() -> Result<Cli, clap::Error> {
    let matches = Cli::command().try_get_matches().map_err(about_unquoted_prompts)?;
    refuse_options_before_a_verb(&matches)?;
    Cli::from_arg_matches(&matches)
}

/// What clap takes for an unknown verb behind a prompt is mostly a prompt without quotes.
fn about_unquoted_prompts(error: clap::Error) -> clap::Error {
    // Behind a verb that has verbs of its own it is one of those, misspelt.
    if std::env::args_os().nth(1).is_some_and(|word| Cli::command().find_subcommand(word).is_some()) {
        return error;
    }
    match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) => {
            let message = format!("unexpected word `{word}`: a prompt is one argument, so put it in quotes");
            Cli::command().error(ErrorKind::UnknownArgument, message)
        }
        _ => error,
    }
}

/// Options of an answer in front of a verb would be dropped without a word.
fn refuse_options_before_a_verb(matches: &ArgMatches) -> Result<(), clap::Error> {
    let Some((verb, _)) = matches.subcommand() else { return Ok(()) };
    let typed = |id: &&clap::Id| matches.value_source(id.as_str()) == Some(ValueSource::CommandLine);
    let groups = |id: &&clap::Id| Cli::command().get_arguments().any(|argument| argument.get_id() == *id);
    if matches.ids().filter(groups).find(typed).is_none() {
        return Ok(());
    }
    let message = format!(
        "`{verb}` is a verb, and comes first: pp-run {verb} [OPTIONS]. As a prompt, write `-- {verb}` or `--prompt {verb}`"
    );
    Err(Cli::command().error(ErrorKind::ArgumentConflict, message))
}
