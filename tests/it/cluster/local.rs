//! A cluster whose workers are threads of the test, each with an endpoint, a key and a certificate of its own.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use pp_engine::checkpoint::Checkpoint;
use pp_engine::cluster::control::Purpose;
use pp_engine::cluster::control_limits;
use pp_engine::cluster::remote::{RemoteDevice, Worker};
use pp_engine::cluster::worker::{Host, Server};
use pp_engine::digest::Digest;
use pp_engine::layout::{StageOptions, StageSpec};
use pp_engine::pipeline::{Device, Model, Pipeline, PipelineError, PipelineOptions};
use pp_engine::tensor_cache::TensorCache;
use pp_transport::identity::{Authority, Identity, Key, Name, PeerName, Role, UnixTime};
use pp_transport::members::{Member, Members};
use pp_transport::quic::{Node, WhoAmI};

const PATIENCE: Duration = Duration::from_secs(5);

/// What a worker has: a model or none, a cache or none.
#[derive(Clone, Default)]
pub struct Models {
    pub model: Option<PathBuf>,
    pub tensors: Option<TensorCache>,
}

impl Host for Models {
    fn model(&self, _: &Digest, _: u64, _: &AtomicBool) -> Result<Option<PathBuf>, String> {
        Ok(self.model.clone())
    }

    fn tensors(&self) -> Option<TensorCache> {
        self.tensors.clone()
    }

    fn keep_members(&self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn keep_certificate(&self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn memory(&self) -> Option<(u64, u64)> {
        None
    }

    fn examine(&self, _: &[pp_engine::cluster::health::Model]) -> Vec<pp_engine::cluster::health::Finding> {
        Vec::new()
    }
}

/// A worker in threads.
pub struct LocalWorker {
    pub server: Arc<Server>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for LocalWorker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A cluster on loopback.
pub struct Cluster {
    pub authority: Authority,
    pub members: Members,
    pub head: Arc<Node>,
    pub workers: Vec<LocalWorker>,
}

fn limits_node(who: WhoAmI) -> Node {
    Node::start(who, "127.0.0.1:0".parse().unwrap(), control_limits()).unwrap()
}

/// A host's key and certificate.
pub fn identity(authority: &Authority, name: &str, role: Role) -> Identity {
    let key = Key::generate().unwrap();
    let name: Name = name.parse().unwrap();
    let peer = PeerName { cluster: authority.cluster(), role, name };
    let certificate = authority.issue_now(key.public(), &peer, UnixTime::now()).unwrap();
    Identity::new(key, certificate, authority.certificate().clone()).unwrap()
}

fn member(identity: &Identity, address: Option<String>) -> Member {
    let PeerName { role, name, .. } = identity.name().clone();
    let address = address.map(|address| address.parse().unwrap());
    Member { name, role, fingerprint: identity.fingerprint(), address, added: 0 }
}

impl Cluster {
    /// Workers `w0`, `w1`, … with these devices, all of which find `checkpoint`.
    pub fn new(checkpoint: &Checkpoint, devices: Vec<Vec<Device>>) -> Cluster {
        let has = Models { model: Some(checkpoint.path.clone()), tensors: None };
        Cluster::having(devices.into_iter().map(|devices| (devices, has.clone())).collect())
    }

    /// Workers `w0`, `w1`, … with these devices, and what each has.
    pub fn having(workers: Vec<(Vec<Device>, Models)>) -> Cluster {
        let authority = Authority::create(UnixTime::now()).unwrap();
        let head = identity(&authority, "head", Role::Head);
        let mut members = Members::founding(authority.cluster(), member(&head, None));
        let mut nodes = Vec::new();
        for at in 0..workers.len() {
            let worker = identity(&authority, &format!("w{at}"), Role::Worker);
            let node = limits_node(WhoAmI { identity: worker.clone(), members: members.clone() });
            members.add(member(&worker, Some(node.local_addr().unwrap().to_string()))).unwrap();
            nodes.push(node);
        }
        let head = Arc::new(limits_node(WhoAmI { identity: head, members: members.clone() }));
        let workers = nodes.into_iter().zip(workers).map(|(node, (devices, models))| {
            node.set_members(members.clone());
            let server = Server::new(node, devices, Box::new(models));
            let stop = Arc::new(AtomicBool::new(false));
            let (serving, stopped) = (server.clone(), stop.clone());
            let thread = std::thread::spawn(move || serving.serve(&stopped));
            LocalWorker { server, stop, thread: Some(thread) }
        });
        Cluster { workers: workers.collect(), authority, members, head }
    }

    /// Worker `at`, leased.
    pub fn lease(&self, at: usize) -> Arc<Worker> {
        let name: Name = format!("w{at}").parse().unwrap();
        let member = self.members.get(&name).unwrap();
        Arc::new(Worker::connect(&self.head, member, "test", Purpose::Lease, PATIENCE).unwrap())
    }

    /// Worker `at`, to be looked at.
    pub fn look(&self, at: usize) -> Worker {
        let name: Name = format!("w{at}").parse().unwrap();
        let member = self.members.get(&name).unwrap();
        Worker::connect(&self.head, member, "test", Purpose::Look, PATIENCE).unwrap()
    }

    /// A pipeline with so many layers a stage; a stage on the first device of a worker, or here.
    pub fn pipeline(
        &self,
        checkpoint: &Arc<Checkpoint>,
        split: &[usize],
        options: StageOptions,
        places: &[Place],
    ) -> Result<Pipeline, PipelineError> {
        let mut leased: Vec<(usize, Arc<Worker>)> = Vec::new();
        let devices: Vec<Device> = places
            .iter()
            .map(|place| match place {
                Place::Here(device) => device.clone(),
                Place::There(at) => {
                    if !leased.iter().any(|(leased, _)| leased == at) {
                        leased.push((*at, self.lease(*at)));
                    }
                    let worker = &leased.iter().find(|(leased, _)| leased == at).unwrap().1;
                    Device::Remote(RemoteDevice::of(worker, None).unwrap())
                }
            })
            .collect();
        let model = Model { digest: Digest([0; 32]), bytes: 0, name: "test".to_owned(), manifests: None };
        let between = PipelineOptions { model: Some(model), ..PipelineOptions::default() };
        let specs = StageSpec::pipeline(split);
        let go_on = AtomicBool::new(false);
        Pipeline::open_with(checkpoint, &specs, options, &between, &devices, &mut |_, _| {}, &go_on)
    }
}

/// Where a stage is.
#[derive(Clone)]
#[expect(clippy::large_enum_variant, reason = "a test has a handful")]
pub enum Place {
    /// In the head's process.
    Here(Device),
    /// On that worker.
    There(usize),
}
