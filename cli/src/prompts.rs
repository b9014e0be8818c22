//! From what people type to the ids of a prompt.

use std::sync::Arc;

use anyhow::Result;
use pp_engine::chat_template::{ChatTemplate, Message, RenderOptions};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::tokenizer::{Encode, Tokenizer};
use serde_json::{Map, Value};

use crate::errors::model;

/// A model's tokenizer and template.
pub struct Prompts {
    tokenizer: Arc<Tokenizer>,
    template: Option<ChatTemplate>,
    origin: String,
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
        let template = template.map(|(source, origin)| ChatTemplate::new(&source, &origin)).transpose()?;
        Ok(Prompts { tokenizer: checkpoint.tokenizer()?.into(), template, origin })
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
        let template = self.template.as_ref().ok_or_else(|| {
            model(format!(
                "{} has no chat template: use --raw to continue plain text, or --chat-template FILE",
                self.origin
            ))
        })?;
        let options = RenderOptions {
            add_generation_prompt: true,
            bos_token: self.tokenizer.bos_text(),
            eos_token: self.tokenizer.eos_text(),
            extra: extra.clone(),
            ..RenderOptions::default()
        };
        Ok(self.tokenizer.encode_chat(&template.render(messages, &options)?)?)
    }
}
