//! What a link costs: frames there and back, and one way without a pause, through any [`Port`].
//!
//! [`stream`] has ports over plain TCP and over TCP with TLS, for the same frames: what QUIC is compared with. One end
//! runs [`serve`], the other one asks.

pub mod stream;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use thiserror::Error;

use crate::frame::{Frame, FrameHeader};
use crate::port::{Port, PortError};

/// How long an answer may take: what is slower is no link to measure.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often the end that serves looks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);
/// Frames that go one way at least, so that more than one is under way.
const STREAM_MIN: usize = 2;
/// Round trips at least, whatever they take.
const TRIPS_MIN: usize = 3;

/// What the end that serves does with a frame.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Wanted {
    /// It goes back as it is.
    Echo = 1,
    /// Only that it has come counts.
    Sink = 2,
}

/// Why nothing was measured.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum MeasureError {
    #[error(transparent)]
    Port(#[from] PortError),
    #[error("frame {expected} was sent, frame {found} came back")]
    Other { expected: u64, found: u64 },
    #[error("a frame of {expected} bytes came back with {found}")]
    Length { expected: usize, found: usize },
}

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Round trips at most; at least three are made.
    pub trips: usize,
    /// After so long no further one is begun, and no further frame goes one way; at least two do.
    pub time: Duration,
}

/// Sends back or swallows what comes, as the other end wants it, until that goes or `stop` is set.
///
/// # Errors
/// [`PortError`] when the link fails; that the other end has closed it is no error.
pub fn serve(port: &mut dyn Port, stop: &AtomicBool) -> Result<(), PortError> {
    while !stop.load(Ordering::Relaxed) {
        let frame = match port.receive(LOOK) {
            Ok(arrival) => arrival.frame,
            Err(PortError::Timeout { .. }) => continue,
            Err(PortError::Closed) => return Ok(()),
            Err(error) => return Err(error),
        };
        if frame.header.micro_batch == Wanted::Echo as u32 {
            match port.send(frame) {
                Err(PortError::Closed) => return Ok(()),
                sent => sent?,
            }
        }
    }
    Ok(())
}

/// How long frames with this payload take there and back, each sent when the one before has come back; in the order in
/// which they were sent. The payload is made before and shared, so its making does not count.
///
/// # Errors
/// [`MeasureError`].
pub fn round_trips(port: &mut dyn Port, payload: &Bytes, effort: Effort) -> Result<Vec<Duration>, MeasureError> {
    let (mut trips, begun) = (Vec::new(), Instant::now());
    while trips.len() < TRIPS_MIN || (trips.len() < effort.trips && begun.elapsed() < effort.time) {
        trips.push(trip(port, payload, trips.len() as u64)?);
    }
    Ok(trips)
}

/// Bytes of payload a second, one way: frames follow each other without a pause, and the time ends when the other end
/// says that it has them all.
///
/// # Errors
/// [`MeasureError`].
pub fn one_way(port: &mut dyn Port, payload: &Bytes, effort: Effort) -> Result<f64, MeasureError> {
    let (mut frames, begun) = (0, Instant::now());
    while frames < STREAM_MIN || begun.elapsed() < effort.time {
        port.send(frame(Wanted::Sink, frames as u64, payload.clone()))?;
        frames += 1;
    }
    trip(port, &Bytes::new(), frames as u64)?;
    Ok((frames * payload.len()) as f64 / begun.elapsed().as_secs_f64())
}

fn trip(port: &mut dyn Port, payload: &Bytes, step: u64) -> Result<Duration, MeasureError> {
    let sent = Instant::now();
    port.send(frame(Wanted::Echo, step, payload.clone()))?;
    let back = port.receive(PATIENCE)?.frame;
    let took = sent.elapsed();
    let (expected, found) = (payload.len(), back.payload.len());
    match back.header.step {
        found if found != step => Err(MeasureError::Other { expected: step, found }),
        _ if expected != found => Err(MeasureError::Length { expected, found }),
        _ => Ok(took),
    }
}

fn frame(wanted: Wanted, step: u64, payload: Bytes) -> Frame {
    Frame { header: FrameHeader { epoch: 0, step, micro_batch: wanted as u32 }, payload }
}
