//! What measurements need of a device beside programs.

use super::{Gpu, STEP_TIMEOUT};
use crate::backend::DeviceError;

impl Gpu {
    /// The device and its queue.
    pub(in crate::backend) fn handles(&self) -> (&wgpu::Device, &wgpu::Queue) {
        (&self.device, &self.queue)
    }

    /// Whether the host's processor does the work.
    pub(in crate::backend) fn is_software(&self) -> bool {
        self.device.adapter_info().device_type == wgpu::DeviceType::Cpu
    }

    /// A buffer that is not one of the stage's.
    pub(in crate::backend) fn own_buffer(
        &self,
        label: &str,
        bytes: usize,
        usage: wgpu::BufferUsages,
    ) -> Result<wgpu::Buffer, DeviceError> {
        self.buffer(label, bytes, usage)
    }

    /// Makes a pipeline; an error of the driver is that of `kernel`.
    pub(in crate::backend) fn own_pipeline(
        &self,
        kernel: &str,
        desc: &wgpu::ComputePipelineDescriptor<'_>,
    ) -> Result<wgpu::ComputePipeline, DeviceError> {
        let made = self.scoped(|| self.device.create_compute_pipeline(desc));
        made.map_err(|error| DeviceError::Pipeline { kernel: kernel.to_owned(), message: error.to_string() })
    }

    /// Waits until a submission is done.
    pub(in crate::backend) fn finish(&self, index: wgpu::SubmissionIndex) -> Result<(), DeviceError> {
        let done =
            self.device.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout: Some(STEP_TIMEOUT) });
        self.failed()?;
        match done {
            Ok(_) => Ok(()),
            Err(wgpu::PollError::Timeout) => Err(DeviceError::Timeout { seconds: STEP_TIMEOUT.as_secs() }),
            Err(other) => Err(DeviceError::Lost { message: other.to_string() }),
        }
    }
}
