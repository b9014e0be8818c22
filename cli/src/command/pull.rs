//! Gets a model from the Hugging Face hub into its standard cache, or from a worker of this head's cluster.

mod hub;
mod member;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use pp_engine::checkpoint::Checkpoint;
use serde::Serialize;

use crate::args::PullArgs;
use crate::cluster::Here;
use crate::errors;
use crate::hub::{HubError, HubName};
use crate::models::Places;
use crate::output::{Out, Report, bytes};

/// The folder of what has not come whole, within that where it will be.
const STAGING: &str = ".pp-run-pull";

/// Downloads what is missing and says where the model is.
pub fn run(args: &PullArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let pulled = match &args.from {
        Some(worker) => {
            let found = member::pull(&Here::open()?, &args.name, Some(worker), &out)?;
            found.map_err(|said| errors::model(format!("model `{}`: {}", args.name, said.join("; "))))?
        }
        None => from_anywhere(&args.name, &out)?,
    };
    // What cannot be used is better known now than when it is wanted.
    let model = Checkpoint::open(&pulled.path)?;
    for (what, why) in model.unsupported() {
        out.note(&format!("{what} is not supported: {why}"));
    }
    out.result(&pulled)?;
    Ok(ExitCode::SUCCESS)
}

/// From the hub, else from a worker that has it.
fn from_anywhere(name: &str, out: &Out) -> Result<Pulled> {
    let failed = match HubName::parse(name) {
        Ok(hub_name) => {
            let folder =
                Places::from_env().hub.context("there is no place for models of the hub: set HF_HOME or HOME")?;
            match hub::pull(&folder, &hub_name, out) {
                Ok(pulled) => return Ok(pulled),
                Err(Failed::Here(error)) => return Err(error),
                Err(Failed::Elsewhere(error)) => error,
            }
        }
        Err(error @ HubError::Name { .. }) if !is_plain(name) => return Err(errors::usage(error.to_string())),
        Err(error) => errors::usage(error.to_string()),
    };
    let Some(here) = Here::open().ok().filter(|here| here.workers().next().is_some()) else { return Err(failed) };
    match member::pull(&here, name, None, out)? {
        Ok(pulled) => Ok(pulled),
        Err(said) => {
            let exit = errors::exit_of(&failed);
            Err(errors::refusal(exit, format!("{failed}\nand no worker has it: {}", said.join("; "))))
        }
    }
}

/// What a model of somebody's models folder may be called.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0'])
}

/// Why a model does not come.
enum Failed {
    /// Nobody else could do better.
    Here(anyhow::Error),
    /// Somebody else may have it.
    Elsewhere(anyhow::Error),
}

impl From<anyhow::Error> for Failed {
    fn from(error: anyhow::Error) -> Failed {
        Failed::Here(error)
    }
}

#[derive(Debug, Serialize)]
struct Pulled {
    name: String,
    /// What `-m` may also be given.
    path: PathBuf,
    /// The worker that gave it; nothing: the hub did, or all of it was there.
    from: Option<String>,
    bytes: u64,
    /// Bytes of the files that were not there before.
    downloaded_bytes: u64,
    files: Vec<PulledFile>,
}

#[derive(Debug, Serialize)]
struct PulledFile {
    name: String,
    bytes: u64,
    downloaded: bool,
}

impl Pulled {
    fn new(name: String, path: PathBuf, files: Vec<PulledFile>, from: Option<String>) -> Pulled {
        let downloaded = files.iter().filter(|file| file.downloaded).map(|file| file.bytes);
        let (downloaded_bytes, bytes) = (downloaded.sum(), files.iter().map(|file| file.bytes).sum());
        Pulled { name, path, from, bytes, downloaded_bytes, files }
    }

    fn of_hub(name: &HubName, path: PathBuf, files: Vec<PulledFile>) -> Pulled {
        let revision = if name.revision == "main" { String::new() } else { format!("@{}", name.revision) };
        let file = name.file.as_ref().map_or(String::new(), |file| format!(":{file}"));
        Pulled::new(format!("{}{revision}{file}", name.repo), path, files, None)
    }
}

impl Report for Pulled {
    fn text(&self) -> String {
        let from = self.from.as_ref().map_or(String::new(), |worker| format!(" from {worker}"));
        let got = match self.downloaded_bytes {
            0 => "all of it was there".to_owned(),
            got => format!("{} downloaded{from}", bytes(got)),
        };
        format!("{}  {}, {got}\nuse it with -m {}", self.path.display(), bytes(self.bytes), self.name)
    }
}

/// The disk is full, or would be.
fn no_room(file: &str, needed: u64, free: u64, folder: &Path) -> anyhow::Error {
    anyhow::anyhow!(
        "no room for {file}: {} more are needed ({needed} bytes), and the disk of {} has {} ({free} bytes)\nmake room and run the same again: what has come is kept",
        bytes(needed),
        folder.display(),
        bytes(free)
    )
}

/// Bytes that the disk has left for this user where `path` is, or would be.
fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let found = rustix::fs::statvfs(there)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}
