//! Every cause alone, and that causes add up.

use proptest::prelude::*;

use super::super::simulated::{Setup, Work, junk, ring};
use super::super::{HeadInterval, HeadSpan, HeadState, StageTrace};
use super::*;

const MS: Nanos = 1_000_000;

/// The shares of all causes of each stage, in percent.
fn percents(trace: &Trace) -> Vec<Vec<(Cause, u64)>> {
    let one = |causes: &StageCauses| {
        let share = |cause| (cause, (100.0 * causes.share(cause)).round() as u64);
        Cause::ALL.into_iter().map(share).filter(|(_, percent)| *percent > 0).collect()
    };
    causes(trace).iter().map(one).collect()
}

fn shares(trace: &Trace, cause: Cause) -> Vec<f64> {
    causes(trace).iter().map(|stage| stage.share(cause)).collect()
}

/// That idle time inside has one cause, but for what is allowed to the others together.
#[track_caller]
fn check_only(trace: &Trace, cause: Cause, others: f64) {
    check_tiles(trace, Window::of(trace));
    let all = causes(trace);
    assert!(all.iter().any(|stage| stage.share(cause) > 0.2), "{:?}", percents(trace));
    for stage in &all {
        let known = [Cause::Busy, Cause::FillDrain, cause].map(|cause| stage.share(cause)).iter().sum::<f64>();
        assert!(known >= 1.0 - others, "{:?}", percents(trace));
        assert_eq!(stage.total(Cause::Unattributed), 0);
    }
}

#[track_caller]
fn check_tiles(trace: &Trace, window: Window) {
    for stage in causes_within(trace, window) {
        assert_eq!(stage.wall(), window.nanos());
        let mut at = window.from;
        let mut totals = [0; Cause::ALL.len()];
        for interval in &stage.intervals {
            assert_eq!(interval.from, at);
            assert!(interval.to > at);
            at = interval.to;
            totals[interval.cause as usize] += interval.nanos();
        }
        assert!(at == window.to || stage.intervals.is_empty() && window.nanos() == 0);
        assert_eq!(totals, stage.totals);
        assert!(stage.intervals.windows(2).all(|pair| pair[0].cause != pair[1].cause));
    }
}

#[test]
fn a_full_pipe_is_busy() {
    let trace = Setup::equal(4, 10 * MS).run(&ring(4, 100, 1));
    for share in shares(&trace, Cause::Busy) {
        assert!(share > 0.99);
    }
    check_tiles(&trace, Window::of(&trace));
}

#[test]
fn a_job_fills_and_drains() {
    let trace = Setup::equal(4, 10 * MS).run(&ring(4, 1, 1));
    for (busy, ends) in shares(&trace, Cause::Busy).into_iter().zip(shares(&trace, Cause::FillDrain)) {
        assert!((busy - 4.0 / 7.0).abs() < 1e-9 && (busy + ends - 1.0).abs() < 1e-9);
    }
}

#[test]
fn a_slow_hop_shows_as_hop() {
    for hop in 0..=3 {
        for (time, latency) in [(MS, 50 * MS), (10 * MS, 10 * MS), (20 * MS, 17 * MS)] {
            let mut setup = Setup::equal(3, time);
            setup.hops[hop] = latency;
            check_only(&setup.run(&ring(3, 60, 1)), Cause::Hop, 0.02);
        }
    }
    // A single answer leaves all stages but one without work; the hop adds to that on the stage it leads to.
    let mut setup = Setup::equal(3, 10 * MS);
    setup.hops[1] = 30 * MS;
    let trace = setup.run(&ring(1, 60, 1));
    for (stage, (hop, starved)) in [(0.0, 50.0 / 60.0), (0.5, 20.0 / 60.0), (0.0, 50.0 / 60.0)].into_iter().enumerate()
    {
        assert!((shares(&trace, Cause::Hop)[stage] - hop).abs() < 0.02, "{:?}", percents(&trace));
        assert!((shares(&trace, Cause::Starved)[stage] - starved).abs() < 0.02, "{:?}", percents(&trace));
    }
}

#[test]
fn hops_behind_a_slow_stage_are_hidden() {
    let mut setup = Setup::equal(3, 10 * MS);
    (setup.stages[1].0, setup.hops) = (60 * MS, vec![5 * MS; 4]);
    check_only(&setup.run(&ring(3, 40, 1)), Cause::Upstream, 0.02);
}

#[test]
fn a_slow_stage_shows_as_upstream() {
    for slow in 0..3 {
        for groups in [2, 3, 5] {
            let mut setup = Setup::equal(3, 10 * MS);
            setup.stages[slow].0 = 60 * MS;
            setup.head = (MS / 10, MS / 2);
            let trace = setup.run(&ring(groups, 40, 1));
            check_only(&trace, Cause::Upstream, 0.02);
            assert!(shares(&trace, Cause::Busy)[slow] > 0.95);
        }
    }
}

#[test]
fn missing_credits_show_as_back_pressure() {
    let mut setup = Setup::equal(3, 10 * MS);
    setup.stages[2].0 = 30 * MS;
    setup.credits = 1;
    check_only(&setup.run(&ring(8, 40, 1)), Cause::BackPressure, 0.01);
    setup.credits = 1000;
    let free = setup.run(&ring(8, 40, 1));
    check_only(&free, Cause::Upstream, 0.01);
}

#[test]
fn too_few_micro_batches_show_as_starved() {
    for groups in [1, 2, 3] {
        let trace = Setup::equal(4, 10 * MS).run(&ring(groups, 50, 1));
        check_only(&trace, Cause::Starved, 0.02);
        for share in shares(&trace, Cause::Starved) {
            assert!((share - (4 - groups) as f64 / 4.0).abs() < 0.03, "{:?}", percents(&trace));
        }
    }
}

#[test]
fn no_requests_show_as_starved() {
    let mut work = ring(4, 40, 1);
    work[80].idle = 2000 * MS;
    for later in &mut work[81..84] {
        later.after = None;
    }
    // Filling the pipe again takes its time too.
    check_only(&Setup::equal(4, 10 * MS).run(&work), Cause::Starved, 0.02);
}

#[test]
fn no_pages_show_as_kv_wait() {
    let waiting = |groups| {
        let mut work = ring(groups, 50, 1);
        work.iter_mut().for_each(|work| work.kv_wait = true);
        work
    };
    for groups in [1, 2, 3] {
        check_only(&Setup::equal(4, 10 * MS).run(&waiting(groups)), Cause::KvWait, 0.03);
    }
    // What lacks nothing is not told to wait for pages.
    assert!(shares(&Setup::equal(4, 10 * MS).run(&waiting(4)), Cause::KvWait).iter().all(|share| *share < 0.01));
    let mut slow = Setup::equal(3, 10 * MS);
    slow.stages[1].0 = 60 * MS;
    check_only(&slow.run(&waiting(3)), Cause::Upstream, 0.01);
}

#[test]
fn a_slow_head_shows_as_upstream() {
    let mut setup = Setup::equal(2, MS);
    setup.head = (2 * MS, 8 * MS);
    check_only(&setup.run(&ring(3, 40, 1)), Cause::Upstream, 0.01);
}

#[test]
fn the_stages_own_work_shows_as_overhead() {
    let mut setup = Setup::equal(2, 10 * MS);
    setup.overhead = (4 * MS, 3 * MS);
    check_only(&setup.run(&ring(3, 40, 1)), Cause::Overhead, 0.01);
}

#[test]
fn a_small_trace_by_hand() {
    let span = |step, arrived, started, finished, send_started, sent| StageSpan {
        step,
        arrived,
        taken: arrived,
        started,
        finished,
        send_started,
        sent,
        ..StageSpan::default()
    };
    let head = |step, formed, sent, answered, sampled| HeadSpan {
        step,
        formed,
        sent,
        answered,
        sampled,
        ..HeadSpan::default()
    };
    let state = |state, from, to| HeadInterval { state, from, to };
    let trace = Trace {
        stages: vec![
            StageTrace { spans: vec![span(0, 12, 12, 20, 21, 23), span(1, 48, 50, 58, 58, 58)], ..Default::default() },
            StageTrace { spans: vec![span(0, 26, 27, 35, 35, 35), span(1, 61, 61, 70, 70, 70)], ..Default::default() },
        ],
        head: vec![head(0, 8, 10, 38, 40), head(1, 43, 45, 75, 76)],
        states: vec![
            state(HeadState::Working, 8, 10),
            state(HeadState::Waiting, 10, 38),
            state(HeadState::Working, 38, 40),
            state(HeadState::KvWait, 40, 42),
            state(HeadState::Working, 43, 45),
            state(HeadState::Waiting, 45, 75),
        ],
        ..Trace::default()
    };
    let told: Vec<Vec<(Cause, Nanos, Nanos)>> =
        causes(&trace).iter().map(|stage| stage.intervals.iter().map(|i| (i.cause, i.from, i.to)).collect()).collect();
    use Cause::*;
    assert_eq!(
        told[0],
        [
            (FillDrain, 10, 12),
            (Busy, 12, 20),
            (Overhead, 20, 21),
            (BackPressure, 21, 23),
            (Starved, 23, 35),
            (Hop, 35, 38),
            (Upstream, 38, 40),
            (KvWait, 40, 42),
            (Unattributed, 42, 43),
            (Upstream, 43, 45),
            (Hop, 45, 48),
            (Overhead, 48, 50),
            (Busy, 50, 58),
            (FillDrain, 58, 75),
        ]
    );
    assert_eq!(
        told[1],
        [
            (FillDrain, 10, 27),
            (Busy, 27, 35),
            (Starved, 35, 40),
            (KvWait, 40, 42),
            (Unattributed, 42, 43),
            (Starved, 43, 58),
            (Hop, 58, 61),
            (Busy, 61, 70),
            (FillDrain, 70, 75),
        ]
    );
}

#[test]
fn nothing_recorded_is_nothing() {
    assert!(causes(&Trace::default()).is_empty());
    let stages = vec![StageTrace::default(); 2];
    let none = causes(&Trace { stages: stages.clone(), ..Trace::default() });
    assert_eq!(none, vec![StageCauses::default(); 2]);
    let head = vec![HeadSpan { sent: 5, answered: 9, ..HeadSpan::default() }];
    let idle = causes(&Trace { stages, head, ..Trace::default() });
    assert_eq!(idle[1].intervals, [Interval { cause: Cause::FillDrain, from: 5, to: 9 }]);
}

#[test]
fn what_was_given_up_does_not_count_as_in_flight() {
    let mut trace = Setup::equal(2, 10 * MS).run(&ring(1, 20, 1));
    // The head gave it up.
    (trace.head[8].answered, trace.head[8].sampled) = (0, 0);
    check_only(&trace, Cause::Starved, 0.001);
}

#[test]
fn a_long_trace_is_divided_in_no_time() {
    let mut trace = Setup::equal(8, MS).run(&ring(8, 1 << 13, 1));
    // The last stage forgot nearly all: one long gap.
    let spans = &mut trace.stages[7].spans;
    *spans = vec![spans[0], spans[spans.len() - 1]];
    let begun = std::time::Instant::now();
    check_tiles(&trace, Window::of(&trace));
    assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
}

prop_compose! {
    fn setup()(stages in 1usize..6)(
        times in prop::collection::vec((0u64..500, 0u64..50), stages),
        hops in prop::collection::vec(0u64..300, stages + 1),
        credits in 1usize..5, overhead in (0u64..20, 0u64..20), head in (0u64..40, 0u64..40),
    ) -> Setup {
        Setup { stages: times, hops, credits, overhead, head }
    }
}

prop_compose! {
    fn work()(groups in 1usize..6)(
        after in Just(groups),
        steps in prop::collection::vec((0u32..4, 1u32..9, 0u64..100, any::<bool>(), 50u64..200), 1..40),
    ) -> Vec<Work> {
        let one = |(step, (prefill, decode, idle, kv_wait, percent)): (usize, &(u32, u32, u64, bool, u64))| Work {
            group: (step % after) as u32,
            prefill: *prefill,
            decode: *decode,
            after: step.checked_sub(after),
            idle: idle.saturating_sub(90),
            kv_wait: *kv_wait,
            percent: *percent,
        };
        steps.iter().enumerate().map(one).collect()
    }
}

proptest! {
    /// T13.
    #[test]
    fn causes_add_up_to_the_wall_time(
        setup in setup(), work in work(),
        forgotten in prop::collection::vec((0usize..7, 0usize..40), 0..6), from in 0u64..5000, length in 0u64..5000,
    ) {
        let whole = setup.run(&work);
        check_tiles(&whole, Window::of(&whole));
        for stage in causes(&whole) {
            prop_assert_eq!(stage.total(Cause::Unattributed), 0);
        }
        let mut trace = whole;
        for (stage, span) in forgotten {
            match trace.stages.get_mut(stage) {
                Some(stage) if span < stage.spans.len() => { stage.spans.remove(span); }
                None if span < trace.head.len() => { trace.head.remove(span); }
                _ => {}
            }
        }
        check_tiles(&trace, Window::of(&trace));
        check_tiles(&trace, Window { from, to: from + length });
    }

    #[test]
    fn any_records_add_up(trace in junk(), from in 0u64..1200, length in 0u64..1200) {
        check_tiles(&trace, Window::of(&trace));
        check_tiles(&trace, Window { from, to: from + length });
    }
}
