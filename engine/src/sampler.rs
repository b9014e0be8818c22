//! From logits to a token. Pure: randomness is a function of (seed, choice, position), so a replay draws the same.
//!
//! Order: bias, penalties, temperature, min-p, top-k, top-p. The tail of the pipeline does the first three and returns
//! the best candidates with the log-sum-exp of all logits; the head does the rest. A draw that candidates cannot decide
//! asks for the whole row, so the result is exact: that of the whole row, worked on here.
//!
//! Where only some tokens may come, the others count as if their logits were -inf before all of this.

use std::cmp::Ordering;

use pp_shaders::profile::TOP_K;
use pp_shaders::reference::is_candidate;

use crate::message::{Candidate, LogitEdit, Output, OutputRequest};
use crate::random::{mix, unit};
use crate::token_set::TokenSet;

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
    /// Added to the logits of tokens, by rising id, each once; -inf bans a token. Ids are of the vocabulary.
    pub logit_bias: Vec<(u32, f32)>,
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
/// How far a device's log-sum-exp may be off: the sum of 4096 floats in the worst order of additions …
const LSE_ERROR: f64 = 4e-5;
/// … and the rounding of the result, as a share of it.
const LSE_ROUNDING: f64 = 2.5e-7;

impl Default for Sampling {
    /// Greedy.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            logit_bias: Vec::new(),
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
    /// The candidates do not decide: ask for the whole row and draw again.
    NeedsRow,
}

impl Sampling {
    /// What is done to the logits of a row before the temperature, by rising id.
    pub fn edits(&self, history: History<'_>) -> Vec<LogitEdit> {
        let penalised = self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        let mut answered = if penalised { history.answer.to_vec() } else { Vec::new() };
        let mut seen =
            if self.repetition_penalty != 1.0 { [history.prompt, history.answer].concat() } else { Vec::new() };
        answered.sort_unstable();
        seen.sort_unstable();
        seen.dedup();
        let mut ids: Vec<u32> = self.logit_bias.iter().map(|(id, _)| *id).chain(answered.iter().copied()).collect();
        ids.extend(&seen);
        ids.sort_unstable();
        ids.dedup();
        let edit = |id: u32| {
            let bias = self.logit_bias.binary_search_by_key(&id, |(biased, _)| *biased);
            let bias = bias.map_or(0.0, |at| self.logit_bias[at].1);
            let repetition = if seen.binary_search(&id).is_ok() { self.repetition_penalty } else { 1.0 };
            let first = answered.partition_point(|answered| *answered < id);
            let count = answered[first..].iter().take_while(|answered| **answered == id).count();
            let presence = if count > 0 { self.presence_penalty } else { 0.0 };
            LogitEdit::new(id, bias, repetition, presence + self.frequency_penalty * count as f32)
        };
        ids.into_iter().map(edit).collect()
    }

    /// What to ask of the tail for row `row`, where only `allowed` may come. Where there are more than `edits_max` edits,
    /// the head must do them.
    pub fn request(
        &self,
        row: u32,
        history: History<'_>,
        edits_max: usize,
        allowed: Option<&TokenSet>,
    ) -> OutputRequest {
        let mut edits = self.edits(history);
        if edits.len() > edits_max {
            return self.request_row(row);
        }
        if let Some(allowed) = allowed.filter(|allowed| allowed.len() + edits.len() <= edits_max.min(TOP_K as usize)) {
            show(allowed, &mut edits);
        }
        let top_k = match self.candidates {
            0 if self.is_greedy() && allowed.is_none() => 1,
            wanted if self.is_greedy() && edits.is_empty() && allowed.is_none() => wanted.min(TOP_K),
            // Also where some are wanted for log-probabilities: edits may put others before them.
            _ => TOP_K,
        };
        OutputRequest { row, target: 0, top_k, inverse_temperature: self.inverse(), whole_row: false, edits }
    }

    /// What to ask of the tail where only the whole row decides.
    pub fn request_row(&self, row: u32) -> OutputRequest {
        OutputRequest {
            row,
            target: 0,
            top_k: self.candidates.clamp(1, TOP_K),
            inverse_temperature: self.inverse(),
            whole_row: true,
            edits: Vec::new(),
        }
    }

    fn is_greedy(&self) -> bool {
        self.temperature < TEMPERATURE_MIN
    }

    fn inverse(&self) -> f32 {
        if self.is_greedy() { 1.0 } else { 1.0 / self.temperature }
    }

    /// Chooses the token at `position` of choice `choice`, of those that are `allowed`. `output` answers a request of this
    /// `history`.
    pub fn draw(
        &self,
        output: &Output,
        vocab: usize,
        history: History<'_>,
        choice: u32,
        position: u32,
        allowed: Option<&TokenSet>,
    ) -> Draw {
        if let Some(only) = allowed.and_then(TokenSet::only) {
            return Draw::Token(only);
        }
        let uniform = uniform(self.seed, choice, position);
        if let Some(row) = &output.row {
            return Draw::Token(self.draw_row(row, history, uniform, allowed));
        }
        let shown = Shown::of(output, vocab, allowed);
        let Some(best) = shown.candidates.first() else { return Draw::NeedsRow };
        if self.is_greedy() {
            return Draw::Token(best.id);
        }
        let (inverse, top) = (f64::from(self.inverse()), f64::from(best.logit));
        // Weights are relative to the best, here as in `draw_row`, so that equal sums are equal to the last bit.
        let weigh = |logit: f32| ((f64::from(logit) - top) * inverse).exp();
        let weights: Vec<(u32, f64)> = shown.candidates.iter().map(|c| (c.id, weigh(c.logit))).collect();
        if shown.hidden == 0 {
            return self.draw_sorted(&weights, None, uniform);
        }
        let lse = f64::from(output.lse_processed);
        let error = LSE_ERROR + LSE_ROUNDING * lse.abs();
        let total = |error: f64| (lse + error - top * inverse).exp();
        // Nothing that is not shown is before the last that is.
        let each = output.best.last().map_or(f64::INFINITY, |last| weigh(last.logit));
        let mass = if allowed.is_none() {
            (total(-error), total(error))
        } else {
            let known: f64 = weights.iter().map(|(_, weight)| weight).sum();
            let rest = total(error) - output.best.iter().map(|c| weigh(c.logit)).sum::<f64>();
            // Infinite where what may not come is far above what may.
            let rest = if rest.is_nan() { f64::INFINITY } else { rest.max(0.0) };
            (known, known + rest.min(shown.hidden as f64 * each) * (1.0 + 1e-9))
        };
        self.draw_sorted(&weights, Some(Beyond { mass, each }), uniform)
    }

    /// Chooses from all logits, as they are before the edits.
    fn draw_row(&self, row: &[f32], history: History<'_>, uniform: f64, allowed: Option<&TokenSet>) -> u32 {
        let only_allowed = |mut logits: Vec<f32>| {
            if let Some(allowed) = allowed {
                let banned = (0u32..).zip(&mut logits).filter(|(id, _)| !allowed.contains(*id));
                banned.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
            }
            logits
        };
        let mut logits = row.to_vec();
        for edit in self.edits(history) {
            if let Some(logit) = logits.get_mut(edit.id as usize) {
                *logit = edit.apply(*logit);
            }
        }
        let logits = only_allowed(logits);
        let order = by_falling_logit(&logits);
        let Some(best) = order.first() else {
            // Where every token is banned, the one that is best without the bans; what is not allowed never comes.
            let best = by_falling_logit(&only_allowed(row.to_vec())).first().copied();
            return best.or_else(|| allowed?.iter().next()).unwrap_or(0);
        };
        if self.is_greedy() {
            return *best;
        }
        let (inverse, top) = (f64::from(self.inverse()), f64::from(logits[*best as usize]));
        let weigh = |id: u32| ((f64::from(logits[id as usize]) - top) * inverse).exp();
        let weights: Vec<(u32, f64)> = order.iter().map(|id| (*id, weigh(*id))).collect();
        match self.draw_sorted(&weights, None, uniform) {
            Draw::Token(id) => id,
            Draw::NeedsRow => *best,
        }
    }

    /// Chooses from (id, weight) by falling weight. `beyond`: what is known of others, where there are any.
    fn draw_sorted(&self, candidates: &[(u32, f64)], beyond: Option<Beyond>, uniform: f64) -> Draw {
        let Some((_, best)) = candidates.first() else { return Draw::NeedsRow };
        let mut kept = candidates.len();
        // Whether what lies beyond the candidates does not exist, or would have been cut off as well.
        let mut closed = beyond.is_none();
        if self.min_p > 0.0 {
            let least = best * f64::from(self.min_p);
            kept = candidates.iter().take_while(|(_, weight)| *weight >= least).count();
            closed |= beyond.is_some_and(|beyond| beyond.each < least);
        }
        if self.top_k > 0 && (self.top_k as usize) <= kept {
            kept = self.top_k as usize;
            closed = true;
        }
        if !closed && (self.min_p > 0.0 || self.top_k > 0) {
            return Draw::NeedsRow;
        }
        let mut sums = Vec::with_capacity(kept);
        let mut sum = 0.0;
        sums.extend(candidates[..kept].iter().map(|(_, weight)| {
            sum += weight;
            sum
        }));
        let (mut low, mut high) = beyond.filter(|_| !closed).map_or((sum, sum), |beyond| beyond.mass);
        if !(low > 0.0 && high.is_finite()) {
            return Draw::NeedsRow;
        }
        if self.top_p < 1.0 {
            let reach = |mass: f64| sums.iter().position(|sum| *sum >= mass * f64::from(self.top_p));
            match reach(low) {
                Some(last) if reach(high) == Some(last) => {
                    sums.truncate(last + 1);
                    (low, high, closed) = (sums[last], sums[last], true);
                }
                _ if closed => {}
                _ => return Draw::NeedsRow,
            }
        }
        let drawn = |mass: f64| sums.iter().position(|sum| uniform * mass < *sum);
        match drawn(low) {
            Some(at) if drawn(high) == Some(at) => Draw::Token(candidates[at].0),
            _ if closed => Draw::Token(candidates[sums.len() - 1].0),
            _ => Draw::NeedsRow,
        }
    }
}

/// Edits that change nothing, of what has none: the tail shows whatever it edits.
fn show(allowed: &TokenSet, edits: &mut Vec<LogitEdit>) {
    let edited: Vec<u32> = edits.iter().map(|edit| edit.id).collect();
    let others = allowed.iter().filter(|id| edited.binary_search(id).is_err());
    edits.extend(others.map(|id| LogitEdit::new(id, 0.0, 1.0, 0.0)));
    edits.sort_by_key(|edit| edit.id);
}

/// What is known of the tokens that candidates leave out.
#[derive(Clone, Copy)]
struct Beyond {
    /// Bounds of the weight of all tokens that may be drawn, candidates included.
    mass: (f64, f64),
    /// Bound of the weight of each that is left out.
    each: f64,
}

/// What an output shows of the tokens that may be drawn.
struct Shown {
    /// The best of them, by falling logit, then rising id.
    candidates: Vec<Candidate>,
    /// How many there may be beside.
    hidden: usize,
}

impl Shown {
    fn of(output: &Output, vocab: usize, allowed: Option<&TokenSet>) -> Shown {
        let is_all = output.best.len() >= vocab || output.best.len() < TOP_K as usize;
        let Some(allowed) = allowed else {
            let hidden = if is_all { 0 } else { vocab - output.best.len() };
            return Shown { candidates: output.best.clone(), hidden };
        };
        let of = |shown: &[Candidate]| shown.iter().filter(|c| allowed.contains(c.id)).copied().collect::<Vec<_>>();
        let (mut candidates, beside) = (of(&output.best), of(&output.beside));
        let hidden = if is_all { 0 } else { allowed.len() - candidates.len() };
        if hidden > 0 && hidden == beside.len() {
            candidates.extend(beside.into_iter().filter(|c| is_candidate(c.logit)));
            candidates.sort_by(|a, b| b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id)));
            return Shown { candidates, hidden: 0 };
        }
        // What is shown beside the best may have others before it.
        Shown { candidates, hidden }
    }
}

/// The ids that may be drawn, by falling logit, then rising id.
fn by_falling_logit(logits: &[f32]) -> Vec<u32> {
    let at = |id: &u32| logits[*id as usize];
    let mut order: Vec<u32> = (0..logits.len() as u32).filter(|id| is_candidate(at(id))).collect();
    order.sort_unstable_by(|a, b| at(b).partial_cmp(&at(a)).unwrap_or(Ordering::Equal).then(a.cmp(b)));
    order
}

/// log p of a token under the raw logits, where the output shows it.
pub fn logprob(output: &Output, id: u32) -> Option<f32> {
    let shown = output.best.iter().chain(&output.beside).find(|candidate| candidate.id == id);
    let raw = shown.map(|candidate| candidate.raw).or_else(|| output.row.as_ref()?.get(id as usize).copied())?;
    Some(raw - output.lse)
}

/// The `count` best tokens under the raw logits with their log p, or as many as the output shows for certain.
pub fn top_logprobs(output: &Output, count: usize) -> Vec<(u32, f32)> {
    let logprob = |raw: f32| raw - output.lse;
    if let Some(row) = &output.row {
        return by_falling_logit(row).into_iter().take(count).map(|id| (id, logprob(row[id as usize]))).collect();
    }
    // Whoever is not shown has a logit that was not edited and is not above the last one shown.
    let least = output.best.last().map_or(f32::INFINITY, |last| last.logit);
    let mut shown: Vec<_> = output.best.iter().chain(&output.beside).filter(|c| c.raw >= least).collect();
    shown.sort_by(|a, b| b.raw.total_cmp(&a.raw).then(a.id.cmp(&b.id)));
    shown.into_iter().take(count).map(|candidate| (candidate.id, logprob(candidate.raw))).collect()
}

/// A number in 0 .. 1 that is a function of the three arguments.
fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    unit(mix(mix(seed) ^ (u64::from(choice) << 32 | u64::from(position))))
}

#[cfg(test)]
mod tests;
