//! What a model file holds.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use pp_engine::chat_template::ChatTemplate;
use pp_engine::checkpoint::{Checkpoint, Container};
use pp_engine::config::RopeScaling;
use pp_engine::digest::Digest;
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::tokenizer::Tokenizer;
use pp_engine::{Act, KvType, Profile, Wire, arch, quant};
use serde::Serialize;

use crate::args::{InspectArgs, ModelArgs};
use crate::models::digest_of;
use crate::output::{Out, Report, bytes, count, table};
use crate::settings;

/// Looks and tells; a model that is not supported is described all the same.
pub fn run(args: &InspectArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let checkpoint = super::open(&ModelArgs { model: args.model.clone() })?;
    let digest = digest_of(&checkpoint, &out)?;
    out.result(&InspectReport::new(&checkpoint, digest))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct InspectReport {
    path: String,
    /// BLAKE3 of its files.
    digest: Digest,
    container: &'static str,
    files: Vec<FileRow>,
    name: Option<String>,
    arch: String,
    layers: usize,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    context: usize,
    rms_eps: f32,
    rope: RopeRow,
    tie_embeddings_declared: bool,
    lm_head_present: bool,
    parameters: u64,
    bytes: u64,
    embedding_bytes: u64,
    lm_head_bytes: u64,
    layer_bytes: Vec<u64>,
    tensor_types: Vec<TypeRow>,
    tokenizer: Option<TokenizerRow>,
    chat_template: TemplateRow,
    generation: GenerationRow,
    supported: bool,
    /// What is not, and why.
    unsupported: Vec<String>,
}

#[derive(Debug, Serialize)]
struct FileRow {
    path: String,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct RopeRow {
    theta: f64,
    dims: usize,
    scaling: String,
}

#[derive(Debug, Serialize)]
struct TypeRow {
    #[serde(rename = "type")]
    name: &'static str,
    tensors: usize,
    bytes: u64,
    /// What it is kept as on a device.
    device: &'static str,
}

#[derive(Debug, Serialize)]
struct TokenizerRow {
    vocab: usize,
    bos: Option<(u32, String)>,
    eos: Vec<(u32, String)>,
}

#[derive(Debug, Serialize)]
struct TemplateRow {
    present: bool,
    bytes: usize,
    error: Option<String>,
}

/// Declared sampling defaults.
#[derive(Debug, Serialize)]
struct GenerationRow {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

impl InspectReport {
    fn new(checkpoint: &Checkpoint, digest: Digest) -> InspectReport {
        let config = &checkpoint.config;
        let costs = settings::costs(checkpoint);
        let tokenizer = checkpoint.tokenizer().map_err(|error| error.to_string());
        let chat_template = TemplateRow::new(checkpoint);
        let mut unsupported = unsupported(checkpoint);
        unsupported.extend(tokenizer.as_ref().err().cloned());
        unsupported.extend(chat_template.error.clone());
        let own_head = checkpoint.tensor("output.weight");
        InspectReport {
            path: checkpoint.path.display().to_string(),
            digest,
            container: match checkpoint.container {
                Container::Gguf => "GGUF",
                Container::Safetensors => "safetensors",
            },
            files: checkpoint
                .files()
                .into_iter()
                .map(|(path, bytes)| FileRow { path: path.display().to_string(), bytes })
                .collect(),
            name: config.name.clone(),
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
            rope: RopeRow { theta: config.rope.theta, dims: config.rope.dims, scaling: scaling(&config.rope.scaling) },
            tie_embeddings_declared: config.tie_embeddings,
            lm_head_present: own_head.is_some(),
            parameters: checkpoint.tensors().map(|tensor| tensor.elements() as u64).sum(),
            bytes: checkpoint.tensors().map(|tensor| tensor.bytes() as u64).sum(),
            embedding_bytes: costs.first,
            lm_head_bytes: own_head.map_or(0, |tensor| tensor.bytes() as u64),
            layer_bytes: costs.layers,
            tensor_types: types(checkpoint),
            tokenizer: tokenizer.ok().map(|tokenizer| TokenizerRow::new(&tokenizer)),
            chat_template,
            generation: {
                let g = &checkpoint.generation;
                GenerationRow {
                    do_sample: g.do_sample,
                    temperature: g.temperature,
                    top_k: g.top_k,
                    top_p: g.top_p,
                    min_p: g.min_p,
                    repetition_penalty: g.repetition_penalty,
                }
            },
            supported: unsupported.is_empty(),
            unsupported,
        }
    }
}

/// Why the model would not run, as far as its files tell.
fn unsupported(checkpoint: &Checkpoint) -> Vec<String> {
    let mut found: Vec<String> = checkpoint
        .unsupported()
        .iter()
        .map(|(tensor, dtype)| format!("tensor `{tensor}` is stored as {dtype}, which cannot be loaded"))
        .collect();
    if let Err(error) = arch::find(&checkpoint.config.arch) {
        found.push(error.to_string());
        return found;
    }
    let options = StageOptions {
        activations: Act::F32,
        kv: KvType::F16,
        context: 1,
        sequences: 1,
        kv_tokens: 1,
        chunk: 1,
        wire: Wire::F32,
    };
    let limits = pp_engine::pipeline::Device::Reference { profile: Profile::SOFTWARE }.limits();
    let whole = StageSpec::pipeline(&[checkpoint.config.layers]).remove(0);
    if let Err(error) = StageLayout::new(checkpoint, whole, options, &Profile::SOFTWARE, limits) {
        let error = error.to_string();
        // A tensor of an unknown type is listed already.
        if checkpoint.unsupported().iter().all(|(tensor, _)| !error.contains(&format!("`{tensor}`"))) {
            found.push(error);
        }
    }
    found
}

fn types(checkpoint: &Checkpoint) -> Vec<TypeRow> {
    let mut types: BTreeMap<_, (usize, u64)> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        let (tensors, bytes) = types.entry(tensor.dtype).or_default();
        *tensors += 1;
        *bytes += tensor.bytes() as u64;
    }
    let row = |(dtype, (tensors, bytes)): (pp_engine::checkpoint::DType, (usize, u64))| TypeRow {
        name: dtype.name(),
        tensors,
        bytes,
        device: quant::device_format(dtype).name(),
    };
    types.into_iter().map(row).collect()
}

fn scaling(scaling: &RopeScaling) -> String {
    match scaling {
        RopeScaling::None => "none".to_owned(),
        RopeScaling::Linear { factor } => format!("linear, factor {factor}"),
        RopeScaling::Llama3 { factor, original_context, .. } => {
            format!("llama3, factor {factor}, original context {original_context}")
        }
        RopeScaling::Factors(factors) => format!("{} factors", factors.len()),
    }
}

impl TokenizerRow {
    fn new(tokenizer: &Tokenizer) -> TokenizerRow {
        let token = |id: u32| (id, String::from_utf8_lossy(&tokenizer.token_bytes(id)).into_owned());
        TokenizerRow {
            vocab: tokenizer.vocab_size(),
            bos: tokenizer.bos().map(token),
            eos: tokenizer.eos_ids().iter().copied().map(token).collect(),
        }
    }
}

impl TemplateRow {
    fn new(checkpoint: &Checkpoint) -> TemplateRow {
        let origin = checkpoint.path.display().to_string();
        match checkpoint.chat_template() {
            Ok(None) => TemplateRow { present: false, bytes: 0, error: None },
            Ok(Some(source)) => TemplateRow {
                present: true,
                bytes: source.len(),
                error: ChatTemplate::new(&source, &origin).err().map(|error| error.to_string()),
            },
            Err(error) => TemplateRow { present: false, bytes: 0, error: Some(error.to_string()) },
        }
    }
}

impl Report for InspectReport {
    fn text(&self) -> String {
        let types: Vec<Vec<String>> = self
            .tensor_types
            .iter()
            .map(|row| vec![row.name.into(), row.device.into(), row.tensors.to_string(), bytes(row.bytes)])
            .collect();
        let verdict = if self.supported {
            "supported".to_owned()
        } else {
            format!("NOT SUPPORTED:\n  {}", self.unsupported.join("\n  "))
        };
        let mut lines = vec![
            format!("{}  ({}, {})", self.path, self.container, files(&self.files)),
            format!("digest         {} (BLAKE3)", self.digest),
            format!(
                "architecture   {}{}",
                self.arch,
                self.name.as_ref().map_or(String::new(), |name| format!("  ({name})"))
            ),
            format!("parameters     {}", count(self.parameters)),
            format!(
                "sizes          {} layers, hidden {}, intermediate {}, vocabulary {}",
                self.layers, self.hidden, self.intermediate, self.vocab
            ),
            format!("attention      {} heads, {} KV heads, of {}", self.heads, self.kv_heads, self.head_dim),
            format!(
                "rope           theta {}, {} dimensions, scaling {}",
                self.rope.theta, self.rope.dims, self.rope.scaling
            ),
            format!("context        {} tokens", count(self.context as u64)),
            format!("LM head        {}", self.head_text()),
            format!("bytes          {} a layer, embedding {}", self.layer_text(), bytes(self.embedding_bytes)),
        ];
        lines.push(format!("tokenizer      {}", self.tokenizer_text()));
        lines.push(format!("chat template  {}", self.template_text()));
        lines.push(format!("sampling       {}", self.generation.text()));
        lines.push(String::new());
        lines.push(table(2, &["type", "on the device", "tensors", "bytes"], &types));
        lines.push(String::new());
        lines.push(verdict);
        lines.join("\n")
    }
}

fn files(files: &[FileRow]) -> String {
    let all = bytes(files.iter().map(|file| file.bytes).sum());
    if files.len() == 1 { all } else { format!("{} files, {all}", files.len()) }
}

impl InspectReport {
    fn head_text(&self) -> String {
        if self.lm_head_present {
            return format!("its own, {}", bytes(self.lm_head_bytes));
        }
        "the embedding, on both ends of a pipeline".to_owned()
    }

    fn layer_text(&self) -> String {
        let (min, max) = (self.layer_bytes.iter().min(), self.layer_bytes.iter().max());
        match (min, max) {
            (Some(min), Some(max)) if min != max => format!("{} to {}", bytes(*min), bytes(*max)),
            (Some(min), _) => bytes(*min),
            _ => "0 B".to_owned(),
        }
    }

    fn tokenizer_text(&self) -> String {
        match &self.tokenizer {
            None => "cannot be used (see below)".to_owned(),
            Some(row) => {
                let token = |(id, text): &(u32, String)| format!("{text} ({id})");
                let list = |tokens: Vec<String>| if tokens.is_empty() { "none".to_owned() } else { tokens.join(", ") };
                format!(
                    "{} tokens, BOS {}, EOS {}",
                    count(row.vocab as u64),
                    list(row.bos.iter().map(token).collect()),
                    list(row.eos.iter().map(token).collect())
                )
            }
        }
    }

    fn template_text(&self) -> String {
        match &self.chat_template {
            TemplateRow { error: Some(_), .. } => "cannot be used (see below)".to_owned(),
            TemplateRow { present: true, bytes: length, .. } => format!("yes, {}", bytes(*length as u64)),
            _ => "none: use --raw or --chat-template".to_owned(),
        }
    }
}

impl GenerationRow {
    fn text(&self) -> String {
        let mut parts = Vec::new();
        parts.extend(self.do_sample.map(|value| format!("do_sample {value}")));
        parts.extend(self.temperature.map(|value| format!("temperature {value}")));
        parts.extend(self.top_k.map(|value| format!("top_k {value}")));
        parts.extend(self.top_p.map(|value| format!("top_p {value}")));
        parts.extend(self.min_p.map(|value| format!("min_p {value}")));
        parts.extend(self.repetition_penalty.map(|value| format!("repetition_penalty {value} (not used)")));
        if parts.is_empty() { "nothing declared: greedy".to_owned() } else { parts.join(", ") }
    }
}
