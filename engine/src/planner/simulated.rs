//! What a split should reach, by the scheduler in virtual time.

use pp_shaders::PAGE;

use super::predict::shares;
use super::{Load, Prediction, Problem, Stage};
use crate::law::HopCost;
use crate::schedule::Limits;
use crate::sim::load::{Load as Requests, Request};
use crate::sim::{Nothing, Pipe, run};
use crate::trace::Nanos;

/// Ids of made-up prompts.
const VOCAB: u32 = 1 << 15;
/// When the second ones come: eleven days behind the first, which have ended by then.
const LATER: Nanos = 1_000_000_000_000_000;

/// How many times longer each stage takes for a prompt, all others computing as well, than alone: what it shares with
/// them is theirs, too.
fn slowed(problem: &Problem, stages: &[Stage]) -> Vec<f64> {
    let alone: Vec<f64> = stages.iter().map(|stage| problem.curve(stage).step(PAGE)).collect();
    let mut times = vec![1.0f64; stages.len()];
    for share in shares(problem, stages) {
        let slowest = share.stages.iter().map(|(stage, _)| alone[*stage]).fold(0.0, f64::max);
        let slower = share.seconds(|stage| alone[stage]) / slowest;
        share
            .stages
            .iter()
            .filter(|_| slower.is_finite())
            .for_each(|(stage, _)| times[*stage] = times[*stage].max(slower));
    }
    times
}

/// The median of what is sorted: between the two in the middle where there are two.
fn middle(sorted: &[f64]) -> f64 {
    let (below, above) = (sorted.get(sorted.len().saturating_sub(1) / 2), sorted.get(sorted.len() / 2));
    below.zip(above).map_or(0.0, |(below, above)| below.midpoint(*above))
}

/// As [`super::predict`], by the simulator: the same scheduler over stages that take what α + βb and attention fit of
/// their curves, and as much longer as they are in each other's way. Nothing where it comes to nothing.
pub fn simulate(problem: &Problem, stages: &[Stage], load: &Load) -> Option<Prediction> {
    let slowed = slowed(problem, stages);
    let costs = stages.iter().zip(slowed).map(|(stage, slower)| problem.curve(stage).law().times(slower)).collect();
    let between = stages.windows(2).map(|pair| problem.hop(Some(pair[0].device), Some(pair[1].device)));
    let first = problem.hop(None, stages.first().map(|stage| stage.device)).latency;
    let back = problem.hop(stages.last().map(|stage| stage.device), None).latency;
    // The simulator's head is beside the first stage: the way to it is added to the way back.
    let hops = between.chain([HopCost { latency: first + back, ..HopCost::default() }]).collect();
    let pipe = Pipe { hops, sampling: problem.sampling, ..Pipe::of(costs) };
    let context = load.prompt + load.answer + 1;
    let limits = Limits {
        stages: stages.len(),
        sequences: load.concurrency,
        batch_tokens: load.chunk.max(1),
        tile: load.tile,
        outputs: load.concurrency,
        pages: load.concurrency * (context.div_ceil(PAGE) + 1),
        context,
        in_flight: 2 * stages.len() + 1,
        queue: load.concurrency,
        prefix_cache: false,
        groups: None,
    };
    // The scheduler learns from the first ones what the stages cost, as that of a pipeline has that runs for a while.
    let request =
        |at| Request { at, prompt: vec![0; load.prompt.max(1)], output: load.answer.max(2), ..Request::default() };
    let all = [0, LATER].iter().flat_map(|at| (0..load.concurrency).map(|_| request(*at))).collect();
    let mut requests = Requests::new(limits, all, VOCAB);
    run(&pipe, &mut requests, &mut Nothing, u64::MAX).ok()?;
    let outcomes = &requests.outcomes()[load.concurrency..];
    let mut first: Vec<f64> =
        outcomes.iter().filter_map(|outcome| Some(outcome.first?.checked_sub(LATER)? as f64 * 1e-9)).collect();
    first.sort_by(f64::total_cmp);
    let each = outcomes.iter().filter_map(|outcome| {
        let more = outcome.answers.first()?.len().checked_sub(1)?;
        Some((outcome.last? - outcome.first?) as f64 * 1e-9 / more as f64)
    });
    let each: Vec<f64> = each.collect();
    let seconds_per_token = each.iter().sum::<f64>() / each.len() as f64;
    (seconds_per_token > 0.0).then(|| Prediction {
        concurrency: load.concurrency,
        groups: requests.scheduler().groups_for(load.concurrency),
        tokens_per_second: load.concurrency as f64 / seconds_per_token,
        seconds_per_token,
        first_token_seconds: middle(&first),
    })
}
