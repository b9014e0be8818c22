//! What heads and workers say to each other on a control link: a version, then a message (postcard). Every message is
//! bounded by the link before it is read, and cannot make a reader allocate more than it came in.

use pp_transport::{Frame, FrameHeader};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::health;
use super::whole::Inventory;
use crate::backend::DeviceLimits;
use crate::calibrate::{Calibration, Shape};
use crate::contract::{Build, Contract};
use crate::law::Use;
use crate::layout::StageSpec;
use crate::manifest::MANIFEST_BYTES_MAX;
use crate::pipeline::StageReport;
use crate::trace::{Nanos, StageSpan};
use crate::weights::{LoadError, LoadProgress};
use crate::worker::WorkerError;

/// Version of the messages. Ends of different versions refuse each other in words.
pub const CONTROL_VERSION: u32 = 4;
/// Largest message: a signed member list, a block for measuring the bandwidth, or a manifest and who asks for tensors.
pub const MESSAGE_BYTES_MAX: usize = (1 << 20) + (64 << 10);
const _: () = assert!(MESSAGE_BYTES_MAX >= MANIFEST_BYTES_MAX + (64 << 10));
/// Largest block for measuring the bandwidth.
pub const ECHO_BYTES_MAX: usize = 1 << 20;
/// Spans in one message.
pub const SPANS_MAX: usize = 1024;

/// What a head wants of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// To see how it is.
    Look,
    /// To run stages there; only one head at a time may.
    Lease,
}

/// A head introduces itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting {
    /// Its program.
    pub build: Build,
    /// Who it is, for people: what a worker says of it to others.
    pub head: String,
    /// What it wants.
    pub purpose: Purpose,
}

/// A device of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// What `--device` calls it there.
    pub id: String,
    /// For people.
    pub name: String,
    /// The profile that its kernels are made for.
    pub profile: String,
    /// Limits of its buffers.
    pub limits: DeviceLimits,
    /// Bytes of its memory, where the driver tells.
    pub memory_bytes: Option<u64>,
    /// Whether it computes on the processor.
    pub is_software: bool,
    /// What a stage on it takes while it computes, of what others may want too.
    pub uses: Vec<Use>,
}

/// Who has a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// As it introduced itself.
    pub head: String,
    /// Since when, in Unix seconds of the worker's clock.
    pub since: u64,
    /// What it runs there: (stage, layers, device).
    pub stages: Vec<(usize, (usize, usize), String)>,
}

/// A worker introduces itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    /// Its program.
    pub build: Build,
    /// Its devices; the first is the one that it gives when none is named.
    pub devices: Vec<DeviceInfo>,
    /// Who has it.
    pub holder: Option<Holder>,
    /// It finishes what it has and takes nothing new.
    pub draining: bool,
    /// Bytes of memory of the host, and how many are free.
    pub memory: Option<(u64, u64)>,
    /// Seconds since it was started.
    pub up_seconds: u64,
    /// Version of its member list.
    pub members_version: u64,
    /// When its certificate ends, in Unix seconds.
    pub certificate_until: u64,
    /// What tells its machine from others as long as that runs; empty where the system does not say.
    pub machine: String,
}

/// The other end of a hop, as a worker's stage sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Neighbour {
    /// The head's process: it opens the link.
    Head,
    /// Another worker, by its member's name. The stage before opens the link.
    Worker(String),
    /// A stage of the same worker.
    Same,
}

/// A stage that a worker is to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    /// Which layers.
    pub spec: StageSpec,
    /// The id of its device.
    pub device: String,
    /// Who is before it.
    pub upstream: Neighbour,
    /// Who is behind it.
    pub downstream: Neighbour,
}

/// What a worker is to do for a pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Names the links of the pipeline; drawn by the head.
    pub session: u64,
    /// The epoch that it begins with.
    pub epoch: u64,
    /// The last epoch of the pipeline in whose place it is: stages that worked in it have its keys and values.
    pub after: Option<u64>,
    /// Bytes of what each stage has handed on that it keeps, at most.
    pub boundary_log: u64,
    /// What head and worker must agree on.
    pub contract: Contract,
    /// Bytes of the model's files, to find it by.
    pub model_bytes: u64,
    /// The model, for people.
    pub model_name: String,
    /// The worker's place among those of the pipeline, from 1: part of the numbers of links for weights.
    pub place: u32,
    /// Its stages.
    pub tasks: Vec<Task>,
    /// Frames that each hop holds.
    pub credits: u64,
    /// Bytes of the largest frame.
    pub payload_bytes: u64,
}

/// A worker of the pipeline, to others of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fellow {
    /// Its place.
    pub place: u32,
    /// Its member's name.
    pub name: String,
}

/// Where a worker may get tensors, beside the head.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Who.
    pub fellow: Fellow,
    /// Which tensors of the manifest it has: a bit each.
    pub holds: Vec<u8>,
}

/// A head speaks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToWorker {
    /// First of all.
    Greeting(Greeting),
    /// Load these stages; whatever ran before is dropped.
    Prepare(Box<Plan>),
    /// The model as a manifest, because some workers have no copy: those may come for tensors.
    Manifest {
        /// Encoded ([`crate::manifest::Manifest`]).
        manifest: Vec<u8>,
        /// Who may come.
        takers: Vec<Fellow>,
    },
    /// To a worker without a copy: fetch what the stages need from the head and from these, and load them.
    Fetch(Vec<Source>),
    /// All stages are there: open the links.
    Start,
    /// Frames of older epochs are dropped.
    Epoch(u64),
    /// The pipeline is not wanted any more.
    Release,
    /// The pipeline ends, and another one will be in its place: stages that are sound stay loaded, and keep their pages
    /// until the next plan or a release. Answered when they have stopped.
    Pause,
    /// What does the worker's clock say? The head's own time comes back with the answer.
    Ping(Nanos),
    /// To be sent back.
    Echo(Vec<u8>),
    /// A signed member list.
    Members(Vec<u8>),
    /// A new certificate (DER) for the worker's key.
    Certificate(Vec<u8>),
    /// Finish what runs and take nothing new; or be of use again.
    Drain(bool),
    /// Is all well, and are these models there?
    Examine(Vec<health::Model>),
    /// Serve a measurement on a link of this session, with frames of so many bytes.
    Measure(u64, u64),
    /// What does a model of that shape take on that device? Measured now, if it was not before.
    Calibrate(String, Box<Shape>),
    /// What is the model made of that is called so there? Its files may be asked for then, on a link of this session.
    Whole(u64, String),
    /// Whoever has the worker is to divide the layers so.
    Rebalance(Vec<u32>),
    /// What has come of the wish of that number?
    Rebalanced(u64),
    /// What has come of a wish, from whoever has the worker.
    Outcome(u64, Result<String, String>),
}

/// Stages of a wish ([`ToWorker::Rebalance`]).
pub const WISH_STAGES_MAX: usize = 1024;

/// What a stage has done, in short.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    /// Which.
    pub stage: usize,
    /// Micro-batches begun.
    pub begun: u64,
    /// Whether the latest is on its way to the device.
    pub preparing: bool,
    /// Micro-batches done.
    pub steps: u64,
    /// Tokens done.
    pub tokens: u64,
    /// Nanoseconds that its device was busy.
    pub busy_ns: u64,
    /// Bytes handed on, headers included.
    pub sent_bytes: u64,
    /// Sequences that it knows.
    pub sequences: u64,
}

/// A worker speaks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToHead {
    /// The answer to a greeting.
    Welcome(Box<Welcome>),
    /// The answer to a greeting that wants a lease that another has.
    Busy(Holder),
    /// The answer to a greeting that wants a lease of a worker that drains; also to a head that has one, once it begins to.
    Draining,
    /// To a head that has the worker: it is not drained any more.
    Serving,
    /// What this worker makes of the same model and plan, where it is not what the head wants; nothing is loaded.
    Mismatch(Box<Contract>),
    /// Whether the model of the plan is here as a whole.
    HasModel(bool),
    /// The answer to a manifest: which of its tensors are here, a bit each.
    Holds(Vec<u8>),
    /// A stage has loaded so much.
    Progress(usize, LoadProgress),
    /// A stage is loaded.
    Ready(usize, Box<StageReport>),
    /// A stage's hops are proved.
    Linked(usize),
    /// A stage could not be loaded.
    LoadFailed(usize, LoadError),
    /// A stage stopped.
    Failed(usize, WorkerError),
    /// What a stage did when, on the worker's clock.
    Spans(usize, Vec<StageSpan>),
    /// How the stages do.
    Beats(Vec<Beat>),
    /// The answer to a ping: the head's time, and the worker's.
    Pong(Nanos, Nanos),
    /// The answer to an echo.
    Echo(Vec<u8>),
    /// A list, a certificate or a wish was taken, or why not.
    Done(Result<(), String>),
    /// How its host is.
    Health(Box<health::Health>),
    /// What a device takes, or why that is not known.
    Calibrated(Result<Box<Calibration>, String>),
    /// A model's files; nothing where there is no model of that name.
    Whole(Result<Option<Box<Inventory>>, String>),
    /// The answer to a wish, its number; and the wish, to whoever has the worker.
    Rebalance(u64, Vec<u32>),
    /// What has come of a wish; nothing as long as that is not known.
    Rebalanced(Option<Result<String, String>>),
}

/// Why a message is refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ControlError {
    #[error(
        "it speaks version {found} of the control protocol, this program version {CONTROL_VERSION}: run the same release on both"
    )]
    Version { found: u32 },
    #[error("its message is malformed: {message}")]
    Malformed { message: String },
}

/// A message as a frame.
pub fn encode<T: Serialize>(message: &T) -> Frame {
    let payload = CONTROL_VERSION.to_le_bytes().to_vec();
    let payload = postcard::to_extend(message, payload).expect("plain data always has an encoding");
    Frame { header: FrameHeader::default(), payload: payload.into() }
}

/// The message in a frame.
///
/// # Errors
/// [`ControlError`].
pub fn decode<T: DeserializeOwned>(frame: &Frame) -> Result<T, ControlError> {
    let malformed = |message: String| ControlError::Malformed { message };
    let (version, rest) =
        frame.payload.split_first_chunk::<4>().ok_or_else(|| malformed("it is cut short".to_owned()))?;
    let found = u32::from_le_bytes(*version);
    if found != CONTROL_VERSION {
        return Err(ControlError::Version { found });
    }
    let (message, left) = postcard::take_from_bytes(rest).map_err(|error| malformed(error.to_string()))?;
    if !left.is_empty() {
        return Err(malformed(format!("{} bytes too many", left.len())));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_come_back_and_other_versions_are_told() {
        for message in [ToWorker::Start, ToWorker::Epoch(7), ToWorker::Ping(9), ToWorker::Echo(vec![1, 2, 3])] {
            assert_eq!(decode::<ToWorker>(&encode(&message)), Ok(message));
        }
        let mut bytes = encode(&ToWorker::Start).payload.to_vec();
        bytes.push(0);
        let frame = |bytes: Vec<u8>| Frame { header: FrameHeader::default(), payload: bytes.into() };
        let found = decode::<ToWorker>(&frame(bytes.clone()));
        assert_eq!(found, Err(ControlError::Malformed { message: "1 bytes too many".to_owned() }));
        bytes[0] = 9;
        assert_eq!(decode::<ToWorker>(&frame(bytes)), Err(ControlError::Version { found: 9 }));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut payload = CONTROL_VERSION.to_le_bytes().to_vec();
            payload.extend(bytes);
            let frame = Frame { header: FrameHeader::default(), payload: payload.into() };
            let _ = (decode::<ToWorker>(&frame), decode::<ToHead>(&frame));
        }
    }
}
