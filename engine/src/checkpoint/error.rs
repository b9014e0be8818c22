//! Why a checkpoint is refused. Every message names the file, what in it, and what to do.

use std::path::PathBuf;

use crate::config::ConfigError;

/// Why a checkpoint cannot be used. Positions are bytes from the start of the file.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused to open, map or list something.
    #[error("cannot open {}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The path leads to no model.
    #[error("{} is no model: found {found}; give a .gguf file, or a folder with config.json and *.safetensors", path.display())]
    NotAModel {
        /// What was given.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// A side file is larger than any real one.
    #[error("{} has {bytes} bytes, more than the {max} accepted for such a file", file.display())]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// Its length.
        bytes: u64,
        /// The bound.
        max: u64,
    },
    /// The file ends inside its own directory.
    #[error("{} ends at byte {len} while reading {reading} at byte {at}: it is truncated; download it again", file.display())]
    Truncated {
        /// The file.
        file: PathBuf,
        /// Where the read began.
        at: u64,
        /// What was being read.
        reading: String,
        /// Length of the file.
        len: u64,
    },
    /// The file's tensors reach past its end.
    #[error("{} ends at byte {len}, but tensor `{tensor}` ends at byte {end}: it is truncated; download it again", file.display())]
    DataTruncated {
        /// The file.
        file: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// One past its last byte.
        end: u64,
        /// Length of the file.
        len: u64,
    },
    /// The file's directory contradicts itself or its format.
    #[error("{}: malformed at byte {at}, {reading}: {what}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// Where.
        at: u64,
        /// What was being read.
        reading: String,
        /// What is wrong.
        what: String,
    },
    /// A GGUF file for big-endian machines.
    #[error("{} is a big-endian GGUF; only little-endian files are read: convert it with gguf-py's gguf_convert_endian", file.display())]
    BigEndian {
        /// The file.
        file: PathBuf,
    },
    /// A GGUF version this program does not know.
    #[error("{} is GGUF version {version}; versions 2 and 3 are read: convert the model again with a current llama.cpp", file.display())]
    GgufVersion {
        /// The file.
        file: PathBuf,
        /// What it says.
        version: u32,
    },
    /// One tensor is badly described.
    #[error("{}: tensor `{tensor}`: {what}", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor, by its name in the file.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// Two tensors share bytes.
    #[error("{}: tensors `{first}` and `{second}` overlap at byte {at}", file.display())]
    Overlap {
        /// The file.
        file: PathBuf,
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
        /// Where the second begins.
        at: u64,
    },
    /// A tensor is there twice.
    #[error("tensor `{tensor}` is in {} as `{first_name}` and in {} as `{second_name}`", first.display(), second.display())]
    Duplicate {
        /// Canonical name.
        tensor: String,
        /// The file it was found in first.
        first: PathBuf,
        /// Its name there.
        first_name: String,
        /// The file it was found in again.
        second: PathBuf,
        /// Its name there.
        second_name: String,
    },
    /// A file of a model in several parts is absent or is another model's.
    #[error("{}: {what}", path.display())]
    Part {
        /// The index or the part.
        path: PathBuf,
        /// What is missing or wrong, and what to do.
        what: String,
    },
    /// A tensor the model needs is not there.
    #[error("{} has no tensor `{tensor}` (expected with shape {expected:?})", path.display())]
    MissingTensor {
        /// The model.
        path: PathBuf,
        /// Canonical name.
        tensor: String,
        /// Shape it would need, outermost first.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than its configuration asks for.
    #[error("{}: tensor `{tensor}` has shape {found:?}, but the configuration asks for {expected:?}", path.display())]
    WrongShape {
        /// The model.
        path: PathBuf,
        /// Canonical name.
        tensor: String,
        /// Shape asked for, outermost first.
        expected: Vec<usize>,
        /// Shape found.
        found: Vec<usize>,
    },
    /// A tensor is stored in a format this program cannot load.
    #[error("{}: tensor `{tensor}` is stored as {found}; supported: {supported}", path.display())]
    UnsupportedType {
        /// The model.
        path: PathBuf,
        /// Canonical name.
        tensor: String,
        /// The format's name.
        found: String,
        /// The formats that can be loaded.
        supported: String,
    },
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A side file is not the JSON it should be.
    #[error("{}: not valid JSON: {source}", file.display())]
    Json {
        /// The file.
        file: PathBuf,
        /// The parser's message, with line and column.
        source: serde_json::Error,
    },
}
