use super::*;
use proptest::prelude::*;

use crate::message::Candidate;

/// What a tail would return for a row; its second log-sum-exp is off by what a device's may be.
fn output(row: &[f32], request: &OutputRequest) -> Output {
    let mut edited = row.to_vec();
    for edit in &request.edits {
        edited[edit.id as usize] = edit.apply(row[edit.id as usize]);
    }
    let lse = |logits: &[f32], scale: f32| {
        let scale = f64::from(scale);
        let top = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|l| ((f64::from(*l) - top) * scale).exp()).sum();
        (top * scale + sum.ln()) as f32
    };
    let error = (2.0 * uniform(1, 2, row[0].to_bits()) - 1.0) as f32 * LSE_ERROR as f32;
    let candidate = |id: u32| Candidate { id, logit: edited[id as usize], raw: row[id as usize] };
    let best: Vec<Candidate> =
        by_falling_logit(&edited).into_iter().take(request.top_k as usize).map(candidate).collect();
    let is_shown = |id: u32| best.iter().any(|candidate| candidate.id == id);
    let mut beside: Vec<Candidate> =
        request.edits.iter().filter(|edit| !is_shown(edit.id)).map(|edit| candidate(edit.id)).collect();
    beside.sort_by(|a, b| b.raw.total_cmp(&a.raw).then(a.id.cmp(&b.id)));
    beside.truncate(request.top_k as usize);
    Output {
        lse: lse(row, 1.0),
        lse_processed: lse(&edited, request.inverse_temperature) + error,
        target_logit: row[0],
        best,
        beside,
        row: request.whole_row.then(|| row.to_vec()),
    }
}

/// The token, and whether it took the whole row.
fn draw_after(row: &[f32], sampling: &Sampling, history: History<'_>, position: u32) -> (u32, bool) {
    draw_allowed(row, sampling, history, position, None)
}

/// As [`draw_after`], of tokens that are allowed.
fn draw_allowed(
    row: &[f32],
    sampling: &Sampling,
    history: History<'_>,
    position: u32,
    allowed: Option<&TokenSet>,
) -> (u32, bool) {
    let draw = |request: OutputRequest| sampling.draw(&output(row, &request), row.len(), history, 0, position, allowed);
    match draw(sampling.request(0, history, row.len(), allowed)) {
        Draw::Token(id) => (id, false),
        Draw::NeedsRow => match draw(sampling.request_row(0)) {
            Draw::Token(id) => (id, true),
            Draw::NeedsRow => panic!("a whole row decides"),
        },
    }
}

fn draw(row: &[f32], sampling: &Sampling, position: u32) -> (u32, bool) {
    draw_after(row, sampling, History::default(), position)
}

/// What the definition says.
fn draw_whole(row: &[f32], sampling: &Sampling, history: History<'_>, position: u32) -> u32 {
    sampling.draw_row(row, history, uniform(sampling.seed, 0, position), None)
}

fn row(len: usize, spread: f32) -> Vec<f32> {
    (0..len as u32).map(|i| (uniform(7, 0, i) as f32 - 0.5) * spread).collect()
}

#[test]
fn greedy_takes_the_best_and_of_equals_the_first() {
    assert_eq!(draw(&[1.0, 3.0, 3.0, 2.0], &Sampling::default(), 0), (1, false));
}

#[test]
fn candidates_decide_as_the_whole_row_would() {
    let row = row(500, 12.0);
    let mut fetched = 0;
    for (top_k, top_p, min_p) in [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (0, 0.5, 0.0),
        (0, 0.95, 0.0),
        (0, 1.0, 0.1),
        (40, 0.9, 0.05),
        (200, 1.0, 0.0),
        (0, 1.0, 1e-4),
    ] {
        let sampling = Sampling { temperature: 0.8, top_k, top_p, min_p, seed: 3, ..Sampling::default() };
        for position in 0..300 {
            let (id, needed_row) = draw(&row, &sampling, position);
            let whole = draw_whole(&row, &sampling, History::default(), position);
            assert_eq!(id, whole, "{sampling:?} at {position}");
            fetched += u32::from(needed_row);
        }
    }
    assert!(fetched > 0, "some draws lie beyond the candidates");
}

/// Where the error of a device's log-sum-exp could move a draw, or the end of top-p, over an edge between two tokens.
#[test]
fn what_is_near_an_edge_asks_for_the_row() {
    let row = row(300, 9.0);
    let plain = Sampling { temperature: 1.0, seed: 5, ..Sampling::default() };
    let exact = output(&row, &plain.request(0, History::default(), 0, None));
    let sum: f64 = row.iter().map(|l| f64::from(*l).exp()).sum();
    let total = |error: f64| Output { lse_processed: (sum.ln() + error) as f32, ..exact.clone() };
    let (low, high) = (total(-LSE_ERROR), total(LSE_ERROR));
    let differ = |sampling: &Sampling, position: u32| {
        let whole = Draw::Token(draw_whole(&row, sampling, History::default(), position));
        let found = [&low, &high].map(|o| sampling.draw(o, row.len(), History::default(), 0, position, None));
        assert!(found.iter().all(|draw| *draw == whole || *draw == Draw::NeedsRow), "{sampling:?} at {position}");
        found.contains(&Draw::NeedsRow)
    };
    let beyond = 1.0 - exact.best.iter().map(|c| f64::from(c.logit).exp()).sum::<f64>() / sum;
    let asked = (0..30_000).filter(|position| differ(&plain, *position)).count() as f64 / 30_000.0;
    assert!((beyond..beyond + 0.01).contains(&asked), "{asked} for {beyond}");
    let mut reached = 0.0;
    for candidate in &exact.best[..40] {
        reached += f64::from(candidate.logit).exp() / sum;
        for off in [-1e-3, -2e-5, 0.0, 2e-5, 1e-3] {
            let sampling = Sampling { top_p: (reached * (1.0 + off)) as f32, ..plain.clone() };
            let asked = (0..20).all(|position| differ(&sampling, position));
            assert_eq!(asked, off.abs() < 1e-4, "{sampling:?}");
        }
    }
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [2.0f32, 1.0, 0.0, -1.0];
    let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
    let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    let mut counts = [0u32; 4];
    (0..20_000).for_each(|position| counts[draw(&logits, &sampling, position).0 as usize] += 1);
    for (logit, count) in logits.iter().zip(counts) {
        let (expected, found) = (f64::from(*logit).exp() / sum, f64::from(count) / 20_000.0);
        assert!((expected - found).abs() < 0.015, "{expected} {found}");
    }
}

#[test]
fn edits_follow_their_definitions() {
    let sampling = Sampling {
        logit_bias: vec![(1, 3.0), (3, -0.5)],
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        ..Sampling::default()
    };
    let edits = sampling.edits(History { prompt: &[1, 0, 0], answer: &[2, 2] });
    let expected = [(0, 0.0, 2.0, 0.0), (1, 3.0, 2.0, 0.0), (2, 0.0, 2.0, 1.0), (3, -0.5, 1.0, 0.0)];
    assert_eq!(edits, expected.map(|(id, bias, repetition, subtract)| LogitEdit { id, bias, repetition, subtract }));
    let row = [4.0f32, -1.0, 3.0, 1.0];
    let edited: Vec<f32> = edits.iter().zip(row).map(|(edit, logit)| edit.apply(logit)).collect();
    // A bias comes before the repetition penalty: it is 2 that is halved, not -1 that is doubled.
    assert_eq!(edited, [2.0, 1.0, 0.5, 0.5]);
    assert_eq!(Sampling::default().edits(History { prompt: &[1, 2], answer: &[3] }), []);
}

/// Worked out by hand: logits 2, 1, 0, -1; bias 1 on token 3; token 0 in the prompt, repetition 2; token 1 answered
/// once, presence 0.5; then temperature 0.5.
#[test]
fn rules_are_applied_in_their_order() {
    let row = [2.0f32, 1.0, 0.0, -1.0];
    let history = History { prompt: &[0], answer: &[1] };
    let sampling = Sampling {
        temperature: 0.5,
        logit_bias: vec![(3, 1.0)],
        repetition_penalty: 2.0,
        presence_penalty: 0.5,
        ..Sampling::default()
    };
    // 2 / 2 = 1; 1 / 2 - 0.5 = 0; 0; -1 + 1 = 0. Divided by 0.5: 2, 0, 0, 0.
    let output = output(&row, &sampling.request(0, history, 4, None));
    assert_eq!(
        output.best.iter().map(|c| (c.id, c.logit, c.raw)).collect::<Vec<_>>(),
        [(0, 1.0, 2.0), (1, 0.0, 1.0), (2, 0.0, 0.0), (3, 0.0, -1.0)]
    );
    let mass = 2f64.exp() + 3.0;
    assert!((f64::from(output.lse_processed) - mass.ln()).abs() < 5e-5);
    for position in 0..2000 {
        let u = uniform(0, 0, position) * mass;
        let expected = if u < 2f64.exp() { 0 } else { 1 + (u - 2f64.exp()) as u32 };
        assert_eq!(draw_after(&row, &sampling, history, position).0, expected);
    }
    // min-p looks at what temperature has left: e^-2 of the best is 0.135.
    let all = |sampling: &Sampling| (0..2000).map(|position| draw_after(&row, sampling, history, position).0).max();
    assert_eq!(all(&Sampling { min_p: 0.13, ..sampling.clone() }), Some(3));
    assert_eq!(all(&Sampling { min_p: 0.14, ..sampling.clone() }), Some(0));
    // top-k comes before top-p: of the two that are left the best has 0.88.
    assert_eq!(all(&Sampling { top_k: 2, top_p: 0.87, ..sampling.clone() }), Some(0));
    assert_eq!(all(&Sampling { top_k: 2, top_p: 0.89, ..sampling.clone() }), Some(1));
    assert_eq!(all(&Sampling { top_p: 0.87, ..sampling.clone() }), Some(2));
}

#[test]
fn a_large_bias_forces_a_token_and_a_small_one_bans_it() {
    let row = row(500, 24.0);
    let best = by_falling_logit(&row)[0];
    for temperature in [0.0, 0.7, 1e-4] {
        for (bias, forced) in [(100.0, true), (1e30, true), (f32::MAX, true), (f32::INFINITY, true)]
            .into_iter()
            .chain([-100.0, -1e30, f32::MIN, f32::NEG_INFINITY].map(|bias| (bias, false)))
        {
            let id = if forced { 321 } else { best };
            let sampling = Sampling { temperature, logit_bias: vec![(id, bias)], ..Sampling::default() };
            for position in 0..100 {
                assert_eq!(draw(&row, &sampling, position).0 == id, forced, "{bias} at {temperature}");
                assert_eq!(draw_whole(&row, &sampling, History::default(), position) == id, forced);
            }
        }
    }
    // Where all are banned, the best is what it was.
    let banned = (0..500).map(|id| (id, f32::NEG_INFINITY)).collect();
    let sampling = Sampling { temperature: 1.0, logit_bias: banned, ..Sampling::default() };
    assert_eq!(draw(&row, &sampling, 0), (best, true));
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let row = row(500, 12.0);
    let order = by_falling_logit(&row);
    let plain =
        output(&row, &Sampling { candidates: 5, ..Sampling::default() }.request(0, History::default(), 0, None));
    let expected = top_logprobs(&plain, 5);
    assert_eq!(expected.iter().map(|(id, _)| *id).collect::<Vec<_>>(), order[..5]);
    let sum: f64 = row.iter().map(|l| f64::from(*l).exp()).sum();
    for (id, logprob) in &expected {
        assert!((f64::from(*logprob) - (f64::from(row[*id as usize]) - sum.ln())).abs() < 1e-5);
    }
    let logit_bias = vec![(order[1], -100.0), (order[3], f32::NEG_INFINITY), (order[400], 50.0)];
    for mut sampling in [
        Sampling { temperature: 0.3, ..Sampling::default() },
        Sampling { repetition_penalty: 1.7, presence_penalty: -3.0, ..Sampling::default() },
        Sampling { temperature: 2.0, logit_bias, ..Sampling::default() },
    ] {
        sampling.candidates = 5;
        let history = History { prompt: &order[..40], answer: &order[2..4] };
        for request in [sampling.request(0, history, 500, None), sampling.request_row(0)] {
            let output = output(&row, &request);
            assert_eq!(top_logprobs(&output, 5), expected);
            assert_eq!(logprob(&output, expected[2].0), Some(expected[2].1));
        }
    }
    assert_eq!(logprob(&plain, order[100]), None, "it is not among the candidates");
}

#[test]
fn a_request_with_too_many_edits_asks_for_the_row() {
    let sampling = Sampling { repetition_penalty: 1.1, ..Sampling::default() };
    let history = History { prompt: &[3, 5, 3], answer: &[9] };
    let request = sampling.request(7, history, 3, None);
    assert_eq!((request.row, request.whole_row, request.edits.len()), (7, false, 3));
    let request = sampling.request(7, history, 2, None);
    assert_eq!((request.row, request.whole_row, request.edits.len()), (7, true, 0));
    let output = output(&row(50, 9.0), &request);
    let whole = draw_whole(&row(50, 9.0), &sampling, history, 0);
    assert_eq!(sampling.draw(&output, 50, history, 0, 0, None), Draw::Token(whole));
}

#[test]
fn cuts_keep_what_they_say() {
    let row = [3.0f32, 2.0, 1.0, 0.0];
    let all = |sampling: Sampling| {
        let mut ids: Vec<u32> = (0..2000).map(|position| draw(&row, &sampling, position).0).collect();
        ids.sort_unstable();
        ids.dedup();
        ids
    };
    let base = Sampling { temperature: 1.0, ..Sampling::default() };
    assert_eq!(all(base.clone()), [0, 1, 2, 3]);
    assert_eq!(all(Sampling { top_k: 2, ..base.clone() }), [0, 1]);
    assert_eq!(all(Sampling { min_p: 0.1, ..base.clone() }), [0, 1, 2]);
    assert_eq!(all(Sampling { top_p: 0.6, ..base.clone() }), [0]);
    assert_eq!(all(Sampling { top_p: 0.7, ..base.clone() }), [0, 1]);
    assert_eq!(all(Sampling { temperature: 0.01, ..base.clone() }), [0]);
    for temperature in [1e-4, 1e-30, 1e-42] {
        assert_eq!(all(Sampling { temperature, top_k: 3, ..base.clone() }), [0], "temperature {temperature}");
    }
}

/// Any way to sample, over a vocabulary of 400.
fn samplings() -> impl Strategy<Value = Sampling> {
    let or = |value: f32, other: BoxedStrategy<f32>| prop_oneof![Just(value), other].boxed();
    let cuts = (
        prop_oneof![Just(0), 1u32..20, 20u32..400],
        or(1.0, (0f32..1.0).boxed()),
        prop_oneof![Just(0.0), 0f32..0.01, 0f32..1.0],
    );
    let penalties = (
        or(1.0, prop_oneof![0.5f32..2.0, 1e-6f32..1e6].boxed()),
        or(0.0, (-2f32..2.0).boxed()),
        or(0.0, (-2f32..2.0).boxed()),
    );
    let bias = prop_oneof![-5f32..5.0, -5f32..5.0, Just(-100.0), Just(100.0), Just(f32::NEG_INFINITY), any::<f32>()];
    let bias = prop_oneof![Just(Default::default()), prop::collection::btree_map(0u32..400, bias, 0..80)];
    (prop_oneof![Just(0f32), 0.05f32..3.0], cuts, penalties, bias, any::<u64>()).prop_map(
        |(temperature, (top_k, top_p, min_p), (repetition, presence, frequency), bias, seed)| Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            logit_bias: bias.into_iter().collect::<std::collections::BTreeMap<_, _>>().into_iter().collect(),
            repetition_penalty: repetition,
            presence_penalty: presence,
            frequency_penalty: frequency,
            seed,
            candidates: 0,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn candidates_with_edits_decide_as_the_whole_row_would(
        logits in (1f32..40.0, prop::collection::vec(-1f32..1.0, 400)), len in prop_oneof![1usize..80, Just(400)],
        sampling in samplings(), prompt in prop::collection::vec(0u32..400, 0..100),
        answer in prop::collection::vec(0u32..400, 0..30), position: u16,
    ) {
        let row: Vec<f32> = logits.1[..len].iter().map(|l| l * logits.0).collect();
        let inside = |ids: Vec<u32>| ids.into_iter().filter(|id| (*id as usize) < len).collect::<Vec<_>>();
        let (prompt, answer) = (inside(prompt), inside(answer));
        let mut sampling = sampling;
        sampling.logit_bias.retain(|(id, _)| (*id as usize) < len);
        let history = History { prompt: &prompt, answer: &answer };
        for position in (0..8).map(|i| u32::from(position) + i) {
            let (id, _) = draw_after(&row, &sampling, history, position);
            prop_assert_eq!(id, draw_whole(&row, &sampling, history, position));
            prop_assert_eq!(draw_after(&row, &sampling, history, position).0, id, "a draw repeats");
        }
    }
}

/// The row as it is where only some tokens may come, worked on without any of the code that knows of that.
fn draw_banned(row: &[f32], sampling: &Sampling, history: History<'_>, position: u32, allowed: &[u32]) -> u32 {
    let mut edited = row.to_vec();
    sampling.edits(history).iter().for_each(|edit| edited[edit.id as usize] = edit.apply(row[edit.id as usize]));
    let banned = (0..row.len() as u32).filter(|id| !allowed.contains(id));
    banned.for_each(|id| edited[id as usize] = f32::NEG_INFINITY);
    let plain = Sampling {
        logit_bias: Vec::new(),
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        ..sampling.clone()
    };
    draw_whole(&edited, &plain, History::default(), position)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    /// Also where the best of what is allowed is far from the best of all, and where little is allowed.
    #[test]
    fn a_draw_of_allowed_tokens_is_that_of_a_row_without_the_others(
        logits in (1f32..60.0, prop::collection::vec(-1f32..1.0, 400)), len in prop_oneof![2usize..80, Just(400)],
        sampling in samplings(), answer in prop::collection::vec(0u32..400, 0..30), position: u16,
        allowed in prop_oneof![
            prop::collection::btree_set(0u32..400, 1..5),
            prop::collection::btree_set(0u32..400, 5..70),
            prop::collection::btree_set(0u32..400, 0..40)
                .prop_map(|banned| (0..400).filter(|id| !banned.contains(id)).collect()),
        ],
    ) {
        let row: Vec<f32> = logits.1[..len].iter().map(|l| l * logits.0).collect();
        let inside = |ids: Vec<u32>| ids.into_iter().filter(|id| (*id as usize) < len).collect::<Vec<_>>();
        let answer = inside(answer);
        let mut allowed = inside(allowed.into_iter().collect());
        if allowed.is_empty() {
            allowed.push(len as u32 / 2);
        }
        let set: TokenSet = allowed.iter().copied().collect();
        let mut sampling = sampling;
        // Where bias bans all that is allowed there is no row to compare with.
        sampling.logit_bias.retain(|(id, bias)| (*id as usize) < len && bias.is_finite() && bias.abs() < 1e5);
        let history = History { prompt: &[], answer: &answer };
        for position in (0..8).map(|i| u32::from(position) + i) {
            let (id, _) = draw_allowed(&row, &sampling, history, position, Some(&set));
            prop_assert!(set.contains(id));
            prop_assert_eq!(id, draw_banned(&row, &sampling, history, position, &allowed));
        }
    }
}

#[test]
fn few_allowed_tokens_need_no_row() {
    let row = row(500, 30.0);
    let order = by_falling_logit(&row);
    for (allowed, needs) in [(&order[300..360], false), (&order[499..], false), (&order[100..300], true)] {
        let set: TokenSet = allowed.iter().copied().collect();
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, candidates: 3, ..Sampling::default() };
            let (id, needed) = draw_allowed(&row, &sampling, History::default(), 0, Some(&set));
            assert_eq!((needed, set.contains(id)), (needs, true), "{} at {temperature}", allowed.len());
            let output = output(&row, &sampling.request(0, History::default(), 500, Some(&set)));
            assert_eq!(logprob(&output, id).is_some(), !needs);
            assert_eq!(top_logprobs(&output, 3), top_logprobs(&self::output(&row, &sampling.request_row(0)), 3));
        }
    }
    // What is banned by a bias and all that is allowed: still nothing else.
    let banned = Sampling { logit_bias: vec![(order[7], f32::NEG_INFINITY)], ..Sampling::default() };
    let only: TokenSet = [order[7]].into_iter().collect();
    assert_eq!(draw_allowed(&row, &banned, History::default(), 0, Some(&only)), (order[7], false));
}

proptest! {
    #[test]
    fn every_draw_is_a_token(
        logits in prop::collection::vec(-20f32..20.0, 1..200), temperature in 0f32..3.0, top_k in 0u32..300,
        top_p in 0f32..=1.0, min_p in 0f32..=1.0, seed: u64, position: u32,
    ) {
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed, ..Sampling::default() };
        let (id, _) = draw(&logits, &sampling, position);
        prop_assert!((id as usize) < logits.len());
        prop_assert_eq!(draw(&logits, &sampling, position).0, id);
    }

    #[test]
    fn uniform_is_in_its_range(seed: u64, choice: u32, position: u32) {
        let u = uniform(seed, choice, position);
        prop_assert!((0.0..1.0).contains(&u));
    }
}
