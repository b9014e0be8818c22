//! What a model is made of: the numbers of its architecture, and the Hugging Face `config.json` they are read from.
//!
//! Owns [`ModelConfig`], its bounds and the rotary frequencies. GGUF metadata is turned into the same struct by
//! `checkpoint::gguf`; which architectures can be run is decided elsewhere, here the name is only carried.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

#[cfg(test)]
mod tests;

/// Most layers a model may declare.
pub const LAYERS_MAX: usize = 1024;
/// Largest width (hidden, intermediate, heads × head_dim) a model may declare.
pub const WIDTH_MAX: usize = 1 << 20;
/// Largest head a model may declare, in elements.
pub const HEAD_DIM_MAX: usize = 1 << 12;
/// Largest vocabulary a model may declare.
pub const VOCAB_MAX: usize = 1 << 24;
/// Longest context a model may declare, in tokens.
pub const CONTEXT_MAX: usize = 1 << 28;

/// What a model's file says about its architecture, the same for every container format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Architecture in GGUF's spelling (`llama`, `qwen2`, `qwen3`); an unknown one is carried as it was found.
    pub arch: String,
    /// The model's own name, where the file has one.
    pub name: Option<String>,
    /// Transformer layers.
    pub layers: usize,
    /// Width of the residual stream, in elements.
    pub hidden: usize,
    /// Width inside the feed-forward block, in elements.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head; even, and not always `hidden / heads`.
    pub head_dim: usize,
    /// Rows of the embedding table, padding rows included.
    pub vocab: usize,
    /// Positions the model was trained for, in tokens.
    pub context: usize,
    /// Epsilon inside every RMS norm.
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Whether the file declares the output matrix to be the embedding table.
    pub tie_embeddings: bool,
}

/// Rotary position embedding: which part of a head turns, and how fast.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Leading elements of a head that are rotated; `head_dim` unless the model rotates a part only.
    pub dims: usize,
    /// How the frequencies are stretched for longer contexts.
    pub scaling: RopeScaling,
}

/// How the rotary frequencies are stretched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor, > 0.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are short.
        high_freq_factor: f64,
        /// Context before stretching, in tokens.
        original_context: usize,
    },
    /// One divisor per frequency (`dims / 2` of them), as GGUF's `rope_freqs.weight` stores them.
    Factors(Vec<f32>),
}

/// Scaling kinds this program computes, for messages.
pub(crate) const ROPE_SCALING_SUPPORTED: &str = "default, linear or llama3";

impl Rope {
    /// The angle per position of every rotated pair: `dims / 2` values, radians per token, first the fastest.
    ///
    /// Computed in f32 in the order of transformers' `modeling_rope_utils` (`default`, `linear`, `llama3`), so that
    /// long contexts do not drift away from it.
    pub fn inv_freq(&self) -> Vec<f32> {
        let dims = self.dims as f32;
        let base = (0..self.dims / 2).map(|i| 1.0 / (self.theta as f32).powf((2 * i) as f32 / dims));
        match &self.scaling {
            RopeScaling::None => base.collect(),
            RopeScaling::Linear { factor } => base.map(|f| f / *factor as f32).collect(),
            RopeScaling::Factors(factors) => base.zip(factors).map(|(f, factor)| f / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (factor, low, high) = (*factor as f32, *low_freq_factor as f32, *high_freq_factor as f32);
                let context = *original_context as f32;
                base.map(|f| llama3(f, factor, low, high, context)).collect()
            }
        }
    }
}

fn llama3(freq: f32, factor: f32, low: f32, high: f32, context: f32) -> f32 {
    let wavelen = 2.0 * std::f32::consts::PI / freq;
    if wavelen > context / low {
        freq / factor
    } else if wavelen < context / high {
        freq
    } else {
        let smooth = (context / wavelen - low) / (high - low);
        (1.0 - smooth) * freq / factor + smooth * freq
    }
}

/// Why a configuration is refused; every message names the file, the key, what was there and what is accepted.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not JSON.
    #[error("{}: not valid JSON: {source}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
    /// A key the model cannot be described without is absent.
    #[error("{}: key `{key}` is missing; expected {accepted}", file.display())]
    Missing {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What would be accepted.
        accepted: String,
    },
    /// A key has a value of the wrong kind or outside its bounds.
    #[error("{}: key `{key}` is {found}; expected {accepted}", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What was found.
        found: String,
        /// What would be accepted.
        accepted: String,
    },
    /// The file is well formed, and asks for something this program does not compute.
    #[error("{}: `{key}` is {found}, which is not supported; supported: {accepted}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What was found.
        found: String,
        /// What is supported.
        accepted: String,
    },
}

impl ModelConfig {
    /// Reads a Hugging Face `config.json`; `file` only appears in messages.
    ///
    /// Understands both the older spelling of the rotary embedding (`rope_theta`, `rope_scaling`) and that of
    /// transformers 5 (`rope_parameters`).
    ///
    /// # Errors
    /// [`ConfigError`] when a key is missing, out of bounds, or asks for something that is not computed here.
    pub fn from_hf_json(bytes: &[u8], file: &Path) -> Result<Self, ConfigError> {
        let root: Value =
            serde_json::from_slice(bytes).map_err(|source| ConfigError::Json { file: file.into(), source })?;
        let Value::Object(map) = &root else {
            return Err(invalid(file, "(root)", show(&root), "an object"));
        };
        Keys { file, map, within: "" }.model()
    }

    /// Checks every bound and divisibility the rest of the program relies on.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] naming the first number out of bounds.
    pub fn validate(&self, file: &Path) -> Result<(), ConfigError> {
        within(file, "layers", self.layers, LAYERS_MAX)?;
        within(file, "hidden size", self.hidden, WIDTH_MAX)?;
        within(file, "intermediate size", self.intermediate, WIDTH_MAX)?;
        within(file, "attention heads", self.heads, WIDTH_MAX)?;
        within(file, "key/value heads", self.kv_heads, WIDTH_MAX)?;
        within(file, "head dimension", self.head_dim, HEAD_DIM_MAX)?;
        within(file, "heads × head dimension", self.heads.saturating_mul(self.head_dim), WIDTH_MAX)?;
        within(file, "vocabulary", self.vocab, VOCAB_MAX)?;
        within(file, "context", self.context, CONTEXT_MAX)?;
        if !self.heads.is_multiple_of(self.kv_heads) {
            let accepted = format!("a divisor of the {} attention heads", self.heads);
            return Err(invalid(file, "key/value heads", self.kv_heads.to_string(), accepted));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(invalid(file, "head dimension", self.head_dim.to_string(), "an even number"));
        }
        let dims = self.rope.dims;
        if dims == 0 || dims > self.head_dim || !dims.is_multiple_of(2) {
            let accepted = format!("an even number from 2 to the head dimension, {}", self.head_dim);
            return Err(invalid(file, "rotary dimensions", dims.to_string(), accepted));
        }
        if !(self.rms_eps > 0.0 && self.rms_eps < 1.0) {
            return Err(invalid(file, "RMS norm epsilon", self.rms_eps.to_string(), "a number between 0 and 1"));
        }
        // Above 1e30 the f32 base of the frequencies would overflow.
        positive(file, "rope theta", self.rope.theta, 1e30)?;
        self.rope.scaling.validate(file, dims)
    }
}

impl RopeScaling {
    fn validate(&self, file: &Path, dims: usize) -> Result<(), ConfigError> {
        match self {
            Self::None => Ok(()),
            Self::Linear { factor } => positive(file, "rope scaling factor", *factor, 1e9),
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive(file, "rope scaling factor", *factor, 1e9)?;
                positive(file, "low_freq_factor", *low_freq_factor, 1e9)?;
                positive(file, "high_freq_factor", *high_freq_factor, 1e9)?;
                within(file, "original_max_position_embeddings", *original_context, CONTEXT_MAX)?;
                if high_freq_factor <= low_freq_factor {
                    let accepted = format!("more than low_freq_factor, {low_freq_factor}");
                    return Err(invalid(file, "high_freq_factor", high_freq_factor.to_string(), accepted));
                }
                Ok(())
            }
            Self::Factors(factors) => {
                if factors.len() != dims / 2 {
                    let accepted = format!("{} values, one for each rotated pair", dims / 2);
                    return Err(invalid(file, "rope_freqs.weight", format!("{} values", factors.len()), accepted));
                }
                factors.iter().try_for_each(|f| positive(file, "rope_freqs.weight", f64::from(*f), 1e9))
            }
        }
    }
}

/// Lookups in one JSON object that know how to complain.
#[derive(Clone, Copy)]
struct Keys<'a> {
    file: &'a Path,
    map: &'a Map<String, Value>,
    /// Prefix of the keys in messages, such as `rope_scaling.`.
    within: &'a str,
}

impl<'a> Keys<'a> {
    fn model(self) -> Result<ModelConfig, ConfigError> {
        self.refuse_unsupported()?;
        let hidden = self.count("hidden_size")?;
        let heads = self.count("num_attention_heads")?;
        let kv_heads = self.count_opt("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = match self.count_opt("head_dim")? {
            Some(head_dim) => head_dim,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let accepted = format!("a divisor of hidden_size, {hidden}, as head_dim is not given");
                return Err(self.invalid("num_attention_heads", heads.to_string(), accepted));
            }
        };
        let context = self.count("max_position_embeddings")?;
        let config = ModelConfig {
            arch: self.arch()?,
            name: self.text("_name_or_path").filter(|name| !name.is_empty()).map(str::to_owned),
            layers: self.count("num_hidden_layers")?,
            hidden,
            intermediate: self.count("intermediate_size")?,
            heads,
            kv_heads,
            head_dim,
            vocab: self.count("vocab_size")?,
            context,
            rms_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope: self.rope(head_dim, context)?,
            tie_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
        };
        config.validate(self.file)?;
        Ok(config)
    }

    /// GGUF's name of the architecture. `model_type` decides, unless the class says it is no language model.
    fn arch(self) -> Result<String, ConfigError> {
        let class = self.map.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
        match (class, self.text("model_type")) {
            (Some(class), model_type) => Ok(match (class.strip_suffix("ForCausalLM"), model_type) {
                (Some(_), Some(model_type)) => model_type.to_ascii_lowercase(),
                (Some(stem), None) => stem.to_ascii_lowercase(),
                (None, _) => class.to_owned(),
            }),
            (None, Some(model_type)) => Ok(model_type.to_ascii_lowercase()),
            (None, None) => Err(self.missing("model_type", "the name of an architecture, such as \"llama\"")),
        }
    }

    fn refuse_unsupported(self) -> Result<(), ConfigError> {
        for key in ["hidden_act", "hidden_activation"] {
            match self.present(key) {
                None => {}
                Some(Value::String(act)) if act == "silu" || act == "swish" => {}
                Some(other) => {
                    return Err(self.unsupported(key, show(other), "\"silu\" (also called \"swish\")"));
                }
            }
        }
        if self.flag("use_sliding_window")? == Some(true) {
            return Err(self.unsupported("use_sliding_window", "true".into(), "false, attention over all positions"));
        }
        if let Some(Value::Array(types)) = self.present("layer_types")
            && let Some(other) = types.iter().find(|t| t.as_str() != Some("full_attention"))
        {
            return Err(self.unsupported("layer_types", show(other), "\"full_attention\" in every layer"));
        }
        if self.flag("mlp_bias")? == Some(true) {
            return Err(self.unsupported("mlp_bias", "true".into(), "false"));
        }
        for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
            if self.count_opt(key)?.is_some_and(|experts| experts > 0) {
                let found = self.present(key).map(show).unwrap_or_default();
                return Err(self.unsupported(key, found, "dense models, without experts"));
            }
        }
        if let Some(Value::Object(quantization)) = self.present("quantization_config") {
            let method = quantization.get("quant_method").map_or_else(|| "of unknown method".into(), show);
            let accepted = "F32, F16 or BF16 safetensors, and quantised weights as GGUF";
            return Err(self.unsupported("quantization_config", method, accepted));
        }
        Ok(())
    }

    fn rope(self, head_dim: usize, context: usize) -> Result<Rope, ConfigError> {
        // transformers 5 writes `rope_parameters` with theta inside; before, `rope_scaling` stood beside `rope_theta`.
        let inner = match (self.object("rope_parameters")?, self.object("rope_scaling")?) {
            (Some(map), _) => Some(Keys { map, within: "rope_parameters.", ..self }),
            (None, Some(map)) => Some(Keys { map, within: "rope_scaling.", ..self }),
            (None, None) => None,
        };
        let number = |key| -> Result<Option<f64>, ConfigError> {
            let nested = inner.map(|keys| keys.number(key)).transpose()?.flatten();
            nested.map_or_else(|| self.number(key), |n| Ok(Some(n)))
        };
        let partial = number("partial_rotary_factor")?.unwrap_or(1.0);
        if !(partial > 0.0 && partial <= 1.0) {
            return Err(self.invalid("partial_rotary_factor", partial.to_string(), "more than 0, at most 1"));
        }
        Ok(Rope {
            theta: number("rope_theta")?.unwrap_or(10_000.0),
            dims: (head_dim as f64 * partial) as usize,
            scaling: inner.map_or(Ok(RopeScaling::None), |keys| keys.scaling(context))?,
        })
    }

    fn scaling(self, context: usize) -> Result<RopeScaling, ConfigError> {
        let (key, kind) = match (self.present("rope_type"), self.present("type")) {
            (Some(kind), _) => ("rope_type", kind),
            (None, Some(kind)) => ("type", kind),
            (None, None) => {
                return match self.map.iter().find(|(_, value)| value.is_object()) {
                    Some((key, _)) => Err(self.unsupported(key, "a set of its own".into(), "one set for all layers")),
                    None => Ok(RopeScaling::None),
                };
            }
        };
        let need = |key| self.number(key)?.ok_or_else(|| self.missing(key, "a number"));
        match kind.as_str() {
            Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear { factor: need("factor")? }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_context: self.count_opt("original_max_position_embeddings")?.unwrap_or(context),
            }),
            _ => Err(self.unsupported(key, show(kind), ROPE_SCALING_SUPPORTED)),
        }
    }

    /// The value of a key; JSON's `null` counts as absent, as in Python's `getattr(…, None)`.
    fn present(self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn text(self, key: &str) -> Option<&'a str> {
        self.present(key).and_then(Value::as_str)
    }

    fn object(self, key: &str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        match self.present(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.invalid(key, show(other), "an object")),
        }
    }

    fn flag(self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.present(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(self.invalid(key, show(other), "true or false")),
        }
    }

    fn number(self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.present(key) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| self.invalid(key, show(value), "a number")),
        }
    }

    fn count_opt(self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.present(key) {
            None => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(count) => Ok(Some(count)),
                None => Err(self.invalid(key, show(value), "a whole number")),
            },
        }
    }

    fn count(self, key: &str) -> Result<usize, ConfigError> {
        self.count_opt(key)?.ok_or_else(|| self.missing(key, "a whole number"))
    }

    fn missing(self, key: &str, accepted: impl Into<String>) -> ConfigError {
        missing(self.file, format!("{}{key}", self.within), accepted)
    }

    fn invalid(self, key: &str, found: String, accepted: impl Into<String>) -> ConfigError {
        invalid(self.file, format!("{}{key}", self.within), found, accepted)
    }

    fn unsupported(self, key: &str, found: String, accepted: impl Into<String>) -> ConfigError {
        unsupported(self.file, format!("{}{key}", self.within), found, accepted)
    }
}

fn within(file: &Path, key: &str, found: usize, max: usize) -> Result<(), ConfigError> {
    match found {
        found if (1..=max).contains(&found) => Ok(()),
        found => Err(invalid(file, key, found.to_string(), format!("a whole number from 1 to {max}"))),
    }
}

fn positive(file: &Path, key: &str, found: f64, max: f64) -> Result<(), ConfigError> {
    if found > 0.0 && found <= max {
        return Ok(());
    }
    Err(invalid(file, key, found.to_string(), format!("a number above 0, at most {max:e}")))
}

pub(crate) fn missing(file: &Path, key: impl Into<String>, accepted: impl Into<String>) -> ConfigError {
    ConfigError::Missing { file: file.into(), key: key.into(), accepted: accepted.into() }
}

pub(crate) fn invalid(
    file: &Path,
    key: impl Into<String>,
    found: impl Into<String>,
    accepted: impl Into<String>,
) -> ConfigError {
    ConfigError::Invalid { file: file.into(), key: key.into(), found: found.into(), accepted: accepted.into() }
}

pub(crate) fn unsupported(
    file: &Path,
    key: impl Into<String>,
    found: impl Into<String>,
    accepted: impl Into<String>,
) -> ConfigError {
    ConfigError::Unsupported { file: file.into(), key: key.into(), found: found.into(), accepted: accepted.into() }
}

/// A value as it stands in the file, cut to what fits a message.
fn show(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}
