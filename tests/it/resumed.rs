//! Answers that have begun go on as if nothing had been in between, wherever that was.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pp_engine::constraint::{Constraint, Grammar, Grammars};
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadOptions, Request, Token};
use pp_engine::sampler::Sampling;
use pp_engine::schedule::Choice;

use crate::support::{checkpoint, exact, head_with, tokenizer, twins};

const MODEL: &str = "tiny/llama-tied";
const CONTEXT: usize = 64;

fn head(prefix_cache: bool) -> Head {
    let options = pp_engine::layout::StageOptions { sequences: 4, kv_tokens: 4 * CONTEXT, ..exact(CONTEXT) };
    head_with(&checkpoint(MODEL), &[1, 1], options, &twins(), HeadOptions { prefix_cache, ..HeadOptions::default() })
}

/// All that is said of one request: for each answer its tokens, its pieces of text, and itself.
fn said(head: &mut Head, request: Request) -> Vec<(Vec<Token>, Vec<String>, Answer)> {
    let mut said = vec![(Vec::new(), Vec::new(), None); request.choices.max(1) as usize];
    let id = head.submit(request).unwrap();
    while said.iter().any(|(.., answer)| answer.is_none()) {
        head.turn(Duration::from_secs(5), &AtomicBool::new(false), &mut |event| match event {
            Event::Token { choice: Choice { request, index }, token } if request == id => {
                said[index as usize].0.push(token);
            }
            Event::Text { choice, text } => said[choice.index as usize].1.push(text),
            Event::Done { choice, answer } => said[choice.index as usize].2 = Some(answer),
            _ => {}
        })
        .unwrap();
    }
    assert_eq!((head.running(), head.status().held_pages), (0, 0), "nothing is left behind");
    said.into_iter().map(|(tokens, texts, answer)| (tokens, texts, answer.unwrap())).collect()
}

/// The same request from every pair of places: as many tokens of its answers have begun.
fn check(what: &str, wanted: FinishReason, request: Request) {
    let whole = said(&mut head(true), request.clone());
    assert!(whole.iter().any(|(.., answer)| answer.finish_reason == wanted), "{what}: {:?}", whole[0].2.finish_reason);
    let mut resumed = head(false);
    let longest = whole.iter().map(|(tokens, ..)| tokens.len()).max().unwrap();
    for at in 0..=longest {
        // The answers are at different places, and some have not begun.
        let begun = |(index, (tokens, ..)): (usize, &(Vec<Token>, _, _))| {
            let count = if index == 0 { at } else { (at * 2).saturating_sub(3) };
            tokens[..count.min(tokens.len())].to_vec()
        };
        let begun: Vec<Vec<Token>> = whole.iter().enumerate().map(begun).collect();
        let found = said(&mut resumed, Request { begun, ..request.clone() });
        for ((expected, texts, answer), (tokens, pieces, found)) in whole.iter().zip(&found) {
            assert_eq!((tokens, pieces), (expected, texts), "{what} from {at}");
            assert_eq!((&found.tokens, &found.text), (&answer.tokens, &answer.text), "{what} from {at}");
            assert_eq!((found.finish_reason, found.prompt_tokens), (answer.finish_reason, answer.prompt_tokens));
        }
    }
}

fn request(seed: u64) -> Request {
    Request {
        prompt: vec![3, 50, 120, 7, 9],
        max_tokens: 20,
        sampling: Sampling { temperature: 1.2, seed, candidates: 2, ..Sampling::default() },
        stop_at_eos: true,
        ..Request::default()
    }
}

#[test]
fn answers_go_on_from_anywhere_as_if_they_had_not_stopped() {
    check("sampled", FinishReason::Length, request(4));
    let sampling =
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.3, ..request(5).sampling };
    check("penalties", FinishReason::Length, Request { sampling, ..request(5) });
    check("several", FinishReason::Length, Request { choices: 3, ..request(6) });
    check("to the end of the context", FinishReason::Length, Request { max_tokens: usize::MAX, ..request(7) });
    let text = said(&mut head(true), request(8)).remove(0).2.text;
    let letters: Vec<char> = text.chars().collect();
    let stop: String = letters[letters.len() / 2..][..2].iter().collect();
    check("a stop text", FinishReason::Stop, Request { stop: vec![stop], choices: 2, ..request(8) });
    let checkpoint = checkpoint(MODEL);
    let grammars = Grammars::new(tokenizer(&checkpoint), checkpoint.config.vocab).unwrap();
    let constraint: Constraint = grammars.compile(&Grammar::Regex("[a-c]{3}( [0-9]{1,4})+".to_owned())).unwrap();
    check("a constraint", FinishReason::Stop, Request { constraint: Some(constraint), choices: 2, ..request(9) });
    let ends = grammars.compile(&Grammar::Regex("[a-c]{3,9}".to_owned())).unwrap();
    check("a constraint that ends", FinishReason::Stop, Request { constraint: Some(ends), ..request(10) });
}

/// One that is complete asks the pipe for nothing.
#[test]
fn answers_that_have_ended_are_told_without_computing() {
    let whole = said(&mut head(true), request(4)).remove(0).0;
    let mut head = head(true);
    for is_cancelled in [false, true] {
        let complete = Request { begun: vec![whole.clone()], ..request(4) };
        let answer = head.generate(complete, &AtomicBool::new(is_cancelled), &mut |_| {}).unwrap();
        assert_eq!((answer.tokens, answer.finish_reason), (whole.clone(), FinishReason::Length));
    }
    let tokens = head.pipeline().counters()[0].tokens.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(tokens, 0, "nothing went through the pipe");
    let other =
        Request { begun: vec![vec![Token { id: 1 << 30, logprob: None, candidates: Vec::new() }]], ..request(4) };
    assert!(head.submit(other).is_err(), "what is no token has not begun an answer");
}
