//! Requests that are given up half-way leave nothing behind: neither work in the pipe nor pages.

use std::sync::atomic::{AtomicBool, Ordering};

use pp_engine::head::{Event, FinishReason, Head, HeadOptions, Request};
use pp_engine::layout::StageSpec;
use pp_engine::pipeline::{Pipeline, PipelineOptions};
use pp_engine::sampler::Sampling;

use crate::support::{checkpoint, exact, head_with, tokenizer, twins};

const CHUNK: usize = 4;
const PROMPT: usize = 160;

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt as u32).map(|i| (i * 37 + 11) % 250).collect(),
        max_tokens,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_at_eos: false,
        choices: 1,
        deadline: None,
        ..Request::default()
    }
}

fn four_stages() -> Head {
    let options = HeadOptions { batch_tokens: CHUNK, ..HeadOptions::default() };
    head_with(&checkpoint("tiny/llama-33"), &[9, 8, 8, 8], exact(192), &twins(), options)
}

fn tokens(head: &mut Head) -> Vec<u32> {
    let answer = head.generate(request(40, 6), &AtomicBool::new(false), &mut |_| {}).unwrap();
    assert_eq!(answer.finish_reason, FinishReason::Length);
    answer.tokens.iter().map(|token| token.id).collect()
}

fn done_by_first_stage(head: &Head) -> usize {
    head.pipeline().counters()[0].tokens.load(Ordering::Relaxed) as usize
}

#[test]
fn a_prompt_that_is_cancelled_leaves_no_trace() {
    let mut head = four_stages();
    let expected = tokens(&mut head);
    // More often than the pipe has room, so that answers left in it would stop it.
    for round in 0..12 {
        let before = done_by_first_stage(&head);
        let cancel = AtomicBool::new(false);
        let answer = head.generate(request(PROMPT, 6), &cancel, &mut |event| {
            if matches!(event, Event::Prefill { done, .. } if done >= CHUNK * (1 + round % 3)) {
                cancel.store(true, Ordering::Relaxed);
            }
        });
        let answer = answer.unwrap();
        assert_eq!((answer.finish_reason, answer.tokens.len()), (FinishReason::Cancelled, 0));
        assert!(answer.timings.total_seconds > 0.0);
        assert_eq!(head.pipeline().in_flight(), 0, "nothing is waited for");
        assert!(done_by_first_stage(&head) - before < PROMPT, "the prompt was not done to its end");
        if round % 4 != 0 {
            continue;
        }
        assert_eq!(tokens(&mut head), expected, "round {round}");
    }
    assert_eq!(tokens(&mut head), expected);
}

#[test]
fn an_answer_that_is_cancelled_leaves_no_trace() {
    let mut head = four_stages();
    let expected = tokens(&mut head);
    for after in 1..4 {
        let cancel = AtomicBool::new(false);
        let mut pieces = 0;
        let answer = head.generate(request(40, 100), &cancel, &mut |event| {
            pieces += usize::from(matches!(event, Event::Text { .. }));
            if pieces == after {
                cancel.store(true, Ordering::Relaxed);
            }
        });
        let answer = answer.unwrap();
        assert_eq!(answer.finish_reason, FinishReason::Cancelled);
        let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
        let same = ids.len().min(expected.len());
        assert_eq!(ids[..same], expected[..same], "what was answered until then is right");
        assert_eq!(tokens(&mut head), expected);
    }
}

#[test]
fn requests_that_never_began_leave_no_trace() {
    let mut head = four_stages();
    let expected = tokens(&mut head);
    for _ in 0..3 {
        let answer = head.generate(request(40, 6), &AtomicBool::new(true), &mut |_| {}).unwrap();
        assert_eq!(answer.finish_reason, FinishReason::Cancelled);
        let nothing = head.generate(request(40, 0), &AtomicBool::new(false), &mut |_| {});
        assert!(nothing.unwrap_err().to_string().contains("max_tokens is 0"));
    }
    assert_eq!(tokens(&mut head), expected);
    assert!(head.score(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 2, 1, &AtomicBool::new(true), &mut |_| {}).is_err());
    assert_eq!(tokens(&mut head), expected);
}

#[test]
fn links_that_hold_one_frame_carry_as_much_as_others() {
    let checkpoint = checkpoint("tiny/llama-33");
    let specs = StageSpec::pipeline(&[9, 8, 8, 8]);
    let between = PipelineOptions { link_frames: Some(1), ..PipelineOptions::default() };
    let (devices, go_on) = (vec![twins(); 4], AtomicBool::new(false));
    let pipeline =
        Pipeline::open_with(&checkpoint, &specs, exact(192), &between, &devices, &mut |_, _| {}, &go_on).unwrap();
    let mut usual = four_stages();
    let options = HeadOptions { batch_tokens: CHUNK, ..HeadOptions::default() };
    let mut narrow = Head::new(pipeline, tokenizer(&checkpoint), options);
    assert_eq!(tokens(&mut narrow), tokens(&mut usual));
}
