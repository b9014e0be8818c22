//! Every request has a name: the client's, if it sends a sane one, else one that nobody guesses. It is in the response
//! and in the log; where answers are kept it is what they are asked for by.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

use super::Shared;
use super::errors::Outcome;

/// The header, both ways.
const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Characters of a name at most.
const LENGTH_MAX: usize = 128;

/// A request's name.
#[derive(Clone, Debug)]
pub struct Name(pub String);

impl Name {
    fn of(headers: &HeaderMap) -> Name {
        let sent = headers.get(HEADER).and_then(|value| value.to_str().ok());
        let is_sane = |name: &&str| {
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
            (1..=LENGTH_MAX).contains(&name.len()) && name.bytes().all(plain)
        };
        Name(sent.filter(is_sane).map_or_else(secret, str::to_owned))
    }
}

/// A name that nobody guesses: 128 bits of the system's randomness.
fn secret() -> String {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => format!("req-{:032x}", u128::from_le_bytes(bytes)),
        // No system without it is known.
        _ => panic!("the system gives no random bytes"),
    }
}

/// Names a request, and logs what became of it.
pub async fn named(State(state): State<Shared>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let name = Name::of(request.headers());
    request.extensions_mut().insert(name.clone());
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(&name.0) {
        response.headers_mut().insert(HEADER, value);
    }
    let status = response.status().as_u16();
    let code = response.extensions().get::<Outcome>().map_or("ok", |outcome| outcome.code);
    state.metrics.responded(&path, status);
    let seconds = began.elapsed().as_secs_f64();
    tracing::info!(id = name.0, %method, path, status, code, seconds, "responded");
    response
}
