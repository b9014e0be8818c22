//! Programs on the kernels' twins: slow, exact, and without any device.

use std::cell::RefCell;

use pp_shaders::{Profile, reference};

use super::{Backend, DeviceError, DeviceLimits, OpTime, ProgramId, Run};
use crate::program::{BufferId, Program, Shape};

/// Buffers of 32-bit words in host memory.
pub struct Reference {
    profile: Profile,
    limits: DeviceLimits,
    buffers: Vec<RefCell<Vec<u32>>>,
    programs: Vec<Program>,
}

impl Reference {
    /// A backend that lays its work out as `profile` would, with bindings of at most `binding_bytes`.
    pub fn new(profile: Profile, binding_bytes: usize) -> Reference {
        let limits = DeviceLimits { binding_bytes, buffer_bytes: binding_bytes };
        Reference { profile, limits, buffers: Vec::new(), programs: Vec::new() }
    }

    fn execute(&self, program: &Program, shape: &Shape) {
        for op in &program.ops {
            if op.workgroups(shape).contains(&0) {
                continue;
            }
            let buffers: Vec<_> = op.buffers.iter().map(|id| &self.buffers[id.0 as usize]).collect();
            reference::run(&op.variant, &op.params_for(shape), &buffers);
        }
    }
}

impl Backend for Reference {
    fn name(&self) -> &str {
        "reference (twins on the CPU)"
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn create(&mut self, label: &str, bytes: usize) -> Result<BufferId, DeviceError> {
        if bytes > self.limits.buffer_bytes {
            return Err(DeviceError::TooLarge { buffer: label.to_owned(), bytes, limit: self.limits.buffer_bytes });
        }
        self.buffers.push(RefCell::new(vec![0; bytes.div_ceil(4)]));
        Ok(BufferId(self.buffers.len() as u32 - 1))
    }

    fn write(&mut self, buffer: BufferId, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        let mut words = self.buffers[buffer.0 as usize].borrow_mut();
        bytemuck::cast_slice_mut(words.as_mut_slice())[offset..offset + data.len()].copy_from_slice(data);
        Ok(())
    }

    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        self.programs.push(program);
        Ok(ProgramId(self.programs.len() - 1))
    }

    fn run(&mut self, run: &Run<'_>) -> Result<Vec<Vec<u8>>, DeviceError> {
        for (buffer, data) in run.writes {
            self.write(*buffer, 0, data)?;
        }
        for (id, shape) in run.programs {
            self.execute(&self.programs[id.0], shape);
        }
        let read = |(buffer, bytes): &(BufferId, usize)| {
            bytemuck::cast_slice(self.buffers[buffer.0 as usize].borrow().as_slice())[..*bytes].to_vec()
        };
        Ok(run.reads.iter().map(read).collect())
    }

    fn time(&mut self, _programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        Ok(Vec::new())
    }

    fn program(&self, id: ProgramId) -> &Program {
        &self.programs[id.0]
    }

    fn allocated_bytes(&self) -> u64 {
        self.buffers.iter().map(|words| 4 * words.borrow().len() as u64).sum()
    }
}
