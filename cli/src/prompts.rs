//! From what people type to the ids of a prompt, and to what an answer must look like.

mod form;
mod untaught;

use std::sync::{Arc, OnceLock};

use anyhow::Result;
use pp_engine::chat_template::{ChatTemplate, Message, RenderOptions, Rendered};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::constraint::{ConstraintError, Grammars};
use pp_engine::tokenizer::{Encode, Tokenizer};
use pp_engine::tools::ToolFormat;
use serde_json::{Map, Value};

use crate::errors::model;
use crate::requests::choosing::Invalid;
use crate::requests::tools::ToolUse;
pub use form::Form;

/// A model's tokenizer and template.
pub struct Prompts {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    origin: String,
    tool_format: ToolFormat,
    /// The template shows tools to the model; else a system message does.
    is_taught_tools: bool,
    /// The template shows them somehow.
    speaks_of_tools: bool,
    /// Tokens that the model has logits for.
    vocab: usize,
    /// Most sessions never need them.
    grammars: OnceLock<Result<Grammars, ConstraintError>>,
}

impl Prompts {
    /// A model's own, or with another template: its text, and where it is from.
    ///
    /// # Errors
    /// When the tokenizer or the template cannot be read.
    pub fn new(checkpoint: &Checkpoint, template: Option<(String, String)>) -> Result<Prompts> {
        let origin = checkpoint.path.display().to_string();
        let template = match template {
            Some(own) => Some(own),
            None => checkpoint.chat_template()?.map(|source| (source, origin.clone())),
        };
        let source = template.as_ref().map_or("", |(source, _)| source.as_str());
        let known = ToolFormat::of_template(source);
        let speaks_of_tools = source.contains("tools");
        let template = template.map(|(source, origin)| ChatTemplate::new(&source, &origin)).transpose()?;
        Ok(Prompts {
            tokenizer: checkpoint.tokenizer()?.into(),
            template,
            origin,
            tool_format: known.unwrap_or(ToolFormat::Hermes),
            // In a form that is not known here calls could not be found.
            is_taught_tools: speaks_of_tools && known.is_some(),
            speaks_of_tools,
            vocab: checkpoint.config.vocab,
            grammars: OnceLock::new(),
        })
    }

    /// With calls of tools in another form than the one that the template's text speaks of.
    #[must_use]
    pub fn with_tool_format(mut self, format: Option<ToolFormat>) -> Prompts {
        if let Some(format) = format {
            self.tool_format = format;
            self.is_taught_tools = self.speaks_of_tools;
        }
        self
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// Plain text to be continued.
    ///
    /// # Errors
    /// When the tokenizer does not take it.
    pub fn raw(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, Encode { add_bos: true, parse_special: false })?)
    }

    /// Messages, put to the model as its template says. `extra`: more variables for the template.
    ///
    /// # Errors
    /// When there is no template, or it refuses them.
    pub fn chat(&self, messages: &[Message], extra: &Map<String, Value>) -> Result<Vec<u32>> {
        self.chat_with_tools(messages, None, extra)
    }

    /// As [`Prompts::chat`], with tools that the model may call.
    ///
    /// # Errors
    /// As [`Prompts::chat`]; an [`Invalid`] where the template does not show the tools.
    pub fn chat_with_tools(
        &self,
        messages: &[Message],
        tools: Option<&ToolUse>,
        extra: &Map<String, Value>,
    ) -> Result<Vec<u32>> {
        let plain = self.render(messages, None, extra, true)?;
        let Some(tools) = tools else { return Ok(self.tokenizer.encode_chat(&plain)?) };
        let rendered = self.render(messages, Some(tools), extra, true);
        let rendered = rendered.map_err(|error| Invalid::new("tools", format!("{error:#}")))?;
        if rendered.text() == plain.text() {
            return Err(Invalid::new("tools", "the chat template of the model has no place for them").into());
        }
        Ok(self.tokenizer.encode_chat(&rendered)?)
    }

    /// What the template itself writes at the beginning of the answer to `messages`, behind the last message.
    ///
    /// # Errors
    /// As [`Prompts::chat`].
    pub fn beginning(&self, messages: &[Message], extra: &Map<String, Value>) -> Result<String> {
        let (asked, bare) = (self.render(messages, None, extra, true)?, self.render(messages, None, extra, false)?);
        Ok(asked.text().strip_prefix(bare.text()).unwrap_or_default().to_owned())
    }

    /// The template.
    ///
    /// # Errors
    /// When there is none.
    pub fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| {
            model(format!(
                "{} has no chat template: use --raw to continue plain text, or --chat-template FILE",
                self.origin
            ))
        })
    }

    /// `ask`: for the beginning of a reply at the end.
    fn render(
        &self,
        messages: &[Message],
        tools: Option<&ToolUse>,
        extra: &Map<String, Value>,
        ask: bool,
    ) -> Result<Rendered> {
        let taught = tools.filter(|_| self.is_taught_tools);
        let options = RenderOptions {
            add_generation_prompt: ask,
            bos_token: self.tokenizer.bos_text(),
            eos_token: self.tokenizer.eos_text(),
            extra: extra.clone(),
            tools: taught.map(|tools| tools.shown.clone()),
            ..RenderOptions::default()
        };
        let template = self.template()?;
        if self.is_taught_tools {
            return Ok(template.render(messages, &options)?);
        }
        Ok(template.render(&untaught::conversation(messages, tools, self.tool_format), &options)?)
    }
}
