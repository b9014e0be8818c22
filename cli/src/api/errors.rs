//! Why a request is not answered, in the shape of OpenAI's API.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use pp_engine::head::service::ServiceError;
use pp_engine::journal::Refusal;
use pp_engine::schedule::Refused;
use serde::Serialize;
use utoipa::ToSchema;

use crate::requests::choosing::Invalid;

/// Seconds after which another pipeline may be there.
const DOWN_RETRY_SECONDS: u64 = 5;

/// A refusal.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    /// Seconds.
    retry_after: Option<u64>,
    pub body: ErrorBody,
}

/// What is sent.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

/// What went wrong, and where.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorDetail {
    /// For people.
    pub message: String,
    /// The class of error.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field that is wrong, as a path.
    pub param: Option<String>,
    /// The error, for programs.
    pub code: Option<&'static str>,
    /// The stage that is down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stage: Option<usize>,
}

impl ApiError {
    /// An error of the caller.
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> ApiError {
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let error = ErrorDetail { message: message.into(), kind, param: None, code, stage: None };
        ApiError { status, retry_after: None, body: ErrorBody { error } }
    }

    fn with_param(mut self, param: impl Into<String>) -> ApiError {
        self.body.error.param = Some(param.into());
        self
    }

    /// As many do that already as may at once.
    pub fn too_many(message: impl Into<String>, retry_after: u64) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("too_many"), message);
        ApiError { retry_after: Some(retry_after), ..error }
    }

    /// A field, as a path, and what is wrong with it.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_value"), message).with_param(param)
    }

    /// A field that nobody knows.
    pub fn unknown_field(param: impl Into<String>) -> ApiError {
        let param = param.into();
        let message = format!("there is no such field as {param:?}");
        ApiError::new(StatusCode::BAD_REQUEST, Some("unknown_parameter"), message).with_param(param)
    }

    /// A field that is known, and not supported here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), message).with_param(param)
    }

    /// An answer cannot go on in the form that a field asks for.
    pub fn too_complex(param: &str) -> ApiError {
        let message = format!("{param}: what may come next takes too much to find out; see the log, and ask for less");
        ApiError::new(StatusCode::BAD_REQUEST, Some("form_too_complex"), message).with_param(param)
    }

    /// A body that is not JSON.
    pub fn not_json(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, Some("invalid_json"), message).with_param("body")
    }

    /// A body that is too large.
    pub fn too_large(bytes_max: usize) -> ApiError {
        let message = format!("the body has more than {bytes_max} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large"), message)
    }

    /// A body of another kind than JSON, or in another form.
    pub fn unsupported_media(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, Some("unsupported_media_type"), message)
    }

    /// A body that does not come.
    pub fn too_slow(seconds: u64) -> ApiError {
        let message = format!("the body was not there within {seconds} s");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, Some("request_timeout"), message)
    }

    /// No key, or a wrong one.
    pub fn unauthorized(message: &str) -> ApiError {
        ApiError::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message)
    }

    /// A request that is not meant for this server.
    pub fn forbidden(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, Some("forbidden"), message)
    }

    /// A model that is not here.
    pub fn no_such_model(asked: &str, served: &str) -> ApiError {
        let message = format!("the model {asked:?} does not exist here; this server runs {served:?}");
        ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), message).with_param("model")
    }

    /// A path that leads nowhere.
    pub fn no_such_path(method: &str, path: &str) -> ApiError {
        let message = format!("there is nothing at {method} {path}; see /openapi.json");
        ApiError::new(StatusCode::NOT_FOUND, Some("unknown_url"), message)
    }

    /// A path that does not take this method.
    pub fn wrong_method(method: &str, path: &str) -> ApiError {
        let message = format!("{path} does not take {method}; see the Allow header");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, Some("method_not_allowed"), message)
    }

    /// A fault of this program.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, Some("internal_error"), message)
    }

    /// A name that another request has.
    pub fn name_in_use(name: &str) -> ApiError {
        let message = format!(
            "a request with x-request-id {name:?} is kept: its answers are at GET /v1/requests/{name}; send another id for another request"
        );
        ApiError::new(StatusCode::CONFLICT, Some("request_id_in_use"), message)
    }

    /// Nothing that is kept has this name.
    pub fn no_such_request(name: &str, has_journal: bool) -> ApiError {
        let message = match has_journal {
            true => format!(
                "no answers of a request {name:?} are kept: it was never asked, was cancelled, or ended long ago"
            ),
            false => "this server keeps no answers: it was started without --journal".to_owned(),
        };
        ApiError::new(StatusCode::NOT_FOUND, Some("request_not_found"), message)
    }

    /// Somebody wanted it to end.
    pub fn cancelled() -> ApiError {
        ApiError::new(StatusCode::CONFLICT, Some("request_cancelled"), "the request was cancelled")
    }

    /// Nothing could be written down.
    pub fn not_ready(reason: &str) -> ApiError {
        let message = format!("the journal cannot be written: {reason}");
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("journal_failing"), message);
        error.retry_after(DOWN_RETRY_SECONDS as f64)
    }

    /// What was asked is not on the disk.
    pub fn not_kept(reason: &str) -> ApiError {
        let message = format!("the request was not written to the journal, and is not answered: {reason}");
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("journal_failing"), message);
        error.retry_after(DOWN_RETRY_SECONDS as f64)
    }

    /// The answer was cut off because the server stops.
    pub fn stopping() -> ApiError {
        let message = "the server is stopping";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some("server_stopping"), message)
    }

    fn retry_after(mut self, seconds: f64) -> ApiError {
        self.retry_after = Some(seconds.ceil().clamp(1.0, 3600.0) as u64);
        self
    }
}

impl From<Invalid> for ApiError {
    fn from(Invalid { param, message }: Invalid) -> ApiError {
        let message = format!("{param}: {message}");
        ApiError::invalid(param, message)
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        match &refusal {
            Refusal::Full { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("journal_full"), refusal.to_string());
                error.retry_after(DOWN_RETRY_SECONDS as f64)
            }
            Refusal::Failing { reason } => ApiError::not_kept(reason),
        }
    }
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> ApiError {
        let message = error.to_string();
        match error {
            ServiceError::Refused(Refused::Busy { retry_seconds, .. }) => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message).retry_after(retry_seconds)
            }
            ServiceError::Refused(refused) => refused_for_good(&refused, message),
            ServiceError::NoSuchToken { .. } => ApiError::invalid("prompt", message),
            ServiceError::Down(failure) => of_stage(failure.stage.map(|stage| stage.index), "pipeline_down", message),
            ServiceError::Silent { stage, .. } => of_stage(Some(stage.index), "stage_silent", message),
            ServiceError::Draining => ApiError::stopping(),
        }
    }
}

fn refused_for_good(refused: &Refused, message: String) -> ApiError {
    let message = match refused {
        // Programs look for these words.
        Refused::PromptTooLong { tokens, context } => {
            format!("This model's maximum context length is {context} tokens, and the prompt has {tokens}: shorten it")
        }
        _ => message,
    };
    let (param, code) = match refused {
        Refused::PromptTooLong { .. } | Refused::NeverFits { .. } => ("messages", "context_length_exceeded"),
        Refused::TooManyChoices { .. } => ("n", "invalid_value"),
        Refused::NothingWanted => ("max_tokens", "invalid_value"),
        Refused::EmptyPrompt | Refused::Busy { .. } => ("prompt", "invalid_value"),
    };
    ApiError::new(StatusCode::BAD_REQUEST, Some(code), message).with_param(param)
}

fn of_stage(stage: Option<usize>, code: &'static str, message: String) -> ApiError {
    let mut error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, Some(code), message);
    error.body.error.stage = stage;
    error.retry_after(DOWN_RETRY_SECONDS as f64)
}

impl ApiError {
    /// The same about another field: the one that this API calls the prompt.
    pub fn about_prompt(mut self, param: &str) -> ApiError {
        if matches!(self.body.error.param.as_deref(), Some("messages" | "prompt")) {
            self.body.error.param = Some(param.to_owned());
        }
        self
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(&self.body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            response.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let realm = HeaderValue::from_static("Bearer realm=\"pp-run\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, realm);
        }
        // For the log.
        response.extensions_mut().insert(Outcome { code: self.body.error.code.unwrap_or("error") });
        response
    }
}

/// What a response was, beside its status: for logs and metrics.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// The error's code.
    pub code: &'static str,
}
