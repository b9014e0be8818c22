//! From logits to a token. Pure: randomness is a function of (seed, choice, position), so a replay draws the same.
//!
//! Order: penalties, temperature, min-p, top-k, top-p. The tail of the pipeline returns the best candidates with the
//! log-sum-exp of all logits; a draw that they cannot decide asks for the whole row, so the result is exact.

use std::collections::HashMap;

use pp_shaders::profile::TOP_K;

use crate::message::{Output, OutputRequest};

/// How a request wants its tokens chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 always takes the best.
    pub temperature: f32,
    /// Keep the `top_k` best; 0 keeps all.
    pub top_k: u32,
    /// Keep the best until their probabilities reach this; 1 keeps all.
    pub top_p: f32,
    /// Keep what is at least this likely, relative to the best; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt and answer (Keskar et al. 2019,
    /// arXiv:1909.05858); 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens in the answer.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, for each time they occur.
    pub frequency_penalty: f32,
    /// What the randomness starts from.
    pub seed: u64,
    /// Best candidates wanted beside the token, for log-probabilities.
    pub candidates: u32,
}

/// Below this a temperature is taken for 0: logits divided by it would not be finite.
const TEMPERATURE_MIN: f32 = 1e-5;

impl Default for Sampling {
    /// Greedy.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            candidates: 0,
        }
    }
}

/// The tokens that penalties look at.
#[derive(Clone, Copy, Debug, Default)]
pub struct History<'a> {
    /// Tokens of the prompt.
    pub prompt: &'a [u32],
    /// Tokens of the answer so far.
    pub answer: &'a [u32],
}

/// What came of a draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Draw {
    /// The token.
    Token(u32),
    /// The candidates do not decide: fetch the whole row and draw again.
    NeedsRow,
}

impl Sampling {
    /// What to ask of the tail for row `row`.
    pub fn request(&self, row: u32) -> OutputRequest {
        let top_k = if self.is_greedy() { 1 } else { TOP_K };
        OutputRequest {
            row,
            target: 0,
            top_k: top_k.max(self.candidates).min(TOP_K),
            inverse_temperature: if self.is_greedy() { 1.0 } else { 1.0 / self.temperature },
            whole_row: self.has_penalties(),
        }
    }

    fn is_greedy(&self) -> bool {
        self.temperature < TEMPERATURE_MIN
    }

    fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Chooses the token at `position` of choice `choice`.
    pub fn draw(&self, output: &Output, vocab: usize, history: History<'_>, choice: u32, position: u32) -> Draw {
        if let Some(row) = &output.row {
            return Draw::Token(self.draw_row(row.clone(), history, choice, position));
        }
        if self.is_greedy() {
            return output.best.first().map_or(Draw::NeedsRow, |(id, _)| Draw::Token(*id));
        }
        let inverse = 1.0 / f64::from(self.temperature);
        let weights = output
            .best
            .iter()
            .map(|(id, logit)| (*id, (f64::from(*logit) * inverse - f64::from(output.lse_scaled)).exp()));
        self.draw_sorted(&weights.collect::<Vec<_>>(), output.best.len() >= vocab, uniform(self.seed, choice, position))
    }

    /// Chooses from all logits.
    fn draw_row(&self, mut logits: Vec<f32>, history: History<'_>, choice: u32, position: u32) -> u32 {
        self.penalise(&mut logits, history);
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        if self.is_greedy() {
            return order[0];
        }
        let inverse = 1.0 / f64::from(self.temperature);
        let top = f64::from(logits[order[0] as usize]) * inverse;
        let sum: f64 = order.iter().map(|id| (f64::from(logits[*id as usize]) * inverse - top).exp()).sum();
        let weights = order.iter().map(|id| (*id, (f64::from(logits[*id as usize]) * inverse - top).exp() / sum));
        match self.draw_sorted(&weights.collect::<Vec<_>>(), true, uniform(self.seed, choice, position)) {
            Draw::Token(id) => id,
            Draw::NeedsRow => order[0],
        }
    }

    fn penalise(&self, logits: &mut [f32], history: History<'_>) {
        let mut answered: HashMap<u32, u32> = HashMap::new();
        history.answer.iter().for_each(|id| *answered.entry(*id).or_default() += 1);
        let mut seen: Vec<u32> = history.prompt.iter().chain(history.answer).copied().collect();
        seen.sort_unstable();
        seen.dedup();
        for id in seen {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = if *logit > 0.0 { *logit / self.repetition_penalty } else { *logit * self.repetition_penalty };
            }
        }
        for (id, count) in answered {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit -= self.presence_penalty + self.frequency_penalty * count as f32;
            }
        }
    }

    /// Chooses from (id, probability) by falling probability. `complete`: no other token exists.
    fn draw_sorted(&self, candidates: &[(u32, f64)], complete: bool, uniform: f64) -> Draw {
        let Some((_, best)) = candidates.first() else { return Draw::NeedsRow };
        let mut kept = candidates.len();
        // Whether what lies beyond the candidates would have been cut off as well.
        let mut closed = complete;
        if self.min_p > 0.0 {
            kept = candidates.iter().take_while(|(_, p)| *p >= best * f64::from(self.min_p)).count();
            closed |= kept < candidates.len();
        }
        if self.top_k > 0 && (self.top_k as usize) <= kept {
            kept = self.top_k as usize;
            closed = true;
        }
        // The mass that top-p and the draw refer to: of what is kept, or 1 when nothing was cut.
        let mass = if closed { candidates[..kept].iter().map(|(_, p)| p).sum() } else { 1.0 };
        if !closed && (self.min_p > 0.0 || self.top_k > 0) {
            return Draw::NeedsRow;
        }
        if !(mass > 0.0 && mass.is_finite()) {
            return Draw::NeedsRow;
        }
        let mut nucleus = mass;
        if self.top_p < 1.0 {
            let mut sum = 0.0;
            let wanted = mass * f64::from(self.top_p);
            match candidates[..kept].iter().position(|(_, p)| {
                sum += p;
                sum >= wanted
            }) {
                Some(last) => (kept, nucleus, closed) = (last + 1, sum, true),
                None if closed => {}
                None => return Draw::NeedsRow,
            }
        }
        let mut sum = 0.0;
        for (id, p) in &candidates[..kept] {
            sum += p;
            if uniform * nucleus < sum {
                return Draw::Token(*id);
            }
        }
        if closed { Draw::Token(candidates[kept - 1].0) } else { Draw::NeedsRow }
    }
}

/// A number in 0 .. 1: SplitMix64 (Steele, Lea and Flood 2014) of the three arguments.
fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let bits = mix(mix(seed) ^ (u64::from(choice) << 32 | u64::from(position)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
