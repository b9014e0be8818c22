//! What the stages did lately, for whoever watches: in pieces that follow each other, each of which replaces what was
//! said of its time before.
//!
//! A stage tells of a micro-batch when it is done with it, and where idle time went is known when all have told of what
//! was under way then. So a piece goes back to where the oldest micro-batch began that was not all told when the one
//! before was made. Beyond the last thing that a stage has told nothing is said of it, unless nothing is asked for: then
//! it starves.

use pp_engine::trace::causes::{Cause, StageCauses, Window, causes_within};
use pp_engine::trace::{HeadSpan, Nanos, Recorder, StageSpan, Trace};
use serde::Serialize;

/// A piece goes back so far at most: the stages may have told nothing for longer.
const BACK_MAX: Nanos = 4_000_000_000;
/// So far back micro-batches are looked for that are still under way.
const LIFE_MAX: Nanos = 30_000_000_000;
/// How long after its end a stage elsewhere has told of a micro-batch.
const LATE: Nanos = 500_000_000;
/// Micro-batches, and as many idle intervals, of a stage in a piece; of more, the latest.
const ITEMS_MAX: usize = 3000;

/// Microseconds of the pipeline's clock.
type Micros = u64;

/// A micro-batch: began, ended, group, tokens, sequences, step.
type Work = (Micros, Micros, u32, u32, u32, u64);
/// Idle time: from, until, why.
type Idle = (Micros, Micros, Cause);

/// A piece.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Piece {
    /// When it was made.
    pub now: Micros,
    /// It replaces what ended after this.
    pub from: Micros,
    /// The stages in order.
    pub stages: Vec<StagePiece>,
}

/// What a stage did.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StagePiece {
    /// What it worked at, by its beginning.
    pub spans: Vec<Work>,
    /// When and why it did not, by time.
    pub idle: Vec<Idle>,
}

/// One who watches a pipeline.
#[derive(Debug)]
pub struct Live {
    /// Up to here all was known.
    settled: Nanos,
    /// The latest micro-batch of each stage that had ended by then.
    before: Vec<Option<StageSpan>>,
}

impl Live {
    /// Watches as many stages from now on.
    pub fn new(stages: usize, now: Nanos) -> Live {
        Live { settled: now.saturating_sub(BACK_MAX) / 1000 * 1000, before: vec![None; stages] }
    }

    /// The next piece. `is_idle`: nothing is asked of the pipeline.
    pub fn piece(&mut self, recorder: &Recorder, now: Nanos, is_idle: bool) -> Piece {
        let from = self.settled.max(now.saturating_sub(BACK_MAX) / 1000 * 1000);
        let mut trace = self.trace(recorder, from);
        let window = Window { from, to: now.max(from) };
        if is_idle {
            trace.stages.iter_mut().for_each(|stage| stage.spans.push(nothing(window.to)));
        }
        let known: Vec<Nanos> = trace.stages.iter().map(|stage| last_end(&stage.spans)).collect();
        let causes = causes_within(&trace, window);
        if is_idle {
            trace.stages.iter_mut().for_each(|stage| stage.spans.truncate(stage.spans.len() - 1));
        }
        let stages = trace.stages.iter().zip(&causes).zip(&known);
        let stages = stages.map(|((stage, causes), known)| StagePiece {
            spans: latest(stage.spans.iter().filter(|span| span.finished > from).map(work).collect()),
            idle: latest(idle(causes, *known, stage.spans.is_empty())),
        });
        let piece = Piece { now: micros(now), from: micros(from), stages: stages.collect() };
        let said = if is_idle { now.saturating_sub(LATE) } else { known.into_iter().min().unwrap_or(now) };
        // Until it forms another one, the head has the latest in its hands.
        let latest = trace.head.iter().map(|span| span.answered).max().filter(|_| !is_idle);
        let known = [open_since(&trace), latest].into_iter().flatten().fold(said, Nanos::min);
        // What comes later may queue for a stage that was at work then: that sets the pace for the others.
        let alive =
            trace.head.iter().filter(|span| span.answered == 0 || span.answered > known).map(|span| span.formed);
        self.settle(&trace, alive.fold(known, Nanos::min));
        piece
    }

    /// What has to be known of the time since `from`: also of what was under way then.
    fn trace(&self, recorder: &Recorder, from: Nanos) -> Trace {
        let formed = recorder.since(from).head.iter().map(|span| span.formed).min();
        let begin = formed.unwrap_or(from).clamp(from.saturating_sub(LIFE_MAX), from);
        let mut trace = recorder.since(begin);
        for (stage, before) in trace.stages.iter_mut().zip(&self.before) {
            if let Some(before) = before
                && stage.spans.iter().all(|span| span.step != before.step)
            {
                stage.spans.insert(0, *before);
            }
        }
        trace
    }

    fn settle(&mut self, trace: &Trace, known: Nanos) {
        self.settled = self.settled.max(known / 1000 * 1000);
        for (stage, before) in trace.stages.iter().zip(&mut self.before) {
            let ended = stage.spans.iter().filter(|span| span.finished <= self.settled);
            *before = ended.max_by_key(|span| span.finished).copied().or(*before);
        }
    }
}

fn micros(nanos: Nanos) -> Micros {
    nanos.div_ceil(1000)
}

/// When the oldest micro-batch was formed that is not all told of.
fn open_since(trace: &Trace) -> Option<Nanos> {
    // Answers come in order, and stages tell in order: what has none, and is before one that has, was given up.
    let answered = trace.head.iter().rposition(|span| span.sampled > 0);
    let told = trace.stages.iter().map(|stage| stage.spans.last().map_or(0, |span| span.step)).min().unwrap_or(0);
    let open = |(at, span): &(usize, &HeadSpan)| span.step > told || answered.is_none_or(|answered| *at > answered);
    trace.head.iter().enumerate().filter(open).map(|(_, span)| span.formed).min()
}

/// A micro-batch that took no time: where nothing is asked for, it shows why nothing was done until now.
fn nothing(now: Nanos) -> StageSpan {
    let step = u64::MAX;
    StageSpan {
        step,
        arrived: now,
        taken: now,
        started: now,
        finished: now,
        send_started: now,
        sent: now,
        ..StageSpan::default()
    }
}

fn last_end(spans: &[StageSpan]) -> Nanos {
    spans.iter().map(|span| span.finished).max().unwrap_or(0)
}

fn work(span: &StageSpan) -> Work {
    (micros(span.started), micros(span.finished), span.group, span.tokens, span.sequences, span.step)
}

/// Idle time up to what is `known`. Who has never worked has not been asked to.
fn idle(causes: &StageCauses, known: Nanos, is_new: bool) -> Vec<Idle> {
    let idle = causes.intervals.iter().filter(|interval| interval.cause != Cause::Busy);
    let idle = idle.map(|interval| {
        let cause = if is_new { Cause::Starved } else { interval.cause };
        (micros(interval.from), micros(interval.to.min(known)), cause)
    });
    idle.filter(|(from, to, _)| from < to).collect()
}

fn latest<T>(mut items: Vec<T>) -> Vec<T> {
    items.drain(..items.len().saturating_sub(ITEMS_MAX));
    items
}

#[cfg(test)]
mod tests;
