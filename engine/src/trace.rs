//! What happened when: every micro-batch's way through the stages, and what the head was doing.
//!
//! Always on. Each stage and the head write into a ring of their own that forgets the oldest; [`Recorder::snapshot`]
//! takes what is there. Times are nanoseconds on the pipeline's clock, which begins when the pipeline opens.

pub mod causes;
pub mod chrome;
#[cfg(test)]
mod simulated;
pub mod summary;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::law::{Share, alone_seconds};

/// Micro-batches that a stage's ring and the head's remember.
pub const RING: usize = 1 << 16;

/// Nanoseconds on the pipeline's clock.
pub type Nanos = u64;

/// One micro-batch in one stage. In order of time: `arrived` ≤ `taken` ≤ `started` ≤ `finished` ≤ `send_started` ≤
/// `sent`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSpan {
    /// The step, unique within the pipeline.
    pub step: u64,
    /// The decode group.
    pub group: u32,
    /// Tokens of all sequences.
    pub tokens: u32,
    /// Sequences.
    pub sequences: u32,
    /// The frame lay ready at this stage's end of the hop.
    pub arrived: Nanos,
    /// The stage took it.
    pub taken: Nanos,
    /// The device began.
    pub started: Nanos,
    /// The device was done; by the host's clock ([`Timestamps`]): and the result read back.
    pub finished: Nanos,
    /// The result was ready for the hop.
    pub send_started: Nanos,
    /// The hop had taken it; later than `send_started` where the hop was out of credits.
    pub sent: Nanos,
}

/// One micro-batch as the head saw it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadSpan {
    /// The step.
    pub step: u64,
    /// The decode group.
    pub group: u32,
    /// Prompt tokens in it.
    pub prefill_tokens: u32,
    /// Sequences that decode in it.
    pub decode_tokens: u32,
    /// The scheduler began to form it.
    pub formed: Nanos,
    /// The first stage's hop had taken it.
    pub sent: Nanos,
    /// The tail's answer was there; 0 while it is not.
    pub answered: Nanos,
    /// Its tokens were drawn and recorded; 0 while they are not.
    pub sampled: Nanos,
}

/// What the head was doing while it sent nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HeadState {
    /// Forming micro-batches, drawing tokens, making text.
    Working,
    /// Waiting for answers: every running sequence, or as many micro-batches as allowed, were in the pipe.
    Waiting,
    /// As `Waiting`, while requests waited that found no free pages.
    KvWait,
    /// Nothing was asked for.
    Idle,
    /// A stage was lost, and no pipeline was there.
    Outage,
}

/// A [`HeadState`] and how long it lasted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadInterval {
    /// What.
    pub state: HeadState,
    /// From.
    pub from: Nanos,
    /// Until.
    pub to: Nanos,
}

/// Which clock says when a stage's device began and was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Timestamps {
    /// The host's: when it had submitted, and when it saw the results.
    #[default]
    Host,
    /// The device's own.
    Device,
}

impl Timestamps {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Timestamps::Host => "host",
            Timestamps::Device => "device",
        }
    }
}

/// A stage and its micro-batches, by `started`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageTrace {
    /// Device, for people.
    pub device: String,
    /// First layer and the one after the last.
    pub layers: (usize, usize),
    /// Whose clock `started` and `finished` are by.
    pub timestamps: Timestamps,
    /// The micro-batches.
    pub spans: Vec<StageSpan>,
}

/// What a pipeline did, of as long as its rings remember.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The stages in order.
    pub stages: Vec<StageTrace>,
    /// The head's micro-batches, by `formed`.
    pub head: Vec<HeadSpan>,
    /// What the head was doing, by time, without overlap.
    pub states: Vec<HeadInterval>,
    /// Micro-batches that were forgotten.
    pub dropped: u64,
    /// What stages take from each other.
    pub shares: Vec<Share>,
}

/// Spans before and after one that may overlap with it.
const NEAR: usize = 64;

/// What stages took for a step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepSeconds {
    /// Seconds that each was busy, or would have been had nobody else computed on the same.
    pub alone: Vec<f64>,
    /// Seconds on the hops: to the first stage, between stages, and from the last.
    pub hops: f64,
}

/// A ring that forgets the oldest.
#[derive(Debug)]
struct Ring<T> {
    items: VecDeque<T>,
    dropped: u64,
}

impl<T> Ring<T> {
    fn push(&mut self, item: T) {
        if self.items.len() == RING {
            self.items.pop_front();
            self.dropped += 1;
        }
        self.items.push_back(item);
    }
}

impl<T: Copy> Ring<T> {
    /// The newest items, back to the last one that is not wanted.
    fn latest(&self, wanted: impl Fn(&T) -> bool) -> Vec<T> {
        let count = self.items.iter().rev().take_while(|item| wanted(item)).count();
        self.items.range(self.items.len() - count..).copied().collect()
    }
}

impl<T> Default for Ring<T> {
    fn default() -> Ring<T> {
        Ring { items: VecDeque::new(), dropped: 0 }
    }
}

/// Layers, and what happened there.
type StageRing = ((usize, usize), Mutex<StageSpans>);

/// What happened on a stage.
#[derive(Debug, Default)]
struct StageSpans {
    device: String,
    /// The clock of the device.
    timestamps: Timestamps,
    ring: Ring<StageSpan>,
    /// The latest is not handed on yet.
    is_open: bool,
    /// Spans of the ring's end that [`Recorder::take`] has not given yet.
    untaken: usize,
}

/// Where a pipeline writes its trace.
#[derive(Debug)]
pub struct Recorder {
    origin: Instant,
    stages: Vec<StageRing>,
    head: Mutex<Ring<HeadSpan>>,
    states: Mutex<Ring<HeadInterval>>,
    shares: OnceLock<Vec<Share>>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Recorder {
    /// A recorder for stages of (device, layers); its clock begins now.
    pub fn new(stages: impl IntoIterator<Item = (String, (usize, usize))>) -> Arc<Recorder> {
        Arc::new(Recorder::begun(Instant::now(), stages))
    }

    fn begun(origin: Instant, stages: impl IntoIterator<Item = (String, (usize, usize))>) -> Recorder {
        let ring = |device| Mutex::new(StageSpans { device, ..StageSpans::default() });
        Recorder {
            origin,
            stages: stages.into_iter().map(|(device, layers)| (layers, ring(device))).collect(),
            head: Mutex::default(),
            states: Mutex::default(),
            shares: OnceLock::new(),
        }
    }

    /// The recorder of a pipeline in the place of another one: the same where the stages have the same layers, else a new
    /// one with the same clock.
    pub fn after(
        before: &Arc<Recorder>,
        stages: impl IntoIterator<Item = (String, (usize, usize))>,
        shares: &[Share],
    ) -> Arc<Recorder> {
        let stages: Vec<_> = stages.into_iter().collect();
        let layers = |stage: &(String, (usize, usize))| stage.1;
        if before.shares() != shares || !stages.iter().map(layers).eq(before.stages.iter().map(|stage| stage.0)) {
            return Arc::new(Recorder::begun(before.origin, stages));
        }
        for ((device, _), (_, ring)) in stages.into_iter().zip(&before.stages) {
            let mut ring = locked(ring);
            (ring.device, ring.is_open) = (device, false);
        }
        before.clone()
    }

    /// The pipeline's clock.
    pub fn now(&self) -> Nanos {
        self.at(Instant::now())
    }

    /// An instant on the pipeline's clock.
    pub fn at(&self, instant: Instant) -> Nanos {
        instant.saturating_duration_since(self.origin).as_nanos() as Nanos
    }

    /// What this recorder's clock said at `instant`, negative before it began: added to times of a clock that began then,
    /// it makes them times of this one.
    pub fn ahead_of(&self, instant: Instant) -> i128 {
        let nanos = |duration: Duration| duration.as_nanos() as i128;
        match instant.checked_duration_since(self.origin) {
            Some(after) => nanos(after),
            None => -nanos(self.origin.duration_since(instant)),
        }
    }

    /// What stages take from each other; said once.
    pub fn shared(&self, shares: &[Share]) {
        self.shares.get_or_init(|| shares.to_vec());
    }

    fn shares(&self) -> &[Share] {
        self.shares.get().map_or(&[], Vec::as_slice)
    }

    /// Which clock a stage's device is timed by; the host's unless told otherwise.
    pub fn timed_by(&self, stage: usize, timestamps: Timestamps) {
        locked(&self.stages[stage].1).timestamps = timestamps;
    }

    /// A stage is about to hand a micro-batch on; [`Recorder::handed_on`] follows.
    pub fn stage(&self, stage: usize, span: StageSpan) {
        let mut spans = locked(&self.stages[stage].1);
        spans.ring.push(span);
        spans.is_open = true;
        spans.untaken = (spans.untaken + 1).min(RING);
    }

    /// A stage elsewhere has handed a micro-batch on.
    pub fn stage_done(&self, stage: usize, span: StageSpan) {
        self.stage(stage, span);
        locked(&self.stages[stage].1).is_open = false;
    }

    /// What a stage has handed on since the last call, for a recorder elsewhere.
    pub fn take(&self, stage: usize) -> Vec<StageSpan> {
        let mut spans = locked(&self.stages[stage].1);
        let (left, len) = (usize::from(spans.is_open), spans.ring.items.len());
        let taken = len - spans.untaken.min(len)..len - left;
        spans.untaken = left;
        spans.ring.items.range(taken).copied().collect()
    }

    /// The hop has taken a stage's latest micro-batch, if it is that of `step`.
    pub fn handed_on(&self, stage: usize, step: u64) {
        let now = self.now();
        let mut spans = locked(&self.stages[stage].1);
        spans.is_open = false;
        if let Some(span) = spans.ring.items.back_mut().filter(|span| span.step == step) {
            span.sent = now;
        }
    }

    /// The head has sent a micro-batch.
    pub fn sent(&self, span: HeadSpan) {
        locked(&self.head).push(span);
    }

    /// The tail's answer to `step` came at `answered` and was drawn from by `sampled`.
    pub fn answered(&self, step: u64, answered: Nanos, sampled: Nanos) {
        if let Some(span) = locked(&self.head).items.iter_mut().rev().find(|span| span.step == step) {
            (span.answered, span.sampled) = (answered, sampled);
        }
    }

    /// What the stages took for a step, once all of them have told of it. The head had it on its way from and until
    /// `sent` and `answered`.
    pub fn step(&self, step: u64, (sent, answered): (Nanos, Nanos)) -> Option<StepSeconds> {
        let shares = self.shares();
        let mut spans = Vec::new();
        let mut lines = Vec::new();
        for (_, ring) in &self.stages {
            let ring = &locked(ring).ring.items;
            let behind = ring.iter().rev().position(|span| span.step == step)?;
            let at = ring.len() - 1 - behind;
            spans.push(ring[at]);
            if shares.is_empty() {
                continue;
            }
            // What overlaps with a step is at most as many steps away as there may be in the pipe.
            let near = at.saturating_sub(NEAR)..ring.len().min(at + NEAR);
            lines.push(ring.range(near).map(|span| (span.started, span.finished)).collect());
        }
        let alone =
            |(stage, span): (usize, &StageSpan)| alone_seconds(stage, (span.started, span.finished), &lines, shares);
        let alone = spans.iter().enumerate().map(alone).collect();
        let left = std::iter::once(sent).chain(spans.iter().map(|span| span.sent));
        let arrived = spans.iter().map(|span| span.arrived).chain([answered]);
        let hops: Nanos = left.zip(arrived).map(|(left, arrived)| arrived.saturating_sub(left)).sum();
        Some(StepSeconds { alone, hops: hops as f64 * 1e-9 })
    }

    /// Whether every stage has told of a step.
    pub fn knows(&self, step: u64) -> bool {
        self.stages.iter().all(|(_, ring)| locked(ring).ring.items.iter().rev().any(|span| span.step == step))
    }

    /// Whether every stage has told of the latest step that the head has drawn from.
    pub fn is_settled(&self) -> bool {
        let latest = locked(&self.head).items.iter().rev().find(|span| span.sampled > 0).map(|span| span.step);
        let has = |step| {
            self.stages.iter().all(|(_, spans)| {
                let spans = locked(spans);
                spans.ring.items.back().is_some_and(|span| span.step >= step)
            })
        };
        latest.is_none_or(has)
    }

    /// Prompt tokens and decoded tokens of the micro-batches whose tokens were drawn since `from`.
    pub fn tokens_since(&self, from: Nanos) -> (u64, u64) {
        let head = locked(&self.head);
        let recent = head.items.iter().rev().take_while(|span| span.sampled == 0 || span.sampled >= from);
        recent.filter(|span| span.sampled > 0).fold((0, 0), |(prompt, decoded), span| {
            (prompt + u64::from(span.prefill_tokens), decoded + u64::from(span.decode_tokens))
        })
    }

    /// The head was in `state` between two times; intervals of one state that touch become one.
    pub fn state(&self, state: HeadState, from: Nanos, to: Nanos) {
        let mut states = locked(&self.states);
        match states.items.back_mut() {
            Some(last) if last.state == state && last.to == from => last.to = to,
            _ if to > from => states.push(HeadInterval { state, from, to }),
            _ => {}
        }
    }

    /// A stage was lost: since `from` nothing came, whatever was said of that time, and there was no pipeline until `to`.
    pub fn outage(&self, from: Nanos, to: Nanos) {
        {
            let mut states = locked(&self.states);
            while states.items.back().is_some_and(|last| last.from >= from) {
                states.items.pop_back();
            }
            if let Some(last) = states.items.back_mut() {
                last.to = last.to.min(from);
            }
        }
        self.state(HeadState::Outage, from, to);
    }

    /// What is remembered now.
    pub fn snapshot(&self) -> Trace {
        self.since(0)
    }

    /// What is remembered now of what was not over at `from`.
    pub fn since(&self, from: Nanos) -> Trace {
        let mut dropped = 0;
        let stages = self.stages.iter().map(|(layers, ring)| {
            let StageSpans { device, timestamps, ring, .. } = &*locked(ring);
            dropped += ring.dropped;
            let (device, spans) = (device.clone(), ring.latest(|span| span.sent >= from));
            StageTrace { device, layers: *layers, timestamps: *timestamps, spans }
        });
        let stages = stages.collect();
        let head = locked(&self.head);
        Trace {
            stages,
            head: head.latest(|span| span.sampled == 0 || span.sampled >= from),
            states: locked(&self.states).latest(|state| state.to >= from),
            dropped: dropped + head.dropped,
            shares: self.shares().to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_that_began_earlier_or_later_are_told_apart() {
        let recorder = Recorder::new([("a".to_owned(), (0, 1))]);
        let (before, after) = (recorder.origin - Duration::from_millis(7), recorder.origin + Duration::from_millis(9));
        assert_eq!([recorder.ahead_of(before), recorder.ahead_of(after)], [-7_000_000, 9_000_000]);
    }

    #[test]
    fn a_step_is_told_once_all_stages_have_told_and_without_the_company_that_it_had() {
        let recorder = || Recorder::new([("a".to_owned(), (0, 1)), ("b".to_owned(), (1, 2))]);
        let span = |step, arrived, started, finished, sent| StageSpan {
            step,
            arrived,
            taken: arrived,
            started,
            finished,
            send_started: finished,
            sent,
            ..StageSpan::default()
        };
        let (recorder, apart) = (recorder(), recorder());
        recorder.shared(&[Share { capacity: 1.0, stages: vec![(0, 1.0), (1, 1.0)] }]);
        recorder.stage(0, span(1, 1_100, 2_000, 6_000, 6_500));
        assert_eq!(recorder.step(1, (1_000, 0)), None);
        recorder.stage(1, span(1, 6_800, 7_000, 11_000, 12_000));
        // The second micro-batch is on the first stage while the first one is on the second.
        recorder.stage(0, span(2, 5_000, 9_000, 13_000, 13_000));
        assert!(recorder.knows(1) && !recorder.knows(2));
        let close = |found: f64, nanos: f64| assert!((found * 1e9 - nanos).abs() < 1e-3, "{found} for {nanos} ns");
        let found = recorder.step(1, (1_000, 12_100)).unwrap();
        close(found.alone[0], 4_000.0);
        close(found.alone[1], 3_000.0);
        close(found.hops, 500.0);
        // The same where nothing is shared.
        apart.stage(0, span(1, 1_100, 2_000, 6_000, 6_500));
        apart.stage(1, span(1, 6_800, 7_000, 11_000, 12_000));
        apart.stage(0, span(2, 5_000, 9_000, 13_000, 13_000));
        close(apart.step(1, (1_000, 12_100)).unwrap().alone[1], 4_000.0);
    }

    #[test]
    fn the_ring_forgets_the_oldest_and_says_so() {
        let recorder = Recorder::new([("a".to_owned(), (0, 2))]);
        for step in 0..RING as u64 + 3 {
            recorder.stage(0, StageSpan { step, ..StageSpan::default() });
        }
        let trace = recorder.snapshot();
        assert_eq!((trace.stages[0].spans.len(), trace.stages[0].spans[0].step, trace.dropped), (RING, 3, 3));
    }

    #[test]
    fn recent_tokens_are_those_drawn_since() {
        let recorder = Recorder::new([]);
        for step in 1..=4 {
            let span = HeadSpan { step, prefill_tokens: 10, decode_tokens: step as u32, ..HeadSpan::default() };
            recorder.sent(span);
        }
        for step in [1, 2, 4] {
            recorder.answered(step, 10 * step, 10 * step + 5);
        }
        assert_eq!(recorder.tokens_since(0), (30, 7), "the third has no answer");
        assert_eq!(recorder.tokens_since(25), (20, 6));
        assert_eq!(recorder.tokens_since(46), (0, 0));
    }

    #[test]
    fn states_that_touch_become_one() {
        let recorder = Recorder::new([]);
        recorder.state(HeadState::Working, 0, 5);
        recorder.state(HeadState::Working, 5, 9);
        recorder.state(HeadState::Waiting, 9, 9);
        recorder.state(HeadState::Waiting, 9, 12);
        let states: Vec<_> = recorder.snapshot().states.iter().map(|s| (s.state, s.from, s.to)).collect();
        assert_eq!(states, [(HeadState::Working, 0, 9), (HeadState::Waiting, 9, 12)]);
    }
}
