//! Steps of one stage that holds a whole model, on the adapter that is used by default: a decoded token, and a prefill
//! micro-batch. The model is a small one of tests/data, or the file that PP_BENCH_MODEL names.

use std::path::{Path, PathBuf};
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use pp_engine::backend::gpu::adapter::Adapter;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::message::{OutputRequest, Span, Step};
use pp_engine::pipeline::Device;
use pp_engine::stage::Stage;
use pp_engine::{Act, KvType, Wire};

/// Tokens of the prefill micro-batch, and the position of the decoded token.
const TOKENS: u32 = 64;
const CONTEXT: usize = 128;

fn model() -> PathBuf {
    let small = || Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-gguf/llama-q4_0.gguf");
    std::env::var_os("PP_BENCH_MODEL").map_or_else(small, PathBuf::from)
}

fn open() -> Stage {
    let path = model();
    let checkpoint = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let adapter = Adapter::choose(&Adapter::all(), &[], 1).expect("a Vulkan adapter").remove(0);
    let device = Device::Gpu { profile: adapter.profile(), adapter, checked: false };
    let options = StageOptions {
        activations: Act::Q8,
        kv: KvType::F16,
        context: CONTEXT,
        sequences: 1,
        kv_tokens: CONTEXT,
        chunk: TOKENS as usize,
        wire: Wire::F32,
    };
    let spec = StageSpec::pipeline(&[checkpoint.config.layers]).remove(0);
    let layout = StageLayout::new(&checkpoint, spec, options, device.profile(), device.limits()).expect("it fits");
    let backend = device.open().expect("the device opens");
    Stage::open(&checkpoint, layout, backend, &mut |_| true).expect("the stage opens")
}

fn step(start: u32, count: u32, new_pages: Vec<u32>) -> Step {
    let output = OutputRequest {
        row: count - 1,
        target: 0,
        top_k: 1,
        inverse_temperature: 1.0,
        whole_row: false,
        edits: Vec::new(),
    };
    Step {
        spans: vec![Span { request: 0, sequence: 1, start, count, new_pages }],
        ids: (start..start + count).map(|i| i * 7 % 97).collect(),
        outputs: vec![output],
        ..Step::default()
    }
}

fn steps(c: &mut Criterion) {
    let mut stage = open();
    let pages = 0..stage.message_limits().pages as u32;
    stage.step(&step(0, TOKENS, pages.collect()), &[]).expect("the stage works");
    let mut group = c.benchmark_group("stage");
    group.measurement_time(Duration::from_secs(10)).sample_size(20);
    for (name, start, count) in [("decode", TOKENS, 1), ("prefill", 0, TOKENS)] {
        // The same step again and again: it writes the same keys and values.
        let step = step(start, count, Vec::new());
        group.throughput(Throughput::Elements(count.into()));
        group.bench_function(name, |b| b.iter(|| stage.step(&step, &[]).expect("the stage works")));
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
