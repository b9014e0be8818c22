use super::*;
use proptest::prelude::*;

fn costs(layers: usize) -> Costs {
    Costs { layers: vec![10; layers], first: 0, last: 0 }
}

#[track_caller]
fn check(split: &str, stages: Option<usize>, layers: usize, expected: &str) {
    let found = match Split::parse(split).and_then(|split| split.resolve(stages, &costs(layers))) {
        Ok(counts) => join(&counts),
        Err(error) => error.to_string(),
    };
    assert_eq!(found, expected);
}

#[test]
fn what_the_user_asked_for_is_obeyed_or_refused() {
    check("9,8,8,8", None, 33, "9,8,8,8");
    check("9,8,8,8", Some(4), 33, "9,8,8,8");
    check("9:8:8:8", None, 33, "9,8,8,8");
    check("1:1", None, 5, "3,2");
    check("1000:1:1", None, 4, "2,1,1");
    check("auto", None, 30, "30");
    check("auto", Some(4), 30, "8,8,7,7");
    check("bytes", Some(4), 30, "8,8,7,7");
    check(" bytes ", None, 30, "30");
    check("8, 8, 7, 7", None, 30, "8,8,7,7");
    check("9,8,8,8", None, 30, "--split: 9+8+8+8 = 33 ≠ 30, the layers of this model; a split that fits: 8,8,7,7");
    check("0,30", None, 30, "--split 0,30: every stage needs at least one layer");
    check("-1,31", None, 30, "--split -1,31: every stage needs at least one layer");
    check("a,b", None, 30, "--split a,b: expected layer counts (9,8,8,8), ratios (9:8:8:8), auto or bytes");
    check("", None, 30, "--split : expected layer counts (9,8,8,8), ratios (9:8:8:8), auto or bytes");
    check("inf:1", None, 30, "--split inf:1: expected layer counts (9,8,8,8), ratios (9:8:8:8), auto or bytes");
    check(
        "15,15",
        Some(3),
        30,
        "--stages 3 and --split 15,15 disagree: the split names 2 stages; give one of them, or make them agree",
    );
    check("auto", Some(31), 30, "--stages 31: this model has 30 layers, so at most 30 stages");
    check("auto", Some(0), 30, "--stages 0: a pipeline has at least one stage");
    check(
        "9223372036854775807,9223372036854775807,9223372036854775807",
        None,
        30,
        "--split: 9223372036854775807+9223372036854775807+9223372036854775807 = 18446744073709551615 ≠ 30, the layers of this model; a split that fits: 10,10,10",
    );
}

#[test]
fn embedding_and_head_weigh_on_the_ends() {
    let heavy = Costs { layers: vec![10; 12], first: 30, last: 30 };
    let counts = Split::Auto.resolve(Some(4), &heavy).unwrap();
    assert!(counts[0] < counts[1] && counts[3] < counts[2], "{counts:?}");
}

/// The smallest largest stage of every contiguous division within limits; none where there is no such division.
fn brute_force(costs: &Costs, limits: &[u64]) -> Option<u64> {
    fn go(costs: &Costs, limits: &[u64], stage: usize, from: usize) -> Option<u64> {
        let stages = limits.len();
        let layers = costs.layers.len();
        let bytes = |to: usize| {
            costs.layers[from..to].iter().sum::<u64>()
                + if stage == 0 { costs.first } else { 0 }
                + if stage + 1 == stages { costs.last } else { 0 }
        };
        let within = |to: usize| Some(bytes(to)).filter(|bytes| *bytes <= limits[stage]);
        if stage + 1 == stages {
            return within(layers);
        }
        (from + 1..=layers - (stages - 1 - stage))
            .filter_map(|to| Some(within(to)?.max(go(costs, limits, stage + 1, to)?)))
            .min()
    }
    go(costs, limits, 0, 0)
}

proptest! {
    /// T7 without memory limits.
    #[test]
    fn auto_is_as_good_as_brute_force(layers in prop::collection::vec(1u64..100, 4..12), first in 0u64..300, last in 0u64..300, stages in 1usize..=4) {
        let costs = Costs { layers, first, last };
        let counts = Split::Auto.resolve(Some(stages), &costs).unwrap();
        prop_assert_eq!(counts.iter().sum::<usize>(), costs.layers.len());
        prop_assert!(counts.iter().all(|count| *count > 0));
        let mut from = 0;
        let mut largest = 0;
        for (stage, count) in counts.iter().enumerate() {
            let ends = if stage == 0 { first } else { 0 } + if stage + 1 == stages { last } else { 0 };
            largest = largest.max(costs.layers[from..from + count].iter().sum::<u64>() + ends);
            from += count;
        }
        prop_assert_eq!(Some(largest), brute_force(&costs, &vec![u64::MAX; stages]));
    }

    /// T7: within the memory of each stage, the best division or none.
    #[test]
    fn auto_within_limits_is_as_good_as_brute_force(
        layers in prop::collection::vec(1u64..100, 4..12),
        first in 0u64..300,
        last in 0u64..300,
        limits in prop::collection::vec(50u64..700, 1..=4),
    ) {
        let costs = Costs { layers, first, last };
        let expected = brute_force(&costs, &limits);
        match auto_within(&costs, &limits) {
            Ok(counts) => {
                let (mut from, mut largest) = (0, 0);
                for (stage, count) in counts.iter().enumerate() {
                    let ends = if stage == 0 { first } else { 0 } + if stage + 1 == limits.len() { last } else { 0 };
                    let bytes = costs.layers[from..from + count].iter().sum::<u64>() + ends;
                    prop_assert!(*count > 0 && bytes <= limits[stage]);
                    largest = largest.max(bytes);
                    from += count;
                }
                prop_assert_eq!((from, Some(largest)), (costs.layers.len(), expected));
            }
            Err(error) => {
                prop_assert_eq!(expected, None);
                prop_assert!(error.to_string().contains("no division of"), "{}", error);
            }
        }
    }

    /// T17 at plan time.
    #[test]
    fn ratios_cover_every_layer_once(ratios in prop::collection::vec(0.01f64..100.0, 1..6), layers in 6usize..100) {
        let counts = apportion(&ratios, layers);
        prop_assert_eq!(counts.iter().sum::<usize>(), layers);
        prop_assert!(counts.iter().all(|count| *count > 0));
    }

    #[test]
    fn any_text_is_a_split_or_an_error(text in ".*") {
        let _ = Split::parse(&text);
    }
}

/// T17: stages that leave a layer out, hold one twice or stand in another order are refused.
#[test]
fn stages_hold_every_layer_once() {
    use crate::layout::StageSpec;
    let good = StageSpec::pipeline(&[9, 8, 8, 8]);
    assert!(StageSpec::check_cover(&good, 33).is_ok());
    let refused = |change: fn(&mut Vec<StageSpec>), layers: usize| {
        let mut specs = good.clone();
        change(&mut specs);
        StageSpec::check_cover(&specs, layers).unwrap_err().to_string()
    };
    assert!(refused(|_| {}, 34).contains("layer 33 of 34 is next"));
    assert!(refused(|_| {}, 32).contains("of 32"));
    assert!(refused(|s| s[1].layers = 10..17, 33).contains("stage 1 holds layers 10..17 where layer 9"));
    assert!(refused(|s| s[1].layers = 8..17, 33).contains("stage 1"));
    assert!(refused(|s| s.swap(1, 2), 33).contains("stage 1"));
    assert!(refused(|s| s[3].layers = 25..25, 33).contains("stage 3"));
}
