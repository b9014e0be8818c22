//! From a plan to stages that load: whether the model is here, whether head and worker want the same, and where the weights
//! come from.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, bounded};
use pp_transport::LinkId;
use pp_transport::frame::PAYLOAD_BYTES_MAX;
use pp_transport::quic::{LinkPort, Peer};

use super::{Running, Session, hop_id, hop_limits};
use crate::checkpoint::Checkpoint;
use crate::cluster::control::{Fellow, Neighbour, Plan, Source, Task, ToHead};
use crate::cluster::fetch::{Fetcher, Offer};
use crate::cluster::weights::{self, OTHERS_MAX, PLACES_MAX, Stock};
use crate::contract::{Contract, ModelFacts};
use crate::layout::{StageLayout, StageSpec};
use crate::manifest::Manifest;
use crate::pipeline::Device;
use crate::pipeline::shelf::Key;
use crate::pipeline::thread::{self, EVENTS_PER_STAGE, Home, StageThread};
use crate::trace::Recorder;
use crate::weights::LoadError;

/// Stages of one worker in one pipeline.
const TASKS_MAX: usize = 64;
/// Frames that a hop may hold.
const CREDITS_MAX: u64 = 4096;

/// A plan for which the model is looked for, or is not here.
pub(super) struct Pending {
    pub(super) plan: Plan,
    devices: Vec<Device>,
    /// What came of looking for the model.
    pub(super) found: Receiver<Result<Option<PathBuf>, String>>,
    /// The link on which the head may be asked for weights.
    head: LinkPort,
    /// The model, once the head has said what it is made of.
    manifest: Option<Arc<Manifest>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Gives other workers of the pipeline what they want of the model.
pub(super) struct Lending {
    threads: Vec<JoinHandle<()>>,
    stop: Arc<AtomicBool>,
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        thread::join(&mut self.threads);
    }
}

/// Gets the weights of the stages from other hosts.
pub(super) struct Fetching {
    fetcher: Arc<Fetcher>,
    threads: Vec<JoinHandle<()>>,
    /// Workers that were dialled for it.
    _peers: Vec<Peer>,
}

impl Drop for Fetching {
    fn drop(&mut self) {
        self.fetcher.stop();
        thread::join(&mut self.threads);
    }
}

impl Session {
    /// Begins to look for the model.
    pub(super) fn prepare(&mut self, plan: Plan) {
        self.end_stages();
        let first = first_stage(&plan);
        match self.look(plan) {
            Ok(pending) => self.pending = Some(pending),
            Err(refusal) => self.refused(first, refusal),
        }
    }

    fn refused(&self, stage: usize, refusal: Refusal) {
        match refusal {
            Refusal::Mismatch(ours) => self.say(&ToHead::Mismatch(ours)),
            Refusal::Load(error) => self.say(&ToHead::LoadFailed(stage, error)),
        }
    }

    fn look(&self, plan: Plan) -> Result<Pending, Refusal> {
        let devices = self.check(&plan)?;
        let (tell, found) = bounded(1);
        let stop = Arc::new(AtomicBool::new(false));
        let (server, stopped) = (self.server.clone(), stop.clone());
        let (digest, bytes) = (plan.contract.model.digest, plan.model_bytes);
        let look = move || drop(tell.send(server.host.model(&digest, bytes, &stopped)));
        std::thread::Builder::new().name("look-for-model".to_owned()).spawn(look).map_err(refused)?;
        let id = LinkId { session: plan.session, link: weights::link(0, plan.place) };
        let head = self.server.node().expect(id, self.control.peer().clone(), weights::limits());
        Ok(Pending { plan, devices, found, head, manifest: None, stop })
    }

    /// It is known whether the model is here.
    pub(super) fn looked(&mut self, found: Result<Option<PathBuf>, String>) {
        let Some(mut pending) = self.pending.take() else { return };
        pending.found = crossbeam_channel::never();
        let first = first_stage(&pending.plan);
        match found {
            Ok(Some(path)) => {
                self.say(&ToHead::HasModel(true));
                match self.load_files(&pending, path) {
                    Ok(running) => self.runs(running),
                    Err(refusal) => self.refused(first, refusal),
                }
            }
            Ok(None) if self.server.host.tensors().is_some() => {
                self.say(&ToHead::HasModel(false));
                self.pending = Some(pending);
            }
            Ok(None) => {
                let Plan { model_name, .. } = &pending.plan;
                let message = format!(
                    "it has no copy of {model_name}, and no folder to keep tensors in (set HOME or XDG_CACHE_HOME)"
                );
                self.refused(first, refused(message));
            }
            Err(message) => self.refused(first, refused(message)),
        }
    }

    pub(super) fn looked_in_vain(&mut self) {
        self.looked(Err("looking for the model has failed; the worker's log says more".to_owned()));
    }

    fn runs(&mut self, running: Running) {
        let stages = running.plan.tasks.iter().map(|task| {
            let layers = &task.spec.layers;
            (task.spec.index, (layers.start, layers.end), task.device.clone())
        });
        self.server.holds(stages.collect());
        self.running = Some(running);
    }

    /// Others may come for tensors of the model.
    pub(super) fn lend(&mut self, manifest: &[u8], takers: &[Fellow]) {
        let plan = self.pending.as_ref().map(|pending| &pending.plan);
        let Some(plan) = plan.or(self.running.as_ref().map(|running| &running.plan)).cloned() else {
            // What it had could not be loaded, which was said.
            return self.say(&ToHead::Holds(Vec::new()));
        };
        match self.lending(&plan, manifest, takers) {
            Ok((lending, holds)) => {
                self.lending = Some(lending);
                self.say(&ToHead::Holds(holds));
            }
            Err(refusal) => self.refused(first_stage(&plan), refusal),
        }
    }

    fn lending(&mut self, plan: &Plan, manifest: &[u8], takers: &[Fellow]) -> Result<(Lending, Vec<u8>), Refusal> {
        let manifest = Arc::new(Manifest::decode(manifest).map_err(refused)?);
        if manifest.model != plan.contract.model.digest {
            return Err(refused("the manifest is another model's"));
        }
        if takers.len() >= PLACES_MAX as usize || takers.iter().any(|taker| taker.place >= PLACES_MAX) {
            return Err(refused(format!("links to more than {PLACES_MAX} workers")));
        }
        let files = self.running.as_ref().and_then(|running| running.files.clone());
        let stock = Stock { manifest: manifest.clone(), files, cache: self.server.host.tensors() };
        let mut lending = Lending { threads: Vec::new(), stop: Arc::default() };
        for taker in takers {
            let Some(peer) = self.peer(&taker.name) else { continue };
            let id = LinkId { session: plan.session, link: weights::link(plan.place, taker.place) };
            let port = self.server.node().expect(id, peer, weights::limits());
            lending.threads.push(stock.clone().serve(Box::new(port), lending.stop.clone()).map_err(refused)?);
        }
        if let Some(pending) = &mut self.pending {
            pending.manifest = Some(manifest);
        }
        Ok((lending, stock.holds()))
    }

    /// The weights are to come from elsewhere.
    pub(super) fn fetch(&mut self, sources: &[Source]) {
        let Some(pending) = self.pending.take() else { return };
        let first = first_stage(&pending.plan);
        match self.load_from_others(&pending, sources) {
            Ok(running) => self.runs(running),
            Err(refusal) => self.refused(first, refusal),
        }
    }

    fn load_files(&self, pending: &Pending, path: PathBuf) -> Result<Running, Refusal> {
        let checkpoint = Arc::new(Checkpoint::open(&path).map_err(refused)?);
        let layouts = self.lay_out(pending, &checkpoint)?;
        let checkpoints = vec![checkpoint.clone(); layouts.len()];
        let mut running = self.load(pending, layouts, checkpoints, None)?;
        running.files = Some(checkpoint);
        Ok(running)
    }

    fn load_from_others(&self, pending: &Pending, sources: &[Source]) -> Result<Running, Refusal> {
        let manifest = pending.manifest.clone().ok_or_else(|| refused("no manifest has come"))?;
        let cache = self.server.host.tensors().ok_or_else(|| refused("there is no tensor cache"))?;
        let name = &pending.plan.model_name;
        let blank = Arc::new(Checkpoint::supplied(&manifest, name, None));
        let layouts = self.lay_out(pending, &blank)?;
        let positions: HashMap<&str, usize> =
            manifest.tensors.iter().enumerate().map(|(at, entry)| (entry.name.as_str(), at)).collect();
        let keys: Vec<Key> = layouts
            .iter()
            .zip(&pending.devices)
            .map(|(layout, device)| Key::new(&blank, Some(manifest.model), layout, device))
            .collect();
        let held = self.shelf.held(&keys.iter().zip(&layouts).collect::<Vec<_>>());
        let wanted: Vec<Vec<usize>> = layouts
            .iter()
            .zip(&held)
            .map(|(layout, held)| layout.tensors_beside(held).map(|tensor| positions[tensor.name.as_str()]).collect())
            .collect();
        let fetcher = Fetcher::new(manifest.clone(), cache, &wanted).map_err(|error| Refusal::Load(error.into()))?;
        let checkpoints = (0..layouts.len())
            .map(|stage| Arc::new(Checkpoint::supplied(&manifest, name, Some(fetcher.for_stage(stage)))))
            .collect();
        let head =
            Offer { name: self.control.peer().name.to_string(), port: Box::new(pending.head.clone()), holds: None };
        let (mut offers, mut peers) = (vec![head], Vec::new());
        for source in sources.iter().take(OTHERS_MAX).filter(|_| !fetcher.is_complete()) {
            match self.dial(&source.fellow.name) {
                Ok(peer) => {
                    let link = weights::link(source.fellow.place, pending.plan.place);
                    let port = peer.open(LinkId { session: pending.plan.session, link }, weights::limits());
                    let (name, holds) = (source.fellow.name.clone(), Some(source.holds.clone()));
                    offers.push(Offer { name, port: Box::new(port), holds });
                    peers.push(peer);
                }
                Err(error) => tracing::warn!(source = source.fellow.name, error, "is not asked for weights"),
            }
        }
        let threads = fetcher.start(offers).map_err(refused)?;
        self.load(pending, layouts, checkpoints, Some(Fetching { fetcher, threads, _peers: peers }))
    }

    /// Compares what this worker makes of the model and the plan with what the head wants, and lays out its stages.
    fn lay_out(&self, pending: &Pending, checkpoint: &Checkpoint) -> Result<Vec<StageLayout>, Refusal> {
        let Pending { plan, devices, .. } = pending;
        let contract = &plan.contract;
        let facts = ModelFacts::of(checkpoint, contract.model.digest);
        let mut ours = contract.clone();
        for (task, device) in plan.tasks.iter().zip(devices) {
            ours = ours.seen_by(task.spec.index, facts.clone(), device.profile()).map_err(refused)?;
        }
        if ours != *contract {
            return Err(Refusal::Mismatch(Box::new(ours)));
        }
        let lay_out = |(task, device): (&Task, &Device)| {
            StageLayout::new(checkpoint, task.spec.clone(), contract.options, device.profile(), device.limits())
        };
        plan.tasks.iter().zip(devices).map(lay_out).collect::<Result<_, _>>().map_err(refused)
    }

    /// Begins to load stages, each from its checkpoint.
    fn load(
        &self,
        pending: &Pending,
        layouts: Vec<StageLayout>,
        checkpoints: Vec<Arc<Checkpoint>>,
        fetching: Option<Fetching>,
    ) -> Result<Running, Refusal> {
        let plan = pending.plan.clone();
        let specs = plan.contract.check().map_err(refused)?;
        let names = specs.iter().map(|spec| (String::new(), (spec.layers.start, spec.layers.end)));
        let (tell, events) = bounded(EVENTS_PER_STAGE * plan.tasks.len());
        let mut running = Running {
            files: None,
            fetching,
            loaded: 0,
            stop: Arc::default(),
            home: Home { shelf: Some(self.shelf.clone()), boundary_log: plan.boundary_log, closed: Arc::default() },
            threads: Vec::new(),
            events,
            counters: plan.tasks.iter().map(|_| Arc::default()).collect(),
            recorder: Recorder::new(names),
            epoch: Arc::new(AtomicU64::new(plan.epoch)),
            waiting: Vec::new(),
            expected: self.expect(&plan),
            peers: Vec::new(),
            plan,
        };
        let digest = Some(running.plan.contract.model.digest);
        let stages: Vec<_> = layouts
            .into_iter()
            .zip(checkpoints)
            .zip(&pending.devices)
            .map(|((layout, checkpoint), device)| (Key::new(&checkpoint, digest, &layout, device), layout, checkpoint))
            .collect();
        let keys: Vec<Key> = stages.iter().map(|(key, ..)| key.clone()).collect();
        let kept = self.shelf.assign(&keys, running.plan.after);
        let each = stages.into_iter().zip(kept).zip(&pending.devices).enumerate();
        for (index, (((key, layout, checkpoint), kept), device)) in each {
            let (give, ports) = bounded(1);
            let thread = StageThread {
                checkpoint,
                device: device.clone(),
                ports,
                tell: tell.clone(),
                stop: running.stop.clone(),
                counters: running.counters[index].clone(),
                recorder: running.recorder.clone(),
                epoch: running.epoch.clone(),
                kept,
                home: running.home.clone(),
                key,
            };
            running.waiting.push(give);
            running.threads.push(thread.start(layout).map_err(refused)?);
        }
        Ok(running)
    }

    /// Everything that a head could say wrongly; returns the device of each task.
    fn check(&self, plan: &Plan) -> Result<Vec<Device>, Refusal> {
        let wrong = |message: String| refused(message);
        let tasks = &plan.tasks;
        if tasks.is_empty() || tasks.len() > TASKS_MAX {
            return Err(wrong(format!("{} stages for one worker; 1 to {TASKS_MAX} are taken", tasks.len())));
        }
        if plan.credits == 0 || plan.credits > CREDITS_MAX {
            return Err(wrong(format!("{} frames on a hop; 1 to {CREDITS_MAX} are taken", plan.credits)));
        }
        if plan.payload_bytes > PAYLOAD_BYTES_MAX as u64 {
            return Err(wrong(format!(
                "frames of {} bytes; at most {PAYLOAD_BYTES_MAX} are taken",
                plan.payload_bytes
            )));
        }
        if !(1..PLACES_MAX).contains(&plan.place) {
            return Err(wrong(format!("place {} of a pipeline; 1 to {} are taken", plan.place, PLACES_MAX - 1)));
        }
        let specs: Vec<StageSpec> = plan.contract.check().map_err(refused)?;
        let mut devices = Vec::new();
        for (at, task) in tasks.iter().enumerate() {
            if specs.get(task.spec.index) != Some(&task.spec) {
                return Err(wrong(format!("stage {} is not as the split says", task.spec.index)));
            }
            let follows = |before: usize, after: usize| {
                tasks.get(before).zip(tasks.get(after)).is_some_and(|(a, b)| a.spec.index + 1 == b.spec.index)
            };
            let alone = at.checked_sub(1).is_none_or(|before| !follows(before, at));
            if alone == (task.upstream == Neighbour::Same)
                || follows(at, at + 1) != (task.downstream == Neighbour::Same)
            {
                return Err(wrong(format!("stage {} has neighbours that are not there", task.spec.index)));
            }
            let device = self.server.devices.iter().find(|device| device.id() == task.device);
            devices.push(device.cloned().ok_or_else(|| wrong(format!("no device {:?}", task.device)))?);
        }
        Ok(devices)
    }

    /// The ends of the hops that the head and neighbours before us will open.
    fn expect(&self, plan: &Plan) -> HashMap<usize, LinkPort> {
        let mut expected = HashMap::new();
        for task in &plan.tasks {
            let hops = [(task.spec.index, &task.upstream, true), (task.spec.index + 1, &task.downstream, false)];
            for (hop, neighbour, is_upstream) in hops {
                let peer = match neighbour {
                    Neighbour::Head => self.control.peer().clone(),
                    Neighbour::Worker(name) if is_upstream => match self.peer(name) {
                        Some(peer) => peer,
                        None => continue,
                    },
                    _ => continue,
                };
                expected.insert(hop, self.server.node().expect(hop_id(plan, hop), peer, hop_limits(plan)));
            }
        }
        expected
    }
}

/// Why a plan is not carried out.
enum Refusal {
    Mismatch(Box<Contract>),
    Load(LoadError),
}

fn refused(why: impl ToString) -> Refusal {
    Refusal::Load(LoadError::Refused { message: why.to_string() })
}

fn first_stage(plan: &Plan) -> usize {
    plan.tasks.first().map_or(0, |task| task.spec.index)
}
