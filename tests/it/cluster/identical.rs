//! A pipeline over workers gives the bits of one in a process, and its trace is one picture.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pp_engine::head::{Head, HeadOptions, Request};
use pp_engine::layout::StageOptions;
use pp_engine::pipeline::Pipeline;
use pp_engine::sampler::Sampling;
use pp_engine::{Act, KvType};

use super::local::{Cluster, Place};
use crate::support::{checkpoint, exact, head, tokenizer, twins};

fn request(prompt: &[u32], seed: u64) -> Request {
    Request {
        prompt: prompt.to_vec(),
        choices: 1,
        max_tokens: 24,
        sampling: Sampling { temperature: 0.9, seed, candidates: 5, ..Sampling::default() },
        stop: Vec::new(),
        stop_at_eos: false,
        deadline: None,
        ..Request::default()
    }
}

/// Ids and log-probabilities, to the last bit, of several requests at once.
fn answers(head: &mut Head) -> Vec<Vec<(u32, Option<u32>)>> {
    let requests =
        (0..5u32).map(|i| request(&(0..40 + 7 * i).map(|id| (id * (i + 3)) % 250).collect::<Vec<_>>(), i.into()));
    let answers = head.generate_all(requests.collect(), &AtomicBool::new(false)).unwrap();
    let bits = |choices: &Vec<pp_engine::head::Answer>| {
        choices[0].tokens.iter().map(|token| (token.id, token.logprob.map(f32::to_bits))).collect()
    };
    answers.iter().map(bits).collect()
}

fn over(pipeline: Pipeline, tokenizer: std::sync::Arc<pp_engine::tokenizer::Tokenizer>) -> Head {
    Head::new(pipeline, tokenizer, HeadOptions::default())
}

#[test]
fn t15_workers_give_the_bits_of_one_process() {
    let checkpoint = checkpoint("tiny/llama-33");
    let options =
        StageOptions { sequences: 8, kv_tokens: 8 * 192, activations: Act::F32, kv: KvType::F32, ..exact(192) };
    let expected = answers(&mut head(&checkpoint, &[33], options, &twins()));
    let here = || Place::Here(twins());
    let ways: [(&[usize], Vec<Place>); 6] = [
        (&[33], vec![Place::There(0)]),
        (&[16, 17], vec![here(), Place::There(0)]),
        (&[16, 17], vec![Place::There(0), Place::There(1)]),
        (&[9, 8, 8, 8], vec![Place::There(0), Place::There(1), Place::There(2), Place::There(3)]),
        // A stage of the head between workers, and a worker with two stages that are neighbours.
        (&[9, 8, 8, 8], vec![Place::There(0), here(), Place::There(1), Place::There(1)]),
        // A worker that comes twice.
        (&[9, 8, 16], vec![Place::There(0), Place::There(1), Place::There(0)]),
    ];
    let cluster = Cluster::new(&checkpoint, vec![vec![twins()]; 4]);
    for (split, places) in ways {
        let pipeline = cluster.pipeline(&checkpoint, split, options, &places).unwrap();
        let mut head = over(pipeline, tokenizer(&checkpoint));
        assert_eq!(answers(&mut head), expected, "{split:?}");
        let trace = head.trace();
        for (stage, spans) in trace.stages.iter().enumerate() {
            assert_eq!(spans.spans.len(), trace.head.len(), "stage {stage} of {split:?}");
        }
    }
}

#[test]
fn a_worker_serves_one_head_after_the_other() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cluster = Cluster::new(&checkpoint, vec![vec![twins()]]);
    for _ in 0..3 {
        let places = [Place::Here(twins()), Place::There(0)];
        let pipeline = cluster.pipeline(&checkpoint, &[16, 17], exact(192), &places).unwrap();
        let mut head = over(pipeline, tokenizer(&checkpoint));
        head.generate(request(&[1, 2, 3], 1), &AtomicBool::new(false), &mut |_| {}).unwrap();
        drop(head);
        // The lease ends when the worker has heard of it.
        let freed = (0..500).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            cluster.workers[0].server.holder().is_none()
        });
        assert!(freed, "the worker is still held");
    }
}
