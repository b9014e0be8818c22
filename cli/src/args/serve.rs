//! What `serve` was typed with.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pp_engine::journal;

use super::{ModelArgs, OutputArgs, PipelineArgs, ToolFormatArg};

/// `serve`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run serve                                             the demo model, at http://127.0.0.1:8080/v1
  pp-run serve -m qwen.gguf --stages 2 --device 0,1        over two adapters
  openssl rand -hex 32 > key && pp-run serve --host 0.0.0.0 --api-key key   for other machines too
  pp-run serve --journal /var/lib/pp-run/journal --resume   what runs outlives a crash of the program
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"What is a pipeline?\"}]}'")]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What clients call the model (default: the name of its file or folder)
    #[arg(long, value_name = "NAME", help_heading = "Model")]
    pub model_name: Option<String>,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub chat_template: Option<PathBuf>,
    /// How the model writes calls of tools (default: as its chat template says, else hermes)
    #[arg(long, value_name = "FORM", value_enum, help_heading = "Model")]
    pub tool_format: Option<ToolFormatArg>,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    /// Address to listen on: 127.0.0.1 is for this machine only, 0.0.0.0 for all that reach it; the latter wants --api-key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Server")]
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one, and says which
    #[arg(long, value_name = "PORT", default_value_t = 8080, help_heading = "Server")]
    pub port: u16,
    /// File with the key that clients must send as `Authorization: Bearer KEY`, for all but /, /health and /ready
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub api_key: Option<PathBuf>,
    /// On a loopback address: take requests for this name too, as a proxy in front sends them (repeatable)
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub allow_host: Vec<String>,
    /// Most tokens of an answer, whatever a request asks for (default: what the context holds)
    #[arg(short = 'n', long, value_name = "TOKENS", value_parser = clap::value_parser!(u64).range(1..), help_heading = "Server")]
    pub max_tokens: Option<u64>,
    /// Most connections at once; others wait
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Server")]
    pub max_connections: u32,
    /// Most bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20, value_parser = clap::value_parser!(u64).range(1024..=1 << 30), help_heading = "Server")]
    pub max_body_bytes: u64,
    /// On SIGTERM or Ctrl-C, how long answers that have begun may take to end
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=86_400), help_heading = "Server")]
    pub drain: u64,
    /// Write what is asked and answered to FILE: what runs when the program dies is finished after a restart with
    /// --resume, with the same tokens, and clients get their answers at /v1/requests/ID (see the README)
    #[arg(long, value_name = "FILE", help_heading = "Journal")]
    pub journal: Option<PathBuf>,
    /// Finish what the journal holds. Right for every start; without it a journal with something unfinished is an error
    #[arg(long, requires = "journal", help_heading = "Journal")]
    pub resume: bool,
    /// Most bytes of the journal's file. Half of them is for what runs, with all tokens that it may come to; what would
    /// not fit is refused
    #[arg(long, value_name = "BYTES", default_value_t = journal::BYTES_DEFAULT, value_parser = clap::value_parser!(u64).range(journal::BYTES_MIN..=journal::BYTES_MAX), requires = "journal", help_heading = "Journal")]
    pub journal_bytes: u64,
    /// How long answers that are complete are kept for clients that lost them
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(0..=86_400), requires = "journal", help_heading = "Journal")]
    pub keep_answers: u64,
    /// How log lines (stderr) are written
    #[arg(long, value_enum, default_value_t, value_name = "FORMAT", help_heading = "Output")]
    pub log_format: LogFormat,
    /// Log prompts too: without it no text of a user is in the log
    #[arg(long, help_heading = "Output")]
    pub log_prompts: bool,
    /// Print less: no notes (stderr)
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `--log-format`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}
