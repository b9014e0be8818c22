//! The server under a crowd: many who stream at once, some of whom vanish, some of whom send what is no request.
//!
//! Nothing of them remains, what is refused is refused properly, and every answer is the one that is given alone. The
//! short form takes half a minute; `PP_SOAK=600 cargo test --test it crowd -- --nocapture` goes on for ten minutes.

use std::io::{BufRead, BufReader, Write};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pp_engine::random::Random;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::http::Response;

use crate::cluster::processes::Running;
use crate::support::data;

/// Clients at once.
const CLIENTS: usize = 64;
/// How long the crowd stays, where `PP_SOAK` does not say.
const SECONDS: u64 = 20;
/// How long the server may take to be rid of the last of them.
const PATIENCE: Duration = Duration::from_secs(60);
/// What memory may grow by beyond what the first crowd left, and by what share of it.
const GROWTH: (f64, f64) = (24e6, 0.1);

struct Server {
    running: Running,
    url: String,
    agent: Agent,
}

impl Server {
    fn start() -> Server {
        let model = data("tiny/llama-untied");
        let mut command = Command::new(env!("CARGO_BIN_EXE_pp-run"));
        command.args(["serve", "--port", "0", "--json", "--device", "reference", "--stages", "2"]);
        command.args(["--max-sequences", "8", "--max-queue", "24", "-m"]).arg(model).env_remove("PP_MODEL");
        let mut running = Running::start(&mut command);
        let ready: Value = serde_json::from_str(&running.prints("{")).expect("JSON");
        let url = ready["url"].as_str().expect("an address").trim_end_matches("/v1").to_owned();
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).build();
        Server { running, url, agent: config.new_agent() }
    }

    fn get(&self, path: &str) -> Value {
        let mut response = self.agent.get(format!("{}{path}", self.url)).call().expect("an answer");
        serde_json::from_str(&response.body_mut().read_to_string().expect("text")).expect("JSON")
    }

    fn post(&self, body: &str) -> Response<ureq::Body> {
        let request = self.agent.post(format!("{}/v1/chat/completions", self.url));
        request.content_type("application/json").send(body).expect("an answer")
    }

    /// Until nothing is left of anybody: requests, pages in use, sequences on the stages.
    fn is_rid_of_all(&self) {
        let until = Instant::now() + PATIENCE;
        loop {
            let pipeline = self.get("/v1/pipeline");
            let left = [&pipeline["requests"]["open"], &pipeline["requests"]["waiting"], &pipeline["kv_pages"]["held"]];
            let on_stages = pipeline["stages"].as_array().expect("stages").iter().map(|stage| &stage["sequences"]);
            if left.into_iter().chain(on_stages).all(|count| count == 0) {
                return;
            }
            assert!(Instant::now() < until, "something is left: {pipeline}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.running.id())).expect("it runs").count()
    }

    /// Bytes of memory that it has.
    fn memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.running.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("Linux tells");
        1024.0 * line.trim().trim_end_matches(" kB").parse::<f64>().expect("a number")
    }
}

/// A request that is answered, and what its answer is.
struct Known {
    body: Value,
    text: String,
    tokens: u64,
}

fn questions() -> Vec<Value> {
    let words = ["pipe", "stage", "token", "page", "head", "tail", "hop", "law"];
    let ask = |i: usize| {
        let content = (0..3 + 5 * (i % 6)).map(|k| words[(i * 3 + k * (i + 1)) % 8]).collect::<Vec<_>>().join(" ");
        json!({
            "messages": [{"role": "user", "content": content}], "stream": true, "max_tokens": 4 + 9 * (i % 5),
            "temperature": if i.is_multiple_of(2) { 0.0 } else { 0.9 }, "seed": i, "stream_options": {"include_usage": true},
        })
    };
    (0..20).map(ask).collect()
}

/// The data of a stream's events, until it ends or `enough` says so.
fn events(response: Response<ureq::Body>, mut enough: impl FnMut(usize) -> bool) -> (Vec<Value>, bool) {
    let mut events = Vec::new();
    let reader = BufReader::new(response.into_body().into_reader());
    for line in reader.lines() {
        let line = line.expect("the stream does not break");
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            return (events, true);
        }
        events.push(serde_json::from_str(data).expect("JSON"));
        if enough(events.len()) {
            break;
        }
    }
    (events, false)
}

fn text(events: &[Value]) -> String {
    events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect()
}

fn alone(server: &Server, body: Value) -> Known {
    let response = server.post(&body.to_string());
    assert_eq!(response.status(), 200);
    let (events, done) = events(response, |_| false);
    assert!(done, "{events:?}");
    let tokens = events.iter().find_map(|event| event["usage"]["completion_tokens"].as_u64()).expect("usage");
    Known { body, text: text(&events), tokens }
}

/// What is no request, and the status that it gets.
const MALFORMED: [(&str, u16); 8] = [
    ("", 400),
    ("{\"messages\": [", 400),
    ("[]", 400),
    ("{\"messages\": []}", 400),
    ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"temperature\": -1}", 400),
    ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"max_tokens\": \"many\"}", 400),
    ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"model\": \"another\"}", 404),
    ("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"top_p\": 2}", 400),
];

/// How often what happened.
#[derive(Debug, Default)]
struct Counts {
    answered: AtomicUsize,
    vanished: AtomicUsize,
    malformed: AtomicUsize,
    refused: AtomicUsize,
}

fn client(server: &Server, known: &[Known], until: Instant, seed: usize, counts: &Counts) {
    let mut random = Random::new(seed as u64);
    while Instant::now() < until {
        let dice = random.unit();
        let question = &known[random.between(0, known.len() - 1)];
        if dice < 0.15 {
            let (body, status) = MALFORMED[random.between(0, MALFORMED.len() - 1)];
            let mut response = server.post(body);
            let told = response.body_mut().read_to_string().expect("text");
            assert_eq!(response.status(), status, "{body}: {told}");
            let error: Value = serde_json::from_str(&told).unwrap_or_else(|e| panic!("{body}: {e}: {told}"));
            assert!(error["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{body}: {told}");
            counts.malformed.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        let response = server.post(&question.body.to_string());
        if response.status() == 429 {
            let wait = response.headers().get("retry-after").and_then(|wait| wait.to_str().ok()?.parse::<u64>().ok());
            assert!(wait.is_some_and(|seconds| seconds >= 1), "{:?}", response.headers());
            counts.refused.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(random.between(20, 200) as u64));
            continue;
        }
        assert_eq!(response.status(), 200, "{:?}", response.into_body().read_to_string());
        let vanishes = (dice < 0.4).then(|| random.between(1, 6));
        let (events, done) = events(response, |count| vanishes.is_some_and(|after| count >= after));
        if vanishes.is_some() && !done {
            assert!(question.text.starts_with(&text(&events)), "what came of it is right");
            counts.vanished.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        assert!(done, "{events:?}");
        assert_eq!(text(&events), question.text, "{}", question.body);
        let tokens = events.iter().find_map(|event| event["usage"]["completion_tokens"].as_u64());
        assert_eq!(tokens, Some(question.tokens), "{}", question.body);
        counts.answered.fetch_add(1, Ordering::Relaxed);
    }
}

/// A crowd comes, and is gone again.
fn crowd(server: &Server, known: &[Known], stay: Duration, seed: usize) -> Counts {
    let counts = Counts::default();
    let until = Instant::now() + stay;
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let counts = &counts;
            scope.spawn(move || client(server, known, until, seed * CLIENTS + number, counts));
        }
    });
    server.is_rid_of_all();
    counts
}

#[test]
fn a_crowd_leaves_nothing_behind_and_gets_right_answers() {
    let soak = std::env::var("PP_SOAK").ok().and_then(|seconds| seconds.parse().ok());
    let stay = Duration::from_secs(soak.unwrap_or(SECONDS));
    let server = Server::start();
    let known: Vec<Known> = questions().into_iter().map(|body| alone(&server, body)).collect();
    server.is_rid_of_all();
    let files = server.open_files();
    // The first crowd takes what is kept for good: connections' buffers, threads' memory, the prefix cache.
    let first = crowd(&server, &known, stay / 4, 1);
    let memory = server.memory();
    let second = crowd(&server, &known, stay - stay / 4, 2);
    for counts in [&first, &second] {
        for count in [&counts.answered, &counts.vanished, &counts.malformed] {
            assert!(count.load(Ordering::Relaxed) > 0, "{counts:?}");
        }
    }
    assert!(second.refused.load(Ordering::Relaxed) > 0, "64 are more than 8 and a queue of 24: {second:?}");
    let until = Instant::now() + PATIENCE;
    // The agent here keeps a few connections for later; dropped, they are closed.
    let Server { running, url, agent } = server;
    drop(agent);
    let server = Server { running, url, agent: Agent::config_builder().max_idle_connections(0).build().new_agent() };
    while server.open_files() > files && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(server.open_files() <= files, "{} files are open where there were {files}", server.open_files());
    let now = server.memory();
    let most = memory + GROWTH.0.max(GROWTH.1 * memory);
    assert!(now <= most, "memory: {:.1} MB after {:.1} MB", now * 1e-6, memory * 1e-6);
    for Known { body, text, .. } in known {
        assert_eq!(alone(&server, body).text, text, "as before");
    }
    let told = format!("{second:?}; memory {:.1} MB, then {:.1} MB; {files} files\n", memory * 1e-6, now * 1e-6);
    std::io::stderr().write_all(told.as_bytes()).expect("stderr");
}
