//! `/openapi.json`: every path and type, as the handlers declare them.

use axum::Json;
use utoipa::openapi::Components;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

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
        super::pipeline::show,
        super::pipeline::events,
    ),
    modifiers(&Keys)
)]
struct Document;

/// The key that callers send.
struct Keys;

impl Modify for Keys {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let key = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        openapi.components.get_or_insert_with(Components::new).add_security_scheme("key", key);
    }
}

/// The document, as JSON.
pub async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(Document::openapi())
}
