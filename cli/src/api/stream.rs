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
use super::telling::Telling;

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

/// What somebody has of a stream: so many chunks of each answer. As the id of an event it is those numbers, with a dash
/// between them: in what order the answers' chunks come may differ, what the chunks of one answer are does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sent(Vec<usize>);

impl Sent {
    /// From the id of an event, of a stream of so many answers; nothing where it is none.
    pub fn parse(id: &str, answers: usize) -> Option<Sent> {
        let sent: Option<Vec<usize>> = id.split('-').map(|count| count.parse().ok()).collect();
        sent.filter(|sent| sent.len() == answers).map(Sent)
    }

    fn id(&self) -> String {
        let counts: Vec<String> = self.0.iter().map(usize::to_string).collect();
        counts.join("-")
    }
}

struct Stream<C> {
    asked: Asked,
    chunks: C,
    /// Tokens whose text is not certain, by index; none where they are not wanted.
    waiting: Vec<Waiting>,
    usage: Usage,
    choices: usize,
    include_usage: bool,
    /// To be sent, and of which answer it is.
    ready: VecDeque<(Option<usize>, String)>,
    /// What the client has already.
    before: Sent,
    /// What was sent, with that; told where the answers are kept.
    sent: Sent,
    is_kept: bool,
    is_over: bool,
}

/// The response that streams answers, without what was `sent` before.
pub fn respond<C: Chunks>(
    asked: Asked,
    chunks: C,
    telling: &Telling,
    sent: Sent,
    waiting: impl Fn() -> Waiting,
) -> Response {
    let answers = asked.answers();
    let ready = (0..answers).filter_map(|index| Some((Some(index), chunks.open(index)?))).collect();
    let stream = Stream {
        before: sent,
        sent: Sent(vec![0; answers]),
        is_kept: asked.is_kept(),
        waiting: if telling.has_logprobs { (0..answers).map(|_| waiting()).collect() } else { Vec::new() },
        usage: Usage::of_prompts(asked.prompt_tokens),
        choices: asked.choices(),
        include_usage: telling.include_usage,
        asked,
        chunks,
        ready,
        is_over: false,
    };
    let events = futures_util::stream::unfold(stream, |mut stream| async move {
        let event = stream.next().await?;
        Some((Ok::<_, Infallible>(event), stream))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(SIGN_OF_LIFE)).into_response()
}

impl<C: Chunks> Stream<C> {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some((answer, data)) = self.ready.pop_front() {
                if answer.is_some_and(|answer| !self.count(answer)) {
                    continue;
                }
                let event = Event::default().data(data);
                return Some(if self.is_kept { event.id(self.sent.id()) } else { event });
            }
            if self.is_over {
                return None;
            }
            match self.asked.next().await {
                Some(Happening::Token(index, token)) => self.token(index, token),
                Some(Happening::Text(index, text)) => {
                    let tokens = self.waiting.get_mut(index).map(|waiting| waiting.text(&text));
                    let chunks = self.chunks.text(index, text, tokens);
                    self.push(index, chunks);
                }
                Some(Happening::Done(index, answer)) => {
                    let rest = self.waiting.get_mut(index).map(|waiting| waiting.text("")).unwrap_or_default();
                    if !rest.is_empty() {
                        let chunks = self.chunks.text(index, String::new(), Some(rest));
                        self.push(index, chunks);
                    }
                    self.usage.add(&answer, index % self.choices == 0);
                    let chunks = self.chunks.end(index, &answer);
                    self.push(index, chunks);
                }
                Some(Happening::Paused(text)) => {
                    return Some(Event::default().comment(text.replace(['\r', '\n'], " ")));
                }
                Some(Happening::Failed(error)) => self.failed(&error),
                None => self.end(),
            }
        }
    }

    fn push(&mut self, answer: usize, chunks: Vec<String>) {
        self.ready.extend(chunks.into_iter().map(|chunk| (Some(answer), chunk)));
    }

    /// Counts a chunk of an answer; false where the client has it already.
    fn count(&mut self, answer: usize) -> bool {
        self.sent.0[answer] += 1;
        self.before.0.get(answer).is_none_or(|before| self.sent.0[answer] > *before)
    }

    fn token(&mut self, index: usize, token: Token) {
        if let Some(waiting) = self.waiting.get_mut(index) {
            waiting.token(token);
        }
    }

    fn failed(&mut self, error: &ApiError) {
        // The status was sent long ago; clients look for this.
        self.ready.push_back((None, json(&error.body)));
        self.is_over = true;
    }

    fn end(&mut self) {
        if self.include_usage {
            self.ready.push_back((None, self.chunks.usage(&self.usage)));
        }
        self.ready.push_back((None, "[DONE]".to_owned()));
        self.is_over = true;
    }
}

/// Plain data as JSON, on one line.
pub fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("plain data always has a JSON form")
}
