//! What the pipeline is doing, as it does it: a few rows at the foot of the terminal.
//!
//! The rows are kept out of the terminal's scrolling region, so that whatever is printed meanwhile, streamed answers
//! on stdout included, scrolls above them and stays in the scrollback. An inline viewport would ask the terminal for
//! its cursor, and crossterm asks on stdout, which may be a file.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pp_engine::head::Head;
use pp_engine::schedule::Status;
use ratatui::backend::CrosstermBackend;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Paragraph;
use ratatui::{Terminal, TerminalOptions, Viewport};

use super::{Out, say};
use crate::report::layer_range;

/// Between two pictures.
const EVERY: Duration = Duration::from_millis(125);
/// What rates and shares are taken over.
const WINDOW: Duration = Duration::from_secs(2);
/// Columns of a bar.
const BAR: usize = 24;
/// Rows beside those of the stages.
const ROWS: u16 = 4;
/// Rows that are left to the rest of the terminal at least.
const ROWS_ABOVE: u16 = 4;

/// Whether the terminal's scrolling region is ours.
static DOCKED: AtomicBool = AtomicBool::new(false);

/// A picture of the pipeline.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The stages, in order.
    pub stages: Vec<StageView>,
    /// The scheduler.
    pub status: Status,
    /// Of all prompts, lately.
    pub prompt_tokens_per_s: f64,
    /// Of all answers, lately.
    pub tokens_per_s: f64,
}

/// A stage in a picture.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StageView {
    /// Device, for people.
    pub device: String,
    /// First layer and the one after the last.
    pub layers: (usize, usize),
    /// Share of the last seconds that it was busy.
    pub busy: f64,
}

/// Lines of a picture: a rule, the stages, the pipe, the queue, the cache.
pub fn lines(snapshot: &Snapshot) -> Vec<Line<'static>> {
    let green = Style::new().fg(Color::Green);
    let ranges: Vec<String> = snapshot.stages.iter().map(|stage| layer_range(stage.layers)).collect();
    let wide = ranges.iter().map(String::len).max().unwrap_or(0);
    let stages = snapshot.stages.iter().zip(&ranges).enumerate().map(|(index, (stage, range))| {
        let percent = 100.0 * stage.busy;
        Line::from(vec![
            Span::raw(format!("stage {index:<2} ")),
            Span::styled(bar(&[(stage.busy, '█')]), green),
            Span::raw(format!(" {percent:>3.0} %  layers {range:wide$}  {}", stage.device)),
        ])
    });
    let s = &snapshot.status;
    let mut pipe =
        format!("pipe     {} in flight, {}", of(s.in_flight, "micro-batch", "es"), of(s.groups, "group", "s"));
    if s.single_stream() && snapshot.stages.len() > 1 {
        pipe.push_str(&format!("; single-stream: 1/{} of the pipe", snapshot.stages.len()));
    }
    let queue = format!(
        "queue    {} waiting, {} running, {} decoding; {:.1} tokens/s, prompts {:.0}/s",
        s.waiting, s.running, s.decoding, snapshot.tokens_per_s, snapshot.prompt_tokens_per_s
    );
    let share = |pages: usize| pages as f64 / s.pages.max(1) as f64;
    let cache = Line::from(vec![
        Span::raw("KV       "),
        Span::styled(bar(&[(share(s.held_pages), '█'), (share(s.idle_pages), '▒')]), green),
        Span::raw(format!(" {} held, {} idle of {} pages", s.held_pages, s.idle_pages, s.pages)),
    ]);
    let rule = Line::styled("─".repeat(3 * BAR), Style::new().fg(Color::DarkGray));
    [rule].into_iter().chain(stages).chain([pipe.into(), queue.into(), cache]).collect()
}

/// `1 group`, `2 groups`
fn of(count: usize, what: &str, plural: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { plural })
}

/// Shares of a bar, each with its own character, and the rest.
fn bar(shares: &[(f64, char)]) -> String {
    let mut text = String::new();
    let (mut sum, mut at) = (0.0, 0);
    for (share, character) in shares {
        sum += share.clamp(0.0, 1.0);
        let end = ((sum * BAR as f64).round() as usize).min(BAR);
        text.extend(std::iter::repeat_n(*character, end.saturating_sub(at)));
        at = end.max(at);
    }
    text.extend(std::iter::repeat_n('░', BAR - at));
    text
}

/// The rows at the foot of the terminal; they go when it is dropped, and leave their last picture above.
pub struct Live(Option<Dock>);

impl Live {
    /// Rows for a pipeline, where they are wanted and stderr is a terminal.
    pub fn new(wanted: bool, out: &Out) -> Live {
        let terminal = io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        if wanted && !terminal {
            out.note("--live needs a terminal on stderr: left out");
        }
        let dock = Dock { rows: 0, terminal: None, samples: VecDeque::new(), drawn: None, last: Snapshot::default() };
        Live((wanted && terminal).then_some(dock))
    }

    /// Whether there are such rows.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Draws them, unless that was just done. Called often, wherever the head is driven.
    pub fn tick(&mut self, head: &Head) {
        if let Some(dock) = &mut self.0
            && dock.drawn.is_none_or(|drawn| drawn.elapsed() >= EVERY)
        {
            dock.last = dock.snapshot(head);
            // Nobody is told when stderr is gone.
            let _ = dock.draw();
            dock.drawn = Some(Instant::now());
        }
    }
}

/// Gives the terminal its scrolling region back; for ends that drop nothing.
pub fn restore() {
    if DOCKED.swap(false, Ordering::Relaxed) {
        say("\x1b7\x1b[r\x1b8\x1b[?25h");
    }
}

struct Dock {
    /// Of the terminal when the scrolling region was set; 0: it is not.
    rows: u16,
    terminal: Option<Terminal<CrosstermBackend<Frame>>>,
    /// When, and nanoseconds that each stage was busy until then.
    samples: VecDeque<(Instant, Vec<u64>)>,
    drawn: Option<Instant>,
    last: Snapshot,
}

impl Dock {
    fn snapshot(&mut self, head: &Head) -> Snapshot {
        let pipeline = head.pipeline();
        let now = Instant::now();
        let busy: Vec<u64> = pipeline.counters().iter().map(|c| c.busy_ns.load(Ordering::Relaxed)).collect();
        while self.samples.len() > 1 && now - self.samples[1].0 > WINDOW {
            self.samples.pop_front();
        }
        self.samples.push_back((now, busy.clone()));
        let (since, before) = &self.samples[0];
        let seconds = (now - *since).as_secs_f64().max(1e-3);
        let stages = pipeline.reports().iter().zip(busy.iter().zip(before)).map(|(report, (busy, before))| StageView {
            device: report.device.clone(),
            layers: (report.spec.layers.start, report.spec.layers.end),
            busy: ((busy - before) as f64 * 1e-9 / seconds).min(1.0),
        });
        let recorder = pipeline.recorder();
        let (prompt, answer) = recorder.tokens_since(recorder.at(*since));
        Snapshot {
            stages: stages.collect(),
            status: head.status(),
            prompt_tokens_per_s: prompt as f64 / seconds,
            tokens_per_s: answer as f64 / seconds,
        }
    }

    fn draw(&mut self) -> io::Result<()> {
        let (columns, rows) = ratatui::crossterm::terminal::size()?;
        let height = self.last.stages.len() as u16 + ROWS;
        let area = Rect::new(0, rows.saturating_sub(height), columns, height);
        if self.terminal.is_none()
            || self.rows != rows
            || self.terminal.as_mut().is_some_and(|t| t.get_frame().area() != area)
        {
            self.undock();
            if rows < height + ROWS_ABOVE {
                return Ok(());
            }
            self.dock(area, rows)?;
        }
        let text = lines(&self.last);
        if let Some(terminal) = &mut self.terminal {
            terminal.draw(|frame| frame.render_widget(Paragraph::new(text), frame.area()))?;
        }
        Ok(())
    }

    /// Makes room at the foot of the terminal.
    fn dock(&mut self, area: Rect, rows: u16) -> io::Result<()> {
        let options = TerminalOptions { viewport: Viewport::Fixed(area) };
        self.terminal = Some(Terminal::with_options(CrosstermBackend::new(Frame::default()), options)?);
        self.rows = rows;
        DOCKED.store(true, Ordering::Relaxed);
        // Scrolls if need be; setting the region moves the cursor, which then goes up again, into the region.
        let (room, height) = ("\n".repeat(area.height.into()), area.height);
        say(&format!("{room}\x1b7\x1b[1;{}r\x1b8\x1b[{height}A\x1b7\x1b[{};1H\x1b[J\x1b8", area.y, area.y + 1));
        Ok(())
    }

    /// Clears what was drawn and gives the terminal back.
    fn undock(&mut self) {
        if let Some(mut terminal) = self.terminal.take() {
            let top = terminal.get_frame().area().y + 1;
            say(&format!("\x1b7\x1b[r\x1b[{top};1H\x1b[J\x1b8"));
            drop(terminal);
            restore();
        }
    }
}

impl Drop for Dock {
    fn drop(&mut self) {
        let was_there = self.terminal.is_some();
        self.undock();
        if was_there {
            let text: Vec<String> = lines(&self.last).iter().map(ToString::to_string).collect();
            say(&format!("\n{}\n", text.join("\n")));
        }
    }
}

/// A picture on its way to stderr: written at once, and the cursor is where it was.
#[derive(Default)]
struct Frame(Vec<u8>);

impl Write for Frame {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let picture = [b"\x1b7", &self.0[..], b"\x1b8"].concat();
        self.0.clear();
        io::stderr().lock().write_all(&picture)
    }
}

#[cfg(test)]
mod tests {
    use ratatui::backend::TestBackend;

    use super::*;

    fn check(snapshot: &Snapshot, expected: &[&str]) {
        let mut terminal = Terminal::new(TestBackend::new(72, expected.len() as u16)).unwrap();
        terminal.draw(|frame| frame.render_widget(Paragraph::new(lines(snapshot)), frame.area())).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y| (0..72).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        let found: Vec<String> = (0..expected.len() as u16).map(row).collect();
        assert_eq!(found, expected);
    }

    fn stage(layers: (usize, usize), busy: f64) -> StageView {
        StageView { device: "llvmpipe".to_owned(), layers, busy }
    }

    #[test]
    fn a_picture_shows_stages_pipe_queue_and_cache() {
        let status = Status {
            waiting: 3,
            running: 8,
            decoding: 6,
            groups: 2,
            in_flight: 3,
            held_pages: 32,
            idle_pages: 16,
            pages: 64,
            ..Status::default()
        };
        let snapshot = Snapshot {
            stages: vec![stage((0, 9), 0.5), stage((9, 17), 1.0)],
            status,
            prompt_tokens_per_s: 400.4,
            tokens_per_s: 12.34,
        };
        let rule = "─".repeat(72);
        check(
            &snapshot,
            &[
                &rule,
                "stage 0  ████████████░░░░░░░░░░░░  50 %  layers 0-8   llvmpipe",
                "stage 1  ████████████████████████ 100 %  layers 9-16  llvmpipe",
                "pipe     3 micro-batches in flight, 2 groups",
                "queue    3 waiting, 8 running, 6 decoding; 12.3 tokens/s, prompts 400/s",
                "KV       ████████████▒▒▒▒▒▒░░░░░░ 32 held, 16 idle of 64 pages",
            ],
        );
    }

    #[test]
    fn a_single_stream_is_told_where_there_are_stages_to_fill() {
        let status = Status { running: 1, groups: 1, in_flight: 1, ..Status::default() };
        let told = |stages: usize| {
            let snapshot = Snapshot { stages: vec![stage((0, 2), 0.0); stages], status, ..Snapshot::default() };
            lines(&snapshot)[stages + 1].to_string()
        };
        assert_eq!(told(4), "pipe     1 micro-batch in flight, 1 group; single-stream: 1/4 of the pipe");
        assert_eq!(told(1), "pipe     1 micro-batch in flight, 1 group");
    }

    #[test]
    fn bars_are_never_longer_than_they_may_be() {
        for shares in [&[(2.0, '█')][..], &[(0.7, '█'), (0.9, '▒')], &[(f64::NAN, '█')], &[]] {
            assert_eq!(bar(shares).chars().count(), BAR, "{shares:?}");
        }
    }
}
