// micro FILE.wgsl ROWS K WGX [reps]: bindings 0 quants(storage) 1 scales(storage) 3 x (storage|uniform) 4 xs 6 y
use std::time::Instant;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let src = std::fs::read_to_string(&a[1]).unwrap();
    let rows: u32 = a[2].parse().unwrap();
    let k: u32 = a[3].parse().unwrap();
    let wgx: u32 = a[4].parse().unwrap();
    let wgy: u32 = a.get(5).map(|v| v.parse().unwrap()).unwrap_or(1);
    let tokens: u32 = a.get(6).map(|v| v.parse().unwrap()).unwrap_or(1);
    let mut desc = wgpu::InstanceDescriptor::new_without_display_handle();
    desc.backends = wgpu::Backends::VULKAN;
    desc.flags = wgpu::InstanceFlags::empty();
    let inst = wgpu::Instance::new(desc);
    let ad = pollster::block_on(inst.enumerate_adapters(wgpu::Backends::VULKAN))
        .into_iter()
        .find(|a| a.get_info().name.contains("llvmpipe"))
        .unwrap();
    let want = wgpu::Features::IMMEDIATES
        | wgpu::Features::SHADER_INT64
        | wgpu::Features::SUBGROUP
        | wgpu::Features::TIMESTAMP_QUERY;
    let (dev, q) = pollster::block_on(ad.request_device(&wgpu::DeviceDescriptor {
        required_features: ad.features() & want,
        required_limits: ad.limits(),
        ..Default::default()
    }))
    .unwrap();
    let uniform_x = src.contains("var<uniform> x");
    let module = unsafe {
        dev.create_shader_module_trusted(
            wgpu::ShaderModuleDescriptor { label: None, source: wgpu::ShaderSource::Wgsl(src.clone().into()) },
            wgpu::ShaderRuntimeChecks::unchecked(),
        )
    };
    let bind = |b: u32, ty| wgpu::BindGroupLayoutEntry {
        binding: b,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
        count: None,
    };
    let ro = wgpu::BufferBindingType::Storage { read_only: true };
    let rw = wgpu::BufferBindingType::Storage { read_only: false };
    let un = wgpu::BufferBindingType::Uniform;
    let bgl = dev.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
        label: None,
        entries: &[
            bind(0, ro),
            bind(1, ro),
            bind(3, if uniform_x { un } else { ro }),
            bind(4, if src.contains("var<uniform> x_scales") { un } else { ro }),
            bind(6, rw),
        ],
    });
    let pl = dev.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
        label: None,
        bind_group_layouts: &[Some(&bgl)],
        immediate_size: 64,
    });
    let t = Instant::now();
    let pipe = dev.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: Some(&pl),
        module: &module,
        entry_point: Some("main"),
        compilation_options: wgpu::PipelineCompilationOptions {
            constants: &[],
            zero_initialize_workgroup_memory: false,
        },
        cache: None,
    });
    let compile = t.elapsed().as_secs_f64();
    let buf = |n: u64| {
        dev.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: n,
            usage: wgpu::BufferUsages::STORAGE
                | wgpu::BufferUsages::UNIFORM
                | wgpu::BufferUsages::COPY_DST
                | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        })
    };
    let bits = if src.contains("Q8") { 8 } else { 4 };
    let (b0, b1, b3, b4, b6) = (
        buf((rows * k) as u64 * bits / 8),
        buf((rows * k / 32 * 4) as u64),
        buf(if uniform_x { 65536.min((k * 4 * tokens.max(32)) as u64) } else { (k * 4 * tokens.max(32)) as u64 }),
        buf((k / 32 * 8 * tokens.max(32)) as u64),
        buf((rows * 4 * tokens.max(8)) as u64),
    );
    let bg = dev.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &bgl,
        entries: &[(0, &b0), (1, &b1), (3, &b3), (4, &b4), (6, &b6)]
            .map(|(n, b)| wgpu::BindGroupEntry { binding: n, resource: b.as_entire_binding() }),
    });
    let per = if tokens > 1 { 2 } else { 30 };
    let mut best = f64::MAX;
    let mut cpu = f64::MAX;
    fn ut() -> f64 {
        let t = std::fs::read_to_string("/proc/self/schedstat").unwrap();
        let _ = t;
        let mut tot = 0.0;
        for e in std::fs::read_dir("/proc/self/task").unwrap() {
            if let Ok(t) = std::fs::read_to_string(e.unwrap().path().join("schedstat")) {
                tot += t.split(' ').next().unwrap().parse::<f64>().unwrap();
            }
        }
        tot / 1e9
    }
    for _ in 0..12 {
        let mut e = dev.create_command_encoder(&Default::default());
        {
            let mut p = e.begin_compute_pass(&Default::default());
            p.set_pipeline(&pipe);
            p.set_bind_group(0, &bg, &[]);
            let im: [u32; 16] = [tokens, k / 32, rows, rows, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            p.set_immediates(0, bytemuck::cast_slice(&im));
            for _ in 0..per {
                p.dispatch_workgroups(wgx, wgy, 1);
            }
        }
        let u0 = ut();
        let t = Instant::now();
        let i = q.submit([e.finish()]);
        dev.poll(wgpu::PollType::Wait { submission_index: Some(i), timeout: None }).unwrap();
        best = best.min(t.elapsed().as_secs_f64() / per as f64);
        cpu = cpu.min((ut() - u0) / per as f64);
    }
    println!(
        "{:<28} {rows}x{k} t{tokens}: {:8.1} us  {:6.2} GOP/s  cpu {:8.1} us  {:6.2}/core (compile {:.0} ms)",
        a[1].rsplit('/').next().unwrap(),
        best * 1e6,
        2.0 * rows as f64 * k as f64 * tokens as f64 / best / 1e9,
        cpu * 1e6,
        2.0 * rows as f64 * k as f64 * tokens as f64 / cpu / 1e9,
        compile * 1e3
    );
}
