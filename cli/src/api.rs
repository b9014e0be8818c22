//! The server: OpenAI's API over one service of the engine, and what watches it.
//!
//! [`State`] is what every handler has. `/`, `/health`, `/ready` and `/openapi.json` need no key, all else does.
//! Conversion between the API's types and the engine's is by hand, in the module of each path.

mod answers;
mod body;
mod calls;
mod catalogue;
mod chat;
mod completions;
mod errors;
mod formed;
pub mod guard;
mod health;
mod json;
pub mod kept;
mod logprobs;
pub mod metrics;
mod openapi;
mod page;
pub mod pipeline;
mod request_id;
mod requests;
mod schemas;
pub mod server;
mod stream;
mod telling;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Result;
use axum::extract::OriginalUri;
use axum::http::Method;
use axum::routing::{get, post};
use axum::{Router, middleware};
use pp_engine::head::service::Service;
use pp_engine::random::mix;
use pp_engine::sampler::Sampling;
use tower_http::catch_panic::CatchPanicLayer;

use crate::prompts::Prompts;
use crate::requests::choosing::Invalid;
use errors::ApiError;
pub use formed::Compiling;
use guard::Key;
use kept::Kept;
use metrics::Metrics;
pub use request_id::Name;

/// What answers say they were made by.
const FINGERPRINT: &str = concat!("pp-run-", env!("CARGO_PKG_VERSION"));

/// What all handlers share.
pub struct State {
    /// The pipeline, driven for many callers.
    pub service: Service,
    /// Texts and messages to ids.
    pub prompts: Prompts,
    pub model: Model,
    pub settings: Settings,
    pub metrics: Arc<Metrics>,
    /// Answers that outlive their clients and this program, where there is a journal.
    pub kept: Option<Arc<Kept>>,
    pub compiling: Compiling,
    /// What is said of the pipeline beside what the service knows.
    pub facts: Arc<pipeline::Facts>,
}

/// As handlers get it.
pub type Shared = Arc<State>;

/// The model that is served.
#[derive(Debug)]
pub struct Model {
    /// What callers call it.
    pub id: String,
    /// Seconds since 1970: of the model's file.
    pub created: u64,
    /// Positions of a sequence.
    pub context: usize,
    /// Ids of tokens.
    pub vocab: usize,
}

impl Model {
    /// Whether it is the one that is asked for; none is.
    fn check(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if asked != self.id => Err(ApiError::no_such_model(asked, &self.id)),
            _ => Ok(()),
        }
    }
}

/// What the command line says of the server.
pub struct Settings {
    /// What callers must know, if anything.
    pub key: Option<Key>,
    /// Whether only this machine reaches it.
    pub is_loopback: bool,
    /// Names in Host headers beside those of this machine.
    pub allowed_hosts: Vec<String>,
    /// Bytes of a request's body at most.
    pub body_bytes_max: usize,
    /// How tokens are chosen where a request does not say.
    pub sampling: Sampling,
    /// Tokens of an answer at most, whatever a request says.
    pub max_tokens: Option<usize>,
    /// Whether prompts are logged.
    pub log_prompts: bool,
}

impl Settings {
    /// Whether a Host header names this server.
    pub fn is_own(&self, host: &str) -> bool {
        guard::is_own_name(host, &self.allowed_hosts)
    }
}

impl State {
    /// The ids of prompts, made where it keeps nobody waiting. `param` is the field that they are from.
    async fn encode_all(
        self: &Shared,
        param: &'static str,
        name: &str,
        encode: impl FnOnce(&Shared) -> Result<Vec<Vec<u32>>> + Send + 'static,
    ) -> Result<Vec<Vec<u32>>, ApiError> {
        let state = self.clone();
        let encoded = tokio::task::spawn_blocking(move || encode(&state)).await;
        let encoded = encoded.map_err(|error| ApiError::internal(format!("{param} could not be encoded: {error}")))?;
        let prompts = encoded.map_err(|error| match error.downcast::<Invalid>() {
            Ok(invalid) => invalid.into(),
            Err(error) => ApiError::invalid(param, format!("{param}: {error:#}")),
        })?;
        if self.settings.log_prompts {
            for ids in &prompts {
                let prompt = self.prompts.tokenizer().decode(ids, false);
                tracing::info!(id = name, prompt, "prompt");
            }
        }
        Ok(prompts)
    }

    /// The ids of one prompt.
    async fn encode(
        self: &Shared,
        param: &'static str,
        name: &str,
        encode: impl FnOnce(&Shared) -> Result<Vec<u32>> + Send + 'static,
    ) -> Result<Vec<u32>, ApiError> {
        let mut prompts = self.encode_all(param, name, move |state| Ok(vec![encode(state)?])).await?;
        Ok(prompts.pop().unwrap_or_default())
    }
}

/// Every path.
pub fn router(state: &Shared) -> Router {
    Router::new()
        .merge(open())
        .merge(keyed().route_layer(middleware::from_fn_with_state(state.clone(), guard::has_key)))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(state.clone(), guard::same_site))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn(body::close_what_is_unread))
        .layer(middleware::from_fn_with_state(state.clone(), request_id::named))
        .with_state(state.clone())
}

/// Paths for everybody.
fn open() -> Router<Shared> {
    Router::new()
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/openapi.json", get(openapi::openapi))
        .merge(page::routes())
}

/// Paths for who has the key.
fn keyed() -> Router<Shared> {
    Router::new()
        .route("/v1/models", get(catalogue::list))
        .route("/v1/models/{model}", get(catalogue::one))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/requests/{id}", get(requests::show).delete(requests::cancel))
        .route("/v1/embeddings", post(catalogue::embeddings))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/pipeline", get(pipeline::show))
        .route("/v1/pipeline/events", get(pipeline::events))
}

async fn no_such_path(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    ApiError::no_such_path(method.as_str(), uri.path())
}

async fn wrong_method(method: Method, OriginalUri(uri): OriginalUri) -> ApiError {
    ApiError::wrong_method(method.as_str(), uri.path())
}

fn panicked(panic: Box<dyn std::any::Any + Send>) -> axum::response::Response {
    let message = pp_engine::worker::panic_message(panic.as_ref());
    tracing::error!(message, "a handler panicked");
    axum::response::IntoResponse::into_response(ApiError::internal("a fault in the program; see its log"))
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A number that no other call gives; not for secrets.
fn random() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    mix(nanos ^ mix(COUNT.fetch_add(1, Ordering::Relaxed)))
}

/// The name of an answer.
fn answer_id(kind: &str) -> String {
    format!("{kind}-{:016x}{:08x}", random(), random() as u32)
}
