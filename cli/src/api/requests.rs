//! `/v1/requests/{id}`: the answers of a request that are kept, for whoever lost them on the way.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Shared;
use super::errors::{ApiError, ErrorBody};
use super::kept::{Entry, Kept};
use super::stream::Sent;

/// The header with which browsers say what they have of a stream.
const LAST_EVENT_ID: &str = "last-event-id";
/// Seconds that may be waited.
const WAIT_MAX: f64 = 86_400.0;

/// How the answers are wanted.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Wanted {
    /// Whether they are sent in server-sent events; as the request said unless said otherwise.
    #[param(value_type = bool, required = false)]
    stream: Option<bool>,
    /// With a stream: the id of the last event that came; those that follow it are sent. So does `Last-Event-ID`.
    #[param(value_type = String, required = false)]
    after: Option<String>,
    /// Without a stream: how many seconds to wait for the answers to be complete; as long as it takes unless said otherwise.
    #[param(value_type = f64, required = false, minimum = 0, maximum = 86400)]
    wait: Option<f64>,
}

/// A request whose answers are not complete.
#[derive(Debug, Serialize, ToSchema)]
pub struct StillRunning {
    /// As in `x-request-id`.
    pub id: String,
    pub object: &'static str,
    /// `running`
    pub status: &'static str,
    /// Tokens of all answers so far.
    pub completion_tokens: usize,
}

/// The answers of a request, as the path where it was asked would have sent them.
#[utoipa::path(
    get,
    path = "/v1/requests/{id}",
    tag = "Requests",
    params(("id" = String, Path, description = "The request's x-request-id"), Wanted),
    security(("key" = [])),
    responses(
        (status = 200, description = "The answers; with `stream` server-sent events, each a chunk", content(
            (Object = "application/json"),
            (Object = "text/event-stream"),
        )),
        (status = 202, description = "They are not complete, and `wait` is over", body = StillRunning),
        (status = 400, description = "A parameter is wrong: `param` names it", body = ErrorBody),
        (status = 401, description = "No key, or a wrong one", body = ErrorBody),
        (status = 404, description = "Nothing of that name is kept", body = ErrorBody),
        (status = 409, description = "Somebody cancelled it", body = ErrorBody),
        (status = 503, description = "The pipeline is down, or the server is stopping", body = ErrorBody),
    )
)]
pub async fn show(
    State(state): State<Shared>,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(wanted) = wanted.map_err(|error| ApiError::invalid("query", error.body_text()))?;
    let (kept, entry) = find(&state, name)?;
    let telling = entry.telling()?;
    if wanted.stream.unwrap_or(telling.is_streamed) {
        if wanted.wait.is_some() {
            return Err(ApiError::invalid("wait", "wait: goes with whole answers; a stream begins at once"));
        }
        let asked = kept.attach(&state, &entry)?;
        let after = wanted.after.as_deref().map(Ok);
        let after = after.or_else(|| headers.get(LAST_EVENT_ID).map(|id| id.to_str().map_err(drop)));
        let sent = match after {
            None => Sent::default(),
            Some(id) => id.ok().and_then(|id| Sent::parse(id, asked.answers())).ok_or_else(|| {
                ApiError::invalid("after", "after: expected the id of an event of this request's stream")
            })?,
        };
        return Ok(telling.stream(&state, asked, sent));
    }
    if wanted.after.is_some() {
        return Err(ApiError::invalid("after", "after: goes with stream"));
    }
    let asked = kept.attach(&state, &entry)?;
    let Some(wait) = wanted.wait else { return telling.whole(&state, asked).await };
    if !(0.0..=WAIT_MAX).contains(&wait) {
        return Err(ApiError::invalid("wait", "wait: expected 0 to 86400 seconds"));
    }
    match tokio::time::timeout(Duration::from_secs_f64(wait), telling.whole(&state, asked)).await {
        Ok(whole) => whole,
        Err(_) => {
            let completion_tokens = entry.tokens();
            let running =
                StillRunning { id: entry.name.clone(), object: "request", status: "running", completion_tokens };
            Ok((StatusCode::ACCEPTED, Json(running)).into_response())
        }
    }
}

/// Ends a request, and forgets its answers.
#[utoipa::path(
    delete,
    path = "/v1/requests/{id}",
    tag = "Requests",
    params(("id" = String, Path, description = "The request's x-request-id")),
    security(("key" = [])),
    responses(
        (status = 204, description = "It has ended, and is forgotten"),
        (status = 401, description = "No key, or a wrong one", body = ErrorBody),
        (status = 404, description = "Nothing of that name is kept", body = ErrorBody),
    )
)]
pub async fn cancel(
    State(state): State<Shared>,
    name: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, ApiError> {
    let (kept, entry) = find(&state, name)?;
    kept.cancel(&entry);
    Ok(StatusCode::NO_CONTENT)
}

/// What is kept under a name.
fn find(state: &Shared, name: Result<Path<String>, PathRejection>) -> Result<(&Arc<Kept>, Arc<Entry>), ApiError> {
    // One that is no text is nobody's.
    let name = name.map(|Path(name)| name).unwrap_or_default();
    let missing = || ApiError::no_such_request(&name, state.kept.is_some());
    let kept = state.kept.as_ref().ok_or_else(missing)?;
    Ok((kept, kept.find(&name).ok_or_else(missing)?))
}
