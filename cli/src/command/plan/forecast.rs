//! What a split should reach, why its stages got their layers, and what would be better.

use pp_engine::planner::{self, Load, Prediction, Problem, Stage, Wish};
use pp_engine::split::join;
use serde::Serialize;

use crate::measured::{Forecast, counts};
use crate::output::{bytes, table};

/// What is better by less is as good.
const WORTH_A_WORD: f64 = 1.03;
/// A stage that is busy for as much of a round sets its pace.
const SETS_THE_PACE: f64 = 0.95;

/// A forecast as it is told.
#[derive(Debug, Serialize)]
pub(super) struct ForecastReport {
    /// `measured`, or `estimated` from a card's figures and simulated.
    source: &'static str,
    prompt_tokens: usize,
    answer_tokens: usize,
    concurrency: Vec<PredictionRow>,
    /// How many requests at once the reasons are for.
    reasons_at: usize,
    reasons: Vec<Reason>,
    left_out: Vec<String>,
    alternatives: Vec<Alternative>,
}

#[derive(Debug, Serialize)]
struct PredictionRow {
    concurrency: usize,
    groups: usize,
    tokens_per_s: f64,
    time_per_token_seconds: f64,
    first_token_seconds: f64,
}

/// Why a stage has its layers.
#[derive(Debug, Serialize)]
struct Reason {
    stage: usize,
    device: String,
    layers: usize,
    step_seconds: f64,
    /// Share of a round.
    busy: f64,
    needed_bytes: u64,
    available_bytes: Option<u64>,
    /// `pace`, `memory`, or null.
    binds: Option<&'static str>,
}

/// Something that would be better.
#[derive(Debug, Serialize)]
struct Alternative {
    text: String,
    split: Option<Vec<usize>>,
    concurrency: usize,
    tokens_per_s: f64,
    /// Of what this split gives.
    times: f64,
}

/// What is asked of a forecast.
pub(super) struct Asked<'a> {
    pub(super) levels: &'a [usize],
    pub(super) prompt: usize,
    pub(super) answer: usize,
    /// By the simulator, not by the law.
    pub(super) simulated: bool,
}

impl ForecastReport {
    pub(super) fn new(forecast: &Forecast, asked: &Asked<'_>) -> ForecastReport {
        let Asked { prompt, answer, .. } = *asked;
        let at = |concurrency| Load { concurrency, prompt, answer, ..forecast.wish.load };
        let predict = |stages: &[Stage], concurrency| {
            let load = at(concurrency);
            let simulated = asked.simulated.then(|| planner::simulate(&forecast.problem, stages, &load)).flatten();
            simulated.unwrap_or_else(|| planner::expected(&forecast.problem, stages, &load))
        };
        let rows: Vec<Prediction> = asked.levels.iter().map(|level| predict(&forecast.stages, *level)).collect();
        let reasons_at = forecast.wish.load.concurrency;
        ForecastReport {
            source: if asked.simulated { "estimated" } else { "measured" },
            prompt_tokens: prompt,
            answer_tokens: answer,
            reasons: reasons(forecast, &at(reasons_at)),
            reasons_at,
            left_out: forecast.left_out().into_iter().map(str::to_owned).collect(),
            alternatives: alternatives(forecast, &rows, &at, &predict),
            concurrency: rows.into_iter().map(PredictionRow::of).collect(),
        }
    }

    pub(super) fn text(&self) -> String {
        let ms = |seconds: f64| format!("{:.1}", seconds * 1e3);
        let rows: Vec<Vec<String>> = self
            .concurrency
            .iter()
            .map(|row| {
                vec![
                    row.concurrency.to_string(),
                    format!("{:.1}", row.tokens_per_s),
                    ms(row.time_per_token_seconds),
                    ms(row.first_token_seconds),
                    row.groups.to_string(),
                ]
            })
            .collect();
        let how = match self.source {
            "measured" => "from measured times",
            _ => "estimated from the cards' figures, simulated",
        };
        let header = ["at once", "tokens/s", "per token ms", "first token ms", "groups M"];
        let mut text = format!(
            "predicted, {how} (prompts of {}, answers of {} tokens)\n{}\n\nwhy, at {} at once:",
            self.prompt_tokens,
            self.answer_tokens,
            table(0, &header, &rows),
            self.reasons_at
        );
        for reason in &self.reasons {
            text.push_str(&format!("\n  {}", reason.text()));
        }
        if self.reasons.iter().all(|reason| reason.binds != Some("pace")) {
            text.push_str(
                "\n  no stage is full: the way round the pipe takes the time, and more requests would fill it",
            );
        }
        if !self.left_out.is_empty() {
            text.push_str(&format!("\nleft out: {} (--use-all keeps it)", self.left_out.join(", ")));
        }
        for alternative in &self.alternatives {
            text.push_str(&format!("\nbetter: {}", alternative.text));
        }
        text
    }
}

impl PredictionRow {
    fn of(of: Prediction) -> PredictionRow {
        PredictionRow {
            concurrency: of.concurrency,
            groups: of.groups,
            tokens_per_s: of.tokens_per_second,
            time_per_token_seconds: of.seconds_per_token,
            first_token_seconds: of.first_token_seconds,
        }
    }
}

impl Reason {
    fn text(&self) -> String {
        let memory = match self.available_bytes {
            Some(available) => format!("{} of {}", bytes(self.needed_bytes), bytes(available)),
            None => bytes(self.needed_bytes),
        };
        let binds = match self.binds {
            Some("pace") => "; it sets the pace",
            Some(_) => "; one layer more would not fit",
            None => "",
        };
        format!(
            "stage {}: {} layer(s) on {}: {:.2} ms a step, busy {:.0} %, {memory}{binds}",
            self.stage,
            self.layers,
            self.device,
            self.step_seconds * 1e3,
            100.0 * self.busy
        )
    }
}

fn reasons(forecast: &Forecast, load: &Load) -> Vec<Reason> {
    let Forecast { problem, stages, wish } = forecast;
    let shares = planner::share(problem, stages, load);
    let most = shares.iter().map(|share| share.busy).fold(0.0, f64::max);
    let reason = |(index, stage): (usize, &Stage)| {
        let device = &problem.devices[stage.device];
        let held = |stage: &Stage| {
            let kv = device.memory.kv_per_token * wish.kv_tokens * stage.layers.len() as u64;
            problem.held(stage.device, &stage.layers) + kv
        };
        let is_full = {
            let mut more = stages.clone();
            grow(&mut more, index).is_some() && !problem.fits(&more, wish.kv_tokens)
        };
        let sets_the_pace = shares[index].busy >= most * SETS_THE_PACE && most >= SETS_THE_PACE;
        Reason {
            stage: index,
            device: device.name.clone(),
            layers: stage.layers.len(),
            step_seconds: shares[index].step_seconds,
            busy: shares[index].busy,
            needed_bytes: held(stage),
            available_bytes: problem.pools[device.pool],
            binds: if sets_the_pace { Some("pace") } else { is_full.then_some("memory") },
        }
    };
    stages.iter().enumerate().map(reason).collect()
}

/// Gives a stage a layer of a neighbour's, if one has more than one.
fn grow(stages: &mut [Stage], index: usize) -> Option<()> {
    if let Some(next) = stages.get(index + 1).filter(|next| next.layers.len() > 1) {
        let end = next.layers.start + 1;
        (stages[index].layers.end, stages[index + 1].layers.start) = (end, end);
        return Some(());
    }
    let before = index.checked_sub(1).filter(|before| stages[*before].layers.len() > 1)?;
    let start = stages[index].layers.start - 1;
    (stages[before].layers.end, stages[index].layers.start) = (start, start);
    Some(())
}

/// `at one request`, `at 8 at once`
fn at_text(concurrency: usize) -> String {
    if concurrency == 1 { "at one request".to_owned() } else { format!("at {concurrency} at once") }
}

/// `12 % more`, `1.9× as much`
fn more_text(times: f64) -> String {
    if times < 1.5 { format!("{:.0} % more", 100.0 * (times - 1.0)) } else { format!("{times:.1}× as much") }
}

fn alternatives(
    forecast: &Forecast,
    rows: &[Prediction],
    at: &impl Fn(usize) -> Load,
    predict: &impl Fn(&[Stage], usize) -> Prediction,
) -> Vec<Alternative> {
    let Forecast { problem, stages, wish } = forecast;
    let mut found = Vec::new();
    let ends = rows.first().into_iter().chain(rows.last().filter(|_| rows.len() > 1));
    for row in ends {
        let (concurrency, now) = (row.concurrency, row.tokens_per_second);
        let wish = Wish { load: at(concurrency), use_all: false, ordered: false, ..*wish };
        let best = numbers_of_stages(problem, stages.len()).into_iter().filter_map(|count| {
            let split = planner::best(problem, &Wish { stages: Some(count), ..wish }).ok()?;
            let rate = predict(&split, concurrency).tokens_per_second;
            (split != *stages).then_some((rate, split))
        });
        let best = best.max_by(|a, b| a.0.total_cmp(&b.0));
        if let Some((rate, split)) = best.filter(|(rate, _)| now > 0.0 && rate / now > WORTH_A_WORD) {
            found.push(Alternative {
                text: format!(
                    "{} would give {} {}",
                    named(problem, &split, stages.len()),
                    more_text(rate / now),
                    at_text(concurrency)
                ),
                split: Some(counts(&split)),
                concurrency,
                tokens_per_s: rate,
                times: rate / now,
            });
        }
    }
    if let Some(row) = rows.last().filter(|row| row.concurrency > 1) {
        let wish = Wish { load: at(row.concurrency), stages: None, use_all: false, ordered: false, ..*wish };
        let rate = planner::replicas(problem, stages, &wish).ok().flatten();
        if let Some(rate) = rate.filter(|rate| rate / row.tokens_per_second > WORTH_A_WORD) {
            let times = rate / row.tokens_per_second;
            let text = format!(
                "two replicas, each over half of the devices, would give {} {}",
                more_text(times),
                at_text(row.concurrency)
            );
            found.push(Alternative { text, split: None, concurrency: row.concurrency, tokens_per_s: rate, times });
        }
    }
    found
}

/// How many stages are looked at beside as many as there are.
fn numbers_of_stages(problem: &Problem, now: usize) -> Vec<usize> {
    let most = problem.devices.len().min(problem.layers());
    let mut numbers: Vec<usize> = [1, 2, now / 2, now.saturating_sub(1), now, now + 1, most]
        .into_iter()
        .filter(|n| (1..=most).contains(n))
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// `2 stages instead of 4 (--split 16,14 on a, b)`
fn named(problem: &Problem, split: &[Stage], now: usize) -> String {
    let devices: Vec<&str> = split.iter().map(|stage| problem.devices[stage.device].name.as_str()).collect();
    let how = format!("split {} on {}", join(&counts(split)), devices.join(", "));
    match split.len() {
        count if count == now => how,
        1 => format!("1 stage instead of {now} (on {})", devices.join(", ")),
        count => format!("{count} stages instead of {now} ({how})"),
    }
}
