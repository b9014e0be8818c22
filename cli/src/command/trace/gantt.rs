//! The picture in characters: a line for each stage.

use std::collections::BTreeSet;

use anstyle::{AnsiColor, Style};
use pp_engine::trace::causes::Cause;

use super::picture::{Fill, Picture};
use crate::output::Canvas;

/// The fewest cells of a line, however narrow the terminal.
const CELLS_MIN: usize = 20;
/// The most cells of a line; terminals say all sorts of things.
const CELLS_MAX: usize = 2000;
/// Columns between two times on the axis.
const TICK: usize = 14;
/// Columns between two entries of the legend.
const GAP: usize = 3;

/// Lines of cells, the time under them, and what the signs mean.
pub fn draw(picture: &Picture, canvas: Canvas) -> String {
    let stages = picture.trace.stages.len();
    let label = format!("stage {}", stages - 1).len();
    let cells = canvas.columns.saturating_sub(label + 3).clamp(CELLS_MIN, CELLS_MAX);
    let cells = cells.min(picture.window.nanos() as usize);
    let rows: Vec<Vec<Fill>> = (0..stages).map(|stage| picture.row(stage, cells)).collect();
    let mut lines: Vec<String> = rows
        .iter()
        .enumerate()
        .map(|(stage, row)| format!("{:label$} │{}│", format!("stage {stage}"), paint(row, canvas)))
        .collect();
    lines.extend(axis(picture, label, cells));
    lines.push(String::new());
    lines.extend(legend(&rows, canvas));
    lines.join("\n")
}

/// One row; neighbours of one style share their escape sequences.
fn paint(row: &[Fill], canvas: Canvas) -> String {
    let runs = row.chunk_by(|a, b| style(*a) == style(*b));
    runs.map(|run| painted(run[0], &run.iter().map(|fill| fill.symbol()).collect::<String>(), canvas)).collect()
}

fn style(fill: Fill) -> Style {
    const GROUPS: [AnsiColor; 6] = [
        AnsiColor::Cyan,
        AnsiColor::Green,
        AnsiColor::Blue,
        AnsiColor::BrightCyan,
        AnsiColor::BrightGreen,
        AnsiColor::BrightBlue,
    ];
    let on = |colour: AnsiColor| Style::new().fg_color(Some(AnsiColor::Black.into())).bg_color(Some(colour.into()));
    let plain = |colour: AnsiColor| Style::new().fg_color(Some(colour.into()));
    match fill {
        Fill::Group(group) => on(GROUPS[group as usize % GROUPS.len()]),
        Fill::Several => on(AnsiColor::White),
        Fill::Idle(Cause::Upstream) => plain(AnsiColor::Yellow),
        Fill::Idle(Cause::Hop) => plain(AnsiColor::BrightYellow),
        Fill::Idle(Cause::BackPressure) => plain(AnsiColor::Red),
        Fill::Idle(Cause::KvWait) => plain(AnsiColor::Magenta),
        Fill::Idle(Cause::Overhead) => plain(AnsiColor::White),
        Fill::Idle(Cause::Outage) => plain(AnsiColor::BrightRed),
        Fill::Idle(Cause::Unattributed) => plain(AnsiColor::BrightRed),
        Fill::Idle(_) => plain(AnsiColor::BrightBlack),
    }
}

/// Marks at round times, and these times.
fn axis(picture: &Picture, label: usize, cells: usize) -> [String; 2] {
    let (from, length) = (picture.window.from, picture.window.nanos());
    let mut marks: Vec<char> = vec!['─'; cells];
    let mut times = String::new();
    for (at, text) in picture.ticks(cells / TICK) {
        let cell = (u128::from(at - from) * cells as u128 / u128::from(length)) as usize;
        let used = times.chars().count();
        if cell < cells && (times.is_empty() || cell > used) && cell + text.chars().count() <= cells + 1 {
            marks[cell] = '┬';
            times.push_str(&" ".repeat(cell - used));
            times.push_str(&text);
        }
    }
    let marks: String = marks.into_iter().collect();
    [format!("{:label$} └{marks}┘", ""), format!("{:label$}  {times}", "")]
}

/// What the signs in the picture mean, in lines that fit.
fn legend(rows: &[Vec<Fill>], canvas: Canvas) -> Vec<String> {
    let present: BTreeSet<char> = rows.iter().flatten().map(|fill| fill.symbol()).collect();
    let group = rows.iter().flatten().find(|fill| matches!(fill, Fill::Group(_)));
    let group = group.map(|fill| (*fill, "0-9 A-Z".to_owned(), "busy with a micro-batch of that group"));
    let idle = Cause::ALL.into_iter().filter(|cause| *cause != Cause::Busy);
    let idle = idle.map(|cause| (Fill::Idle(cause), cause.name()));
    let others = std::iter::once((Fill::Several, "busy with several")).chain(idle);
    let others = others.filter(|(fill, _)| present.contains(&fill.symbol()));
    let others = others.map(|(fill, words)| (fill, fill.symbol().to_string(), words));
    let mut lines: Vec<String> = Vec::new();
    let mut room = 0;
    for (fill, signs, words) in group.into_iter().chain(others) {
        let width = signs.chars().count() + 1 + words.chars().count();
        let entry = format!("{} {words}", painted(fill, &signs, canvas));
        match lines.last_mut() {
            Some(line) if room >= GAP + width => {
                line.push_str(&format!("{:GAP$}{entry}", ""));
                room -= GAP + width;
            }
            _ => {
                lines.push(entry);
                room = canvas.columns.saturating_sub(width);
            }
        }
    }
    lines
}

fn painted(fill: Fill, text: &str, canvas: Canvas) -> String {
    if !canvas.colours {
        return text.to_owned();
    }
    let style = style(fill);
    format!("{style}{text}{style:#}")
}
