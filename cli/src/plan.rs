//! From a model and the typed options to a pipeline that fits: devices, layers, context and layouts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Result;
use pp_engine::backend::gpu::adapter::Adapter;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::cluster::control::Purpose;
use pp_engine::cluster::remote::{RemoteDevice, Worker};
use pp_engine::layout::{LayoutError, StageLayout, StageOptions, StageSpec};
use pp_engine::pipeline::Device;
use pp_engine::planner;
use pp_engine::split::{Costs, Split, auto_within};
use pp_engine::{PAGE, Profile};

use crate::args::{PipelineArgs, ProfileArg};
use pp_transport::identity::Name;

use crate::cluster::gather::Cluster;
use crate::cluster::{file, lease_error, places};
use crate::measured::{self, Forecast};
use crate::memory::{self, Need, Pool, Situation};
use crate::output::Out;
use crate::{cancel, errors, settings};

/// A context is lowered to what fits in steps of this many tokens, …
const CONTEXT_STEP: usize = 256;
/// … but not below this.
const CONTEXT_MIN: usize = 512;
/// `--device` of the twins.
const REFERENCE: &str = "reference";

/// A pipeline that is not loaded yet.
pub struct Plan {
    /// The model.
    pub checkpoint: Arc<Checkpoint>,
    /// Layers of each stage.
    pub counts: Vec<usize>,
    /// The stages.
    pub specs: Vec<StageSpec>,
    /// The device of each.
    pub devices: Vec<Device>,
    /// What each will hold.
    pub layouts: Vec<StageLayout>,
    /// What they share.
    pub options: StageOptions,
    /// Bytes that each may keep of what it hands on, in its host's memory.
    pub boundary_log: u64,
    /// Whether the context is smaller than the model's because no more fits.
    pub lowered: bool,
    /// Whether the KV cache is smaller than all sequences may need, because no more fits.
    pub kv_lowered: bool,
    /// The memories.
    pub pools: Vec<Pool>,
    /// What the split goes by.
    pub basis: Basis,
    /// The workers, as long as the pipeline is wanted: dropped after all that runs there.
    pub cluster: Option<Cluster>,
}

/// What a split goes by.
#[derive(Clone, Debug)]
pub enum Basis {
    /// What was typed.
    Typed,
    /// Bytes; why not what devices take, if that was wanted.
    Bytes(Option<String>),
    /// What devices take.
    Measured(Box<Forecast>),
}

/// What a verb wants where nothing was typed.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Positions; nothing: as much of the model's own as fits.
    pub context: Option<usize>,
    /// Sequences at once.
    pub sequences: usize,
    /// What of workers.
    pub purpose: Purpose,
}

impl Wanted {
    /// One sequence.
    pub fn one(context: Option<usize>) -> Wanted {
        Wanted::several(context, 1)
    }

    /// Several at once.
    pub fn several(context: Option<usize>, sequences: usize) -> Wanted {
        Wanted { context, sequences, purpose: Purpose::Lease }
    }
}

/// Lays out the pipeline that `args` ask for.
///
/// # Errors
/// When options and model do not agree, or nothing fits.
pub fn make(checkpoint: Arc<Checkpoint>, args: &PipelineArgs, wanted: Wanted, out: &Out) -> Result<Plan> {
    let (args, asked_stages) = &file::merged(args)?;
    // What the model cannot do comes before what the machine cannot.
    pp_engine::arch::find(&checkpoint.config.arch).map_err(LayoutError::from)?;
    let costs = settings::costs(&checkpoint);
    let split = settings::split(args)?;
    let is_free = args.split.is_some() && split == Split::Auto && !args.no_measure;
    let stages = args.stages.or_else(|| is_free.then(|| candidates(args).min(costs.layers.len())));
    let counts = split.resolve(stages, &costs)?;
    let (activations, kv) = settings::precision(args.activations, args.kv, settings::is_quantised(&checkpoint))?;
    let max = checkpoint.config.context;
    let typed = settings::context(args.ctx, max)?;
    settings::chunk(args.max_batch_tokens, 1)?;
    let sequences = settings::sequences(args.max_sequences, wanted.sequences)?;
    let kv_tokens = settings::kv_tokens(args.kv_tokens)?;
    if args.groups == Some(0) {
        return Err(errors::usage("--groups 0: expected at least 1"));
    }
    let (devices, cluster) = devices(args, counts.len(), wanted.purpose, out)?;
    let default = devices.iter().map(|d| d.profile().chunk).min().unwrap_or(1);
    let chunk = settings::chunk(args.max_batch_tokens, default)?;
    let pools = memory::pools(&devices);
    let asked = typed.or(wanted.context.map(|tokens| tokens.clamp(1, max)));
    let context = asked.unwrap_or(max);
    let wire = settings::wire(args.wire);
    let options = StageOptions { activations, kv, context, sequences, kv_tokens: context, chunk, wire };
    let log = args.boundary_log.as_u64();
    let wish = Wish { stages: *asked_stages, context: asked, kv_tokens, is_free, log };
    let open = Open { checkpoint: &checkpoint, args, options: &options };
    let division = match split {
        Split::Auto if !args.no_measure && counts.len() > 1 && (is_free || are_unlike(&devices)) => {
            open.by_measure(counts, devices, pools, &wish, out)?
        }
        Split::Auto | Split::Bytes => open.by_bytes(counts, devices, pools, &wish, None)?,
        _ => Division { counts, devices, pools, basis: Basis::Typed },
    };
    let Division { counts, devices, pools, basis } = division;
    let asked = Asked { context: asked.is_some(), kv_tokens, log };
    let plan = fit(checkpoint, counts, devices, pools, options, asked, &costs)?;
    Ok(Plan { cluster, basis, ..plan })
}

/// How many devices there are for a free split.
fn candidates(args: &PipelineArgs) -> usize {
    let hardware = || Adapter::all().iter().filter(|adapter| !adapter.is_software()).count();
    if args.device.is_empty() { hardware().max(1) } else { args.device.len() }
}

/// Whether a split decides about more than memory: all stages on one device compute as much however they are cut.
fn are_unlike(devices: &[Device]) -> bool {
    let key = |device: &Device| (device.worker(), device.id());
    devices.iter().any(|device| key(device) != key(&devices[0]))
}

/// What is wanted of an automatic split.
struct Wish {
    /// Exactly so many.
    stages: Option<usize>,
    context: Option<usize>,
    kv_tokens: Option<usize>,
    /// Whether devices may be left out and come in any order.
    is_free: bool,
    /// Bytes that each stage may keep of what it hands on.
    log: u64,
}

/// Layers, and what they are on.
struct Division {
    counts: Vec<usize>,
    devices: Vec<Device>,
    pools: Vec<Pool>,
    basis: Basis,
}

/// A split that is still to be made.
struct Open<'a> {
    checkpoint: &'a Arc<Checkpoint>,
    args: &'a PipelineArgs,
    options: &'a StageOptions,
}

impl Open<'_> {
    /// By what devices and links take; by bytes where that is not known.
    fn by_measure(
        &self,
        counts: Vec<usize>,
        devices: Vec<Device>,
        pools: Vec<Pool>,
        wish: &Wish,
        out: &Out,
    ) -> Result<Division> {
        let problem = match measured::problem(self.checkpoint, &devices, &pools, self.options, out) {
            Ok(problem) => problem,
            Err(_) if cancel::flag().load(Ordering::Relaxed) => return Err(errors::cancelled()),
            Err(error) => {
                return self.by_bytes(counts, devices, pools, wish, Some(format!("{error:#}")));
            }
        };
        let wanted = measured::Wanted {
            stages: wish.stages.or((!wish.is_free).then_some(counts.len())),
            ordered: !wish.is_free,
            context: wish.context,
            kv_tokens: wish.kv_tokens,
            sequences: self.options.sequences,
            context_max: self.checkpoint.config.context,
            chunk: self.options.chunk,
            tile: Device::tile(&devices, self.options.activations),
        };
        let planned = wanted.wish(self.args, &problem);
        let stages = planner::best(&problem, &planned).map_err(|error| measured::refused(&error))?;
        let devices: Vec<Device> = stages.iter().map(|stage| devices[stage.device].clone()).collect();
        let pools = memory::pools(&devices);
        let basis = Basis::Measured(Box::new(Forecast { problem, stages: stages.clone(), wish: planned }));
        Ok(Division { counts: measured::counts(&stages), devices, pools, basis })
    }

    /// By bytes, as equal as the memories allow.
    fn by_bytes(
        &self,
        counts: Vec<usize>,
        devices: Vec<Device>,
        pools: Vec<Pool>,
        wish: &Wish,
        why: Option<String>,
    ) -> Result<Division> {
        let max = self.checkpoint.config.context;
        let context = wish.context.unwrap_or(CONTEXT_MIN.min(max));
        let options = StageOptions { context, kv_tokens: wish.kv_tokens.unwrap_or(context), ..*self.options };
        let fits = |counts: &[usize]| {
            let laid_out = layouts(self.checkpoint, &StageSpec::pipeline(counts), options, &devices);
            laid_out.is_ok_and(|layouts| memory::shortage(&pools, &needs(&layouts, wish.log)).is_none())
        };
        let basis = Basis::Bytes(why);
        let counts =
            if fits(&counts) { counts } else { self.within(&pools, &devices, options, fits).unwrap_or(counts) };
        Ok(Division { counts, devices, pools, basis })
    }

    /// The split by bytes among those that fit.
    fn within(
        &self,
        pools: &[Pool],
        devices: &[Device],
        options: StageOptions,
        fits: impl Fn(&[usize]) -> bool,
    ) -> Option<Vec<usize>> {
        let parts = measured::parts(self.checkpoint, &options, devices[0].profile(), devices[0].limits()).ok()?;
        let kv = parts.kv_per_token * options.kv_tokens as u64;
        let costs = Costs {
            layers: parts.layers.iter().map(|layer| layer + kv).collect(),
            first: parts.first,
            last: parts.last,
        };
        let limit = |stage: usize, divided: bool| {
            let pool = pools.iter().find(|pool| pool.stages.contains(&stage));
            let part = |pool: &Pool| if divided { pool.stages.len() as u64 } else { 1 };
            let room = pool.and_then(|pool| Some(pool.available? / part(pool)));
            room.map_or(u64::MAX, |room| room.saturating_sub(parts.work))
        };
        [false, true].into_iter().find_map(|divided| {
            let limits: Vec<u64> = (0..devices.len()).map(|stage| limit(stage, divided)).collect();
            auto_within(&costs, &limits).ok().filter(|counts| fits(counts))
        })
    }
}

/// What the user set.
#[derive(Clone, Copy)]
struct Asked {
    context: bool,
    kv_tokens: Option<usize>,
    /// Bytes that each stage may keep of what it hands on.
    log: u64,
}

/// Lays the stages out; a context that nobody asked for is lowered to what fits with one sequence of it, and the cache
/// of several sequences to what fits beside.
fn fit(
    checkpoint: Arc<Checkpoint>,
    counts: Vec<usize>,
    devices: Vec<Device>,
    pools: Vec<Pool>,
    options: StageOptions,
    asked: Asked,
    costs: &Costs,
) -> Result<Plan> {
    let specs = StageSpec::pipeline(&counts);
    let options_at =
        |context: usize| StageOptions { context, kv_tokens: asked.kv_tokens.unwrap_or(context), ..options };
    let layouts_at = |context| layouts(&checkpoint, &specs, options_at(context), &devices);
    let fits_with = |options| match layouts(&checkpoint, &specs, options, &devices) {
        Ok(layouts) => Ok(memory::shortage(&pools, &needs(&layouts, asked.log)).is_none()),
        Err(LayoutError::KvBinding { .. } | LayoutError::Work { option: "--ctx", .. }) => Ok(false),
        Err(other) => Err(other),
    };
    let fits = |context| fits_with(options_at(context));
    let mut context = options.context;
    if !fits(context)? {
        let smaller = largest(CONTEXT_MIN, context, CONTEXT_STEP, &fits)?;
        match smaller {
            Some(smaller) if !asked.context => context = smaller,
            _ => {
                let at = if asked.context { context } else { CONTEXT_MIN.min(context) };
                let layouts = layouts_at(at)?;
                let needs = needs(&layouts, asked.log);
                if let Some(pool) = memory::shortage(&pools, &needs) {
                    let parameters = checkpoint.tensors().map(|tensor| tensor.elements() as u64).sum();
                    let situation = Situation {
                        pools: &pools,
                        needs: &needs,
                        counts: &counts,
                        costs,
                        parameters,
                        context: at,
                        context_that_fits: smaller,
                    };
                    return Err(errors::device(situation.explain(pool)));
                }
                context = at;
            }
        }
    }
    let lowered = !asked.context && context < options.context;
    let one = options_at(context);
    // A sequence alone needs its context; of several each has a page to go on with while others begin.
    let pages = one.context.div_ceil(PAGE) + usize::from(one.sequences > 1);
    let all = if one.sequences > 1 { one.sequences.saturating_mul(pages * PAGE) } else { one.context };
    let with = |kv_tokens| StageOptions { kv_tokens, ..one };
    let options = match asked.kv_tokens {
        Some(_) => one,
        None if fits_with(with(all))? => with(all),
        None => {
            let fits = |tokens: usize| fits_with(with(tokens.max(context)));
            with(largest(context, all, CONTEXT_STEP, &fits)?.unwrap_or(context).max(context))
        }
    };
    let layouts = layouts(&checkpoint, &specs, options, &devices)?;
    let kv_lowered = asked.kv_tokens.is_none() && options.kv_tokens < all;
    let basis = Basis::Typed;
    Ok(Plan {
        specs,
        devices,
        layouts,
        options,
        boundary_log: asked.log,
        lowered,
        kv_lowered,
        pools,
        counts,
        checkpoint,
        basis,
        cluster: None,
    })
}

/// The largest multiple of `step` in `min .. max` for which `fits`, which is monotone.
fn largest<E>(
    min: usize,
    max: usize,
    step: usize,
    fits: &impl Fn(usize) -> Result<bool, E>,
) -> Result<Option<usize>, E> {
    let (mut low, mut high) = (min.div_ceil(step), max.div_ceil(step));
    if low >= high || !fits(low * step)? {
        return Ok(None);
    }
    // `low` fits, `high` does not.
    while high - low > 1 {
        let middle = low.midpoint(high);
        if fits(middle * step)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(Some(low * step))
}

fn layouts(
    checkpoint: &Checkpoint,
    specs: &[StageSpec],
    options: StageOptions,
    devices: &[Device],
) -> Result<Vec<StageLayout>, LayoutError> {
    let stages = specs.iter().zip(devices);
    stages
        .map(|(spec, device)| StageLayout::new(checkpoint, spec.clone(), options, device.profile(), device.limits()))
        .collect()
}

/// What stages need that keep so many bytes at most of what they hand on.
fn needs(layouts: &[StageLayout], boundary_log: u64) -> Vec<Need> {
    let need = |layout: &StageLayout| Need {
        weights: layout.weight_bytes(),
        kv: layout.kv_bytes(),
        work: layout.work_bytes(),
        log: layout.boundary_log_bytes(boundary_log),
    };
    layouts.iter().map(need).collect()
}

/// The device of each stage, here or at workers, which are connected.
fn devices(args: &PipelineArgs, stages: usize, purpose: Purpose, out: &Out) -> Result<(Vec<Device>, Option<Cluster>)> {
    if args.workers.is_empty() {
        return Ok((here(&args.device, args.profile, stages)?, None));
    }
    let places = places::of(&args.workers, stages)?;
    // What is wrong here comes before what may be wrong elsewhere.
    let unpicked = places.iter().filter(|place| place.worker.is_none() && place.device.is_none()).count();
    if unpicked == 0 && !args.device.is_empty() {
        return Err(errors::usage(
            "--device picks devices of this machine, and no stage is left for them: write NAME:DEVICE in --workers",
        ));
    }
    let mut unpicked = if unpicked == 0 { Vec::new() } else { here(&args.device, args.profile, unpicked)? }.into_iter();
    let mut local = Vec::new();
    for place in places.iter().filter(|place| place.worker.is_none()) {
        local.push(match &place.device {
            Some(selector) => here(std::slice::from_ref(selector), args.profile, 1)?.remove(0),
            None => unpicked.next().expect("as many as were counted"),
        });
    }
    let mut local = local.into_iter();
    let cluster = Cluster::gather(&places, purpose, Duration::from_secs(args.wait), out)?;
    let device = |place: &places::Place| match &place.worker {
        Some(name) => cluster.device(name, place.device.as_deref()),
        None => Ok(local.next().expect("one for every stage here")),
    };
    let devices = places.iter().map(device).collect::<Result<Vec<_>>>()?;
    Ok((devices, Some(cluster)))
}

/// Devices of this machine for so many stages.
fn here(selectors: &[String], profile: ProfileArg, stages: usize) -> Result<Vec<Device>> {
    let named = if selectors.is_empty() { adapters(profile, stages)? } else { named(selectors, profile)? };
    if named.len() > stages {
        let (given, split) = (named.len(), if stages == 1 { "; give --stages or --split" } else { "" });
        return Err(errors::usage(format!("--device names {given} devices for {stages} stage(s){split}")));
    }
    Ok((0..stages).map(|stage| named[stage % named.len()].clone()).collect())
}

/// All devices that a worker gives: those named, else every hardware adapter, else a software one; each once.
///
/// # Errors
/// When one is not there.
pub fn all_devices(selectors: &[String], profile: ProfileArg) -> Result<Vec<Device>> {
    let all = if selectors.is_empty() { adapters(profile, Adapter::all().len())? } else { named(selectors, profile)? };
    let mut once: Vec<Device> = Vec::new();
    for device in all {
        if once.iter().all(|other| other.id() != device.id()) {
            once.push(device);
        }
    }
    Ok(once)
}

fn adapters(profile: ProfileArg, count: usize) -> Result<Vec<Device>> {
    Ok(Adapter::choose(&Adapter::all(), &[], count)?.into_iter().map(|adapter| gpu(adapter, profile)).collect())
}

fn named(selectors: &[String], profile: ProfileArg) -> Result<Vec<Device>> {
    let mut all = None;
    let mut device = |selector: &String| {
        if selector == REFERENCE {
            return Ok(Device::Reference { profile: settings::profile(profile).unwrap_or(Profile::SOFTWARE) });
        }
        let all = all.get_or_insert_with(Adapter::all);
        Ok(gpu(Adapter::choose(all, std::slice::from_ref(selector), 1)?.remove(0), profile))
    };
    selectors.iter().map(&mut device).collect()
}

fn gpu(adapter: Adapter, profile: ProfileArg) -> Device {
    let profile = settings::profile(profile).unwrap_or(adapter.profile());
    Device::Gpu { profile, adapter, checked: checked() }
}

/// Whether kernels are compiled with bounds checks: always in builds for debugging.
pub fn checked() -> bool {
    cfg!(debug_assertions) || std::env::var_os("PP_CHECKED").is_some_and(|value| value == "1")
}

impl Plan {
    /// What of it others may know: all but the workers.
    pub fn sketch(&self) -> Sketch {
        Sketch {
            checkpoint: self.checkpoint.clone(),
            specs: self.specs.clone(),
            devices: self.devices.clone(),
            options: self.options,
            boundary_log: self.boundary_log,
        }
    }

    /// The devices with those of lost workers replaced by the first of others, a worker for each; their names are forgotten.
    ///
    /// # Errors
    /// When one has no device, or not the memory.
    pub fn with_others(&mut self, lost: &[Name], others: &[Arc<Worker>]) -> Result<()> {
        let (devices, layouts) = self.sketch().with_others(lost, others)?;
        if let Some(cluster) = &mut self.cluster {
            cluster.forget(lost);
        }
        (self.layouts, self.devices, self.pools) = (layouts, devices.clone(), memory::pools(&devices));
        Ok(())
    }

    /// Divides the layers so over the same devices; context and cache stay as they are.
    ///
    /// # Errors
    /// As [`Sketch::divided`].
    pub fn divide(&mut self, counts: &[usize], held: u64) -> Result<()> {
        self.layouts = self.sketch().divided(counts, held)?;
        (self.counts, self.specs, self.basis) = (counts.to_vec(), StageSpec::pipeline(counts), Basis::Typed);
        Ok(())
    }

    /// Divides the layers over other devices, by bytes; context and cache stay as they are. Of this machine's memory `held`
    /// bytes are the pipeline's already.
    ///
    /// # Errors
    /// When there is none, or they do not fit.
    pub fn over(&mut self, devices: Vec<Device>, held: u64) -> Result<()> {
        if devices.is_empty() {
            return Err(errors::worker("no device is left"));
        }
        let costs = settings::costs(&self.checkpoint);
        let counts = Split::Bytes.resolve(Some(devices.len()), &costs)?;
        let (pools, options) = (memory::with_held(memory::pools(&devices), held), self.options);
        let args = PipelineArgs::default();
        let open = Open { checkpoint: &self.checkpoint, args: &args, options: &options };
        let (context, kv_tokens) = (Some(options.context), Some(options.kv_tokens));
        let log = self.boundary_log;
        let wish = Wish { stages: Some(counts.len()), context, kv_tokens, is_free: false, log };
        let Division { counts, devices, pools, .. } = open.by_bytes(counts, devices, pools, &wish, None)?;
        let asked = Asked { context: true, kv_tokens, log };
        let cluster = self.cluster.take();
        let fitted = fit(self.checkpoint.clone(), counts, devices, pools, options, asked, &costs);
        match fitted {
            Ok(plan) => *self = Plan { cluster, ..plan },
            Err(error) => {
                self.cluster = cluster;
                return Err(error);
            }
        }
        let used: Vec<String> = self.devices.iter().filter_map(Device::worker).collect();
        if let Some(cluster) = &mut self.cluster {
            cluster.keep_only(&used);
        }
        Ok(())
    }

    /// What to say about context and cache, if anything.
    pub fn notes(&self) -> Vec<String> {
        let StageOptions { context, sequences, kv_tokens, .. } = self.options;
        let max = self.checkpoint.config.context;
        let context_note = self.lowered.then(|| {
            format!(
                "context: {context} tokens, as much as fits the memory (the model's maximum is {max}; --ctx sets it)"
            )
        });
        let kv_note = self.kv_lowered.then(|| {
            format!(
                "KV cache: {kv_tokens} tokens for {sequences} sequences of up to {context}, as much as fits the memory (--kv-tokens sets it)"
            )
        });
        self.basis_note().into_iter().chain(context_note).chain(kv_note).collect()
    }

    /// What an automatic split went by, where that is worth a word.
    pub fn basis_note(&self) -> Option<String> {
        let split = pp_engine::split::join(&self.counts);
        match &self.basis {
            Basis::Measured(forecast) => Some(format!("split {split} {}", forecast.basis_text())),
            Basis::Bytes(Some(why)) => Some(format!("split {split} by bytes: {why}")),
            Basis::Bytes(None) | Basis::Typed => None,
        }
    }
}

/// A pipeline's stages and devices.
#[derive(Clone)]
pub struct Sketch {
    /// The model.
    pub checkpoint: Arc<Checkpoint>,
    /// The stages.
    pub specs: Vec<StageSpec>,
    /// The device of each.
    pub devices: Vec<Device>,
    /// What they share.
    pub options: StageOptions,
    /// Bytes that each may keep of what it hands on.
    pub boundary_log: u64,
}

impl Sketch {
    /// The devices with those of some workers replaced by the first of others, a worker for each; and what all hold then.
    ///
    /// # Errors
    /// When one has no device, or not the memory.
    pub fn with_others(&self, lost: &[Name], others: &[Arc<Worker>]) -> Result<(Vec<Device>, Vec<StageLayout>)> {
        let replace = |device: &Device| -> Result<Device> {
            let name = device.worker();
            let at = lost.iter().position(|lost| name.as_deref() == Some(lost.as_str()));
            let other = at.map(|at| RemoteDevice::of(&others[at], None).map_err(lease_error)).transpose()?;
            Ok(other.map_or_else(|| device.clone(), Device::Remote))
        };
        let devices = self.devices.iter().map(replace).collect::<Result<Vec<_>>>()?;
        let layouts = layouts(&self.checkpoint, &self.specs, self.options, &devices)?;
        // What those that are left hold is theirs already.
        let is_new = |pool: &Pool| others.iter().any(|other| pool.worker.as_deref() == Some(other.name()));
        let pools: Vec<Pool> = memory::pools(&devices).into_iter().filter(is_new).collect();
        if let Some(pool) = memory::shortage(&pools, &needs(&layouts, self.boundary_log)) {
            return Err(errors::device(format!("{} has not enough memory for the lost layers", pool.device)));
        }
        Ok((devices, layouts))
    }

    /// What the stages hold where the layers are divided so over the same devices. Of this machine's memory `held` bytes are
    /// the pipeline's already.
    ///
    /// # Errors
    /// When that is no division of the layers over as many devices, or one has not the memory.
    pub fn divided(&self, counts: &[usize], held: u64) -> Result<Vec<StageLayout>> {
        let split = pp_engine::split::join(counts);
        let (stages, layers) = (self.devices.len(), self.checkpoint.config.layers);
        if counts.len() != stages {
            return Err(errors::usage(format!("split {split}: {stages} stages run, give as many numbers")));
        }
        let sum = counts.iter().fold(0usize, |sum, count| sum.saturating_add(*count));
        if counts.contains(&0) || sum != layers {
            return Err(errors::usage(format!(
                "split {split}: the model has {layers} layers, at least one for each stage"
            )));
        }
        let layouts = layouts(&self.checkpoint, &StageSpec::pipeline(counts), self.options, &self.devices)?;
        let pools = memory::with_held(memory::pools(&self.devices), held);
        let needs = needs(&layouts, self.boundary_log);
        match memory::shortage(&pools, &needs) {
            None => Ok(layouts),
            Some(pool) => {
                let device = &pool.device;
                Err(errors::device(format!("split {split}: {device} has not enough memory for its layers")))
            }
        }
    }
}

#[cfg(test)]
mod tests;
