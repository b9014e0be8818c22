//! Getting hold of the workers that a pipeline names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use pp_engine::cluster::control::Purpose;
use pp_engine::cluster::remote::{LeaseError, RemoteDevice, Worker};
use pp_engine::pipeline::Device;
use pp_transport::identity::Name;
use pp_transport::members::Member;
use pp_transport::quic::Node;

use super::places::Place;
use super::{Here, lease_error};
use crate::output::Out;
use crate::{cancel, errors};

/// How long a worker may take to answer a dialler.
pub const DIAL: Duration = Duration::from_secs(3);
/// The same for one that was lost and is looked for again and again.
const REDIAL: Duration = Duration::from_secs(1);
/// What passes sooner is not worth a word: a head that has just ended has its workers for a moment more.
const SILENT: Duration = Duration::from_millis(1500);
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(200);

/// Workers that are connected.
pub struct Cluster {
    reach: Arc<Reach>,
    /// Those that it was gathered for, and those that took the places of some.
    names: Vec<Name>,
    workers: Vec<Arc<Worker>>,
}

/// What it takes to get hold of more.
pub struct Reach {
    here: Here,
    node: Arc<Node>,
}

impl Reach {
    fn lease(&self, name: &Name) -> Result<Arc<Worker>> {
        let member = self.here.worker(name)?;
        let greeting = self.here.greeting();
        let worker = Worker::connect(&self.node, member, &greeting, Purpose::Lease, REDIAL).map_err(lease_error)?;
        self.here.freshen(&worker)?;
        Ok(Arc::new(worker))
    }

    /// So many workers of the cluster that nobody has, but these; or as many as there are, or were found until `stop` was
    /// set.
    pub fn idle(&self, count: usize, but: &[Name], stop: &AtomicBool) -> Vec<Arc<Worker>> {
        let names = self.here.workers().map(|member| &member.name).filter(|name| !but.contains(name));
        let names = names.take_while(|_| !stop.load(Ordering::Relaxed));
        names.filter_map(|name| self.lease(name).ok()).take(count).collect()
    }
}

impl Cluster {
    /// The workers of these places, each once: waits up to `wait` for those that are busy or do not answer, and says so.
    /// Each has the present member list then.
    ///
    /// # Errors
    /// Which are no workers of this cluster; which are missing, and why.
    pub fn gather(places: &[Place], purpose: Purpose, wait: Duration, out: &Out) -> Result<Cluster> {
        let here = Here::open()?;
        // Every head takes workers in the same order, so that no two wait for each other.
        let mut names: Vec<&Name> = places.iter().filter_map(|place| place.worker.as_ref()).collect();
        names.sort();
        names.dedup();
        let members = names.iter().map(|name| here.worker(name)).collect::<Result<Vec<_>>>()?;
        let node = here.node()?;
        let greeting = here.greeting();
        let call = Call { node: &node, greeting: &greeting, purpose, until: Instant::now() + wait, wait };
        let mut workers = Vec::new();
        let names: Vec<Name> = names.into_iter().cloned().collect();
        for (at, member) in members.iter().enumerate() {
            match call.reach(member, out)? {
                Ok(worker) => workers.push(Arc::new(worker)),
                Err(error) => return Err(call.missing(error, &members[at + 1..])),
            }
        }
        for worker in &workers {
            here.freshen(worker)?;
            let (theirs, ours) = (worker.welcome().members_version, here.head().members.version());
            if theirs > ours {
                out.note(&format!(
                    "{} has member list {theirs}, this head only {ours}: its folder may be an old copy",
                    worker.name()
                ));
            }
        }
        Ok(Cluster { reach: Arc::new(Reach { here, node }), names, workers })
    }

    /// Those that are wanted and have gone.
    pub fn lost(&mut self) -> Vec<Name> {
        self.workers.retain(|worker| !worker.is_gone());
        let has = |name: &Name| self.workers.iter().any(|worker| worker.name() == name.as_str());
        self.names.iter().filter(|name| !has(name)).cloned().collect()
    }

    /// Those that are being drained.
    pub fn leaving(&self) -> Vec<Name> {
        self.workers
            .iter()
            .filter(|worker| worker.is_draining())
            .filter_map(|worker| worker.name().parse().ok())
            .collect()
    }

    /// Those that are wanted.
    pub fn names(&self) -> &[Name] {
        &self.names
    }

    /// Gets hold of these again, all or none; returns the same devices, at the workers as they are connected then.
    ///
    /// # Errors
    /// Why the first of them is not to be had now, or that one has come back without a device.
    pub fn regain(&mut self, names: &[Name], devices: &[Device]) -> Result<Vec<Device>> {
        let found = names.iter().map(|name| self.reach.lease(name)).collect::<Result<Vec<_>>>()?;
        let workers: Vec<Arc<Worker>> = self.workers.iter().chain(&found).cloned().collect();
        let devices = renewed(devices, &workers)?;
        self.workers = workers;
        Ok(devices)
    }

    /// So many other workers of the cluster that nobody has, but these; they are ours from then on. Or as many as there
    /// are, which are not.
    pub fn others(&mut self, count: usize, but: &[Name]) -> Vec<Arc<Worker>> {
        let but: Vec<Name> = self.names.iter().chain(but).cloned().collect();
        let found = self.reach.idle(count, &but, cancel::flag());
        if found.len() == count {
            self.adopt(&found);
        }
        found
    }

    /// These are ours from now on.
    pub fn adopt(&mut self, workers: &[Arc<Worker>]) {
        self.names.extend(workers.iter().filter_map(|worker| worker.name().parse().ok()));
        self.workers.extend(workers.iter().cloned());
    }

    /// Those that are connected.
    pub fn workers(&self) -> &[Arc<Worker>] {
        &self.workers
    }

    /// What it takes to get hold of more.
    pub fn reach(&self) -> &Arc<Reach> {
        &self.reach
    }

    /// These are not waited for any more.
    pub fn forget(&mut self, names: &[Name]) {
        self.names.retain(|name| !names.contains(name));
        self.workers.retain(|worker| !names.iter().any(|name| name.as_str() == worker.name()));
    }

    /// Nobody but these is waited for any more.
    pub fn keep_only(&mut self, used: &[String]) {
        self.names.retain(|name| used.iter().any(|used| used == name.as_str()));
        self.workers.retain(|worker| used.iter().any(|used| used == worker.name()));
    }

    /// The device of a place that is a worker's.
    ///
    /// # Errors
    /// When the worker has no such device.
    pub fn device(&self, name: &Name, selector: Option<&str>) -> Result<Device> {
        let worker = self.workers.iter().find(|worker| worker.name() == name.as_str());
        let worker = worker.expect("every place was gathered");
        let id = selector.map(|selector| picked(worker, selector)).transpose()?;
        Ok(Device::Remote(RemoteDevice::of(worker, id.as_deref()).map_err(lease_error)?))
    }
}

/// The same devices, at workers as they are connected.
fn renewed(devices: &[Device], workers: &[Arc<Worker>]) -> Result<Vec<Device>> {
    let renew = |device: &Device| match device {
        Device::Remote(remote) => {
            let worker = workers.iter().find(|worker| worker.name() == remote.worker().name());
            let worker = worker.ok_or_else(|| errors::worker(format!("{} is gone", remote.worker().name())))?;
            Ok(Device::Remote(RemoteDevice::of(worker, Some(&remote.info().id)).map_err(lease_error)?))
        }
        device => Ok(device.clone()),
    };
    devices.iter().map(renew).collect()
}

/// What all workers are asked.
struct Call<'a> {
    node: &'a Arc<Node>,
    greeting: &'a str,
    purpose: Purpose,
    until: Instant,
    wait: Duration,
}

impl Call<'_> {
    fn connect(&self, member: &Member, purpose: Purpose) -> Result<Worker, LeaseError> {
        Worker::connect(self.node, member, self.greeting, purpose, DIAL)
    }

    /// Tries until there is no time left.
    fn reach(&self, member: &Member, out: &Out) -> Result<Result<Worker, LeaseError>> {
        let (mut said, started) = (None, Instant::now());
        loop {
            if cancel::flag().load(Ordering::Relaxed) {
                return Err(errors::cancelled());
            }
            let error = match self.connect(member, self.purpose) {
                Ok(worker) => return Ok(Ok(worker)),
                Err(error) => error,
            };
            if !error.may_pass() || Instant::now() >= self.until {
                return Ok(Err(error));
            }
            let text = error.to_string();
            if said.as_ref() != Some(&text) && started.elapsed() >= SILENT {
                out.note(&format!("waiting up to {} s: {text}", self.wait.as_secs()));
                said = Some(text);
            }
            std::thread::sleep(AGAIN);
        }
    }

    /// What to say when one is not to be had: how the others are as well.
    fn missing(&self, first: LeaseError, others: &[&Member]) -> anyhow::Error {
        let looks = std::thread::scope(|scope| {
            let look = |member| scope.spawn(move || self.connect(member, Purpose::Look));
            let looks: Vec<_> = others.iter().map(|member| look(*member)).collect();
            looks.into_iter().map(|look| look.join()).collect::<Vec<_>>()
        });
        let mut lines = vec![first.to_string()];
        for (member, look) in others.iter().zip(looks) {
            match look {
                Ok(Err(error)) => lines.push(error.to_string()),
                Ok(Ok(worker)) => {
                    let holder = worker.welcome().holder.clone();
                    if let Some(holder) = holder.filter(|_| self.purpose == Purpose::Lease) {
                        let worker = member.name.to_string();
                        lines.push(LeaseError::Busy { worker, holder }.to_string());
                    }
                }
                Err(_) => {}
            }
        }
        let what = if lines.len() == 1 { "a worker is missing" } else { "workers are missing" };
        errors::worker(format!("{what}: {}", lines.join("\n  ")))
    }
}

/// The id of the device that `selector` means: an id, an index, or part of one name.
fn picked(worker: &Worker, selector: &str) -> Result<String> {
    let devices = &worker.welcome().devices;
    let exact = devices.iter().position(|device| device.id == selector);
    let exact = exact.or_else(|| selector.parse().ok().filter(|index| *index < devices.len()));
    if let Some(index) = exact {
        return Ok(devices[index].id.clone());
    }
    let wanted = selector.to_lowercase();
    let mut found = devices.iter().filter(|device| device.name.to_lowercase().contains(&wanted));
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one.id.clone()),
        (first, _) => {
            let known: Vec<String> = devices.iter().map(|device| format!("{} {}", device.id, device.name)).collect();
            let what = if first.is_none() { "has no device" } else { "has more than one device" };
            Err(errors::usage(format!("{} {what} `{selector}`; it has {}", worker.name(), known.join(", "))))
        }
    }
}
