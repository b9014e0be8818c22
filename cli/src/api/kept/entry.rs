//! One request that is kept: what was heard of it, and who listens.

use std::sync::{Arc, Mutex, MutexGuard};

use pp_engine::head::service::{Notice, Ticket};
use pp_engine::head::{Event, FinishReason};
use pp_engine::journal::{Found, Journal, Number};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::Kept;
use crate::api::answers::Heard;
use crate::api::errors::ApiError;
use crate::api::metrics::{Metrics, Outcome};
use crate::api::telling::{Prepared, Telling};

/// A request that is kept.
pub struct Entry {
    /// What it is asked for by.
    pub name: String,
    pub(super) number: Number,
    /// Answers of each prompt.
    choices: usize,
    prompts: usize,
    prompt_tokens: usize,
    /// Whether it goes on when nobody listens.
    outlives: bool,
    /// Why there are no answers, where it could not be asked again.
    telling: Result<Telling, ApiError>,
    story: Mutex<Story>,
}

/// What became of it so far.
struct Story {
    heard: Vec<Heard>,
    bytes: usize,
    listeners: Vec<UnboundedSender<Heard>>,
    attached: usize,
    /// It is cancelled when they are dropped.
    tickets: Vec<Ticket>,
    /// Tokens of each answer: those that were heard, and those of them that the journal had before.
    tokens: Vec<usize>,
    journaled: Vec<usize>,
    /// Answers that are not complete.
    left: usize,
    is_over: bool,
}

/// How it ended.
pub(super) enum Over {
    /// All answers are there, or as much of them as there will ever be.
    Complete,
    Failed,
    /// It was never taken.
    Refused,
    /// The server stops.
    Interrupted,
}

impl Entry {
    /// Of something new.
    pub(super) fn new(
        name: &str,
        number: Number,
        (prompts, choices): (usize, usize),
        prepared: &Prepared,
        outlives: bool,
    ) -> Entry {
        Entry {
            name: name.to_owned(),
            number,
            choices,
            prompts,
            prompt_tokens: prepared.requests.iter().map(|request| request.prompt.len()).sum(),
            outlives,
            telling: Ok(prepared.telling.clone()),
            story: Mutex::new(Story::new(vec![0; prompts * choices])),
        }
    }

    /// Of what a journal had, which goes on whoever listens: its client may come back at any time.
    pub(super) fn found(number: Number, found: &Found, telling: Result<Telling, ApiError>) -> Entry {
        let asked = &found.asked;
        let (prompts, choices) = (asked.prompts.len(), asked.choices as usize);
        let tokens = |answer: usize| found.tokens.get(&(answer as u32)).map_or(0, Vec::len);
        Entry {
            name: asked.name.clone(),
            number,
            choices,
            prompts,
            prompt_tokens: asked.prompts.iter().map(Vec::len).sum(),
            outlives: true,
            telling,
            story: Mutex::new(Story::new((0..prompts * choices).map(tokens).collect())),
        }
    }

    fn story(&self) -> MutexGuard<'_, Story> {
        self.story.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// How its answers are told.
    ///
    /// # Errors
    /// Why there are none.
    pub fn telling(&self) -> Result<&Telling, ApiError> {
        self.telling.as_ref().map_err(ApiError::clone)
    }

    /// The field that says what answers must look like.
    pub(super) fn formed_by(&self) -> String {
        self.telling.as_ref().map_or(String::new(), |telling| telling.form.param().to_owned())
    }

    /// Bytes that it takes, about.
    pub(super) fn bytes(&self) -> usize {
        self.story().bytes
    }

    /// Tokens of all answers so far.
    pub fn tokens(&self) -> usize {
        self.story().tokens.iter().sum()
    }

    /// Keeps what cancels it.
    pub(super) fn holds(&self, ticket: Ticket) {
        let mut story = self.story();
        if !story.is_over {
            story.tickets.push(ticket);
        }
    }

    /// Something has become of it. Says how it ended, once.
    pub(super) fn hear(&self, prompt: usize, notice: Notice, journal: &Journal, metrics: &Metrics) -> Option<Over> {
        let mut story = self.story();
        if story.is_over || matches!(notice, Notice::Event(Event::Prefill { .. })) {
            return None;
        }
        let mut over = None;
        match &notice {
            Notice::Event(Event::Token { choice, token }) => {
                let answer = prompt * self.choices + choice.index as usize;
                let at = story.tokens[answer];
                story.tokens[answer] += 1;
                if at >= story.journaled[answer] {
                    journal.tokens(self.number, answer as u32, at, std::slice::from_ref(token));
                }
            }
            Notice::Event(Event::Done { answer, .. }) => {
                over = match answer.finish_reason {
                    FinishReason::Cancelled => Some((Over::Interrupted, Outcome::Cancelled)),
                    FinishReason::Constraint => Some((Over::Complete, Outcome::Failed)),
                    _ => {
                        metrics.answered(answer);
                        story.left -= 1;
                        (story.left == 0).then_some((Over::Complete, Outcome::Stop))
                    }
                };
            }
            Notice::Failed(_) => over = Some((Over::Failed, Outcome::Failed)),
            Notice::Refused(_) => {
                story.left = 0;
                over = Some((Over::Refused, Outcome::Failed));
            }
            // Of the moment: nobody wants to know later.
            Notice::Paused(_) | Notice::Resumed(_) => {
                story.pass_on(&(prompt, Ok(notice)));
                return None;
            }
            Notice::Taken(_) | Notice::Event(_) => {}
        }
        story.tell((prompt, Ok(notice)));
        over.map(|(over, outcome)| {
            metrics.ended(outcome, story.left as u64);
            story.end();
            over
        })
    }

    /// Ends it with an error, unless it has ended; the answers that were to come.
    pub(super) fn end(&self, error: ApiError) -> u64 {
        let mut story = self.story();
        if story.is_over {
            return 0;
        }
        story.tell((0, Err(error)));
        let left = story.left as u64;
        story.end();
        left
    }

    /// All that was heard and will be.
    pub(super) fn attach(
        self: &Arc<Entry>,
        kept: &Arc<Kept>,
    ) -> Result<(UnboundedReceiver<Heard>, Attached), ApiError> {
        self.telling()?;
        // Bounded by what the request may come to: see `head::service`.
        let (sender, notices) = unbounded_channel();
        let mut story = self.story();
        for heard in &story.heard {
            // The other end is here.
            let _ = sender.send(heard.clone());
        }
        if !story.is_over {
            story.listeners.push(sender);
        }
        story.attached += 1;
        drop(story);
        Ok((notices, Attached { kept: kept.clone(), entry: self.clone() }))
    }
}

impl Story {
    /// Of answers of which the journal has so many tokens.
    fn new(journaled: Vec<usize>) -> Story {
        Story {
            heard: Vec::new(),
            bytes: 0,
            listeners: Vec::new(),
            attached: 0,
            tickets: Vec::new(),
            tokens: vec![0; journaled.len()],
            left: journaled.len(),
            journaled,
            is_over: false,
        }
    }

    fn tell(&mut self, heard: Heard) {
        self.pass_on(&heard);
        self.bytes += std::mem::size_of::<Heard>() + extra(&heard);
        self.heard.push(heard);
    }

    fn pass_on(&mut self, heard: &Heard) {
        self.listeners.retain(|listener| listener.send(heard.clone()).is_ok());
    }

    fn end(&mut self) {
        self.is_over = true;
        self.listeners.clear();
        self.tickets.clear();
    }
}

/// What a notice has elsewhere in memory, in bytes.
fn extra((_, heard): &Heard) -> usize {
    match heard {
        Ok(Notice::Event(Event::Text { text, .. })) => text.len(),
        Ok(Notice::Event(Event::Token { token, .. })) => 8 * token.candidates.len(),
        Ok(Notice::Event(Event::Done { answer, .. })) => {
            let tokens = answer.tokens.iter().map(|token| std::mem::size_of_val(token) + 8 * token.candidates.len());
            answer.text.len() + tokens.sum::<usize>()
        }
        _ => 0,
    }
}

/// Somebody who listens. When the last one goes, a request that does not outlive them is cancelled.
pub struct Attached {
    kept: Arc<Kept>,
    entry: Arc<Entry>,
}

impl Attached {
    /// Prompts, answers of each, and tokens of the prompts.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.entry.prompts, self.entry.choices, self.entry.prompt_tokens)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut story = self.entry.story();
        story.attached -= 1;
        let is_left = story.attached == 0 && !story.is_over && !self.entry.outlives;
        drop(story);
        if is_left {
            self.kept.cancel(&self.entry);
        }
    }
}
