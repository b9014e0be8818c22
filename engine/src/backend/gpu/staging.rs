//! Host-visible buffers between the host and the device: two sets, used in turn, so that one can be filled while the
//! device has the other. They grow when a run needs more and are kept.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::Gpu;
use super::stamps::TICKS_BYTES;
use crate::backend::{DeviceError, Run};
use crate::program::BufferId;

/// Smallest staging buffer, bytes.
const LEAST_BYTES: usize = 64 << 10;

/// A set. Its upload buffer is mapped while no submission has it; its read-back buffer is mapped when one is done.
#[derive(Default)]
pub(super) struct Staging {
    pub upload: Option<wgpu::Buffer>,
    pub read_back: Option<wgpu::Buffer>,
}

/// What is to happen when the last submission is done.
pub(super) struct Maps {
    answers: Receiver<Result<(), wgpu::BufferAsyncError>>,
    /// Answers to come.
    asked: usize,
}

impl Maps {
    /// Asks for the upload buffer again, for the first `bytes` bytes of the read-back buffer, and to be told in any case.
    pub fn ask(queue: &wgpu::Queue, upload: Option<&wgpu::Buffer>, read_back: Option<(&wgpu::Buffer, usize)>) -> Maps {
        let (send, answers) = channel();
        // Whoever asked may have given up.
        let tell = |send: Sender<_>| move |answer| drop(send.send(answer));
        if let Some(buffer) = upload {
            buffer.map_async(wgpu::MapMode::Write, .., tell(send.clone()));
        }
        if let Some((buffer, bytes)) = read_back {
            buffer.map_async(wgpu::MapMode::Read, ..bytes as u64, tell(send.clone()));
        }
        let asked = 1 + usize::from(upload.is_some()) + usize::from(read_back.is_some());
        queue.on_submitted_work_done(move || drop(send.send(Ok(()))));
        Maps { answers, asked }
    }

    /// Whether it is done and all is mapped, as the last poll of the device has found.
    ///
    /// # Errors
    /// [`DeviceError::Lost`]
    pub fn are_done(&mut self) -> Result<bool, DeviceError> {
        for answer in self.answers.try_iter() {
            answer.map_err(|error| DeviceError::Lost { message: error.to_string() })?;
            self.asked -= 1;
        }
        Ok(self.asked == 0)
    }
}

/// The ranges of a staging buffer that hold parts of so many bytes, one after the other, and the bytes of all.
pub(super) fn ranges(parts: impl Iterator<Item = usize>) -> (Vec<std::ops::Range<usize>>, usize) {
    let mut end = 0;
    let ranges = parts.map(|bytes| {
        let start = end;
        end += bytes.next_multiple_of(4);
        start..start + bytes
    });
    (ranges.collect(), end)
}

impl Gpu {
    /// Where a run's reads are in its read-back buffer, behind them its ticks where the device has a clock; and the
    /// bytes of all.
    pub(super) fn read_ranges(&self, reads: &[(BufferId, usize)]) -> (Vec<std::ops::Range<usize>>, usize) {
        ranges(reads.iter().map(|(_, bytes)| *bytes).chain(self.stamps.is_some().then_some(TICKS_BYTES)))
    }

    /// Makes the buffers that a run in turn `turn` needs where they are too small. A run that writes to the same
    /// buffers as one before it never does.
    pub(super) fn ensure_staging(&mut self, run: &Run<'_>, turn: usize) -> Result<(), DeviceError> {
        let room = |bytes: usize, limit: usize| bytes.next_power_of_two().max(LEAST_BYTES).min(limit.max(bytes));
        let is_small = |buffer: &Option<wgpu::Buffer>, bytes: usize| {
            bytes > 0 && buffer.as_ref().is_none_or(|buffer| (buffer.size() as usize) < bytes)
        };
        let bytes = run.writes.iter().map(|(buffer, _)| self.buffers[buffer.0 as usize].size() as usize).sum();
        if is_small(&self.staging[turn].upload, bytes) {
            let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
            let buffer = self.mapped_buffer("upload", room(bytes, self.limits.buffer_bytes), usage)?;
            self.staging[turn].upload = Some(buffer);
        }
        let (_, bytes) = self.read_ranges(run.reads);
        // The next run is recorded ahead, and reads as much.
        for turn in 0..2 {
            if is_small(&self.staging[turn].read_back, bytes) {
                let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
                let buffer = self.buffer("read-back", room(bytes, self.limits.buffer_bytes), usage)?;
                self.staging[turn].read_back = Some(buffer);
                self.recorded = None;
            }
        }
        Ok(())
    }

    /// Commands that copy a run's writes to their buffers, from the upload buffer of its turn. That buffer is to be
    /// mapped again once they are submitted.
    pub(super) fn upload(
        &self,
        writes: &[(BufferId, &[u8])],
        turn: usize,
    ) -> Result<Option<wgpu::CommandBuffer>, DeviceError> {
        let (ranges, bytes) = ranges(writes.iter().map(|(_, data)| data.len()));
        if bytes == 0 {
            return Ok(None);
        }
        let upload = self.staging[turn].upload.as_ref().expect("made for this run");
        let mut view = upload
            .get_mapped_range_mut(..bytes as u64)
            .map_err(|error| DeviceError::Lost { message: error.to_string() })?;
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for (range, (buffer, data)) in ranges.into_iter().zip(writes) {
            view.slice(range.clone()).copy_from_slice(data);
            let (at, to) = (range.start as u64, &self.buffers[buffer.0 as usize]);
            encoder.copy_buffer_to_buffer(upload, at, to, 0, data.len() as u64);
        }
        drop(view);
        upload.unmap();
        Ok(Some(encoder.finish()))
    }
}
