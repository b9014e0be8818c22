//! A journal's file: a header and commits, one behind the other.
//!
//! ```text
//! header   "pp-run journal\n", version u32, 16 bytes that no other file has, checksum 8 bytes
//! commit   mark 4 bytes, length of the records u32, checksum 8 bytes, records
//! ```
//!
//! Numbers are little-endian. A checksum is the beginning of the BLAKE3 of the file's own bytes, the place of the commit
//! and its records. So no commit can be taken for one of another file or place, nor can what a client sends.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::record::{self, Record};
use super::{Contents, JournalError};

const MAGIC: &[u8; 15] = b"pp-run journal\n";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = MAGIC.len() + 4 + 16 + 8;
/// No text has these bytes: 0xf7 is none of UTF-8.
const MARK: [u8; 4] = [0xf7, b'p', b'p', 0xf7];
/// Of a commit, before its records.
const COMMIT_BYTES: usize = 16;
/// Records of a commit, where a file is written anew: about so many bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// How often a file that is written anew meanwhile is looked for again.
const OPENS_MAX: usize = 10;

type Id = [u8; 16];
/// Its bytes, and its records.
type Commit = (u64, Vec<Record>);

fn checksum(id: &Id, offset: u64, bytes: &[u8]) -> [u8; 8] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(id).update(&offset.to_le_bytes()).update(bytes);
    let mut sum = [0; 8];
    sum.copy_from_slice(&hasher.finalize().as_bytes()[..8]);
    sum
}

fn header(id: &Id) -> Vec<u8> {
    let mut header = [&MAGIC[..], &VERSION.to_le_bytes(), id].concat();
    let sum = checksum(id, 0, &header);
    header.extend(sum);
    header
}

/// The commit that `records` make at `offset`.
fn commit(id: &Id, offset: u64, records: &[u8]) -> Vec<u8> {
    let length = u32::try_from(records.len()).expect("a commit is bounded by the file");
    [&MARK[..], &length.to_le_bytes(), &checksum(id, offset, records), records].concat()
}

/// A file that is appended to.
#[derive(Debug)]
pub(super) struct JournalFile {
    path: PathBuf,
    file: File,
    id: Id,
    /// Up to the end of the last commit that is on the disk.
    bytes: u64,
}

impl JournalFile {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends a commit, and waits until it is on the disk.
    ///
    /// # Errors
    /// Those of the system. What of it is in the file is cut off by the next one, or by [`JournalFile::renew`].
    pub(super) fn append(&mut self, records: &[u8]) -> io::Result<()> {
        let commit = commit(&self.id, self.bytes, records);
        self.file.seek(SeekFrom::Start(self.bytes))?;
        self.file.write_all(&commit)?;
        self.file.sync_data()?;
        self.bytes += commit.len() as u64;
        Ok(())
    }

    /// Writes the file anew, without what is forgotten: whole, or not at all.
    ///
    /// # Errors
    /// [`JournalError`]; the file is as it was.
    pub(super) fn renew(&mut self) -> Result<(), JournalError> {
        self.file.set_len(self.bytes).map_err(|source| unwritten(&self.path, source))?;
        let contents = contents(&self.path, &self.file)?;
        *self = JournalFile::anew(&self.path, &contents)?;
        Ok(())
    }

    /// A file with `contents` in the place of the one at `path`.
    fn anew(path: &Path, contents: &Contents) -> Result<JournalFile, JournalError> {
        let mut unfinished = path.as_os_str().to_owned();
        unfinished.push(format!(".{}.tmp", std::process::id()));
        let unfinished = PathBuf::from(unfinished);
        let written = JournalFile::write(path, &unfinished, contents);
        if written.is_err() {
            let _ = std::fs::remove_file(&unfinished);
        }
        written.map_err(|source| unwritten(path, source))
    }

    fn write(path: &Path, unfinished: &Path, contents: &Contents) -> io::Result<JournalFile> {
        // Left behind by a program of the same number.
        let _ = std::fs::remove_file(unfinished);
        // It says what people asked.
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(unfinished)?;
        // Nobody else knows it yet.
        file.try_lock().map_err(io::Error::other)?;
        let mut id = [0; 16];
        rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
        let header = header(&id);
        let mut new = JournalFile { path: path.to_owned(), file, id, bytes: header.len() as u64 };
        new.file.write_all(&header)?;
        let mut records = Vec::new();
        for (number, found) in &contents.requests {
            for record in record::of(*number, found) {
                record.write(&mut records);
                if records.len() >= CHUNK_BYTES {
                    new.write_chunk(&mut records)?;
                }
            }
        }
        new.write_chunk(&mut records)?;
        new.file.sync_all()?;
        std::fs::rename(unfinished, path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()?;
        Ok(new)
    }

    fn write_chunk(&mut self, records: &mut Vec<u8>) -> io::Result<()> {
        if records.is_empty() {
            return Ok(());
        }
        let commit = commit(&self.id, self.bytes, records);
        self.file.write_all(&commit)?;
        self.bytes += commit.len() as u64;
        records.clear();
        Ok(())
    }
}

fn unwritten(path: &Path, source: io::Error) -> JournalError {
    JournalError::Io { what: "write", path: path.to_owned(), source }
}

fn unread(path: &Path, source: io::Error) -> JournalError {
    JournalError::Io { what: "read", path: path.to_owned(), source }
}

/// The journal at `path`, written anew, and what it holds.
pub(super) fn open(path: &Path) -> Result<(JournalFile, Contents), JournalError> {
    // Held until the new one, which has a lock of its own, is in its place.
    let old = locked(path)?;
    // What a link leads to is written anew, not the link.
    let path = std::fs::canonicalize(path).map_err(|source| unread(path, source))?;
    let contents = contents(&path, &old)?;
    let file = JournalFile::anew(&path, &contents)?;
    Ok((file, contents))
}

/// The file at `path`, which nobody else has.
fn locked(path: &Path) -> Result<File, JournalError> {
    let in_use = || JournalError::InUse { path: path.to_owned() };
    for _ in 0..OPENS_MAX {
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path);
        let file = open.map_err(|source| JournalError::Io { what: "open", path: path.to_owned(), source })?;
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return Err(JournalError::NoJournal { path: path.to_owned() });
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(in_use()),
            Err(TryLockError::Error(source)) => {
                return Err(JournalError::Io { what: "lock", path: path.to_owned(), source });
            }
        }
        // Who had it may have written it anew in between: then this is the old one.
        let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let (here, there) = (file.metadata(), std::fs::metadata(path));
        if let (Ok(here), Ok(there)) = (here, there)
            && place(here) == place(there)
        {
            return Ok(file);
        }
    }
    Err(in_use())
}

/// What the journal at `path` holds; it is left as it is.
///
/// # Errors
/// [`JournalError`]
pub fn read(path: &Path) -> Result<Contents, JournalError> {
    contents(path, &File::open(path).map_err(|source| unread(path, source))?)
}

/// What a file holds, up to the first commit that is not whole.
fn contents(path: &Path, file: &File) -> Result<Contents, JournalError> {
    let length = file.metadata().map_err(|source| unread(path, source))?.len();
    let mut reader = BufReader::new(file);
    reader.seek(SeekFrom::Start(0)).map_err(|source| unread(path, source))?;
    let mut contents = Contents::default();
    if length == 0 {
        return Ok(contents);
    }
    let id = read_header(path, &mut reader)?;
    contents.bytes = HEADER_BYTES as u64;
    while contents.bytes < length {
        let (at, left) = (contents.bytes, length - contents.bytes);
        let (bytes, records) = match next(&mut reader, &id, at, left).map_err(|source| unread(path, source))? {
            Ok(commit) => commit,
            Err(what) => {
                let later = later(file, &id, at, length).map_err(|source| unread(path, source))?;
                if let Some(next) = later {
                    return Err(JournalError::Damaged { path: path.to_owned(), offset: at, next, what });
                }
                contents.torn_bytes = left;
                break;
            }
        };
        if !records.into_iter().all(|record| record.apply(&mut contents.requests)) {
            return Err(JournalError::Contradiction { path: path.to_owned(), offset: at });
        }
        contents.bytes += bytes;
    }
    Ok(contents)
}

fn read_header(path: &Path, reader: &mut impl Read) -> Result<Id, JournalError> {
    let no_journal = || JournalError::NoJournal { path: path.to_owned() };
    let mut bytes = [0; HEADER_BYTES];
    match reader.read_exact(&mut bytes) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(no_journal()),
        read => read.map_err(|source| unread(path, source))?,
    }
    let (magic, rest) = bytes.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(no_journal());
    }
    let found = u32::from_le_bytes(rest[..4].try_into().expect("four bytes"));
    if found != VERSION {
        return Err(JournalError::Version { path: path.to_owned(), found, known: VERSION });
    }
    let id: Id = rest[4..20].try_into().expect("sixteen bytes");
    if bytes[..] != header(&id) { Err(no_journal()) } else { Ok(id) }
}

/// The bytes and the records of the commit at `at`, behind which the file has `left` bytes, itself among them; or what is
/// wrong with it.
fn next(reader: &mut impl Read, id: &Id, at: u64, left: u64) -> io::Result<Result<Commit, &'static str>> {
    let mut head = [0; COMMIT_BYTES];
    if left < COMMIT_BYTES as u64 {
        return Ok(Err("it is cut off"));
    }
    reader.read_exact(&mut head)?;
    if head[..4] != MARK {
        return Ok(Err("no commit begins there"));
    }
    let length = u64::from(u32::from_le_bytes(head[4..8].try_into().expect("four bytes")));
    if length > left - COMMIT_BYTES as u64 {
        return Ok(Err("it is cut off"));
    }
    let mut records = vec![0; length as usize];
    reader.read_exact(&mut records)?;
    if head[8..] != checksum(id, at, &records) {
        return Ok(Err("its checksum is another one"));
    }
    let records = Record::all(&records).ok_or("its records cannot be read");
    Ok(records.map(|records| (COMMIT_BYTES as u64 + length, records)))
}

/// Where a whole commit begins behind `at`, if any does.
fn later(mut file: &File, id: &Id, at: u64, length: u64) -> io::Result<Option<u64>> {
    let mut reader = BufReader::new(file);
    reader.seek(SeekFrom::Start(at + 1))?;
    let mut latest = [0; 4];
    let mut marks = Vec::new();
    for (end, byte) in (at + 2..).zip(reader.bytes()) {
        latest.rotate_left(1);
        latest[3] = byte?;
        if latest == MARK && end >= at + 5 {
            marks.push(end - 4);
        }
    }
    for mark in marks {
        file.seek(SeekFrom::Start(mark))?;
        if next(&mut file, id, mark, length - mark)?.is_ok() {
            return Ok(Some(mark));
        }
    }
    Ok(None)
}
