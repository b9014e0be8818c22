//! A request's body as one of the API's types; what is wrong with it is told by its path.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::LengthLimitError;
use hyper::body::{Frame, SizeHint};
use serde::de::DeserializeOwned;

use super::Shared;
use super::errors::ApiError;
use super::json::Json;

/// How long a body may take to come.
const PATIENCE: Duration = Duration::from_secs(30);

/// A body of JSON.
pub struct JsonBody<T> {
    /// What it says.
    pub value: T,
    /// As it was sent.
    pub text: String,
}

impl<T: DeserializeOwned> FromRequest<Shared> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Shared) -> Result<JsonBody<T>, ApiError> {
        let bytes_max = state.settings.body_bytes_max;
        check(request.headers(), bytes_max)?;
        let bytes = read(request.into_body(), bytes_max).await?;
        let value = parse(&bytes)?;
        let text = String::from_utf8(bytes).map_err(|error| ApiError::not_json(format!("the body: {error}")))?;
        Ok(JsonBody { value, text })
    }
}

/// Says that the connection ends where an answer was made before the body was there: what comes of it would be taken for
/// another request (RFC 9112, 9.3 and 9.6).
pub async fn close_what_is_unread(request: Request, next: Next) -> Response {
    let ended = Arc::new(AtomicBool::new(request.body().is_end_stream()));
    let watched = ended.clone();
    let request = request.map(|body| Body::new(Watched { body, ended: watched }));
    let mut response = next.run(request).await;
    if !ended.load(Ordering::Relaxed) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// A body that tells when it was read to its end.
struct Watched {
    body: Body,
    ended: Arc<AtomicBool>,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None)) || self.body.is_end_stream() {
            self.ended.store(true, Ordering::Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What the head says of the body, before any of it is asked for. One without a type is taken for JSON.
fn check(headers: &HeaderMap, bytes_max: usize) -> Result<(), ApiError> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or("?").trim());
    let length = text(header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    if length.is_some_and(|length| length > bytes_max as u64) {
        return Err(ApiError::too_large(bytes_max));
    }
    if let Some(coding) = text(header::CONTENT_ENCODING).filter(|coding| !coding.eq_ignore_ascii_case("identity")) {
        return Err(ApiError::unsupported_media(format!("Content-Encoding {coding:?}: send the body as it is")));
    }
    match text(header::CONTENT_TYPE) {
        Some(kind) if !is_json(kind) => {
            Err(ApiError::unsupported_media(format!("Content-Type {kind:?}: send JSON, as application/json")))
        }
        _ => Ok(()),
    }
}

/// `application/json` and `application/*+json`, with or without parameters.
fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    kind.strip_prefix("application/").is_some_and(|kind| kind == "json" || kind.ends_with("+json"))
}

async fn read(body: Body, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    let read = tokio::time::timeout(PATIENCE, to_bytes(body, bytes_max)).await;
    match read.map_err(|_| ApiError::too_slow(PATIENCE.as_secs()))? {
        Ok(bytes) => Ok(bytes.into()),
        Err(error) if error.source().is_some_and(|cause| cause.is::<LengthLimitError>()) => {
            Err(ApiError::too_large(bytes_max))
        }
        Err(error) => Err(ApiError::not_json(format!("the body could not be read: {error}"))),
    }
}

/// JSON as `T`. It is made on the thread that talks to the client: never more of it at once than there are such threads.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let value = serde_json::from_slice(bytes)
        .map_err(|error| ApiError::not_json(format!("the body is not valid JSON: {error}")))?;
    serde_path_to_error::deserialize(Json(value)).map_err(|error| {
        let path = error.path().to_string();
        let message = error.inner().to_string();
        if message.starts_with("unknown field") {
            return ApiError::unknown_field(path);
        }
        let param = if path == "." { missing(&message).unwrap_or("body").to_owned() } else { path };
        ApiError::invalid(param.clone(), format!("{param}: {message}"))
    })
}

/// The field of "missing field `messages`".
fn missing(message: &str) -> Option<&str> {
    message.strip_prefix("missing field `")?.split_once('`').map(|(field, _)| field)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        items: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        size: u32,
    }

    #[test]
    fn what_the_head_says_of_the_body_is_looked_at_first() {
        let status = |name: HeaderName, value: &str| {
            let headers = HeaderMap::from_iter([(name, value.parse().unwrap())]);
            check(&headers, 1000).err().map(|error| error.status.as_u16())
        };
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"] {
            assert_eq!(status(header::CONTENT_TYPE, json), None, "{json}");
        }
        for other in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""] {
            assert_eq!(status(header::CONTENT_TYPE, other), Some(415), "{other:?}");
        }
        assert_eq!(status(header::CONTENT_ENCODING, "identity"), None);
        assert_eq!(status(header::CONTENT_ENCODING, "gzip"), Some(415));
        assert_eq!((status(header::CONTENT_LENGTH, "1000"), status(header::CONTENT_LENGTH, "1001")), (None, Some(413)));
        assert!(check(&HeaderMap::new(), 1000).is_ok());
    }

    #[test]
    fn what_is_wrong_is_told_by_its_path() {
        let check = |body: &str, param: &str, code: &str| {
            let error = parse::<Outer>(body.as_bytes()).expect_err(body).body.error;
            assert_eq!((error.param.as_deref(), error.code), (Some(param), Some(code)), "{body}: {}", error.message);
        };
        check(r#"{"items": [{"size": 1}, {"size": "x"}]}"#, "items[1].size", "invalid_value");
        check(r#"{"items": [{"size": 1, "colour": 2}]}"#, "items[0].colour", "unknown_parameter");
        check(r#"{"items": [], "more": 1}"#, "more", "unknown_parameter");
        check(r#"{"items": [{}]}"#, "items[0]", "invalid_value");
        check(r#"{"items": [[1]]}"#, "items[0]", "invalid_value");
        check(r#"[[{"size": 1}]]"#, "body", "invalid_value");
        check(r#"{"items": [{"size": 1.5}]}"#, "items[0].size", "invalid_value");
        check(r#"{"items": [{"size": -1.0}]}"#, "items[0].size", "invalid_value");
        check(r#"{"items": [{"size": 1e10}]}"#, "items[0].size", "invalid_value");
        check("{}", "items", "invalid_value");
        check("[]", "body", "invalid_value");
        check(r#"{"items": ["#, "body", "invalid_json");
        check(r#"{"items": []} x"#, "body", "invalid_json");
        check("\u{fffd}", "body", "invalid_json");
        let sizes =
            |body: &str| parse::<Outer>(body.as_bytes()).map(|outer| outer.items.iter().map(|i| i.size).sum::<u32>());
        assert_eq!(sizes("{\"items\": [{\"size\": 3}, {\"size\": 4.0}, {\"size\": 5e1}]} \n").ok(), Some(57));
        assert!(parse::<Outer>(b"\xff").is_err());
    }
}
