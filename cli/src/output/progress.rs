//! How far long work is: bars where stderr is a terminal, else a line now and then.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Out, bytes};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(1);
/// Seconds between two lines where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Bars of stages that load.
pub struct Loading {
    bars: Vec<ProgressBar>,
    names: Vec<String>,
    at: Vec<(u64, u64)>,
    line: Lines,
}

impl Loading {
    /// A bar for each of `stages`: its name and the bytes it will read.
    pub fn new(out: &Out, stages: Vec<(String, u64)>) -> Loading {
        let at = stages.iter().map(|(_, total)| (0, *total)).collect();
        let width = stages.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let names: Vec<String> = stages.iter().map(|(name, _)| format!("{name:width$}")).collect();
        let bars = if on_terminal(out) {
            let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr_with_hz(10));
            stages.iter().zip(&names).map(|((_, total), name)| all.add(bar(*total, name))).collect()
        } else {
            Vec::new()
        };
        Loading { bars, names, at, line: Lines::new(out) }
    }

    /// Stage `stage` has read `read` of `total` bytes.
    pub fn update(&mut self, stage: usize, read: u64, total: u64) {
        self.at[stage] = (read, total);
        if let Some(bar) = self.bars.get(stage) {
            bar.set_position(read);
            bar.set_message(format!("{} of {}", bytes(read), bytes(total)));
        }
        let (names, at) = (&self.names, &self.at);
        self.line.say(|| {
            let one = |(name, (read, total)): (&String, &(u64, u64))| {
                format!("{} {} of {}", name.trim_end(), bytes(*read), bytes(*total))
            };
            format!("loading: {}", names.iter().zip(at).map(one).collect::<Vec<_>>().join("; "))
        });
    }

    /// All are ready: the bars stay, full.
    pub fn finish(self) {
        for (bar, (_, total)) in self.bars.iter().zip(&self.at) {
            bar.set_message(bytes(*total));
            bar.finish();
        }
    }

    /// It failed: the bars go.
    pub fn abandon(self) {
        self.bars.iter().for_each(ProgressBar::finish_and_clear);
    }
}

/// One count that rises; shown only when it takes long.
pub struct Steps {
    what: &'static str,
    unit: &'static str,
    started: Instant,
    bar: Option<ProgressBar>,
    terminal: bool,
    line: Lines,
}

impl Steps {
    /// `what` is done, counted in `unit`: for instance `prompt` in `tokens`.
    pub fn new(out: &Out, what: &'static str, unit: &'static str) -> Steps {
        Steps { what, unit, started: Instant::now(), bar: None, terminal: on_terminal(out), line: Lines::new(out) }
    }

    /// `done` of `total` are done.
    pub fn update(&mut self, done: usize, total: usize) {
        if self.terminal && self.bar.is_none() && done < total && self.started.elapsed() > PATIENCE {
            self.bar = Some(bar(total as u64, self.what).with_elapsed(self.started.elapsed()));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
            bar.set_message(format!("{done} of {total} {}", self.unit));
        }
        self.line.say(|| format!("{}: {done} of {total} {}", self.what, self.unit));
    }

    /// It is done: the bar goes.
    pub fn finish(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
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

    fn say(&mut self, text: impl FnOnce() -> String) {
        if !self.terminal && self.last.elapsed() >= LINE_EVERY {
            self.last = Instant::now();
            self.out.note(&text());
        }
    }
}
