//! What a device can do at most: bytes and operations a second, measured.
//!
//! No kernel of a model is involved: a copy by the driver, and `roofline.wgsl`, whose kernels only read, only take
//! integer dots, or only multiply and add. What a kernel of a model must do at least, over these rates, is the time
//! that no version of it can go below.

use std::time::{Duration, Instant};

use pp_shaders::Kernel;

use super::DeviceError;
use super::gpu::Gpu;
use crate::program::Op;

/// Bytes that are copied and read: more than a card's caches hold …
const CARD_BYTES: usize = 256 << 20;
/// … or a processor's share of them.
const SOFTWARE_BYTES: usize = 64 << 20;
/// Workgroups of 64 threads: enough to fill the largest card several times over.
const WORKGROUPS: u32 = 4096;
/// A measurement is long enough when its work takes this long: starting it counts for nothing then.
const LONG_ENOUGH: Duration = Duration::from_millis(60);
/// Measurements of each kind; the fastest counts.
const REPETITIONS: usize = 4;
/// Most rounds of a thread, or copies in one submission.
const ROUNDS_MAX: u32 = 1 << 20;

/// The measured rates of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    /// Of the driver's copies on the device; read and written bytes both count.
    pub copy_bytes_per_s: f64,
    /// Of a kernel that reads.
    pub read_bytes_per_s: f64,
    /// Multiplications and additions of dots of four signed bytes.
    pub int8_ops_per_s: f64,
    /// Multiplications and additions of floats.
    pub f32_flops_per_s: f64,
}

/// What a dispatch has to do at least.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Bytes of weights to read.
    pub weight_bytes: u64,
    /// Multiplications and additions.
    pub operations: u64,
    /// Whether they are of bytes.
    pub int8: bool,
}

impl Work {
    /// Of a dispatch that counts `tokens` tokens.
    pub fn of(op: &Op, tokens: u32) -> Work {
        Work {
            weight_bytes: op.weight_bytes,
            operations: op.operations * u64::from(tokens),
            int8: matches!(op.variant.kernel, Kernel::MatvecQ8 | Kernel::MatvecSwiGluQ8 | Kernel::MatmulTileQ8),
        }
    }
}

impl Roofline {
    /// Measures the device under `gpu`, which has nothing else to do meanwhile. Takes one to a few seconds.
    ///
    /// # Errors
    /// When the device fails, or has no room for two buffers of 64 MiB (256 on cards).
    pub fn measure(gpu: &mut Gpu) -> Result<Roofline, DeviceError> {
        let meter = Meter::new(gpu)?;
        let threads = f64::from(WORKGROUPS) * 64.0;
        let copies = meter.best(1, |count| meter.copies(count))?;
        let pipeline = meter.pipeline("read_all")?;
        let reads = meter.best(1, |count| meter.dispatches(&pipeline, meter.rounds_of_a_read(), count))?;
        let pipeline = meter.pipeline("int8_dots")?;
        let dots = meter.best(64, |rounds| meter.dispatches(&pipeline, rounds, 1))?;
        let pipeline = meter.pipeline("float_fmas")?;
        let fmas = meter.best(64, |rounds| meter.dispatches(&pipeline, rounds, 1))?;
        Ok(Roofline {
            copy_bytes_per_s: 2.0 * meter.bytes as f64 * copies,
            read_bytes_per_s: meter.bytes as f64 * reads,
            int8_ops_per_s: threads * 16.0 * 8.0 * dots,
            f32_flops_per_s: threads * 16.0 * 2.0 * fmas,
        })
    }

    /// Bytes a second at which weights can arrive at best.
    pub fn bytes_per_s(&self) -> f64 {
        self.copy_bytes_per_s.max(self.read_bytes_per_s)
    }

    /// The time below which the device cannot do `work`.
    pub fn floor_seconds(&self, work: &Work) -> f64 {
        let rate = if work.int8 { self.int8_ops_per_s } else { self.f32_flops_per_s };
        (work.weight_bytes as f64 / self.bytes_per_s()).max(work.operations as f64 / rate)
    }
}

/// The buffers and pipelines of a measurement.
struct Meter<'a> {
    gpu: &'a Gpu,
    device: &'a wgpu::Device,
    queue: &'a wgpu::Queue,
    bytes: usize,
    rounds: wgpu::Buffer,
    from: wgpu::Buffer,
    to: wgpu::Buffer,
    module: wgpu::ShaderModule,
    layout: wgpu::PipelineLayout,
    group: wgpu::BindGroup,
}

impl<'a> Meter<'a> {
    fn new(gpu: &'a Gpu) -> Result<Meter<'a>, DeviceError> {
        let (device, queue) = gpu.handles();
        let wanted = if gpu.is_software() { SOFTWARE_BYTES } else { CARD_BYTES };
        let limits = super::Backend::limits(gpu);
        // A whole number of rounds of four vectors for every thread.
        let unit = WORKGROUPS as usize * 64 * 64;
        let bytes = (wanted.min(limits.binding_bytes).min(limits.buffer_bytes) / unit).max(1) * unit;
        let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
        let rounds = gpu.own_buffer("roofline", 16, storage)?;
        let from = gpu.own_buffer("roofline", bytes, storage)?;
        let to = gpu.own_buffer("roofline", bytes, storage)?;
        let buffers = [(&rounds, true), (&from, true), (&to, false)];
        let entries: Vec<_> = (0..).zip(buffers).map(|(binding, (_, read_only))| entry(binding, read_only)).collect();
        let layout =
            device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: None, entries: &entries });
        let entries: Vec<_> = (0..)
            .zip(buffers)
            .map(|(binding, (buffer, _))| wgpu::BindGroupEntry { binding, resource: buffer.as_entire_binding() })
            .collect();
        let group =
            device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout: &layout, entries: &entries });
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: None,
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let desc = wgpu::ShaderModuleDescriptor {
            label: Some("roofline"),
            source: wgpu::ShaderSource::Wgsl(include_str!("roofline.wgsl").into()),
        };
        // SAFETY: every index in the three kernels is below the sizes chosen above, and every loop ends.
        let module = unsafe { device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked()) };
        Ok(Meter { gpu, device, queue, bytes, rounds, from, to, module, layout, group })
    }

    /// Rounds in which all threads together read the whole buffer.
    fn rounds_of_a_read(&self) -> u32 {
        (self.bytes / (WORKGROUPS as usize * 64 * 16)) as u32
    }

    /// Rounds a second of `work`, which submits so many of them and has them timed: more and more rounds until they
    /// take long enough, then the fastest of some.
    fn best(&self, mut rounds: u32, work: impl Fn(u32) -> wgpu::CommandBuffer) -> Result<f64, DeviceError> {
        let time = |rounds| -> Result<Duration, DeviceError> {
            let commands = work(rounds);
            let started = Instant::now();
            let index = self.queue.submit([commands]);
            self.gpu.finish(index)?;
            Ok(started.elapsed())
        };
        // The first touches memory and compiles; it is not counted.
        time(rounds)?;
        let mut took = time(rounds)?;
        while took < LONG_ENOUGH && rounds < ROUNDS_MAX {
            rounds *= 2;
            took = time(rounds)?;
        }
        for _ in 1..REPETITIONS {
            took = took.min(time(rounds)?);
        }
        Ok(f64::from(rounds) / took.as_secs_f64())
    }

    fn copies(&self, count: u32) -> wgpu::CommandBuffer {
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for _ in 0..count {
            encoder.copy_buffer_to_buffer(&self.from, 0, &self.to, 0, self.bytes as u64);
        }
        encoder.finish()
    }

    fn pipeline(&self, kernel: &str) -> Result<wgpu::ComputePipeline, DeviceError> {
        let desc = wgpu::ComputePipelineDescriptor {
            label: Some(kernel),
            layout: Some(&self.layout),
            module: &self.module,
            entry_point: Some(kernel),
            compilation_options: wgpu::PipelineCompilationOptions::default(),
            cache: None,
        };
        self.gpu.own_pipeline(kernel, &desc)
    }

    /// `count` dispatches of a kernel of `roofline.wgsl`, `rounds` rounds a thread each.
    fn dispatches(&self, pipeline: &wgpu::ComputePipeline, rounds: u32, count: u32) -> wgpu::CommandBuffer {
        self.queue.write_buffer(&self.rounds, 0, &rounds.to_le_bytes());
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, &self.group, &[]);
            (0..count).for_each(|_| pass.dispatch_workgroups(WORKGROUPS, 1, 1));
        }
        encoder.finish()
    }
}

fn entry(binding: u32, read_only: bool) -> wgpu::BindGroupLayoutEntry {
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty: wgpu::BufferBindingType::Storage { read_only },
            has_dynamic_offset: false,
            min_binding_size: None,
        },
        count: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcer_of_bytes_and_operations_is_the_floor() {
        let roofline =
            Roofline { copy_bytes_per_s: 1e9, read_bytes_per_s: 2e9, int8_ops_per_s: 8e9, f32_flops_per_s: 4e9 };
        let floor = |weight_bytes, operations, int8| roofline.floor_seconds(&Work { weight_bytes, operations, int8 });
        assert_eq!(floor(2_000_000_000, 1, true), 1.0);
        assert_eq!(floor(1, 8_000_000_000, true), 1.0);
        assert_eq!(floor(1, 8_000_000_000, false), 2.0);
        assert_eq!(floor(0, 0, false), 0.0);
    }
}
