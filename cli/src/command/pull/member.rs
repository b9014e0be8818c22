//! From another member of the cluster: a worker that has a model gives this head all of its files.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};
use pp_engine::cluster::control::Purpose;
use pp_engine::cluster::remote::{LeaseError, Worker};
use pp_engine::cluster::whole::{self, FetchError, Inventory, Offered};
use pp_engine::digest::{Digest, DigestError, Digests};
use pp_engine::tensor_cache::TensorCache;
use pp_transport::Port;

use super::{Pulled, PulledFile, STAGING};
use crate::cluster::gather::DIAL;
use crate::cluster::{Here, lease_error, typed_name};
use crate::hub::{self, HubName};
use crate::models::Places;
use crate::output::Out;
use crate::output::progress::Steps;
use crate::{cancel, errors};

/// A worker that takes longer reads the model for the first time.
const SOON: Duration = Duration::from_secs(2);
const MIB: u64 = 1 << 20;

/// The model called `name`: from the worker that is named, else from the first that has it; nothing where none does,
/// with what each said.
pub(super) fn pull(here: &Here, name: &str, from: Option<&str>, out: &Out) -> Result<Result<Pulled, Vec<String>>> {
    let members = match from {
        Some(from) => vec![here.worker(&typed_name(from)?)?],
        None => here.workers().collect(),
    };
    let (node, greeting, mut said) = (here.node()?, here.greeting(), Vec::new());
    for member in members {
        let asked = Worker::connect(&node, member, &greeting, Purpose::Look, DIAL);
        let found = asked.and_then(|worker| Ok(ask(&worker, name, out)?.map(|found| (worker, found))));
        if cancel::flag().load(Ordering::Relaxed) {
            return Err(errors::cancelled());
        }
        match found {
            Ok(Some((worker, Offered { inventory, port }))) => {
                let wanted = Wanted { name, worker: worker.name(), inventory, out };
                return wanted.get(port).map(Ok);
            }
            Ok(None) => said.push(format!("worker {} has none of that name", member.name)),
            Err(error) if from.is_some() => return Err(lease_error(error)),
            Err(error) => said.push(error.to_string()),
        }
    }
    Ok(Err(said))
}

/// What a worker has of that name. It may take a while, which is told.
fn ask(worker: &Worker, name: &str, out: &Out) -> Result<Option<Offered>, LeaseError> {
    std::thread::scope(|scope| {
        let (done, waiting) = mpsc::channel::<()>();
        scope.spawn(move || {
            if waiting.recv_timeout(SOON) == Err(mpsc::RecvTimeoutError::Timeout) {
                out.note(&format!("{} reads its copy of {name} once, to know it by its content", worker.name()));
            }
        });
        let found = worker.whole(name, cancel::flag());
        drop(done);
        found
    })
}

/// What is to come.
struct Wanted<'a> {
    name: &'a str,
    worker: &'a str,
    inventory: Inventory,
    out: &'a Out,
}

/// Where a model goes.
struct Goal {
    /// The folder of its files.
    folder: PathBuf,
    /// Where they are until all have come.
    staging: PathBuf,
    /// What is to be opened, and what `-m` calls it.
    path: PathBuf,
    /// The name of the hub's that leads to it, and its commit.
    reference: Option<(PathBuf, String)>,
}

impl Wanted<'_> {
    fn get(&self, mut port: Box<dyn Port>) -> Result<Pulled> {
        let places = Places::from_env();
        if let Some(path) = self.is_here(&places)? {
            let name = path.display().to_string();
            return Ok(self.pulled(name, path, None));
        }
        let goal = self.goal(&places)?;
        let there = self.in_place(&goal)?;
        let staging = TensorCache::new(goal.staging.clone(), u64::MAX);
        let (mut steps, total) = (Steps::new(self.out, "pull", "MiB"), self.inventory.bytes());
        let mut go_on = |done: u64| {
            steps.update((done / MIB) as usize, (total / MIB) as usize);
            !cancel::flag().load(Ordering::Relaxed)
        };
        let got = whole::fetch(&self.inventory, port.as_mut(), &staging, &there, &mut go_on);
        steps.finish();
        let received = got.map_err(|error| self.about(error))?;
        self.place(&goal, &staging)?;
        tracing::info!(received, worker = self.worker, "a model has come");
        Ok(self.pulled(self.name.to_owned(), goal.path, Some(&there)))
    }

    /// What was asked for is at `path`; all but the files that were `there` has come, where anything has.
    fn pulled(&self, name: String, path: PathBuf, there: Option<&HashSet<Digest>>) -> Pulled {
        let files = self.inventory.files.iter().map(|file| PulledFile {
            name: file.name.clone(),
            bytes: file.bytes,
            downloaded: there.is_some_and(|there| !there.contains(&file.digest)),
        });
        let from = there.map(|_| self.worker.to_owned());
        Pulled::new(name, path, files.collect(), from)
    }

    fn about(&self, error: FetchError) -> anyhow::Error {
        match error {
            FetchError::Cancelled => errors::cancelled(),
            FetchError::NoRoom { file, folder, needed, free } => super::no_room(&file, needed, free, &folder),
            FetchError::Io { .. } => error.into(),
            FetchError::Source { .. } | FetchError::Damaged { .. } => {
                errors::worker(format!("worker {}: {error}; what has come is kept, run the same again", self.worker))
            }
        }
    }

    /// Whether this machine has the same model, whatever it is called.
    fn is_here(&self, places: &Places) -> Result<Option<PathBuf>> {
        let mut go_on = |_, _| !cancel::flag().load(Ordering::Relaxed);
        let mut digests = Digests::new(places.digests.clone());
        let bytes = self.inventory.counted().map(|file| file.bytes).sum();
        digests.find(self.inventory.model, bytes, &places.searched(), &mut go_on).map_err(of_digest)
    }

    fn goal(&self, places: &Places) -> Result<Goal> {
        let Inventory { commit, folder, files, .. } = &self.inventory;
        let strange = || {
            let worker = self.worker;
            errors::worker(format!("worker {worker} has {} in a place where none of that name can be", self.name))
        };
        let (root, hub) = match commit {
            Some(commit) => {
                let name = HubName::parse(self.name).map_err(|_| strange())?;
                let hub = places.hub.clone().context("there is no place for models of the hub: set HF_HOME or HOME")?;
                let repo = hub.join(name.repo().folder_name());
                (repo.join("snapshots").join(commit), Some((repo, name.revision, commit.clone())))
            }
            None if folder.contains('/') || !(folder.is_empty() || folder == self.name) => return Err(strange()),
            None => (places.folder.clone().context("there is no models folder: set PP_MODELS or HOME")?, None),
        };
        let staging = hub.as_ref().map_or(&root, |(repo, ..)| repo).join(STAGING);
        let reference = hub.map(|(repo, revision, commit)| (repo.join("refs").join(revision), commit));
        let goal = root.join(folder);
        let is_folder = files.iter().any(|file| file.name == CONFIG);
        let path = if is_folder { goal.clone() } else { goal.join(&files[0].name) };
        Ok(Goal { folder: goal, staging, path, reference })
    }

    /// Files that are in their place. What has the name of one and is something else is left as it is.
    fn in_place(&self, goal: &Goal) -> Result<HashSet<Digest>> {
        let (mut there, mut missing) = (HashSet::new(), HashSet::new());
        for file in &self.inventory.files {
            let path = goal.folder.join(&file.name);
            if path.symlink_metadata().is_err() {
                missing.insert(file.digest);
            } else if digest(&path)? == Some(file.digest) {
                there.insert(file.digest);
            } else {
                return Err(errors::usage(format!(
                    "{} is there already and is something else than {} has: move it away, or give it another name",
                    path.display(),
                    self.worker
                )));
            }
        }
        // Of files that are alike one may be there and another not.
        Ok(&there - &missing)
    }

    /// All is there: gives the files their names, that by which a model is known last.
    fn place(&self, goal: &Goal, staging: &TensorCache) -> Result<()> {
        let mut files: Vec<_> = self.inventory.files.iter().rev().collect();
        files.sort_by_key(|file| file.name == CONFIG);
        std::fs::create_dir_all(&goal.folder).with_context(|| format!("cannot write {}", goal.folder.display()))?;
        for (at, file) in files.iter().enumerate() {
            let (from, to) = (staging.path(&file.digest), goal.folder.join(&file.name));
            // It was in its place, or somebody else has just put it there.
            if digest(&to)? == Some(file.digest) {
                continue;
            }
            let is_wanted_again = files[at + 1..].iter().any(|other| other.digest == file.digest);
            let placed = if is_wanted_again { copy(&from, &to) } else { std::fs::rename(&from, &to) };
            placed.with_context(|| format!("cannot write {}", to.display()))?;
        }
        if let Some((file, commit)) = &goal.reference {
            hub::refer(file, commit).with_context(|| format!("cannot write {}", file.display()))?;
        }
        // As long as nothing else is in it.
        let _ = std::fs::remove_dir(&goal.staging);
        Ok(())
    }
}

/// What makes a folder a model.
const CONFIG: &str = "config.json";

/// All of it or nothing.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let mut unfinished = to.as_os_str().to_owned();
    unfinished.push(".part");
    std::fs::copy(from, &unfinished).and_then(|_| std::fs::rename(&unfinished, to))
}

fn digest(path: &Path) -> Result<Option<Digest>> {
    if !path.is_file() {
        return Ok(None);
    }
    let mut digests = Digests::new(Places::from_env().digests);
    let found = digests.of_file(path, &mut |_| !cancel::flag().load(Ordering::Relaxed));
    found.map(Some).map_err(of_digest)
}

fn of_digest(error: DigestError) -> anyhow::Error {
    match error {
        DigestError::Cancelled => errors::cancelled(),
        error => errors::model(error.to_string()),
    }
}
