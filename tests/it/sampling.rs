//! Bias and penalties at the tail: tokens and log-probabilities are those that the head finds in whole raw rows.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Answer, Head, Request};
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::message::{LogitEdit, Output, OutputRequest, Span, Step};
use pp_engine::pipeline::Device;
use pp_engine::sampler::{Draw, History, Sampling, logprob, top_logprobs};
use pp_engine::stage::{Stage, StageOutput, message_limits};
use pp_shaders::{PAGE, Profile};

use crate::support::{checkpoint, exact, gpu, head, swiftshader, twins};

const PROMPT: [u32; 12] = [5, 99, 17, 23, 5, 260, 31, 99, 5, 301, 44, 6];
const TOKENS: usize = 24;

fn devices() -> [Device; 3] {
    [twins(), gpu(Profile::SOFTWARE), gpu(Profile::CARD)]
}

fn options() -> StageOptions {
    StageOptions { sequences: 3, kv_tokens: 3 * 64, ..exact(64) }
}

fn stage(checkpoint: &Arc<Checkpoint>, device: &Device) -> Stage {
    let spec = StageSpec::pipeline(&[checkpoint.config.layers]).remove(0);
    let layout = StageLayout::new(checkpoint, spec, options(), device.profile(), device.limits()).unwrap();
    Stage::open(checkpoint, layout, device.open().unwrap(), &mut |_| true).unwrap()
}

fn outputs(stage: &mut Stage, step: &Step) -> Vec<Output> {
    match stage.step(step, &[]).unwrap() {
        StageOutput::Outputs(outputs) => outputs.outputs,
        StageOutput::Hidden(_) => panic!("the stage is the last one"),
    }
}

/// Tokens of sequence `sequence`, which has the pages of its number.
fn span(sequence: usize, start: usize, count: usize) -> Span {
    let pages = options().pages_per_sequence() as u32;
    let new_pages = if start == 0 { (0..pages).map(|page| sequence as u32 * pages + page).collect() } else { vec![] };
    assert!(start + count <= pages as usize * PAGE);
    Span { request: 0, sequence: sequence as u64, start: start as u32, count: count as u32, new_pages }
}

/// A token, its log-probability, and the best with theirs.
type Chosen = (u32, Option<f32>, Vec<(u32, f32)>);

/// The tokens of an answer, each with its log-probability and the best ones'; whole rows come where a request has
/// more edits than `edits_max`, and where candidates do not decide. How many rows came is returned, too.
fn answer(stage: &mut Stage, sampling: &Sampling, edits_max: Option<usize>) -> (Vec<Chosen>, usize) {
    let vocab = stage.layout().dims.vocab;
    let mut ids: Vec<u32> = PROMPT.to_vec();
    let mut chosen = Vec::new();
    let (mut done, mut rows) = (0, 0);
    while ids.len() < PROMPT.len() + TOKENS {
        let history = History { prompt: &PROMPT, answer: &ids[PROMPT.len()..] };
        let count = ids.len() - done;
        let mut ask = |first: usize, request: OutputRequest| {
            let released = if first == 0 { vec![0] } else { vec![] };
            let spans = vec![span(0, first, ids.len() - first)];
            let step =
                Step { released, spans, ids: ids[first..].to_vec(), outputs: vec![request], until: None, from: None };
            outputs(stage, &step).remove(0)
        };
        let row = count as u32 - 1;
        let request = edits_max.map_or(sampling.request_row(row), |max| sampling.request(row, history, max, None));
        let mut output = ask(done, request);
        let mut draw = sampling.draw(&output, vocab, history, 0, ids.len() as u32, None);
        if draw == Draw::NeedsRow {
            output = ask(ids.len() - 1, sampling.request_row(0));
            draw = sampling.draw(&output, vocab, history, 0, ids.len() as u32, None);
        }
        let Draw::Token(id) = draw else { panic!("a whole row decides") };
        rows += usize::from(output.row.is_some());
        done = ids.len();
        ids.push(id);
        chosen.push((id, logprob(&output, id), top_logprobs(&output, sampling.candidates as usize)));
    }
    (chosen, rows)
}

/// Ways to sample that touch every rule.
pub fn samplings() -> Vec<Sampling> {
    let all = Sampling {
        logit_bias: vec![(7, 2.5), (31, -0.3), (99, 1.5), (359, -100.0), (380, f32::NEG_INFINITY)],
        repetition_penalty: 1.5,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        seed: 11,
        candidates: 5,
        ..Sampling::default()
    };
    vec![
        all.clone(),
        Sampling { logit_bias: vec![], presence_penalty: 0.0, frequency_penalty: 0.0, ..all.clone() },
        Sampling { temperature: 0.6, ..all.clone() },
        Sampling { temperature: 0.5, top_p: 0.9, repetition_penalty: 0.8, ..all.clone() },
        Sampling { temperature: 0.8, top_k: 20, top_p: 0.8, ..all.clone() },
        Sampling { temperature: 0.7, min_p: 0.1, presence_penalty: -0.4, ..all.clone() },
        Sampling { temperature: 1.5, ..all },
    ]
}

/// A tail that edits, one that takes few edits, and whole rows agree on tokens and log-probabilities.
pub fn check(checkpoint: &Arc<Checkpoint>, device: &Device, samplings: &[Sampling]) {
    let mut stage = stage(checkpoint, device);
    let edits_max = stage.message_limits().edits;
    for sampling in samplings {
        let (expected, rows) = answer(&mut stage, sampling, None);
        assert_eq!(rows, TOKENS);
        let (found, rows) = answer(&mut stage, sampling, Some(edits_max));
        assert!(rows < TOKENS / 2 || sampling.temperature > 1.0, "{rows} rows for {sampling:?}");
        assert_eq!(found, expected, "{sampling:?} on {}", device.name());
        let (found, _) = answer(&mut stage, sampling, Some(14));
        assert_eq!(found, expected, "more edits than a step takes: {sampling:?} on {}", device.name());
    }
}

#[test]
fn edits_at_the_tail_give_the_tokens_of_whole_rows() {
    let checkpoint = checkpoint("tiny/qwen3");
    devices().iter().for_each(|device| check(&checkpoint, device, &samplings()));
}

fn generate(head: &mut Head, sampling: Sampling) -> Answer {
    let request = Request {
        prompt: PROMPT.to_vec(),
        max_tokens: TOKENS,
        sampling,
        stop: Vec::new(),
        stop_at_eos: false,
        choices: 1,
        deadline: None,
        ..Request::default()
    };
    head.generate(request, &AtomicBool::new(false), &mut |_| {}).unwrap()
}

#[test]
fn a_pipeline_samples_as_its_tail_alone() {
    let checkpoint = checkpoint("tiny/qwen3");
    for device in devices() {
        let mut stage = stage(&checkpoint, &device);
        let mut head = head(&checkpoint, &[1, checkpoint.config.layers - 1], exact(64), &device);
        for sampling in samplings() {
            let (expected, _) = answer(&mut stage, &sampling, None);
            let found = generate(&mut head, sampling.clone());
            let found: Vec<Chosen> = found.tokens.into_iter().map(|t| (t.id, t.logprob, t.candidates)).collect();
            assert_eq!(found, expected, "{sampling:?} on {}", device.name());
        }
    }
}

#[test]
fn a_bias_of_100_forces_a_token_and_one_of_minus_100_bans_it() {
    let checkpoint = checkpoint("tiny/llama-untied");
    for device in devices() {
        let mut head = head(&checkpoint, &[checkpoint.config.layers], exact(64), &device);
        for temperature in [0.0, 1.0] {
            let base = Sampling { temperature, seed: 3, candidates: 1, ..Sampling::default() };
            for bias in [100.0, 1e30, f32::MAX] {
                let forced = Sampling { logit_bias: vec![(213, bias)], ..base.clone() };
                let answer = generate(&mut head, forced);
                assert!(answer.tokens.iter().all(|token| token.id == 213), "{bias} on {}", device.name());
                assert!(answer.tokens.iter().all(|token| token.logprob.is_some_and(|p| (-20.0..0.0).contains(&p))));
            }
            let free = generate(&mut head, base.clone());
            let mut said: Vec<u32> = free.tokens.iter().map(|token| token.id).collect();
            said.sort_unstable();
            said.dedup();
            for bias in [-100.0, -1e30, f32::MIN, f32::NEG_INFINITY] {
                let logit_bias = said.iter().map(|id| (*id, bias)).collect();
                let answer = generate(&mut head, Sampling { logit_bias, ..base.clone() });
                assert!(!answer.tokens.iter().any(|token| said.contains(&token.id)), "{bias} on {}", device.name());
                let first = |answer: &Answer| answer.tokens[0].candidates[0];
                assert_eq!(first(&answer), first(&free), "the best of the raw logits is still shown");
            }
            // All but two are banned, which leaves fewer candidates than are wanted.
            let logit_bias = (0..384).filter(|id| ![8, 9].contains(id)).map(|id| (id, f32::NEG_INFINITY)).collect();
            let answer = generate(&mut head, Sampling { logit_bias, ..base });
            assert!(answer.tokens.iter().all(|token| [8, 9].contains(&token.id)));
        }
    }
}

#[test]
fn a_bias_on_a_token_that_does_not_exist_is_refused() {
    let checkpoint = checkpoint("tiny/llama-untied");
    let mut head = head(&checkpoint, &[checkpoint.config.layers], exact(64), &twins());
    let mut request = |id: u32| {
        let sampling = Sampling { logit_bias: vec![(id, 1.0)], ..Sampling::default() };
        let request = Request {
            prompt: vec![1],
            max_tokens: 1,
            sampling,
            stop: vec![],
            stop_at_eos: false,
            choices: 1,
            deadline: None,
            ..Request::default()
        };
        head.generate(request, &AtomicBool::new(false), &mut |_| {})
    };
    assert!(request(383).is_ok());
    assert_eq!(request(384).unwrap_err().to_string(), "token id 384 is not in the vocabulary of 384");
    assert!(request(383).is_ok(), "the pipeline still runs");
}

/// Three sequences of the same tokens in a step, with edits of their own: the raw results have the same bits.
#[test]
fn raw_results_do_not_depend_on_edits_nor_on_temperature() {
    let checkpoint = checkpoint("tiny/llama-untied");
    let swiftshader = swiftshader().expect("SwiftShader was not found; scripts/test.sh installs it");
    let swiftshader = Profile::ALL.map(|profile| Device::Gpu { adapter: swiftshader.clone(), profile, checked: true });
    for device in devices().into_iter().chain(swiftshader) {
        let mut stage = stage(&checkpoint, &device);
        let request = |row: usize, edits: Vec<LogitEdit>, inverse_temperature: f32, whole_row: bool| OutputRequest {
            row: row as u32,
            target: 41,
            top_k: 64,
            inverse_temperature,
            whole_row,
            edits,
        };
        let ban = |id| LogitEdit::new(id, f32::NEG_INFINITY, 1.0, 0.0);
        let many: Vec<LogitEdit> = (0..90).map(|i| LogitEdit::new(4 * i + 1, 0.5, 1.5, i as f32 / 50.0)).collect();
        let last = PROMPT.len() - 1;
        let step = |outputs: Vec<OutputRequest>| Step {
            released: vec![0, 1, 2],
            spans: (0..3).map(|sequence| span(sequence, 0, PROMPT.len())).collect(),
            ids: PROMPT.repeat(3),
            outputs,
            until: None,
            from: None,
        };
        let at = |sequence: usize| sequence * PROMPT.len() + last;
        let plain = outputs(&mut stage, &step((0..3).map(|i| request(at(i), vec![], 1.0, true)).collect()));
        assert_eq!(plain[1], plain[0]);
        let edited = outputs(
            &mut stage,
            &step(vec![
                request(at(0), vec![], 0.5, true),
                request(at(1), many.clone(), 8.0, true),
                request(at(2), vec![ban(0), ban(41), LogitEdit::new(380, 100.0, 1.0, 0.0)], 1.0, false),
            ]),
        );
        let raw = plain[0].row.as_ref().unwrap();
        for output in &edited {
            let name = device.name();
            assert_eq!(output.lse.to_bits(), plain[0].lse.to_bits(), "{name}");
            assert_eq!(output.target_logit.to_bits(), raw[41].to_bits(), "{name}");
            assert_eq!(output.best.len(), 64);
            assert!(output.row.as_ref().is_none_or(|row| row == raw), "whole rows are raw");
            for candidate in output.best.iter().chain(&output.beside) {
                assert_eq!(candidate.raw.to_bits(), raw[candidate.id as usize].to_bits());
            }
            assert_eq!(top_logprobs(output, 5), top_logprobs(&plain[0], 5));
        }
        assert_eq!(edited[0].best, plain[0].best, "without edits, in company that has some");
        let expected = |edits: &[LogitEdit]| {
            let mut row = raw.clone();
            edits.iter().for_each(|edit| row[edit.id as usize] = edit.apply(raw[edit.id as usize]));
            let mut order: Vec<(u32, u32)> = (0..).zip(row.iter().map(|logit| logit.to_bits())).collect();
            order.sort_by(|a, b| f32::from_bits(b.1).total_cmp(&f32::from_bits(a.1)).then(a.0.cmp(&b.0)));
            let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|l| (8.0 * f64::from(l - top)).exp()).sum();
            (order[..64].to_vec(), 8.0 * f64::from(top) + sum.ln())
        };
        let (best, lse) = expected(&many);
        let found: Vec<(u32, u32)> = edited[1].best.iter().map(|c| (c.id, c.logit.to_bits())).collect();
        assert_eq!(found, best);
        assert!((f64::from(edited[1].lse_processed) - lse).abs() < 1e-5 * lse.abs(), "{}", edited[1].lse_processed);
        assert_eq!(edited[2].best[0].id, 380);
        assert!(edited[2].lse_processed.is_finite());
    }
}

/// Nearly as many edits as a step may have: the buffer of edits is filled up to its end.
#[test]
fn a_step_takes_as_many_edits_as_its_limit_says() {
    let checkpoint = checkpoint("tiny/llama-untied");
    let options = StageOptions { context: 128, kv_tokens: 3 * 128, ..options() };
    let device = gpu(Profile::SOFTWARE);
    let spec = StageSpec::pipeline(&[checkpoint.config.layers]).remove(0);
    let layout = StageLayout::new(&checkpoint, spec, options, device.profile(), device.limits()).unwrap();
    let (edits_max, vocab) = (message_limits(&layout).edits, layout.dims.vocab);
    let rows = (edits_max / vocab) as u32;
    assert_eq!((edits_max, rows), (32768, 85));
    let mut stage = Stage::open(&checkpoint, layout, device.open().unwrap(), &mut |_| true).unwrap();
    let request = |row: u32| OutputRequest {
        row,
        target: 0,
        top_k: 1,
        inverse_temperature: 1.0,
        whole_row: false,
        edits: (0..vocab as u32).map(|id| LogitEdit::new(id, 20.0 * ((id + row) % 50) as f32, 1.0, 0.0)).collect(),
    };
    let new_pages = (0..options.pages_per_sequence() as u32).collect();
    let spans = vec![Span { request: 0, sequence: 0, start: 0, count: rows, new_pages }];
    let ids = (0..rows).map(|i| i * 5 % 384).collect();
    let found = outputs(&mut stage, &Step { spans, ids, outputs: (0..rows).map(request).collect(), ..Step::default() });
    assert!((0..rows).zip(&found).all(|(row, output)| (output.best[0].id + row) % 50 == 49));
}
