//! Of many answers the figures that servers are compared by.

use serde::Serialize;

use super::client::Sample;
use super::{Come, Failures};
use crate::output::{Report, table};
use crate::report::Percentiles;

/// What is good; milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Goal {
    /// To the first token.
    pub ttft: Option<f64>,
    /// A token after it.
    pub tpot: Option<f64>,
    /// The whole answer.
    pub e2e: Option<f64>,
}

impl Goal {
    fn is_set(&self) -> bool {
        self.ttft.or(self.tpot).or(self.e2e).is_some()
    }

    fn is_met(&self, sample: &Sample) -> bool {
        let within =
            |goal: Option<f64>, seconds: Option<f64>| goal.is_none_or(|ms| seconds.is_none_or(|s| s * 1e3 <= ms));
        sample.outcome.is_ok()
            && within(self.ttft, sample.first.or(Some(sample.end)))
            && within(self.tpot, sample.per_token())
            && within(self.e2e, Some(sample.end))
    }
}

/// Failures of a kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failed {
    pub count: usize,
    /// What the first of them said.
    pub example: String,
}

/// A row: so many at once, or so many a second. Times are seconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Level {
    pub concurrency: Option<usize>,
    /// Requests a second that were sent.
    pub rate: Option<f64>,
    pub requests: usize,
    pub ok: usize,
    /// From the first request to the last answer.
    pub seconds: f64,
    /// Answered.
    pub requests_per_s: f64,
    /// As the server counts; null where it does not.
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: u64,
    /// Whether tokens are as the server counts, not pieces of its stream.
    pub counted_by_server: bool,
    pub input_tokens_per_s: Option<f64>,
    pub output_tokens_per_s: f64,
    /// To the first token, from when the request was due.
    pub ttft_seconds: Option<Percentiles>,
    /// Of an answer: the mean time a token after the first.
    pub tpot_seconds: Option<Percentiles>,
    /// Between two pieces of a stream.
    pub itl_seconds: Option<Percentiles>,
    /// The whole answer.
    pub e2e_seconds: Option<Percentiles>,
    /// Answers a second that are good, and their share of all requests; null where no goal is set.
    pub goodput_per_s: Option<f64>,
    pub good_share: Option<f64>,
    pub errors: Failures,
}

impl Level {
    /// Of all requests of a row.
    pub fn of(come: Come, samples: &[Sample], seconds: f64, goal: Goal) -> Level {
        let ok: Vec<&Sample> = samples.iter().filter(|sample| sample.outcome.is_ok()).collect();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let counted_by_server = !ok.is_empty() && ok.iter().all(|sample| sample.usage.is_some());
        let prompt_tokens: Option<u64> =
            counted_by_server.then(|| ok.iter().filter_map(|sample| sample.usage).map(|usage| usage.0).sum());
        let completion_tokens: u64 = ok.iter().map(|sample| sample.tokens()).sum();
        let good = samples.iter().filter(|sample| goal.is_met(sample)).count() as f64;
        let mut errors = Failures::new();
        for failure in samples.iter().filter_map(|sample| sample.outcome.as_ref().err()) {
            let first = || Failed { count: 0, example: failure.message.clone() };
            errors.entry(failure.kind.clone()).or_insert_with(first).count += 1;
        }
        Level {
            concurrency: if let Come::AtOnce(count) = come { Some(count) } else { None },
            rate: if let Come::Rate(rate) = come { Some(rate) } else { None },
            requests: samples.len(),
            ok: ok.len(),
            seconds,
            requests_per_s: per_second(ok.len() as f64),
            prompt_tokens,
            completion_tokens,
            counted_by_server,
            input_tokens_per_s: prompt_tokens.map(|tokens| per_second(tokens as f64)),
            output_tokens_per_s: per_second(completion_tokens as f64),
            ttft_seconds: Percentiles::of(ok.iter().filter_map(|sample| sample.first)),
            tpot_seconds: Percentiles::of(ok.iter().filter_map(|sample| sample.per_token())),
            itl_seconds: Percentiles::of(ok.iter().flat_map(|sample| sample.gaps.iter().copied())),
            e2e_seconds: Percentiles::of(ok.iter().map(|sample| sample.end)),
            goodput_per_s: goal.is_set().then(|| per_second(good)),
            good_share: goal.is_set().then(|| good / samples.len().max(1) as f64),
            errors,
        }
    }

    /// `8`, `2.5/s`
    pub fn name(&self) -> String {
        match (self.concurrency, self.rate) {
            (Some(count), _) => count.to_string(),
            (_, Some(rate)) => format!("{rate}/s"),
            _ => String::new(),
        }
    }
}

/// A server, measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadReport {
    pub url: String,
    pub model: String,
    /// Words of a prompt, and tokens of an answer at most.
    pub prompt_tokens: String,
    pub gen_tokens: String,
    pub seed: u64,
    /// What is good, milliseconds.
    pub slo: Goal,
    pub levels: Vec<Level>,
}

impl LoadReport {
    /// What the first failure said.
    pub fn first_error(&self) -> Option<&str> {
        let failed = self.levels.iter().flat_map(|level| level.errors.values()).next();
        failed.map(|failed| failed.example.as_str())
    }
}

impl Report for LoadReport {
    fn text(&self) -> String {
        let by_rate = self.levels.iter().any(|level| level.rate.is_some());
        let ms = |p: &Option<Percentiles>| {
            p.map_or("-".to_owned(), |p| [p.p50, p.p90, p.p99].map(|s| format!("{:.1}", s * 1e3)).join("/"))
        };
        let rows: Vec<Vec<String>> = self
            .levels
            .iter()
            .map(|level| {
                let mut row = vec![
                    level.name(),
                    format!("{}/{}", level.ok, level.requests),
                    format!("{:.2}", level.requests_per_s),
                    level.input_tokens_per_s.map_or("-".to_owned(), |rate| format!("{rate:.1}")),
                    format!("{:.1}", level.output_tokens_per_s),
                    ms(&level.ttft_seconds),
                    ms(&level.tpot_seconds),
                    ms(&level.itl_seconds),
                    ms(&level.e2e_seconds),
                ];
                if let (Some(rate), Some(share)) = (level.goodput_per_s, level.good_share) {
                    row.push(format!("{rate:.2} ({:.0} %)", 100.0 * share));
                }
                row
            })
            .collect();
        let mut header = vec![
            if by_rate { "sent" } else { "at once" },
            "answered",
            "requests/s",
            "in tokens/s",
            "out tokens/s",
            "first token ms",
            "per token ms",
            "between pieces ms",
            "whole ms",
        ];
        if self.slo.is_set() {
            header.push("good/s");
        }
        let mut text = format!(
            "{}   {}\nprompt {} words, answer up to {} tokens; times: p50/p90/p99\n\n{}",
            self.url,
            crate::output::printable(&self.model),
            self.prompt_tokens,
            self.gen_tokens,
            table(0, &header, &rows)
        );
        if self.levels.iter().any(|level| level.ok > 0 && !level.counted_by_server) {
            text.push_str("\n\nThe server does not count tokens: pieces of its streams are counted.");
        }
        for level in &self.levels {
            for (kind, Failed { count, example }) in &level.errors {
                text.push_str(&format!("\n{}: {count} × {kind}: {example}", level.name()));
            }
        }
        text
    }
}
