//! When runs began and ended by the device's own clock: a timestamp before the first dispatch and one after the last,
//! which come back with a run's results. What they need is made when the device is opened.

use std::time::Instant;

use super::Gpu;
use crate::backend::clock::Clock;

/// Bytes of a run's two ticks among its results.
pub(super) const TICKS_BYTES: usize = 16;

/// Two queries for each turn, where they are resolved to, and what is known of the clock.
pub(super) struct Stamps {
    queries: wgpu::QuerySet,
    resolved: [wgpu::Buffer; 2],
    clock: Clock,
}

impl Stamps {
    /// None where the adapter has no timestamps, or the driver does not give what they need.
    pub fn open(gpu: &Gpu) -> Option<Stamps> {
        if !gpu.device.features().contains(wgpu::Features::TIMESTAMP_QUERY) {
            return None;
        }
        let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        let resolved = || gpu.buffer("timestamps", TICKS_BYTES, usage);
        let made = gpu.query_set(4).and_then(|queries| Ok((queries, [resolved()?, resolved()?])));
        let (queries, resolved) =
            made.inspect_err(|error| tracing::debug!(device = gpu.name, %error, "no timestamps")).ok()?;
        Some(Stamps { queries, resolved, clock: Clock::new(gpu.queue.get_timestamp_period().into()) })
    }

    /// What the pass of a run's first submission and that of its last are to write.
    pub fn writes(&self, turn: usize, is_first: bool, is_last: bool) -> Option<wgpu::ComputePassTimestampWrites<'_>> {
        let [begin, end] = [2 * turn as u32, 2 * turn as u32 + 1];
        (is_first || is_last).then_some(wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: is_first.then_some(begin),
            end_of_pass_write_index: is_last.then_some(end),
        })
    }

    /// Has a run's ticks written to `to`, at a byte.
    pub fn read(&self, encoder: &mut wgpu::CommandEncoder, turn: usize, to: &wgpu::Buffer, at: usize) {
        let (first, resolved) = (2 * turn as u32, &self.resolved[turn]);
        encoder.resolve_query_set(&self.queries, first..first + 2, resolved, 0);
        encoder.copy_buffer_to_buffer(resolved, 0, to, at as u64, TICKS_BYTES as u64);
    }

    /// When a run began and ended, by what it read back; none where that says nothing. See [`Clock::place`].
    pub fn place(&mut self, ticks: &[u8], submitted: Instant, seen: Instant) -> Option<(Instant, Instant)> {
        let tick = |i: usize| ticks.get(8 * i..8 * i + 8).map(bytemuck::pod_read_unaligned::<u64>);
        self.clock.place([tick(0)?, tick(1)?], submitted, seen)
    }
}
