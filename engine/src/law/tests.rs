//! The closed forms against plain simulations and brute force.

use pp_shaders::PAGE;
use proptest::prelude::*;

use super::*;

fn cost(alpha: f64, beta: f64) -> StageCost {
    StageCost { alpha, beta, attention: 0.0 }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1e-12)
}

/// The number of groups whose rounds the law finds shortest; of equally good ones the smallest.
fn best_groups(sequences: usize, stages: &[StageCost], hops: &[HopCost], back: HopCost) -> usize {
    let ring = Ring { stages, hops, back, sampling: 0.0, shares: &[] };
    let rounds = (1..=sequences).map(|groups| (groups, ring.round_of(sequences, groups)));
    let best = rounds.reduce(|best, next| if next.1 < best.1 * (1.0 - 1e-9) { next } else { best });
    best.map_or(1, |(groups, _)| groups)
}

/// The end of a job whose micro-batch m takes `times(m, i)` on stage i: nobody begins before the work is there and the
/// one before is done. Hops are lines of their own.
fn simulated(
    stages: usize,
    micro_batches: usize,
    times: impl Fn(usize, usize) -> f64,
    hops: &[HopCost],
    b: f64,
) -> f64 {
    let (mut free, mut line) = (vec![0.0f64; stages], vec![0.0f64; stages]);
    let mut end = 0.0f64;
    for m in 0..micro_batches {
        let mut at = 0.0f64;
        for i in 0..stages {
            at = at.max(free[i]) + times(m, i);
            free[i] = at;
            if let Some(hop) = hops.get(i) {
                line[i] = at.max(line[i]) + hop.occupied(b);
                at = line[i] + hop.latency;
            }
        }
        end = end.max(at);
    }
    end
}

#[test]
fn a_job_takes_its_slots_and_the_wrong_formula_fails_everywhere() {
    for p in 1..=8usize {
        for m in 1..=32usize {
            let end = simulated(p, m, |_, _| 1.0, &[], 0.0);
            assert!(close(end, slots(p, m) as f64), "P = {p}, M = {m}");
            let busy = (m * p) as f64 / (p as f64 * end);
            assert!(close(busy, job_efficiency(p, m)), "P = {p}, M = {m}");
            let wrong = (m * p) as f64 / (m * p + p - 1) as f64;
            assert_eq!(p == 1, close(busy, wrong), "P = {p}, M = {m}");
        }
    }
    assert!(close(job_efficiency(4, 4), 4.0 / 7.0));
    assert!(job_efficiency(4, 26) < 0.9 && job_efficiency(4, 27) >= 0.9);
    assert_eq!((slots(4, 0), job_efficiency(4, 0)), (0, 0.0));
}

fn costs(most: usize) -> impl Strategy<Value = Vec<StageCost>> {
    let one = (0.0..5.0f64, 0.01..1.0f64).prop_map(|(alpha, beta)| cost(alpha, beta));
    prop::collection::vec(one, 1..=most)
}

fn hops(count: usize) -> impl Strategy<Value = Vec<HopCost>> {
    let one = (0.0..3.0f64, 0.0..0.5f64).prop_map(|(latency, s)| HopCost { latency, seconds_per_token: s });
    prop::collection::vec(one, count)
}

/// A decode ring, group by group; the mean seconds of a round after a while.
fn ring_round(ring: &Ring, sizes: &[usize]) -> f64 {
    let rounds = 400;
    let p = ring.stages.len();
    let mut free = vec![0.0f64; p + 1];
    let mut line = vec![0.0f64; p + 1];
    let mut ready = vec![0.0f64; sizes.len()];
    let mut half = 0.0;
    for round in 0..rounds {
        for (at, size) in ready.iter_mut().zip(sizes) {
            let b = *size as f64;
            for i in 0..p {
                *at = at.max(free[i]) + ring.stages[i].step(b);
                free[i] = *at;
                let hop = ring.hops.get(i).copied().unwrap_or(ring.back);
                line[i] = at.max(line[i]) + hop.occupied(b);
                *at = line[i] + hop.latency;
            }
            *at = at.max(free[p]) + ring.sampling;
            free[p] = *at;
        }
        if round == rounds / 2 - 1 {
            half = ready[0];
        }
    }
    (ready[0] - half) / (rounds / 2) as f64
}

/// Rounds of [`crowded_round`], of which the first half is not counted: groups gather before the slowest stage.
const CROWDED: usize = 1000;

/// As [`ring_round`] without hops, where stages whose parts of something are `parts` compute at fair shares.
fn crowded_round(times: &[f64], parts: &[f64], groups: usize) -> f64 {
    let rounds = CROWDED;
    let mut queues = vec![std::collections::VecDeque::new(); times.len()];
    queues[0].extend(0..groups);
    let mut left = times.to_vec();
    let (mut now, mut half, mut done) = (0.0, 0.0, 0);
    while done < rounds {
        let busy: Vec<usize> = (0..times.len()).filter(|stage| !queues[*stage].is_empty()).collect();
        let slowdown = busy.iter().map(|stage| parts[*stage]).sum::<f64>().max(1.0);
        let next = busy.iter().map(|stage| left[*stage]).fold(f64::INFINITY, f64::min);
        now += next * slowdown;
        for stage in busy {
            left[stage] -= next;
            if left[stage] <= 1e-12 {
                let group = queues[stage].pop_front().unwrap();
                left[stage] = times[stage];
                queues[(stage + 1) % times.len()].push_back(group);
                if stage + 1 == times.len() && group == 0 {
                    done += 1;
                    half = if done == rounds / 2 { now } else { half };
                }
            }
        }
    }
    (now - half) / (rounds / 2) as f64
}

fn crowd(times: &[f64], parts: &[f64], groups: usize) -> f64 {
    let stages: Vec<StageCost> = times.iter().map(|seconds| cost(*seconds, 0.0)).collect();
    let share = [Share { capacity: 1.0, stages: parts.iter().copied().enumerate().collect() }];
    Ring { stages: &stages, hops: &[], back: HopCost::default(), sampling: 0.0, shares: &share }
        .round(groups as f64, 1.0)
}

#[test]
fn a_stage_that_is_always_busy_is_slowed_down_by_one_that_is_not() {
    // One of two cores for 20 ms, both for 7.5 ms: 17.5 ms of two cores, and yet 23.75 ms, not 20.
    let (times, parts) = ([20.0, 7.5], [0.5, 1.0]);
    let simulated = crowded_round(&times, &parts, 8) / 8.0;
    assert!((simulated - 23.75).abs() < 0.01, "{simulated}");
    assert!(close(crowd(&times, &parts, 8) / 8.0, 23.75));
}

fn groups_of(sequences: usize, groups: usize) -> Vec<usize> {
    (0..groups).map(|group| sequences / groups + usize::from(group < sequences % groups)).collect()
}

proptest! {
    #[test]
    fn unequal_stages_and_hops_take_what_the_law_says(
        (stages, hops) in costs(5).prop_flat_map(|stages| { let n = stages.len() - 1; (Just(stages), hops(n)) }),
        m in 1usize..20, b in 1usize..16,
    ) {
        let b = b as f64;
        let end = simulated(stages.len(), m, |_, i| stages[i].step(b), &hops, b);
        prop_assert!(close(end, makespan(&stages, &hops, b, m)));
        let held = |_, i: usize| stages[i].step(b) + hops.get(i).map_or(0.0, |hop| hop.seconds(b));
        let blocking = simulated(stages.len(), m, held, &[], b);
        prop_assert!(close(blocking, makespan_blocking(&stages, &hops, b, m)));
    }

    #[test]
    fn proportional_stages_take_the_sum_and_the_largest(sizes in prop::collection::vec(0.1..10.0f64, 1..12), p in 1usize..8) {
        let end = simulated(p, sizes.len(), |m, _| sizes[m], &[], 0.0);
        let largest = sizes.iter().copied().fold(0.0, f64::max);
        prop_assert!(close(end, sizes.iter().sum::<f64>() + (p - 1) as f64 * largest));
    }

    #[test]
    fn a_ring_goes_round_as_the_law_says(
        (stages, hops, back) in costs(5).prop_flat_map(|stages| { let n = stages.len() - 1; (Just(stages), hops(n), hops(1)) }),
        sampling in 0.0..2.0f64, m in 1usize..12, b in 1usize..8,
    ) {
        let ring = Ring { stages: &stages, hops: &hops, back: back[0], sampling, shares: &[] };
        let (round, b) = (ring_round(&ring, &vec![b; m]), b as f64);
        let law = ring.round(m as f64, b);
        prop_assert!((round - law).abs() <= 1e-6 * law, "{round} for {law}");
        let knee = ring.knee(b);
        prop_assert!(ring.round(knee as f64 + 1.0, b) > ring.round(1.0, b));
        prop_assert!(knee == 1 || close(ring.round(knee as f64 - 1.0, b), ring.round(1.0, b)));
        prop_assert!(ring.efficiency(m as f64, b) <= 1.0 + 1e-9);
    }

    #[test]
    fn stages_that_share_take_no_less_than_the_law_says_and_two_take_that(
        // Multiples of a tenth: of stages that are almost as slow as each other groups would gather before none for long.
        stages in prop::collection::vec((1..=50u32, prop::sample::select(vec![0.25, 0.5, 0.75, 1.0])), 2..=4),
        groups in 1usize..12,
    ) {
        let (times, parts): (Vec<f64>, Vec<f64>) =
            stages.into_iter().map(|(tenths, part)| (f64::from(tenths) * 0.1, part)).unzip();
        let (round, law) = (crowded_round(&times, &parts, groups), crowd(&times, &parts, groups));
        // While groups still gather, what is counted may begin and end up to a round apart at another stage.
        prop_assert!(round >= law * (1.0 - 2.0 / CROWDED as f64), "{round} for {law}");
        if times.len() == 2 && groups > 1 {
            prop_assert!(round <= law * (1.0 + 1e-6), "{round} for {law}");
        }
    }

    #[test]
    fn the_chosen_groups_are_within_two_percent_of_the_best(
        (stages, hops, back) in costs(4).prop_flat_map(|stages| { let n = stages.len() - 1; (Just(stages), hops(n), hops(1)) }),
        sequences in 1usize..24,
    ) {
        let ring = Ring { stages: &stages, hops: &hops, back: back[0], sampling: 0.0, shares: &[] };
        let rounds: Vec<f64> = (1..=sequences).map(|m| ring_round(&ring, &groups_of(sequences, m))).collect();
        let best = rounds.iter().copied().fold(f64::INFINITY, f64::min);
        let chosen = best_groups(sequences, &stages, &hops, back[0]);
        prop_assert!((1..=sequences).contains(&chosen));
        prop_assert!(rounds[chosen - 1] <= 1.02 * best, "{chosen} groups: {} for {best}", rounds[chosen - 1]);
    }

    #[test]
    fn the_number_of_chunks_is_within_one_of_the_best(p in 1usize..9, alpha in 0.0..10.0f64, work in 0.1..1000.0f64, most in 1usize..200) {
        let best = (1..=most).min_by(|a, b| prefill(p, *a, alpha, work).total_cmp(&prefill(p, *b, alpha, work)));
        let chosen = best_chunks(p, alpha, work, most);
        prop_assert!(chosen.abs_diff(best.unwrap()) <= 1, "{chosen} for {best:?}");
    }

    #[test]
    fn chunks_take_equally_long(
        tokens in 1usize..20_000, start in 0usize..20_000, p in 1usize..9,
        alpha in 0.0..0.1f64, beta in 1e-6..1e-3f64, attention in 0.0..1e-7f64, max in 1usize..4096,
    ) {
        let cost = StageCost { alpha, beta, attention };
        let sizes = chunks(tokens, start, p, cost, max);
        prop_assert_eq!(sizes.iter().sum::<usize>(), tokens);
        prop_assert!(sizes.iter().all(|size| (1..=max).contains(size)));
        prop_assert!(sizes.windows(2).all(|pair| pair[1] <= pair[0] + 1), "later ones are no longer: {:?}", sizes);
        let mut at = start as f64;
        let mut times = Vec::new();
        for size in &sizes {
            times.push(cost.seconds(*size as f64, at));
            at += *size as f64;
        }
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let page = cost.seconds(PAGE as f64, at) - cost.alpha;
        for time in &times[..times.len() - 1] {
            prop_assert!((time - mean).abs() <= (0.05 * mean).max(page), "{time} of {mean}: {:?}", sizes);
        }
        let work: f64 = times.iter().sum::<f64>() - times.len() as f64 * alpha;
        if sizes[0] < max / 2 {
            let most = tokens.div_ceil(PAGE);
            let best = (1..=most).min_by(|a, b| prefill(p, *a, alpha, work).total_cmp(&prefill(p, *b, alpha, work)));
            prop_assert!(sizes.len().abs_diff(best.unwrap()) <= 1, "{} for {best:?}", sizes.len());
        }
    }

    #[test]
    fn a_fit_is_never_negative(steps in prop::collection::vec((0usize..5000, -1.0..10.0f64), 0..200)) {
        let mut fit = Fit::default();
        for (tokens, seconds) in steps {
            fit.add(tokens, (tokens * tokens) as f64, seconds);
        }
        let cost = fit.cost();
        prop_assert!(cost.alpha >= 0.0 && cost.beta >= 0.0 && cost.alpha.is_finite() && cost.beta.is_finite());
    }
}

#[test]
fn equal_stages_without_hops_are_full_at_as_many_groups() {
    let stages = vec![cost(0.0, 1.0); 4];
    let hops = [HopCost::default(); 3];
    let ring = Ring { stages: &stages, hops: &hops, back: HopCost::default(), sampling: 0.0, shares: &[] };
    for m in 1..=8 {
        assert!(close(ring.efficiency(m as f64, 1.0), (m as f64 / 4.0).min(1.0)), "M = {m}");
    }
    assert_eq!(ring.knee(1.0), 4);
    let hops = [HopCost { latency: 0.5, seconds_per_token: 0.0 }; 3];
    let ring = Ring { hops: &hops, back: HopCost { latency: 0.5, seconds_per_token: 0.0 }, ..ring };
    assert_eq!(ring.knee(1.0), 6);
    for m in 1..=8 {
        assert!(close(ring.efficiency(m as f64, 1.0), (m as f64 / 6.0).min(1.0)), "M = {m}");
    }
    assert!(close(ring.tokens_per_second(6.0, 1.0), 1.0) && close(ring.tokens_per_second(3.0, 1.0), 0.5));
}

#[test]
fn a_split_batch_gains_nothing_while_weights_bind_and_p_when_computing_does() {
    assert!((speedup(1.0, 1e-6, 4, 8.0) - 1.0).abs() < 1e-4);
    assert!((speedup(1.0, 1.0, 4, 1e6) - 4.0).abs() < 1e-4);
    assert!(close(speedup(3.0, 0.5, 1, 17.0), 1.0));
    // S(B) is what one device takes, over the pace of P stages that each hold a part of it.
    for b in [4.0, 32.0, 400.0] {
        let stages = vec![cost(0.25, 0.01); 4];
        assert!(close(speedup(1.0, 0.04, 4, b), ceiling(&stages, b)));
        let hops = [HopCost::default(); 3];
        let ring = Ring { stages: &stages, hops: &hops, back: HopCost::default(), sampling: 0.0, shares: &[] };
        let alone = b / (1.0 + 0.04 * b);
        assert!(close(ring.tokens_per_second(4.0, b / 4.0) / alone, ceiling(&stages, b)));
    }
    assert_eq!(ceiling(&[], 1.0), 0.0);
}

#[test]
fn groups_follow_the_cost() {
    let stages = [cost(1.0, 0.0); 4];
    let far = HopCost { latency: 1.0, seconds_per_token: 0.0 };
    assert_eq!(best_groups(16, &stages, &[HopCost::default(); 3], HopCost::default()), 1, "weights alone: one batch");
    let stages = [cost(0.0, 1.0); 4];
    assert_eq!(
        best_groups(16, &stages, &[HopCost::default(); 3], HopCost::default()),
        4,
        "computing alone: a full pipe"
    );
    assert!(best_groups(16, &stages, &[far; 3], far) > 4, "hops are filled as well");
    assert_eq!(best_groups(1, &stages, &[far; 3], far), 1);
    assert_eq!(best_groups(0, &stages, &[far; 3], far), 1);
}

#[test]
fn keys_and_values_fit_the_tightest_stage() {
    let room = |memory, taken, kv_per_token| StageRoom { memory, taken, kv_per_token };
    let mut stages = vec![room(1000, 500, 5), room(1000, 900, 2), room(2000, 100, 7)];
    assert_eq!(kv_tokens(&stages), 50);
    stages[2].memory += 1_000_000;
    stages[0].taken -= 100;
    assert_eq!(kv_tokens(&stages), 50, "the others change nothing");
    stages[1].taken = 5000;
    assert_eq!(kv_tokens(&stages), 0);
}

#[test]
fn chunks_of_known_prompts() {
    let cost = StageCost { alpha: 0.01, beta: 1e-4, attention: 0.0 };
    // K* = √(3 · 0.4096/0.01) = 11.1.
    assert_eq!(chunks(4096, 0, 4, cost, 4096).len(), 11);
    assert_eq!(chunks(4096, 0, 1, cost, 4096), [4096], "one stage has no bubble");
    assert_eq!(chunks(4096, 0, 1, cost, 1000), [819, 819, 820, 819, 819]);
    assert_eq!(chunks(100, 0, 4, StageCost::default(), 40), [33, 34, 33], "nothing known: equal tokens");
    assert_eq!(chunks(0, 7, 4, cost, 40), [0usize; 0]);
    let growing = chunks(8192, 0, 4, StageCost { alpha: 0.1, beta: 1e-4, attention: 1e-7 }, 8192);
    assert!(growing.windows(2).all(|pair| pair[1] < pair[0]), "{growing:?}");
}

#[test]
fn a_fit_finds_what_steps_cost() {
    let mut fit = Fit::default();
    assert_eq!(fit.cost(), StageCost::default());
    let truth = cost(0.02, 0.0003);
    for _ in 0..50 {
        fit.add(8, 800.0, truth.step(8.0));
    }
    assert!(!fit.is_determined());
    let guess = fit.cost();
    assert!((guess.step(8.0) - truth.step(8.0)).abs() < 1e-5, "{guess:?}");
    assert!(close(guess.alpha, 16.0 * guess.beta) || (guess.alpha - 16.0 * guess.beta).abs() < 1e-4 * guess.alpha);
    for tokens in [256, 300, 512] {
        fit.add(tokens, (tokens * tokens) as f64, truth.step(tokens as f64));
    }
    assert!(fit.is_determined());
    // A long answer does not wipe that out.
    for _ in 0..5000 {
        fit.add(8, 800.0, truth.step(8.0));
    }
    let found = fit.cost();
    assert!(
        (found.alpha / truth.alpha - 1.0).abs() < 0.01 && (found.beta / truth.beta - 1.0).abs() < 0.01,
        "{found:?}"
    );
}

#[test]
fn a_fit_follows_a_device_that_slows_down() {
    let mut fit = Fit::default();
    for factor in [1.0, 2.0] {
        for step in 0..2000usize {
            let tokens = [1, 3, 8, 70][step % 4];
            fit.add(tokens, (tokens * tokens) as f64, factor * cost(0.01, 0.001).step(tokens as f64));
        }
    }
    let found = fit.cost();
    assert!((found.alpha / 0.02 - 1.0).abs() < 0.01 && (found.beta / 0.002 - 1.0).abs() < 0.01, "{found:?}");
}
