//! One end of a measurement, a process of its own: it serves, or measures and prints what it found, a line a size.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bytes::Bytes;
use pp_engine::cluster::control_limits;
use pp_transport::identity::{Identity, Store};
use pp_transport::local::pair;
use pp_transport::measure::{self, Effort, stream};
use pp_transport::members::Members;
use pp_transport::quic::{Node, WhoAmI, tuning};
use pp_transport::{LinkId, LinkLimits, Port};
use serde::{Deserialize, Serialize};

use super::{Cell, OTHER_END};
use crate::args::{NetBenchEndArgs, TransportArg};
use crate::output::Out;

/// How long the other end may take to be reached.
const DIAL: Duration = Duration::from_secs(10);
/// Frames that a link holds, as a pipeline of two stages has it.
const CREDITS: u64 = 5;
/// What goes before anything is measured: paths are found, buffers grow, processors wake.
const WARM: Duration = Duration::from_millis(300);
/// Of the frames that go before.
pub(super) const WARM_BYTES: usize = 8 << 10;

/// Where an end serves.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Serving {
    pub(super) address: SocketAddr,
}

/// Serves or measures.
pub fn run(args: &NetBenchEndArgs) -> Result<ExitCode> {
    let out = Out::new(true, true);
    match (args.listen, args.to) {
        (Some(listen), _) => serve(args, listen, &out)?,
        (None, Some(to)) => measure_to(args, to, &out)?,
        (None, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}

fn limits(args: &NetBenchEndArgs) -> LinkLimits {
    LinkLimits { credits: CREDITS, payload_bytes: largest(args), silence: tuning::SILENCE }
}

/// Bytes of the largest frame.
fn largest(args: &NetBenchEndArgs) -> usize {
    args.sizes.iter().copied().max().unwrap_or(0).max(WARM_BYTES)
}

/// Serves one that comes, until it goes or stdin ends.
fn serve(args: &NetBenchEndArgs, listen: SocketAddr, out: &Out) -> Result<()> {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin().lock().take(u64::MAX), &mut io::sink());
        // Whoever started this end has gone.
        std::process::exit(0);
    });
    let worker = Store::new(&args.folder).worker()?.context("no worker's identity is in the folder")?;
    let stop = AtomicBool::new(false);
    let told = match args.transport {
        TransportArg::Quic | TransportArg::Local => {
            let node = node(worker.identity, &worker.members, listen)?;
            let head = worker.members.members().iter().find(|member| member.role == pp_transport::identity::Role::Head);
            let head = head.context("no head is in the member list")?;
            let name = pp_transport::identity::PeerName {
                cluster: worker.members.cluster(),
                role: head.role,
                name: head.name.clone(),
            };
            let mut port = node.expect(link(), name, limits(args));
            out.object(&Serving { address: node.local_addr()? })?;
            measure::serve(&mut port, &stop)
        }
        TransportArg::Tcp | TransportArg::Tls => {
            let listener = TcpListener::bind(listen)?;
            out.object(&Serving { address: listener.local_addr()? })?;
            let socket = listener.accept()?.0;
            if args.transport == TransportArg::Tcp {
                measure::serve(&mut stream::plain(socket, largest(args))?, &stop)
            } else {
                measure::serve(&mut stream::accepted(socket, &worker.identity, largest(args))?, &stop)
            }
        }
    };
    Ok(told?)
}

fn node(identity: Identity, members: &Members, listen: SocketAddr) -> Result<Node> {
    Ok(Node::start(WhoAmI { identity, members: members.clone() }, listen, control_limits())?)
}

fn link() -> LinkId {
    LinkId { session: 1, link: 1 }
}

fn measure_to(args: &NetBenchEndArgs, to: SocketAddr, out: &Out) -> Result<()> {
    if args.transport == TransportArg::Local {
        let (mut here, mut there) = pair(CREDITS as usize);
        std::thread::spawn(move || measure::serve(&mut there, &AtomicBool::new(false)));
        return all(args, &mut here, None, out);
    }
    let head = Store::new(&args.folder).head()?.context("no head's identity is in the folder")?;
    let other = OTHER_END.parse().context("a name")?;
    let peer = pp_transport::identity::PeerName {
        cluster: head.members.cluster(),
        role: pp_transport::identity::Role::Worker,
        name: other,
    };
    match args.transport {
        TransportArg::Local => Ok(()),
        TransportArg::Quic => {
            let node = node(head.identity, &head.members, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)))?;
            let peer = node.dial(&peer, &to.to_string().parse().context("an address")?, DIAL)?;
            let mut port = peer.open(link(), limits(args));
            all(args, &mut port, Some(&|| peer.mtu()), out)
        }
        TransportArg::Tcp => {
            let socket = TcpStream::connect_timeout(&to, DIAL)?;
            all(args, &mut stream::plain(socket, largest(args))?, None, out)
        }
        TransportArg::Tls => {
            let socket = TcpStream::connect_timeout(&to, DIAL)?;
            all(args, &mut stream::dialled(socket, &head.identity, &peer, largest(args))?, None, out)
        }
    }
}

fn all(args: &NetBenchEndArgs, port: &mut dyn Port, mtu: Option<&dyn Fn() -> u16>, out: &Out) -> Result<()> {
    let effort = Effort { trips: args.reps, time: Duration::from_secs_f64(args.seconds) };
    warm(port, effort)?;
    for bytes in &args.sizes {
        let cell = Cell { mtu: mtu.map(|mtu| mtu()), ..cell(port, *bytes, effort)? };
        out.object(&cell)?;
    }
    Ok(())
}

/// Lets paths be found and buffers grow; as long as a measurement at most.
pub(super) fn warm(port: &mut dyn Port, effort: Effort) -> Result<()> {
    let time = effort.time.min(WARM);
    let begun = Instant::now();
    measure::round_trips(port, &Bytes::from_static(&[1; 64]), Effort { trips: usize::MAX, time: time / 2 })?;
    let payload = Bytes::from(vec![1; WARM_BYTES]);
    measure::round_trips(port, &payload, Effort { trips: usize::MAX, time: time.saturating_sub(begun.elapsed()) })?;
    Ok(())
}

/// What frames of so many bytes cost.
pub(super) fn cell(port: &mut dyn Port, bytes: usize, effort: Effort) -> Result<Cell> {
    let payload = Bytes::from(vec![0x5a; bytes]);
    let mut trips = measure::round_trips(port, &payload, effort)?;
    let rate = measure::one_way(port, &payload, effort)?;
    trips.sort();
    let at = |share: f64| {
        let rank = (trips.len() as f64 * share).ceil() as usize;
        trips[rank.clamp(1, trips.len()) - 1].as_secs_f64() * 1e6
    };
    Ok(Cell {
        bytes,
        trips: trips.len(),
        median_us: Some(at(0.5)),
        p95_us: Some(at(0.95)),
        one_way_bytes_per_s: Some(rate),
        mtu: None,
        not_measured: None,
    })
}
