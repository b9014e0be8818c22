//! One stage: its weights and pages on one device, and what it does with a micro-batch.

mod inputs;
mod output;

use std::collections::HashMap;
use std::time::Instant;

use pp_shaders::PAGE;
use serde::{Deserialize, Serialize};

use crate::backend::{Backend, DeviceError, Done, OpTime, ProgramId, Run, Ticket};
use crate::boundary::BoundaryLog;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::supplied::Origins;
use crate::layout::{Held, StageLayout};
use crate::message::{MessageLimits, OutputRequest, Outputs, Span, Step};
use crate::program::ops::{Activations, Alone, Bucket, Ops, WorkBuffers};
use crate::program::{BufferId, Count, Program, Shape};
use crate::random::Random;
use crate::weights::{self, LoadError, LoadProgress, Weights};
use inputs::body_bucket;
use output::{RESULT_BYTES, parse_output, restore_raw};

/// The sequence of the known token; the scheduler counts from 0.
const CANARY: u64 = u64::MAX;

/// What a stage hands on.
#[derive(Clone, Debug, PartialEq)]
pub enum StageOutput {
    /// Activations for the next stage: [tokens, hidden].
    Hidden(Vec<f32>),
    /// What the last stage found.
    Outputs(Outputs),
}

/// A micro-batch that a stage has begun.
#[must_use]
#[derive(Debug)]
pub struct Pending {
    /// The run on the device; none where there was nothing to do.
    ticket: Option<Ticket>,
    wanted: Wanted,
}

/// What becomes of a run's reads.
#[derive(Debug)]
enum Wanted {
    /// There was nothing to compute.
    Nothing,
    /// Activations; where they are kept: the page and position of each row, and whether others may go for them.
    Hidden(Vec<(u32, usize)>, bool),
    /// Rows that were kept.
    Kept(Vec<f32>),
    Outputs(Vec<OutputRequest>),
}

/// A micro-batch that a stage has done.
#[derive(Debug)]
pub struct Finished {
    /// What came of it.
    pub output: StageOutput,
    /// When the device began, as [`crate::backend::Done`] has it; as `finished` where it had nothing to do.
    pub started: Instant,
    /// When it was done, likewise.
    pub finished: Instant,
}

/// Why a stage did not do a step.
#[derive(Clone, Debug, thiserror::Error, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StepError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("sequence {sequence} has no page for position {position}")]
    NoPage { sequence: u64, position: u32 },
    #[error("the log of what it handed on has no row of sequence {sequence} for position {position}")]
    NotKept { sequence: u64, position: usize },
    #[error("{sequences} sequences hold pages, {limit} may")]
    Sequences { sequences: usize, limit: usize },
    #[error("the logits of output {output} are not finite: the model's weights or the device's results are broken")]
    NotFinite { output: usize },
}

/// An opened stage. One thread owns it.
pub struct Stage {
    layout: StageLayout,
    backend: Box<dyn Backend>,
    weights: Weights,
    work: WorkBuffers,
    work_buffers: Vec<BufferId>,
    /// By the layers that they compute, too: all of them, or as many as are to be restored.
    bodies: HashMap<(Bucket, usize), ProgramId>,
    /// Those that edit logits have `true`.
    heads: HashMap<(Bucket, bool), ProgramId>,
    inv_freq: Vec<f32>,
    tables: HashMap<u64, Vec<u32>>,
    /// What it has handed on.
    log: Option<BoundaryLog>,
}

impl Stage {
    /// Loads a stage's weights onto `backend`, takes all its memory and makes the programs for decode and prefill.
    /// `progress` returns false to stop.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn open(
        checkpoint: &Checkpoint,
        layout: StageLayout,
        mut backend: Box<dyn Backend>,
        progress: &mut dyn FnMut(LoadProgress) -> bool,
    ) -> Result<Stage, LoadError> {
        let (work, work_buffers) = work_buffers(&layout, backend.as_mut())?;
        let (there, held) = (Weights::default(), Held::default());
        let weights = weights::load(checkpoint, &layout, there, &held, backend.as_mut(), progress)?;
        let inv_freq = checkpoint.config.rope.inv_freq();
        let stage = Stage {
            layout,
            backend,
            weights,
            work,
            work_buffers,
            bodies: HashMap::new(),
            heads: HashMap::new(),
            inv_freq,
            tables: HashMap::new(),
            log: None,
        };
        stage.prepared()
    }

    /// Becomes a stage of the same model with other layers, or in another place: what both have stays on the device, with
    /// keys and values; what is not wanted any more is freed, then the rest is loaded. It knows no sequence.
    ///
    /// # Errors
    /// [`LoadError`].
    ///
    /// # Panics
    /// When it was opened with other options, or a micro-batch is begun and not finished.
    pub fn recut(
        mut self,
        checkpoint: &Checkpoint,
        layout: StageLayout,
        progress: &mut dyn FnMut(LoadProgress) -> bool,
    ) -> Result<Stage, LoadError> {
        assert_eq!(self.layout.options, layout.options, "options are those of the whole pipeline");
        let held = layout.held_by(&self.layout);
        let mut gone = self.weights.keep_only(&held);
        gone.append(&mut self.work_buffers);
        self.backend.clear(&gone)?;
        (self.bodies, self.heads, self.tables) = Default::default();
        // What it hands on is of other layers then.
        self.log = self.log.filter(|_| self.layout.spec.layers.end == layout.spec.layers.end && layout.head.is_none());
        (self.work, self.work_buffers) = work_buffers(&layout, self.backend.as_mut())?;
        self.weights = weights::load(checkpoint, &layout, self.weights, &held, self.backend.as_mut(), progress)?;
        self.layout = layout;
        self.prepared()
    }

    /// Makes the programs that will be wanted first, and runs one.
    fn prepared(mut self) -> Result<Stage, LoadError> {
        for bucket in [Bucket::of(1, 1, Alone::All), Bucket::of(1, 2, Alone::All), Bucket::Many { alone: Alone::None }]
        {
            self.body(bucket, self.weights.layers.len())?;
        }
        if self.layout.head.is_some() {
            self.head(Bucket::of(1, 1, Alone::None), false)?;
        }
        self.warm_up()?;
        Ok(self)
    }

    /// What it holds.
    pub fn layout(&self) -> &StageLayout {
        &self.layout
    }

    /// What runs its programs.
    pub fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    /// Bytes read from the checkpoint.
    pub fn read_bytes(&self) -> u64 {
        self.weights.read_bytes
    }

    /// Where they were.
    pub fn origins(&self) -> Origins {
        self.weights.origins
    }

    /// Sequences that it has pages of.
    pub fn sequences(&self) -> usize {
        self.tables.len()
    }

    /// Forgets every sequence: the head has given up what was under way, and begins anew.
    pub fn forget_sequences(&mut self) {
        self.tables.clear();
    }

    /// Keeps what it hands on from now on, in at most so many bytes; no more where they are none. The last stage keeps
    /// nothing. What is kept stays where the bound stays.
    pub fn keep_boundary(&mut self, bytes: u64) {
        let is_wanted = bytes > 0 && self.layout.head.is_none();
        if !is_wanted {
            self.log = None;
        } else if self.log.as_ref().is_none_or(|log| log.bytes_max() != bytes) {
            self.log = Some(BoundaryLog::new(self.layout.dims.hidden, bytes));
        }
    }

    /// Bytes of the host's memory that its log of what it handed on takes.
    pub fn boundary_bytes(&self) -> u64 {
        self.log.as_ref().map_or(0, BoundaryLog::bytes)
    }

    /// What it has kept of what it handed on: pages, with a bit for each row.
    pub fn kept_boundary(&self) -> Vec<(u32, u32)> {
        self.log.as_ref().map_or(Vec::new(), BoundaryLog::pages)
    }

    /// Bounds of the messages that it takes.
    pub fn message_limits(&self) -> MessageLimits {
        message_limits(&self.layout)
    }

    /// Touches every buffer, so that the first request does not wait for the driver to make or clear them.
    fn warm_up(&mut self) -> Result<(), DeviceError> {
        let nothing = Shape { tokens: 1, splits: 1, ..Shape::default() };
        // No sequence has that page.
        let page = self.layout.canary_page().to_le_bytes();
        let body = self.body(Bucket::of(1, 1, Alone::All), self.weights.layers.len())?;
        let run = Run { programs: &[(body, nothing)], writes: &[(self.work.pages, &page)], reads: &[], next: &[] };
        self.backend.run(&run)?;
        Ok(())
    }

    /// The program of its first `layers` layers.
    fn body(&mut self, bucket: Bucket, layers: usize) -> Result<ProgramId, DeviceError> {
        if let Some(id) = self.bodies.get(&(bucket, layers)) {
            return Ok(*id);
        }
        let mut ops = self.ops(bucket, Count::Tokens);
        if let Some(embedding) = &self.weights.embedding {
            ops.embed(embedding);
        }
        for layer in &self.weights.layers[..layers] {
            (self.layout.arch.layer)(&mut ops, layer);
        }
        let program = ops.finish();
        let id = self.backend.prepare(program)?;
        self.bodies.insert((bucket, layers), id);
        Ok(id)
    }

    fn head(&mut self, bucket: Bucket, edited: bool) -> Result<ProgramId, DeviceError> {
        if let Some(id) = self.heads.get(&(bucket, edited)) {
            return Ok(*id);
        }
        let mut ops = self.ops(bucket, Count::Outputs);
        if let Some((norm, head)) = &self.weights.head {
            let a = ops.rmsnorm(*norm, head, "output_norm");
            ops.linear(head, a, self.work.logits, self.layout.dims.vocab, false);
            if edited {
                ops.edit_logits();
            }
            ops.top_k(edited);
        }
        let program = ops.finish();
        let id = self.backend.prepare(program)?;
        self.heads.insert((bucket, edited), id);
        Ok(id)
    }

    fn ops(&self, bucket: Bucket, count: Count) -> Ops<'_> {
        let options = &self.layout.options;
        Ops::new(
            self.backend.profile(),
            &self.layout.dims,
            &self.work,
            options.activations,
            options.kv,
            self.layout.splits_max(),
            bucket,
            count,
        )
    }

    /// Does a micro-batch: `hidden` are the activations of its tokens, [tokens, hidden]; empty on the first stage.
    ///
    /// # Errors
    /// [`StepError`]; a stage whose device failed does not recover.
    pub fn step(&mut self, step: &Step, hidden: &[f32]) -> Result<StageOutput, StepError> {
        let pending = self.begin(step, hidden)?;
        Ok(self.finish(pending)?.output)
    }

    /// Begins a micro-batch and does not wait for the device. At most [`crate::backend::RUNS_MAX`] may be begun and not
    /// finished; they take effect in the order they were begun in: page tables at once, all else on the device.
    ///
    /// # Errors
    /// As [`Stage::step`].
    pub fn begin(&mut self, step: &Step, hidden: &[f32]) -> Result<Pending, StepError> {
        for sequence in &step.released {
            self.tables.remove(sequence);
        }
        let index = self.layout.spec.index;
        if step.from.is_some_and(|from| from as usize > index) {
            return Ok(Pending { ticket: None, wanted: Wanted::Nothing });
        }
        for span in &step.spans {
            self.tables.entry(span.sequence).or_default().extend(&span.new_pages);
        }
        let (sequences, limit) = (self.tables.len(), self.layout.options.sequences);
        if sequences > limit {
            return Err(StepError::Sequences { sequences, limit });
        }
        if step.from == Some(index as u32) {
            return Ok(Pending { ticket: None, wanted: Wanted::Kept(self.kept(step)?) });
        }
        self.submit(step, hidden)
    }

    /// The rows of a step that were handed on before.
    fn kept(&self, step: &Step) -> Result<Vec<f32>, StepError> {
        let mut rows = Vec::with_capacity(step.tokens() * self.layout.dims.hidden);
        for (span, (page, position)) in self.places(step) {
            let row = self.log.as_ref().and_then(|log| log.read(page?, position));
            rows.extend(row.ok_or(StepError::NotKept { sequence: span.sequence, position })?);
        }
        Ok(rows)
    }

    /// The page of each token of a step, if it has one, and its position.
    fn places<'a>(&'a self, step: &'a Step) -> impl Iterator<Item = (&'a Span, (Option<u32>, usize))> {
        step.spans.iter().flat_map(move |span| {
            let table = self.tables.get(&span.sequence).map_or(&[][..], Vec::as_slice);
            let positions = span.start as usize..span.start as usize + span.count as usize;
            positions.map(move |position| (span, (table.get(position / PAGE).copied(), position)))
        })
    }

    /// Computes a known token in a page that no sequence has, and nothing else meanwhile. What comes of it are the same
    /// bits every time.
    ///
    /// # Errors
    /// As [`Stage::step`].
    ///
    /// # Panics
    /// When a micro-batch is begun and not finished.
    pub fn canary(&mut self) -> Result<StageOutput, StepError> {
        let span = Span { request: 0, sequence: CANARY, start: 0, count: 1, new_pages: Vec::new() };
        let output = OutputRequest {
            row: 0,
            target: 0,
            top_k: 1,
            inverse_temperature: 1.0,
            whole_row: false,
            edits: Vec::new(),
        };
        let step = Step { spans: vec![span], ids: vec![0], outputs: vec![output], ..Step::default() };
        let mut random = Random::new(CANARY);
        let hidden = if self.layout.spec.is_first() { 0 } else { self.layout.dims.hidden };
        let hidden: Vec<f32> = (0..hidden).map(|_| 2.0 * random.unit() as f32 - 1.0).collect();
        self.tables.insert(CANARY, vec![self.layout.canary_page()]);
        let pending = self.submit(&step, &hidden);
        self.tables.remove(&CANARY);
        Ok(self.finish(pending?)?.output)
    }

    fn submit(&mut self, step: &Step, hidden: &[f32]) -> Result<Pending, StepError> {
        let is_last = self.layout.head.is_some();
        let layers = step.layers_of(&self.layout.spec);
        let is_whole = layers == self.weights.layers.len();
        let wanted = if !is_whole {
            Wanted::Nothing
        } else if is_last {
            Wanted::Outputs(step.outputs.clone())
        } else {
            Wanted::Hidden(self.to_keep(step), step.until.is_none())
        };
        let inputs = self.inputs(step)?;
        if inputs.shape.tokens == 0 || layers == 0 {
            // One that is wholly empty is a probe: it asks whether the device still answers.
            let is_probe = step.released.is_empty() && layers > 0;
            let ticket = is_probe.then(|| self.touch()).transpose()?;
            return Ok(Pending { ticket, wanted: Wanted::Nothing });
        }
        let body = self.body(body_bucket(&inputs.shape), layers)?;
        let mut programs = vec![(body, inputs.shape)];
        if is_last && !step.outputs.is_empty() {
            programs.push((
                self.head(Bucket::of(step.outputs.len(), 1, Alone::None), inputs.shape.edits > 0)?,
                inputs.shape,
            ));
        }
        let w = &self.work;
        let mut writes: Vec<(BufferId, &[u8])> = vec![
            (w.tokens, bytemuck::cast_slice(&inputs.tokens)),
            (w.rotation, bytemuck::cast_slice(&inputs.rotation)),
            (w.pages, bytemuck::cast_slice(&inputs.pages)),
        ];
        if !inputs.tiles.is_empty() {
            writes.push((w.tiles, bytemuck::cast_slice(&inputs.tiles)));
        }
        if !inputs.outputs.is_empty() {
            writes.push((w.outputs, bytemuck::cast_slice(&inputs.outputs)));
        }
        if !inputs.edits.is_empty() {
            writes.push((w.edits, bytemuck::cast_slice(&inputs.edits)));
        }
        if !hidden.is_empty() {
            writes.push((w.x, bytemuck::cast_slice(hidden)));
        }
        let whole_rows = step.outputs.iter().any(|output| output.whole_row);
        let mut reads = Vec::new();
        if !is_whole {
            // What was lost ends within the stage: keys and values are all that is wanted of it.
        } else if is_last {
            reads.push((w.result, step.outputs.len() * RESULT_BYTES));
            if whole_rows {
                reads.push((w.logits, 4 * step.outputs.len() * self.layout.dims.vocab));
            }
            if !inputs.edits.is_empty() {
                reads.push((w.raw_logits, 4 * inputs.edits.len()));
            }
        } else {
            reads.push((w.x, 4 * step.tokens() * self.layout.dims.hidden));
        }
        let next = self.next_decode(step, &programs);
        let ticket = self.backend.submit(&Run { programs: &programs, writes: &writes, reads: &reads, next: &next })?;
        Ok(Pending { ticket: Some(ticket), wanted })
    }

    /// Where what it hands on of a step is kept.
    fn to_keep(&self, step: &Step) -> Vec<(u32, usize)> {
        if self.log.is_none() || step.spans.iter().any(|span| span.sequence == CANARY) {
            return Vec::new();
        }
        self.places(step).filter_map(|(_, (page, position))| Some((page?, position))).collect()
    }

    /// Reads a few bytes back behind all that the device does: it comes to an end where the device does.
    fn touch(&mut self) -> Result<Ticket, StepError> {
        let run = Run { programs: &[], writes: &[], reads: &[(self.work.tokens, 4)], next: &[] };
        Ok(self.backend.submit(&run)?)
    }

    /// Waits for the micro-batch that was begun first and is not finished.
    ///
    /// # Errors
    /// As [`Stage::step`].
    ///
    /// # Panics
    /// When an older one is not finished.
    pub fn finish(&mut self, pending: Pending) -> Result<Finished, StepError> {
        let nothing = |now| Done { reads: Vec::new(), started: now, finished: now };
        let done = match pending.ticket {
            Some(ticket) => self.backend.collect(ticket)?,
            None => nothing(Instant::now()),
        };
        let output = match pending.wanted {
            Wanted::Nothing if self.layout.head.is_some() => StageOutput::Outputs(Outputs::default()),
            Wanted::Nothing => StageOutput::Hidden(Vec::new()),
            Wanted::Hidden(places, evicts) => {
                let hidden = floats(&done.reads[0]);
                if let Some(log) = &mut self.log {
                    let rows = hidden.chunks_exact(self.layout.dims.hidden);
                    places
                        .iter()
                        .zip(rows)
                        .for_each(|((page, position), row)| log.write(*page, *position, row, evicts));
                }
                StageOutput::Hidden(hidden)
            }
            Wanted::Kept(hidden) => StageOutput::Hidden(hidden),
            Wanted::Outputs(requests) => StageOutput::Outputs(self.outputs(&requests, &done.reads)?),
        };
        Ok(Finished { output, started: done.started, finished: done.finished })
    }

    fn outputs(&self, requests: &[OutputRequest], data: &[Vec<u8>]) -> Result<Outputs, StepError> {
        let edited = requests.iter().any(|request| !request.edits.is_empty());
        let raw = if edited { floats(&data[data.len() - 1]) } else { Vec::new() };
        let mut raw = raw.into_iter();
        let mut outputs = Vec::with_capacity(requests.len());
        for (i, request) in requests.iter().enumerate() {
            let mut output = parse_output(&data[0][i * RESULT_BYTES..][..RESULT_BYTES]);
            // What is banned is no candidate, and then there may be fewer.
            let wanted = if request.edits.is_empty() { request.top_k as usize } else { 0 };
            if !output.lse.is_finite() || output.best.len() < wanted.min(self.layout.dims.vocab) {
                return Err(StepError::NotFinite { output: i });
            }
            if request.whole_row {
                let bytes = 4 * self.layout.dims.vocab;
                output.row = Some(floats(&data[1][i * bytes..][..bytes]));
            }
            restore_raw(&mut output, request, &mut raw);
            outputs.push(output);
        }
        Ok(Outputs { outputs })
    }

    /// After a decode step of one token a sequence the next one will be like it, one position on.
    fn next_decode(&self, step: &Step, programs: &[(ProgramId, Shape)]) -> Vec<(ProgramId, Shape)> {
        if step.spans.iter().any(|span| span.count != 1) {
            return Vec::new();
        }
        let longest = step.spans.iter().map(|span| span.start as usize + 2).max().unwrap_or(1);
        let splits = longest.div_ceil(pp_shaders::SPLIT) as u32;
        let mut next: Vec<_> = programs.iter().map(|(id, shape)| (*id, Shape { splits, ..*shape })).collect();
        let whole = (body_bucket(&next[0].1), self.weights.layers.len());
        let Some(body) = self.bodies.get(&whole).filter(|_| step.until.is_none()) else { return Vec::new() };
        next[0].0 = *body;
        next
    }

    /// The programs of a step of `tokens` tokens at position `start` with `outputs` outputs, for people and clocks.
    ///
    /// # Errors
    /// When the driver refuses a kernel.
    pub fn programs(
        &mut self,
        start: usize,
        tokens: usize,
        outputs: usize,
    ) -> Result<Vec<(ProgramId, Shape)>, DeviceError> {
        let tile = self.backend.profile().prefill_tile;
        let splits = (start + tokens).div_ceil(pp_shaders::SPLIT) as u32;
        let shape = Shape {
            tokens: tokens as u32,
            outputs: outputs as u32,
            edits: 0,
            alone: u32::from(tokens == 1),
            tiles: (tokens as u32).div_ceil(tile),
            splits,
        };
        let mut programs = vec![(self.body(body_bucket(&shape), self.weights.layers.len())?, shape)];
        if self.layout.head.is_some() && outputs > 0 {
            programs.push((self.head(Bucket::of(outputs, 1, Alone::None), false)?, shape));
        }
        Ok(programs)
    }

    /// The text of a program.
    pub fn program(&self, id: ProgramId) -> &Program {
        self.backend.program(id)
    }

    /// The time of each dispatch of `programs` on the device, with whatever its buffers hold.
    ///
    /// # Errors
    /// When the device fails.
    pub fn time(&mut self, programs: &[(ProgramId, Shape)]) -> Result<Vec<OpTime>, DeviceError> {
        self.backend.time(programs)
    }

    /// The bytes of layer `layer`'s keys and values as they lie on the device, for tests that compare them.
    ///
    /// # Errors
    /// When the device fails.
    pub fn kv_bytes(&mut self, layer: usize) -> Result<Vec<Vec<u8>>, DeviceError> {
        let layer = self.weights.layers.iter().find(|l| l.index == layer).expect("a layer of this stage");
        let reads: Vec<(BufferId, usize)> = layer
            .kv
            .iter()
            .flat_map(|kv| [kv.keys, kv.values].map(|buffer| (buffer, self.layout.kv_buffer_bytes(kv.kv_heads))))
            .collect();
        self.backend.run(&Run { programs: &[], writes: &[], reads: &reads, next: &[] })
    }
}

/// Bounds of the messages of a stage with that layout.
pub fn message_limits(layout: &StageLayout) -> MessageLimits {
    MessageLimits {
        tokens: layout.options.chunk,
        sequences: layout.options.sequences,
        context: layout.options.context,
        pages: layout.options.pages(),
        outputs: layout.outputs_max,
        edits: layout.edits_max,
        vocab: layout.dims.vocab,
        hidden: layout.dims.hidden,
        wire: layout.options.wire,
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(std::array::from_fn(|i| b[i]))).collect()
}

fn work_buffers(layout: &StageLayout, backend: &mut dyn Backend) -> Result<(WorkBuffers, Vec<BufferId>), DeviceError> {
    let mut made = HashMap::new();
    for buffer in &layout.work {
        made.insert(buffer.name, backend.create(buffer.name, buffer.bytes)?);
    }
    let get = |name: &str| made[name];
    let pair = |words: &str, scales: &str| Some([*made.get(words)?, *made.get(scales)?]);
    let buffers = WorkBuffers {
        x: get("x"),
        act: Activations { q8: pair("act_q8", "act_q8_scales"), f32: pair("act_f32", "act_f32_scales") },
        gated: [get("gated"), get("gated_scales")],
        qkv: get("qkv"),
        q: get("q"),
        attention: get("attention"),
        part_out: get("part_out"),
        part_stat: get("part_stat"),
        gate_up: get("gate_up"),
        tokens: get("tokens"),
        rotation: get("rotation"),
        pages: get("pages"),
        tiles: get("tiles"),
        outputs: get("outputs"),
        logits: get("logits"),
        best: get("best"),
        stats: get("stats"),
        edits: get("edits"),
        raw_logits: get("raw_logits"),
        raw_stats: get("raw_stats"),
        result: get("result"),
        nothing: get("nothing"),
    };
    Ok((buffers, made.into_values().collect()))
}
