//! A worker: it is enrolled once, and then runs stages for its head until it is told to end.

use std::fs::{File, OpenOptions, TryLockError};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use pp_engine::cluster::control_limits;
use pp_engine::cluster::health::{Finding, Model};
use pp_engine::cluster::whole::Whole;
use pp_engine::cluster::worker::{Host, Server};
use pp_engine::digest::Digest;
use pp_engine::pipeline::Device;
use pp_engine::tensor_cache::TensorCache;
use pp_transport::enrol::{CODE_VALIDITY, Code};
use pp_transport::identity::store::Worker as Enrolled;
use pp_transport::identity::{CaCertificate, HostCertificate, Key, Name, Store, UnixTime};
use pp_transport::members::SignedMembers;
use pp_transport::quic::joining::{self, JoinError, Waiting};
use pp_transport::quic::{Node, NodeError, WhoAmI};
use serde::Serialize;

use crate::args::WorkerArgs;
use crate::cluster::{self, LOCK, PORT};
use crate::errors::usage;
use crate::models::Places;
use crate::output::{Out, bytes};
use crate::{cancel, errors, measured, memory, plan};

/// Held as long as a worker of this folder runs.
const RUNNING: &str = "worker.lock";
/// An address of documentation (RFC 5737): asked how it would be reached, the system says what is ours. Nothing is sent.
const SOMEWHERE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);
/// The same (RFC 3849).
const SOMEWHERE_V6: (Ipv6Addr, u16) = (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9);

/// Serves until it is told to end.
pub fn run(args: &WorkerArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let listen = listen(&args.listen)?;
    let name = match &args.name {
        Some(typed) => Some(cluster::typed_name(typed)?),
        None => cluster::member_name(&cluster::host_name()),
    };
    let store = cluster::store()?;
    let _running = only_one(&store)?;
    let key = key(&store)?;
    let devices = devices(args)?;
    let stop = cancel::flag();
    let (enrolled, listen) = match enrolled(&store, &out)? {
        Some(enrolled) => (enrolled, listen),
        None => match enrol(args, listen, &key, name.as_ref(), &store, &out)? {
            Some(enrolled) => enrolled,
            None => return Ok(ExitCode::SUCCESS),
        },
    };
    let (peer, members) = (enrolled.identity.name().clone(), enrolled.members);
    if let Some(wanted) = name.filter(|wanted| args.name.is_some() && *wanted != peer.name) {
        out.note(&format!("this worker was enrolled as {}: --name {wanted} is of no effect any more", peer.name));
    }
    let removed = Arc::new(AtomicBool::new(false));
    let places = Places::from_env();
    let host = Machine {
        name: peer.name.clone(),
        authority: enrolled.identity.authority().clone(),
        tensors: places.tensors.map(|folder| TensorCache::new(folder, args.cache_size.as_u64())),
        removed: removed.clone(),
        store,
    };
    let node = Node::start(WhoAmI { identity: enrolled.identity, members }, listen, control_limits());
    let node = node.map_err(about_bind)?;
    let listen = node.local_addr()?;
    let ready = Ready {
        name: peer.name.to_string(),
        cluster: peer.cluster.to_string(),
        listen,
        devices: devices.iter().map(|device| DeviceRow { id: device.id(), name: device.name() }).collect(),
        models: places.folder.map(|folder| folder.display().to_string()),
        cache: host.tensors.as_ref().map(|cache| cache.folder().display().to_string()),
        cache_bytes_max: args.cache_size.as_u64(),
    };
    let server = Server::new(node, devices, Box::new(host));
    out.note(&ready.text());
    if out.json() {
        out.object(&ready)?;
    }
    server.serve(stop);
    if removed.load(Ordering::Relaxed) {
        return Err(errors::worker(format!(
            "the head has removed {} from cluster {}: start the worker again to enrol it again",
            peer.name, peer.cluster
        )));
    }
    Ok(ExitCode::SUCCESS)
}

/// What there is to know of a worker that serves.
#[derive(Debug, Serialize)]
struct Ready {
    name: String,
    cluster: String,
    listen: SocketAddr,
    devices: Vec<DeviceRow>,
    /// Where it looks for models.
    models: Option<String>,
    /// Where it keeps tensors that come from other machines.
    cache: Option<String>,
    /// How many bytes of them at most.
    cache_bytes_max: u64,
}

#[derive(Debug, Serialize)]
struct DeviceRow {
    id: String,
    name: String,
}

impl Ready {
    fn text(&self) -> String {
        let devices: Vec<String> = self.devices.iter().map(|device| format!("{} {}", device.id, device.name)).collect();
        format!(
            "worker {} of cluster {} serves on UDP {}\ndevices: {}\nmodels: {}\ntensor cache: {}",
            self.name,
            self.cluster,
            self.listen,
            devices.join(", "),
            self.models.as_deref().unwrap_or("no folder: set PP_MODELS or HOME"),
            match &self.cache {
                Some(folder) => format!("{folder}, at most {} (--cache-size)", bytes(self.cache_bytes_max)),
                None => "no folder: set HOME or XDG_CACHE_HOME".to_owned(),
            }
        )
    }
}

/// Where to listen, as typed.
pub(super) fn listen(typed: &str) -> Result<SocketAddr> {
    let with_port = || typed.parse().ok();
    let without = || {
        let bare = typed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(typed);
        bare.parse::<IpAddr>().ok().map(|address| SocketAddr::from((address, PORT)))
    };
    with_port().or_else(without).ok_or_else(|| {
        usage(format!(
            "--listen {typed}: expected an address of this machine, with or without a port, such as 0.0.0.0:{PORT} or [::]:{PORT}"
        ))
    })
}

/// Whether a worker of this folder runs.
pub(super) fn is_running(store: &Store) -> bool {
    let lock = File::open(store.folder().join(RUNNING));
    lock.is_ok_and(|lock| matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// The right to be the worker of this folder.
fn only_one(store: &Store) -> Result<File> {
    // Makes the folder.
    drop(store.lock(LOCK)?);
    let path = store.folder().join(RUNNING);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.with_context(|| format!("cannot open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(anyhow::anyhow!(
            "a worker with the keys in {} runs already; a second one on this machine needs a folder of its own (XDG_CONFIG_HOME) and another port (--listen)",
            store.folder().display()
        )),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// The worker's key, made on its first start.
fn key(store: &Store) -> Result<Key> {
    let lock = store.lock(LOCK)?;
    if let Some(key) = store.worker_key()? {
        return Ok(key);
    }
    let key = Key::generate()?;
    lock.put_worker_key(&key)?;
    Ok(key)
}

/// The devices to give, opened once to see that they can be.
fn devices(args: &WorkerArgs) -> Result<Vec<Device>> {
    let devices = plan::all_devices(&args.device, args.profile)?;
    for device in &devices {
        device.trusted().map_err(|error| errors::device(format!("{}: {error}", device.name())))?;
    }
    Ok(devices)
}

/// What enrolment gave, as long as it is worth something.
fn enrolled(store: &Store, out: &Out) -> Result<Option<Enrolled>> {
    let Some(worker) = store.worker()? else { return Ok(None) };
    let certificate = worker.identity.certificate();
    let peer = certificate.name();
    if worker.members.allows(peer, &certificate.fingerprint()).is_err() && worker.members.version() > 0 {
        out.note(&format!("{} was removed from cluster {}: it has to be enrolled again", peer.name, peer.cluster));
        return Ok(None);
    }
    if certificate.not_after() < UnixTime::now() {
        out.note(&format!(
            "the certificate of {} in cluster {} has expired, as no head has renewed it: it has to be enrolled again",
            peer.name, peer.cluster
        ));
        return Ok(None);
    }
    Ok(Some(worker))
}

/// Waits for a head that has the code; nothing when the worker is to end before.
fn enrol(
    args: &WorkerArgs,
    listen: SocketAddr,
    key: &Key,
    name: Option<&Name>,
    store: &Store,
    out: &Out,
) -> Result<Option<(Enrolled, SocketAddr)>> {
    let preset = match std::env::var("PP_JOIN_CODE") {
        Ok(text) if !text.is_empty() => {
            Some(Code::preset(&text).map_err(|error| usage(format!("PP_JOIN_CODE: {error}")))?)
        }
        _ => None,
    };
    let mut tell = |waiting: Waiting<'_>| match waiting {
        Waiting::Code { address, code, again } => {
            let head = Invitation { name, address: advertised(args.advertise.as_deref(), address), code };
            out.note(&head.text(address, again.map(|shut| shut.to_string())));
        }
        Waiting::Refused { from, error } => out.note(&format!("{from}: {error}")),
    };
    let keeping = store.clone();
    let keep = move |identity: &pp_transport::identity::Identity, members: &SignedMembers| {
        keeping.lock(LOCK).and_then(|lock| lock.put_worker(identity, members))
    };
    let joined = joining::wait_for_enrolment(listen, key, name, preset.as_ref(), cancel::flag(), &mut tell, keep);
    let Some((identity, listen)) = joined.map_err(about_joining)? else { return Ok(None) };
    out.note(&format!("enrolled as {} in cluster {}", identity.name().name, identity.name().cluster));
    let enrolled = store.worker()?.context("what enrolment has stored is not there")?;
    Ok(Some((enrolled, listen)))
}

/// What a person carries to the head.
struct Invitation<'a> {
    name: Option<&'a Name>,
    address: String,
    code: &'a Code,
}

impl Invitation<'_> {
    fn text(&self, listens: SocketAddr, again: Option<String>) -> String {
        let why = again.map_or_else(
            || format!("this worker is in no cluster yet, and listens on UDP {listens} to be enrolled"),
            |shut| shut.split(':').next().unwrap_or_default().to_owned(),
        );
        let (name, address) = (self.name.map_or("NAME", Name::as_str), &self.address);
        let minutes = CODE_VALIDITY.as_secs() / 60;
        if self.code.is_preset() {
            return format!(
                "{why}\nrun on the head within {minutes} minutes, with the same PP_JOIN_CODE:\n\n  pp-run cluster add {name} {address}\n"
            );
        }
        let code = self.code.reveal();
        format!(
            "{why}\nrun on the head within {minutes} minutes:\n\n  pp-run cluster add {name} {address} --code {code}\n"
        )
    }
}

/// The address to print for the head.
fn advertised(typed: Option<&str>, listens: SocketAddr) -> String {
    if let Some(typed) = typed {
        let has_port = typed.parse::<SocketAddr>().is_ok()
            || (typed.parse::<IpAddr>().is_err()
                && typed.rsplit_once(':').is_some_and(|(_, p)| p.parse::<u16>().is_ok()));
        return match typed.parse::<Ipv6Addr>() {
            Ok(address) => format!("[{address}]:{}", listens.port()),
            Err(_) if has_port => typed.to_owned(),
            Err(_) => format!("{typed}:{}", listens.port()),
        };
    }
    if !listens.ip().is_unspecified() {
        return listens.to_string();
    }
    let v4 = || ours((Ipv4Addr::UNSPECIFIED, 0).into(), SOMEWHERE.into());
    let v6 = || ours((Ipv6Addr::UNSPECIFIED, 0).into(), SOMEWHERE_V6.into()).filter(|_| listens.is_ipv6());
    match v4().or_else(v6) {
        Some(address) => SocketAddr::from((address, listens.port())).to_string(),
        None => format!("{}:{}", cluster::host_name(), listens.port()),
    }
}

/// Our address on the way to `there`.
fn ours(from: SocketAddr, there: SocketAddr) -> Option<IpAddr> {
    let socket = UdpSocket::bind(from).ok()?;
    socket.connect(there).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

fn about_joining(error: JoinError) -> anyhow::Error {
    match error {
        JoinError::Node(error) => about_bind(error),
        error => error.into(),
    }
}

fn about_bind(error: NodeError) -> anyhow::Error {
    let taken = matches!(&error, NodeError::Bind { error, .. } if error.kind() == std::io::ErrorKind::AddrInUse);
    if taken {
        return anyhow::anyhow!("{error}: another worker may run on this machine; take another port (--listen)");
    }
    error.into()
}

/// What a worker keeps and looks up for its head.
struct Machine {
    name: Name,
    authority: CaCertificate,
    tensors: Option<TensorCache>,
    store: Store,
    removed: Arc<AtomicBool>,
}

impl Host for Machine {
    fn model(&self, digest: &Digest, bytes: u64, stop: &AtomicBool) -> Result<Option<PathBuf>, String> {
        cluster::model::find(digest, bytes, stop)
    }

    fn whole(&self, name: &str, stop: &AtomicBool) -> Result<Option<Whole>, String> {
        cluster::model::whole(name, stop)
    }

    fn tensors(&self) -> Option<TensorCache> {
        self.tensors.clone()
    }

    fn examine(&self, models: &[Model]) -> Vec<Finding> {
        super::doctor::machine::of_worker(models)
    }

    fn keep_members(&self, signed: &[u8]) -> Result<(), String> {
        let signed = SignedMembers::from_bytes(signed.to_vec()).map_err(|error| error.to_string())?;
        let members = signed.verify(&self.authority).map_err(|error| error.to_string())?;
        let keep = self.store.lock(LOCK).and_then(|lock| lock.put_signed_members(&signed, &self.authority));
        keep.map_err(|error| error.to_string())?;
        if members.get(&self.name).is_none() {
            self.removed.store(true, Ordering::Relaxed);
            cancel::flag().store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    fn keep_certificate(&self, der: &[u8]) -> Result<(), String> {
        let certificate = HostCertificate::parse(der).map_err(|error| error.to_string())?;
        let lock = self.store.lock(LOCK).map_err(|error| error.to_string())?;
        let stored = self.store.worker().map_err(|error| error.to_string())?;
        let mut identity = stored.ok_or("this worker's certificate is not in its folder")?.identity;
        identity.replace_certificate(certificate, UnixTime::now()).map_err(|error| error.to_string())?;
        lock.put_certificate(&identity).map_err(|error| error.to_string())
    }

    fn memory(&self) -> Option<(u64, u64)> {
        memory::host()
    }

    fn calibrations(&self) -> Option<PathBuf> {
        measured::file()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_listens_where_it_is_told_or_on_the_usual_port() {
        let check = |typed: &str, wanted: &str| assert_eq!(listen(typed).unwrap().to_string(), wanted);
        check("0.0.0.0", "0.0.0.0:7711");
        check("192.0.2.1:80", "192.0.2.1:80");
        check("::", "[::]:7711");
        check("[::]", "[::]:7711");
        check("[::1]:80", "[::1]:80");
        assert!(listen("rig2").unwrap_err().to_string().contains("--listen rig2"));
    }

    #[test]
    fn what_is_printed_for_the_head_can_be_dialled() {
        let at = |typed, listens: &str| advertised(typed, listens.parse().unwrap());
        assert_eq!(at(None, "192.0.2.1:7711"), "192.0.2.1:7711");
        assert_eq!(at(Some("rig2.example.net"), "0.0.0.0:80"), "rig2.example.net:80");
        assert_eq!(at(Some("rig2:90"), "0.0.0.0:80"), "rig2:90");
        assert_eq!(at(Some("2001:db8::2"), "[::]:80"), "[2001:db8::2]:80");
        assert_eq!(at(Some("192.0.2.2"), "0.0.0.0:80"), "192.0.2.2:80");
        assert!(!at(None, "0.0.0.0:80").starts_with("0.0.0.0"));
    }
}
