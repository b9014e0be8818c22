//! `/openapi.json`: every path and type, as the handlers declare them.

use axum::Json;
use axum::extract::State;
use utoipa::OpenApi;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};

use super::Shared;

/// The document.
#[derive(OpenApi)]
#[openapi(
    info(title = "pp-run", description = "A language model as a pipeline of stages, with OpenAI's API"),
    paths(
        super::chat::chat,
        super::completions::completions,
        super::catalogue::list,
        super::catalogue::one,
        super::catalogue::embeddings,
        super::health::health,
        super::health::ready,
        super::metrics::metrics,
        super::pipeline::show,
        super::pipeline::events,
        openapi,
    )
)]
struct Document;

/// The document of a server that wants a key, or of one that does not.
fn document(has_key: bool) -> utoipa::openapi::OpenApi {
    let mut document = Document::openapi();
    if has_key {
        let key = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document.components.get_or_insert_default().add_security_scheme("key", key);
        return document;
    }
    for path in document.paths.paths.values_mut() {
        for operation in [&mut path.get, &mut path.post].into_iter().flatten() {
            operation.security = None;
            operation.responses.responses.remove("401");
        }
    }
    document
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "Watching", responses((status = 200, body = Object)))]
pub async fn openapi(State(state): State<Shared>) -> Json<utoipa::openapi::OpenApi> {
    Json(document(state.settings.key.is_some()))
}
