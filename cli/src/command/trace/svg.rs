//! The picture as SVG: no scripts, no fonts, nothing from elsewhere; light or dark as its reader likes.
//!
//! Work stands tall with the number of its group, idle time lies low with the sign of its cause: neither needs colours.
//! Whatever the pointer is on says what it is. The size is bounded: of long traces cells are drawn, not every interval.

use std::fmt::Write;

use pp_engine::trace::causes::Cause;
use pp_engine::trace::summary::{Summary, time};
use pp_engine::trace::{Nanos, StageSpan};

use super::picture::{Fill, Picture, symbol};
use crate::report::layer_range;

/// Intervals that are drawn one by one; of more than these, cells.
const EXACT_MAX: usize = 5000;
/// Cells of all rows together, and of one row at most.
const CELLS_MAX: usize = 6000;
const ROW_CELLS_MAX: usize = 1000;
/// Characters of a device's name and of an action that are shown.
const NAME_MAX: usize = 60;
const WORDS_MAX: usize = 170;

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 64.0;
const ROW: f64 = 46.0;
/// Of a bar of work, and of idle time below it.
const BAR: f64 = 34.0;
const IDLE: f64 = 14.0;
const LINE: f64 = 20.0;
/// Of the legend, below the rows.
const LEGEND: f64 = 44.0;
/// A character of small text.
const CHARACTER: f64 = 7.0;
/// Times on the axis.
const TICKS: usize = 10;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#24292f}.h{font-size:16px;font-weight:600}.q{fill:#57606a}
.m{font:10px ui-monospace,monospace;text-anchor:middle}.g .m,.w{fill:#fff}.r{text-anchor:end}.c{text-anchor:middle}
.bg{fill:#fff}.l{stroke:#d0d7de}.t{fill:#f6f8fa}g>rect:hover{opacity:.75}
.g0{fill:#3567b5}.g1{fill:#1d7f74}.g2{fill:#7451b8}.g3{fill:#43802f}.g4{fill:#1f7da3}.g5{fill:#8b4f9f}.g6{fill:#5c6f8e}.g7{fill:#667d1f}
.several{fill:#4b5563}.fill{fill:#d8dee4}.upstream{fill:#f2cc60}.hop{fill:#fb8f44}.back{fill:#e5534b}
.starved{fill:url(#stripes)}.kv{fill:#f29bd3}.own{fill:#b99a7e}.unknown{fill:#24292f}.outage{fill:#b3261e}.unknown+.m,.outage+.m{fill:#fff}
.s0{fill:#eaeef2}.s1{stroke:#8c959f}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.q{fill:#9198a1}.bg{fill:#0d1117}.l{stroke:#3d444d}.t{fill:#151b23}
.fill{fill:#3d444d}.fill+.m,.starved+.m{fill:#e6edf3}.upstream+.m,.hop+.m,.back+.m,.kv+.m,.own+.m{fill:#0d1117}
.upstream{fill:#d4a72c}.kv{fill:#db7fbd}.unknown{fill:#f0f6fc}.unknown+.m{fill:#0d1117}.s0{fill:#212830}.s1{stroke:#656c76}}
";

/// The whole file.
pub fn draw(picture: &Picture, summary: &Summary) -> String {
    let stages = picture.trace.stages.len();
    let bottom = TOP + stages as f64 * ROW;
    let words: Vec<String> = summary.actions.iter().take(3).map(|action| cut(&action.words, WORDS_MAX)).collect();
    let height = bottom + LEGEND + LINE * (1.5 + words.len() as f64);
    let mut svg = Svg { text: String::new(), picture };
    svg.open(height, summary);
    svg.axis(bottom);
    for stage in 0..stages {
        svg.row(stage, summary);
    }
    svg.legend(bottom + LEGEND);
    for (line, words) in words.iter().enumerate() {
        let y = bottom + LEGEND + LINE * (line as f64 + 1.5);
        let label = if line == 0 { "next: " } else { "also: " };
        svg.put(format_args!("<text x=\"{LEFT}\" y=\"{y}\">{label}{}</text>\n", escape(words)));
    }
    svg.text.push_str("</svg>\n");
    svg.text
}

struct Svg<'a> {
    text: String,
    picture: &'a Picture<'a>,
}

/// A rectangle and what it says.
struct Bar<'a> {
    from: Nanos,
    to: Nanos,
    fill: Fill,
    title: &'a str,
}

impl Svg<'_> {
    fn put(&mut self, text: std::fmt::Arguments) {
        // Writing to a string does not fail.
        let _ = self.text.write_fmt(text);
    }

    fn open(&mut self, height: f64, summary: &Summary) {
        let stages = self.picture.trace.stages.len();
        let busy = |share: f64| format!("{:.0} %", 100.0 * share);
        let about = format!(
            "{} micro-batches through {stages} stages in {}: {:.1} tokens/s, stages busy {} of the time",
            summary.micro_batches,
            time(summary.seconds),
            summary.tokens_per_second,
            busy(summary.busy)
        );
        let law = format!("the law allows {} with so many in flight", busy(summary.law.busy));
        let rows = summary.stages.iter().enumerate();
        let rows = rows.map(|(stage, s)| format!("stage {stage} busy {}", busy(s.shares.of(Cause::Busy))));
        let rows = rows.collect::<Vec<_>>().join(", ");
        self.put(format_args!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" \
             aria-labelledby=\"title desc\">\n<title id=\"title\">Trace of a pipeline</title>\n\
             <desc id=\"desc\">{about}; {law}; {rows}</desc>\n<style>{STYLE}</style>\n\
             <defs><pattern id=\"stripes\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" \
             patternTransform=\"rotate(45)\"><rect class=\"s0\" width=\"6\" height=\"6\"/>\
             <line class=\"s1\" x1=\"1\" x2=\"1\" y2=\"6\" stroke-width=\"1.5\"/></pattern></defs>\n\
             <rect class=\"bg\" width=\"{WIDTH}\" height=\"{height}\"/>\n\
             <text class=\"h\" x=\"{LEFT}\" y=\"28\">{about}</text>\n<text class=\"q\" x=\"{LEFT}\" y=\"48\">{law}</text>\n",
        ));
    }

    fn row(&mut self, stage: usize, summary: &Summary) {
        let y = TOP + stage as f64 * ROW;
        let s = &summary.stages[stage];
        let shares = Cause::ALL.into_iter().filter(|cause| s.shares.of(*cause) > 0.0);
        let shares = shares.map(|cause| format!("{} {:.1} %", cause.name(), 100.0 * s.shares.of(cause)));
        let about = format!(
            "stage {stage}, layers {}, {}: {}",
            layer_range(s.layers),
            cut(&s.device, NAME_MAX),
            shares.collect::<Vec<_>>().join(", ")
        );
        let base = y + BAR + 0.5;
        let (x, middle, right, width) = (LEFT - 10.0, y + BAR / 2.0, WIDTH - RIGHT, WIDTH - LEFT - RIGHT);
        self.put(format_args!(
            "<g><title>{}</title>\n<text class=\"r\" x=\"{x}\" y=\"{middle}\">stage {stage}</text>\
             <text class=\"r q\" x=\"{x}\" y=\"{}\">{:.0} %</text>\
             <rect class=\"t\" x=\"{LEFT}\" y=\"{y}\" width=\"{width}\" height=\"{BAR}\"/>\
             <line class=\"l\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{base}\" y2=\"{base}\"/></g>\n",
            escape(&about),
            middle + 14.0,
            100.0 * s.shares.of(Cause::Busy),
        ));
        let parts = |stage| self.picture.spans(stage).count() + self.picture.idle(stage).count();
        if (0..self.picture.trace.stages.len()).map(parts).sum::<usize>() <= EXACT_MAX {
            self.exact(stage, y);
        } else {
            self.cells(stage, y);
        }
    }

    /// Every micro-batch and every idle interval.
    fn exact(&mut self, stage: usize, y: f64) {
        let picture = self.picture;
        for idle in picture.idle(stage) {
            let title = format!("{}: {}", idle.cause.name(), self.when(idle.from, idle.to));
            self.bar(y, &Bar { from: idle.from, to: idle.to, fill: Fill::Idle(idle.cause), title: &title });
        }
        for span in picture.spans(stage) {
            let StageSpan { step, group, tokens, sequences, started, finished, .. } = *span;
            let title = format!(
                "step {step}, group {group}: {}, {}; {}",
                counted(tokens, "token"),
                counted(sequences, "sequence"),
                self.when(started, finished)
            );
            self.bar(y, &Bar { from: started, to: finished, fill: Fill::Group(group), title: &title });
        }
    }

    /// What most of the time of each cell went to.
    fn cells(&mut self, stage: usize, y: f64) {
        let columns = (CELLS_MAX / self.picture.trace.stages.len()).clamp(50, ROW_CELLS_MAX);
        let columns = columns.min(self.picture.window.nanos() as usize);
        let row = self.picture.row(stage, columns);
        let mut cell = 0;
        for run in row.chunk_by(|a, b| a == b) {
            let (from, to) = (self.picture.edge(cell, columns), self.picture.edge(cell + run.len(), columns));
            let name = match run[0] {
                Fill::Group(group) => format!("mostly group {group}"),
                Fill::Several => "busy with several micro-batches".to_owned(),
                Fill::Idle(cause) => format!("mostly {}", cause.name()),
            };
            let title = format!("{name}: {}", self.when(from, to));
            self.bar(y, &Bar { from, to, fill: run[0], title: &title });
            cell += run.len();
        }
    }

    fn bar(&mut self, y: f64, bar: &Bar) {
        let (x, end) = (self.x(bar.from), self.x(bar.to));
        let (width, middle) = (end - x, (x + end) / 2.0);
        let tall = !matches!(bar.fill, Fill::Idle(_));
        let (y, height) = if tall { (y, BAR) } else { (y + BAR - IDLE, IDLE) };
        self.put(format_args!(
            "<g{}><title>{}</title><rect class=\"{}\" x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{height}\"/>",
            if tall { " class=\"g\"" } else { "" },
            escape(bar.title),
            class(bar.fill)
        ));
        let sign = match bar.fill {
            Fill::Group(group) => group.to_string(),
            fill => fill.symbol().to_string(),
        };
        if width >= CHARACTER * sign.chars().count() as f64 + 2.0 {
            let y = y + height / 2.0 + 3.5;
            self.put(format_args!("<text class=\"m\" x=\"{middle:.2}\" y=\"{y}\">{sign}</text>"));
        }
        self.text.push_str("</g>\n");
    }

    fn axis(&mut self, y: f64) {
        for (at, label) in self.picture.ticks(TICKS) {
            let (x, text) = (self.x(at), y + 14.0);
            self.put(format_args!(
                "<line class=\"l\" x1=\"{x:.2}\" x2=\"{x:.2}\" y1=\"{TOP}\" y2=\"{y}\"/>\
                 <text class=\"q c\" x=\"{x:.2}\" y=\"{text}\">{label}</text>\n"
            ));
        }
    }

    fn legend(&mut self, y: f64) {
        let mut x = LEFT;
        let groups = (Fill::Group(0), "busy: the number is the group's".to_owned());
        let idle = Cause::ALL.into_iter().filter(|cause| *cause != Cause::Busy);
        let present = idle.filter(|cause| self.picture.causes.iter().any(|stage| stage.total(*cause) > 0));
        let idle =
            present.map(|cause| (Fill::Idle(cause), format!("{} {}", symbol(cause).unwrap_or(' '), cause.name())));
        for (fill, name) in std::iter::once(groups).chain(idle).collect::<Vec<_>>() {
            self.put(format_args!(
                "<rect class=\"{}\" x=\"{x}\" y=\"{}\" width=\"14\" height=\"12\"/><text x=\"{}\" y=\"{y}\">{name}</text>\n",
                class(fill),
                y - 10.0,
                x + 20.0
            ));
            x += 20.0 + CHARACTER * name.chars().count() as f64 + 14.0;
        }
    }

    /// Where a time is.
    fn x(&self, at: Nanos) -> f64 {
        let window = self.picture.window;
        let inside = at.clamp(window.from, window.to) - window.from;
        LEFT + (WIDTH - LEFT - RIGHT) * inside as f64 / window.nanos().max(1) as f64
    }

    /// How long, and since when.
    fn when(&self, from: Nanos, to: Nanos) -> String {
        let seconds = |nanos: Nanos| nanos as f64 * 1e-9;
        let begin = seconds(from) - seconds(self.picture.origin);
        format!("{} from {:.6} s", time(seconds(to.saturating_sub(from))), begin)
    }
}

fn class(fill: Fill) -> &'static str {
    const GROUPS: [&str; 8] = ["g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7"];
    match fill {
        Fill::Group(group) => GROUPS[group as usize % GROUPS.len()],
        Fill::Several | Fill::Idle(Cause::Busy) => "several",
        Fill::Idle(Cause::FillDrain) => "fill",
        Fill::Idle(Cause::Upstream) => "upstream",
        Fill::Idle(Cause::Hop) => "hop",
        Fill::Idle(Cause::BackPressure) => "back",
        Fill::Idle(Cause::Starved) => "starved",
        Fill::Idle(Cause::KvWait) => "kv",
        Fill::Idle(Cause::Overhead) => "own",
        Fill::Idle(Cause::Outage) => "outage",
        Fill::Idle(Cause::Unattributed) => "unknown",
    }
}

fn counted(count: u32, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The beginning of a text that is too long.
fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most).chain(['…']).collect()
}

/// A text as XML has it; what it cannot have is replaced.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push(char::REPLACEMENT_CHARACTER),
            c => escaped.push(c),
        }
    }
    escaped
}
