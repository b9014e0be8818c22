//! The head of a pipeline: owns the requests, feeds the pipe as the scheduler says, draws tokens, and makes text.

mod options;
mod probe;
mod recovery;
mod replay;
mod request;
mod score;
pub mod service;
mod stop;
mod text;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::constraint::{Constraint, Progress};
use crate::message::{MessageError, Output, Outputs, Span, Step};
use crate::pipeline::{Pipeline, PipelineError};
use crate::sampler::{Draw, History, logprob, top_logprobs};
use crate::schedule::cost::attended;
use crate::schedule::{Batch, Choice, Job, Next, Refused, RequestId, Scheduler, Status};
use crate::tokenizer::Tokenizer;
use crate::trace::{HeadSpan, HeadState, Nanos, Recorder, Trace};
pub use options::HeadOptions;
pub use recovery::Slow;
pub use request::{Answer, Event, FinishReason, Request, Timings, Token, Turn};
pub use score::Score;
use text::AnswerText;

/// A stage that computes one micro-batch for so long, and for [`WEDGED_TIMES`] what it should take, is wedged.
const WEDGED: Duration = Duration::from_secs(5);
const WEDGED_TIMES: f64 = 10.0;
/// Steps that wait for stages to tell how long they took; older ones are not learnt from.
const UNMEASURED_MAX: usize = 256;

/// Why no answer was made.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum HeadError {
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the pipeline is down: {reason}")]
    Down { reason: String },
    #[error("token id {id} is not in the vocabulary of {vocab}")]
    NoSuchToken { id: u32, vocab: usize },
    #[error("the scheduler has {waiting} requests waiting and nothing under way: this is a fault in the program")]
    Stuck { waiting: usize },
}

impl HeadError {
    /// The user wanted it to end.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, HeadError::Pipeline(error) if error.is_cancelled())
    }

    /// Whether nothing has failed: somebody wants another pipeline.
    pub fn is_wanted(&self) -> bool {
        matches!(self, HeadError::Pipeline(error) if error.is_wanted())
    }

    /// Whether another pipeline may do better with the same.
    pub fn may_be_recovered(&self) -> bool {
        matches!(self, HeadError::Pipeline(error) if error.may_be_recovered())
    }
}

struct ChoiceState {
    ids: Vec<u32>,
    tokens: Vec<Token>,
    text: AnswerText,
    constraint: Option<Progress>,
    first: Option<Instant>,
    last: Option<Instant>,
    done: bool,
}

struct Running {
    request: Request,
    submitted: Instant,
    cached: usize,
    prefilled: usize,
    choices: Vec<ChoiceState>,
}

/// A step that the scheduler is to learn from, once all stages have said how long it took them.
struct Measured {
    step: u64,
    tokens: usize,
    attended: f64,
    /// Seconds that the head took for it.
    overhead: f64,
    /// When it was sent and when its answer was there.
    away: (Nanos, Nanos),
}

struct InFlight {
    step: u64,
    tokens: usize,
    attended: f64,
    /// Seconds that the slowest stage should take; nothing while that is not known.
    expected: Option<f64>,
    /// Whose prompt is done up to where.
    prefilled: Vec<(RequestId, usize)>,
    sent: Nanos,
    /// Seconds that the head took to form it.
    forming: f64,
    /// Restores what was lost: not every stage computes it, and nothing is learnt from it.
    restores: bool,
    /// Computes nothing, and is none of the scheduler's.
    is_probe: bool,
}

/// Drives a pipeline.
pub struct Head {
    pipeline: Pipeline,
    tokenizer: Arc<Tokenizer>,
    scheduler: Scheduler,
    recorder: Arc<Recorder>,
    running: HashMap<RequestId, Running>,
    /// What became of answers that had begun when they were asked for; said by the next turn.
    replayed: Vec<Event>,
    in_flight: VecDeque<InFlight>,
    /// Oldest first; stages elsewhere tell what they did a little later.
    unmeasured: VecDeque<Measured>,
    /// Until when the trace knows what the head was doing.
    accounted: Nanos,
    options: HeadOptions,
    /// Why the pipeline answers no more, …
    down: Option<String>,
    /// … and since when.
    lost_at: Option<Nanos>,
    /// Tokens drawn so far.
    drawn: u64,
    straggling: recovery::Straggling,
    crossings: probe::Crossings,
}

impl Head {
    /// Takes a pipeline over.
    pub fn new(pipeline: Pipeline, tokenizer: Arc<Tokenizer>, options: HeadOptions) -> Head {
        let limits = options.limits(&pipeline);
        let shares = pipeline.shares().to_vec();
        let recorder = pipeline.recorder().clone();
        Head {
            pipeline,
            tokenizer,
            scheduler: Scheduler::new(limits).with_shares(shares),
            recorder,
            running: HashMap::new(),
            replayed: Vec::new(),
            in_flight: VecDeque::new(),
            unmeasured: VecDeque::new(),
            accounted: 0,
            options,
            down: None,
            lost_at: None,
            drawn: 0,
            straggling: recovery::Straggling::default(),
            crossings: probe::Crossings::default(),
        }
    }

    /// The pipeline.
    pub fn pipeline(&self) -> &Pipeline {
        &self.pipeline
    }

    /// Where the scheduler stands.
    pub fn status(&self) -> Status {
        self.scheduler.status()
    }

    /// Tokens drawn so far, of all answers.
    pub fn drawn(&self) -> u64 {
        self.drawn
    }

    /// Requests whose answers are not all complete.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// What happened when, of as long as the rings remember. Waits a moment for stages elsewhere to tell of the latest.
    pub fn trace(&self) -> Trace {
        self.pipeline.settle();
        self.recorder.snapshot()
    }

    fn check_ids(&self, ids: &[u32]) -> Result<(), HeadError> {
        let vocab = self.pipeline.limits().vocab;
        match ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => Err(HeadError::NoSuchToken { id: *id, vocab }),
            None => Ok(()),
        }
    }

    /// Takes a request; [`Head::turn`] makes it go on. Answers that have begun go on behind what there is of them, which
    /// the next turn says as if it had just been drawn.
    ///
    /// # Errors
    /// [`HeadError::Refused`], [`HeadError::NoSuchToken`], and [`HeadError::Down`] once the pipeline has failed.
    pub fn submit(&mut self, mut request: Request) -> Result<RequestId, HeadError> {
        if let Some(reason) = self.down.as_ref().filter(|_| !self.options.recovers) {
            return Err(HeadError::Down { reason: reason.clone() });
        }
        self.check_ids(&request.prompt)?;
        let biased: Vec<u32> = request.sampling.logit_bias.iter().map(|(id, _)| *id).collect();
        self.check_ids(&biased)?;
        let begun: Vec<u32> = request.begun.iter().flatten().map(|token| token.id).collect();
        self.check_ids(&begun)?;
        if request.max_tokens == 0 {
            return Err(Refused::NothingWanted.into());
        }
        let now = self.recorder.now();
        let choices = request.choices.max(1);
        let deadline = request.deadline.map(|deadline| now + deadline.as_nanos() as Nanos);
        let id = self.scheduler.submit(Job { prompt: request.prompt.clone(), choices, deadline }, now)?;
        let state = || ChoiceState {
            ids: Vec::new(),
            tokens: Vec::new(),
            text: AnswerText::new(self.tokenizer.clone(), &request.stop, &request.shown_specials),
            constraint: request.constraint.as_ref().map(Constraint::begin),
            first: None,
            last: None,
            done: false,
        };
        let choices = (0..choices).map(|_| state()).collect();
        let submitted = Instant::now();
        let begun = std::mem::take(&mut request.begun);
        self.running.insert(id, Running { request, submitted, cached: 0, prefilled: 0, choices });
        self.replay(id, begun);
        Ok(id)
    }

    /// Ends a request; what there is so far are its answers. What the stages were still to do is not waited for.
    pub fn cancel(&mut self, request: RequestId, say: &mut dyn FnMut(Event)) {
        self.end(request, FinishReason::Cancelled, say);
        self.scheduler.cancel(request);
        if self.running.is_empty() {
            self.give_up_all();
        }
    }

    /// Ends what is left of a request's answers.
    fn end(&mut self, request: RequestId, reason: FinishReason, say: &mut dyn FnMut(Event)) {
        let choices = self.running.get(&request).map_or(0, |running| running.choices.len() as u32);
        (0..choices).for_each(|index| self.done(Choice { request, index }, reason, say));
    }

    /// Gives up what is in the pipe.
    fn give_up_all(&mut self) {
        if self.pipeline.in_flight() > 0 {
            self.pipeline.abandon();
            self.crossings.lost(self.in_flight.iter().any(|flight| flight.is_probe));
            self.in_flight.clear();
            self.scheduler.restart();
        }
    }

    /// Sends what can be sent and takes one answer of the pipe, waiting for at most `patience`. Tells `say` what came
    /// of it. When the pipeline fails, everything that was asked ends ([`FinishReason::Failed`]), and nothing else is
    /// taken; where it is to be recovered ([`HeadOptions::recovers`]), all of it waits for
    /// [`Head::recover`] or [`Head::fail`].
    ///
    /// # Errors
    /// [`HeadError::Pipeline`] when a stage failed, and when `cancel` is set.
    pub fn turn(
        &mut self,
        patience: Duration,
        cancel: &AtomicBool,
        say: &mut dyn FnMut(Event),
    ) -> Result<Turn, HeadError> {
        self.say_replayed(say);
        let turn = self.try_turn(patience, cancel, say);
        if let Err(error) = &turn
            && !error.is_cancelled()
        {
            self.lost(error.to_string());
            if !self.options.recovers {
                self.fail(say);
            }
        }
        turn
    }

    fn try_turn(
        &mut self,
        patience: Duration,
        cancel: &AtomicBool,
        say: &mut dyn FnMut(Event),
    ) -> Result<Turn, HeadError> {
        if self.options.recovers
            && let Some(why) = self.pipeline.going()
        {
            return Err(why.into());
        }
        if let Some(error) = self.straggles() {
            return Err(error.into());
        }
        let begun = self.recorder.now();
        // What the caller did in between: with requests running it kept the pipe waiting.
        let between = if self.running.is_empty() { HeadState::Idle } else { HeadState::Working };
        self.recorder.state(between, self.accounted, begun);
        self.accounted = begun;
        for request in self.scheduler.expire(begun) {
            self.end(request, FinishReason::Deadline, say);
        }
        let waiting = self.fill()?;
        self.account(HeadState::Working);
        let Some(waiting) = waiting else { return Ok(Turn::Idle) };
        self.be_patient();
        let received = self.pipeline.receive_within(patience, cancel);
        self.account(waiting);
        let Some((outputs, at)) = received? else { return Ok(Turn::Quiet) };
        let answered = self.recorder.at(at);
        let step = self.answered(outputs, answered, say)?;
        self.account(HeadState::Working);
        if let Some(step) = step {
            self.recorder.answered(step, answered, self.accounted);
        }
        Ok(Turn::Progress)
    }

    /// Says that the head has been in a state until now.
    fn account(&mut self, state: HeadState) {
        let now = self.recorder.now();
        self.recorder.state(state, self.accounted, now);
        self.accounted = now;
    }

    /// Sends micro-batches until the scheduler has no more; says what the head waits for then, if for anything.
    fn fill(&mut self) -> Result<Option<HeadState>, HeadError> {
        loop {
            if self.must_wait_for_probe()? {
                return Ok(Some(HeadState::Waiting));
            }
            if self.pipeline.room() > 0 && !self.pipeline.has_room() {
                // What was given up is not taken: by a stage that hangs, maybe.
                return Ok(Some(HeadState::Waiting));
            }
            let formed = self.recorder.now();
            match self.scheduler.next(formed) {
                Next::Send(batch) => self.send(&batch, formed)?,
                Next::Wait { .. } if self.pipeline.in_flight() == 0 => {
                    return Err(HeadError::Stuck { waiting: self.running.len() });
                }
                Next::Wait { for_pages: true } => return Ok(Some(HeadState::KvWait)),
                Next::Wait { for_pages: false } => return Ok(Some(HeadState::Waiting)),
                Next::Idle => return Ok((self.pipeline.in_flight() > 0).then_some(HeadState::Idle)),
            }
        }
    }

    fn send(&mut self, batch: &Batch, formed: Nanos) -> Result<(), HeadError> {
        let limits = self.pipeline.limits();
        let draws = batch.parts.iter().filter(|part| part.draws).count();
        let edits_max = limits.edits / draws.max(1);
        let until = batch.until.map(|layers| layers as u32);
        let from = batch.from.map(|stage| stage as u32);
        let mut step = Step { released: batch.released.clone(), until, from, ..Step::default() };
        let mut prefilled = Vec::new();
        let mut seen = 0.0;
        for part in &batch.parts {
            let Choice { request, index } = part.choice;
            if let Some(running) = self.running.get_mut(&request).filter(|_| index == 0 && until.is_none()) {
                let spared = self.scheduler.spared(part.choice).min(running.request.prompt.len());
                running.cached = running.cached.max(spared);
                if running.choices[0].ids.is_empty() {
                    prefilled.push((request, part.start + part.ids.len()));
                }
            }
            step.ids.extend(&part.ids);
            if part.draws {
                let running = &self.running[&request];
                let row = step.ids.len() as u32 - 1;
                let state = &running.choices[index as usize];
                let history = History { prompt: &running.request.prompt, answer: &state.ids };
                let sampling = &running.request.sampling;
                step.outputs.push(if part.whole_row {
                    sampling.request_row(row)
                } else {
                    sampling.request(row, history, edits_max, state.constraint.as_ref().map(Progress::allowed))
                });
            }
            step.spans.push(Span {
                request: request.0,
                sequence: part.sequence,
                start: part.start as u32,
                count: part.ids.len() as u32,
                new_pages: part.new_pages.clone(),
            });
            seen += attended(part.start, part.ids.len());
        }
        let expected = self.scheduler.expected(step.ids.len(), seen);
        let number = self.pipeline.send(&step, batch.group)?;
        tracing::debug!(step = number, requests = ?step.requests(), tokens = step.ids.len(), "sent");
        let sent = self.recorder.now();
        self.in_flight.push_back(InFlight {
            step: number,
            tokens: step.ids.len(),
            attended: seen,
            expected,
            prefilled,
            sent,
            forming: (sent - formed) as f64 * 1e-9,
            restores: batch.until.is_some(),
            is_probe: false,
        });
        if !step.ids.is_empty() {
            self.recorder.sent(HeadSpan {
                step: number,
                group: batch.group,
                prefill_tokens: batch.prefill_tokens as u32,
                decode_tokens: batch.decode_tokens as u32,
                formed,
                sent,
                answered: 0,
                sampled: 0,
            });
        }
        Ok(())
    }

    /// Draws what an answer of the pipe allows. Returns its step, unless that computed nothing.
    fn answered(&mut self, outputs: Outputs, at: Nanos, say: &mut dyn FnMut(Event)) -> Result<Option<u64>, HeadError> {
        let begun = Instant::now();
        let flight = self.in_flight.pop_front().expect("the pipe answers what was sent");
        self.crossings.answered(flight.is_probe);
        if flight.is_probe {
            return Ok(None);
        }
        for (request, done) in flight.prefilled {
            if let Some(running) = self.running.get_mut(&request)
                && done > running.prefilled
            {
                running.prefilled = done;
                say(Event::Prefill { request, done, total: running.request.prompt.len() });
            }
        }
        let choices = self.scheduler.answered();
        let (found, expected) = (outputs.outputs.len(), choices.len());
        if found != expected {
            return Err(PipelineError::from(MessageError::Count { what: "outputs".into(), found, expected }).into());
        }
        for (choice, output) in choices.into_iter().zip(&outputs.outputs) {
            if let Some(choice) = choice {
                self.draw(choice, output, say)?;
            }
        }
        if flight.tokens == 0 {
            return Ok(None);
        }
        if flight.restores {
            return Ok(Some(flight.step));
        }
        let overhead = flight.forming + begun.elapsed().as_secs_f64();
        let InFlight { step, tokens, attended, sent, .. } = flight;
        self.unmeasured.push_back(Measured { step, tokens, attended, overhead, away: (sent, at) });
        self.learn();
        Ok(Some(step))
    }

    /// Gives the scheduler what all stages have told.
    fn learn(&mut self) {
        // What stages on the same took from each other is known once those behind have told, too.
        let behind = if self.pipeline.shares().is_empty() { 0 } else { self.pipeline.reports().len() };
        while let Some(oldest) = self.unmeasured.front() {
            let is_told = self.unmeasured.get(behind).is_some_and(|later| self.recorder.knows(later.step));
            if !is_told && self.unmeasured.len() <= UNMEASURED_MAX {
                break;
            }
            if let Some(took) = self.recorder.step(oldest.step, oldest.away) {
                let beyond = oldest.overhead + took.hops;
                self.scheduler.measured(oldest.tokens, oldest.attended, &took.alone, beyond);
            }
            self.unmeasured.pop_front();
        }
    }

    /// How long a stage may compute one of the micro-batches in flight.
    fn be_patient(&mut self) {
        let mut expected = self.in_flight.iter().map(|flight| flight.expected);
        if let Some(seconds) = expected.try_fold(0.0, |longest: f64, seconds| Some(longest.max(seconds?))) {
            self.pipeline.set_patience(WEDGED.max(Duration::from_secs_f64(WEDGED_TIMES * seconds)));
        }
    }

    /// Draws the next token of an answer and decides whether it goes on.
    fn draw(&mut self, choice: Choice, output: &Output, say: &mut dyn FnMut(Event)) -> Result<(), HeadError> {
        let vocab = self.pipeline.limits().vocab;
        let Some(running) = self.running.get(&choice.request) else { return Ok(()) };
        let Running { request, choices, .. } = running;
        let state = &choices[choice.index as usize];
        let history = History { prompt: &request.prompt, answer: &state.ids };
        let position = request.prompt.len() + state.ids.len();
        let allowed = state.constraint.as_ref().map(Progress::allowed);
        let id = match request.sampling.draw(output, vocab, history, choice.index, position as u32, allowed) {
            Draw::Token(id) => id,
            Draw::NeedsRow if output.row.is_none() => {
                self.scheduler.needs_row(choice);
                return Ok(());
            }
            Draw::NeedsRow => {
                let error = MessageError::Count { what: "logits of a row".into(), found: 0, expected: vocab };
                return Err(PipelineError::from(error).into());
            }
        };
        self.drawn += 1;
        let token = token(id, output, request.sampling.candidates);
        self.take(choice, token, say);
        Ok(())
    }

    /// Adds a token to an answer and decides whether it goes on; nothing where it has ended.
    fn take(&mut self, choice: Choice, token: Token, say: &mut dyn FnMut(Event)) {
        let capacity = self.scheduler.limits().capacity();
        let Some(running) = self.running.get_mut(&choice.request) else { return };
        let Running { request, choices, .. } = running;
        let Some(state) = choices.get_mut(choice.index as usize).filter(|state| !state.done) else { return };
        let position = request.prompt.len() + state.ids.len();
        let id = token.id;
        let now = Instant::now();
        state.first.get_or_insert(now);
        state.last = Some(now);
        state.ids.push(id);
        say(Event::Token { choice, token: token.clone() });
        state.tokens.push(token);
        let ends = request.stop_at_eos && self.tokenizer.eos_ids().contains(&id);
        let (text, stopped) = if ends { (String::new(), false) } else { state.text.push(id) };
        if !text.is_empty() {
            say(Event::Text { choice, text });
        }
        let reason = if ends || stopped {
            Some(FinishReason::Stop)
        } else if state.ids.len() >= request.max_tokens || position >= capacity {
            Some(FinishReason::Length)
        } else {
            state.constraint.as_mut().and_then(|constraint| go_on(constraint, id))
        };
        self.scheduler.drawn(choice, id, reason.is_some());
        if let Some(reason) = reason {
            self.done(choice, reason, say);
        }
    }

    /// Hands an answer out, once.
    fn done(&mut self, choice: Choice, finish_reason: FinishReason, say: &mut dyn FnMut(Event)) {
        let Some(running) = self.running.get_mut(&choice.request) else { return };
        let state = &mut running.choices[choice.index as usize];
        if std::mem::replace(&mut state.done, true) {
            return;
        }
        let rest = state.text.finish();
        if !rest.is_empty() {
            say(Event::Text { choice, text: rest });
        }
        let since =
            |instant: Option<Instant>| instant.map_or(0.0, |at| at.duration_since(running.submitted).as_secs_f64());
        let (first, last) = (since(state.first), since(state.last));
        let answer = Answer {
            tokens: std::mem::take(&mut state.tokens),
            text: state.text.text().to_owned(),
            finish_reason,
            prompt_tokens: running.request.prompt.len(),
            cached_tokens: running.cached,
            timings: Timings {
                first_token_seconds: first,
                decode_seconds: last - first,
                total_seconds: running.submitted.elapsed().as_secs_f64(),
            },
        };
        if running.choices.iter().all(|choice| choice.done) {
            self.running.remove(&choice.request);
        }
        say(Event::Done { choice, answer });
    }

    /// Makes one answer, telling `say` as it goes; other requests go on beside it. When `cancel` is set, what there is so
    /// far is the answer.
    ///
    /// # Errors
    /// [`HeadError`].
    pub fn generate(
        &mut self,
        request: Request,
        cancel: &AtomicBool,
        say: &mut dyn FnMut(Event),
    ) -> Result<Answer, HeadError> {
        let id = self.submit(Request { choices: 1, ..request })?;
        let mut answer = None;
        let mut hear = |event| match event {
            Event::Done { choice, answer: done } if choice.request == id => answer = Some(done),
            event => say(event),
        };
        while self.running.contains_key(&id) || !self.replayed.is_empty() {
            if cancel.load(Ordering::Relaxed) {
                self.say_replayed(&mut hear);
                self.cancel(id, &mut hear);
                break;
            }
            match self.turn(PATIENCE, cancel, &mut hear) {
                Err(error) if error.is_cancelled() => {}
                other => drop(other?),
            }
        }
        Ok(answer.expect("what has ended was handed out"))
    }

    /// Answers requests that are all there from the start; the answers of each, in order.
    ///
    /// # Errors
    /// [`HeadError`]; also when `cancel` is set.
    pub fn generate_all(&mut self, requests: Vec<Request>, cancel: &AtomicBool) -> Result<Vec<Vec<Answer>>, HeadError> {
        let mut ids = HashMap::new();
        let mut answers: Vec<Vec<Option<Answer>>> = Vec::new();
        for (i, request) in requests.into_iter().enumerate() {
            answers.push(vec![None; request.choices.max(1) as usize]);
            ids.insert(self.submit(request)?, i);
        }
        while !self.running.is_empty() || !self.replayed.is_empty() {
            self.turn(PATIENCE, cancel, &mut |event| {
                if let Event::Done { choice, answer } = event
                    && let Some(i) = ids.get(&choice.request)
                {
                    answers[*i][choice.index as usize] = Some(answer);
                }
            })?;
        }
        Ok(answers.into_iter().map(|choices| choices.into_iter().flatten().collect()).collect())
    }
}

/// How long a turn of a blocking call waits for the pipe; answers and cancellation end it sooner.
const PATIENCE: Duration = Duration::from_secs(1);

/// Why an answer ends with a token, if its constraint says so.
fn go_on(constraint: &mut Progress, id: u32) -> Option<FinishReason> {
    match constraint.take(id) {
        Ok(complete) => complete.then_some(FinishReason::Stop),
        Err(error) => {
            tracing::warn!("{error}");
            Some(FinishReason::Constraint)
        }
    }
}

fn token(id: u32, output: &Output, candidates: u32) -> Token {
    Token { id, logprob: logprob(output, id), candidates: top_logprobs(output, candidates as usize) }
}
