//! `/openapi.json`: every path and type, as the handlers declare them.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
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
        super::requests::show,
        super::requests::cancel,
        super::health::health,
        super::health::ready,
        super::metrics::metrics,
        super::pipeline::show,
        super::pipeline::events,
        openapi,
    )
)]
struct Document;

/// The document of a server that wants a key, or of one that does not; with a journal or without.
fn document(has_key: bool, has_journal: bool) -> Value {
    let mut document = Document::openapi();
    if has_key {
        let key = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        document.components.get_or_insert_default().add_security_scheme("key", key);
    }
    let mut document = serde_json::to_value(document).expect("plain data always has a JSON form");
    // What else is in a part is told by a reason of its own, for which its type takes everything.
    document["components"]["schemas"]["Part"]["additionalProperties"] = false.into();
    let paths = document["paths"].as_object_mut().into_iter().flat_map(|paths| paths.values_mut());
    for operation in paths.filter_map(Value::as_object_mut).flat_map(|path| path.values_mut()) {
        if !has_key && let Some(operation) = operation.as_object_mut() {
            operation.shift_remove("security");
            operation["responses"].as_object_mut().and_then(|responses| responses.shift_remove("401"));
        }
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut).into_iter().flatten();
        for parameter in parameters.filter(|parameter| !has_journal && parameter["name"] == "x-on-disconnect") {
            parameter["schema"]["pattern"] = "^cancel$".into();
        }
        if let Some(schema) = operation.pointer_mut("/responses/200/content/text~1event-stream/schema") {
            *schema = events_of(schema.take());
        }
    }
    document
}

/// Events whose data is JSON of a schema: an error may end them, or `[DONE]`.
fn events_of(schema: Value) -> Value {
    let json =
        |schema: Value| json!({"type": "string", "contentMediaType": "application/json", "contentSchema": schema});
    let error = json!({"$ref": "#/components/schemas/ErrorBody"});
    let data = json!({"anyOf": [json(schema), json(error), {"type": "string", "const": "[DONE]"}]});
    json!({"type": "object", "required": ["data"], "properties": {"data": data}})
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "Watching", responses((status = 200, body = Object)))]
pub async fn openapi(State(state): State<Shared>) -> Json<Value> {
    Json(document(state.settings.key.is_some(), state.kept.is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every reference leads somewhere, streams are events, and a key is wanted only where there is one.
    #[test]
    fn the_document_is_whole() {
        for has_key in [false, true] {
            let document = document(has_key, !has_key);
            let text = document.to_string();
            for reference in text.split("\"$ref\":\"#").skip(1).map(|rest| rest.split('"').next().unwrap()) {
                assert!(document.pointer(reference).is_some(), "{reference}");
            }
            let chat = &document["paths"]["/v1/chat/completions"]["post"];
            let events = &chat["responses"]["200"]["content"]["text/event-stream"]["schema"]["properties"]["data"];
            assert_eq!(events["anyOf"].as_array().map(Vec::len), Some(3), "{events}");
            assert_eq!((chat["security"].is_array(), chat["responses"]["401"].is_object()), (has_key, has_key));
            assert_eq!(text.contains("bearer"), has_key);
            let header = &chat["parameters"][0];
            let pattern = if has_key { "^cancel$" } else { "^(cancel|finish)$" };
            assert_eq!((&header["name"], &header["in"]), (&"x-on-disconnect".into(), &"header".into()));
            assert_eq!((&header["schema"]["pattern"], &header["required"]), (&pattern.into(), &false.into()));
            assert_eq!(header["schema"]["type"], "string");
        }
    }
}
