//! `/v1/completions`: texts to be continued, without a chat template.

use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::Response;
use pp_engine::head::{Answer, Request};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::answers::{Usage, Wanted};
use super::body::JsonBody;
use super::chat::StreamOptions;
use super::errors::{ApiError, ErrorBody};
use super::logprobs::{CompletionLogprobs, Placed, Waiting};
use super::stream::{Chunks, json};
use super::telling::{Endpoint, Prepared, Prior, Telling};
use super::{Name, Shared, kept, schemas};
use crate::prompts::Form;
use crate::requests::Stop;
use crate::requests::choosing::{Choosing, Invalid};

/// Tokens of an answer where the request does not say, as in OpenAI's API.
const MAX_TOKENS: usize = 16;
/// Prompts of a request at most.
pub const PROMPTS_MAX: usize = 128;
/// Candidates of a token with their log-probabilities, at most.
const LOGPROBS_MAX: u32 = 20;

/// What is asked. Fields that OpenAI's API does not have are marked so.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CompletionRequest {
    /// The model; the one that is served unless said otherwise.
    pub model: Option<String>,
    /// What is to be continued.
    #[schema(schema_with = schemas::prompt)]
    pub prompt: Prompt,
    /// Tokens of an answer at most; 16 unless said otherwise.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub max_tokens: Option<u32>,
    /// Randomness: 0 always takes the likeliest token.
    #[schema(minimum = 0, maximum = 100)]
    pub temperature: Option<f32>,
    /// Choose among the likeliest tokens that together reach this probability.
    #[schema(minimum = 1e-6, maximum = 1)]
    pub top_p: Option<f32>,
    /// Ours: choose among so many of the likeliest tokens; 0 is all.
    pub top_k: Option<u32>,
    /// Ours: drop tokens less likely than so many times the likeliest.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// Subtracted once from the logits of tokens already answered.
    #[schema(minimum = -100, maximum = 100)]
    pub presence_penalty: Option<f32>,
    /// Subtracted from the logits of tokens already answered, for each time.
    #[schema(minimum = -100, maximum = 100)]
    pub frequency_penalty: Option<f32>,
    /// Ours: divides the logits of tokens already seen.
    #[schema(minimum = 1e-6, maximum = 100)]
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of tokens, by id.
    #[schema(schema_with = schemas::logit_bias)]
    pub logit_bias: Option<Map<String, Value>>,
    /// Start of the random numbers: the same seed gives the same answer.
    pub seed: Option<i64>,
    /// Answers wanted for each prompt.
    #[schema(minimum = 1)]
    pub n: Option<u32>,
    /// Texts that end an answer, at most 16.
    #[schema(schema_with = schemas::stop)]
    pub stop: Option<Stop>,
    /// Whether the answer is sent as it comes, in server-sent events.
    pub stream: Option<bool>,
    /// How it is streamed.
    pub stream_options: Option<StreamOptions>,
    /// Tokens are told with their log-probabilities, and with so many of the likeliest in each place.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<u32>,
    /// Only as `n`.
    #[schema(minimum = 1)]
    pub best_of: Option<u32>,
    /// Only false.
    #[schema(schema_with = schemas::only_false)]
    pub echo: Option<bool>,
    /// Not supported.
    #[schema(max_length = 0)]
    pub suffix: Option<String>,
    /// Taken and not used.
    #[expect(dead_code, reason = "taken and not used")]
    pub user: Option<Value>,
}

/// `prompt`
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids, or an array of such arrays"
)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several lists of token ids.
    Lists(Vec<Vec<u32>>),
}

impl Prompt {
    fn len(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Ids(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::Lists(lists) => lists.len(),
        }
    }

    /// The ids of each prompt.
    fn encode(self, state: &Shared) -> anyhow::Result<Vec<Vec<u32>>> {
        match self {
            Prompt::Text(text) => Ok(vec![state.prompts.raw(&text)?]),
            Prompt::Ids(ids) => Ok(vec![ids]),
            Prompt::Texts(texts) => texts.iter().map(|text| state.prompts.raw(text)).collect(),
            Prompt::Lists(lists) => Ok(lists),
        }
    }
}

impl CompletionRequest {
    fn check_unsupported(&self) -> Result<(), ApiError> {
        if self.echo == Some(true) {
            return Err(ApiError::unsupported("echo", "echo is not supported: the prompt is known to whoever asks"));
        }
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "suffix is not supported"));
        }
        if self.best_of.is_some_and(|best_of| best_of != self.n.unwrap_or(1)) {
            return Err(ApiError::unsupported("best_of", "best_of is supported only where it is n"));
        }
        Ok(())
    }

    fn wanted(&self) -> Result<Wanted<'_>, ApiError> {
        let candidates = self.logprobs.unwrap_or(0);
        Invalid::unless(candidates <= LOGPROBS_MAX, "logprobs", "0 to 20")?;
        Ok(Wanted {
            choosing: Choosing {
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                min_p: self.min_p,
                presence_penalty: self.presence_penalty,
                frequency_penalty: self.frequency_penalty,
                repetition_penalty: self.repetition_penalty,
                logit_bias: self.logit_bias.as_ref(),
                seed: self.seed.map(|seed| seed as u64),
                candidates,
            },
            n: self.n,
            max_tokens: ("max_tokens", self.max_tokens.map(|most| most as usize)),
            max_tokens_default: Some(MAX_TOKENS),
            stop: self.stop.as_ref(),
        })
    }
}

/// Answers, or a piece of them.
#[derive(Debug, Serialize, ToSchema)]
pub struct Completion<'a> {
    pub id: &'a str,
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'static str,
    pub choices: Vec<CompletionChoice>,
    /// Streamed, with `include_usage`: null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
}

/// One of the answers, or a piece of one.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// Answers of the first prompt come first.
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: Option<&'static str>,
}

/// Continues texts.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    params(kept::OnDisconnect),
    request_body = CompletionRequest,
    security(("key" = [])),
    responses(
        (status = 200, description = "The answers; with `stream` server-sent events, each a chunk", content(
            (Completion = "application/json"),
            (Completion = "text/event-stream"),
        )),
        (status = 400, description = "A field is wrong: `param` names it", body = ErrorBody),
        (status = 401, description = "No key, or a wrong one", body = ErrorBody),
        (status = 404, description = "Another model", body = ErrorBody),
        (status = 408, description = "The body did not come", body = ErrorBody),
        (status = 409, description = "With a journal: a request of this x-request-id is kept", body = ErrorBody),
        (status = 413, description = "The body is too large", body = ErrorBody),
        (status = 415, description = "The body is no JSON by its Content-Type, or is compressed", body = ErrorBody),
        (status = 429, description = "The queue, or the journal, is full: see Retry-After", body = ErrorBody),
        (status = 503, description = "The pipeline is down, or the server is stopping", body = ErrorBody),
    )
)]
pub async fn completions(
    State(state): State<Shared>,
    Extension(Name(name)): Extension<Name>,
    headers: HeaderMap,
    JsonBody { value, text }: JsonBody<CompletionRequest>,
) -> Result<Response, ApiError> {
    state.model.check(value.model.as_deref())?;
    let prepared = prepare(&state, &name, value, None).await?;
    kept::answer(&state, prepared, &name, text, &headers).await
}

/// What a body comes to; with `prior` once more.
pub async fn prepare(
    state: &Shared,
    name: &str,
    request: CompletionRequest,
    prior: Option<Prior>,
) -> Result<Prepared, ApiError> {
    request.check_unsupported()?;
    let is_streamed = request.stream == Some(true);
    Invalid::unless(is_streamed || request.stream_options.is_none(), "stream_options", "stream to be true with it")?;
    let mut wanted = request.wanted()?.request(state)?;
    let prompt = request.prompt;
    Invalid::unless((1..=PROMPTS_MAX).contains(&prompt.len()), "prompt", "1 to 128 prompts")?;
    let (id, created, prompts) = match prior {
        Some(Prior { id, created, seed, prompts }) => {
            wanted.sampling.seed = seed;
            (id, created, prompts)
        }
        None => {
            let prompts = state.encode_all("prompt", name, move |state| prompt.encode(state)).await?;
            (super::answer_id("cmpl"), super::now(), prompts)
        }
    };
    let telling = Telling {
        endpoint: Endpoint::Completions,
        id,
        created,
        is_streamed,
        include_usage: request.stream_options.and_then(|options| options.include_usage) == Some(true),
        has_logprobs: request.logprobs.is_some(),
        form: Form::default(),
    };
    let requests = prompts.into_iter().map(|prompt| Request { prompt, ..wanted.clone() }).collect();
    Ok(Prepared { requests, telling })
}

/// Texts that go on, in pieces or whole.
pub struct CompletionChunks {
    pub telling: Telling,
    pub state: Shared,
}

impl CompletionChunks {
    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Completion<'_> {
        Completion {
            id: &self.telling.id,
            object: "text_completion",
            created: self.telling.created,
            model: &self.state.model.id,
            system_fingerprint: super::FINGERPRINT,
            choices,
            usage,
        }
    }

    fn logprobs(&self, tokens: Option<&[Placed]>) -> Option<CompletionLogprobs> {
        tokens.map(|tokens| CompletionLogprobs::new(self.state.prompts.tokenizer(), tokens))
    }

    fn one(&self, choice: CompletionChoice) -> String {
        json(&self.completion(vec![choice], self.telling.include_usage.then_some(None)))
    }

    pub fn whole(&self, answers: Vec<Answer>, usage: Usage) -> Completion<'_> {
        let (tokenizer, has_logprobs) = (self.state.prompts.tokenizer(), self.telling.has_logprobs);
        let choice = |(index, answer): (usize, Answer)| {
            let tokens = has_logprobs.then(|| Waiting::all(tokenizer, &[], &answer.tokens, &answer.text));
            CompletionChoice {
                index,
                logprobs: self.logprobs(tokens.as_deref()),
                finish_reason: Some(answer.finish_reason.name()),
                text: answer.text,
            }
        };
        self.completion(answers.into_iter().enumerate().map(choice).collect(), Some(Some(usage)))
    }
}

impl Chunks for CompletionChunks {
    fn open(&self, _: usize) -> Option<String> {
        None
    }

    fn text(&mut self, index: usize, text: String, tokens: Option<Vec<Placed>>) -> Vec<String> {
        let logprobs = self.logprobs(tokens.as_deref());
        vec![self.one(CompletionChoice { index, text, logprobs, finish_reason: None })]
    }

    fn end(&mut self, index: usize, answer: &Answer) -> Vec<String> {
        let finish_reason = Some(answer.finish_reason.name());
        vec![self.one(CompletionChoice { index, text: String::new(), logprobs: None, finish_reason })]
    }

    fn usage(&self, usage: &Usage) -> String {
        json(&self.completion(Vec::new(), Some(Some(*usage))))
    }
}
