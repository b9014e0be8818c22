//! Answers as they come: server-sent events, as the official clients read them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use pp_engine::head::{Answer, Token};

use super::answers::{Asked, Happening, Usage};
use super::errors::ApiError;
use super::logprobs::{Placed, Waiting};

/// How often something is sent while no token comes: for whoever takes silence for death.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// What a stream of answers consists of: chunks, as JSON.
pub trait Chunks: Send + 'static {
    /// What opens the answer of an index, if anything does.
    fn open(&self, index: usize) -> Option<String>;
    /// More text, and the tokens that begin in it where log-probabilities are wanted.
    fn text(&mut self, index: usize, text: String, tokens: Option<Vec<Placed>>) -> Vec<String>;
    /// The end of an answer.
    fn end(&mut self, index: usize, answer: &Answer) -> Vec<String>;
    /// What follows the last answer, where it was asked for.
    fn usage(&self, usage: &Usage) -> String;
}

/// How answers are to be streamed.
pub struct Options {
    /// Whether tokens go with their text.
    pub logprobs: bool,
    /// Whether the usage is told at the end.
    pub include_usage: bool,
}

/// What goes to the client.
enum Said {
    Data(String),
    /// Clients pass over it; people who look see why nothing comes.
    Comment(String),
}

struct Stream<C> {
    asked: Asked,
    chunks: C,
    /// Tokens whose text is not certain, by index; none where they are not wanted.
    waiting: Vec<Waiting>,
    usage: Usage,
    choices: usize,
    include_usage: bool,
    /// To be sent.
    ready: VecDeque<String>,
    is_over: bool,
}

/// The response that streams answers: `answers` of them, `choices` for each prompt.
pub fn respond<C: Chunks>(asked: Asked, chunks: C, options: &Options, waiting: impl Fn() -> Waiting) -> Response {
    let answers = asked.answers();
    let ready = (0..answers).filter_map(|index| chunks.open(index)).collect();
    let stream = Stream {
        waiting: if options.logprobs { (0..answers).map(|_| waiting()).collect() } else { Vec::new() },
        usage: Usage::of_prompts(asked.prompt_tokens),
        choices: asked.choices(),
        include_usage: options.include_usage,
        asked,
        chunks,
        ready,
        is_over: false,
    };
    let events = futures_util::stream::unfold(stream, |mut stream| async move {
        let event = match stream.next().await? {
            Said::Data(data) => Event::default().data(data),
            Said::Comment(text) => Event::default().comment(text.replace(['\r', '\n'], " ")),
        };
        Some((Ok::<_, Infallible>(event), stream))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)).into_response()
}

impl<C: Chunks> Stream<C> {
    async fn next(&mut self) -> Option<Said> {
        loop {
            if let Some(data) = self.ready.pop_front() {
                return Some(Said::Data(data));
            }
            if self.is_over {
                return None;
            }
            match self.asked.next().await {
                Some(Happening::Token(index, token)) => self.token(index, token),
                Some(Happening::Text(index, text)) => {
                    let tokens = self.waiting.get_mut(index).map(|waiting| waiting.text(&text));
                    self.ready.extend(self.chunks.text(index, text, tokens));
                }
                Some(Happening::Done(index, answer)) => {
                    let rest = self.waiting.get_mut(index).map(|waiting| waiting.text("")).unwrap_or_default();
                    if !rest.is_empty() {
                        self.ready.extend(self.chunks.text(index, String::new(), Some(rest)));
                    }
                    self.usage.add(&answer, index % self.choices == 0);
                    self.ready.extend(self.chunks.end(index, &answer));
                }
                Some(Happening::Paused(text)) => return Some(Said::Comment(text)),
                Some(Happening::Failed(error)) => self.failed(&error),
                None => self.end(),
            }
        }
    }

    fn token(&mut self, index: usize, token: Token) {
        if let Some(waiting) = self.waiting.get_mut(index) {
            waiting.token(token);
        }
    }

    fn failed(&mut self, error: &ApiError) {
        // The status was sent long ago; clients look for this.
        self.ready.push_back(json(&error.body));
        self.is_over = true;
    }

    fn end(&mut self) {
        if self.include_usage {
            self.ready.push_back(self.chunks.usage(&self.usage));
        }
        self.ready.push_back("[DONE]".to_owned());
        self.is_over = true;
    }
}

/// Plain data as JSON, on one line.
pub fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("plain data always has a JSON form")
}
