//! Measuring the way to a worker: a link of its own, whose frames the worker sends back or swallows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use pp_transport::quic::{CONTROL, LinkPort, tuning};
use pp_transport::{LinkId, LinkLimits, measure};

use super::worker::Server;

/// Bytes of the largest frame that is measured with.
pub const PAYLOAD_BYTES_MAX: usize = 32 << 20;
/// Its number in the session that the head names.
const LINK: u32 = CONTROL - 1;
/// Frames that each end holds: one is on its way while another is handled.
const CREDITS: u64 = 2;

pub(super) fn id(session: u64) -> LinkId {
    LinkId { session, link: LINK }
}

pub(super) fn limits(payload_bytes: usize) -> LinkLimits {
    LinkLimits { credits: CREDITS, payload_bytes, silence: tuning::SILENCE }
}

/// The worker's end, which serves until this is dropped.
pub(super) struct Serving {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Serving {
    /// Serves the head at the other end of `control`.
    pub(super) fn start(
        server: &Server,
        control: &LinkPort,
        session: u64,
        payload_bytes: u64,
    ) -> Result<Serving, String> {
        if payload_bytes > PAYLOAD_BYTES_MAX as u64 {
            return Err(format!("frames of {payload_bytes} bytes; at most {PAYLOAD_BYTES_MAX} are measured with"));
        }
        if let Some(holder) = server.holder() {
            return Err(format!("it is held by {}, whose work a measurement would disturb", holder.head));
        }
        let mut port = server.node().expect(id(session), control.peer().clone(), limits(payload_bytes as usize));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let serve = move || {
            if let Err(error) = measure::serve(&mut port, &stopped) {
                tracing::info!(%error, "a measurement ended");
            }
        };
        let thread = std::thread::Builder::new().name("measure".to_owned()).spawn(serve);
        Ok(Serving { stop, thread: Some(thread.map_err(|error| error.to_string())?) })
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
