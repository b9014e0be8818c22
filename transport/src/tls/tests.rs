use std::net::{Ipv4Addr, SocketAddr};

use quinn::{ConnectionError, Endpoint};
use rustls_pki_types::UnixTime;

use super::*;
use crate::identity::tests::{authority, host, member, peer};
use crate::identity::{Authority, Name};
use crate::members::{Members, Refusal};

/// A free port of this host.
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Two ends of a connection. What they stand on is kept.
pub(crate) struct Pair {
    pub(crate) dialler: Connection,
    pub(crate) listener: Connection,
    _endpoints: [Endpoint; 2],
}

/// Connects; an error is what the end that refused says, and the other end's if none did.
pub(crate) async fn connect(
    server: quinn::ServerConfig,
    client: quinn::ClientConfig,
    name: &str,
) -> Result<Pair, String> {
    let listening = Endpoint::server(server, LOOPBACK).unwrap();
    let dialling = Endpoint::client(LOOPBACK).unwrap();
    let connecting = dialling.connect_with(client, listening.local_addr().unwrap(), name).unwrap();
    let accepting = async { listening.accept().await.unwrap().await };
    let (dialler, listener) = tokio::join!(connecting, accepting);
    match (dialler, listener) {
        (Ok(dialler), Ok(listener)) => Ok(Pair { dialler, listener, _endpoints: [listening, dialling] }),
        (Err(error @ ConnectionError::TransportError(_)), _) => Err(format!("dialler: {error}")),
        (_, Err(error @ ConnectionError::TransportError(_))) => Err(format!("listener: {error}")),
        (dialler, listener) => Err(format!("{:?} {:?}", dialler.err(), listener.err())),
    }
}

async fn meet(server: &Identity, client: &Identity, name: &PeerName) -> Result<Pair, String> {
    connect(server_config(server).unwrap(), client_config(client).unwrap(), &name.to_string()).await
}

fn check_refused(met: Result<Pair, String>, expected: &str) {
    let error = met.err().expect("to be refused");
    assert!(error.contains(expected), "{error}\nshould say {expected}");
}

/// A host with a certificate of its own making.
fn host_valid(authority: &Authority, role: Role, not_before: u64, seconds: u64) -> Identity {
    let key = Key::generate().unwrap();
    let not_before = UnixTime::since_unix_epoch(Duration::from_secs(not_before));
    let name = peer(authority, role, "odd");
    let certificate = authority.issue(key.public(), &name, not_before, Duration::from_secs(seconds)).unwrap();
    Identity::new(key, certificate, authority.certificate().clone()).unwrap()
}

#[tokio::test]
async fn members_meet_and_know_each_other() {
    let authority = authority();
    let desk = host(&authority, Role::Head, "desk");
    let (rig1, rig2) = (host(&authority, Role::Worker, "rig1"), host(&authority, Role::Worker, "rig2"));
    for (listener, dialler) in [(&rig1, &desk), (&rig2, &rig1)] {
        let pair = meet(listener, dialler, listener.name()).await.unwrap();
        assert_eq!(peer_of(&pair.listener).unwrap(), *dialler.certificate());
        assert_eq!(peer_of(&pair.dialler).unwrap(), *listener.certificate());
        assert!(matches!(enrolling_key_of(&pair.dialler), Err(TlsError::Alpn { .. })));
    }
    assert!(matches!(server_config(&desk), Err(TlsError::HeadListens { .. })));
}

#[tokio::test]
async fn a_member_that_was_removed_is_refused_on_a_live_connection() {
    let authority = authority();
    let desk = host(&authority, Role::Head, "desk");
    let (rig1, rig2) = (host(&authority, Role::Worker, "rig1"), host(&authority, Role::Worker, "rig2"));
    let mut members = Members::founding(authority.cluster(), member(&desk));
    members.add(member(&rig2)).unwrap();
    let pair = meet(&rig1, &rig2, rig1.name()).await.unwrap();
    let allowed = |members: &Members| {
        let peer = peer_of(&pair.listener).unwrap();
        members.allows(peer.name(), &peer.fingerprint())
    };
    assert_eq!(allowed(&members), Ok(()));
    let name: Name = "rig2".parse().unwrap();
    members.remove(&name).unwrap();
    assert_eq!(allowed(&members), Err(Refusal::NotMember { name, version: 2 }));
}

#[tokio::test]
async fn a_dialler_gets_the_worker_that_it_asked_for() {
    let authority = authority();
    let (desk, rig1) = (host(&authority, Role::Head, "desk"), host(&authority, Role::Worker, "rig1"));
    for other in [peer(&authority, Role::Worker, "rig2"), peer(&authority, Role::Head, "rig1")] {
        check_refused(meet(&rig1, &desk, &other).await, "not valid for name");
    }
    // A head's certificate is none of a server, even where somebody makes it listen.
    let head = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![desk.certificate().der().clone()], desk.key().der())
        .unwrap();
    let met = connect(served(head, ALPN).unwrap(), client_config(&rig1).unwrap(), &desk.name().to_string()).await;
    check_refused(met, "certificate does not allow extended key usage for server authentication");
}

#[tokio::test]
async fn other_authorities_and_other_times_are_refused() {
    let (mine, other) = (authority(), authority());
    let rig1 = host(&mine, Role::Worker, "rig1");
    let stranger = host(&other, Role::Worker, "rig1");
    check_refused(meet(&rig1, &stranger, stranger.name()).await, "dialler: the cryptographic handshake failed");
    check_refused(meet(&stranger, &rig1, rig1.name()).await, "UnknownIssuer");

    let trusting = |identity: &Identity, authority: &Authority| {
        let config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots(authority.certificate()).unwrap())
            .with_client_auth_cert(vec![identity.certificate().der().clone()], identity.key().der());
        dialled(config.unwrap(), ALPN).unwrap()
    };
    let name = rig1.name().to_string();
    let met = connect(server_config(&rig1).unwrap(), trusting(&stranger, &mine), &name).await;
    check_refused(
        met,
        "listener: the cryptographic handshake failed: error 48: invalid peer certificate: UnknownIssuer",
    );

    let now = UnixTime::now().as_secs();
    for (not_before, seconds, expected) in [(now - 1000, 500, "expired"), (now + 1000, 500, "not valid yet")] {
        let odd = host_valid(&mine, Role::Worker, not_before, seconds);
        check_refused(meet(&rig1, &odd, rig1.name()).await, expected);
        check_refused(meet(&odd, &rig1, odd.name()).await, expected);
    }
}

#[tokio::test]
async fn nobody_without_a_certificate_or_the_protocol_gets_in() {
    let authority = authority();
    let rig1 = host(&authority, Role::Worker, "rig1");
    let name = rig1.name().to_string();
    let bare = || {
        rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_root_certificates(roots(authority.certificate()).unwrap())
            .with_no_client_auth()
    };
    let met = connect(server_config(&rig1).unwrap(), dialled(bare(), ALPN).unwrap(), &name).await;
    check_refused(met, "listener: the cryptographic handshake failed: error 116: peer sent no certificates");
    for client in
        [dialled(bare(), ENROL_ALPN).unwrap(), dialled(bare(), b"h3").unwrap(), enrol_client_config().unwrap()]
    {
        let met = connect(server_config(&rig1).unwrap(), client, &name).await;
        check_refused(met, "error 120");
    }
    // An unenrolled worker serves nothing but enrolment.
    let unenrolled = enrol_server_config(rig1.key()).unwrap();
    check_refused(connect(unenrolled, client_config(&rig1).unwrap(), &name).await, "error 120");
}

#[tokio::test]
async fn sessions_are_never_resumed_and_nothing_is_sent_early() {
    let authority = authority();
    let (desk, rig1) = (host(&authority, Role::Head, "desk"), host(&authority, Role::Worker, "rig1"));
    let listening = Endpoint::server(server_config(&rig1).unwrap(), LOOPBACK).unwrap();
    let dialling = Endpoint::client(LOOPBACK).unwrap();
    let config = client_config(&desk).unwrap();
    for _ in 0..2 {
        let address = listening.local_addr().unwrap();
        let connecting = dialling.connect_with(config.clone(), address, &rig1.name().to_string()).unwrap();
        let Err(connecting) = connecting.into_0rtt() else { panic!("nothing is to be sent before the handshake") };
        let accepting = async { listening.accept().await.unwrap().await };
        let (dialler, listener) = tokio::join!(connecting, accepting);
        let (dialler, listener) = (dialler.unwrap(), listener.unwrap());
        // Time for a ticket to arrive, were there one.
        let mut stream = listener.open_uni().await.unwrap();
        stream.write_all(b"x").await.unwrap();
        stream.finish().unwrap();
        dialler.accept_uni().await.unwrap().read_to_end(1).await.unwrap();
        assert_eq!(peer_of(&listener).unwrap().name(), desk.name(), "the certificate is shown every time");
    }
}

#[tokio::test]
async fn a_worker_is_enrolled_and_renewed_without_a_restart() {
    let authority = authority();
    let (desk, rig1) = (host(&authority, Role::Head, "desk"), host(&authority, Role::Worker, "rig1"));
    let listening = Endpoint::server(enrol_server_config(rig1.key()).unwrap(), LOOPBACK).unwrap();
    let dialling = Endpoint::client(LOOPBACK).unwrap();
    let address = listening.local_addr().unwrap();
    let dial = async |config: quinn::ClientConfig, name: &str| {
        let connecting = dialling.connect_with(config, address, name).unwrap();
        let accepting = async { listening.accept().await.unwrap().await };
        let (dialler, listener) = tokio::join!(connecting, accepting);
        (dialler, listener)
    };
    let name = rig1.name().to_string();
    let (enrolling, _worker) = dial(enrol_client_config().unwrap(), ENROL_SERVER_NAME).await;
    let enrolling = enrolling.unwrap();
    assert_eq!(enrolling_key_of(&enrolling).unwrap(), *rig1.key().public());
    assert!(matches!(peer_of(&enrolling), Err(TlsError::Alpn { .. })));

    listening.set_server_config(Some(server_config(&rig1).unwrap()));
    assert!(enrolling.close_reason().is_none(), "a live connection lives on");
    assert!(dial(enrol_client_config().unwrap(), ENROL_SERVER_NAME).await.0.is_err());
    let (member, _worker) = dial(client_config(&desk).unwrap(), &name).await;
    assert_eq!(peer_of(&member.unwrap()).unwrap(), *rig1.certificate());

    let mut renewed = rig1.clone();
    let later = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs() + 60));
    let certificate = authority.renew(rig1.certificate(), later).unwrap();
    renewed.replace_certificate(certificate, UnixTime::now()).unwrap();
    listening.set_server_config(Some(server_config(&renewed).unwrap()));
    let (member, _worker) = dial(client_config(&desk).unwrap(), &name).await;
    assert_eq!(peer_of(&member.unwrap()).unwrap(), *renewed.certificate());

    listening.set_server_config(None);
    let dialled = dialling.connect_with(client_config(&desk).unwrap(), address, &name).unwrap();
    let dialled = tokio::time::timeout(Duration::from_millis(200), dialled).await;
    assert!(dialled.is_err(), "a worker that serves nothing says nothing");
}

#[tokio::test]
async fn whoever_shows_a_key_must_have_it() {
    let (mine, stolen) = (Key::generate().unwrap(), Key::generate().unwrap());
    let params = rcgen::CertificateParams::new([ENROL_SERVER_NAME.to_owned()]).unwrap();
    let certificate = params.self_signed(stolen.pair()).unwrap().der().clone();
    let signing = ring::sign::any_supported_type(&mine.der());
    let resolver =
        rustls::sign::SingleCertAndKey::from(rustls::sign::CertifiedKey::new(vec![certificate], signing.unwrap()));
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(resolver));
    let met = connect(served(config, ENROL_ALPN).unwrap(), enrol_client_config().unwrap(), ENROL_SERVER_NAME).await;
    check_refused(met, "BadSignature");
}
