//! One end of a link between neighbours.

use std::time::{Duration, Instant};

use thiserror::Error;

use crate::frame::{Frame, FrameError};

/// A frame, and since when it could have been taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// What came.
    pub frame: Frame,
    /// When it lay ready at the receiver's end, taken or not.
    pub at: Instant,
}

/// An end of a link. Frames arrive whole, in the order they were sent, once each. A port holds a bounded number of
/// frames: a sender waits while its neighbour is behind.
pub trait Port: Send {
    /// Sends a frame, waiting while the link is full.
    ///
    /// # Errors
    /// [`PortError::Closed`] or [`PortError::Lost`] when the other end is gone, [`PortError::Frame`] when the payload is over the limit.
    fn send(&mut self, frame: Frame) -> Result<(), PortError>;

    /// Whether [`Port::send`] would not wait: the link takes a frame, or says why it takes none any more.
    fn has_room(&self) -> bool;

    /// The next frame, waiting at most `timeout`; zero does not wait.
    ///
    /// # Errors
    /// [`PortError::Timeout`] when none came, [`PortError::Closed`] when the other end is gone and all it sent has
    /// been received, [`PortError::Lost`] when it is on another host that was silent for too long.
    fn receive(&mut self, timeout: Duration) -> Result<Arrival, PortError>;
}

/// Why a port did not send or receive.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum PortError {
    #[error("the neighbour has closed the link")]
    Closed,
    #[error("no frame within {} ms", timeout.as_millis())]
    Timeout { timeout: Duration },
    #[error("the neighbour is lost: it was silent for {} ms", silent.as_millis())]
    Lost { silent: Duration },
    #[error(transparent)]
    Frame(#[from] FrameError),
}
