//! Requests that are given up half-way leave nothing behind: neither work in the pipe nor pages.

use std::sync::atomic::{AtomicBool, Ordering};

use pp_engine::head::{FinishReason, Head, Progress, Request};
use pp_engine::sampler::Sampling;
use pp_engine::tokenizer::Tokenizer;

use crate::support::{checkpoint, exact, head, twins};

const CHUNK: usize = 4;
const PROMPT: usize = 160;

fn request(prompt: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt as u32).map(|i| (i * 37 + 11) % 250).collect(),
        max_tokens,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_at_eos: false,
        chunk: CHUNK,
    }
}

fn four_stages() -> (Head, Tokenizer) {
    let checkpoint = checkpoint("tiny/llama-33");
    let tokenizer = checkpoint.tokenizer().unwrap();
    (head(&checkpoint, &[9, 8, 8, 8], exact(192), &twins()), tokenizer)
}

fn tokens(head: &mut Head, tokenizer: &Tokenizer) -> Vec<u32> {
    let answer = head.generate(&request(40, 6), tokenizer, &AtomicBool::new(false), &mut |_| {}).unwrap();
    assert_eq!(answer.finish_reason, FinishReason::Length);
    answer.tokens.iter().map(|token| token.id).collect()
}

fn done_by_first_stage(head: &Head) -> usize {
    head.pipeline().counters()[0].tokens.load(Ordering::Relaxed) as usize
}

#[test]
fn a_prompt_that_is_cancelled_leaves_no_trace() {
    let (mut head, tokenizer) = four_stages();
    let expected = tokens(&mut head, &tokenizer);
    // More often than the pipe has room, so that answers left in it would stop it.
    for round in 0..12 {
        let before = done_by_first_stage(&head);
        let cancel = AtomicBool::new(false);
        let answer = head.generate(&request(PROMPT, 6), &tokenizer, &cancel, &mut |progress| {
            if matches!(progress, Progress::Prefill { done, .. } if done >= CHUNK * (1 + round % 3)) {
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
        assert_eq!(tokens(&mut head, &tokenizer), expected, "round {round}");
    }
    assert_eq!(tokens(&mut head, &tokenizer), expected);
}

#[test]
fn an_answer_that_is_cancelled_leaves_no_trace() {
    let (mut head, tokenizer) = four_stages();
    let expected = tokens(&mut head, &tokenizer);
    for after in 1..4 {
        let cancel = AtomicBool::new(false);
        let mut pieces = 0;
        let answer = head.generate(&request(40, 100), &tokenizer, &cancel, &mut |progress| {
            pieces += usize::from(matches!(progress, Progress::Text(_)));
            if pieces == after {
                cancel.store(true, Ordering::Relaxed);
            }
        });
        let answer = answer.unwrap();
        assert_eq!(answer.finish_reason, FinishReason::Cancelled);
        let ids: Vec<u32> = answer.tokens.iter().map(|token| token.id).collect();
        let same = ids.len().min(expected.len());
        assert_eq!(ids[..same], expected[..same], "what was answered until then is right");
        assert_eq!(tokens(&mut head, &tokenizer), expected);
    }
}

#[test]
fn requests_that_never_began_leave_no_trace() {
    let (mut head, tokenizer) = four_stages();
    let expected = tokens(&mut head, &tokenizer);
    for _ in 0..3 {
        let answer = head.generate(&request(40, 6), &tokenizer, &AtomicBool::new(true), &mut |_| {}).unwrap();
        assert_eq!(answer.finish_reason, FinishReason::Cancelled);
        let nothing = head.generate(&request(40, 0), &tokenizer, &AtomicBool::new(false), &mut |_| {}).unwrap();
        assert_eq!((nothing.finish_reason, nothing.tokens.len()), (FinishReason::Length, 0));
    }
    assert_eq!(tokens(&mut head, &tokenizer), expected);
    assert!(head.score(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 2, 1, &AtomicBool::new(true), &mut |_| {}).is_err());
    assert_eq!(tokens(&mut head, &tokenizer), expected);
}
