//! What GGUF metadata means: the model's configuration, its sampling defaults, its vocabulary.
//!
//! Keys as llama.cpp's converter writes them.

use std::collections::BTreeMap;
use std::path::Path;

use super::gguf::{Directory, Value};
use super::{CheckpointError, DType, GenerationDefaults, Mapped, TensorInfo};
use crate::config::{self, ConfigError, ModelConfig, ROPE_SCALING_SUPPORTED, Rope, RopeScaling};
use crate::tokenizer::{GgufVocab, TokenizerError};

/// Canonical name of the table of rotary divisors.
const ROPE_FREQS: &str = "rope_freqs.weight";

/// Typed lookups; integers of any width and sign are accepted where they fit.
impl Directory {
    pub(super) fn uint(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Uint(n)) => Ok(Some(*n)),
            Some(Value::Int(n)) if *n >= 0 => Ok(Some(n.unsigned_abs())),
            Some(other) => Err(config::invalid(&self.file, key, show(other), "a whole number")),
        }
    }

    fn count(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        // A count beyond usize is beyond every bound, which `ModelConfig::validate` then names.
        Ok(self.uint(key)?.map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
    }

    fn need(&self, key: &str) -> Result<usize, ConfigError> {
        self.count(key)?.ok_or_else(|| config::missing(&self.file, key, "a whole number"))
    }

    fn id(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        // -1 stands for "none" in files of some converters.
        if let Some(Value::Int(n)) = self.metadata.get(key)
            && *n < 0
        {
            return Ok(None);
        }
        match self.uint(key)?.map(u32::try_from) {
            None => Ok(None),
            Some(Ok(id)) if id != u32::MAX => Ok(Some(id)),
            Some(Ok(_)) => Ok(None),
            Some(Err(_)) => Err(config::invalid(&self.file, key, "beyond 32 bits", "a token id")),
        }
    }

    fn float(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Float(x)) => Ok(Some(*x)),
            Some(Value::Uint(n)) => Ok(Some(*n as f64)),
            Some(Value::Int(n)) => Ok(Some(*n as f64)),
            Some(other) => Err(config::invalid(&self.file, key, show(other), "a number")),
        }
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(config::invalid(&self.file, key, show(other), "true or false")),
        }
    }
}

/// A value as it appears in messages.
fn show(value: &Value) -> String {
    match value {
        Value::Uint(n) => n.to_string(),
        Value::Int(n) => n.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Text(text) => format!("{:?}", text.chars().take(80).collect::<String>()),
        Value::Array(array) => format!("an array of {} items", array.count()),
    }
}

/// An opened GGUF model, while its metadata is being understood.
pub(super) struct Model<'a> {
    /// Of the first file, which holds all metadata.
    pub(super) directory: &'a Directory,
    pub(super) files: &'a [Mapped],
    pub(super) tensors: &'a BTreeMap<String, TensorInfo>,
}

impl Model<'_> {
    fn file(&self) -> &Path {
        &self.directory.file
    }

    fn bytes(&self, tensor: &TensorInfo) -> &[u8] {
        &self.files[tensor.file].bytes()[tensor.offset..tensor.offset + tensor.bytes]
    }

    pub(super) fn config(&self) -> Result<ModelConfig, ConfigError> {
        let directory = self.directory;
        let arch = directory.text("general.architecture");
        let arch =
            arch.ok_or_else(|| config::missing(self.file(), "general.architecture", "a name, such as \"llama\""))?;
        let key = |name: &str| format!("{arch}.{name}");
        if directory.uint(&key("expert_count"))?.is_some_and(|experts| experts > 0) {
            let found = "a mixture of experts";
            return Err(config::unsupported(self.file(), key("expert_count"), found, "dense models, without experts"));
        }
        let hidden = directory.need(&key("embedding_length"))?;
        let heads = directory.need(&key("attention.head_count"))?;
        let head_dim = match directory.count(&key("attention.key_length"))? {
            Some(head_dim) => head_dim,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let accepted = format!("a divisor of the embedding length, {hidden}, as no key length is given");
                return Err(config::invalid(self.file(), key("attention.head_count"), heads.to_string(), accepted));
            }
        };
        if let Some(value_dim) = directory.count(&key("attention.value_length"))?
            && value_dim != head_dim
        {
            let accepted = format!("the key length, {head_dim}");
            return Err(config::unsupported(
                self.file(),
                key("attention.value_length"),
                value_dim.to_string(),
                accepted,
            ));
        }
        let config = ModelConfig {
            arch: arch.to_owned(),
            name: directory.text("general.name").map(str::to_owned),
            layers: directory.need(&key("block_count"))?,
            hidden,
            intermediate: directory.need(&key("feed_forward_length"))?,
            heads,
            kv_heads: directory.count(&key("attention.head_count_kv"))?.unwrap_or(heads),
            head_dim,
            vocab: self.vocab_rows(&key("vocab_size"))?,
            context: directory.need(&key("context_length"))?,
            rms_eps: directory.float(&key("attention.layer_norm_rms_epsilon"))?.ok_or_else(|| {
                config::missing(self.file(), key("attention.layer_norm_rms_epsilon"), "a small number, such as 1e-5")
            })? as f32,
            rope: self.rope(arch, head_dim)?,
            tie_embeddings: !self.tensors.contains_key("output.weight"),
        };
        config.validate(self.file())?;
        Ok(config)
    }

    /// Rows of the embedding table; the number of tokens may be smaller.
    fn vocab_rows(&self, key: &str) -> Result<usize, ConfigError> {
        if let Some(TensorInfo { shape, .. }) = self.tensors.get("token_embd.weight") {
            return Ok(shape[0]);
        }
        match (self.directory.count(key)?, self.directory.metadata.get("tokenizer.ggml.tokens")) {
            (Some(count), _) => Ok(count),
            (None, Some(Value::Array(tokens))) => Ok(usize::try_from(tokens.count()).unwrap_or(usize::MAX)),
            _ => Err(config::missing(self.file(), key, "a whole number, or the tensor token_embd.weight")),
        }
    }

    fn rope(&self, arch: &str, head_dim: usize) -> Result<Rope, ConfigError> {
        let directory = self.directory;
        let key = |name: &str| format!("{arch}.rope.{name}");
        let dims = directory.count(&key("dimension_count"))?.unwrap_or(head_dim);
        let theta = directory.float(&key("freq_base"))?.unwrap_or(10_000.0);
        let linear = match directory.text(&key("scaling.type")) {
            None => directory.float(&key("scale_linear"))?,
            Some("none") => None,
            Some("linear") => Some(
                directory
                    .float(&key("scaling.factor"))?
                    .ok_or_else(|| config::missing(self.file(), key("scaling.factor"), "a number"))?,
            ),
            Some(other) => {
                let accepted = format!("{ROPE_SCALING_SUPPORTED} (llama3 as the tensor {ROPE_FREQS})");
                return Err(config::unsupported(self.file(), key("scaling.type"), format!("{other:?}"), accepted));
            }
        };
        // Old converters wrote a factor of 0 or 1 where nothing is scaled.
        let linear = linear.filter(|factor| *factor != 0.0 && *factor != 1.0);
        let scaling = match (self.rope_factors()?, linear) {
            (Some(factors), linear) => {
                let stretch = linear.unwrap_or(1.0) as f32;
                RopeScaling::Factors(factors.into_iter().map(|factor| factor * stretch).collect())
            }
            (None, Some(factor)) => RopeScaling::Linear { factor },
            (None, None) => RopeScaling::None,
        };
        Ok(Rope { theta, dims, scaling })
    }

    fn rope_factors(&self) -> Result<Option<Vec<f32>>, ConfigError> {
        let Some(tensor) = self.tensors.get(ROPE_FREQS) else {
            return Ok(None);
        };
        if tensor.dtype != DType::F32 || tensor.shape.len() != 1 || tensor.elements() > config::HEAD_DIM_MAX {
            let found = format!("{} of shape {:?}", tensor.dtype, tensor.shape);
            return Err(config::invalid(self.file(), ROPE_FREQS, found, "one row of F32"));
        }
        let floats = self.bytes(tensor).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        Ok(Some(floats.collect()))
    }

    pub(super) fn generation(&self) -> Result<GenerationDefaults, ConfigError> {
        let directory = self.directory;
        let float = |key: &str| Ok::<_, ConfigError>(directory.float(key)?.map(|x| x as f32));
        let mut eos_ids = Vec::new();
        for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
            eos_ids.extend(directory.id(&format!("tokenizer.ggml.{key}"))?.filter(|id| !eos_ids.contains(id)));
        }
        Ok(GenerationDefaults {
            temperature: float("general.sampling.temp")?,
            top_k: directory.id("general.sampling.top_k")?,
            top_p: float("general.sampling.top_p")?,
            min_p: float("general.sampling.min_p")?,
            repetition_penalty: float("general.sampling.penalty_repeat")?,
            do_sample: None,
            eos_ids,
            bos_id: directory.id("tokenizer.ggml.bos_token_id")?,
            pad_id: directory.id("tokenizer.ggml.padding_token_id")?,
        })
    }

    pub(super) fn vocab(&self) -> Result<GgufVocab, TokenizerError> {
        let directory = self.directory;
        let bytes = self.files[0].bytes();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let need = |name: &str| TokenizerError::Missing { origin: self.file().into(), what: key(name) };
        let wrong = |e: ConfigError| TokenizerError::Malformed { origin: self.file().into(), what: e.to_string() };
        let walk = |e: CheckpointError| TokenizerError::Malformed { origin: self.file().into(), what: e.to_string() };
        Ok(GgufVocab {
            origin: self.file().into(),
            model: directory.text(&key("model")).ok_or_else(|| need("model"))?.to_owned(),
            pre: directory.text(&key("pre")).map(str::to_owned),
            tokens: directory.strings(&key("tokens"), bytes).map_err(walk)?.ok_or_else(|| need("tokens"))?,
            scores: directory.floats(&key("scores"), bytes).map_err(walk)?.unwrap_or_default(),
            types: directory.integers(&key("token_type"), bytes).map_err(walk)?.unwrap_or_default(),
            merges: directory.strings(&key("merges"), bytes).map_err(walk)?.unwrap_or_default(),
            bos: directory.id(&key("bos_token_id")).map_err(wrong)?,
            eos: directory.id(&key("eos_token_id")).map_err(wrong)?,
            eot: directory.id(&key("eot_token_id")).map_err(wrong)?,
            eom: directory.id(&key("eom_token_id")).map_err(wrong)?,
            unk: directory.id(&key("unknown_token_id")).map_err(wrong)?,
            add_bos: directory.flag(&key("add_bos_token")).map_err(wrong)?,
            add_eos: directory.flag(&key("add_eos_token")).map_err(wrong)?,
            add_space_prefix: directory.flag(&key("add_space_prefix")).map_err(wrong)?,
        })
    }
}
