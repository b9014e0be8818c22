//! Chat templates: messages in, the text a model was trained on out.
//!
//! Owns the Jinja environment, set up as transformers' `apply_chat_template` sets up its own. Which parts of the
//! text may become special tokens is the tokenizer's business; for that a rendering can be repeated with its
//! messages rewritten, see [`Rendered`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::{Map, Value};

mod clock;
mod json;
#[cfg(test)]
mod tests;

/// Longest template accepted, in bytes; real ones have some 10 KiB.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Longest role accepted, in bytes.
const ROLE_BYTES_MAX: usize = 64;
/// Name of the one template in the environment.
const NAME: &str = "chat_template";

/// Why a template cannot be used or refuses its messages.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ChatTemplateError {
    /// The template is no Jinja that is understood here.
    #[error("{origin}: chat template, line {line}: {message}; give another one with --chat-template FILE")]
    Parse {
        /// Where the template is from.
        origin: String,
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// The template failed on these messages.
    #[error(
        "{origin}: chat template, line {line}: {message}; if the template is at fault, give another one with \
         --chat-template FILE"
    )]
    Render {
        /// Where the template is from.
        origin: String,
        /// Line in the template, from 1; 0 where it is not known.
        line: usize,
        /// What went wrong.
        message: String,
    },
    /// The template itself refuses these messages, with `raise_exception`.
    #[error("{origin}: the chat template refuses these messages: {message}")]
    Refused {
        /// Where the template is from.
        origin: String,
        /// What the template says.
        message: String,
    },
    /// A role that is no plain word; templates print it next to special tokens.
    #[error("message {index} has the role {role:?}; a role is 1 to {max} letters, digits, `_` or `-`", max = ROLE_BYTES_MAX)]
    Role {
        /// Position of the message, from 0.
        index: usize,
        /// The role.
        role: String,
    },
}

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
    /// What else the template sees of it, such as `tool_calls`, `tool_call_id` and `name`.
    pub extra: Map<String, Value>,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), extra: Map::new() }
    }

    fn to_template(&self) -> minijinja::Value {
        let own = [("role", self.role.as_str().into()), ("content", self.content.as_str().into())];
        let extra = self.extra.iter().map(|(key, value)| (key.as_str(), json::to_template(value)));
        minijinja::Value::from_pairs(own.into_iter().chain(extra))
    }
}

/// What a template is given besides the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RenderOptions {
    /// Ask for the beginning of a reply at the end.
    pub add_generation_prompt: bool,
    /// Text of the BOS token; `None` leaves it undefined, which prints nothing.
    pub bos_token: Option<String>,
    /// Text of the EOS token.
    pub eos_token: Option<String>,
    /// Tools the model may call, in the form the template expects; `None` is passed on as `none`.
    pub tools: Option<Value>,
    /// More variables, such as `enable_thinking`.
    pub extra: Map<String, Value>,
    /// What `strftime_now` takes for now, in seconds since 1970 UTC; `None` asks the system's clock.
    pub now_unix: Option<u64>,
}

/// A parsed chat template. Cheap to clone.
#[derive(Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
    origin: Arc<str>,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").field("origin", &self.origin).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Parses a template; `origin` says in messages where it is from.
    ///
    /// The environment is that of transformers: blocks trimmed, Python's methods of strings, lists and dicts, loop
    /// controls, `raise_exception`, `strftime_now`, its `tojson`; `generation` blocks are passed over.
    ///
    /// # Errors
    /// [`ChatTemplateError::Parse`] with the line.
    pub fn new(source: &str, origin: &str) -> Result<Self, ChatTemplateError> {
        let parse_error = |line, message| ChatTemplateError::Parse { origin: origin.into(), line, message };
        if source.len() > SOURCE_BYTES_MAX {
            let message = format!("it has {} bytes; at most {SOURCE_BYTES_MAX} are accepted", source.len());
            return Err(parse_error(0, message));
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let mut environment = Environment::new();
        environment.set_syntax(syntax.map_err(|e| parse_error(0, message_of(&e)))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|e| parse_error(e.line().unwrap_or(0), message_of(&e)))?;
        Ok(Self { environment: Arc::new(environment), origin: origin.into() })
    }

    /// Renders messages.
    ///
    /// # Errors
    /// [`ChatTemplateError::Render`] when the template fails, [`ChatTemplateError::Refused`] when it says so itself,
    /// [`ChatTemplateError::Role`] for a role that is no plain word.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Rendered, ChatTemplateError> {
        if let Some((index, message)) = messages.iter().enumerate().find(|(_, message)| !is_role(&message.role)) {
            return Err(ChatTemplateError::Role { index, role: message.role.clone() });
        }
        let mut options = options.clone();
        // Fixed here, so that a second rendering agrees with the first.
        options.now_unix.get_or_insert_with(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()));
        let text = self.run(messages, &options)?;
        Ok(Rendered { text, again: Some((self.clone(), messages.to_vec(), options)) })
    }

    fn run(&self, messages: &[Message], options: &RenderOptions) -> Result<String, ChatTemplateError> {
        let now = options.now_unix.unwrap_or(0);
        let strftime_now = minijinja::Value::from_function(move |format: String| clock::strftime(&format, now));
        let mut context: BTreeMap<&str, minijinja::Value> =
            options.extra.iter().map(|(key, value)| (key.as_str(), json::to_template(value))).collect();
        context.insert("messages", messages.iter().map(Message::to_template).collect());
        context.insert("add_generation_prompt", options.add_generation_prompt.into());
        context.insert("strftime_now", strftime_now);
        // transformers always passes these two, and templates ask `is none` as well as `is defined`.
        context.insert("tools", options.tools.as_ref().map_or(().into(), json::to_template));
        context.entry("documents").or_insert(().into());
        for (key, token) in [("bos_token", &options.bos_token), ("eos_token", &options.eos_token)] {
            if let Some(token) = token {
                context.insert(key, token.as_str().into());
            }
        }
        let template = self.environment.get_template(NAME).map_err(|e| self.failed(&e))?;
        template.render(context).map_err(|e| self.failed(&e))
    }

    fn failed(&self, error: &Error) -> ChatTemplateError {
        let origin = self.origin.to_string();
        let mut source: Option<&dyn std::error::Error> = Some(error);
        while let Some(cause) = source {
            if let Some(Raised(message)) = cause.downcast_ref() {
                return ChatTemplateError::Refused { origin, message: message.clone() };
            }
            source = cause.source();
        }
        ChatTemplateError::Render { origin, line: error.line().unwrap_or(0), message: message_of(error) }
    }
}

/// A rendered chat, and what it takes to render it again with other texts in its messages.
#[derive(Clone, Debug)]
pub struct Rendered {
    text: String,
    again: Option<(ChatTemplate, Vec<Message>, RenderOptions)>,
}

impl Rendered {
    /// A text that was rendered elsewhere and is trusted as a whole: special tokens in it become special.
    pub fn trusted(text: impl Into<String>) -> Self {
        Self { text: text.into(), again: None }
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Every text in it that came from outside the template: messages, and the strings in tools and extra variables.
    pub(crate) fn contents(&self) -> impl Iterator<Item = &str> {
        let mut contents = Vec::new();
        if let Some((_, messages, options)) = &self.again {
            for message in messages {
                contents.push(message.content.as_str());
                message.extra.values().for_each(|value| strings(value, &mut contents));
            }
            options.tools.iter().chain(options.extra.values()).for_each(|value| strings(value, &mut contents));
        }
        contents.into_iter()
    }

    /// The text with every one of [`Self::contents`] rewritten before rendering.
    pub(crate) fn again(&self, rewrite: impl Fn(&str) -> String) -> Result<String, ChatTemplateError> {
        let Some((template, messages, options)) = &self.again else {
            return Ok(self.text.clone());
        };
        let mut messages = messages.clone();
        for message in &mut messages {
            message.content = rewrite(&message.content);
            message.extra.values_mut().for_each(|value| rewrite_strings(value, &rewrite));
        }
        let mut options = options.clone();
        options.tools.iter_mut().chain(options.extra.values_mut()).for_each(|value| rewrite_strings(value, &rewrite));
        template.run(&messages, &options)
    }
}

/// The text.
impl fmt::Display for Rendered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn strings<'a>(value: &'a Value, out: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => out.push(text),
        Value::Array(items) => items.iter().for_each(|item| strings(item, out)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            out.push(key);
            strings(item, out);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn rewrite_strings(value: &mut Value, rewrite: &impl Fn(&str) -> String) {
    match value {
        Value::String(text) => *text = rewrite(text),
        Value::Array(items) => items.iter_mut().for_each(|item| rewrite_strings(item, rewrite)),
        Value::Object(map) => {
            let rewritten = std::mem::take(map).into_iter().map(|(key, mut item)| {
                rewrite_strings(&mut item, rewrite);
                (rewrite(&key), item)
            });
            *map = rewritten.collect();
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn is_role(role: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=ROLE_BYTES_MAX).contains(&role.len()) && role.bytes().all(plain)
}

/// What a template said with `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn raise_exception(message: String) -> Result<minijinja::Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn message_of(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Replaces the tags that mark a model's own words for training by ones that do nothing and trim alike.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        let Some((inside, after)) = tag.split_once("%}") else {
            rest = tag;
            break;
        };
        match inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => out.push_str(&inside.replace("endgeneration", "endif")),
            _ => {
                // A string inside may hold `%}`: go on right behind the opening.
                rest = tag;
                continue;
            }
        }
        out.push_str("%}");
        rest = after;
    }
    out.push_str(rest);
    out
}
