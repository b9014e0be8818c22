//! Tensors that came from other hosts: a folder with a file for each, named by the BLAKE3 digest of its bytes.
//!
//! A file is written under another name (`.part`), verified as a whole, brought to the disk and renamed; what is called
//! by its digest is whole. It is hashed again whenever a load begins with it, and one that is damaged is deleted. A
//! `.part` stays when a transfer breaks off, and is continued. Any number of programs may share the folder: who writes a
//! `.part` has it locked. What was used longest ago, by time of change, is deleted first when there is no room.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use memmap2::Mmap;
use thiserror::Error;

use crate::checkpoint::supplied::Bound;
use crate::digest::Digest;

/// Ending of a file that is not whole.
const PART: &str = ".part";
/// Bytes that are hashed at once.
const PIECE_BYTES: usize = 1 << 20;

/// Why the cache is of no use.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum CacheError {
    #[error("the tensor cache at {}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error("{needed} bytes of tensors are needed, and the tensor cache has room for {room}")]
    Room { needed: u64, room: u64, bound: Bound },
}

/// The folder, and how much it may hold.
#[derive(Clone, Debug)]
pub struct TensorCache {
    folder: PathBuf,
    cap_bytes: u64,
}

/// A file of the folder.
struct Found {
    path: PathBuf,
    digest: Option<Digest>,
    is_part: bool,
    bytes: u64,
    used: SystemTime,
}

impl TensorCache {
    /// The cache in `folder`, which holds at most `cap_bytes`. Nothing is made before it is needed.
    pub fn new(folder: PathBuf, cap_bytes: u64) -> TensorCache {
        TensorCache { folder, cap_bytes }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes that it may hold.
    pub fn cap_bytes(&self) -> u64 {
        self.cap_bytes
    }

    /// What the file with that digest is called, whether it is there or not.
    pub fn path(&self, digest: &Digest) -> PathBuf {
        self.folder.join(digest.to_string())
    }

    /// Whether there is a file for a tensor of so many bytes; what is in it is not looked at.
    pub fn has(&self, digest: &Digest, bytes: u64) -> bool {
        std::fs::metadata(self.path(digest)).is_ok_and(|meta| meta.is_file() && meta.len() == bytes)
    }

    /// A tensor, if it is there, with bytes that are what they should be: all are hashed. A file that is damaged is
    /// deleted.
    pub fn verified(&self, digest: &Digest, bytes: u64) -> Option<Mmap> {
        let path = self.path(digest);
        if let Some(map) = self.unverified(digest, bytes)
            && Digest::from(blake3::hash(&map)) == *digest
        {
            return Some(map);
        }
        if path.exists() {
            tracing::warn!(file = %path.display(), "a file of the tensor cache is damaged, and deleted");
            let _ = std::fs::remove_file(&path);
        }
        None
    }

    /// A tensor, if it is there: of a file that this process has verified, or for whoever verifies what it gets.
    pub fn unverified(&self, digest: &Digest, bytes: u64) -> Option<Mmap> {
        let file = File::open(self.path(digest)).ok()?;
        let meta = file.metadata().ok()?;
        if !meta.is_file() || meta.len() != bytes || bytes == 0 {
            return None;
        }
        // Without the right to do so it is only forgotten sooner.
        let _ = file.set_modified(SystemTime::now());
        // SAFETY: the map is read only and outlives every slice of it. Files that are called by their digest are
        // never written nor cut, only deleted, which leaves a map as it is; somebody else who writes one changes
        // weights, which are only ever read as plain bytes.
        unsafe { Mmap::map(&file) }.ok()
    }

    /// Makes room for the tensors `wanted` (digest and bytes) that are not there: deletes what was used longest ago and
    /// is none of them.
    ///
    /// # Errors
    /// [`CacheError::Room`] where that does not help, [`CacheError::Io`].
    pub fn make_room(&self, wanted: &HashMap<Digest, u64>) -> Result<(), CacheError> {
        std::fs::create_dir_all(&self.folder).map_err(|source| self.io(source))?;
        let needed: u64 = wanted.values().sum();
        if needed > self.cap_bytes {
            return Err(CacheError::Room { needed, room: self.cap_bytes, bound: Bound::Cap });
        }
        let (kept, mut others): (Vec<Found>, Vec<Found>) = self
            .files()
            .map_err(|source| self.io(source))?
            .into_iter()
            .partition(|found| found.digest.is_some_and(|digest| wanted.contains_key(&digest)));
        let there: u64 = kept.iter().map(|found| found.bytes).sum();
        let missing = needed.saturating_sub(there);
        let mut free = self.free_bytes().map_err(|source| self.io(source))?;
        let mut rest: u64 = others.iter().map(|found| found.bytes).sum();
        others.sort_by_key(|found| found.used);
        for found in others {
            if needed.max(there) + rest <= self.cap_bytes && missing <= free {
                break;
            }
            if found.delete() {
                rest -= found.bytes;
                free += found.bytes;
            }
        }
        if missing > free {
            return Err(CacheError::Room { needed, room: there + free, bound: Bound::Disk });
        }
        Ok(())
    }

    /// Bytes of what has that digest that are there, whole or as the beginning of it.
    pub fn there_bytes(&self, digest: &Digest) -> u64 {
        let size = |path: PathBuf| std::fs::metadata(path).map(|meta| meta.len()).ok();
        size(self.path(digest)).or_else(|| size(self.folder.join(format!("{digest}{PART}")))).unwrap_or(0)
    }

    /// Bytes that the disk has left for this user.
    ///
    /// # Errors
    /// The system's.
    pub fn free_bytes(&self) -> std::io::Result<u64> {
        let found = rustix::fs::statvfs(&self.folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    fn io(&self, source: std::io::Error) -> CacheError {
        CacheError::Io { path: self.folder.clone(), source }
    }

    fn files(&self) -> std::io::Result<Vec<Found>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let Ok(meta) = std::fs::symlink_metadata(&path) else { continue };
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let (stem, is_part) = match name.strip_suffix(PART) {
                // Behind a digest stands who writes it, where that is not the first.
                Some(stem) => (stem.split('.').next().unwrap_or_default(), true),
                None => (&*name, false),
            };
            // What else lies there is nobody's business.
            let Ok(digest) = stem.parse::<Digest>() else { continue };
            if meta.is_file() {
                let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let is_ours = !is_part || name.len() == digest.to_string().len() + PART.len();
                let digest = is_ours.then_some(digest);
                files.push(Found { digest, is_part, bytes: meta.len(), used, path: path.clone() });
            }
        }
        Ok(files)
    }

    /// Begins to write a tensor of so many bytes, or goes on where somebody had to stop.
    ///
    /// # Errors
    /// [`CacheError::Io`].
    pub fn part(&self, digest: &Digest, bytes: u64) -> Result<Part, CacheError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(&self.folder).map_err(|source| self.io(source))?;
        let shared = self.folder.join(format!("{digest}{PART}"));
        let (file, path) = match locked(&shared).map_err(|source| self.io(source))? {
            Some(file) => (file, shared),
            None => {
                let number = NUMBER.fetch_add(1, Ordering::Relaxed);
                let own = self.folder.join(format!("{digest}.{}-{number}{PART}", std::process::id()));
                let file = locked(&own).map_err(|source| self.io(source))?;
                (file.ok_or_else(|| self.io(ErrorKind::WouldBlock.into()))?, own)
            }
        };
        let is_own = path != self.folder.join(format!("{digest}{PART}"));
        let whole = self.path(digest);
        let mut part = Part {
            file,
            path,
            whole,
            is_own,
            digest: *digest,
            bytes,
            at: 0,
            resumed: 0,
            hasher: blake3::Hasher::new(),
        };
        part.resume().map_err(|source| self.io(source))?;
        Ok(part)
    }
}

/// Opens a `.part` and locks it; nothing where somebody else has it.
fn locked(path: &Path) -> std::io::Result<Option<File>> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Who had it may have given it its name, or deleted it, before it was locked here.
        let inode = file.metadata()?.ino();
        if std::fs::metadata(path).is_ok_and(|meta| meta.ino() == inode) {
            return Ok(Some(file));
        }
    }
}

impl Found {
    fn delete(&self) -> bool {
        // Of what somebody writes hands are kept off.
        if self.is_part && !matches!(locked(&self.path), Ok(Some(_))) {
            return false;
        }
        std::fs::remove_file(&self.path).is_ok()
    }
}

/// A tensor that is being written, from its beginning on.
#[derive(Debug)]
pub struct Part {
    file: File,
    path: PathBuf,
    whole: PathBuf,
    /// Another program writes the same tensor: nobody goes on with this one.
    is_own: bool,
    digest: Digest,
    bytes: u64,
    at: u64,
    /// Bytes that were there when it was opened.
    resumed: u64,
    hasher: blake3::Hasher,
}

impl Part {
    /// Bytes that are there.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// Bytes that there will be.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether some of it was there when it was opened.
    pub fn is_resumed(&self) -> bool {
        self.resumed > 0
    }

    fn resume(&mut self) -> std::io::Result<()> {
        if self.file.metadata()?.len() > self.bytes {
            self.file.set_len(0)?;
        }
        let mut buffer = vec![0; PIECE_BYTES];
        loop {
            match self.file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => {
                    self.hasher.update(&buffer[..read]);
                    self.at += read as u64;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.resumed = self.at;
        self.file.seek(SeekFrom::Start(self.at)).map(drop)
    }

    /// Appends what follows.
    ///
    /// # Errors
    /// The system's, [`ErrorKind::StorageFull`] among them; [`ErrorKind::InvalidInput`] when it is too much.
    pub fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        if self.at + bytes.len() as u64 > self.bytes {
            return Err(ErrorKind::InvalidInput.into());
        }
        if let Err(error) = self.file.write_all(bytes) {
            // Nobody knows how much was written.
            let _ = self.file.set_len(self.at);
            return Err(error);
        }
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// All bytes are there: gives the file its name if they are what they should be, else deletes it and says no.
    ///
    /// # Errors
    /// The system's.
    pub fn finish(self) -> std::io::Result<bool> {
        let found = Digest::from(self.hasher.finalize());
        if self.at != self.bytes || found != self.digest {
            std::fs::remove_file(&self.path)?;
            return Ok(false);
        }
        self.file.sync_all()?;
        std::fs::rename(&self.path, &self.whole)?;
        Ok(true)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if (self.at == 0 && self.bytes > 0) || self.is_own {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;
