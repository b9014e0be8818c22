//! What is asked of a pipeline beside answers: the log-probabilities of a text, and all logits.

use std::sync::atomic::{AtomicBool, Ordering};

use pp_shaders::PAGE;

use super::{Head, HeadError, PATIENCE};
use crate::message::{OutputRequest, Outputs, Span, Step};
use crate::pipeline::PipelineError;
use crate::schedule::Refused;

/// Teacher-forced scores of a text.
#[derive(Clone, Debug)]
pub struct Score {
    /// log p(token i + 1 | tokens 0 ..= i), nats.
    pub token_logprobs: Vec<f32>,
    /// The best candidates after the last token, with their log-probabilities.
    pub top: Vec<(u32, f32)>,
}

impl Score {
    /// Sum of -log p, nats.
    pub fn nll(&self) -> f64 {
        -self.token_logprobs.iter().map(|p| f64::from(*p)).sum::<f64>()
    }
}

fn output(row: usize, target: u32, top_k: u32, whole_row: bool) -> OutputRequest {
    OutputRequest { row: row as u32, target, top_k, inverse_temperature: 1.0, whole_row, edits: Vec::new() }
}

impl Head {
    /// log p of every token after the first, given those before it, and the `candidates` best after the last, in
    /// micro-batches of at most `chunk` tokens. `progress` is told the number of tokens done. Nothing else runs meanwhile.
    ///
    /// # Errors
    /// [`HeadError`], also when `cancel` is set.
    pub fn score(
        &mut self,
        ids: &[u32],
        chunk: usize,
        candidates: u32,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Score, HeadError> {
        let mut score = Score { token_logprobs: Vec::with_capacity(ids.len()), top: Vec::new() };
        let want = |i: usize, row: usize| {
            let top_k = if i + 1 == ids.len() { candidates.max(1) } else { 1 };
            output(row, ids.get(i + 1).copied().unwrap_or(0), top_k, false)
        };
        self.feed(ids, chunk, cancel, want, &mut |outputs, done| {
            for output in outputs.outputs {
                if score.token_logprobs.len() + 1 < ids.len() {
                    score.token_logprobs.push(output.target_logit - output.lse);
                } else {
                    score.top = output.best.iter().map(|best| (best.id, best.raw - output.lse)).collect();
                }
            }
            progress(done);
        })?;
        Ok(score)
    }

    /// All logits after each token of `ids`: [tokens][vocab]; in micro-batches of at most `chunk` tokens.
    ///
    /// # Errors
    /// [`HeadError`].
    pub fn logits(&mut self, ids: &[u32], chunk: usize) -> Result<Vec<Vec<f32>>, HeadError> {
        let mut rows = Vec::with_capacity(ids.len());
        let never = AtomicBool::new(false);
        self.feed(ids, chunk, &never, |_, row| output(row, 0, 1, true), &mut |outputs, _| {
            rows.extend(outputs.outputs.into_iter().filter_map(|output| output.row));
        })?;
        Ok(rows)
    }

    /// Sends `ids` in chunks, as many at a time as the pipe takes; `want` says what is wanted of a token, given its
    /// index and its row in the chunk; `answer` gets what comes back, with the number of tokens done.
    fn feed(
        &mut self,
        ids: &[u32],
        chunk: usize,
        cancel: &AtomicBool,
        want: impl Fn(usize, usize) -> OutputRequest,
        answer: &mut dyn FnMut(Outputs, usize),
    ) -> Result<(), HeadError> {
        let limits = *self.pipeline.limits();
        let capacity = self.scheduler.limits().capacity();
        if ids.is_empty() {
            return Err(Refused::EmptyPrompt.into());
        }
        if ids.len() > capacity {
            return Err(Refused::PromptTooLong { tokens: ids.len(), context: capacity }.into());
        }
        self.check_ids(ids)?;
        self.give_up_all();
        self.scheduler.reset();
        let sequence = self.scheduler.foreign();
        let chunk = chunk.clamp(1, limits.tokens.min(limits.outputs));
        let fed = self.feed_as(sequence, ids, chunk, cancel, want, answer);
        // What an error left in the pipe; the stages forget every sequence then.
        self.give_up_all();
        if fed.is_ok() {
            self.scheduler.release(sequence);
        }
        fed
    }

    fn feed_as(
        &mut self,
        sequence: u64,
        ids: &[u32],
        chunk: usize,
        cancel: &AtomicBool,
        want: impl Fn(usize, usize) -> OutputRequest,
        answer: &mut dyn FnMut(Outputs, usize),
    ) -> Result<(), HeadError> {
        let mut pages: Vec<u32> = (0..ids.len().div_ceil(PAGE) as u32).collect();
        let (mut sent, mut done) = (0, 0);
        while done < ids.len() {
            if cancel.load(Ordering::Relaxed) {
                return Err(PipelineError::Cancelled.into());
            }
            if sent < ids.len() && self.pipeline.has_room() {
                let end = ids.len().min(sent + chunk);
                let span = Span {
                    request: 0,
                    sequence,
                    start: sent as u32,
                    count: (end - sent) as u32,
                    new_pages: std::mem::take(&mut pages),
                };
                let step = Step {
                    released: self.scheduler.take_released(),
                    spans: vec![span],
                    ids: ids[sent..end].to_vec(),
                    outputs: (sent..end).map(|i| want(i, i - sent)).collect(),
                    until: None,
                    from: None,
                };
                self.pipeline.send(&step, 0)?;
                sent = end;
                // Answers are taken as they come, but only waited for when the pipe is full or all is sent.
                if sent < ids.len() && self.pipeline.has_room() {
                    continue;
                }
            }
            let Some((outputs, _)) = self.pipeline.receive_within(PATIENCE, cancel)? else { continue };
            done = ids.len().min(done + chunk);
            answer(outputs, done);
        }
        Ok(())
    }
}
