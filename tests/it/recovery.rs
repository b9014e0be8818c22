//! A stage is lost and the answers go on: the same tokens and log-probabilities as if nothing had happened, and only what
//! was lost is computed again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pp_engine::checkpoint::Checkpoint;
use pp_engine::constraint::{Grammar, Grammars};
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadOptions, Request, Turn};
use pp_engine::layout::{StageOptions, StageSpec};
use pp_engine::pipeline::shelf::Shelf;
use pp_engine::pipeline::{Device, Past, Pipeline, PipelineOptions};
use pp_engine::random::Random;
use pp_engine::sampler::Sampling;
use pp_engine::schedule::Choice;
use pp_engine::trace::causes::{Cause, causes};

use crate::support::{checkpoint, exact, gpu, tokenizer, twins};

const PATIENCE: Duration = Duration::from_secs(20);

/// A head whose stages may be lost.
struct Rig {
    checkpoint: Arc<Checkpoint>,
    split: Vec<usize>,
    options: StageOptions,
    device: Device,
    shelf: Arc<Shelf>,
    boundary_log: u64,
    has_turned: bool,
    head: Head,
    answers: BTreeMap<Choice, Answer>,
    /// Tokens that were streamed.
    streamed: BTreeMap<Choice, Vec<u32>>,
}

type Bits = Vec<(u32, Option<u32>)>;

fn bits(answer: &Answer) -> Bits {
    answer.tokens.iter().map(|token| (token.id, token.logprob.map(f32::to_bits))).collect()
}

impl Rig {
    /// Whose stages keep so many bytes of what they hand on.
    fn new(path: &str, split: &[usize], options: StageOptions, device: &Device, boundary_log: u64) -> Rig {
        let checkpoint = checkpoint(path);
        let shelf: Arc<Shelf> = Arc::default();
        let pipeline = open(&checkpoint, split, options, device, &shelf, boundary_log, None);
        let head_options = HeadOptions { recovers: true, ..HeadOptions::default() };
        let head = Head::new(pipeline, tokenizer(&checkpoint), head_options);
        let (answers, streamed, device) = (BTreeMap::new(), BTreeMap::new(), device.clone());
        Rig {
            split: split.to_vec(),
            options,
            device,
            shelf,
            boundary_log,
            has_turned: false,
            head,
            answers,
            streamed,
            checkpoint,
        }
    }

    fn ask(&mut self, requests: &[Request]) {
        for request in requests {
            self.head.submit(request.clone()).unwrap();
        }
    }

    /// One turn; false where nothing is asked for.
    fn turn(&mut self) -> bool {
        self.has_turned = true;
        let (answers, streamed) = (&mut self.answers, &mut self.streamed);
        let turn = self.head.turn(PATIENCE, &AtomicBool::new(false), &mut |event| hear(answers, streamed, event));
        turn.unwrap() != Turn::Idle
    }

    fn turns(&mut self, turns: usize) {
        for _ in 0..turns {
            self.turn();
        }
    }

    /// These stages are lost, and others open in their places; with `split`, in another cut.
    fn lose(&mut self, stages: &[usize], split: Option<&[usize]>) {
        let past = self.head.suspend();
        past.settle();
        stages.iter().for_each(|stage| assert!(self.shelf.lose(*stage), "stage {stage} was kept"));
        if let Some(split) = split {
            self.split = split.to_vec();
        }
        let pipeline =
            open(&self.checkpoint, &self.split, self.options, &self.device, &self.shelf, self.boundary_log, Some(past));
        let kept: Vec<bool> = pipeline.reports().iter().map(|report| !report.kept.is_empty()).collect();
        // Before the first micro-batch there was nothing to keep.
        let is_wanted = |stage| self.has_turned && split.is_none() && !stages.contains(&stage);
        let wanted: Vec<bool> = (0..kept.len()).map(is_wanted).collect();
        assert!(split.is_some() || kept == wanted, "only what was lost is gone: {kept:?}, {wanted:?}");
        self.has_turned = false;
        let (answers, streamed) = (&mut self.answers, &mut self.streamed);
        self.head.recover(pipeline, &mut |event| hear(answers, streamed, event));
    }

    fn finish(&mut self) -> Vec<(Choice, Bits)> {
        while self.turn() {}
        let status = self.head.status();
        assert_eq!((status.running, status.waiting, status.held_pages, status.in_flight), (0, 0, 0, 0));
        for (choice, answer) in &self.answers {
            let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
            assert_eq!(self.streamed[choice], ids, "{choice:?}: every token was said once");
        }
        self.answers.iter().map(|(choice, answer)| (*choice, bits(answer))).collect()
    }

    fn computed(&self) -> Vec<u64> {
        let tokens = |counters: &Arc<pp_engine::worker::Counters>| counters.tokens.load(Ordering::Relaxed);
        self.head.pipeline().counters().iter().map(tokens).collect()
    }
}

fn hear(answers: &mut BTreeMap<Choice, Answer>, streamed: &mut BTreeMap<Choice, Vec<u32>>, event: Event) {
    match event {
        Event::Token { choice, token } => streamed.entry(choice).or_default().push(token.id),
        Event::Done { choice, answer } => drop(answers.insert(choice, answer)),
        Event::Text { .. } | Event::Prefill { .. } => {}
    }
}

fn open(
    checkpoint: &Arc<Checkpoint>,
    split: &[usize],
    options: StageOptions,
    device: &Device,
    shelf: &Arc<Shelf>,
    boundary_log: u64,
    past: Option<Past>,
) -> Pipeline {
    let specs = StageSpec::pipeline(split);
    let devices = vec![device.clone(); split.len()];
    let between = PipelineOptions { shelf: Some(shelf.clone()), past, boundary_log, ..PipelineOptions::default() };
    let go_on = AtomicBool::new(false);
    Pipeline::open_with(checkpoint, &specs, options, &between, &devices, &mut |_, _| {}, &go_on).unwrap()
}

/// What has nothing left to compute waits for no pipeline.
#[test]
fn what_was_complete_when_it_was_asked_ends_while_there_is_no_pipeline() {
    let mut rig = Rig::new("tiny/llama-33", &[17, 16], exact(192), &twins(), 0);
    let request = Request { prompt: vec![3, 50, 120], max_tokens: 4, ..Request::default() };
    rig.ask(std::slice::from_ref(&request));
    rig.finish();
    let whole = rig.answers.pop_first().unwrap().1;
    rig.head.suspend();
    rig.ask(&[Request { begun: vec![whole.tokens.clone()], ..request.clone() }, request]);
    let answers = &mut rig.answers;
    rig.head.meanwhile(&mut |event| hear(answers, &mut BTreeMap::new(), event));
    let told: Vec<&Answer> = rig.answers.values().collect();
    assert!(
        matches!(told[..], [answer] if bits(answer) == bits(&whole) && answer.finish_reason == whole.finish_reason)
    );
}

/// Prompts that begin alike and others, greedy and drawn, one with two answers, one of a form.
fn workload(checkpoint: &Checkpoint, longest: usize, tokens: usize) -> Vec<Request> {
    let mut random = Random::new(11);
    let common: Vec<u32> = (0..longest).map(|_| random.between(0, 249) as u32).collect();
    let mut requests: Vec<Request> = (0..5)
        .map(|i| {
            let own = random.between(2, longest / 2);
            let begin = if i < 3 { &common[..] } else { &[][..] };
            Request {
                prompt: begin.iter().copied().chain((0..own as u32).map(|j| (j * 17 + i) % 250)).collect(),
                choices: 1 + u32::from(i == 1),
                max_tokens: random.between(2, tokens),
                sampling: Sampling {
                    temperature: if i % 2 == 0 { 0.0 } else { 0.9 },
                    seed: u64::from(i),
                    candidates: 2,
                    repetition_penalty: if i == 3 { 1.3 } else { 1.0 },
                    ..Sampling::default()
                },
                ..Request::default()
            }
        })
        .collect();
    let grammars = Grammars::new(tokenizer(checkpoint), checkpoint.config.vocab).unwrap();
    requests[4].constraint = Some(grammars.compile(&Grammar::Regex("[a-z]{4,9}".to_owned())).unwrap());
    requests
}

fn options(context: usize) -> StageOptions {
    StageOptions { sequences: 3, kv_tokens: 3 * context, chunk: 32, ..exact(context) }
}

/// T11: every stage is lost after every answer of the pipe.
#[test]
fn t11_a_stage_that_is_lost_at_any_token_changes_nothing() {
    let split = [1, 1];
    let requests = workload(&checkpoint("tiny/qwen3"), 40, 8);
    let rig = || {
        let mut rig = Rig::new("tiny/qwen3", &split, options(128), &twins(), 0);
        rig.ask(&requests);
        rig
    };
    let expected = rig().finish();
    let mut moments = 0;
    for stage in 0..split.len() {
        for turns in 0.. {
            let mut rig = rig();
            if !(0..turns).all(|_| rig.turn()) {
                break;
            }
            rig.lose(&[stage], None);
            assert_eq!(rig.finish(), expected, "stage {stage} lost after {turns} turns");
            moments += 1;
        }
    }
    assert!(moments >= 40, "{moments} moments");
}

/// Losses upon losses, while what an earlier one took is restored, of several stages at once, of none but the links; and
/// another cut in the end.
#[test]
fn losses_upon_losses_change_nothing() {
    let requests = workload(&checkpoint("tiny/llama-33"), 60, 16);
    let split = [9, 8, 8, 8];
    // Nothing, some pages, and all that there is.
    for (device, seeds, boundary_log) in
        [(twins(), 2, 0), (twins(), 2, 40_000), (twins(), 2, 1 << 30), (gpu(pp_engine::Profile::SOFTWARE), 1, 1 << 30)]
    {
        let rig = || {
            let mut rig = Rig::new("tiny/llama-33", &split, options(192), &device, boundary_log);
            rig.ask(&requests);
            rig
        };
        let expected = rig().finish();
        for seed in 0..seeds {
            let (mut random, mut rig) = (Random::new(seed), rig());
            for lost in [&[2][..], &[1], &[], &[0, 3], &[0, 1, 2, 3]] {
                rig.turns(random.between(1, 7));
                rig.lose(lost, None);
            }
            rig.turns(random.between(1, 5));
            rig.lose(&[], Some(&[17, 16]));
            assert_eq!(rig.finish(), expected, "seed {seed}");
        }
    }
}

/// What stages compute again: those up to the lost one what was known, those behind it nothing.
#[test]
fn only_what_was_lost_is_computed_again_and_the_trace_tells_the_outage() {
    let mut rig = Rig::new("tiny/llama-33", &[9, 8, 8, 8], options(192), &twins(), 0);
    let prompt: Vec<u32> = (0..90).map(|i| i * 7 % 250).collect();
    rig.ask(&[Request { prompt, max_tokens: 40, ..Request::default() }]);
    let choice = *{
        while rig.streamed.values().next().is_none_or(|ids| ids.len() < 10) {
            assert!(rig.turn());
        }
        rig.streamed.keys().next().unwrap()
    };
    rig.lose(&[1], None);
    // 90 of the prompt and nine of the ten that were drawn were computed.
    let rebuild = rig.head.rebuild();
    assert_eq!((rebuild.tokens, rebuild.until, rebuild.stage, rebuild.sequences, rebuild.done), (99, 17, 1, 1, 0));
    rig.finish();
    assert_eq!(rig.streamed[&choice].len(), 40);
    assert_eq!(rig.computed(), [99 + 30, 99 + 30, 30, 30]);
    assert!(rig.head.rebuild().is_over());
    let trace = rig.head.trace();
    for (stage, found) in causes(&trace).iter().enumerate() {
        assert!(found.total(Cause::Outage) > 0, "stage {stage}");
        assert_eq!(found.wall(), pp_engine::trace::causes::Window::of(&trace).nanos());
        assert_eq!(found.total(Cause::Unattributed), 0, "stage {stage}");
    }
    let steps: Vec<u64> = trace.head.iter().map(|span| span.step).collect();
    assert!(steps.is_sorted_by(|a, b| a < b), "numbers go on: {steps:?}");
}

/// Where the stage before the lost one has kept what it handed on, those before it compute nothing again.
#[test]
fn what_was_handed_on_is_not_computed_again() {
    let mut rig = Rig::new("tiny/llama-33", &[9, 8, 8, 8], options(192), &twins(), 1 << 20);
    let prompt: Vec<u32> = (0..90).map(|i| i * 7 % 250).collect();
    let request = Request { prompt, max_tokens: 40, ..Request::default() };
    rig.ask(std::slice::from_ref(&request));
    while rig.streamed.values().next().is_none_or(|ids| ids.len() < 10) {
        assert!(rig.turn());
    }
    rig.lose(&[2], None);
    let rebuild = rig.head.rebuild();
    assert_eq!((rebuild.tokens, rebuild.logged, rebuild.from, rebuild.stage), (99, 99, Some(1), 2));
    let found = rig.finish();
    assert_eq!(rig.computed(), [30, 30, 99 + 30, 30]);
    let mut alone = Rig::new("tiny/llama-33", &[33], options(192), &twins(), 0);
    alone.ask(&[request]);
    assert_eq!(found, alone.finish());
}

/// In another cut stages go on with the layers that they have: only others are loaded, and only up to the last of these
/// anything is computed again.
#[test]
fn layers_stay_where_they_are_in_another_cut() {
    let prompt: Vec<u32> = (0..90).map(|i| i * 7 % 250).collect();
    let request = Request { prompt, max_tokens: 40, ..Request::default() };
    for device in [twins(), gpu(pp_engine::Profile::SOFTWARE)] {
        let rig = || {
            let mut rig = Rig::new("tiny/llama-33", &[9, 8, 8, 8], options(192), &device, 0);
            rig.ask(std::slice::from_ref(&request));
            rig
        };
        let expected = rig().finish();
        let mut rig = rig();
        while rig.streamed.values().next().is_none_or(|ids| ids.len() < 10) {
            assert!(rig.turn());
        }
        rig.lose(&[], Some(&[10, 7, 8, 8]));
        let reports = rig.head.pipeline().reports();
        let kept: Vec<_> = reports.iter().map(|report| report.kept.clone()).collect();
        assert_eq!(kept, [0..9, 10..17, 17..25, 25..33]);
        let layer: usize =
            rig.checkpoint.tensors().filter(|t| t.name.starts_with("blk.9.")).map(|tensor| tensor.bytes()).sum();
        let read: Vec<u64> = reports.iter().map(|report| report.read_bytes).collect();
        assert_eq!(read, [layer as u64, 0, 0, 0]);
        let held: Vec<u64> = reports.iter().map(|report| report.allocated_bytes).collect();
        let rebuild = rig.head.rebuild();
        assert_eq!((rebuild.tokens, rebuild.until, rebuild.stage), (99, 10, 0));
        let found = rig.finish();
        assert_eq!(found, expected);
        assert_eq!(rig.computed(), [99 + 30, 30, 30, 30]);
        let alone = Rig::new("tiny/llama-33", &[10, 7, 8, 8], options(192), &device, 0);
        let fresh: Vec<u64> = alone.head.pipeline().reports().iter().map(|report| report.allocated_bytes).collect();
        assert_eq!(held, fresh, "what is not wanted any more is freed");
    }
}

/// What a stage has handed on is kept where its last layer stays its last, and serves a later loss.
#[test]
fn what_was_handed_on_outlives_another_cut() {
    let mut rig = Rig::new("tiny/llama-33", &[9, 8, 16], options(192), &twins(), 1 << 20);
    let prompt: Vec<u32> = (0..90).map(|i| i * 7 % 250).collect();
    let request = Request { prompt, max_tokens: 40, ..Request::default() };
    rig.ask(std::slice::from_ref(&request));
    let until = |rig: &mut Rig, tokens: usize| {
        while rig.streamed.values().next().is_none_or(|ids| ids.len() < tokens) {
            assert!(rig.turn());
        }
    };
    until(&mut rig, 10);
    rig.lose(&[], Some(&[10, 7, 16]));
    until(&mut rig, 14);
    rig.lose(&[2], None);
    let rebuild = rig.head.rebuild();
    assert_eq!((rebuild.tokens, rebuild.logged, rebuild.from, rebuild.stage), (103, 103, Some(1), 2));
    let found = rig.finish();
    let mut alone = Rig::new("tiny/llama-33", &[33], options(192), &twins(), 0);
    alone.ask(&[request]);
    assert_eq!(found, alone.finish());
}

/// Where hops round rows nothing computed in another cut is used, and the answers go on from their tokens.
#[test]
fn keys_of_another_cut_are_not_used_where_hops_round() {
    let options = StageOptions { wire: pp_engine::wire::Wire::Q8, ..options(192) };
    let mut rig = Rig::new("tiny/llama-33", &[9, 8, 16], options, &twins(), 0);
    let prompt: Vec<u32> = (0..90).map(|i| i * 7 % 250).collect();
    rig.ask(&[Request { prompt, max_tokens: 20, ..Request::default() }]);
    while rig.streamed.values().next().is_none_or(|ids| ids.len() < 10) {
        assert!(rig.turn());
    }
    rig.lose(&[], Some(&[9, 7, 17]));
    assert_eq!(rig.head.rebuild().until, 33);
    assert_eq!(rig.finish()[0].1.len(), 20);
}

/// Cuts upon cuts, to one stage and back, with tied embeddings and without, with a loss in between.
#[test]
fn any_cut_becomes_any_other() {
    for (path, cuts) in [
        ("tiny/llama-33", &[&[11, 22][..], &[33], &[4, 9, 20], &[1, 31, 1], &[12, 21]][..]),
        ("tiny/llama-tied", &[&[2][..], &[1, 1], &[2], &[1, 1]][..]),
        ("tiny/llama-untied", &[&[2][..], &[1, 1], &[2], &[1, 1]][..]),
    ] {
        let requests = workload(&checkpoint(path), 40, 16);
        let rig = || {
            let mut rig = Rig::new(path, cuts[0], options(128), &twins(), 10_000);
            rig.ask(&requests);
            rig
        };
        let expected = rig().finish();
        let mut rig = rig();
        for (at, cut) in cuts.iter().enumerate().skip(1) {
            rig.turns(3);
            let lost: &[usize] = if at == 3 { &[0] } else { &[] };
            rig.lose(lost, Some(cut));
        }
        assert_eq!(rig.finish(), expected, "{path}");
    }
}

#[test]
fn what_is_asked_during_an_outage_waits_and_deadlines_hold() {
    let mut rig = Rig::new("tiny/qwen3", &[1, 1], options(128), &twins(), 0);
    let request = |max_tokens| Request { prompt: vec![1, 2, 3], max_tokens, ..Request::default() };
    rig.ask(&[request(20)]);
    (0..4).for_each(|_| assert!(rig.turn()));
    let past = rig.head.suspend();
    past.settle();
    assert!(rig.shelf.lose(0));
    let id = rig.head.submit(request(3)).unwrap();
    let late = rig.head.submit(Request { deadline: Some(Duration::from_millis(1)), ..request(3) }).unwrap();
    std::thread::sleep(Duration::from_millis(5));
    let mut ended = Vec::new();
    rig.head.meanwhile(&mut |event| {
        if let Event::Done { choice, answer } = event {
            ended.push((choice.request, answer.finish_reason));
        }
    });
    assert_eq!(ended, [(late, FinishReason::Deadline)]);
    let pipeline =
        open(&rig.checkpoint, &rig.split, rig.options, &rig.device, &rig.shelf, rig.boundary_log, Some(past));
    rig.head.recover(pipeline, &mut |_| {});
    rig.finish();
    assert_eq!(rig.answers[&Choice { request: id, index: 0 }].tokens.len(), 3);
}

#[test]
fn without_another_pipeline_everything_ends_with_what_there_is() {
    let mut rig = Rig::new("tiny/qwen3", &[1, 1], options(128), &twins(), 0);
    rig.ask(&[Request { prompt: vec![1, 2, 3], max_tokens: 20, ..Request::default() }]);
    (0..5).for_each(|_| assert!(rig.turn()));
    rig.head.suspend();
    let (answers, streamed) = (&mut rig.answers, &mut rig.streamed);
    rig.head.fail(&mut |event| hear(answers, streamed, event));
    let answer = rig.answers.values().next().unwrap();
    assert_eq!(answer.finish_reason, FinishReason::Failed);
    assert!(!answer.tokens.is_empty());
    assert_eq!((rig.head.running(), rig.head.status().held_pages), (0, 0));
}
