//! What a model is, whatever it is called and wherever it lies: the digest of its files' contents.
//!
//! The digest of a GGUF file is the BLAKE3 of its bytes, as `b3sum` prints it. Where a model is several files (a folder,
//! a GGUF in parts), it is that of the list of them, by name: what `b3sum FILES | b3sum` prints in the folder. A file
//! is hashed once; what came of it is kept in a cache as long as the file's size and time stay as they were.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::checkpoint::hf::{INDEX, SINGLE};
use crate::checkpoint::{Checkpoint, Container};

mod cache;

use cache::Cache;

/// Bytes that are read at once: enough for the hash's widest vectors.
const READ_BYTES: usize = 1 << 20;
/// Most entries of a folder that are looked at for a model.
const CANDIDATES_MAX: usize = 10_000;
/// What this program reads of a Hugging Face folder beside the weights and their index.
const SIDE_FILES: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// A BLAKE3 digest. Text and JSON have it in hexadecimal.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// Its beginning, for people.
    pub fn short(&self) -> String {
        self.to_string()[..12].to_owned()
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Digest {
        Digest(*hash.as_bytes())
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl std::fmt::Debug for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// A text is not a digest.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{found}` is no digest: expected 64 hexadecimal digits")]
pub struct NoDigest {
    found: String,
}

impl FromStr for Digest {
    type Err = NoDigest;

    fn from_str(text: &str) -> Result<Digest, NoDigest> {
        blake3::Hash::from_hex(text).map(Digest::from).map_err(|_| NoDigest { found: text.chars().take(80).collect() })
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() { serializer.collect_str(self) } else { self.0.serialize(serializer) }
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        if !deserializer.is_human_readable() {
            return <[u8; 32]>::deserialize(deserializer).map(Digest);
        }
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// Why there is no digest.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DigestError {
    #[error("cannot read {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{} changed while it was read", path.display())]
    Changed { path: PathBuf },
    #[error("hashing was cancelled")]
    Cancelled,
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFile {
    /// Its name, without folders.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

/// The files that `model` consists of, by name.
///
/// # Errors
/// When one cannot be found any more.
pub fn files(model: &Checkpoint) -> Result<Vec<ModelFile>, DigestError> {
    let mut paths: Vec<PathBuf> = model.files().into_iter().map(|(path, _)| path).collect();
    if model.container == Container::Safetensors {
        let folder = paths[0].parent().unwrap_or(Path::new("")).to_owned();
        paths.extend(SIDE_FILES.map(|name| folder.join(name)).into_iter().filter(|path| path.is_file()));
    }
    let file = |path: PathBuf| {
        let bytes = std::fs::metadata(&path).map_err(|source| DigestError::Io { path: path.clone(), source })?.len();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(ModelFile { name, path, bytes })
    };
    let mut files = paths.into_iter().map(file).collect::<Result<Vec<_>, DigestError>>()?;
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// All that makes `model` one when it is copied: its files, and behind them the list of which tensor is in which, where it
/// has one. That is no part of what the model is.
///
/// # Errors
/// As [`files`].
pub fn copied(model: &Checkpoint) -> Result<Vec<ModelFile>, DigestError> {
    let mut files = files(model)?;
    let folder = files.first().and_then(|file| file.path.parent());
    let index = folder.map(|folder| folder.join(INDEX)).filter(|index| {
        let is_sharded = files.iter().all(|file| file.name != SINGLE);
        model.container == Container::Safetensors && is_sharded && index.is_file()
    });
    if let Some(path) = index {
        let bytes = std::fs::metadata(&path).map_err(|source| DigestError::Io { path: path.clone(), source })?.len();
        files.push(ModelFile { name: INDEX.to_owned(), path, bytes });
    }
    Ok(files)
}

/// Bytes of all files of `model`.
///
/// # Errors
/// As [`files`].
pub fn bytes(model: &Checkpoint) -> Result<u64, DigestError> {
    Ok(files(model)?.iter().map(|file| file.bytes).sum())
}

/// How far hashing is: bytes done and bytes in all. Returns false to stop.
pub type OnHashed<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// Digests of models, with a memory.
#[derive(Debug)]
pub struct Digests {
    cache: Cache,
    hashed_bytes: u64,
}

impl Digests {
    /// Remembers digests in the file `cache`, if there may be one. A file that is damaged, or of another version, is
    /// taken for empty; what cannot be written is hashed again another time.
    pub fn new(cache: Option<PathBuf>) -> Digests {
        Digests { cache: Cache::new(cache), hashed_bytes: 0 }
    }

    /// Bytes that were read so far because no digest of them was known.
    pub fn hashed_bytes(&self) -> u64 {
        self.hashed_bytes
    }

    /// The digest of `model`.
    ///
    /// # Errors
    /// [`DigestError`].
    pub fn of(&mut self, model: &Checkpoint, progress: OnHashed<'_>) -> Result<Digest, DigestError> {
        self.of_files(&files(model)?, progress)
    }

    /// A model with this digest, whose files have `bytes` bytes together, in one of `folders`, by name within each. Only
    /// models of that size are hashed, and what cannot be read is passed over.
    ///
    /// # Errors
    /// [`DigestError::Cancelled`]
    pub fn find(
        &mut self,
        digest: Digest,
        bytes: u64,
        folders: &[PathBuf],
        progress: OnHashed<'_>,
    ) -> Result<Option<PathBuf>, DigestError> {
        for path in folders.iter().flat_map(|folder| candidates(folder)) {
            // Most need not be opened for it.
            if is_all_of_it(&path) && std::fs::metadata(&path).is_ok_and(|meta| meta.len() != bytes) {
                continue;
            }
            let Ok(files) = Checkpoint::open(&path).map_err(drop).and_then(|model| files(&model).map_err(drop)) else {
                continue;
            };
            if files.iter().map(|file| file.bytes).sum::<u64>() != bytes {
                continue;
            }
            match self.of_files(&files, progress) {
                Ok(found) if found == digest => return Ok(Some(path)),
                Ok(_) => {}
                Err(DigestError::Cancelled) => return Err(DigestError::Cancelled),
                Err(error) => tracing::debug!(%error, "passed over"),
            }
        }
        Ok(None)
    }

    fn of_files(&mut self, files: &[ModelFile], progress: OnHashed<'_>) -> Result<Digest, DigestError> {
        let digests = self.of_each(files, progress)?;
        Ok(of_list(files.iter().map(|file| file.name.as_str()).zip(digests)))
    }

    /// The digests of some files, one after the other.
    ///
    /// # Errors
    /// [`DigestError`].
    pub fn of_each(&mut self, files: &[ModelFile], progress: OnHashed<'_>) -> Result<Vec<Digest>, DigestError> {
        let total = files.iter().map(|file| file.bytes).sum();
        let mut before = 0;
        let mut digests = Vec::new();
        for file in files {
            digests.push(self.of_file(&file.path, &mut |done| progress(before + done, total))?);
            before += file.bytes;
        }
        Ok(digests)
    }

    /// The digest of a file; `progress` hears how many of its bytes are hashed, and returns false to stop.
    ///
    /// # Errors
    /// [`DigestError`].
    pub fn of_file(&mut self, path: &Path, progress: &mut dyn FnMut(u64) -> bool) -> Result<Digest, DigestError> {
        let io = |source| DigestError::Io { path: path.to_owned(), source };
        // A name may be a link; what it leads to is what is remembered.
        let path = path.canonicalize().map_err(io)?;
        let mut file = File::open(&path).map_err(io)?;
        let state = State::of(&file).map_err(io)?;
        if let Some(digest) = self.cache.get(&path, state) {
            return Ok(digest);
        }
        let mut hasher = blake3::Hasher::new();
        let mut buffer = vec![0; READ_BYTES];
        let mut done = 0;
        loop {
            let read = match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(io(error)),
            };
            hasher.update(&buffer[..read]);
            done += read as u64;
            self.hashed_bytes += read as u64;
            if !progress(done) {
                return Err(DigestError::Cancelled);
            }
        }
        if State::of(&file).map_err(io)? != state || done != state.bytes {
            return Err(DigestError::Changed { path });
        }
        let digest = hasher.finalize().into();
        self.cache.put(&path, state, digest);
        Ok(digest)
    }
}

/// The digest of a model that is made of these files, in this order: their names, and what is in them.
pub fn of_list<'a>(files: impl IntoIterator<Item = (&'a str, Digest)>) -> Digest {
    let (mut list, mut count, mut last) = (blake3::Hasher::new(), 0, None);
    for (name, digest) in files {
        list.update(format!("{digest}  {name}\n").as_bytes());
        (count, last) = (count + 1, Some(digest));
    }
    last.filter(|_| count == 1).unwrap_or_else(|| list.finalize().into())
}

/// GGUF files, of which a part stands for its model if it is the first, and folders with a `config.json`, by name.
fn candidates(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(CANDIDATES_MAX);
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
            let is_later_part = name.contains("-of-") && !name.contains("-00001-of-");
            (name.ends_with(".gguf") && !is_later_part && path.is_file()) || path.join("config.json").is_file()
        })
        .collect();
    paths.sort();
    paths
}

/// Whether a candidate is a model in one file.
fn is_all_of_it(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
    name.ends_with(".gguf") && !name.contains("-of-") && path.is_file()
}

/// What a file's system says of it: as long as that stays, so does its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State {
    bytes: u64,
    /// Nanoseconds since 1970 at the last change; 0 where that is not known.
    modified_ns: u64,
}

impl State {
    fn of(file: &File) -> std::io::Result<State> {
        let meta = file.metadata()?;
        let since = meta.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
        Ok(State { bytes: meta.len(), modified_ns: since.map_or(0, |since| since.as_nanos() as u64) })
    }
}

#[cfg(test)]
mod tests;
