//! What several tests need: the adapters of this machine, pipelines, and the recorded data.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pp_engine::Wire;
use pp_engine::backend::gpu::adapter::Adapter;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Head, HeadOptions};
use pp_engine::layout::{StageOptions, StageSpec};
use pp_engine::pipeline::{Device, Pipeline};
use pp_engine::tokenizer::Tokenizer;
use pp_shaders::{Act, KvType, Profile};

/// A file of tests/data.
pub fn data(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}

/// A JSON file of tests/data.
pub fn json(path: &str) -> serde_json::Value {
    let path = data(path);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The adapter that tests run on: a hardware one, else Mesa's software driver, else another; none is a failure.
pub fn adapter() -> Adapter {
    let all = Adapter::all();
    Adapter::choose(&all, &[], 1)
        .expect("tests need a Vulkan adapter; scripts/test.sh installs a software one")
        .remove(0)
}

/// SwiftShader, where scripts/test.sh has put it.
pub fn swiftshader() -> Option<Adapter> {
    Adapter::all().into_iter().find(|adapter| adapter.name().contains("SwiftShader"))
}

/// The tests' adapter with a profile; kernels carry bounds checks.
pub fn gpu(profile: Profile) -> Device {
    Device::Gpu { adapter: adapter(), profile, checked: true }
}

/// The twins.
pub fn twins() -> Device {
    Device::Reference { profile: Profile::SOFTWARE }
}

/// Options for small models: the exact mode.
pub fn exact(context: usize) -> StageOptions {
    StageOptions {
        activations: Act::F32,
        kv: KvType::F32,
        context,
        sequences: 1,
        kv_tokens: context,
        chunk: 128,
        wire: Wire::F32,
    }
}

/// A head over a pipeline with so many layers a stage, all stages on `device`.
pub fn head(checkpoint: &Arc<Checkpoint>, split: &[usize], options: StageOptions, device: &Device) -> Head {
    head_with(checkpoint, split, options, device, HeadOptions::default())
}

/// As [`head`], with choices of the head's own.
pub fn head_with(
    checkpoint: &Arc<Checkpoint>,
    split: &[usize],
    options: StageOptions,
    device: &Device,
    head: HeadOptions,
) -> Head {
    let specs = StageSpec::pipeline(split);
    let devices = vec![device.clone(); specs.len()];
    let pipeline = Pipeline::open(checkpoint, &specs, options, &devices, &mut |_, _| {}, &AtomicBool::new(false));
    let pipeline = pipeline.unwrap_or_else(|e| panic!("{}: {e}", checkpoint.path.display()));
    Head::new(pipeline, tokenizer(checkpoint), head)
}

/// A checkpoint's tokenizer.
pub fn tokenizer(checkpoint: &Checkpoint) -> Arc<Tokenizer> {
    Arc::new(checkpoint.tokenizer().unwrap_or_else(|e| panic!("{}: {e}", checkpoint.path.display())))
}

/// A checkpoint of tests/data.
pub fn checkpoint(path: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&data(path)).unwrap_or_else(|e| panic!("{path}: {e}")))
}

/// The numbers of a JSON array.
pub fn floats(value: &serde_json::Value) -> Vec<f64> {
    value.as_array().expect("an array").iter().map(|v| v.as_f64().expect("a number")).collect()
}

/// The ids of a JSON array.
pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().expect("an array").iter().map(|v| v.as_u64().expect("an id") as u32).collect()
}
