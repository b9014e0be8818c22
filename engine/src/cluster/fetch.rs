//! Brings the tensors of a worker's stages: from its cache, else from the head and other workers.
//!
//! A thread for each source asks for what its stages want next, in the order in which they will want it, and writes it to
//! the cache; a tensor comes from one source at a time. A source that is lost, is silent, or sends what is not the tensor
//! is left out from then on, and another goes on where it stopped.

mod taker;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use memmap2::Mmap;
use pp_transport::Port;

use super::weights::bit;
use crate::checkpoint::TensorInfo;
use crate::checkpoint::supplied::{Bound, Origins, Supplier, SupplyError};
use crate::digest::Digest;
use crate::manifest::Manifest;
use crate::tensor_cache::{CacheError, Part, TensorCache};
use taker::Taker;

/// How often somebody who waits looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);
/// How often one tensor may come wrongly, or vanish from the cache, before it is given up.
const TRIES_MAX: u32 = 2;

/// Who has tensors.
pub struct Offer {
    /// For messages.
    pub name: String,
    /// The link to it.
    pub port: Box<dyn Port>,
    /// Which of the manifest's tensors it has ([`bit`]); nothing: all.
    pub holds: Option<Vec<u8>>,
}

/// Tensors that stages of this process want, and how far they are.
#[derive(Debug)]
pub struct Fetcher {
    manifest: Arc<Manifest>,
    places: HashMap<String, usize>,
    cache: TensorCache,
    state: Mutex<State>,
    changed: Condvar,
    stop: AtomicBool,
}

#[derive(Debug)]
struct State {
    /// In the order in which they are wanted.
    wants: Vec<Want>,
    by_digest: HashMap<Digest, usize>,
    sources: Vec<Source>,
    /// Of each stage.
    counts: Vec<Origins>,
    failed: Option<SupplyError>,
}

#[derive(Debug)]
struct Source {
    name: String,
    holds: Option<Vec<u8>>,
    /// Tensors that it turned out not to have.
    lacks: Vec<usize>,
    is_there: bool,
    /// Why it was left out.
    why: String,
    /// Bytes that it has sent.
    sent: u64,
}

/// One tensor.
#[derive(Debug)]
struct Want {
    /// By its place in the manifest.
    tensor: usize,
    digest: Digest,
    bytes: u64,
    /// The stage that its transfer is charged to: the first that wants it.
    stage: usize,
    status: Status,
    /// Bytes that came over the network.
    received: u64,
    /// How often it came wrongly, whole from one source.
    lies: u32,
    /// How often it was gone from the cache.
    vanished: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    /// There is a file of that name, which nobody has looked at.
    Cached,
    /// To be fetched.
    Queued,
    /// Some source is at it.
    Coming,
    /// It is in the cache, and is what it should be.
    Here,
}

impl Fetcher {
    /// For stages that want these tensors (places in the manifest) in this order. Makes room for them in the cache.
    ///
    /// # Errors
    /// [`SupplyError`].
    pub fn new(
        manifest: Arc<Manifest>,
        cache: TensorCache,
        stages: &[Vec<usize>],
    ) -> Result<Arc<Fetcher>, SupplyError> {
        let (mut wants, mut by_digest): (Vec<Want>, HashMap<Digest, usize>) = Default::default();
        // Stages load side by side: the first tensors of all come first.
        for turn in 0..stages.iter().map(Vec::len).max().unwrap_or(0) {
            for (stage, tensors) in stages.iter().enumerate() {
                let Some(tensor) = tensors.get(turn) else { continue };
                let entry = &manifest.tensors[*tensor];
                let (digest, bytes) = (entry.digest, entry.bytes() as u64);
                by_digest.entry(digest).or_insert_with(|| {
                    let status = Status::Queued;
                    let (received, lies, vanished) = (0, 0, 0);
                    wants.push(Want { tensor: *tensor, digest, bytes, stage, status, received, lies, vanished });
                    wants.len() - 1
                });
            }
        }
        let wanted: HashMap<Digest, u64> = wants.iter().map(|want| (want.digest, want.bytes)).collect();
        cache.make_room(&wanted).map_err(|error| no_use(&cache, error, || room(&cache, &wanted)))?;
        for want in &mut wants {
            if cache.has(&want.digest, want.bytes) {
                want.status = Status::Cached;
            }
        }
        let counts = vec![Origins::default(); stages.len()];
        let state = State { wants, by_digest, sources: Vec::new(), counts, failed: None };
        let places = manifest.tensors.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect();
        let (state, changed, stop) = (Mutex::new(state), Condvar::new(), AtomicBool::new(false));
        Ok(Arc::new(Fetcher { manifest, places, cache, state, changed, stop }))
    }

    /// Begins to fetch what is not in the cache.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(self: &Arc<Fetcher>, sources: Vec<Offer>) -> std::io::Result<Vec<JoinHandle<()>>> {
        let mut ports = Vec::new();
        let mut state = self.lock();
        for Offer { name, port, holds } in sources {
            state.sources.push(Source { name, holds, lacks: Vec::new(), is_there: true, why: String::new(), sent: 0 });
            ports.push(port);
        }
        self.look_for_orphans(&mut state);
        drop(state);
        let start = |(source, port): (usize, Box<dyn Port>)| {
            let taker = Taker::new(self.clone(), source, port);
            std::thread::Builder::new().name("weights-taker".to_owned()).spawn(move || taker.run())
        };
        ports.into_iter().enumerate().map(start).collect()
    }

    /// Whether everything seems to be in the cache.
    pub fn is_complete(&self) -> bool {
        self.lock().wants.iter().all(|want| matches!(want.status, Status::Cached | Status::Here))
    }

    /// Nothing more is wanted: the threads end, and who waits is told that it was cancelled.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// What brings the tensors of stage `stage`, by its place in the list that [`Fetcher::new`] was given.
    pub fn for_stage(self: &Arc<Fetcher>, stage: usize) -> Arc<dyn Supplier> {
        Arc::new(StageSupplier { fetcher: self.clone(), stage })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn name(&self, want: &Want) -> &str {
        &self.manifest.tensors[want.tensor].name
    }

    /// Where something is queued that nobody has, nothing more will come of it.
    fn look_for_orphans(&self, state: &mut State) {
        let has = |want: &Want| state.sources.iter().any(|source| source.has(want.tensor));
        let orphan = state.wants.iter().find(|want| want.status == Status::Queued && !has(want));
        if let (Some(orphan), None) = (orphan, &state.failed) {
            let asked: Vec<String> = state.sources.iter().map(Source::text).collect();
            let message = format!(
                "tensor {} is not in the cache, and nobody who is left has it (asked were {})",
                self.name(orphan),
                asked.join("; ")
            );
            state.failed = Some(SupplyError::Failed { message });
        }
        self.changed.notify_all();
    }

    /// A source is of no use any more: what it was at is for others.
    fn leave_out(&self, source: usize, wants: Vec<usize>, why: &str) {
        let mut state = self.lock();
        tracing::warn!(source = state.sources[source].name, why, "left out as a source of weights");
        state.sources[source].is_there = false;
        state.sources[source].why = why.to_owned();
        for want in wants {
            state.wants[want].status = Status::Queued;
        }
        self.look_for_orphans(&mut state);
    }

    /// The next tensor that a source has and nobody is at.
    fn next(&self, source: usize) -> Option<(usize, Digest, u64)> {
        let mut state = self.lock();
        let State { wants, sources, .. } = &mut *state;
        let has = |want: &Want| want.status == Status::Queued && sources[source].has(want.tensor);
        let want = wants.iter().position(has)?;
        wants[want].status = Status::Coming;
        Some((want, wants[want].digest, wants[want].bytes))
    }

    /// So many bytes of a tensor have come.
    fn received(&self, source: usize, want: usize, bytes: u64) {
        let mut state = self.lock();
        let stage = state.wants[want].stage;
        state.wants[want].received += bytes;
        state.sources[source].sent += bytes;
        state.counts[stage].network_bytes += bytes;
    }

    /// All bytes of a tensor are there.
    fn finish(&self, source: usize, want: usize, part: Part) {
        let was_resumed = part.is_resumed();
        let is_right = match part.finish() {
            Ok(is_right) => is_right,
            Err(error) => return self.cannot_write(error),
        };
        let mut state = self.lock();
        if is_right {
            state.wants[want].status = Status::Here;
            return self.changed.notify_all();
        }
        state.wants[want].status = Status::Queued;
        if was_resumed {
            // What lay there may have been wrong: nobody is to blame.
            return self.changed.notify_all();
        }
        let (tensor, name) = (state.wants[want].tensor, self.name(&state.wants[want]).to_owned());
        state.wants[want].lies += 1;
        if state.wants[want].lies >= TRIES_MAX {
            let from = state.sources[source].name.clone();
            let message = format!(
                "tensor {name} came {TRIES_MAX} times and was not what the manifest says, at last from {from}: its copy of the model may be damaged, or was changed"
            );
            state.failed = Some(SupplyError::Failed { message });
            return self.changed.notify_all();
        }
        let has_another = state.sources.iter().enumerate().any(|(other, it)| other != source && it.has(tensor));
        if has_another {
            state.sources[source].is_there = false;
        }
        self.changed.notify_all();
    }

    /// A source turned out not to have a tensor.
    fn lacks(&self, source: usize, want: usize) {
        let mut state = self.lock();
        let tensor = state.wants[want].tensor;
        state.sources[source].lacks.push(tensor);
        state.wants[want].status = Status::Queued;
        self.look_for_orphans(&mut state);
    }

    fn fail(&self, error: SupplyError) {
        self.lock().failed.get_or_insert(error);
        self.changed.notify_all();
    }

    fn cannot_write(&self, error: std::io::Error) {
        if error.kind() == std::io::ErrorKind::StorageFull {
            tracing::warn!(folder = %self.cache.folder().display(), "the disk of the tensor cache is full");
        }
        let path = self.cache.folder().to_owned();
        self.cannot_keep(CacheError::Io { path, source: error });
    }

    fn cannot_keep(&self, error: CacheError) {
        let wanted = || self.lock().wants.iter().map(|want| (want.digest, want.bytes)).collect();
        self.fail(no_use(&self.cache, error, || room(&self.cache, &wanted())));
    }

    /// A tensor for a stage; see [`Supplier::tensor`].
    fn bring(
        &self,
        stage: usize,
        tensor: &TensorInfo,
        go_on: &mut dyn FnMut(Origins) -> bool,
    ) -> Result<Mmap, SupplyError> {
        let unknown = || SupplyError::Failed { message: format!("tensor {} is not in the manifest", tensor.name) };
        let place = *self.places.get(&tensor.name).ok_or_else(unknown)?;
        let mut state = self.lock();
        let at = *state.by_digest.get(&self.manifest.tensors[place].digest).ok_or_else(unknown)?;
        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if self.is_stopped() || !go_on(state.counts[stage]) {
                return Err(SupplyError::Cancelled);
            }
            let (status, digest, bytes) = {
                let want = &state.wants[at];
                (want.status, want.digest, want.bytes)
            };
            if !matches!(status, Status::Cached | Status::Here) {
                state = self.wait(state);
                continue;
            }
            drop(state);
            let found = match status {
                Status::Cached => self.cache.verified(&digest, bytes),
                _ => self.cache.unverified(&digest, bytes),
            };
            state = self.lock();
            match found {
                Some(map) => {
                    let want = &mut state.wants[at];
                    want.status = Status::Here;
                    let came = if want.stage == stage { want.received.min(bytes) } else { 0 };
                    state.counts[stage].cache_bytes += bytes - came;
                    return Ok(map);
                }
                None => self.fetch_again(&mut state, at),
            }
        }
    }

    /// What should be in the cache is not, or is damaged.
    fn fetch_again(&self, state: &mut State, at: usize) {
        let want = &mut state.wants[at];
        if matches!(want.status, Status::Cached | Status::Here) {
            want.status = Status::Queued;
            want.vanished += 1;
        }
        if want.vanished > TRIES_MAX {
            let message = format!(
                "tensor {} vanishes from the cache at {}: something else deletes its files",
                self.manifest.tensors[want.tensor].name,
                self.cache.folder().display()
            );
            state.failed = Some(SupplyError::Failed { message });
        }
        self.look_for_orphans(state);
    }
}

impl Source {
    fn text(&self) -> String {
        if self.why.is_empty() { self.name.clone() } else { format!("{}: {}", self.name, self.why) }
    }

    fn has(&self, tensor: usize) -> bool {
        self.is_there && !self.lacks.contains(&tensor) && self.holds.as_ref().is_none_or(|holds| bit(holds, tensor))
    }
}

/// Why the cache is of no use, where `room` says how much is wanted of it and how much it has room for.
fn no_use(cache: &TensorCache, error: CacheError, room: impl FnOnce() -> (u64, u64)) -> SupplyError {
    let folder = cache.folder().display().to_string();
    match error {
        CacheError::Room { needed, room, bound } => SupplyError::NoRoom { folder, needed, room, bound },
        CacheError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            let (needed, room) = room();
            SupplyError::NoRoom { folder, needed, room, bound: Bound::Disk }
        }
        error => SupplyError::Failed { message: error.to_string() },
    }
}

/// Bytes of all that is wanted, and those for which a disk that was full just now has room: what is there, and what is
/// free.
fn room(cache: &TensorCache, wanted: &HashMap<Digest, u64>) -> (u64, u64) {
    let needed = wanted.values().sum();
    let there: u64 = wanted.iter().map(|(digest, bytes)| cache.there_bytes(digest).min(*bytes)).sum();
    let room = there + cache.free_bytes().unwrap_or(0);
    // A disk may be full of names or files, and still have bytes.
    (needed, if room < needed { room } else { there })
}

/// Brings the tensors of one stage.
#[derive(Debug)]
struct StageSupplier {
    fetcher: Arc<Fetcher>,
    stage: usize,
}

impl Supplier for StageSupplier {
    fn tensor(&self, tensor: &TensorInfo, go_on: &mut dyn FnMut(Origins) -> bool) -> Result<Mmap, SupplyError> {
        self.fetcher.bring(self.stage, tensor, go_on)
    }

    fn origins(&self) -> Origins {
        self.fetcher.lock().counts[self.stage]
    }
}

#[cfg(test)]
mod tests;
