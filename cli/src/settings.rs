//! What the program needs, worked out from what was typed and what the model declares. Pure.

use std::path::PathBuf;

use anyhow::Result;
use pp_engine::checkpoint::{Checkpoint, GenerationDefaults};
use pp_engine::layout::{CHUNK_MAX, KV_TOKENS_MAX, SEQUENCES_MAX};
use pp_engine::sampler::Sampling;
use pp_engine::split::{Costs, Split};
use pp_engine::tools::ToolFormat;
use pp_engine::{Act, KvType, Profile, Wire};
use serde_json::{Map, Value};

use crate::args::{ActivationsArg, KvArg, PipelineArgs, ProfileArg, PromptArgs, SamplingArgs, ToolFormatArg, WireArg};
use crate::errors::usage;
use crate::requests::choosing::{self, LOGPROBS_MAX};

/// Sequences at once, at most, where many requests come and nothing was typed.
pub const SEQUENCES: usize = 16;

/// Where a prompt is read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// It was typed.
    Typed(String),
    /// A file.
    File(PathBuf),
    /// Piped in.
    Stdin,
}

/// The one prompt that was given.
///
/// # Errors
/// When there is none or more than one.
pub fn prompt_source(args: &PromptArgs, stdin_is_terminal: bool) -> Result<PromptSource> {
    let mut given = Vec::new();
    given.extend(args.words.as_ref().map(|text| ("an argument", PromptSource::Typed(text.clone()))));
    given.extend(args.prompt.as_ref().map(|text| ("--prompt", PromptSource::Typed(text.clone()))));
    given.extend(args.prompt_file.as_ref().map(|path| ("--prompt-file", PromptSource::File(path.clone()))));
    if given.len() > 1 {
        let names = given.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(" and ");
        return Err(usage(format!("more than one prompt: {names}; give one of them")));
    }
    match given.pop() {
        Some((_, source)) => Ok(source),
        None if stdin_is_terminal => Err(usage(
            "no prompt\ngive one as argument (pp-run \"What is a pipeline?\"), with --prompt or --prompt-file, or pipe it in; see pp-run --help",
        )),
        None => Ok(PromptSource::Stdin),
    }
}

/// A text as it was read, if it is one.
///
/// # Errors
/// When the bytes are no UTF-8: names the place.
pub fn text(bytes: Vec<u8>, origin: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let byte = error.as_bytes()[at];
        usage(format!("{origin} is not valid UTF-8: byte {at} (counted from 0) is 0x{byte:02x}; convert it first, for instance with iconv"))
    })
}

/// Refuses an empty prompt.
///
/// # Errors
/// When there is nothing in it.
pub fn not_empty(text: &str, origin: &str) -> Result<()> {
    if text.is_empty() { Err(usage(format!("the prompt ({origin}) is empty"))) } else { Ok(()) }
}

/// Variables for the chat template, each `key=value` with a JSON value or else a text.
///
/// # Errors
/// When there is no `=` or no key.
pub fn template_args(typed: &[String]) -> Result<Map<String, Value>> {
    typed
        .iter()
        .map(|pair| match pair.split_once('=') {
            Some((key, value)) if !key.is_empty() => {
                Ok((key.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
            }
            _ => Err(usage(format!("--template-arg {pair}: expected KEY=VALUE"))),
        })
        .collect()
}

/// Types of activations and cache, for a model with or without quantised matrices.
///
/// # Errors
/// When they contradict each other.
pub fn precision(activations: ActivationsArg, kv: KvArg, quantised: bool) -> Result<(Act, KvType)> {
    let act = match activations {
        ActivationsArg::F32 => Act::F32,
        ActivationsArg::Q8 => Act::Q8,
        ActivationsArg::Auto if quantised => Act::Q8,
        ActivationsArg::Auto => Act::F32,
    };
    let exact = activations == ActivationsArg::F32;
    Ok((
        act,
        match kv {
            KvArg::F16 if exact => {
                return Err(usage(
                    "--activations f32 is the exact mode, which keeps keys and values in f32: leave --kv f16 away, or use --activations auto",
                ));
            }
            KvArg::Auto if exact => KvType::F32,
            KvArg::F32 => KvType::F32,
            KvArg::F16 | KvArg::Auto => KvType::F16,
        },
    ))
}

/// Whether any matrix is quantised.
pub fn is_quantised(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors().any(|tensor| tensor.dtype.block_elements() > 1)
}

/// Bytes, as stored, of the parts that stages are cut from.
pub fn costs(checkpoint: &Checkpoint) -> Costs {
    let mut layers = vec![0; checkpoint.config.layers];
    for tensor in checkpoint.tensors() {
        let index = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        if let Some(layer) = index.and_then(|index| layers.get_mut(index)) {
            *layer += tensor.bytes() as u64;
        }
    }
    let bytes = |name: &str| checkpoint.tensor(name).map(|tensor| tensor.bytes() as u64);
    let embedding = bytes("token_embd.weight").unwrap_or(0);
    Costs { layers, first: embedding, last: bytes("output.weight").unwrap_or(embedding) }
}

/// How layers are to be divided.
///
/// # Errors
/// [`pp_engine::split::SplitError`].
pub fn split(args: &PipelineArgs) -> Result<Split> {
    Ok(args.split.as_deref().map_or(Ok(Split::Auto), Split::parse)?)
}

/// The type of activations between stages.
pub fn wire(arg: Option<WireArg>) -> Wire {
    match arg.unwrap_or_default() {
        WireArg::F32 => Wire::F32,
        WireArg::F16 => Wire::F16,
        WireArg::Q8 => Wire::Q8,
    }
}

/// How calls of tools are written.
pub fn tool_format(arg: ToolFormatArg) -> ToolFormat {
    match arg {
        ToolFormatArg::Hermes => ToolFormat::Hermes,
        ToolFormatArg::Llama => ToolFormat::Llama,
        ToolFormatArg::Mistral => ToolFormat::Mistral,
    }
}

/// A forced profile.
pub fn profile(arg: ProfileArg) -> Option<Profile> {
    match arg {
        ProfileArg::Auto => None,
        ProfileArg::Card => Some(Profile::CARD),
        ProfileArg::Software => Some(Profile::SOFTWARE),
    }
}

/// Tokens of the largest micro-batch.
///
/// # Errors
/// When it is out of range.
pub fn chunk(typed: Option<usize>, default: usize) -> Result<usize> {
    match typed {
        Some(chunk) if !(1..=CHUNK_MAX).contains(&chunk) => {
            Err(usage(format!("--max-batch-tokens {chunk}: expected 1 to {CHUNK_MAX}")))
        }
        typed => Ok(typed.unwrap_or(default)),
    }
}

/// Size of the KV cache that was asked for.
///
/// # Errors
/// When it is out of range.
pub fn kv_tokens(typed: Option<usize>) -> Result<Option<usize>> {
    match typed {
        Some(n) if !(1..=KV_TOKENS_MAX).contains(&n) => {
            Err(usage(format!("--kv-tokens {n}: expected 1 to {KV_TOKENS_MAX}")))
        }
        typed => Ok(typed),
    }
}

/// Sequences that run at once.
///
/// # Errors
/// When it is out of range.
pub fn sequences(typed: Option<usize>, default: usize) -> Result<usize> {
    match typed {
        Some(n) if !(1..=SEQUENCES_MAX).contains(&n) => {
            Err(usage(format!("--max-sequences {n}: expected 1 to {SEQUENCES_MAX}")))
        }
        typed => Ok(typed.unwrap_or(default)),
    }
}

/// The context that was asked for.
///
/// # Errors
/// When the model has no such context.
pub fn context(typed: Option<usize>, max: usize) -> Result<Option<usize>> {
    match typed {
        Some(0) => Err(usage("--ctx 0: a context holds at least one token")),
        Some(context) if context > max => {
            Err(usage(format!("--ctx {context}: this model was made for at most {max} tokens")))
        }
        typed => Ok(typed),
    }
}

/// Number of candidates to return with each token.
///
/// # Errors
/// When it is out of range, or would be shown nowhere.
pub fn logprobs(typed: Option<u32>, json: bool) -> Result<u32> {
    match typed {
        Some(count) if count > LOGPROBS_MAX => Err(usage(format!("--logprobs {count}: expected 0 to {LOGPROBS_MAX}"))),
        Some(_) if !json => Err(usage("--logprobs is shown with --json only")),
        typed => Ok(typed.unwrap_or(0)),
    }
}

/// How tokens are chosen: as typed, else as the model declares, else greedily.
///
/// # Errors
/// Names the option that is out of range.
pub fn sampling(args: &SamplingArgs, declared: &GenerationDefaults, seed: u64, candidates: u32) -> Result<Sampling> {
    let greedy = declared.do_sample == Some(false);
    let declares = [declared.temperature, declared.top_p, declared.min_p].iter().any(Option::is_some)
        || declared.top_k.is_some()
        || declared.do_sample == Some(true);
    let default_temperature = match declared.temperature {
        _ if greedy || !declares => 0.0,
        Some(temperature) => temperature,
        None => 1.0,
    };
    let sampling = Sampling {
        temperature: args.temperature.unwrap_or(default_temperature),
        top_k: args.top_k.or(declared.top_k).unwrap_or(0),
        top_p: args.top_p.or(declared.top_p).unwrap_or(1.0),
        min_p: args.min_p.or(declared.min_p).unwrap_or(0.0),
        logit_bias: Vec::new(),
        // The model's own is left aside: it is a crutch of its makers' demo, and wrong for code and tables.
        repetition_penalty: args.repeat_penalty.unwrap_or(1.0),
        presence_penalty: args.presence_penalty.unwrap_or(0.0),
        frequency_penalty: args.frequency_penalty.unwrap_or(0.0),
        seed: args.seed.unwrap_or(seed),
        candidates,
    };
    choosing::check(&sampling).map_err(|range| {
        // The option that goes by another name than the field.
        let name = range.name.replace("repetition", "repeat").replace('_', "-");
        usage(format!("--{name} {}: expected {}", range.value, range.expected))
    })?;
    if args.max_tokens == 0 {
        return Err(usage("--max-tokens 0: expected at least 1"));
    }
    if args.stop.iter().any(String::is_empty) {
        return Err(usage("--stop: an empty text would end every answer at once"));
    }
    Ok(sampling)
}

#[cfg(test)]
mod tests;
