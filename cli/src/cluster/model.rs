//! A model as workers look for it: by what is in its files, whatever they are called.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use pp_engine::checkpoint::{Checkpoint, Container};
use pp_engine::cluster::whole::{Inventory, Item, Whole};
use pp_engine::digest::{self, Digest, Digests, ModelFile};
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

/// The model of that digest in the models folder or the hub's cache, if it is there. `stop` ends the search.
///
/// # Errors
/// When the search was ended.
pub fn find(digest: &Digest, bytes: u64, stop: &AtomicBool) -> Result<Option<PathBuf>, String> {
    let places = Places::from_env();
    let mut go_on = |_, _| goes_on(stop);
    let found = Digests::new(places.digests.clone()).find(*digest, bytes, &places.searched(), &mut go_on);
    found.map_err(|error| error.to_string())
}

fn goes_on(stop: &AtomicBool) -> bool {
    !stop.load(Ordering::Relaxed) && !cancel::flag().load(Ordering::Relaxed)
}

/// The model called `name` in the models folder or the hub's cache, with all that it is made of. `stop` ends reading it.
///
/// # Errors
/// When it cannot be read, or leads elsewhere.
pub fn whole(name: &str, stop: &AtomicBool) -> Result<Option<Whole>, String> {
    let places = Places::from_env();
    let Some(path) = places.kept(name).map_err(|error| error.to_string())? else { return Ok(None) };
    let model = Checkpoint::open(&path).map_err(|error| error.to_string())?;
    if path.is_file() && model.container == Container::Safetensors {
        return Err(format!("{name} is a file of a model in a folder: ask for the folder"));
    }
    let files = digest::copied(&model).map_err(|error| error.to_string())?;
    let roots = roots(&places, &path);
    if let Some(file) = files.iter().find(|file| !is_in(&file.path, &roots)) {
        return Err(format!("{} leads out of the folders for models", file.path.display()));
    }
    let digests = Digests::new(places.digests.clone()).of_each(&files, &mut |_, _| goes_on(stop));
    let digests = digests.map_err(|error| error.to_string())?;
    let (commit, folder) = place(&places, &path);
    let item = |(file, digest): (&ModelFile, Digest)| Item { name: file.name.clone(), bytes: file.bytes, digest };
    let items = files.iter().zip(digests).map(item).collect();
    let inventory = Inventory::new(commit, folder, items);
    Ok(Some(Whole { inventory, paths: files.into_iter().map(|file| file.path).collect() }))
}

/// Where files of the model at `path` may be: links in the models folder may lead to a model elsewhere, and those in it
/// no further.
fn roots(places: &Places, path: &Path) -> Vec<PathBuf> {
    let real = path.canonicalize().ok();
    let own = real.map(|real| if real.is_file() { real.parent().unwrap_or(&real).to_owned() } else { real });
    [&places.folder, &places.hub].into_iter().flatten().filter_map(|root| root.canonicalize().ok()).chain(own).collect()
}

fn is_in(path: &Path, roots: &[PathBuf]) -> bool {
    path.canonicalize().is_ok_and(|path| roots.iter().any(|root| path.starts_with(root)))
}

/// The commit that a model of the hub's cache is, and the folder of its files seen from there or from the models folder.
fn place(places: &Places, path: &Path) -> (Option<String>, String) {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let within = |root: &Option<PathBuf>| root.as_ref().and_then(|root| folder.strip_prefix(root).ok());
    if let Some(within) = within(&places.folder) {
        return (None, text(within));
    }
    // models--OWNER--NAME/snapshots/COMMIT/…
    let mut parts = within(&places.hub).map(Path::components).into_iter().flatten().skip(2);
    let commit = parts.next().map(|commit| text(commit.as_ref()));
    (commit, text(&parts.collect::<PathBuf>()))
}
