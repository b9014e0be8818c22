//! `/v1/models`, and what this server does not do.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;
use utoipa::ToSchema;

use super::Shared;
use super::errors::{ApiError, ErrorBody};

/// The models that are served: one.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<ModelCard>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelCard {
    pub id: String,
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    pub owned_by: &'static str,
    /// Ours: positions of a sequence, prompt and answer together.
    pub context_length: usize,
}

fn card(state: &Shared) -> ModelCard {
    ModelCard {
        id: state.model.id.clone(),
        object: "model",
        created: state.model.created,
        owned_by: "pp-run",
        context_length: state.model.context,
    }
}

/// The models that are served.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", security(("key" = [])), responses(
    (status = 200, body = ModelList),
    (status = 401, description = "No key, or a wrong one", body = ErrorBody),
))]
pub async fn list(State(state): State<Shared>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![card(&state)] })
}

/// One of them.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "OpenAI", security(("key" = [])), params(
    ("model" = String, Path, description = "Its id"),
), responses(
    (status = 200, body = ModelCard),
    (status = 401, description = "No key, or a wrong one", body = ErrorBody),
    (status = 404, description = "Another model", body = ErrorBody),
))]
pub async fn one(
    State(state): State<Shared>,
    model: Result<Path<String>, PathRejection>,
) -> Result<Json<ModelCard>, ApiError> {
    // One that is no text is none that is served.
    let model = model.map(|Path(model)| model).unwrap_or_default();
    state.model.check(Some(&model))?;
    Ok(Json(card(&state)))
}

/// Refused: no pooling stage.
#[utoipa::path(post, path = "/v1/embeddings", tag = "OpenAI", security(("key" = [])), responses(
    (status = 400, description = "Always", body = ErrorBody),
    (status = 401, description = "No key, or a wrong one", body = ErrorBody),
))]
pub async fn embeddings(State(state): State<Shared>) -> ApiError {
    let message = format!("embeddings are not supported: {:?} is served as a model that writes text", state.model.id);
    ApiError::unsupported("model", message)
}
