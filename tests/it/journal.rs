//! What runs when the program dies is finished by the next one, with the same tokens; clients find their answers again.

mod batch;
mod disk;
mod kept;
mod killed;

use std::collections::BTreeMap;
use std::io::Read;
use std::net::TcpStream;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::cli::model;
use crate::serve::client::Server;

/// A folder for a journal, and servers that write it.
struct Desk {
    dir: tempfile::TempDir,
}

impl Desk {
    fn new() -> Desk {
        Desk { dir: tempfile::tempdir().expect("a folder") }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("journal")
    }

    fn arguments(&self, options: &[&str]) -> Vec<String> {
        self.arguments_of(MODEL, options)
    }

    fn arguments_of(&self, of: &str, options: &[&str]) -> Vec<String> {
        let journal = self.path().to_str().expect("UTF-8").to_owned();
        let own = ["-m", &model(of), "--device", "reference", "--journal", &journal];
        own.iter().chain(options).map(|option| (*option).to_owned()).collect()
    }

    fn server(&self, options: &[&str]) -> Server {
        let arguments = self.arguments(options);
        Server::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

/// Slow enough to be killed in the middle of an answer.
const MODEL: &str = "tiny/llama-33";

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "run of a stage"}], "max_tokens": 60});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// What came of a stream before it broke off: whole events, and the id of the last one.
#[derive(Debug, Default)]
struct Stream {
    events: Vec<Value>,
    last_id: Option<String>,
    is_done: bool,
}

impl Stream {
    /// Everything until the connection ends, in whatever way.
    fn read(mut stream: TcpStream, mut bytes: Vec<u8>) -> Stream {
        let mut some = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut some) {
            bytes.extend(&some[..count]);
        }
        let head = bytes.windows(4).position(|four| four == b"\r\n\r\n").map_or(bytes.len(), |at| at + 4);
        let body = String::from_utf8_lossy(&unchunked(&bytes[head..])).into_owned();
        let mut stream = Stream::default();
        let (whole, _) = body.rsplit_once("\n\n").unwrap_or_default();
        for event in whole.split("\n\n") {
            let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
            stream.last_id = field("id: ").map(str::to_owned).or(stream.last_id);
            match field("data: ") {
                Some("[DONE]") => stream.is_done = true,
                Some(data) => stream.events.push(serde_json::from_str(data).expect("JSON")),
                None => {}
            }
        }
        stream
    }

    /// The text of each answer.
    fn texts(&self) -> BTreeMap<u64, String> {
        let mut texts = BTreeMap::<u64, String>::new();
        for choice in self.events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten()) {
            let text = choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
            *texts.entry(choice["index"].as_u64().unwrap()).or_default() += text;
        }
        texts
    }
}

/// What of a chunked body is there.
fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
        let size = std::str::from_utf8(&bytes[..end]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
        let Some(size) = size.filter(|size| *size > 0) else { break };
        let rest = &bytes[end + 2..];
        body.extend(&rest[..size.min(rest.len())]);
        bytes = rest.get(size + 2..).unwrap_or_default();
    }
    body
}

/// The text of each answer of a whole response.
fn texts(whole: &Value) -> BTreeMap<u64, String> {
    let choices = whole["choices"].as_array().unwrap_or_else(|| panic!("{whole}"));
    let text = |choice: &Value| {
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap_or_default().to_owned()
    };
    choices.iter().map(|choice| (choice["index"].as_u64().unwrap(), text(choice))).collect()
}
