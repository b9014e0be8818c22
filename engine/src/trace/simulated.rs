//! Traces for tests: of a pipeline in virtual time, where nothing begins before what it needs is there; and records that
//! make no sense.

use proptest::prelude::*;

use super::{HeadInterval, HeadSpan, HeadState, Nanos, StageSpan, StageTrace, Trace};

/// A pipeline.
#[derive(Clone, Debug)]
pub struct Setup {
    /// α and β of each stage.
    pub stages: Vec<(Nanos, Nanos)>,
    /// Latencies of the hops: head to first stage, between stages, tail to head.
    pub hops: Vec<Nanos>,
    /// Micro-batches that each stage's end of a hop holds.
    pub credits: usize,
    /// The stage's own work before the device begins, and after it ends.
    pub overhead: (Nanos, Nanos),
    /// What the head takes to form, and to draw.
    pub head: (Nanos, Nanos),
}

/// A micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct Work {
    pub group: u32,
    pub prefill: u32,
    pub decode: u32,
    /// The micro-batch whose tokens must be drawn before.
    pub after: Option<usize>,
    /// Nothing was asked for so long before it.
    pub idle: Nanos,
    /// What the head is in while it waits before it.
    pub kv_wait: bool,
    /// What its time in the stages is multiplied with, in percent; 0 is 100.
    pub percent: Nanos,
}

impl Setup {
    /// Equal stages and nothing else.
    pub fn equal(stages: usize, time: Nanos) -> Setup {
        Setup {
            stages: vec![(time, 0); stages],
            hops: vec![0; stages + 1],
            credits: 1000,
            overhead: (0, 0),
            head: (0, 0),
        }
    }

    /// What the pipeline does with some micro-batches.
    pub fn run(&self, work: &[Work]) -> Trace {
        let mut run = Run { setup: self, trace: self.empty(), now: 0, drawn: 0 };
        for (step, work) in work.iter().enumerate() {
            run.step(step, work);
        }
        run.draw_until(work.len(), HeadState::Waiting);
        run.trace
    }

    fn empty(&self) -> Trace {
        let stage = |i| StageTrace { device: format!("card {i}"), layers: (8 * i, 8 * i + 8), ..StageTrace::default() };
        Trace { stages: (0..self.stages.len()).map(stage).collect(), ..Trace::default() }
    }
}

/// `rounds` tokens of `groups` groups of `sequences` sequences each.
pub fn ring(groups: usize, rounds: usize, sequences: u32) -> Vec<Work> {
    let work = |step: usize| Work {
        group: (step % groups) as u32,
        decode: sequences,
        after: step.checked_sub(groups),
        ..Work::default()
    };
    (0..groups * rounds).map(work).collect()
}

/// The trace in tests/data/trace: prompts, two answers at once, six, a pause, and one that waits for pages. One stage
/// and one hop are slower than the others.
pub fn sample() -> Trace {
    const US: Nanos = 1_000;
    let setup = Setup {
        stages: vec![(3_000 * US, 50 * US), (3_100 * US, 52 * US), (4_600 * US, 72 * US), (3_300 * US, 55 * US)],
        hops: vec![20 * US, 300 * US, 2_400 * US, 300 * US, 250 * US],
        credits: 1,
        overhead: (250 * US, 150 * US),
        head: (60 * US, 350 * US),
    };
    let chunk = |group: u32| Work { group, prefill: 64, percent: 100 - 2 * Nanos::from(group), ..Work::default() };
    let mut work: Vec<Work> = (0..4).map(chunk).collect();
    let mut rounds = |groups: usize, rounds: usize, first: Work| {
        let begin = work.len();
        for step in 0..groups * rounds {
            let after = if step < groups { begin - 1 } else { begin + step - groups };
            let percent = 95 + (step as Nanos * 7) % 11;
            let own = if step == 0 { first } else { Work { kv_wait: first.kv_wait, ..Work::default() } };
            work.push(Work { group: (step % groups) as u32, decode: 2, after: Some(after), percent, ..own });
        }
    };
    rounds(2, 3, Work::default());
    rounds(6, 3, Work::default());
    rounds(1, 2, Work { idle: 25_000 * US, ..Work::default() });
    rounds(1, 3, Work { kv_wait: true, ..Work::default() });
    let mut trace = setup.run(&work);
    for (stage, layers) in trace.stages.iter_mut().zip([(0, 8), (8, 16), (16, 25), (25, 33)]) {
        stage.layers = layers;
    }
    trace
}

struct Run<'a> {
    setup: &'a Setup,
    trace: Trace,
    /// Of the head.
    now: Nanos,
    /// Micro-batches whose tokens are drawn.
    drawn: usize,
}

impl Run<'_> {
    fn state(&mut self, state: HeadState, to: Nanos) {
        if to > self.now {
            self.trace.states.push(HeadInterval { state, from: self.now, to });
            self.now = to;
        }
    }

    /// Draws the tokens of the first `count` micro-batches.
    fn draw_until(&mut self, count: usize, waiting: HeadState) {
        while self.drawn < count {
            let answered = self.trace.head[self.drawn].answered;
            self.state(waiting, answered);
            self.state(HeadState::Working, self.now + self.setup.head.1);
            self.trace.head[self.drawn].sampled = self.now;
            self.drawn += 1;
        }
    }

    fn step(&mut self, step: usize, work: &Work) {
        let waiting = if work.kv_wait { HeadState::KvWait } else { HeadState::Waiting };
        self.draw_until(if work.idle > 0 { step } else { work.after.map_or(0, |after| after + 1) }, waiting);
        self.state(HeadState::Idle, self.now + work.idle);
        let formed = self.now;
        let sent = self.taken(0, step).max(formed + self.setup.head.0);
        self.state(HeadState::Working, sent);
        let mut at = sent;
        for stage in 0..self.setup.stages.len() {
            at = self.visit(stage, step, work, at + self.setup.hops[stage]);
        }
        let answered = at + self.setup.hops[self.setup.stages.len()];
        self.trace.head.push(HeadSpan {
            step: step as u64,
            group: work.group,
            prefill_tokens: work.prefill,
            decode_tokens: work.decode,
            formed,
            sent,
            answered,
            sampled: 0,
        });
    }

    /// When a stage makes room on its end of the hop for a micro-batch.
    fn taken(&self, stage: usize, step: usize) -> Nanos {
        let before = step.checked_sub(self.setup.credits);
        let span = before.and_then(|before| self.trace.stages.get(stage)?.spans.get(before));
        span.map_or(0, |span| span.taken)
    }

    /// Returns when the hop has taken the result.
    fn visit(&mut self, stage: usize, step: usize, work: &Work, arrived: Nanos) -> Nanos {
        let tokens = work.prefill + work.decode;
        let (alpha, beta) = self.setup.stages[stage];
        let percent = if work.percent == 0 { 100 } else { work.percent };
        let time = (alpha + beta * Nanos::from(tokens)) * percent / 100;
        let taken = arrived.max(self.trace.stages[stage].spans.last().map_or(0, |span| span.sent));
        let started = taken + self.setup.overhead.0;
        let finished = started + time;
        let send_started = finished + self.setup.overhead.1;
        let sent = send_started.max(self.taken(stage + 1, step));
        self.trace.stages[stage].spans.push(StageSpan {
            step: step as u64,
            group: work.group,
            tokens,
            sequences: work.decode.max(1),
            arrived,
            taken,
            started,
            finished,
            send_started,
            sent,
        });
        sent
    }
}

prop_compose! {
    fn junk_span()(step in 0u64..20, at in prop::array::uniform6(0u64..1000), wild in 0usize..30, huge in any::<u64>()) -> StageSpan {
        let mut at = at;
        if let Some(at) = at.get_mut(wild) {
            *at = huge;
        }
        let [arrived, taken, started, finished, send_started, sent] = at;
        StageSpan { step, arrived, taken, started, finished, send_started, sent, ..StageSpan::default() }
    }
}

prop_compose! {
    /// Any records at all.
    pub fn junk()(
        stages in prop::collection::vec(prop::collection::vec(junk_span(), 0..20), 0..4),
        head in prop::collection::vec(junk_span(), 0..20),
        states in prop::collection::vec((0usize..4, 0u64..1000, 0u64..1000), 0..20),
    ) -> Trace {
        use HeadState::*;
        let span = |s: &StageSpan| HeadSpan { step: s.step, formed: s.arrived, sent: s.taken, answered: s.started, sampled: s.sent, ..HeadSpan::default() };
        Trace {
            stages: stages.into_iter().map(|spans| StageTrace { spans, ..StageTrace::default() }).collect(),
            head: head.iter().map(span).collect(),
            states: states.into_iter().map(|(s, from, to)| HeadInterval { state: [Working, Waiting, KvWait, Idle][s], from, to }).collect(),
            dropped: 0,
            shares: Vec::new(),
        }
    }
}
