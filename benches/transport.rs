//! Frames between two threads of a process, there and back; and what it costs to remember them.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pp_engine::trace::{HeadSpan, HeadState, RING, Recorder, StageSpan};
use pp_transport::local::pair;
use pp_transport::{Frame, FrameHeader, Port, PortError};

const WAIT: Duration = Duration::from_secs(10);

/// A token's ids, a token's activations, a prefill micro-batch's activations.
const PAYLOADS: [usize; 3] = [64, 8 << 10, 1 << 20];

fn local(c: &mut Criterion) {
    let mut group = c.benchmark_group("local port, there and back");
    for bytes in PAYLOADS {
        let (mut here, mut there) = pair(2);
        let echo = std::thread::spawn(move || {
            loop {
                match there.receive(WAIT) {
                    Ok(arrival) => there.send(arrival.frame).expect("the other end waits for it"),
                    Err(PortError::Timeout { .. }) => {}
                    Err(_) => return,
                }
            }
        });
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |b| {
            let activations = vec![1u8; bytes];
            b.iter(|| {
                // A stage makes a payload for every frame, so making it counts.
                let frame = Frame { header: FrameHeader::default(), payload: activations.clone() };
                here.send(frame).expect("the echo is there");
                black_box(here.receive(WAIT).expect("the echo answers"))
            });
        });
        drop(here);
        echo.join().expect("the echo ends with its port");
    }
    group.finish();
}

/// What always being traced costs: all that a micro-batch through four stages writes, with rings that are full.
fn trace(c: &mut Criterion) {
    let stages = 4;
    let recorder = Recorder::new((0..stages).map(|i| (format!("stage {i}"), (i, i + 1))));
    let mut step = 0;
    let mut micro_batch = || {
        step += 1;
        recorder.sent(HeadSpan { step, sent: recorder.now(), ..HeadSpan::default() });
        for stage in 0..stages {
            recorder.stage(stage, StageSpan { step, started: recorder.now(), ..StageSpan::default() });
            recorder.handed_on(stage, step);
        }
        let now = recorder.now();
        recorder.answered(step, now, now);
        recorder.state(HeadState::Working, now - 1, now);
        black_box(recorder.step_seconds(step));
    };
    (0..RING + 1).for_each(|_| micro_batch());
    c.bench_function("trace of a micro-batch through four stages", |b| b.iter(&mut micro_batch));
}

criterion_group!(benches, local, trace);
criterion_main!(benches);
