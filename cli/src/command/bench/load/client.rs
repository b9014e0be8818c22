//! One request: sent, and its streamed answer timed piece by piece.

use std::time::Duration;

use anyhow::{Result, bail};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Client, Response, Url};
use serde_json::{Map, Value, json};
use tokio::time::{Instant, timeout};

use super::arrivals::Ask;
use crate::args::ApiArg;
use crate::errors::usage;

/// A line of a stream, and an answer that is no stream, at most.
const LINE_BYTES_MAX: usize = 1 << 20;
/// Of a server's own words that are repeated.
const WORDS_MAX: usize = 200;
const CONNECT: Duration = Duration::from_secs(10);

/// A server, and how it is asked.
pub struct Target {
    client: Client,
    /// With `/v1` at its end.
    base: String,
    endpoint: String,
    api: ApiArg,
    more: Map<String, Value>,
    timeout: Duration,
    /// The model's name there.
    pub model: String,
}

/// What became of a request. Seconds are since it was due.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The first piece of text came.
    pub first: Option<f64>,
    /// The last piece of text came.
    pub last: f64,
    /// All was there.
    pub end: f64,
    /// Between pieces of text.
    pub gaps: Vec<f64>,
    /// As the server counts, if it does.
    pub usage: Option<(u64, u64)>,
    /// Pieces of text.
    pub pieces: u64,
    pub outcome: Result<(), Failure>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The same for all that are alike.
    pub kind: String,
    pub message: String,
}

impl Failure {
    fn new(kind: impl Into<String>, message: impl std::fmt::Display) -> Failure {
        let message = crate::output::printable(&message.to_string());
        Failure { kind: kind.into(), message: message.chars().take(WORDS_MAX).collect() }
    }

    /// Of the transport.
    fn of(error: &reqwest::Error) -> Failure {
        let kind = if error.is_connect() { "no connection" } else { "connection lost" };
        // The cause is what tells; the rest repeats the address.
        let mut cause: &dyn std::error::Error = error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        Failure::new(kind, format!("{kind}: {cause}"))
    }
}

impl Target {
    /// Nothing is sent yet.
    ///
    /// # Errors
    /// An address or a key that cannot be.
    pub fn new(
        url: &str,
        key: Option<&str>,
        api: ApiArg,
        more: Map<String, Value>,
        timeout: Duration,
    ) -> Result<Target> {
        let parsed = Url::parse(url).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        if parsed.is_none() {
            return Err(usage(format!("--url {url}: expected an address such as http://127.0.0.1:8080")));
        }
        let base = url.trim_end_matches('/').trim_end_matches("/v1");
        let base = format!("{base}/v1");
        let path = match api {
            ApiArg::Chat => "chat/completions",
            ApiArg::Completions => "completions",
        };
        let mut headers = HeaderMap::new();
        if let Some(key) = key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}"))
                .map_err(|_| usage("--api-key: the key has characters that no header may have"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        // The only provider that is built in; whoever was first has set the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .default_headers(headers)
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .user_agent(concat!("pp-run/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Target { client, endpoint: format!("{base}/{path}"), base, api, more, timeout, model: String::new() })
    }

    /// Where requests go.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// The first model that the server lists.
    ///
    /// # Errors
    /// Where it lists none.
    pub async fn only_model(&self) -> Result<String> {
        let url = format!("{}/models", self.base);
        let asked = async {
            let response = self.client.get(&url).send().await.map_err(|error| Failure::of(&error))?;
            if !response.status().is_success() {
                return Err(refusal(response).await);
            }
            let body = bounded(response).await?;
            let list: Value = serde_json::from_slice(&body).unwrap_or_default();
            let id = list["data"][0]["id"].as_str().map(str::to_owned);
            id.ok_or_else(|| Failure::new("models", "no model is listed there"))
        };
        match timeout(self.timeout, asked).await {
            Ok(Ok(model)) => Ok(model),
            Ok(Err(failure)) => {
                bail!("{url}: {}; -m names the model where the server does not list it", failure.message)
            }
            Err(_) => bail!("{url}: no answer within {} s", self.timeout.as_secs_f64()),
        }
    }

    fn body(&self, ask: &Ask) -> Value {
        let mut body = json!({
            "model": self.model, "max_tokens": ask.max_tokens, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true},
        });
        match self.api {
            ApiArg::Chat => body["messages"] = json!([{"role": "user", "content": ask.prompt}]),
            ApiArg::Completions => body["prompt"] = json!(ask.prompt),
        }
        let object = body.as_object_mut().expect("it is one");
        object.extend(self.more.clone());
        body
    }

    /// Asks, and waits for all of the answer; times count from `due`.
    pub async fn ask(&self, ask: &Ask, due: Instant) -> Sample {
        let mut answer = Answer::new(due);
        let outcome = match timeout(self.timeout, self.stream(ask, &mut answer)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Failure::new("timeout", format!("not done after {} s", self.timeout.as_secs_f64()))),
        };
        answer.sample(outcome)
    }

    async fn stream(&self, ask: &Ask, answer: &mut Answer) -> Result<(), Failure> {
        let request = self.client.post(&self.endpoint).header("content-type", "application/json");
        let sent = request.body(self.body(ask).to_string()).send().await;
        let mut response = sent.map_err(|error| Failure::of(&error))?;
        if !response.status().is_success() {
            return Err(refusal(response).await);
        }
        let mut lines = Lines::default();
        while let Some(bytes) = response.chunk().await.map_err(|error| Failure::of(&error))? {
            let now = Instant::now();
            lines.push(&bytes)?;
            while let Some(line) = lines.next() {
                answer.line(&line, now)?;
            }
        }
        match answer.finished {
            true => Ok(()),
            false => Err(Failure::new("cut off", "the stream ended before the answer did")),
        }
    }
}

impl Sample {
    /// There were too many under way.
    pub fn not_sent(most: usize) -> Sample {
        let failure = Failure::new("not sent", format!("{most} requests were under way already"));
        Answer::new(Instant::now()).sample(Err(failure))
    }

    /// Tokens of the answer: as the server counts, else pieces.
    pub fn tokens(&self) -> u64 {
        self.usage.map_or(self.pieces, |(_, completion)| completion)
    }

    /// Seconds a token after the first.
    pub fn per_token(&self) -> Option<f64> {
        let more = self.tokens().checked_sub(1).filter(|more| *more > 0)?;
        Some((self.last - self.first?) / more as f64)
    }
}

/// An answer that comes.
struct Answer {
    due: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    gaps: Vec<f64>,
    usage: Option<(u64, u64)>,
    pieces: u64,
    finished: bool,
}

impl Answer {
    fn new(due: Instant) -> Answer {
        Answer { due, first: None, last: None, gaps: Vec::new(), usage: None, pieces: 0, finished: false }
    }

    /// A line of an event stream (WHATWG HTML 9.2): what is no data is no concern of ours.
    fn line(&mut self, line: &[u8], now: Instant) -> Result<(), Failure> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.strip_prefix(b" ").unwrap_or(data);
        if data == b"[DONE]" {
            self.finished = true;
            return Ok(());
        }
        let event: Value =
            serde_json::from_slice(data).map_err(|error| Failure::new("bad stream", format!("not JSON: {error}")))?;
        if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
            let message = error["message"].as_str().map_or_else(|| error.to_string(), str::to_owned);
            return Err(Failure::new("error in the stream", message));
        }
        if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
            self.usage = usage["prompt_tokens"].as_u64().zip(usage["completion_tokens"].as_u64()).or(self.usage);
        }
        let choice = &event["choices"][0];
        self.finished |= choice["finish_reason"].is_string();
        if has_text(choice) {
            self.pieces += 1;
            self.first.get_or_insert(now);
            if let Some(last) = self.last.replace(now) {
                self.gaps.push((now - last).as_secs_f64());
            }
        }
        Ok(())
    }

    fn sample(self, outcome: Result<(), Failure>) -> Sample {
        let since = |at: Instant| at.saturating_duration_since(self.due).as_secs_f64();
        let end = since(Instant::now());
        Sample {
            first: self.first.map(since),
            last: self.last.map_or(end, since),
            end,
            gaps: self.gaps,
            usage: self.usage,
            pieces: self.pieces,
            outcome,
        }
    }
}

/// Whether a piece of an answer has anything in it: text, thoughts or a call.
fn has_text(choice: &Value) -> bool {
    let is_text = |value: &Value| value.as_str().is_some_and(|text| !text.is_empty());
    let delta = &choice["delta"];
    is_text(&choice["text"])
        || ["content", "reasoning_content", "reasoning"].iter().any(|name| is_text(&delta[name]))
        || delta["tool_calls"].as_array().is_some_and(|calls| !calls.is_empty())
}

/// What a server says that does not answer.
async fn refusal(response: Response) -> Failure {
    let status = response.status();
    let body = bounded(response).await.unwrap_or_default();
    let told: Value = serde_json::from_slice(&body).unwrap_or_default();
    let message =
        told["error"]["message"].as_str().map_or_else(|| String::from_utf8_lossy(&body).into(), str::to_owned);
    Failure::new(format!("HTTP {status}"), format!("{status}: {}", message.trim()))
}

/// A body that is not too long.
async fn bounded(mut response: Response) -> Result<Vec<u8>, Failure> {
    let mut body = Vec::new();
    while let Some(bytes) = response.chunk().await.map_err(|error| Failure::of(&error))? {
        if body.len() + bytes.len() > LINE_BYTES_MAX {
            return Err(Failure::new("bad stream", format!("more than {LINE_BYTES_MAX} bytes")));
        }
        body.extend_from_slice(&bytes);
    }
    Ok(body)
}

/// Lines out of pieces of them.
#[derive(Default)]
struct Lines {
    bytes: Vec<u8>,
    /// Up to here they were given out.
    done: usize,
}

impl Lines {
    fn push(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.bytes.drain(..std::mem::take(&mut self.done));
        if self.bytes.len() + bytes.len() > 2 * LINE_BYTES_MAX {
            return Err(Failure::new("bad stream", format!("a line of more than {LINE_BYTES_MAX} bytes")));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn next(&mut self) -> Option<Vec<u8>> {
        let rest = &self.bytes[self.done..];
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]).to_vec();
        self.done += end + 1;
        Some(line)
    }
}
