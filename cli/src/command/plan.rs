//! What each stage would hold, and what they would reach, before anything is loaded.

mod elsewhere;
mod forecast;

use std::process::ExitCode;

use anyhow::Result;
use pp_engine::cluster::control::Purpose;
use pp_engine::layout::{SEQUENCES_MAX, StageLayout};
use pp_engine::pipeline::Device;
use serde::Serialize;

use crate::args::PlanArgs;
use crate::errors::usage;
use crate::measured::Forecast;
use crate::output::{Out, Report, bytes, count, table};
use crate::plan::{self, Basis, Plan};
use crate::report::{Widened, layer_range, placed};
use forecast::{Asked, ForecastReport};

/// Requests at once, tokens of a prompt or an answer at most.
const COUNT_MAX: usize = 1 << 20;

/// Plans and tells.
pub fn run(args: &PlanArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    for level in args.levels() {
        if !(1..=SEQUENCES_MAX).contains(level) {
            return Err(usage(format!("--concurrency {level}: expected 1 to {SEQUENCES_MAX} requests at once")));
        }
    }
    for (name, tokens) in [("--prompt-tokens", args.prompt_tokens), ("--gen-tokens", args.gen_tokens)] {
        if !(1..=COUNT_MAX).contains(&tokens) {
            return Err(usage(format!("{name} {tokens}: expected 1 to {COUNT_MAX}")));
        }
    }
    let checkpoint = super::open(&args.model)?;
    if let Some(path) = &args.hardware {
        out.result(&elsewhere::plan(&checkpoint, args, path)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Who plans takes nothing from anybody.
    let wanted = plan::Wanted { purpose: Purpose::Look, ..plan::Wanted::several(None, args.sequences()) };
    let plan = plan::make(checkpoint, &args.pipeline, wanted, &out)?;
    let forecast = Forecast::wanted(&plan, &args.pipeline, &out)?;
    let forecast = forecast.map(|forecast| ForecastReport::new(&forecast, &asked(args, false)));
    out.result(&PlanReport { forecast, ..PlanReport::new(&plan) })?;
    Ok(ExitCode::SUCCESS)
}

fn asked(args: &PlanArgs, simulated: bool) -> Asked<'_> {
    Asked { levels: args.levels(), prompt: args.prompt_tokens, answer: args.gen_tokens, simulated }
}

#[derive(Debug, Serialize)]
struct PlanReport {
    model: String,
    split: Vec<usize>,
    /// `typed`, `bytes` or `measured`.
    split_by: &'static str,
    /// The same for people, with what was left out.
    split_reason: Option<String>,
    activations: &'static str,
    kv: &'static str,
    context: usize,
    context_max: usize,
    chunk: usize,
    /// Tokens whose keys and values every stage has room for.
    kv_tokens: usize,
    stages: Vec<Row>,
    total: Total,
    memory: Vec<Memory>,
    /// Type of activations between stages.
    wire: &'static str,
    /// Bytes between two stages, of one decoded token and of a whole chunk of a prompt.
    hop_bytes_decode: u64,
    hop_bytes_chunk: u64,
    /// What it should reach; null where nothing is measured.
    forecast: Option<ForecastReport>,
}

#[derive(Debug, Serialize)]
struct Row {
    index: usize,
    /// The worker that it would be on; null: this machine.
    worker: Option<String>,
    device: String,
    device_id: String,
    profile: &'static str,
    /// First layer and the one after the last.
    layers: (usize, usize),
    layer_count: usize,
    embedding: bool,
    lm_head: bool,
    file_bytes: u64,
    weight_bytes: u64,
    kv_bytes: u64,
    kv_bytes_per_token: u64,
    work_bytes: u64,
    device_bytes: u64,
    /// Bytes of its host's memory for a log of what it hands on, at most.
    boundary_log_bytes: u64,
    widened: Vec<Widened>,
}

#[derive(Debug, Default, Serialize)]
struct Total {
    file_bytes: u64,
    weight_bytes: u64,
    kv_bytes: u64,
    work_bytes: u64,
    device_bytes: u64,
}

/// A memory and what is taken of it.
#[derive(Debug, Serialize)]
struct Memory {
    worker: Option<String>,
    device: String,
    host: bool,
    stages: Vec<usize>,
    available_bytes: Option<u64>,
    needed_bytes: u64,
}

impl Row {
    fn new(layout: &StageLayout, device: &Device, boundary_log: u64) -> Row {
        let spec = &layout.spec;
        Row {
            index: spec.index,
            worker: device.worker(),
            device: device.name(),
            device_id: device.id(),
            profile: device.profile().name,
            layers: (spec.layers.start, spec.layers.end),
            layer_count: spec.layers.len(),
            embedding: spec.is_first(),
            lm_head: spec.is_last(),
            file_bytes: layout.file_bytes(),
            weight_bytes: layout.weight_bytes(),
            kv_bytes: layout.kv_bytes(),
            kv_bytes_per_token: layout.kv_bytes_per_token(),
            work_bytes: layout.work_bytes(),
            device_bytes: layout.device_bytes(),
            boundary_log_bytes: layout.boundary_log_bytes(boundary_log),
            widened: Widened::of(&layout.widened()),
        }
    }
}

impl PlanReport {
    fn new(plan: &Plan) -> PlanReport {
        let (activations, kv, wire) = super::precision(plan);
        let row = |(layout, device): (&StageLayout, &Device)| Row::new(layout, device, plan.boundary_log);
        let stages: Vec<Row> = plan.layouts.iter().zip(&plan.devices).map(row).collect();
        let sum = |part: fn(&Row) -> u64| stages.iter().map(part).sum();
        let memory = plan.pools.iter().map(|pool| Memory {
            worker: pool.worker.clone(),
            device: pool.device.clone(),
            host: pool.host,
            stages: pool.stages.clone(),
            available_bytes: pool.available,
            needed_bytes: pool.stages.iter().map(|stage| stages[*stage].bytes_in(pool.host)).sum(),
        });
        let hidden = plan.checkpoint.config.hidden;
        PlanReport {
            model: plan.checkpoint.path.display().to_string(),
            split: plan.counts.clone(),
            split_by: match &plan.basis {
                Basis::Typed => "typed",
                Basis::Bytes(_) => "bytes",
                Basis::Measured(_) => "measured",
            },
            split_reason: plan.basis_note(),
            activations,
            kv,
            context: plan.options.context,
            context_max: plan.checkpoint.config.context,
            chunk: plan.options.chunk,
            kv_tokens: plan.options.pages() * pp_engine::PAGE,
            total: Total {
                file_bytes: sum(|row| row.file_bytes),
                weight_bytes: sum(|row| row.weight_bytes),
                kv_bytes: sum(|row| row.kv_bytes),
                work_bytes: sum(|row| row.work_bytes),
                device_bytes: sum(|row| row.device_bytes),
            },
            memory: memory.collect(),
            wire,
            hop_bytes_decode: plan.options.wire.bytes(1, hidden) as u64,
            hop_bytes_chunk: plan.options.wire.bytes(plan.options.chunk, hidden) as u64,
            stages,
            forecast: None,
        }
    }
}

impl Report for PlanReport {
    fn text(&self) -> String {
        let mut rows: Vec<Vec<String>> = self.stages.iter().map(Row::cells).collect();
        let t = &self.total;
        rows.push(vec![
            "all".into(),
            String::new(),
            self.split.iter().sum::<usize>().to_string(),
            bytes(t.weight_bytes),
            bytes(t.kv_bytes),
            bytes(t.work_bytes),
            bytes(t.device_bytes),
        ]);
        let by_bytes = if self.split_by == "bytes" && self.split.len() > 1 { " by bytes" } else { "" };
        let split = format!("split {}{by_bytes}", pp_engine::split::join(&self.split));
        let mut text = format!(
            "{}\n{}   activations {}   KV {}\n\n{}\n",
            self.model,
            self.split_reason.as_ref().unwrap_or(&split),
            self.activations,
            self.kv,
            table(3, &["stage", "device", "layers", "weights", "KV", "work", "in all"], &rows)
        );
        for stage in &self.stages {
            for widened in &stage.widened {
                text.push_str(&format!("\nstage {}: {}", stage.index, widened.text()));
            }
        }
        let lowered = if self.context < self.context_max {
            format!(" (the model's maximum: {})", count(self.context_max as u64))
        } else {
            String::new()
        };
        text.push_str(&format!(
            "\ncontext {} tokens{lowered}, KV room for {}; chunks of {} tokens",
            count(self.context as u64),
            count(self.kv_tokens as u64),
            self.chunk
        ));
        for memory in &self.memory {
            let whose = if memory.host { format!("host memory ({})", memory.device) } else { memory.device.clone() };
            let available = memory.available_bytes.map_or("an unknown amount".to_owned(), bytes);
            text.push_str(&format!("\n{whose}: {} of {available} to give", bytes(memory.needed_bytes)));
        }
        let log: u64 = self.stages.iter().map(|stage| stage.boundary_log_bytes).sum();
        if log > 0 {
            text.push_str(&format!("\nlogs of what stages hand on: at most {} of their hosts' memory", bytes(log)));
        }
        if self.stages.len() > 1 {
            text.push_str(&format!(
                "\nbetween stages ({}): {} a decoded token, {} a full chunk of a prompt",
                self.wire,
                bytes(self.hop_bytes_decode),
                bytes(self.hop_bytes_chunk)
            ));
        }
        if let Some(forecast) = &self.forecast {
            text.push_str(&format!("\n\n{}", forecast.text()));
        }
        text
    }
}

impl Row {
    /// What it takes of the host's memory, or of another.
    fn bytes_in(&self, host: bool) -> u64 {
        self.device_bytes + if host { self.boundary_log_bytes } else { 0 }
    }

    fn cells(&self) -> Vec<String> {
        let ends = match (self.embedding, self.lm_head) {
            (true, true) => " +embedding +head",
            (true, false) => " +embedding",
            (false, true) => " +head",
            (false, false) => "",
        };
        vec![
            self.index.to_string(),
            placed(self.worker.as_deref(), &self.device),
            format!("{}{ends}", layer_range(self.layers)),
            bytes(self.weight_bytes),
            bytes(self.kv_bytes),
            bytes(self.work_bytes),
            bytes(self.device_bytes),
        ]
    }
}
