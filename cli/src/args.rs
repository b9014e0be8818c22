//! What was typed. Says nothing about what it means: that is [`crate::settings`].

mod bench;
mod chat;
mod cluster;
mod form;
mod network;
mod plan;
mod serve;

use std::path::PathBuf;

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};
use pp_engine::journal;
use serde::Deserialize;

pub use bench::{ApiArg, BenchArgs, Lengths, LoadArgs};
pub use chat::{ChatArgs, ContextPolicy, ThoughtsArg};
pub use cluster::{
    AddArgs, ClusterArgs, ClusterVerb, DrainArgs, InitArgs, RebalanceArgs, RemoveArgs, StatusArgs, WorkerArgs,
};
pub use form::{FormArgs, ToolFormatArg};
pub use network::{DoctorArgs, NetBenchArgs, NetBenchEndArgs, NetworkArg, TransportArg};
pub use plan::PlanArgs;
pub use serve::{LogFormat, ServeArgs};

/// Seconds that a lost worker is waited for.
pub const RECOVER_WAIT: u64 = 10;

const EXAMPLES: &str = "\
Examples:
  pp-run \"What is a pipeline?\"                          one answer of the demo model
  pp-run --stages 4 --split 8,8,7,7 \"Tell me a story\"   the same model, cut into four stages
  pp-run -m qwen.gguf --raw -n 64 < start.txt           continue a text, without a chat template
  pp-run -m qwen.gguf --device 0,1 --stages 2 \"Hello\"   stages on two adapters
  pp-run -m qwen.gguf --stages 3 --workers rig2,rig3 \"Hello\"   stage 0 here, the others on two workers
  pp-run                                                a conversation, on a terminal (see pp-run help chat)
  pp-run -- devices                                     `--` makes a prompt of a verb
  pp-run plan -m qwen.gguf --stages 2                   what each stage would hold; loads nothing

More: pp-run --help, pp-run help plan";

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    failed while running (a device was lost, a file could not be written, …)
  2    bad usage or bad input (an option, a prompt, a split)
  3    no usable device, or not enough device memory
  4    the model cannot be found or read, or is not supported
  5    a worker is busy, does not answer, is not a member, or does not take its stages
  6    `doctor` has warnings, and no errors (with errors it is 1)
  130  cancelled with Ctrl-C; what was answered until then has been printed
  141  nobody reads the output any more

Environment:
  PP_MODEL   model when -m is not given (a path or a name)
  PP_MODELS  the models folder (default: $XDG_DATA_HOME/pp-run/models, else ~/.local/share/pp-run/models)
  PP_JOIN_CODE  on a worker: the code to be enrolled with, in place of a made-up one; on the head: default of --code
  PP_LOG     what to log to stderr: error, warn (default), info, debug, trace, or a filter such as pp_engine=debug
  PP_CHECKED set to 1 to compile kernels with bounds checks (slower; for finding faults)
  NO_COLOR   set to anything to print without colours";

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "pp-run",
    version,
    about = "Run a language model as a pipeline of stages on one or more GPUs",
    long_about = "Run a language model as a pipeline of stages, cut by depth, on one or more GPUs (Vulkan), or on the \
                  processor through a software driver.\n\nWithout a verb: answer one prompt, streamed to stdout; \
                  without a prompt, on a terminal: a conversation.",
    after_help = EXAMPLES,
    after_long_help = format!("{EXAMPLES}\n\n{EXIT_CODES}"),
    override_usage = "pp-run [OPTIONS] [PROMPT]\n       pp-run <COMMAND> [OPTIONS]"
)]
pub struct Cli {
    /// A verb, when there is one.
    #[command(subcommand)]
    pub verb: Option<Verb>,
    /// Without one: an answer.
    #[command(flatten)]
    pub run: RunArgs,
}

/// What else there is beside an answer.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Talk to a model: a conversation that goes on, and commands about it and the pipe
    Chat(Box<ChatArgs>),
    /// Every adapter: what it is, what it can do, whether its kernels compute right, whether it would be used
    Devices(DevicesArgs),
    /// What a model file holds: architecture, sizes, tensors, tokenizer, and what is not supported
    Inspect(InspectArgs),
    /// Layers and bytes of every stage, before anything is loaded
    Plan(PlanArgs),
    /// Get a model from the Hugging Face hub, or from a worker
    Pull(PullArgs),
    /// How well a model predicts a text: negative log-likelihood and perplexity
    Perplexity(PerplexityArgs),
    /// How fast a model runs: prompt and answer tokens per second at several depths, or with several requests at once
    Bench(BenchArgs),
    /// Answer a file of requests, many at a time; goes on where it was interrupted
    Batch(BatchArgs),
    /// Answer many clients over HTTP, with OpenAI's API
    Serve(ServeArgs),
    /// A pipeline in virtual time: what a load would get out of stages and hops of given costs
    Sim(SimArgs),
    /// Where a pipeline's time went: who was busy when, why the others were not, and what to do about it
    Trace(TraceArgs),
    /// Give this machine's devices to a cluster: wait to be enrolled, then run stages for its head
    Worker(WorkerArgs),
    /// The cluster that this machine is the head of: begin it, add workers, see how they are, remove them
    Cluster(ClusterArgs),
    /// Whether all is well: drivers, devices, network, keys, models and workers; and what to do where it is not
    Doctor(DoctorArgs),
    /// What a hop costs: QUIC beside TCP and TCP with TLS, on this machine or to a worker
    NetBench(NetBenchArgs),
    /// One end of a measurement: what net-bench starts
    #[command(hide = true)]
    NetBenchEnd(NetBenchEndArgs),
}

/// One answer.
#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub prompt: PromptArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub form: FormArgs,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Print less: neither notes nor the closing table (stderr)
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,
    /// Write what every stage did when to FILE: Chrome's trace format, for `pp-run trace` and ui.perfetto.dev
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,
    /// Show what the stages, the queue and the KV cache are doing, at the foot of the terminal (stderr)
    #[arg(long, help_heading = "Output")]
    pub live: bool,
    /// With --json: add each token's log-probability and those of the N likeliest (0 to 64)
    #[arg(long, value_name = "N", help_heading = "Output")]
    pub logprobs: Option<u32>,
}

/// Where the prompt is from, and how it is put to the model.
#[derive(Debug, Args)]
pub struct PromptArgs {
    /// The prompt, taken verbatim. A first word that is a verb is the verb: write `-- devices` or `--prompt devices`
    #[arg(value_name = "PROMPT", help_heading = "Prompt")]
    pub words: Option<String>,
    /// The prompt, as an option
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Prompt")]
    pub prompt: Option<String>,
    /// Read the prompt from a file (UTF-8, nothing trimmed). Without any prompt it is read from stdin, when piped
    #[arg(short = 'f', long, value_name = "FILE", help_heading = "Prompt")]
    pub prompt_file: Option<PathBuf>,
    /// Continue the prompt as plain text, without a chat template
    #[arg(long, help_heading = "Prompt", conflicts_with_all = ["system", "chat_template", "template_arg"])]
    pub raw: bool,
    /// System message (default: whatever the model's own template says)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Prompt")]
    pub system: Option<String>,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub chat_template: Option<PathBuf>,
    /// Variable for the chat template, such as enable_thinking=false (JSON, else text; repeatable)
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Prompt")]
    pub template_arg: Vec<String>,
}

/// Which model.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// A .gguf file, a Hugging Face folder, or a name in the models folder (default: $PP_MODEL, else the demo model)
    #[arg(short, long, value_name = "PATH|NAME", help_heading = "Model")]
    pub model: Option<String>,
}

/// How the model is cut and on what it runs.
#[derive(Clone, Debug, Default, Args)]
pub struct PipelineArgs {
    /// Number of stages (default: as many as --split names, else as --workers makes, else 1)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = stages, help_heading = "Pipeline")]
    pub stages: Option<usize>,
    /// Layers per stage: exact counts (9,8,8,8), ratios (9:8:8:8), auto, or bytes [default: auto]
    #[arg(
        long,
        value_name = "SPLIT",
        allow_hyphen_values = true,
        help_heading = "Pipeline",
        long_help = "Layers per stage: exact counts (9,8,8,8), ratios (9:8:8:8), auto, or bytes [default: auto].\n\nauto \
                     measures devices and links, once for each kind of model and some seconds long, and takes the split \
                     that serves --optimize best: how many layers on which device, which device comes when, and which \
                     is left out because it would slow the rest down. Where --stages says how many, it is that many. \
                     Where all stages are on one device, and where devices are not measured (--no-measure), it is \
                     bytes: as equal as can be, within what the memories hold"
    )]
    pub split: Option<String>,
    /// What an automatic split is for: tokens a second of all requests, one request's time, or the largest KV cache
    /// [default: throughput]
    #[arg(long, value_enum, value_name = "WHAT", help_heading = "Pipeline")]
    pub optimize: Option<OptimizeArg>,
    /// Leave no device out, also where it slows the rest down
    #[arg(long, help_heading = "Pipeline")]
    pub use_all: bool,
    /// Measure no device: an automatic split goes by bytes, and nothing is predicted
    #[arg(long, help_heading = "Pipeline")]
    pub no_measure: bool,
    /// Adapter of each stage, by index, id or part of the name, comma-separated; fewer than stages repeat in turn
    /// (default: every hardware adapter; a software one only when named or when there is nothing else).
    #[arg(
        long,
        value_name = "SEL[,SEL…]",
        value_delimiter = ',',
        help_heading = "Pipeline",
        long_help = "Adapter of each stage, by index, id or part of the name (see `pp-run devices`), \
                     comma-separated; fewer than stages repeat in turn. Default: every hardware adapter; a software \
                     one only when named or when there is nothing else. `reference` computes on the processor with \
                     plain loops and no driver at all: exact, and very slow"
    )]
    pub device: Vec<String>,
    /// Who runs the stages: one name fewer than stages (stage 0 is here then), or one for each, `local` among them;
    /// NAME:DEVICE picks a device
    #[arg(
        long,
        value_name = "NAME[:DEVICE],…",
        value_delimiter = ',',
        help_heading = "Pipeline",
        long_help = "Who runs the stages, in order: one name fewer than there are stages, and stage 0 runs here; or a \
                     name for every stage, where `local` is this machine. NAME:DEVICE picks a device of the worker, by \
                     id, index or part of its name (see `pp-run cluster status`); without one it is the worker's \
                     first. A name may stand for several stages. --device picks the devices of the stages that run \
                     here. A worker that has no copy of the model in its models folder or its cache of the hub, under any name, gets the tensors of \
                     its layers from this machine and other workers, and keeps them"
    )]
    pub workers: Vec<String>,
    /// Take workers, split, wire and device from FILE (TOML); what is also typed is as typed
    #[arg(
        long,
        value_name = "FILE",
        help_heading = "Pipeline",
        long_help = "Take workers, stages, split, wire and device from FILE, in TOML; what is also typed is as typed. \
                     For example:\n\n  workers = [\"local\", \"rig2\", \"rig3:0\"]\n  split = \"10,12,10\"\n  wire = \
                     \"f16\""
    )]
    pub cluster: Option<PathBuf>,
    /// How long to wait for workers that are busy or do not answer
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=86_400), help_heading = "Pipeline")]
    pub wait: u64,
    /// How long to wait for a worker that was lost while answers were made, before its layers go elsewhere
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = RECOVER_WAIT,
        value_parser = clap::value_parser!(u64).range(0..=86_400),
        help_heading = "Pipeline",
        long_help = "How long to wait for a worker that was lost while answers were made, before its layers go elsewhere. Answers \
                     pause meanwhile and then go on with the same tokens. Where another member of the cluster is idle, it \
                     takes the layers sooner, after as long as the lost one took to load"
    )]
    pub recover_wait: u64,
    /// Most other members of the cluster that take the place of lost ones at once (default: any number)
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    pub spares: Option<usize>,
    /// Treat a worker's stage that takes more than three times what it used to, for 32 micro-batches, as lost: another member
    /// takes its layers, or those that are left, and where nobody can it stays
    #[arg(long, help_heading = "Pipeline", conflicts_with = "no_recover")]
    pub replace_stragglers: bool,
    /// Memory of every stage for what it has handed on, such as 512MB: a lost stage is restored from there, and those before
    /// it compute nothing again
    #[arg(long, value_name = "SIZE", default_value = "0", help_heading = "Pipeline")]
    pub boundary_log: ByteSize,
    /// End with an error when a stage is lost, in place of going on with another one
    #[arg(long, help_heading = "Pipeline")]
    pub no_recover: bool,
    /// Positions of the context, in tokens (default: the model's maximum, or what fits the device memory)
    #[arg(short, long, value_name = "TOKENS", help_heading = "Pipeline")]
    pub ctx: Option<usize>,
    /// Precision of activations that meet quantised weights: f32 is the exact mode, q8 (8 bits) the fast one; auto is
    /// q8 where weights are quantised
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "TYPE",
        help_heading = "Pipeline",
        hide_possible_values = false
    )]
    pub activations: ActivationsArg,
    /// Precision of cached keys and values: auto is f16, and f32 in the exact mode
    #[arg(long, value_enum, default_value_t, value_name = "TYPE", help_heading = "Pipeline")]
    pub kv: KvArg,
    /// How activations cross from stage to stage: f32 changes nothing; f16 is half the bytes, q8 (8 bits, in blocks of
    /// 32) less than a third, and both cost some accuracy at every hop [default: f32]
    #[arg(long, value_enum, value_name = "TYPE", help_heading = "Pipeline")]
    pub wire: Option<WireArg>,
    /// Shapes of the kernels: for graphics cards or for software drivers; auto is by adapter
    #[arg(long, value_enum, default_value_t, value_name = "PROFILE", help_heading = "Pipeline")]
    pub profile: ProfileArg,
    /// Most tokens, of all requests, of a micro-batch; prompts are cut to it (default: the profile's, 512 or 128)
    #[arg(long, alias = "chunk", value_name = "TOKENS", help_heading = "Pipeline")]
    pub max_batch_tokens: Option<usize>,
    /// Most requests, or answers of one, that run at once; others wait (default: as many as there are, up to 16)
    #[arg(long, value_name = "N", help_heading = "Pipeline")]
    pub max_sequences: Option<usize>,
    /// Size of the KV cache that all requests share, in tokens (default: room for --max-sequences, or what fits)
    #[arg(long, value_name = "TOKENS", help_heading = "Pipeline")]
    pub kv_tokens: Option<usize>,
    /// Most requests that wait for a place; more are refused with a hint when to come again
    #[arg(long, value_name = "N", default_value_t = 1024, help_heading = "Pipeline")]
    pub max_queue: usize,
    /// Do not keep the KV pages of what has ended for prompts that begin alike
    #[arg(long, help_heading = "Pipeline")]
    pub no_prefix_cache: bool,
    /// Decode groups that follow each other through the pipe (default: by the measured cost of the stages)
    #[arg(long, value_name = "M", help_heading = "Pipeline")]
    pub groups: Option<usize>,
}

/// How tokens are chosen.
#[derive(Clone, Debug, Default, Args)]
pub struct SamplingArgs {
    /// Most tokens of the answer
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 512, help_heading = "Answer")]
    pub max_tokens: usize,
    /// Text that ends the answer, and is not part of it (repeatable)
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Answer")]
    pub stop: Vec<String>,
    /// Randomness: 0 always takes the likeliest token (default: the model's own, else 0)
    #[arg(short, long, value_name = "T", allow_negative_numbers = true, help_heading = "Answer")]
    pub temperature: Option<f32>,
    /// Choose among the K likeliest tokens only; 0 is all (default: the model's own, else 0)
    #[arg(long, value_name = "K", help_heading = "Answer")]
    pub top_k: Option<u32>,
    /// Choose among the likeliest tokens that together reach probability P (default: the model's own, else 1)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Answer")]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than P times the likeliest (default: the model's own, else 0)
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Answer")]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens already seen; 1 does nothing [default: 1]
    #[arg(long, value_name = "R", allow_negative_numbers = true, help_heading = "Answer")]
    pub repeat_penalty: Option<f32>,
    /// Subtract once from the logits of tokens already answered [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Answer")]
    pub presence_penalty: Option<f32>,
    /// Subtract from the logits of tokens already answered, for each time [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Answer")]
    pub frequency_penalty: Option<f32>,
    /// Start of the random numbers: the same seed gives the same answer (default: from the clock)
    #[arg(short, long, value_name = "N", help_heading = "Answer")]
    pub seed: Option<u64>,
}

/// How results are printed.
#[derive(Debug, Default, Args)]
pub struct OutputArgs {
    /// Print one JSON object on one line to stdout, and nothing else there
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// `devices`
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Skip the self-test of the kernels
    #[arg(long)]
    pub no_selftest: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `inspect`
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  pp-run inspect SmolLM2-135M-Instruct.Q4_1\n  pp-run inspect ./Llama-3.2-1B --json"
)]
pub struct InspectArgs {
    /// A .gguf file, a Hugging Face folder, or a name in the models folder
    #[arg(value_name = "MODEL")]
    pub model: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `pull`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run pull Qwen/Qwen2.5-1.5B-Instruct-GGUF            of several files the one with Q4_K_M in its name
  pp-run pull Qwen/Qwen2.5-1.5B-Instruct-GGUF:q8_0       another one
  pp-run pull HuggingFaceTB/SmolLM2-135M-Instruct        a folder of safetensors
  pp-run -m Qwen/Qwen2.5-1.5B-Instruct-GGUF Hello        what was pulled is a name of a model
  pp-run pull big.gguf --from rig2                       a model of a worker's models folder

Models of the hub go to the cache of Hugging Face's own programs ($HF_HUB_CACHE, $HF_HOME/hub or ~/.cache/huggingface/hub). What
is there is not fetched again, and what breaks off goes on where it was. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
mean what they mean there. Every file is compared with what the hub says of its content.

On the head of a cluster a model that the hub does not give comes from the first worker that has it, in its models folder
or its cache of the hub, into the same place here.")]
pub struct PullArgs {
    /// OWNER/NAME, with @REVISION and :FILE (or a part of its name) where wanted; or a name in a worker's models folder
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Get it from this worker of the cluster, and ask nobody else
    #[arg(long, value_name = "WORKER")]
    pub from: Option<String>,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `perplexity`
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  pp-run perplexity -m qwen.gguf --text-file book.txt --tokens 2048 --activations f32"
)]
pub struct PerplexityArgs {
    /// The text (UTF-8, taken verbatim)
    #[arg(short = 'f', long, value_name = "FILE")]
    pub text_file: PathBuf,
    /// Score the first N tokens only
    #[arg(long, value_name = "N")]
    pub tokens: Option<usize>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `batch`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run batch questions.jsonl -o answers.jsonl -m qwen.gguf --stages 4
  echo '{\"id\": 1, \"prompt\": \"2 + 2?\", \"max_tokens\": 8}' > q.jsonl; pp-run batch q.jsonl -o a.jsonl

A request has OpenAI's names: id, prompt or messages, raw, max_tokens, temperature, top_p, top_k, min_p, \
presence_penalty, frequency_penalty, repetition_penalty, logit_bias, logprobs, n, seed, stop, response_format, tools, tool_choice, \
parallel_tool_calls, deadline_seconds. \
What a request does not say is as the options say; the seed is 0 where neither says one.
An answer has line, id, tokens, text, tool_calls, finish_reason, logprobs, choices (where n > 1), usage, timings; or line, id, error.
Run again with the same files, it answers what has no answer yet.")]
pub struct BatchArgs {
    /// Requests: JSON, one a line
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Answers: JSON, one a line, in the order in which they are complete
    #[arg(short, long, value_name = "FILE")]
    pub out: PathBuf,
    #[command(flatten)]
    pub model: ModelArgs,
    /// Jinja chat template to use instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub chat_template: Option<PathBuf>,
    /// How the model writes calls of tools (default: as its chat template says, else hermes)
    #[arg(long, value_name = "FORM", value_enum, help_heading = "Prompt")]
    pub tool_format: Option<ToolFormatArg>,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Keep what there is of unfinished answers in FILE: a run that died goes on in their middle, with the same tokens,
    /// when it is started again
    #[arg(long, value_name = "FILE", help_heading = "Journal")]
    pub journal: Option<PathBuf>,
    /// Most bytes of the journal's file. Half of them is for what runs, with all tokens that it may come to; lines that
    /// would not fit wait
    #[arg(long, value_name = "BYTES", default_value_t = journal::BYTES_DEFAULT, value_parser = clap::value_parser!(u64).range(journal::BYTES_MIN..=journal::BYTES_MAX), requires = "journal", help_heading = "Journal")]
    pub journal_bytes: u64,
    /// Write what every stage did when to FILE, for `pp-run trace` and ui.perfetto.dev
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,
    /// Show what the stages, the queue and the KV cache are doing, at the foot of the terminal (stderr)
    #[arg(long, help_heading = "Output")]
    pub live: bool,
    /// Print less: no notes (stderr)
    #[arg(short, long, help_heading = "Output")]
    pub quiet: bool,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `sim`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run sim --stages 4 --stage 20,1 --count 100 --rate 5        four stages of 20 ms + 1 ms a token
  pp-run sim --stage 20,1 --stage 30,1 --hop 0.5,0.01 --count 8  unequal stages, hops of 0.5 ms + 10 µs a token
  pp-run sim --stages 4 --stage 20,1 --count 16 --rate 0 --trace sim.json && pp-run trace sim.json")]
pub struct SimArgs {
    /// Number of stages, where one --stage stands for all (default: as many as --stage is given)
    #[arg(long, value_name = "N", value_parser = stages)]
    pub stages: Option<usize>,
    /// What a stage takes: ms a micro-batch, ms a token, ms a thousand positions attended to (repeatable)
    #[arg(long, value_name = "MS[,MS[,MS]]", default_value = "20,1")]
    pub stage: Vec<String>,
    /// What a hop takes: ms of latency, ms a token on the link; the last leads back to the head (repeatable)
    #[arg(long, value_name = "MS[,MS]")]
    pub hop: Vec<String>,
    /// What a hop may take beyond, at random, ms
    #[arg(long, value_name = "MS", default_value = "0")]
    pub jitter: String,
    /// What the head takes to draw the tokens of a micro-batch, ms
    #[arg(long, value_name = "MS", default_value = "0.1")]
    pub sampling: String,
    /// Requests to replay in place of made-up ones: JSON, one a line, with prompt_tokens, max_tokens, n, arrival_ms
    #[arg(long, value_name = "FILE")]
    pub requests: Option<PathBuf>,
    /// Made-up requests
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub count: usize,
    /// Requests a second (Poisson arrivals); 0: all at once
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    pub rate: f64,
    /// Tokens of a prompt, or a range, uniform in the logarithm
    #[arg(long, value_name = "N|N..N", default_value = "32..512")]
    pub prompt: Lengths,
    /// Tokens of an answer, or a range
    #[arg(long, value_name = "N|N..N", default_value = "16..128")]
    pub answer: Lengths,
    /// Share of prompts that begin like others
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub shared: f64,
    /// Share of requests that are cancelled within 10 s
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub cancelled: f64,
    /// Most sequences at once
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub max_sequences: usize,
    /// Most tokens of a micro-batch
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub max_batch_tokens: usize,
    /// Size of the KV cache
    #[arg(long, value_name = "TOKENS", default_value_t = 65536)]
    pub kv_tokens: usize,
    /// Positions of a sequence
    #[arg(short, long, value_name = "TOKENS", default_value_t = 4096)]
    pub ctx: usize,
    /// Requests that may wait; more are refused
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub queue: usize,
    /// Decode groups (default: by the cost of the stages, as the scheduler learns it)
    #[arg(long, value_name = "M")]
    pub groups: Option<usize>,
    /// Do not keep the pages of what has ended
    #[arg(long)]
    pub no_prefix_cache: bool,
    /// Start of the random numbers
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Write what every stage did when to FILE, for `pp-run trace` and ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `trace`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run trace run.json                        who was busy when, and what to do
  pp-run trace run.json --from 1.5 --to 1.7    only these 200 ms
  pp-run trace run.json --svg run.svg          the same as a picture
  pp-run trace run.json --json | jq .actions   for programs

https://ui.perfetto.dev opens the file as well.")]
pub struct TraceArgs {
    /// A trace that pp-run wrote
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Draw it into a file too
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Begin here, in seconds after the first micro-batch was sent
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub from: Option<f64>,
    /// End here, in seconds after the first micro-batch was sent
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub to: Option<f64>,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `--optimize`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum OptimizeArg {
    /// Tokens a second of as many requests as run at once (--max-sequences)
    #[default]
    Throughput,
    /// The time of one request
    Latency,
    /// Tokens that the KV cache has room for
    Context,
}

/// `--activations`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    #[default]
    Auto,
    F32,
    Q8,
}

/// `--kv`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvArg {
    #[default]
    Auto,
    F32,
    F16,
}

/// `--wire`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WireArg {
    #[default]
    F32,
    F16,
    Q8,
}

/// `--profile`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ProfileArg {
    #[default]
    Auto,
    Card,
    Software,
}

fn stages(text: &str) -> Result<usize, String> {
    match text.parse::<i64>() {
        Ok(count @ 1..) => Ok(count as usize),
        Ok(_) => Err("a pipeline has at least one stage".to_owned()),
        Err(_) => Err("expected a whole number of stages".to_owned()),
    }
}

#[cfg(test)]
mod tests;
