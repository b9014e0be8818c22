//! Moves opaque, bounded frames between neighbouring stages.
//!
//! A leaf: it knows neither tensors nor devices. The payload of a [`Frame`] is the engine's; what a neighbour
//! needs to route and bound it stands in the [`FrameHeader`]. [`Port`] is one end of a link; [`local`] links two
//! threads of a process, [`relay`] does so slowly; [`measure`] says what a link costs. [`link`] is what two hosts say to each other, without the network.

pub mod enrol;
pub mod frame;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod identity;
pub mod link;
pub mod local;
pub mod measure;
pub mod members;
pub mod port;
pub mod quic;
pub mod relay;
pub mod tls;

pub use frame::{Frame, FrameError, FrameHeader};
pub use link::{Ack, Decoder, Hello, Link, LinkError, LinkId, LinkLimits, LinkState, Message, SendError};
pub use port::{Arrival, Port, PortError};
