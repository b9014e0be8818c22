//! Two micro-batches on a device at once: the same results as one after the other, nothing made on the way, and a worker
//! that keeps its device so.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use pp_engine::backend::gpu::Gpu;
use pp_engine::backend::gpu::adapter::Adapter;
use pp_engine::backend::reference::Reference;
use pp_engine::backend::{Backend, Counts, DeviceError, DeviceLimits, Done, OpTime, ProgramId, Run, Ticket};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::message::{self, OutputRequest, Span, Step};
use pp_engine::pipeline::Device;
use pp_engine::program::{BufferId, Program, Shape};
use pp_engine::stage::{Stage, StageOutput};
use pp_engine::trace::{Recorder, StageSpan, Timestamps};
use pp_engine::worker::{self, Counters, WorkerError};
use pp_shaders::{PAGE, Profile};
use pp_transport::local::pair;
use pp_transport::{Frame, FrameHeader, Port, PortError};

use crate::support::{adapter, checkpoint, exact, gpu, twins};

const CONTEXT: usize = 128;
const PROMPT: u32 = 20;

/// The stages of a pipeline of two over `device`, for two sequences.
fn two_stages(checkpoint: &Checkpoint, device: &Device) -> [Stage; 2] {
    two_stages_on(checkpoint, device, || device.open().unwrap())
}

/// The same, on backends that were opened otherwise.
fn two_stages_on(checkpoint: &Checkpoint, device: &Device, open: impl Fn() -> Box<dyn Backend>) -> [Stage; 2] {
    let options = StageOptions { sequences: 2, kv_tokens: 2 * CONTEXT, ..exact(CONTEXT) };
    let specs = StageSpec::pipeline(&[1, checkpoint.config.layers - 1]);
    let stages = specs.into_iter().map(|spec| {
        let layout = StageLayout::new(checkpoint, spec, options, device.profile(), device.limits()).unwrap();
        Stage::open(checkpoint, layout, open(), &mut |_| true).unwrap()
    });
    stages.collect::<Vec<_>>().try_into().ok().unwrap()
}

/// `count` tokens of a sequence, which has all its pages from the start.
fn step(sequence: u64, start: u32, count: u32) -> Step {
    let pages = (CONTEXT / PAGE) as u32;
    let first = pages * sequence as u32;
    let new_pages = if start == 0 { (first..first + pages).collect() } else { Vec::new() };
    Step {
        spans: vec![Span { request: 0, sequence, start, count, new_pages }],
        ids: (start..start + count).map(|i| (i * 37 + 11 * sequence as u32) % 250).collect(),
        outputs: vec![OutputRequest {
            row: count - 1,
            target: 0,
            top_k: 4,
            inverse_temperature: 1.0,
            whole_row: true,
            edits: vec![],
        }],
        ..Step::default()
    }
}

/// A prompt of each sequence, then tokens in turns.
fn steps() -> Vec<Step> {
    let tokens = (PROMPT..PROMPT + 8).flat_map(|start| [0, 1].map(|sequence| step(sequence, start, 1)));
    [0, 1].map(|sequence| step(sequence, 0, PROMPT)).into_iter().chain(tokens).collect()
}

/// Does steps one after the other.
fn alone(stage: &mut Stage, steps: &[Step], hidden: &[Vec<f32>]) -> Vec<StageOutput> {
    steps.iter().zip(hidden).map(|(step, hidden)| stage.step(step, hidden).unwrap()).collect()
}

/// Does steps so that each is finished after the next has begun.
fn overlapped(stage: &mut Stage, steps: &[Step], hidden: &[Vec<f32>]) -> Vec<StageOutput> {
    let mut outputs = Vec::new();
    let mut running = None;
    for (step, hidden) in steps.iter().zip(hidden) {
        let begun = stage.begin(step, hidden).unwrap();
        outputs.extend(running.replace(begun).map(|older| stage.finish(older).unwrap().output));
    }
    outputs.extend(running.map(|last| stage.finish(last).unwrap().output));
    outputs
}

fn hidden(outputs: &[StageOutput]) -> Vec<Vec<f32>> {
    let rows = outputs.iter().map(|output| match output {
        StageOutput::Hidden(hidden) => hidden.clone(),
        StageOutput::Outputs(_) => panic!("the first stage hands activations on"),
    });
    rows.collect()
}

#[test]
fn two_micro_batches_at_once_have_the_results_of_one_after_the_other() {
    let checkpoint = checkpoint("tiny/llama-untied");
    let steps = steps();
    let nothing = vec![Vec::new(); steps.len()];
    for device in [twins(), gpu(Profile::SOFTWARE), gpu(Profile::CARD)] {
        let [mut first, mut last] = two_stages(&checkpoint, &device);
        let expected = alone(&mut first, &steps, &nothing);
        let expected_logits = alone(&mut last, &steps, &hidden(&expected));
        let [mut first, mut last] = two_stages(&checkpoint, &device);
        let found = overlapped(&mut first, &steps, &nothing);
        assert!(found == expected, "activations on {}", device.name());
        assert!(overlapped(&mut last, &steps, &hidden(&found)) == expected_logits, "logits on {}", device.name());
    }
}

#[test]
fn a_steady_decode_makes_no_buffers() {
    let checkpoint = checkpoint("tiny/llama-untied");
    let [mut first, mut last] = two_stages(&checkpoint, &gpu(Profile::SOFTWARE));
    let steps = steps();
    let outputs = alone(&mut first, &steps, &vec![Vec::new(); steps.len()]);
    alone(&mut last, &steps, &hidden(&outputs));
    let made = |stage: &Stage| {
        let counts = stage.backend().counts();
        (counts.buffers, counts.query_sets)
    };
    let before = [made(&first), made(&last)];
    // Across a page's end, so that page tables grow.
    let start = PROMPT + 8;
    let tokens: Vec<Step> =
        (start..start + 20).flat_map(|start| [0, 1].map(|sequence| step(sequence, start, 1))).collect();
    let outputs = overlapped(&mut first, &tokens, &vec![Vec::new(); tokens.len()]);
    overlapped(&mut last, &tokens, &hidden(&outputs));
    assert_eq!([made(&first), made(&last)], before);
    assert!(before[0].0 > 0, "buffers are counted");
    let has_clock = adapter().timestamps() == Timestamps::Device;
    assert_eq!(before[0].1, u64::from(has_clock), "what timestamps need is made when the stage opens");
}

/// Whoever waits before it collects a run, as a worker does whose hop is full, finds when the run ended by the device's
/// clock: whole runs and those that are cut, alone and with one more behind.
#[test]
fn a_run_has_finished_when_its_device_was_done_not_when_it_is_collected() {
    const LATE: Duration = Duration::from_millis(300);
    let checkpoint = checkpoint("tiny/llama-untied");
    for (adapter, target) in Adapter::all().into_iter().flat_map(|a| [(a.clone(), Duration::MAX), (a, Duration::ZERO)])
    {
        let name = format!("{}, submissions of {target:?}", adapter.name());
        let device = Device::Gpu { adapter: adapter.clone(), profile: adapter.profile(), checked: true };
        let open = || {
            let mut gpu = Gpu::open(&adapter, adapter.profile(), true).unwrap();
            gpu.set_submission_target(target);
            Box::new(gpu) as Box<dyn Backend>
        };
        let [mut stage, _] = two_stages_on(&checkpoint, &device, open);
        assert_eq!(stage.backend().timestamps(), adapter.timestamps(), "{name}");
        alone(&mut stage, &steps(), &vec![Vec::new(); steps().len()]);
        let mut before = Instant::now();
        for start in PROMPT + 8..PROMPT + 12 {
            let begun = [0, 1].map(|sequence| stage.begin(&step(sequence, start, 1), &[]).unwrap());
            std::thread::sleep(LATE);
            for pending in begun {
                let done = stage.finish(pending).unwrap();
                let now = Instant::now();
                assert!(before <= done.started && done.started <= done.finished && done.finished <= now, "{name}");
                if adapter.timestamps() == Timestamps::Device {
                    let (took, old) = (done.finished - done.started, now - done.finished);
                    assert!(took < LATE / 2, "{name}: it took {took:?}");
                    assert!(took > Duration::ZERO && old > LATE / 2, "{name}: it ended {old:?} ago");
                }
                before = done.finished;
            }
        }
    }
}

#[test]
fn runs_that_are_cut_into_submissions_have_the_same_results() {
    let checkpoint = checkpoint("tiny/llama-untied");
    let (device, steps) = (gpu(Profile::CARD), steps());
    let mut found = [Duration::MAX, Duration::ZERO].map(|target| {
        let open = || {
            let mut gpu = Gpu::open(&adapter(), Profile::CARD, true).unwrap();
            gpu.set_submission_target(target);
            Box::new(gpu) as Box<dyn Backend>
        };
        let [mut first, mut last] = two_stages_on(&checkpoint, &device, open);
        let before = [&first, &last].map(|stage| stage.backend().counts().submissions);
        let outputs = overlapped(&mut first, &steps, &vec![Vec::new(); steps.len()]);
        let logits = overlapped(&mut last, &steps, &hidden(&outputs));
        let after = [&first, &last].map(|stage| stage.backend().counts().submissions);
        let dispatches = |stage: &mut Stage| -> usize {
            let programs = steps.iter().flat_map(|step| {
                let span = &step.spans[0];
                stage.programs(span.start as usize, span.count as usize, 1).unwrap()
            });
            let programs: Vec<_> = programs.collect();
            programs.iter().map(|(id, _)| stage.program(*id).ops.len()).sum()
        };
        let dispatches = [dispatches(&mut first) as u64, dispatches(&mut last) as u64];
        ((outputs, logits), [after[0] - before[0], after[1] - before[1]], dispatches)
    });
    let [(whole, one, _), (cut, many, dispatches)] = &mut found;
    assert_eq!(*one, [steps.len() as u64; 2], "a long target: a submission a step");
    assert_eq!(many, dispatches, "no target: a submission a dispatch");
    assert!(whole == cut, "the results are the same");
}

/// Hears of submissions and collections, and says whether what they find is to be right.
type Tell = Box<dyn FnMut(&'static str) -> bool + Send>;

/// The twins, and a word before every submission and collection.
struct Told {
    inner: Reference,
    tell: Tell,
}

impl Backend for Told {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn profile(&self) -> &Profile {
        self.inner.profile()
    }
    fn limits(&self) -> DeviceLimits {
        self.inner.limits()
    }
    fn create(&mut self, label: &str, bytes: usize) -> Result<BufferId, DeviceError> {
        self.inner.create(label, bytes)
    }
    fn write(&mut self, buffer: BufferId, offset: usize, data: &[u8]) -> Result<(), DeviceError> {
        self.inner.write(buffer, offset, data)
    }
    fn clear(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.inner.clear(buffers)
    }
    fn prepare(&mut self, program: Program) -> Result<ProgramId, DeviceError> {
        self.inner.prepare(program)
    }
    fn submit(&mut self, run: &Run<'_>) -> Result<Ticket, DeviceError> {
        (self.tell)("submit");
        self.inner.submit(run)
    }
    fn collect(&mut self, ticket: Ticket) -> Result<Done, DeviceError> {
        let is_right = (self.tell)("collect");
        let mut done = self.inner.collect(ticket)?;
        if let Some(byte) = done.reads.first_mut().filter(|_| !is_right).and_then(|bytes| bytes.first_mut()) {
            *byte ^= 1;
        }
        Ok(done)
    }
    fn time(&mut self, programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        self.inner.time(programs)
    }
    fn program(&self, id: ProgramId) -> &Program {
        self.inner.program(id)
    }
    fn allocated_bytes(&self) -> u64 {
        self.inner.allocated_bytes()
    }
    fn counts(&self) -> Counts {
        self.inner.counts()
    }
}

/// What a worker did with frames that had all come before it began, and no more came.
struct Worked {
    end: Result<(), WorkerError>,
    /// Steps that were answered, in order.
    answered: Vec<u64>,
    spans: Vec<StageSpan>,
    counters: Counters,
}

/// Runs a worker on (epoch, step) frames; `tell` hears of submissions and collections.
fn work(frames: &[(u64, Step)], epoch: &AtomicU64, tell: Tell) -> Worked {
    let checkpoint = checkpoint("tiny/llama-untied");
    let device = twins();
    let options = StageOptions { sequences: 2, kv_tokens: 2 * CONTEXT, ..exact(CONTEXT) };
    let spec = StageSpec::pipeline(&[checkpoint.config.layers]).remove(0);
    let layout = StageLayout::new(&checkpoint, spec, options, device.profile(), device.limits()).unwrap();
    let inner = Reference::new(*device.profile(), device.limits().binding_bytes);
    let mut stage = Stage::open(&checkpoint, layout, Box::new(Told { inner, tell }), &mut |_| true).unwrap();
    let (mut here, mut upstream) = pair(frames.len());
    let (mut downstream, mut there) = pair(frames.len());
    for (number, (epoch, step)) in (0..).zip(frames) {
        let header = FrameHeader { epoch: *epoch, step: number, micro_batch: 10 + number as u32 };
        let payload = message::encode_step(step, &[], &stage.message_limits()).into();
        here.send(Frame { header, payload }).unwrap();
    }
    drop(here);
    let (counters, stop) = (Counters::default(), AtomicBool::new(false));
    let recorder = Recorder::new([("twins".to_owned(), (0, checkpoint.config.layers))]);
    let end = worker::run(&mut stage, &mut upstream, &mut downstream, epoch, &counters, &recorder, &stop);
    let answered = std::iter::from_fn(|| there.receive(Duration::ZERO).ok()).map(|arrival| arrival.frame.header.step);
    let answered = answered.collect();
    assert!(matches!(there.receive(Duration::ZERO), Err(PortError::Timeout { .. })), "the other end is still there");
    Worked { end, answered, spans: recorder.snapshot().stages.remove(0).spans, counters }
}

/// Words for a [`Told`] to send, and what it sent after its stage was opened.
fn heard() -> (Tell, Receiver<&'static str>) {
    let (send, words) = channel();
    let tell = move |word| {
        send.send(word).unwrap();
        true
    };
    (Box::new(tell), words)
}

#[test]
fn a_worker_begins_what_has_come_before_it_waits() {
    let released = Step { released: vec![1], ..Step::default() };
    let steps = [step(0, 0, PROMPT), step(1, 0, PROMPT), step(0, PROMPT, 1), step(1, PROMPT, 1), released];
    let (tell, words) = heard();
    let worked = work(&steps.map(|step| (1, step)), &AtomicU64::new(1), tell);
    worked.end.unwrap();
    // The first four are of the stage's warm-up and of the known token.
    let words: Vec<_> = words.iter().skip(4).collect();
    assert_eq!(words.concat(), ["submit"; 2].concat() + &["collect", "submit"].concat().repeat(2) + "collectcollect");
    assert_eq!(worked.answered, [0, 1, 2, 3, 4]);
    let spans = &worked.spans;
    let numbers: Vec<_> = spans.iter().map(|s| (s.step, s.group, s.tokens, s.sequences)).collect();
    assert_eq!(numbers, [(0, 10, PROMPT, 1), (1, 11, PROMPT, 1), (2, 12, 1, 1), (3, 13, 1, 1)], "tokens are recorded");
    for span in spans {
        let times = [span.arrived, span.taken, span.started, span.finished, span.send_started, span.sent];
        assert!(times.is_sorted(), "{span:?}");
    }
    assert!(spans.windows(2).all(|pair| pair[0].finished <= pair[1].started), "the device does one after the other");
    assert!(spans.windows(2).all(|pair| pair[1].taken <= pair[0].finished), "each is taken while one is underway");
    let busy: u64 = spans.iter().map(|span| span.finished - span.started).sum();
    let counted = worked.counters.busy_ns.load(Ordering::Relaxed);
    assert!(counted.abs_diff(busy) <= 10, "{counted} and {busy} differ by rounding to nanoseconds");
    assert_eq!(worked.counters.steps.load(Ordering::Relaxed), 5);
}

#[test]
fn results_that_became_old_on_the_device_are_dropped() {
    let epoch = std::sync::Arc::new(AtomicU64::new(1));
    let (head, mut runs) = (epoch.clone(), 0);
    let tell = move |word| {
        runs += usize::from(word == "collect");
        // The warm-up is the first, the known token the second.
        if runs == 3 {
            head.store(2, Ordering::Relaxed);
        }
        true
    };
    let steps = [(1, step(0, 0, PROMPT)), (1, step(1, 0, PROMPT)), (1, step(0, PROMPT, 1)), (2, step(0, 0, 4))];
    let worked = work(&steps, &epoch, Box::new(tell));
    worked.end.unwrap();
    assert_eq!(worked.answered, [3]);
    let done: Vec<_> = worked.spans.iter().map(|span| span.step).collect();
    assert_eq!(done, [0, 1, 3], "what had begun was done, what had not was dropped");
}

#[test]
fn a_panic_while_a_device_is_submitted_to_or_waited_for_is_the_stages_failure() {
    for wrong in ["submit", "collect"] {
        let mut runs = 0;
        let tell = move |word| {
            runs += usize::from(word == wrong);
            assert!(runs < 4, "no {wrong}");
            true
        };
        let steps = [step(0, 0, PROMPT), step(1, 0, PROMPT), step(0, PROMPT, 1)];
        let worked = work(&steps.map(|step| (1, step)), &AtomicU64::new(1), Box::new(tell));
        let Err(WorkerError::Panic(message)) = worked.end else { panic!("{:?}", worked.end) };
        assert_eq!(message, format!("no {wrong}"));
    }
}

/// R14, R15: a device that begins to compute something else is not trusted any more, at the next look at the latest.
#[test]
fn a_device_that_changes_its_mind_is_found_out() {
    let steps: Vec<(u64, Step)> = (0..2100).map(|_| (1, Step { released: vec![0], ..step(0, 0, 1) })).collect();
    for rots in [false, true] {
        let mut runs = 0;
        let tell = move |word| {
            runs += usize::from(word == "collect");
            !rots || runs < 1000
        };
        let worked = work(&steps, &AtomicU64::new(1), Box::new(tell));
        match worked.end {
            Ok(()) => assert!(!rots && worked.answered.len() == steps.len()),
            Err(WorkerError::Canary { steps }) => assert!(rots && (2048..2100).contains(&steps), "{steps}"),
            Err(other) => panic!("{other}"),
        }
    }
}
