//! Links between hosts, over QUIC.
//!
//! A [`Node`] is one host's endpoint. A thread that waits at a link moves its bytes itself; an I/O thread does it when
//! none waits, so that signs of life go out whatever the stages do (`drive`). One connection leads to each neighbour;
//! [`Peer`] is the end that dialled it and dials again when it is lost. Links ([`crate::link::Link`]) lie on it: the
//! control link on a bidirectional stream, links for data on one unidirectional stream each way. [`LinkPort`] is an end
//! of a link, for threads.
//!
//! Nothing of a peer is read before TLS has proved that it is a member of the cluster, and the member list still names
//! it. What a peer then does wrong costs it its connection.

mod congestion;
mod drive;
pub mod joining;
mod line;
mod node;
mod peer;
mod port;
#[cfg(test)]
mod tests;
pub mod tuning;

pub use node::{CONTROL, Joined, Node, NodeError, WhoAmI};
pub use peer::{DialError, Peer};
pub use port::LinkPort;
