//! Who belongs to a cluster: a versioned list that the authority signs and the head pushes to every worker.
//!
//! A certificate says who a host is; the list says whether it still belongs. Every host asks its list about every peer,
//! when a connection is made and again whenever the list has changed, so a member that was removed is refused by its
//! neighbours too. Only the holder of the authority's key makes lists; everybody else takes them, never an older one.

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::identity::{Address, Authority, CaCertificate, ClusterId, Fingerprint, IdentityError, Name, PeerName, Role};

/// Most members of a list.
pub const MEMBERS_MAX: usize = 1024;
/// Longest signed list. A member takes at most 350 bytes.
pub const SIGNED_BYTES_MAX: usize = 1 << 20;

/// What stands before a list when it is signed: the authority's key signs certificates as well.
const SIGNED_AS: &[u8] = b"pp-run member list, version 1\n";
const SIGNATURE_BYTES: usize = 64;

/// A host that belongs to the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name, unique within the list.
    pub name: Name,
    /// What it may do.
    pub role: Role,
    /// Its key.
    pub fingerprint: Fingerprint,
    /// Where it listens; none for a head, which does not.
    pub address: Option<Address>,
    /// When it was added, in Unix seconds.
    pub added: u64,
}

/// The members of a cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Members {
    cluster: ClusterId,
    version: u64,
    members: Vec<Member>,
}

/// What [`Members::accept`] has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// The list is another now: keep it, and ask it again about every live connection.
    Changed,
    /// It is the list that was there.
    Unchanged,
}

impl Members {
    /// The list with which a cluster begins, version 0: its head alone. A worker has it from the moment it is enrolled,
    /// so the head can connect and push the current one.
    ///
    /// # Panics
    /// When the member is no head.
    pub fn founding(cluster: ClusterId, head: Member) -> Members {
        assert_eq!(head.role, Role::Head, "a cluster begins with its head");
        Members { cluster, version: 0, members: vec![head] }
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// The number of the list; each change raises it.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The members, in the order in which they were added.
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The member of that name.
    pub fn get(&self, name: &Name) -> Option<&Member> {
        self.members.iter().find(|member| member.name == *name)
    }

    /// Whether there is a member of that name and role, whatever its key.
    ///
    /// # Errors
    /// [`Refusal`]: why there is none.
    pub fn knows(&self, peer: &PeerName) -> Result<&Member, Refusal> {
        if peer.cluster != self.cluster {
            return Err(Refusal::OtherCluster { found: peer.cluster, mine: self.cluster });
        }
        let Some(member) = self.get(&peer.name) else {
            return Err(Refusal::NotMember { name: peer.name.clone(), version: self.version });
        };
        if member.role != peer.role {
            return Err(Refusal::OtherRole { name: peer.name.clone(), found: peer.role, listed: member.role });
        }
        Ok(member)
    }

    /// Whether the host that a verified certificate names, with the key of that fingerprint, is a member.
    ///
    /// # Errors
    /// [`Refusal`]: why it is not.
    pub fn allows(&self, peer: &PeerName, fingerprint: &Fingerprint) -> Result<(), Refusal> {
        let member = self.knows(peer)?;
        if member.fingerprint != *fingerprint {
            let (found, listed) = (*fingerprint, member.fingerprint);
            return Err(Refusal::OtherKey { name: peer.name.clone(), found, listed });
        }
        Ok(())
    }

    /// Takes a list that the authority has signed, unless it is older.
    ///
    /// # Errors
    /// [`MembersError`]; the list is then as it was.
    pub fn accept(&mut self, signed: &SignedMembers, authority: &CaCertificate) -> Result<Accepted, MembersError> {
        let new = signed.verify(authority)?;
        if new.cluster != self.cluster {
            return Err(MembersError::OtherCluster { found: new.cluster, mine: self.cluster });
        }
        if new == *self {
            return Ok(Accepted::Unchanged);
        }
        if new.version < self.version {
            return Err(MembersError::Older { found: new.version, mine: self.version });
        }
        if new.version == self.version {
            return Err(MembersError::SameVersion { version: new.version });
        }
        *self = new;
        Ok(Accepted::Changed)
    }

    /// Adds a member. One of the same name, role and key is replaced: a host that was added again, or that has moved.
    ///
    /// # Errors
    /// [`MembersError`]: the name or the key is another member's, or the list is full.
    pub fn add(&mut self, member: Member) -> Result<(), MembersError> {
        let is_same = |other: &Member| {
            (&other.name, other.role, other.fingerprint) == (&member.name, member.role, member.fingerprint)
        };
        if let Some(same) = self.members.iter_mut().find(|other| is_same(other)) {
            *same = member;
        } else {
            self.check_new(&member)?;
            self.members.push(member);
        }
        self.version += 1;
        Ok(())
    }

    /// Removes a member, and says who it was.
    ///
    /// # Errors
    /// [`MembersError`]: there is none of that name, or it is the last head.
    pub fn remove(&mut self, name: &Name) -> Result<Member, MembersError> {
        let at = self.members.iter().position(|member| member.name == *name);
        let at = at.ok_or_else(|| MembersError::NoSuch { name: name.clone() })?;
        let is_other_head = |(i, member): (usize, &Member)| i != at && member.role == Role::Head;
        if !self.members.iter().enumerate().any(is_other_head) {
            return Err(MembersError::LastHead { name: name.clone() });
        }
        self.version += 1;
        Ok(self.members.remove(at))
    }

    /// Puts a member in the place of the one of that name, with another key or address, as one change: a host that was
    /// set up again.
    ///
    /// # Errors
    /// [`MembersError`]: there is none of that name with that role, or the key is another member's.
    pub fn replace(&mut self, member: Member) -> Result<Member, MembersError> {
        let is_it = |other: &Member| other.name == member.name && other.role == member.role;
        let at = self.members.iter().position(is_it);
        let at = at.ok_or_else(|| MembersError::NoSuch { name: member.name.clone() })?;
        if let Some(other) =
            self.members.iter().enumerate().find(|(i, other)| *i != at && other.fingerprint == member.fingerprint)
        {
            return Err(MembersError::KeyTaken { name: member.name, other: other.1.name.clone() });
        }
        self.version += 1;
        Ok(std::mem::replace(&mut self.members[at], member))
    }

    fn check_new(&self, member: &Member) -> Result<(), MembersError> {
        if self.get(&member.name).is_some() {
            return Err(MembersError::NameTaken { name: member.name.clone() });
        }
        if let Some(other) = self.members.iter().find(|other| other.fingerprint == member.fingerprint) {
            return Err(MembersError::KeyTaken { name: member.name.clone(), other: other.name.clone() });
        }
        if self.members.len() >= MEMBERS_MAX {
            return Err(MembersError::Full);
        }
        Ok(())
    }

    /// That no list but a well-formed one was signed.
    fn check(&self) -> Result<(), MembersError> {
        if self.members.len() > MEMBERS_MAX {
            return Err(MembersError::Full);
        }
        let (mut names, mut keys) = (std::collections::HashSet::new(), std::collections::HashSet::new());
        for member in &self.members {
            if !names.insert(&member.name) || !keys.insert(member.fingerprint.0) {
                return Err(MembersError::NameTaken { name: member.name.clone() });
            }
        }
        Ok(())
    }
}

/// A list with the authority's signature, as it is sent and stored: the signature, then the list in
/// [postcard](https://docs.rs/postcard).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedMembers(Vec<u8>);

impl SignedMembers {
    /// The list with the signature of its cluster's authority.
    ///
    /// # Errors
    /// [`MembersError`]: it is another cluster's, or over a limit.
    pub fn sign(members: &Members, authority: &Authority) -> Result<SignedMembers, MembersError> {
        let (found, mine) = (members.cluster, authority.cluster());
        if found != mine {
            return Err(MembersError::OtherCluster { found, mine });
        }
        members.check()?;
        let mut signed = SIGNED_AS.to_vec();
        signed = postcard::to_extend(members, signed).map_err(|_| MembersError::Form)?;
        let signature = authority.sign(&signed)?;
        SignedMembers::from_bytes([&signature[..], &signed[SIGNED_AS.len()..]].concat())
    }

    /// Anything, signed as if it were a list.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn sign_bytes(list: &[u8], authority: &Authority) -> Result<SignedMembers, MembersError> {
        let signature = authority.sign(&[SIGNED_AS, list].concat())?;
        SignedMembers::from_bytes([&signature[..], list].concat())
    }

    /// Bytes that anybody may have sent; [`SignedMembers::verify`] looks into them.
    ///
    /// # Errors
    /// [`MembersError::TooLong`].
    pub fn from_bytes(bytes: Vec<u8>) -> Result<SignedMembers, MembersError> {
        if bytes.len() > SIGNED_BYTES_MAX {
            return Err(MembersError::TooLong { found: bytes.len() });
        }
        Ok(SignedMembers(bytes))
    }

    /// The bytes to send or store.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The list, if this authority has signed it.
    ///
    /// # Errors
    /// [`MembersError`]: it has not, or the list is over a limit.
    pub fn verify(&self, authority: &CaCertificate) -> Result<Members, MembersError> {
        let (signature, list) = self.0.split_at_checked(SIGNATURE_BYTES).ok_or(MembersError::Form)?;
        if !authority.key().has_signed(&[SIGNED_AS, list].concat(), signature) {
            return Err(MembersError::Signature { cluster: authority.cluster() });
        }
        let (members, rest): (Members, _) = postcard::take_from_bytes(list).map_err(|_| MembersError::Form)?;
        if !rest.is_empty() {
            return Err(MembersError::Form);
        }
        let (found, mine) = (members.cluster, authority.cluster());
        if found != mine {
            return Err(MembersError::OtherCluster { found, mine });
        }
        members.check()?;
        Ok(members)
    }
}

/// Why a peer is refused although the authority has signed its certificate.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum Refusal {
    #[error("peer belongs to cluster {found}, this host to cluster {mine}")]
    OtherCluster { found: ClusterId, mine: ClusterId },
    #[error(
        "{name} is not a member (list {version}): it was removed, or this host's list is old; on the head, `pp-run cluster status` shows the members"
    )]
    NotMember { name: Name, version: u64 },
    #[error("{name} connects as {found}, the member list has it as {listed}")]
    OtherRole { name: Name, found: Role, listed: Role },
    #[error(
        "{name} has key {found}, the member list says {listed}: it was set up again; remove it and add it on the head"
    )]
    OtherKey { name: Name, found: Fingerprint, listed: Fingerprint },
}

/// What is wrong with a list, or with a change of it.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum MembersError {
    #[error("member list of {found} bytes, the limit is {SIGNED_BYTES_MAX}")]
    TooLong { found: usize },
    #[error("member list is not signed by the authority of cluster {cluster}")]
    Signature { cluster: ClusterId },
    #[error("member list is signed but not in the form of this release: both ends must run the same")]
    Form,
    #[error("member list is of cluster {found}, this host is in cluster {mine}")]
    OtherCluster { found: ClusterId, mine: ClusterId },
    #[error("member list {found} is older than the present one, {mine}: the head has an old copy of its folder")]
    Older { found: u64, mine: u64 },
    #[error("there are two different member lists {version}: the head's folder was copied, and both copies changed")]
    SameVersion { version: u64 },
    #[error("the cluster has {MEMBERS_MAX} members, which is the limit: remove some that are gone")]
    Full,
    #[error("there is a member {name} already: take another name, or remove it first")]
    NameTaken { name: Name },
    #[error("the key of {name} is that of the member {other}")]
    KeyTaken { name: Name, other: Name },
    #[error("there is no member {name}")]
    NoSuch { name: Name },
    #[error("{name} is the cluster's only head: without it no list could be pushed")]
    LastHead { name: Name },
    #[error(transparent)]
    Identity(#[from] IdentityError),
}
