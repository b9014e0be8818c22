//! Programs on wgpu (Vulkan).
//!
//! One compute pass and one submission a run. Pipelines, bind groups and the buffers of a stage are made when it
//! opens; while a run is on the device the next one is recorded, so that only small writes and the submission
//! stand between two steps.

pub mod adapter;
mod pin;
mod raw;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pp_shaders::{Access, Profile, Variant};

use super::{Backend, DeviceError, DeviceLimits, OpTime, ProgramId, Run};
use crate::program::{BufferId, Program, Shape};
use adapter::Adapter;

/// A step that takes longer than this has lost its device.
const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Weights in flight to the device before the uploader waits for it: bounds the host memory of staging.
const UPLOAD_BYTES: usize = 32 << 20;
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
    /// Two read-back buffers, used in turn: a recorded step names the one it will use.
    staging: [Option<wgpu::Buffer>; 2],
    turn: usize,
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
    commands: wgpu::CommandBuffer,
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
            | wgpu::Features::SHADER_INT64;
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
        Ok(Gpu {
            name: adapter.name().to_owned(),
            profile: Profile {
                wide: profile.wide && device.features().contains(wgpu::Features::SHADER_INT64),
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
            staging: [None, None],
            turn: 0,
            recorded: None,
            unsubmitted_bytes: 0,
            allocated: 0,
            errors,
        })
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
        let size = bytes.next_multiple_of(4).max(16);
        if size > self.limits.buffer_bytes {
            return Err(DeviceError::TooLarge { buffer: label.to_owned(), bytes, limit: self.limits.buffer_bytes });
        }
        let desc = wgpu::BufferDescriptor { label: Some(label), size: size as u64, usage, mapped_at_creation: false };
        self.scoped(|| self.device.create_buffer(&desc)).map_err(|error| match error {
            wgpu::Error::OutOfMemory { .. } => {
                DeviceError::OutOfMemory { buffer: label.to_owned(), bytes, allocated: self.allocated }
            }
            other => DeviceError::Validation { message: other.to_string() },
        })
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

    fn record(
        &self,
        programs: &[(ProgramId, Shape)],
        reads: &[(BufferId, usize)],
        turn: usize,
        times: Option<&wgpu::QuerySet>,
    ) -> wgpu::CommandBuffer {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            let mut query = 0;
            for (id, shape) in programs {
                let prepared = &self.programs[id.0];
                for (op, (pipeline, group)) in prepared.program.ops.iter().zip(&prepared.ops) {
                    if let Some(times) = times {
                        pass.write_timestamp(times, query);
                        query += 1;
                    }
                    let [x, y, z] = op.workgroups(shape);
                    if x * y * z == 0 {
                        continue;
                    }
                    pass.set_pipeline(pipeline);
                    pass.set_bind_group(0, group, &[]);
                    pass.set_immediates(0, &op.params_for(shape));
                    pass.dispatch_workgroups(x, y, z);
                }
            }
            if let Some(times) = times {
                pass.write_timestamp(times, query);
            }
        }
        if let Some(staging) = &self.staging[turn] {
            let mut at = 0;
            for (buffer, bytes) in reads {
                let bytes = bytes.next_multiple_of(4) as u64;
                encoder.copy_buffer_to_buffer(&self.buffers[buffer.0 as usize], 0, staging, at, bytes);
                at += bytes;
            }
        }
        encoder.finish()
    }

    fn ensure_staging(&mut self, reads: &[(BufferId, usize)]) -> Result<(), DeviceError> {
        let bytes: usize = reads.iter().map(|(_, bytes)| bytes.next_multiple_of(4)).sum();
        for turn in 0..2 {
            if self.staging[turn].as_ref().is_none_or(|b| (b.size() as usize) < bytes) {
                let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
                self.staging[turn] = Some(self.buffer("read-back", bytes, usage)?);
                self.recorded = None;
            }
        }
        Ok(())
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

    /// Reads `bytes` bytes back from a mapped read-back buffer.
    fn map(
        &mut self,
        buffer: &wgpu::Buffer,
        bytes: usize,
        index: wgpu::SubmissionIndex,
    ) -> Result<Vec<u8>, DeviceError> {
        let (send, receive) = std::sync::mpsc::channel();
        buffer.slice(..bytes as u64).map_async(wgpu::MapMode::Read, move |result| {
            // The receiver waits below, unless the wait itself failed.
            let _ = send.send(result);
        });
        self.wait(Some(index))?;
        match receive.try_recv() {
            Ok(Ok(())) => {}
            Ok(Err(e)) => return Err(DeviceError::Lost { message: e.to_string() }),
            Err(_) => return Err(DeviceError::Timeout { seconds: STEP_TIMEOUT.as_secs() }),
        }
        let view = buffer
            .slice(..bytes as u64)
            .get_mapped_range()
            .map_err(|e| DeviceError::Lost { message: e.to_string() })?;
        let data = view.to_vec();
        drop(view);
        buffer.unmap();
        Ok(data)
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

    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        let mut ops = Vec::with_capacity(program.ops.len());
        for op in &program.ops {
            ops.push((self.pipeline(&op.variant)?, self.bind_group(op.variant.bindings(), &op.buffers)));
        }
        self.programs.push(Prepared { program, ops });
        self.failed()?;
        Ok(ProgramId(self.programs.len() - 1))
    }

    fn run(&mut self, run: &Run<'_>) -> Result<Vec<Vec<u8>>, DeviceError> {
        self.ensure_staging(run.reads)?;
        let turn = self.turn;
        let commands = match self.recorded.take() {
            Some(recorded) if recorded.programs == run.programs && recorded.reads == run.reads => recorded.commands,
            _ => self.record(run.programs, run.reads, turn, None),
        };
        for (buffer, data) in run.writes {
            self.queue.write_buffer(&self.buffers[buffer.0 as usize], 0, data);
        }
        let index = self.queue.submit([commands]);
        self.turn = 1 - turn;
        if !run.next.is_empty() {
            let commands = self.record(run.next, run.reads, self.turn, None);
            self.recorded = Some(Recorded { programs: run.next.to_vec(), reads: run.reads.to_vec(), commands });
        }
        let bytes: usize = run.reads.iter().map(|(_, bytes)| bytes.next_multiple_of(4)).sum();
        if bytes == 0 {
            self.wait(Some(index))?;
            return Ok(Vec::new());
        }
        let staging = self.staging[turn].clone().expect("made above");
        let all = self.map(&staging, bytes, index)?;
        let mut at = 0;
        let split = run.reads.iter().map(|(_, bytes)| {
            let data = all[at..at + bytes].to_vec();
            at += bytes.next_multiple_of(4);
            data
        });
        Ok(split.collect())
    }

    fn time(&mut self, programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        let wanted = wgpu::Features::TIMESTAMP_QUERY | wgpu::Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        let ops: usize = programs.iter().map(|(id, _)| self.programs[id.0].ops.len()).sum();
        if !self.device.features().contains(wanted) || ops + 1 > wgpu::QUERY_SET_MAX_QUERIES as usize {
            return Ok(Vec::new());
        }
        let count = ops as u32 + 1;
        let queries = self.device.create_query_set(&wgpu::QuerySetDescriptor {
            label: None,
            ty: wgpu::QueryType::Timestamp,
            count,
        });
        let bytes = 8 * count as usize;
        let resolve =
            self.buffer("timestamps", bytes, wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC)?;
        let read = self.buffer("timestamps", bytes, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST)?;
        let work = self.record(programs, &[], 0, Some(&queries));
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.resolve_query_set(&queries, 0..count, &resolve, 0);
        encoder.copy_buffer_to_buffer(&resolve, 0, &read, 0, bytes as u64);
        let index = self.queue.submit([work, encoder.finish()]);
        let data = self.map(&read, bytes, index)?;
        let ticks: Vec<u64> = data.chunks_exact(8).map(|b| u64::from_le_bytes(std::array::from_fn(|i| b[i]))).collect();
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
}
