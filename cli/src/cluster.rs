//! This machine as the head of a cluster: its folder, its member list, and workers that are within reach.
//!
//! [`places`] is where stages run, as typed; [`file`] the same by file; [`gather`] gets hold of the workers; [`model`]
//! is the model as workers look for it.

pub mod file;
pub mod gather;
pub mod model;
pub mod places;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use pp_engine::cluster::control::ToWorker;
use pp_engine::cluster::control_limits;
use pp_engine::cluster::remote::{LeaseError, Worker};
use pp_transport::identity::store::{Head, Lock};
use pp_transport::identity::{Address, HOST_VALIDITY, Name, Role, Store, UnixTime};
use pp_transport::members::{Member, Members, SignedMembers};
use pp_transport::quic::{Node, WhoAmI};

use crate::errors::{self, usage};

/// Where workers listen unless told otherwise. Of the user ports, and assigned to nobody.
pub const PORT: u16 = 7711;
/// How long another pp-run of this machine may hold the folder.
pub const LOCK: Duration = Duration::from_secs(5);
/// What `--workers` calls the head's own machine.
pub const LOCAL: &str = "local";

/// The folder of identities and members: `$XDG_CONFIG_HOME/pp-run/cluster`.
///
/// # Errors
/// When the environment does not say where that is.
pub fn store() -> Result<Store> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = var("XDG_CONFIG_HOME").or_else(|| var("HOME").map(|home| home.join(".config")));
    let config = config.ok_or_else(|| usage("set HOME or XDG_CONFIG_HOME: it says where the cluster's keys are"))?;
    Ok(Store::new(config.join("pp-run/cluster")))
}

/// What this machine calls itself, or nothing it would call a name.
pub fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// A name for a member that is made of a host name as far as it can be.
pub fn member_name(host: &str) -> Option<Name> {
    let first = host.split('.').next().unwrap_or_default().to_ascii_lowercase();
    let legal = |c: char| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' };
    let spelt: String = first.chars().map(legal).take(pp_transport::identity::NAME_BYTES_MAX).collect();
    spelt.trim_matches('-').parse().ok()
}

/// A name that was typed.
///
/// # Errors
/// When it is none, or means something else.
pub fn typed_name(typed: &str) -> Result<Name> {
    if typed == LOCAL {
        return Err(usage(format!("`{LOCAL}` is what --workers calls this machine: take another name")));
    }
    typed.parse().map_err(|error: pp_transport::identity::NameError| usage(error.to_string()))
}

/// An address that was typed, with or without a port.
///
/// # Errors
/// When it is none.
pub fn typed_address(typed: &str) -> Result<Address> {
    let bare_v6 = typed.parse::<Ipv6Addr>().is_ok();
    let has_port = !bare_v6 && typed.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
    let whole = match (bare_v6, has_port) {
        (true, _) => format!("[{typed}]:{PORT}"),
        (false, true) => typed.to_owned(),
        (false, false) => format!("{typed}:{PORT}"),
    };
    whole.parse().map_err(|error: pp_transport::identity::NameError| usage(error.to_string()))
}

/// This machine as the head of its cluster.
pub struct Here {
    store: Store,
    head: Head,
}

impl Here {
    /// The cluster that was begun on this machine. The head's own certificate is renewed in time.
    ///
    /// # Errors
    /// When there is none, or its folder is damaged.
    pub fn open() -> Result<Here> {
        let store = store()?;
        let head = read(&store)?;
        let mut here = Here { head, store };
        if here.head.identity.renewal_due(UnixTime::now()) {
            here.renew()?;
        }
        Ok(here)
    }

    fn renew(&mut self) -> Result<()> {
        let lock = self.store.lock(LOCK)?;
        let mut head = read(lock.store())?;
        let (now, old) = (UnixTime::now(), head.identity.certificate().clone());
        // Whoever has the authority's key needs no valid certificate to make another.
        let new = head.authority.issue_now(old.key(), old.name(), now)?;
        head.identity.replace_certificate(new, now)?;
        lock.put_certificate(&head.identity)?;
        drop(lock);
        self.head = head;
        Ok(())
    }

    /// The authority, the identity and the members.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// The head's own entry in the list.
    ///
    /// # Errors
    /// When it is not there.
    pub fn member(&self) -> Result<&Member> {
        let name = &self.head.identity.name().name;
        let missing = || anyhow::anyhow!("the member list does not have this head, {name}: restore its folder");
        self.head.members.get(name).ok_or_else(missing)
    }

    /// The workers, in the order in which they were added.
    pub fn workers(&self) -> impl Iterator<Item = &Member> {
        self.head.members.members().iter().filter(|member| member.role == Role::Worker)
    }

    /// A worker.
    ///
    /// # Errors
    /// When there is none of that name: says which there are.
    pub fn worker(&self, name: &Name) -> Result<&Member> {
        self.workers().find(|member| member.name == *name).ok_or_else(|| {
            let names: Vec<&str> = self.workers().map(|member| member.name.as_str()).collect();
            let known =
                if names.is_empty() { "it has none yet".to_owned() } else { format!("it has {}", names.join(", ")) };
            usage(format!("there is no worker {name} in this cluster; {known} (`pp-run cluster add` adds one)"))
        })
    }

    /// Changes the stored member list, under its lock.
    ///
    /// # Errors
    /// When the change is refused or cannot be stored; the list is then as it was.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut Members) -> Result<T>) -> Result<T> {
        let lock = self.store.lock(LOCK)?;
        let (changed, head) = changed(&lock, change)?;
        drop(lock);
        self.head = head;
        Ok(changed)
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// What workers tell others of this process.
    pub fn greeting(&self) -> String {
        let name = &self.head.identity.name().name;
        format!("{name} ({}, process {})", host_name(), std::process::id())
    }

    /// An endpoint that dials.
    ///
    /// # Errors
    /// When the system gives none.
    pub fn node(&self) -> Result<Arc<Node>> {
        let who = WhoAmI { identity: self.head.identity.clone(), members: self.head.members.clone() };
        let v4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let is_v4 = |address: &Address| address.as_str().parse::<std::net::SocketAddrV4>().is_ok();
        if self.workers().filter_map(|member| member.address.as_ref()).all(is_v4) {
            return Ok(Arc::new(Node::start(who, v4, control_limits())?));
        }
        // Names may lead anywhere: a socket of IPv6 reaches both kinds, where the system has any.
        let v6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let node =
            Node::start(who.clone(), v6, control_limits()).or_else(|_| Node::start(who, v4, control_limits()))?;
        Ok(Arc::new(node))
    }

    /// The member list for workers.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn signed(&self) -> Result<SignedMembers> {
        Ok(SignedMembers::sign(&self.head.members, &self.head.authority)?)
    }

    /// Gives a worker the present member list, and a new certificate when less than a third of its life is left.
    ///
    /// # Errors
    /// When it does not take them.
    pub fn freshen(&self, worker: &Worker) -> Result<Fresh> {
        let welcome = worker.welcome();
        let mut fresh =
            Fresh { members_version: welcome.members_version, certificate_until: welcome.certificate_until };
        if fresh.members_version < self.head.members.version() {
            worker.tell(&ToWorker::Members(self.signed()?.as_bytes().to_vec()))?;
            fresh.members_version = self.head.members.version();
        }
        let now = UnixTime::now();
        let left = fresh.certificate_until.saturating_sub(now.as_secs());
        if left < HOST_VALIDITY.as_secs() / 3
            && let Some(old) = worker.certificate()
        {
            let new = self.head.authority.renew(&old, now)?;
            worker.tell(&ToWorker::Certificate(new.der().to_vec()))?;
            fresh.certificate_until = new.not_after().as_secs();
        }
        Ok(fresh)
    }
}

/// What a worker has once it was freshened.
#[derive(Clone, Copy, Debug)]
pub struct Fresh {
    /// Version of its member list.
    pub members_version: u64,
    /// When its certificate ends, in Unix seconds.
    pub certificate_until: u64,
}

fn read(store: &Store) -> Result<Head> {
    store.head()?.ok_or_else(|| {
        usage(format!(
            "this machine is not the head of a cluster: there is none in {}; `pp-run cluster init` begins one",
            store.folder().display()
        ))
    })
}

/// Changes the list in the store that is locked; returns the head as it is then.
pub fn changed<T>(lock: &Lock<'_>, change: impl FnOnce(&mut Members) -> Result<T>) -> Result<(T, Head)> {
    let mut head = read(lock.store())?;
    let changed = change(&mut head.members)?;
    lock.put_members(&head.members, &head.authority)?;
    Ok((changed, head))
}

/// What a worker that was not reached means for the exit code.
pub fn lease_error(error: LeaseError) -> anyhow::Error {
    errors::worker(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_names_become_names_of_members() {
        let check = |host: &str, name: Option<&str>| {
            assert_eq!(member_name(host).as_ref().map(Name::as_str), name, "{host:?}");
        };
        check("rig2", Some("rig2"));
        check("Rig_2.example.net", Some("rig-2"));
        check("-x-", Some("x"));
        check("", None);
        check("...", None);
        check(&"a".repeat(80), Some(&"a".repeat(40)));
    }

    #[test]
    fn addresses_get_the_usual_port() {
        let check = |typed: &str, address: &str| assert_eq!(typed_address(typed).unwrap().as_str(), address);
        check("192.0.2.12", "192.0.2.12:7711");
        check("192.0.2.12:7712", "192.0.2.12:7712");
        check("rig2.example.net", "rig2.example.net:7711");
        check("2001:db8::1", "[2001:db8::1]:7711");
        check("[2001:db8::1]", "[2001:db8::1]:7711");
        check("[2001:db8::1]:80", "[2001:db8::1]:80");
        for wrong in ["", ":7711", "a b", "rig2:0", "rig2:x"] {
            assert!(typed_address(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn this_machine_has_a_name_that_no_worker_may_take() {
        assert!(typed_name("local").is_err());
        assert!(typed_name("Rig2").is_err());
        assert_eq!(typed_name("rig2").unwrap().as_str(), "rig2");
    }
}
