//! Whether stages fit the memory of their devices, and what would fit when they do not. Pure but for one look at
//! `/proc/meminfo`.

use pp_engine::checkpoint::supplied::Bound;
use pp_engine::pipeline::Device;
use pp_engine::split::{Costs, Split, auto_within, join};

use crate::output::bytes;
use crate::report;

/// Share of a card's memory that stages may take: drivers and screens need some.
const SHARE: f64 = 0.95;

/// Stages that share one memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pool {
    /// What its device is called.
    pub device: String,
    /// The worker that has it; none: this machine.
    pub worker: Option<String>,
    /// Whether it is the host's memory.
    pub host: bool,
    /// Bytes that stages may take, where that is known.
    pub available: Option<u64>,
    /// The stages.
    pub stages: Vec<usize>,
}

/// What a stage needs, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Weights.
    pub weights: u64,
    /// Keys and values.
    pub kv: u64,
    /// Buffers between kernels.
    pub work: u64,
    /// What it keeps of what it hands on, always in the host's memory.
    pub log: u64,
}

impl Need {
    /// All of it, in the host's memory or in another.
    pub fn total(self, host: bool) -> u64 {
        self.weights + self.kv + self.work + if host { self.log } else { 0 }
    }
}

/// The memories that the stages' devices have. Software devices all take their host's.
pub fn pools(devices: &[Device]) -> Vec<Pool> {
    let mut pools: Vec<(String, Pool)> = Vec::new();
    for (stage, device) in devices.iter().enumerate() {
        let host = device.is_software();
        let worker = device.worker();
        let place = worker.as_ref().map_or(String::new(), |worker| format!("{worker}:"));
        let key = format!("{place}{}", if host { "host".to_owned() } else { device.id() });
        if let Some((_, pool)) = pools.iter_mut().find(|(k, _)| *k == key) {
            pool.stages.push(stage);
            continue;
        }
        let free = match device {
            Device::Remote(device) => device.worker().welcome().memory.map(|(_, free)| free),
            _ => self::host().map(|(_, free)| free),
        };
        let available = if host { free } else { device.memory_bytes().map(|bytes| (bytes as f64 * SHARE) as u64) };
        pools.push((key, Pool { device: report::place(device), worker, host, available, stages: vec![stage] }));
    }
    pools.into_iter().map(|(_, pool)| pool).collect()
}

/// The same where a pipeline that is to be replaced holds so many bytes of this machine's memory: they are free for the next.
pub fn with_held(mut pools: Vec<Pool>, held: u64) -> Vec<Pool> {
    let here = pools.iter_mut().filter(|pool| pool.worker.is_none() && pool.host);
    here.for_each(|pool| pool.available = pool.available.map(|available| available.saturating_add(held)));
    pools
}

/// Bytes of memory of this machine, and how many it can give away without swapping.
pub fn host() -> Option<(u64, u64)> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    Some((line_of(&meminfo, "MemTotal:")?, line_of(&meminfo, "MemAvailable:")?))
}

fn line_of(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The first memory that is too small for its stages.
pub fn shortage<'a>(pools: &'a [Pool], needs: &[Need]) -> Option<&'a Pool> {
    pools.iter().find(|pool| pool.available.is_some_and(|available| needed(pool, needs) > available))
}

fn needed(pool: &Pool, needs: &[Need]) -> u64 {
    pool.stages.iter().map(|stage| needs[*stage].total(pool.host)).sum()
}

/// What the advice is worked out from.
pub struct Situation<'a> {
    /// The memories.
    pub pools: &'a [Pool],
    /// Of each stage.
    pub needs: &'a [Need],
    /// Layers of each stage.
    pub counts: &'a [usize],
    /// Bytes of the model's parts.
    pub costs: &'a Costs,
    /// Values in all matrices.
    pub parameters: u64,
    /// Positions.
    pub context: usize,
    /// The largest context that would fit, if one would.
    pub context_that_fits: Option<usize>,
}

impl Situation<'_> {
    /// How much is missing where, and what would fit.
    pub fn explain(&self, pool: &Pool) -> String {
        let available = pool.available.unwrap_or(0);
        let sum = |part: fn(&Need) -> u64| bytes(pool.stages.iter().map(|stage| part(&self.needs[*stage])).sum());
        let stages = pool.stages.iter().map(|stage| self.stage(*stage)).collect::<Vec<_>>().join(", ");
        let has = match (&pool.worker, pool.host) {
            (Some(worker), true) => format!("{worker} has"),
            (None, true) => "the host has".to_owned(),
            (_, false) => "it has".to_owned(),
        };
        let log: u64 = pool.stages.iter().filter(|_| pool.host).map(|stage| self.needs[*stage].log).sum();
        let log = if log > 0 { format!(", log of what they hand on {}", bytes(log)) } else { String::new() };
        let what = format!(
            "not enough memory on {}: {stages} take{} {} (weights {}, keys and values {} at a context of {}, work {}{log}), {has} {} to give",
            pool.device,
            if pool.stages.len() == 1 { "s" } else { "" },
            bytes(needed(pool, self.needs)),
            sum(|need| need.weights),
            sum(|need| need.kv),
            self.context,
            sum(|need| need.work),
            bytes(available),
        );
        let ways: Vec<String> =
            [self.smaller_context(), self.by_memory(), self.more_stages(pool), self.fewer_bits(pool)]
                .into_iter()
                .flatten()
                .collect();
        let ways = if ways.is_empty() {
            "no split and no quantisation of this model would fit".to_owned()
        } else {
            ways.join("; or ")
        };
        format!("{what}\nwhat would fit: {ways}")
    }

    fn stage(&self, stage: usize) -> String {
        let first: usize = self.counts[..stage].iter().sum();
        format!("stage {stage} (layers {first}-{})", first + self.counts[stage] - 1)
    }

    fn smaller_context(&self) -> Option<String> {
        self.context_that_fits.map(|context| format!("--ctx {context}"))
    }

    /// Bytes of a stage with these layers, in proportion to what the present stages need.
    fn estimate(&self, counts: &[usize]) -> Vec<u64> {
        let stored: u64 = self.costs.layers.iter().sum::<u64>() + self.costs.first + self.costs.last;
        let weights: u64 = self.needs.iter().map(|need| need.weights).sum();
        let kv: u64 = self.needs.iter().map(|need| need.kv).sum();
        let work = self.needs.iter().map(|need| need.work).max().unwrap_or(0);
        let layers = self.costs.layers.len().max(1) as u64;
        let mut first = 0;
        counts
            .iter()
            .enumerate()
            .map(|(stage, count)| {
                let held = &self.costs.layers[first..first + count];
                first += count;
                let ends = if stage == 0 { self.costs.first } else { 0 }
                    + if stage + 1 == counts.len() { self.costs.last } else { 0 };
                let part = (held.iter().sum::<u64>() + ends) as f64 / stored.max(1) as f64;
                (weights as f64 * part) as u64 + kv * *count as u64 / layers + work
            })
            .collect()
    }

    /// Another split over the same devices: as even as their memory allows.
    fn by_memory(&self) -> Option<String> {
        if self.pools.len() < 2 {
            return None;
        }
        let mut room = vec![0.0; self.needs.len()];
        for pool in self.pools {
            for stage in &pool.stages {
                room[*stage] = pool.available? as f64 / pool.stages.len() as f64;
            }
        }
        let work = self.needs.iter().map(|need| need.work).max().unwrap_or(0) as f64;
        let held: u64 = self.needs.iter().map(|need| need.weights + need.kv).sum();
        let stored: u64 = self.costs.layers.iter().sum::<u64>() + self.costs.first + self.costs.last;
        let limits: Vec<u64> =
            room.iter().map(|room| ((room - work).max(0.0) * stored as f64 / held.max(1) as f64) as u64).collect();
        let counts = auto_within(self.costs, &limits).ok()?;
        let needs = self.estimate(&counts);
        let fits = |pool: &Pool| {
            pool.available.is_none_or(|room| pool.stages.iter().map(|stage| needs[*stage]).sum::<u64>() <= room)
        };
        (counts != self.counts && self.pools.iter().all(fits)).then(|| format!("--split {}", join(&counts)))
    }

    /// More devices like this one. Stages that share one memory gain nothing by being more.
    fn more_stages(&self, pool: &Pool) -> Option<String> {
        if pool.host {
            return None;
        }
        let available = pool.available?;
        (self.counts.len() + 1..=self.costs.layers.len()).find_map(|stages| {
            let counts = Split::Auto.resolve(Some(stages), self.costs).ok()?;
            let fits = self.estimate(&counts).into_iter().max()? <= available;
            fits.then(|| format!("{stages} devices of this size (--stages {stages} --split {})", join(&counts)))
        })
    }

    fn fewer_bits(&self, pool: &Pool) -> Option<String> {
        let all: u64 = self.needs.iter().map(|need| need.weights).sum();
        let weights: u64 = pool.stages.iter().map(|stage| self.needs[*stage].weights).sum();
        let rest = needed(pool, self.needs) - weights;
        let now = all as f64 * 8.0 / self.parameters.max(1) as f64;
        // Bits a value, scales included.
        [("Q8_0", 8.5), ("Q6_K", 6.6), ("Q4_K", 4.5)].into_iter().filter(|(_, bits)| *bits < 0.95 * now).find_map(
            |(name, bits)| {
                let then = (weights as f64 * bits / now) as u64;
                (then + rest <= pool.available?)
                    .then(|| format!("a {name} file of this model ({} of weights here)", bytes(then)))
            },
        )
    }
}

/// A worker's tensor cache that is too small: bytes.
#[derive(Clone, Debug)]
pub struct Room {
    /// Where it is, on the worker.
    pub folder: String,
    /// The tensors of its stages.
    pub needed: u64,
    /// What it can take.
    pub room: u64,
    /// What bounds it.
    pub bound: Bound,
}

/// How much is missing in a worker's tensor cache, and what would fit. `workers` are the stages' (none: this machine),
/// `counts` their layers.
pub fn no_room_for_tensors(
    worker: &str,
    workers: &[Option<String>],
    counts: &[usize],
    costs: &Costs,
    Room { folder, needed, room, bound }: Room,
) -> String {
    let is_its = |other: &Option<String>| other.as_deref() == Some(worker);
    let stages = workers.iter().filter(|other| is_its(other)).count().max(1) as u64;
    let limits: Vec<u64> = workers.iter().map(|other| if is_its(other) { room / stages } else { u64::MAX }).collect();
    let split = auto_within(costs, &limits).ok().filter(|found| found != counts);
    let (what, wider) = match bound {
        Bound::Cap => ("holds at most", format!("a larger --cache-size on {worker} (at least {needed})")),
        Bound::Disk => {
            let missing = bytes(needed.saturating_sub(room));
            ("has with what is free on its disk", format!("{missing} more on the disk of {worker}"))
        }
    };
    let copy = format!("a copy of the model in the models folder of {worker}");
    let ways: Vec<String> =
        split.map(|split| format!("--split {}", join(&split))).into_iter().chain([wider, copy]).collect();
    format!(
        "not enough room on {worker}: its stages' tensors take {} ({needed} bytes), and its tensor cache at {folder} {what} {} ({room} bytes)\nwhat would fit: {}",
        bytes(needed),
        bytes(room),
        ways.join("; or ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn pool(device: &str, host: bool, gigabytes: u64, stages: &[usize]) -> Pool {
        Pool { device: device.into(), worker: None, host, available: Some(gigabytes * GB), stages: stages.into() }
    }

    fn explain(pools: &[Pool], weights: &[u64], counts: &[usize], fits: Option<usize>) -> String {
        let needs: Vec<Need> =
            weights.iter().map(|w| Need { weights: w * GB, kv: GB, work: GB / 10, log: 0 }).collect();
        let costs = Costs { layers: vec![GB; 30], first: GB, last: GB };
        let situation = Situation {
            pools,
            needs: &needs,
            counts,
            costs: &costs,
            parameters: 16 * GB,
            context: 8192,
            context_that_fits: fits,
        };
        situation.explain(shortage(pools, &needs).expect("too small"))
    }

    #[test]
    fn the_message_says_how_much_and_what_would_fit() {
        let message = explain(&[pool("A", false, 24, &[0])], &[32], &[30], None);
        assert!(message.contains("stage 0 (layers 0-29) takes 33.1 GB"), "{message}");
        assert!(message.contains("it has 24.0 GB"), "{message}");
        assert!(message.contains("2 devices of this size (--stages 2 --split 15,15)"), "{message}");
        assert!(message.contains("a Q8_0 file of this model (17.0 GB of weights here)"), "{message}");
    }

    #[test]
    fn a_smaller_context_comes_first() {
        let message = explain(&[pool("A", false, 24, &[0])], &[32], &[30], Some(2048));
        assert!(message.contains("what would fit: --ctx 2048; or "), "{message}");
    }

    #[test]
    fn unequal_devices_get_a_split_by_their_memory() {
        let pools = [pool("A", false, 32, &[0]), pool("B", false, 8, &[1])];
        let message = explain(&pools, &[16, 16], &[15, 15], None);
        assert!(message.starts_with("not enough memory on B: stage 1 (layers 15-29)"), "{message}");
        assert!(message.contains("--split 24,6"), "{message}");
    }

    #[test]
    fn more_stages_do_not_help_the_host() {
        let message = explain(&[pool("llvmpipe", true, 24, &[0, 1])], &[16, 16], &[15, 15], None);
        assert!(message.contains("the host has 24.0 GB"), "{message}");
        assert!(!message.contains("devices of this size"), "{message}");
    }

    #[test]
    fn what_fits_is_no_shortage_and_unknown_memory_neither() {
        let needs = [Need { weights: GB, kv: 0, work: 0, log: 0 }];
        assert_eq!(shortage(&[pool("A", false, 1, &[0])], &needs), None);
        assert_eq!(shortage(&[Pool { available: None, ..pool("A", false, 0, &[0]) }], &needs), None);
    }

    #[test]
    fn a_cache_that_is_too_small_says_which_split_would_fit() {
        let costs = Costs { layers: vec![GB; 30], first: GB, last: GB };
        let workers = [None, Some("rig2".to_owned())];
        let room = Room { folder: "/cache".to_owned(), needed: 16 * GB, room: 8 * GB, bound: Bound::Cap };
        let message = no_room_for_tensors("rig2", &workers, &[15, 15], &costs, room.clone());
        assert!(message.starts_with("not enough room on rig2: its stages' tensors take 16.0 GB"), "{message}");
        assert!(
            message.contains("at /cache holds at most 8.0 GB") && message.contains("--split 23,7; or"),
            "{message}"
        );
        assert!(message.contains("--cache-size on rig2 (at least 16000000000)"), "{message}");
        let room = Room { room: 0, bound: Bound::Disk, ..room };
        let message = no_room_for_tensors("rig2", &workers, &[15, 15], &costs, room);
        assert!(!message.contains("--split") && message.contains("16.0 GB more on the disk of rig2"), "{message}");
    }

    #[test]
    fn mem_available_is_read() {
        let meminfo = "MemTotal: 5 kB\nMemAvailable:    3 kB\n";
        assert_eq!((line_of(meminfo, "MemTotal:"), line_of(meminfo, "MemAvailable:")), (Some(5120), Some(3072)));
        assert_eq!(line_of("", "MemTotal:"), None);
    }
}
