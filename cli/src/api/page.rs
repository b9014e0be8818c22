//! The page at `/`: files that are part of the program. Nothing is fetched from elsewhere, nothing is inline, and what a
//! browser may do with them is written in their headers.

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderName, IF_NONE_MATCH, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// What the page may do: run and show its own files, talk to its own server, and nothing else; nor may it be framed.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const PERMISSIONS: HeaderName = HeaderName::from_static("permissions-policy");

const HTML: &str = "text/html; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";

/// A file of the page.
struct File {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
}

macro_rules! file {
    ($path:literal, $name:literal, $kind:expr) => {
        File { path: $path, kind: $kind, text: include_str!(concat!("page/", $name)) }
    };
}

const FILES: [File; 12] = [
    file!("/", "index.html", HTML),
    file!("/style.css", "style.css", STYLE),
    file!("/icon.svg", "icon.svg", "image/svg+xml"),
    file!("/app.js", "app.js", SCRIPT),
    file!("/api.js", "api.js", SCRIPT),
    file!("/chat.js", "chat.js", SCRIPT),
    file!("/dom.js", "dom.js", SCRIPT),
    file!("/gantt.js", "gantt.js", SCRIPT),
    file!("/markdown.js", "markdown.js", SCRIPT),
    file!("/pipe.js", "pipe.js", SCRIPT),
    file!("/settings.js", "settings.js", SCRIPT),
    file!("/store.js", "store.js", SCRIPT),
];

/// The files of the page; no key is needed for them.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let with = |router: Router<S>, file: &'static File| {
        router.route(file.path, get(move |headers: HeaderMap| async move { serve(file, &headers) }))
    };
    FILES.iter().fold(Router::new(), with)
}

/// A file, or that the browser has it already.
fn serve(file: &'static File, asked: &HeaderMap) -> Response {
    // Another version of the program may have another page: browsers ask each time, and get what has changed.
    let tag = format!("\"{}\"", &blake3::hash(file.text.as_bytes()).to_hex()[..16]);
    let headers = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (PERMISSIONS, "camera=(), microphone=(), geolocation=()"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_TYPE, file.kind),
    ];
    let known = asked.get(IF_NONE_MATCH).is_some_and(|known| known.as_bytes() == tag.as_bytes());
    let tag = [(ETAG, tag)];
    match known {
        true => (StatusCode::NOT_MODIFIED, headers, tag).into_response(),
        false => (headers, tag, file.text).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn every_file_of_the_folder_is_served_and_nothing_comes_from_elsewhere() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/api/page");
        let on_disk: BTreeSet<String> =
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        let name = |file: &File| if file.path == "/" { "index.html".to_owned() } else { file.path[1..].to_owned() };
        assert_eq!(on_disk, FILES.iter().map(name).collect());
        for file in &FILES {
            for word in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"]
            {
                assert!(!file.text.contains(word), "{}: {word} makes HTML or code of text", file.path);
            }
            let elsewhere = file.text.match_indices("://").map(|(at, _)| &file.text[at.saturating_sub(5)..]);
            for text in elsewhere {
                let text: String = text.chars().take(40).collect();
                assert!(text.contains("http://www.w3.org/") || file.kind == SCRIPT, "{}: {text}", file.path);
            }
            if file.kind == HTML {
                assert!(!file.text.contains("<style") && !file.text.contains(" style="), "no style is inline");
                assert_eq!(file.text.matches("<script").count(), 1, "no script is inline");
            }
        }
    }

    #[test]
    fn browsers_are_told_what_they_may_do_and_get_what_has_changed() {
        let first = serve(&FILES[0], &HeaderMap::new());
        assert_eq!(first.status(), StatusCode::OK);
        let policy = first.headers()[CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(first.headers()[X_CONTENT_TYPE_OPTIONS], "nosniff");
        assert_eq!(first.headers()[REFERRER_POLICY], "no-referrer");
        let mut known = HeaderMap::new();
        known.insert(IF_NONE_MATCH, first.headers()[ETAG].clone());
        assert_eq!(serve(&FILES[0], &known).status(), StatusCode::NOT_MODIFIED);
        assert_eq!(serve(&FILES[1], &known).status(), StatusCode::OK);
    }
}
