//! Traces made for one thing each, and what is made of them.

use proptest::prelude::*;

use super::super::simulated::{Setup, Work, junk, ring};
use super::*;

const MS: Nanos = 1_000_000;

fn summary(trace: &Trace) -> Summary {
    Summary::of(trace, Options::default())
}

fn near(a: f64, b: f64, percent: f64) -> bool {
    (a - b).abs() <= percent / 100.0 * b.abs().max(1e-12)
}

/// The first action of a trace.
#[track_caller]
fn check(trace: &Trace, kind: ActionKind, words: &str) -> Summary {
    let summary = summary(trace);
    let first = summary.actions.first().expect("there is always something to say");
    assert_eq!((first.kind, first.words.as_str()), (kind, words), "{:#?}", summary.actions);
    summary
}

#[test]
fn a_full_pipe_is_told_to_be_full() {
    let trace = Setup::equal(4, 10 * MS).run(&ring(4, 100, 2));
    let found = check(&trace, ActionKind::None, "the pipe is full: stage 3 is busy 99 % of the time");
    assert_eq!((found.micro_batches, found.prompt_tokens, found.answer_tokens, found.groups), (400, 0, 800, 4));
    assert!(near(found.seconds, 4.03, 0.01) && near(found.tokens_per_second, 800.0 / 4.03, 0.01));
    assert!(near(found.in_flight, 4.0, 2.0), "{}", found.in_flight);
    assert!(near(found.busy, 400.0 / 403.0, 0.01) && near(found.law.busy, found.busy, 0.01));
    assert_eq!((found.law.knee, found.law.speedup_max), (4, None), "one size of micro-batch tells no ceiling");
    assert!(!found.stages[0].fitted && near(found.stages[0].alpha + 2.0 * found.stages[0].beta, 0.01, 0.1));
}

#[test]
fn the_law_is_what_equal_stages_do() {
    for groups in 1..=6 {
        for stages in 1..=5 {
            let found = summary(&Setup::equal(stages, 10 * MS).run(&ring(groups, 60, 1)));
            assert_eq!((found.groups, found.law.knee), (groups, stages));
            assert!(near(found.busy, found.law.busy, 0.5), "{stages} stages, {groups} groups: {found:?}");
        }
    }
    // A job: M/(M + P − 1).
    for (stages, micro_batches) in [(1, 3), (4, 1), (4, 2), (4, 3), (4, 4), (4, 9), (7, 5)] {
        let job = summary(&Setup::equal(stages, 10 * MS).run(&ring(micro_batches, 1, 1)));
        let expected = law::job_efficiency(stages, micro_batches);
        assert!(near(job.busy, expected, 0.01) && near(job.law.busy, expected, 0.01), "{expected}: {job:?}");
    }
    // Four groups, then one.
    let mut work = ring(4, 50, 1);
    work.extend((200..250).map(|step| Work { decode: 1, after: Some(step - 1), ..Work::default() }));
    let mixed = summary(&Setup::equal(4, 10 * MS).run(&work));
    assert!(near(mixed.busy, 250.0 / 403.0, 0.01) && near(mixed.law.busy, mixed.busy, 1.0), "{mixed:?}");
}

#[test]
fn the_law_is_what_unequal_stages_with_hops_do() {
    let mut setup = Setup::equal(3, 10 * MS);
    (setup.stages[1].0, setup.hops, setup.head) = (17 * MS, vec![MS, 2 * MS, 3 * MS, 4 * MS], (MS / 2, MS / 2));
    for groups in 1..=5 {
        let found = summary(&setup.run(&ring(groups, 60, 1)));
        assert!(near(found.busy, found.law.busy, 1.0), "{groups} groups: {} for {}", found.busy, found.law.busy);
        assert!(near(found.bottleneck_busy, found.law.bottleneck_busy, 1.0));
        assert_eq!((found.bottleneck, found.law.knee), (1, 3));
        assert!(near(found.law.loop_seconds, 0.048, 0.1) && near(found.law.pace_seconds, 0.017, 0.1));
        for (hop, expected) in found.hop_seconds.iter().zip([0.001, 0.002, 0.003, 0.004]) {
            assert!(near(*hop, expected, 0.1));
        }
    }
}

#[test]
fn costs_are_fitted() {
    let mut setup = Setup::equal(2, 0);
    setup.stages = vec![(4 * MS, MS / 10), (6 * MS, MS / 5)];
    let mut work = ring(2, 40, 3);
    work.insert(0, Work { prefill: 64, ..Work::default() });
    work.insert(0, Work { prefill: 128, ..Work::default() });
    let found = summary(&setup.run(&work));
    for (stage, (alpha, beta)) in found.stages.iter().zip([(4e-3, 1e-4), (6e-3, 2e-4)]) {
        assert!(stage.fitted && near(stage.alpha, alpha, 1.0) && near(stage.beta, beta, 1.0), "{stage:?}");
    }
    let speedup = found.law.speedup_max.expect("two sizes were seen");
    assert!(speedup > 1.0 && speedup < 2.0, "{speedup}");
    assert_eq!((found.prompt_tokens, found.answer_tokens), (192, 240));
}

#[test]
fn too_few_requests() {
    let setup = Setup::equal(4, 10 * MS);
    let words = "M = 2 < P = 4: two more concurrent requests would fill the pipe";
    let found = check(&setup.run(&ring(2, 50, 1)), ActionKind::Requests, words);
    assert!(near(found.actions[0].gain, 2.0, 1.0));
    let words = "M = 3 < P = 4: one more concurrent request would fill the pipe";
    check(&setup.run(&ring(3, 50, 1)), ActionKind::Requests, words);
    let mut far = setup.clone();
    far.hops = vec![0, 5 * MS, 5 * MS, 5 * MS, 5 * MS];
    let words = "M = 4 < M* = 6: two more concurrent requests would fill the pipe";
    check(&far.run(&ring(4, 50, 1)), ActionKind::Requests, words);
    // One slow stage is full before there are as many micro-batches as stages.
    let mut slow = setup;
    slow.stages[1].0 = 60 * MS;
    assert!(summary(&slow.run(&ring(2, 50, 1))).actions.iter().all(|action| action.kind != ActionKind::Requests));
}

#[test]
fn sequences_that_could_be_more_groups() {
    let mut setup = Setup::equal(4, 0);
    setup.stages = vec![(MS, MS); 4];
    let mut work = ring(2, 400, 8);
    work[0] = Work { prefill: 64, ..Work::default() };
    let words = "the 16 sequences that run would go faster as 4 micro-batches than as 2";
    check(&setup.run(&work), ActionKind::Groups, words);
}

/// Stages on the same cores: more micro-batches would only divide them.
#[test]
fn what_is_shared_is_not_filled_by_more() {
    let mut setup = Setup::equal(4, 0);
    setup.stages = vec![(MS, MS); 4];
    let mut work = ring(2, 400, 8);
    work[0] = Work { prefill: 64, ..Work::default() };
    let mut trace = setup.run(&work);
    let of = |capacity: f64| vec![Share { capacity, stages: (0..4).map(|stage| (stage, 1.0)).collect() }];
    for (capacity, knee, words) in [
        (1.0, 1, "stages share what they compute on, and one micro-batch at a time take all of it"),
        (2.0, 2, "stages share what they compute on, and two micro-batches at a time take all of it"),
    ] {
        trace.shares = of(capacity);
        let found = summary(&trace);
        assert_eq!(found.law.knee, knee);
        let first = &found.actions[0];
        assert!(first.kind == ActionKind::None && first.words.starts_with(words), "{:#?}", found.actions);
    }
    // Enough for all: as if nothing was shared.
    trace.shares = of(4.0);
    let words = "the 16 sequences that run would go faster as 4 micro-batches than as 2";
    let found = check(&trace, ActionKind::Groups, words);
    assert!(near(found.stages[1].alone_seconds, found.stages[1].step_seconds, 1e-6));
    // Two that are always at it together on what is enough for one took twice as long as alone.
    trace.shares = of(1.0);
    let found = summary(&trace);
    assert!(near(found.stages[1].alone_seconds, found.stages[1].step_seconds / 2.0, 5.0), "{:?}", found.stages[1]);
}

#[test]
fn too_few_pages() {
    let mut work = ring(2, 50, 1);
    work.iter_mut().for_each(|work| work.kv_wait = true);
    let words = "requests wait for KV pages 48 % of the time, and M = 2 < P = 4: raise --kv-tokens, or shorten --ctx, \
                 or leave the tightest stage fewer layers";
    check(&Setup::equal(4, 10 * MS).run(&work), ActionKind::KvRoom, words);
}

#[test]
fn requests_that_come_and_go() {
    let mut work = ring(2, 60, 1);
    for (step, work) in work.iter_mut().enumerate().filter(|(step, _)| step % 40 == 0 && *step > 0) {
        (work.idle, work.after) = (150 * MS, Some(step - 1));
    }
    let words = "stages starve 20 % of the time, though M = 2 fills the pipe when it is there: steadier requests";
    let found = check(&Setup::equal(2, 10 * MS).run(&work), ActionKind::Requests, words);
    assert!(near(found.head_idle, 300.0 / 1_510.0, 5.0), "{found:?}");
}

#[test]
fn an_uneven_split() {
    let mut setup = Setup::equal(4, 8 * MS);
    setup.stages[2].0 = 12 * MS;
    let words = "stage 2 is 1.3× the mean: move two layers to stage 1";
    let mut trace = setup.run(&ring(5, 50, 1));
    let found = check(&trace, ActionKind::Layers, words);
    assert_eq!(found.bottleneck, 2);
    assert!(near(found.actions[0].gain, 1.2, 1.0), "{:?}", found.actions);
    trace.stages[2].layers = (16, 17);
    check(
        &trace,
        ActionKind::Device,
        "stage 2 is 1.3× the mean, and no move of whole layers helps: it wants a faster device",
    );
    for (stage, time) in [4, 15, 16, 15].into_iter().enumerate() {
        setup.stages[stage].0 = time * MS;
    }
    let words = "stage 2 is 1.3× the mean: move one layer to stage 0, by way of those between";
    check(&setup.run(&ring(5, 50, 1)), ActionKind::Layers, words);
}

#[test]
fn long_hops() {
    let mut setup = Setup::equal(2, 10 * MS);
    setup.hops = vec![0, 40 * MS, MS];
    let trace = setup.run(&ring(4, 50, 1));
    let found = summary(&trace);
    let hops = found.actions.iter().find(|action| action.kind == ActionKind::Hops).expect("told");
    assert_eq!(
        hops.words,
        "hops take 41.0 ms of the 61.0 ms of a round, 40.0 ms of it from stage 0 to stage 1: a faster link there, or \
         enough in flight to hide it (M* = 7)"
    );
    assert!(near(hops.gain, 61.0 / 40.0, 1.0));
    assert_eq!(found.actions[0].kind, ActionKind::Requests);
}

#[test]
fn a_slow_head() {
    let mut setup = Setup::equal(2, MS);
    setup.head = (2 * MS, 8 * MS);
    let words = "the head takes 9.84 ms a micro-batch to form it and to draw its tokens, the slowest stage 1.00 ms: \
                 the stages wait for it";
    let found = check(&setup.run(&ring(3, 50, 1)), ActionKind::Head, words);
    assert!(found.head_working > 0.95 && found.head_idle == 0.0);
}

#[test]
fn work_around_the_device() {
    let mut setup = Setup::equal(2, 10 * MS);
    setup.overhead = (4 * MS, 3 * MS);
    let words = "stage 1 spends 41 % of its time around the device: larger micro-batches, or fewer stages";
    check(&setup.run(&ring(3, 50, 1)), ActionKind::Overhead, words);
}

#[test]
fn a_short_job() {
    let work = vec![Work { prefill: 64, ..Work::default() }; 4];
    let words = "filling and draining takes 43 % of the time, with 4 micro-batches through 4 stages: a longer job, or \
                 a smaller --chunk";
    let found = check(&Setup::equal(4, 10 * MS).run(&work), ActionKind::Job, words);
    assert!(near(found.actions[0].gain, 7.0 / 4.0, 1.0));
}

#[test]
fn replicas_where_the_model_fits_one_device() {
    let mut setup = Setup::equal(2, 10 * MS);
    setup.hops = vec![0, 5 * MS, 5 * MS];
    let options = Options { fits_one_device: true, ..Options::default() };
    let words = |groups| {
        let found = Summary::of(&setup.run(&ring(groups, 50, 1)), options);
        found.actions.iter().find(|action| action.kind == ActionKind::Replicas).expect("told").clone()
    };
    assert_eq!(words(2).words, "the model fits on one card: two replicas would give more than this pipeline");
    assert!(near(words(2).gain, 1.5, 1.0));
    assert_eq!(words(1).words, "the model fits on one card, which would answer sooner without hops");
    assert!(summary(&setup.run(&ring(2, 50, 1))).actions.iter().all(|action| action.kind != ActionKind::Replicas));
}

#[test]
fn a_part_of_a_trace() {
    let trace = Setup::equal(4, 10 * MS).run(&ring(4, 100, 1));
    let window = Some(Window { from: 1000 * MS, to: 2000 * MS });
    let found = Summary::of(&trace, Options { window, ..Options::default() });
    assert_eq!((found.micro_batches, found.seconds), (100, 1.0));
    assert!(near(found.busy, 1.0, 0.1) && near(found.law.busy, 1.0, 0.1));
}

#[test]
fn it_is_told_to_programs() {
    let trace = Setup::equal(2, 10 * MS).run(&ring(1, 4, 1));
    let found = serde_json::to_value(summary(&trace)).expect("JSON");
    let shares = found["stages"][1]["shares"].as_object().expect("an object");
    let names: Vec<&str> = shares.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "busy",
            "fill_drain",
            "upstream",
            "hop",
            "back_pressure",
            "starved",
            "kv_wait",
            "overhead",
            "outage",
            "unattributed"
        ]
    );
    assert!(near(shares.values().filter_map(serde_json::Value::as_f64).sum(), 1.0, 1e-6));
    assert_eq!(found["actions"][0]["kind"], "requests");
}

#[test]
fn nothing_recorded_is_nothing_to_say() {
    for stages in [0, 2] {
        let found = summary(&Trace { stages: vec![StageTrace::default(); stages], ..Trace::default() });
        assert!(found.actions.is_empty() && found.busy == 0.0 && found.tokens_per_second == 0.0);
        let json = serde_json::to_string(&found).expect("JSON");
        assert!(!json.contains("NaN") && !json.contains("null,\"busy\""), "{json}");
    }
}

proptest! {
    #[test]
    fn any_records_say_something(trace in junk(), from in 0u64..1200, length in 0u64..1200, fits_one_device in any::<bool>()) {
        for window in [None, Some(Window { from, to: from + length })] {
            let found = Summary::of(&trace, Options { window, fits_one_device });
            prop_assert!(found.actions.iter().all(|action| action.gain.is_finite()));
            prop_assert!((0.0..=1.0).contains(&found.busy) && (0.0..=1.0).contains(&found.law.busy));
        }
    }
}
