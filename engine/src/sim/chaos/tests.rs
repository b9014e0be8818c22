//! Lives by their seeds, and what happened in them.

use std::io::Write;

use super::*;

/// What happened in many lives.
#[derive(Debug, Default)]
struct Seen {
    lives: u64,
    wakes: u64,
    seconds: u64,
    losses: std::collections::BTreeMap<&'static str, u64>,
    opened: u64,
    restored: u64,
    logged: u64,
    recuts: u64,
    abandoned: u64,
    dropped: u64,
    redials: u64,
    refusals: u64,
    strays: u64,
    ends: std::collections::BTreeMap<String, u64>,
}

/// One life, by its seed; a failure names it.
fn live(seed: u64, seen: &mut Seen) -> u64 {
    let life = std::panic::AssertUnwindSafe(|| {
        let mut world = World::new(seed);
        world.run();
        world.check();
        world.end();
        world
    });
    let world = match std::panic::catch_unwind(life) {
        Ok(world) => world,
        Err(panic) => {
            let text = crate::worker::panic_message(panic.as_ref());
            panic!("seed {seed} (PP_SOAK=1 PP_SOAK_FROM={seed}): {text}");
        }
    };
    let World { head, network, workers, .. } = &world;
    seen.lives += 1;
    seen.wakes += world.wakes;
    seen.seconds += network.now / 1_000_000;
    head.losses.iter().for_each(|(why, count)| *seen.losses.entry(why).or_default() += count);
    seen.opened += head.opened;
    seen.restored += head.restored;
    seen.recuts += head.recuts;
    seen.abandoned += head.abandoned;
    seen.redials += network.redials;
    seen.refusals += network.refusals;
    seen.strays += network.strays;
    for worker in workers {
        seen.dropped += worker.station.dropped;
        seen.logged += worker.station.logged;
    }
    for asked in &head.asked {
        *seen.ends.entry(format!("{:?}", asked.end)).or_default() += 1;
    }
    world.print
}

/// Lives of these seeds; of many, everything has happened that may.
fn lives(seeds: std::ops::Range<u64>) -> Seen {
    let mut seen = Seen::default();
    seeds.for_each(|seed| {
        live(seed, &mut seen);
    });
    if seen.lives >= 500 {
        let Seen { losses, restored, logged, recuts, abandoned, dropped, redials, refusals, strays, ends, .. } = &seen;
        assert!(losses.len() > 4 && ends.len() > 5, "{losses:?}, {ends:?}");
        let counts = [restored, logged, recuts, abandoned, dropped, redials, refusals, strays];
        assert!(counts.iter().all(|count| **count > 0), "{counts:?}");
    }
    seen
}

#[test]
fn chaos_changes_no_token_and_leaves_nothing() {
    lives(0..1000);
}

#[test]
fn a_seed_is_a_life() {
    for seed in 0..20 {
        let print = || live(seed, &mut Seen::default());
        assert_eq!(print(), print(), "seed {seed}");
    }
}

/// PP_SOAK seeds (none unless asked for), from PP_SOAK_FROM.
#[test]
fn chaos_as_long_as_asked() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let (from, count) = (number("PP_SOAK_FROM"), number("PP_SOAK"));
    let seen = lives(from..from + count);
    if count > 0 {
        writeln!(std::io::stdout(), "{seen:#?}").unwrap();
    }
}
