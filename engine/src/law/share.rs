//! Stages that compute on the same thing: two on one card, or on the cores of one host.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a stage takes of something while it computes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Use {
    /// Names it: equal for all who take of the same.
    pub what: u64,
    /// How much is taken by one who computes at full speed.
    pub weight: f64,
    /// How much there is.
    pub capacity: f64,
}

/// Stages that take of the same: while Σw of those that compute is more than there is, all slow down alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Share {
    /// C: how much there is.
    pub capacity: f64,
    /// Stages, and w, what each takes while it computes.
    pub stages: Vec<(usize, f64)>,
}

impl Share {
    /// max(Σwt/C, max_i(t_i + Σ_j max(0, (w_i + w_j)/C − 1)·t_j)), j ≠ i: seconds that work takes of which each stage has
    /// `seconds` alone, if nothing else held it up. Shares are fair: while another computes, one that always has work
    /// gets on by less, even if there is enough for the work of both. Exact for two stages.
    pub fn seconds(&self, seconds: impl Fn(usize) -> f64) -> f64 {
        let of_capacity = |(stage, weight): &(usize, f64)| (weight / self.capacity, seconds(*stage));
        let all: Vec<(f64, f64)> = self.stages.iter().map(of_capacity).collect();
        let beside = |i: usize| {
            let others = all.iter().enumerate().filter(|(j, _)| *j != i);
            all[i].1 + others.map(|(_, (share, seconds))| crowding(all[i].0, *share) * seconds).sum::<f64>()
        };
        (0..all.len()).map(beside).fold(all.iter().map(|(share, seconds)| share * seconds).sum(), f64::max)
    }

    /// How many of the stages can compute at once without being in each other's way, at least one; those that take least.
    pub fn at_full_speed(&self) -> usize {
        let mut weights: Vec<f64> = self.stages.iter().map(|(_, weight)| *weight).collect();
        weights.sort_by(f64::total_cmp);
        let mut left = self.capacity * (1.0 + 1e-9);
        let fits = |weight: &&f64| {
            left -= **weight;
            left >= 0.0
        };
        weights.iter().take_while(fits).count().max(1)
    }

    /// Whether it is about some of so many stages, in amounts that are some.
    pub fn is_of(&self, stages: usize) -> bool {
        let is_some = |amount: f64| amount.is_finite() && amount > 0.0;
        is_some(self.capacity) && self.stages.iter().all(|(stage, weight)| *stage < stages && is_some(*weight))
    }

    /// How many times longer everything takes while the stages compute for which `busy`.
    fn slowdown(&self, busy: impl Fn(usize) -> bool) -> f64 {
        let taken: f64 = self.stages.iter().filter(|(stage, _)| busy(*stage)).map(|(_, weight)| weight).sum();
        (taken / self.capacity).max(1.0)
    }
}

/// max(0, s + s' − 1): the seconds that each of two who take these shares loses for a second of the other's work, while both
/// compute.
pub fn crowding(share: f64, other: f64) -> f64 {
    (share + other - 1.0).max(0.0)
}

/// What the stages of a pipeline share, by what each uses. Amounts that are none (negative, not finite) are left out, and
/// what no two stages could be in each other's way with.
pub fn shares<'a>(stages: impl IntoIterator<Item = &'a [Use]>) -> Vec<Share> {
    let mut found: BTreeMap<u64, Share> = BTreeMap::new();
    for (stage, uses) in stages.into_iter().enumerate() {
        let valid = |amount: f64| amount.is_finite() && amount > 0.0;
        for Use { what, weight, capacity } in uses.iter().copied().filter(|u| valid(u.weight) && valid(u.capacity)) {
            let share = found.entry(what).or_insert(Share { capacity, stages: Vec::new() });
            share.capacity = share.capacity.min(capacity);
            share.stages.push((stage, weight.min(capacity)));
        }
    }
    let tight = |share: &Share| share.stages.len() > 1 && share.slowdown(|_| true) > 1.0;
    found.into_values().filter(tight).collect()
}

/// Seconds that `stage` would have taken alone for what it did in `from..to`, by what all stages did: `busy[i]` are the
/// intervals in which stage i computed, in nanoseconds, in order.
pub fn alone_seconds(stage: usize, (from, to): (u64, u64), busy: &[Vec<(u64, u64)>], shares: &[Share]) -> f64 {
    let mine: Vec<&Share> =
        shares.iter().filter(|share| share.stages.iter().any(|(other, _)| *other == stage)).collect();
    let inside = |at: &u64| (from..to).contains(at);
    let mut edges: Vec<u64> = busy.iter().flatten().flat_map(|(a, b)| [*a, *b]).filter(inside).collect();
    edges.extend([from, to]);
    edges.sort_unstable();
    let computes = |other: usize, at: u64| {
        other == stage || busy.get(other).is_some_and(|all| all.iter().any(|(a, b)| (*a..*b).contains(&at)))
    };
    let alone = |pair: &[u64]| {
        let slowdown = mine.iter().map(|share| share.slowdown(|other| computes(other, pair[0]))).fold(1.0, f64::max);
        pair[1].saturating_sub(pair[0]) as f64 * 1e-9 / slowdown
    };
    edges.windows(2).map(alone).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::law::{HopCost, Ring, StageCost};

    fn cores(weight: f64) -> Vec<Use> {
        vec![Use { what: 7, weight, capacity: 2.0 }]
    }

    #[test]
    fn stages_share_what_they_name_alike_and_could_exhaust() {
        let of = |uses: &[Vec<Use>]| shares(uses.iter().map(Vec::as_slice));
        assert_eq!(of(&[cores(1.0), cores(1.0)]), [], "there is enough for both");
        assert_eq!(of(&[cores(2.0), vec![]]), [], "one alone");
        let found = of(&[cores(1.0), vec![], cores(2.0), cores(9.0)]);
        assert_eq!(found, [Share { capacity: 2.0, stages: vec![(0, 1.0), (2, 2.0), (3, 2.0)] }]);
        for weight in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            assert_eq!(of(&[cores(weight), cores(weight), cores(1.0)]), [], "{weight}");
        }
    }

    #[test]
    fn time_in_company_is_counted_as_the_share_of_it_that_one_has() {
        let share = [Share { capacity: 2.0, stages: (0..4).map(|stage| (stage, 1.0)).collect() }];
        let all = |from, to| vec![(from, to)];
        // Two of two cores: no slower. Four: half as fast. Stage 4 has no part in it.
        let busy = [all(0, 4_000), all(0, 4_000), all(2_000, 4_000), all(2_000, 4_000), all(0, 4_000)];
        let close = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-12, "{found} for {wanted}");
        close(alone_seconds(0, (0, 4_000), &busy, &share), 3e-6);
        close(alone_seconds(2, (2_000, 4_000), &busy, &share), 1e-6);
        close(alone_seconds(4, (0, 4_000), &busy, &share), 4e-6);
        close(alone_seconds(0, (0, 4_000), &busy, &[]), 4e-6);
    }

    #[test]
    fn stages_on_fewer_cores_are_filled_by_as_many_groups_as_there_are_cores() {
        let stages = [StageCost { alpha: 0.01, beta: 0.005, attention: 0.0 }; 4];
        let share = [Share { capacity: 2.0, stages: (0..4).map(|stage| (stage, 1.0)).collect() }];
        let ring = Ring { stages: &stages, hops: &[], back: HopCost::default(), sampling: 0.0, shares: &share };
        let round = |groups| ring.round_of(8, groups);
        // Two groups: each goes round in 4(α + 4β), which is also what two cores take for 2·4α + 8·4β.
        assert!((round(2) - 0.12).abs() < 1e-12 && (round(4) - 0.16).abs() < 1e-12);
        assert!((1..=8).all(|groups| round(groups) >= round(2) - 1e-12));
        assert!((ring.pace(1.0) - 0.03).abs() < 1e-12);
    }
}
