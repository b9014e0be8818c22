//! Frames there and back, between two threads of a process and between two hosts, over QUIC, TCP and TCP with TLS; and
//! what it costs to remember them. `pp-run net-bench` measures the same between processes.

use std::hint::black_box;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pp_engine::trace::{HeadSpan, HeadState, RING, Recorder, StageSpan};
use pp_transport::identity::{Authority, Identity, Key, PeerName, Role, UnixTime};
use pp_transport::local::pair;
use pp_transport::measure::{self, Effort, stream};
use pp_transport::members::{Member, Members};
use pp_transport::quic::{Node, WhoAmI, tuning};
use pp_transport::{LinkId, LinkLimits, Port};

const WAIT: Duration = Duration::from_secs(10);

/// A token's ids, a token's activations, those of eight tokens, a prefill micro-batch's.
const PAYLOADS: [usize; 4] = [64, 8 << 10, 64 << 10, 1 << 20];

fn local(c: &mut Criterion) {
    there_and_back(c, "local port, there and back", || {
        let (here, there) = pair(2);
        (Box::new(here), Box::new(there), Box::new(()))
    });
}

/// A head, a worker, and the list that has both.
struct Cluster {
    desk: Identity,
    rig: Identity,
    members: Members,
}

fn cluster() -> Cluster {
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
    Cluster { desk, rig, members }
}

/// Two hosts on the loopback: encrypted, with an I/O thread each.
fn quic(c: &mut Criterion) {
    let Cluster { desk, rig, members } = cluster();
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

/// Both ends of a TCP connection over the loopback.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket");
    let here = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    (here, listener.accept().expect("a connection").0)
}

/// The same frames over TCP, and over TCP with TLS 1.3.
fn tcp(c: &mut Criterion) {
    let most = PAYLOADS[PAYLOADS.len() - 1];
    there_and_back(c, "TCP, there and back", || {
        let (here, there) = sockets();
        let port = |socket| Box::new(stream::plain(socket, most).expect("a port"));
        (port(here), port(there), Box::new(()))
    });
    let Cluster { desk, rig, .. } = cluster();
    there_and_back(c, "TCP with TLS, there and back", || {
        let ((here, there), listens) = (sockets(), rig.clone());
        let accept = std::thread::spawn(move || stream::accepted(there, &listens, most).expect("a port"));
        let here = stream::dialled(here, &desk, rig.name(), most).expect("a port");
        (Box::new(here), Box::new(accept.join().expect("a port")), Box::new(()))
    });
}

type Ends = (Box<dyn Port>, Box<dyn Port>, Box<dyn std::any::Any>);

/// Frames of each size, through a link that `open` makes, with what it stands on.
fn there_and_back(c: &mut Criterion, name: &str, open: impl Fn() -> Ends) {
    let mut group = c.benchmark_group(name);
    for bytes in PAYLOADS {
        let (mut here, mut there, stands_on) = open();
        let echo = std::thread::spawn(move || measure::serve(there.as_mut(), &AtomicBool::new(false)));
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        group.bench_function(BenchmarkId::from_parameter(bytes), |b| {
            let payload = vec![1u8; bytes].into();
            b.iter_custom(|trips| {
                let effort = Effort { trips: trips as usize, time: Duration::MAX };
                // The least that is measured is three; the mean stands for what was asked for.
                let took = measure::round_trips(here.as_mut(), &payload, effort).expect("the other end answers");
                black_box(took.iter().sum::<Duration>()).div_f64(took.len() as f64).mul_f64(trips as f64)
            });
        });
        drop(here);
        echo.join().expect("it ends with its port").expect("a link that was closed");
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
        black_box(recorder.step(step, (now, now)));
    };
    (0..RING + 1).for_each(|_| micro_batch());
    c.bench_function("trace of a micro-batch through four stages", |b| b.iter(&mut micro_batch));
}

criterion_group!(benches, local, quic, tcp, trace);
criterion_main!(benches);
