//! What a cluster and its hosts are called, and how a certificate spells it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::key::PublicKey;
use super::text;

/// Bytes of a [`ClusterId`]: 80 bits are unique, and whole characters of base32.
pub const CLUSTER_ID_BYTES: usize = 10;
/// Longest name of a host, so that one name is one label of a domain name with room to spare.
pub const NAME_BYTES_MAX: usize = 40;
/// Longest address of a host: a domain name, a colon, a port.
pub const ADDRESS_BYTES_MAX: usize = 253 + 1 + 5;
/// The last label of every certificate's name. Not a domain of the internet: no public authority can sign for it.
const SUFFIX: &str = "pp-run";

/// Which cluster. It is cut from the hash of the public key of the cluster's authority: as random as that, and no other
/// authority can claim it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClusterId([u8; CLUSTER_ID_BYTES]);

impl ClusterId {
    /// The cluster whose authority has this key.
    pub fn of(authority: &PublicKey) -> ClusterId {
        let mut id = [0; CLUSTER_ID_BYTES];
        id.copy_from_slice(&authority.fingerprint().0[..CLUSTER_ID_BYTES]);
        ClusterId(id)
    }
}

impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::encode(&self.0).to_ascii_lowercase())
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterId({self})")
    }
}

impl FromStr for ClusterId {
    type Err = NameError;

    fn from_str(id: &str) -> Result<ClusterId, NameError> {
        let bytes = text::decode(id).and_then(|bytes| bytes.try_into().ok());
        bytes.map(ClusterId).ok_or_else(|| NameError::Cluster { found: shown(id) })
    }
}

/// What a certificate entitles its host to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Role {
    /// Sends control; never listens.
    Head,
    /// Serves one head, and links to the workers that the head names.
    Worker,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Head => "head",
            Role::Worker => "worker",
        })
    }
}

/// The name of a host within its cluster: 1 to [`NAME_BYTES_MAX`] of `a-z`, `0-9` and, inside, `-`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(name: String) -> Result<Name, NameError> {
        let is_inside = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let is_name = (1..=NAME_BYTES_MAX).contains(&name.len())
            && name.bytes().all(is_inside)
            && !name.starts_with('-')
            && !name.ends_with('-');
        if is_name { Ok(Name(name)) } else { Err(NameError::Host { found: shown(&name) }) }
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(name: &str) -> Result<Name, NameError> {
        name.to_owned().try_into()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who a certificate is for. As text it is the certificate's only DNS name: `rig2.worker.<cluster>.pp-run`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerName {
    /// The cluster.
    pub cluster: ClusterId,
    /// What the host may do.
    pub role: Role,
    /// The host.
    pub name: Name,
}

impl fmt::Display for PeerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}.{SUFFIX}", self.name, self.role, self.cluster)
    }
}

impl FromStr for PeerName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<PeerName, NameError> {
        let wrong = || NameError::Peer { found: shown(text) };
        let labels: Vec<&str> = text.splitn(5, '.').collect();
        let [name, role, cluster, SUFFIX] = labels[..] else { return Err(wrong()) };
        let role = match role {
            "head" => Role::Head,
            "worker" => Role::Worker,
            _ => return Err(wrong()),
        };
        let peer = PeerName { cluster: cluster.parse()?, role, name: name.parse()? };
        // One spelling of a name: base32 alone would also take capitals.
        if peer.to_string() == text { Ok(peer) } else { Err(wrong()) }
    }
}

/// Where a host listens: `host:port`, the host a domain name, an IPv4 address, or an IPv6 address in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address(String);

impl Address {
    /// The address as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Address {
    type Error = NameError;

    fn try_from(address: String) -> Result<Address, NameError> {
        let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:[]%".contains(&byte);
        let is_address = address.len() <= ADDRESS_BYTES_MAX
            && address.bytes().all(is_host)
            && address.rsplit_once(':').is_some_and(|(host, port)| {
                let is_bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
                let is_plain = !host.is_empty() && !host.contains([':', '[', ']', '%']);
                (is_bracketed || is_plain) && port.parse::<u16>().is_ok_and(|port| port != 0)
            });
        if is_address { Ok(Address(address)) } else { Err(NameError::Address { found: shown(&address) }) }
    }
}

impl FromStr for Address {
    type Err = NameError;

    fn from_str(address: &str) -> Result<Address, NameError> {
        address.to_owned().try_into()
    }
}

impl From<Address> for String {
    fn from(address: Address) -> String {
        address.0
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a text is not a name.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum NameError {
    #[error(
        "{found} is not a name of a host: take 1 to {NAME_BYTES_MAX} of a-z, 0-9 and -, not beginning or ending in -"
    )]
    Host { found: String },
    #[error("{found} is not the id of a cluster: 16 letters and digits, as `pp-run cluster status` shows it")]
    Cluster { found: String },
    #[error("{found} is not the address of a host: write host:port, an IPv6 address as [2001:db8::1]:7711")]
    Address { found: String },
    #[error("certificate is for {found}, which is not NAME.head.CLUSTER.{SUFFIX} nor NAME.worker.CLUSTER.{SUFFIX}")]
    Peer { found: String },
}

/// A text that anybody may have written, for a message: short, and without what a terminal would obey.
fn shown(text: &str) -> String {
    let mut start: String = text.chars().take(NAME_BYTES_MAX + 20).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    format!("{start:?}")
}
