//! From the hub, by its own crate. Files come into a folder of their own, and go into the cache when they are what the
//! hub says.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use hf_hub::Cache;
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo, Metadata};
use pp_engine::checkpoint::Checkpoint;

use super::{Failed, Pulled, PulledFile, STAGING, free_bytes};
use crate::errors;
use crate::hub::content::{Tag, Verified};
use crate::hub::{self, HubError, HubName, is_safe};
use crate::models::Places;
use crate::output::progress::Steps;
use crate::output::{Out, bytes};

/// How often a transfer that breaks off is continued, and how long is waited before.
const TRIES: u64 = 5;
const PAUSE: Duration = Duration::from_secs(1);
const MIB: usize = 1 << 20;

/// Whether a variable says yes, as Hugging Face's libraries read it.
fn is_set(variable: &str) -> bool {
    std::env::var(variable).is_ok_and(|value| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str()))
}

/// The model, into the cache at `folder`.
pub(super) fn pull(folder: &Path, name: &HubName, out: &Out) -> Result<Pulled, Failed> {
    if is_set("HF_HUB_OFFLINE") { offline(folder, name) } else { Hub::open(folder, name, out)?.pull() }
}

fn offline(folder: &Path, name: &HubName) -> Result<Pulled, Failed> {
    let path = hub::cached(folder, name).map_err(about)?.ok_or_else(|| {
        Failed::Elsewhere(errors::model(format!(
            "{} is not in {}, and HF_HUB_OFFLINE forbids to fetch it",
            name.repo,
            folder.display()
        )))
    })?;
    let files = Checkpoint::open(&path).map_err(anyhow::Error::from)?.files();
    let files = files.into_iter().map(|(path, bytes)| PulledFile {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        bytes,
        downloaded: false,
    });
    Ok(Pulled::of_hub(name, path, files.collect()))
}

/// A repository of the hub, and the cache that it comes into.
struct Hub<'a> {
    name: &'a HubName,
    out: &'a Out,
    api: Api,
    repo: ApiRepo,
    cache: Cache,
    /// What is not in the cache yet.
    staging: Cache,
    verified: Verified,
}

/// A file of the repository.
struct Wanted {
    file: String,
    metadata: Metadata,
    is_here: bool,
}

impl<'a> Hub<'a> {
    fn open(folder: &Path, name: &'a HubName, out: &'a Out) -> Result<Hub<'a>, Failed> {
        let cache = Cache::new(folder.to_owned());
        let staging = folder.join(name.repo().folder_name()).join(STAGING);
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let mut builder = ApiBuilder::from_cache(cache.clone()).with_progress(false).with_cache_dir(staging.clone());
        if let Some(token) = variable("HF_TOKEN") {
            builder = builder.with_token(Some(token));
        }
        if let Some(endpoint) = variable("HF_ENDPOINT") {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
        }
        let api = builder.build().map_err(|error| refusal(name, &error))?;
        let repo = api.repo(name.repo());
        let verified = Verified::new(Places::from_env().pulled);
        Ok(Hub { name, out, api, repo, cache, staging: Cache::new(staging), verified })
    }

    fn pull(&self) -> Result<Pulled, Failed> {
        let info = self.repo.info().map_err(|error| refusal(self.name, &error))?;
        let all: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let names = self.name.files(&all).map_err(about)?;
        let wanted = names.iter().map(|file| self.look(file)).collect::<Result<Vec<_>, Failed>>()?;
        for (at, file) in wanted.iter().enumerate() {
            if !file.is_here {
                self.look_for_room(&wanted[at..])?;
                self.fetch(file, &wanted[at..])?;
            }
            let reference = self.folder().join("refs").join(&self.name.revision);
            hub::refer(&reference, file.metadata.commit_hash()).context("cannot write to the cache")?;
        }
        let snapshot = wanted.first().map(|file| self.snapshot(&file.metadata)).unwrap_or_default();
        let files = wanted.iter().map(|wanted| PulledFile {
            name: wanted.file.clone(),
            bytes: wanted.metadata.size() as u64,
            downloaded: !wanted.is_here,
        });
        Ok(Pulled::of_hub(self.name, hub::entry(&snapshot, &names), files.collect()))
    }

    fn folder(&self) -> PathBuf {
        self.cache.path().join(self.name.repo().folder_name())
    }

    fn snapshot(&self, metadata: &Metadata) -> PathBuf {
        self.cache.repo(self.name.repo()).pointer_path(metadata.commit_hash())
    }

    fn metadata(&self, file: &str) -> Result<Metadata, Failed> {
        let metadata = self.api.metadata(&self.repo.url(file)).map_err(|error| refusal(self.name, &error))?;
        // Both become names of files.
        if !is_safe(metadata.etag()) || !is_safe(metadata.commit_hash()) {
            return Err(errors::model(format!("the hub's answer for {file} leads out of the cache")).into());
        }
        Ok(metadata)
    }

    /// What the hub has of a file now, and whether that is in the cache.
    fn look(&self, file: &str) -> Result<Wanted, Failed> {
        let metadata = self.metadata(file)?;
        if Tag::of(metadata.etag()) == Tag::Opaque {
            self.out.note(&format!("the hub does not say what {file} holds: only its length is looked at"));
        }
        let pointer = self.snapshot(&metadata).join(file);
        let blob = self.cache.repo(self.name.repo()).blob_path(metadata.etag());
        let mut is_here = self.is_right(&self.verified, &pointer, file, &metadata)?;
        if !is_here && pointer.exists() {
            self.out.note(&format!("{file} in the cache is not what the hub has: it is fetched again"));
        }
        if !is_here && self.is_right(&self.verified, &blob, file, &metadata)? {
            self.point(&pointer, file, &metadata)?;
            is_here = true;
        }
        Ok(Wanted { file: file.to_owned(), metadata, is_here })
    }

    fn is_right(&self, verified: &Verified, path: &Path, file: &str, metadata: &Metadata) -> Result<bool, Failed> {
        let (mut steps, total) = (Steps::new(self.out, "verify", "MiB"), metadata.size());
        let mut read = |done: u64| steps.update(done as usize / MIB, total / MIB);
        let is_it = verified.is(path, total as u64, metadata.etag(), &mut read);
        steps.finish();
        Ok(is_it.with_context(|| format!("cannot read {file} in the cache"))?)
    }

    /// Names a blob of the cache as the file that it is in a commit.
    fn point(&self, pointer: &Path, file: &str, metadata: &Metadata) -> Result<(), Failed> {
        let point = || {
            std::fs::create_dir_all(pointer.parent().unwrap_or(pointer))?;
            if pointer.symlink_metadata().is_ok() {
                std::fs::remove_file(pointer)?;
            }
            let up = "../".repeat(2 + file.matches('/').count());
            std::os::unix::fs::symlink(format!("{up}blobs/{}", metadata.etag()), pointer)
        };
        Ok(point().with_context(|| format!("cannot write {}", pointer.display()))?)
    }

    /// What has come of a file.
    fn part(&self, wanted: &Wanted) -> PathBuf {
        self.staging.repo(self.name.repo()).blob_path(wanted.metadata.etag()).with_extension("part")
    }

    /// Bytes of some files that are still to come.
    fn missing(&self, files: &[Wanted]) -> u64 {
        let missing = files.iter().filter(|wanted| !wanted.is_here);
        missing.map(|wanted| (wanted.metadata.size() as u64).saturating_sub(length(&self.part(wanted)))).sum()
    }

    fn look_for_room(&self, files: &[Wanted]) -> Result<(), Failed> {
        match free_bytes(self.cache.path()) {
            Ok(free) if free < self.missing(files) => Err(self.no_room(files)),
            _ => Ok(()),
        }
    }

    /// The first of these files, and those behind it, have no room.
    fn no_room(&self, files: &[Wanted]) -> Failed {
        let folder = self.cache.path();
        let (needed, free) = (self.missing(files), free_bytes(folder).unwrap_or(0));
        super::no_room(&files[0].file, needed, free, folder).into()
    }

    /// A file, whole and right, into the cache.
    fn fetch(&self, wanted: &Wanted, rest: &[Wanted]) -> Result<(), Failed> {
        let (file, metadata) = (&wanted.file, &wanted.metadata);
        let blob = self.cache.repo(self.name.repo()).blob_path(metadata.etag());
        for is_last in [false, true] {
            let path = self.download(wanted, rest)?;
            let staged = path.canonicalize().with_context(|| format!("{file} came and is not there"))?;
            let _ = std::fs::remove_file(&path);
            if self.is_right(&Verified::new(None), &staged, file, metadata)? {
                let place = || {
                    std::fs::create_dir_all(blob.parent().unwrap_or(&blob))?;
                    std::fs::File::open(&staged)?.sync_all()?;
                    std::fs::rename(&staged, &blob)
                };
                place().with_context(|| format!("cannot write {}", blob.display()))?;
                self.verified.trust(&blob, metadata.etag());
                return self.point(&self.snapshot(metadata).join(file), file, metadata);
            }
            let _ = std::fs::remove_file(&staged);
            if !is_last {
                self.out.note(&format!("{file} came and is not what the hub says it is: it is fetched again"));
            }
        }
        Err(anyhow::anyhow!(
            "{file} of {} came twice and is not what the hub says it is ({}): nothing of it is kept; try again later",
            self.name.repo,
            metadata.etag()
        )
        .into())
    }

    /// A file, whole. What has come of it before is not fetched again.
    fn download(&self, wanted: &Wanted, rest: &[Wanted]) -> Result<PathBuf, Failed> {
        let (file, size) = (&wanted.file, wanted.metadata.size() as u64);
        let part = self.part(wanted);
        // What an end in the midst of it has left would be in the way.
        let pointer = self.staging.repo(self.name.repo()).pointer_path(wanted.metadata.commit_hash()).join(file);
        let _ = std::fs::remove_file(pointer);
        let mut tries = 1;
        loop {
            if length(&part) >= size {
                // Nothing is left to ask for, but it was never finished.
                let _ = std::fs::remove_file(&part);
            }
            let shown = Shown { steps: Steps::new(self.out, "pull", "MiB"), done: 0, total: 0 };
            match self.repo.download_with_progress(file, shown) {
                Ok(path) => return Ok(path),
                Err(ApiError::IoError(error)) if error.kind() == std::io::ErrorKind::StorageFull => {
                    return Err(self.no_room(rest));
                }
                Err(error) if tries < TRIES && may_pass(&error) => {
                    self.out.note(&format!("{file}: {error}; going on after {}", bytes(length(&part))));
                    std::thread::sleep(PAUSE * tries as u32);
                    tries += 1;
                }
                Err(error) => return Err(refusal(self.name, &error)),
            }
        }
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |found| found.len())
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

/// Others may have what the hub does not give.
fn refusal(name: &HubName, error: &ApiError) -> Failed {
    let repo = &name.repo;
    Failed::Elsewhere(match status(error) {
        Some(401 | 403) => errors::model(format!(
            "the hub does not give {repo} to everybody: accept its terms on its page, and set HF_TOKEN to a token of yours"
        )),
        Some(404) => {
            errors::model(format!("the hub has no {repo} at revision {}, or none for you (HF_TOKEN)", name.revision))
        }
        Some(code) => errors::model(format!("the hub answers with status {code} for {repo}: try again later")),
        None => anyhow::anyhow!("cannot get {repo}: {error}; what has come is kept, run the same again"),
    })
}

fn about(error: HubError) -> Failed {
    match error {
        HubError::NoModel { .. } => Failed::Elsewhere(errors::model(error.to_string())),
        error => Failed::Here(errors::usage(error.to_string())),
    }
}
