//! What devices and links take, as the planner wants it: measured here and by workers, once for each device and shape.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use pp_engine::calibrate::{CalibrateError, Calibration, Calibrations, Shape, in_process_hop, machine};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::cluster::remote::Worker;
use pp_engine::law::HopCost;
use pp_engine::layout::{LayoutError, StageLayout, StageOptions, StageSpec};
use pp_engine::pipeline::Device;
use pp_engine::planner::{self, Compute, Load, Memory, Objective, PlanError, Prediction, Problem, Stage, Wish};
use pp_engine::{PAGE, Profile, Wire};

use crate::args::{OptimizeArg, PipelineArgs};
use crate::memory::Pool;
use crate::models::Places;
use crate::output::progress::Steps;
use crate::output::{Out, bytes, count};
use crate::plan::{Basis, Plan};
use crate::{cancel, errors, report};

/// Prompt and answer that splits are made for where nobody says what will come.
pub const PROMPT: usize = 128;
/// Tokens of that answer.
pub const ANSWER: usize = 64;
/// Positions a sequence that a split should have room for, where no context was asked for.
const CONTEXT_WANTED: usize = 4096;
/// Positions that it must have room for.
const CONTEXT_LEAST: usize = 512;
/// Seconds of the head for each micro-batch: it reads the candidates, draws, and makes the next one.
pub const SAMPLING: f64 = 1.5e-4;
/// How long the first round trips to a worker may take to come.
const ROUND_TRIP: Duration = Duration::from_secs(1);
/// Blocks of a MiB that measure a worker's line.
const BLOCKS: usize = 2;

/// Where calibrations are kept.
pub fn file() -> Option<PathBuf> {
    Places::from_env().calibrations
}

/// What there is to plan with on `devices`: all of them are measured, if they were not before.
///
/// # Errors
/// When the user gave up, and when a device is not measured: why.
pub fn problem(
    checkpoint: &Checkpoint,
    devices: &[Device],
    pools: &[Pool],
    options: &StageOptions,
    out: &Out,
) -> Result<Problem> {
    let (shape, kinds) = Shape::of(checkpoint, options.activations, options.kv);
    let found = calibrations(devices, &shape, out)?;
    let mut processes = vec![String::new()];
    let mut groups: Vec<String> = Vec::new();
    let mut planned = Vec::new();
    for (index, (device, calibration)) in devices.iter().zip(found).enumerate() {
        let worker = device.worker().unwrap_or_default();
        let compute = Compute { group: index_of(&mut groups, compute_of(device)), share: calibration.share };
        planned.push(planner::Device {
            name: report::place(device),
            place: index_of(&mut processes, worker),
            layers: calibration.layers(&kinds),
            fixed: calibration.fixed,
            first: calibration.first,
            last: calibration.last,
            memory: memory(checkpoint, options, device)?,
            pool: pools.iter().position(|pool| pool.stages.contains(&index)).unwrap_or(0),
            compute: Some(compute),
        });
    }
    let hops = hops(devices, &processes, options.wire, checkpoint.config.hidden)?;
    let pools = pools.iter().map(|pool| pool.available).collect();
    Ok(Problem { devices: planned, pools, hops, sampling: SAMPLING })
}

/// The place of an item, which is added where it is not there.
fn index_of(known: &mut Vec<String>, item: String) -> usize {
    known.iter().position(|known| *known == item).unwrap_or_else(|| {
        known.push(item);
        known.len() - 1
    })
}

/// What tells the machine that a device is in from others.
fn machine_of(device: &Device) -> String {
    let unknown = |worker: &str| format!("worker {worker}");
    match device {
        Device::Remote(remote) => {
            let machine = &remote.worker().welcome().machine;
            if machine.is_empty() { unknown(remote.worker().name()) } else { machine.clone() }
        }
        _ => machine(),
    }
}

/// What computes: software devices share a machine's processor, stages on one card the card.
fn compute_of(device: &Device) -> String {
    let what = if device.is_software() { "processor".to_owned() } else { device.id() };
    format!("{} {what}", machine_of(device))
}

/// What each device takes. The devices of one machine are measured one after the other, machines side by side.
fn calibrations(devices: &[Device], shape: &Shape, out: &Out) -> Result<Vec<Calibration>> {
    let mut machines: BTreeMap<String, Vec<&Device>> = BTreeMap::new();
    for device in devices {
        let its = machines.entry(machine_of(device)).or_default();
        if its.iter().all(|other| key(other) != key(device)) {
            its.push(device);
        }
    }
    let measured = std::thread::scope(|scope| {
        let measure = |devices: Vec<&Device>| -> Result<Vec<(String, Calibration)>> {
            devices.into_iter().map(|device| Ok((key(device), calibration(device, shape, out)?))).collect()
        };
        let threads: Vec<_> = machines.into_values().map(|its| scope.spawn(move || measure(its))).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a measurement panicked"))?).collect()
    });
    let measured: Vec<Vec<(String, Calibration)>> = join(measured)?;
    let find = |device: &Device| {
        let found = measured.iter().flatten().find(|(of, _)| *of == key(device));
        found.map(|(_, calibration)| calibration.clone()).context("every device was measured")
    };
    devices.iter().map(find).collect()
}

/// All results, or the first error.
fn join<T>(results: Vec<Result<T>>) -> Result<Vec<T>> {
    results.into_iter().collect()
}

fn key(device: &Device) -> String {
    format!("{}:{}", device.worker().unwrap_or_default(), device.id())
}

fn calibration(device: &Device, shape: &Shape, out: &Out) -> Result<Calibration> {
    let mut kept = Calibrations::new(file());
    if let Device::Remote(remote) = device {
        let name = remote.worker().name();
        return match remote.worker().calibrate(&device.id(), shape, cancel::flag()) {
            Ok(found) => {
                kept.keep(name, device, shape, found.clone());
                Ok(found)
            }
            Err(_) if cancel::flag().load(Ordering::Relaxed) => Err(errors::cancelled()),
            Err(error) => kept.said(name, device, shape).ok_or_else(|| error.into()),
        };
    }
    if kept.known(device, shape).is_none() {
        out.note(&format!("measuring {}: once for models of this shape, some seconds", device.name()));
    }
    let mut steps = Steps::new(out, "measuring", "stages");
    let mut progress = |done, total| steps.update(done, total);
    kept.measure(device, shape, &mut progress, cancel::flag()).map_err(|error| match error {
        CalibrateError::Cancelled => errors::cancelled(),
        error => error.into(),
    })
}

/// From process to process: lines to workers as they are measured now, between workers the worse of both.
fn hops(devices: &[Device], processes: &[String], wire: Wire, hidden: usize) -> Result<Vec<Vec<HopCost>>> {
    let near = HopCost { latency: in_process_hop().as_secs_f64(), seconds_per_token: 0.0 };
    let mut lines = vec![near];
    for process in &processes[1..] {
        let of = |device: &Device| match device {
            Device::Remote(remote) if remote.worker().name() == process => Some(remote.worker().clone()),
            _ => None,
        };
        let worker = devices.iter().find_map(of).context("every process has a device")?;
        lines.push(line(&worker, wire, hidden)?);
    }
    let hop = |from: usize, to: usize| match (from, to) {
        _ if from == to => near,
        (0, other) | (other, 0) => lines[other],
        _ => HopCost {
            latency: lines[from].latency.max(lines[to].latency),
            seconds_per_token: lines[from].seconds_per_token.max(lines[to].seconds_per_token),
        },
    };
    let all = 0..processes.len();
    Ok(all.clone().map(|from| all.clone().map(|to| hop(from, to)).collect()).collect())
}

/// The line to a worker, one way.
fn line(worker: &Arc<Worker>, wire: Wire, hidden: usize) -> Result<HopCost> {
    let until = Instant::now() + ROUND_TRIP;
    while worker.round_trip().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let rate = (0..BLOCKS).map(|_| worker.bandwidth(1)).collect::<Result<Vec<_>, _>>()?;
    let rate = rate.into_iter().fold(0.0, f64::max);
    let round_trip = worker.round_trip().context("a worker answers no ping")?;
    Ok(HopCost {
        latency: round_trip.as_secs_f64() / 2.0,
        seconds_per_token: wire.bytes(1, hidden) as f64 / rate.max(1.0),
    })
}

/// Bytes of the parts of a model on a device.
fn memory(checkpoint: &Checkpoint, options: &StageOptions, device: &Device) -> Result<Memory, LayoutError> {
    parts(checkpoint, options, device.profile(), device.limits())
}

/// The same on a device of that profile and those limits.
///
/// # Errors
/// [`LayoutError`]
pub fn parts(
    checkpoint: &Checkpoint,
    options: &StageOptions,
    profile: &Profile,
    limits: pp_engine::backend::DeviceLimits,
) -> Result<Memory, LayoutError> {
    let context = options.context.min(CONTEXT_WANTED);
    let options = StageOptions { context, kv_tokens: context, ..*options };
    let layers = checkpoint.config.layers;
    let at = |index: usize, stages: usize, layers: std::ops::Range<usize>| {
        StageLayout::new(checkpoint, StageSpec { index, stages, layers }, options, profile, limits)
    };
    let middle = (0..layers).map(|layer| at(1, 3, layer..layer + 1)).collect::<Result<Vec<_>, _>>()?;
    let beside = |index, stages, layer: usize| -> Result<u64, LayoutError> {
        let stage = at(index, stages, layer..layer + 1)?;
        let all = stage.weight_bytes() + stage.work_bytes();
        Ok(all.saturating_sub(middle[layer].weight_bytes() + middle[layer].work_bytes()))
    };
    let kv_per_token = middle[0].kv_bytes_per_token();
    // Every layer has a page of the known token's.
    let page = kv_per_token * PAGE as u64;
    Ok(Memory {
        first: beside(0, 2, 0)?,
        last: beside(1, 2, layers - 1)?,
        both: beside(0, 1, 0)?,
        work: middle.iter().map(StageLayout::work_bytes).max().unwrap_or(0),
        layers: middle.iter().map(|layout| layout.weight_bytes() + page).collect(),
        kv_per_token,
    })
}

/// What is wanted of a split.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Exactly so many.
    pub stages: Option<usize>,
    /// Devices stay where they were typed.
    pub ordered: bool,
    /// Positions that were asked for.
    pub context: Option<usize>,
    /// Size of the KV cache that was asked for.
    pub kv_tokens: Option<usize>,
    /// Sequences at once.
    pub sequences: usize,
    /// The model's positions.
    pub context_max: usize,
    /// Tokens of the largest micro-batch.
    pub chunk: usize,
    /// Tokens of prompts that kernels compute at once.
    pub tile: usize,
}

impl Wanted {
    /// The wish that the planner is asked for. Room for a context that nobody asked for is as much as any split has, up
    /// to 4096 positions a sequence.
    pub fn wish(&self, args: &PipelineArgs, problem: &Problem) -> Wish {
        let (concurrency, chunk, tile) = (self.sequences, self.chunk, self.tile);
        let load = Load { concurrency, prompt: PROMPT, answer: ANSWER, chunk, tile };
        let wish = Wish {
            objective: objective(args.optimize.unwrap_or_default()),
            load,
            kv_tokens: 0,
            stages: self.stages,
            use_all: args.use_all,
            ordered: self.ordered,
        };
        let asked = self.kv_tokens.or(self.context.map(|context| context * self.sequences));
        let kv_tokens = asked.map_or_else(
            || {
                let wanted = self.context_max.min(CONTEXT_WANTED) * self.sequences;
                let least = self.context_max.min(CONTEXT_LEAST);
                planner::most_tokens(problem, &wish).clamp(least as u64, wanted.max(least) as u64)
            },
            |asked| asked as u64,
        );
        Wish { kv_tokens, ..wish }
    }
}

/// As the planner calls it.
pub fn objective(typed: OptimizeArg) -> Objective {
    match typed {
        OptimizeArg::Throughput => Objective::Throughput,
        OptimizeArg::Latency => Objective::Latency,
        OptimizeArg::Context => Objective::Context,
    }
}

/// No split, for people.
pub fn refused(error: &PlanError) -> anyhow::Error {
    match error {
        PlanError::DoesNotFit { kv_tokens, needed, each, available, layer, roomiest } => {
            let [needed, available] = [*needed, *available].map(|sum| bytes(u64::try_from(sum).unwrap_or(u64::MAX)));
            errors::device(format!(
                "no split fits the memory: with keys and values of {} tokens the model takes {needed} on one device and {} \
                 more on each further one; there are {available} in all. The largest layer takes {}, the roomiest device \
                 gives {}\nwhat would fit: more devices, a shorter context (--ctx, --kv-tokens), or a file of fewer bits",
                count(*kv_tokens),
                bytes(*each),
                bytes(*layer),
                bytes(*roomiest)
            ))
        }
        PlanError::NoDevice => errors::device(error.to_string()),
        PlanError::TooMany { .. } => errors::usage(error.to_string()),
    }
}

/// Layers of each stage.
pub fn counts(stages: &[Stage]) -> Vec<usize> {
    stages.iter().map(|stage| stage.layers.len()).collect()
}

/// A split, and what it should reach.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// What there was to plan with: devices that were left out too.
    pub problem: Problem,
    /// The split.
    pub stages: Vec<Stage>,
    /// What it is for.
    pub wish: Wish,
}

impl Forecast {
    /// Of a pipeline, whatever its split goes by. Measures what was not measured before.
    ///
    /// # Errors
    /// When the user gave up, and when a device is not measured: why.
    pub fn of(plan: &Plan, out: &Out) -> Result<Forecast> {
        if let Basis::Measured(forecast) = &plan.basis {
            return Ok(Forecast::clone(forecast));
        }
        let problem = problem(&plan.checkpoint, &plan.devices, &plan.pools, &plan.options, out)?;
        let stages = plan.specs.iter().map(|spec| Stage { device: spec.index, layers: spec.layers.clone() });
        let (concurrency, chunk) = (plan.options.sequences, plan.options.chunk);
        let tile = Device::tile(&plan.devices, plan.options.activations);
        let load = Load { concurrency, prompt: PROMPT, answer: ANSWER, chunk, tile };
        let wish = Wish {
            objective: Objective::Throughput,
            load,
            kv_tokens: plan.options.context.min(CONTEXT_LEAST) as u64,
            stages: None,
            use_all: false,
            ordered: false,
        };
        Ok(Forecast { stages: stages.collect(), problem, wish })
    }

    /// As [`Forecast::of`], where it is wanted and possible; says why not.
    ///
    /// # Errors
    /// When the user gave up.
    pub fn wanted(plan: &Plan, args: &PipelineArgs, out: &Out) -> Result<Option<Forecast>> {
        if args.no_measure {
            return Ok(None);
        }
        match Forecast::of(plan, out) {
            Ok(forecast) => Ok(Some(forecast)),
            Err(_) if cancel::flag().load(Ordering::Relaxed) => Err(errors::cancelled()),
            Err(error) => {
                out.note(&format!("nothing is predicted: {error:#}"));
                Ok(None)
            }
        }
    }

    /// What it should reach with so many requests at once of that kind.
    pub fn predict(&self, concurrency: usize, prompt: usize, answer: usize) -> Prediction {
        let load = Load { concurrency, prompt, answer, ..self.wish.load };
        planner::expected(&self.problem, &self.stages, &load)
    }

    /// Names of the devices that were left out.
    pub fn left_out(&self) -> Vec<&str> {
        let is_used = |device: &usize| self.stages.iter().any(|stage| stage.device == *device);
        let all = 0..self.problem.devices.len();
        all.filter(|device| !is_used(device)).map(|device| self.problem.devices[device].name.as_str()).collect()
    }

    /// What the split went by.
    pub fn basis_text(&self) -> String {
        let what = match self.wish.objective {
            Objective::Throughput if self.wish.load.concurrency == 1 => "one request".to_owned(),
            Objective::Throughput => format!("{} requests at once", self.wish.load.concurrency),
            Objective::Latency => "the time of one request".to_owned(),
            Objective::Context => "the largest KV cache".to_owned(),
        };
        let left_out = self.left_out();
        let rest = if left_out.is_empty() {
            String::new()
        } else {
            format!("; left out, as it would slow the rest down: {} (--use-all keeps it)", left_out.join(", "))
        };
        format!("by measured times, for {what}{rest}")
    }
}
