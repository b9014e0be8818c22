//! The thread of a stage: takes frames from upstream, does them, hands the result downstream.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pp_transport::{Frame, Port, PortError};
use thiserror::Error;

use crate::message::{self, MessageError};
use crate::stage::{Stage, StageOutput, StepError};

/// How often an idle worker looks whether it should stop.
const IDLE: Duration = Duration::from_millis(100);

/// What a stage has done so far; read by others while it works.
#[derive(Debug, Default)]
pub struct Counters {
    /// Nanoseconds spent in steps.
    pub busy_ns: AtomicU64,
    /// Micro-batches done.
    pub steps: AtomicU64,
    /// Tokens done.
    pub tokens: AtomicU64,
    /// Bytes of payload handed on.
    pub sent_bytes: AtomicU64,
}

/// Why a worker stopped.
#[derive(Clone, Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum WorkerError {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("refused a message: {0}")]
    Message(#[from] MessageError),
    #[error("its neighbour is gone")]
    Neighbour,
    #[error("it panicked: {0}")]
    Panic(String),
}

/// Runs `stage` between two ports until upstream closes or `stop` is set.
///
/// Frames of an epoch before `epoch`, which the head may raise at any time, are dropped without work; so is the
/// result of a step that became old while it ran. With the first frame of a newer epoch all sequences are forgotten.
///
/// # Errors
/// [`WorkerError`]; the stage is not used again.
pub fn run(
    stage: &mut Stage,
    upstream: &mut dyn Port,
    downstream: &mut dyn Port,
    epoch: &AtomicU64,
    counters: &Arc<Counters>,
    stop: &AtomicBool,
) -> Result<(), WorkerError> {
    let limits = stage.message_limits();
    let first = stage.layout().spec.is_first();
    let mut current = epoch.load(Ordering::Relaxed);
    while !stop.load(Ordering::Relaxed) {
        let frame = match upstream.receive(IDLE) {
            Ok(frame) => frame,
            Err(PortError::Timeout { .. }) => continue,
            Err(_) => return Ok(()),
        };
        let of = frame.header.epoch;
        if of < current.max(epoch.load(Ordering::Relaxed)) {
            tracing::debug!(stage = stage.layout().spec.index, epoch = of, "dropped a frame of an older epoch");
            continue;
        }
        if of > current {
            stage.forget_sequences();
            current = of;
        }
        let started = Instant::now();
        let (step, hidden) = message::decode_step(&frame.payload, &limits, first)?;
        // A driver's panic (wgpu panics on some device errors) is this stage's failure, not the program's.
        let output = std::panic::catch_unwind(AssertUnwindSafe(|| stage.step(&step, &hidden)))
            .map_err(|panic| WorkerError::Panic(panic_message(panic.as_ref())))??;
        let tokens = step.tokens() as u64;
        let payload = match output {
            StageOutput::Hidden(hidden) => message::encode(&message::Step { ids: Vec::new(), ..step }, &hidden),
            StageOutput::Outputs(outputs) => message::encode(&outputs, &[]),
        };
        counters.busy_ns.fetch_add(started.elapsed().as_nanos() as u64, Ordering::Relaxed);
        counters.steps.fetch_add(1, Ordering::Relaxed);
        counters.tokens.fetch_add(tokens, Ordering::Relaxed);
        counters.sent_bytes.fetch_add(payload.len() as u64, Ordering::Relaxed);
        if of < epoch.load(Ordering::Relaxed) {
            continue;
        }
        if downstream.send(Frame { header: frame.header, payload }).is_err() {
            return Err(WorkerError::Neighbour);
        }
    }
    Ok(())
}

/// What a caught panic said.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
