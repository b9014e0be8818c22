//! Answers under a constraint: valid JSON of their schema at any temperature, the same tokens alone and in company, on
//! any number of stages, and after pre-emption.

use std::sync::atomic::AtomicBool;

use pp_engine::constraint::{Grammar, Grammars};
use pp_engine::head::{Answer, FinishReason, HeadOptions, Request};
use pp_engine::layout::StageOptions;
use pp_engine::sampler::Sampling;
use serde_json::{Value, json};

use crate::support::{checkpoint, exact, head_with, tokenizer, twins};

/// Schemas whose answers are short whatever a model that knows nothing would say.
fn schemas() -> Vec<Value> {
    vec![
        // Letters of several tokens each.
        json!({"type": "object", "properties": {"colour": {"enum": ["röd", "緑色"]}, "n": {"type": "integer",
            "minimum": 1, "maximum": 99}}, "required": ["colour", "n"], "additionalProperties": false}),
        json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
        json!({"anyOf": [{"const": null}, {"type": "string", "maxLength": 6}]}),
    ]
}

/// The answers, and how many sequences lost their pages on the way.
fn answers(stages: &[usize], options: StageOptions, requests: &[Request], together: bool) -> (Vec<Answer>, u64) {
    let checkpoint = checkpoint("tiny/qwen2-tied");
    let mut head = head_with(&checkpoint, stages, options, &twins(), HeadOptions::default());
    let never = AtomicBool::new(false);
    let answers = if together {
        head.generate_all(requests.to_vec(), &never).unwrap().into_iter().flatten().collect()
    } else {
        requests.iter().map(|request| head.generate(request.clone(), &never, &mut |_| {}).unwrap()).collect()
    };
    (answers, head.status().preemptions)
}

fn tokens(answers: &[Answer]) -> Vec<Vec<(u32, Option<u32>)>> {
    let bits = |answer: &Answer| answer.tokens.iter().map(|t| (t.id, t.logprob.map(f32::to_bits))).collect();
    answers.iter().map(bits).collect()
}

#[test]
fn constrained_answers_are_valid_and_do_not_depend_on_company() {
    let checkpoint = checkpoint("tiny/qwen2-tied");
    let layers = checkpoint.config.layers;
    let grammars = Grammars::new(tokenizer(&checkpoint), checkpoint.config.vocab).unwrap();
    let schemas = schemas();
    let mut requests = Vec::new();
    for i in 0..15u32 {
        let schema = schemas.get(i as usize % 5).cloned();
        requests.push(Request {
            prompt: (1..20 + 3 * i).map(|place| (place * 7 + i) % 250).collect(),
            max_tokens: if schema.is_some() { 150 } else { 30 },
            sampling: Sampling { temperature: (i % 3) as f32 * 0.7, seed: i.into(), ..Sampling::default() },
            stop_at_eos: schema.is_some(),
            constraint: schema.map(|schema| grammars.compile(&Grammar::JsonSchema(schema)).unwrap()),
            ..Request::default()
        });
    }
    let roomy = StageOptions { sequences: 6, kv_tokens: 6 * 256, ..exact(256) };
    let (alone, _) = answers(&[layers], roomy, &requests, false);
    for (i, answer) in alone.iter().enumerate() {
        let Some(schema) = schemas.get(i % 5) else { continue };
        if answer.finish_reason == FinishReason::Length {
            // White space may be long; what there is so far is the beginning of an answer.
            continue;
        }
        assert_eq!(answer.finish_reason, FinishReason::Stop);
        let value: Value = serde_json::from_str(&answer.text).unwrap_or_else(|e| panic!("{e}: {}", answer.text));
        assert!(jsonschema::is_valid(schema, &value), "{schema}: {}", answer.text);
        assert!(answer.tokens.iter().all(|token| token.logprob.is_some()), "every token has its log-probability");
    }
    let ended = alone.iter().filter(|answer| answer.finish_reason == FinishReason::Stop).count();
    assert!(ended >= 6, "{ended} of 9 came to an end");
    let expected = tokens(&alone);
    assert_eq!(tokens(&answers(&[layers], roomy, &requests, true).0), expected);
    assert_eq!(tokens(&answers(&vec![1; layers], roomy, &requests, true).0), expected);
    // So little room that sequences lose their pages to older ones.
    let tight = StageOptions { kv_tokens: 320, ..roomy };
    let (found, preemptions) = answers(&vec![1; layers], tight, &requests, true);
    assert_eq!(tokens(&found), expected);
    assert!(preemptions > 0, "some lost their pages");
}

#[test]
fn choices_of_one_request_have_states_of_their_own() {
    let checkpoint = checkpoint("tiny/qwen2-tied");
    let grammars = Grammars::new(tokenizer(&checkpoint), checkpoint.config.vocab).unwrap();
    let constraint = grammars.compile(&Grammar::Regex("[a-f]{4}".into())).unwrap();
    let sampling = Sampling { temperature: 1.5, seed: 4, ..Sampling::default() };
    let request = Request {
        prompt: vec![1, 2, 3],
        choices: 4,
        max_tokens: 20,
        sampling,
        stop_at_eos: true,
        constraint: Some(constraint),
        ..Request::default()
    };
    let options = StageOptions { sequences: 4, kv_tokens: 4 * 64, ..exact(64) };
    let mut head = head_with(&checkpoint, &[checkpoint.config.layers], options, &twins(), HeadOptions::default());
    let answers = head.generate_all(vec![request], &AtomicBool::new(false)).unwrap().remove(0);
    let texts: Vec<&str> = answers.iter().map(|answer| answer.text.as_str()).collect();
    assert!(texts.iter().all(|t| t.len() == 4 && t.bytes().all(|b| (b'a'..=b'f').contains(&b))), "{texts:?}");
    assert!(answers.iter().all(|answer| answer.finish_reason == FinishReason::Stop));
    assert!(texts.iter().any(|text| *text != texts[0]), "{texts:?}");
}
