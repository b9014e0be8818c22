//! `/metrics`: what is counted as it happens, and how the service stands.

mod observed;

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use pp_engine::head::Answer;
use pp_engine::head::service::Standing;
use pp_engine::journal;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::Shared;
use super::errors::{ApiError, ErrorBody};

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum Outcome {
    Stop,
    Length,
    /// The client has gone, or the server stopped.
    Cancelled,
    /// The pipeline failed.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AnswerLabels {
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    path: String,
    status: u16,
}

/// What is counted as it happens; the rest is read when somebody asks.
pub struct Metrics {
    registry: Registry,
    responses: Family<ResponseLabels, Counter>,
    answers: Family<AnswerLabels, Counter>,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    answer_tokens: Counter,
    first_token: Histogram,
    token: Histogram,
}

/// Seconds from a request to its first token.
const FIRST_TOKEN: [f64; 13] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];
/// Seconds from a token to the next, on average over an answer.
const TOKEN: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5];

impl Metrics {
    pub fn new() -> Metrics {
        let metrics = Metrics {
            registry: Registry::with_prefix("pp_run"),
            responses: Family::default(),
            answers: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            answer_tokens: Counter::default(),
            first_token: Histogram::new(FIRST_TOKEN),
            token: Histogram::new(TOKEN),
        };
        metrics.registered()
    }

    fn registered(mut self) -> Metrics {
        let r = &mut self.registry;
        r.register("responses", "HTTP responses by path and status", self.responses.clone());
        r.register("answers", "Answers by how they ended", self.answers.clone());
        r.register("prompt_tokens", "Tokens of answered prompts", self.prompt_tokens.clone());
        r.register("cached_tokens", "Those of them that the prefix cache had", self.cached_tokens.clone());
        r.register("answer_tokens", "Tokens of answers", self.answer_tokens.clone());
        r.register("first_token_seconds", "From a request to its first token", self.first_token.clone());
        r.register("token_seconds", "From a token of an answer to the next, on average", self.token.clone());
        self
    }

    /// In Prometheus' text format.
    fn text(&self, standing: &Standing, journal: Option<&journal::Standing>) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode_registry(&mut text, &self.registry)?;
        encode_registry(&mut text, &observed::registry(standing))?;
        if let Some(journal) = journal {
            encode_registry(&mut text, &observed::journal(journal))?;
        }
        encode_eof(&mut text)?;
        Ok(text)
    }

    /// A response was sent, or begun.
    pub fn responded(&self, path: &str, status: u16) {
        self.responses.get_or_create(&ResponseLabels { path: path.to_owned(), status }).inc();
    }

    /// An answer is complete.
    pub fn answered(&self, answer: &Answer) {
        let is_stop = answer.finish_reason == pp_engine::head::FinishReason::Stop;
        self.ended(if is_stop { Outcome::Stop } else { Outcome::Length }, 1);
        let tokens = answer.tokens.len();
        self.prompt_tokens.inc_by(answer.prompt_tokens as u64);
        self.cached_tokens.inc_by(answer.cached_tokens as u64);
        self.answer_tokens.inc_by(tokens as u64);
        if tokens > 0 {
            self.first_token.observe(answer.timings.first_token_seconds);
        }
        if tokens > 1 {
            self.token.observe(answer.timings.decode_seconds / (tokens - 1) as f64);
        }
    }

    /// Answers have ended in such a way.
    pub fn ended(&self, outcome: Outcome, count: u64) {
        if count > 0 {
            self.answers.get_or_create(&AnswerLabels { outcome }).inc_by(count);
        }
    }
}

/// All of it, as OpenMetrics writes it.
#[utoipa::path(get, path = "/metrics", tag = "Watching", security(("key" = [])), responses(
    (status = 200, description = "Metrics in the text format of OpenMetrics", content(
        (String = "application/openmetrics-text"),
    )),
    (status = 401, description = "No key, or a wrong one", body = ErrorBody),
))]
pub async fn metrics(State(state): State<Shared>) -> Result<Response, ApiError> {
    // A trace is looked through: that is not for a thread that talks to clients.
    let text = tokio::task::spawn_blocking(move || {
        let journal = state.kept.as_ref().map(|kept| kept.journal());
        state.metrics.text(&state.service.standing(), journal.as_ref())
    });
    let text = text.await;
    let text = text.map_err(|error| ApiError::internal(error.to_string()))?;
    let text = text.map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response())
}
