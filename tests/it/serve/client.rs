//! A server in a process of its own, and HTTP as plain text: every request on a connection of its own.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::cli::program;

const PATIENCE: Duration = Duration::from_secs(60);

pub struct Server {
    child: Child,
    address: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts one on a free port.
    pub fn start(options: &[&str]) -> Server {
        let arguments = [&["serve", "--port", "0", "--json", "--quiet"], options].concat();
        Server::spawn(&mut program(&arguments))
    }

    /// Starts what is a server, and says in JSON where it listens.
    pub fn spawn(command: &mut Command) -> Server {
        let mut child = command.env("PP_LOG", "warn").stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it says where it listens");
        let ready: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        Server { child, address: ready["address"].as_str().expect("an address").to_owned() }
    }

    /// Where it listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends a request; the answer is still to be read.
    pub fn begin(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            head += &format!("host: {}\r\n", self.address);
        }
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        // A body that is refused may not be read to its end.
        let _ = stream.write_all(format!("{head}\r\n{body}").as_bytes());
        stream
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
        Response::read(self.begin(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[("content-type", "application/json")], &body.to_string())
    }

    /// As [`Server::post`], under a name.
    pub fn post_named(&self, name: &str, path: &str, body: &Value) -> Response {
        self.send("POST", path, &[("content-type", "application/json"), ("x-request-id", name)], &body.to_string())
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        let sent = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().expect("kill is there");
        assert!(sent.success());
    }

    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("it ends")
    }
}

pub struct Response {
    pub status: u16,
    headers: Vec<(String, String)>,
    pub body: String,
}

impl Response {
    /// Everything until the server closes the connection.
    pub fn read(stream: TcpStream) -> Response {
        let mut reader = BufReader::new(stream);
        let mut line = || {
            let mut line = String::new();
            reader.read_line(&mut line).expect("a line of the head");
            line.trim_end().to_owned()
        };
        let first = line();
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status: {first:?}"));
        let mut headers = Vec::new();
        loop {
            let next = line();
            let Some((name, value)) = next.split_once(": ") else { break };
            headers.push((name.to_ascii_lowercase(), value.to_owned()));
        }
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).expect("the body");
        let is_chunked = headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
        let bytes = if is_chunked { unchunked(&bytes) } else { bytes };
        Response { status, headers, body: String::from_utf8(bytes).expect("UTF-8") }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.body);
        self.json()
    }

    /// The chunks of a stream of events, and what ends it.
    #[track_caller]
    pub fn events(&self) -> (Vec<Value>, String) {
        assert_eq!(self.status, 200, "{}", self.body);
        let data = |event: &str| event.strip_prefix("data: ").map(str::to_owned);
        let mut events: Vec<String> = self.body.split("\n\n").filter_map(data).collect();
        let last = events.pop().expect("there are events");
        let parse = |event: &String| serde_json::from_str(event).unwrap_or_else(|error| panic!("{error}: {event}"));
        (events.iter().map(parse).collect(), last)
    }
}

fn unchunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).expect("a size"), 16).expect("a size");
        if size == 0 {
            break;
        }
        let rest = &bytes[end + 2..];
        body.extend(&rest[..size]);
        bytes = &rest[size + 2..];
    }
    body
}
