//! What was typed for `chat`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{ModelArgs, OutputArgs, PipelineArgs, RunArgs, SamplingArgs};

/// `chat`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run chat                                        talk to the demo model; plain `pp-run` on a terminal does the same
  pp-run chat -m qwen.gguf --stages 4 --system \"Be brief.\" -t 0.7
  pp-run chat -m qwen.gguf --workers rig2,rig3 --transcript talk.md
  pp-run chat -m qwen3.gguf --template-arg enable_thinking=false
  printf 'My name is Ada.\\nWhat is my name?\\n' | pp-run chat --json   a turn a line, also without a terminal

/help, once it runs, lists its commands. Alt-Enter or a backslash at the end goes on in another line; Tab completes
commands; Ctrl-C ends an answer and never the program (twice at an empty prompt it does); Ctrl-D leaves.
What was typed is kept in $XDG_STATE_HOME/pp-run/history (else ~/.local/state), readable by its owner only; what begins
with a space is not.")]
pub struct ChatArgs {
    /// System message (default: whatever the model's own template says)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Conversation")]
    pub system: Option<String>,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Conversation")]
    pub chat_template: Option<PathBuf>,
    /// Variable for the chat template, such as enable_thinking=false (JSON, else text; repeatable)
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Conversation")]
    pub template_arg: Vec<String>,
    /// What to do when the context is full: stop, and say so; or drop the oldest turns
    #[arg(long, value_enum, default_value_t, value_name = "POLICY", help_heading = "Conversation")]
    pub context_policy: ContextPolicy,
    /// Thoughts of models that think aloud (<think>): shown dimmed, as any text, or not at all
    #[arg(long, value_enum, default_value_t, value_name = "HOW", help_heading = "Conversation")]
    pub thoughts: ThoughtsArg,
    /// Append what is said to FILE, as readable text
    #[arg(long, value_name = "FILE", help_heading = "Conversation")]
    pub transcript: Option<PathBuf>,
    /// Neither read nor write the history of what was typed
    #[arg(long, help_heading = "Conversation")]
    pub no_history: bool,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Print less: no notes (stderr)
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

impl ChatArgs {
    /// Of an answer's options without a prompt; nothing where some of them make no sense in a conversation.
    pub fn of(args: RunArgs) -> Result<ChatArgs, Box<RunArgs>> {
        let RunArgs { prompt, output, trace, live, logprobs, .. } = &args;
        let prompted = prompt.words.is_some() || prompt.prompt.is_some() || prompt.prompt_file.is_some();
        if prompted || prompt.raw || output.json || *live || trace.is_some() || logprobs.is_some() {
            return Err(Box::new(args));
        }
        Ok(ChatArgs {
            system: args.prompt.system,
            chat_template: args.prompt.chat_template,
            template_arg: args.prompt.template_arg,
            context_policy: ContextPolicy::default(),
            thoughts: ThoughtsArg::default(),
            transcript: None,
            no_history: false,
            model: args.model,
            pipeline: args.pipeline,
            sampling: args.sampling,
            quiet: args.quiet,
            output: args.output,
        })
    }
}

/// `--context-policy`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ContextPolicy {
    /// Say so, and wait for what is to become of it.
    #[default]
    Stop,
    /// Drop the oldest turns.
    DropOldest,
}

/// `--thoughts`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ThoughtsArg {
    /// Dimmed, on a terminal.
    #[default]
    Dim,
    /// As any text.
    Show,
    /// Not at all.
    Hide,
}
