//! Every adapter of this machine.

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;

use anyhow::Result;
use pp_engine::backend::gpu::Gpu;
use pp_engine::backend::gpu::adapter::{Adapter, AdapterError};
use pp_engine::backend::selftest;
use pp_engine::trace::Timestamps;
use pp_engine::worker::panic_message;
use serde::Serialize;

use crate::args::DevicesArgs;
use crate::output::{Out, Report, bytes};
use crate::plan;

/// Features that the kernels or their clocks make use of.
const FEATURES: [&str; 4] = ["IMMEDIATES", "SHADER_INT64", "TIMESTAMP_QUERY", "TIMESTAMP_QUERY_INSIDE_PASSES"];
/// The one feature that nothing works without.
pub(super) const NEEDED: &str = "IMMEDIATES";

/// Lists them.
pub fn run(args: &DevicesArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let all = Adapter::all();
    let default = Adapter::choose(&all, &[], all.len()).map(|chosen| chosen.iter().map(Adapter::index).collect());
    let default: Vec<usize> = match default {
        Ok(default) => default,
        Err(error @ AdapterError::None) => return Err(error.into()),
        Err(_) => Vec::new(),
    };
    let hardware = all.iter().any(|adapter| !adapter.is_software());
    let row = |adapter: &Adapter| Row::new(adapter, default.contains(&adapter.index()), hardware, !args.no_selftest);
    out.result(&DevicesReport { devices: all.iter().map(row).collect() })?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct DevicesReport {
    devices: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    index: usize,
    /// What `--device` takes and what stays the same when another adapter is added.
    id: String,
    pci_id: Option<String>,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    driver: String,
    driver_info: String,
    /// Of the largest memory on the device, where the driver tells.
    memory_bytes: Option<u64>,
    limits: Limits,
    features: Vec<String>,
    subgroup_sizes: (u32, u32),
    profile: &'static str,
    /// Whose clock says in a trace when the device began and was done: its own or the host's.
    timestamps: Timestamps,
    selftest: Option<SelfTest>,
    used_by_default: bool,
    why: String,
}

#[derive(Debug, Serialize)]
struct Limits {
    binding_bytes: u64,
    buffer_bytes: u64,
    workgroup_memory_bytes: u32,
    workgroup_invocations: u32,
}

/// What came of the self-test.
#[derive(Debug, Serialize)]
pub(super) struct SelfTest {
    ok: bool,
    /// Dispatches compared with the twins.
    pub(super) checked: usize,
    seconds: Option<f64>,
    /// Why it failed, if it did.
    pub(super) error: Option<String>,
}

impl Row {
    fn new(adapter: &Adapter, default: bool, hardware: bool, test: bool) -> Row {
        let info = adapter.info();
        let limits = adapter.raw().limits();
        let has: Vec<&str> = adapter.raw().features().iter_names().map(|(name, _)| name).collect();
        let features: Vec<String> =
            FEATURES.iter().filter(|name| has.contains(name)).map(|name| (*name).to_owned()).collect();
        let usable = features.iter().any(|feature| feature == NEEDED);
        let selftest = (test && usable).then(|| SelfTest::of(adapter));
        Row {
            index: adapter.index(),
            id: adapter.id().to_owned(),
            pci_id: Some(adapter.pci_id().to_owned()).filter(|id| !id.is_empty()),
            name: adapter.name().to_owned(),
            kind: kind(&format!("{:?}", info.device_type)),
            driver: info.driver.clone(),
            driver_info: info.driver_info.clone(),
            memory_bytes: adapter.memory_bytes(),
            limits: Limits {
                binding_bytes: limits.max_storage_buffer_binding_size,
                buffer_bytes: limits.max_buffer_size,
                workgroup_memory_bytes: limits.max_compute_workgroup_storage_size,
                workgroup_invocations: limits.max_compute_invocations_per_workgroup,
            },
            why: why(adapter, &features, selftest.as_ref(), default, hardware),
            features,
            subgroup_sizes: (info.subgroup_min_size, info.subgroup_max_size),
            profile: adapter.profile().name,
            timestamps: adapter.timestamps(),
            selftest,
            used_by_default: default,
        }
    }
}

fn kind(device_type: &str) -> &'static str {
    match device_type {
        "DiscreteGpu" => "discrete",
        "IntegratedGpu" => "integrated",
        "VirtualGpu" => "virtual",
        "Cpu" => "software",
        _ => "other",
    }
}

fn why(adapter: &Adapter, features: &[String], selftest: Option<&SelfTest>, default: bool, hardware: bool) -> String {
    if !features.iter().any(|feature| feature == NEEDED) {
        return format!("not usable: its driver lacks {NEEDED}; a newer driver may have it");
    }
    if selftest.is_some_and(|test| !test.ok) {
        return "not to be trusted: its driver computes kernels wrongly; try another driver version".to_owned();
    }
    let name = format!("--device {}", adapter.id());
    match (default, adapter.is_software(), hardware) {
        (true, false, _) => "used by default: it is a hardware adapter".to_owned(),
        (true, true, _) => "used by default: there is no hardware adapter".to_owned(),
        (false, true, true) => format!("used only when named ({name}): it is software, and there is hardware"),
        (false, ..) => format!("used only when named ({name}): another software adapter is preferred"),
    }
}

impl SelfTest {
    /// Runs every kernel on the adapter, as a stage would, and compares it with its twin.
    pub(super) fn of(adapter: &Adapter) -> SelfTest {
        let failed = |error: String| SelfTest { ok: false, checked: 0, seconds: None, error: Some(error) };
        let mut gpu = match Gpu::open(adapter, adapter.profile(), plan::checked()) {
            Ok(gpu) => gpu,
            Err(error) => return failed(error.to_string()),
        };
        // A driver that makes wgpu panic has failed the test; the other adapters are still to be told of.
        match std::panic::catch_unwind(AssertUnwindSafe(|| selftest::run(&mut gpu))) {
            Ok(Ok(done)) => SelfTest { ok: true, checked: done.checked, seconds: Some(done.seconds), error: None },
            Ok(Err(error)) => failed(error.to_string()),
            Err(panic) => failed(panic_message(panic.as_ref())),
        }
    }

    fn text(&self) -> String {
        match (&self.error, self.seconds) {
            (Some(error), _) => format!("FAILED: {error}"),
            (None, seconds) => {
                format!("passed: {} dispatches as their twins ({:.1} s)", self.checked, seconds.unwrap_or(0.0))
            }
        }
    }
}

impl Report for DevicesReport {
    fn text(&self) -> String {
        self.devices.iter().map(Row::text).collect::<Vec<_>>().join("\n\n")
    }
}

impl Row {
    fn text(&self) -> String {
        let limits = &self.limits;
        let [min, max] = [self.subgroup_sizes.0, self.subgroup_sizes.1];
        let subgroup =
            if min == max { format!(" (subgroups of {min})") } else { format!(" (subgroups of {min}-{max})") };
        let selftest = self.selftest.as_ref().map_or("not done".to_owned(), SelfTest::text);
        let pci = self.pci_id.as_ref().map_or(String::new(), |id| format!("  PCI {id}"));
        let lines = [
            format!("{}  {}", self.index, self.name),
            format!("   id         {}", self.id),
            format!("   type       {}{pci}", self.kind),
            format!("   driver     {} {}", self.driver, self.driver_info),
            format!("   memory     {}", self.memory_bytes.map_or("unknown".to_owned(), bytes)),
            format!(
                "   limits     {} a binding, {} a buffer, {} workgroup memory, {} invocations a workgroup",
                bytes(limits.binding_bytes),
                bytes(limits.buffer_bytes),
                bytes(limits.workgroup_memory_bytes.into()),
                limits.workgroup_invocations
            ),
            format!("   features   {}{subgroup}", self.features.join(", ")),
            format!("   profile    {}", self.profile),
            format!("   timestamps {}", self.timestamps.name()),
            format!("   self-test  {selftest}"),
            format!("   {}", self.why),
        ];
        lines.join("\n")
    }
}
