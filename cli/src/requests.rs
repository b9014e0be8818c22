//! Requests as JSON, one a line, with the names of OpenAI's API; what `batch` answers and `bench` replays.

pub mod choosing;
pub mod format;
pub mod messages;
pub mod tools;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use pp_engine::chat_template::Message;
use pp_engine::head::Request;
use pp_engine::sampler::Sampling;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa::openapi::schema::{Object, ObjectBuilder, Type};

use crate::errors::usage;
use crate::prompts::{Form, Prompts};
use choosing::{Choosing, Invalid};
use format::ResponseFormat;
use messages::ChatMessage;
use tools::{ToolChoice, ToolSpec, ToolUse};

/// How the OpenAPI document describes what is known and must not be asked for.
pub fn null_schema() -> Object {
    ObjectBuilder::new().schema_type(Type::Null).build()
}

/// Bytes of a line at most.
pub const LINE_BYTES_MAX: usize = 32 << 20;

/// A request.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RequestLine {
    /// The caller's name for it.
    pub id: Option<Value>,
    /// A text to answer; with `raw` to continue.
    pub prompt: Option<String>,
    /// A conversation to go on with.
    pub messages: Option<Vec<ChatMessage>>,
    /// Continue `prompt` as plain text, without a chat template.
    pub raw: bool,
    /// In place of a prompt: so many made-up tokens (`bench` and `sim`).
    pub prompt_tokens: Option<usize>,
    /// Tokens of an answer at most.
    #[serde(alias = "max_completion_tokens")]
    pub max_tokens: Option<usize>,
    /// As the options of the same names.
    pub temperature: Option<f32>,
    /// As the options of the same names.
    pub top_p: Option<f32>,
    /// As the options of the same names.
    pub top_k: Option<u32>,
    /// As the options of the same names.
    pub min_p: Option<f32>,
    /// As the options of the same names.
    pub presence_penalty: Option<f32>,
    /// As the options of the same names.
    pub frequency_penalty: Option<f32>,
    /// As `--repeat-penalty`.
    #[serde(alias = "repeat_penalty")]
    pub repetition_penalty: Option<f32>,
    /// Added to the logits of tokens, by id.
    pub logit_bias: Map<String, Value>,
    /// Whether, or how many candidates of each token are wanted with their log-probabilities.
    pub logprobs: Option<Logprobs>,
    /// With `logprobs: true`: how many.
    pub top_logprobs: Option<u32>,
    /// Answers wanted.
    pub n: Option<u32>,
    /// Start of the random numbers.
    pub seed: Option<u64>,
    /// Texts that end an answer.
    pub stop: Option<Stop>,
    /// When it comes, in milliseconds from the start (`bench` and `sim`).
    pub arrival_ms: Option<f64>,
    /// Seconds after which it is given up.
    pub deadline_seconds: Option<f64>,
    /// What an answer must look like.
    pub response_format: Option<ResponseFormat>,
    /// Functions that the model may ask to have called.
    pub tools: Option<Vec<ToolSpec>>,
    /// Whether it may, must, or must one of them.
    pub tool_choice: Option<ToolChoice>,
    /// Whether it may several at once.
    pub parallel_tool_calls: Option<bool>,
    /// More variables for the chat template.
    pub template_args: Map<String, Value>,
    model: Option<IgnoredAny>,
    user: Option<IgnoredAny>,
    stream: Option<IgnoredAny>,
}

/// What lines may leave open.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens of an answer at most.
    pub max_tokens: usize,
    /// Texts that end an answer.
    pub stop: Vec<String>,
}

/// `logprobs`
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Logprobs {
    /// Of the chat API.
    Wanted(bool),
    /// Of the completions API.
    Count(u32),
}

/// `stop`
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub enum Stop {
    /// One text.
    One(String),
    /// Several.
    Several(Vec<String>),
}

impl Stop {
    /// The texts.
    pub fn texts(&self) -> Vec<String> {
        match self {
            Stop::One(text) => vec![text.clone()],
            Stop::Several(texts) => texts.clone(),
        }
    }
}

impl RequestLine {
    /// Of one line.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(line: &str) -> Result<RequestLine, String> {
        serde_json::from_str(line).map_err(|error| error.to_string())
    }

    /// The conversation, if it is one.
    ///
    /// # Errors
    /// Names the message that cannot be put to a model.
    pub fn conversation(&self) -> Result<Option<Vec<Message>>, String> {
        let messages = self.messages.as_deref().map(|messages| messages::conversation(messages, "messages"));
        messages.transpose().map_err(|invalid| invalid.to_string())
    }

    /// Tools that an answer may or must call.
    ///
    /// # Errors
    /// Names the field that cannot be.
    pub fn tools(&self) -> Result<Option<ToolUse>, String> {
        let tools = ToolUse::new(self.tools.as_deref(), self.tool_choice.as_ref(), self.parallel_tool_calls);
        match tools.map_err(|invalid| invalid.to_string())? {
            Some(_) if self.raw => Err("tools go with a chat template, not with raw".to_owned()),
            tools => Ok(tools),
        }
    }

    /// What an answer must look like.
    ///
    /// # Errors
    /// Names the field that cannot be.
    pub fn form(&self, prompts: &Prompts, tools: Option<&ToolUse>) -> Result<Form, String> {
        prompts.form(self.response_format.as_ref(), tools).map_err(|invalid| invalid.to_string())
    }

    /// The ids of what is to be answered or continued.
    ///
    /// # Errors
    /// When there is not one prompt, or tokenizer or template refuse it.
    pub fn ids(&self, prompts: &Prompts, tools: Option<&ToolUse>) -> Result<Vec<u32>, String> {
        let chat = |messages: &[Message]| prompts.chat_with_tools(messages, tools, &self.template_args);
        let ids = match (&self.prompt, self.conversation()?) {
            (Some(prompt), None) if self.raw => prompts.raw(prompt),
            (Some(prompt), None) => chat(&[Message::new("user", prompt.clone())]),
            (None, Some(messages)) if !self.raw => chat(&messages),
            (None, Some(_)) => return Err("raw goes with prompt, not with messages".to_owned()),
            (Some(_), Some(_)) => return Err("give prompt or messages, not both".to_owned()),
            (None, None) => return Err("prompt or messages are missing".to_owned()),
        };
        ids.map_err(|error| format!("{error:#}"))
    }

    /// The request for a prompt; what the line does not say is as in `defaults`.
    ///
    /// # Errors
    /// As [`RequestLine::sampling`].
    pub fn request(&self, prompt: Vec<u32>, defaults: &Defaults, vocab: usize) -> Result<Request, String> {
        Ok(Request {
            prompt,
            choices: self.n.unwrap_or(1),
            max_tokens: self.max_tokens.unwrap_or(defaults.max_tokens),
            sampling: self.sampling(&defaults.sampling, vocab)?,
            stop: if self.stop.is_some() { self.stop_texts() } else { defaults.stop.clone() },
            stop_at_eos: true,
            deadline: self.deadline_seconds.map(Duration::from_secs_f64),
            ..Request::default()
        })
    }

    /// Texts that end an answer.
    pub fn stop_texts(&self) -> Vec<String> {
        self.stop.as_ref().map_or(Vec::new(), Stop::texts)
    }

    /// Candidates wanted with each token; none without log-probabilities.
    pub fn candidates(&self) -> Option<u32> {
        match self.logprobs {
            Some(Logprobs::Count(count)) => Some(count),
            Some(Logprobs::Wanted(true)) => Some(self.top_logprobs.unwrap_or(0)),
            Some(Logprobs::Wanted(false)) | None => self.top_logprobs,
        }
    }

    /// `defaults` with what the line says.
    ///
    /// # Errors
    /// Names the field that is out of range.
    pub fn sampling(&self, defaults: &Sampling, vocab: usize) -> Result<Sampling, String> {
        let choosing = Choosing {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            logit_bias: Some(&self.logit_bias),
            seed: self.seed,
            candidates: self.candidates().unwrap_or(0),
        };
        let sampling = choosing.sampling(defaults, vocab).map_err(|invalid| invalid.to_string())?;
        let range = |name: &str, ok: bool, expected: &str| {
            Invalid::unless(ok, name, expected).map_err(|invalid| invalid.to_string())
        };
        range("n", self.n != Some(0), "at least 1")?;
        range("max_tokens", self.max_tokens != Some(0), "at least 1")?;
        range("stop", !self.stop_texts().iter().any(String::is_empty), "texts that are not empty")?;
        range("arrival_ms", self.arrival_ms.is_none_or(|ms| (0.0..1e12).contains(&ms)), "0 or more milliseconds")?;
        let deadline = self.deadline_seconds.is_none_or(|seconds| seconds > 0.0 && seconds < 1e9);
        range("deadline_seconds", deadline, "more than 0")?;
        Ok(sampling)
    }
}

/// The lines of a file, each with its number, from 1; empty ones are left out.
///
/// # Errors
/// When it cannot be opened; later ones when it cannot be read on.
pub fn open(path: &Path) -> Result<impl Iterator<Item = Result<(usize, Result<String, String>)>>> {
    let unread = |error: std::io::Error| usage(format!("cannot read {}: {error}", path.display()));
    let file = File::open(path).map_err(unread)?;
    Ok(Lines::new(BufReader::new(file)).map(move |line| line.map_err(unread)))
}

/// The lines of a file: each with its number, from 1; empty ones are left out. A line that is too long or no UTF-8 is
/// an error of its own, and the next one follows.
pub struct Lines<R> {
    reader: R,
    number: usize,
}

impl<R: BufRead> Lines<R> {
    /// Lines of `reader`.
    pub fn new(reader: R) -> Lines<R> {
        Lines { reader, number: 0 }
    }

    /// The next line, empty or not, with its number.
    ///
    /// # Errors
    /// When nothing more can be read.
    pub fn next_line(&mut self) -> std::io::Result<Option<(usize, Result<String, String>)>> {
        let line = self.line()?;
        Ok(line.map(|line| (self.number, line)))
    }

    fn line(&mut self) -> std::io::Result<Option<Result<String, String>>> {
        let mut line = Vec::new();
        let read = (&mut self.reader).take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        if read == LINE_BYTES_MAX && line.last() != Some(&b'\n') {
            // The rest of it, without keeping it.
            loop {
                let buffer = self.reader.fill_buf()?;
                if buffer.is_empty() {
                    break;
                }
                let end = buffer.iter().position(|byte| *byte == b'\n');
                let used = end.map_or(buffer.len(), |at| at + 1);
                self.reader.consume(used);
                if end.is_some() {
                    break;
                }
            }
            return Ok(Some(Err(format!("the line is longer than {LINE_BYTES_MAX} bytes"))));
        }
        let text = String::from_utf8(line).map_err(|error| {
            format!("the line is not valid UTF-8 at byte {} (counted from 0)", error.utf8_error().valid_up_to())
        });
        Ok(Some(text))
    }
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = std::io::Result<(usize, Result<String, String>)>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.line() {
                Ok(None) => return None,
                Ok(Some(Ok(text))) if text.trim().is_empty() => {}
                Ok(Some(line)) => return Some(Ok((self.number, line))),
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> String {
        match RequestLine::parse(line) {
            Err(message) => message,
            Ok(request) => request.sampling(&Sampling::default(), 100).expect_err(line),
        }
    }

    #[test]
    fn a_line_has_openai_s_names() {
        let line = r#"{"id": 7, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5, "top_k": 3,
            "logit_bias": {"9": -100, "3": 2.5}, "logprobs": true, "top_logprobs": 2, "n": 2, "stop": "x", "model": "m"}"#;
        let request = RequestLine::parse(line).unwrap();
        let sampling = request.sampling(&Sampling { temperature: 0.5, ..Sampling::default() }, 100).unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.candidates), (0.5, 3, 2));
        assert_eq!(sampling.logit_bias, [(3, 2.5), (9, -100.0)]);
        assert_eq!((request.max_tokens, request.n, request.stop_texts()), (Some(5), Some(2), vec!["x".to_owned()]));
        assert_eq!(request.conversation().unwrap().unwrap().len(), 1);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |line: &str, part: &str| assert!(refused(line).contains(part), "{}", refused(line));
        check(r#"{"prompt": "a", "temprature": 1}"#, "temprature");
        check(r#"{"prompt": 5}"#, "expected a string");
        check(r#"{"prompt": "a""#, "EOF");
        check(r#"{"temperature": -1}"#, "temperature: expected 0 to 100");
        check(r#"{"top_p": 0}"#, "top_p");
        check(r#"{"n": 0}"#, "n: expected at least 1");
        check(r#"{"logit_bias": {"100": 1}}"#, "\"100\" is no token id below 100");
        check(r#"{"logit_bias": {"1": "x"}}"#, "not a number");
        check(r#"{"stop": [""]}"#, "stop");
    }

    #[test]
    fn lines_are_numbered_and_bad_ones_do_not_end_them() {
        let text: &[u8] = b"a\n\n \xff\nb";
        let lines: Vec<_> = Lines::new(text).map(|line| line.unwrap()).collect();
        let numbers: Vec<_> = lines.iter().map(|(number, text)| (*number, text.is_ok())).collect();
        assert_eq!(numbers, [(1, true), (3, false), (4, true)]);
        let mut long = vec![b'x'; LINE_BYTES_MAX + 10];
        long.extend(b"\nnext\n");
        let lines: Vec<_> = Lines::new(&long[..]).map(|line| line.unwrap().1).collect();
        assert!(lines[0].as_ref().unwrap_err().contains("longer") && lines[1].as_ref().unwrap() == "next\n");
        assert_eq!(lines.len(), 2);
    }
}
