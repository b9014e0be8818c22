//! Where a pipeline's time went: a picture, shares, and what to do.

mod gantt;
mod picture;
mod svg;

use std::fs::File;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use pp_engine::trace::causes::{Cause, Window};
use pp_engine::trace::summary::{Options, Summary, time};
use pp_engine::trace::{Nanos, Trace, chrome};
use serde::Serialize;

use crate::args::TraceArgs;
use crate::errors::usage;
use crate::output::{Canvas, Out, Report, count, printable, table};
use crate::report::layer_range;
use picture::Picture;

/// Reads, draws and tells.
pub fn run(args: &TraceArgs) -> Result<ExitCode> {
    let out = Out::new(args.output.json, false);
    let trace = read(&args.file)?;
    let whole = Window::of(&trace);
    if whole.nanos() == 0 || trace.stages.is_empty() {
        return Err(usage(format!("{} holds no micro-batch: the pipeline was asked nothing", args.file.display())));
    }
    let window = window(args, whole)?;
    let summary = Summary::of(&trace, Options { window: Some(window), ..Options::default() });
    let picture = Picture::new(&trace, window, whole.from);
    if let Some(path) = &args.svg {
        std::fs::write(path, svg::draw(&picture, &summary))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    out.result(&TraceReport {
        file: args.file.display().to_string(),
        svg: args.svg.as_ref().map(|path| path.display().to_string()),
        from_seconds: seconds(window.from - whole.from),
        to_seconds: seconds(window.to - whole.from),
        chart: if out.json() { String::new() } else { gantt::draw(&picture, Canvas::stdout()) },
        summary,
    })?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<Trace> {
    let file = File::open(path).map_err(|error| usage(format!("cannot read {}: {error}", path.display())))?;
    chrome::read(file).map_err(|error| usage(format!("{} {error}", path.display())))
}

/// The part that was asked for.
fn window(args: &TraceArgs, whole: Window) -> Result<Window> {
    let length = whole.seconds();
    let (from, to) = (args.from.unwrap_or(0.0), args.to.unwrap_or(length));
    if !(from >= 0.0 && from < to && from < length) {
        return Err(usage(format!(
            "--from {from} --to {to}: expected two times in seconds, the first below the second; the trace is {length:.3} s long"
        )));
    }
    let at = |seconds: f64| whole.from + ((seconds * 1e9) as Nanos).min(whole.nanos());
    Ok(Window { from: at(from), to: if args.to.is_some() { at(to) } else { whole.to } })
}

fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 * 1e-9
}

#[derive(Debug, Serialize)]
struct TraceReport {
    file: String,
    svg: Option<String>,
    /// After the first micro-batch was sent.
    from_seconds: f64,
    to_seconds: f64,
    #[serde(skip)]
    chart: String,
    #[serde(flatten)]
    summary: Summary,
}

impl Report for TraceReport {
    fn text(&self) -> String {
        let mut parts = vec![self.chart.clone(), self.shares(), self.costs(), self.numbers()];
        if !self.summary.actions.is_empty() {
            let words = self.summary.actions.iter().enumerate().map(|(place, action)| {
                let gain = if action.gain > 1.0 { format!(" (up to {:.2}×)", action.gain) } else { String::new() };
                format!("{} {}{gain}", if place == 0 { "next:" } else { "also:" }, action.words)
            });
            parts.push(words.collect::<Vec<_>>().join("\n"));
        }
        parts.join("\n\n")
    }
}

impl TraceReport {
    fn shares(&self) -> String {
        let mut header = vec!["% of time".to_owned()];
        header.extend(Cause::ALL.map(|cause| match picture::symbol(cause) {
            None => cause.name().to_owned(),
            Some(symbol) => format!("{symbol} {}", short(cause)),
        }));
        let rows: Vec<Vec<String>> = self
            .summary
            .stages
            .iter()
            .enumerate()
            .map(|(index, stage)| {
                let shares = Cause::ALL.map(|cause| match stage.shares.of(cause) {
                    0.0 => "-".to_owned(),
                    share => format!("{:.1}", 100.0 * share),
                });
                [format!("stage {index}")].into_iter().chain(shares).collect()
            })
            .collect();
        table(1, &header.iter().map(String::as_str).collect::<Vec<_>>(), &rows)
    }

    fn costs(&self) -> String {
        let rows: Vec<Vec<String>> = self
            .summary
            .stages
            .iter()
            .enumerate()
            .map(|(index, stage)| {
                let guess = if stage.fitted { "" } else { "~" };
                vec![
                    format!("stage {index}"),
                    printable(&stage.device),
                    layer_range(stage.layers),
                    stage.micro_batches.to_string(),
                    count(stage.tokens),
                    time(stage.step_seconds),
                    format!("{guess}{}", time(stage.alpha)),
                    format!("{guess}{}", time(stage.beta)),
                    time(self.summary.hop_seconds[index]),
                ]
            })
            .collect();
        let header =
            ["cost", "device", "layers", "micro-batches", "tokens", "on average", "α", "β a token", "hop to it"];
        table(3, &header, &rows)
    }

    fn numbers(&self) -> String {
        let s = &self.summary;
        let percent = |share: f64| format!("{:.0} %", 100.0 * share);
        let mut lines = vec![
            format!(
                "{} micro-batches of {:.1} tokens in {}: {:.1} tokens/s ({} of prompts, {} of answers)",
                count(s.micro_batches as u64),
                s.batch,
                time(s.seconds),
                s.tokens_per_second,
                count(s.prompt_tokens),
                count(s.answer_tokens)
            ),
            format!(
                "in flight: {:.1} on average, mostly M = {}; M* = {} fill the {} stages",
                s.in_flight,
                s.groups,
                s.law.knee,
                s.stages.len()
            ),
            format!(
                "the head worked {} of the time, and {} of it nothing was asked for",
                percent(s.head_working),
                percent(s.head_idle)
            ),
            format!(
                "busy: {} on average, stage {} {}; the law allows {} and {} with so many in flight",
                percent(s.busy),
                s.bottleneck,
                percent(s.bottleneck_busy),
                percent(s.law.busy),
                percent(s.law.bottleneck_busy)
            ),
        ];
        if let Some(speedup) = s.law.speedup_max {
            lines.push(format!(
                "S(B) = {speedup:.2} at {:.0} tokens in flight: at most so many times one device that holds everything",
                s.groups as f64 * s.batch
            ));
        }
        if s.dropped > 0 {
            lines.push(format!("{} older micro-batches were forgotten", count(s.dropped)));
        }
        lines.join("\n")
    }
}

/// As narrow as a column of shares.
fn short(cause: Cause) -> &'static str {
    match cause {
        Cause::Busy => "busy",
        Cause::FillDrain => "fill",
        Cause::Upstream => "upstr",
        Cause::Hop => "hop",
        Cause::BackPressure => "back",
        Cause::Starved => "starved",
        Cause::KvWait => "KV",
        Cause::Overhead => "own",
        Cause::Outage => "outage",
        Cause::Unattributed => "none",
    }
}

#[cfg(test)]
mod tests;
