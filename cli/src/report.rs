//! What several results have in common: stages, and spreads of measurements.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pp_engine::head::Token;
use pp_engine::pipeline::{Device, Pipeline, StageReport};
use serde::Serialize;

use crate::output::{bytes, printable, table};

/// A format that was widened on loading.
#[derive(Clone, Debug, Serialize)]
pub struct Widened {
    /// In the file.
    pub from: String,
    /// On the device.
    pub to: String,
    /// How many tensors.
    pub tensors: usize,
}

impl Widened {
    /// Of a layout's list.
    pub fn of<S: AsRef<str>>(list: &[(S, S, usize)]) -> Vec<Widened> {
        let one = |(from, to, tensors): &(S, S, usize)| Widened {
            from: from.as_ref().to_owned(),
            to: to.as_ref().to_owned(),
            tensors: *tensors,
        };
        list.iter().map(one).collect()
    }

    /// For people.
    pub fn text(&self) -> String {
        format!("{} kept as {} (8-bit) for {} tensors", self.from, self.to, self.tensors)
    }
}

/// A token with its log-probability and those of the likeliest.
#[derive(Clone, Debug, Serialize)]
pub struct TokenRow {
    pub id: u32,
    pub logprob: Option<f32>,
    pub top: Vec<(u32, f32)>,
}

impl TokenRow {
    /// Of an answer's token.
    pub fn of(token: &Token) -> TokenRow {
        TokenRow { id: token.id, logprob: token.logprob, top: token.candidates.clone() }
    }
}

/// A stage that ran.
#[derive(Clone, Debug, Serialize)]
pub struct StageRow {
    pub index: usize,
    /// The worker that it was on; null: this machine.
    pub worker: Option<String>,
    pub device: String,
    pub device_id: String,
    /// First layer and the one after the last.
    pub layers: (usize, usize),
    pub layer_count: usize,
    /// Bytes of its tensors that were in the model's files, …
    pub file_bytes: u64,
    /// … in the worker's tensor cache, …
    pub cache_bytes: u64,
    /// … and received from other machines.
    pub network_bytes: u64,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    pub work_bytes: u64,
    /// Bytes of all buffers on the device.
    pub device_bytes: u64,
    pub busy_seconds: f64,
    pub steps: u64,
    pub tokens: u64,
    /// Bytes handed on, headers included.
    pub sent_bytes: u64,
    /// Of each token; null where there was none.
    pub sent_bytes_per_token: Option<f64>,
    pub load_seconds: f64,
    pub widened: Vec<Widened>,
}

/// How long to wait for what workers have to say of their stages: they do so ten times a second.
const WORD: Duration = Duration::from_millis(500);

/// Whether a pipeline has stages on workers.
pub fn has_workers(pipeline: &Pipeline) -> bool {
    pipeline.reports().iter().any(|report| report.worker.is_some())
}

/// The stages of a pipeline, with what they have done so far.
pub fn stages(pipeline: &Pipeline) -> Vec<StageRow> {
    let until = Instant::now() + WORD;
    let steps = || pipeline.counters().iter().map(|counters| counters.steps.load(Ordering::Relaxed));
    // What is answered has been through all of them.
    while has_workers(pipeline) && steps().min() != steps().max() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    let stages = pipeline.reports().iter().zip(pipeline.counters());
    stages
        .map(|(report, counters)| StageRow {
            busy_seconds: counters.busy_ns.load(Ordering::Relaxed) as f64 * 1e-9,
            steps: counters.steps.load(Ordering::Relaxed),
            tokens: counters.tokens.load(Ordering::Relaxed),
            sent_bytes: counters.sent_bytes.load(Ordering::Relaxed),
            ..row(report)
        })
        .map(|row| StageRow {
            sent_bytes_per_token: (row.tokens > 0).then(|| row.sent_bytes as f64 / row.tokens as f64),
            ..row
        })
        .collect()
}

fn row(report: &StageReport) -> StageRow {
    let layers = &report.spec.layers;
    StageRow {
        index: report.spec.index,
        worker: report.worker.clone(),
        device: report.device.clone(),
        device_id: report.device_id.clone(),
        layers: (layers.start, layers.end),
        layer_count: layers.len(),
        file_bytes: report.origins.file_bytes,
        cache_bytes: report.origins.cache_bytes,
        network_bytes: report.origins.network_bytes,
        weight_bytes: report.weight_bytes,
        kv_bytes: report.kv_bytes,
        work_bytes: report.work_bytes,
        device_bytes: report.allocated_bytes,
        busy_seconds: 0.0,
        steps: 0,
        tokens: 0,
        sent_bytes: 0,
        sent_bytes_per_token: None,
        load_seconds: report.load_seconds,
        widened: Widened::of(&report.widened),
    }
}

/// A device as tables and notes call it, with the worker that has it.
pub fn place(device: &Device) -> String {
    placed(device.worker().as_deref(), &device.name())
}

/// A device with the worker that has it. What a worker calls its devices is its own affair: nothing of it is obeyed.
pub fn placed(worker: Option<&str>, device: &str) -> String {
    worker.map_or_else(|| device.to_owned(), |worker| format!("{worker}: {}", printable(device)))
}

/// `0-7`, of a first layer and the one after the last.
pub fn layer_range(layers: (usize, usize)) -> String {
    format!("{}-{}", layers.0, layers.1.saturating_sub(1))
}

/// Where a stage's tensors were: `network 45.0 MB`, `cache 3.0 MB, network 42.0 MB`.
fn origins(stage: &StageRow) -> String {
    let from = [("file", stage.file_bytes), ("cache", stage.cache_bytes), ("network", stage.network_bytes)];
    let parts =
        from.iter().filter(|(_, amount)| *amount > 0).map(|(name, amount)| format!("{name} {}", bytes(*amount)));
    parts.collect::<Vec<_>>().join(", ")
}

/// The stages as a table; `wall_seconds` is what their busy time is a share of. Where there are workers it says where
/// weights came from.
pub fn stage_table(stages: &[StageRow], wall_seconds: f64) -> String {
    let has_workers = stages.iter().any(|stage| stage.worker.is_some());
    let mut rows: Vec<Vec<String>> = stages
        .iter()
        .map(|stage| {
            let share = if wall_seconds > 0.0 { 100.0 * stage.busy_seconds / wall_seconds } else { 0.0 };
            vec![
                stage.index.to_string(),
                placed(stage.worker.as_deref(), &stage.device),
                layer_range(stage.layers),
                bytes(stage.weight_bytes),
                bytes(stage.kv_bytes),
                bytes(stage.device_bytes),
                format!("{:.2} s ({share:.0} %)", stage.busy_seconds),
                stage.sent_bytes_per_token.map_or("-".to_owned(), |sent| format!("{sent:.0} B")),
            ]
        })
        .collect();
    let mut names = vec!["stage", "device", "layers", "weights", "KV", "in all", "busy", "sent a token"];
    if has_workers {
        names.push("weights from");
        rows.iter_mut().zip(stages).for_each(|(row, stage)| row.push(origins(stage)));
    }
    table(3, &names, &rows)
}

/// Median, smallest and largest of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of at least one measurement.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 { values[middle] } else { values[middle - 1].midpoint(values[middle]) };
        Some(Spread { median, min, max })
    }
}

/// How measurements are spread: nearest ranks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Percentiles {
    /// Of at least one measurement.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Percentiles> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let max = *values.last()?;
        let rank = |share: f64| values[((values.len() as f64 * share).ceil() as usize).clamp(1, values.len()) - 1];
        Some(Percentiles { p50: rank(0.5), p90: rank(0.9), p99: rank(0.99), max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measurements() {
        assert_eq!(Percentiles::of([]), None);
        let hundred = Percentiles::of((1..=100).map(f64::from)).unwrap();
        assert_eq!(hundred, Percentiles { p50: 50.0, p90: 90.0, p99: 99.0, max: 100.0 });
        assert_eq!(Percentiles::of([7.0]).unwrap().p50, 7.0);
    }

    #[test]
    fn a_spread_is_median_and_extremes() {
        assert_eq!(Spread::of([]), None);
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(Spread::of([4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
    }
}
