//! What is typed to measure speed: of a pipeline here, or of a server.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::{ModelArgs, OutputArgs, PipelineArgs};

/// Tokens of a prompt or an answer at most.
const TOKENS_MAX: usize = 1 << 20;

/// A number of tokens, or a range that numbers are drawn from, uniform in the logarithm: `16`, `16..512`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// The smallest.
    pub least: usize,
    /// The largest.
    pub most: usize,
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Lengths, String> {
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        match (least.trim().parse(), most.trim().parse()) {
            (Ok(least), Ok(most)) if 1 <= least && least <= most && most <= TOKENS_MAX => Ok(Lengths { least, most }),
            _ => Err(format!("expected a number of tokens, 1 to {TOKENS_MAX}, or a range such as 16..512")),
        }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.least == self.most {
            true => write!(f, "{}", self.least),
            false => write!(f, "{}..{}", self.least, self.most),
        }
    }
}

/// `bench`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run bench -m qwen.gguf --prompt-tokens 128 --gen-tokens 32 --depths 0,512,2048
  pp-run bench -m qwen.gguf --stages 4 --concurrency 1,2,4,8
  pp-run bench --url http://127.0.0.1:8080 --concurrency 1,8,64 --count 256 --svg load.svg
  pp-run bench --url http://127.0.0.1:8000 --rate 2,4 --duration 60 --prompt-tokens 64..1024 --slo-ttft 500

With --url, any server that speaks OpenAI's protocol is measured: requests are streamed, and -m is the model's name
there. With --rate requests come when they are due, however slow the answers are.")]
pub struct BenchArgs {
    /// Tokens of the prompt whose speed is measured (with --url: about as many words, or a range to draw from)
    #[arg(long, value_name = "TOKENS", default_value = "128")]
    pub prompt_tokens: Lengths,
    /// Tokens of the answer whose speed is measured (with --url: at most, or a range to draw from)
    #[arg(long, value_name = "TOKENS", default_value = "32")]
    pub gen_tokens: Lengths,
    /// Tokens that are in the context before, comma-separated; one measurement each
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', default_value = "0")]
    pub depths: Vec<usize>,
    /// Measured repetitions, after one that is not counted
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub reps: usize,
    /// Requests at once, comma-separated: a row for each, in place of depths and roofline
    #[arg(long, value_name = "N,…", value_delimiter = ',', conflicts_with = "depths")]
    pub concurrency: Vec<usize>,
    /// Replay requests, JSON, one a line as `batch` takes them, at their arrival_ms; prompt_tokens in place of a prompt
    #[arg(long, value_name = "FILE", conflicts_with_all = ["concurrency", "depths"])]
    pub requests: Option<PathBuf>,
    /// With --concurrency or --requests: write what every stage did when to FILE, for `pp-run trace`
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// With --concurrency or --requests: show what the stages, the queue and the KV cache are doing (stderr)
    #[arg(long)]
    pub live: bool,
    /// Skip the roofline: what the device can do at most, and each kernel's share of it (loads the stages once more)
    #[arg(long)]
    pub no_roofline: bool,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// `bench --url`
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "A server")]
pub struct LoadArgs {
    /// Measure the server at URL (http or https), whoever wrote it
    #[arg(
        long,
        value_name = "URL",
        conflicts_with_all = ["depths", "reps", "requests", "trace", "live", "no_roofline", "stages", "split", "device", "workers", "cluster"]
    )]
    pub url: Option<String>,
    /// Its API key, the first line of FILE
    #[arg(long, value_name = "FILE", requires = "url")]
    pub api_key: Option<PathBuf>,
    /// What is asked for
    #[arg(long, value_enum, value_name = "KIND", default_value = "chat", requires = "url")]
    pub api: ApiArg,
    /// Requests a second (Poisson arrivals), comma-separated: a row for each, in place of --concurrency
    #[arg(
        long,
        value_name = "R,…",
        value_delimiter = ',',
        allow_negative_numbers = true,
        requires = "url",
        conflicts_with = "concurrency"
    )]
    pub rate: Vec<f64>,
    /// Requests of each row [default: 64, or what --duration allows]
    #[arg(long, value_name = "N", requires = "url")]
    pub count: Option<usize>,
    /// Begin no request of a row after so long
    #[arg(long, value_name = "SECONDS", requires = "url")]
    pub duration: Option<f64>,
    /// A request that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0, requires = "url")]
    pub timeout: f64,
    /// What is good: the first token within so long
    #[arg(long, value_name = "MS", requires = "url")]
    pub slo_ttft: Option<f64>,
    /// What is good: a token at least every so long, on average
    #[arg(long, value_name = "MS", requires = "url")]
    pub slo_tpot: Option<f64>,
    /// What is good: the whole answer within so long
    #[arg(long, value_name = "MS", requires = "url")]
    pub slo_e2e: Option<f64>,
    /// More of each request's body, such as '{"ignore_eos": true}'
    #[arg(long, value_name = "JSON", requires = "url")]
    pub body: Option<String>,
    /// Start of the random numbers: of arrivals, lengths and words
    #[arg(long, value_name = "N", default_value_t = 0, requires = "url")]
    pub load_seed: u64,
    /// Draw throughput and latencies into a file
    #[arg(long, value_name = "FILE", requires = "url")]
    pub svg: Option<PathBuf>,
}

/// `--api`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ApiArg {
    /// /v1/chat/completions
    #[default]
    Chat,
    /// /v1/completions
    Completions,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_numbers_or_ranges() {
        let check = |text: &str, least, most| {
            assert_eq!(text.parse(), Ok(Lengths { least, most }));
            assert_eq!(text.parse::<Lengths>().unwrap().to_string(), text);
        };
        check("16", 16, 16);
        check("16..512", 16, 512);
        for bad in ["", "0", "5..2", "a", "1..x", "-1", "9999999"] {
            assert!(bad.parse::<Lengths>().is_err(), "{bad}");
        }
    }
}
