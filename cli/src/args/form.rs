//! What an answer must look like.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// What an answer must look like.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct FormArgs {
    /// The answer is JSON that this JSON Schema describes: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", help_heading = "Answer")]
    pub json_schema: Option<String>,
    /// The answer is a JSON object
    #[arg(long, help_heading = "Answer")]
    pub json_object: bool,
    /// The answer matches this regular expression as a whole
    #[arg(long, value_name = "REGEX", help_heading = "Answer")]
    pub regex: Option<String>,
    /// The answer is a text of the grammar in FILE, in llguidance's variant of Lark's syntax
    #[arg(long, value_name = "FILE", help_heading = "Answer")]
    pub grammar: Option<PathBuf>,
}

/// `--tool-format`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ToolFormatArg {
    /// <tool_call>{"name": …, "arguments": …}</tool_call>
    Hermes,
    /// {"name": …, "parameters": …}
    Llama,
    /// [TOOL_CALLS] [{"name": …, "arguments": …}]
    Mistral,
}
