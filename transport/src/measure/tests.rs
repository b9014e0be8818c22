use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use bytes::Bytes;

use super::stream::{StreamError, accepted, dialled, plain};
use super::*;
use crate::identity::Role;
use crate::identity::tests::{authority, host};
use crate::local::pair;

const LIMIT: usize = 1 << 20;
const LITTLE: Effort = Effort { trips: 5, time: Duration::from_secs(20) };

/// Both ends of a TCP connection over the loopback.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (here, listener.accept().unwrap().0)
}

/// What one end of a link finds out about it while the other one serves.
fn check(mut here: impl Port, mut there: impl Port + 'static) {
    let server = thread::spawn(move || serve(&mut there, &AtomicBool::new(false)));
    for bytes in [0, 1, 64, 8 << 10, LIMIT] {
        let payload = Bytes::from(vec![7; bytes]);
        assert_eq!(round_trips(&mut here, &payload, LITTLE).unwrap().len(), 5, "{bytes} bytes");
        let rate = one_way(&mut here, &payload, Effort { trips: 0, time: Duration::ZERO }).unwrap();
        assert_eq!(rate > 0.0, bytes > 0, "{bytes} bytes: {rate}");
    }
    drop(here);
    assert_eq!(server.join().unwrap(), Ok(()));
}

#[test]
fn every_port_is_measured_alike() {
    let (here, there) = pair(2);
    check(here, there);
    let (here, there) = sockets();
    check(plain(here, LIMIT).unwrap(), plain(there, LIMIT).unwrap());
    let authority = authority();
    let (desk, rig) = (host(&authority, Role::Head, "desk"), host(&authority, Role::Worker, "rig"));
    let (here, there) = sockets();
    let name = rig.name().clone();
    let listens = thread::spawn(move || accepted(there, &rig, LIMIT).unwrap());
    let here = dialled(here, &desk, &name, LIMIT).unwrap();
    check(here, listens.join().unwrap());
}

#[test]
fn who_serves_stops_when_it_is_told() {
    let (_here, mut there) = pair(1);
    assert_eq!(serve(&mut there, &AtomicBool::new(true)), Ok(()));
}

#[test]
fn tls_lets_in_only_the_cluster_and_reaches_only_who_was_meant() {
    let (ours, theirs) = (authority(), authority());
    let rig = host(&ours, Role::Worker, "rig");
    let attempt = |dialler, wanted| {
        let (here, there) = sockets();
        let rig = rig.clone();
        let listens = thread::spawn(move || {
            let mut port = accepted(there, &rig, LIMIT)?;
            // In TLS 1.3 a dialler is done first; what it is refused for it hears when it reads.
            serve(&mut port, &AtomicBool::new(false)).map_err(|_| StreamError::Name("a port that fails".to_owned()))
        });
        let went = dialled(here, &dialler, &wanted, LIMIT)
            .map_err(|error| error.to_string())
            .and_then(|mut port| trip(&mut port, &Bytes::new(), 1).map_err(|error| error.to_string()));
        (went.is_ok(), listens.join().unwrap().is_ok())
    };
    let name = rig.name().clone();
    assert_eq!(attempt(host(&ours, Role::Head, "desk"), name.clone()), (true, true));
    assert_eq!(attempt(host(&theirs, Role::Head, "desk"), name.clone()), (false, false), "another cluster's");
    let other = crate::identity::PeerName { name: "rig3".parse().unwrap(), ..name };
    assert_eq!(attempt(host(&ours, Role::Head, "desk"), other), (false, false), "another worker was meant");
}

#[test]
fn a_stream_that_breaks_the_frames_or_ends_is_told() {
    let check = |bytes: &[u8], wanted: PortError| {
        let (mut here, there) = sockets();
        let mut port = plain(there, 8).unwrap();
        std::io::Write::write_all(&mut here, bytes).unwrap();
        drop(here);
        assert_eq!(port.receive(Duration::from_secs(5)), Err(wanted));
    };
    let frame = |bytes: usize| {
        let message = crate::Message::Frame { sequence: 1, frame: frame(Wanted::Sink, 1, vec![0; bytes].into()) };
        [&message.header()[..], &message.payload()].concat()
    };
    check(&[], PortError::Closed);
    check(&frame(8)[..44], PortError::Closed);
    check(&frame(9), crate::FrameError::TooLarge { found: 9, limit: 8 }.into());
    check(&[9; 40], crate::FrameError::Version { found: 0x0909 }.into());
    let (_here, there) = sockets();
    let timeout = Duration::from_millis(5);
    assert_eq!(plain(there, 8).unwrap().receive(timeout), Err(PortError::Timeout { timeout }));
}

/// A port that gives back something else.
struct Liar(Frame);

impl Port for Liar {
    fn send(&mut self, _frame: Frame) -> Result<(), PortError> {
        Ok(())
    }

    fn has_room(&self) -> bool {
        true
    }

    fn receive(&mut self, _timeout: Duration) -> Result<crate::Arrival, PortError> {
        Ok(crate::Arrival { frame: self.0.clone(), at: Instant::now() })
    }
}

#[test]
fn an_answer_to_something_else_is_no_measurement() {
    let payload = Bytes::from_static(b"four");
    let ask = |step, found: &'static [u8]| {
        let mut port = Liar(frame(Wanted::Echo, step, Bytes::from_static(found)));
        trip(&mut port, &payload, 1).map(drop)
    };
    assert_eq!(ask(1, b"four"), Ok(()));
    assert_eq!(ask(2, b"four"), Err(MeasureError::Other { expected: 1, found: 2 }));
    assert_eq!(ask(1, b"fou"), Err(MeasureError::Length { expected: 4, found: 3 }));
}
