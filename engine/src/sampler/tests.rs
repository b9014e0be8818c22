use super::*;
use proptest::prelude::*;

/// What the tail would return for a row.
fn output(row: &[f32], sampling: &Sampling, whole_row: bool) -> Output {
    let request = sampling.request(0);
    let lse = |scale: f64| {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|l| (f64::from(l - top) * scale).exp()).sum();
        (f64::from(top) * scale + sum.ln()) as f32
    };
    let mut best: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    best.truncate(request.top_k as usize);
    Output {
        lse: lse(1.0),
        lse_scaled: lse(f64::from(request.inverse_temperature)),
        target_logit: row[0],
        best,
        row: whole_row.then(|| row.to_vec()),
    }
}

fn draw(row: &[f32], sampling: &Sampling, position: u32) -> (u32, bool) {
    let history = History::default();
    match sampling.draw(&output(row, sampling, sampling.has_penalties()), row.len(), history, 0, position) {
        Draw::Token(id) => (id, false),
        Draw::NeedsRow => match sampling.draw(&output(row, sampling, true), row.len(), history, 0, position) {
            Draw::Token(id) => (id, true),
            Draw::NeedsRow => panic!("a whole row decides"),
        },
    }
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
            let whole = sampling.draw_row(row.clone(), History::default(), 0, position);
            assert_eq!(id, whole, "{sampling:?} at {position}");
            fetched += u32::from(needed_row);
        }
    }
    assert!(fetched > 0, "some draws lie beyond the candidates");
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
fn penalties_follow_their_definitions() {
    let sampling =
        Sampling { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 0.25, ..Sampling::default() };
    let mut logits = vec![4.0, -1.0, 3.0, 1.0];
    sampling.penalise(&mut logits, History { prompt: &[0, 1], answer: &[2, 2] });
    assert_eq!(logits, [2.0, -2.0, 1.5 - 0.5 - 0.5, 1.0]);
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
