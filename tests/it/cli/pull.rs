//! Models of the hub, from a server on the loopback that answers as the hub does.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{program, stderr};
use crate::cluster::processes::Running;
use crate::disk::Disk;
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
    /// How many transfers have a wrong byte.
    lies: usize,
    /// Whether its tags say nothing of what is in a file.
    opaque: bool,
    /// Half of a large file is sent; the rest when this can be received from.
    gate: Option<Arc<Mutex<Receiver<()>>>>,
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
        let counts = sent.clone();
        let (files, habits) = (Arc::new(files), Arc::new(Mutex::new(habits)));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (files, counts, habits) = (files.clone(), counts.clone(), habits.clone());
                std::thread::spawn(move || attend(&stream, &files, &counts, &habits));
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
        command.env("XDG_CONFIG_HOME", self.home.path()).env("XDG_CACHE_HOME", self.home.path().join("cache"));
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

/// Files that are larger lie in the hub's large storage, which has other tags.
const LARGE: usize = 10_000;

/// The tag of a file, as the hub sends it.
fn tag(name: &str, bytes: &[u8], opaque: bool) -> String {
    if opaque {
        return format!("ETag: \"tag-of-{name}\"\r\n");
    }
    if bytes.len() > LARGE {
        return format!("ETag: \"of-the-storage\"\r\nX-Linked-Etag: \"{}\"\r\n", sum("sha256sum", bytes));
    }
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    format!("ETag: \"{}\"\r\n", sum("sha1sum", &blob))
}

/// What a program of coreutils makes of some bytes.
fn sum(program: &str, bytes: &[u8]) -> String {
    let mut child =
        Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("coreutils are there");
    child.stdin.take().expect("piped").write_all(bytes).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    String::from_utf8_lossy(&output.stdout).split_whitespace().next().expect("a sum").to_owned()
}

fn attend(mut stream: &TcpStream, files: &BTreeMap<String, Vec<u8>>, sent: &Mutex<usize>, habits: &Mutex<Habits>) {
    let Some(asked) = ask(stream) else { return };
    let mut answer = |status: &str, headers: &str, body: &[u8]| {
        let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
    };
    let now = habits.lock().expect("no panic").clone();
    let wanted = now.token.map(|token| format!("Bearer {token}"));
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
    let headers = format!("{range}{}X-Repo-Commit: {COMMIT}\r\n", tag(name, bytes, now.opaque));
    if asked.one_byte {
        return answer("206 Partial Content", &headers, &bytes[from..to]);
    }
    let mut habits = habits.lock().expect("no panic");
    let some = if habits.cuts > 0 && bytes.len() > LARGE { (to - from) / 2 } else { to - from };
    habits.cuts = habits.cuts.saturating_sub(usize::from(some < to - from));
    let mut sends = bytes[from..from + some].to_vec();
    if habits.lies > 0 && bytes.len() > LARGE {
        habits.lies -= 1;
        sends[some / 2] ^= 1;
    }
    drop(habits);
    *sent.lock().expect("no panic") += some;
    let head =
        format!("HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n", to - from);
    let (first, second) = sends.split_at(if sends.len() > LARGE { sends.len() / 2 } else { 0 });
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(first));
    if let Some(gate) = now.gate.filter(|_| sends.len() > LARGE) {
        let _ = gate.lock().expect("no panic").recv();
    }
    let _ = stream.write_all(second);
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
    let hub = Hub::new(
        &[("a-Q8_0.gguf", gguf()), ("b-Q5_0.gguf", gguf())],
        Habits { token: Some("mine"), ..Habits::default() },
    );
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

/// A file that came wrongly is fetched again, once, and never has its name; one that was damaged in the cache, too.
#[test]
fn what_is_not_what_the_hub_says_is_fetched_again_or_refused() {
    let files = || [("m-Q8_0.gguf", gguf())];
    let hub = Hub::new(&files(), Habits { lies: 1, ..Habits::default() });
    let output = hub.program(&["pull", REPO, "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("m-Q8_0.gguf came and is not what the hub says it is"), "{}", stderr(&output));
    assert_eq!(*hub.sent.lock().unwrap(), 2 * size(&gguf()));
    let pulled: Value = serde_json::from_slice(&output.stdout).unwrap();
    let path = PathBuf::from(pulled["path"].as_str().unwrap());
    assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(gguf()).unwrap());

    // One byte of the blob changes, and its time with it.
    let mut bytes = std::fs::read(gguf()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path.canonicalize().unwrap(), &bytes).unwrap();
    let output = hub.program(&["pull", REPO, "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("in the cache is not what the hub has"), "{}", stderr(&output));
    assert_eq!(*hub.sent.lock().unwrap(), 3 * size(&gguf()));
    assert_eq!(std::fs::read(&path).unwrap(), std::fs::read(gguf()).unwrap());

    let hub = Hub::new(&files(), Habits { lies: 2, ..Habits::default() });
    let told = hub.refused(&mut hub.program(&["pull", REPO]), 1);
    assert!(told.contains("came twice and is not what the hub says"), "{told}");
    let repo = hub.home.path().join("hub/models--tiny--llama");
    let named = [repo.join("snapshots").join(COMMIT).join("m-Q8_0.gguf"), repo.join("refs/main")];
    assert_eq!(named.map(|path| path.exists()), [false; 2]);
    assert_eq!(std::fs::read_dir(repo.join("blobs")).map_or(0, Iterator::count), 0);
}

#[test]
fn a_hub_whose_tags_say_nothing_is_believed_and_that_is_told() {
    let hub = Hub::new(&[("m-Q8_0.gguf", gguf())], Habits { opaque: true, ..Habits::default() });
    let output = hub.program(&["pull", REPO, "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("only its length is looked at"), "{}", stderr(&output));
}

/// A disk that fills up in the midst of a file: what came stays under no name that it is not, and is gone on with.
#[test]
fn a_full_disk_is_told_and_gone_on_with_once_there_is_room() {
    let (go_on, gate) = channel();
    let habits = Habits { gate: Some(Arc::new(Mutex::new(gate))), ..Habits::default() };
    let hub = Hub::new(&[("m-Q8_0.gguf", gguf())], habits);
    let folder = hub.home.path().join("hub");
    let test = "a_full_disk_is_told_and_gone_on_with_once_there_is_room";
    let Some(disk) = Disk::new(&folder, 2 * size(&gguf()) as u64, test) else { return };
    let repo = disk.folder().join("models--tiny--llama");
    let part = || {
        let blobs = repo.join(".pp-run-pull/models--tiny--llama/blobs");
        let entries = std::fs::read_dir(blobs).into_iter().flatten().flatten().map(|entry| entry.path());
        let part = entries.into_iter().find(|path| path.extension().is_some_and(|end| end == "part"));
        part.map_or(0, |path| std::fs::metadata(path).map_or(0, |meta| meta.len() as usize))
    };
    let pull = || Running::start(&mut disk.enter(&hub.program(&["pull", REPO, "--json"])));
    let first = pull();
    let until = Instant::now() + Duration::from_secs(120);
    while part() < size(&gguf()) / 2 {
        assert!(Instant::now() < until, "half of it comes: {}", first.said());
        std::thread::sleep(Duration::from_millis(5));
    }
    disk.fill();
    go_on.send(()).unwrap();
    let (code, told) = first.end();
    assert_eq!(code, Some(1), "{told}");
    let there = part();
    assert!((size(&gguf()) / 2..size(&gguf())).contains(&there), "{there}");
    assert!(told.contains("no room for m-Q8_0.gguf: "), "{told}");
    assert!(told.contains(&format!("({} bytes), and the disk of", size(&gguf()) - there)), "{there}: {told}");
    assert!(!repo.join("snapshots").exists() && !repo.join("blobs").exists());
    // Nothing is asked for as long as there is no room.
    let sent = *hub.sent.lock().unwrap();
    assert_eq!(pull().end().0, Some(1));
    assert_eq!(*hub.sent.lock().unwrap(), sent);
    disk.free();
    go_on.send(()).unwrap();
    let (code, told) = pull().end();
    assert_eq!(code, Some(0), "{told}");
    assert_eq!(*hub.sent.lock().unwrap() - sent, size(&gguf()) - there, "just what was missing");
    let snapshot = repo.join("snapshots").join(COMMIT).join("m-Q8_0.gguf");
    assert_eq!(std::fs::read(snapshot).unwrap(), std::fs::read(gguf()).unwrap());
}
