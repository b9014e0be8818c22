//! A model as workers look for it: by what is in its files, whatever they are called.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::digest::{self, Digest, Digests};
use pp_engine::pipeline::Model;

use crate::models::{Places, digest_of};
use crate::output::Out;
use crate::{cancel, errors};

/// The model that the head has opened. Reads all of one that was never seen before.
///
/// # Errors
/// When its files cannot be read.
pub fn of(checkpoint: &Checkpoint, out: &Out) -> Result<Model> {
    let digest = digest_of(checkpoint, out)?;
    let bytes = digest::bytes(checkpoint).map_err(|error| errors::model(error.to_string()))?;
    let name = checkpoint.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Model { digest, bytes, name, manifests: Places::from_env().manifests })
}

/// The model of that digest in the models folder, if it is there. `stop` ends the search.
///
/// # Errors
/// When the search was ended.
pub fn find(digest: &Digest, bytes: u64, stop: &AtomicBool) -> Result<Option<PathBuf>, String> {
    let places = Places::from_env();
    let Some(folder) = places.folder else { return Ok(None) };
    let go_on = || !stop.load(Ordering::Relaxed) && !cancel::flag().load(Ordering::Relaxed);
    let found = Digests::new(places.digests).find(*digest, bytes, &[folder], &mut |_, _| go_on());
    found.map_err(|error| error.to_string())
}
