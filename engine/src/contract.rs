//! What head and stages must agree on before any batch: the contract. Pure.
//!
//! Every end writes down what it would do, from its own model files and its own program. Where two contracts differ, the
//! pipeline would compute something else than one process would, so it is refused, with both sides of every difference.

use std::collections::BTreeMap;
use std::ops::Range;

use pp_shaders::{KERNEL_ORDER_VERSION, Profile};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checkpoint::Checkpoint;
use crate::config::{CONTEXT_MAX, Rope, RopeScaling};
use crate::digest::Digest;
use crate::layout::{CHUNK_MAX, KV_TOKENS_MAX, LayoutError, SEQUENCES_MAX, StageOptions, StageSpec};
use crate::message::MESSAGE_VERSION;

/// Largest contract, encoded.
pub const CONTRACT_BYTES_MAX: usize = 64 << 10;
/// Version of a contract's encoding, which it begins with: raised with every change to the types below.
const CONTRACT_VERSION: u32 = 1;

/// What all ends of a pipeline have in common.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contract {
    /// [`KERNEL_ORDER_VERSION`]
    pub kernel_order: u32,
    /// [`MESSAGE_VERSION`]
    pub message_version: u32,
    /// The model.
    pub model: ModelFacts,
    /// What all stages share.
    pub options: StageOptions,
    /// Every stage, in order.
    pub stages: Vec<StageTerms>,
}

/// What a model is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Of its files.
    pub digest: Digest,
    /// Architecture.
    pub arch: String,
    /// Layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward block.
    pub intermediate: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Epsilon of the norms.
    pub rms_eps: f32,
    /// Rotation.
    pub rope: Rope,
    /// Tensors of each format, by name of the format.
    pub formats: Vec<(String, usize)>,
    /// Of names, shapes and formats of all tensors.
    pub tensors: Digest,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StageTerms {
    /// Its layers.
    pub layers: Range<usize>,
    /// How its kernels work.
    pub plan: KernelPlan,
}

/// What decides the bits of a stage's results, beside its device: the profile with its sizes that are part of an order
/// of additions, and the choices of loads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelPlan {
    /// Profile.
    pub profile: String,
    /// Contiguous parts of K.
    pub segments: u32,
    /// Threads that share the sum of a norm.
    pub norm: u32,
    /// Threads that share the log-sum-exp of a row of logits.
    pub topk: u32,
    /// Whether loads are 64 bits wide where the device can.
    pub wide: bool,
    /// Whether lanes hand each other what all of them read, where the device can.
    pub shared: bool,
}

impl KernelPlan {
    /// Of a profile.
    pub fn of(profile: &Profile) -> KernelPlan {
        let Profile { name, segments, norm, topk, wide, shared, .. } = *profile;
        KernelPlan { profile: name.to_owned(), segments, norm, topk, wide, shared }
    }
}

impl ModelFacts {
    /// Of an opened model whose files have that digest.
    pub fn of(checkpoint: &Checkpoint, digest: Digest) -> ModelFacts {
        let config = &checkpoint.config;
        let mut formats = BTreeMap::new();
        let mut tensors = blake3::Hasher::new();
        for tensor in checkpoint.tensors() {
            *formats.entry(tensor.dtype.name().to_owned()).or_insert(0) += 1;
            tensors.update(format!("{} {} {:?}\n", tensor.name, tensor.dtype, tensor.shape).as_bytes());
        }
        ModelFacts {
            digest,
            arch: config.arch.clone(),
            layers: config.layers,
            hidden: config.hidden,
            intermediate: config.intermediate,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            vocab: config.vocab,
            rms_eps: config.rms_eps,
            rope: config.rope.clone(),
            formats: formats.into_iter().collect(),
            tensors: tensors.finalize().into(),
        }
    }
}

/// Why a contract is refused before it is compared.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ContractError {
    #[error("a contract of {bytes} bytes is over the limit of {CONTRACT_BYTES_MAX}")]
    TooLarge { bytes: usize },
    #[error(
        "the contract is of version {found}, this program's are of version {CONTRACT_VERSION}: all ends must run the same release"
    )]
    Version { found: u32 },
    #[error("the contract is malformed: {message}")]
    Malformed { message: String },
    #[error("the contract's {what} {found} is not within 1 and {limit}")]
    Limit { what: &'static str, found: usize, limit: usize },
    #[error("the contract has no stage {index}, only {stages}")]
    NoStage { index: usize, stages: usize },
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

/// Something that two ends do not agree on, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What it is.
    pub what: String,
    /// Here.
    pub ours: String,
    /// There.
    pub theirs: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} here, {} there", self.what, self.ours, self.theirs)
    }
}

impl Contract {
    /// What this program would do with that model in that pipeline; `profiles` are those of the stages, in order.
    ///
    /// # Panics
    /// When there are more or fewer profiles than stages.
    pub fn new(model: ModelFacts, specs: &[StageSpec], options: StageOptions, profiles: &[Profile]) -> Contract {
        assert_eq!(specs.len(), profiles.len(), "a profile for every stage");
        let stages = specs.iter().zip(profiles);
        Contract {
            kernel_order: KERNEL_ORDER_VERSION,
            message_version: MESSAGE_VERSION,
            model,
            options,
            stages: stages
                .map(|(spec, profile)| StageTerms { layers: spec.layers.clone(), plan: KernelPlan::of(profile) })
                .collect(),
        }
    }

    /// What stage `index` would write down for this pipeline, with the model and the profile that it has itself. The
    /// rest it takes as it is told, so only what it knows better can differ.
    ///
    /// # Errors
    /// [`ContractError::NoStage`]
    pub fn seen_by(&self, index: usize, model: ModelFacts, profile: &Profile) -> Result<Contract, ContractError> {
        let mut stages = self.stages.clone();
        let count = stages.len();
        let stage = stages.get_mut(index).ok_or(ContractError::NoStage { index, stages: count })?;
        stage.plan = KernelPlan::of(profile);
        let (kernel_order, message_version) = (KERNEL_ORDER_VERSION, MESSAGE_VERSION);
        Ok(Contract { kernel_order, message_version, model, options: self.options, stages })
    }

    /// The stages, if they hold every layer of the model once, in order, and the options are such that a layout may be
    /// made for them. To be asked of a contract that came from elsewhere before anything is done with it.
    ///
    /// # Errors
    /// [`ContractError::Limit`]; [`ContractError::Layout`] with [`LayoutError::Cover`].
    pub fn check(&self) -> Result<Vec<StageSpec>, ContractError> {
        let StageOptions { context, sequences, kv_tokens, chunk, .. } = self.options;
        for (what, found, limit) in [
            ("--ctx", context, CONTEXT_MAX),
            ("--max-sequences", sequences, SEQUENCES_MAX),
            ("--kv-tokens", kv_tokens, KV_TOKENS_MAX),
            ("--max-batch-tokens", chunk, CHUNK_MAX),
        ] {
            if !(1..=limit).contains(&found) {
                return Err(ContractError::Limit { what, found, limit });
            }
        }
        let layers = self.stages.iter().map(|stage| stage.layers.clone());
        let stages = self.stages.len();
        let specs: Vec<_> = layers.enumerate().map(|(index, layers)| StageSpec { index, stages, layers }).collect();
        StageSpec::check_cover(&specs, self.model.layers)?;
        Ok(specs)
    }

    /// The bytes of a contract: the version of the encoding (u32), and postcard.
    ///
    /// # Errors
    /// [`ContractError::TooLarge`]: no other end would take it.
    pub fn encode(&self) -> Result<Vec<u8>, ContractError> {
        let bytes = self.bytes();
        if bytes.len() > CONTRACT_BYTES_MAX {
            return Err(ContractError::TooLarge { bytes: bytes.len() });
        }
        Ok(bytes)
    }

    fn bytes(&self) -> Vec<u8> {
        let bytes = CONTRACT_VERSION.to_le_bytes().to_vec();
        postcard::to_extend(self, bytes).expect("plain data always has an encoding")
    }

    /// The contract in `bytes`. Says nothing about whether it makes sense.
    ///
    /// # Errors
    /// [`ContractError`].
    pub fn decode(bytes: &[u8]) -> Result<Contract, ContractError> {
        if bytes.len() > CONTRACT_BYTES_MAX {
            return Err(ContractError::TooLarge { bytes: bytes.len() });
        }
        let malformed = |message: String| ContractError::Malformed { message };
        let Some((version, rest)) = bytes.split_first_chunk() else {
            return Err(malformed(format!("{} bytes", bytes.len())));
        };
        let found = u32::from_le_bytes(*version);
        if found != CONTRACT_VERSION {
            return Err(ContractError::Version { found });
        }
        let (contract, left) = postcard::take_from_bytes(rest).map_err(|error| malformed(error.to_string()))?;
        if !left.is_empty() {
            return Err(malformed(format!("{} bytes too many", left.len())));
        }
        Ok(contract)
    }

    /// Of its encoding: equal contracts have equal digests.
    pub fn digest(&self) -> Digest {
        blake3::hash(&self.bytes()).into()
    }

    /// All that this contract and `other` do not agree on; nothing when their digests are equal.
    pub fn differences(&self, other: &Contract) -> Vec<Difference> {
        let mut found = self.differences_in_words(other);
        // Words may be ambiguous where somebody wants them to be.
        let (ours, theirs) = (self.digest(), other.digest());
        if found.is_empty() && ours != theirs {
            let (ours, theirs) = (ours.to_string(), theirs.to_string());
            found.push(Difference { what: "contract digest".into(), ours, theirs });
        }
        found
    }

    fn differences_in_words(&self, other: &Contract) -> Vec<Difference> {
        let mut found = Vec::new();
        let (ours, theirs) = (self.terms(), other.terms());
        for ((what, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
            if ours != theirs {
                found.push(Difference { what, ours, theirs });
            }
        }
        let (ours, theirs) = (self.split(), other.split());
        if ours != theirs {
            // Plans of stages that are not the same stages say nothing.
            found.push(Difference { what: "split".into(), ours, theirs });
            return found;
        }
        for (index, (ours, theirs)) in self.stages.iter().zip(&other.stages).enumerate() {
            for ((what, ours), (_, theirs)) in ours.plan.terms().into_iter().zip(theirs.plan.terms()) {
                if ours != theirs {
                    found.push(Difference { what: format!("{what} of stage {index}"), ours, theirs });
                }
            }
        }
        found
    }

    /// Everything but the stages, in words.
    fn terms(&self) -> Vec<(String, String)> {
        // Taken apart, so that a new field is not forgotten.
        let Contract { kernel_order, message_version, model, options, stages: _ } = self;
        let ModelFacts {
            digest,
            arch,
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
            vocab,
            rms_eps,
            rope,
            formats,
            tensors,
        } = model;
        let StageOptions { activations, kv, context, sequences, kv_tokens, chunk, wire } = options;
        let formats = formats.iter().map(|(format, count)| format!("{count} {format}")).collect::<Vec<_>>().join(", ");
        [
            ("order of additions in kernels, version", kernel_order.to_string()),
            ("messages, version", message_version.to_string()),
            ("model digest", digest.to_string()),
            ("architecture", arch.clone()),
            ("layers", layers.to_string()),
            ("hidden size", hidden.to_string()),
            ("intermediate size", intermediate.to_string()),
            ("heads", heads.to_string()),
            ("KV heads", kv_heads.to_string()),
            ("head size", head_dim.to_string()),
            ("vocabulary", vocab.to_string()),
            ("epsilon of norms", format!("{rms_eps:e}")),
            ("rotation", rope_text(rope)),
            ("tensor formats", formats),
            ("names, shapes and formats of tensors", tensors.to_string()),
            ("--activations", activations.name().into()),
            ("--kv", kv.name().into()),
            ("--ctx", context.to_string()),
            ("--max-sequences", sequences.to_string()),
            ("--kv-tokens", kv_tokens.to_string()),
            ("--max-batch-tokens", chunk.to_string()),
            ("--wire", wire.name().into()),
        ]
        .map(|(what, value)| (what.to_owned(), value))
        .into()
    }

    fn split(&self) -> String {
        let ranges =
            self.stages.iter().map(|stage| format!("{}-{}", stage.layers.start, stage.layers.end.saturating_sub(1)));
        format!("layers {}", ranges.collect::<Vec<_>>().join(", "))
    }
}

impl KernelPlan {
    fn terms(&self) -> [(&'static str, String); 6] {
        let KernelPlan { profile, segments, norm, topk, wide, shared } = self;
        [
            ("profile", profile.clone()),
            ("segments of K", segments.to_string()),
            ("threads of a norm", norm.to_string()),
            ("threads of top-k", topk.to_string()),
            ("64-bit loads", wide.to_string()),
            ("loads shared by lanes", shared.to_string()),
        ]
    }
}

fn rope_text(rope: &Rope) -> String {
    let scaling = match &rope.scaling {
        RopeScaling::None => "no scaling".to_owned(),
        RopeScaling::Linear { factor } => format!("linear scaling by {factor}"),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => format!(
            "llama3 scaling by {factor} between {low_freq_factor} and {high_freq_factor} of {original_context} positions"
        ),
        RopeScaling::Factors(factors) => {
            let bytes: &[u8] = bytemuck::cast_slice(factors);
            format!("{} factors ({})", factors.len(), Digest::from(blake3::hash(bytes)))
        }
    };
    format!("theta {}, {} dimensions, {scaling}", rope.theta, rope.dims)
}

/// The program at one end. Ends of different builds may work together as long as their contracts are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Build {
    /// Version of the program.
    pub version: String,
    /// What it was built for: architecture and system.
    pub target: String,
    /// Whether it was built for debugging.
    pub debug: bool,
}

impl Build {
    /// This one.
    pub fn this() -> Build {
        Build {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            debug: cfg!(debug_assertions),
        }
    }

    /// Logs a warning that `peer` runs another build, if it does; returns whether it does.
    pub fn warn_if_different(&self, other: &Build, peer: &str) -> bool {
        let is_different = self != other;
        if is_different {
            tracing::warn!(peer, "another build: {self} here, {other} there");
        }
        is_different
    }
}

impl std::fmt::Display for Build {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Build { version, target, debug } = self;
        write!(f, "{version} for {target}{}", if *debug { ", with debug assertions" } else { "" })
    }
}

#[cfg(test)]
mod tests;
