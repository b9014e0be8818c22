//! What a split should reach.

use super::search::groups;
use super::simulated::simulate;
use super::{Load, PlanError, Problem, Stage, Wish};
use crate::law::{self, Curve, HopCost, Ring, Share, StageCost, Use};
use crate::schedule::cost::{Costs, attended};

/// What a pipeline should do with so many requests at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Requests at once.
    pub concurrency: usize,
    /// Decode groups.
    pub groups: usize,
    /// Of all requests.
    pub tokens_per_second: f64,
    /// Of each request.
    pub seconds_per_token: f64,
    /// When all requests come at once, until the one in the middle has its first token.
    pub first_token_seconds: f64,
}

/// What becomes of a stage in decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageShare {
    /// Seconds of one step.
    pub step_seconds: f64,
    /// Share of a round that it computes.
    pub busy: f64,
}

/// Seconds of a round of `load.concurrency` sequences in so many groups. The only place where the law of the ring is
/// asked.
fn round(problem: &Problem, stages: &[Stage], load: &Load, groups: usize) -> f64 {
    let (small, large) = (load.concurrency / groups, load.concurrency.div_ceil(groups));
    let context = load.context();
    // Groups have one of two sizes: a line through both is the curve.
    let line = |curve: &Curve| {
        let beta = curve.decode(large, context) - curve.decode(small, context);
        let beta = if large > small { beta } else { 0.0 };
        StageCost { alpha: curve.decode(small, context) - beta * small as f64, beta, attention: 0.0 }
    };
    let costs: Vec<StageCost> = stages.iter().map(|stage| line(&problem.curve(stage))).collect();
    let hops: Vec<HopCost> =
        stages.windows(2).map(|pair| problem.hop(Some(pair[0].device), Some(pair[1].device))).collect();
    let ends = stages.first().zip(stages.last());
    let back = ends.map_or(0.0, |(first, last)| {
        problem.hop(Some(last.device), None).latency + problem.hop(None, Some(first.device)).latency
    });
    let back = HopCost { latency: back, ..HopCost::default() };
    let ring = Ring { stages: &costs, hops: &hops, back, sampling: problem.sampling, shares: &shares(problem, stages) };
    ring.round_of(load.concurrency, groups).max(groups as f64 * problem.sampling)
}

/// What the stages take from each other, as the scheduler knows it.
pub(super) fn shares(problem: &Problem, stages: &[Stage]) -> Vec<Share> {
    let of = |stage: &Stage| {
        let compute = problem.devices[stage.device].compute;
        compute.map(|compute| Use { what: compute.group as u64, weight: compute.share, capacity: 1.0 })
    };
    let uses: Vec<Vec<Use>> = stages.iter().map(|stage| of(stage).into_iter().collect()).collect();
    law::shares(uses.iter().map(Vec::as_slice))
}

/// The number of groups that gets round soonest, and the seconds of its round.
fn best_round(problem: &Problem, stages: &[Stage], load: &Load) -> (usize, f64) {
    let rounds =
        groups(load.concurrency.max(1)).into_iter().map(|groups| (groups, round(problem, stages, load, groups)));
    rounds.reduce(|best, next| if next.1 < best.1 * (1.0 - 1e-9) { next } else { best }).unwrap_or((1, 0.0))
}

/// What the stages should do under `load`, in the best number of groups.
pub fn predict(problem: &Problem, stages: &[Stage], load: &Load) -> Prediction {
    let (groups, round) = best_round(problem, stages, load);
    prediction(problem, stages, load, groups, round)
}

/// What the stages should do under `load` in as many groups as the scheduler will take: it knows α and β of each stage,
/// and no curves.
pub fn expected(problem: &Problem, stages: &[Stage], load: &Load) -> Prediction {
    let hops = stages.windows(2).map(|pair| problem.hop(Some(pair[0].device), Some(pair[1].device)).seconds(1.0));
    let costs = Costs {
        stages: stages.iter().map(|stage| problem.curve(stage).decode_law()).collect(),
        prompts: Vec::new(),
        shares: shares(problem, stages),
        attended: attended(load.context(), 1),
        overhead: hops.sum::<f64>() + problem.sampling,
    };
    let groups = costs.best_groups(load.concurrency.max(1));
    let found = prediction(problem, stages, load, groups, round(problem, stages, load, groups));
    // How prompts are packed and mixed is the scheduler's affair.
    let simulated = (load.concurrency > 1).then(|| simulate(problem, stages, load)).flatten();
    let first_token_seconds = simulated.map_or(found.first_token_seconds, |simulated| simulated.first_token_seconds);
    Prediction { first_token_seconds, ..found }
}

fn prediction(problem: &Problem, stages: &[Stage], load: &Load, groups: usize, round: f64) -> Prediction {
    Prediction {
        concurrency: load.concurrency,
        groups,
        tokens_per_second: if round > 0.0 { load.concurrency as f64 / round } else { 0.0 },
        seconds_per_token: round,
        first_token_seconds: first_token(problem, stages, load),
    }
}

/// Seconds until, of `load.concurrency` prompts that come at once, the one in the middle has its first token. Chunks of
/// all prompts follow one another through the stages, each stage computing one at a time and those that share what
/// computes waiting for each other.
pub fn first_token(problem: &Problem, stages: &[Stage], load: &Load) -> f64 {
    let chunk = load.chunk.max(1);
    let all = load.prompt.max(1) * load.concurrency.max(1);
    let until = load.prompt.max(1) * load.concurrency.max(1).div_ceil(2);
    let curves: Vec<Curve> = stages.iter().map(|stage| problem.curve(stage)).collect();
    let mut free = vec![0.0f64; stages.len()];
    let shares = shares(problem, stages);
    let mut shared_free = 0.0f64;
    let mut end = 0.0;
    let mut done = 0;
    while done < until {
        let tokens = chunk.min(all - done);
        let context = done % load.prompt.max(1);
        let mut at = stages.first().map_or(0.0, |first| problem.hop(None, Some(first.device)).latency);
        let mut busy = Vec::new();
        for (i, stage) in stages.iter().enumerate() {
            if i > 0 {
                at += problem.hop(Some(stages[i - 1].device), Some(stage.device)).seconds(tokens as f64);
            }
            let seconds = curves[i].at(tokens, context);
            busy.push(seconds);
            at = at.max(free[i]) + seconds;
            free[i] = at;
        }
        shared_free += shares.iter().map(|share| share.seconds(|stage| busy[stage])).fold(0.0, f64::max);
        let back = stages.last().map_or(0.0, |last| problem.hop(Some(last.device), None).latency);
        end = at.max(shared_free) + back + problem.sampling;
        done += tokens;
    }
    end
}

/// How busy each stage is in decode.
pub fn share(problem: &Problem, stages: &[Stage], load: &Load) -> Vec<StageShare> {
    let (groups, round) = best_round(problem, stages, load);
    let of = |stage: &Stage| {
        let curve = problem.curve(stage);
        let (small, larger) = (load.concurrency / groups, load.concurrency % groups);
        let context = load.context();
        let busy = (groups - larger) as f64 * curve.decode(small, context)
            + if larger > 0 { larger as f64 * curve.decode(small + 1, context) } else { 0.0 };
        StageShare {
            step_seconds: curve.decode(load.concurrency.div_ceil(groups), context),
            busy: if round > 0.0 { busy / round } else { 0.0 },
        }
    };
    stages.iter().map(of).collect()
}

/// Tokens whose keys and values the stages have room for: the least over the memories; nothing where none is known.
pub fn kv_tokens(problem: &Problem, stages: &[Stage]) -> Option<u64> {
    let room = |(pool, limit): (usize, &Option<u64>)| {
        let its = || stages.iter().filter(|stage| problem.devices[stage.device].pool == pool);
        let each: u64 =
            its().map(|stage| problem.devices[stage.device].memory.kv_per_token * stage.layers.len() as u64).sum();
        let taken = its().map(|stage| problem.held(stage.device, &stage.layers)).sum();
        (each > 0).then_some(crate::law::StageRoom { memory: (*limit)?, taken, kv_per_token: each })
    };
    let rooms: Vec<_> = problem.pools.iter().enumerate().filter_map(room).collect();
    (!rooms.is_empty()).then(|| crate::law::kv_tokens(&rooms))
}

/// Tokens a second of two pipelines side by side, each over some of the devices of `stages` and with half of the
/// requests; nothing where that is not possible.
///
/// # Errors
/// [`PlanError`] where the model does not fit on a half of the devices.
pub fn replicas(problem: &Problem, stages: &[Stage], wish: &Wish) -> Result<Option<f64>, PlanError> {
    if stages.len() < 2 || wish.load.concurrency < 2 {
        return Ok(None);
    }
    let slowness = |stage: &&Stage| problem.devices[stage.device].layers.iter().map(|layer| layer.step(1)).sum::<f64>();
    let mut sorted: Vec<&Stage> = stages.iter().collect();
    sorted.sort_by(|a, b| slowness(a).total_cmp(&slowness(b)));
    let halves = [0, 1].map(|half| -> Vec<usize> {
        // Fast and slow ones in turn, as players are chosen: 0 3 4 7, and 1 2 5 6.
        let is_its = |at: &usize| matches!((at % 4, half), (0 | 3, 0) | (1 | 2, 1));
        (0..sorted.len()).filter(is_its).map(|at| sorted[at].device).collect()
    });
    let load = Load { concurrency: wish.load.concurrency / 2, ..wish.load };
    let (mut rate, mut used, mut seconds) = (0.0, Vec::new(), Vec::new());
    for half in halves {
        let devices = half.iter().map(|device| problem.devices[*device].clone()).collect();
        let part = Problem { devices, ..problem.clone() };
        let wish =
            Wish { load, stages: None, use_all: false, ordered: false, kv_tokens: wish.kv_tokens.div_ceil(2), ..*wish };
        let split = super::best(&part, &wish)?;
        let (groups, round) = best_round(&part, &split, &load);
        rate += load.concurrency as f64 / round;
        for (stage, share) in split.iter().zip(share(&part, &split, &Load { ..load })) {
            used.push(Stage { device: half[stage.device], layers: stage.layers.clone() });
            seconds.push(share.busy);
        }
        debug_assert!(groups > 0);
    }
    if !problem.fits(&used, wish.kv_tokens.div_ceil(2)) {
        return Ok(None);
    }
    // Where both compute on the same, they have a part of it each.
    let shared = shares(problem, &used);
    let load_of_shared = shared.iter().map(|share| share.seconds(|stage| seconds[stage])).fold(1.0, f64::max);
    Ok(Some(rate / load_of_shared))
}
