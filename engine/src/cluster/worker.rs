//! A worker: serves one head at a time, shows itself to others, and keeps what the cluster's head gives it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pp_transport::quic::{Joined, Node};

use super::control::{self, DeviceInfo, Greeting, Holder, Purpose, ToHead, ToWorker, WISH_STAGES_MAX, Welcome};
use super::health;
use super::session::Session;
use super::whole::Whole;
use crate::calibrate::{Calibration, Calibrations, Shape};
use crate::contract::Build;
use crate::digest::Digest;
use crate::pipeline::Device;
use crate::tensor_cache::TensorCache;

/// How long a head has to introduce itself.
const GREETING: Duration = Duration::from_secs(5);
/// How often an idle worker looks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);

/// What the program around a worker does for it.
pub trait Host: Send + Sync {
    /// The model of that digest, whose files have so many bytes, if it is here. Looking for it may take long; `stop` ends
    /// it.
    ///
    /// # Errors
    /// In words.
    fn model(&self, digest: &Digest, bytes: u64, stop: &AtomicBool) -> Result<Option<PathBuf>, String>;
    /// Where tensors may be kept that come from other hosts.
    fn tensors(&self) -> Option<TensorCache>;
    /// Keeps a member list that was verified, as it was signed.
    ///
    /// # Errors
    /// In words.
    fn keep_members(&self, signed: &[u8]) -> Result<(), String>;
    /// Keeps a certificate that was verified.
    ///
    /// # Errors
    /// In words.
    fn keep_certificate(&self, der: &[u8]) -> Result<(), String>;
    /// Bytes of memory of the host, and how many are free.
    fn memory(&self) -> Option<(u64, u64)>;
    /// How the host is, and whether these models are there; nothing that takes long.
    fn examine(&self, models: &[health::Model]) -> Vec<health::Finding>;
    /// The model that is called so in the places where this host keeps models, and nowhere else. Reading it may take
    /// long; `stop` ends it.
    ///
    /// # Errors
    /// In words.
    fn whole(&self, _name: &str, _stop: &AtomicBool) -> Result<Option<Whole>, String> {
        Ok(None)
    }
    /// Where it is kept what the devices were measured to take.
    fn calibrations(&self) -> Option<PathBuf> {
        None
    }
}

/// A worker.
pub struct Server {
    pub(super) node: Node,
    pub(super) devices: Vec<Device>,
    pub(super) host: Box<dyn Host>,
    started: Instant,
    holder: Mutex<Option<Holder>>,
    draining: AtomicBool,
    /// The latest wish for another split.
    wish: Mutex<Option<Wish>>,
    pub(super) stop: AtomicBool,
    /// Devices are measured one after the other.
    measuring: Mutex<()>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    /// A worker that gives `devices`, of this process.
    ///
    /// # Panics
    /// When there is no device.
    pub fn new(node: Node, devices: Vec<Device>, host: Box<dyn Host>) -> Arc<Server> {
        assert!(!devices.is_empty(), "a worker has a device");
        Arc::new(Server {
            node,
            devices,
            host,
            started: Instant::now(),
            holder: Mutex::default(),
            draining: AtomicBool::new(false),
            wish: Mutex::default(),
            stop: AtomicBool::new(false),
            measuring: Mutex::default(),
        })
    }

    /// The endpoint.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Serves until `stop` is set, or until what runs is done once it drains.
    pub fn serve(self: &Arc<Server>, stop: &AtomicBool) {
        let mut sessions = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            if let Some(joined) = self.node.joined(LOOK) {
                let server = self.clone();
                let name = "session".to_owned();
                match std::thread::Builder::new().name(name).spawn(move || server.attend(joined)) {
                    Ok(thread) => sessions.push(thread),
                    Err(error) => tracing::error!(%error, "the system starts no thread for a head"),
                }
            }
            sessions.retain(|session| !session.is_finished());
        }
        self.stop.store(true, Ordering::Relaxed);
        for session in sessions {
            let _ = session.join();
        }
    }

    /// Whether it takes nothing new.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Who has it.
    pub fn holder(&self) -> Option<Holder> {
        locked(&self.holder).clone()
    }

    fn attend(self: Arc<Server>, joined: Joined) {
        let Joined { control, from, .. } = joined;
        let greeting = match control.receive_frame(GREETING).map(|arrival| control::decode(&arrival.frame)) {
            Ok(Ok(ToWorker::Greeting(greeting))) => greeting,
            Ok(Ok(_)) => return tracing::warn!(%from, "a head did not introduce itself"),
            Ok(Err(error)) => {
                tracing::warn!(%from, %error, "a head is not understood");
                // In words that every version understands: a refusal of the version.
                let _ = control.send_frame(control::encode(&ToHead::Done(Err(error.to_string()))));
                return;
            }
            Err(_) => return,
        };
        let lease = match greeting.purpose {
            Purpose::Look => None,
            Purpose::Lease => match self.lease(&greeting) {
                Ok(lease) => Some(lease),
                Err(refusal) => {
                    let _ = control.send_frame(control::encode(&refusal));
                    return;
                }
            },
        };
        tracing::info!(head = greeting.head, %from, purpose = ?greeting.purpose, "a head has come");
        let welcome = ToHead::Welcome(Box::new(self.welcome()));
        if control.send_frame(control::encode(&welcome)).is_ok() {
            Session::new(self.clone(), control, lease.is_some()).run();
        }
        drop(lease);
        tracing::info!(head = greeting.head, %from, "a head has gone");
    }

    fn lease(self: &Arc<Server>, greeting: &Greeting) -> Result<Lease, ToHead> {
        if self.is_draining() {
            return Err(ToHead::Draining);
        }
        let mut holder = locked(&self.holder);
        if let Some(holder) = &*holder {
            return Err(ToHead::Busy(holder.clone()));
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        *holder = Some(Holder { head: greeting.head.clone(), since, stages: Vec::new() });
        Ok(Lease(self.clone()))
    }

    fn welcome(&self) -> Welcome {
        let who = self.node.who();
        Welcome {
            build: Build::this(),
            devices: self.devices.iter().map(info).collect(),
            holder: self.holder(),
            draining: self.is_draining(),
            memory: self.host.memory(),
            up_seconds: self.started.elapsed().as_secs(),
            members_version: who.members.version(),
            certificate_until: who.identity.certificate().not_after().as_secs(),
            machine: crate::calibrate::machine(),
        }
    }

    pub(super) fn health(&self, models: &[health::Model]) -> health::Health {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut findings = self.host.examine(models);
        findings.truncate(health::FINDINGS_MAX);
        health::Health { unix_ms: since.as_millis() as u64, findings }
    }

    /// What the leased stages are, for others.
    pub(super) fn holds(&self, stages: Vec<(usize, (usize, usize), String)>) {
        if let Some(holder) = locked(&self.holder).as_mut() {
            holder.stages = stages;
        }
    }

    /// What a device takes for the parts of a model: as it was measured before, or measured now if nothing runs here.
    pub(super) fn calibrate(
        &self,
        device: &str,
        shape: &Shape,
        is_lease: bool,
        cancel: &AtomicBool,
    ) -> Result<Calibration, String> {
        let device = self.devices.iter().find(|known| known.id() == device);
        let device = device.ok_or_else(|| "it has no such device".to_owned())?;
        let mut known = Calibrations::new(self.host.calibrations());
        if let Some(known) = known.known(device, shape) {
            return Ok(known);
        }
        if let Some(holder) = self.holder().filter(|holder| !is_lease || !holder.stages.is_empty()) {
            return Err(format!("its devices are not measured while {} has it", holder.head));
        }
        let _alone = locked(&self.measuring);
        known.measure(device, shape, &mut |_, _| {}, cancel).map_err(|error| error.to_string())
    }

    pub(super) fn drain(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }

    /// Takes a wish for whoever has the worker; returns its number.
    pub(super) fn wish(&self, split: Vec<u32>) -> Result<u64, String> {
        if split.is_empty() || split.len() > WISH_STAGES_MAX {
            return Err(format!("{} stages are wished for; 1 to {WISH_STAGES_MAX} are taken", split.len()));
        }
        let holder = locked(&self.holder);
        if holder.as_ref().is_none_or(|holder| holder.stages.is_empty()) {
            return Err("it runs nothing whose layers could be divided anew".to_owned());
        }
        let mut wish = locked(&self.wish);
        if wish.as_ref().is_some_and(|wish| wish.outcome.is_none()) {
            return Err("its layers are being divided anew already".to_owned());
        }
        let number = wish.as_ref().map_or(1, |wish| wish.number + 1);
        *wish = Some(Wish { number, split, outcome: None });
        Ok(number)
    }

    /// The latest wish, if nothing has come of it so far.
    pub(super) fn wished(&self) -> Option<(u64, Vec<u32>)> {
        let wish = locked(&self.wish);
        wish.as_ref().filter(|wish| wish.outcome.is_none()).map(|wish| (wish.number, wish.split.clone()))
    }

    /// What has come of a wish.
    pub(super) fn outcome(&self, number: u64) -> Option<Result<String, String>> {
        let wish = locked(&self.wish);
        match wish.as_ref().filter(|wish| wish.number == number) {
            Some(wish) => wish.outcome.clone(),
            None => Some(Err("there is no such wish".to_owned())),
        }
    }

    pub(super) fn came(&self, number: u64, outcome: Result<String, String>) {
        if let Some(wish) = locked(&self.wish).as_mut().filter(|wish| wish.number == number) {
            wish.outcome.get_or_insert(outcome);
        }
    }

    /// Speaks for a while with a head that has no lease, or has one.
    pub(super) fn take_members(&self, signed: Vec<u8>) -> Result<(), String> {
        let who = self.node.who();
        let mut members = who.members;
        let list = pp_transport::members::SignedMembers::from_bytes(signed).map_err(|error| error.to_string())?;
        members.accept(&list, who.identity.authority()).map_err(|error| error.to_string())?;
        self.host.keep_members(list.as_bytes())?;
        self.node.set_members(members);
        Ok(())
    }

    pub(super) fn take_certificate(&self, der: &[u8]) -> Result<(), String> {
        let mut identity = self.node.who().identity;
        let certificate = pp_transport::identity::HostCertificate::parse(der).map_err(|error| error.to_string())?;
        identity
            .replace_certificate(certificate, pp_transport::identity::UnixTime::now())
            .map_err(|error| error.to_string())?;
        self.host.keep_certificate(der)?;
        self.node.set_identity(identity).map_err(|error| error.to_string())
    }
}

/// A head has the worker as long as this is there.
struct Lease(Arc<Server>);

impl Drop for Lease {
    fn drop(&mut self) {
        *locked(&self.0.holder) = None;
        if let Some((number, _)) = self.0.wished() {
            self.0.came(number, Err("whoever had the worker has gone".to_owned()));
        }
    }
}

/// Another split, as somebody wishes it.
struct Wish {
    number: u64,
    split: Vec<u32>,
    outcome: Option<Result<String, String>>,
}

fn info(device: &Device) -> DeviceInfo {
    DeviceInfo {
        id: device.id(),
        name: device.name(),
        profile: device.profile().name.to_owned(),
        limits: device.limits(),
        memory_bytes: device.memory_bytes(),
        is_software: device.is_software(),
        uses: device.uses(),
    }
}
