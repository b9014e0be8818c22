//! How far long work is: bars where stderr is a terminal, else a line now and then.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use pp_engine::weights::LoadProgress;

use super::{Out, bytes};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);
/// Seconds between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Bars of stages that load.
pub struct Loading {
    bars: Vec<ProgressBar>,
    names: Vec<String>,
    at: Vec<LoadProgress>,
    /// Since when each stage receives from other machines.
    receiving: Vec<Option<Instant>>,
    line: Lines,
}

impl Loading {
    /// A bar for each of `stages`: its name and the bytes it will read.
    pub fn new(out: &Out, stages: Vec<(String, u64)>) -> Loading {
        let at = stages.iter().map(|(_, total)| LoadProgress { total_bytes: *total, ..LoadProgress::default() });
        let at: Vec<LoadProgress> = at.collect();
        let width = stages.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let names: Vec<String> = stages.iter().map(|(name, _)| format!("{name:width$}")).collect();
        let bars = if on_terminal(out) {
            let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
            stages.iter().zip(&names).map(|((_, total), name)| all.add(bar(*total, name))).collect()
        } else {
            Vec::new()
        };
        let receiving = vec![None; at.len()];
        Loading { bars, names, at, receiving, line: Lines::new(out) }
    }

    /// How far stage `stage` is.
    pub fn update(&mut self, stage: usize, at: LoadProgress) {
        let total_bytes = if at.hashing.is_some() { self.at[stage].total_bytes } else { at.total_bytes };
        self.at[stage] = LoadProgress { total_bytes, ..at };
        if at.origins.network_bytes > 0 {
            self.receiving[stage].get_or_insert_with(Instant::now);
        }
        if let Some(bar) = self.bars.get(stage) {
            bar.set_position(at.at_hand());
            bar.set_message(self.text(stage));
        }
        let text = |stage: usize| format!("{} {}", self.names[stage].trim_end(), self.text(stage));
        let all = || format!("loading: {}", (0..self.names.len()).map(text).collect::<Vec<_>>().join("; "));
        let text = self.line.is_due().then(all);
        if let Some(text) = text {
            self.line.say(|| text);
        }
    }

    fn text(&self, stage: usize) -> String {
        how_far(&self.at[stage], self.receiving[stage].map(|since| since.elapsed().as_secs_f64()))
    }

    /// All are ready: the bars stay, full.
    pub fn finish(self) {
        for (bar, at) in self.bars.iter().zip(&self.at) {
            bar.set_position(at.total_bytes);
            bar.set_message(bytes(at.total_bytes));
            bar.finish();
        }
        if !self.bars.is_empty() {
            // They leave the cursor behind the last of them, for whoever writes next to wrap.
            super::say("\n");
        }
    }

    /// It failed: the bars go.
    pub fn abandon(self) {
        self.bars.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// `12.0 MB of 45.0 MB`, of a stage; with `34.0 MB/s, 1 s left` where it has been receiving for so many seconds.
fn how_far(at: &LoadProgress, receiving_seconds: Option<f64>) -> String {
    if let Some((done, total)) = at.hashing {
        return format!("the head reads the model once: {} of {}", bytes(done), bytes(total));
    }
    let (done, total) = (at.at_hand(), at.total_bytes);
    let text = format!("{} of {}", bytes(done), bytes(total));
    // In the first moment it says little.
    match receiving_seconds.filter(|seconds| *seconds > 0.1 && done < total) {
        Some(seconds) => {
            let rate = (at.origins.network_bytes as f64 / seconds).max(1.0);
            let left = (total - done) as f64 / rate;
            format!("{text}  {}/s, {} s left", bytes(rate as u64), left.ceil() as u64)
        }
        None => text,
    }
}

/// One count that rises; shown only when it takes long.
pub struct Steps {
    what: &'static str,
    unit: &'static str,
    started: Instant,
    /// How many were done when it was first told of: they took no time.
    before: Option<usize>,
    bar: Option<ProgressBar>,
    terminal: bool,
    line: Lines,
}

impl Steps {
    /// `what` is done, counted in `unit`: for instance `prompt` in `tokens`.
    pub fn new(out: &Out, what: &'static str, unit: &'static str) -> Steps {
        let (started, terminal, line) = (Instant::now(), on_terminal(out), Lines::new(out));
        Steps { what, unit, started, before: None, bar: None, terminal, line }
    }

    /// `done` of `total` are done.
    pub fn update(&mut self, done: usize, total: usize) {
        if self.terminal && self.bar.is_none() && done < total && self.started.elapsed() > PATIENCE {
            self.bar = Some(bar(total as u64, self.what).with_elapsed(self.started.elapsed()));
        }
        let before = *self.before.get_or_insert(done);
        let (unit, seconds) = (self.unit, self.started.elapsed().as_secs_f64());
        let text = || {
            format!(
                "{done} of {total} {unit}{}",
                pace(done.saturating_sub(before), total.saturating_sub(done), unit, seconds)
            )
        };
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
            bar.set_message(text());
        }
        self.line.say(|| format!("{}: {}", self.what, text()));
    }

    /// It is done: the bar goes.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// `  34 MiB/s, 5 s left`, once so many were done in so many seconds that it says something.
fn pace(done: usize, left: usize, unit: &str, seconds: f64) -> String {
    if done == 0 || left == 0 || seconds < PATIENCE.as_secs_f64() {
        return String::new();
    }
    match done as f64 / seconds {
        // Few long steps are no pace.
        rate if rate < 1.0 => String::new(),
        rate => format!("  {} {unit}/s, {} s left", rate.round(), (left as f64 / rate).ceil()),
    }
}

fn bar(total: u64, name: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix}  {bar:24} {msg}").expect("the template is well formed");
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    bar.with_style(style.progress_chars("█▉▊▋▌▍▎▏ ")).with_prefix(name.to_owned())
}

fn on_terminal(out: &Out) -> bool {
    !out.quiet && io::stderr().is_terminal()
}

/// Lines for logs, seldom.
struct Lines {
    out: Out,
    last: Instant,
    terminal: bool,
}

impl Lines {
    fn new(out: &Out) -> Lines {
        Lines { out: *out, last: Instant::now(), terminal: io::stderr().is_terminal() }
    }

    fn is_due(&self) -> bool {
        !self.terminal && self.last.elapsed() >= LINE_EVERY
    }

    fn say(&mut self, text: impl FnOnce() -> String) {
        if self.is_due() {
            self.last = Instant::now();
            self.out.note(&text());
        }
    }
}

#[cfg(test)]
mod tests {
    use pp_engine::checkpoint::supplied::Origins;

    use super::*;

    #[test]
    fn steps_have_a_pace_once_it_says_something() {
        assert_eq!(pace(60, 90, "MiB", 2.0), "  30 MiB/s, 3 s left");
        let quiet = [pace(0, 9, "MiB", 9.0), pace(9, 0, "MiB", 9.0), pace(9, 9, "MiB", 0.5), pace(1, 2, "checks", 4.0)];
        assert_eq!(quiet, [""; 4]);
    }

    #[test]
    fn what_is_received_has_a_rate_and_a_time_left() {
        let origins = Origins { network_bytes: 20_000_000, cache_bytes: 5_000_000, ..Origins::default() };
        let at = LoadProgress { read_bytes: 1_000_000, total_bytes: 45_000_000, origins, hashing: None };
        assert_eq!(how_far(&at, Some(2.0)), "25.0 MB of 45.0 MB  10.0 MB/s, 2 s left");
        assert_eq!(how_far(&at, None), "25.0 MB of 45.0 MB");
        let all = LoadProgress { total_bytes: 25_000_000, ..at };
        assert_eq!(how_far(&all, Some(2.0)), "25.0 MB of 25.0 MB");
        let hashing = LoadProgress { hashing: Some((1_000, 2_000)), ..at };
        assert_eq!(how_far(&hashing, None), "the head reads the model once: 1.0 kB of 2.0 kB");
    }
}
