//! What a stage can run on.

use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pp_shaders::{Act, Profile};

use super::uses;
use crate::backend::gpu::Gpu;
use crate::backend::gpu::adapter::Adapter;
use crate::backend::paced::{Pace, Paced};
use crate::backend::reference::Reference;
use crate::backend::{Backend, DeviceError, DeviceLimits, selftest};
use crate::cluster::remote::RemoteDevice;
use crate::law::Use;
use crate::weights::LoadError;

/// What a stage runs on.
#[derive(Clone)]
pub enum Device {
    /// A Vulkan adapter. `checked`: kernels carry bounds checks.
    Gpu {
        /// The adapter.
        adapter: Adapter,
        /// Sizes of workgroups and tiles.
        profile: Profile,
        /// Whether kernels carry bounds checks.
        checked: bool,
    },
    /// The kernels' twins on the CPU.
    Reference {
        /// Sizes that programs are laid out for.
        profile: Profile,
    },
    /// Nothing: a micro-batch takes what `pace` says, and its results are made up. For tests and measurements of
    /// everything around the devices.
    Paced {
        /// Time of a micro-batch.
        pace: Pace,
        /// Sizes that programs are laid out for.
        profile: Profile,
        /// While it is set nothing finishes.
        hold: Arc<AtomicBool>,
        /// With n everything takes 1 + n times as long.
        brake: Arc<AtomicU32>,
    },
    /// A device of a worker elsewhere, which opens it.
    Remote(RemoteDevice),
}

impl Device {
    /// A device that only takes time ([`Device::Paced`]): `alpha` for a micro-batch, and `beta` for each of its tokens.
    pub fn paced(alpha: Duration, beta: Duration, profile: Profile) -> Device {
        let pace = Pace { alpha, beta, ..Pace::default() };
        Device::Paced { pace, profile, hold: Arc::default(), brake: Arc::default() }
    }

    /// The name, for people.
    pub fn name(&self) -> String {
        match self {
            Device::Gpu { adapter, .. } => adapter.name().to_owned(),
            Device::Reference { .. } => "reference (twins on the CPU)".to_owned(),
            Device::Paced { .. } => "paced (computes nothing)".to_owned(),
            Device::Remote(device) => device.info().name.clone(),
        }
    }

    /// What `--device` calls it.
    pub fn id(&self) -> String {
        match self {
            Device::Gpu { adapter, .. } => adapter.id().to_owned(),
            Device::Reference { .. } => "reference".to_owned(),
            Device::Paced { .. } => "paced".to_owned(),
            Device::Remote(device) => device.info().id.clone(),
        }
    }

    /// Tokens of prompts that the kernels of such devices compute at once; those of the largest tile.
    pub fn tile(devices: &[Device], activations: Act) -> usize {
        devices.iter().map(|device| device.profile().token_tile(activations) as usize).max().unwrap_or(1)
    }

    /// Sizes of workgroups and tiles.
    pub fn profile(&self) -> &Profile {
        match self {
            Device::Gpu { profile, .. } | Device::Reference { profile } | Device::Paced { profile, .. } => profile,
            Device::Remote(device) => device.profile(),
        }
    }

    /// Limits of its buffers.
    pub fn limits(&self) -> DeviceLimits {
        match self {
            Device::Gpu { adapter, .. } => {
                let limits = adapter.raw().limits();
                DeviceLimits {
                    binding_bytes: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) as usize,
                    buffer_bytes: limits.max_buffer_size as usize,
                }
            }
            Device::Reference { .. } | Device::Paced { .. } => {
                DeviceLimits { binding_bytes: 1 << 30, buffer_bytes: 1 << 30 }
            }
            Device::Remote(device) => device.limits(),
        }
    }

    /// Bytes of device memory, where the driver tells.
    pub fn memory_bytes(&self) -> Option<u64> {
        match self {
            Device::Gpu { adapter, .. } => adapter.memory_bytes(),
            Device::Reference { .. } | Device::Paced { .. } => None,
            Device::Remote(device) => device.info().memory_bytes,
        }
    }

    /// Whether it computes on the processor.
    pub fn is_software(&self) -> bool {
        match self {
            Device::Gpu { adapter, .. } => adapter.is_software(),
            Device::Reference { .. } | Device::Paced { .. } => true,
            Device::Remote(device) => device.info().is_software,
        }
    }

    /// What a stage on it takes while it computes, of what others may want too.
    pub fn uses(&self) -> Vec<Use> {
        uses::of(self)
    }

    /// The worker that has it; none: this process.
    pub fn worker(&self) -> Option<String> {
        match self {
            Device::Remote(device) => Some(device.worker().name().to_owned()),
            _ => None,
        }
    }

    /// Whether it computes what the kernels say ([`selftest`]), looked at once in the life of the process for each
    /// adapter and profile.
    ///
    /// # Errors
    /// [`LoadError::Untrusted`] where it does not; [`LoadError::Device`] where it cannot be opened.
    pub fn trusted(&self) -> Result<(), LoadError> {
        static LOOKED_AT: Mutex<Vec<(String, Profile)>> = Mutex::new(Vec::new());
        let Device::Gpu { adapter, profile, checked } = self else { return Ok(()) };
        let key = (adapter.id().to_owned(), *profile);
        let mut looked_at = LOOKED_AT.lock().unwrap_or_else(PoisonError::into_inner);
        if !looked_at.contains(&key) {
            let mut device = Gpu::open(adapter, *profile, *checked)?;
            selftest::run(&mut device).map_err(|error| LoadError::Untrusted { message: error.to_string() })?;
            looked_at.push(key);
        }
        Ok(())
    }

    /// Opens it for one stage.
    ///
    /// # Errors
    /// When the driver does not give a device.
    ///
    /// # Panics
    /// When it is another host's.
    pub fn open(&self) -> Result<Box<dyn Backend>, DeviceError> {
        Ok(match self {
            Device::Gpu { adapter, profile, checked } => Box::new(Gpu::open(adapter, *profile, *checked)?),
            Device::Reference { profile } => Box::new(Reference::new(*profile, self.limits().binding_bytes)),
            Device::Paced { pace, profile, hold, brake } => {
                Box::new(Paced::new(*pace, *profile, self.limits(), hold.clone(), brake.clone()))
            }
            Device::Remote(device) => unreachable!("{device:?} is opened by its worker"),
        })
    }
}
