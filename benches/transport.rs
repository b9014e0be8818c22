//! Frames there and back, between two threads of a process and between two hosts; and what it costs to remember them.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pp_engine::trace::{HeadSpan, HeadState, RING, Recorder, StageSpan};
use pp_transport::identity::{Authority, Identity, Key, PeerName, Role, UnixTime};
use pp_transport::local::pair;
use pp_transport::members::{Member, Members};
use pp_transport::quic::{Node, WhoAmI, tuning};
use pp_transport::{Frame, FrameHeader, LinkId, LinkLimits, Port, PortError};

const WAIT: Duration = Duration::from_secs(10);

/// A token's ids, a token's activations, those of eight tokens, a prefill micro-batch's.
const PAYLOADS: [usize; 4] = [64, 8 << 10, 64 << 10, 1 << 20];

fn local(c: &mut Criterion) {
    there_and_back(c, "local port, there and back", || {
        let (here, there) = pair(2);
        (Box::new(here), Box::new(there), Box::new(()))
    });
}

/// Two hosts on the loopback: encrypted, with an I/O thread each.
fn quic(c: &mut Criterion) {
    let authority = Authority::create(UnixTime::now()).expect("an authority");
    let host = |name: &str, role| {
        let key = Key::generate().expect("a key");
        let peer = PeerName { cluster: authority.cluster(), role, name: name.parse().expect("a name") };
        let certificate = authority.issue_now(key.public(), &peer, UnixTime::now()).expect("a certificate");
        Identity::new(key, certificate, authority.certificate().clone()).expect("an identity")
    };
    let (desk, rig) = (host("desk", Role::Head), host("rig", Role::Worker));
    let member = |identity: &Identity| {
        let PeerName { name, role, .. } = identity.name().clone();
        Member { name, role, fingerprint: identity.fingerprint(), address: None, added: 0 }
    };
    let mut members = Members::founding(authority.cluster(), member(&desk));
    members.add(member(&rig)).expect("two members");
    let limits = LinkLimits { credits: 2, payload_bytes: PAYLOADS[PAYLOADS.len() - 1], silence: tuning::SILENCE };
    there_and_back(c, "link over QUIC, there and back", || {
        let start = |identity: &Identity| {
            let who = WhoAmI { identity: identity.clone(), members: members.clone() };
            Node::start(who, "127.0.0.1:0".parse().expect("an address"), limits).expect("a node")
        };
        let (head, worker) = (start(&desk), start(&rig));
        let id = LinkId { session: 1, link: 1 };
        let there = worker.expect(id, desk.name().clone(), limits);
        let address = worker.local_addr().expect("an address").to_string().parse().expect("an address");
        let peer = head.dial(rig.name(), &address, WAIT).expect("the worker answers");
        let here = peer.open(id, limits);
        (Box::new(here), Box::new(there), Box::new((head, worker)))
    });
}

type Ends = (Box<dyn Port>, Box<dyn Port>, Box<dyn std::any::Any>);

/// Frames of each size, through a link that `open` makes, with what it stands on.
fn there_and_back(c: &mut Criterion, name: &str, open: impl Fn() -> Ends) {
    let mut group = c.benchmark_group(name);
    for bytes in PAYLOADS {
        let (mut here, mut there, stands_on) = open();
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
                let frame = Frame { header: FrameHeader::default(), payload: activations.clone().into() };
                here.send(frame).expect("the echo is there");
                black_box(here.receive(WAIT).expect("the echo answers"))
            });
        });
        drop(here);
        echo.join().expect("the echo ends with its port");
        drop(stands_on);
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
        black_box(recorder.step(step, (now, now), &[]));
    };
    (0..RING + 1).for_each(|_| micro_batch());
    c.bench_function("trace of a micro-batch through four stages", |b| b.iter(&mut micro_batch));
}

criterion_group!(benches, local, quic, trace);
criterion_main!(benches);
