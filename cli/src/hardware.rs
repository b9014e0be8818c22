//! Cards and links that are not here, by file.

use std::path::Path;

use anyhow::Result;
use pp_engine::Profile;
use pp_engine::backend::DeviceLimits;
use pp_engine::calibrate::Shape;
use pp_engine::calibrate::estimate::{BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, Card, estimate};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::law::HopCost;
use pp_engine::layout::StageOptions;
use pp_engine::planner::{Device, Problem};
use serde::Deserialize;
use toml::Spanned;

use crate::errors::usage;
use crate::measured::{SAMPLING, parts};
use crate::output::printable;

/// Longest file that is read.
const BYTES_MAX: u64 = 1 << 20;
/// Cards at most.
const CARDS_MAX: usize = 256;
/// Share of a card's memory that stages may take.
const SHARE: f64 = 0.95;
/// Limits that all drivers of cards keep.
const LIMITS: DeviceLimits = DeviceLimits { binding_bytes: (1 << 31) - 4, buffer_bytes: (1 << 31) - 4 };
/// Where [link] is not there: a PCIe slot, through the host's memory.
const LINK: (f64, f64) = (30e-6, 10e9);
/// Where [network] is not there: 10 Gbit/s.
const NETWORK: (f64, f64) = (200e-6, 1.25e9);

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    card: Vec<CardEntry>,
    link: Option<Link>,
    network: Option<Network>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CardEntry {
    name: String,
    count: Option<Spanned<i64>>,
    memory_gb: Spanned<f64>,
    bandwidth_gb_s: Spanned<f64>,
    f32_tflops: Spanned<f64>,
    int8_tops: Option<Spanned<f64>>,
    host: Option<String>,
    bandwidth_efficiency: Option<Spanned<f64>>,
    compute_efficiency: Option<Spanned<f64>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    latency_us: Spanned<f64>,
    bandwidth_gb_s: Spanned<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Network {
    latency_us: Spanned<f64>,
    bandwidth_gbit_s: Spanned<f64>,
}

/// A card that is not here.
#[derive(Clone, Debug, PartialEq)]
struct Entry {
    name: String,
    host: String,
    memory: u64,
    card: Card,
}

/// Cards, and (seconds, bytes a second) between those of one host and of two.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    cards: Vec<Entry>,
    link: (f64, f64),
    network: (f64, f64),
}

impl Hardware {
    /// Reads a file.
    ///
    /// # Errors
    /// When it cannot be read, or says something else: names the line and the field.
    pub fn read(path: &Path) -> Result<Hardware> {
        let wrong = |error: &dyn std::fmt::Display| usage(format!("--hardware {}: {error}", path.display()));
        let bytes = std::fs::metadata(path).map_err(|error| wrong(&error))?.len();
        if bytes > BYTES_MAX {
            return Err(wrong(&format!("{bytes} bytes are too many for such a file")));
        }
        let text = std::fs::read_to_string(path).map_err(|error| wrong(&error))?;
        Hardware::parse(&text).map_err(|error| wrong(&error))
    }

    fn parse(text: &str) -> Result<Hardware, String> {
        let line_of = |at: usize| 1 + text[..at.min(text.len())].matches('\n').count();
        let file: File = toml::from_str(text).map_err(|error| match error.span() {
            Some(span) => {
                let line = line_of(span.start);
                let said: String = text.lines().nth(line - 1).unwrap_or_default().trim().chars().take(60).collect();
                format!("line {line} ({}): {}", printable(&said), error.message())
            }
            None => error.message().to_owned(),
        })?;
        let within = |field: &str, value: &Spanned<f64>, least: f64, most: f64| {
            let line = line_of(value.span().start);
            let found = *value.get_ref();
            if (least..=most).contains(&found) {
                return Ok(found);
            }
            Err(format!("line {line}: {field} = {found}: expected {least} to {most}"))
        };
        let share = |field: &str, value: &Option<Spanned<f64>>, default: f64| {
            value.as_ref().map_or(Ok(default), |value| within(field, value, 0.01, 1.0))
        };
        let mut cards = Vec::new();
        for entry in &file.card {
            let f32_flops = within("f32_tflops", &entry.f32_tflops, 1e-3, 1e6)? * 1e12;
            let int8 = entry.int8_tops.as_ref();
            let card = Card {
                bytes_per_s: within("bandwidth_gb_s", &entry.bandwidth_gb_s, 0.1, 1e6)? * 1e9,
                f32_flops,
                int8_ops: int8
                    .map_or(Ok(4.0 * f32_flops), |tops| Ok(1e12 * within("int8_tops", tops, 1e-3, 1e6)?))
                    .map_err(|error: String| error)?,
                bandwidth_efficiency: share("bandwidth_efficiency", &entry.bandwidth_efficiency, BANDWIDTH_EFFICIENCY)?,
                compute_efficiency: share("compute_efficiency", &entry.compute_efficiency, COMPUTE_EFFICIENCY)?,
            };
            let memory = (within("memory_gb", &entry.memory_gb, 0.1, 1e5)? * 1e9 * SHARE) as u64;
            let count = match &entry.count {
                None => 1,
                Some(count) => {
                    let line = line_of(count.span().start);
                    let found = *count.get_ref();
                    usize::try_from(found)
                        .ok()
                        .filter(|count| (1..=CARDS_MAX).contains(count))
                        .ok_or_else(|| format!("line {line}: count = {found}: expected 1 to {CARDS_MAX}"))?
                }
            };
            for index in 0..count {
                let name = if count > 1 { format!("{} #{}", entry.name, index + 1) } else { entry.name.clone() };
                cards.push(Entry { name, host: entry.host.clone().unwrap_or_default(), memory, card });
            }
        }
        if cards.is_empty() || cards.len() > CARDS_MAX {
            return Err(format!("{} cards: expected 1 to {CARDS_MAX}, each as [[card]]", cards.len()));
        }
        let link = file.link.as_ref().map_or(Ok(LINK), |link| {
            let latency = within("latency_us", &link.latency_us, 0.0, 1e7)?;
            Ok::<_, String>((latency * 1e-6, within("bandwidth_gb_s", &link.bandwidth_gb_s, 1e-4, 1e5)? * 1e9))
        })?;
        let network = file.network.as_ref().map_or(Ok(NETWORK), |network| {
            let latency = within("latency_us", &network.latency_us, 0.0, 1e7)?;
            let rate = within("bandwidth_gbit_s", &network.bandwidth_gbit_s, 1e-3, 1e5)?;
            Ok::<_, String>((latency * 1e-6, rate * 1e9 / 8.0))
        })?;
        Ok(Hardware { cards, link, network })
    }

    /// Names of the cards.
    pub fn names(&self) -> Vec<String> {
        self.cards.iter().map(|entry| entry.name.clone()).collect()
    }

    /// What there is to plan with. The head is on the host of the first card.
    ///
    /// # Errors
    /// When the model cannot be laid out.
    pub fn problem(&self, checkpoint: &Checkpoint, options: &StageOptions) -> Result<Problem> {
        let (shape, kinds) = Shape::of(checkpoint, options.activations, options.kv);
        let memory = parts(checkpoint, options, &Profile::CARD, LIMITS)?;
        let device = |(index, entry): (usize, &Entry)| {
            let found = estimate(&shape, &entry.card);
            Device {
                name: entry.name.clone(),
                place: index,
                layers: found.layers(&kinds),
                fixed: found.fixed,
                first: found.first,
                last: found.last,
                memory: memory.clone(),
                pool: index,
                compute: None,
            }
        };
        let token = options.wire.bytes(1, checkpoint.config.hidden) as f64;
        let hop = |from: &Entry, to: &Entry| {
            let (latency, rate) = if from.host == to.host { self.link } else { self.network };
            HopCost { latency, seconds_per_token: token / rate }
        };
        Ok(Problem {
            devices: self.cards.iter().enumerate().map(device).collect(),
            pools: self.cards.iter().map(|entry| Some(entry.memory)).collect(),
            hops: self.cards.iter().map(|from| self.cards.iter().map(|to| hop(from, to)).collect()).collect(),
            sampling: SAMPLING,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "\
[[card]]
name = 'big'
count = 2
memory_gb = 24
bandwidth_gb_s = 936.0
f32_tflops = 35.6
host = 'rig1'

[[card]]
name = 'small'
memory_gb = 8
bandwidth_gb_s = 256
f32_tflops = 6.5
int8_tops = 26
host = 'rig2'

[network]
latency_us = 100
bandwidth_gbit_s = 2.5
";

    #[test]
    fn cards_and_links_are_read() {
        let found = Hardware::parse(EXAMPLE).unwrap();
        assert_eq!(found.names(), ["big #1", "big #2", "small"]);
        assert_eq!(found.cards[2].memory, 7_600_000_000);
        assert_eq!((found.cards[0].card.int8_ops, found.cards[2].card.int8_ops), (4.0 * 35.6e12, 26e12));
        assert_eq!((found.link, found.network), (LINK, (100.0 * 1e-6, 2.5e9 / 8.0)));
    }

    #[test]
    fn errors_name_the_line_and_the_field() {
        let check = |from: &str, to: &str, wanted: &[&str]| {
            assert!(EXAMPLE.contains(from), "{from}");
            let error = Hardware::parse(&EXAMPLE.replacen(from, to, 1)).unwrap_err();
            assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{error}");
        };
        check("memory_gb = 24", "memory_gb = 0", &["line 4", "memory_gb = 0", "expected 0.1"]);
        check("memory_gb = 8", "memory_gb = nan", &["line 11", "memory_gb"]);
        check("count = 2", "count = 0", &["line 3", "count = 0"]);
        check("count = 2", "count = 1000000000000", &["line 3", "expected 1 to 256"]);
        check("f32_tflops = 35.6\n", "", &["f32_tflops"]);
        check("host = 'rig1'", "hosts = 'rig1'", &["line 7", "hosts"]);
        check("latency_us = 100", "latency_us = -1", &["line 18", "latency_us = -1"]);
        check("latency_us = 100", "latency_us = 'x'", &["line 18", "latency_us"]);
        check(
            "int8_tops = 26",
            "int8_tops = 26\ncompute_efficiency = 2",
            &["line 15", "compute_efficiency = 2", "0.01 to 1"],
        );
        assert!(Hardware::parse("").unwrap_err().contains("card"));
        assert!(Hardware::parse("card = []").unwrap_err().contains("0 cards"));
    }
}
