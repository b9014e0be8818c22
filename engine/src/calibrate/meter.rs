//! Stages of a made-up model, timed on a device.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pp_shaders::PAGE;
use pp_shaders::profile::TOP_K;

use super::{CalibrateError, Calibration, Shape};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::made_up::MadeUp;
use crate::law::{Curve, SIZES};
use crate::layout::{StageLayout, StageOptions, StageSpec};
use crate::message::{self, OutputRequest, Span, Step};
use crate::pipeline::Device;
use crate::stage::{Stage, StageOutput};
use crate::wire::Wire;

/// Weights of the layers of the larger stage, in bytes: more than a processor keeps near it for long …
const SOFTWARE_BYTES: usize = 48 << 20;
/// … or than a card's cache holds.
const CARD_BYTES: usize = 192 << 20;
/// Layers of the larger stage at most.
const LAYERS_MAX: usize = 32;
/// A step is repeated for as long, …
const LONG_ENOUGH: Duration = Duration::from_millis(120);
/// … but not more often.
const REPETITIONS: usize = 9;
/// A step as long as this is done once.
const LONG: Duration = Duration::from_millis(250);
/// Positions before a decoded token at first.
const NEAR: usize = 16;
/// Positions before the last token of what tells what a position costs.
const FAR: usize = 1024;
/// Tokens of a chunk that tells what a position costs.
const FAR_CHUNK: usize = 32;
/// How many of the sizes decode.
const DECODE: usize = 4;
/// Sequences that decode together, and one for long contexts.
const SEQUENCES: usize = 8;
const LONG_SEQUENCE: u64 = SEQUENCES as u64;

/// Where in a pipeline a stage is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    First,
    Middle,
    Last,
}

/// Measures the parts of a model of that shape.
pub(super) fn measure(
    device: &Device,
    shape: &Shape,
    progress: &mut dyn FnMut(usize, usize),
    cancel: &AtomicBool,
) -> Result<Calibration, CalibrateError> {
    let reason = match device {
        Device::Gpu { .. } | Device::Paced { .. } => None,
        Device::Reference { .. } => Some("it is there to be exact, and takes too long"),
        Device::Remote(_) => Some("its worker measures it"),
    };
    if let Some(reason) = reason {
        return Err(CalibrateError::NotThis { device: device.name(), reason });
    }
    shape.check()?;
    let stages = 3 + shape.kinds.len();
    let mut done = 0;
    let mut curve = |kind: usize, layers: usize, place: Place| {
        progress(done, stages);
        done += 1;
        let mut meter = Meter::open(device, shape, kind, layers, place, cancel)?;
        let curve = meter.curve(if place == Place::Last { DECODE } else { SIZES.len() })?;
        Ok::<_, CalibrateError>((meter, curve))
    };
    let (small, large) = layers(device, shape);
    let (mut meter, few) = curve(0, small, Place::Middle)?;
    let positions = meter.positions(&few)?.times(1.0 / small as f64);
    drop(meter);
    let (_, many) = curve(0, large, Place::Middle)?;
    let layer = many.minus(&few).times(1.0 / (large - small) as f64);
    let fixed = few.minus(&layer.times(small as f64));
    let mut kinds = vec![layer.plus(&positions)];
    for kind in 1..shape.kinds.len() {
        let (_, found) = curve(kind, small, Place::Middle)?;
        kinds.push(found.minus(&fixed).times(1.0 / small as f64).plus(&positions));
    }
    let (_, first) = curve(0, 1, Place::First)?;
    let first = first.minus(&fixed.plus(&layer));
    // Beside as many layers as push what it reads out of a processor's caches, as the layers of a model do.
    let (_, last) = curve(0, large, Place::Last)?;
    let mut last = last.minus(&many);
    // Of a chunk's rows one is drawn from.
    let one_row = last.seconds[0];
    last.seconds[DECODE..].fill(one_row);
    progress(stages, stages);
    Ok(Calibration { fixed, kinds, first, last, share: 1.0 })
}

/// Layers of the smaller and of the larger stage.
fn layers(device: &Device, shape: &Shape) -> (usize, usize) {
    let wanted = if device.is_software() { SOFTWARE_BYTES } else { CARD_BYTES };
    let most = shape.layers.clamp(2, LAYERS_MAX);
    let large = wanted.div_ceil(shape.layer_bytes(0).max(1)).clamp(2, most);
    ((large / 3).max(1), large)
}

struct Meter<'a> {
    stage: Stage,
    place: Place,
    hidden: usize,
    context: usize,
    cancel: &'a AtomicBool,
}

impl<'a> Meter<'a> {
    fn open(
        device: &Device,
        shape: &Shape,
        kind: usize,
        layers: usize,
        place: Place,
        cancel: &'a AtomicBool,
    ) -> Result<Meter<'a>, CalibrateError> {
        let kinds: Vec<&[MadeUp]> = vec![&shape.kinds[kind]; layers];
        let checkpoint = Checkpoint::made_up(shape.config(), &kinds, &shape.ends)?;
        let (index, stages) = match place {
            Place::First => (0, 2),
            Place::Middle => (1, 3),
            Place::Last => (1, 2),
        };
        let spec = StageSpec { index, stages, layers: 0..layers };
        let context = shape.context.min(FAR + SIZES[SIZES.len() - 1]);
        let options = StageOptions {
            activations: shape.activations,
            kv: shape.kv,
            context,
            sequences: SEQUENCES + 1,
            kv_tokens: context.next_multiple_of(PAGE) + SEQUENCES * PAGE,
            chunk: SIZES[SIZES.len() - 1],
            wire: Wire::F32,
        };
        let layout = StageLayout::new(&checkpoint, spec, options, device.profile(), device.limits())?;
        let mut go_on = |_| !cancel.load(Ordering::Relaxed);
        let stage = Stage::open(&checkpoint, layout, device.open()?, &mut go_on);
        let stage = stage.map_err(|error| match error {
            crate::weights::LoadError::Cancelled => CalibrateError::Cancelled,
            error => error.into(),
        })?;
        let mut meter = Meter { stage, place, hidden: shape.hidden, context, cancel };
        meter.take_pages()?;
        Ok(meter)
    }

    /// Gives every sequence its pages.
    fn take_pages(&mut self) -> Result<(), CalibrateError> {
        let long = self.context.div_ceil(PAGE);
        let mut next = 0u32;
        let mut pages = |count: usize| {
            next += count as u32;
            (next - count as u32..next).collect()
        };
        let mut spans = vec![span(LONG_SEQUENCE, 0, 1, pages(long))];
        spans.extend((0..SEQUENCES as u64).map(|sequence| span(sequence, 0, 1, pages(1))));
        self.seconds(&self.step(spans), 1)?;
        Ok(())
    }

    /// What the stage takes at the first `sizes` sizes.
    fn curve(&mut self, sizes: usize) -> Result<Curve, CalibrateError> {
        let near = self.near();
        let mut curve = Curve::default();
        let mut known = 0;
        for (at, size) in SIZES.into_iter().enumerate().take(sizes) {
            let step = match size <= SEQUENCES {
                true => self.step((0..size as u64).map(|sequence| span(sequence, near, 1, Vec::new())).collect()),
                false if size <= self.context => self.step(vec![span(LONG_SEQUENCE, 0, size, Vec::new())]),
                false => break,
            };
            curve.seconds[at] = self.seconds(&step, REPETITIONS)?;
            known = at;
        }
        // Short contexts hold no large micro-batches: as the last two sizes go on.
        for at in known + 1..sizes {
            let slope = (curve.seconds[at - 1] - curve.seconds[at - 2]) / (SIZES[at - 1] - SIZES[at - 2]) as f64;
            curve.seconds[at] = curve.seconds[at - 1] + slope.max(0.0) * (SIZES[at] - SIZES[at - 1]) as f64;
        }
        Ok(curve)
    }

    /// What positions before the tokens take more than in `curve`, and nothing else.
    fn positions(&mut self, curve: &Curve) -> Result<Curve, CalibrateError> {
        let near = self.near();
        let mut found = Curve::default();
        let far = self.context - 1;
        if far > 2 * near {
            let step = self.step(vec![span(LONG_SEQUENCE, far, 1, Vec::new())]);
            let more = self.seconds(&step, REPETITIONS)? - curve.seconds[0];
            found.decode_position = more.max(0.0) / (far - near) as f64;
        }
        found.prefill_position = found.decode_position;
        let size = FAR_CHUNK.min(self.context / 2);
        let start = self.context - size;
        if size > SEQUENCES {
            let steps = [start, 0].map(|start| self.step(vec![span(LONG_SEQUENCE, start, size, Vec::new())]));
            let more = self.seconds(&steps[0], REPETITIONS)? - self.seconds(&steps[1], REPETITIONS)?;
            found.prefill_position = more.max(0.0) / (start * size) as f64;
        }
        Ok(found)
    }

    /// Positions before a decoded token.
    fn near(&self) -> usize {
        NEAR.min(self.context.min(PAGE) - 1)
    }

    /// A step over these spans, with an output for each on the last stage.
    fn step(&self, spans: Vec<Span>) -> Step {
        let mut row = 0;
        let outputs = spans.iter().map(|span| {
            row += span.count;
            let (top_k, inverse_temperature) = (TOP_K.min(8), 1.0);
            OutputRequest { row: row - 1, target: 0, top_k, inverse_temperature, whole_row: false, edits: Vec::new() }
        });
        let outputs = if self.place == Place::Last { outputs.collect() } else { Vec::new() };
        let tokens: u32 = spans.iter().map(|span| span.count).sum();
        let ids = if self.place == Place::First { (0..tokens).map(|i| i * 7 % 97 % 32).collect() } else { Vec::new() };
        Step { spans, ids, outputs, ..Step::default() }
    }

    /// Seconds of a step, from its frame to the frame that it becomes: the lower quartile, after one that is not counted.
    /// What others take of the machine meanwhile only adds.
    fn seconds(&mut self, step: &Step, repetitions: usize) -> Result<f64, CalibrateError> {
        let limits = self.stage.message_limits();
        let hidden = if self.place == Place::First { 0 } else { step.tokens() * self.hidden };
        let hidden: Vec<f32> = (0..hidden).map(|i| (i % 17) as f32 * 0.01 - 0.08).collect();
        let frame = message::encode_step(step, &hidden, &limits);
        let mut times: Vec<Duration> = Vec::new();
        let mut first = None;
        while times.len() < repetitions {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(CalibrateError::Cancelled);
            }
            let started = Instant::now();
            let (step, hidden) = message::decode_step(&frame, &limits, self.place == Place::First)
                .map_err(|error| crate::weights::LoadError::Refused { message: error.to_string() })?;
            let pending = self.stage.begin(&step, &hidden)?;
            let finished = self.stage.finish(pending)?;
            let answer = match finished.output {
                StageOutput::Hidden(hidden) => message::encode_step(&step, &hidden, &limits),
                StageOutput::Outputs(outputs) => message::encode_outputs(&outputs),
            };
            let took = started.elapsed();
            std::hint::black_box(answer);
            // Programs for few tokens are compiled with their first step; those of chunks are there from the start, and
            // what takes them long was not long because it was the first.
            let is_chunk = step.tokens() > SEQUENCES;
            if first.replace(took).is_none() && !(is_chunk && took > LONG) {
                continue;
            }
            times.push(took);
            let all: Duration = times.iter().sum();
            if took > LONG || times.len() >= 3 && all > LONG_ENOUGH {
                break;
            }
        }
        times.sort_unstable();
        Ok(times.get(times.len() / 4).copied().or(first).unwrap_or_default().as_secs_f64())
    }
}

fn span(sequence: u64, start: usize, count: usize, new_pages: Vec<u32>) -> Span {
    Span { request: sequence, sequence, start: start as u32, count: count as u32, new_pages }
}
