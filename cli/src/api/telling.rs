//! What a body of either API comes to: what the engine is asked, and how the answers are told. Whoever asks again for
//! answers that are kept hears them as they were asked for.

use axum::Json;
use axum::response::{IntoResponse, Response};
use pp_engine::head::Request;
use serde::{Deserialize, Serialize};

use super::Shared;
use super::answers::{Asked, Usage};
use super::calls::Calling;
use super::chat::{self, ChatChunks};
use super::completions::{self, CompletionChunks};
use super::errors::ApiError;
use super::logprobs::Waiting;
use super::stream::{self, Sent};
use crate::prompts::Form;
use crate::requests::tools::CallIds;

/// Where answers are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
}

impl Endpoint {
    /// The field that the prompt is in.
    pub fn prompt(self) -> &'static str {
        match self {
            Endpoint::Chat => "messages",
            Endpoint::Completions => "prompt",
        }
    }

    /// Its body once more, with what was certain of it the first time.
    ///
    /// # Errors
    /// When it is not taken any more.
    pub async fn again(self, state: &Shared, name: &str, body: &str, prior: Prior) -> Result<Prepared, ApiError> {
        match self {
            Endpoint::Chat => chat::prepare(state, name, super::body::parse(body.as_bytes())?, Some(prior)).await,
            Endpoint::Completions => {
                completions::prepare(state, name, super::body::parse(body.as_bytes())?, Some(prior)).await
            }
        }
    }
}

/// What does not follow from a body: what was drawn for it, and what a template made of it then.
#[derive(Clone, Debug)]
pub struct Prior {
    pub id: String,
    pub created: u64,
    pub seed: u64,
    pub prompts: Vec<Vec<u32>>,
}

/// What a body comes to.
pub struct Prepared {
    /// One for each prompt; they want equally many answers.
    pub requests: Vec<Request>,
    pub telling: Telling,
}

/// How answers are told, to whoever asks for them.
#[derive(Clone, Debug)]
pub struct Telling {
    pub endpoint: Endpoint,
    /// What the answers are called.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub is_streamed: bool,
    pub include_usage: bool,
    pub has_logprobs: bool,
    /// What answers look like.
    pub form: Form,
}

impl Telling {
    /// As it was asked for.
    ///
    /// # Errors
    /// When there is no whole answer.
    pub async fn respond(&self, state: &Shared, asked: Asked) -> Result<Response, ApiError> {
        match self.is_streamed {
            true => Ok(self.stream(state, asked, Sent::default())),
            false => self.whole(state, asked).await,
        }
    }

    /// All at once.
    ///
    /// # Errors
    /// When the pipeline fails, or the server stops.
    pub async fn whole(&self, state: &Shared, asked: Asked) -> Result<Response, ApiError> {
        let mut usage = Usage::of_prompts(asked.prompt_tokens);
        let choices = asked.choices();
        let answers = asked.all().await?;
        answers.iter().enumerate().for_each(|(index, answer)| usage.add(answer, index % choices == 0));
        Ok(match self.endpoint {
            Endpoint::Chat => Json(self.chat(state, 0).whole(answers, usage)).into_response(),
            Endpoint::Completions => Json(self.completions(state).whole(answers, usage)).into_response(),
        })
    }

    /// As they come, without what was `sent` before.
    pub fn stream(&self, state: &Shared, asked: Asked, sent: Sent) -> Response {
        let shown = self.form.shown_specials.clone();
        let waiting = || Waiting::new(state.prompts.tokenizer().clone(), &shown);
        match self.endpoint {
            Endpoint::Chat => {
                let chunks = self.chat(state, asked.answers());
                stream::respond(asked, chunks, self, sent, waiting)
            }
            Endpoint::Completions => stream::respond(asked, self.completions(state), self, sent, waiting),
        }
    }

    fn chat(&self, state: &Shared, streamed: usize) -> ChatChunks {
        let calling = |index| self.form.tools.map(|format| Calling::new(format, CallIds::new(&self.id, index)));
        ChatChunks { telling: self.clone(), state: state.clone(), calling: (0..streamed).filter_map(calling).collect() }
    }

    fn completions(&self, state: &Shared) -> CompletionChunks {
        CompletionChunks { telling: self.clone(), state: state.clone() }
    }
}
