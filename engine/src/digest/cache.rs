//! Digests that were worked out before, in a file of JSON that any number of programs may share.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Digest, State};
use crate::json_file;

/// Version of the file's layout.
const VERSION: u32 = 1;
/// Most files that are remembered; the oldest are forgotten first.
pub(super) const ENTRIES_MAX: usize = 4096;
/// Largest cache that is read: all entries with the longest paths.
const BYTES_MAX: u64 = 32 << 20;

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    version: u32,
    /// Oldest first.
    files: Vec<Entry>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    path: String,
    bytes: u64,
    modified_ns: u64,
    digest: Digest,
}

/// Digests by path, size and time.
#[derive(Debug)]
pub(super) struct Cache {
    file: Option<PathBuf>,
    known: Vec<Entry>,
}

impl Cache {
    pub(super) fn new(file: Option<PathBuf>) -> Cache {
        let known = file.as_deref().map(read).unwrap_or_default();
        Cache { file, known }
    }

    pub(super) fn get(&self, path: &Path, state: State) -> Option<Digest> {
        let path = path.to_str()?;
        let is_it =
            |entry: &&Entry| entry.path == path && (entry.bytes, entry.modified_ns) == (state.bytes, state.modified_ns);
        self.known.iter().rev().find(is_it).map(|entry| entry.digest)
    }

    /// Remembers, and writes it down if it can.
    pub(super) fn put(&mut self, path: &Path, state: State, digest: Digest) {
        let State { bytes, modified_ns } = state;
        let Some(path) = path.to_str().filter(|_| modified_ns > 0) else { return };
        // Others may have written meanwhile.
        if let Some(file) = &self.file {
            let others = read(file);
            self.known.retain(|entry| others.iter().all(|other| other.path != entry.path));
            self.known.extend(others);
        }
        self.known.retain(|entry| entry.path != path);
        self.known.push(Entry { path: path.to_owned(), bytes, modified_ns, digest });
        self.known.drain(..self.known.len().saturating_sub(ENTRIES_MAX));
        if let Some(file) = &self.file
            && let Err(error) = self.write(file)
        {
            tracing::debug!(%error, file = %file.display(), "digests were not written down");
        }
    }

    fn write(&self, file: &Path) -> std::io::Result<()> {
        json_file::write(file, &Content { version: VERSION, files: self.known.clone() })
    }
}

/// What a cache holds; nothing where it is not there, not whole, or not of this version.
fn read(file: &Path) -> Vec<Entry> {
    let content: Content = json_file::read(file, BYTES_MAX).unwrap_or_default();
    if content.version == VERSION { content.files } else { Vec::new() }
}
