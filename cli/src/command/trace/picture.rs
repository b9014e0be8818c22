//! What is drawn, whatever it is drawn with: rows of cells, and a time axis.

use pp_engine::trace::causes::{Cause, Interval, StageCauses, Window, causes_within};
use pp_engine::trace::{Nanos, StageSpan, Trace};

/// A part of a trace.
pub struct Picture<'a> {
    pub trace: &'a Trace,
    pub causes: Vec<StageCauses>,
    pub window: Window,
    /// Time 0 of the axis.
    pub origin: Nanos,
}

/// What a cell shows: what fills most of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fill {
    /// The stage worked at a group.
    Group(u32),
    /// It worked at several, none of them for more than half of the time.
    Several,
    /// It was idle.
    Idle(Cause),
}

/// The sign of an idle cause.
pub fn symbol(cause: Cause) -> Option<char> {
    match cause {
        Cause::Busy => None,
        Cause::FillDrain => Some('·'),
        Cause::Upstream => Some('u'),
        Cause::Hop => Some('h'),
        Cause::BackPressure => Some('b'),
        Cause::Starved => Some('s'),
        Cause::KvWait => Some('k'),
        Cause::Overhead => Some('o'),
        Cause::Outage => Some('!'),
        Cause::Unattributed => Some('?'),
    }
}

impl Fill {
    /// Its sign: a digit or a capital letter for groups, which repeat after 36.
    pub fn symbol(self) -> char {
        match self {
            Fill::Group(group) => char::from_digit(group % 36, 36).unwrap_or('0').to_ascii_uppercase(),
            Fill::Several => '#',
            Fill::Idle(cause) => symbol(cause).unwrap_or(' '),
        }
    }
}

impl<'a> Picture<'a> {
    /// Of what happened in a window.
    pub fn new(trace: &'a Trace, window: Window, origin: Nanos) -> Picture<'a> {
        Picture { trace, causes: causes_within(trace, window), window, origin }
    }

    /// A stage's time in so many cells.
    pub fn row(&self, stage: usize, columns: usize) -> Vec<Fill> {
        let columns = columns.max(1);
        let mut cells = vec![Cell::default(); columns];
        for interval in &self.causes[stage].intervals {
            self.spread(interval.from, interval.to, &mut cells, |cell, nanos| {
                cell.causes[interval.cause as usize] += nanos;
            });
        }
        let mut busy_until = 0;
        for span in self.trace.stages[stage].spans.iter() {
            self.spread(span.started.max(busy_until), span.finished, &mut cells, |cell, nanos| {
                cell.add_group(span.group, nanos);
            });
            busy_until = busy_until.max(span.finished);
        }
        cells.iter().map(Cell::fill).collect()
    }

    /// The micro-batches of a stage that are seen.
    pub fn spans(&self, stage: usize) -> impl Iterator<Item = &StageSpan> {
        let window = self.window;
        let seen = move |span: &&StageSpan| span.finished > window.from && span.started < window.to;
        self.trace.stages[stage].spans.iter().filter(seen)
    }

    /// The idle intervals of a stage.
    pub fn idle(&self, stage: usize) -> impl Iterator<Item = &Interval> {
        self.causes[stage].intervals.iter().filter(|interval| interval.cause != Cause::Busy)
    }

    /// Where a cell begins.
    pub fn edge(&self, cell: usize, columns: usize) -> Nanos {
        let nanos = u128::from(self.window.nanos()) * cell as u128 / columns as u128;
        self.window.from + nanos as Nanos
    }

    /// The cell that a time is in.
    fn cell(&self, at: Nanos, columns: usize) -> usize {
        let inside = u128::from(at - self.window.from) * columns as u128;
        ((inside / u128::from(self.window.nanos().max(1))) as usize).min(columns - 1)
    }

    /// Divides the time between two instants among the cells it is in.
    fn spread(&self, from: Nanos, to: Nanos, cells: &mut [Cell], mut add: impl FnMut(&mut Cell, Nanos)) {
        let (from, to) = (from.max(self.window.from), to.min(self.window.to));
        if from >= to {
            return;
        }
        let columns = cells.len();
        // Edges are rounded down: the last nanosecond may be in the cell behind.
        let (first, last) = (self.cell(from, columns), (self.cell(to - 1, columns) + 1).min(columns - 1));
        for (cell, place) in cells[first..=last].iter_mut().zip(first..) {
            let (a, b) = (self.edge(place, columns).max(from), self.edge(place + 1, columns).min(to));
            if a < b {
                add(cell, b - a);
            }
        }
    }

    /// Round times for an axis, at most `most` of them, each with its label.
    pub fn ticks(&self, most: usize) -> Vec<(Nanos, String)> {
        let (from, to) = (self.window.from - self.origin, self.window.to - self.origin);
        let least = self.window.nanos() / most.max(1) as Nanos + 1;
        let tens = std::iter::successors(Some(1), |step: &Nanos| step.checked_mul(10));
        let step = tens.flat_map(|ten| [1, 2, 5].map(|n| ten.saturating_mul(n))).find(|step| *step >= least);
        let step = step.unwrap_or(Nanos::MAX);
        let (unit, name) = match to {
            0..2_000 => (1, "ns"),
            2_000..2_000_000 => (1_000, "µs"),
            2_000_000..2_000_000_000 => (1_000_000, "ms"),
            _ => (1_000_000_000, "s"),
        };
        let digits = std::iter::successors(Some(unit), |u| Some(u / 10)).take_while(|u| *u > step).count();
        let times = (from.div_ceil(step)..).map(|n| n.checked_mul(step)).map_while(|at| at.filter(|at| *at <= to));
        times.map(|at| (at + self.origin, format!("{:.digits$} {name}", at as f64 / unit as f64))).collect()
    }
}

/// The time of a cell, divided.
#[derive(Clone, Debug, Default)]
struct Cell {
    causes: [Nanos; Cause::ALL.len()],
    groups: Vec<(u32, Nanos)>,
}

impl Cell {
    fn add_group(&mut self, group: u32, nanos: Nanos) {
        match self.groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, sum)) => *sum += nanos,
            None => self.groups.push((group, nanos)),
        }
    }

    fn fill(&self) -> Fill {
        let most = Cause::ALL.into_iter().rev().max_by_key(|cause| self.causes[*cause as usize]);
        match most.unwrap_or(Cause::Unattributed) {
            Cause::Busy => {
                let all: Nanos = self.groups.iter().map(|(_, nanos)| nanos).sum();
                let group = self.groups.iter().find(|(_, nanos)| *nanos > all / 2);
                group.map_or(Fill::Several, |(group, _)| Fill::Group(*group))
            }
            cause => Fill::Idle(cause),
        }
    }
}
