//! What a model is made of, without its weights: its configuration, and of every tensor what it is and the digest of its
//! bytes. With it a stage can be laid out and loaded where none of the model's files is.
//!
//! A head makes it once of a model, which reads all of it, and remembers it in a folder, by the model's digest.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::checkpoint::{Checkpoint, Container, DType};
use crate::config::ModelConfig;
use crate::digest::Digest;

/// Largest manifest, encoded: some 12,000 tensors.
pub const MANIFEST_BYTES_MAX: usize = 1 << 20;
/// Version of its encoding, which it begins with.
const MANIFEST_VERSION: u32 = 1;
/// Extents of a tensor.
const DIMS_MAX: usize = 8;
/// Bytes of a tensor's name.
const NAME_BYTES_MAX: usize = 1024;
/// Manifests that are remembered; the oldest go first.
const REMEMBERED_MAX: usize = 64;
/// Bytes that are hashed at once.
const PIECE_BYTES: usize = 8 << 20;

/// A model without its weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Of the model's files.
    pub model: Digest,
    /// The kind of its files, which says how rows lie.
    pub container: Container,
    /// The architecture's numbers.
    pub config: ModelConfig,
    /// Every tensor that can be loaded, by name.
    pub tensors: Vec<Entry>,
    /// Tensors in formats that cannot be loaded: name and format.
    pub unsupported: Vec<(String, String)>,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Canonical name.
    pub name: String,
    /// Element format.
    pub dtype: DType,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Of its bytes.
    pub digest: Digest,
}

impl Entry {
    /// Its bytes on disk.
    pub fn bytes(&self) -> usize {
        self.checked_bytes().unwrap_or(0)
    }

    fn checked_bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |product, extent| product.checked_mul(*extent))?;
        let row = self.shape.last().copied().unwrap_or(1);
        if !row.is_multiple_of(self.dtype.block_elements()) {
            return None;
        }
        (elements / self.dtype.block_elements()).checked_mul(self.dtype.block_bytes())
    }
}

/// Why there is no manifest.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ManifestError {
    #[error(
        "the manifest is of version {found}, this program's are of version {MANIFEST_VERSION}: all ends must run the same release"
    )]
    Version { found: u32 },
    #[error("the manifest is malformed: {message}")]
    Malformed { message: String },
    #[error(
        "the model has so many tensors that their list takes {bytes} bytes, over the limit of {MANIFEST_BYTES_MAX}: give every worker a copy of the model"
    )]
    TooLarge { bytes: usize },
    #[error("hashing was cancelled")]
    Cancelled,
}

fn malformed(message: impl Into<String>) -> ManifestError {
    ManifestError::Malformed { message: message.into() }
}

/// How far hashing is: bytes done and bytes in all. Returns false to stop.
pub type OnHashed<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

impl Manifest {
    /// Of an opened model whose files are here and have that digest. Reads all of its weights.
    ///
    /// # Errors
    /// [`ManifestError::Cancelled`], [`ManifestError::TooLarge`].
    pub fn of(checkpoint: &Checkpoint, model: Digest, progress: OnHashed<'_>) -> Result<Manifest, ManifestError> {
        let total = checkpoint.tensors().map(|tensor| tensor.bytes() as u64).sum();
        let mut done = 0;
        let mut tensors = Vec::new();
        for tensor in checkpoint.tensors() {
            let mut hasher = blake3::Hasher::new();
            for piece in checkpoint.data(tensor).chunks(PIECE_BYTES) {
                hasher.update(piece);
                done += piece.len() as u64;
                if !progress(done, total) {
                    return Err(ManifestError::Cancelled);
                }
            }
            let (name, dtype, shape) = (tensor.name.clone(), tensor.dtype, tensor.shape.clone());
            tensors.push(Entry { name, dtype, shape, digest: hasher.finalize().into() });
        }
        let manifest = Manifest {
            model,
            container: checkpoint.container,
            config: checkpoint.config.clone(),
            tensors,
            unsupported: checkpoint.unsupported().to_vec(),
        };
        match manifest.encode().len() {
            bytes if bytes > MANIFEST_BYTES_MAX => Err(ManifestError::TooLarge { bytes }),
            _ => Ok(manifest),
        }
    }

    /// The same, remembered in `folder` from another time if it can be.
    ///
    /// # Errors
    /// As [`Manifest::of`].
    pub fn remembered(
        folder: Option<&Path>,
        checkpoint: &Checkpoint,
        model: Digest,
        progress: OnHashed<'_>,
    ) -> Result<Manifest, ManifestError> {
        let file = folder.map(|folder| folder.join(model.to_string()));
        if let Some(found) = file.as_deref().and_then(recall).filter(|found| found.describes(checkpoint, model)) {
            return Ok(found);
        }
        let manifest = Manifest::of(checkpoint, model, progress)?;
        if let Some(file) = file
            && let Err(error) = remember(&file, &manifest)
        {
            tracing::debug!(%error, file = %file.display(), "a manifest was not written down");
        }
        Ok(manifest)
    }

    /// As bytes: a version, then postcard.
    pub fn encode(&self) -> Vec<u8> {
        let version = MANIFEST_VERSION.to_le_bytes().to_vec();
        postcard::to_extend(self, version).expect("plain data always has an encoding")
    }

    /// From bytes that anybody may have written.
    ///
    /// # Errors
    /// [`ManifestError`].
    pub fn decode(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        if bytes.len() > MANIFEST_BYTES_MAX {
            return Err(ManifestError::TooLarge { bytes: bytes.len() });
        }
        let (version, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| malformed("it is cut short"))?;
        let found = u32::from_le_bytes(*version);
        if found != MANIFEST_VERSION {
            return Err(ManifestError::Version { found });
        }
        let (manifest, left): (Manifest, _) =
            postcard::take_from_bytes(rest).map_err(|error| malformed(error.to_string()))?;
        if !left.is_empty() {
            return Err(malformed(format!("{} bytes too many", left.len())));
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), ManifestError> {
        self.config.validate(Path::new("the manifest")).map_err(|error| malformed(error.to_string()))?;
        let mut names = HashSet::new();
        let mut total = 0usize;
        for entry in &self.tensors {
            let name = || entry.name.chars().take(80).collect::<String>();
            if entry.name.len() > NAME_BYTES_MAX || !names.insert(entry.name.as_str()) {
                return Err(malformed(format!("tensor `{}` is there twice, or has too long a name", name())));
            }
            let bytes = entry.checked_bytes().filter(|_| entry.shape.len() <= DIMS_MAX);
            let sum = bytes.and_then(|bytes| total.checked_add(bytes));
            total = sum.ok_or_else(|| malformed(format!("tensor `{}` has no such shape", name())))?;
        }
        Ok(())
    }

    /// Where a tensor is in [`Manifest::tensors`].
    pub fn position(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|entry| entry.name == name)
    }

    /// Whether it can be this model's.
    fn describes(&self, checkpoint: &Checkpoint, model: Digest) -> bool {
        let alike = |(entry, tensor): (&Entry, &crate::checkpoint::TensorInfo)| {
            entry.name == tensor.name && entry.dtype == tensor.dtype && entry.shape == tensor.shape
        };
        self.model == model
            && self.config == checkpoint.config
            && self.container == checkpoint.container
            && self.unsupported == checkpoint.unsupported()
            && self.tensors.len() == checkpoint.tensors().count()
            && self.tensors.iter().zip(checkpoint.tensors()).all(alike)
    }
}

/// A manifest that was written down, if it is whole: the digest of its bytes comes before them.
fn recall(file: &Path) -> Option<Manifest> {
    let mut bytes = Vec::new();
    File::open(file).and_then(|file| file.take(MANIFEST_BYTES_MAX as u64 + 64).read_to_end(&mut bytes)).ok()?;
    let (digest, rest) = bytes.split_first_chunk::<32>()?;
    (blake3::hash(rest).as_bytes() == digest).then(|| Manifest::decode(rest).ok()).flatten()
}

/// All of it or nothing: a name of its own first.
fn remember(file: &Path, manifest: &Manifest) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
        forget_old(folder);
    }
    let unfinished = file.with_extension(format!("{}.tmp", std::process::id()));
    let bytes = manifest.encode();
    let write = || {
        let mut to = File::create(&unfinished)?;
        to.write_all(blake3::hash(&bytes).as_bytes())?;
        to.write_all(&bytes)?;
        std::fs::rename(&unfinished, file)
    };
    let written = write();
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}

fn forget_old(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<(std::time::SystemTime, PathBuf)> =
        entries.filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path()))).collect();
    files.sort();
    for (_, path) in files.iter().take(files.len().saturating_sub(REMEMBERED_MAX - 1)) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests;
