//! No device at all: a run takes as long as a cost law says, and finds something plausible. Schedules and transports are
//! tested on it with real threads and real ports, with more stages than a machine has devices or cores.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pp_shaders::params::TopK;
use pp_shaders::profile::TOP_K;
use pp_shaders::{Kernel, Profile};

use super::in_flight::InFlight;
use super::{Backend, Counts, DeviceError, DeviceLimits, Done, OpTime, ProgramId, Run, Ticket};
use crate::program::{BufferId, Op, Program, Shape};

/// What sleeping may be late by: so much is waited for awake.
const AWAKE: Duration = Duration::from_micros(200);
/// Words of a row of `topk_merge.wgsl`'s result.
const RESULT_WORDS: usize = 2 * (TOP_K as usize + 2);

/// What a run takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Every run.
    pub alpha: Duration,
    /// Each of its tokens.
    pub beta: Duration,
    /// Every run, for each layer.
    pub layer_alpha: Duration,
    /// Each token, for each layer.
    pub layer_beta: Duration,
    /// Every run that logits are wanted of.
    pub head_alpha: Duration,
    /// Each row that they are wanted of.
    pub head_beta: Duration,
}

/// A backend without buffers. Runs follow one another without a gap where the next one is submitted in time: when a run
/// finishes is computed, not observed.
pub struct Paced {
    pace: Pace,
    profile: Profile,
    limits: DeviceLimits,
    /// While it is set nothing finishes.
    hold: Arc<AtomicBool>,
    /// So many times longer everything takes, beyond what it should.
    brake: Arc<AtomicU32>,
    programs: Vec<Program>,
    /// Where rows that logits are wanted for are described, and where what was found of them is read.
    outputs: Option<BufferId>,
    result: Option<BufferId>,
    vocab: u32,
    in_flight: InFlight<Waiting>,
    /// Bytes of each buffer.
    buffers: Vec<u64>,
    counts: Counts,
}

struct Waiting {
    takes: Duration,
    reads: Vec<Vec<u8>>,
}

impl Paced {
    /// A backend whose runs take what `pace` says; one without programs takes no time. Work is laid out as `profile`
    /// would. While `hold` is set nothing finishes: a device that hangs. With a `brake` of n everything takes 1 + n times as
    /// long.
    pub fn new(
        pace: Pace,
        profile: Profile,
        limits: DeviceLimits,
        hold: Arc<AtomicBool>,
        brake: Arc<AtomicU32>,
    ) -> Paced {
        Paced {
            hold,
            brake,
            pace,
            profile,
            limits,
            programs: Vec::new(),
            outputs: None,
            result: None,
            vocab: 0,
            in_flight: InFlight::default(),
            buffers: Vec::new(),
            counts: Counts::default(),
        }
    }

    fn takes(&self, programs: &[(ProgramId, Shape)]) -> Duration {
        let Some((body, shape)) = programs.first() else { return Duration::ZERO };
        let pace = &self.pace;
        let layers = layers(&self.programs[body.0]);
        let body = pace.alpha + pace.beta * shape.tokens + (pace.layer_alpha + pace.layer_beta * shape.tokens) * layers;
        let heads = programs.iter().skip(1).map(|(_, shape)| pace.head_alpha + pace.head_beta * shape.outputs);
        (body + heads.sum::<Duration>()) * (1 + self.brake.load(Ordering::Relaxed))
    }

    /// The results of rows that logits are wanted for: [row, target, 1 / temperature, candidates] each.
    fn results(&self, requests: &[u8], bytes: usize) -> Vec<u8> {
        let rows = requests.chunks_exact(16).map(bytemuck::pod_read_unaligned::<[u32; 4]>);
        let words: Vec<u32> = rows.flat_map(|row| self.result(row)).collect();
        let mut data = bytemuck::cast_slice(&words).to_vec();
        data.resize(bytes, 0);
        data
    }

    /// One row of `topk_merge.wgsl`'s result. The candidates are from the middle of the vocabulary, where no special
    /// tokens are; each logit is one below the one before, and there is nothing beside the candidates.
    fn result(&self, [_, target, inverse_temperature, wanted]: [u32; 4]) -> [u32; RESULT_WORDS] {
        let count = wanted.min(TOP_K).min(self.vocab);
        let first = self.vocab / 2;
        let sum = |scale: f32| (0..count).map(|i| (-scale * i as f32).exp()).sum::<f32>().ln();
        let mut row = [0; RESULT_WORDS];
        row[0] = sum(1.0).to_bits();
        row[1] = sum(f32::from_bits(inverse_temperature)).to_bits();
        row[2] = (-(target.abs_diff(first) as f32)).to_bits();
        row[3] = count;
        for (i, candidate) in (0..count).zip(row[4..].chunks_exact_mut(2)) {
            candidate.copy_from_slice(&[(first + i) % self.vocab, (-(i as f32)).to_bits()]);
        }
        row
    }
}

/// Layers of a program: their operations have notes that begin with `blk.` and the layer.
fn layers(program: &Program) -> u32 {
    let layer = |op: &Op| {
        let digits = op.note.strip_prefix("blk.")?;
        Some(digits.bytes().take_while(u8::is_ascii_digit).fold(0u32, |n, digit| 10 * n + u32::from(digit - b'0')))
    };
    program.ops.iter().filter_map(layer).collect::<std::collections::BTreeSet<_>>().len() as u32
}

/// Returns at `deadline`, late by microseconds where a core is free.
fn sleep_until(deadline: Instant) {
    loop {
        match deadline.saturating_duration_since(Instant::now()) {
            Duration::ZERO => return,
            left if left > AWAKE => std::thread::sleep(left - AWAKE),
            _ => std::thread::yield_now(),
        }
    }
}

impl Backend for Paced {
    fn name(&self) -> &str {
        "paced (computes nothing)"
    }

    fn profile(&self) -> &Profile {
        &self.profile
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn create(&mut self, label: &str, bytes: usize) -> Result<BufferId, DeviceError> {
        let id = BufferId(self.buffers.len() as u32);
        self.counts.buffers += 1;
        self.buffers.push(bytes as u64);
        match label {
            "outputs" => self.outputs = Some(id),
            "result" => self.result = Some(id),
            _ => {}
        }
        Ok(id)
    }

    fn write(&mut self, _buffer: BufferId, _offset: usize, _data: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn clear(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.in_flight.assert_empty();
        self.programs.clear();
        buffers.iter().for_each(|buffer| self.buffers[buffer.0 as usize] = 0);
        Ok(())
    }

    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        if let Some(op) = program.ops.iter().find(|op| op.variant.kernel == Kernel::TopkMerge) {
            self.vocab = bytemuck::pod_read_unaligned::<TopK>(&op.params).vocab;
        }
        self.programs.push(program);
        Ok(ProgramId(self.programs.len() - 1))
    }

    fn submit(&mut self, run: &Run<'_>) -> Result<Ticket, DeviceError> {
        let submitted = Instant::now();
        self.counts.submissions += 1;
        let requests = run.writes.iter().find(|(buffer, _)| Some(*buffer) == self.outputs).map_or(&[][..], |w| w.1);
        let reads = run.reads.iter().map(|(buffer, bytes)| {
            if Some(*buffer) == self.result { self.results(requests, *bytes) } else { vec![0; *bytes] }
        });
        let waiting = Waiting { takes: self.takes(run.programs), reads: reads.collect() };
        Ok(self.in_flight.push(submitted, waiting))
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Done, DeviceError> {
        let (started, run) = self.in_flight.pop(ticket);
        let finished = started + run.takes;
        sleep_until(finished);
        while self.hold.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        self.in_flight.finish(finished);
        Ok(Done { reads: run.reads, started, finished })
    }

    fn time(&mut self, _programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        Ok(Vec::new())
    }

    fn program(&self, id: ProgramId) -> &Program {
        &self.programs[id.0]
    }

    fn allocated_bytes(&self) -> u64 {
        self.buffers.iter().sum()
    }

    fn counts(&self) -> Counts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALPHA: Duration = Duration::from_millis(3);
    const BETA: Duration = Duration::from_micros(50);

    fn paced() -> Paced {
        let limits = DeviceLimits { binding_bytes: 1 << 30, buffer_bytes: 1 << 30 };
        let pace = Pace { alpha: ALPHA, beta: BETA, ..Pace::default() };
        Paced::new(pace, Profile::CARD, limits, Arc::default(), Arc::default())
    }

    #[test]
    fn overlapping_submissions_follow_one_another_without_a_gap() {
        let mut backend = paced();
        let program = backend.prepare(Program::default()).unwrap();
        let submit = |backend: &mut Paced, tokens| {
            let programs = [(program, Shape { tokens, ..Shape::default() })];
            backend.submit(&Run { programs: &programs, writes: &[], reads: &[], next: &[] }).unwrap()
        };
        let before = Instant::now();
        let (a, b) = (submit(&mut backend, 1), submit(&mut backend, 20));
        let both = Instant::now();
        let a = backend.collect(a).unwrap();
        assert!(before <= a.started && a.finished <= Instant::now());
        let c = submit(&mut backend, 2);
        let b = backend.collect(b).unwrap();
        assert!(b.started == a.finished || a.finished < both, "it was there when the one before finished");
        assert!(b.finished <= Instant::now());
        let c = backend.collect(c).unwrap();
        let late = Instant::now();
        let d = submit(&mut backend, 3);
        let d = backend.collect(d).unwrap();
        assert!(d.started >= late, "nothing starts before it is submitted");
        let took = [a, b, c, d].map(|done| done.finished - done.started);
        assert_eq!(took, [1, 20, 2, 3].map(|tokens| ALPHA + BETA * tokens));
    }

    #[test]
    fn a_row_has_the_candidates_that_were_asked_for() {
        let backend = Paced { vocab: 100, ..paced() };
        let row = backend.result([0, 52, 0.5f32.to_bits(), 60]);
        let float = |i: usize| f32::from_bits(row[i]);
        assert_eq!((row[3], row[4], row[6], row[4 + 2 * 59]), (60, 50, 51, 9));
        assert_eq!((float(2), float(5), float(7)), (-2.0, 0.0, -1.0));
        assert!((float(0) - 0.4587).abs() < 1e-3 && (float(1) - 0.9328).abs() < 1e-3, "{} {}", float(0), float(1));
        assert_eq!(Paced { vocab: 7, ..paced() }.result([0, 0, 1.0f32.to_bits(), 60])[3], 7);
    }
}
