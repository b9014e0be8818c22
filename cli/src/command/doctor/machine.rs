//! What there is to say of a host without asking its devices: memory, disk, network, keys and models. A worker says it of
//! itself when its head asks.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::path::Path;

use pp_engine::checkpoint::Checkpoint;
use pp_engine::cluster::health::{Finding, MODELS_MAX, Model, Severity};
use pp_engine::digest::{self, DigestError, Digests};
use pp_transport::identity::store::StoreError;
use pp_transport::identity::{HostCertificate, Store, UnixTime};
use pp_transport::quic::tuning;

use crate::cluster;
use crate::command::worker;
use crate::memory;
use crate::models::{Places, models_in};
use crate::output::bytes;

/// Less free memory or disk than this is little.
const LITTLE: u64 = 1_000_000_000;
const DAY: u64 = 24 * 3600;
/// A head renews certificates with 30 days left: with fewer, it has not for a while.
const DAYS_FEW: u64 = 15;
/// A year's notice before the cluster's authority ends and all are enrolled again.
const AUTHORITY_DAYS_FEW: u64 = 365;
/// What QUIC needs of a network, in bytes of an IP packet.
const MTU_MIN: u64 = 1280;

/// All of it; `listen` is where a worker would be.
pub(super) fn all(listen: SocketAddr) -> Vec<Finding> {
    let places = Places::from_env();
    let mut findings = vec![port(listen)];
    findings.extend(of_host(&places));
    findings.extend(models(&places));
    findings
}

/// What a worker says of its host, and of the models that its head has.
pub fn of_worker(wanted: &[Model]) -> Vec<Finding> {
    let places = Places::from_env();
    let mut findings = of_host(&places);
    findings.extend(wanted.iter().map(|model| wanted_model(&places, model)));
    findings
}

fn of_host(places: &Places) -> Vec<Finding> {
    let mut findings = vec![free_memory()];
    findings.extend(places.folder.as_deref().map(|folder| disk("disk of models", folder)));
    let cache = places.digests.as_deref().and_then(Path::parent);
    findings.extend(cache.map(|folder| disk("disk of the cache", folder)));
    findings.push(interfaces(Path::new("/sys/class/net")));
    findings.extend(sockets());
    findings.extend(keys());
    findings
}

fn free_memory() -> Finding {
    let subject = "memory";
    match memory::host() {
        Some((all, free)) if free < LITTLE => {
            let found = format!("{} of {} are free", bytes(free), bytes(all));
            Finding::new(Severity::Warning, subject, found, "end what else runs, or use a smaller --ctx")
        }
        Some((all, free)) => Finding::ok(subject, format!("{} of {} are free", bytes(free), bytes(all))),
        None => Finding::new(Severity::Note, subject, "the system does not say how much there is", "nothing"),
    }
}

/// The file system that `path` is on, or would be.
fn disk(subject: &str, path: &Path) -> Finding {
    let there = path.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let free = match rustix::fs::statvfs(there) {
        Ok(found) => found.f_bavail.saturating_mul(found.f_frsize),
        Err(error) => {
            let found = format!("{}: {error}", there.display());
            return Finding::new(Severity::Warning, subject, found, "make it readable for this user");
        }
    };
    let found = format!("{} free for {}", bytes(free), path.display());
    if free < LITTLE {
        return Finding::new(
            Severity::Warning,
            subject,
            found,
            "make room, or have it elsewhere (PP_MODELS, XDG_CACHE_HOME)",
        );
    }
    Finding::ok(subject, found)
}

/// Whether a worker could listen there, or does.
fn port(listen: SocketAddr) -> Finding {
    let subject = "port";
    let is_ours = || cluster::store().is_ok_and(|store| worker::is_running(&store));
    match UdpSocket::bind(listen) {
        Ok(_) => Finding::ok(subject, format!("UDP {listen} is free")),
        Err(error) if error.kind() == ErrorKind::AddrInUse && is_ours() => {
            Finding::ok(subject, format!("UDP {listen} is used while this machine's worker runs"))
        }
        Err(error) if error.kind() == ErrorKind::AddrInUse => Finding::new(
            Severity::Warning,
            subject,
            format!("UDP {listen} is taken by another program"),
            "find it (ss -ulpn), or give a worker another port (--listen)",
        ),
        Err(error) => Finding::new(
            Severity::Error,
            subject,
            format!("UDP {listen} cannot be bound: {error}"),
            "take an address of this machine (ip address), and a port above 1023",
        ),
    }
}

/// Network devices that are up, and how large packets they take; from sysfs.
fn interfaces(net: &Path) -> Finding {
    let subject = "MTU";
    let read = |name: &str, file: &str| fs::read_to_string(net.join(name).join(file)).unwrap_or_default();
    let names = fs::read_dir(net).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut up: Vec<(String, u64)> = names
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name != "lo" && matches!(read(name, "operstate").trim(), "up" | "unknown"))
        .filter_map(|name| Some((name.clone(), read(&name, "mtu").trim().parse().ok()?)))
        .collect();
    up.sort();
    let found = up.iter().map(|(name, mtu)| format!("{name} {mtu}")).collect::<Vec<_>>().join(", ");
    if up.is_empty() {
        let advice = "nothing, where all stages are here; else bring a network device up (ip link)";
        return Finding::new(Severity::Note, subject, "no network device is up but the loopback", advice);
    }
    match up.iter().find(|(_, mtu)| *mtu < MTU_MIN) {
        Some((name, _)) => {
            let advice = format!(
                "QUIC needs packets of {MTU_MIN} bytes: ip link set {name} mtu 1500, as far as the network allows"
            );
            Finding::new(Severity::Warning, subject, found, advice)
        }
        None => Finding::ok(subject, found),
    }
}

/// What the system does for sockets of UDP.
fn sockets() -> Vec<Finding> {
    let facts = match tuning::facts() {
        Ok(facts) => facts,
        Err(error) => {
            let found = format!("no UDP socket can be had: {error}");
            return vec![Finding::new(Severity::Error, "sockets", found, "let this user open sockets")];
        }
    };
    let (sent, received) = (facts.segments_sent, facts.segments_received);
    let found = format!("{sent} datagrams sent and {received} received at once");
    let batches = if sent > 1 && received > 1 {
        Finding::ok("GSO, GRO", found)
    } else {
        let advice = "a newer kernel (5.0) sends and receives several at once, which large frames gain by";
        Finding::new(Severity::Note, "GSO, GRO", found, advice)
    };
    let (least, wanted) = (facts.receive_bytes.min(facts.send_bytes), facts.wanted_bytes);
    let found = format!("{} to receive, {} to send", bytes(facts.receive_bytes as u64), bytes(facts.send_bytes as u64));
    let buffers = if least >= wanted {
        Finding::ok("socket buffers", found)
    } else {
        let advice = format!(
            "sysctl -w net.core.rmem_max={wanted} net.core.wmem_max={wanted} (and in /etc/sysctl.d) loses fewer datagrams on fast networks"
        );
        Finding::new(Severity::Note, "socket buffers", found, advice)
    };
    vec![batches, buffers]
}

/// The identity of this machine, as head and as worker.
fn keys() -> Vec<Finding> {
    let store = match cluster::store() {
        Ok(store) => store,
        Err(error) => return vec![Finding::new(Severity::Error, "keys", error.to_string(), "set HOME")],
    };
    let (head, worker) = (store.head(), store.worker());
    let mut findings = Vec::new();
    match &head {
        Ok(Some(head)) => {
            let days = days_left(head.authority.certificate().not_after());
            findings.push(match days {
                Some(days) if days >= AUTHORITY_DAYS_FEW => {
                    Finding::ok("authority", format!("cluster {}, good for {days} days", head.authority.cluster()))
                }
                days => Finding::new(
                    if days.is_some() { Severity::Warning } else { Severity::Error },
                    "authority",
                    days.map_or("it has expired".to_owned(), |days| format!("it ends in {days} days")),
                    "begin a new cluster in another folder (XDG_CONFIG_HOME) and enrol the workers again",
                ),
            });
            // Whoever has the authority's key makes another when it is next needed.
            let renewal = "the next `pp-run cluster status` renews it";
            findings.push(certificate("head's certificate", head.identity.certificate(), Severity::Note, renewal));
            let workers = head.members.members().len() - 1;
            let version = head.members.version();
            findings.push(Finding::ok("members", format!("{workers} workers, list {version}")));
        }
        Ok(None) => {}
        Err(error) => findings.push(damaged("head's keys", &store, error)),
    }
    match &worker {
        Ok(Some(worker)) => {
            let renewal = "start the worker, and run on the head what it prints; else use it, and the head renews it";
            let end = worker.identity.certificate();
            findings.push(certificate("worker's certificate", end, Severity::Error, renewal));
        }
        Ok(None) => {}
        Err(error) => findings.push(damaged("worker's keys", &store, error)),
    }
    if findings.is_empty() {
        findings.push(Finding::ok("keys", "this machine is in no cluster"));
    }
    findings
}

fn damaged(subject: &str, store: &Store, error: &StoreError) -> Finding {
    let (found, advice) = match error {
        StoreError::Readable { path, mode } => (
            format!("{} is a private key that others can read (mode {mode:04o})", path.display()),
            format!("chmod 600 '{}', and make a new one if somebody may have read it", path.display()),
        ),
        StoreError::Writable { path, mode } => (
            format!("{} can be written by others (mode {mode:04o})", path.display()),
            format!("chmod 700 '{}'", path.display()),
        ),
        error => (
            error.to_string(),
            format!("restore {} from a backup; on a worker remove it and enrol again", store.folder().display()),
        ),
    };
    Finding::new(Severity::Error, subject, found, advice)
}

fn certificate(subject: &str, certificate: &HostCertificate, expired: Severity, advice: &str) -> Finding {
    let name = &certificate.name().name;
    match days_left(certificate.not_after()) {
        None => Finding::new(expired, subject, format!("that of {name} has expired"), advice),
        Some(days) if days < DAYS_FEW => {
            let severity = expired.min(Severity::Warning);
            Finding::new(severity, subject, format!("that of {name} ends in {days} days"), advice)
        }
        Some(days) => Finding::ok(subject, format!("{name}, good for {days} days")),
    }
}

/// Whole days; nothing where it is over.
pub(super) fn days_left(until: UnixTime) -> Option<u64> {
    until.as_secs().checked_sub(UnixTime::now().as_secs()).map(|seconds| seconds / DAY)
}

/// Models that are here and whose digest is known.
pub(super) fn known_models() -> Vec<Model> {
    let places = Places::from_env();
    let mut digests = Digests::new(places.digests.clone());
    let models = places.folder.iter().flat_map(|folder| models_in(folder).into_iter().map(|name| folder.join(name)));
    let known = models.filter_map(|path| {
        let checkpoint = Checkpoint::open(&path).ok()?;
        let digest = digests.of(&checkpoint, &mut |_, _| false).ok()?;
        Some(Model { digest, bytes: digest::bytes(&checkpoint).ok()?, name: file_name(&path) })
    });
    known.take(MODELS_MAX).collect()
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The models folder, and each model in it.
fn models(places: &Places) -> Vec<Finding> {
    let subject = "models";
    let Some(folder) = &places.folder else {
        let found = "there is no models folder";
        return vec![Finding::new(Severity::Warning, subject, found, "set PP_MODELS or HOME")];
    };
    let error = match fs::read_dir(folder) {
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let found = format!("{} is not there yet", folder.display());
            let advice = "put models there, or set PP_MODELS; scripts/demo.sh fetches a small one";
            return vec![Finding::new(Severity::Note, subject, found, advice)];
        }
        Err(error) => Some(error),
    };
    if let Some(error) = error {
        let found = format!("{} cannot be read: {error}", folder.display());
        return vec![Finding::new(Severity::Error, subject, found, "let this user read it (chmod, chown)")];
    }
    let names = models_in(folder);
    if names.is_empty() {
        let found = format!("{} holds none", folder.display());
        let advice = "put some there, or set PP_MODELS; scripts/demo.sh fetches a small one";
        return vec![Finding::new(Severity::Note, subject, found, advice)];
    }
    let mut digests = Digests::new(places.digests.clone());
    names.iter().map(|name| model(&folder.join(name), &mut digests)).collect()
}

fn model(path: &Path, digests: &mut Digests) -> Finding {
    let subject = format!("model {}", file_name(path));
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            let advice = "copy or fetch it again; `pp-run inspect` says more";
            return Finding::new(Severity::Error, &subject, error.to_string(), advice);
        }
    };
    let size = digest::bytes(&checkpoint).map_or("size unknown".to_owned(), bytes);
    let unsupported = checkpoint.unsupported();
    if let Some((tensor, kind)) = unsupported.first() {
        let found =
            format!("{size}, {} tensors are of types that are not supported: {tensor} is {kind}", unsupported.len());
        return Finding::new(Severity::Warning, &subject, found, "take another quantisation of the model");
    }
    match digests.of(&checkpoint, &mut |_, _| false) {
        Ok(digest) => Finding::ok(&subject, format!("{size}, digest {}", digest.short())),
        Err(DigestError::Cancelled) => {
            let advice =
                format!("`pp-run inspect {}` reads it once; the first run with workers does so, too", file_name(path));
            Finding::new(Severity::Note, &subject, format!("{size}, its digest is not known yet"), advice)
        }
        Err(error) => Finding::new(Severity::Error, &subject, error.to_string(), "let this user read it"),
    }
}

/// Whether a model of the head's is here. Nothing is read for it that was never read.
fn wanted_model(places: &Places, wanted: &Model) -> Finding {
    let subject = format!("model {}", wanted.name);
    let copy =
        "copy it into the models folder, under any name; else its layers come from the head when they are wanted";
    let Some(folder) = &places.folder else {
        return Finding::new(Severity::Warning, &subject, "there is no models folder", "set PP_MODELS or HOME");
    };
    let (mut digests, searched) = (Digests::new(places.digests.clone()), places.searched());
    let found = digests.find(wanted.digest, wanted.bytes, &searched, &mut |_, _| false);
    match found {
        Ok(Some(path)) => Finding::ok(&subject, format!("here as {}", path.display())),
        Ok(None) => Finding::new(
            Severity::Note,
            &subject,
            format!("no copy in {}, nor in the hub's cache", folder.display()),
            copy,
        ),
        Err(_) => {
            let found = "a file of its size is here, which was never read whole";
            Finding::new(Severity::Note, &subject, found, "the first run that uses it reads it once")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_are_up_are_told_with_their_mtu() {
        let dir = tempfile::tempdir().unwrap();
        let device = |name: &str, state: &str, mtu: &str| {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("operstate"), state).unwrap();
            fs::write(dir.path().join(name).join("mtu"), mtu).unwrap();
        };
        let severity = |finding: &Finding| (finding.severity, finding.found.clone());
        device("lo", "unknown\n", "65536\n");
        device("eth9", "down\n", "1500\n");
        assert_eq!(interfaces(dir.path()).severity, Severity::Note);
        device("eth0", "up\n", "1500\n");
        device("tun0", "unknown\n", "1420\n");
        assert_eq!(severity(&interfaces(dir.path())), (Severity::Ok, "eth0 1500, tun0 1420".to_owned()));
        device("ppp0", "up\n", "576\n");
        assert_eq!(interfaces(dir.path()).severity, Severity::Warning);
    }

    #[test]
    fn the_disk_of_what_is_not_there_yet_is_that_of_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (whole, part) = (disk("disk", dir.path()), disk("disk", &dir.path().join("a/b/c")));
        assert_eq!(whole.severity, part.severity);
        assert!(part.found.contains(" free for ") && part.found.ends_with("a/b/c"), "{}", part.found);
    }
}
