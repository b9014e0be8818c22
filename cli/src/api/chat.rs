//! `/v1/chat/completions`

use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::Response;
use pp_engine::head::{Answer, Request};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::answers::{Usage, Wanted};
use super::body::JsonBody;
use super::calls::{CallDelta, Calling};
use super::errors::{ApiError, ErrorBody};
use super::formed::{Formed, WantedForm};
use super::logprobs::{ChatLogprobs, Placed, Waiting};
use super::stream::{Chunks, json};
use super::telling::{Endpoint, Prepared, Prior, Telling};
use super::{Name, Shared, kept, schemas};
use crate::requests::Stop;
use crate::requests::choosing::{Choosing, Invalid};
use crate::requests::format::ResponseFormat;
use crate::requests::messages::{ChatMessage, conversation};
use crate::requests::tools::{self, CallIds, ToolCall, ToolChoice, ToolSpec};

/// Candidates of a token with their log-probabilities, at most.
const TOP_LOGPROBS_MAX: u32 = 20;

/// What is asked. Fields that OpenAI's API does not have are marked so.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChatRequest {
    /// The model; the one that is served unless said otherwise.
    pub model: Option<String>,
    /// The conversation to go on with.
    #[schema(min_items = 1)]
    pub messages: Vec<ChatMessage>,
    /// The older name of `max_completion_tokens`.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub max_tokens: Option<u32>,
    /// Tokens of an answer at most; as many as the context holds unless said otherwise.
    #[schema(minimum = 1, maximum = 2_147_483_647)]
    pub max_completion_tokens: Option<u32>,
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
    /// Answers wanted.
    #[schema(minimum = 1)]
    pub n: Option<u32>,
    /// Texts that end an answer, at most 16.
    #[schema(schema_with = schemas::stop)]
    pub stop: Option<Stop>,
    /// Whether the answer is sent as it comes, in server-sent events.
    pub stream: Option<bool>,
    /// How it is streamed.
    pub stream_options: Option<StreamOptions>,
    /// Whether tokens are told with their log-probabilities.
    pub logprobs: Option<bool>,
    /// With `logprobs`: how many of the likeliest tokens in each place.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// Ours, as elsewhere: more variables for the chat template, such as `enable_thinking`.
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    /// What an answer must look like; it cannot become anything else.
    pub response_format: Option<ResponseFormat>,
    /// Functions that the model may ask to have called, at most 128.
    #[schema(max_items = 128)]
    pub tools: Option<Vec<ToolSpec>>,
    /// Whether it may call one (`auto`, as unless said otherwise), must (`required`, or one of them), or must not (`none`).
    pub tool_choice: Option<ToolChoice>,
    /// Whether it may call several at once; true unless said otherwise.
    pub parallel_tool_calls: Option<bool>,
    /// Only `["text"]`.
    #[schema(schema_with = schemas::modalities)]
    pub modalities: Option<Vec<String>>,
    /// Not supported.
    #[schema(schema_with = schemas::null)]
    pub audio: Option<Value>,
    /// Not supported.
    #[schema(schema_with = schemas::null)]
    pub prediction: Option<Value>,
    /// Not supported.
    #[schema(schema_with = schemas::null)]
    pub web_search_options: Option<Value>,
    /// Not supported.
    #[schema(schema_with = schemas::null)]
    pub moderation: Option<Value>,
    /// Not supported: the older form of `tools`.
    #[schema(schema_with = schemas::null)]
    pub functions: Option<Value>,
    /// Not supported: the older form of `tool_choice`.
    #[schema(schema_with = schemas::null)]
    pub function_call: Option<Value>,
    /// Not supported.
    #[schema(schema_with = schemas::null)]
    pub verbosity: Option<Value>,
    /// For the chat template, as if it were in `chat_template_kwargs`.
    pub reasoning_effort: Option<String>,
    /// Taken and not used, as the fields below.
    #[expect(dead_code, reason = "taken and not used")]
    pub user: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub metadata: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub store: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub service_tier: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub safety_identifier: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub prompt_cache_key: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub prompt_cache_options: Option<Value>,
    #[expect(dead_code, reason = "taken and not used")]
    pub prompt_cache_retention: Option<Value>,
}

/// `stream_options`
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// Whether the usage is told at the end.
    pub include_usage: Option<bool>,
    /// Taken and not used: chunks are not padded.
    #[expect(dead_code, reason = "taken and not used")]
    pub include_obfuscation: Option<bool>,
}

impl ChatRequest {
    /// What is known and not supported.
    fn check_unsupported(&self) -> Result<(), ApiError> {
        let fields = [
            ("audio", self.audio.as_ref()),
            ("prediction", self.prediction.as_ref()),
            ("web_search_options", self.web_search_options.as_ref()),
            ("moderation", self.moderation.as_ref()),
            ("functions", self.functions.as_ref()),
            ("function_call", self.function_call.as_ref()),
            ("verbosity", self.verbosity.as_ref()),
        ];
        if let Some((field, _)) = fields.iter().find(|(_, value)| value.is_some()) {
            return Err(ApiError::unsupported(*field, format!("{field} is not supported by this server")));
        }
        if self.modalities.as_ref().is_some_and(|modalities| modalities.iter().any(|modality| modality != "text")) {
            return Err(ApiError::unsupported("modalities", "this model answers with text only"));
        }
        Ok(())
    }

    fn wanted(&self) -> Result<Wanted<'_>, ApiError> {
        let has_logprobs = self.logprobs == Some(true);
        let top = self.top_logprobs.unwrap_or(0);
        Invalid::unless(top <= TOP_LOGPROBS_MAX, "top_logprobs", "0 to 20")?;
        Invalid::unless(has_logprobs || self.top_logprobs.is_none(), "top_logprobs", "logprobs to be true with it")?;
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
                candidates: if has_logprobs { top } else { 0 },
            },
            n: self.n,
            max_tokens: match self.max_completion_tokens {
                Some(most) => ("max_completion_tokens", Some(most as usize)),
                None => ("max_tokens", self.max_tokens.map(|most| most as usize)),
            },
            max_tokens_default: None,
            stop: self.stop.as_ref(),
        })
    }

    /// More variables for the chat template.
    fn template_variables(&self) -> Map<String, Value> {
        let mut variables = self.chat_template_kwargs.clone().unwrap_or_default();
        if let Some(effort) = &self.reasoning_effort {
            variables.insert("reasoning_effort".to_owned(), effort.as_str().into());
        }
        variables
    }

    fn is_streamed(&self) -> Result<bool, ApiError> {
        let is_streamed = self.stream == Some(true);
        Invalid::unless(is_streamed || self.stream_options.is_none(), "stream_options", "stream to be true with it")?;
        Ok(is_streamed)
    }
}

/// The whole answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatCompletion {
    pub id: String,
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
    pub system_fingerprint: &'static str,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
}

/// One of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    pub index: usize,
    pub message: AnswerMessage,
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
}

/// What the model says.
#[derive(Debug, Serialize, ToSchema)]
pub struct AnswerMessage {
    pub role: &'static str,
    /// Null where it only calls tools.
    pub content: Option<String>,
    /// Functions to be called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Always null.
    pub refusal: Option<String>,
}

/// A piece of answers.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChunk<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub model: &'a str,
    pub system_fingerprint: &'static str,
    pub choices: Vec<ChunkChoice>,
    /// With `include_usage`: null but in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
}

/// A piece of one of the answers.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: Delta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
}

/// What is new.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// Null in the first piece, where tools may be called.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<[CallDelta; 1]>,
}

impl Delta {
    pub fn of_text(text: String) -> Delta {
        Delta { content: Some(Some(text)), ..Delta::default() }
    }

    pub fn of_call(call: CallDelta) -> Delta {
        Delta { tool_calls: Some([call]), ..Delta::default() }
    }
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "OpenAI",
    params(kept::OnDisconnect),
    request_body = ChatRequest,
    security(("key" = [])),
    responses(
        (status = 200, description = "The answers; with `stream` server-sent events, each a chunk", content(
            (ChatCompletion = "application/json"),
            (ChatChunk = "text/event-stream"),
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
pub async fn chat(
    State(state): State<Shared>,
    Extension(Name(name)): Extension<Name>,
    headers: HeaderMap,
    JsonBody { value, text }: JsonBody<ChatRequest>,
) -> Result<Response, ApiError> {
    state.model.check(value.model.as_deref())?;
    let prepared = prepare(&state, &name, value, None).await?;
    kept::answer(&state, prepared, &name, text, &headers).await
}

/// What a body comes to; with `prior` once more.
pub async fn prepare(
    state: &Shared,
    name: &str,
    mut request: ChatRequest,
    prior: Option<Prior>,
) -> Result<Prepared, ApiError> {
    request.check_unsupported()?;
    let is_streamed = request.is_streamed()?;
    let mut wanted = request.wanted()?.request(state)?;
    let messages = conversation(&request.messages, "messages")?;
    let form = WantedForm {
        format: request.response_format.take(),
        tools: request.tools.take(),
        choice: request.tool_choice.take(),
        parallel: request.parallel_tool_calls,
    };
    let Formed { form, tools, constraint } = form.compile(state).await?;
    let extra = request.template_variables();
    let (id, created, prompt) = match prior {
        Some(Prior { id, created, seed, mut prompts }) => {
            wanted.sampling.seed = seed;
            (id, created, prompts.pop().unwrap_or_default())
        }
        None => {
            let encode = move |state: &Shared| state.prompts.chat_with_tools(&messages, tools.as_ref(), &extra);
            (super::answer_id("chatcmpl"), super::now(), state.encode("messages", name, encode).await?)
        }
    };
    let shown_specials = form.shown_specials.clone();
    let telling = Telling {
        endpoint: Endpoint::Chat,
        id,
        created,
        is_streamed,
        include_usage: request.stream_options.and_then(|options| options.include_usage) == Some(true),
        has_logprobs: request.logprobs == Some(true),
        form,
    };
    Ok(Prepared { requests: vec![Request { prompt, constraint, shown_specials, ..wanted }], telling })
}

/// The answers of a conversation, in pieces or whole.
pub struct ChatChunks {
    pub telling: Telling,
    pub state: Shared,
    /// Of each answer that is streamed, where tools may be called.
    pub calling: Vec<Calling>,
}

impl ChatChunks {
    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>) -> String {
        json(&ChatChunk {
            id: &self.telling.id,
            object: "chat.completion.chunk",
            created: self.telling.created,
            model: &self.state.model.id,
            system_fingerprint: super::FINGERPRINT,
            choices,
            usage: self.telling.include_usage.then_some(usage),
        })
    }

    fn one(&self, index: usize, delta: Delta, logprobs: Option<ChatLogprobs>, end: Option<&'static str>) -> String {
        self.chunk(vec![ChunkChoice { index, delta, logprobs, finish_reason: end }], None)
    }

    /// Pieces with the tokens of all of them; without pieces they wait for the next, unless it is the end.
    fn several(&mut self, index: usize, mut deltas: Vec<Delta>, is_end: bool) -> Vec<String> {
        let tokens = match self.calling.get_mut(index) {
            Some(calling) if is_end || !deltas.is_empty() => std::mem::take(&mut calling.tokens),
            _ => Vec::new(),
        };
        if deltas.is_empty() && !tokens.is_empty() {
            deltas.push(Delta::default());
        }
        let mut logprobs = self.logprobs((!tokens.is_empty()).then_some(&tokens));
        deltas.into_iter().map(|delta| self.one(index, delta, logprobs.take(), None)).collect()
    }

    fn logprobs(&self, tokens: Option<&[Placed]>) -> Option<ChatLogprobs> {
        tokens.map(|tokens| ChatLogprobs::new(self.state.prompts.tokenizer(), tokens))
    }

    pub fn whole(self, answers: Vec<Answer>, usage: Usage) -> ChatCompletion {
        let Telling { form, has_logprobs, .. } = &self.telling;
        let tokenizer = self.state.prompts.tokenizer();
        let choice = |(index, answer): (usize, Answer)| {
            let shown = &form.shown_specials;
            let tokens = has_logprobs.then(|| Waiting::all(tokenizer, shown, &answer.tokens, &answer.text));
            let (text, tool_calls, finish_reason) = match form.tools {
                Some(format) => {
                    let ids = CallIds::new(&self.telling.id, index);
                    tools::read(&answer.text, format, answer.finish_reason, &ids)
                }
                None => (answer.text, Vec::new(), answer.finish_reason.name()),
            };
            let content = Some(text).filter(|text| !text.is_empty() || tool_calls.is_empty());
            ChatChoice {
                index,
                logprobs: self.logprobs(tokens.as_deref()),
                finish_reason,
                message: AnswerMessage { role: "assistant", content, tool_calls, refusal: None },
            }
        };
        let choices = answers.into_iter().enumerate().map(choice).collect();
        ChatCompletion {
            choices,
            object: "chat.completion",
            created: self.telling.created,
            model: self.state.model.id.clone(),
            system_fingerprint: super::FINGERPRINT,
            usage,
            id: self.telling.id,
        }
    }
}

impl Chunks for ChatChunks {
    fn open(&self, index: usize) -> Option<String> {
        // Where tools may be called there may be no content.
        let content = self.calling.is_empty().then(String::new);
        let delta = Delta { role: Some("assistant"), content: Some(content), tool_calls: None };
        Some(self.one(index, delta, None, None))
    }

    fn text(&mut self, index: usize, text: String, tokens: Option<Vec<Placed>>) -> Vec<String> {
        let Some(calling) = self.calling.get_mut(index) else {
            return vec![self.one(index, Delta::of_text(text), self.logprobs(tokens.as_deref()), None)];
        };
        calling.tokens.extend(tokens.into_iter().flatten());
        let deltas = calling.text(&text);
        self.several(index, deltas, false)
    }

    fn end(&mut self, index: usize, answer: &Answer) -> Vec<String> {
        let (deltas, reason) = match self.calling.get_mut(index) {
            Some(calling) => calling.end(answer.finish_reason),
            None => (Vec::new(), answer.finish_reason.name()),
        };
        let mut chunks = self.several(index, deltas, true);
        chunks.push(self.one(index, Delta::default(), None, Some(reason)));
        chunks
    }

    fn usage(&self, usage: &Usage) -> String {
        self.chunk(Vec::new(), Some(*usage))
    }
}
