//! A plan for cards that are not here.

use std::path::Path;

use anyhow::Result;
use pp_engine::Profile;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::layout::StageOptions;
use pp_engine::planner::{self, Stage};
use pp_engine::split::{Split, join};
use serde::Serialize;

use super::asked;
use super::forecast::ForecastReport;
use crate::args::PlanArgs;
use crate::errors;
use crate::hardware::Hardware;
use crate::measured::{self, Forecast};
use crate::output::{Report, bytes, count, table};
use crate::report::layer_range;
use crate::settings;

/// What stages on such cards would hold and reach.
#[derive(Debug, Serialize)]
pub(super) struct ElsewherePlan {
    model: String,
    hardware: String,
    split: Vec<usize>,
    activations: &'static str,
    kv: &'static str,
    wire: &'static str,
    chunk: usize,
    /// Tokens whose keys and values there is room for.
    kv_tokens: Option<u64>,
    stages: Vec<Row>,
    forecast: ForecastReport,
}

#[derive(Debug, Serialize)]
struct Row {
    index: usize,
    card: String,
    /// First layer and the one after the last.
    layers: (usize, usize),
    layer_count: usize,
    /// Weights and buffers between kernels.
    held_bytes: u64,
    available_bytes: Option<u64>,
}

/// Plans a model for the cards of a file.
pub(super) fn plan(checkpoint: &Checkpoint, args: &PlanArgs, path: &Path) -> Result<ElsewherePlan> {
    let pipeline = &args.pipeline;
    let (activations, kv) = settings::precision(pipeline.activations, pipeline.kv, settings::is_quantised(checkpoint))?;
    let max = checkpoint.config.context;
    let context = settings::context(pipeline.ctx, max)?;
    let chunk = settings::chunk(pipeline.max_batch_tokens, Profile::CARD.chunk)?;
    let most = args.levels().iter().copied().max().unwrap_or(1);
    let sequences = settings::sequences(pipeline.max_sequences, most)?;
    let kv_tokens = settings::kv_tokens(pipeline.kv_tokens)?;
    let wire = settings::wire(pipeline.wire);
    let options = StageOptions {
        activations,
        kv,
        context: context.unwrap_or(max),
        sequences,
        kv_tokens: context.unwrap_or(max),
        chunk,
        wire,
    };
    let hardware = Hardware::read(path)?;
    let problem = hardware.problem(checkpoint, &options)?;
    let wanted = measured::Wanted {
        stages: pipeline.stages,
        ordered: false,
        context,
        kv_tokens,
        sequences,
        context_max: max,
        chunk,
        tile: Profile::CARD.token_tile(activations) as usize,
    };
    let wish = wanted.wish(pipeline, &problem);
    let stages = match settings::split(pipeline)? {
        Split::Auto => planner::best(&problem, &wish).map_err(|error| measured::refused(&error))?,
        split => {
            let counts = split.resolve(pipeline.stages, &settings::costs(checkpoint))?;
            if counts.len() > hardware.names().len() {
                let (stages, cards) = (counts.len(), hardware.names().len());
                return Err(errors::usage(format!("{stages} stages, but {} has {cards} card(s)", path.display())));
            }
            let mut first = 0;
            let stage = |(device, layers): (usize, usize)| {
                first += layers;
                Stage { device, layers: first - layers..first }
            };
            let stages: Vec<Stage> = counts.into_iter().enumerate().map(stage).collect();
            if !problem.fits(&stages, wish.kv_tokens) {
                return Err(errors::device(too_large(&problem, &stages)));
            }
            stages
        }
    };
    let forecast = Forecast { stages: stages.clone(), wish, problem };
    let problem = &forecast.problem;
    let row = |(index, stage): (usize, &Stage)| Row {
        index,
        card: problem.devices[stage.device].name.clone(),
        layers: (stage.layers.start, stage.layers.end),
        layer_count: stage.layers.len(),
        held_bytes: problem.held(stage.device, &stage.layers),
        available_bytes: problem.pools[problem.devices[stage.device].pool],
    };
    Ok(ElsewherePlan {
        model: checkpoint.path.display().to_string(),
        hardware: path.display().to_string(),
        split: measured::counts(&stages),
        activations: activations.name(),
        kv: kv.name(),
        wire: wire.name(),
        chunk,
        kv_tokens: planner::kv_tokens(problem, &stages),
        stages: stages.iter().enumerate().map(row).collect(),
        forecast: ForecastReport::new(&forecast, &asked(args, true)),
    })
}

/// Which stage is too large for its card, and by how much.
fn too_large(problem: &planner::Problem, stages: &[Stage]) -> String {
    let over = stages.iter().enumerate().filter_map(|(index, stage)| {
        let device = &problem.devices[stage.device];
        let (held, room) = (problem.held(stage.device, &stage.layers), problem.pools[device.pool]?);
        (held > room).then(|| format!("stage {index} takes {}, {} has {}", bytes(held), device.name, bytes(room)))
    });
    let over: Vec<String> = over.collect();
    let what =
        if over.is_empty() { "keys and values do not fit beside the weights".to_owned() } else { over.join("; ") };
    format!("this split does not fit the cards: {what}; --split auto finds one that does, if there is one")
}

impl Report for ElsewherePlan {
    fn text(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .stages
            .iter()
            .map(|row| {
                vec![
                    row.index.to_string(),
                    row.card.clone(),
                    layer_range(row.layers),
                    bytes(row.held_bytes),
                    row.available_bytes.map_or("-".to_owned(), bytes),
                ]
            })
            .collect();
        let room = self.kv_tokens.map_or("any number of".to_owned(), count);
        format!(
            "{} on the cards of {}\nsplit {}   activations {}   KV {}   wire {}\n\n{}\n\nKV room for {room} tokens; chunks of {} tokens\n\n{}",
            self.model,
            self.hardware,
            join(&self.split),
            self.activations,
            self.kv,
            self.wire,
            table(3, &["stage", "card", "layers", "weights and work", "to give"], &rows),
            self.chunk,
            self.forecast.text()
        )
    }
}
