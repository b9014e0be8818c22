//! The scheduler in virtual time over real stages: the kernels' twins compute a small model, while delays, stalls and
//! credits come from a seed.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Head, HeadOptions, Request};
use pp_engine::law::{HopCost, StageCost};
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::message::{OutputRequest, Span, Step};
use pp_engine::random::Random;
use pp_engine::sampler::Sampling;
use pp_engine::schedule::{Batch, Limits};
use pp_engine::sim::load::{Distribution, End, Load};
use pp_engine::sim::{Model, Pipe};
use pp_engine::stage::{Stage, StageOutput};

use crate::support::{checkpoint, exact, head_with, twins};

/// Stages on the twins. What goes between them are the bits of their activations.
struct Twins {
    stages: Vec<Stage>,
}

impl Twins {
    fn open(checkpoint: &Checkpoint, split: &[usize], options: StageOptions) -> Twins {
        let device = twins();
        let open = |spec| {
            let layout = StageLayout::new(checkpoint, spec, options, device.profile(), device.limits()).unwrap();
            Stage::open(checkpoint, layout, device.open().unwrap(), &mut |_| true).unwrap()
        };
        Twins { stages: StageSpec::pipeline(split).into_iter().map(open).collect() }
    }
}

impl Model for Twins {
    fn forward(&mut self, stage: usize, batch: &Batch, from: Vec<u64>) -> Vec<u64> {
        let mut step = Step { released: batch.released.clone(), ..Step::default() };
        for part in &batch.parts {
            step.ids.extend(&part.ids);
            if part.draws {
                step.outputs.push(OutputRequest {
                    row: step.ids.len() as u32 - 1,
                    target: 0,
                    top_k: 1,
                    inverse_temperature: 1.0,
                    whole_row: false,
                    edits: Vec::new(),
                });
            }
            step.spans.push(Span {
                request: 0,
                sequence: part.sequence,
                start: part.start as u32,
                count: part.ids.len() as u32,
                new_pages: part.new_pages.clone(),
            });
        }
        let hidden: Vec<f32> = from.iter().map(|bits| f32::from_bits(*bits as u32)).collect();
        match self.stages[stage].step(&step, &hidden).unwrap() {
            StageOutput::Hidden(hidden) => hidden.iter().map(|value| u64::from(value.to_bits())).collect(),
            StageOutput::Outputs(outputs) => outputs.outputs.iter().map(|o| u64::from(o.best[0].id)).collect(),
        }
    }
}

fn alone(head: &mut Head, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let request = Request {
        prompt: prompt.to_vec(),
        choices: 1,
        max_tokens,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_at_eos: false,
        deadline: None,
        ..Request::default()
    };
    let answer = head.generate(request, &AtomicBool::new(false), &mut |_| {}).unwrap();
    answer.tokens.iter().map(|token| token.id).collect()
}

#[test]
fn real_stages_in_virtual_time_answer_as_alone() {
    let checkpoint: Arc<Checkpoint> = checkpoint("tiny/llama-33");
    let vocab = checkpoint.config.vocab as u32;
    let plain = HeadOptions { prefix_cache: false, ..HeadOptions::default() };
    let mut reference = head_with(&checkpoint, &[33], exact(96), &twins(), plain);
    for seed in 0..6u64 {
        let mut random = Random::new(seed);
        let split = [vec![33], vec![20, 13], vec![9, 8, 8, 8]][random.between(0, 2)].clone();
        let (sequences, pages) = (random.between(1, 6), random.between(3, 12));
        let options = StageOptions { sequences, kv_tokens: 32 * pages, chunk: 64, ..exact(96) };
        let limits = Limits {
            stages: split.len(),
            sequences,
            batch_tokens: random.between(8, 64),
            tile: 1 << random.between(0, 4),
            outputs: 16,
            pages,
            context: 96,
            in_flight: random.between(1, 9),
            queue: 64,
            prefix_cache: random.unit() < 0.7,
            groups: None,
        };
        let mut pipe = Pipe::of(vec![StageCost { alpha: 0.02, beta: 1e-3, attention: 1e-6 }; split.len()]);
        pipe.hops = vec![HopCost { latency: 0.01, seconds_per_token: 1e-4 }; split.len()];
        (pipe.credits, pipe.jitter, pipe.stall, pipe.seed) = (random.between(1, 4), 0.02, 0.1, seed);
        let distribution = Distribution {
            requests: 12,
            rate: 8.0,
            prompt: (1, 70),
            output: (1, 16),
            shared: 0.5,
            cancelled: (0.2, 1.0),
            several: 0.2,
        };
        let mut load = Load::new(limits, distribution.requests(seed, vocab), vocab);
        load.undecided = 9;
        let mut model = Twins::open(&checkpoint, &split, options);
        pp_engine::sim::run(&pipe, &mut load, &mut model, u64::MAX).expect("no deadlock");
        for (request, outcome) in load.requests().iter().zip(load.outcomes()) {
            assert!(matches!(outcome.end, Some(End::Finished | End::Cancelled | End::Refused(_))), "seed {seed}");
            for answer in outcome.answers.iter().filter(|answer| !answer.is_empty()) {
                assert_eq!(*answer, alone(&mut reference, &request.prompt, answer.len()), "seed {seed}");
            }
        }
        assert!(model.stages.iter().all(|stage| stage.sequences() == 0), "seed {seed}");
    }
}
