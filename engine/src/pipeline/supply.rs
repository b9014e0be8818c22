//! Weights for workers that have no copy of the model: the head learns who lacks it and who has which tensors, names each
//! taker its sources, and is one of them itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::Sender;
use pp_transport::LinkId;

use super::thread::{Event, WeightsEvent};
use super::{Model, PipelineError};
use crate::checkpoint::Checkpoint;
use crate::cluster::control::{Fellow, Source, ToWorker};
use crate::cluster::remote::Worker;
use crate::cluster::weights::{self, Stock};
use crate::manifest::{Manifest, ManifestError};

/// What the head knows of who has what.
pub(super) struct Supply {
    checkpoint: Arc<Checkpoint>,
    model: Model,
    session: u64,
    workers: Vec<Arc<Worker>>,
    /// Of each worker: whether it has the model, once it has said so.
    has_model: Vec<Option<bool>>,
    manifest: Option<Arc<Manifest>>,
    is_hashing: bool,
    /// Of each worker, once it has said so.
    holds: HashMap<usize, Vec<u8>>,
    is_told: bool,
    tell: Sender<Event>,
    stop: Arc<AtomicBool>,
}

/// The place of a worker in links for weights: the head's is 0.
pub(super) fn place(worker: usize) -> u32 {
    worker as u32 + 1
}

impl Supply {
    pub(super) fn new(
        checkpoint: &Arc<Checkpoint>,
        model: &Model,
        session: u64,
        workers: &[Arc<Worker>],
        tell: &Sender<Event>,
        stop: &Arc<AtomicBool>,
    ) -> Supply {
        Supply {
            checkpoint: checkpoint.clone(),
            model: model.clone(),
            session,
            workers: workers.to_vec(),
            has_model: vec![None; workers.len()],
            manifest: None,
            is_hashing: false,
            holds: HashMap::new(),
            is_told: false,
            tell: tell.clone(),
            stop: stop.clone(),
        }
    }

    /// Workers that have said that they have no copy.
    fn takers(&self) -> impl Iterator<Item = usize> {
        self.has_model.iter().enumerate().filter(|(_, has)| **has == Some(false)).map(|(worker, _)| worker)
    }

    /// Whether `worker` has said that it has no copy.
    pub(super) fn lacks_model(&self, worker: &Arc<Worker>) -> bool {
        self.takers().any(|taker| Arc::ptr_eq(&self.workers[taker], worker))
    }

    /// A worker has said something; threads that this takes are added to `threads`.
    pub(super) fn hear(
        &mut self,
        worker: &str,
        said: WeightsEvent,
        threads: &mut Vec<JoinHandle<()>>,
    ) -> Result<(), PipelineError> {
        let Some(at) = self.workers.iter().position(|known| known.name() == worker) else { return Ok(()) };
        match said {
            WeightsEvent::HasModel(has) => {
                self.has_model[at] = Some(has);
                if !has && !self.is_hashing {
                    self.is_hashing = true;
                    threads.push(self.make_manifest().map_err(no_thread)?);
                }
                self.tell_all()
            }
            WeightsEvent::Holds(holds) => {
                self.holds.insert(at, holds);
                self.begin(threads)
            }
        }
    }

    /// The manifest is made.
    pub(super) fn made(&mut self, manifest: Result<Arc<Manifest>, ManifestError>) -> Result<(), PipelineError> {
        let manifest = manifest.map_err(|error| match error {
            ManifestError::Cancelled => PipelineError::Cancelled,
            error => PipelineError::Manifest(error),
        })?;
        self.manifest = Some(manifest);
        self.tell_all()
    }

    fn make_manifest(&self) -> std::io::Result<JoinHandle<()>> {
        let (checkpoint, model) = (self.checkpoint.clone(), self.model.clone());
        let (tell, stop) = (self.tell.clone(), self.stop.clone());
        let make = move || {
            let mut told = 0;
            let mut progress = |done: u64, total: u64| {
                if done >= told + (total / 128).max(1) {
                    told = done;
                    // A bar misses nothing that matters.
                    let _ = tell.try_send(Event::Hashing(done, total));
                }
                !stop.load(Ordering::Relaxed)
            };
            let made = Manifest::remembered(model.manifests.as_deref(), &checkpoint, model.digest, &mut progress);
            let _ = tell.send(Event::Manifest(made.map(Arc::new)));
        };
        std::thread::Builder::new().name("manifest".to_owned()).spawn(make)
    }

    /// Once all have said whether they have the model, and its tensors are known: who may come to whom.
    fn tell_all(&mut self) -> Result<(), PipelineError> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        if self.is_told || self.has_model.contains(&None) {
            return Ok(());
        }
        self.is_told = true;
        let takers: Vec<Fellow> = self.takers().map(|taker| self.fellow(taker)).collect();
        for worker in &self.workers {
            let others = takers.iter().filter(|taker| taker.name != worker.name()).cloned().collect();
            worker.say(&ToWorker::Manifest { manifest: manifest.encode(), takers: others });
        }
        Ok(())
    }

    fn fellow(&self, worker: usize) -> Fellow {
        Fellow { place: place(worker), name: self.workers[worker].name().to_owned() }
    }

    /// Once all have said which tensors they have: those without a copy begin.
    fn begin(&mut self, threads: &mut Vec<JoinHandle<()>>) -> Result<(), PipelineError> {
        let Some(manifest) = self.manifest.clone().filter(|_| self.holds.len() == self.workers.len()) else {
            return Ok(());
        };
        for taker in self.takers() {
            let id = LinkId { session: self.session, link: weights::link(0, place(taker)) };
            let port = self.workers[taker].weights(id);
            let stock = Stock { manifest: manifest.clone(), files: Some(self.checkpoint.clone()), cache: None };
            threads.push(stock.serve(Box::new(port), self.stop.clone()).map_err(no_thread)?);
            // Each begins with the one behind it, so that where there are many not all ask the same.
            let count = self.workers.len();
            let sources = (1..count).map(|step| (taker + step) % count).filter_map(|other| {
                let holds = self.holds[&other].clone();
                holds.iter().any(|bits| *bits != 0).then(|| Source { fellow: self.fellow(other), holds })
            });
            self.workers[taker].say(&ToWorker::Fetch(sources.take(weights::OTHERS_MAX).collect()));
        }
        Ok(())
    }
}

fn no_thread(error: std::io::Error) -> PipelineError {
    PipelineError::NoThread(error)
}
