//! Traces as files: the JSON of Chrome's trace viewer, which <https://ui.perfetto.dev> opens as well.
//!
//! Tracks of one process: the head, its state, and two for each stage, micro-batches and idle time by cause; arrows
//! follow a micro-batch along the hops. Times are microseconds for viewers; the arguments of an event carry the record
//! in nanoseconds, so that a file read back is the trace that was written. `otherData` comes before `traceEvents` and
//! tells the format; each event is a line.

mod read;

use std::io::{self, BufWriter, Write};

use serde::{Deserialize, Serialize};

use super::causes::{Cause, causes};
use super::{HeadInterval, HeadSpan, HeadState, Nanos, StageSpan, StageTrace, Timestamps, Trace};
use crate::law::Share;

pub use read::{ReadError, read};

const FORMAT: &str = "pp-run trace";
/// Of the format; another one is refused.
const VERSION: u64 = 1;
/// The one process.
const PID: u32 = 1;

/// What `otherData` holds.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    version: u64,
    dropped: u64,
    stages: Vec<StageHeader>,
    /// Older files do not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shares: Vec<Share>,
}

#[derive(Debug, Serialize, Deserialize)]
struct StageHeader {
    device: String,
    layers: (usize, usize),
    /// Older files do not say, and were by the host's clock.
    #[serde(default)]
    timestamps: Timestamps,
}

/// A line of `traceEvents`.
#[derive(Debug, Serialize)]
struct Event<'a, A> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<Category>,
    ph: &'static str,
    pid: u32,
    tid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<A>,
}

/// What an event is; the first three are records, the others are for viewers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Category {
    Stage,
    Head,
    State,
    Draw,
    Idle,
    Hop,
}

#[derive(Debug, Serialize)]
struct StageArgs {
    stage: usize,
    #[serde(flatten)]
    span: StageSpan,
}

#[derive(Debug, Serialize)]
struct StepArgs {
    step: u64,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Label<'a> {
    Name { name: &'a str },
    Order { sort_index: usize },
}

const HEAD: usize = 0;
const HEAD_STATE: usize = 1;

fn stage_track(stage: usize) -> usize {
    2 + 2 * stage
}

fn idle_track(stage: usize) -> usize {
    3 + 2 * stage
}

/// Writes a trace.
///
/// # Errors
/// When `out` does not take it.
pub fn write(trace: &Trace, out: impl Write) -> io::Result<()> {
    let mut file = File { out: BufWriter::new(out), events: 0 };
    let header = Header {
        format: FORMAT.to_owned(),
        version: VERSION,
        dropped: trace.dropped,
        stages: trace
            .stages
            .iter()
            .map(|StageTrace { device, layers, timestamps, .. }| StageHeader {
                device: device.clone(),
                layers: *layers,
                timestamps: *timestamps,
            })
            .collect(),
        shares: trace.shares.clone(),
    };
    write!(file.out, "{{\"displayTimeUnit\":\"ms\",\"otherData\":")?;
    serde_json::to_writer(&mut file.out, &header)?;
    write!(file.out, ",\"traceEvents\":[")?;
    file.tracks(trace)?;
    file.head(trace)?;
    file.stages(trace)?;
    file.idle(trace)?;
    file.hops(trace)?;
    writeln!(file.out, "\n]}}")?;
    file.out.flush()
}

/// Microseconds.
fn micros(nanos: Nanos) -> f64 {
    nanos as f64 / 1000.0
}

struct File<W: Write> {
    out: BufWriter<W>,
    events: usize,
}

impl<W: Write> File<W> {
    fn event(&mut self, event: &Event<impl Serialize>) -> io::Result<()> {
        self.out.write_all(if self.events == 0 { b"\n" } else { b",\n" })?;
        self.events += 1;
        Ok(serde_json::to_writer(&mut self.out, event)?)
    }

    fn label(&mut self, name: &str, tid: usize, label: Label) -> io::Result<()> {
        let (ts, dur, id, bp) = (None, None, None, None);
        self.event(&Event { name, cat: None, ph: "M", pid: PID, tid, ts, dur, id, bp, args: Some(label) })
    }

    fn tracks(&mut self, trace: &Trace) -> io::Result<()> {
        self.label("process_name", 0, Label::Name { name: "pipeline" })?;
        let mut names = vec![(HEAD, "head".to_owned()), (HEAD_STATE, "head state".to_owned())];
        for (index, stage) in trace.stages.iter().enumerate() {
            let layers = (stage.layers.0, stage.layers.1.saturating_sub(1));
            let name = format!("stage {index}  layers {}-{}  {}", layers.0, layers.1, stage.device);
            names.push((stage_track(index), name));
            names.push((idle_track(index), format!("stage {index} idle")));
        }
        for (tid, name) in names {
            self.label("thread_name", tid, Label::Name { name: &name })?;
            self.label("thread_sort_index", tid, Label::Order { sort_index: tid })?;
        }
        Ok(())
    }

    /// A bar.
    fn complete(
        &mut self,
        name: &str,
        cat: Category,
        tid: usize,
        (from, to): (Nanos, Nanos),
        args: Option<impl Serialize>,
    ) -> io::Result<()> {
        let (ts, dur) = (Some(micros(from)), Some(micros(to.saturating_sub(from))));
        self.event(&Event { name, cat: Some(cat), ph: "X", pid: PID, tid, ts, dur, id: None, bp: None, args })
    }

    fn head(&mut self, trace: &Trace) -> io::Result<()> {
        for (span, [form, draw]) in trace.head.iter().zip(head_bars(&trace.head)) {
            self.complete(&format!("group {}", span.group), Category::Head, HEAD, form, Some(span))?;
            if span.sampled > 0 {
                self.complete("draw", Category::Draw, HEAD, draw, Some(StepArgs { step: span.step }))?;
            }
        }
        for interval in &trace.states {
            let name = state_name(interval.state);
            self.complete(name, Category::State, HEAD_STATE, (interval.from, interval.to), Some(interval))?;
        }
        Ok(())
    }

    fn stages(&mut self, trace: &Trace) -> io::Result<()> {
        for (stage, records) in trace.stages.iter().enumerate() {
            for span in &records.spans {
                let (name, args) = (format!("group {}", span.group), StageArgs { stage, span: *span });
                let track = stage_track(stage);
                self.complete(&name, Category::Stage, track, (span.started, span.finished), Some(args))?;
            }
        }
        Ok(())
    }

    fn idle(&mut self, trace: &Trace) -> io::Result<()> {
        for (stage, causes) in causes(trace).iter().enumerate() {
            for idle in causes.intervals.iter().filter(|interval| interval.cause != Cause::Busy) {
                let args = None::<StepArgs>;
                self.complete(idle.cause.name(), Category::Idle, idle_track(stage), (idle.from, idle.to), args)?;
            }
        }
        Ok(())
    }

    /// An arrow for every hop that both ends remember.
    fn hops(&mut self, trace: &Trace) -> io::Result<()> {
        let hops = trace.stages.len() as u64 + 1;
        let mut arrivals: Vec<_> = trace.stages.iter().map(|stage| stage.spans.iter().peekable()).collect();
        let mut answers = trace.head.iter().filter(|head| head.sampled > 0).peekable();
        for head in &trace.head {
            let mut leaves = Some((HEAD, head.formed, head.sent));
            for (stage, spans) in arrivals.iter_mut().enumerate() {
                while spans.next_if(|span| span.step < head.step).is_some() {}
                let here = spans.next_if(|span| span.step == head.step);
                if let (Some(from), Some(span)) = (leaves, here) {
                    self.arrow(head.step, hops, stage, from, (stage_track(stage), span.started))?;
                }
                leaves = here.map(|span| (stage_track(stage), span.started, span.finished));
            }
            while answers.next_if(|answer| answer.step < head.step).is_some() {}
            let answer = answers.next_if(|answer| answer.step == head.step);
            if let (Some(from), Some(answer)) = (leaves, answer) {
                let at = answer.answered.max(answer.sampled - 1);
                self.arrow(head.step, hops, trace.stages.len(), from, (HEAD, at))?;
            }
        }
        Ok(())
    }

    /// From inside of the bar that a micro-batch leaves to the beginning of the one that it comes to.
    fn arrow(
        &mut self,
        step: u64,
        hops: u64,
        hop: usize,
        (tail, from, to): (usize, Nanos, Nanos),
        (tip, at): (usize, Nanos),
    ) -> io::Result<()> {
        let id = Some(step.wrapping_mul(hops).wrapping_add(hop as u64));
        let (name, cat, pid, dur) = ("hop", Some(Category::Hop), PID, None);
        let (begin, end, args) = (Some(micros(from.max(to.saturating_sub(1)))), Some(micros(at)), None::<StepArgs>);
        self.event(&Event { name, cat, ph: "s", pid, tid: tail, ts: begin, dur, id, bp: None, args })?;
        self.event(&Event {
            name,
            cat,
            ph: "f",
            pid,
            tid: tip,
            ts: end,
            dur,
            id,
            bp: Some("e"),
            args: None::<StepArgs>,
        })
    }
}

/// When the head formed and sent each micro-batch, and when it drew its tokens. An answer waits while the head works;
/// bars of one track do not overlap.
fn head_bars(spans: &[HeadSpan]) -> Vec<[(Nanos, Nanos); 2]> {
    let mut bars: Vec<[(Nanos, Nanos); 2]> =
        spans.iter().map(|span| [(span.formed, span.sent), (span.answered, span.sampled)]).collect();
    let mut order: Vec<(usize, usize)> = (0..2 * spans.len()).map(|i| (i / 2, i % 2)).collect();
    order.sort_by_key(|(span, kind)| (bars[*span][*kind].1, bars[*span][*kind].0));
    let mut done = 0;
    for (span, kind) in order {
        let (from, to) = &mut bars[span][kind];
        *from = (*from).max(done).min(*to);
        done = *to;
    }
    bars
}

fn state_name(state: HeadState) -> &'static str {
    match state {
        HeadState::Working => "working",
        HeadState::Waiting => "waiting",
        HeadState::KvWait => "KV wait",
        HeadState::Idle => "idle",
        HeadState::Outage => "outage",
    }
}

#[cfg(test)]
mod tests;
