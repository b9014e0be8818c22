//! Answers that outlive their clients, and this program: what was asked is in the journal, what was answered is kept for
//! whoever comes back.
//!
//! With a journal every request is an [`Entry`], which hears what becomes of it and tells all who listen: the client who
//! asked, and whoever attaches later, from the beginning on. When the last of them goes the request is cancelled, as it is
//! without a journal; unless it was asked otherwise, or was taken up from the journal.

mod entry;
mod resume;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName};
use axum::response::Response;
use pp_engine::digest::Digest;
use pp_engine::head::Request;
use pp_engine::head::service::Notice;
use pp_engine::journal::{self, Journal, Refusal};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use utoipa::IntoParams;

use super::Shared;
use super::answers::Asked;
use super::errors::ApiError;
use super::metrics::{Metrics, Outcome};
use super::telling::{Endpoint, Prepared};
use entry::Over;
pub use entry::{Attached, Entry};
pub use resume::is_of_a_server;

/// Requests that have ended and are kept, at most, and bytes of what they heard.
const KEPT_MAX: usize = 1024;
const KEPT_BYTES_MAX: usize = 64 << 20;
/// The header that says what becomes of a request whose client has gone.
const ON_DISCONNECT: HeaderName = HeaderName::from_static("x-on-disconnect");

/// The header, for the OpenAPI document.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "the document's words for a header")]
pub struct OnDisconnect {
    /// What becomes of the request when its client goes: `cancel`, as unless said otherwise, or `finish`, which wants a
    /// server with a journal. Its answers are then at `/v1/requests/{id}`.
    #[serde(rename = "x-on-disconnect")]
    #[param(value_type = String, required = false, pattern = "^(cancel|finish)$")]
    x_on_disconnect: Option<String>,
}

/// How a request was asked, as the journal has it.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    endpoint: Endpoint,
    body: String,
    id: String,
    created: u64,
    seed: u64,
    outlives: bool,
}

/// What is kept.
pub struct Kept {
    journal: Journal,
    model: Digest,
    /// Under what else the same answers come, in words.
    conditions: String,
    /// Positions of a sequence.
    context: usize,
    /// How long after its end.
    keep: Duration,
    metrics: Arc<Metrics>,
    shelf: Mutex<Shelf>,
}

#[derive(Default)]
struct Shelf {
    by_name: HashMap<String, Arc<Entry>>,
    /// Those that have ended, and when they did.
    over: VecDeque<(Instant, Arc<Entry>)>,
    over_bytes: usize,
}

impl Kept {
    /// With that journal, of a model and of what else decides its answers.
    pub fn new(
        journal: Journal,
        model: Digest,
        conditions: String,
        context: usize,
        keep: Duration,
        metrics: Arc<Metrics>,
    ) -> Kept {
        Kept { journal, model, conditions, context, keep, metrics, shelf: Mutex::default() }
    }

    /// How the journal stands.
    pub fn journal(&self) -> journal::Standing {
        self.journal.standing()
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        self.shelf.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A request by its name.
    pub fn find(&self, name: &str) -> Option<Arc<Entry>> {
        self.sweep();
        self.shelf().by_name.get(name).cloned()
    }

    /// Writes down what is asked, under a name that no other has.
    fn begin(
        &self,
        name: &str,
        prepared: &Prepared,
        (text, outlives): (String, bool),
        durable: impl FnOnce() + Send + 'static,
    ) -> Result<Arc<Entry>, ApiError> {
        self.sweep();
        let first = &prepared.requests[0];
        let telling = &prepared.telling;
        let stored = Stored {
            endpoint: telling.endpoint,
            body: text,
            id: telling.id.clone(),
            created: telling.created,
            seed: first.sampling.seed,
            outlives,
        };
        let asked = journal::Asked {
            name: name.to_owned(),
            body: serde_json::to_vec(&stored).map_err(|error| ApiError::internal(error.to_string()))?,
            model: self.model,
            conditions: self.conditions.clone(),
            prompts: prepared.requests.iter().map(|request| request.prompt.clone()).collect(),
            choices: first.choices.max(1),
            tokens_max: first.max_tokens.min(self.context) as u64,
            candidates: telling.has_logprobs.then_some(first.sampling.candidates),
        };
        let mut shelf = self.shelf();
        if shelf.by_name.contains_key(name) {
            return Err(ApiError::name_in_use(name));
        }
        // Answers that are waited for go before those that only might be.
        while matches!(self.journal.room(&asked), Err(Refusal::Full { needed, limit, .. }) if needed <= limit) {
            let Some((_, oldest)) = shelf.over.pop_front() else { break };
            self.drop_from(&mut shelf, &oldest);
        }
        let counts = (asked.prompts.len(), asked.choices as usize);
        let number = self.journal.ask(asked, durable)?;
        let entry = Arc::new(Entry::new(name, number, counts, prepared, outlives));
        shelf.by_name.insert(name.to_owned(), entry.clone());
        Ok(entry)
    }

    /// Somebody hears of a request from its beginning on.
    ///
    /// # Errors
    /// Why there are no answers.
    pub fn attach(self: &Arc<Kept>, state: &Shared, entry: &Arc<Entry>) -> Result<Asked, ApiError> {
        let (notices, attached) = entry.attach(self)?;
        let mut asked = Asked::attached(state, notices, attached);
        asked.formed_by = entry.formed_by();
        Ok(asked)
    }

    /// What hears of a prompt's answers.
    fn hearing(self: &Arc<Kept>, entry: &Arc<Entry>, prompt: usize) -> impl FnMut(Notice) + Send + 'static {
        let (kept, entry) = (self.clone(), entry.clone());
        move |notice| kept.hear(&entry, prompt, notice)
    }

    fn hear(&self, entry: &Arc<Entry>, prompt: usize, notice: Notice) {
        match entry.hear(prompt, notice, &self.journal, &self.metrics) {
            None => {}
            Some(Over::Complete) => {
                self.journal.complete(entry.number);
                self.shelve(entry);
            }
            // Whoever asked has been told that it failed.
            Some(Over::Failed) => {
                self.journal.forget(entry.number);
                self.shelve(entry);
            }
            Some(Over::Refused) => self.remove(entry),
            // The journal has it until it is resumed.
            Some(Over::Interrupted) => {}
        }
    }

    /// It has ended, and is kept for a while.
    fn shelve(&self, entry: &Arc<Entry>) {
        let mut shelf = self.shelf();
        shelf.over_bytes += entry.bytes();
        shelf.over.push_back((Instant::now(), entry.clone()));
        drop(shelf);
        self.sweep();
    }

    /// Forgets what has been kept for long enough, and what is too much.
    pub fn sweep(&self) {
        let mut shelf = self.shelf();
        while let Some((since, oldest)) = shelf.over.front() {
            let is_too_much = shelf.over.len() > KEPT_MAX || shelf.over_bytes > KEPT_BYTES_MAX;
            if !is_too_much && since.elapsed() < self.keep {
                break;
            }
            let oldest = oldest.clone();
            shelf.over.pop_front();
            self.drop_from(&mut shelf, &oldest);
        }
    }

    fn drop_from(&self, shelf: &mut Shelf, entry: &Arc<Entry>) {
        shelf.over_bytes = shelf.over_bytes.saturating_sub(entry.bytes());
        shelf.by_name.remove(&entry.name);
        self.journal.forget(entry.number);
    }

    /// Forgets one.
    fn remove(&self, entry: &Arc<Entry>) {
        let mut shelf = self.shelf();
        if let Some(at) = shelf.over.iter().position(|(_, other)| Arc::ptr_eq(other, entry)) {
            shelf.over.remove(at);
            shelf.over_bytes = shelf.over_bytes.saturating_sub(entry.bytes());
        }
        shelf.by_name.remove(&entry.name);
        drop(shelf);
        self.journal.forget(entry.number);
    }

    /// Ends a request that runs, or forgets one that has ended; whoever listens hears of it.
    pub fn cancel(&self, entry: &Arc<Entry>) {
        let left = entry.end(ApiError::cancelled());
        self.metrics.ended(Outcome::Cancelled, left);
        self.remove(entry);
    }
}

/// Answers a body, and keeps what becomes of it where there is a journal.
///
/// # Errors
/// When it is not taken.
pub async fn answer(
    state: &Shared,
    prepared: Prepared,
    name: &str,
    text: String,
    headers: &HeaderMap,
) -> Result<Response, ApiError> {
    let outlives = outlives(headers, state.kept.is_some())?;
    let telling = prepared.telling.clone();
    let asked = match &state.kept {
        Some(kept) => ask(state, kept, prepared, name, (text, outlives)).await,
        None => Asked::ask(state, prepared.requests, name).await,
    };
    let mut asked = asked.map_err(|error| error.about_prompt(telling.endpoint.prompt()))?;
    telling.form.param().clone_into(&mut asked.formed_by);
    telling.respond(state, asked).await
}

/// Asks for what is written down; the answer is not begun to be told before it is on the disk.
async fn ask(
    state: &Shared,
    kept: &Arc<Kept>,
    prepared: Prepared,
    name: &str,
    how: (String, bool),
) -> Result<Asked, ApiError> {
    let (sender, durable) = oneshot::channel();
    let entry = kept.begin(name, &prepared, how, move || {
        // Whoever asked may be gone.
        let _ = sender.send(());
    })?;
    let asked = kept.attach(state, &entry)?;
    let prompts = prepared.requests.len();
    for (prompt, request) in prepared.requests.into_iter().enumerate() {
        entry.holds(state.service.submit(request, kept.hearing(&entry, prompt)));
    }
    let asked = asked.taken(prompts, name).await?;
    if durable.await.is_err() {
        let reason = kept.journal().failing.unwrap_or_else(|| "see the log".to_owned());
        kept.cancel(&entry);
        return Err(ApiError::not_kept(&reason));
    }
    Ok(asked)
}

/// Whether a request goes on without its client.
fn outlives(headers: &HeaderMap, has_journal: bool) -> Result<bool, ApiError> {
    let Some(value) = headers.get(ON_DISCONNECT) else { return Ok(false) };
    match value.as_bytes() {
        b"cancel" => Ok(false),
        b"finish" if has_journal => Ok(true),
        b"finish" => Err(ApiError::unsupported(
            ON_DISCONNECT.as_str(),
            "x-on-disconnect: finish wants a server with a journal, and this one was started without --journal",
        )),
        _ => Err(ApiError::invalid(ON_DISCONNECT.as_str(), "x-on-disconnect: expected cancel or finish")),
    }
}

/// The request as it is asked once more, from where it was.
fn begun(request: Request, tokens: Vec<Vec<pp_engine::head::Token>>, tokens_max: u64) -> Request {
    Request { begun: tokens, max_tokens: usize::try_from(tokens_max).unwrap_or(usize::MAX), ..request }
}
