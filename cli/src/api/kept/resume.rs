//! What a journal holds when the server starts is asked once more, from where it was.

use std::sync::Arc;
use std::time::Duration;

use pp_engine::head::Request;
use pp_engine::head::service::{Notice, ServiceError};
use pp_engine::journal::{Contents, Found};
use pp_engine::schedule::Refused;
use tokio::sync::oneshot;

use super::entry::Entry;
use super::{Kept, Stored, begun};
use crate::api::Shared;
use crate::api::errors::ApiError;
use crate::api::telling::{Prepared, Prior};

/// How long one that found the queue full waits.
const RETRY: Duration = Duration::from_millis(100);

/// Whether all that a journal holds was asked of a server that says it as this one does.
pub fn is_of_a_server(contents: &Contents) -> bool {
    contents.requests.values().all(|found| serde_json::from_slice::<Stored>(&found.asked.body).is_ok())
}

/// Requests that are to go on.
pub struct Resumed(Vec<(Arc<Entry>, Vec<Request>)>);

impl Kept {
    /// Makes of a journal's contents what can be asked again; from then on its answers can be asked for.
    pub async fn take_up(&self, state: &Shared, contents: Contents) -> Resumed {
        let mut resumed = Vec::new();
        for (number, found) in contents.requests {
            let prepared = again(state, &found).await;
            let (telling, requests) = match prepared {
                Ok(Prepared { telling, requests }) => (Ok(telling), requests),
                Err(error) => {
                    let reason = &error.body.error.message;
                    tracing::error!(id = found.asked.name, reason, "a request of the journal cannot be asked again");
                    (Err(error), Vec::new())
                }
            };
            let entry = Arc::new(Entry::found(number, &found, telling));
            self.shelf().by_name.insert(found.asked.name, entry.clone());
            if requests.is_empty() {
                // It is told why, for a while; nothing is lost in the journal before that.
                self.shelve(&entry);
            } else {
                resumed.push((entry, requests));
            }
        }
        Resumed(resumed)
    }

    /// Asks for them, one after the other: as long as the queue is full the next one waits.
    pub async fn resume(self: Arc<Kept>, state: Shared, Resumed(resumed): Resumed) {
        for (entry, requests) in resumed {
            for (prompt, request) in requests.into_iter().enumerate() {
                self.ask_again(&state, &entry, prompt, request).await;
            }
        }
    }

    async fn ask_again(self: &Arc<Kept>, state: &Shared, entry: &Arc<Entry>, prompt: usize, request: Request) {
        loop {
            let (sender, refused) = oneshot::channel();
            let mut sender = Some(sender);
            let mut hear = self.hearing(entry, prompt);
            let ticket = state.service.submit(request.clone(), move |notice| match notice {
                Notice::Refused(error) => {
                    // The other end waits for it.
                    let _ = sender.take().map(|sender| sender.send(error));
                }
                notice => {
                    sender = None;
                    hear(notice);
                }
            });
            entry.holds(ticket);
            match refused.await {
                Err(_) => return tracing::info!(id = entry.name, prompt, "resumed"),
                Ok(ServiceError::Refused(Refused::Busy { .. }) | ServiceError::Down(_)) => {
                    tokio::time::sleep(RETRY).await;
                }
                Ok(ServiceError::Draining) => return,
                Ok(error) => {
                    tracing::error!(id = entry.name, %error, "a request of the journal is not taken any more");
                    return self.hear(entry, prompt, Notice::Failed(failure(&error)));
                }
            }
        }
    }
}

fn failure(error: &ServiceError) -> pp_engine::head::service::Failure {
    pp_engine::head::service::Failure { stage: None, reason: error.to_string() }
}

/// What is asked now to get the answers that were asked for then.
async fn again(state: &Shared, found: &Found) -> Result<Prepared, ApiError> {
    let asked = &found.asked;
    let stored: Stored = serde_json::from_slice(&asked.body).map_err(|error| {
        ApiError::internal(format!("the journal says of it what this version does not read: {error}"))
    })?;
    let Stored { endpoint, body, id, created, seed, .. } = stored;
    let prior = Prior { id, created, seed, prompts: asked.prompts.clone() };
    let Prepared { requests, telling } = endpoint.again(state, &asked.name, &body, prior).await?;
    let choices = asked.choices as usize;
    let requests = requests.into_iter().enumerate();
    let requests = requests
        .map(|(prompt, request)| begun(request, found.begun(prompt * choices, choices), asked.tokens_max))
        .collect();
    Ok(Prepared { requests, telling })
}
