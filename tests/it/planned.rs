//! T14: what is predicted of splits and loads that nothing was fitted to, against what they reach. Devices are paced, and
//! measured as any other; the head, the workers and the links are real.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use pp_engine::backend::paced::Pace;
use pp_engine::calibrate::{Calibration, Calibrations, Shape, in_process_hop};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Head, HeadOptions};
use pp_engine::law::HopCost;
use pp_engine::layout::{StageOptions, StageSpec};
use pp_engine::pipeline::{Device, Pipeline};
use pp_engine::planner::{self, Load, Memory, Objective, Problem, Stage, Wish};
use pp_engine::trace::Trace;
use pp_shaders::Profile;

use crate::paced::plain;
use crate::support::{checkpoint, exact, tokenizer};

/// The most that a prediction may be off.
const ERROR: f64 = 0.15;
const LAYERS: usize = 33;
const PROMPT: usize = 32;
const CHUNK: usize = 8;

/// A device that takes `percent` of the usual times: a stage of eight layers 8 ms and 0.8 ms a token, the head 3 ms and
/// 0.3 ms a row.
fn device(percent: u32) -> Device {
    let micros = |usual: u64| Duration::from_micros(usual) * percent / 100;
    let pace = Pace {
        alpha: micros(1000),
        beta: micros(50),
        layer_alpha: micros(1000),
        layer_beta: micros(100),
        head_alpha: micros(3000),
        head_beta: micros(300),
    };
    Device::Paced { pace, profile: Profile::CARD, hold: Arc::default(), brake: Arc::default() }
}

/// What is measured of devices of these speeds, as a problem without limits of memory.
fn problem(checkpoint: &Checkpoint, percents: &[u32]) -> Problem {
    let options = exact(192);
    let (shape, kinds) = Shape::of(checkpoint, options.activations, options.kv);
    // As many as are measured at most.
    let shape = Shape { layers: 6, ..shape };
    let mut kept = Calibrations::new(None);
    let go_on = AtomicBool::new(false);
    let mut measured =
        |percent: &u32| -> Calibration { kept.measure(&device(*percent), &shape, &mut |_, _| {}, &go_on).unwrap() };
    let devices = percents.iter().enumerate().map(|(pool, percent)| {
        let found = measured(percent);
        planner::Device {
            name: format!("{percent} %"),
            place: 0,
            layers: found.layers(&kinds),
            fixed: found.fixed,
            first: found.first,
            last: found.last,
            memory: Memory { layers: vec![0; LAYERS], ..Memory::default() },
            pool,
            compute: None,
        }
    });
    let devices: Vec<_> = devices.collect();
    let near = HopCost { latency: in_process_hop().as_secs_f64(), seconds_per_token: 0.0 };
    Problem { pools: vec![None; devices.len()], devices, hops: vec![vec![near]], sampling: 1e-4 }
}

fn head(checkpoint: &Arc<Checkpoint>, percents: &[u32], stages: &[Stage], sequences: usize, groups: usize) -> Head {
    let counts: Vec<usize> = stages.iter().map(|stage| stage.layers.len()).collect();
    let devices: Vec<Device> = stages.iter().map(|stage| device(percents[stage.device])).collect();
    let options = StageOptions { sequences, kv_tokens: 192 * sequences, ..exact(192) };
    let specs = StageSpec::pipeline(&counts);
    let pipeline = Pipeline::open(checkpoint, &specs, options, &devices, &mut |_, _| {}, &AtomicBool::new(false));
    let options = HeadOptions { groups: Some(groups), batch_tokens: CHUNK, ..HeadOptions::default() };
    Head::new(pipeline.unwrap(), tokenizer(checkpoint), options)
}

/// Tokens a second while all requests decode, read from the trace.
fn decode_rate(trace: &Trace, groups: usize) -> f64 {
    let last_prompt = trace.head.iter().rposition(|span| span.prefill_tokens > 0).unwrap();
    let decode = &trace.head[last_prompt + 1..];
    // From when the pipe is full until one ends.
    let steady = &decode[groups..decode.len() - 2 * groups];
    let seconds = (steady[steady.len() - 1].sent - steady[0].sent) as f64 * 1e-9;
    let tokens: u32 = steady[..steady.len() - 1].iter().map(|span| span.decode_tokens).sum();
    f64::from(tokens) / seconds
}

/// Predicted over measured, nearest to 1 of three: others may take the processor away.
fn nearest(measure: impl Fn() -> f64) -> f64 {
    let mut nearest = f64::INFINITY;
    for _ in 0..3 {
        let ratio = measure();
        if (ratio - 1.0).abs() < (nearest - 1.0).abs() {
            nearest = ratio;
        }
        if (nearest - 1.0).abs() <= ERROR {
            break;
        }
    }
    nearest
}

/// Devices in percent of the usual times; a split, else the planner's own; requests at once.
type Case<'a> = (&'a [u32], Option<&'a [usize]>, &'a [usize]);

fn wish(objective: Objective, load: Load, stages: usize) -> Wish {
    Wish { objective, load, kv_tokens: 1, stages: Some(stages), use_all: false, ordered: false }
}

#[test]
fn t14_predictions_of_unequal_devices_are_within_fifteen_percent() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cases: [Case; 5] = [
        (&[100, 100, 100, 100], Some(&[9, 8, 8, 8]), &[4, 8]),
        (&[100, 200, 100, 100], None, &[1, 8]),
        (&[200, 100, 150, 100], Some(&[4, 12, 9, 8]), &[6]),
        (&[100, 150, 100, 100, 200, 100], None, &[12]),
        (&[100; 8], Some(&[5, 4, 4, 4, 4, 4, 4, 4]), &[8, 16]),
    ];
    for (percents, split, levels) in cases {
        for sequences in levels {
            let load = Load { concurrency: *sequences, prompt: PROMPT, answer: 24, chunk: CHUNK, tile: 1 };
            let ratio = nearest(|| {
                let problem = problem(&checkpoint, percents);
                let stages = match split {
                    Some(counts) => StageSpec::pipeline(counts)
                        .into_iter()
                        .map(|spec| Stage { device: spec.index, layers: spec.layers })
                        .collect(),
                    None => planner::best(&problem, &wish(Objective::Throughput, load, percents.len())).unwrap(),
                };
                let predicted = planner::predict(&problem, &stages, &load);
                let mut head = head(&checkpoint, percents, &stages, *sequences, predicted.groups);
                let requests = (0..*sequences).map(|_| plain(PROMPT, 24)).collect();
                head.generate_all(requests, &AtomicBool::new(false)).unwrap();
                predicted.tokens_per_second / decode_rate(&head.trace(), predicted.groups)
            });
            assert!((ratio - 1.0).abs() <= ERROR, "{percents:?}, {sequences} at once: {ratio:.3} of what is reached");
        }
    }
}

#[test]
fn t14_the_first_token_comes_when_it_is_predicted() {
    let checkpoint = checkpoint("tiny/llama-33");
    for percents in [&[100, 100, 100, 100][..], &[150, 100, 200, 100, 100, 100]] {
        let load = Load { concurrency: 1, prompt: PROMPT, answer: 1, chunk: CHUNK, tile: 1 };
        let ratio = nearest(|| {
            let problem = problem(&checkpoint, percents);
            let stages = planner::best(&problem, &wish(Objective::Latency, load, percents.len())).unwrap();
            let predicted = planner::first_token(&problem, &stages, &load);
            let mut head = head(&checkpoint, percents, &stages, 1, 1);
            head.generate(plain(PROMPT, 1), &AtomicBool::new(false), &mut |_| {}).unwrap();
            let trace = head.trace();
            let chunks: Vec<_> = trace.head.iter().filter(|span| span.prefill_tokens > 0).collect();
            predicted / ((chunks[chunks.len() - 1].sampled - chunks[0].formed) as f64 * 1e-9)
        });
        assert!((ratio - 1.0).abs() <= ERROR, "{percents:?}: {ratio:.3} of what it takes");
    }
}
