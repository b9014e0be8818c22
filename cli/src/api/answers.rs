//! From a request of either API to the answers of the service: asked at once, heard in any order, cancelled when nobody
//! waits any more.

use std::collections::VecDeque;

use pp_engine::head::service::{Notice, ServiceError, Ticket};
use pp_engine::head::{Answer, Event, FinishReason, Request, Token};
use serde::Serialize;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use utoipa::ToSchema;

use super::Shared;
use super::errors::ApiError;
use super::kept::Attached;
use super::metrics::Outcome;
use crate::requests::Stop;
use crate::requests::choosing::{Choosing, Invalid};

/// Texts that may end an answer, at most; and characters of each.
pub const STOPS_MAX: usize = 16;
pub const STOP_CHARACTERS_MAX: usize = 1024;

/// Tokens of an answer that may be asked for, as the document says.
const TOKENS_MAX: usize = i32::MAX as usize;

/// What happens to the answer of an index.
pub enum Happening {
    /// Another token; its text may follow later.
    Token(usize, Token),
    /// More text.
    Text(usize, String),
    /// It is complete.
    Done(usize, Answer),
    /// It waits for another pipeline, or goes on with one: what there is to say of it.
    Paused(String),
    /// Nothing more comes.
    Failed(ApiError),
}

/// What both APIs say of the answers wanted.
pub struct Wanted<'a> {
    pub choosing: Choosing<'a>,
    pub n: Option<u32>,
    /// The field's name, and tokens of an answer.
    pub max_tokens: (&'static str, Option<usize>),
    /// Where it says nothing; else as many as the context holds.
    pub max_tokens_default: Option<usize>,
    pub stop: Option<&'a Stop>,
}

impl Wanted<'_> {
    /// The request for a prompt that is still to be made.
    ///
    /// # Errors
    /// Names the field that is out of range.
    pub fn request(&self, state: &Shared) -> Result<Request, ApiError> {
        let sampling = self.choosing.sampling(&state.settings.sampling, state.model.vocab)?;
        let sampling =
            pp_engine::sampler::Sampling { seed: self.choosing.seed.unwrap_or_else(super::random), ..sampling };
        let (field, max_tokens) = self.max_tokens;
        let is_in_range = max_tokens.is_none_or(|tokens| (1..=TOKENS_MAX).contains(&tokens));
        Invalid::unless(is_in_range, field, "1 to 2147483647")?;
        Invalid::unless(self.n != Some(0), "n", "at least 1")?;
        let stop = self.stop.map_or(Vec::new(), Stop::texts);
        Invalid::unless(stop.len() <= STOPS_MAX, "stop", "at most 16 texts")?;
        let is_stop = |text: &String| (1..=STOP_CHARACTERS_MAX).contains(&text.chars().count());
        Invalid::unless(stop.iter().all(is_stop), "stop", "texts of 1 to 1024 characters")?;
        let most = state.settings.max_tokens.unwrap_or(usize::MAX);
        Ok(Request {
            prompt: Vec::new(),
            choices: self.n.unwrap_or(1),
            max_tokens: max_tokens.or(self.max_tokens_default).unwrap_or(usize::MAX).min(most),
            sampling,
            stop,
            stop_at_eos: true,
            deadline: None,
            ..Request::default()
        })
    }
}

/// What is heard of a prompt's answers; an error is the last.
pub type Heard = (usize, Result<Notice, ApiError>);

/// Answers that are waited for. Dropping it cancels what is not complete, unless it is kept.
pub struct Asked {
    state: Shared,
    notices: UnboundedReceiver<Heard>,
    heard: VecDeque<Heard>,
    tickets: Vec<Ticket>,
    /// Where the answers are kept: what is counted, and who cancels, is told there.
    attached: Option<Attached>,
    /// Answers of each prompt.
    choices: usize,
    left: usize,
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// The field that says what answers must look like.
    pub formed_by: String,
}

impl Asked {
    /// Asks for the answers of one or more prompts, which want equally many; waits until all are taken. `name` is what
    /// logs call the request.
    ///
    /// # Errors
    /// When one of them is refused; the others are cancelled then.
    pub async fn ask(state: &Shared, requests: Vec<Request>, name: &str) -> Result<Asked, ApiError> {
        let choices = requests.first().map_or(1, |request| request.choices.max(1)) as usize;
        let (sender, notices) = unbounded_channel();
        let count = requests.len();
        let prompt_tokens = requests.iter().map(|request| request.prompt.len()).sum();
        let ask = |(prompt, request)| {
            // Bounded by what the request may come to: see `head::service`.
            let sender = sender.clone();
            state.service.submit(request, move |notice| {
                // Whoever asked may be gone.
                let _ = sender.send((prompt, Ok(notice)));
            })
        };
        let tickets = requests.into_iter().enumerate().map(ask).collect();
        drop(sender);
        let mut asked = Asked::hearing(state, notices, (count, choices, prompt_tokens));
        asked.tickets = tickets;
        asked.taken(count, name).await
    }

    /// Answers that are kept, told from their beginnings on.
    pub fn attached(state: &Shared, notices: UnboundedReceiver<Heard>, attached: Attached) -> Asked {
        let mut asked = Asked::hearing(state, notices, attached.counts());
        asked.attached = Some(attached);
        asked
    }

    /// Of so many prompts, with so many answers each, and of so many tokens.
    fn hearing(
        state: &Shared,
        notices: UnboundedReceiver<Heard>,
        (prompts, choices, prompt_tokens): (usize, usize, usize),
    ) -> Asked {
        Asked {
            state: state.clone(),
            notices,
            heard: VecDeque::new(),
            tickets: Vec::new(),
            attached: None,
            choices,
            left: prompts * choices,
            prompt_tokens,
            formed_by: String::new(),
        }
    }

    /// Once the service has taken all `prompts`.
    ///
    /// # Errors
    /// When one of them is refused.
    pub async fn taken(mut self, prompts: usize, name: &str) -> Result<Asked, ApiError> {
        let prompt_tokens = self.prompt_tokens;
        let mut taken = 0;
        while taken < prompts {
            match self.notices.recv().await {
                Some((_, Ok(Notice::Taken(request)))) => {
                    tracing::info!(id = name, request = request.0, prompt_tokens, "taken");
                    taken += 1;
                }
                Some((_, Ok(Notice::Refused(error)))) => {
                    // It was never asked, as far as anybody counts.
                    self.left = 0;
                    return Err(error.into());
                }
                Some((_, Err(error))) => return Err(error),
                Some(other) => self.heard.push_back(other),
                None => return Err(ApiError::stopping()),
            }
        }
        Ok(self)
    }

    /// Whether whoever loses it may ask again.
    pub fn is_kept(&self) -> bool {
        self.attached.is_some()
    }

    /// Answers that are not complete.
    pub fn answers(&self) -> usize {
        self.left
    }

    /// Answers of each prompt.
    pub fn choices(&self) -> usize {
        self.choices
    }

    /// What happens next; nothing once all answers are complete.
    pub async fn next(&mut self) -> Option<Happening> {
        while self.left > 0 {
            let next = match self.heard.pop_front() {
                Some(next) => Some(next),
                None => self.notices.recv().await,
            };
            let happening = match next {
                Some((prompt, Ok(Notice::Event(event)))) => self.event(prompt, event),
                Some((_, Ok(Notice::Failed(failure)))) => {
                    self.end(Outcome::Failed);
                    Some(Happening::Failed(ServiceError::from(failure).into()))
                }
                Some((_, Ok(Notice::Refused(error)))) => {
                    self.end(Outcome::Failed);
                    Some(Happening::Failed(error.into()))
                }
                Some((_, Ok(Notice::Paused(failure)))) => Some(Happening::Paused(failure.to_string())),
                Some((_, Ok(Notice::Resumed(text)))) => Some(Happening::Paused(text)),
                Some((_, Ok(Notice::Taken(_)))) => None,
                Some((_, Err(error))) => {
                    self.end(Outcome::Failed);
                    Some(Happening::Failed(error))
                }
                None => {
                    self.end(Outcome::Cancelled);
                    Some(Happening::Failed(ApiError::stopping()))
                }
            };
            if happening.is_some() {
                return happening;
            }
        }
        None
    }

    fn event(&mut self, prompt: usize, event: Event) -> Option<Happening> {
        let at = |index: u32| prompt * self.choices + index as usize;
        match event {
            Event::Prefill { .. } => None,
            Event::Token { choice, token } => Some(Happening::Token(at(choice.index), token)),
            Event::Text { choice, text } => Some(Happening::Text(at(choice.index), text)),
            Event::Done { answer: Answer { finish_reason: FinishReason::Cancelled, .. }, .. } => {
                self.end(Outcome::Cancelled);
                Some(Happening::Failed(ApiError::stopping()))
            }
            Event::Done { answer: Answer { finish_reason: FinishReason::Constraint, .. }, .. } => {
                self.end(Outcome::Failed);
                Some(Happening::Failed(ApiError::too_complex(&self.formed_by)))
            }
            Event::Done { choice, answer } => {
                let index = at(choice.index);
                self.left -= 1;
                if self.attached.is_none() {
                    self.state.metrics.answered(&answer);
                }
                Some(Happening::Done(index, answer))
            }
        }
    }

    /// All answers, in order of their index.
    ///
    /// # Errors
    /// When the pipeline fails, or the server stops.
    pub async fn all(mut self) -> Result<Vec<Answer>, ApiError> {
        let mut answers: Vec<Option<Answer>> = vec![None; self.left];
        while let Some(happening) = self.next().await {
            match happening {
                Happening::Done(index, answer) => answers[index] = Some(answer),
                Happening::Failed(error) => return Err(error),
                Happening::Token(..) | Happening::Text(..) | Happening::Paused(_) => {}
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// What is left ends without an answer.
    fn end(&mut self, outcome: Outcome) {
        let left = std::mem::take(&mut self.left) as u64;
        if self.attached.is_none() {
            self.state.metrics.ended(outcome, left);
        }
        self.tickets.clear();
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.end(Outcome::Cancelled);
    }
}

/// Tokens that a request took.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct Usage {
    /// Of the prompts.
    pub prompt_tokens: usize,
    /// Of all answers, end-of-sequence tokens included.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokens,
}

/// Of the prompts' tokens.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub struct PromptTokens {
    /// Those that the prefix cache had.
    pub cached_tokens: usize,
}

impl Usage {
    /// Of prompts that are not answered yet.
    pub fn of_prompts(prompt_tokens: usize) -> Usage {
        Usage { prompt_tokens, total_tokens: prompt_tokens, ..Usage::default() }
    }

    /// Adds an answer; `is_first` of its prompt.
    pub fn add(&mut self, answer: &Answer, is_first: bool) {
        self.completion_tokens += answer.tokens.len();
        self.total_tokens += answer.tokens.len();
        if is_first {
            self.prompt_tokens_details.cached_tokens += answer.cached_tokens;
        }
    }
}
