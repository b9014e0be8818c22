//! Model files on disk: what tensors they hold and where their bytes are.
//!
//! Owns the container formats (GGUF, and safetensors in a Hugging Face folder), the canonical tensor names and every
//! check that makes it safe to slice the mapped files afterwards. Does not decode weights: [`Checkpoint::data`] hands
//! out bytes as they lie on disk.
//!
//! Files are untrusted: every count, length and offset is checked before it is used, and nothing of a size that only
//! the file claims is allocated. Files are mapped, so opening one reads its directory and not its weights.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use crate::config::ModelConfig;
use crate::tokenizer::{Tokenizer, TokenizerError};

mod error;
pub mod gguf;
mod gguf_model;
pub mod gguf_writer;
pub(crate) mod hf;
pub mod made_up;
pub mod names;
pub mod safetensors;
pub mod supplied;
#[cfg(test)]
mod tests;

pub use error::CheckpointError;
use supplied::Supplier;

/// Element formats of tensors this program can load. The quantised ones are ggml's, block by block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash, Serialize, Deserialize)]
#[expect(non_camel_case_types, reason = "the names are ggml's, and are read as such in messages and tables")]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// The upper half of an F32.
    BF16,
    /// 4 bits, 32 per block, one scale.
    Q4_0,
    /// 4 bits, 32 per block, scale and minimum.
    Q4_1,
    /// 5 bits, 32 per block, one scale.
    Q5_0,
    /// 5 bits, 32 per block, scale and minimum.
    Q5_1,
    /// 8 bits, 32 per block, one scale.
    Q8_0,
    /// 4 bits, 256 per block, 6-bit scales and minima per 32.
    Q4_K,
    /// 5 bits, 256 per block, 6-bit scales and minima per 32.
    Q5_K,
    /// 6 bits, 256 per block, 8-bit scales per 16.
    Q6_K,
}

impl DType {
    /// Every format, in the order of the enum.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::BF16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
    ];

    /// Elements stored together; 1 where nothing is quantised. A row is a whole number of blocks.
    pub fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q4_K | Self::Q5_K | Self::Q6_K => 256,
        }
    }

    /// Bytes of one block on disk.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// ggml's name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4_K => "Q4_K",
            Self::Q5_K => "Q5_K",
            Self::Q6_K => "Q6_K",
        }
    }

    /// The names of [`Self::ALL`], for messages.
    fn supported() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One tensor of a checkpoint: its name, format, shape, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Canonical name, GGUF's spelling (see [`names`]); the source name where there is none.
    pub name: String,
    /// The name in the file.
    pub source_name: String,
    /// Element format.
    pub dtype: DType,
    /// Extents, outermost first: a matrix is `[rows, cols]`, and `cols` lie side by side.
    pub shape: Vec<usize>,
    file: usize,
    offset: usize,
    bytes: usize,
}

impl TensorInfo {
    /// Index of its file in [`Checkpoint::files`].
    pub fn file(&self) -> usize {
        self.file
    }

    /// First byte in its file.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes on disk.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Length of the innermost extent, in elements; 1 for a scalar.
    pub fn row_elements(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of one row on disk.
    pub fn row_bytes(&self) -> usize {
        (self.row_elements() / self.dtype.block_elements()).saturating_mul(self.dtype.block_bytes())
    }
}

/// The kind of file a checkpoint was read from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
pub enum Container {
    /// One GGUF file, or its parts.
    Gguf,
    /// A Hugging Face folder of safetensors.
    Safetensors,
}

/// Sampling defaults and special ids a model file declares; `None` where it says nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Softmax temperature.
    pub temperature: Option<f32>,
    /// Keep the k likeliest tokens; 0 means all.
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens up to this probability mass.
    pub top_p: Option<f32>,
    /// Keep tokens at least this likely, relative to the likeliest.
    pub min_p: Option<f32>,
    /// Divisor of the positive logits of tokens already seen; 1 means none.
    pub repetition_penalty: Option<f32>,
    /// Whether the makers sample at all.
    pub do_sample: Option<bool>,
    /// Ids declared to end a reply; [`Tokenizer::eos_ids`] adds those known by their text.
    pub eos_ids: Vec<u32>,
    /// Id that begins a text.
    pub bos_id: Option<u32>,
    /// Id used for padding.
    pub pad_id: Option<u32>,
}

/// An opened model: configuration, directory of tensors, and the mapped files behind them.
#[derive(Debug)]
pub struct Checkpoint {
    /// The architecture's numbers.
    pub config: ModelConfig,
    /// Kind of files.
    pub container: Container,
    /// What was opened: the (first) GGUF file, the folder, or the single safetensors file.
    pub path: PathBuf,
    /// Sampling defaults and special ids as declared.
    pub generation: GenerationDefaults,
    files: Vec<Mapped>,
    tensors: BTreeMap<String, TensorInfo>,
    unsupported: Vec<(String, String)>,
    source: Source,
}

/// Where the parts that are not tensors are read from.
#[derive(Debug)]
enum Source {
    Gguf(Box<gguf::Directory>),
    Folder(PathBuf),
    /// No file is here; nothing brings the weights, or that does.
    Supplied(Option<Arc<dyn Supplier>>),
}

impl Checkpoint {
    /// Opens a `.gguf` file (any part of a split one finds the others beside it), a Hugging Face folder, or a
    /// `.safetensors` file inside such a folder.
    ///
    /// Follows the GGUF specification (versions 2 and 3, little-endian) and that of safetensors. Reads directories
    /// and side files only; the weights stay on disk until [`Self::data`] is read. The files must not be cut while
    /// the checkpoint is open.
    ///
    /// # Errors
    /// [`CheckpointError`] on anything missing, truncated or contradictory. Tensors in formats that cannot be loaded
    /// are no error here, see [`Self::unsupported`].
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let meta = std::fs::metadata(path).map_err(|source| CheckpointError::Io { path: path.into(), source })?;
        let extension = path.extension().map(|e| e.to_ascii_lowercase());
        match extension.as_ref().and_then(|e| e.to_str()) {
            _ if meta.is_dir() => hf::open_folder(path),
            Some("safetensors") => hf::open_file(path),
            Some("gguf") => Self::open_gguf(path),
            _ if starts_with_gguf(path) => Self::open_gguf(path),
            _ => Err(CheckpointError::NotAModel { path: path.into(), found: "a file of another kind".into() }),
        }
    }

    fn open_gguf(path: &Path) -> Result<Self, CheckpointError> {
        let parts = gguf::open_parts(path)?;
        let (files, mut directories): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let entries = directories.iter_mut().map(|directory| std::mem::take(&mut directory.entries)).collect();
        let (tensors, unsupported) = index(&files, entries, str::to_owned)?;
        let first = directories.swap_remove(0);
        let model = gguf_model::Model { directory: &first, files: &files, tensors: &tensors };
        Ok(Self {
            config: model.config()?,
            generation: model.generation()?,
            container: Container::Gguf,
            path: files[0].path.clone(),
            files,
            tensors,
            unsupported,
            source: Source::Gguf(Box::new(first)),
        })
    }

    /// Every tensor that can be loaded, sorted by canonical name.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.tensors.values()
    }

    /// The tensor of this canonical name, if it is there and can be loaded.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// The tensor of this canonical name and this shape, outermost extent first.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`], [`CheckpointError::WrongShape`] or [`CheckpointError::UnsupportedType`].
    pub fn require(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, CheckpointError> {
        let path = || self.path.clone();
        let Some(tensor) = self.tensors.get(name) else {
            return Err(match self.unsupported.iter().find(|(unsupported, _)| unsupported == name) {
                Some((_, found)) => CheckpointError::UnsupportedType {
                    path: path(),
                    tensor: name.into(),
                    found: found.clone(),
                    supported: DType::supported(),
                },
                None => CheckpointError::MissingTensor { path: path(), tensor: name.into(), expected: shape.into() },
            });
        };
        if tensor.shape != shape {
            return Err(CheckpointError::WrongShape {
                path: path(),
                tensor: name.into(),
                expected: shape.into(),
                found: tensor.shape.clone(),
            });
        }
        Ok(tensor)
    }

    /// The bytes of a tensor, as they lie on disk: rows one after the other, little-endian, blocks unpacked by nobody.
    ///
    /// `tensor` must be one of this checkpoint's, and its files be here ([`Checkpoint::read`] also waits for bytes that
    /// come from elsewhere).
    pub fn data(&self, tensor: &TensorInfo) -> &[u8] {
        &self.files[tensor.file].bytes()[tensor.offset..tensor.offset + tensor.bytes]
    }

    /// Weight files and their lengths in bytes; none where the weights come from elsewhere.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        self.files.iter().map(|file| (file.path.clone(), file.bytes().len() as u64)).collect()
    }

    /// Tensors that are there in a format that cannot be loaded: canonical name and the format's name.
    pub fn unsupported(&self) -> &[(String, String)] {
        &self.unsupported
    }

    /// Whether rows of `attn_q` and `attn_k` are permuted so that rotation turns *adjacent* elements of a head.
    ///
    /// llama.cpp's converter does this for architecture `llama`; GGUF files of other architectures, and Hugging Face
    /// folders, rotate element `i` with element `i + dims / 2`.
    pub fn rope_interleaved(&self) -> bool {
        self.container == Container::Gguf && self.config.arch == "llama"
    }

    /// The model's tokenizer: from `tokenizer.json` in a folder, from the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`TokenizerError`] when it is missing, malformed, or of a kind that is not known.
    pub fn tokenizer(&self) -> Result<Tokenizer, TokenizerError> {
        match &self.source {
            Source::Folder(folder) => Tokenizer::from_hf_dir(folder),
            Source::Gguf(directory) => {
                let model = gguf_model::Model { directory, files: &self.files, tensors: &self.tensors };
                Tokenizer::from_gguf(model.vocab()?)
            }
            Source::Supplied(_) => {
                Err(TokenizerError::Missing { origin: self.path.clone(), what: "a tokenizer".to_owned() })
            }
        }
    }

    /// Source of the model's chat template, if it has one: `chat_template.jinja`, else `chat_template.json`, else the
    /// key of `tokenizer_config.json`; for GGUF the key `tokenizer.chat_template`.
    ///
    /// # Errors
    /// [`CheckpointError`] when a side file cannot be read.
    pub fn chat_template(&self) -> Result<Option<String>, CheckpointError> {
        match &self.source {
            Source::Folder(folder) => hf::chat_template(folder),
            Source::Gguf(directory) => Ok(directory.text("tokenizer.chat_template").map(str::to_owned)),
            Source::Supplied(_) => Ok(None),
        }
    }
}

fn starts_with_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic));
    read.is_ok() && magic == gguf::MAGIC
}

/// A file mapped into memory, read only.
#[derive(Debug)]
struct Mapped {
    path: PathBuf,
    map: Mmap,
}

impl Mapped {
    fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::Io { path: path.into(), source };
        let file = File::open(path).map_err(io)?;
        let meta = file.metadata().map_err(io)?;
        if !meta.is_file() || meta.len() == 0 {
            let found = if meta.is_file() { "an empty file" } else { "something that is no regular file" };
            return Err(CheckpointError::NotAModel { path: path.into(), found: found.into() });
        }
        // SAFETY: the map is read only and outlives every slice handed out. Another process that cuts the file would
        // end this one with a bus error and no memory unsafety; one that writes it changes weights, which are only
        // ever read as plain bytes. Both are documented at `Checkpoint::open`.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: path.into(), map })
    }

    fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// A tensor as a container's directory describes it, its range not yet compared with the others'.
#[derive(Clone, Debug)]
struct Entry {
    source_name: String,
    /// The format, or the name of one that cannot be loaded.
    dtype: Result<DType, String>,
    shape: Vec<usize>,
    offset: usize,
    /// Length in bytes; `None` when the format is so unknown that it has none.
    bytes: Option<usize>,
}

type Index = (BTreeMap<String, TensorInfo>, Vec<(String, String)>);

/// Merges the directories of all files: checks ranges, gives canonical names, refuses duplicates.
fn index(
    files: &[Mapped],
    entries: Vec<Vec<Entry>>,
    canonical: impl Fn(&str) -> String,
) -> Result<Index, CheckpointError> {
    let mut tensors = BTreeMap::new();
    let mut unsupported = Vec::new();
    let mut seen: HashMap<String, (usize, String)> = HashMap::new();
    for (file, mut entries) in entries.into_iter().enumerate() {
        check_ranges(&files[file], &mut entries)?;
        for Entry { source_name, dtype, shape, offset, bytes } in entries {
            let name = canonical(&source_name);
            if let Some((first, first_name)) = seen.insert(name.clone(), (file, source_name.clone())) {
                return Err(CheckpointError::Duplicate {
                    tensor: name,
                    first: files[first].path.clone(),
                    first_name,
                    second: files[file].path.clone(),
                    second_name: source_name,
                });
            }
            match (dtype, bytes) {
                (Ok(dtype), Some(bytes)) => {
                    let info = TensorInfo { name: name.clone(), source_name, dtype, shape, file, offset, bytes };
                    tensors.insert(name, info);
                }
                (dtype, _) => unsupported.push((name, dtype.map_or_else(|found| found, |d| d.to_string()))),
            }
        }
    }
    unsupported.sort();
    Ok((tensors, unsupported))
}

/// Every range lies inside the file and touches no other. Sorts the entries by position.
fn check_ranges(file: &Mapped, entries: &mut [Entry]) -> Result<(), CheckpointError> {
    let len = file.bytes().len();
    entries.sort_by_key(|entry| entry.offset);
    let mut last: Option<(&Entry, usize)> = None;
    for entry in entries.iter() {
        let end = entry.offset.checked_add(entry.bytes.unwrap_or(0));
        let Some(end) = end.filter(|end| *end <= len) else {
            return Err(CheckpointError::DataTruncated {
                file: file.path.clone(),
                tensor: entry.source_name.clone(),
                end: end.map_or(u64::MAX, |end| end as u64),
                len: len as u64,
            });
        };
        if let Some((first, first_end)) = last
            && first_end > entry.offset
            && end > entry.offset
        {
            return Err(CheckpointError::Overlap {
                file: file.path.clone(),
                first: first.source_name.clone(),
                second: entry.source_name.clone(),
                at: entry.offset as u64,
            });
        }
        if last.is_none_or(|(_, last_end)| end >= last_end) {
            last = Some((entry, end));
        }
    }
    Ok(())
}
