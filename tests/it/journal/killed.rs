//! A server that is killed while it answers.

use std::io::{Read, Write};
use std::net::TcpStream;

use pp_engine::random::Random;
use serde_json::{Value, json};

use super::{Desk, Stream, chat, texts};
use crate::cli::{program, run, stderr};
use crate::serve::client::{Response, Server};

/// A request of a client: its id, path and body.
struct Asked {
    id: &'static str,
    path: &'static str,
    body: Value,
}

fn asked(id: &'static str, path: &'static str, body: Value) -> Asked {
    Asked { id, path, body }
}

fn whole(mut body: Value) -> Value {
    body.as_object_mut().unwrap().shift_remove("stream");
    body
}

/// Several at once, of all kinds.
fn mixed(stop: &str) -> Vec<Asked> {
    let completions = "/v1/completions";
    let of_chat = "/v1/chat/completions";
    let form = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {
        "type": "array", "items": {"enum": ["run", "stage", 17]}, "minItems": 6, "maxItems": 9}}});
    vec![
        asked("sampled", of_chat, chat(json!({"stream": true, "temperature": 1.1, "seed": 5}))),
        asked(
            "two-1",
            completions,
            json!({"prompt": "run of", "n": 2, "seed": 8, "temperature": 1.4, "max_tokens": 50,
            "stream": true, "logprobs": 2}),
        ),
        asked("stop:text", of_chat, chat(json!({"stream": true, "temperature": 1.1, "seed": 5, "stop": [stop]}))),
        asked("formed", of_chat, chat(json!({"stream": true, "temperature": 1.2, "seed": 6, "response_format": form}))),
        asked(
            "not.streamed",
            completions,
            json!({"prompt": ["a stage", "of a"], "max_tokens": 40, "temperature": 1,
            "seed": 7, "frequency_penalty": 0.4}),
        ),
        asked("unseeded", of_chat, chat(json!({"stream": true, "temperature": 1.3}))),
    ]
}

fn begin(server: &Server, Asked { id, path, body }: &Asked) -> TcpStream {
    let headers = [("content-type", "application/json"), ("x-request-id", *id)];
    server.begin("POST", path, &headers, &body.to_string())
}

/// Reads so many bytes, or all that come.
fn read(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.take(count as u64).read_to_end(&mut bytes).expect("it streams");
    bytes
}

/// Bytes of a stream after which the server is killed, and what becomes of its journal: two, or as many as `PP_SOAK` says.
fn moments() -> Vec<(usize, Lost)> {
    let count = std::env::var("PP_SOAK").ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    let mut random = Random::new(count);
    let lost = |is_tail: bool| if is_tail { Lost::Tail } else { Lost::Torn };
    let soak = (0..count).map(|i| (random.between(300, 9000), lost(i % 2 == 0)));
    [(600, Lost::Torn), (6000, Lost::Tail)].into_iter().chain(soak).collect()
}

/// Twice killed, at different moments, with a journal whose end is torn or lost: every client hears the rest of what an
/// undisturbed server says, and who asks anew hears all of it.
#[test]
fn clients_of_a_killed_server_get_the_answers_that_they_would_have_got() {
    let undisturbed = Server::start(&["-m", &crate::cli::model(super::MODEL), "--device", "reference"]);
    let text = |body: &Value| undisturbed.post("/v1/chat/completions", &whole(body.clone())).ok();
    let first = text(&mixed("")[0].body);
    let said: Vec<char> = texts(&first)[&0].chars().collect();
    let stop: String = said[said.len() * 3 / 4..][..3].iter().collect();
    for (moment, lost) in moments() {
        let desk = Desk::new();
        let requests = mixed(&stop);
        let mut server = desk.server(&[]);
        let mut streams: Vec<TcpStream> = requests.iter().map(|asked| begin(&server, asked)).collect();
        let mut begun = read(&mut streams[0], moment);
        let mut heard = Vec::new();
        for last in [false, true] {
            drop(server);
            heard = hear(std::mem::take(&mut streams), std::mem::take(&mut begun), heard);
            lost.strike(&desk);
            server = desk.server(&["--resume"]);
            if last {
                break;
            }
            // They come back, and go on where they were.
            streams = requests.iter().zip(&heard).map(|(asked, heard)| attach(&server, asked, heard)).collect();
            begun = read(&mut streams[1], moment);
        }
        for (asked, heard) in requests.iter().zip(&heard) {
            let path = format!("/v1/requests/{}", asked.id);
            let found = server.get(&format!("{path}?stream=false")).ok();
            if asked.id != "unseeded" {
                let expected = undisturbed.post(asked.path, &whole(asked.body.clone())).ok();
                assert_eq!(found["choices"], expected["choices"], "{}", asked.id);
                assert_eq!(found["usage"]["completion_tokens"], expected["usage"]["completion_tokens"]);
            }
            let streamed = Stream::read(server.begin("GET", &format!("{path}?stream=true"), &[], ""), Vec::new());
            assert!(streamed.is_done);
            assert_eq!(streamed.texts(), texts(&found), "{}: from its beginning", asked.id);
            let rest = Stream::read(attach(&server, asked, heard), Vec::new());
            let together = [&heard.events[..], &rest.events].concat();
            if asked.id != "not.streamed" {
                assert_eq!(sorted(&together), sorted(&streamed.events), "{}: in pieces", asked.id);
                assert!(!heard.events.is_empty() || moment < 1000, "{}: some of it came before", asked.id);
            }
        }
    }
}

/// Chunks of each answer, in order: answers may come in another order beside each other.
fn sorted(events: &[Value]) -> Vec<&Value> {
    let mut events: Vec<&Value> = events.iter().collect();
    events.sort_by_key(|event| event["choices"][0]["index"].as_u64());
    events
}

/// What was heard until the connections broke, behind what was heard before.
fn hear(streams: Vec<TcpStream>, mut begun: Vec<u8>, before: Vec<Stream>) -> Vec<Stream> {
    let is_first = before.is_empty();
    let mut before = before.into_iter();
    let place = if is_first { 0 } else { 1 };
    let streams = streams.into_iter().enumerate().map(|(i, stream)| {
        let begun = if i == place { std::mem::take(&mut begun) } else { Vec::new() };
        let heard = Stream::read(stream, begun);
        let mut all = before.next().unwrap_or_default();
        all.last_id = heard.last_id.or(all.last_id);
        all.events.extend(heard.events);
        all
    });
    streams.collect()
}

/// The rest of a stream; browsers and others say in different places what they have.
fn attach(server: &Server, asked: &Asked, heard: &Stream) -> TcpStream {
    let path = format!("/v1/requests/{}?stream=true", asked.id);
    match &heard.last_id {
        Some(id) if asked.id == "sampled" => server.begin("GET", &format!("{path}&after={id}"), &[], ""),
        Some(id) => server.begin("GET", &path, &[("last-event-id", id)], ""),
        None => server.begin("GET", &path, &[], ""),
    }
}

/// What became of the end of a journal.
enum Lost {
    /// Half a commit.
    Torn,
    /// The last tokens, and a part of those before.
    Tail,
}

impl Lost {
    fn strike(&self, desk: &Desk) {
        let file = std::fs::OpenOptions::new().append(true).open(desk.path());
        let mut file = file.expect("there is a journal");
        let length = file.metadata().unwrap().len();
        match self {
            Lost::Torn => file.write_all(b"\xf7pp\xf7\xff\x00\x00\x00 half").unwrap(),
            // Tokens are the last that is written.
            Lost::Tail => file.set_len(length - 9).unwrap(),
        }
    }
}

/// What cannot go on is refused before anything is loaded, and the file stays.
#[test]
fn journals_that_are_not_to_be_gone_on_with_are_refused() {
    let desk = Desk::new();
    let server = desk.server(&[]);
    let mut stream = begin(&server, &asked("a", "/v1/chat/completions", chat(json!({"stream": true}))));
    read(&mut stream, 400);
    drop((server, stream));
    let check = |model: &str, options: &[&str], part: &str| {
        let before = std::fs::read(desk.path()).unwrap();
        let arguments = desk.arguments_of(model, options);
        let arguments: Vec<&str> =
            ["serve", "--port", "0"].into_iter().chain(arguments.iter().map(String::as_str)).collect();
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(part), "{part:?} in {}", stderr(&output));
        before
    };
    check(super::MODEL, &[], "holds what is not finished (1)");
    check("tiny/llama-tied", &["--resume"], "is of another model");
    let batch = ["batch", "/dev/null", "-o", "/dev/null", "-m", &crate::cli::model(super::MODEL), "--journal"];
    let output = program(&batch).arg(desk.path()).output().unwrap();
    assert!(stderr(&output).contains("is not of a batch"), "{}", stderr(&output));
    let server = desk.server(&["--resume"]);
    check(super::MODEL, &["--resume"], "another program has the journal");
    assert_eq!(server.get("/v1/requests/a").status, 200);
    drop(server);
    let mut bytes = std::fs::read(desk.path()).unwrap();
    bytes[80] ^= 1;
    std::fs::write(desk.path(), &bytes).unwrap();
    let before = check(super::MODEL, &["--resume"], "is damaged at byte");
    assert_eq!(std::fs::read(desk.path()).unwrap(), before, "it is left as it is");
}

/// Told to end, it gives its clients a clean end, with a journal and without; with one, the rest comes after a restart.
#[test]
fn a_server_that_is_told_to_end_says_so_to_its_clients() {
    let desk = Desk::new();
    for has_journal in [false, true] {
        let mut server = match has_journal {
            true => desk.server(&["--drain", "0"]),
            false => Server::start(&["-m", &crate::cli::model(super::MODEL), "--device", "reference", "--drain", "0"]),
        };
        let streamed = asked("a", "/v1/chat/completions", chat(json!({"stream": true, "seed": 3, "temperature": 1})));
        let awaited = asked("b", "/v1/chat/completions", chat(json!({"max_tokens": 150})));
        let mut stream = begin(&server, &streamed);
        let whole = begin(&server, &awaited);
        let begun = read(&mut stream, 900);
        server.terminate();
        let heard = Stream::read(stream, begun);
        assert_eq!(heard.events.last().unwrap()["error"]["code"], "server_stopping", "{heard:?}");
        assert!(!heard.is_done, "it is no whole answer");
        let refused = Response::read(whole);
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &"server_stopping".into()));
        assert!(server.wait().success());
        if has_journal {
            let server = desk.server(&["--resume"]);
            let rest = Stream::read(attach(&server, &streamed, &heard), Vec::new());
            let expected = server.post(streamed.path, &self::whole(streamed.body.clone())).ok();
            let before = &heard.events[..heard.events.len() - 1];
            let events = [before, &rest.events].concat();
            assert_eq!(Stream { events, ..Stream::default() }.texts(), texts(&expected));
            assert_eq!(server.get("/v1/requests/b").ok()["usage"]["completion_tokens"], 150);
        }
    }
}
