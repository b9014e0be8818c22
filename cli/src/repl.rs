//! A conversation: does the commands that are typed, and has the model answer the rest.
//!
//! Every message is answered to the ids of the whole conversation, rendered and encoded anew as a single run of it would
//! be. What of their keys and values is there already is the head's prefix cache to find: all up to the first id that
//! differs. So an answer is the one that a single run gives, whatever was said, taken back or changed before.

mod choices;
mod commands;
mod conversation;
mod display;
pub mod editor;
mod session;
mod thoughts;
mod transcript;
mod turn;

use std::sync::atomic::Ordering;

use anyhow::Result;
use pp_engine::head::{Answer, Event, FinishReason, HeadError, Request};
use pp_engine::schedule::Refused;

use crate::args::{ChatArgs, ContextPolicy};
use crate::command::run;
use crate::errors::{Exit, exit_of};
use crate::output::Out;
use crate::output::progress::Steps;
use crate::{cancel, settings};
use choices::Choices;
use commands::{Command, Input};
use conversation::{Conversation, path};
use display::Display;
use session::Session;
use transcript::Transcript;
use turn::{Asked, TurnReport};

/// The part of a context that an answer should have room in, where old turns may be dropped.
const ROOM: usize = 4;

/// What comes next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Another line.
    Line,
    /// A line that begins with a text which is there already; it takes the place of the last message.
    Edited(String),
    /// The end.
    Leave,
}

/// A conversation that goes on.
pub struct Repl {
    session: Session,
    conversation: Conversation,
    choices: Choices,
    transcript: Option<Transcript>,
    last: Option<TurnReport>,
    turns: usize,
    out: Out,
}

/// How an answer ended that was not complete.
struct Broken {
    error: anyhow::Error,
    /// Whether nothing of it was shown.
    untouched: bool,
}

impl Repl {
    /// Opens what the arguments ask for.
    ///
    /// # Errors
    /// When an argument is wrong, or model or pipeline do not open.
    pub fn open(args: ChatArgs, out: Out) -> Result<Repl> {
        let template_args = settings::template_args(&args.template_arg)?;
        let template = run::chat_template(args.chat_template.as_deref())?;
        let mut sampling = args.sampling;
        sampling.seed = Some(sampling.seed.unwrap_or_else(run::seed));
        let choices = Choices { sampling, template_args, thoughts: args.thoughts, policy: args.context_policy };
        let checkpoint = crate::command::open(&args.model)?;
        // What is wrong with what was typed comes before the time that loading takes.
        choices.sampling(&checkpoint.generation)?;
        drop(checkpoint);
        let session = Session::open(&args.model, template, args.pipeline, out)?;
        let name = session.model().name();
        let transcript = args.transcript.map(|path| Transcript::open(&path, &name)).transpose()?;
        let conversation = Conversation::new(args.system);
        Ok(Repl { session, conversation, choices, transcript, last: None, turns: 0, out })
    }

    /// The model, for people.
    pub fn model(&self) -> String {
        self.session.model().name()
    }

    /// Does what a line says. `edited`: a message in it takes the place of the last one. Whoever read the line has
    /// called [`cancel::rearm`] before.
    ///
    /// # Errors
    /// When it cannot be done; the conversation is as it was then, or ends with a message that has no answer.
    pub fn take(&mut self, line: &str, edited: bool) -> Result<Next> {
        match commands::parse(line)? {
            Input::Nothing => {}
            Input::Message(text) => self.send(text, edited)?,
            Input::Command(command, argument) => return self.command(command, &argument),
        }
        Ok(Next::Line)
    }

    fn command(&mut self, command: Command, argument: &str) -> Result<Next> {
        match command {
            Command::Help => self.out.tell(&commands::help()),
            Command::System => self.system(argument),
            Command::Reset => {
                self.conversation.reset();
                self.happened("the conversation begins anew");
            }
            Command::Retry => self.retry()?,
            Command::Undo if self.conversation.undo() => self.happened("the last message was taken back"),
            Command::Undo => self.out.tell("nothing was said that could be taken back"),
            Command::Edit => return self.edit(argument),
            Command::Save => {
                let (file, name) = (path(argument), self.model());
                self.conversation.save(&file, &name)?;
                let count = self.conversation.messages().len();
                self.out.tell(&format!("{count} messages written to {}", file.display()));
            }
            Command::Load => self.load(argument)?,
            Command::Model if argument.is_empty() => self.out.tell(&self.model()),
            Command::Model => self.switch(argument)?,
            Command::Stages => self.out.tell(&self.session.stages_text()),
            Command::Stats => self.stats(),
            Command::Trace => {
                let file = path(argument);
                self.session.write_trace(&file)?;
                self.out.tell(&format!("written to {0}; pp-run trace {0} draws it", file.display()));
            }
            Command::Set => self.set(argument)?,
            Command::Exit => return Ok(Next::Leave),
        }
        Ok(Next::Line)
    }

    fn system(&mut self, argument: &str) {
        match argument {
            "" => {
                let text = self.conversation.system().unwrap_or("there is none but what the model's template says");
                self.out.tell(text);
            }
            "\"\"" => {
                self.conversation.set_system(None);
                self.happened("the system message was removed");
            }
            text => {
                self.conversation.set_system(Some(text.to_owned()));
                self.happened(&format!("the system message is: {text}"));
            }
        }
    }

    fn retry(&mut self) -> Result<()> {
        if self.conversation.unanswered().is_some() {
            return self.answer();
        }
        if self.conversation.last_said().is_none() {
            self.out.tell("nothing was said that could be answered again");
            return Ok(());
        }
        let sampling = self.choices.sampling(&self.session.model().checkpoint.generation)?;
        if sampling.temperature == 0.0 {
            self.out.note(
                "the likeliest token is always taken, so the answer is the same; /set temperature=0.8 changes that",
            );
        } else {
            self.choices.reseed();
            self.out.aside(&format!("seed {}", self.choices.seed()));
        }
        self.conversation.forget_answer();
        self.write_down("answered again");
        self.answer()
    }

    fn edit(&mut self, argument: &str) -> Result<Next> {
        let last = self.conversation.last_said().unwrap_or_default().to_owned();
        if argument.is_empty() {
            return Ok(Next::Edited(last));
        }
        self.send(argument.to_owned(), true)?;
        Ok(Next::Line)
    }

    fn load(&mut self, argument: &str) -> Result<()> {
        let file = path(argument);
        let loaded = Conversation::load(&file)?;
        let unanswered = loaded.unanswered().map_or("", |_| "; the last has no answer: /retry answers it");
        self.conversation = loaded;
        let count = self.conversation.messages().len();
        self.happened(&format!("{count} messages read from {}{unanswered}", file.display()));
        Ok(())
    }

    fn switch(&mut self, name: &str) -> Result<()> {
        self.session.switch(name)?;
        self.last = None;
        self.happened(&format!("the model is {}", self.model()));
        Ok(())
    }

    fn stats(&self) {
        let mut text = self.last.as_ref().map_or("nothing was answered yet".to_owned(), TurnReport::lines);
        if let Some(single) = session::single_stream(self.session.stages().len()) {
            text.push_str(&format!("\npipe     {single}"));
        }
        self.out.tell(&text);
    }

    fn set(&mut self, argument: &str) -> Result<()> {
        let declared = &self.session.model().checkpoint.generation;
        if argument.is_empty() {
            self.out.tell(&self.choices.text(declared)?);
        } else {
            let set = self.choices.set(argument, declared)?;
            self.out.note(&set);
        }
        Ok(())
    }

    /// Something was done that is worth a word, here and in the transcript.
    fn happened(&mut self, what: &str) {
        self.out.note(what);
        self.write_down(what);
    }

    fn write_down(&mut self, what: &str) {
        let out = self.out;
        if let Some(transcript) = &mut self.transcript {
            transcript.note(what, &out);
        }
    }

    /// Says something to the model. `edited`: in place of the last message and its answer.
    fn send(&mut self, text: String, edited: bool) -> Result<()> {
        if edited && self.conversation.undo() {
            self.write_down("the last message was changed");
        }
        let out = self.out;
        if let Some(transcript) = &mut self.transcript {
            transcript.said("user", &text, &out);
        }
        if self.conversation.say(text) && !edited {
            self.out.note("in place of the message before, which has no answer");
        }
        self.answer()
    }

    /// Has the last message answered. Without an answer it stays as it is.
    fn answer(&mut self) -> Result<()> {
        let (prompt, dropped) = self.fit()?;
        let opens =
            self.session.model().prompts.beginning(self.conversation.messages(), &self.choices.template_args)?;
        // What the template itself begins an answer with is part of what was thought.
        let thought =
            opens.rfind(thoughts::OPEN).map(|at| &opens[at..]).filter(|tail| tail.trim_end() == thoughts::OPEN);
        let request = Request {
            prompt: prompt.clone(),
            max_tokens: self.choices.sampling.max_tokens,
            sampling: self.choices.sampling(&self.session.model().checkpoint.generation)?,
            stop: self.choices.sampling.stop.clone(),
            stop_at_eos: true,
            ..Request::default()
        };
        let asked = Asked {
            turn: self.turns + 1,
            prompt_ids: prompt,
            context: self.session.capacity()?,
            dropped_messages: dropped,
            seed: self.choices.seed(),
            open: thought.is_some(),
        };
        let answer = match self.ask(request.clone(), asked.open) {
            // A pipeline that failed while nobody asked is found out only now.
            Err(broken) if broken.untouched && self.session.is_down() && exit_of(&broken.error) != Exit::Cancelled => {
                self.out.note(&format!("{:#}; the pipeline is opened again", broken.error));
                self.ask(request, asked.open)
            }
            other => other,
        };
        let answer = answer.map_err(|broken| self.unanswered(broken.error))?;
        if answer.text.is_empty() && answer.finish_reason == FinishReason::Cancelled {
            self.happened("cancelled before anything was said: /retry answers the message");
            return Ok(());
        }
        self.turns += 1;
        let report = TurnReport::of(&answer, asked, self.session.recovered());
        let said = format!("{}{}", thought.unwrap_or_default(), answer.text);
        let out = self.out;
        if let Some(transcript) = &mut self.transcript {
            transcript.said("assistant", &said, &out);
        }
        self.conversation.answer(said);
        if self.out.json() {
            self.out.object(&report)?;
        }
        self.closing(&report);
        self.last = Some(report);
        Ok(())
    }

    /// What is said under an answer.
    fn closing(&self, report: &TurnReport) {
        self.out.aside(&report.line());
        if report.is_full() {
            self.out.note(&format!("the context of {} tokens is full: {}", report.context, self.way_out()));
        } else if report.finish_reason == FinishReason::Length.name() {
            let most = self.choices.sampling.max_tokens;
            self.out.note(&format!("cut off at {most} tokens; /set max_tokens={} allows more", 2 * most.max(1)));
        }
    }

    /// What can be done when the context is full.
    fn way_out(&self) -> &'static str {
        match self.choices.policy {
            ContextPolicy::Stop => {
                "/reset begins anew, /undo takes the last message back, /set context_policy=drop-oldest drops the oldest turns"
            }
            ContextPolicy::DropOldest => "the oldest turns are dropped with the next message",
        }
    }

    /// An error, with what becomes of the message that has no answer.
    fn unanswered(&mut self, error: anyhow::Error) -> anyhow::Error {
        self.write_down("no answer");
        if exit_of(&error) == Exit::Pipe {
            return error;
        }
        self.out.note("the message has no answer, and the conversation is kept: /retry asks again");
        error
    }

    /// The ids of the conversation, and the number of messages that were dropped so that it fits the context.
    fn fit(&mut self) -> Result<(Vec<u32>, usize)> {
        let capacity = self.session.capacity().map_err(|error| self.unanswered(error))?;
        let encode =
            |repl: &Repl| repl.session.model().prompts.chat(repl.conversation.messages(), &repl.choices.template_args);
        let mut ids = encode(self)?;
        let mut dropped = 0;
        if self.choices.policy == ContextPolicy::DropOldest {
            let room = self.choices.sampling.max_tokens.min(capacity / ROOM);
            // More than need be, so that the next turns find what they begin with in the cache.
            let most = if ids.len() + room > capacity { capacity / 2 } else { capacity };
            while ids.len() > most {
                let count = self.conversation.drop_oldest();
                if count == 0 {
                    break;
                }
                dropped += count;
                ids = encode(self)?;
            }
        }
        if dropped > 0 {
            self.happened(&format!("the context is full: the {dropped} oldest messages were dropped"));
        }
        if ids.len() > capacity {
            let refused = Refused::PromptTooLong { tokens: ids.len(), context: capacity };
            let what = format!(
                "the context is full: the conversation has {} tokens, the context holds {capacity}; {}",
                ids.len(),
                self.way_out()
            );
            return Err(self.unanswered(anyhow::Error::from(HeadError::from(refused)).context(what)));
        }
        Ok((ids, dropped))
    }

    /// Asks the pipeline, and shows what comes.
    fn ask(&mut self, request: Request, open: bool) -> Result<Answer, Broken> {
        let mut display = Display::new(self.out, self.choices.thoughts, open);
        let mut prefill = Steps::new(&self.out, "prompt", "tokens");
        let mut untouched = true;
        let answer = self.session.ask(request, &mut |event| match event {
            Event::Prefill { done, total, .. } => {
                prefill.update(done, total);
                if done == total {
                    prefill.finish();
                }
            }
            Event::Text { text, .. } => {
                untouched = false;
                if !display.push(&text) {
                    // Nobody reads: the rest need not be computed.
                    cancel::flag().store(true, Ordering::Relaxed);
                }
            }
            Event::Token { .. } | Event::Done { .. } => {}
        });
        prefill.finish();
        let shown = if untouched && answer.is_err() { Ok(()) } else { display.finish() };
        match (answer, shown) {
            (Err(error), _) => Err(Broken { error, untouched }),
            (Ok(_), Err(error)) => Err(Broken { error: error.into(), untouched: false }),
            (Ok(answer), Ok(())) => Ok(answer),
        }
    }
}
