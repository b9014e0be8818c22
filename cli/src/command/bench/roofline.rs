//! What the devices could do at most, and each kernel's share of it.
//!
//! The stages are opened once more, one after the other in this thread, and brought to the place that is measured:
//! the last micro-batch of a prompt, and then the token after it. Each of these two steps is replayed with a clock at
//! every dispatch.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use pp_engine::backend::gpu::Gpu;
use pp_engine::backend::roofline::{Roofline as Rates, Work};
use pp_engine::layout::StageLayout;
use pp_engine::message::{OutputRequest, Span, Step};
use pp_engine::pipeline::Device;
use pp_engine::stage::Stage;
use pp_engine::{PAGE, backend::OpTime};
use serde::Serialize;

use crate::cancel;
use crate::errors::cancelled;
use crate::output::{Out, table};
use crate::plan::Plan;

/// Replays of a decode step and of a prefill micro-batch; the fastest counts.
const DECODE_REPLAYS: usize = 8;
const PREFILL_REPLAYS: usize = 3;

/// The measured limits of the devices, and what the kernels make of them.
#[derive(Debug, Serialize)]
pub struct Roofline {
    /// Of the first stage's device.
    #[serde(flatten)]
    rates: RateRow,
    /// Each device that a stage is on, once.
    devices: Vec<DeviceRow>,
    /// Whether every device has a clock for single dispatches; kernels of others are not listed.
    timestamps: bool,
    /// Position of the decoded token.
    decode_position: usize,
    /// Tokens of the prefill micro-batch.
    prefill_tokens: usize,
    decode: Vec<KernelRow>,
    prefill: Vec<KernelRow>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct RateRow {
    copy_bytes_per_s: f64,
    read_bytes_per_s: f64,
    int8_ops_per_s: f64,
    f32_flops_per_s: f64,
}

#[derive(Debug, Serialize)]
struct DeviceRow {
    id: String,
    name: String,
    #[serde(flatten)]
    rates: RateRow,
}

/// All dispatches of a step that do the same with the same kind of tensor on the same device.
#[derive(Debug, Serialize)]
struct KernelRow {
    kernel: String,
    role: String,
    device: String,
    calls: usize,
    seconds: f64,
    /// Of the step's time on the devices.
    share_of_step: f64,
    weight_bytes: u64,
    operations: u64,
    bytes_per_s: f64,
    operations_per_s: f64,
    /// Below which the device cannot do it; null for kernels without weights, whose traffic is not counted.
    floor_seconds: Option<f64>,
    share_of_floor: Option<f64>,
}

/// Measures the devices of a plan and its kernels after a prompt of `prompt` tokens; None when no stage is on a GPU.
pub fn measure(plan: &Plan, prompt: usize, out: &Out) -> Result<Option<Roofline>> {
    let mut devices: Vec<(DeviceRow, Rates)> = Vec::new();
    let mut workers: Vec<String> = plan.devices.iter().filter_map(Device::worker).collect();
    workers.sort();
    workers.dedup();
    if !workers.is_empty() {
        out.note(&format!("roofline: the devices of {} are left out; measure them there", workers.join(", ")));
    }
    for device in &plan.devices {
        let Device::Gpu { adapter, profile, checked } = device else { continue };
        if devices.iter().any(|(row, _)| row.id == device.id()) {
            continue;
        }
        out.note(&format!("roofline: measuring {}", device.name()));
        let rates = Rates::measure(&mut Gpu::open(adapter, *profile, *checked)?)
            .with_context(|| format!("cannot measure {}", device.name()))?;
        let row = RateRow {
            copy_bytes_per_s: rates.copy_bytes_per_s,
            read_bytes_per_s: rates.read_bytes_per_s,
            int8_ops_per_s: rates.int8_ops_per_s,
            f32_flops_per_s: rates.f32_flops_per_s,
        };
        devices.push((DeviceRow { id: device.id(), name: device.name(), rates: row }, rates));
    }
    let Some(first) = devices.first().map(|(row, _)| row.rates) else { return Ok(None) };
    let prefill_tokens = prompt.min(plan.options.chunk);
    let mut roofline = Roofline {
        rates: first,
        devices: Vec::new(),
        timestamps: true,
        decode_position: prompt,
        prefill_tokens,
        decode: Vec::new(),
        prefill: Vec::new(),
    };
    for (spec, device) in plan.specs.iter().zip(&plan.devices) {
        let Some((_, rates)) = devices.iter().find(|(row, _)| row.id == device.id()) else { continue };
        out.note(&format!("roofline: timing the kernels of stage {}", spec.index));
        let options = plan.options;
        let layout = StageLayout::new(&plan.checkpoint, spec.clone(), options, device.profile(), device.limits())?;
        let mut progress = |_| !cancel::flag().load(Ordering::Relaxed);
        let stage = Stage::open(&plan.checkpoint, layout, device.open()?, &mut progress)?;
        let mut timed = Timed { stage, device: device.id(), rates };
        for at in (0..prompt - prefill_tokens).step_by(options.chunk) {
            timed.step(at, options.chunk.min(prompt - prefill_tokens - at))?;
        }
        roofline.timestamps &=
            timed.replay(prompt - prefill_tokens, prefill_tokens, PREFILL_REPLAYS, &mut roofline.prefill)?;
        roofline.timestamps &= timed.replay(prompt, 1, DECODE_REPLAYS, &mut roofline.decode)?;
    }
    roofline.devices = devices.into_iter().map(|(row, _)| row).collect();
    finish(&mut roofline.prefill);
    finish(&mut roofline.decode);
    Ok(Some(roofline))
}

/// A stage under the clock.
struct Timed<'a> {
    stage: Stage,
    device: String,
    rates: &'a Rates,
}

impl Timed<'_> {
    /// Does a step of `tokens` tokens at `start`, the last of which has an output.
    fn step(&mut self, start: usize, tokens: usize) -> Result<()> {
        if cancel::flag().load(Ordering::Relaxed) {
            return Err(cancelled());
        }
        let layout = self.stage.layout();
        let (vocab, hidden, first) = (layout.dims.vocab, layout.dims.hidden, layout.spec.is_first());
        let new_pages = (start.div_ceil(PAGE) as u32..(start + tokens).div_ceil(PAGE) as u32).collect();
        let output = OutputRequest {
            row: tokens as u32 - 1,
            target: 0,
            top_k: 1,
            inverse_temperature: 1.0,
            whole_row: false,
            edits: Vec::new(),
        };
        let ids = (start..start + tokens).map(|i| super::made_up_id(i, vocab)).collect();
        let step = Step {
            spans: vec![Span { request: 0, sequence: 1, start: start as u32, count: tokens as u32, new_pages }],
            ids,
            outputs: vec![output],
            ..Step::default()
        };
        // What activations are does not change the work either.
        let activations: Vec<f32> =
            if first { Vec::new() } else { (0..tokens * hidden).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect() };
        self.stage.step(&step, &activations)?;
        Ok(())
    }

    /// Does a step and replays it with the clock; adds what its dispatches took to `rows`. False when there is no
    /// clock.
    fn replay(&mut self, start: usize, tokens: usize, replays: usize, rows: &mut Vec<KernelRow>) -> Result<bool> {
        self.step(start, tokens)?;
        let programs = self.stage.programs(start, tokens, 1)?;
        let mut best: Vec<OpTime> = Vec::new();
        let total = |times: &[OpTime]| times.iter().map(|time| time.seconds).sum::<f64>();
        for _ in 0..replays {
            let times = self.stage.time(&programs)?;
            if times.is_empty() {
                return Ok(false);
            }
            if best.is_empty() || total(&times) < total(&best) {
                best = times;
            }
        }
        for time in &best {
            let (id, shape) = programs[time.op.0];
            let op = &self.stage.program(id).ops[time.op.1];
            self.add(rows, &op.variant.label(), &role(&op.note), time.seconds, Work::of(op, op.count(&shape)));
        }
        Ok(true)
    }

    fn add(&self, rows: &mut Vec<KernelRow>, kernel: &str, role: &str, seconds: f64, work: Work) {
        let same = |row: &KernelRow| row.kernel == kernel && row.role == role && row.device == self.device;
        let at = rows.iter().position(same).unwrap_or_else(|| {
            rows.push(KernelRow {
                kernel: kernel.to_owned(),
                role: role.to_owned(),
                device: self.device.clone(),
                calls: 0,
                seconds: 0.0,
                share_of_step: 0.0,
                weight_bytes: 0,
                operations: 0,
                bytes_per_s: 0.0,
                operations_per_s: 0.0,
                floor_seconds: None,
                share_of_floor: None,
            });
            rows.len() - 1
        });
        let row = &mut rows[at];
        row.calls += 1;
        row.seconds += seconds;
        row.weight_bytes += work.weight_bytes;
        row.operations += work.operations;
        if work.weight_bytes > 0 {
            row.floor_seconds = Some(row.floor_seconds.unwrap_or(0.0) + self.rates.floor_seconds(&work));
        }
    }
}

/// Shares and rates, once all is added up; what takes longest comes first.
fn finish(rows: &mut [KernelRow]) {
    let total: f64 = rows.iter().map(|row| row.seconds).sum();
    for row in rows.iter_mut().filter(|row| row.seconds > 0.0) {
        row.share_of_step = row.seconds / total;
        row.bytes_per_s = row.weight_bytes as f64 / row.seconds;
        row.operations_per_s = row.operations as f64 / row.seconds;
        row.share_of_floor = row.floor_seconds.map(|floor| floor / row.seconds);
    }
    rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
}

/// What a dispatch computes, without the layer: `blk.7 blk.7.ffn_gate+blk.7.ffn_up` is `ffn_gate+ffn_up`.
fn role(note: &str) -> String {
    let words = note.split(' ').map(|word| word.split('+').map(without_layer).collect::<Vec<_>>().join("+"));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A tensor's name without `blk.7.` before it and `.weight` behind it; nothing is left of the layer's own name.
fn without_layer(word: &str) -> &str {
    let is_layer = |number: &str| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let rest = word.strip_prefix("blk.").map(|rest| rest.split_once('.').unwrap_or((rest, "")));
    let name = match rest {
        Some((number, name)) if is_layer(number) => name,
        _ => word,
    };
    name.strip_suffix(".weight").unwrap_or(name)
}

impl Roofline {
    /// For people.
    pub fn text(&self) -> String {
        let rate = |rate: f64| format!("{:.1}", rate / 1e9);
        let devices: Vec<Vec<String>> = self
            .devices
            .iter()
            .map(|device| {
                let r = &device.rates;
                let rates = [r.copy_bytes_per_s, r.read_bytes_per_s, r.int8_ops_per_s, r.f32_flops_per_s];
                [device.name.clone()].into_iter().chain(rates.map(rate)).collect()
            })
            .collect();
        let mut text = table(1, &["device, at most", "copy GB/s", "read GB/s", "int8 Gop/s", "f32 Gflop/s"], &devices);
        if !self.timestamps {
            text.push_str("\n\nno kernel times: a driver has no timestamps inside passes");
        }
        for (what, rows) in [
            (format!("decode, 1 token at position {}", self.decode_position), &self.decode),
            (format!("prefill, {} tokens", self.prefill_tokens), &self.prefill),
        ] {
            if !rows.is_empty() {
                text.push_str(&format!("\n\n{}", self.kernels(&what, rows)));
            }
        }
        text
    }

    fn kernels(&self, what: &str, rows: &[KernelRow]) -> String {
        let several = self.devices.len() > 1;
        let giga = |rate: f64| if rate > 0.0 { format!("{:.1}", rate / 1e9) } else { "-".to_owned() };
        let cells = |row: &KernelRow| {
            let mut cells = vec![row.kernel.clone(), row.role.clone()];
            if several {
                cells.push(row.device.clone());
            }
            cells.extend([
                row.calls.to_string(),
                format!("{:.2}", 1e3 * row.seconds),
                format!("{:.1}", 100.0 * row.share_of_step),
                if row.weight_bytes > 0 { format!("{:.1}", row.weight_bytes as f64 / 1e6) } else { "-".to_owned() },
                giga(row.bytes_per_s),
                giga(row.operations_per_s),
                row.share_of_floor.map_or("-".to_owned(), |share| format!("{:.0}", 100.0 * share)),
            ]);
            cells
        };
        let mut header = vec!["kernel", "of"];
        if several {
            header.push("device");
        }
        header.extend(["calls", "ms", "% of step", "weights MB", "GB/s", "Gop/s", "% of roof"]);
        let total: f64 = rows.iter().map(|row| row.seconds).sum();
        let left = if several { 3 } else { 2 };
        let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
        format!("{what}: {:.2} ms on the device\n{}", 1e3 * total, table(left, &header, &rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_leave_the_layer_out() {
        for (note, expected) in [
            ("blk.7 blk.7.ffn_down.weight", "ffn_down"),
            ("blk.12 blk.12.attn_q+blk.12.attn_k.weight", "attn_q+attn_k"),
            ("blk.3 rope, write kv", "rope, write kv"),
            ("output.weight", "output"),
            ("top-k of chunks", "top-k of chunks"),
            ("blk.x y", "blk.x y"),
        ] {
            assert_eq!(role(note), expected);
        }
    }
}
