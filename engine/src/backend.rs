//! What runs programs: [`gpu`] on wgpu, [`reference`] on the kernels' twins, [`paced`] on nothing but time; and what is
//! asked of a device before it is trusted ([`selftest`]) and before it is judged ([`roofline`]).

mod clock;
pub mod gpu;
mod in_flight;
pub mod paced;
pub mod reference;
pub mod roofline;
pub mod selftest;

use std::time::Instant;

use pp_shaders::Profile;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::program::{BufferId, Program, Shape};
use crate::trace::Timestamps;

/// A program that a backend has prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramId(pub usize);

/// One submission: programs in order, between what is written before and read after them.
pub struct Run<'a> {
    /// Programs with their shapes.
    pub programs: &'a [(ProgramId, Shape)],
    /// Bytes to write at the start of buffers first.
    pub writes: &'a [(BufferId, &'a [u8])],
    /// Bytes to read from the start of buffers last.
    pub reads: &'a [(BufferId, usize)],
    /// The programs that will probably run next with the same reads: a backend may record them while this run is
    /// on the device.
    pub next: &'a [(ProgramId, Shape)],
}

/// Runs that may be submitted and not yet collected.
pub const RUNS_MAX: usize = 2;

/// A run that was submitted. It is collected once.
#[must_use]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Done {
    /// The bytes of [`Run::reads`].
    pub reads: Vec<Vec<u8>>,
    /// When the device began, never before the run was submitted and the one before it had finished. By the host's
    /// clock ([`Backend::timestamps`]): when it could begin.
    pub started: Instant,
    /// When the device was done, never after the run was collected. By the host's clock: when its results were there, as
    /// the host saw it; a caller that collects late sees it late.
    pub finished: Instant,
}

/// What a backend has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Buffers made, those for uploads and read-back among them.
    pub buffers: u64,
    /// Sets of timestamps made.
    pub query_sets: u64,
    /// Submissions to the device for runs.
    pub submissions: u64,
}

/// How long a dispatch took on the device.
#[derive(Clone, Debug)]
pub struct OpTime {
    /// Index of the program in [`Run::programs`], and of the dispatch in it.
    pub op: (usize, usize),
    /// Seconds.
    pub seconds: f64,
}

/// Sizes that a backend holds to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceLimits {
    /// Largest range that a kernel can see through one binding, bytes.
    pub binding_bytes: usize,
    /// Largest buffer, bytes.
    pub buffer_bytes: usize,
}

/// Runs programs on buffers. Owned by one stage, used by one thread.
pub trait Backend: Send {
    /// The device's name, for people.
    fn name(&self) -> &str;
    /// The sizes of workgroups and tiles to ask for.
    fn profile(&self) -> &Profile;
    /// Limits of buffers.
    fn limits(&self) -> DeviceLimits;
    /// Makes a buffer of `bytes` bytes (rounded up to 4), all zero.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the device has no room for it.
    fn create(&mut self, label: &str, bytes: usize) -> Result<BufferId, DeviceError>;
    /// Writes `data`, a multiple of 4 bytes, at `offset`. Used for weights, in chunks, while nothing runs.
    ///
    /// # Errors
    /// When the device is lost.
    fn write(&mut self, buffer: BufferId, offset: usize, data: &[u8]) -> Result<(), DeviceError>;
    /// Forgets every program, and frees these buffers. Ids of what is gone are not given again to buffers.
    ///
    /// # Errors
    /// When the device is lost.
    ///
    /// # Panics
    /// When a run has not been collected.
    fn clear(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError>;
    /// Makes pipelines and bindings of a program.
    ///
    /// # Errors
    /// [`DeviceError::Pipeline`] when the driver refuses a kernel.
    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError>;
    /// Hands a run to the device and does not wait for it. At most [`RUNS_MAX`] runs may be submitted and not
    /// collected; the device does them in order, so that a run's writes come after all that the run before it
    /// computes and reads.
    ///
    /// # Errors
    /// When the device is lost, or has no room for staging.
    ///
    /// # Panics
    /// When [`RUNS_MAX`] runs wait to be collected.
    fn submit(&mut self, run: &Run<'_>) -> Result<Ticket, DeviceError>;
    /// Runs that are worth having on the device at once, from 1 to [`RUNS_MAX`].
    fn runs_at_once(&self) -> usize {
        RUNS_MAX
    }
    /// Which clock says when runs started and finished. Runs whose ticks say nothing are timed by the host all the same.
    fn timestamps(&self) -> Timestamps {
        Timestamps::Host
    }
    /// Waits for a run and takes what it read.
    ///
    /// # Errors
    /// When the device is lost or does not answer.
    ///
    /// # Panics
    /// When an older run has not been collected.
    fn collect(&mut self, ticket: Ticket) -> Result<Done, DeviceError>;
    /// [`Backend::submit`] and [`Backend::collect`] while nothing else runs; returns the bytes of `reads`.
    ///
    /// # Errors
    /// As those.
    fn run(&mut self, run: &Run<'_>) -> Result<Vec<Vec<u8>>, DeviceError> {
        let ticket = self.submit(run)?;
        Ok(self.collect(ticket)?.reads)
    }
    /// As [`Backend::run`] without writes and reads, with the time of each dispatch; empty where the device has no
    /// clock.
    ///
    /// # Errors
    /// As [`Backend::run`].
    fn time(&mut self, programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError>;
    /// A prepared program.
    fn program(&self, id: ProgramId) -> &Program;
    /// Bytes of all buffers made by [`Backend::create`] and not freed.
    fn allocated_bytes(&self) -> u64;
    /// Counts of what was done, for tests and reports.
    fn counts(&self) -> Counts;
}

/// What can go wrong on a device.
#[derive(Clone, Debug, Error, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum DeviceError {
    #[error("device memory is full: `{buffer}` needs {bytes} more bytes beside the {allocated} already in use")]
    OutOfMemory { buffer: String, bytes: usize, allocated: u64 },
    #[error("buffer `{buffer}` of {bytes} bytes is over the device's limit of {limit}")]
    TooLarge { buffer: String, bytes: usize, limit: usize },
    #[error("the driver refuses kernel `{kernel}`: {message}")]
    Pipeline { kernel: String, message: String },
    #[error("the device was lost ({message})")]
    Lost { message: String },
    #[error("the device did not finish a step within {seconds} s")]
    Timeout { seconds: u64 },
    #[error("the device reported: {message}")]
    Validation { message: String },
}
