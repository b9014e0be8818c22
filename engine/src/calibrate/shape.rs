//! A model without its weights.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use pp_shaders::{Act, KvType};

use crate::arch;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::made_up::MadeUp;
use crate::config::{ModelConfig, Rope};

/// Kinds of layers at most: mixtures of formats have a handful.
const KINDS_MAX: usize = 32;
/// Tensors of a layer, and beside the layers, at most.
const TENSORS_MAX: usize = 64;
/// Longest name of a tensor.
const NAME_BYTES_MAX: usize = 64;

/// What of a model and of the choices that were made decides about time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shape {
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
    /// Positions that the model was made for.
    pub context: usize,
    /// Epsilon of the norms.
    pub rms_eps: f32,
    /// Rotation.
    pub rope: Rope,
    /// Layers that differ in formats or shapes.
    pub kinds: Vec<Vec<MadeUp>>,
    /// Embedding, final norm and LM head.
    pub ends: Vec<MadeUp>,
    /// Activations that meet quantised weights.
    pub activations: Act,
    /// Type of keys and values.
    pub kv: KvType,
}

/// Why a shape is refused.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ShapeError {
    #[error(transparent)]
    Arch(#[from] arch::UnknownArch),
    #[error("a shape with {found} {what}; 1 to {limit} are taken")]
    Limit { what: &'static str, found: usize, limit: usize },
    #[error("a tensor's name of {found} bytes; at most {NAME_BYTES_MAX} are taken")]
    Name { found: usize },
}

impl Shape {
    /// The shape of a model, and the kind of each of its layers.
    pub fn of(checkpoint: &Checkpoint, activations: Act, kv: KvType) -> (Shape, Vec<usize>) {
        let config = &checkpoint.config;
        let mut layers: Vec<Vec<MadeUp>> = vec![Vec::new(); config.layers];
        let mut ends = Vec::new();
        for tensor in checkpoint.tensors() {
            let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
            let layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            match layer.and_then(|(index, name)| Some((index.parse::<usize>().ok()?, name))) {
                Some((index, name)) if index < layers.len() => {
                    layers[index].push(MadeUp { name: name.to_owned(), dtype, shape });
                }
                _ if ["token_embd.weight", "output_norm.weight", "output.weight"].contains(&tensor.name.as_str()) => {
                    ends.push(MadeUp { name: tensor.name.clone(), dtype, shape });
                }
                _ => {}
            }
        }
        let mut kinds: Vec<Vec<MadeUp>> = Vec::new();
        let of_layer = layers.into_iter().map(|layer| {
            kinds.iter().position(|kind| *kind == layer).unwrap_or_else(|| {
                kinds.push(layer);
                kinds.len() - 1
            })
        });
        let of_layer = of_layer.collect();
        let shape = Shape {
            arch: config.arch.clone(),
            layers: config.layers,
            hidden: config.hidden,
            intermediate: config.intermediate,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            vocab: config.vocab,
            context: config.context,
            rms_eps: config.rms_eps,
            rope: config.rope.clone(),
            kinds,
            ends,
            activations,
            kv,
        };
        (shape, of_layer)
    }

    /// Whether it is within bounds: another host may have made it.
    ///
    /// # Errors
    /// [`ShapeError`]
    pub fn check(&self) -> Result<(), ShapeError> {
        arch::find(&self.arch)?;
        let within = |what, found, limit| {
            if (1..=limit).contains(&found) { Ok(()) } else { Err(ShapeError::Limit { what, found, limit }) }
        };
        within("kinds of layers", self.kinds.len(), KINDS_MAX)?;
        for list in self.kinds.iter().chain([&self.ends]) {
            within("tensors", list.len(), TENSORS_MAX)?;
            if let Some(tensor) = list.iter().find(|tensor| tensor.name.len() > NAME_BYTES_MAX) {
                return Err(ShapeError::Name { found: tensor.name.len() });
            }
        }
        Ok(())
    }

    pub(super) fn config(&self) -> ModelConfig {
        ModelConfig {
            arch: self.arch.clone(),
            name: None,
            layers: self.layers,
            hidden: self.hidden,
            intermediate: self.intermediate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab: self.vocab,
            context: self.context,
            rms_eps: self.rms_eps,
            rope: self.rope.clone(),
            tie_embeddings: !self.ends.iter().any(|tensor| tensor.name == "output.weight"),
        }
    }

    /// Bytes of a layer of a kind.
    pub(super) fn layer_bytes(&self, kind: usize) -> usize {
        self.kinds[kind].iter().filter_map(MadeUp::bytes).fold(0, usize::saturating_add)
    }
}
