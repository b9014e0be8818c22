//! What is asked, and when: a function of a seed.

use std::time::Duration;

use pp_engine::random::{Random, mix};

use crate::args::Lengths;

/// Short words of daily English, most of them one token of any vocabulary with the space before them.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "that", "was", "his", "he", "it", "with", "is", "for", "as", "had", "you", "not",
    "be", "her", "on", "at", "by", "which", "have", "or", "from", "this", "him", "but", "all", "she", "they", "were",
    "my", "are", "me", "one", "their", "so", "an", "said", "them", "we", "who", "would", "been", "will", "no", "when",
    "there", "if", "more", "out", "up", "into", "do", "any", "your", "what", "has", "man", "could", "other", "than",
];

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Made-up words.
    pub prompt: String,
    /// Of the answer.
    pub max_tokens: usize,
}

/// Requests, by their number.
#[derive(Clone, Copy, Debug)]
pub struct Asks {
    pub prompt: Lengths,
    pub answer: Lengths,
    pub seed: u64,
}

impl Asks {
    /// The request of a number. No two begin alike, so that no server finds one's beginning in its cache.
    pub fn at(&self, number: usize) -> Ask {
        let mut random = Random::new(mix(self.seed) ^ mix(number as u64));
        let (words, max_tokens) = (draw(self.prompt, &mut random), draw(self.answer, &mut random));
        let word = |_| WORDS[random.between(0, WORDS.len() - 1)];
        let prompt = (0..words).map(word).collect::<Vec<_>>().join(" ");
        Ask { prompt, max_tokens }
    }

    /// When requests come that are as likely at one moment as at any other.
    pub fn arrivals(&self, rate: f64) -> impl Iterator<Item = Duration> {
        let mut random = Random::new(!self.seed);
        let mut at = 0.0;
        std::iter::from_fn(move || {
            at += random.exponential(1.0 / rate);
            Some(Duration::from_secs_f64(at))
        })
    }
}

/// Uniform in the logarithm.
fn draw(lengths: Lengths, random: &mut Random) -> usize {
    let (least, most) = (lengths.least as f64, lengths.most as f64);
    let drawn = (least * (most / least).powf(random.unit())).round() as usize;
    drawn.clamp(lengths.least, lengths.most)
}
