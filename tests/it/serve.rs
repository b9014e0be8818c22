//! The server over real sockets, with a client that knows nothing of it.

pub(crate) mod client;
mod down;
mod formed;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cli::{PROMPT, model, object, program};
use client::{Response, Server};

fn tied(options: &[&str]) -> Server {
    Server::start(&[&["-m", &model("tiny/llama-tied"), "--activations", "f32"], options].concat())
}

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Waits until it is so.
#[track_caller]
pub(crate) fn eventually(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !is_so() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_software_driver_of_one_thread_has_none_of_its_own() {
    let m = model("tiny/llama-tied");
    for (threads, has) in [("1", false), (" 1 ", false), ("2", true)] {
        let mut command = program(&["serve", "--port", "0", "--json", "--quiet", "-m", &m]);
        let server = Server::spawn(command.env("LP_NUM_THREADS", threads));
        let folder = format!("/proc/{}/task", server.id());
        let names = std::fs::read_dir(&folder).expect("it runs").flatten();
        let mut names = names.map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
        assert_eq!(names.any(|name| name.starts_with("llvmpipe-")), has, "LP_NUM_THREADS={threads:?}");
        server.post("/v1/chat/completions", &chat(json!({"max_tokens": 2}))).ok();
    }
}

#[test]
fn answers_are_those_of_the_program() {
    let m = model("tiny/llama-tied");
    let server = tied(&[]);
    for (options, fields) in [
        (&["-t", "0"][..], json!({"temperature": 0})),
        (&["-t", "1.3", "--top-p", "0.9", "--seed", "7"], json!({"temperature": 1.3, "top_p": 0.9, "seed": 7})),
        (
            &["-t", "0.8", "--seed", "3", "--repeat-penalty", "1.2"],
            json!({"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2}),
        ),
    ] {
        let arguments = [&["-m", &m, "--activations", "f32", "-n", "12"], options].concat();
        let expected = object(&[&arguments[..], &[PROMPT]].concat());
        let found = server.post("/v1/chat/completions", &chat(fields.clone())).ok();
        let choice = &found["choices"][0];
        assert_eq!(choice["message"]["content"], expected["text"], "{options:?}");
        assert_eq!(choice["finish_reason"], expected["finish_reason"]);
        let counts = |key: &str| expected[key].as_array().map(Vec::len);
        assert_eq!(found["usage"]["prompt_tokens"].as_u64().map(|n| n as usize), counts("prompt_ids"));
        assert_eq!(found["usage"]["completion_tokens"].as_u64().map(|n| n as usize), counts("tokens"));
        // The same text, continued without a template, from text and from ids.
        let raw = object(&[&arguments[..], &["--raw", PROMPT]].concat());
        for prompt in [json!(PROMPT), raw["prompt_ids"].clone(), json!([PROMPT])] {
            let mut body = json!({"prompt": prompt, "max_tokens": 12});
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let found = server.post("/v1/completions", &body).ok();
            assert_eq!(found["choices"][0]["text"], raw["text"], "{prompt}");
        }
    }
}

#[test]
fn streams_are_what_official_clients_expect() {
    // Usage tells what was cached: the same both times.
    let server = tied(&["--no-prefix-cache"]);
    let whole = server.post("/v1/chat/completions", &chat(json!({"logprobs": true, "top_logprobs": 2}))).ok();
    let fields =
        json!({"stream": true, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 2});
    let response = server.post("/v1/chat/completions", &chat(fields));
    assert_eq!((response.status, response.header("content-type")), (200, Some("text/event-stream")));
    let (chunks, last) = response.events();
    assert_eq!(last, "[DONE]");
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant", "the role comes first");
    let usage = chunks.last().unwrap();
    assert_eq!((usage["choices"].as_array().map(Vec::len), &usage["usage"]), (Some(0), &whole["usage"]));
    let middle = &chunks[..chunks.len() - 1];
    assert!(middle.iter().all(|chunk| chunk["usage"].is_null() && chunk["object"] == "chat.completion.chunk"));
    assert!(middle.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
    let text: String = middle.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"]);
    assert_eq!(middle.last().unwrap()["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    let logprobs = |chunk: &Value| chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    let streamed: Vec<Value> = middle.iter().flat_map(logprobs).collect();
    assert_eq!(streamed, logprobs(&whole));
    assert!(streamed.iter().all(|token| token["top_logprobs"].as_array().map(Vec::len) == Some(2)));
    let spelt: Vec<u8> = streamed
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8))
        .collect();
    assert!(String::from_utf8_lossy(&spelt).starts_with(&text), "tokens spell the text");
}

#[test]
fn a_stop_text_ends_an_answer_and_never_shows() {
    let server = tied(&[]);
    let whole = server.post("/v1/chat/completions", &chat(json!({"max_tokens": 24}))).ok();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(5).take(3).collect();
    let expected = text.split(&stop).next().unwrap();
    let fields = json!({"max_tokens": 24, "stop": ["never there", stop]});
    let found = server.post("/v1/chat/completions", &chat(fields.clone())).ok();
    assert_eq!(
        (&found["choices"][0]["message"]["content"], &found["choices"][0]["finish_reason"]),
        (&expected.into(), &"stop".into())
    );
    let mut streamed = fields;
    streamed["stream"] = true.into();
    let (chunks, _) = server.post("/v1/chat/completions", &chat(streamed)).events();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, expected);
}

/// Characters of several bytes, which come in several tokens, are sent whole; what is no character shows as U+FFFD in
/// the same places as in the whole answer.
#[test]
fn characters_are_never_split() {
    let server = tied(&[]);
    let mut wide = 0;
    for seed in 0..24 {
        let fields = json!({"temperature": 3.0, "seed": seed, "max_tokens": 40, "logprobs": true, "stop": ["\u{e9}"]});
        let whole = server.post("/v1/chat/completions", &chat(fields.clone())).ok();
        let mut streamed = fields;
        streamed["stream"] = true.into();
        let (chunks, _) = server.post("/v1/chat/completions", &chat(streamed)).events();
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(text, whole["choices"][0]["message"]["content"], "seed {seed}");
        assert!(!text.contains('\u{e9}'), "the stop text never shows");
        let byte = |byte: &Value| byte.as_u64().unwrap() as u8;
        let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
        let bytes: Vec<u8> =
            tokens.iter().flat_map(|token| token["bytes"].as_array().unwrap().iter().map(byte)).collect();
        // An independent way from bytes to text.
        let spelt = String::from_utf8_lossy(&bytes);
        assert!(spelt.starts_with(&text), "seed {seed}: {text:?} is not the beginning of {spelt:?}");
        wide += text.chars().filter(|c| c.len_utf8() > 1 && *c != char::REPLACEMENT_CHARACTER).count();
    }
    assert!(wide > 0, "some characters took several bytes");
}

/// The status line and all else that comes until the server closes the connection.
fn rest_of(mut stream: TcpStream) -> String {
    let mut rest = String::new();
    stream.set_read_timeout(Some(Duration::from_secs(90))).unwrap();
    // One that is cut off has said what it said.
    let _ = stream.read_to_string(&mut rest);
    rest
}

/// Clients that send half a head, half a body, or nothing at all keep nobody waiting, and are shown out.
#[test]
fn slow_clients_keep_nobody_waiting() {
    let server = tied(&[]);
    let connect = |begin: &str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(begin.as_bytes()).unwrap();
        stream
    };
    let silent: Vec<TcpStream> = (0..50).map(|_| connect("")).collect();
    let half_head = connect("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-slow:");
    let half_body = connect(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: 100\r\n\r\n{\"messages\": [",
    );
    server.post("/v1/chat/completions", &chat(json!({"max_tokens": 2}))).ok();
    let late = rest_of(half_body);
    assert!(late.starts_with("HTTP/1.1 408 ") && late.contains("request_timeout"), "{late}");
    let unheard = rest_of(half_head);
    assert!(unheard.is_empty() || unheard.starts_with("HTTP/1.1 408 "), "{unheard}");
    assert!(silent.into_iter().map(rest_of).all(|said| said.is_empty() || said.starts_with("HTTP/1.1 408 ")));
}

/// Who is refused before the body is there hears that the connection ends with it; who sent all of it can go on.
#[test]
fn a_connection_whose_body_was_not_read_ends() {
    let server = tied(&["--max-body-bytes", "4096"]);
    let ask = |path: &str, kind: &str, length: usize, body: &str| {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        rest_of(stream).to_ascii_lowercase()
    };
    for (path, kind, length) in [
        ("/v1/nothing", "application/json", 100),
        ("/v1/models", "application/json", 100),
        ("/v1/embeddings", "application/json", 100),
        ("/v1/completions", "text/plain", 100),
        ("/v1/completions", "application/json", 5000),
    ] {
        let said = ask(path, kind, length, "");
        assert!(said.starts_with("http/1.1 4") && said.contains("\r\nconnection: close\r\n"), "{path}: {said}");
    }
    let mut stream = TcpStream::connect(server.address()).unwrap();
    for last in [false, true] {
        let more = if last { "connection: close\r\n" } else { "" };
        let body = r#"{"prompt": "a", "max_tokens": 1, "stream": false}"#;
        let head =
            format!("POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{more}content-length: {}\r\n\r\n", body.len());
        stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    }
    let said = rest_of(stream);
    assert_eq!(said.matches("HTTP/1.1 200 OK").count(), 2, "{said}");
}

/// Heads that are too large, or have too many headers, are refused before anything is made of them.
#[test]
fn heads_are_bounded() {
    let server = tied(&[]);
    let large = "x".repeat(300_000);
    assert_eq!(server.send("GET", "/ready", &[("x-large", &large)], "").status, 431);
    let many: Vec<(String, &str)> = (0..200).map(|i| (format!("x-{i}"), "1")).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(server.send("GET", "/ready", &many, "").status, 431);
    assert_eq!(server.get("/ready").status, 200);
}

#[test]
fn what_is_wrong_is_refused_by_name() {
    let server = tied(&["--max-body-bytes", "4096"]);
    let check = |path: &str, body: Value, status: u16, param: Value, code: &str| {
        let response = server.post(path, &body);
        let error = response.json();
        let error = &error["error"];
        assert_eq!(
            (response.status, &error["param"], &error["code"]),
            (status, &param, &code.into()),
            "{body}: {error}"
        );
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        assert!(response.header("x-request-id").is_some());
    };
    let of_chat =
        |fields: Value, param: &str, code: &str| check("/v1/chat/completions", chat(fields), 400, param.into(), code);
    of_chat(json!({"temperature": -1}), "temperature", "invalid_value");
    of_chat(json!({"temperature": "hot"}), "temperature", "invalid_value");
    of_chat(json!({"temprature": 1}), "temprature", "unknown_parameter");
    of_chat(json!({"top_p": 0}), "top_p", "invalid_value");
    of_chat(json!({"n": 0}), "n", "invalid_value");
    of_chat(json!({"n": 10_000}), "n", "invalid_value");
    of_chat(json!({"max_tokens": 0}), "max_tokens", "invalid_value");
    of_chat(json!({"stop": [""]}), "stop", "invalid_value");
    of_chat(json!({"stop": 5}), "stop", "invalid_value");
    of_chat(json!({"logit_bias": {"100000": 1}}), "logit_bias", "invalid_value");
    of_chat(json!({"top_logprobs": 2}), "top_logprobs", "invalid_value");
    of_chat(json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "invalid_value");
    of_chat(json!({"stream_options": {"include_usage": true}}), "stream_options", "invalid_value");
    of_chat(json!({"messages": []}), "messages", "invalid_value");
    of_chat(json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content", "invalid_value");
    of_chat(json!({"messages": [{"role": "king", "content": "a"}]}), "messages[0].role", "invalid_value");
    of_chat(
        json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        "messages[0].content[0].type",
        "invalid_value",
    );
    of_chat(
        json!({"messages": [{"role": "user", "content": "run of ".repeat(400)}]}),
        "messages",
        "context_length_exceeded",
    );
    check("/v1/chat/completions", json!({}), 400, "messages".into(), "invalid_value");
    check("/v1/chat/completions", json!([]), 400, "body".into(), "invalid_value");
    check("/v1/chat/completions", chat(json!({"model": "gpt-4"})), 404, "model".into(), "model_not_found");
    check("/v1/completions", json!({"prompt": "a", "echo": true}), 400, "echo".into(), "unsupported_parameter");
    check("/v1/completions", json!({"prompt": [999_999]}), 400, "prompt".into(), "invalid_value");
    check("/v1/embeddings", json!({"input": "a"}), 400, "model".into(), "unsupported_parameter");
    check("/v1/nothing", json!({}), 404, Value::Null, "unknown_url");
    check("/v1/models", json!({}), 405, Value::Null, "method_not_allowed");
    check("/v1/chat/completions", chat(json!({"user": "x".repeat(5000)})), 413, Value::Null, "request_too_large");
    let broken = server.send("POST", "/v1/completions", &[], "{\"prompt\": ");
    assert_eq!((broken.status, &broken.json()["error"]["code"]), (400, &"invalid_json".into()));
    assert_eq!(server.get("/v1/models").ok()["data"][0]["id"], "llama-tied");
    for path in ["/v1/models/%ff", "/v1/models/gpt-4", "/v1/requests/%ff"] {
        let missing = server.get(path);
        assert!(missing.status == 404 && missing.json()["error"]["code"].is_string(), "{path}: {}", missing.body);
    }
    let named = server.send("GET", "/v1/models", &[("x-request-id", "mine-1")], "");
    assert_eq!(named.header("x-request-id"), Some("mine-1"));
}

#[test]
fn pages_of_other_sites_and_callers_without_the_key_get_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "0123456789abcdef0123\n").unwrap();
    let server = tied(&["--api-key", file.to_str().unwrap()]);
    let open = tied(&[]);
    for (path, status) in
        [("/health", 200), ("/ready", 200), ("/openapi.json", 200), ("/v1/models", 401), ("/metrics", 401)]
    {
        let response = server.get(path);
        assert_eq!(response.status, status, "{path}");
        assert_eq!(response.header("www-authenticate").is_some(), status == 401);
        // The document tells of the key, where there is one.
        let documents = [(&server, true), (&open, false)];
        for (server, has_key) in documents {
            let document = server.get("/openapi.json").ok();
            let security = &document["paths"].get(path).expect(path)["get"]["security"];
            assert_eq!(security.is_array(), has_key && status == 401, "{path}");
        }
        let right = server.send("GET", path, &[("authorization", "Bearer 0123456789abcdef0123")], "");
        assert_eq!(right.status, 200, "{path}");
    }
    let wrong = server.send("GET", "/v1/models", &[("authorization", "Bearer 0123456789abcdef0124")], "");
    assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (401, &"invalid_api_key".into()));
    assert_eq!(server.send("GET", "/ready", &[("host", "evil.example")], "").status, 403);
    assert_eq!(server.send("GET", "/ready", &[("origin", "http://evil.example")], "").status, 403);
    let refused = crate::cli::run(&["serve", "-m", &model("tiny/llama-tied"), "--host", "0.0.0.0", "--port", "0"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--api-key"));
}

/// The value of a metric without labels.
fn metric(server: &Server, name: &str) -> f64 {
    let text = server.get("/metrics").body;
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("pp_run_{name} ")));
    line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
}

#[test]
fn a_client_that_goes_is_forgotten() {
    let server = Server::start(&["-m", &model("tiny/llama-33"), "--device", "reference"]);
    let body = chat(json!({"max_tokens": 150, "stream": true, "n": 2})).to_string();
    for _ in 0..3 {
        let mut stream = server.begin("POST", "/v1/chat/completions", &[], &body);
        let mut some = [0; 16];
        stream.read_exact(&mut some).unwrap();
        eventually("it runs", || metric(&server, "requests") == 1.0);
        drop(stream);
        eventually("it is forgotten", || metric(&server, "requests") == 0.0 && metric(&server, "kv_pages_held") == 0.0);
    }
}

#[test]
fn a_full_queue_says_when_to_come_again() {
    let server = Server::start(&[
        "-m",
        &model("tiny/llama-33"),
        "--device",
        "reference",
        "--max-sequences",
        "1",
        "--max-queue",
        "1",
    ]);
    let body = chat(json!({"max_tokens": 150, "stream": true})).to_string();
    let running = server.begin("POST", "/v1/chat/completions", &[], &body);
    eventually("it runs", || metric(&server, "running") == 1.0);
    let waiting = server.begin("POST", "/v1/chat/completions", &[], &body);
    eventually("it waits", || metric(&server, "queue") == 1.0);
    let refused = server.post("/v1/chat/completions", &chat(json!({})));
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (429, &"queue_full".into()));
    assert!(refused.header("retry-after").and_then(|after| after.parse::<u64>().ok()).is_some_and(|after| after > 0));
    drop((running, waiting));
    eventually("there is a place", || {
        server.post("/v1/chat/completions", &chat(json!({"max_tokens": 1}))).status == 200
    });
}

#[test]
fn what_has_begun_ends_when_the_server_is_told_to_stop() {
    let mut server = Server::start(&["-m", &model("tiny/llama-33"), "--device", "reference"]);
    let body = chat(json!({"max_tokens": 60, "stream": true})).to_string();
    let stream = server.begin("POST", "/v1/chat/completions", &[], &body);
    eventually("it runs", || metric(&server, "requests") == 1.0);
    server.terminate();
    eventually("it drains", || server.get("/ready").status == 503);
    let late = server.post("/v1/chat/completions", &chat(json!({})));
    assert_eq!((late.status, &late.json()["error"]["code"]), (503, &"server_stopping".into()));
    let (chunks, last) = Response::read(stream).events();
    assert_eq!(last, "[DONE]", "it was answered to the end");
    assert!(chunks.last().unwrap()["choices"][0]["finish_reason"].is_string());
    assert!(server.wait().success());
}
