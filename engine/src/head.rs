//! The head of a pipeline: owns the sequences, feeds the pipe, samples, and turns ids into text.

mod stop;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use thiserror::Error;

use crate::kv::{OutOfPages, PagePool, SequenceId};
use crate::message::{MessageError, Output, OutputRequest, Outputs, Span, Step};
use crate::pipeline::{Pipeline, PipelineError};
use crate::sampler::{Draw, History, Sampling};
use crate::tokenizer::Tokenizer;
use stop::StopScanner;

/// Why no answer was made.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum HeadError {
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Pages(#[from] OutOfPages),
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    #[error(
        "the prompt has {tokens} tokens, the context holds {context}: shorten it, or raise --ctx if the model allows"
    )]
    PromptTooLong { tokens: usize, context: usize },
    #[error("token id {id} is not in the vocabulary of {vocab}")]
    NoSuchToken { id: u32, vocab: usize },
}

impl HeadError {
    /// The user wanted it to end.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, HeadError::Pipeline(PipelineError::Cancelled))
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended it, or a stop string came.
    Stop,
    /// The wanted number of tokens, or the end of the context.
    Length,
    /// The user cancelled it.
    Cancelled,
}

impl FinishReason {
    /// As OpenAI's API spells it (`cancelled` is ours).
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
}

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens of the answer at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Whether the end-of-sequence tokens end the answer.
    pub stop_at_eos: bool,
    /// Tokens of a prefill micro-batch, at most what the stages take.
    pub chunk: usize,
}

/// One token of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Log-probability under the raw logits, where the candidates show it.
    pub logprob: Option<f32>,
    /// Best candidates with their log-probabilities.
    pub candidates: Vec<(u32, f32)>,
}

/// Where a request stands, told while it runs.
#[derive(Debug)]
pub enum Progress<'a> {
    /// Prompt tokens done, of all.
    Prefill {
        /// Done.
        done: usize,
        /// All.
        total: usize,
    },
    /// More text of the answer; never half a character.
    Text(&'a str),
}

/// Seconds that parts of a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Timings {
    /// From start to the first token.
    pub first_token_seconds: f64,
    /// From the first token to the last.
    pub decode_seconds: f64,
    /// From start to end.
    pub total_seconds: f64,
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// Its tokens; an end-of-sequence token is the last one.
    pub tokens: Vec<Token>,
    /// Its text, without special tokens and stop strings.
    pub text: String,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// How long it took.
    pub timings: Timings,
}

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

/// Drives a pipeline.
pub struct Head {
    pipeline: Pipeline,
    pool: PagePool,
    next_sequence: u64,
    released: Vec<u64>,
}

impl Head {
    /// Takes a pipeline over.
    pub fn new(pipeline: Pipeline) -> Head {
        let pool = PagePool::new(pipeline.limits().pages);
        Head { pipeline, pool, next_sequence: 0, released: Vec::new() }
    }

    /// The pipeline.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    fn begin(&mut self, tokens: &[u32]) -> Result<SequenceId, HeadError> {
        let limits = self.pipeline.limits();
        if tokens.is_empty() {
            return Err(HeadError::EmptyPrompt);
        }
        if tokens.len() > limits.context {
            return Err(HeadError::PromptTooLong { tokens: tokens.len(), context: limits.context });
        }
        if let Some(id) = tokens.iter().find(|id| **id as usize >= limits.vocab) {
            return Err(HeadError::NoSuchToken { id: *id, vocab: limits.vocab });
        }
        self.next_sequence += 1;
        Ok(SequenceId(self.next_sequence))
    }

    /// Takes the pages of a sequence back. What it left in the pipe, when it was cancelled or failed, is given up.
    fn end(&mut self, sequence: SequenceId) {
        if self.pipeline.in_flight() > 0 {
            // The stages forget all their sequences then.
            self.pipeline.abandon();
            self.released.clear();
        } else if self.pool.holds(sequence) {
            self.released.push(sequence.0);
        }
        self.pool.release(sequence);
    }

    fn step(
        &mut self,
        sequence: SequenceId,
        start: usize,
        ids: &[u32],
        outputs: Vec<OutputRequest>,
    ) -> Result<(), HeadError> {
        let new_pages = self.pool.grow(sequence, start + ids.len())?;
        let span = Span { sequence: sequence.0, start: start as u32, count: ids.len() as u32, new_pages };
        let released = std::mem::take(&mut self.released);
        Ok(self.pipeline.send(&Step {
            released,
            spans: vec![span],
            ids: ids.to_vec(),
            outputs,
            fetch_rows: Vec::new(),
        })?)
    }

    /// Sends `ids` in chunks, as many at a time as the pipe takes; `outputs` says what is wanted of each chunk, and
    /// `answer` gets what comes back, with the number of tokens done.
    fn feed(
        &mut self,
        sequence: SequenceId,
        ids: &[u32],
        chunk: usize,
        cancel: &AtomicBool,
        mut outputs: impl FnMut(usize, usize) -> Vec<OutputRequest>,
        mut answer: impl FnMut(Outputs, usize),
    ) -> Result<(), HeadError> {
        let chunk = chunk.clamp(1, self.pipeline.limits().tokens);
        let mut sent = 0;
        let mut done = 0;
        while done < ids.len() {
            if cancel.load(Ordering::Relaxed) {
                return Err(PipelineError::Cancelled.into());
            }
            if sent < ids.len() && self.pipeline.room() > 0 {
                let end = ids.len().min(sent + chunk);
                let wanted = outputs(sent, end);
                self.step(sequence, sent, &ids[sent..end], wanted)?;
                sent = end;
                // Answers are taken as they come, but only waited for when the pipe is full or all is sent.
                if sent < ids.len() && self.pipeline.room() > 0 {
                    continue;
                }
            }
            let outputs = self.pipeline.receive(cancel)?;
            done = ids.len().min(done + chunk);
            answer(outputs, done);
        }
        Ok(())
    }

    /// Answers a request, telling `progress` as it goes. When `cancel` is set, what there is so far is the answer;
    /// what the stages were still to do for it is not waited for.
    ///
    /// # Errors
    /// [`HeadError`].
    pub fn generate(
        &mut self,
        request: &Request,
        tokenizer: &Tokenizer,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Answer, HeadError> {
        let sequence = self.begin(&request.prompt)?;
        let result = self.generate_in(sequence, request, tokenizer, cancel, progress);
        self.end(sequence);
        result
    }

    fn generate_in(
        &mut self,
        sequence: SequenceId,
        request: &Request,
        tokenizer: &Tokenizer,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<Answer, HeadError> {
        let started = Instant::now();
        let context = self.pipeline.limits().context;
        let total = request.prompt.len();
        let mut text = AnswerText::new(tokenizer, &request.stop);
        let mut answer = Answer {
            tokens: Vec::new(),
            text: String::new(),
            finish_reason: FinishReason::Length,
            timings: Timings::default(),
        };
        if request.max_tokens == 0 {
            return Ok(answer);
        }
        let mut last = None;
        progress(Progress::Prefill { done: 0, total });
        let fed = self.feed(
            sequence,
            &request.prompt,
            request.chunk,
            cancel,
            |start, end| {
                if end == total { vec![request.sampling.request((end - start - 1) as u32)] } else { Vec::new() }
            },
            |mut outputs, done| {
                progress(Progress::Prefill { done, total });
                last = outputs.outputs.pop();
            },
        );
        match fed {
            Err(error) if error.is_cancelled() => {
                answer.finish_reason = FinishReason::Cancelled;
                answer.timings.total_seconds = started.elapsed().as_secs_f64();
                return Ok(answer);
            }
            other => other?,
        }
        let mut ids = Vec::new();
        while let Some(output) = last.take() {
            let position = total + ids.len();
            let id = match self.choose(&output, request, &ids, position as u32, cancel) {
                Err(error) if error.is_cancelled() => {
                    answer.finish_reason = FinishReason::Cancelled;
                    break;
                }
                other => other?,
            };
            ids.push(id);
            answer.tokens.push(token(id, &output, request.sampling.candidates));
            if ids.len() == 1 {
                answer.timings.first_token_seconds = started.elapsed().as_secs_f64();
            }
            if request.stop_at_eos && tokenizer.eos_ids().contains(&id) {
                answer.finish_reason = FinishReason::Stop;
                break;
            }
            let stopped = text.push(id, &mut |piece| progress(Progress::Text(piece)));
            if stopped {
                answer.finish_reason = FinishReason::Stop;
                break;
            }
            if ids.len() >= request.max_tokens || position >= context {
                break;
            }
            if cancel.load(Ordering::Relaxed) {
                answer.finish_reason = FinishReason::Cancelled;
                break;
            }
            self.step(sequence, position, &[id], vec![request.sampling.request(0)])?;
            last = match self.pipeline.receive(cancel) {
                Err(PipelineError::Cancelled) => {
                    answer.finish_reason = FinishReason::Cancelled;
                    break;
                }
                other => other?.outputs.pop(),
            };
        }
        answer.text = text.finish(&mut |piece| progress(Progress::Text(piece)));
        answer.timings.total_seconds = started.elapsed().as_secs_f64();
        if !ids.is_empty() {
            answer.timings.decode_seconds = answer.timings.total_seconds - answer.timings.first_token_seconds;
        }
        Ok(answer)
    }

    fn choose(
        &mut self,
        output: &Output,
        request: &Request,
        answer: &[u32],
        position: u32,
        cancel: &AtomicBool,
    ) -> Result<u32, HeadError> {
        let vocab = self.pipeline.limits().vocab;
        let history = History { prompt: &request.prompt, answer };
        if let Draw::Token(id) = request.sampling.draw(output, vocab, history, 0, position) {
            return Ok(id);
        }
        self.pipeline.send(&Step { fetch_rows: vec![0], ..Step::default() })?;
        let row = self.pipeline.receive(cancel)?.outputs.pop().and_then(|output| output.row);
        let whole = Output { row, ..output.clone() };
        match request.sampling.draw(&whole, vocab, history, 0, position) {
            Draw::Token(id) => Ok(id),
            Draw::NeedsRow => Err(MessageError::Count { what: "logits of a row", found: 0, expected: vocab })
                .map_err(|error| PipelineError::from(error).into()),
        }
    }

    /// log p of every token after the first, given those before it, and the `candidates` best after the last.
    /// `progress` is told the number of tokens done.
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
        let sequence = self.begin(ids)?;
        let chunk = chunk.min(self.pipeline.limits().outputs);
        let mut score = Score { token_logprobs: Vec::with_capacity(ids.len()), top: Vec::new() };
        let request = |row: usize, target: u32, top_k: u32| OutputRequest {
            row: row as u32,
            target,
            top_k,
            inverse_temperature: 1.0,
            whole_row: false,
        };
        let fed = self.feed(
            sequence,
            ids,
            chunk,
            cancel,
            |start, end| {
                let want = |i: usize| {
                    request(
                        i - start,
                        ids.get(i + 1).copied().unwrap_or(0),
                        if i + 1 == ids.len() { candidates.max(1) } else { 1 },
                    )
                };
                (start..end).map(want).collect()
            },
            |outputs, done| {
                for output in outputs.outputs {
                    if score.token_logprobs.len() + 1 < ids.len() {
                        score.token_logprobs.push(output.target_logit - output.lse);
                    } else {
                        score.top = output.best.iter().map(|(id, logit)| (*id, logit - output.lse)).collect();
                    }
                }
                progress(done);
            },
        );
        self.end(sequence);
        fed?;
        Ok(score)
    }

    /// All logits after each token of `ids`: [tokens][vocab].
    ///
    /// # Errors
    /// [`HeadError`].
    pub fn logits(&mut self, ids: &[u32], chunk: usize) -> Result<Vec<Vec<f32>>, HeadError> {
        let sequence = self.begin(ids)?;
        let chunk = chunk.min(self.pipeline.limits().outputs);
        let mut rows = Vec::with_capacity(ids.len());
        let request = |row: usize| OutputRequest {
            row: row as u32,
            target: 0,
            top_k: 1,
            inverse_temperature: 1.0,
            whole_row: true,
        };
        let never = AtomicBool::new(false);
        let fed = self.feed(
            sequence,
            ids,
            chunk,
            &never,
            |start, end| (0..end - start).map(request).collect(),
            |outputs, _| rows.extend(outputs.outputs.into_iter().filter_map(|output| output.row)),
        );
        self.end(sequence);
        fed?;
        Ok(rows)
    }
}

fn token(id: u32, output: &Output, candidates: u32) -> Token {
    let logprob = |logit: f32| logit - output.lse;
    let from_row = output.row.as_ref().and_then(|row| row.get(id as usize)).copied();
    let from_best = output.best.iter().find(|(candidate, _)| *candidate == id).map(|(_, logit)| *logit);
    Token {
        id,
        logprob: from_best.or(from_row).map(logprob),
        candidates: output.best.iter().take(candidates as usize).map(|(id, logit)| (*id, logprob(*logit))).collect(),
    }
}

/// Turns ids into the answer's text as they come, up to a stop string.
struct AnswerText<'a> {
    tokenizer: &'a Tokenizer,
    stream: crate::tokenizer::TokenStream,
    scanner: StopScanner,
    text: String,
}

impl<'a> AnswerText<'a> {
    fn new(tokenizer: &'a Tokenizer, stop: &[String]) -> AnswerText<'a> {
        AnswerText {
            tokenizer,
            stream: tokenizer.stream_continuing(),
            scanner: StopScanner::new(stop),
            text: String::new(),
        }
    }

    /// Tells `say` what has become certain; true when a stop string came.
    fn push(&mut self, id: u32, say: &mut dyn FnMut(&str)) -> bool {
        if self.tokenizer.is_special(id) {
            return false;
        }
        let Some(piece) = self.stream.push(id) else { return false };
        let (certain, stopped) = self.scanner.push(&piece);
        self.say(&certain, say);
        stopped
    }

    fn finish(mut self, say: &mut dyn FnMut(&str)) -> String {
        let certain = self.scanner.finish();
        self.say(&certain, say);
        self.text
    }

    fn say(&mut self, certain: &str, say: &mut dyn FnMut(&str)) {
        if !certain.is_empty() {
            self.text.push_str(certain);
            say(certain);
        }
    }
}
