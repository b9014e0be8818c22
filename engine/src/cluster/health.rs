//! What a host says of itself when its head wants to know whether all is well.

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Models that are asked about at once.
pub const MODELS_MAX: usize = 64;
/// Findings of one host that are passed on.
pub const FINDINGS_MAX: usize = 256;

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Works, and is worth knowing.
    Note,
    /// Works, and will not for long, or not well.
    Warning,
    /// Does not work.
    Error,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// What was looked at, in a word or two.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub advice: Option<String>,
}

impl Finding {
    /// All is well with `subject`.
    pub fn ok(subject: &str, found: impl Into<String>) -> Finding {
        Finding { severity: Severity::Ok, subject: subject.to_owned(), found: found.into(), advice: None }
    }

    /// Something that is not as it might be, and what to do about it.
    pub fn new(severity: Severity, subject: &str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { severity, subject: subject.to_owned(), found: found.into(), advice: Some(advice.into()) }
    }
}

/// A model that a head has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// Of its contents.
    pub digest: Digest,
    /// Of its files.
    pub bytes: u64,
    /// For people.
    pub name: String,
}

/// What a worker answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// Its clock when it was asked, in milliseconds of Unix time.
    pub unix_ms: u64,
    /// What it found.
    pub findings: Vec<Finding>,
}
