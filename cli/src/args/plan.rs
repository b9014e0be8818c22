//! What is typed to know what a pipeline would be, before anything is loaded.

use std::path::PathBuf;

use clap::Args;

use super::{ModelArgs, OptimizeArg, OutputArgs, PipelineArgs};

/// Requests at once that speeds are predicted for, where nothing is typed.
const LEVELS: [usize; 5] = [1, 2, 4, 8, 16];

/// `plan`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  pp-run plan -m qwen.gguf --stages 2                          what each stage would hold, and how fast it would be
  pp-run plan -m qwen.gguf --split 9,8,8,8 --ctx 4096
  pp-run plan -m qwen.gguf --workers rig2,rig3 --split auto --concurrency 1,8     the split that is best for eight
  pp-run plan -m qwen.gguf --workers rig2,rig3 --split auto --optimize latency
  pp-run plan -m qwen.gguf --hardware cards.toml --concurrency 1,8,32   with cards that are not here
  pp-run plan -m qwen.gguf --stages 2 --no-measure             bytes only")]
pub struct PlanArgs {
    /// Requests at once that speeds are predicted for, comma-separated (default: 1,2,4,8,16). Where they are typed, or
    /// --optimize throughput is, the plan is for the most of them; else for one, as a plain run is. --max-sequences
    /// says otherwise
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    concurrency: Vec<usize>,
    /// Tokens of a prompt in predictions
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub prompt_tokens: usize,
    /// Tokens of an answer in predictions
    #[arg(long, value_name = "TOKENS", default_value_t = 64)]
    pub gen_tokens: usize,
    /// Plan for the cards and links in FILE (TOML), which need not be here; nothing is measured
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["device", "workers", "cluster", "no_measure", "profile"],
        long_help = "Plan for the cards and links in FILE, which need not be here: what they take is estimated from \
                     their makers' figures, and what a pipeline of them does is simulated. In TOML:\n\n  \
                     [[card]]\n  name = \"RTX 3090\"\n  count = 2                  # as many, each with its own memory \
                     (default 1)\n  memory_gb = 24\n  bandwidth_gb_s = 936       # of its memory\n  f32_tflops = \
                     35.6\n  int8_tops = 142            # dots of bytes (default: 4 · f32_tflops)\n  host = \
                     \"rig1\"              # cards of one host are joined by [link], others by [network]\n  \
                     bandwidth_efficiency = 0.7 # share of the figures that kernels reach (default 0.7)\n  \
                     compute_efficiency = 0.35  # (default 0.35)\n\n  [link]                     # between cards of one \
                     host\n  latency_us = 30\n  bandwidth_gb_s = 12\n\n  [network]                  # between \
                     hosts\n  latency_us = 200\n  bandwidth_gbit_s = 10"
    )]
    pub hardware: Option<PathBuf>,
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub pipeline: PipelineArgs,
    #[command(flatten)]
    pub output: OutputArgs,
}

impl PlanArgs {
    /// Requests at once that speeds are predicted for.
    pub fn levels(&self) -> &[usize] {
        if self.concurrency.is_empty() { &LEVELS } else { &self.concurrency }
    }

    /// Requests at once that the plan is for, where `--max-sequences` does not say.
    pub fn sequences(&self) -> usize {
        let is_one = self.concurrency.is_empty() && self.pipeline.optimize != Some(OptimizeArg::Throughput);
        if is_one { 1 } else { self.levels().iter().copied().max().unwrap_or(1) }
    }
}
