//! A model as workers look for it: by what is in its files, whatever they are called.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

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
    Ok(Model { digest, bytes, name })
}

/// The model of that digest in the models folder.
///
/// # Errors
/// What was looked for and where, where there is none.
pub fn find(digest: &Digest, bytes: u64, name: &str) -> Result<PathBuf, String> {
    let places = Places::from_env();
    let Some(folder) = places.folder else {
        return Err(format!("no {name} here: there is no models folder (set PP_MODELS or HOME)"));
    };
    let folders = [folder];
    let found = Digests::new(places.digests)
        .find(*digest, bytes, &folders, &mut |_, _| !cancel::flag().load(Ordering::Relaxed))
        .map_err(|error| error.to_string())?;
    found.ok_or_else(|| {
        format!(
            "no copy of {name} here: looked for a model of {bytes} bytes with BLAKE3 digest {digest} in {}; copy its file or folder there, under any name",
            folders[0].display()
        )
    })
}
