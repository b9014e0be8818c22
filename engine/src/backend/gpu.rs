//! Programs on wgpu (Vulkan).
//!
//! One compute pass and one submission a run, or several where one would be long. Pipelines, bind groups and the
//! buffers of a stage are made when it opens; while a run is on the device the next one is recorded, so that only small
//! writes and the submission stand between two steps. Two runs may be on the device at once, each with staging buffers
//! of its own. The queue does them in order: the uploads of the later one come after the kernels and the read-back
//! copies of the earlier. When a run started and finished the device's clock says where it has one, else the host's.

pub mod adapter;
mod forecast;
mod pin;
mod raw;
mod staging;
mod stamps;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pp_shaders::{Access, Profile, Variant};

use super::in_flight::InFlight;
use super::{Backend, Counts, DeviceError, DeviceLimits, Done, OpTime, ProgramId, RUNS_MAX, Run, Ticket};
use crate::program::{BufferId, Op, Program, Shape};
use crate::trace::Timestamps;
use adapter::Adapter;
use forecast::{Forecast, cut};
use staging::{Maps, Staging, ranges};
use stamps::Stamps;

/// A step that takes longer than this has lost its device.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Weights in flight to the device before the uploader waits for it: bounds the host memory of staging.
const UPLOAD_BYTES: usize = 32 << 20;
/// What a submission is to take at most. Watchdogs of drivers wait two seconds and more, people notice less.
const SUBMISSION_TARGET: Duration = Duration::from_millis(200);
/// Largest params block; every Vulkan device takes 128 bytes.
const IMMEDIATE_BYTES: u32 = 64;

/// A logical device and everything made on it.
pub struct Gpu {
    name: String,
    profile: Profile,
    limits: DeviceLimits,
    checked: bool,
    device: wgpu::Device,
    queue: wgpu::Queue,
    buffers: Vec<wgpu::Buffer>,
    layouts: HashMap<Vec<(u32, Access)>, (wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
    pipelines: HashMap<Variant, wgpu::ComputePipeline>,
    bind_groups: HashMap<BindGroupKey, wgpu::BindGroup>,
    programs: Vec<Prepared>,
    /// Used in turn: a recorded step names the read-back buffer that it will use.
    staging: [Staging; 2],
    turn: usize,
    in_flight: InFlight<Flight>,
    stamps: Option<Stamps>,
    forecast: Forecast,
    submission_target: Duration,
    buffers_made: Cell<u64>,
    query_sets_made: Cell<u64>,
    submissions: u64,
    recorded: Option<Recorded>,
    unsubmitted_bytes: usize,
    allocated: u64,
    errors: Arc<Mutex<Option<DeviceError>>>,
}

/// A layout and what is bound to it.
type BindGroupKey = (Vec<(u32, Access)>, Vec<BufferId>);

struct Prepared {
    program: Program,
    ops: Vec<(wgpu::ComputePipeline, wgpu::BindGroup)>,
}

struct Recorded {
    programs: Vec<(ProgramId, Shape)>,
    reads: Vec<(BufferId, usize)>,
    commands: Vec<wgpu::CommandBuffer>,
}

/// One of a run's.
struct Dispatch<'a> {
    program: ProgramId,
    shape: &'a Shape,
    op: &'a Op,
    pipeline: &'a wgpu::ComputePipeline,
    group: &'a wgpu::BindGroup,
}

/// A run on the device.
struct Flight {
    /// Programs and their work.
    programs: Vec<(ProgramId, f64)>,
    submitted: Instant,
    index: wgpu::SubmissionIndex,
    /// Where its reads are in the read-back buffer.
    reads: Vec<std::ops::Range<usize>>,
    read_back: Option<wgpu::Buffer>,
    maps: Maps,
}

impl Gpu {
    /// Opens a logical device on an adapter; several may share one. Kernels carry bounds checks when `checked`.
    ///
    /// # Errors
    /// [`DeviceError::Lost`] when the driver does not give a device.
    pub fn open(adapter: &Adapter, profile: Profile, checked: bool) -> Result<Gpu, DeviceError> {
        let limits = adapter.raw().limits();
        let wanted = wgpu::Features::IMMEDIATES
            | wgpu::Features::TIMESTAMP_QUERY
            | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES
            | wgpu::Features::SHADER_INT64
            | wgpu::Features::SUBGROUP;
        let (device, queue) = pollster::block_on(adapter.raw().request_device(&wgpu::DeviceDescriptor {
            label: Some("pp-run stage"),
            required_features: adapter.raw().features() & wanted,
            required_limits: limits.clone(),
            experimental_features: wgpu::ExperimentalFeatures::disabled(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            trace: wgpu::Trace::Off,
        }))
        .map_err(|e| DeviceError::Lost { message: e.to_string() })?;

        if adapter.is_software() {
            pin::pin_driver_threads();
        }
        let info = adapter.raw().get_info();
        let subgroups_of_8 = device.features().contains(wgpu::Features::SUBGROUP)
            && (info.subgroup_min_size, info.subgroup_max_size) == (8, 8);
        let errors: Arc<Mutex<Option<DeviceError>>> = Arc::default();
        let first = errors.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let error = match error {
                wgpu::Error::OutOfMemory { .. } => {
                    DeviceError::OutOfMemory { buffer: "staging".to_owned(), bytes: 0, allocated: 0 }
                }
                other => DeviceError::Validation { message: other.to_string() },
            };
            first.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(error);
        }));
        let lost = errors.clone();
        device.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                lost.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(DeviceError::Lost { message });
            }
        });
        let mut gpu = Gpu {
            name: adapter.name().to_owned(),
            profile: Profile {
                wide: profile.wide && device.features().contains(wgpu::Features::SHADER_INT64),
                shared: profile.shared && subgroups_of_8,
                ..profile
            },
            limits: DeviceLimits {
                binding_bytes: limits.max_storage_buffer_binding_size.min(limits.max_buffer_size) as usize,
                buffer_bytes: limits.max_buffer_size as usize,
            },
            checked,
            device,
            queue,
            buffers: Vec::new(),
            layouts: HashMap::new(),
            pipelines: HashMap::new(),
            bind_groups: HashMap::new(),
            programs: Vec::new(),
            staging: Default::default(),
            turn: 0,
            in_flight: InFlight::default(),
            stamps: None,
            forecast: Forecast::default(),
            submission_target: SUBMISSION_TARGET,
            buffers_made: Cell::new(0),
            query_sets_made: Cell::new(0),
            submissions: 0,
            recorded: None,
            unsubmitted_bytes: 0,
            allocated: 0,
            errors,
        };
        gpu.stamps = Stamps::open(&gpu);
        Ok(gpu)
    }

    /// Cuts runs into submissions that are forecast to take at most `target` each, where that is possible between two
    /// dispatches. 200 ms unless told otherwise. What is computed is the same.
    pub fn set_submission_target(&mut self, target: Duration) {
        self.submission_target = target;
        self.recorded = None;
    }

    fn failed(&self) -> Result<(), DeviceError> {
        match self.errors.lock().unwrap_or_else(|e| e.into_inner()).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Makes something under error scopes; `create` is not told of errors, the scopes are.
    fn scoped<T>(&self, create: impl FnOnce() -> T) -> Result<T, wgpu::Error> {
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let validation = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let internal = self.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let made = create();
        let errors = [
            pollster::block_on(internal.pop()),
            pollster::block_on(validation.pop()),
            pollster::block_on(memory.pop()),
        ];
        match errors.into_iter().flatten().next() {
            Some(error) => Err(error),
            None => Ok(made),
        }
    }

    fn buffer(&self, label: &str, bytes: usize, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer, DeviceError> {
        self.make_buffer(label, bytes, usage, false)
    }

    /// A buffer that is mapped for the host to write.
    fn mapped_buffer(&self, label: &str, bytes: usize, usage: wgpu::BufferUsages) -> Result<wgpu::Buffer, DeviceError> {
        self.make_buffer(label, bytes, usage, true)
    }

    fn make_buffer(
        &self,
        label: &str,
        bytes: usize,
        usage: wgpu::BufferUsages,
        mapped: bool,
    ) -> Result<wgpu::Buffer, DeviceError> {
        let size = bytes.next_multiple_of(4).max(16);
        if size > self.limits.buffer_bytes {
            return Err(DeviceError::TooLarge { buffer: label.to_owned(), bytes, limit: self.limits.buffer_bytes });
        }
        let desc = wgpu::BufferDescriptor { label: Some(label), size: size as u64, usage, mapped_at_creation: mapped };
        self.buffers_made.set(self.buffers_made.get() + 1);
        self.scoped(|| self.device.create_buffer(&desc)).map_err(|error| match error {
            wgpu::Error::OutOfMemory { .. } => {
                DeviceError::OutOfMemory { buffer: label.to_owned(), bytes, allocated: self.allocated }
            }
            other => DeviceError::Validation { message: other.to_string() },
        })
    }

    fn query_set(&self, count: u32) -> Result<wgpu::QuerySet, DeviceError> {
        let desc = wgpu::QuerySetDescriptor { label: None, ty: wgpu::QueryType::Timestamp, count };
        self.query_sets_made.set(self.query_sets_made.get() + 1);
        self.scoped(|| self.device.create_query_set(&desc))
            .map_err(|error| DeviceError::Validation { message: error.to_string() })
    }

    fn layout(&mut self, bindings: &[(u32, Access)]) -> (wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        if let Some(layout) = self.layouts.get(bindings) {
            return layout.clone();
        }
        let entries: Vec<_> = bindings
            .iter()
            .map(|(binding, access)| wgpu::BindGroupLayoutEntry {
                binding: *binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: *access == Access::Read },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let group =
            self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
        let pipeline = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&group)],
            immediate_size: IMMEDIATE_BYTES,
        });
        self.layouts.insert(bindings.to_vec(), (group.clone(), pipeline.clone()));
        (group, pipeline)
    }

    fn pipeline(&mut self, variant: &Variant) -> Result<wgpu::ComputePipeline, DeviceError> {
        if let Some(pipeline) = self.pipelines.get(variant) {
            return Ok(pipeline.clone());
        }
        let (_, layout) = self.layout(&variant.bindings());
        let label = variant.label();
        let desc = wgpu::ShaderModuleDescriptor {
            label: Some(&label),
            source: wgpu::ShaderSource::Wgsl(variant.source().into()),
        };
        let made = self.scoped(|| {
            let module = if self.checked {
                self.device.create_shader_module(desc)
            } else {
                // SAFETY: the kernels are this program's own; tests run them with checks, on shapes that are
                // multiples of nothing, and compare every output with the twin's.
                unsafe { self.device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked()) }
            };
            self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&label),
                layout: Some(&layout),
                module: &module,
                entry_point: Some("main"),
                // Kernels write workgroup memory before they read it; zeroing it makes SwiftShader take most of
                // a second a pipeline.
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            })
        });
        let pipeline = made.map_err(|e| DeviceError::Pipeline { kernel: label.clone(), message: e.to_string() })?;
        self.pipelines.insert(variant.clone(), pipeline.clone());
        Ok(pipeline)
    }

    fn bind_group(&mut self, bindings: Vec<(u32, Access)>, buffers: &[BufferId]) -> wgpu::BindGroup {
        assert_eq!(
            bindings.len(),
            buffers.len(),
            "a kernel binds {} buffers, the dispatch names {}",
            bindings.len(),
            buffers.len()
        );
        let key = (bindings, buffers.to_vec());
        if let Some(group) = self.bind_groups.get(&key) {
            return group.clone();
        }
        let (layout, _) = self.layout(&key.0);
        let entries: Vec<_> = key
            .0
            .iter()
            .zip(buffers)
            .map(|((binding, _), id)| wgpu::BindGroupEntry {
                binding: *binding,
                resource: self.buffers[id.0 as usize].as_entire_binding(),
            })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &layout,
            entries: &entries,
        });
        self.bind_groups.insert(key, group.clone());
        group
    }

    /// The commands of a run, one buffer a submission.
    fn record(
        &self,
        programs: &[(ProgramId, Shape)],
        reads: &[(BufferId, usize)],
        turn: usize,
    ) -> Vec<wgpu::CommandBuffer> {
        let dispatches = self.dispatches(programs);
        let seconds =
            dispatches.iter().map(|dispatch| self.forecast.seconds(dispatch.program, dispatch.op.work(dispatch.shape)));
        let pieces = cut(seconds, self.submission_target.as_secs_f64());
        let (mut commands, mut rest) = (Vec::with_capacity(pieces.len()), dispatches.as_slice());
        let stamps = self.stamps.as_ref();
        for (i, count) in pieces.iter().enumerate() {
            let (piece, others) = rest.split_at(*count);
            rest = others;
            let is_last = i + 1 == pieces.len();
            let mut encoder = self.encode(piece, stamps.and_then(|stamps| stamps.writes(turn, i == 0, is_last)), None);
            if let Some(staging) = self.staging[turn].read_back.as_ref().filter(|_| is_last) {
                let (ranges, _) = self.read_ranges(reads);
                for ((buffer, bytes), range) in reads.iter().zip(&ranges) {
                    let (from, bytes) = (&self.buffers[buffer.0 as usize], bytes.next_multiple_of(4) as u64);
                    encoder.copy_buffer_to_buffer(from, 0, staging, range.start as u64, bytes);
                }
                if let (Some(stamps), Some(range)) = (stamps, ranges.last()) {
                    stamps.read(&mut encoder, turn, staging, range.start);
                }
            }
            commands.push(encoder.finish());
        }
        commands
    }

    fn dispatches<'a>(&'a self, programs: &'a [(ProgramId, Shape)]) -> Vec<Dispatch<'a>> {
        let all = programs.iter().flat_map(|(program, shape)| {
            let prepared = &self.programs[program.0];
            let ops = prepared.program.ops.iter().zip(&prepared.ops);
            ops.map(|(op, (pipeline, group))| Dispatch { program: *program, shape, op, pipeline, group })
        });
        all.collect()
    }

    /// Dispatches in a pass of their own, with timestamps around it, and with a time before each dispatch and after the
    /// last where those are wanted.
    fn encode(
        &self,
        dispatches: &[Dispatch<'_>],
        around: Option<wgpu::ComputePassTimestampWrites<'_>>,
        times: Option<&wgpu::QuerySet>,
    ) -> wgpu::CommandEncoder {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let desc = wgpu::ComputePassDescriptor { label: None, timestamp_writes: around };
        let mut pass = encoder.begin_compute_pass(&desc);
        let mut query = 0;
        for Dispatch { shape, op, pipeline, group, .. } in dispatches {
            if let Some(times) = times {
                pass.write_timestamp(times, query);
                query += 1;
            }
            let [x, y, z] = op.workgroups(shape);
            if x * y * z == 0 {
                continue;
            }
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, *group, &[]);
            pass.set_immediates(0, &op.params_for(shape));
            pass.dispatch_workgroups(x, y, z);
        }
        if let Some(times) = times {
            pass.write_timestamp(times, query);
        }
        drop(pass);
        encoder
    }

    fn wait(&mut self, index: Option<wgpu::SubmissionIndex>) -> Result<(), DeviceError> {
        let status = self.device.poll(wgpu::PollType::Wait { submission_index: index, timeout: Some(STEP_TIMEOUT) });
        self.failed()?;
        match status {
            Ok(_) => Ok(()),
            Err(wgpu::PollError::Timeout) => Err(DeviceError::Timeout { seconds: STEP_TIMEOUT.as_secs() }),
            Err(other) => Err(DeviceError::Lost { message: other.to_string() }),
        }
    }

    /// Waits for a run and takes what it has read.
    fn land(&mut self, mut flight: Flight) -> Result<Vec<Vec<u8>>, DeviceError> {
        self.wait(Some(flight.index))?;
        if !flight.maps.are_done()? {
            return Err(DeviceError::Lost { message: "a staging buffer was not mapped".to_owned() });
        }
        let Some(buffer) = flight.read_back else { return Ok(vec![Vec::new(); flight.reads.len()]) };
        let bytes = flight.reads.last().map_or(0, |range| range.end.next_multiple_of(4));
        let view = buffer.get_mapped_range(..bytes as u64).map_err(|e| DeviceError::Lost { message: e.to_string() })?;
        let reads = flight.reads.iter().map(|range| view[range.clone()].to_vec()).collect();
        drop(view);
        buffer.unmap();
        Ok(reads)
    }
}

impl Backend for Gpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn create(&mut self, label: &str, bytes: usize) -> Result<BufferId, DeviceError> {
        let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
        let buffer = self.buffer(label, bytes, usage)?;
        self.allocated += buffer.size();
        self.buffers.push(buffer);
        Ok(BufferId(self.buffers.len() as u32 - 1))
    }

    fn write(&mut self, buffer: BufferId, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.queue.write_buffer(&self.buffers[buffer.0 as usize], offset as u64, data);
        self.unsubmitted_bytes += data.len();
        if self.unsubmitted_bytes >= UPLOAD_BYTES {
            self.unsubmitted_bytes = 0;
            let index = self.queue.submit([]);
            self.wait(Some(index))?;
        }
        self.failed()
    }

    fn clear(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.in_flight.assert_empty();
        // What was written to them is on its way.
        let index = self.queue.submit([]);
        self.wait(Some(index))?;
        self.recorded = None;
        self.programs.clear();
        self.bind_groups.clear();
        self.forecast = Forecast::default();
        for buffer in buffers {
            let buffer = &self.buffers[buffer.0 as usize];
            self.allocated -= buffer.size();
            buffer.destroy();
        }
        // Only then is their memory free for others.
        self.wait(None)
    }

    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        let mut ops = Vec::with_capacity(program.ops.len());
        for op in &program.ops {
            ops.push((self.pipeline(&op.variant)?, self.bind_group(op.variant.bindings(), &op.buffers)));
        }
        self.programs.push(Prepared { program, ops });
        self.failed()?;
        Ok(ProgramId(self.programs.len() - 1))
    }

    fn submit(&mut self, run: &Run<'_>) -> Result<Ticket, DeviceError> {
        self.in_flight.assert_room();
        let turn = self.turn;
        self.ensure_staging(run, turn)?;
        let commands = match self.recorded.take() {
            Some(recorded) if recorded.programs == run.programs && recorded.reads == run.reads => recorded.commands,
            _ => self.record(run.programs, run.reads, turn),
        };
        let uploads = self.upload(run.writes, turn)?;
        let (reads, bytes) = self.read_ranges(run.reads);
        let staging = &self.staging[turn];
        let upload = staging.upload.as_ref().filter(|_| uploads.is_some());
        let read_back = staging.read_back.clone().filter(|_| bytes > 0);
        let submitted = Instant::now();
        let mut commands = commands.into_iter();
        let mut index = self.queue.submit(uploads.into_iter().chain(commands.next()));
        self.submissions += 1;
        for rest in commands {
            index = self.queue.submit([rest]);
            self.submissions += 1;
        }
        let maps = Maps::ask(&self.queue, upload, read_back.as_ref().map(|buffer| (buffer, bytes)));
        self.turn = 1 - turn;
        if !run.next.is_empty() {
            let commands = self.record(run.next, run.reads, self.turn);
            self.recorded = Some(Recorded { programs: run.next.to_vec(), reads: run.reads.to_vec(), commands });
        }
        let work = |id: &ProgramId, shape| self.programs[id.0].program.ops.iter().map(|op| op.work(shape)).sum();
        let programs = run.programs.iter().map(|(id, shape)| (*id, work(id, shape))).collect();
        Ok(self.in_flight.push(submitted, Flight { programs, submitted, index, reads, read_back, maps }))
    }

    /// Mesa's software driver does not return from a submission before the one ahead of it is done: what it has done
    /// would wait for what it does next.
    fn runs_at_once(&self) -> usize {
        if self.is_software() { 1 } else { RUNS_MAX }
    }

    fn timestamps(&self) -> Timestamps {
        if self.stamps.is_some() { Timestamps::Device } else { Timestamps::Host }
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Done, DeviceError> {
        let (started, mut flight) = self.in_flight.pop(ticket);
        // A run that is done before anyone waits for it has taken at most the time until now.
        let is_done = self.device.poll(wgpu::PollType::Poll).is_ok() && flight.maps.are_done().unwrap_or(false);
        let (programs, submitted) = (std::mem::take(&mut flight.programs), flight.submitted);
        let mut reads = self.land(flight)?;
        let seen = Instant::now();
        let placed = self.stamps.as_mut().and_then(|stamps| stamps.place(&reads.pop()?, submitted, seen));
        let (begin, end) = placed.unwrap_or((started, seen));
        self.forecast.learn(&programs, (end - begin).as_secs_f64(), is_done && placed.is_none());
        // The bounds of the clock may have moved since the run before it: runs do not overlap all the same.
        let (started, finished) = (begin.max(started), end.max(started));
        self.in_flight.finish(finished);
        Ok(Done { reads, started, finished })
    }

    fn time(&mut self, programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        assert!(self.in_flight.is_empty(), "dispatches are timed while nothing else runs");
        let wanted = wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        let ops: usize = programs.iter().map(|(id, _)| self.programs[id.0].ops.len()).sum();
        if !self.device.features().contains(wanted) || ops + 1 > wgpu::QUERY_SET_MAX_QUERIES as usize {
            return Ok(Vec::new());
        }
        let count = ops as u32 + 1;
        let queries = self.query_set(count)?;
        let bytes = 8 * count as usize;
        let resolve =
            self.buffer("timestamps", bytes, wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC)?;
        let read = self.buffer("timestamps", bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?;
        let mut encoder = self.encode(&self.dispatches(programs), None, Some(&queries));
        encoder.resolve_query_set(&queries, 0..count, &resolve, 0);
        encoder.copy_buffer_to_buffer(&resolve, 0, &read, 0, bytes as u64);
        let submitted = Instant::now();
        let index = self.queue.submit([encoder.finish()]);
        let maps = Maps::ask(&self.queue, None, Some((&read, bytes)));
        let reads = ranges([bytes].into_iter()).0;
        let flight = Flight { programs: Vec::new(), submitted, index, reads, read_back: Some(read), maps };
        let ticks: Vec<u64> =
            self.land(flight)?[0].chunks_exact(8).map(|b| u64::from_le_bytes(std::array::from_fn(|i| b[i]))).collect();
        let period = f64::from(self.queue.get_timestamp_period()) * 1e-9;
        let names = programs
            .iter()
            .enumerate()
            .flat_map(|(p, (id, _))| (0..self.programs[id.0].ops.len()).map(move |o| (p, o)));
        let times = names.zip(ticks.windows(2));
        Ok(times.map(|(op, t)| OpTime { op, seconds: t[1].saturating_sub(t[0]) as f64 * period }).collect())
    }

    fn program(&self, id: ProgramId) -> &Program {
        &self.programs[id.0].program
    }

    fn allocated_bytes(&self) -> u64 {
        self.allocated
    }

    fn counts(&self) -> Counts {
        Counts {
            buffers: self.buffers_made.get(),
            query_sets: self.query_sets_made.get(),
            submissions: self.submissions,
        }
    }
}
