//! Looks after the workers of a pipeline that runs: whether one is to be rid of its stages, and whether somebody wants the
//! layers to be divided otherwise. What can be done beforehand is done here, beside the pipeline: another member loads
//! the layers, a split is looked at. Only then the pipeline is told to go.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;
use pp_engine::cluster::remote::{Going, Worker};
use pp_engine::pipeline::{Model, Pipeline, PipelineOptions};
use pp_transport::identity::Name;

use super::list;
use crate::cluster::gather::Reach;
use crate::output::Out;
use crate::plan::{Plan, Sketch};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(100);

/// What there is for the next pipeline.
#[derive(Default)]
pub struct Prepared {
    /// Members that have loaded layers.
    pub others: Vec<Others>,
    /// Members that could not.
    pub failed: Vec<Name>,
    /// Another split.
    pub wish: Option<Wish>,
}

/// Members that have loaded the layers of others.
pub struct Others {
    /// Those others.
    pub of: Vec<Name>,
    /// As many, which this program has.
    pub workers: Vec<Arc<Worker>>,
}

/// Somebody wants the layers to be divided so. Whoever it was hears what comes of it.
pub struct Wish {
    /// Layers of each stage.
    pub split: Vec<usize>,
    number: u64,
    worker: Option<Arc<Worker>>,
}

impl Wish {
    /// Tells what has come of it.
    pub fn came(mut self, outcome: Result<String, String>) {
        if let Some(worker) = self.worker.take() {
            worker.came(self.number, outcome);
        }
    }
}

impl Drop for Wish {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            worker.came(self.number, Err("something else came between: try again".to_owned()));
        }
    }
}

/// The thread that looks.
pub struct Watch {
    stop: Arc<AtomicBool>,
    prepared: Arc<Mutex<Prepared>>,
    workers: Vec<Arc<Worker>>,
    thread: Option<JoinHandle<()>>,
}

/// What it knows.
struct Looking {
    sketch: Sketch,
    model: Model,
    workers: Vec<Arc<Worker>>,
    reach: Arc<Reach>,
    /// Members that are not asked, …
    but: Vec<Name>,
    /// … and how many others may be taken.
    spares: usize,
    /// Bytes of this machine that the pipeline holds.
    held: u64,
    /// Workers that stay, though they are drained: nobody can take their stages.
    stay: Vec<Name>,
    stop: Arc<AtomicBool>,
    prepared: Arc<Mutex<Prepared>>,
    out: Out,
}

/// What is told of a pipeline that is to be looked after.
pub struct Orders {
    /// The model, as workers look for it.
    pub model: Model,
    /// Members that are not to be asked.
    pub bad: Vec<Name>,
    /// Members that may be taken.
    pub spares: usize,
    /// Bytes of this machine that the pipeline holds.
    pub held: u64,
    /// Workers that nobody can take the stages of.
    pub stay: Vec<Name>,
}

impl Watch {
    /// Begins to look after the workers of a plan's pipeline; nothing where it has none.
    pub fn start(plan: &Plan, orders: Orders, out: Out) -> Option<Watch> {
        let cluster = plan.cluster.as_ref()?;
        let (stop, prepared) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Prepared>>::default());
        let Orders { model, bad, spares, held, stay } = orders;
        let workers = cluster.workers().to_vec();
        workers.iter().for_each(|worker| worker.watched());
        let looking = Looking {
            sketch: plan.sketch(),
            model,
            workers: workers.clone(),
            reach: cluster.reach().clone(),
            but: cluster.names().iter().cloned().chain(bad).collect(),
            spares,
            held,
            stay,
            stop: stop.clone(),
            prepared: prepared.clone(),
            out,
        };
        let thread = std::thread::Builder::new().name("watch".to_owned()).spawn(move || looking.run());
        if let Err(error) = &thread {
            out.note(&format!("the system starts no thread ({error}): draining a worker will not be noticed"));
        }
        Some(Watch { stop, prepared, workers, thread: thread.ok() })
    }

    /// Ends it; what was prepared is for the next pipeline.
    pub fn end(self) -> Prepared {
        self.stop.store(true, Ordering::Relaxed);
        let prepared = self.prepared.clone();
        drop(self);
        std::mem::take(&mut *prepared.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // The next pipeline has another watch.
        self.workers.iter().for_each(|worker| worker.stay());
    }
}

impl Looking {
    fn run(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            self.look();
            std::thread::sleep(LOOK);
        }
    }

    fn look(&mut self) {
        let name = |worker: &Arc<Worker>| worker.name().parse::<Name>().ok();
        let leaving: Vec<Arc<Worker>> = self.workers.iter().filter(|worker| worker.is_draining()).cloned().collect();
        // Whoever is of use again may be drained again.
        self.stay.retain(|stays| leaving.iter().any(|worker| worker.name() == stays.as_str()));
        let is_new = |name: &Name| !self.stay.contains(name);
        let leaving: Vec<(Name, Arc<Worker>)> =
            leaving.into_iter().filter_map(|worker| Some((name(&worker).filter(is_new)?, worker))).collect();
        if let Some((_, first)) = leaving.first() {
            let names: Vec<Name> = leaving.iter().map(|(name, _)| name.clone()).collect();
            let mut note = None;
            match self.load_elsewhere(&names) {
                Ok(workers) => {
                    let loaded = |workers: &Vec<Arc<Worker>>| {
                        let others: Vec<&str> = workers.iter().map(|worker| worker.name()).collect();
                        format!("{} has the layers of {}", others.join(", "), list(&names))
                    };
                    note = workers.as_ref().map(loaded);
                    let others = workers.map(|workers| Others { of: names.clone(), workers });
                    self.prepare(|prepared| prepared.others.extend(others));
                }
                Err(_) if self.stop.load(Ordering::Relaxed) => return,
                Err(error) => self.out.note(&format!("others cannot take the layers of {}: {error:#}", list(&names))),
            }
            self.stay.extend(names);
            first.go(Going::Away);
            note.iter().for_each(|note| self.out.note(note));
        }
        for worker in &self.workers {
            let Some((number, split)) = worker.wish() else { continue };
            let split: Vec<usize> = split.into_iter().map(|count| count as usize).collect();
            let wish = Wish { split: split.clone(), number, worker: Some(worker.clone()) };
            let is_so = || split.iter().copied().eq(self.sketch.specs.iter().map(|spec| spec.layers.len()));
            match self.sketch.divided(&split, self.held) {
                Err(error) => wish.came(Err(format!("{error:#}"))),
                Ok(_) if is_so() => wish.came(Ok("the layers are divided so".to_owned())),
                Ok(_) => {
                    self.prepare(|prepared| prepared.wish = Some(wish));
                    worker.go(Going::Split(split));
                }
            }
        }
    }

    fn prepare(&self, change: impl FnOnce(&mut Prepared)) {
        change(&mut self.prepared.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Idle members load the layers of these workers; nothing where there are too few of them.
    fn load_elsewhere(&self, leaving: &[Name]) -> Result<Option<Vec<Arc<Worker>>>> {
        if leaving.len() > self.spares {
            return Ok(None);
        }
        let others = self.reach.idle(leaving.len(), &self.but, &self.stop);
        if others.len() < leaving.len() {
            return Ok(None);
        }
        let (devices, _) = self.sketch.with_others(leaving, &others)?;
        let names: Vec<Name> = others.iter().filter_map(|worker| worker.name().parse().ok()).collect();
        self.out.note(&format!("{} is to be drained: {} loads its layers first", list(leaving), list(&names)));
        let between = PipelineOptions { model: Some(self.model.clone()), ..PipelineOptions::default() };
        let Sketch { checkpoint, specs, options, .. } = &self.sketch;
        let loaded =
            Pipeline::preload(checkpoint, specs, *options, &between, &devices, &others, &mut |_, _| {}, &self.stop);
        if loaded.is_err() && !self.stop.load(Ordering::Relaxed) {
            self.prepare(|prepared| prepared.failed.extend(names));
        }
        loaded?;
        Ok(Some(others))
    }
}
