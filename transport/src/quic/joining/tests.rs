//! Two ends on the loopback.

use std::sync::mpsc;
use std::thread;

use super::*;
use crate::identity::{PeerName, Role, UnixTime};
use crate::members::Members;

const NOBODY: &str = "127.0.0.1:9";

fn loopback() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// An authority with the entry of its head.
fn head() -> (Authority, Member) {
    let authority = Authority::create(UnixTime::now()).unwrap();
    let fingerprint = Key::generate().unwrap().fingerprint();
    let name = "head".parse().unwrap();
    let member = Member { name, role: Role::Head, fingerprint, address: None, added: 0 };
    (authority, member)
}

/// What a waiting worker says.
enum Said {
    Code(SocketAddr, Code),
    Again,
    Refused(String),
}

struct Worker {
    said: mpsc::Receiver<Said>,
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<Option<(Identity, SocketAddr)>, JoinError>>,
}

fn worker(preset: Option<Code>, stores: bool) -> Worker {
    let (tell, said) = mpsc::channel();
    let stop = Arc::new(AtomicBool::new(false));
    let cancel = stop.clone();
    let thread = thread::spawn(move || {
        let key = Key::generate().unwrap();
        let name: Name = "rig2".parse().unwrap();
        let mut hear = |waiting: Waiting<'_>| {
            let said = match waiting {
                Waiting::Code { address, code, again: None } => Said::Code(address, code.clone()),
                Waiting::Code { again: Some(_), .. } => Said::Again,
                Waiting::Refused { error, .. } => Said::Refused(error.to_string()),
            };
            let _ = tell.send(said);
        };
        let keep = move |_: &Identity, members: &SignedMembers| {
            assert!(!members.as_bytes().is_empty());
            if stores { Ok(()) } else { Err(std::io::Error::other("the disk is full")) }
        };
        wait_for_enrolment(loopback(), &key, Some(&name), preset.as_ref(), &cancel, &mut hear, keep)
    });
    Worker { said, stop, thread }
}

impl Worker {
    fn code(&self) -> (Address, Code) {
        match self.said.recv_timeout(Duration::from_secs(20)).expect("it says something") {
            Said::Code(address, code) => (address.to_string().parse().unwrap(), code),
            _ => panic!("it says its code first"),
        }
    }

    fn end(self) -> Result<Option<(Identity, SocketAddr)>, JoinError> {
        self.thread.join().unwrap()
    }
}

fn enrol(address: &Address, code: &Code) -> Result<HostCertificate, JoinError> {
    let (authority, member) = head();
    enrol_worker(address, code, &authority, &member, |host| Ok::<_, AskError>(host.name.clone().unwrap()))
}

#[test]
fn a_worker_is_enrolled_with_the_code_that_it_tells() {
    let worker = worker(None, true);
    let (address, code) = worker.code();
    let (authority, member) = head();
    let enlist = |host: &Host| Ok::<_, AskError>(host.name.clone().unwrap());
    let certificate = enrol_worker(&address, &code, &authority, &member, enlist).unwrap();
    let (identity, listened) = worker.end().unwrap().expect("enrolled");
    assert_eq!(identity.certificate(), &certificate);
    assert_eq!(listened.to_string(), address.as_str());
    let PeerName { cluster, role, name } = identity.name();
    assert_eq!((*cluster, *role, name.as_str()), (authority.cluster(), Role::Worker, "rig2"));
    assert_eq!(Members::founding(*cluster, member).version(), 0);
    // Its endpoint is closed: the address is free for the node.
    UdpSocket::bind(listened).unwrap();
}

#[test]
fn a_code_of_another_key_is_refused_before_any_proof() {
    let worker = worker(None, true);
    let (address, code) = worker.code();
    let other = Code::generate(&Key::generate().unwrap().fingerprint()).unwrap();
    // A code of another key never gets as far as a proof.
    let error = enrol(&address, &other).unwrap_err();
    assert!(matches!(error, JoinError::Ask(AskError::OtherKey { .. })), "{error}");
    enrol(&address, &code).expect("the right code is still good");
    assert!(worker.end().unwrap().is_some());
}

#[test]
fn a_preset_code_is_proved_by_both_and_another_is_not() {
    let preset = |text: &str| Code::preset(text).unwrap();
    let worker = worker(Some(preset("correct horse battery staple 42")), true);
    let (address, code) = worker.code();
    let error = enrol(&address, &preset("wrong horse battery staple 4242")).unwrap_err();
    assert!(matches!(error, JoinError::Ask(AskError::WrongCode)), "{error}");
    let Said::Refused(text) = worker.said.recv_timeout(Duration::from_secs(20)).unwrap() else { panic!("refused") };
    assert!(text.contains("code"), "{text}");
    enrol(&address, &code).unwrap();
    assert!(worker.end().unwrap().is_some());
}

#[test]
fn what_cannot_be_stored_is_no_enrolment() {
    let worker = worker(None, false);
    let (address, code) = worker.code();
    let error = enrol(&address, &code).unwrap_err();
    assert!(matches!(error, JoinError::Ask(AskError::Refused { .. })), "{error}");
    let error = worker.end().unwrap_err();
    assert!(error.to_string().contains("the disk is full"), "{error}");
}

#[test]
fn a_worker_that_is_told_to_end_ends() {
    let worker = worker(None, true);
    worker.code();
    worker.stop.store(true, Ordering::Relaxed);
    assert!(worker.end().unwrap().is_none());
}

#[test]
fn nobody_and_members_do_not_enrol() {
    let (_, code) = {
        let worker = worker(None, true);
        let found = worker.code();
        worker.stop.store(true, Ordering::Relaxed);
        found
    };
    let error = enrol(&NOBODY.parse().unwrap(), &code).unwrap_err();
    assert!(matches!(error, JoinError::Timeout { .. }), "{error}");

    let (authority, member) = head();
    let key = Key::generate().unwrap();
    let name = PeerName { cluster: authority.cluster(), role: Role::Worker, name: "rig2".parse().unwrap() };
    let certificate = authority.issue_now(key.public(), &name, UnixTime::now()).unwrap();
    let identity = Identity::new(key, certificate, authority.certificate().clone()).unwrap();
    let who = super::super::WhoAmI { identity, members: Members::founding(authority.cluster(), member) };
    let limits = crate::LinkLimits { credits: 4, payload_bytes: 1024, silence: super::super::tuning::SILENCE };
    let node = super::super::Node::start(who, loopback(), limits).unwrap();
    let address = node.local_addr().unwrap().to_string().parse().unwrap();
    let error = enrol(&address, &code).unwrap_err();
    assert!(matches!(error, JoinError::Enrolled { .. }), "{error}");
}

#[test]
fn two_do_not_listen_at_one_address() {
    let worker = worker(None, true);
    let (address, _) = worker.code();
    let key = Key::generate().unwrap();
    let keep = |_: &Identity, _: &SignedMembers| Ok::<_, std::io::Error>(());
    let stop = AtomicBool::new(false);
    let listen = address.as_str().parse().unwrap();
    let error = wait_for_enrolment(listen, &key, None, None, &stop, &mut |_| {}, keep).unwrap_err();
    assert!(error.to_string().contains("cannot listen on UDP"), "{error}");
    worker.stop.store(true, Ordering::Relaxed);
    worker.end().unwrap();
}
