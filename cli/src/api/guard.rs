//! Who may ask: keys, and pages of other sites that a browser here shows.

use std::net::IpAddr;
use std::path::Path;

use anyhow::Result;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::Response;
use subtle::ConstantTimeEq;

use super::Shared;
use super::errors::ApiError;
use crate::errors::usage;

/// Characters of a key at least: shorter ones are guessed.
const KEY_MIN: usize = 16;
/// Bytes of a file with a key at most.
const KEY_FILE_MAX: u64 = 4096;

/// What callers must know.
pub struct Key(blake3::Hash);

impl Key {
    /// The one that a file holds, without the white space around it.
    ///
    /// # Errors
    /// When it cannot be read, or is no key.
    pub fn read(path: &Path) -> Result<Key> {
        let bad = |what: String| usage(format!("--api-key {}: {what}", path.display()));
        let length = std::fs::metadata(path).map_err(|error| bad(format!("cannot read it: {error}")))?.len();
        if length > KEY_FILE_MAX {
            return Err(bad(format!("it has {length} bytes, and a key at most {KEY_FILE_MAX}")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| bad(format!("cannot read it: {error}")))?;
        let key = text.trim();
        if key.len() < KEY_MIN || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(bad(format!(
                "expected one key of at least {KEY_MIN} characters, without white space; make one with: openssl rand -hex 32"
            )));
        }
        Ok(Key::of(key))
    }

    fn of(key: &str) -> Key {
        Key(blake3::hash(key.as_bytes()))
    }

    /// Whether it is the one that `headers` bring. Takes as long for every key: only digests of one size are compared.
    fn is_in(&self, headers: &HeaderMap) -> Option<bool> {
        let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
        let (scheme, key) = value.split_once(' ')?;
        let is_bearer = scheme.eq_ignore_ascii_case("bearer");
        is_bearer.then(|| self.0.as_bytes().ct_eq(blake3::hash(key.trim().as_bytes()).as_bytes()).into())
    }
}

/// Lets pass who has the key, where there is one.
pub async fn has_key(State(state): State<Shared>, request: Request, next: Next) -> Result<Response, ApiError> {
    if let Some(key) = &state.settings.key {
        match key.is_in(request.headers()) {
            Some(true) => {}
            Some(false) => return Err(ApiError::unauthorized("this API key is not the server's")),
            None => {
                let message = "this server wants an API key: send the header `Authorization: Bearer KEY`";
                return Err(ApiError::unauthorized(message));
            }
        }
    }
    Ok(next.run(request).await)
}

/// Keeps out pages of other sites: those that a name leads here to (DNS rebinding), and those that a browser tells of.
pub async fn same_site(State(state): State<Shared>, request: Request, next: Next) -> Result<Response, ApiError> {
    let headers = request.headers();
    let host = host(&request);
    if state.settings.is_loopback && !host.is_some_and(|host| state.settings.is_own(host)) {
        return Err(ApiError::forbidden(format!(
            "the Host header {:?} is none of this server's names: it listens on this machine only (allow a name with --allow-host)",
            host.unwrap_or("")
        )));
    }
    if let Some(origin) = headers.get(header::ORIGIN) {
        let origin = origin.to_str().unwrap_or("");
        let of = origin.split_once("://").map(|(_, authority)| authority);
        if of.is_none() || of != host {
            return Err(ApiError::forbidden(format!("pages of {origin:?} may not ask this server: CORS is off")));
        }
    }
    Ok(next.run(request).await)
}

/// The host and port that a request names.
fn host(request: &Request) -> Option<&str> {
    match request.uri().authority() {
        Some(authority) => Some(authority.as_str()),
        None => request.headers().get(header::HOST)?.to_str().ok(),
    }
}

/// Whether a name with or without a port is one of this machine's own, or of `allowed`.
pub fn is_own_name(host: &str, allowed: &[String]) -> bool {
    let name = without_port(host);
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let is_loopback = bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    let is_localhost = bare.eq_ignore_ascii_case("localhost") || bare.to_ascii_lowercase().ends_with(".localhost");
    is_loopback || is_localhost || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_known_and_others_are_not() {
        for own in ["localhost", "LOCALHOST:8080", "a.localhost:1", "127.0.0.1", "127.1.2.3:80", "[::1]:8080", "[::1]"]
        {
            assert!(is_own_name(own, &[]), "{own}");
        }
        for foreign in ["", "evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1:8080", "[::2]:80"]
        {
            assert!(!is_own_name(foreign, &[]), "{foreign}");
        }
        assert!(is_own_name("Rig.lan:8080", &["rig.lan".to_owned()]));
    }

    #[test]
    fn a_key_is_found_only_where_it_is_whole() {
        let key = Key::of("0123456789abcdef");
        let found = |value: &str| {
            let headers = HeaderMap::from_iter([(header::AUTHORIZATION, value.parse().unwrap())]);
            key.is_in(&headers)
        };
        assert_eq!(found("Bearer 0123456789abcdef"), Some(true));
        assert_eq!(found("bearer  0123456789abcdef"), Some(true));
        assert_eq!(found("Bearer 0123456789abcde"), Some(false));
        assert_eq!(found("Bearer "), Some(false));
        assert_eq!(found("Basic 0123456789abcdef"), None);
        assert_eq!(key.is_in(&HeaderMap::new()), None);
    }
}
