//! Answers do not depend on company: the same tokens and log-probabilities, alone or with others, however they are
//! grouped, cut, pre-empted, shared and staged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadOptions, Request, Turn};
use pp_engine::layout::StageOptions;
use pp_engine::pipeline::Device;
use pp_engine::random::Random;
use pp_engine::sampler::Sampling;
use pp_engine::{Act, KvType, Profile, Wire};

use crate::support::{checkpoint, exact, gpu, head_with, twins};

/// What is compared: ids, and log-probabilities to the last bit.
type Bits = Vec<(u32, Option<u32>)>;

fn bits(answer: &Answer) -> Bits {
    answer.tokens.iter().map(|token| (token.id, token.logprob.map(f32::to_bits))).collect()
}

/// Requests of mixed lengths and kinds; every third begins like the one before.
fn mixed(count: usize, longest: usize, vocab: u32, seed: u64) -> Vec<Request> {
    let mut random = Random::new(seed);
    let mut requests: Vec<Request> = Vec::new();
    for i in 0..count {
        let length = random.between(1, longest);
        let mut prompt: Vec<u32> = (0..length).map(|_| (random.bits() % u64::from(vocab)) as u32).collect();
        if i % 3 == 2 {
            let before = &requests[i - 1].prompt;
            let same = before.len().min(length).saturating_sub(1);
            prompt[..same].copy_from_slice(&before[..same]);
        }
        let sampling = match i % 4 {
            0 => Sampling::default(),
            1 => Sampling { temperature: 0.9, seed: i as u64, candidates: 3, ..Sampling::default() },
            2 => Sampling { temperature: 1.3, top_k: 20, seed: 5, repetition_penalty: 1.2, ..Sampling::default() },
            _ => Sampling { temperature: 0.7, top_p: 0.8, logit_bias: vec![(3, 2.0)], ..Sampling::default() },
        };
        requests.push(Request {
            prompt,
            choices: 1,
            max_tokens: random.between(1, 60),
            sampling,
            stop: Vec::new(),
            stop_at_eos: false,
            deadline: None,
            ..Request::default()
        });
    }
    requests
}

fn alone(head: &mut Head, requests: &[Request]) -> Vec<Bits> {
    let go_on = AtomicBool::new(false);
    requests.iter().map(|r| bits(&head.generate(r.clone(), &go_on, &mut |_| {}).unwrap())).collect()
}

fn together(head: &mut Head, requests: &[Request]) -> Vec<Bits> {
    let answers = head.generate_all(requests.to_vec(), &AtomicBool::new(false)).unwrap();
    answers.iter().map(|choices| bits(&choices[0])).collect()
}

fn at_rest(head: &Head) {
    let status = head.status();
    assert_eq!((status.running, status.waiting, status.held_pages), (0, 0, 0));
}

/// T15: alone on one stage without a prefix cache, against 16 together in every way.
fn company(checkpoint: &Arc<Checkpoint>, options: StageOptions, device: &Device, ways: &[Way], longest: usize) {
    let requests = mixed(16, longest, checkpoint.config.vocab.min(250) as u32, 7);
    let layers = checkpoint.config.layers;
    let plain = HeadOptions { prefix_cache: false, ..HeadOptions::default() };
    let one = StageOptions { sequences: 1, kv_tokens: options.context, ..options };
    let expected = alone(&mut head_with(checkpoint, &[layers], one, device, plain), &requests);
    for way in ways {
        let split: Vec<usize> =
            (0..way.stages).map(|i| layers * (i + 1) / way.stages - layers * i / way.stages).collect();
        let options = StageOptions { sequences: 16, kv_tokens: way.kv_tokens, chunk: way.chunk, ..options };
        let choices = HeadOptions { prefix_cache: way.cache, groups: way.groups, ..HeadOptions::default() };
        let mut head = head_with(checkpoint, &split, options, device, choices);
        // Twice: the second time finds what the first has left in the cache.
        for round in 0..2 {
            assert_eq!(together(&mut head, &requests), expected, "{way:?}, round {round}");
            at_rest(&head);
        }
        let status = head.status();
        assert_eq!(status.preemptions > 0, way.preempts, "{way:?}: {status:?}");
        assert_eq!(status.spared_tokens > 0, way.cache, "{way:?}: {status:?}");
    }
}

#[derive(Clone, Copy, Debug)]
struct Way {
    stages: usize,
    chunk: usize,
    kv_tokens: usize,
    cache: bool,
    groups: Option<usize>,
    preempts: bool,
}

const WAY: Way = Way { stages: 1, chunk: 128, kv_tokens: 4096, cache: false, groups: None, preempts: false };

#[test]
fn company_changes_nothing_on_the_twins() {
    let ways = [
        WAY,
        Way { stages: 2, cache: true, ..WAY },
        Way { stages: 4, chunk: 16, ..WAY },
        Way { stages: 4, chunk: 512, cache: true, groups: Some(2), ..WAY },
        Way { stages: 2, chunk: 64, kv_tokens: 160, preempts: true, ..WAY },
        Way { stages: 4, chunk: 32, kv_tokens: 160, cache: true, preempts: true, ..WAY },
    ];
    company(&checkpoint("tiny/llama-33"), exact(160), &twins(), &ways, 90);
}

#[test]
fn company_changes_nothing_on_a_device() {
    let ways = [
        WAY,
        Way { stages: 2, chunk: 16, cache: true, ..WAY },
        Way { stages: 2, chunk: 32, kv_tokens: 160, cache: true, preempts: true, ..WAY },
    ];
    let fast = StageOptions { activations: Act::Q8, kv: KvType::F16, ..exact(160) };
    for (profile, options) in [(Profile::SOFTWARE, exact(160)), (Profile::SOFTWARE, fast), (Profile::CARD, fast)] {
        company(&checkpoint("tiny-gguf/llama-q4_1.gguf"), options, &gpu(profile), &ways, 90);
    }
}

/// Contexts of several splits of attention, of which each token has its own.
#[test]
fn company_changes_nothing_in_long_contexts() {
    let ways = [Way { kv_tokens: 8192, ..WAY }];
    let fast = StageOptions { activations: Act::Q8, kv: KvType::F16, ..exact(640) };
    for profile in Profile::ALL {
        company(&checkpoint("tiny-gguf/llama-q4_1.gguf"), fast, &gpu(profile), &ways, 560);
    }
}

/// Rounding on a hop is by row: other tokens of a micro-batch change nothing, other hops do.
#[test]
fn company_changes_nothing_whatever_the_wire() {
    let checkpoint = checkpoint("tiny/llama-33");
    let requests = mixed(6, 40, 250, 7);
    let plain = HeadOptions { prefix_cache: false, ..HeadOptions::default() };
    for wire in [Wire::F16, Wire::Q8] {
        let one = StageOptions { wire, ..exact(160) };
        let many = StageOptions { sequences: 6, kv_tokens: 1024, chunk: 32, ..one };
        let expected = alone(&mut head_with(&checkpoint, &[11, 11, 11], one, &twins(), plain), &requests);
        let mut head = head_with(&checkpoint, &[11, 11, 11], many, &twins(), HeadOptions::default());
        assert_eq!(together(&mut head, &requests), expected, "{wire}");
        let whole = alone(&mut head_with(&checkpoint, &[33], one, &twins(), plain), &requests[..2]);
        assert_ne!(whole, expected[..2], "{wire}: there is something to see");
    }
}

fn sixteen(stages: &[usize]) -> Head {
    let options = StageOptions { sequences: 16, kv_tokens: 2048, chunk: 32, ..exact(256) };
    head_with(&checkpoint("tiny/llama-33"), stages, options, &twins(), HeadOptions::default())
}

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt as u32).map(|i| (i * 37 + 11) % 250).collect(),
        choices: 1,
        max_tokens,
        sampling: Sampling { temperature: 1.0, seed: 3, ..Sampling::default() },
        stop: Vec::new(),
        stop_at_eos: false,
        deadline: None,
        ..Request::default()
    }
}

#[test]
fn answers_of_one_prompt_differ_and_are_those_of_their_index() {
    let mut head = sixteen(&[17, 16]);
    let several = Request { choices: 4, ..request(70, 8) };
    let answers = head.generate_all(vec![several], &AtomicBool::new(false)).unwrap().remove(0);
    let all: Vec<Bits> = answers.iter().map(bits).collect();
    assert!((1..4).all(|i| all[i] != all[0]), "{all:?}");
    assert_eq!(alone(&mut head, &[request(70, 8)])[0], all[0]);
    // Two full pages are shared; the rest of the prompt is computed for each.
    assert!(head.status().spared_tokens >= 3 * 64);
    at_rest(&head);
}

/// T16 in a running pipeline: a cancelled request's pages are free at once, its sequences are forgotten by the stages with
/// the next micro-batch, and the others do not notice.
#[test]
fn t16_cancel_in_company() {
    let mut head = sixteen(&[9, 8, 8, 8]);
    let go_on = AtomicBool::new(false);
    let expected = alone(&mut head, &[request(40, 12)]).remove(0);
    let stays = head.submit(request(40, 12)).unwrap();
    let goes = head.submit(request(200, 50)).unwrap();
    let mut found = None;
    let mut cancelled = None;
    let mut turns = 0;
    while found.is_none() || cancelled.is_none() {
        let mut events = Vec::new();
        head.turn(Duration::from_secs(5), &go_on, &mut |event| events.push(event)).unwrap();
        turns += 1;
        if turns == 3 {
            let held = head.status().held_pages;
            head.cancel(goes, &mut |event| events.push(event));
            assert!(head.status().held_pages < held);
        }
        for event in events {
            match event {
                Event::Done { choice, answer } if choice.request == stays => found = Some(bits(&answer)),
                Event::Done { choice, answer } if choice.request == goes => cancelled = Some(answer.finish_reason),
                _ => {}
            }
        }
    }
    assert_eq!((found, cancelled), (Some(expected), Some(FinishReason::Cancelled)));
    while head.turn(Duration::from_secs(5), &go_on, &mut |_| {}).unwrap() != Turn::Idle {}
    at_rest(&head);
    for counters in head.pipeline().counters() {
        assert_eq!(counters.sequences.load(Ordering::Relaxed), 0, "a stage still knows a sequence");
    }
}

#[test]
fn a_deadline_ends_a_request_and_stop_strings_end_others() {
    let mut head = sixteen(&[17, 16]);
    let late = Request { deadline: Some(Duration::from_millis(1)), ..request(200, 200) };
    let greedy = Request { sampling: Sampling::default(), ..request(30, 20) };
    let answers = head.generate_all(vec![late, greedy.clone()], &AtomicBool::new(false)).unwrap();
    assert_eq!(answers[0][0].finish_reason, FinishReason::Deadline);
    assert_eq!(answers[1][0].finish_reason, FinishReason::Length);
    let text = &answers[1][0].text;
    if let Some(stop) = text.chars().find(|c| c.is_alphanumeric()) {
        let stopped = Request { stop: vec![stop.to_string()], ..greedy };
        let answer = head.generate(stopped, &AtomicBool::new(false), &mut |_| {}).unwrap();
        assert_eq!((answer.finish_reason, answer.text.contains(stop)), (FinishReason::Stop, false));
    }
    at_rest(&head);
}

/// A conversation's next turn computes what is new.
#[test]
fn the_next_turn_finds_the_one_before() {
    let mut head = sixteen(&[17, 16]);
    let go_on = AtomicBool::new(false);
    let first = head.generate(request(50, 10), &go_on, &mut |_| {}).unwrap();
    let mut second = request(50, 10);
    second.prompt.extend(first.tokens.iter().map(|token| token.id));
    second.prompt.extend([7, 8, 9]);
    let answer = head.generate(second.clone(), &go_on, &mut |_| {}).unwrap();
    // The last token of the first turn was drawn and never computed.
    assert_eq!((answer.prompt_tokens, answer.cached_tokens), (63, 59));
    let mut fresh = sixteen(&[33]);
    assert_eq!(bits(&answer), alone(&mut fresh, &[second])[0]);
}

/// Pages, sequences and memory are what they were before, after 10,000 short requests. In a process of its own, whose
/// memory no other test uses.
#[test]
fn ten_thousand_requests_leave_nothing_behind() {
    const ALONE: &str = "PP_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let program = std::env::current_exe().unwrap();
        let name = "batching::ten_thousand_requests_leave_nothing_behind";
        let child = std::process::Command::new(program).args(["--exact", name]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
        status.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or(0) * 4096
    };
    let options = StageOptions { sequences: 16, kv_tokens: 512, chunk: 64, ..exact(64) };
    let mut head = head_with(&checkpoint("tiny/llama-tied"), &[1, 1], options, &twins(), HeadOptions::default());
    let mut random = Random::new(1);
    let mut run = |head: &mut Head, count: usize| {
        for _ in 0..count / 100 {
            let short = |_| Request { prompt: vec![random.between(0, 99) as u32; 2], ..request(0, 2) };
            let answers = head.generate_all((0..100).map(short).collect(), &AtomicBool::new(false)).unwrap();
            assert!(answers.iter().all(|choices| choices[0].tokens.len() == 2));
        }
        at_rest(head);
    };
    run(&mut head, 2_000);
    let before = resident();
    run(&mut head, 8_000);
    for counters in head.pipeline().counters() {
        assert!(counters.sequences.load(Ordering::Relaxed) <= 16);
    }
    let grown = resident().saturating_sub(before);
    // The trace's rings are still filling: some 15 MB when full.
    assert!(grown < 16 << 20, "{grown} bytes more after 8,000 requests");
}
