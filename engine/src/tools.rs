//! Tools: functions that a model may ask its caller to call.
//!
//! Owns the forms in which models write calls: which form a chat template speaks of, the grammar of it for given tools
//! (`grammar`), and how calls are found in an answer as it comes (`parse`). Pure.

mod grammar;
mod parse;
#[cfg(test)]
mod tests;

use serde_json::Value;

pub use grammar::{Allowed, grammar};
pub use parse::{Piece, ToolParser};

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// JSON Schema of its arguments, an object.
    pub parameters: Value,
}

/// How a model writes a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call: Hermes, Qwen.
    Hermes,
    /// `{"name": …, "parameters": …}` as the whole answer: Llama 3.
    Llama,
    /// `[TOOL_CALLS] [{"name": …, "arguments": …}, …]`: Mistral.
    Mistral,
}

impl ToolFormat {
    /// All, with the names by which they are chosen.
    pub const ALL: [(ToolFormat, &'static str); 3] =
        [(ToolFormat::Hermes, "hermes"), (ToolFormat::Llama, "llama"), (ToolFormat::Mistral, "mistral")];

    /// The one that a chat template shows its model, as far as its text tells.
    pub fn of_template(source: &str) -> Option<ToolFormat> {
        let has = |text: &str| source.contains(text);
        match () {
            () if has("[TOOL_CALLS]") => Some(ToolFormat::Mistral),
            () if has("<tool_call>") => Some(ToolFormat::Hermes),
            () if has("\"parameters\"") && (has("ipython") || has("<|python_tag|>")) => Some(ToolFormat::Llama),
            () => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        ToolFormat::ALL[self as usize].1
    }

    /// What a call begins with, and ends with.
    pub(crate) fn markers(self) -> Option<(&'static str, &'static str)> {
        match self {
            ToolFormat::Hermes => Some(("<tool_call>", "</tool_call>")),
            ToolFormat::Llama => None,
            ToolFormat::Mistral => Some(("[TOOL_CALLS]", "")),
        }
    }

    /// Texts that are one special token in some vocabularies, and have to be seen in an answer.
    pub fn marker_texts(self) -> impl Iterator<Item = &'static str> {
        self.markers().into_iter().flat_map(|(open, close)| [open, close]).filter(|text| !text.is_empty())
    }

    /// The key of a call's arguments.
    pub(crate) fn arguments_key(self) -> &'static str {
        match self {
            ToolFormat::Hermes | ToolFormat::Mistral => "arguments",
            ToolFormat::Llama => "parameters",
        }
    }
}
