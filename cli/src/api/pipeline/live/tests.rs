//! Whoever puts the pieces together has what is known when all is over.

use std::sync::Arc;

use pp_engine::law::{HopCost, StageCost};
use pp_engine::schedule::Limits;
use pp_engine::sim::load::{Distribution, Load};
use pp_engine::sim::{Nothing, Pipe};

use super::*;

const MS: Nanos = 1_000_000;

/// What some requests do to a pipeline of unequal stages and slow hops, with pauses in which nothing is asked for.
fn trace(seed: u64) -> Trace {
    let limits = Limits {
        stages: 3,
        sequences: 8,
        batch_tokens: 64,
        tile: 1,
        outputs: 8,
        pages: 256,
        context: 512,
        in_flight: 7,
        queue: 100,
        prefix_cache: true,
        groups: None,
    };
    let stage = |alpha: f64| StageCost { alpha, beta: 2e-4, attention: 0.0 };
    let pipe = Pipe {
        hops: vec![HopCost { latency: 2e-3, seconds_per_token: 0.0 }; 3],
        seed,
        ..Pipe::of(vec![stage(0.01), stage(0.03), stage(0.015)])
    };
    let wanted = Distribution {
        requests: 12,
        rate: 1.0,
        prompt: (8, 80),
        output: (4, 24),
        shared: 0.0,
        cancelled: (0.0, 1.0),
        several: 0.0,
    };
    let mut load = Load::new(limits, wanted.requests(seed, 1000), 1000);
    let mut trace = pp_engine::sim::run(&pipe, &mut load, &mut Nothing, u64::MAX).expect("it does not stand still").0;
    // A head tells nothing of micro-batches that only give pages back.
    trace.head.retain(|span| span.prefill_tokens + span.decode_tokens > 0);
    trace
}

/// A recorder that is told of a trace in its time.
struct Replay {
    trace: Trace,
    recorder: Arc<Recorder>,
    /// What was told so far, of each stage, of the head's sending and answering, and of states; and when.
    told: (Vec<usize>, usize, usize, usize, Nanos),
}

impl Replay {
    fn of(mut trace: Trace) -> Replay {
        // Stages tell of a micro-batch when they have handed it on.
        trace.stages.iter_mut().for_each(|stage| stage.spans.sort_by_key(|span| span.sent));
        let recorder = Recorder::new(trace.stages.iter().map(|stage| (stage.device.clone(), stage.layers)));
        let told = (vec![0; trace.stages.len()], 0, 0, 0, 0);
        Replay { trace, recorder, told }
    }

    /// Tells what was known at a time; false when all has been told.
    fn until(&mut self, now: Nanos) -> bool {
        let (stages, sent, answered, states, told) = &mut self.told;
        let Trace { stages: all, head, states: intervals, .. } = &self.trace;
        for (index, (stage, told)) in all.iter().zip(stages.iter_mut()).enumerate() {
            while let Some(span) = stage.spans.get(*told).filter(|span| span.sent <= now) {
                self.recorder.stage_done(index, *span);
                *told += 1;
            }
        }
        while let Some(span) = head.get(*sent).filter(|span| span.sent <= now) {
            self.recorder.sent(pp_engine::trace::HeadSpan { answered: 0, sampled: 0, ..*span });
            *sent += 1;
        }
        while let Some(span) = head.get(*answered).filter(|span| span.sampled <= now && span.sent <= now) {
            self.recorder.answered(span.step, span.answered, span.sampled);
            *answered += 1;
        }
        // The head says what it does all the time, not when it does something else.
        while let Some(state) = intervals.get(*states).filter(|state| state.from < now) {
            self.recorder.state(state.state, state.from.max(*told), state.to.min(now));
            if state.to > now {
                break;
            }
            *states += 1;
        }
        *told = now;
        let left = all.iter().zip(stages).any(|(stage, told)| *told < stage.spans.len());
        left || *answered < head.len()
    }

    fn is_idle(&self) -> bool {
        self.told.1 == self.told.2
    }
}

/// As the page does it.
fn merge(all: &mut [StagePiece], piece: &Piece) {
    for (lane, new) in all.iter_mut().zip(&piece.stages) {
        lane.spans.retain(|span| span.1 <= piece.from);
        lane.spans.extend(&new.spans);
        lane.idle.retain(|idle| idle.0 < piece.from);
        lane.idle.iter_mut().for_each(|idle| idle.1 = idle.1.min(piece.from));
        lane.idle.extend(&new.idle);
    }
}

/// Microseconds of each cause, up to a time.
fn totals(idle: &[Idle], until: Micros) -> Vec<u64> {
    let of =
        |cause: Cause| idle.iter().filter(move |i| i.2 == cause).map(move |i| i.1.min(until).saturating_sub(i.0)).sum();
    Cause::ALL.into_iter().map(of).collect()
}

#[test]
fn pieces_come_to_what_is_known_when_all_is_over() {
    for seed in 0..8 {
        let whole = trace(seed);
        let mut replay = Replay::of(whole.clone());
        let mut live = Live::new(3, 0);
        let mut all = vec![StagePiece::default(); 3];
        let mut now = 0;
        while replay.until(now) {
            merge(&mut all, &live.piece(&replay.recorder, now, replay.is_idle()));
            now += 330 * MS + 777;
        }
        merge(&mut all, &live.piece(&replay.recorder, now, true));
        let end = whole.stages.iter().map(|stage| last_end(&stage.spans)).min().unwrap();
        let causes = causes_within(&whole, Window { from: 0, to: end });
        for (index, (stage, lane)) in whole.stages.iter().zip(&all).enumerate() {
            let mut spans: Vec<Work> = stage.spans.iter().map(work).collect();
            spans.sort_unstable();
            let mut found = lane.spans.clone();
            found.sort_unstable();
            assert_eq!(found, spans, "seed {seed}, stage {index}: every micro-batch once");
            let first = micros(stage.spans.iter().map(|span| span.started).min().unwrap());
            let lately: Vec<Idle> = lane.idle.iter().copied().filter(|idle| idle.0 >= first).collect();
            let of = |cause: Cause| {
                if cause == Cause::Busy {
                    0
                } else {
                    causes[index]
                        .intervals
                        .iter()
                        .filter(|i| i.cause == cause && micros(i.from) >= first)
                        .map(|i| micros(i.to) - micros(i.from))
                        .sum()
                }
            };
            let wanted: Vec<u64> = Cause::ALL.into_iter().map(of).collect();
            for ((cause, found), wanted) in Cause::ALL.into_iter().zip(totals(&lately, micros(end))).zip(wanted) {
                // Each piece rounds its edges to microseconds.
                assert!(
                    found.abs_diff(wanted) <= 200,
                    "seed {seed}, stage {index}, {cause:?}: {found} for {wanted} µs"
                );
            }
            assert!(lane.idle.windows(2).all(|pair| pair[0].1 <= pair[1].0), "no idle time twice");
        }
    }
}

#[test]
fn a_pipe_that_nobody_asks_starves_and_pieces_stay_small() {
    let recorder = Recorder::new([("a".to_owned(), (0, 1))]);
    let mut live = Live::new(1, 0);
    let piece = live.piece(&recorder, 10_000 * MS, true);
    assert_eq!(piece.stages[0].idle, [(6_000_000, 10_000_000, Cause::Starved)], "as far back as pieces go");
    // It works at something and has told nothing: nothing is said.
    assert_eq!(live.piece(&recorder, 10_300 * MS, false).stages[0], StagePiece::default());
    for step in 0..10_000 {
        let at = 10_300 * MS + step * MS / 10;
        let span =
            StageSpan { step, arrived: at, taken: at, started: at, finished: at + MS / 20, ..StageSpan::default() };
        recorder.stage_done(0, StageSpan { send_started: span.finished, sent: span.finished, ..span });
    }
    let piece = live.piece(&recorder, 11_400 * MS, false);
    assert_eq!(piece.stages[0].spans.len(), ITEMS_MAX);
    assert_eq!(piece.stages[0].spans.last().unwrap().5, 9_999, "the latest are kept");
    assert!(piece.stages[0].idle.len() <= ITEMS_MAX);
}
