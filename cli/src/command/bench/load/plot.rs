//! Throughput and latencies as a picture: SVG without scripts or fonts, light or dark as its reader likes.

use std::fmt::Write;

use super::figures::{Level, LoadReport};
use crate::report::Percentiles;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 300.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 44.0;
const LEFT: f64 = 56.0;
const GAP: f64 = 56.0;
const RIGHT: f64 = 20.0;
/// Lines across a panel.
const TICKS: usize = 4;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#24292f}.h{font-weight:600}.q{fill:#57606a}.r{text-anchor:end}.c{text-anchor:middle}
.bg{fill:#fff}.l{stroke:#d0d7de}.s{fill:none;stroke-width:2}.a{stroke:#3567b5}.a,circle.a{fill:#3567b5}.b{stroke:#1d7f74}.c2{stroke:#b35900}
polyline{fill:none!important}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.q{fill:#9198a1}.bg{fill:#0d1117}.l{stroke:#3d444d}.a{stroke:#6ea0ee}.b{stroke:#4dbdb0}.c2{stroke:#fb8f44}}
";

/// A line: its class, its name, and a value for each level.
type Line = (&'static str, &'static str, Vec<Option<f64>>);

/// The whole file.
pub fn draw(report: &LoadReport) -> String {
    let levels = &report.levels;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-labelledby=\"title desc\">\n<title id=\"title\">A server under load</title>\n<desc id=\"desc\">{}</desc>\n\
         <style>{STYLE}</style>\n<rect class=\"bg\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n\
         <text class=\"q\" x=\"{LEFT}\" y=\"22\">{}</text>\n",
        escape(&levels.iter().map(in_words).collect::<Vec<_>>().join("; ")),
        escape(&format!("{}, {}", report.model, report.url)),
    );
    let each = |value: &dyn Fn(&Level) -> Option<f64>| levels.iter().map(value).collect::<Vec<_>>();
    let spread = |of: fn(&Level) -> Option<Percentiles>| -> Vec<Line> {
        let line = |value: fn(Percentiles) -> f64| each(&|level| of(level).map(|p| 1e3 * value(p)));
        vec![("a", "p50", line(|p| p.p50)), ("b", "p90", line(|p| p.p90)), ("c2", "p99", line(|p| p.p99))]
    };
    let panels = [
        ("output tokens/s", vec![("a", "", each(&|level| Some(level.output_tokens_per_s)))]),
        ("first token, ms", spread(|level| level.ttft_seconds)),
        ("per token, ms", spread(|level| level.tpot_seconds)),
    ];
    let width = (WIDTH - LEFT - RIGHT - GAP * (panels.len() - 1) as f64) / panels.len() as f64;
    let names: Vec<String> = levels.iter().map(Level::name).collect();
    for (index, (title, lines)) in panels.iter().enumerate() {
        let x = LEFT + index as f64 * (width + GAP);
        panel(&mut svg, (x, width), title, lines, &names);
    }
    svg.push_str("</svg>\n");
    svg
}

fn in_words(level: &Level) -> String {
    let p50 = |p: Option<Percentiles>| p.map_or("-".to_owned(), |p| format!("{:.1}", p.p50 * 1e3));
    format!(
        "{}: {:.1} output tokens/s, first token {} ms, per token {} ms",
        level.name(),
        level.output_tokens_per_s,
        p50(level.ttft_seconds),
        p50(level.tpot_seconds)
    )
}

/// Levels stand side by side, as far apart as each other.
fn panel(svg: &mut String, (left, width): (f64, f64), title: &str, lines: &[Line], names: &[String]) {
    let most = lines.iter().flat_map(|line| &line.2).flatten().copied().fold(0.0, f64::max);
    let top = nice(most);
    let (floor, height) = (HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP);
    let x = |index: usize| left + width * (index as f64 + 0.5) / names.len().max(1) as f64;
    let y = |value: f64| floor - height * value / top;
    let mut put = |text: std::fmt::Arguments| {
        // Writing to a string does not fail.
        let _ = svg.write_fmt(text);
    };
    put(format_args!("<text class=\"h\" x=\"{left}\" y=\"44\">{title}</text>\n"));
    for tick in 0..=TICKS {
        let value = top * tick as f64 / TICKS as f64;
        let (y, right, label) = (y(value), left + width, left - 6.0);
        put(format_args!(
            "<line class=\"l\" x1=\"{left}\" x2=\"{right:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text class=\"q r\" x=\"{label}\" y=\"{:.1}\">{}</text>\n",
            y + 4.0,
            short(value)
        ));
    }
    for (index, name) in names.iter().enumerate() {
        put(format_args!(
            "<text class=\"q c\" x=\"{:.1}\" y=\"{:.1}\">{}</text>\n",
            x(index),
            floor + 18.0,
            escape(name)
        ));
    }
    let mut key = left + width;
    for (class, name, values) in lines.iter().rev() {
        let points: Vec<(f64, f64)> =
            values.iter().enumerate().filter_map(|(i, value)| Some((x(i), y((*value)?)))).collect();
        let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        put(format_args!("<polyline class=\"s {class}\" points=\"{}\"/>", path.join(" ")));
        for (x, y) in &points {
            put(format_args!("<circle class=\"s {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"/>"));
        }
        if !name.is_empty() {
            put(format_args!(
                "<line class=\"s {class}\" x1=\"{}\" x2=\"{}\" y1=\"40\" y2=\"40\"/>\
                 <text class=\"q r\" x=\"{key}\" y=\"44\">{name}</text>\n",
                key - 42.0,
                key - 28.0
            ));
            key -= 52.0;
        }
    }
    put(format_args!("\n"));
}

/// The next of 1, 2, 4 or 8 times a power of ten.
fn nice(most: f64) -> f64 {
    if !(most > 0.0 && most.is_finite()) {
        return 1.0;
    }
    let power = 10f64.powf(most.log10().floor());
    [1.0, 2.0, 4.0, 8.0, 10.0].into_iter().map(|step| step * power).find(|top| *top >= most).unwrap_or(10.0 * power)
}

fn short(value: f64) -> String {
    match value {
        v if v >= 1e4 => format!("{:.0}k", v * 1e-3),
        v if v >= 10.0 || v.fract() == 0.0 => format!("{v:.0}"),
        v => format!("{v:.2}"),
    }
}

/// A text as XML has it; what it cannot have is replaced.
fn escape(text: &str) -> String {
    crate::output::printable(text)
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
