//! What each stage would hold, before anything is loaded.

use std::process::ExitCode;

use anyhow::Result;
use pp_engine::cluster::control::Purpose;
use pp_engine::layout::StageLayout;
use pp_engine::pipeline::Device;
use serde::Serialize;

use crate::args::PlanArgs;
use crate::output::{Out, Report, bytes, count, table};
use crate::plan::{self, Plan};
use crate::report::{Widened, layer_range, placed};

/// Plans and tells.
pub fn run(args: &PlanArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    // Who plans takes nothing from anybody.
    let wanted = plan::Wanted { purpose: Purpose::Look, ..plan::Wanted::one(None) };
    let plan = plan::make(super::open(&args.model)?, &args.pipeline, wanted, &out)?;
    out.result(&PlanReport::new(&plan))?;
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, Serialize)]
struct PlanReport {
    model: String,
    split: Vec<usize>,
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
    fn new(layout: &StageLayout, device: &Device) -> Row {
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
            widened: Widened::of(&layout.widened()),
        }
    }
}

impl PlanReport {
    fn new(plan: &Plan) -> PlanReport {
        let (activations, kv, wire) = super::precision(plan);
        let stages: Vec<Row> = plan.layouts.iter().zip(&plan.devices).map(|(l, d)| Row::new(l, d)).collect();
        let sum = |part: fn(&Row) -> u64| stages.iter().map(part).sum();
        let memory = plan.pools.iter().map(|pool| Memory {
            worker: pool.worker.clone(),
            device: pool.device.clone(),
            host: pool.host,
            stages: pool.stages.clone(),
            available_bytes: pool.available,
            needed_bytes: pool.stages.iter().map(|stage| stages[*stage].device_bytes).sum(),
        });
        let hidden = plan.checkpoint.config.hidden;
        PlanReport {
            model: plan.checkpoint.path.display().to_string(),
            split: plan.counts.clone(),
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
        let mut text = format!(
            "{}\nsplit {}   activations {}   KV {}\n\n{}\n",
            self.model,
            pp_engine::split::join(&self.split),
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
        if self.stages.len() > 1 {
            text.push_str(&format!(
                "\nbetween stages ({}): {} a decoded token, {} a full chunk of a prompt",
                self.wire,
                bytes(self.hop_bytes_decode),
                bytes(self.hop_bytes_chunk)
            ));
        }
        text
    }
}

impl Row {
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
