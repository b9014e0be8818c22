//! A request's body as one of the API's types; what is wrong with it is told by its path.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{FromRequest, Request};
use serde::de::DeserializeOwned;

use super::Shared;
use super::errors::ApiError;

/// How long a body may take to come.
const PATIENCE: Duration = Duration::from_secs(30);

/// A body of JSON.
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned> FromRequest<Shared> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Shared) -> Result<JsonBody<T>, ApiError> {
        let bytes = read(request.into_body(), state.settings.body_bytes_max).await?;
        Ok(JsonBody(parse(&bytes)?))
    }
}

async fn read(body: Body, bytes_max: usize) -> Result<Vec<u8>, ApiError> {
    let read = tokio::time::timeout(PATIENCE, to_bytes(body, bytes_max)).await;
    match read.map_err(|_| ApiError::too_slow(PATIENCE.as_secs()))? {
        Ok(bytes) => Ok(bytes.into()),
        Err(error) => {
            let mut source: Option<&dyn std::error::Error> = Some(&error);
            while let Some(cause) = source {
                if cause.to_string().contains("length limit") {
                    return Err(ApiError::too_large(bytes_max));
                }
                source = cause.source();
            }
            Err(ApiError::not_json(format!("the body could not be read: {error}")))
        }
    }
}

/// JSON as `T`.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let message = error.inner().to_string();
        if error.inner().is_syntax() || error.inner().is_eof() {
            return ApiError::not_json(format!("the body is not valid JSON: {message}"));
        }
        if message.starts_with("unknown field") {
            return ApiError::unknown_field(path);
        }
        let param = if path == "." { missing(&message).unwrap_or("body").to_owned() } else { path };
        ApiError::invalid(param.clone(), format!("{param}: {message}"))
    })?;
    json.end().map_err(|error| ApiError::not_json(format!("the body is not valid JSON: {error}")))?;
    Ok(parsed)
}

/// The field of "missing field `messages` at line 1 column 2".
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
        #[expect(dead_code, reason = "only parsed")]
        items: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Inner {
        #[expect(dead_code, reason = "only parsed")]
        size: u32,
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
        check("{}", "items", "invalid_value");
        check("[]", "body", "invalid_value");
        check(r#"{"items": ["#, "body", "invalid_json");
        check(r#"{"items": []} x"#, "body", "invalid_json");
        check("\u{fffd}", "body", "invalid_json");
        assert!(parse::<Outer>(b"{\"items\": [{\"size\": 3}]} \n").is_ok());
        assert!(parse::<Outer>(b"\xff").is_err());
    }
}
