//! A Hugging Face folder: which files in it are the model, and its JSON side files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::names::{self, Name};
use super::{Checkpoint, CheckpointError, Container, Entry, GenerationDefaults, Mapped, Source, index, safetensors};
use crate::config::ModelConfig;

/// Longest side file accepted, in bytes. The largest real one is the index of a model with thousands of experts.
const SIDE_FILE_BYTES_MAX: u64 = 64 << 20;

pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const SINGLE: &str = "model.safetensors";

/// Opens a folder: `model.safetensors` if it is there, else the shards the index names, else the only safetensors file.
pub(super) fn open_folder(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    if !folder.join("config.json").is_file() {
        let found = format!("a folder without config.json ({})", listing(folder));
        return Err(CheckpointError::NotAModel { path: folder.into(), found });
    }
    let single = folder.join(SINGLE);
    if single.is_file() {
        return open(folder, folder, &[single], None);
    }
    if folder.join(INDEX).is_file() {
        return open_index(folder);
    }
    let mut files = safetensors_in(folder)?;
    match (files.pop(), files.is_empty()) {
        (Some(file), true) => open(folder, folder, &[file], None),
        (Some(_), false) => {
            let what = format!("several safetensors files but no {INDEX}; download it, or give one file");
            Err(CheckpointError::Part { path: folder.into(), what })
        }
        (None, _) => {
            let found = format!("config.json but no safetensors weights ({})", listing(folder));
            Err(CheckpointError::NotAModel { path: folder.into(), found })
        }
    }
}

/// Opens one `.safetensors` file; a shard named by the index beside it stands for all of them.
pub(super) fn open_file(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let folder = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let name = path.file_name().and_then(|name| name.to_str());
    if name != Some(SINGLE) && folder.join(INDEX).is_file() {
        let index: ShardIndex = json(&folder.join(INDEX))?;
        if index.weight_map.values().any(|shard| Some(shard.as_str()) == name) {
            return open_index(folder);
        }
    }
    open(folder, path, &[path.into()], None)
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

fn open_index(folder: &Path) -> Result<Checkpoint, CheckpointError> {
    let path = folder.join(INDEX);
    let index: ShardIndex = json(&path)?;
    let shards: BTreeSet<&str> = index.weight_map.values().map(String::as_str).collect();
    let mut files = Vec::new();
    for shard in shards {
        let error = |what| CheckpointError::Part { path: path.clone(), what };
        if !is_plain_name(shard) {
            return Err(error(format!("names the shard {shard:?}; a shard is a file in the same folder")));
        }
        let file = folder.join(shard);
        if !file.is_file() {
            return Err(error(format!("names the shard {shard}, which is not there; download it again")));
        }
        files.push(file);
    }
    if files.is_empty() {
        return Err(CheckpointError::Part { path, what: "its weight_map is empty".into() });
    }
    open(folder, folder, &files, Some(&index))
}

/// A name that stays in the folder on every system.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

fn open(
    folder: &Path,
    path: &Path,
    paths: &[PathBuf],
    shards: Option<&ShardIndex>,
) -> Result<Checkpoint, CheckpointError> {
    let config_path = folder.join("config.json");
    let config_bytes = read(&config_path)?;
    let config = ModelConfig::from_hf_json(&config_bytes, &config_path)?;
    let files = paths.iter().map(|path| Mapped::open(path)).collect::<Result<Vec<_>, _>>()?;
    let mut entries = Vec::new();
    for file in &files {
        let mut found = safetensors::parse(file.bytes(), &file.path)?;
        found.retain(|entry| names::canonical(&entry.source_name) != Name::Ignored);
        entries.push(found);
    }
    if let Some(shards) = shards {
        check_shards(folder, &files, &entries, shards)?;
    }
    let (tensors, unsupported) = index(&files, entries, |source| match names::canonical(source) {
        Name::Canonical(name) => name,
        Name::Ignored | Name::Unknown => source.to_owned(),
    })?;
    Ok(Checkpoint {
        config,
        container: Container::Safetensors,
        path: path.into(),
        generation: generation(folder, &config_bytes)?,
        files,
        tensors,
        unsupported,
        source: Source::Folder(folder.into()),
    })
}

/// Every tensor of the index is in the shard the index says.
fn check_shards(
    folder: &Path,
    files: &[Mapped],
    entries: &[Vec<Entry>],
    shards: &ShardIndex,
) -> Result<(), CheckpointError> {
    let mut homes = BTreeMap::new();
    for (file, entries) in files.iter().zip(entries) {
        let shard = file.path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        homes.extend(entries.iter().map(|entry| (entry.source_name.as_str(), shard)));
    }
    for (tensor, shard) in &shards.weight_map {
        let found = homes.get(tensor.as_str()).copied();
        if found != Some(shard) && names::canonical(tensor) != Name::Ignored {
            let found = found.map_or_else(|| "no shard has it".into(), |found| format!("it is in {found}"));
            let what = format!("says tensor `{tensor}` is in {shard}, but {found}; download the model again");
            return Err(CheckpointError::Part { path: folder.join(INDEX), what });
        }
    }
    Ok(())
}

/// `generation_config.json`, and the special ids of `config.json` where it has none.
fn generation(folder: &Path, config: &[u8]) -> Result<GenerationDefaults, CheckpointError> {
    let path = folder.join("generation_config.json");
    let own: Value = if path.is_file() { json(&path)? } else { Value::Null };
    let config: Value = serde_json::from_slice(config).unwrap_or_default();
    let float = |key: &str| own[key].as_f64().map(|x| x as f32);
    let id = |key: &str| ids(&own[key]).first().or(ids(&config[key]).first()).copied();
    let eos_ids = ids(&own["eos_token_id"]);
    Ok(GenerationDefaults {
        temperature: float("temperature"),
        top_k: own["top_k"].as_u64().and_then(|k| u32::try_from(k).ok()),
        top_p: float("top_p"),
        min_p: float("min_p"),
        repetition_penalty: float("repetition_penalty"),
        do_sample: own["do_sample"].as_bool(),
        eos_ids: if eos_ids.is_empty() { ids(&config["eos_token_id"]) } else { eos_ids },
        bos_id: id("bos_token_id"),
        pad_id: id("pad_token_id"),
    })
}

/// One id or a list of them; anything else counts as none.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

pub(super) fn chat_template(folder: &Path) -> Result<Option<String>, CheckpointError> {
    let path = folder.join("chat_template.jinja");
    if path.is_file() {
        return Ok(Some(String::from_utf8_lossy(&read(&path)?).into_owned()));
    }
    for name in ["chat_template.json", "tokenizer_config.json"] {
        let path = folder.join(name);
        if path.is_file() {
            let side: Value = json(&path)?;
            if let Some(template) = template_in(&side["chat_template"]) {
                return Ok(Some(template));
            }
        }
    }
    Ok(None)
}

/// A template, or the one called `default` in a list of named ones.
fn template_in(value: &Value) -> Option<String> {
    match value {
        Value::String(template) => Some(template.clone()),
        Value::Array(named) => {
            let default = named.iter().find(|template| template["name"] == "default")?;
            default["template"].as_str().map(str::to_owned)
        }
        _ => None,
    }
}

fn json<T: DeserializeOwned>(path: &Path) -> Result<T, CheckpointError> {
    serde_json::from_slice(&read(path)?).map_err(|source| CheckpointError::Json { file: path.into(), source })
}

fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let io = |source| CheckpointError::Io { path: path.into(), source };
    let meta = std::fs::metadata(path).map_err(io)?;
    if !meta.is_file() {
        return Err(CheckpointError::NotAModel {
            path: path.into(),
            found: "something that is no regular file".into(),
        });
    }
    let bytes = meta.len();
    if bytes > SIDE_FILE_BYTES_MAX {
        return Err(CheckpointError::TooLarge { file: path.into(), bytes, max: SIDE_FILE_BYTES_MAX });
    }
    std::fs::read(path).map_err(io)
}

fn safetensors_in(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let io = |source| CheckpointError::Io { path: folder.into(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The first few names in a folder, for messages.
pub(crate) fn listing(folder: &Path) -> String {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return "which cannot be listed".into();
    };
    let mut names: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    match names.len() {
        0 => "it is empty".into(),
        count if count > 12 => format!("it holds {}, … {count} in all", names[..12].join(", ")),
        _ => format!("it holds {}", names.join(", ")),
    }
}
