//! Models whole: a worker gives the files of one that it has to the head that asks for it by name.
//!
//! The worker says what the model is made of ([`Inventory`]), each file with its digest, and answers questions for pieces
//! of just these files, by their places in it, as tensors are asked for ([`super::weights`]). The head appends what comes
//! to files that are named by their digests ([`TensorCache`]): verified as a whole, resumable, each with its name only
//! when it is what the worker said it is.

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_transport::quic::{CONTROL, LinkPort};
use pp_transport::{Frame, LinkId, Port, PortError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::control::{self, ToHead};
use super::weights::{self, Ask, CREDITS, PIECE_BYTES_MAX, Reply, decode_reply, encode_ask, encode_reply};
use super::worker::Server;
use crate::checkpoint::hf::INDEX;
use crate::digest::{self, Digest};
use crate::tensor_cache::{CacheError, Part, TensorCache};

/// Files of a model.
pub const FILES_MAX: usize = 512;
/// Bytes of a name.
pub const NAME_BYTES_MAX: usize = 512;
/// How long a worker may take to read a model that nobody has asked for before.
pub(super) const PATIENCE: Duration = Duration::from_secs(3600);
/// How long it may take to answer a question.
const ANSWER: Duration = Duration::from_secs(30);
/// How often somebody who waits looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);
/// The link's number in the session that the head names; measuring has the one above.
const LINK: u32 = CONTROL - 2;

pub(super) fn id(session: u64) -> LinkId {
    LinkId { session, link: LINK }
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Item {
    /// Its name, without folders.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Of its contents.
    pub digest: Digest,
}

/// What a model is made of, as a worker tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// Of the model.
    pub model: Digest,
    /// The commit of the hub's that it is, where it lies in the hub's cache.
    pub commit: Option<String>,
    /// The folder that its files are in, seen from the models folder or the commit's; often empty.
    pub folder: String,
    /// Its files, by name; behind them what must be copied with it ([`digest::copied`]).
    pub files: Vec<Item>,
}

impl Inventory {
    /// Of a model that is made of these files.
    pub fn new(commit: Option<String>, folder: String, files: Vec<Item>) -> Inventory {
        let mut found = Inventory { model: Digest([0; 32]), commit, folder, files };
        found.model = found.digest();
        found
    }

    fn digest(&self) -> Digest {
        digest::of_list(self.counted().map(|file| (file.name.as_str(), file.digest)))
    }

    /// The files that say what the model is.
    pub fn counted(&self) -> impl Iterator<Item = &Item> {
        self.files.iter().filter(|file| file.name != INDEX)
    }

    /// Bytes of all that is to come.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.bytes))
    }

    /// Whether it can be a model's: names that stay in their folder, and the digest of that list.
    pub(crate) fn check(&self) -> Result<(), String> {
        let (count, files) = (self.files.len(), || self.files.iter());
        if count == 0 || count > FILES_MAX {
            return Err(format!("a model of {count} files; 1 to {FILES_MAX} are taken"));
        }
        let folders = self.folder.split('/').filter(|_| !self.folder.is_empty());
        let commit = self.commit.as_deref();
        let mut names = folders.chain(commit).chain(files().map(|file| file.name.as_str()));
        if let Some(name) = names.find(|name| !is_plain(name)) {
            return Err(format!("{:?} is no name of a file", name.chars().take(80).collect::<String>()));
        }
        if files().map(|file| &file.name).collect::<HashSet<_>>().len() < count {
            return Err("two of its files have the same name".to_owned());
        }
        if self.digest() != self.model {
            return Err("its files do not make the model that they should".to_owned());
        }
        Ok(())
    }
}

/// A name that stays in the folder that it is put in, and is not hidden there.
fn is_plain(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// A model that a worker would give.
pub struct Offered {
    /// What it is made of.
    pub inventory: Inventory,
    /// The link on which its files come ([`fetch`]).
    pub port: Box<dyn Port>,
}

/// A model that a host has.
#[derive(Clone, Debug)]
pub struct Whole {
    /// What it is made of.
    pub inventory: Inventory,
    /// Where its files are, in the same order.
    pub paths: Vec<PathBuf>,
}

/// The worker's end: looks for a model and answers for its files until this is dropped.
pub(super) struct Giving {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Giving {
    /// For the head at the other end of `control`, which hears of it there.
    pub(super) fn start(
        server: &Arc<Server>,
        control: &LinkPort,
        session: u64,
        name: String,
    ) -> std::io::Result<Giving> {
        let (server, control, stop) = (server.clone(), control.clone(), Arc::new(AtomicBool::new(false)));
        let stopped = stop.clone();
        let give = move || {
            let mut port = server.node().expect(id(session), control.peer().clone(), weights::limits());
            let found = look(&server, &name, &stopped);
            let (answer, files) = match found {
                Ok(Some((inventory, files))) => (Ok(Some(Box::new(inventory))), files),
                Ok(None) => (Ok(None), Vec::new()),
                Err(reason) => (Err(reason), Vec::new()),
            };
            // A head that is gone is noticed by the listener.
            let _ = control.send_frame(control::encode(&ToHead::Whole(answer)));
            if !files.is_empty() {
                tracing::info!(name, to = %control.peer().name, "gives a model whole");
                weights::answer_all(&mut port, &stopped, &mut |ask| piece(&files, ask));
            }
        };
        let thread = std::thread::Builder::new().name("give-model".to_owned()).spawn(give)?;
        Ok(Giving { stop, thread: Some(thread) })
    }
}

impl Drop for Giving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A file that is given, and its size.
type Given = (File, u64);

fn look(server: &Server, name: &str, stop: &AtomicBool) -> Result<Option<(Inventory, Vec<Given>)>, String> {
    if name.len() > NAME_BYTES_MAX {
        return Err(format!("a name of {} bytes; at most {NAME_BYTES_MAX} are taken", name.len()));
    }
    let Some(Whole { inventory, paths }) = server.host.whole(name, stop)? else { return Ok(None) };
    inventory.check()?;
    let open = |path: &PathBuf| File::open(path).map_err(|error| format!("cannot read {}: {error}", path.display()));
    let files = paths.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let sizes = inventory.files.iter().map(|file| file.bytes).collect::<Vec<_>>();
    Ok(Some((inventory, files.into_iter().zip(sizes).collect())))
}

fn piece(files: &[Given], ask: Ask) -> Frame {
    let lacks = || encode_reply(&Reply::Lacks(ask.tensor), &[]);
    let Some((file, bytes)) = files.get(ask.tensor as usize) else { return lacks() };
    if !ask.is_within(*bytes) {
        return lacks();
    }
    let mut piece = vec![0; ask.bytes as usize];
    match file.read_exact_at(&mut piece, ask.offset) {
        Ok(()) => encode_reply(&Reply::Piece(ask), &piece),
        Err(error) => {
            tracing::warn!(%error, "a model's file is not what it was");
            lacks()
        }
    }
}

/// Why a model does not come. What has come is kept, and gone on with another time.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum FetchError {
    #[error("cancelled")]
    Cancelled,
    #[error("{file} does not come: {reason}")]
    Source { file: String, reason: String },
    #[error("{file} came and is not what was announced: it was changed meanwhile, or is damaged")]
    Damaged { file: String },
    #[error("no room for {file}: {needed} bytes more are needed for the model, and the disk of {} has {free}", folder.display())]
    NoRoom { file: String, folder: PathBuf, needed: u64, free: u64 },
    #[error("cannot write {file} to {}: {source}", folder.display())]
    Io { file: String, folder: PathBuf, source: std::io::Error },
}

/// Gets the files of a model into `folder`, called by their digests, but for those that are `there` already, and returns how
/// many bytes came. `go_on` hears how many are at hand, and returns false to stop.
///
/// # Errors
/// [`FetchError`].
pub fn fetch(
    inventory: &Inventory,
    port: &mut dyn Port,
    folder: &TensorCache,
    there: &HashSet<Digest>,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<u64, FetchError> {
    let mut taking = Taking { inventory, port, folder, there, go_on, before: 0, received: 0 };
    taking.look_for_room()?;
    for place in 0..inventory.files.len() {
        taking.file(place)?;
    }
    Ok(taking.received)
}

/// A fetch that is under way.
struct Taking<'a> {
    inventory: &'a Inventory,
    port: &'a mut dyn Port,
    folder: &'a TensorCache,
    there: &'a HashSet<Digest>,
    go_on: &'a mut dyn FnMut(u64) -> bool,
    /// Bytes of files that are done.
    before: u64,
    /// Bytes that came.
    received: u64,
}

impl Taking<'_> {
    /// What does not fit is better known before anything comes.
    fn look_for_room(&mut self) -> Result<(), FetchError> {
        let missing = |file: &&Item| self.missing(file) > 0;
        let Some(first) = self.inventory.files.iter().find(missing) else { return Ok(()) };
        let made = std::fs::create_dir_all(self.folder.folder());
        let free = made.and_then(|()| self.folder.free_bytes()).map_err(|error| self.io(&first.name, error))?;
        if self.needed() > free { Err(self.no_room(&first.name)) } else { Ok(()) }
    }

    /// Bytes that are still to come.
    fn needed(&self) -> u64 {
        let mut seen = HashSet::new();
        let files = self.inventory.files.iter().filter(|file| seen.insert(file.digest));
        files.map(|file| self.missing(file)).sum()
    }

    fn missing(&self, file: &Item) -> u64 {
        let is_there = self.there.contains(&file.digest);
        if is_there { 0 } else { file.bytes.saturating_sub(self.folder.there_bytes(&file.digest)) }
    }

    fn no_room(&self, file: &str) -> FetchError {
        let (file, folder) = (file.to_owned(), self.folder.folder().to_owned());
        FetchError::NoRoom { file, folder, needed: self.needed(), free: self.folder.free_bytes().unwrap_or(0) }
    }

    fn io(&self, file: &str, source: std::io::Error) -> FetchError {
        if source.kind() == std::io::ErrorKind::StorageFull {
            return self.no_room(file);
        }
        FetchError::Io { file: file.to_owned(), folder: self.folder.folder().to_owned(), source }
    }

    fn cache(&self, file: &str, error: CacheError) -> FetchError {
        match error {
            CacheError::Io { source, .. } => self.io(file, source),
            CacheError::Room { .. } => self.no_room(file),
        }
    }

    fn told(&mut self, at: u64) -> Result<(), FetchError> {
        if (self.go_on)(self.before + at) { Ok(()) } else { Err(FetchError::Cancelled) }
    }

    fn file(&mut self, place: usize) -> Result<(), FetchError> {
        let Item { name, bytes, digest } = &self.inventory.files[place];
        // What lay there may have been wrong; then nobody is to blame, and it comes once more.
        while !self.there.contains(digest) && self.folder.verified(digest, *bytes).is_none() {
            let mut part = self.folder.part(digest, *bytes).map_err(|error| self.cache(name, error))?;
            let was_resumed = part.is_resumed();
            self.take(place, name, &mut part)?;
            match part.finish() {
                Ok(true) => break,
                Ok(false) if was_resumed => {}
                Ok(false) => return Err(FetchError::Damaged { file: name.clone() }),
                Err(error) => return Err(self.io(name, error)),
            }
        }
        self.before += bytes;
        self.told(0)
    }

    /// What is missing of a file, several pieces at once.
    fn take(&mut self, place: usize, name: &str, part: &mut Part) -> Result<(), FetchError> {
        let source = |reason: String| FetchError::Source { file: name.to_owned(), reason };
        let (mut asked, mut heard, mut window) = (part.at(), Instant::now(), VecDeque::new());
        while part.at() < part.bytes() {
            while asked < part.bytes() && window.len() < CREDITS as usize {
                let bytes = (part.bytes() - asked).min(PIECE_BYTES_MAX as u64);
                let ask = Ask { tensor: place as u32, offset: asked, bytes: bytes as u32 };
                self.port.send(encode_ask(&ask)).map_err(|error| source(error.to_string()))?;
                window.push_back(ask);
                asked += bytes;
            }
            self.told(part.at())?;
            let arrival = match self.port.receive(LOOK) {
                Ok(arrival) => arrival,
                Err(PortError::Timeout { .. }) if heard.elapsed() < ANSWER => continue,
                Err(error) => return Err(source(error.to_string())),
            };
            heard = Instant::now();
            let (reply, bytes) = decode_reply(&arrival.frame).map_err(|error| source(error.to_string()))?;
            if window.pop_front().is_none_or(|ask| reply != Reply::Piece(ask)) {
                return Err(source("it is not what it was there".to_owned()));
            }
            part.write(&bytes).map_err(|error| self.io(name, error))?;
            self.received += bytes.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
