//! Whether a file of the hub is what the hub says it is. The tag of a file is the SHA-256 of its bytes where those lie in
//! large storage, else its id in git: the SHA-1 of `blob`, its length and its bytes.
//!
//! A file that was looked at is remembered by path, size and time of change, so that nothing is read twice for it.

use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use pp_engine::json_file;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde::{Deserialize, Serialize};

/// Bytes that are read at once.
const READ_BYTES: usize = 1 << 20;
/// Most files that are remembered; the oldest are forgotten first.
const ENTRIES_MAX: usize = 4096;
/// Largest memory that is read.
const BYTES_MAX: u64 = 32 << 20;

/// What a tag says of a file's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tag {
    /// SHA-256 of the bytes.
    Sha256,
    /// The id of a blob in git.
    GitBlob,
    /// Nothing that could be checked.
    Opaque,
}

impl Tag {
    /// By how it looks.
    pub fn of(tag: &str) -> Tag {
        let tag = bare(tag);
        match tag.len() {
            64 if is_hex(tag) => Tag::Sha256,
            40 if is_hex(tag) => Tag::GitBlob,
            _ => Tag::Opaque,
        }
    }
}

/// Without the mark of a tag that is the same for other encodings of a file too.
fn bare(tag: &str) -> &str {
    tag.strip_prefix("W/").unwrap_or(tag)
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The tag that a file of so many bytes should have; `read` hears how many were read.
fn tag_of(file: &mut impl Read, kind: Tag, bytes: u64, read: &mut dyn FnMut(u64)) -> std::io::Result<String> {
    let mut context = Context::new(if kind == Tag::Sha256 { &SHA256 } else { &SHA1_FOR_LEGACY_USE_ONLY });
    if kind == Tag::GitBlob {
        context.update(format!("blob {bytes}\0").as_bytes());
    }
    let (mut buffer, mut done) = (vec![0; READ_BYTES], 0);
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(some) => {
                context.update(&buffer[..some]);
                done += some as u64;
                read(done);
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    path: PathBuf,
    bytes: u64,
    modified_ns: u64,
    tag: String,
}

/// Nanoseconds since 1970 at the last change; 0 where that is not known.
fn modified_ns(meta: &Metadata) -> u64 {
    let since = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map_or(0, |since| since.as_nanos() as u64)
}

/// Files that are what they should be.
pub struct Verified {
    memory: Option<PathBuf>,
}

impl Verified {
    /// Remembered in the file `memory`, if that can be.
    pub fn new(memory: Option<PathBuf>) -> Verified {
        Verified { memory }
    }

    fn known(&self) -> Vec<Entry> {
        self.memory.as_deref().and_then(|memory| json_file::read(memory, BYTES_MAX)).unwrap_or_default()
    }

    /// Whether the file at `path` has `bytes` bytes, those that the tag says, as far as the tag says anything. One that is
    /// not there is not. `read` hears how many bytes were read.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn is(&self, path: &Path, bytes: u64, tag: &str, read: &mut dyn FnMut(u64)) -> std::io::Result<bool> {
        let (path, mut file) = match path.canonicalize().and_then(|path| Ok((path.clone(), File::open(path)?))) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            opened => opened?,
        };
        let meta = file.metadata()?;
        let kind = Tag::of(tag);
        if meta.len() != bytes || kind == Tag::Opaque {
            return Ok(meta.len() == bytes);
        }
        let entry = Entry { path, bytes, modified_ns: modified_ns(&meta), tag: tag.to_owned() };
        if self.known().contains(&entry) {
            return Ok(true);
        }
        let is_it = tag_of(&mut file, kind, bytes, read)? == bare(tag);
        if is_it {
            self.remember(entry);
        }
        Ok(is_it)
    }

    /// The file at `path` is known to be what the tag says.
    pub fn trust(&self, path: &Path, tag: &str) {
        let found = path.canonicalize().and_then(|path| Ok((path.metadata()?, path)));
        if let (Ok((meta, path)), false) = (found, Tag::of(tag) == Tag::Opaque) {
            self.remember(Entry { path, bytes: meta.len(), modified_ns: modified_ns(&meta), tag: tag.to_owned() });
        }
    }

    fn remember(&self, entry: Entry) {
        let Some(memory) = &self.memory else { return };
        let mut known = self.known();
        known.retain(|other| other.path != entry.path);
        known.push(entry);
        known.drain(..known.len().saturating_sub(ENTRIES_MAX));
        if let Err(error) = json_file::write(memory, &known) {
            tracing::debug!(%error, "what was verified was not written down");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, and what `git hash-object` prints of them.
    const WORDS: (&[u8], &str) = (b"what is up, doc?", "bd9dbf5aae1a3862dd1526723246b20206e5fc37");

    #[test]
    fn tags_are_those_of_git_and_of_sha256sum() {
        let tag = |bytes: &[u8], kind| tag_of(&mut &*bytes, kind, bytes.len() as u64, &mut |_| {}).unwrap();
        assert_eq!(tag(WORDS.0, Tag::GitBlob), WORDS.1);
        assert_eq!(tag(b"", Tag::GitBlob), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(tag(b"", Tag::Sha256), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        assert_eq!(tag(b"abc", Tag::Sha256), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        for (text, kind) in [
            ("W/abc", Tag::Opaque),
            ("W/e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", Tag::GitBlob),
            ("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", Tag::GitBlob),
            ("E69DE29BB2D1D6434B8B29AE775AD8C2E48C5391", Tag::Opaque),
        ] {
            assert_eq!(Tag::of(text), kind, "{text}");
        }
    }

    #[test]
    fn a_file_is_read_once_and_again_when_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let (file, memory) = (dir.path().join("file"), dir.path().join("memory.json"));
        let look = || {
            let (verified, mut read) = (Verified::new(Some(memory.clone())), 0);
            let is_it = verified.is(&file, WORDS.0.len() as u64, WORDS.1, &mut |bytes| read = bytes).unwrap();
            (is_it, read)
        };
        assert_eq!(look(), (false, 0), "it is not there");
        std::fs::write(&file, WORDS.0).unwrap();
        assert_eq!(look(), (true, 16));
        assert_eq!(look(), (true, 0));
        let weak = format!("W/{}", WORDS.1);
        assert!(Verified::new(None).is(&file, WORDS.0.len() as u64, &weak, &mut |_| {}).unwrap());
        let mut other = WORDS.0.to_vec();
        other[3] ^= 1;
        std::fs::write(&file, &other).unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(2);
        File::options().write(true).open(&file).unwrap().set_modified(later).unwrap();
        assert_eq!(look(), (false, 16));
        assert_eq!(look(), (false, 16), "what is wrong is not remembered");
    }
}
