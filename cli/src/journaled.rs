//! What `serve` and `batch` do alike with a journal: open it, and see whether what it holds is of this model.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use pp_engine::digest::Digest;
use pp_engine::journal::{Contents, Journal, JournalError};

use crate::errors::usage;
use crate::output::Out;
use crate::report::StageRow;

/// Opens the journal at `path`, or begins one; says what of it was lost.
///
/// # Errors
/// When it cannot be had, or is damaged.
pub fn open(path: &Path, bytes_max: u64, out: &Out) -> Result<(Journal, Contents)> {
    let (journal, contents) = Journal::open(path, bytes_max).map_err(|error| match error {
        error @ JournalError::Io { .. } => anyhow::Error::new(error),
        error => usage(error.to_string()),
    })?;
    if contents.torn_bytes > 0 {
        let torn = contents.torn_bytes;
        tracing::warn!(torn, "the end of the journal is torn");
        out.note(&format!(
            "the last {torn} bytes of {} were being written when the program died, and are dropped: their tokens are \
             computed again",
            path.display()
        ));
    }
    Ok((journal, contents))
}

/// Whether all that is unfinished is of this model.
///
/// # Errors
/// Where something is of another one: its answers would go on as something else.
pub fn check_model(contents: &Contents, model: Digest, path: &Path) -> Result<()> {
    match contents.requests.values().find(|found| found.asked.model != model) {
        None => Ok(()),
        Some(found) => Err(usage(format!(
            "the journal {} is of another model (digest {}…, this one's is {}…): give that one, or another --journal",
            path.display(),
            found.asked.model.short(),
            model.short()
        ))),
    }
}

/// Under what else than its model a request has the same answers: kinds of numbers, the context, devices.
pub fn conditions((activations, kv, wire): (&str, &str, &str), context: usize, stages: &[StageRow]) -> String {
    let devices: BTreeSet<&str> = stages.iter().map(|stage| stage.device.as_str()).collect();
    let devices: Vec<&str> = devices.into_iter().collect();
    format!("activations {activations}, KV {kv}, wire {wire}, context {context}, on {}", devices.join(" and "))
}

/// Says where answers may go on otherwise than they would have.
pub fn note_conditions(contents: &Contents, conditions: &str, out: &Out) {
    if let Some(found) = contents.requests.values().find(|found| found.asked.conditions != conditions) {
        let before = &found.asked.conditions;
        tracing::warn!(before, now = conditions, "the journal's answers go on under other conditions");
        out.note(&format!(
            "answers of the journal began with {before}; now it is {conditions}. The tokens that they have stay; those \
             that follow may be others than they would have been"
        ));
    }
}
