//! The pipeline in virtual time: the same scheduler over stages given by their costs and hops given by theirs.
//!
//! A discrete-event simulation. A stage takes micro-batches in order, computes one while the one before is handed on,
//! and stands still when the next hop is out of credits. A hop carries a micro-batch's bytes one after the other
//! (seconds a token) and then delays them (latency, jitter) without occupying the link. What the stages compute is a
//! [`Model`]'s, so that the simulation can carry real results. It writes the same [`Trace`] as a running pipeline.

pub mod load;
pub mod toy;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use crate::law::{HopCost, StageCost};
use crate::schedule::cost::attended;
use crate::schedule::{Batch, Next};
use crate::trace::{HeadInterval, HeadSpan, HeadState, Nanos, StageSpan, StageTrace, Trace};

/// A pipeline to simulate.
#[derive(Clone, Debug, PartialEq)]
pub struct Pipe {
    /// Costs of the stages.
    pub stages: Vec<StageCost>,
    /// The hop behind each stage; the last leads to the head, which is beside the first stage.
    pub hops: Vec<HopCost>,
    /// Up to so many seconds more for each hop, at random; order is kept.
    pub jitter: f64,
    /// Micro-batches that a hop and the queue behind it hold before the stage before must wait.
    pub credits: usize,
    /// Seconds that the head needs to draw the tokens of a micro-batch.
    pub sampling: f64,
    /// Up to so many seconds that a stage stands still before a micro-batch, at random, one time in eight.
    pub stall: f64,
    /// What the randomness starts from.
    pub seed: u64,
}

impl Pipe {
    /// Stages without hops.
    pub fn of(stages: Vec<StageCost>) -> Pipe {
        let hops = vec![HopCost::default(); stages.len()];
        let credits = 2 * stages.len() + 1;
        Pipe { stages, hops, jitter: 0.0, credits, sampling: 0.0, stall: 0.0, seed: 0 }
    }
}

/// Where micro-batches come from: the head's part of a simulation.
pub trait Source {
    /// When something of its own is due (a request arrives, a user cancels); nothing later.
    fn due(&self) -> Option<Nanos>;
    /// Does what is due.
    fn wake(&mut self, now: Nanos);
    /// The next micro-batch.
    fn next(&mut self, now: Nanos) -> Next;
    /// The oldest micro-batch in flight came back; `results`: what the tail's model said for each part that draws,
    /// `seconds` of each stage.
    fn answered(&mut self, now: Nanos, results: &[u64], seconds: &[f64]);
}

/// What the stages compute.
pub trait Model {
    /// Stage `stage` computes `batch`, given what the stage before handed on for each token (nothing on the first);
    /// returns the same for the next, or from the last stage a result for each part that draws.
    fn forward(&mut self, stage: usize, batch: &Batch, from: Vec<u64>) -> Vec<u64>;
}

/// Computes nothing.
pub struct Nothing;

impl Model for Nothing {
    fn forward(&mut self, _stage: usize, batch: &Batch, _from: Vec<u64>) -> Vec<u64> {
        vec![0; batch.parts.iter().filter(|part| part.draws).count()]
    }
}

struct Moving {
    step: u64,
    batch: Batch,
    data: Vec<u64>,
    seconds: Vec<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A frame lies ready behind hop `.0`: at stage `.0 + 1`, or at the head.
    Arrived(usize),
    /// Stage `.0` has computed.
    Computed(usize),
    /// The head is free again.
    Head,
    /// Something of the source is due.
    Due,
}

#[derive(Default)]
struct StageState {
    queue: VecDeque<(Moving, Nanos)>,
    computing: Option<(Moving, StageSpan)>,
    /// Computed, waiting for a credit.
    done: Option<(Moving, StageSpan)>,
    spans: Vec<StageSpan>,
}

#[derive(Default)]
struct Link {
    /// When it has carried all that was given to it.
    free: Nanos,
    /// When the last frame is there.
    last: Nanos,
    carrying: VecDeque<Moving>,
}

struct World<'a> {
    pipe: &'a Pipe,
    model: &'a mut dyn Model,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    count: u64,
    random: u64,
    stages: Vec<StageState>,
    links: Vec<Link>,
    answers: VecDeque<Moving>,
}

fn nanos(seconds: f64) -> Nanos {
    (seconds * 1e9).round() as Nanos
}

impl World<'_> {
    fn at(&mut self, time: Nanos, event: Event) {
        self.count += 1;
        self.events.push(Reverse((time, self.count, event)));
    }

    /// Uniform in 0 .. 1.
    fn uniform(&mut self) -> f64 {
        self.random = crate::random::mix(self.random);
        crate::random::unit(self.random)
    }

    /// A stage begins what it can.
    fn begin(&mut self, stage: usize, now: Nanos) {
        if self.stages[stage].computing.is_some() {
            return;
        }
        let Some((mut moving, arrived)) = self.stages[stage].queue.pop_front() else { return };
        let asked = (moving.batch.from, moving.batch.until);
        let is_asked = asked.0.is_none_or(|from| stage > from) && asked.1.is_none_or(|until| stage < until);
        let tokens: usize = moving.batch.parts.iter().filter(|_| is_asked).map(|part| part.ids.len()).sum();
        let seen: f64 = moving.batch.parts.iter().map(|part| attended(part.start, part.ids.len())).sum();
        let cost = self.pipe.stages[stage];
        let mut seconds = if tokens == 0 { 0.0 } else { cost.step(tokens as f64) + cost.attention * seen };
        if self.pipe.stall > 0.0 && self.uniform() < 0.125 {
            seconds += self.pipe.stall * self.uniform();
        }
        moving.data = self.model.forward(stage, &moving.batch, std::mem::take(&mut moving.data));
        moving.seconds.push(seconds);
        let finished = now + nanos(seconds);
        let span = StageSpan {
            step: moving.step,
            group: moving.batch.group,
            tokens: tokens as u32,
            sequences: moving.batch.parts.len() as u32,
            arrived,
            taken: now,
            started: now,
            finished,
            ..StageSpan::default()
        };
        self.stages[stage].computing = Some((moving, span));
        self.at(finished, Event::Computed(stage));
        if stage > 0 {
            // A place in the queue is free.
            self.hand_on(stage - 1, now);
        }
    }

    /// A stage hands on what it has computed, if the hop takes it.
    fn hand_on(&mut self, stage: usize, now: Nanos) {
        let waiting = self.stages.get(stage + 1).map_or(0, |next| next.queue.len());
        if self.links[stage].carrying.len() + waiting >= self.pipe.credits && stage + 1 < self.stages.len() {
            return;
        }
        let Some((moving, mut span)) = self.stages[stage].done.take() else { return };
        span.sent = now;
        if span.tokens > 0 {
            self.stages[stage].spans.push(span);
        }
        let hop = self.pipe.hops[stage];
        let late = if self.pipe.jitter > 0.0 { self.pipe.jitter * self.uniform() } else { 0.0 };
        let link = &mut self.links[stage];
        link.free = link.free.max(now) + nanos(hop.seconds_per_token * f64::from(span.tokens));
        link.last = link.last.max(link.free + nanos(hop.latency + late));
        link.carrying.push_back(moving);
        let there = link.last;
        self.at(there, Event::Arrived(stage));
        self.finish(stage, now);
    }

    /// A finished computation moves to where it waits for the hop.
    fn finish(&mut self, stage: usize, now: Nanos) {
        let state = &mut self.stages[stage];
        let finished = state.computing.as_ref().is_some_and(|(_, span)| span.finished <= now);
        if finished && state.done.is_none() {
            let (moving, mut span) = state.computing.take().expect("it is computing");
            span.send_started = span.finished;
            state.done = Some((moving, span));
            self.hand_on(stage, now);
            self.begin(stage, now);
        }
    }
}

/// The pipe stood still while micro-batches were in it, or the source waited for an answer with nothing under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deadlock {
    /// When.
    pub at: Nanos,
}

/// Runs until the source is idle and nothing is due, or until `until`.
///
/// # Errors
/// [`Deadlock`].
pub fn run(
    pipe: &Pipe,
    source: &mut dyn Source,
    model: &mut dyn Model,
    until: Nanos,
) -> Result<(Trace, Nanos), Deadlock> {
    let stages = pipe.stages.len();
    assert_eq!(stages, pipe.hops.len(), "a hop behind every stage");
    let mut world = World {
        pipe,
        model,
        events: BinaryHeap::new(),
        count: 0,
        random: crate::random::mix(pipe.seed),
        stages: (0..stages).map(|_| StageState::default()).collect(),
        links: (0..stages).map(|_| Link::default()).collect(),
        answers: VecDeque::new(),
    };
    let mut trace = Trace::default();
    let mut step = 0;
    let mut in_flight = 0usize;
    let mut head_free: Nanos = 0;
    let mut sampling: Option<Moving> = None;
    let mut state_since = (HeadState::Idle, 0);
    let mut now = 0;
    let mut noted_due = None;
    world.at(0, Event::Head);
    while let Some(Reverse((time, _, event))) = world.events.pop() {
        if time > until {
            break;
        }
        now = time;
        match event {
            Event::Arrived(hop) => {
                let moving = world.links[hop].carrying.pop_front().expect("it was carried");
                if hop + 1 < stages {
                    world.stages[hop + 1].queue.push_back((moving, now));
                    world.begin(hop + 1, now);
                } else {
                    if let Some(span) = trace.head.get_mut(moving.step as usize) {
                        span.answered = now;
                    }
                    world.answers.push_back(moving);
                }
            }
            Event::Computed(stage) => world.finish(stage, now),
            Event::Head => {}
            Event::Due => noted_due = None,
        }
        if source.due().is_some_and(|due| due <= now) {
            source.wake(now);
        }
        if now < head_free {
            continue;
        }
        // The head is free: it records what it has drawn, sends what it can, and takes the next answer.
        loop {
            if let Some(moving) = sampling.take() {
                if let Some(span) = trace.head.get_mut(moving.step as usize) {
                    span.sampled = now;
                }
                in_flight -= 1;
                source.answered(now, &moving.data, &moving.seconds);
            }
            let mut state = HeadState::Waiting;
            loop {
                match source.next(now) {
                    Next::Send(batch) => {
                        in_flight += 1;
                        trace.head.push(HeadSpan {
                            step,
                            group: batch.group,
                            prefill_tokens: batch.prefill_tokens as u32,
                            decode_tokens: batch.decode_tokens as u32,
                            formed: now,
                            sent: now,
                            answered: 0,
                            sampled: 0,
                        });
                        let moving = Moving { step, batch, data: Vec::new(), seconds: Vec::new() };
                        step += 1;
                        world.stages[0].queue.push_back((moving, now));
                        world.begin(0, now);
                    }
                    Next::Wait { for_pages } => {
                        if for_pages {
                            state = HeadState::KvWait;
                        }
                        break;
                    }
                    Next::Idle => {
                        state = HeadState::Idle;
                        break;
                    }
                }
            }
            if let Some(moving) = world.answers.pop_front() {
                note(&mut trace, &mut state_since, HeadState::Working, now);
                head_free = now + if moving.data.is_empty() { 0 } else { nanos(pipe.sampling) };
                sampling = Some(moving);
                if head_free > now {
                    world.at(head_free, Event::Head);
                    break;
                }
            } else {
                note(&mut trace, &mut state_since, state, now);
                break;
            }
        }
        if let Some(due) = source.due()
            && noted_due != Some(due)
        {
            noted_due = Some(due);
            world.at(due.max(now), Event::Due);
        }
    }
    if world.events.is_empty() && (in_flight > 0 || !matches!(source.next(now), Next::Idle)) {
        return Err(Deadlock { at: now });
    }
    note(&mut trace, &mut state_since, HeadState::Idle, now);
    trace.stages = world
        .stages
        .into_iter()
        .enumerate()
        .map(|(i, state)| StageTrace {
            device: format!("simulated {i}"),
            layers: (i, i + 1),
            spans: state.spans,
            ..StageTrace::default()
        })
        .collect();
    Ok((trace, now))
}

fn note(trace: &mut Trace, since: &mut (HeadState, Nanos), state: HeadState, now: Nanos) {
    if since.0 != state {
        if now > since.1 {
            trace.states.push(HeadInterval { state: since.0, from: since.1, to: now });
        }
        *since = (state, now);
    }
}

#[cfg(test)]
mod chaos;
#[cfg(test)]
mod tests;
