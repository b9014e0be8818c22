//! What a device takes for the parts of a model, measured in a few seconds, without the model.
//!
//! Only shapes and formats matter for time: [`Shape`] is a model without its weights. A small checkpoint of that shape is
//! made up, and real stages of it run on the real device: two numbers of layers tell a layer from what every stage
//! takes beside, a first and a last stage tell the embedding and the LM head. Results are kept ([`Calibrations`]).

mod cache;
pub mod estimate;
mod meter;
mod shape;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pp_transport::{Frame, FrameHeader, Port};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::backend::DeviceError;
use crate::checkpoint::CheckpointError;
use crate::law::Curve;
use crate::layout::LayoutError;
use crate::pipeline::Device;
use crate::stage::StepError;
use crate::weights::LoadError;
use cache::{Cache, Key};
pub use shape::{Shape, ShapeError};

/// How long the other end of a hop in this process may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the parts of a model take on a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// What every stage takes beside its layers.
    pub fixed: Curve,
    /// A layer of each kind of [`Shape::kinds`].
    pub kinds: Vec<Curve>,
    /// What the first stage takes beside: the embedding.
    pub first: Curve,
    /// What the last stage takes beside: final norm, LM head, top-k.
    pub last: Curve,
    /// Share of what computes in its machine that the device takes; less than 1 where a software driver has fewer threads
    /// than there are cores.
    pub share: f64,
}

impl Calibration {
    /// What each layer of a model takes, given the kind of each.
    ///
    /// # Panics
    /// When there is no such kind.
    pub fn layers(&self, kinds: &[usize]) -> Vec<Curve> {
        kinds.iter().map(|kind| self.kinds[*kind]).collect()
    }

    /// Whether it may be of a shape: another host may have made it.
    pub fn is_of(&self, shape: &Shape) -> bool {
        let curves = [&self.fixed, &self.first, &self.last].into_iter().chain(&self.kinds);
        let is_sane = |number: &f64| number.is_finite() && (0.0..1e6).contains(number);
        let numbers =
            curves.flat_map(|curve| curve.seconds.iter().chain([&curve.decode_position, &curve.prefill_position]));
        self.kinds.len() == shape.kinds.len() && numbers.into_iter().all(is_sane) && (0.0..=1.0).contains(&self.share)
    }
}

/// Why a device was not measured.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum CalibrateError {
    #[error("the {device} is not measured: {reason}")]
    NotThis { device: String, reason: &'static str },
    #[error("cancelled")]
    Cancelled,
    #[error(transparent)]
    Shape(#[from] ShapeError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Step(#[from] StepError),
}

/// Measurements of this host's devices, and what workers said of theirs; kept in a file.
#[derive(Debug)]
pub struct Calibrations(Cache);

impl Calibrations {
    /// Kept in `file`, where it is one; else as long as this is there.
    pub fn new(file: Option<PathBuf>) -> Calibrations {
        Calibrations(Cache::new(file))
    }

    /// What is known of a device of this host.
    pub fn known(&self, device: &Device, shape: &Shape) -> Option<Calibration> {
        self.0.get(&Key::of(device, shape)).filter(|found| found.is_of(shape)).map(here(device))
    }

    /// What is known of a device of this host, else measured: the device has nothing else to do meanwhile. `progress`
    /// hears what part of it is done.
    ///
    /// # Errors
    /// [`CalibrateError`]
    pub fn measure(
        &mut self,
        device: &Device,
        shape: &Shape,
        progress: &mut dyn FnMut(usize, usize),
        cancel: &AtomicBool,
    ) -> Result<Calibration, CalibrateError> {
        if let Some(known) = self.known(device, shape) {
            return Ok(known);
        }
        let measured = here(device)(meter::measure(device, shape, progress, cancel)?);
        self.0.put(Key::of(device, shape), measured.clone());
        Ok(measured)
    }

    /// What a worker said of its device before.
    pub fn said(&self, worker: &str, device: &Device, shape: &Shape) -> Option<Calibration> {
        self.0.get(&Key::of_worker(worker, device, shape)).filter(|found| found.is_of(shape))
    }

    /// Keeps what a worker says of its device.
    pub fn keep(&mut self, worker: &str, device: &Device, shape: &Shape, said: Calibration) {
        self.0.put(Key::of_worker(worker, device, shape), said);
    }
}

/// Says how much of the machine a device takes.
fn here(device: &Device) -> impl Fn(Calibration) -> Calibration {
    let share = if device.is_software() && !matches!(device, Device::Paced { .. }) {
        (driver_threads() as f64 / cores() as f64).min(1.0)
    } else {
        1.0
    };
    move |calibration| Calibration { share, ..calibration }
}

/// What tells this machine from others as long as it runs; empty where the system does not say.
pub fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// What it takes to hand a frame to another thread of this process, measured once.
pub fn in_process_hop() -> Duration {
    static MEASURED: OnceLock<Duration> = OnceLock::new();
    *MEASURED.get_or_init(|| round_trip().map_or(Duration::ZERO, |round_trip| round_trip / 2))
}

/// The median of some round trips between two threads.
fn round_trip() -> Option<Duration> {
    const TRIPS: usize = 41;
    let (mut here, mut there) = pp_transport::local::pair(1);
    let back = move || {
        for _ in 0..TRIPS {
            let Ok(arrival) = there.receive(PATIENCE) else { return };
            if there.send(arrival.frame).is_err() {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("hop".to_owned()).spawn(back).ok()?;
    let mut trips = Vec::new();
    for _ in 0..TRIPS {
        let started = Instant::now();
        let frame = Frame { header: FrameHeader::default(), payload: vec![0; 4096].into() };
        here.send(frame).ok()?;
        here.receive(PATIENCE).ok()?;
        trips.push(started.elapsed());
    }
    drop(here);
    let _ = thread.join();
    trips.sort_unstable();
    trips.get(TRIPS / 2).copied()
}

/// Cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Threads that Mesa's software driver computes with: as many as it is told, one where it is told to do without.
pub(crate) fn driver_threads() -> usize {
    let told = std::env::var("LP_NUM_THREADS").ok().and_then(|text| text.trim().parse::<usize>().ok());
    told.unwrap_or_else(cores).clamp(1, 1024)
}

#[cfg(test)]
mod tests;
