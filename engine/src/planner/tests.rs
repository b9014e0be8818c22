//! Splits against brute force, and predictions against the law.

use proptest::prelude::*;

use super::*;
use crate::law::{Ring, StageCost};

fn curve(alpha: f64, beta: f64) -> Curve {
    Curve::of(StageCost { alpha, beta, attention: 0.0 })
}

/// A device of one memory and one processor of its own, whose layers are all alike.
fn device(index: usize, layers: usize, alpha: f64, beta: f64) -> Device {
    Device {
        name: format!("d{index}"),
        place: 0,
        fixed: Curve::default(),
        layers: vec![curve(alpha, beta); layers],
        first: Curve::default(),
        last: Curve::default(),
        memory: Memory { layers: vec![10; layers], kv_per_token: 1, ..Memory::default() },
        pool: index,
        compute: None,
    }
}

fn problem(devices: Vec<Device>) -> Problem {
    let places = devices.iter().map(|device| device.place + 1).max().unwrap_or(1);
    let pools = devices.iter().map(|device| device.pool + 1).max().unwrap_or(0);
    Problem { devices, pools: vec![None; pools], hops: vec![vec![HopCost::default(); places]; places], sampling: 0.0 }
}

const LOAD: Load = Load { concurrency: 4, prompt: 40, answer: 16, chunk: 16, tile: 1 };

fn wish(objective: Objective) -> Wish {
    Wish { objective, load: LOAD, kv_tokens: 1, stages: None, use_all: false, ordered: false }
}

/// Seconds of a part for (a group's tokens, the whole round), as the definition has them.
fn stage_seconds(problem: &Problem, stage: &Stage, tokens: usize, context: usize) -> f64 {
    let device = &problem.devices[stage.device];
    let mut seconds = device.fixed.at(tokens, context);
    seconds += stage.layers.clone().map(|layer| device.layers[layer].at(tokens, context)).sum::<f64>();
    if stage.layers.start == 0 {
        seconds += device.first.at(tokens, context);
    }
    if stage.layers.end == problem.layers() {
        seconds += device.last.at(tokens, context);
    }
    seconds
}

fn between(problem: &Problem, stages: &[Stage]) -> Vec<HopCost> {
    stages
        .windows(2)
        .map(|pair| problem.hops[problem.devices[pair[0].device].place][problem.devices[pair[1].device].place])
        .collect()
}

fn ends(problem: &Problem, stages: &[Stage]) -> f64 {
    let place = |stage: &Stage| problem.devices[stage.device].place;
    problem.hops[0][place(&stages[0])].latency + problem.hops[place(&stages[stages.len() - 1])][0].latency
}

/// Busy seconds of everything that computes: devices, and what they share.
fn busiest(problem: &Problem, stages: &[Stage], busy: &[f64]) -> f64 {
    let mut most = busy.iter().copied().fold(0.0, f64::max);
    for group in 0..4 {
        let of = |stage: &Stage| problem.devices[stage.device].compute.filter(|compute| compute.group == group);
        let its: Vec<(f64, f64)> =
            stages.iter().zip(busy).filter_map(|(stage, busy)| Some((of(stage)?.share, *busy))).collect();
        most = most.max(its.iter().map(|(share, busy)| share * busy).sum());
        // One that is always busy loses, while another computes, what both want beyond all there is.
        for (i, (share, busy)) in its.iter().enumerate() {
            let others = its.iter().enumerate().filter(|(j, _)| i != *j);
            let lost: f64 = others.map(|(_, (other, busy))| (share + other - 1.0).max(0.0) * busy).sum();
            most = most.max(busy + lost);
        }
    }
    most
}

/// Seconds of the best round of a split.
fn round(problem: &Problem, stages: &[Stage], load: &Load) -> f64 {
    let d = load.concurrency;
    let context = load.prompt + load.answer / 2;
    let round = |groups: usize| {
        let sizes: Vec<usize> = (0..groups).map(|group| d / groups + usize::from(group < d % groups)).collect();
        let busy: Vec<f64> = stages
            .iter()
            .map(|stage| sizes.iter().map(|size| stage_seconds(problem, stage, *size, context)).sum())
            .collect();
        let hops = between(problem, stages);
        let way: f64 = stages.iter().map(|stage| stage_seconds(problem, stage, sizes[0], context)).sum::<f64>()
            + hops.iter().map(|hop| hop.seconds(sizes[0] as f64)).sum::<f64>()
            + ends(problem, stages)
            + problem.sampling;
        let line = hops.iter().map(|hop| hop.occupied(d as f64)).fold(0.0, f64::max);
        way.max(busiest(problem, stages, &busy)).max(line).max(groups as f64 * problem.sampling)
    };
    (1..=d).map(round).fold(f64::INFINITY, f64::min)
}

/// Seconds of one request, by the law of a job with equal chunks, and of its answer.
fn request(problem: &Problem, stages: &[Stage], load: &Load) -> f64 {
    let (count, tokens) = load.chunks();
    let chunks: Vec<f64> = stages.iter().map(|stage| stage_seconds(problem, stage, tokens, load.prompt / 2)).collect();
    let decode: f64 = stages.iter().map(|stage| stage_seconds(problem, stage, 1, load.prompt + load.answer / 2)).sum();
    let hops = between(problem, stages);
    let pace = hops.iter().map(|hop| hop.occupied(tokens as f64)).fold(busiest(problem, stages, &chunks), f64::max);
    let n = load.answer as f64;
    chunks.iter().sum::<f64>()
        + hops.iter().map(|hop| hop.seconds(tokens as f64) + n * hop.seconds(1.0)).sum::<f64>()
        + (count - 1) as f64 * pace
        + n * decode
        + (n + 1.0) * (ends(problem, stages) + problem.sampling)
}

/// All contiguous divisions of `from..layers` over the devices, in any order.
fn all_splits(problem: &Problem, from: usize, used: &mut Vec<Stage>, visit: &mut dyn FnMut(&[Stage])) {
    let layers = problem.layers();
    if from == layers {
        return visit(used);
    }
    for device in 0..problem.devices.len() {
        if used.iter().any(|stage| stage.device == device) {
            continue;
        }
        for to in from + 1..=layers {
            used.push(Stage { device, layers: from..to });
            all_splits(problem, to, used, visit);
            used.pop();
        }
    }
}

/// The least worth of the splits that the wish allows.
fn brute_force(problem: &Problem, wish: &Wish, worth: impl Fn(&[Stage]) -> f64) -> Option<f64> {
    let mut best: Option<f64> = None;
    all_splits(problem, 0, &mut Vec::new(), &mut |stages| {
        let count_fits = wish.stages.is_none_or(|wanted| wanted == stages.len())
            && (!wish.use_all || stages.len() == problem.devices.len());
        let is_in_order = !wish.ordered || stages.is_sorted_by_key(|stage| stage.device);
        if count_fits && is_in_order && problem.fits(stages, wish.kv_tokens) {
            let worth = worth(stages);
            best = Some(best.map_or(worth, |best| best.min(worth)));
        }
    });
    best
}

prop_compose! {
    fn any_curve()(alpha in 0.0..2.0f64, beta in 0.0..0.5f64, attention in 0.0..1e-4f64) -> Curve {
        Curve::of(StageCost { alpha, beta, attention })
    }
}

prop_compose! {
    fn any_device(layers: usize)(
        curves in prop::collection::vec(any_curve(), layers),
        (fixed, first, last) in (any_curve(), any_curve(), any_curve()),
        bytes in prop::collection::vec(1..20u64, layers),
        (ahead, behind, both, work, kv) in (0..30u64, 0..30u64, 0..50u64, 0..9u64, 0..4u64),
        place in 0usize..3, alike in any::<bool>(),
        group in prop::option::of((0usize..2, prop::sample::select(vec![0.3, 0.5, 0.75, 1.0]))),
    ) -> Device {
        let layer = curves[0];
        Device {
            name: String::new(),
            place,
            fixed,
            layers: if alike { vec![layer; layers] } else { curves },
            first,
            last,
            memory: Memory { layers: bytes, first: ahead, last: behind, both, work, kv_per_token: kv },
            pool: 0,
            compute: group.map(|(group, share)| Compute { group, share }),
        }
    }
}

fn any_problem() -> impl Strategy<Value = Problem> {
    let sizes =
        prop_oneof![(Just(1usize), 1usize..=12), (Just(2), 1usize..=12), (Just(3), 1usize..=9), (Just(4), 1usize..=7)];
    let hop =
        (0.0..2.0f64, 0.0..0.3f64).prop_map(|(latency, seconds_per_token)| HopCost { latency, seconds_per_token });
    sizes.prop_flat_map(move |(count, layers)| {
        let devices = prop::collection::vec(any_device(layers), count);
        let pools = prop::collection::vec(prop::option::of(20..200u64), count);
        let hops = prop::collection::vec(prop::collection::vec(hop.clone(), 3), 3);
        (devices, pools, hops, 0.0..0.5f64, any::<bool>()).prop_map(|(mut devices, pools, hops, sampling, twins)| {
            if twins && devices.len() > 1 {
                devices[1] = devices[0].clone();
            }
            devices.iter_mut().enumerate().for_each(|(pool, device)| device.pool = pool);
            Problem { devices, pools, hops, sampling }
        })
    })
}

fn any_wish(objective: Objective) -> impl Strategy<Value = Wish> {
    (
        1usize..6,
        1usize..60,
        1usize..10,
        1usize..40,
        1..8u64,
        prop::option::weighted(0.3, 1usize..4),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.2),
    )
        .prop_map(move |(concurrency, prompt, answer, chunk, kv_tokens, stages, use_all, ordered)| {
            let load = Load { concurrency, prompt, answer, chunk, tile: 1 };
            Wish { objective, load, kv_tokens, stages: stages.filter(|_| !use_all), use_all, ordered }
        })
}

/// The found split is allowed, and nothing is better.
fn check(problem: &Problem, wish: &Wish, worth: impl Fn(&[Stage]) -> f64) -> Result<(), TestCaseError> {
    let wanted = brute_force(problem, wish, &worth);
    match (best(problem, wish), wanted) {
        (Ok(stages), Some(wanted)) => {
            let mut next = 0;
            for stage in &stages {
                prop_assert!(stage.layers.start == next && stage.layers.end > next);
                next = stage.layers.end;
            }
            prop_assert_eq!(next, problem.layers());
            prop_assert!(problem.fits(&stages, wish.kv_tokens));
            let found = worth(&stages);
            prop_assert!(found <= wanted + 1e-9 * wanted.abs().max(1.0), "{} for {}", found, wanted);
        }
        (Err(_), None) => {}
        (found, wanted) => prop_assert!(false, "{:?} for {:?}", found, wanted),
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn t7_the_split_for_throughput_is_that_of_brute_force(problem in any_problem(), wish in any_wish(Objective::Throughput)) {
        check(&problem, &wish, |stages| round(&problem, stages, &wish.load))?;
    }

    #[test]
    fn t7_the_split_for_latency_is_that_of_brute_force(problem in any_problem(), wish in any_wish(Objective::Latency)) {
        check(&problem, &wish, |stages| request(&problem, stages, &wish.load))?;
    }

    #[test]
    fn t7_the_split_for_context_is_that_of_brute_force(problem in any_problem(), wish in any_wish(Objective::Context)) {
        prop_assume!(problem.pools.iter().all(Option::is_some));
        prop_assume!(problem.devices.iter().all(|device| device.memory.kv_per_token > 0));
        check(&problem, &wish, |stages| -(kv_tokens(&problem, stages).unwrap() as f64))?;
    }

    #[test]
    fn what_is_predicted_is_the_best_round(problem in any_problem(), wish in any_wish(Objective::Throughput)) {
        if let Ok(stages) = best(&problem, &wish) {
            let (found, wanted) = (predict(&problem, &stages, &wish.load), round(&problem, &stages, &wish.load));
            prop_assert!((found.seconds_per_token - wanted).abs() <= 1e-6 * wanted);
            let rate = wish.load.concurrency as f64 / wanted;
            prop_assert!((found.tokens_per_second - rate).abs() <= 1e-6 * rate);
            prop_assert!(share(&problem, &stages, &wish.load).iter().all(|stage| stage.busy <= 1.0 + 1e-9));
        }
    }

    /// T8.
    #[test]
    fn t8_the_room_is_that_of_the_tightest_and_others_change_nothing(problem in any_problem(), extra in 1..50u64) {
        prop_assume!(problem.devices.iter().all(|device| device.memory.kv_per_token > 0));
        prop_assume!(problem.pools.iter().all(Option::is_some));
        if let Ok(stages) = best(&problem, &wish(Objective::Throughput)) {
            let room = |stage: &Stage| {
                let left = problem.pools[problem.devices[stage.device].pool].unwrap() - problem.held(stage.device, &stage.layers);
                left / (problem.devices[stage.device].memory.kv_per_token * stage.layers.len() as u64)
            };
            let least = stages.iter().map(room).min();
            prop_assert_eq!(kv_tokens(&problem, &stages), least);
            for stage in stages.iter().filter(|stage| Some(room(stage)) > least) {
                let mut roomier = problem.clone();
                *roomier.pools[problem.devices[stage.device].pool].as_mut().unwrap() += extra;
                prop_assert_eq!(kv_tokens(&roomier, &stages), least);
            }
        }
    }
}

#[test]
fn a_device_that_hurts_is_left_out_unless_all_are_wanted() {
    let problem = problem(vec![device(0, 12, 0.001, 1e-4), device(1, 12, 1.0, 0.1), device(2, 12, 0.001, 1e-4)]);
    let stages = best(&problem, &wish(Objective::Throughput)).unwrap();
    assert_eq!(stages.iter().map(|stage| (stage.device, stage.layers.len())).collect::<Vec<_>>(), [(0, 6), (2, 6)]);
    let all = best(&problem, &Wish { use_all: true, ..wish(Objective::Throughput) }).unwrap();
    let slow = all.iter().find(|stage| stage.device == 1).unwrap();
    assert_eq!((all.len(), slow.layers.len()), (3, 1));
}

#[test]
fn one_request_wants_the_fastest_device_and_many_want_all() {
    let problem = problem(vec![device(0, 12, 0.010, 1e-3), device(1, 12, 0.011, 1e-3)]);
    let of = |concurrency, objective| {
        let load = Load { concurrency, prompt: 4, ..LOAD };
        best(&problem, &Wish { load, ..wish(objective) }).unwrap().len()
    };
    assert_eq!((of(1, Objective::Throughput), of(1, Objective::Latency), of(8, Objective::Throughput)), (1, 1, 2));
}

#[test]
fn two_devices_of_one_memory_share_it_and_of_one_processor_too() {
    let mut problem = problem(vec![device(0, 12, 0.01, 1e-3), device(1, 12, 0.01, 1e-3)]);
    // 12 layers of 10 bytes with 1 byte of keys and values each.
    (problem.devices[1].pool, problem.pools) = (0, vec![Some(132)]);
    assert_eq!(best(&problem, &wish(Objective::Throughput)).unwrap().len(), 2);
    problem.pools = vec![Some(131)];
    let error = best(&problem, &wish(Objective::Throughput)).unwrap_err();
    assert!(matches!(error, PlanError::DoesNotFit { needed: 132, available: 131, .. }), "{error}");
    problem.pools = vec![None];
    problem.devices.iter_mut().for_each(|device| device.compute = Some(Compute { group: 7, share: 1.0 }));
    let load = Load { concurrency: 8, ..LOAD };
    let two = [Stage { device: 0, layers: 0..6 }, Stage { device: 1, layers: 6..12 }];
    let rate = |stages: &[Stage]| predict(&problem, stages, &load).tokens_per_second;
    assert!(rate(&two) <= rate(&[Stage { device: 0, layers: 0..12 }]) * (1.0 + 1e-9), "nothing is gained");
}

#[test]
fn what_does_not_fit_is_told_with_the_amounts() {
    let mut problem = problem(vec![device(0, 4, 1.0, 0.1), device(1, 4, 1.0, 0.1)]);
    problem.pools = vec![Some(20), Some(15)];
    let error = best(&problem, &Wish { kv_tokens: 2, ..wish(Objective::Throughput) }).unwrap_err();
    let wanted = PlanError::DoesNotFit { kv_tokens: 2, needed: 48, each: 0, available: 35, layer: 12, roomiest: 20 };
    assert_eq!(error, wanted);
    for number in ["48 bytes", "35 in all", "takes 12", "gives 20"] {
        assert!(error.to_string().contains(number), "{error}");
    }
    let five = best(&problem, &Wish { stages: Some(5), ..wish(Objective::Latency) }).unwrap_err();
    assert_eq!(five, PlanError::TooMany { stages: 5, devices: 2, layers: 4 });
    assert_eq!(best(&Problem { devices: vec![], ..problem }, &wish(Objective::Context)), Err(PlanError::NoDevice));
}

#[test]
fn without_limits_there_is_room_for_any_context() {
    let free = problem(vec![device(0, 4, 1.0, 0.1), device(1, 4, 0.5, 0.1)]);
    assert!(most_tokens(&free, &wish(Objective::Context)) > 1 << 30);
    assert_eq!(kv_tokens(&free, &[Stage { device: 0, layers: 0..4 }]), None);
    assert!(best(&free, &wish(Objective::Context)).is_ok());
}

/// Twelve unequal devices are too many for all orders; what is found for them is good still.
#[test]
fn many_unequal_devices_are_planned_in_a_few_orders() {
    let devices: Vec<Device> =
        (0..12).map(|i| device(i, 40, 0.001 * (1 + i % 5) as f64 + 1e-5 * i as f64, 1e-4)).collect();
    let problem = problem(devices);
    let load = Load { concurrency: 24, ..LOAD };
    let stages = best(&problem, &Wish { load, ..wish(Objective::Throughput) }).unwrap();
    let equal: Vec<Stage> = (0..10).map(|i| Stage { device: i, layers: 4 * i..4 * i + 4 }).collect();
    let rate = |stages: &[Stage]| predict(&problem, stages, &load).tokens_per_second;
    assert!(rate(&stages) > 1.2 * rate(&equal));
}

#[test]
fn the_law_of_the_ring_is_what_is_predicted() {
    let problem = problem((0..4).map(|i| device(i, 8, 0.002, 1e-3)).collect());
    let stages: Vec<Stage> = (0..4).map(|device| Stage { device, layers: 2 * device..2 * device + 2 }).collect();
    let load = Load { concurrency: 8, ..LOAD };
    let costs = [StageCost { alpha: 0.004, beta: 2e-3, attention: 0.0 }; 4];
    let ring = Ring { stages: &costs, hops: &[], back: HopCost::default(), sampling: 0.0, shares: &[] };
    let found = predict(&problem, &stages, &load);
    assert!((found.seconds_per_token - ring.round_of(8, 4)).abs() < 1e-9 && found.groups == 4, "{found:?}");
    // The scheduler would take as many groups.
    let expected = expected(&problem, &stages, &load);
    assert_eq!((expected.groups, expected.seconds_per_token), (found.groups, found.seconds_per_token));
    // First tokens of several are those of its scheduler, which does not put all prompts into one chunk.
    let short = Load { concurrency: 4, prompt: 32, chunk: 128, ..load };
    let first = |prediction: Prediction| prediction.first_token_seconds;
    let simulated = first(simulate(&problem, &stages, &short).unwrap());
    assert_eq!(first(super::expected(&problem, &stages, &short)), simulated);
    assert!(simulated < first(predict(&problem, &stages, &short)), "{simulated}");
    // Where two stages are on one processor, everything takes twice as long while both compute.
    let mut shared = problem.clone();
    shared.devices.iter_mut().for_each(|device| device.compute = Some(Compute { group: 0, share: 1.0 }));
    let (two, pair) = ([&stages[0], &stages[1]].map(Stage::clone), Load { concurrency: 2, ..short });
    let [alone, beside] = [&problem, &shared].map(|problem| first(super::expected(problem, &two, &pair)));
    assert!((beside / alone - 2.0).abs() < 0.01, "{beside} for {alone}");
    // A prompt of 40 tokens in chunks of 16: three micro-batches, the last one shorter.
    let [large, small] = [16.0, 8.0].map(|tokens| 0.004 + 2e-3 * tokens);
    let wanted = 4.0 * large + large + small;
    let first = first_token(&problem, &stages, &Load { concurrency: 1, ..load });
    assert!((first - wanted).abs() < 1e-9, "{first} for {wanted}");
}

#[test]
fn two_replicas_are_worth_what_each_half_reaches() {
    let problem = problem((0..2).map(|i| device(i, 8, 0.01, 1e-4)).collect());
    let stages = [Stage { device: 0, layers: 0..4 }, Stage { device: 1, layers: 4..8 }];
    let wish = Wish { load: Load { concurrency: 8, ..LOAD }, ..wish(Objective::Throughput) };
    let found = replicas(&problem, &stages, &wish).unwrap().unwrap();
    let wanted = 2.0 * 4.0 / (8.0 * (0.01 + 4e-4));
    assert!((found / wanted - 1.0).abs() < 1e-6, "{found} for {wanted}");
    assert_eq!(replicas(&problem, &stages[..1], &wish), Ok(None));
    let mut shared = problem.clone();
    shared.devices.iter_mut().for_each(|device| device.compute = Some(Compute { group: 0, share: 1.0 }));
    let half = replicas(&shared, &stages, &wish).unwrap().unwrap();
    assert!((half / found - 0.5).abs() < 1e-6, "{half} of {found}");
}

/// Long answers of equal stages: the simulator and the law agree.
#[test]
fn the_simulator_says_what_the_law_says() {
    let problem = problem((0..4).map(|i| device(i, 8, 0.002, 1e-3)).collect());
    let stages: Vec<Stage> = (0..4).map(|device| Stage { device, layers: 2 * device..2 * device + 2 }).collect();
    for concurrency in [1, 4, 8] {
        let load = Load { concurrency, prompt: 16, answer: 400, chunk: 16, tile: 1 };
        let (law, simulated) = (predict(&problem, &stages, &load), simulate(&problem, &stages, &load).unwrap());
        let ratio = simulated.tokens_per_second / law.tokens_per_second;
        assert!((ratio - 1.0).abs() < 0.1, "{concurrency} at once: {simulated:?} for {law:?}");
    }
}
