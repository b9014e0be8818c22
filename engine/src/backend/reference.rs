//! Programs on the kernels' twins: slow, exact, and without any device.

use std::cell::RefCell;
use std::time::Instant;

use pp_shaders::{Profile, reference};

use super::in_flight::InFlight;
use super::{Backend, Counts, DeviceError, DeviceLimits, Done, OpTime, ProgramId, Run, Ticket};
use crate::program::{BufferId, Program, Shape};

/// Buffers of 32-bit words in host memory. A run is done when it is collected.
pub struct Reference {
    profile: Profile,
    limits: DeviceLimits,
    buffers: Vec<RefCell<Vec<u32>>>,
    programs: Vec<Program>,
    in_flight: InFlight<Waiting>,
    submissions: u64,
}

/// A run that was not begun.
struct Waiting {
    programs: Vec<(ProgramId, Shape)>,
    writes: Vec<(BufferId, Vec<u8>)>,
    reads: Vec<(BufferId, usize)>,
}

impl Reference {
    /// A backend that lays its work out as `profile` would, with bindings of at most `binding_bytes`.
    pub fn new(profile: Profile, binding_bytes: usize) -> Reference {
        let limits = DeviceLimits { binding_bytes, buffer_bytes: binding_bytes };
        Reference {
            profile,
            limits,
            buffers: Vec::new(),
            programs: Vec::new(),
            in_flight: InFlight::default(),
            submissions: 0,
        }
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

    fn clear(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.in_flight.assert_empty();
        self.programs.clear();
        buffers.iter().for_each(|buffer| self.buffers[buffer.0 as usize] = RefCell::default());
        Ok(())
    }

    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        self.programs.push(program);
        Ok(ProgramId(self.programs.len() - 1))
    }

    fn submit(&mut self, run: &Run<'_>) -> Result<Ticket, DeviceError> {
        self.submissions += 1;
        let waiting = Waiting {
            programs: run.programs.to_vec(),
            writes: run.writes.iter().map(|(buffer, data)| (*buffer, data.to_vec())).collect(),
            reads: run.reads.to_vec(),
        };
        Ok(self.in_flight.push(Instant::now(), waiting))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Done, DeviceError> {
        let (_, run) = self.in_flight.pop(ticket);
        let started = Instant::now();
        for (buffer, data) in &run.writes {
            self.write(*buffer, 0, data)?;
        }
        for (id, shape) in &run.programs {
            self.execute(&self.programs[id.0], shape);
        }
        let read = |(buffer, bytes): &(BufferId, usize)| {
            bytemuck::cast_slice(self.buffers[buffer.0 as usize].borrow().as_slice())[..*bytes].to_vec()
        };
        let reads = run.reads.iter().map(read).collect();
        let finished = Instant::now();
        self.in_flight.finish(finished);
        Ok(Done { reads, started, finished })
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

    fn counts(&self) -> Counts {
        Counts { buffers: self.buffers.len() as u64, submissions: self.submissions, ..Counts::default() }
    }
}
