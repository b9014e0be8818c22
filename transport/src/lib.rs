//! Moves opaque, bounded frames between neighbouring stages.
//!
//! A leaf: it knows neither tensors nor devices. The payload of a [`Frame`] is the engine's; what a neighbour
//! needs to route and bound it stands in the [`FrameHeader`]. [`Port`] is one end of a link; [`local`] links two
//! threads of a process, [`relay`] does so slowly.

pub mod enrol;
pub mod frame;
pub mod identity;
pub mod local;
pub mod members;
pub mod port;
pub mod relay;
pub mod tls;

pub use frame::{Frame, FrameError, FrameHeader};
pub use port::{Arrival, Port, PortError};
