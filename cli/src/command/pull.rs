//! Gets a model from the Hugging Face hub into its standard cache.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use hf_hub::Cache;
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use pp_engine::checkpoint::Checkpoint;
use serde::Serialize;

use crate::args::PullArgs;
use crate::errors;
use crate::hub::{self, HubError, HubName};
use crate::models::Places;
use crate::output::progress::Steps;
use crate::output::{Out, Report, bytes};

/// How often a transfer that breaks off is continued, and how long is waited before.
const TRIES: u64 = 5;
const PAUSE: Duration = Duration::from_secs(1);
const MIB: usize = 1 << 20;

/// Downloads what is missing and says where the model is.
pub fn run(args: &PullArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let name = HubName::parse(&args.name).map_err(|error| errors::usage(error.to_string()))?;
    let folder = Places::from_env().hub.context("there is no place for models of the hub: set HF_HOME or HOME")?;
    let pulled = if is_set("HF_HUB_OFFLINE") { offline(&folder, &name)? } else { online(&folder, &name, &out)? };
    // What cannot be used is better known now than when it is wanted.
    let model = Checkpoint::open(&pulled.path)?;
    for (what, why) in model.unsupported() {
        out.note(&format!("{what} is not supported: {why}"));
    }
    out.result(&pulled)?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Pulled {
    name: String,
    /// What `-m` may also be given.
    path: PathBuf,
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

impl Report for Pulled {
    fn text(&self) -> String {
        let got = match self.downloaded_bytes {
            0 => "all of it was there".to_owned(),
            got => format!("{} downloaded", bytes(got)),
        };
        format!("{}  {}, {got}\nuse it with -m {}", self.path.display(), bytes(self.bytes), self.name)
    }
}

/// Whether a variable says yes, as Hugging Face's libraries read it.
fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()))
}

fn offline(folder: &Path, name: &HubName) -> Result<Pulled> {
    let path = hub::cached(folder, name).map_err(about)?.ok_or_else(|| {
        errors::model(format!("{} is not in {}, and HF_HUB_OFFLINE forbids to fetch it", name.repo, folder.display()))
    })?;
    let files = Checkpoint::open(&path)?.files();
    let files = files.into_iter().map(|(path, bytes)| PulledFile {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bytes,
        downloaded: false,
    });
    Ok(Pulled::of(name, path, files.collect()))
}

fn online(folder: &Path, name: &HubName, out: &Out) -> Result<Pulled> {
    let cache = Cache::new(folder.to_owned());
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false);
    if let Some(token) = variable("HF_TOKEN") {
        builder = builder.with_token(Some(token));
    }
    if let Some(endpoint) = variable("HF_ENDPOINT") {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    let api = builder.build().map_err(|error| refusal(name, &error))?;
    let repo = api.repo(name.repo());
    let info = repo.info().map_err(|error| refusal(name, &error))?;
    let all: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
    let wanted = name.files(&all).map_err(about)?;
    let mut files = Vec::new();
    let mut snapshot = PathBuf::new();
    for file in &wanted {
        // A file that is there may be of an older commit of the branch.
        let metadata = api.metadata(&repo.url(file)).map_err(|error| refusal(name, &error))?;
        snapshot = cache.repo(name.repo()).pointer_path(metadata.commit_hash());
        let is_here = std::fs::metadata(snapshot.join(file)).is_ok_and(|found| found.len() == metadata.size() as u64);
        if is_here {
            cache.repo(name.repo()).create_ref(metadata.commit_hash()).context("cannot write to the cache")?;
        } else {
            download(&api, &repo, &cache, name, file, out)?;
        }
        files.push(PulledFile { name: file.clone(), bytes: metadata.size() as u64, downloaded: !is_here });
    }
    Ok(Pulled::of(name, hub::entry(&snapshot, &wanted), files))
}

impl Pulled {
    fn of(name: &HubName, path: PathBuf, files: Vec<PulledFile>) -> Pulled {
        let revision = if name.revision == "main" { String::new() } else { format!("@{}", name.revision) };
        let file = name.file.as_ref().map_or(String::new(), |file| format!(":{file}"));
        let downloaded = files.iter().filter(|file| file.downloaded).map(|file| file.bytes);
        Pulled {
            name: format!("{}{revision}{file}", name.repo),
            path,
            bytes: files.iter().map(|file| file.bytes).sum(),
            downloaded_bytes: downloaded.sum(),
            files,
        }
    }
}

/// A file of a repository, whole. What has come of it before is not fetched again.
fn download(api: &Api, repo: &ApiRepo, cache: &Cache, name: &HubName, file: &str, out: &Out) -> Result<()> {
    let mut tries = 1;
    loop {
        let metadata = api.metadata(&repo.url(file)).map_err(|error| refusal(name, &error))?;
        let blob = cache.repo(name.repo()).blob_path(metadata.etag());
        let part = blob.with_extension("part");
        let has = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len());
        if has(&part) >= metadata.size() as u64 {
            // Nothing is left to ask for, but it was never finished.
            let _ = std::fs::remove_file(&part);
        }
        let shown = Shown { steps: Steps::new(out, "pull", "MiB"), done: 0, total: 0 };
        match repo.download_with_progress(file, shown) {
            Ok(path) if has(&path) == metadata.size() as u64 => return Ok(()),
            Ok(path) => {
                let found = has(&path);
                let _ = (std::fs::remove_file(&path), std::fs::remove_file(&blob));
                anyhow::bail!("{file} of {}: {found} bytes came of {}; pull it again", name.repo, metadata.size());
            }
            Err(error) if tries < TRIES && may_pass(&error) => {
                out.note(&format!("{file}: {error}; going on after {}", bytes(has(&part))));
                std::thread::sleep(PAUSE * tries as u32);
                tries += 1;
            }
            Err(error) => return Err(refusal(name, &error)),
        }
    }
}

/// A bar for a file.
struct Shown {
    steps: Steps,
    done: usize,
    total: usize,
}

impl Progress for Shown {
    fn init(&mut self, size: usize, _: &str) {
        (self.done, self.total) = (0, size);
    }

    fn update(&mut self, size: usize) {
        self.done += size;
        self.steps.update(self.done / MIB, self.total / MIB);
    }

    fn finish(&mut self) {
        self.steps.finish();
    }
}

/// The status of an answer that refuses.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match &**error {
            ureq::Error::StatusCode(code) => Some(*code),
            _ => None,
        },
        _ => None,
    }
}

fn may_pass(error: &ApiError) -> bool {
    match error {
        ApiError::RequestError(_) => status(error).is_none_or(|code| code == 429 || code >= 500),
        ApiError::IoError(_) => true,
        _ => false,
    }
}

fn refusal(name: &HubName, error: &ApiError) -> anyhow::Error {
    let repo = &name.repo;
    match status(error) {
        Some(401 | 403) => errors::model(format!(
            "the hub does not give {repo} to everybody: accept its terms on its page, and set HF_TOKEN to a token of yours"
        )),
        Some(404) => {
            errors::model(format!("the hub has no {repo} at revision {}, or none for you (HF_TOKEN)", name.revision))
        }
        Some(code) => errors::model(format!("the hub answers with status {code} for {repo}: try again later")),
        None => anyhow::anyhow!("cannot get {repo}: {error}; what has come is kept, run the same again"),
    }
}

fn about(error: HubError) -> anyhow::Error {
    match error {
        HubError::NoModel { .. } => errors::model(error.to_string()),
        error => errors::usage(error.to_string()),
    }
}
