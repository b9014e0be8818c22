//! What a stage can run on.

use std::time::Duration;

use pp_shaders::Profile;

use crate::backend::gpu::Gpu;
use crate::backend::gpu::adapter::Adapter;
use crate::backend::paced::Paced;
use crate::backend::reference::Reference;
use crate::backend::{Backend, DeviceError, DeviceLimits};

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
    /// Nothing: a micro-batch takes `alpha` and `beta` for each token, and its results are made up. For tests and
    /// measurements of everything around the devices.
    Paced {
        /// Time of a micro-batch.
        alpha: Duration,
        /// Time of each of its tokens.
        beta: Duration,
        /// Sizes that programs are laid out for.
        profile: Profile,
    },
}

impl Device {
    /// The name, for people.
    pub fn name(&self) -> String {
        match self {
            Device::Gpu { adapter, .. } => adapter.name().to_owned(),
            Device::Reference { .. } => "reference (twins on the CPU)".to_owned(),
            Device::Paced { .. } => "paced (computes nothing)".to_owned(),
        }
    }

    /// What `--device` calls it.
    pub fn id(&self) -> String {
        match self {
            Device::Gpu { adapter, .. } => adapter.id().to_owned(),
            Device::Reference { .. } => "reference".to_owned(),
            Device::Paced { .. } => "paced".to_owned(),
        }
    }

    /// Sizes of workgroups and tiles.
    pub fn profile(&self) -> &Profile {
        match self {
            Device::Gpu { profile, .. } | Device::Reference { profile } | Device::Paced { profile, .. } => profile,
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
        }
    }

    /// Bytes of device memory, where the driver tells.
    pub fn memory_bytes(&self) -> Option<u64> {
        match self {
            Device::Gpu { adapter, .. } => adapter.memory_bytes(),
            Device::Reference { .. } | Device::Paced { .. } => None,
        }
    }

    /// Opens it for one stage.
    ///
    /// # Errors
    /// When the driver does not give a device.
    pub fn open(&self) -> Result<Box<dyn Backend>, DeviceError> {
        Ok(match self {
            Device::Gpu { adapter, profile, checked } => Box::new(Gpu::open(adapter, *profile, *checked)?),
            Device::Reference { profile } => Box::new(Reference::new(*profile, self.limits().binding_bytes)),
            Device::Paced { alpha, beta, profile } => Box::new(Paced::new(*alpha, *beta, *profile, self.limits())),
        })
    }
}
