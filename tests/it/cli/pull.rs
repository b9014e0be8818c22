//! Models of the hub, from a server on the loopback that answers as the hub does.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::{program, stderr};
use crate::support::data;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const REPO: &str = "tiny/llama";

/// What the hub is to do.
#[derive(Clone, Default)]
struct Habits {
    /// How often a transfer is cut in its middle.
    cuts: usize,
    /// Whom it gives anything.
    token: Option<&'static str>,
}

/// A hub with one repository.
struct Hub {
    endpoint: String,
    /// Weight bytes that were sent.
    sent: Arc<Mutex<usize>>,
    home: tempfile::TempDir,
}

struct Asked {
    path: String,
    from: Option<usize>,
    authorization: Option<String>,
    one_byte: bool,
}

impl Hub {
    fn new(files: &[(&str, PathBuf)], habits: Habits) -> Hub {
        let files: BTreeMap<String, Vec<u8>> =
            files.iter().map(|(name, path)| ((*name).to_owned(), std::fs::read(path).expect("a file"))).collect();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let sent: Arc<Mutex<usize>> = Arc::default();
        let (counts, cuts) = (sent.clone(), Arc::new(Mutex::new(habits.cuts)));
        let files = Arc::new(files);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (files, counts, cuts, habits) = (files.clone(), counts.clone(), cuts.clone(), habits.clone());
                std::thread::spawn(move || attend(&stream, &files, &counts, &cuts, &habits));
            }
        });
        Hub { endpoint, sent, home: tempfile::tempdir().expect("a folder") }
    }

    fn program(&self, arguments: &[&str]) -> Command {
        let mut command = program(arguments);
        for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"]
        {
            command.env_remove(name);
        }
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HOME", self.home.path());
        command
    }

    #[track_caller]
    fn object(&self, command: &mut Command) -> Value {
        let output = command.output().expect("it starts");
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    #[track_caller]
    fn refused(&self, command: &mut Command, code: i32) -> String {
        let output = command.output().expect("it starts");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(output.stdout.is_empty());
        stderr(&output)
    }
}

fn ask(stream: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut asked =
        Asked { path: first.split(' ').nth(1)?.to_owned(), from: None, authorization: None, one_byte: false };
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ")?;
        match name.to_lowercase().as_str() {
            "range" => {
                let (from, to) = value.strip_prefix("bytes=")?.split_once('-')?;
                (asked.from, asked.one_byte) = (from.parse().ok(), to == "0");
            }
            "authorization" => asked.authorization = Some(value.to_owned()),
            _ => {}
        }
    }
    Some(asked)
}

fn attend(
    mut stream: &TcpStream,
    files: &BTreeMap<String, Vec<u8>>,
    sent: &Mutex<usize>,
    cuts: &Mutex<usize>,
    habits: &Habits,
) {
    let Some(asked) = ask(stream) else { return };
    let mut answer = |status: &str, headers: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    let wanted = habits.token.map(|token| format!("Bearer {token}"));
    if wanted.is_some() && asked.authorization != wanted {
        return answer("401 Unauthorized", "", b"");
    }
    if asked.path == format!("/api/models/{REPO}/revision/main") {
        let siblings: Vec<Value> = files.keys().map(|name| json!({ "rfilename": name })).collect();
        let info = json!({ "sha": COMMIT, "siblings": siblings }).to_string();
        return answer("200 OK", "Content-Type: application/json\r\n", info.as_bytes());
    }
    let name = asked.path.strip_prefix(&format!("/{REPO}/resolve/main/"));
    let Some((name, bytes)) = name.and_then(|name| files.get_key_value(name)) else {
        return answer("404 Not Found", "", b"");
    };
    let from = asked.from.unwrap_or(0).min(bytes.len());
    let to = if asked.one_byte { 1.min(bytes.len()) } else { bytes.len() };
    let range = format!("Content-Range: bytes {from}-{}/{}\r\n", to.saturating_sub(1), bytes.len());
    let headers = format!("{range}ETag: \"tag-of-{name}\"\r\nX-Repo-Commit: {COMMIT}\r\n");
    if asked.one_byte {
        return answer("206 Partial Content", &headers, &bytes[from..to]);
    }
    let mut cuts = cuts.lock().expect("no panic");
    let some = if *cuts > 0 && bytes.len() > 10_000 { (to - from) / 2 } else { to - from };
    *cuts = cuts.saturating_sub(usize::from(some < to - from));
    *sent.lock().expect("no panic") += some;
    let head =
        format!("HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", to - from);
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&bytes[from..from + some]));
}

fn gguf() -> PathBuf {
    data("tiny-gguf/llama-bf16.gguf")
}

fn folder() -> Vec<(&'static str, PathBuf)> {
    let names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    names.into_iter().map(|name| (name, data("tiny/llama-tied").join(name))).collect()
}

fn size(path: &PathBuf) -> usize {
    std::fs::metadata(path).expect("a file").len() as usize
}

#[test]
fn a_model_is_pulled_once_and_then_known_by_its_name() {
    let hub = Hub::new(&folder(), Habits::default());
    let pulled = hub.object(&mut hub.program(&["pull", REPO, "--json"]));
    let all: usize = folder().iter().map(|(_, path)| size(path)).sum();
    assert_eq!((pulled["bytes"].as_u64(), pulled["downloaded_bytes"].as_u64()), (Some(all as u64), Some(all as u64)));
    assert_eq!(*hub.sent.lock().unwrap(), all);
    let again = hub.object(&mut hub.program(&["pull", REPO, "--json"]));
    assert_eq!((&again["downloaded_bytes"], &again["path"]), (&json!(0), &pulled["path"]));
    assert_eq!(*hub.sent.lock().unwrap(), all, "nothing is fetched twice");
    let run = ["-m", REPO, "--device", "reference", "--raw", "-n", "2", "--json", "hello"];
    let answer = hub.object(&mut hub.program(&run));
    assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(2), "{answer}");
    // Without a network, too.
    let offline = hub.object(hub.program(&["pull", REPO, "--json"]).env("HF_HUB_OFFLINE", "1"));
    assert_eq!(offline["path"], pulled["path"]);
    let told = hub.refused(hub.program(&["pull", "tiny/other"]).env("HF_HUB_OFFLINE", "1"), 4);
    assert!(told.contains("HF_HUB_OFFLINE"), "{told}");
}

#[test]
fn a_transfer_that_is_cut_goes_on_where_it_was() {
    let hub = Hub::new(&[("m-Q8_0.gguf", gguf())], Habits { cuts: 2, ..Habits::default() });
    let pulled = hub.object(&mut hub.program(&["pull", REPO, "--json"]));
    assert_eq!(*hub.sent.lock().unwrap(), size(&gguf()), "no byte comes twice");
    let path = PathBuf::from(pulled["path"].as_str().expect("a path"));
    assert_eq!(std::fs::read(path).unwrap(), std::fs::read(gguf()).unwrap());
}

#[test]
fn a_hub_that_refuses_is_told_in_words() {
    let hub = Hub::new(&[("a-Q8_0.gguf", gguf()), ("b-Q5_0.gguf", gguf())], Habits { token: Some("mine"), cuts: 0 });
    let told = hub.refused(&mut hub.program(&["pull", REPO]), 4);
    assert!(told.contains("HF_TOKEN"), "{told}");
    let told = hub.refused(hub.program(&["pull", REPO]).env("HF_TOKEN", "mine"), 2);
    assert!(told.contains("a-Q8_0.gguf, b-Q5_0.gguf"), "{told}");
    let told = hub.refused(hub.program(&["pull", "tiny/other"]).env("HF_TOKEN", "mine"), 4);
    assert!(told.contains("has no tiny/other"), "{told}");
    let told = hub.refused(&mut hub.program(&["pull", "nothing"]), 2);
    assert!(told.contains("OWNER/NAME"), "{told}");
    let name = format!("{REPO}:q5_0");
    let pulled = hub.object(hub.program(&["pull", &name, "--json"]).env("HF_TOKEN", "mine"));
    assert!(pulled["path"].as_str().is_some_and(|path| path.ends_with("b-Q5_0.gguf")), "{pulled}");
}

#[test]
fn what_was_not_pulled_says_how_to() {
    let hub = Hub::new(&folder(), Habits::default());
    let told = hub.refused(&mut hub.program(&["inspect", REPO]), 4);
    assert!(told.contains("pp-run pull tiny/llama"), "{told}");
    assert_eq!(*hub.sent.lock().unwrap(), 0);
}
