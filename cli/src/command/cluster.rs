//! What the head does with its cluster: begins it, adds workers, removes and drains them. [`status`] shows it, [`rebalance`] has
//! layers divided otherwise.

mod rebalance;
mod status;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pp_engine::cluster::control::{Purpose, ToWorker};
use pp_engine::cluster::remote::{LeaseError, Worker};
use pp_transport::enrol::{AskError, Code};
use pp_transport::identity::store::Head;
use pp_transport::identity::{Address, Authority, Identity, Key, Name, PeerName, Role, UnixTime};
use pp_transport::members::{Member, Members};
use pp_transport::quic::Node;
use pp_transport::quic::joining::{self, JoinError};
use serde::Serialize;

use crate::args::{AddArgs, ClusterArgs, ClusterVerb, DrainArgs, InitArgs, RemoveArgs};
use crate::cluster::gather::DIAL;
use crate::cluster::{self, Here, LOCK, lease_error, typed_address, typed_name};
use crate::errors::{self, usage};
use crate::output::{Out, Report};
pub(super) use status::{Look, look};

/// How often a worker that was just enrolled is tried: it opens its endpoint anew.
const TRIES: usize = 5;
/// Between two tries.
const AGAIN: Duration = Duration::from_millis(300);

/// Does what was asked.
pub fn run(args: &ClusterArgs) -> Result<ExitCode> {
    match &args.verb {
        ClusterVerb::Init(args) => init(args),
        ClusterVerb::Add(args) => add(args),
        ClusterVerb::Status(args) => status::run(args),
        ClusterVerb::Remove(args) => remove(args),
        ClusterVerb::Drain(args) => drain(args),
        ClusterVerb::Rebalance(args) => rebalance::run(args),
    }
}

fn init(args: &InitArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let name = typed_name(&args.name)?;
    let store = cluster::store()?;
    let lock = store.lock(LOCK)?;
    let now = UnixTime::now();
    let authority = Authority::create(now)?;
    let key = Key::generate()?;
    let peer = PeerName { cluster: authority.cluster(), role: Role::Head, name: name.clone() };
    let certificate = authority.issue_now(key.public(), &peer, now)?;
    let identity = Identity::new(key, certificate, authority.certificate().clone())?;
    let fingerprint = identity.fingerprint();
    let member = Member { name: name.clone(), role: Role::Head, fingerprint, address: None, added: now.as_secs() };
    let members = Members::founding(authority.cluster(), member);
    lock.put_head(&Head { authority, identity, members })?;
    out.result(&Begun {
        cluster: peer.cluster.to_string(),
        head: name.to_string(),
        folder: store.folder().display().to_string(),
    })?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Begun {
    cluster: String,
    head: String,
    folder: String,
}

impl Report for Begun {
    fn text(&self) -> String {
        let Begun { cluster, head, folder } = self;
        format!(
            "cluster {cluster} is begun, and this machine is its head, {head}\n\
             ca.key and head.key in {folder} are its private keys (mode 0600): whoever has them has the cluster; keep a backup of the folder\n\
             next: `pp-run worker` on another machine; it prints what to run here"
        )
    }
}

fn add(args: &AddArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let name = typed_name(&args.name)?;
    let address = typed_address(&args.address)?;
    let mut here = Here::open()?;
    let is_member = here.worker(&name).is_ok();
    match args.code.as_deref().filter(|code| !code.is_empty()) {
        Some(code) => {
            let code: Code = code.parse().map_err(|error| usage(format!("--code: {error}")))?;
            enrol(&mut here, &name, &address, &code)?;
        }
        None if is_member => relocate(&mut here, &name, &address)?,
        None => {
            return Err(usage(format!(
                "{name} is no member yet: give the code that its worker has printed (--code CODE), or set PP_JOIN_CODE"
            )));
        }
    }
    // It serves in a moment, if it does: only then everything is seen to work.
    let devices = greet(&here, &name, &out);
    out.result(&Added { name: name.to_string(), address: address.to_string(), devices })?;
    Ok(ExitCode::SUCCESS)
}

fn enrol(here: &mut Here, name: &Name, address: &Address, code: &Code) -> Result<()> {
    let (store, head) = (here.store().clone(), here.head().clone());
    let enlist = |host: &pp_transport::enrol::Host| -> Result<Name> {
        let member = Member {
            name: name.clone(),
            role: Role::Worker,
            fingerprint: host.fingerprint,
            address: Some(address.clone()),
            added: UnixTime::now().as_secs(),
        };
        cluster::changed(&store.lock(LOCK)?, |members| Ok(members.add(member)?))?;
        Ok(name.clone())
    };
    joining::enrol_worker(address, code, &head.authority, here.member()?, enlist).map_err(join_error)?;
    *here = Here::open()?;
    Ok(())
}

fn join_error(error: JoinError) -> anyhow::Error {
    match &error {
        JoinError::Ask(AskError::Enlist(cause)) => usage(cause.to_string()),
        _ => errors::worker(error.to_string()),
    }
}

/// The member has another address now; it must be there.
fn relocate(here: &mut Here, name: &Name, address: &Address) -> Result<()> {
    let moved = Member { address: Some(address.clone()), ..here.worker(name)?.clone() };
    Worker::connect(&here.node()?, &moved, &here.greeting(), Purpose::Look, DIAL).map_err(lease_error)?;
    here.change(|members| Ok(members.add(moved)?))
}

/// The devices of a worker that should serve now, with the present list; what goes wrong is only noted.
fn greet(here: &Here, name: &Name, out: &Out) -> Vec<String> {
    let greeted = here.node().and_then(|node| {
        let member = here.worker(name)?;
        let mut tries = 1;
        loop {
            match Worker::connect(&node, member, &here.greeting(), Purpose::Look, DIAL) {
                Ok(worker) => {
                    here.freshen(&worker)?;
                    return Ok(worker.welcome().devices.iter().map(|d| format!("{} {}", d.id, d.name)).collect());
                }
                Err(error) if tries == TRIES => return Err(lease_error(error)),
                Err(_) => {
                    tries += 1;
                    std::thread::sleep(AGAIN);
                }
            }
        }
    });
    greeted.unwrap_or_else(|error| {
        out.note(&format!("it is a member, and does not serve yet: {error:#}"));
        Vec::new()
    })
}

#[derive(Debug, Serialize)]
struct Added {
    name: String,
    address: String,
    devices: Vec<String>,
}

impl Report for Added {
    fn text(&self) -> String {
        let devices = if self.devices.is_empty() { String::new() } else { format!(": {}", self.devices.join(", ")) };
        format!("{} is a member, at {}{devices}", self.name, self.address)
    }
}

fn remove(args: &RemoveArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let name: Name = args.name.parse().map_err(|error: pp_transport::identity::NameError| usage(error.to_string()))?;
    let mut here = Here::open()?;
    here.worker(&name)?;
    // This endpoint still knows the member that goes, so that it can be told as well.
    let node = here.node()?;
    let all: Vec<Member> = here.workers().cloned().collect();
    here.change(|members| Ok(members.remove(&name)?))?;
    let signed = here.signed()?.as_bytes().to_vec();
    let told = every(&node, &all, &here.greeting(), |worker| worker.tell(&ToWorker::Members(signed.clone())));
    let missed = all.iter().zip(told).filter_map(|(member, told)| {
        let reason = told.err()?.to_string();
        Some(Missed { name: member.name.to_string(), reason })
    });
    let missed: Vec<Missed> = missed.collect();
    out.result(&Removed { name: name.to_string(), version: here.head().members.version(), not_told: missed })?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Removed {
    name: String,
    /// Of the member list.
    version: u64,
    not_told: Vec<Missed>,
}

#[derive(Debug, Serialize)]
struct Missed {
    name: String,
    reason: String,
}

impl Report for Removed {
    fn text(&self) -> String {
        let mut text = format!("{} is no member any more (member list {})", self.name, self.version);
        for Missed { name, reason } in &self.not_told {
            if *name == self.name {
                text.push_str(&format!("\nit could not be told itself ({reason}); nobody who knows speaks with it"));
            } else {
                text.push_str(&format!("\n{name} could not be told, and will be when it is next used: {reason}"));
            }
        }
        text
    }
}

fn drain(args: &DrainArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let name: Name = args.name.parse().map_err(|error: pp_transport::identity::NameError| usage(error.to_string()))?;
    let here = Here::open()?;
    let member = here.worker(&name)?;
    let node = here.node()?;
    let worker = Worker::connect(&node, member, &here.greeting(), Purpose::Look, DIAL).map_err(lease_error)?;
    here.freshen(&worker)?;
    worker.tell(&ToWorker::Drain(!args.undo)).map_err(lease_error)?;
    let held_by = worker.welcome().holder.as_ref().map(|holder| holder.head.clone());
    out.result(&Drained { name: name.to_string(), draining: !args.undo, held_by })?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct Drained {
    name: String,
    draining: bool,
    held_by: Option<String>,
}

impl Report for Drained {
    fn text(&self) -> String {
        match (self.draining, &self.held_by) {
            (false, _) => format!("{} takes work again", self.name),
            (true, None) => format!("{} takes nothing new, and has nothing: it can be stopped", self.name),
            (true, Some(head)) => format!("{} takes nothing new, and ends what it runs for {head}", self.name),
        }
    }
}

/// Does something with every worker at once.
pub(super) fn every<T: Send>(
    node: &Arc<Node>,
    members: &[Member],
    greeting: &str,
    visit: impl Fn(&Worker) -> Result<T, LeaseError> + Sync,
) -> Vec<Result<T, LeaseError>> {
    std::thread::scope(|scope| {
        let visit = &visit;
        let one = |member| {
            scope.spawn(move || Worker::connect(node, member, greeting, Purpose::Look, DIAL).and_then(|w| visit(&w)))
        };
        let visits: Vec<_> = members.iter().map(one).collect();
        visits.into_iter().map(|visit| visit.join().expect("a visit does not panic")).collect()
    })
}
