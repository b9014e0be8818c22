//! `/health`: whether something comes through all stages. `/ready`: whether a request would be taken.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use pp_engine::head::service::{Probe, ServiceError};
use serde::Serialize;
use utoipa::ToSchema;

use super::Shared;
use super::errors::{ApiError, ErrorBody};

/// How long the probe may be under way.
const PATIENCE: Duration = Duration::from_secs(5);

/// How the pipeline is.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `ok`: an empty micro-batch crossed every stage; `busy`: it is behind others, which come out of the pipe.
    pub status: &'static str,
    /// Milliseconds that the empty micro-batch took; null where it is still under way.
    pub round_ms: Option<f64>,
    pub stages: usize,
    /// Pipelines that were opened in the place of failed ones.
    pub restarts: u64,
}

/// Whether something comes through all stages.
#[utoipa::path(get, path = "/health", tag = "Watching", responses(
    (status = 200, body = Health),
    (status = 503, description = "A stage is down, or does not answer: `stage` says which", body = ErrorBody),
))]
pub async fn health(State(state): State<Shared>) -> Result<Json<Health>, ApiError> {
    let (sender, probed) = tokio::sync::oneshot::channel();
    state.service.probe(PATIENCE, move |probe| {
        // Whoever asked may be gone.
        let _ = sender.send(probe);
    });
    let (status, round_ms) = match probed.await.unwrap_or(Err(ServiceError::Draining)) {
        Ok(Probe::Crossed(round)) => ("ok", Some(round.as_secs_f64() * 1e3)),
        Ok(Probe::Moving) => ("busy", None),
        Err(error) => return Err(error.into()),
    };
    let standing = state.service.standing();
    Ok(Json(Health { status, round_ms, stages: standing.pipe.reports.len(), restarts: standing.restarts }))
}

/// Whether a request would be taken.
#[derive(Debug, Serialize, ToSchema)]
pub struct Ready {
    /// Always true: else it is an error.
    pub ready: bool,
    /// Requests and answers that wait for a place.
    pub waiting: usize,
    /// Sequences that run.
    pub running: usize,
}

/// Whether a request would be taken.
#[utoipa::path(get, path = "/ready", tag = "Watching", responses(
    (status = 200, body = Ready),
    (status = 503, description = "The pipeline is down, the journal cannot be written, or the server is stopping", body = ErrorBody),
))]
pub async fn ready(State(state): State<Shared>) -> Result<Json<Ready>, ApiError> {
    let standing = state.service.standing();
    if standing.is_draining {
        return Err(ApiError::stopping());
    }
    if let Some(reason) = state.kept.as_ref().and_then(|kept| kept.journal().failing) {
        return Err(ApiError::not_ready(&reason));
    }
    if let Some(failure) = standing.down {
        return Err(ServiceError::Down(failure).into());
    }
    Ok(Json(Ready { ready: true, waiting: standing.schedule.waiting, running: standing.schedule.running }))
}
