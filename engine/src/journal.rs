//! What was asked and what was answered so far, in a file: what a program that died finds again.
//!
//! Only what cannot be computed again is written at once: that something was asked. Tokens follow, gathered for a moment;
//! those that are lost with the program are drawn again, the same ones, as a draw is a function of what was asked and of
//! what came before.
//!
//! The file is a header and commits ([`file`]), each a few records ([`record`]) under one checksum. Commits are appended
//! and made durable one after the other, so that only the last one can be torn. A thread of its own writes them
//! ([`writer`]). Records of what is forgotten are dead weight until the file is written anew: when it is opened, and when
//! it would grow past its bound.

mod file;
mod record;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::digest::Digest;
use crate::head::Token;
pub use file::read;
use record::Record;
use writer::{Durable, Entry, Writer};

/// Bytes of a journal's file at least: less holds no long conversation.
pub const BYTES_MIN: u64 = 1 << 20;
/// Bytes of a journal's file at most: the length of a commit has 32 bits.
pub const BYTES_MAX: u64 = 1 << 32;
/// Bytes of a journal's file where nobody says.
pub const BYTES_DEFAULT: u64 = 256 << 20;

/// Why there is no journal.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum JournalError {
    #[error("cannot {what} the journal {}: {source}", path.display())]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("another program has the journal {} open: end that, or give each a file of its own", path.display())]
    InUse { path: PathBuf },
    #[error("{} is no journal of this program: it is left as it is; give another file", path.display())]
    NoJournal { path: PathBuf },
    #[error(
        "the journal {} has version {found}, and this program knows {known}: finish it with the program that began it",
        path.display()
    )]
    Version { path: PathBuf, found: u32, known: u32 },
    #[error(
        "the journal {} is damaged at byte {offset} ({what}), and good commits follow from byte {next} on: what was \
         asked in between would be lost, so it is left as it is. Restore the file from a copy; or move it away, and \
         begin another one",
        path.display()
    )]
    Damaged { path: PathBuf, offset: u64, next: u64, what: &'static str },
    #[error(
        "the journal {} says at byte {offset} what cannot follow what it said before: this is a fault in the program; \
         move the file away, and begin another one",
        path.display()
    )]
    Contradiction { path: PathBuf, offset: u64 },
}

/// Why something that was asked is not written, and so not done.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Refusal {
    #[error(
        "the journal is full: with all tokens that it may come to, this request needs {needed} bytes, and {free} of \
         {limit} are free; wait until others have ended, ask for fewer tokens, or serve with a larger --journal-bytes"
    )]
    Full { needed: u64, free: u64, limit: u64 },
    #[error("the journal cannot be written ({reason}): what runs goes on, and nothing new is taken until it can be")]
    Failing { reason: String },
}

/// A request, as the journal calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Number(pub u64);

/// What was asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Asked {
    /// What the caller calls it; no other that is not forgotten is called so.
    pub name: String,
    /// What only the caller understands: how it was asked, and all that was drawn for it, such as a seed.
    pub body: Vec<u8>,
    /// The model that answers.
    pub model: Digest,
    /// Under what else the same answers come, in words: kinds of numbers, devices.
    pub conditions: String,
    /// The ids of its prompts: a template that knows the date would make others tomorrow.
    pub prompts: Vec<Vec<u32>>,
    /// Answers of each prompt.
    pub choices: u32,
    /// Tokens of an answer at most.
    pub tokens_max: u64,
    /// Where log-probabilities were asked for: candidates of each token, at most.
    pub candidates: Option<u32>,
}

/// What a journal knows of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// What was asked.
    pub asked: Asked,
    /// The tokens of its answers so far; of answers without any, nothing.
    pub tokens: BTreeMap<u32, Vec<Token>>,
    /// Whether all of its answers are there to their ends.
    pub is_complete: bool,
}

impl Found {
    /// The tokens of answers `first` to `first + count`.
    pub fn begun(&self, first: usize, count: usize) -> Vec<Vec<Token>> {
        let of = |answer: usize| self.tokens.get(&(answer as u32)).cloned().unwrap_or_default();
        (first..first + count).map(of).collect()
    }
}

/// What a file holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Contents {
    /// What is not forgotten, in the order in which it was asked.
    pub requests: BTreeMap<Number, Found>,
    /// Bytes up to the end of the last whole commit.
    pub bytes: u64,
    /// Bytes behind that: of a commit that was being written when the program died.
    pub torn_bytes: u64,
}

/// How a journal stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Bytes of its file.
    pub bytes: u64,
    /// Bytes that it keeps free for what is not forgotten, with all tokens that it may come to.
    pub reserved_bytes: u64,
    /// Requests that are not forgotten.
    pub requests: usize,
    /// Commits so far.
    pub commits: u64,
    /// Why it cannot be written now.
    pub failing: Option<String>,
}

/// What one request may take.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// What was asked.
    asked: u64,
    per_token: u64,
    tokens: u64,
    /// Tokens that may come, of all answers.
    to_come: u64,
    answers: u64,
}

/// Of a record beside its contents: its kind, its number, an answer's, counts.
const RECORD_BYTES: u64 = 40;

impl Account {
    fn of(asked: &Asked) -> Account {
        let answers = (asked.prompts.len() as u64).saturating_mul(u64::from(asked.choices.max(1)));
        let ids: usize = asked.prompts.iter().map(|prompt| prompt.len() + 1).sum();
        let texts = asked.name.len() + asked.body.len() + asked.conditions.len();
        // An id takes five bytes at most, and with its log-probability, and those of candidates, as many and four each.
        let scores = asked.candidates.map_or(0, |candidates| 10 + 9 * u64::from(candidates));
        Account {
            asked: texts as u64 + 5 * ids as u64 + 2 * RECORD_BYTES,
            per_token: 5 + scores,
            tokens: 0,
            to_come: answers.saturating_mul(asked.tokens_max),
            answers,
        }
    }

    fn bytes(&self) -> u64 {
        let tokens = self.tokens.max(self.to_come).saturating_mul(self.per_token);
        tokens.saturating_add(self.asked).saturating_add(self.answers.saturating_mul(RECORD_BYTES))
    }
}

/// What the handle and the writing thread share.
#[derive(Debug, Default)]
struct Shared {
    accounts: HashMap<Number, Account>,
    reserved: u64,
    latest: u64,
    bytes: u64,
    commits: u64,
    failing: Option<String>,
}

impl Shared {
    fn set(&mut self, number: Number, account: Account) {
        self.reserved += account.bytes();
        if let Some(old) = self.accounts.insert(number, account) {
            self.reserved -= old.bytes();
        }
    }

    fn room(&self, account: &Account, bytes_max: u64) -> Result<(), Refusal> {
        if let Some(reason) = &self.failing {
            return Err(Refusal::Failing { reason: reason.clone() });
        }
        let limit = bytes_max / 2;
        let (needed, free) = (account.bytes(), limit.saturating_sub(self.reserved));
        if needed > free { Err(Refusal::Full { needed, free, limit }) } else { Ok(()) }
    }

    fn remove(&mut self, number: Number) -> bool {
        let removed = self.accounts.remove(&number);
        self.reserved -= removed.map_or(0, |account| account.bytes());
        removed.is_some()
    }
}

/// A journal that is written. Dropping it waits until all is on the disk, where the disk takes it.
#[derive(Debug)]
pub struct Journal {
    entries: Option<Sender<Entry>>,
    shared: Arc<Mutex<Shared>>,
    bytes_max: u64,
    thread: Option<JoinHandle<()>>,
}

impl Journal {
    /// Opens the journal at `path`, or begins one, and says what it holds. Its file has at most `bytes_max` bytes; all
    /// that is not forgotten gets half of them, so that writing it anew always pays.
    ///
    /// # Errors
    /// [`JournalError`]; the file is as it was then.
    pub fn open(path: &Path, bytes_max: u64) -> Result<(Journal, Contents), JournalError> {
        let bytes_max = bytes_max.clamp(BYTES_MIN, BYTES_MAX);
        let (file, contents) = file::open(path)?;
        let mut shared = Shared { bytes: file.bytes(), ..Shared::default() };
        for (number, found) in &contents.requests {
            let tokens = found.tokens.values().map(|tokens| tokens.len() as u64).sum();
            let account = Account { tokens, ..Account::of(&found.asked) };
            let to_come = if found.is_complete { 0 } else { account.to_come };
            shared.set(*number, Account { to_come, ..account });
            shared.latest = number.0;
        }
        let shared = Arc::new(Mutex::new(shared));
        let (entries, asked) = unbounded();
        let writer = Writer::new(file, bytes_max, asked, shared.clone());
        let thread = std::thread::Builder::new().name("journal".to_owned()).spawn(move || writer.run());
        let thread =
            thread.map_err(|source| JournalError::Io { what: "start a thread for", path: path.to_owned(), source })?;
        Ok((Journal { entries: Some(entries), shared, bytes_max, thread: Some(thread) }, contents))
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn write(&self, record: Record, durable: Option<Durable>) {
        let entry = Entry { record, durable };
        // The thread ends only with this, unless it panicked.
        if self.entries.as_ref().is_some_and(|entries| entries.send(entry).is_err()) {
            self.shared().failing = Some("its thread has ended: a fault in the program, see the log".to_owned());
        }
    }

    /// Whether so much may be asked now.
    ///
    /// # Errors
    /// [`Refusal`]
    pub fn room(&self, asked: &Asked) -> Result<(), Refusal> {
        self.shared().room(&Account::of(asked), self.bytes_max)
    }

    /// Writes what was asked. `durable` is called, from the journal's thread, once it is on the disk; it is dropped
    /// where it never will be.
    ///
    /// # Errors
    /// [`Refusal`]: nothing is written then.
    pub fn ask(&self, asked: Asked, durable: impl FnOnce() + Send + 'static) -> Result<Number, Refusal> {
        let account = Account::of(&asked);
        let number = {
            let mut shared = self.shared();
            shared.room(&account, self.bytes_max)?;
            shared.latest += 1;
            let number = Number(shared.latest);
            shared.set(number, account);
            number
        };
        self.write(Record::Asked(number, asked), Some(Box::new(durable)));
        Ok(number)
    }

    /// Writes the next tokens of an answer, of which there were `from` before; they are on the disk within a moment.
    pub fn tokens(&self, number: Number, answer: u32, from: usize, tokens: &[Token]) {
        let is_scored = {
            let mut shared = self.shared();
            let Some(account) = shared.accounts.get(&number).copied() else { return };
            shared.set(number, Account { tokens: account.tokens + tokens.len() as u64, ..account });
            account.per_token > 5
        };
        self.write(Record::tokens(number, answer, from, tokens, is_scored), None);
    }

    /// Writes that all answers are there. They are kept until they are forgotten.
    pub fn complete(&self, number: Number) {
        let mut shared = self.shared();
        let Some(account) = shared.accounts.get(&number).copied() else { return };
        shared.set(number, Account { to_come: 0, ..account });
        drop(shared);
        self.write(Record::Complete(number), None);
    }

    /// Writes that nobody wants to know of it any more.
    pub fn forget(&self, number: Number) {
        if self.shared().remove(number) {
            self.write(Record::Forgotten(number), None);
        }
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        let shared = self.shared();
        Standing {
            bytes: shared.bytes,
            reserved_bytes: shared.reserved,
            requests: shared.accounts.len(),
            commits: shared.commits,
            failing: shared.failing.clone(),
        }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        self.entries = None;
        if let Some(thread) = self.thread.take() {
            // What it panicked with has been printed.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
