//! The thread that writes a journal.
//!
//! What comes is gathered for a moment and written at once; what somebody waits for is written at once with all that was
//! gathered. While the disk takes no writes, what comes is kept: it is no more than what was asked may come to, as nothing
//! new is taken meanwhile.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::file::JournalFile;
use super::record::Record;
use super::{JournalError, Shared};

/// How long tokens are gathered: with the time that the disk takes, fifty milliseconds mostly.
const GATHER: Duration = Duration::from_millis(40);
/// Bytes of a commit from which on nothing more is gathered.
const COMMIT_BYTES: usize = 1 << 20;
/// How long after a failure the next attempt is made, and how often when the journal is closed.
const RETRY: Duration = Duration::from_secs(1);

/// Called once something is on the disk.
pub(super) type Durable = Box<dyn FnOnce() + Send>;

/// What is to be written.
pub(super) struct Entry {
    pub(super) record: Record,
    /// Who waits for it.
    pub(super) durable: Option<Durable>,
}

pub(super) struct Writer {
    file: JournalFile,
    bytes_max: u64,
    /// From so many bytes on the file is written anew.
    renew_at: u64,
    entries: Receiver<Entry>,
    shared: Arc<Mutex<Shared>>,
    /// Gathered: records, and who waits for them.
    records: Vec<u8>,
    waiting: Vec<Durable>,
    is_failing: bool,
}

impl Writer {
    pub(super) fn new(
        file: JournalFile,
        bytes_max: u64,
        entries: Receiver<Entry>,
        shared: Arc<Mutex<Shared>>,
    ) -> Writer {
        let renew_at = renew_at(&file, bytes_max);
        let (records, waiting) = (Vec::new(), Vec::new());
        Writer { file, bytes_max, renew_at, entries, shared, records, waiting, is_failing: false }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Until nobody writes any more.
    pub(super) fn run(mut self) {
        while self.gather() {
            self.commit();
        }
        self.commit();
    }

    /// Waits for something to write, and a moment for more; false when the last was written.
    fn gather(&mut self) -> bool {
        if self.records.is_empty() {
            match self.entries.recv() {
                Ok(entry) => self.take(entry),
                Err(_) => return false,
            }
        }
        let until = Instant::now() + if self.is_failing { RETRY } else { GATHER };
        loop {
            let is_awaited = !self.waiting.is_empty() && !self.is_failing;
            let is_full = self.records.len() >= COMMIT_BYTES && !self.is_failing;
            let left = if is_awaited || is_full { Duration::ZERO } else { until - Instant::now().min(until) };
            match self.entries.recv_timeout(left) {
                Ok(entry) if is_full => {
                    self.take(entry);
                    return true;
                }
                Ok(entry) => self.take(entry),
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    fn take(&mut self, entry: Entry) {
        entry.record.write(&mut self.records);
        self.waiting.extend(entry.durable);
    }

    /// Writes what was gathered; keeps it where that fails.
    fn commit(&mut self) {
        if self.records.is_empty() {
            return;
        }
        match self.try_commit() {
            Ok(()) => {
                self.records.clear();
                if std::mem::take(&mut self.is_failing) {
                    tracing::warn!("the journal is written again");
                }
                let mut shared = self.shared();
                (shared.bytes, shared.failing) = (self.file.bytes(), None);
                shared.commits += 1;
                drop(shared);
                self.waiting.drain(..).for_each(|durable| durable());
            }
            Err(reason) => {
                if !std::mem::replace(&mut self.is_failing, true) {
                    tracing::error!(%reason, "the journal cannot be written: nothing new is taken until it can be");
                }
                self.shared().failing = Some(reason);
                // They hear that it is not.
                self.waiting.clear();
            }
        }
    }

    fn try_commit(&mut self) -> Result<(), String> {
        // After a failure nobody knows which of the file's bytes the disk has: all are written once more.
        if self.is_failing || self.file.bytes() + self.records.len() as u64 > self.renew_at {
            self.file.renew().map_err(|error: JournalError| error.to_string())?;
            self.renew_at = renew_at(&self.file, self.bytes_max);
        }
        self.file.append(&self.records).map_err(|error| error.to_string())
    }
}

/// Where the bound was lowered, what is there may be more than it: then the file is written anew when it has doubled.
fn renew_at(file: &JournalFile, bytes_max: u64) -> u64 {
    bytes_max.max(file.bytes().saturating_mul(2))
}
