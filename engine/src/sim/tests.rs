use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::load::{Distribution, End, Load, Request};
use super::toy::Toy;
use super::*;
use crate::law;
use crate::random::Random;
use crate::schedule::{Choice, Limits, Part, RequestId, Scheduler};

const SECOND: f64 = 1e9;

fn stage(alpha: f64, beta: f64) -> StageCost {
    StageCost { alpha, beta, attention: 0.0 }
}

/// Micro-batches of these tokens, all there at once.
struct OneJob {
    left: VecDeque<usize>,
    next: u64,
    out: usize,
}

impl OneJob {
    fn new(tokens: impl IntoIterator<Item = usize>) -> OneJob {
        OneJob { left: tokens.into_iter().collect(), next: 0, out: 0 }
    }
}

impl Source for OneJob {
    fn due(&self) -> Option<Nanos> {
        None
    }
    fn wake(&mut self, _: Nanos) {}
    fn next(&mut self, _: Nanos) -> Next {
        let Some(tokens) = self.left.pop_front() else {
            return if self.out == 0 { Next::Idle } else { Next::Wait { for_pages: false } };
        };
        self.next += 1;
        self.out += 1;
        let part = Part {
            choice: Choice { request: RequestId(self.next), index: 0 },
            sequence: self.next,
            start: 0,
            ids: vec![0; tokens],
            new_pages: Vec::new(),
            draws: false,
            whole_row: false,
        };
        Next::Send(Batch { group: 0, parts: vec![part], prefill_tokens: tokens, ..Batch::default() })
    }
    fn answered(&mut self, _: Nanos, _: &[u64], _: &[f64]) {
        self.out -= 1;
    }
}

/// Seconds from the first micro-batch sent to the last answer.
fn makespan(pipe: &Pipe, tokens: impl IntoIterator<Item = usize>) -> (f64, Trace) {
    let (trace, _) = run(pipe, &mut OneJob::new(tokens), &mut Nothing, Nanos::MAX).expect("no deadlock");
    let end = trace.head.iter().map(|span| span.answered).max().expect("there were micro-batches");
    ((end - trace.head[0].sent) as f64 / SECOND, trace)
}

fn busy_share(trace: &Trace, seconds: f64) -> f64 {
    let busy: u64 = trace.stages.iter().flat_map(|s| &s.spans).map(|span| span.finished - span.started).sum();
    busy as f64 / SECOND / (seconds * trace.stages.len() as f64)
}

/// T1: equal slots take M + P − 1 of them, efficiency M/(M + P − 1); the formula in circulation, MP/(MP + P − 1), sets
/// the idle slots of one stage against the work of all and is wrong wherever there is a bubble.
#[test]
fn t1_equal_slots() {
    for stages in 1..=8usize {
        for batches in 1..=32usize {
            let pipe = Pipe::of(vec![stage(0.5, 0.0); stages]);
            let (seconds, trace) = makespan(&pipe, std::iter::repeat_n(1, batches));
            let (m, p) = (batches as f64, stages as f64);
            assert_eq!(seconds, 0.5 * (m + p - 1.0), "P = {stages}, M = {batches}");
            assert_eq!(seconds, 0.5 * law::slots(stages, batches) as f64);
            let efficiency = busy_share(&trace, seconds);
            assert!((efficiency - m / (m + p - 1.0)).abs() < 1e-9);
            assert!((efficiency - law::job_efficiency(stages, batches)).abs() < 1e-9);
            let wrong = m * p / (m * p + p - 1.0);
            assert_eq!((efficiency - wrong).abs() > 1e-3, stages >= 2, "P = {stages}, M = {batches}");
        }
    }
}

proptest! {
    /// T2: unequal stages and hops: Σt + Σc + (M − 1)·max(t_max, s_max), c = latency + s.
    #[test]
    fn t2_unequal_stages_and_hops(
        stages in prop::collection::vec((1u32..50, 0u32..40, 0u32..60), 1..8),
        batches in 1usize..24,
    ) {
        let ms = |n: u32| f64::from(n) * 1e-3;
        let mut pipe = Pipe::of(stages.iter().map(|(t, _, _)| stage(ms(*t), 0.0)).collect());
        pipe.hops = stages
            .iter()
            .map(|(_, s, l)| HopCost { latency: ms(*l), seconds_per_token: ms(*s) })
            .collect();
        pipe.credits = batches + 1;
        let (seconds, _) = makespan(&pipe, std::iter::repeat_n(1, batches));
        let sum: f64 = stages.iter().map(|(t, s, l)| ms(t + s + l)).sum();
        let slowest = stages.iter().map(|(t, s, _)| ms(*t.max(s))).fold(0.0, f64::max);
        prop_assert!((seconds - (sum + (batches - 1) as f64 * slowest)).abs() < 1e-6);
        prop_assert!((seconds - law::makespan(&pipe.stages, &pipe.hops, 1.0, batches)).abs() < 1e-6);
    }

    /// T3: uneven micro-batches on proportional stages: Στ + (P − 1)·max τ in any order.
    #[test]
    fn t3_uneven_batches_in_any_order(
        batches in prop::collection::vec(1usize..40, 1..12).prop_shuffle(),
        stages in 1usize..8,
    ) {
        let mut pipe = Pipe::of(vec![stage(0.0, 1e-3); stages]);
        pipe.credits = batches.len() + 1;
        let (seconds, _) = makespan(&pipe, batches.clone());
        let law = batches.iter().sum::<usize>() as f64 + (stages - 1) as f64 * *batches.iter().max().unwrap() as f64;
        prop_assert!((seconds - law * 1e-3).abs() < 1e-6);
    }
}

fn limits(stages: usize, sequences: usize) -> Limits {
    Limits {
        stages,
        sequences,
        batch_tokens: 512,
        tile: 1,
        outputs: 64,
        pages: 4096,
        context: 4096,
        in_flight: 2 * sequences.max(stages) + 2,
        queue: 1 << 20,
        prefix_cache: false,
        groups: None,
    }
}

fn same(count: usize, prompt: usize, output: usize) -> Vec<Request> {
    let request = |i: usize| Request { prompt: vec![i as u32; prompt], choices: 1, output, ..Request::default() };
    (0..count).map(request).collect()
}

/// Tokens a second in the steady part of a decode run of `sequences` sequences in `groups` groups.
fn decode_rate(pipe: &Pipe, sequences: usize, groups: Option<usize>) -> f64 {
    let output = 120;
    let mut load =
        Load::new(Limits { groups, ..limits(pipe.stages.len(), sequences) }, same(sequences, 1, output), 100);
    let (trace, _) = run(pipe, &mut load, &mut Nothing, Nanos::MAX).expect("no deadlock");
    assert!(load.outcomes().iter().all(|o| o.end == Some(End::Finished) && o.answers[0].len() == output));
    let middle = &trace.head[trace.head.len() / 3..trace.head.len() * 2 / 3];
    let tokens: u32 = middle.iter().map(|span| span.decode_tokens).sum();
    f64::from(tokens) / ((middle[middle.len() - 1].sent - middle[0].sent) as f64 / SECOND) * (middle.len() - 1) as f64
        / middle.len() as f64
}

/// T4 and T5: decode is a ring. Equal stages keep min(1, M/P) busy; with hops the knee is at M* = ⌈L/max(t, s)⌉ and it is
/// flat behind it.
#[test]
fn t4_t5_the_ring() {
    for stages in 1..=8usize {
        for groups in 1..=12usize {
            let pipe = Pipe::of(vec![stage(0.01, 0.0); stages]);
            let rate = decode_rate(&pipe, groups, Some(groups));
            let law = 100.0 * (groups as f64 / stages as f64).min(1.0);
            assert!((rate / law - 1.0).abs() < 0.02, "P = {stages}, M = {groups}: {rate} for {law}");
        }
    }
    for (latency, serial) in [(0.004, 0.0), (0.010, 0.002), (0.001, 0.02)] {
        let mut pipe = Pipe::of(vec![stage(0.01, 0.0); 4]);
        pipe.hops = vec![HopCost { latency, seconds_per_token: serial }; 4];
        let around = 4.0 * (0.01 + latency + serial);
        let slowest = serial.max(0.01);
        for groups in 1..=14usize {
            let law = groups as f64 / around.max(groups as f64 * slowest);
            let rate = decode_rate(&pipe, groups, Some(groups));
            assert!((rate / law - 1.0).abs() < 0.02, "c = {latency} + {serial}, M = {groups}: {rate} for {law}");
        }
    }
}

/// T6: the chosen M is within 2 % of the best, and the gain over one device is S(B) = P(α + βB)/(Pα + βB).
#[test]
fn t6_the_chosen_groups() {
    for (alpha, beta, sequences) in [(0.02, 1e-5, 8), (0.02, 1e-3, 8), (0.005, 5e-3, 16), (0.01, 2e-3, 12)] {
        for stages in [2usize, 4] {
            let mut pipe = Pipe::of(vec![stage(alpha, beta); stages]);
            pipe.sampling = 1e-4;
            let rates: Vec<f64> = (1..=sequences).map(|m| decode_rate(&pipe, sequences, Some(m))).collect();
            let best = rates.iter().copied().fold(0.0, f64::max);
            let chosen = decode_rate(&pipe, sequences, None);
            assert!(
                chosen > best * 0.98,
                "{alpha} {beta} {sequences} P = {stages}: {chosen}, best {best} of {rates:?}"
            );
            let (p, b) = (stages as f64, sequences as f64);
            let one = b / (p * (alpha + beta * b));
            let ceiling = p * (alpha + beta * b) / (p * alpha + beta * b);
            assert!((ceiling - law::speedup(alpha, beta, stages, b)).abs() < 1e-9);
            assert!(best / one < ceiling * 1.01 + p * 1e-2, "{best} over {one}, S(B) = {ceiling}");
            if (sequences % stages) == 0 {
                assert!(best / one > ceiling * 0.95, "{best} over {one}, S(B) = {ceiling}");
            }
        }
    }
}

/// Simulated stages reach 95 % of the law at every grid point.
#[test]
fn the_grid() {
    for stages in 1..=8usize {
        for groups in 1..=32 {
            let pipe = Pipe::of(vec![stage(0.01, 0.0005); stages]);
            let rate = decode_rate(&pipe, groups, Some(groups));
            let law = groups as f64 / (0.0105 * groups.max(stages) as f64);
            assert!(rate > 0.95 * law && rate < 1.02 * law, "P = {stages}, M = {groups}: {rate} for {law}");
        }
    }
}

/// T12: chunks of a prompt follow each other without waiting for anything that is drawn.
#[test]
fn t12_chunks_do_not_wait_for_sampling() {
    let mut pipe = Pipe::of(vec![stage(0.01, 1e-4); 4]);
    pipe.sampling = 5.0;
    let mut load = Load::new(Limits { batch_tokens: 32, ..limits(4, 4) }, same(1, 640, 1), 100);
    let (trace, end) = run(&pipe, &mut load, &mut Nothing, Nanos::MAX).expect("no deadlock");
    let chunks: Vec<_> = trace.head.iter().filter(|span| span.prefill_tokens > 0).collect();
    assert_eq!(chunks.len(), 20);
    let slots = 20.0 + 4.0 - 1.0;
    let seconds = (chunks[19].answered - chunks[0].sent) as f64 / SECOND;
    assert!((seconds - slots * (0.01 + 32.0 * 1e-4)).abs() < 1e-6, "{seconds}");
    assert!((end as f64 / SECOND - (seconds + pipe.sampling)).abs() < 1e-6);
}

/// T9 in the scheduler: once the stages are measured, a prompt's chunks take equal times within 5 % or a page of tokens, the
/// last apart, and are shorter the more there is to attend to.
#[test]
fn t9_chunks_take_equal_times() {
    let stage = StageCost { alpha: 0.01, beta: 1e-4, attention: 4e-8 };
    let pipe = Pipe::of(vec![stage; 4]);
    let mut requests = same(1, 700, 20);
    requests.push(Request { at: 60_000_000_000, prompt: vec![9; 3500], output: 1, ..Request::default() });
    let mut load = Load::new(Limits { batch_tokens: 2048, ..limits(4, 4) }, requests, 100);
    let (trace, _) = run(&pipe, &mut load, &mut Nothing, Nanos::MAX).expect("no deadlock");
    let late = trace.head.iter().find(|span| span.sent >= 60_000_000_000).expect("the second prompt").step;
    let chunks: Vec<(f64, u32)> = trace.stages[0]
        .spans
        .iter()
        .filter(|span| span.step >= late)
        .map(|span| ((span.finished - span.started) as f64 / SECOND, span.tokens))
        .collect();
    assert!(chunks.len() > 4, "{chunks:?}");
    let (first, page) = (chunks[0].0, 32.0 * stage.beta + stage.attention * 2.0 * 3500.0 * 32.0);
    for (seconds, _) in &chunks[..chunks.len() - 1] {
        assert!((seconds - first).abs() <= (0.05 * first).max(page), "{chunks:?}");
    }
    assert!(chunks[..chunks.len() - 1].windows(2).all(|pair| pair[1].1 <= pair[0].1), "{chunks:?}");
    assert!(chunks[chunks.len() - 2].1 < chunks[0].1, "{chunks:?}");
}

/// T10: whatever the delays and credits, nothing stands still and no hop holds more than its credits.
#[test]
fn t10_credits_and_random_delays() {
    for seed in 0..60u64 {
        let mut random = Random::new(seed);
        let stages = random.between(1, 6);
        let mut pipe = Pipe::of((0..stages).map(|_| stage(random.unit() * 0.01, random.unit() * 1e-3)).collect());
        pipe.credits = random.between(1, 4);
        pipe.stall = 0.05;
        pipe.jitter = 0.02;
        pipe.sampling = 1e-4;
        pipe.seed = seed;
        for hop in &mut pipe.hops {
            *hop = HopCost { latency: random.unit() * 0.02, seconds_per_token: random.unit() * 1e-3 };
        }
        let load = Distribution {
            requests: 30,
            rate: 20.0,
            prompt: (1, 300),
            output: (1, 20),
            shared: 0.3,
            cancelled: (0.2, 0.5),
            several: 0.2,
        };
        let mut load = Load::new(limits(stages, 8), load.requests(seed, 50), 50);
        let (trace, _) = run(&pipe, &mut load, &mut Nothing, Nanos::MAX).expect("no deadlock");
        for hop in 0..stages - 1 {
            let mut events: Vec<(Nanos, i64)> = trace.stages[hop].spans.iter().map(|span| (span.sent, 1)).collect();
            events.extend(trace.stages[hop + 1].spans.iter().map(|span| (span.taken, -1)));
            events.sort_unstable();
            let mut held = 0;
            for (_, change) in events {
                held += change;
                assert!(held <= pipe.credits as i64, "seed {seed}, hop {hop}");
            }
        }
    }
}

/// Tokens by (stages, prompt, tokens).
type Answers = HashMap<(usize, Vec<u32>, usize), Vec<u32>>;

thread_local! {
    static ALONE: RefCell<Answers> = RefCell::default();
}

fn alone(stages: usize, prompt: &[u32], output: usize, vocab: u32) -> Vec<u32> {
    ALONE.with_borrow_mut(|known| {
        let key = (stages, prompt.to_vec(), output);
        known.entry(key).or_insert_with(|| Toy::alone(stages, prompt, output, vocab)).clone()
    })
}

/// One life of a pipeline: random stages, hops, delays, limits and requests. Every request ends, with the tokens that it
/// has alone; nobody waits for ever; and at the end every page is free and the stages know no sequence.
fn soak(seed: u64, hours: f64) {
    const VOCAB: u32 = 200;
    let mut random = Random::new(seed);
    let stages = random.between(1, 5);
    let pages = random.between(8, 60);
    let mut pipe = Pipe::of(
        (0..stages)
            .map(|_| StageCost {
                alpha: 0.02 + 0.1 * random.unit(),
                beta: 0.01 * random.unit(),
                attention: 5e-6 * random.unit(),
            })
            .collect(),
    );
    pipe.credits = random.between(1, 9);
    pipe.stall = 2.0 * random.unit();
    pipe.jitter = 0.1;
    pipe.sampling = 0.01 * random.unit();
    pipe.seed = seed;
    for hop in &mut pipe.hops {
        *hop = HopCost { latency: 0.05 * random.unit(), seconds_per_token: 1e-3 * random.unit() };
    }
    let limits = Limits {
        stages,
        sequences: random.between(1, 12),
        batch_tokens: random.between(8, 128),
        tile: 1 << random.between(0, 4),
        outputs: random.between(4, 16),
        pages,
        context: random.between(64, 400),
        in_flight: random.between(1, 12),
        queue: random.between(4, 40),
        prefix_cache: random.unit() < 0.8,
        groups: (random.unit() < 0.3).then(|| random.between(1, 6)),
    };
    let capacity = limits.capacity();
    let rate = 0.02 + 0.2 * random.unit();
    let distribution = Distribution {
        requests: (hours * 3600.0 * rate) as usize,
        rate,
        prompt: (1, capacity + 4),
        output: (1, 60),
        shared: 0.5,
        cancelled: (0.15, 60.0),
        several: 0.15,
    };
    let mut requests = distribution.requests(seed, VOCAB);
    for request in &mut requests {
        if random.unit() < 0.05 {
            request.deadline = Some(request.at + (random.exponential(60.0) * 1e9) as Nanos);
        }
    }
    let mut load = Load::new(limits, requests, VOCAB);
    load.undecided = 11;
    let mut toy = Toy::new(stages, pages);
    let result = run(&pipe, &mut load, &mut toy, Nanos::MAX);
    assert!(result.is_ok(), "seed {seed}: {result:?}");
    for (i, (request, outcome)) in load.requests().iter().zip(load.outcomes()).enumerate() {
        let end = outcome.end.as_ref().unwrap_or_else(|| panic!("seed {seed}: request {i} never ended"));
        for answer in &outcome.answers {
            let expected = alone(stages, &request.prompt, answer.len(), VOCAB);
            assert_eq!(answer, &expected, "seed {seed}, request {i} ({end:?})");
            if *end == End::Finished {
                let full = request.output.min(capacity + 1 - request.prompt.len());
                assert_eq!(answer.len(), full, "seed {seed}, request {i}");
            }
        }
    }
    let status = load.scheduler().status();
    assert_eq!((status.running, status.waiting, status.in_flight, status.held_pages), (0, 0, 0, 0), "seed {seed}");
    assert!(toy.tables().all(|known| known == 0), "seed {seed}: a stage still knows a sequence");
}

/// The share of the long soak that fits everyday tests.
#[test]
fn soak_of_a_few_seeds() {
    (0..60).for_each(|seed| soak(seed, 0.1));
    (1000..1040).for_each(|seed| soak(seed, 2.0));
}

/// Two virtual hours of each of PP_SOAK seeds (none unless asked for), from PP_SOAK_FROM.
#[test]
fn soak_as_long_as_asked() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let from = number("PP_SOAK_FROM");
    (from..from + number("PP_SOAK")).for_each(|seed| soak(seed, 2.0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Delays, stalls and credits of any seed; a failing one is made small.
    #[test]
    fn any_seed_ends_well(seed in 0u64..1 << 40, minutes in 1u32..8) {
        soak(seed, f64::from(minutes) / 60.0);
    }
}

/// A flood of short requests and one huge prompt: each still ends, and nobody waits longer than those before it take.
#[test]
fn nobody_starves() {
    let pipe = Pipe::of(vec![stage(0.01, 1e-4); 4]);
    let mut requests = vec![Request { prompt: vec![1; 3000], output: 4, ..Request::default() }];
    requests.extend((0..400).map(|i| Request {
        at: i * 5_000_000,
        prompt: vec![2; 20],
        output: 8,
        ..Request::default()
    }));
    let mut load = Load::new(Limits { batch_tokens: 128, ..limits(4, 8) }, requests, 100);
    run(&pipe, &mut load, &mut Nothing, Nanos::MAX).expect("no deadlock");
    assert!(load.outcomes().iter().all(|outcome| outcome.end == Some(End::Finished)));
    // The huge prompt gets half of every micro-batch; alone it would take 24 of them.
    let huge = load.outcomes()[0].first.unwrap() as f64 / SECOND;
    let alone = makespan(&pipe, std::iter::repeat_n(128, 24)).0;
    assert!(huge < 3.0 * alone, "{huge} s in company, {alone} s alone");
    // And the short ones that came at its start did not wait for its end.
    let short = load.outcomes()[1].first.unwrap() as f64 / SECOND;
    assert!(short < 0.5 * huge, "{short} s beside a prompt of {huge} s");
}

#[test]
fn a_prefix_that_is_known_is_not_computed_again() {
    let pipe = Pipe::of(vec![stage(0.01, 1e-3); 2]);
    let mut requests = same(1, 200, 4);
    requests.push(Request { at: 10_000_000_000, ..requests[0].clone() });
    let mut load = Load::new(Limits { prefix_cache: true, ..limits(2, 4) }, requests, 100);
    let (trace, _) = run(&pipe, &mut load, &mut Nothing, Nanos::MAX).expect("no deadlock");
    let prefilled = |from: Nanos| trace.head.iter().filter(|s| s.sent >= from).map(|s| s.prefill_tokens).sum::<u32>();
    assert_eq!((prefilled(0), prefilled(10_000_000_000)), (201, 1));
    assert_eq!(load.scheduler().status().spared_tokens, 199);
}

#[test]
fn answers_of_one_prompt_share_its_pages() {
    let pipe = Pipe::of(vec![stage(0.01, 1e-3); 2]);
    let request = Request { prompt: (0..100).collect(), choices: 4, output: 6, ..Request::default() };
    let mut load = Load::new(Limits { prefix_cache: true, ..limits(2, 8) }, vec![request], 100);
    let mut toy = Toy::new(2, 4096);
    let (trace, _) = run(&pipe, &mut load, &mut toy, Nanos::MAX).expect("no deadlock");
    let prefilled: u32 = trace.head.iter().map(|span| span.prefill_tokens).sum();
    assert_eq!(prefilled, 100 + 3 * (100 - 96));
    let answers: HashSet<_> = load.outcomes()[0].answers.iter().collect();
    assert_eq!(answers.len(), 1);
}

#[test]
fn a_scheduler_begins_empty() {
    let mut scheduler = Scheduler::new(limits(2, 2));
    assert_eq!(scheduler.next(0), Next::Idle);
}
