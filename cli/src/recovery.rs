//! Another pipeline in the place of one that lost a stage: on the same workers as soon as they are back, on another member of the
//! cluster, or on those that are left.
//!
//! A worker that comes back has its weights on disk, and a process that was only out of reach may be back in a moment; another
//! member needs about as long to load as the lost one did. So for that long the lost ones are waited for, and then another
//! member is taken: that is at most twice what the better choice would have cost, whichever it was. Where there is no
//! other, the lost ones have `--recover-wait`; then those that are left divide the layers, if their memories allow.

mod stragglers;
mod watch;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use pp_engine::cluster::remote::Worker;
use pp_engine::head::{Event, Head, HeadError, HeadOptions};
use pp_engine::layout::StageSpec;
use pp_engine::pipeline::shelf::Shelf;
use pp_engine::pipeline::{Device, Past, Pipeline, PipelineError};
use pp_engine::tokenizer::Tokenizer;
use pp_engine::weights::LoadError;
use pp_engine::wire::Wire;
use pp_engine::worker::WorkerError;
use pp_transport::identity::Name;
use serde::Serialize;

use crate::args::PipelineArgs;
use crate::command::{self, Keep};
use crate::output::Out;
use crate::output::progress::Steps;
use crate::plan::Plan;
use crate::{cancel, errors};
pub use stragglers::Straggler;
use stragglers::Stragglers;
use watch::{Orders, Others, Prepared, Watch};

/// Between two looks for a worker.
const AGAIN: Duration = Duration::from_millis(100);
/// How soon others are asked again whether they are idle.
const OTHERS_AGAIN: Duration = Duration::from_secs(2);
/// Pipelines that are tried in the place of one: workers may be lost meanwhile, too.
const TRIES: usize = 5;

/// What is wanted of a recovery.
#[derive(Clone, Copy, Debug)]
struct Wish {
    /// How long lost workers are waited for.
    wait: Duration,
    /// How many other members may be taken at once.
    spares: usize,
}

/// A plan, and what it takes to carry it out again.
pub struct Recovery {
    plan: Plan,
    wish: Wish,
    recovers: bool,
    boundary_log: u64,
    shelf: Arc<Shelf>,
    /// Seconds that the slowest stage took to load.
    load_seconds: f64,
    /// Since when something is computed again, and how far that is.
    rebuilding: Option<(Instant, Steps)>,
    /// Pipelines that were sought since a token was last drawn, and tokens drawn then.
    tries: usize,
    drawn: u64,
    /// Workers that are within reach and do not do what they should: the last to be asked again.
    bad: Vec<Name>,
    /// Members that the latest plan has in the places of others.
    taken: Vec<Name>,
    /// Workers that stay, though they are drained: nobody can take their stages.
    stay: Vec<Name>,
    /// Looks after the workers as long as the pipeline runs.
    watch: Option<Watch>,
    happened: Vec<Recovered>,
    stragglers: Stragglers,
    /// Whether the latest pipeline computes to the bit what the one before did.
    is_same: bool,
    out: Out,
}

/// A recovery, for reports.
#[derive(Clone, Debug, Serialize)]
pub struct Recovered {
    /// What had failed.
    pub error: String,
    /// What took its place.
    pub by: String,
    /// Seconds from when the pipeline was last heard until that was noticed; …
    pub noticed_seconds: f64,
    /// … from then until another pipeline was there, …
    pub replaced_seconds: f64,
    /// … and that the slowest stage took to load at first: what it may take where nothing is loaded.
    pub load_seconds: f64,
    /// Tokens that were computed again.
    pub tokens: usize,
    /// The same times layers, of each stage.
    pub layer_tokens: Vec<usize>,
    /// Whether every layer is on a device of the same kind as before, so that what follows is what would have followed, to
    /// the bit; else it may differ within rounding.
    pub is_same: bool,
    /// Seconds that this was predicted to take, …
    pub predicted_seconds: Option<f64>,
    /// … and took; null while it is under way.
    pub rebuilt_seconds: Option<f64>,
}

impl Recovery {
    /// Loads a plan's stages; returns the head, and the seconds it took.
    ///
    /// # Errors
    /// As [`command::load`].
    pub fn load(
        plan: Plan,
        args: &PipelineArgs,
        options: HeadOptions,
        tokenizer: Arc<Tokenizer>,
        out: &Out,
    ) -> Result<(Recovery, Head, f64)> {
        let started = Instant::now();
        let (recovers, boundary_log) = (!args.no_recover, args.boundary_log.as_u64());
        let wish = Wish { wait: Duration::from_secs(args.recover_wait), spares: args.spares.unwrap_or(usize::MAX) };
        plan.notes().iter().for_each(|note| out.note(note));
        let shelf: Arc<Shelf> = Arc::default();
        let pipeline =
            command::open_pipeline(&plan, Keep { shelf: recovers.then_some(&shelf), past: None, boundary_log }, out)?;
        let seconds = |report: &pp_engine::pipeline::StageReport| report.load_seconds;
        let load_seconds = pipeline.reports().iter().map(seconds).fold(0.0, f64::max);
        let options = HeadOptions { recovers, replaces_stragglers: args.replace_stragglers, ..options };
        let held = held(&plan, &pipeline);
        let head = Head::new(pipeline, tokenizer, options);
        let mut recovery = Recovery {
            plan,
            wish,
            recovers,
            boundary_log,
            shelf,
            load_seconds,
            rebuilding: None,
            tries: 0,
            drawn: 0,
            bad: Vec::new(),
            taken: Vec::new(),
            stay: Vec::new(),
            watch: None,
            happened: Vec::new(),
            stragglers: Stragglers::new(recovers && args.replace_stragglers, out),
            is_same: true,
            out: *out,
        };
        recovery.look_after(held);
        Ok((recovery, head, started.elapsed().as_secs_f64()))
    }

    /// Begins to look after the workers of the pipeline that runs now, which holds so many bytes of this machine.
    fn look_after(&mut self, held: u64) {
        if !self.recovers || self.plan.cluster.is_none() {
            return;
        }
        let (bad, spares, stay) = (self.bad.clone(), self.wish.spares, self.stay.clone());
        match crate::cluster::model::of(&self.plan.checkpoint, &self.out) {
            Ok(model) => self.watch = Watch::start(&self.plan, Orders { model, bad, spares, held, stay }, self.out),
            Err(error) => self.out.note(&format!("{error:#}: a worker that is drained keeps its stages")),
        }
    }

    /// What has happened so far.
    pub fn happened(&self) -> &[Recovered] {
        &self.happened
    }

    /// Stages that took much longer than they used to, so far.
    pub fn stragglers(&self) -> &[Straggler] {
        self.stragglers.happened()
    }

    /// The plan that runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether what failed is worth another pipeline.
    pub fn is_for(&self, error: &HeadError) -> bool {
        self.recovers && error.may_be_recovered()
    }

    /// Goes on with another pipeline in the place of the head's, which failed with `error`. Where there is none, everything
    /// that was asked ends.
    ///
    /// # Errors
    /// What failed, and why nothing takes its place.
    pub fn recover(&mut self, head: &mut Head, error: HeadError, say: &mut dyn FnMut(Event)) -> Result<()> {
        let is_hopeless = self.tries == TRIES && self.drawn == head.drawn() && !error.is_wanted();
        if !self.is_for(&error) || is_hopeless {
            head.fail(say);
            return Err(error.into());
        }
        self.tries = if self.drawn == head.drawn() { self.tries + usize::from(!error.is_wanted()) } else { 1 };
        self.drawn = head.drawn();
        // An answer may stand there in the middle of its line.
        self.out.note(&format!("\n{error}; looking for another pipeline"));
        let started = Instant::now();
        let noticed_seconds = head.noticed_after().unwrap_or_default();
        let past = head.suspend();
        match self.replace(&error, &past) {
            Ok((pipeline, text)) => {
                let rebuild = head.recover(pipeline, say);
                self.stragglers.forget();
                let replaced_seconds = started.elapsed().as_secs_f64();
                self.out.note(&format!("{text} after {replaced_seconds:.1} s; {rebuild}"));
                let layer_tokens = |spec: &StageSpec| rebuild.layer_tokens(spec.index, &spec.layers);
                self.happened.push(Recovered {
                    error: error.to_string(),
                    by: text,
                    noticed_seconds,
                    replaced_seconds,
                    load_seconds: self.load_seconds,
                    tokens: rebuild.tokens,
                    layer_tokens: self.plan.specs.iter().map(layer_tokens).collect(),
                    is_same: self.is_same,
                    predicted_seconds: rebuild.seconds,
                    rebuilt_seconds: None,
                });
                self.rebuilding = Some((Instant::now(), Steps::new(&self.out, "rebuilt", "tokens")));
                Ok(())
            }
            Err(why) if cancel::flag().load(Ordering::Relaxed) => {
                head.fail(say);
                Err(why)
            }
            Err(why) => {
                head.fail(say);
                Err(anyhow::Error::from(error).context(format!("no other pipeline: {why:#}")))
            }
        }
    }

    /// Shows how far it is what a recovery computes again, and tells of stages that take much longer than they used to.
    pub fn tick(&mut self, head: &Head) {
        self.stragglers.look(head);
        let Some((since, steps)) = &mut self.rebuilding else { return };
        let rebuild = head.rebuild();
        steps.update(rebuild.done, rebuild.tokens);
        if rebuild.is_over() {
            steps.finish();
            if let Some(last) = self.happened.last_mut() {
                last.rebuilt_seconds = Some(since.elapsed().as_secs_f64());
            }
            if rebuild.tokens > 0 {
                let predicted = rebuild.seconds.map_or(String::new(), |seconds| format!(" (predicted {seconds:.1} s)"));
                let text = format!("rebuilt in {:.1} s{predicted}: the answers go on", since.elapsed().as_secs_f64());
                self.out.note(&text);
            }
            self.rebuilding = None;
        }
    }

    /// Another pipeline in the place of the one that failed with `error`; the head goes on with it once it recovers.
    ///
    /// # Errors
    /// When there is none: why.
    pub fn replace(&mut self, error: &HeadError, past: &Past) -> Result<(Pipeline, String)> {
        if let HeadError::Pipeline(
            error @ (PipelineError::Wedged { .. } | PipelineError::Silent { .. } | PipelineError::Straggler { .. }),
        ) = error
        {
            self.distrust(error);
        }
        let Prepared { mut others, failed, wish } = self.watch.take().map(Watch::end).unwrap_or_default();
        self.bad.extend(failed);
        let before = kinds(&self.plan);
        let divided_before = self.plan.counts.clone();
        let mut wish = wish.filter(|_| error.is_wanted());
        let mut text = None;
        if let Some(wished) = &wish {
            past.settle();
            match self.plan.divide(&wished.split, self.shelf.host_bytes()) {
                Ok(()) => text = Some(format!("split {}", pp_engine::split::join(&wished.split))),
                Err(error) => wish.take().into_iter().for_each(|wish| wish.came(Err(format!("{error:#}")))),
            }
        }
        let mut last = None;
        for tried in 0..TRIES {
            let text = match text.take() {
                Some(text) => text,
                None => self.find(past, std::mem::take(&mut others))?,
            };
            let keep = Keep { shelf: Some(&self.shelf), past: Some(past), boundary_log: self.boundary_log };
            match command::open_pipeline(&self.plan, keep, &self.out) {
                Ok(pipeline) => {
                    self.taken.clear();
                    self.look_after(held(&self.plan, &pipeline));
                    wish.take().into_iter().for_each(|wish| wish.came(Ok(text.clone())));
                    self.is_same = kinds(&self.plan) == before;
                    let other = "; layers are on another kind of device, or hops round elsewhere: what follows may differ \
                                 within rounding";
                    let other = if self.is_same { "" } else { other };
                    return Ok((pipeline, format!("{text}{other}")));
                }
                Err(error) if cancel::flag().load(Ordering::Relaxed) => return Err(error),
                Err(error) => {
                    self.out.note(&format!("{error:#}; trying again"));
                    if let Some(wish) = wish.take() {
                        // That says nothing of the devices with the layers that they had.
                        wish.came(Err(format!("{error:#}")));
                        if let Err(error) = self.plan.divide(&divided_before, u64::MAX) {
                            self.out.note(&format!("{error:#}"));
                        }
                        last = Some(error);
                        continue;
                    }
                    // Those that were taken for it are not good for it, whatever the reason.
                    self.bad.append(&mut self.taken);
                    if let Some(error) = error.downcast_ref::<PipelineError>() {
                        self.distrust(error);
                    }
                    last = Some(error);
                }
            }
            std::thread::sleep(AGAIN * (1u32 << tried));
        }
        Err(last.expect("it was tried"))
    }

    /// The worker whose device does not do what it should, where that is what the error says; not one that waits for
    /// another, nor one that is gone, which may come back as it should be.
    fn distrust(&mut self, error: &PipelineError) {
        let is_its_own = match error {
            PipelineError::Wedged { .. } | PipelineError::Silent { .. } | PipelineError::Straggler { .. } => true,
            PipelineError::Stage { error, .. } => {
                matches!(error, WorkerError::Step(_) | WorkerError::Canary { .. } | WorkerError::Panic(_))
            }
            PipelineError::Load { error, .. } => {
                matches!(error, LoadError::Device(_) | LoadError::Untrusted { .. } | LoadError::NoRoom { .. })
            }
            _ => false,
        };
        let worker = error.stage().filter(|_| is_its_own).and_then(|stage| stage.worker.as_deref());
        if let Some(name) = worker.and_then(|worker| worker.parse().ok()) {
            self.bad.push(name);
        }
    }

    /// Makes a plan whose workers are all there; says what it is. Some members may have loaded the layers of others.
    fn find(&mut self, past: &Past, prepared: Vec<Others>) -> Result<String> {
        let Some(cluster) = &mut self.plan.cluster else { return Ok("on the same devices".to_owned()) };
        let (mut lost, mut leaving) = (cluster.lost(), cluster.leaving());
        self.stay.retain(|name| leaving.contains(name));
        leaving.retain(|name| !self.stay.contains(name));
        let bad: Vec<Name> = cluster.names().iter().filter(|name| self.bad.contains(name)).cloned().collect();
        let is_bad = !bad.is_empty();
        lost.extend(bad.into_iter().filter(|name| !lost.contains(name)).collect::<Vec<_>>());
        if lost.is_empty() {
            return Ok(if leaving.is_empty() {
                "on the same workers".into()
            } else {
                self.move_away(&leaving, prepared, past)
            });
        }
        // They may be taken for what was lost.
        drop(prepared);
        let started = Instant::now();
        let mut others_at = self.wish.wait.min(Duration::from_secs_f64(self.load_seconds));
        let why = loop {
            if cancel::flag().load(Ordering::Relaxed) {
                return Err(errors::cancelled());
            }
            let found = if is_bad { Err(anyhow::anyhow!("{} fails", list(&lost))) } else { self.regain(&lost) };
            let error = match found {
                Ok(text) => return Ok(text),
                Err(error) => error,
            };
            let waited = started.elapsed();
            if is_bad || waited >= others_at {
                if let Some(text) = self.by_others(&lost) {
                    return Ok(text);
                }
                // Those that do not answer take a while to say so.
                others_at = started.elapsed() + OTHERS_AGAIN;
            }
            if is_bad || waited >= self.wish.wait {
                break error;
            }
            std::thread::sleep(AGAIN);
        };
        past.settle();
        match self.without(&lost) {
            Ok(text) => Ok(text),
            Err(error) => {
                // Who else is there?
                self.bad.clear();
                if self.plan.cluster.as_mut().is_some_and(|cluster| cluster.lost().is_empty()) {
                    return Ok("on the same workers, as nobody else can do it".to_owned());
                }
                let gone = errors::worker(format!("{why:#}"));
                Err(gone.context(format!("those that are left cannot do it: {error:#}")))
            }
        }
    }

    /// Lost workers, if they are back.
    fn regain(&mut self, lost: &[Name]) -> Result<String> {
        let cluster = self.plan.cluster.as_mut().expect("they are of one");
        self.plan.devices = cluster.regain(lost, &self.plan.devices)?;
        Ok(format!("{} {} back", list(lost), if lost.len() == 1 { "is" } else { "are" }))
    }

    /// Other members in the places of some, if there are enough that can do it.
    fn by_others(&mut self, lost: &[Name]) -> Option<String> {
        let cluster = self.plan.cluster.as_mut().filter(|_| lost.len() <= self.wish.spares)?;
        let others = cluster.others(lost.len(), &self.bad);
        if others.len() < lost.len() {
            return None;
        }
        self.by_these(lost, &others)
    }

    /// These, which are ours, in the places of some.
    fn by_these(&mut self, lost: &[Name], others: &[Arc<Worker>]) -> Option<String> {
        let names: Vec<Name> = others.iter().filter_map(|worker| worker.name().parse().ok()).collect();
        match self.plan.with_others(lost, others) {
            Ok(()) => {
                self.taken = names.clone();
                Some(format!("{} in the place of {}", list(&names), list(lost)))
            }
            Err(error) => {
                self.out.note(&format!("{error:#}"));
                self.plan.cluster.iter_mut().for_each(|cluster| cluster.forget(&names));
                self.bad.extend(names);
                None
            }
        }
    }

    /// Makes a plan without workers that are being drained; where nobody else can do it they stay.
    fn move_away(&mut self, leaving: &[Name], prepared: Vec<Others>, past: &Past) -> String {
        let mut moved = Vec::new();
        for Others { of, workers } in prepared {
            if of.iter().all(|name| leaving.contains(name)) && workers.iter().all(|worker| !worker.is_gone()) {
                self.plan.cluster.iter_mut().for_each(|cluster| cluster.adopt(&workers));
                moved.extend(self.by_these(&of, &workers));
            }
        }
        if !moved.is_empty() {
            // Others that leave are looked after once this pipeline runs.
            return moved.join(", ");
        }
        if let Some(text) = self.by_others(leaving) {
            return text;
        }
        past.settle();
        self.without(leaving).unwrap_or_else(|error| {
            let names = list(leaving);
            self.stay.extend_from_slice(leaving);
            format!("{names} stays until what runs is done, as those that are left cannot do it: {error:#}")
        })
    }

    /// Divides the layers over the devices of all others.
    fn without(&mut self, workers: &[Name]) -> Result<String> {
        let left: Vec<Device> = self.plan.devices.iter().filter(|device| !is_of(device, workers)).cloned().collect();
        self.plan.over(left, self.shelf.host_bytes())?;
        Ok(format!("without {}, split {}", list(workers), pp_engine::split::join(&self.plan.counts)))
    }
}

/// Bytes of this machine's memory that a plan's pipeline holds.
fn held(plan: &Plan, pipeline: &Pipeline) -> u64 {
    let stages = pipeline.reports().iter().zip(&plan.devices);
    let here = stages.filter(|(_, device)| device.worker().is_none() && device.is_software());
    here.map(|(report, _)| report.allocated_bytes).sum()
}

/// What decides about bits: what computes each layer, as (device, profile); and where hops are, if they round.
type Kinds = (Vec<(String, &'static str)>, Option<Vec<usize>>);

fn kinds(plan: &Plan) -> Kinds {
    let kind = |device: &Device| (device.name(), device.profile().name);
    let layers = plan.counts.iter().zip(&plan.devices);
    let layers = layers.flat_map(|(count, device)| std::iter::repeat_n(kind(device), *count)).collect();
    (layers, (plan.options.wire != Wire::F32).then(|| plan.counts.clone()))
}

fn list(names: &[Name]) -> String {
    names.iter().map(Name::to_string).collect::<Vec<_>>().join(", ")
}

/// Whether a device is one of these workers'.
fn is_of(device: &Device, workers: &[Name]) -> bool {
    device.worker().is_some_and(|name| workers.iter().any(|lost| lost.as_str() == name))
}
