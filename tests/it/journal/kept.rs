//! Answers that are kept while the server lives: who may have them, and for how long.

use std::io::Read;

use serde_json::{Value, json};

use super::{Desk, Stream, chat, texts};
use crate::serve::client::Server;
use crate::serve::eventually;

fn code(response: &crate::serve::client::Response) -> (u16, Value) {
    (response.status, response.json()["error"]["code"].clone())
}

const CHAT: &str = "/v1/chat/completions";

/// Begins a streamed answer, and goes after some of it.
fn come_and_go(server: &Server, headers: &[(&str, &str)], body: Value) {
    let mut stream = server.begin("POST", CHAT, headers, &chat(body).to_string());
    stream.read_exact(&mut [0; 900]).expect("it streams");
}

#[test]
fn who_loses_an_answer_finds_it_again() {
    let desk = Desk::new();
    let server = desk.server(&[]);
    let body = json!({"stream": true, "seed": 4, "temperature": 1, "max_tokens": 100});
    let expected = server.post(CHAT, &chat(json!({"seed": 4, "temperature": 1, "max_tokens": 100}))).ok();
    come_and_go(&server, &[("x-request-id", "mine"), ("x-on-disconnect", "finish")], body.clone());
    let running = server.get("/v1/requests/mine?stream=false&wait=0");
    assert_eq!((running.status, &running.json()["status"]), (202, &"running".into()), "{}", running.body);
    assert!(running.json()["completion_tokens"].as_u64() > Some(0));
    // As it was asked for: in pieces.
    let again = Stream::read(server.begin("GET", "/v1/requests/mine", &[], ""), Vec::new());
    assert!(again.is_done);
    assert_eq!(again.texts(), texts(&expected));
    let found = server.get("/v1/requests/mine?stream=false").ok();
    assert_eq!(found["choices"], expected["choices"]);
    assert_eq!(found["id"], again.events[0]["id"], "they are the same answers");
    assert_eq!(code(&server.post_named("mine", CHAT, &chat(json!({})))), (409, "request_id_in_use".into()));
    for (query, param) in [
        ("after=1-2", "after"),
        ("after=x", "after"),
        ("stream=false&after=3", "after"),
        ("stream=false&wait=-1", "wait"),
        ("wait=1", "wait"),
        ("never=1", "query"),
    ] {
        let refused = server.get(&format!("/v1/requests/mine?{query}"));
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &param.into()), "{query}");
    }
    assert_eq!(server.send("DELETE", "/v1/requests/mine", &[], "").status, 204);
    assert_eq!(code(&server.get("/v1/requests/mine")), (404, "request_not_found".into()));
}

/// As without a journal, unless they ask otherwise; what is cancelled is over for everybody.
#[test]
fn clients_that_go_cancel_and_so_does_who_asks_for_it() {
    let desk = Desk::new();
    let server = desk.server(&[]);
    let long = json!({"stream": true, "max_tokens": 150});
    come_and_go(&server, &[("x-request-id", "a")], long.clone());
    eventually("it is forgotten", || server.get("/v1/requests/a?stream=false&wait=0").status == 404);
    let mut other =
        server.begin("POST", CHAT, &[("x-request-id", "b"), ("x-on-disconnect", "finish")], &chat(long).to_string());
    let mut begun = vec![0; 900];
    other.read_exact(&mut begun).unwrap();
    assert_eq!(server.send("DELETE", "/v1/requests/b", &[], "").status, 204);
    let heard = Stream::read(other, begun);
    assert!(!heard.is_done);
    assert_eq!(heard.events.last().unwrap()["error"]["code"], "request_cancelled");
    eventually("nothing runs", || server.get("/metrics").body.contains("pp_run_requests 0.0\n"));
    assert!(server.get("/metrics").body.contains("pp_run_journal_requests 0.0\n"));
    assert_eq!(code(&server.get("/v1/requests/b")), (404, "request_not_found".into()));
    let odd = server.send("POST", CHAT, &[("x-on-disconnect", "perhaps")], &chat(json!({})).to_string());
    assert_eq!((odd.status, &odd.json()["error"]["param"]), (400, &"x-on-disconnect".into()));
}

#[test]
fn answers_are_kept_for_who_has_the_key_and_for_a_while() {
    let desk = Desk::new();
    let key = desk.dir.path().join("key");
    std::fs::write(&key, "0123456789abcdef0123\n").unwrap();
    let server = desk.server(&["--api-key", key.to_str().unwrap(), "--keep-answers", "1"]);
    let headers = [("authorization", "Bearer 0123456789abcdef0123")];
    let asked = server.send("POST", CHAT, &headers, &chat(json!({"max_tokens": 2})).to_string());
    let name = asked.header("x-request-id").unwrap().to_owned();
    let digits = name.strip_prefix("req-").unwrap();
    assert!(digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit()), "{name}");
    let path = format!("/v1/requests/{name}");
    for method in ["GET", "DELETE"] {
        assert_eq!(code(&server.send(method, &path, &[], "")), (401, "invalid_api_key".into()));
    }
    let found = server.send("GET", &path, &headers, "").ok();
    assert_eq!(found["choices"], asked.ok()["choices"]);
    eventually("it was kept for a second", || server.send("GET", &path, &headers, "").status == 404);
    let document = server.get("/openapi.json").ok();
    let operations = document["paths"]["/v1/requests/{id}"].as_object().unwrap();
    assert!(operations.contains_key("get") && operations.contains_key("delete"));
}

#[test]
fn without_a_journal_nothing_is_kept_and_that_is_said() {
    let server = Server::start(&["-m", &crate::cli::model("tiny/llama-tied")]);
    let refused = server.get("/v1/requests/a");
    assert_eq!(code(&refused), (404, "request_not_found".into()));
    assert!(refused.body.contains("--journal"), "{}", refused.body);
    let odd = server.send("POST", CHAT, &[("x-on-disconnect", "finish")], &chat(json!({})).to_string());
    assert_eq!(code(&odd), (400, "unsupported_parameter".into()));
    assert!(!server.get("/metrics").body.contains("journal"));
}
