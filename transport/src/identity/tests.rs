use std::time::Duration;

use proptest::prelude::*;
use rustls_pki_types::CertificateDer;
use webpki::KeyUsage;

use super::certificate::for_usage;
use super::*;
use crate::members::Member;

pub(crate) const DAY: u64 = 24 * 3600;

/// A clock in the tests: 2030, plus so many seconds.
pub(crate) fn at(seconds: u64) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(1_893_456_000 + seconds))
}

pub(crate) fn authority() -> Authority {
    Authority::create(UnixTime::now()).unwrap()
}

pub(crate) fn peer(authority: &Authority, role: Role, name: &str) -> PeerName {
    PeerName { cluster: authority.cluster(), role, name: name.parse().unwrap() }
}

/// A host whose certificate is valid now.
pub(crate) fn host(authority: &Authority, role: Role, name: &str) -> Identity {
    let key = Key::generate().unwrap();
    let certificate = authority.issue_now(key.public(), &peer(authority, role, name), UnixTime::now()).unwrap();
    Identity::new(key, certificate, authority.certificate().clone()).unwrap()
}

pub(crate) fn member(identity: &Identity) -> Member {
    let PeerName { role, name, .. } = identity.name().clone();
    let address = (role == Role::Worker).then(|| "192.0.2.12:7711".parse().unwrap());
    Member { name, role, fingerprint: identity.fingerprint(), address, added: 1_893_456_000 }
}

#[test]
fn names_are_one_label_and_have_one_spelling() {
    for good in ["a", "rig2", "rig-2", "9", &"x".repeat(40)] {
        assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
    }
    for bad in ["", "-a", "a-", "Rig", "a.b", "a b", "ä", "a\n", "*", &"x".repeat(41)] {
        assert!(matches!(bad.parse::<Name>(), Err(NameError::Host { .. })), "{bad:?}");
    }
    let authority = authority();
    let name = peer(&authority, Role::Worker, "rig2");
    assert_eq!(name.to_string(), format!("rig2.worker.{}.pp-run", authority.cluster()));
    assert_eq!(name.to_string().parse(), Ok(name.clone()));
    assert_eq!(authority.cluster().to_string().parse(), Ok(authority.cluster()));
    let text = name.to_string();
    let bad = [text.to_uppercase(), format!("x.{text}"), format!("{text}."), text.replace("worker", "king")];
    for bad in bad.iter().map(String::as_str).chain(["", "....", "*.worker.0000000000000000.pp-run"]) {
        assert!(bad.parse::<PeerName>().is_err(), "{bad:?}");
    }
    let shown = "\u{1b}[2J".repeat(50).parse::<Name>().unwrap_err().to_string();
    assert!(!shown.contains('\u{1b}') && shown.len() < 1000, "{shown}");
}

#[test]
fn addresses_have_a_host_and_a_port() {
    for good in ["192.0.2.12:7711", "rig2:1", "rig2.example.org:65535", "[2001:db8::1]:7711", "[fe80::1%eth0]:7711"] {
        assert_eq!(good.parse::<Address>().unwrap().as_str(), good);
    }
    for bad in
        ["", ":1", "a", "a:", "a:0", "a:65536", "a:+1x", "2001:db8::1:7711", "[]:1", "a b:1", "a\u{1b}:1", "a]:1"]
    {
        assert!(matches!(bad.parse::<Address>(), Err(NameError::Address { .. })), "{bad:?}");
    }
    assert!(format!("{}:1", "x".repeat(300)).parse::<Address>().is_err());
}

#[test]
fn an_authority_vouches_for_its_own_hosts_only() {
    let (mine, other) = (authority(), authority());
    let now = UnixTime::now();
    for role in [Role::Head, Role::Worker] {
        let certificate = host(&mine, role, "a").certificate().clone();
        assert_eq!(mine.certificate().verify(&certificate, now), Ok(()));
        let refused = other.certificate().verify(&certificate, now);
        assert_eq!(refused, Err(IdentityError::OtherCluster { found: mine.cluster(), mine: other.cluster() }));
    }
    let foreign = peer(&other, Role::Worker, "a");
    let key = Key::generate().unwrap();
    assert!(matches!(mine.issue_now(key.public(), &foreign, now), Err(IdentityError::OtherCluster { .. })));
    // Another authority that says it were this one: the name is right, the signature is not.
    let forged = forge(&peer(&mine, Role::Worker, "a"));
    let refused = mine.certificate().verify(&forged, now);
    assert!(matches!(refused, Err(IdentityError::Certificate(webpki::Error::UnknownIssuer))), "{refused:?}");
}

/// A certificate for any name, signed by its own key.
fn forge(name: &PeerName) -> HostCertificate {
    let key = Key::generate().unwrap();
    let params = rcgen::CertificateParams::new([name.to_string()]).unwrap();
    HostCertificate::parse(params.self_signed(key.pair()).unwrap().der()).unwrap()
}

#[test]
fn a_head_is_no_server() {
    let authority = authority();
    let usages = |role| {
        let certificate = host(&authority, role, "a").certificate().clone();
        [KeyUsage::server_auth(), KeyUsage::client_auth()]
            .map(|usage| for_usage(authority.certificate(), &certificate, UnixTime::now(), usage).is_ok())
    };
    assert_eq!(usages(Role::Head), [false, true]);
    assert_eq!(usages(Role::Worker), [true, true]);

    // A worker with the certificate of a head's kind would be refused by whoever dials it: it is not to take it.
    let key = Key::generate().unwrap();
    let mut params = rcgen::CertificateParams::new([peer(&authority, Role::Worker, "a").to_string()]).unwrap();
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    let issuer = rcgen::Issuer::new(authority::issuer(authority.key().public()), authority.key().pair());
    let deaf = HostCertificate::parse(params.signed_by(key.public(), &issuer).unwrap().der()).unwrap();
    let verified = authority.certificate().verify(&deaf, UnixTime::now());
    assert!(matches!(verified, Err(IdentityError::Certificate(_))), "{verified:?}");
}

#[test]
fn certificates_are_valid_when_they_say() {
    let authority = Authority::create(at(0)).unwrap();
    let key = Key::generate().unwrap();
    let name = peer(&authority, Role::Worker, "a");
    let certificate = authority.issue(key.public(), &name, at(100), Duration::from_secs(900)).unwrap();
    assert_eq!(certificate.not_after(), at(1000));
    let verify = |now| authority.certificate().verify(&certificate, at(now));
    assert_eq!([100, 1000].map(verify), [Ok(()), Ok(())]);
    // webpki reads the same dates.
    let [begin, end] = [100, 1000].map(|s| at(s).as_secs());
    assert_eq!(verify(99), Err(IdentityError::NotYet { not_before: begin, now: begin - 1 }));
    assert_eq!(verify(1001), Err(IdentityError::Expired { not_after: end, now: end + 1 }));
    assert_eq!([1000, 1001].map(|now| certificate.has_expired(at(now))), [false, true]);

    // Dates from 2050 on have another form, and none is later than the authority's.
    let late = authority.issue(key.public(), &name, at(0), Duration::from_secs(10_000 * DAY)).unwrap();
    assert_eq!(late.not_after(), authority.certificate().not_after());
    let (long_ago, for_long) = (UnixTime::since_unix_epoch(Duration::ZERO), Authority::create(at(8000 * DAY)).unwrap());
    assert_eq!(for_long.certificate().not_after(), at(8000 * DAY + AUTHORITY_VALIDITY.as_secs()));
    let old = authority.issue(key.public(), &name, long_ago, Duration::from_secs(9)).unwrap();
    assert_eq!(old.not_after().as_secs(), 9);
}

#[test]
fn certificates_renew_before_they_expire() {
    let authority = Authority::create(at(0)).unwrap();
    let key = Key::generate().unwrap();
    let name = peer(&authority, Role::Worker, "a");
    let certificate = authority.issue_now(key.public(), &name, at(0)).unwrap();
    let mut identity = Identity::new(key, certificate, authority.certificate().clone()).unwrap();
    let life = HOST_VALIDITY.as_secs() + CLOCK_SKEW.as_secs();
    let due = HOST_VALIDITY.as_secs() - life / 3;
    assert_eq!([0, due, due + 1, 100 * DAY].map(|now| identity.renewal_due(at(now))), [false, false, true, true]);

    let renewed = authority.renew(identity.certificate(), at(70 * DAY)).unwrap();
    assert_eq!((renewed.name(), renewed.key()), (identity.name(), identity.certificate().key()));
    assert_ne!(renewed.der(), identity.certificate().der());
    identity.replace_certificate(renewed.clone(), at(70 * DAY)).unwrap();
    assert!(!identity.renewal_due(at(70 * DAY)));
    assert!(matches!(
        identity.replace_certificate(renewed, at(70 * DAY)),
        Err(IdentityError::NotLater { found, mine }) if found == mine
    ));

    let now = at(80 * DAY);
    let refused = |certificate: HostCertificate| identity.clone().replace_certificate(certificate, now).unwrap_err();
    let other_key = authority.issue_now(Key::generate().unwrap().public(), &name, now).unwrap();
    assert_eq!(refused(other_key), IdentityError::OtherKey);
    for other in [peer(&authority, Role::Head, "a"), peer(&authority, Role::Worker, "b")] {
        let other = authority.issue_now(identity.key().public(), &other, now).unwrap();
        assert!(matches!(refused(other), IdentityError::OtherName { .. }));
    }
    let params = rcgen::CertificateParams::new([name.to_string()]).unwrap();
    let forged = HostCertificate::parse(params.self_signed(identity.key().pair()).unwrap().der()).unwrap();
    assert!(matches!(refused(forged), IdentityError::Certificate(webpki::Error::UnknownIssuer)));
    let expired = authority.renew(identity.certificate(), at(70 * DAY + 91 * DAY));
    assert!(matches!(expired, Err(IdentityError::Expired { .. })));
}

#[test]
fn an_identity_is_one_key_one_certificate_one_authority() {
    let (mine, other) = (authority(), authority());
    let identity = host(&mine, Role::Worker, "a");
    let with = |key: &Key, authority: &Authority| {
        Identity::new(key.clone(), identity.certificate().clone(), authority.certificate().clone()).map(drop)
    };
    assert_eq!(with(identity.key(), &mine), Ok(()));
    assert_eq!(with(&Key::generate().unwrap(), &mine), Err(IdentityError::OtherKey));
    assert!(matches!(with(identity.key(), &other), Err(IdentityError::OtherCluster { .. })));
    assert!(matches!(Authority::new(other.key().clone(), mine.certificate().clone()), Err(IdentityError::OtherKey)));
    let shown = format!("{identity:?} {:?}", identity.key());
    assert!(shown.contains("not shown"), "{shown}");
}

#[test]
fn certificates_with_other_names_or_keys_are_not_hosts() {
    let parse = |names: &[&str], key: &rcgen::KeyPair| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        HostCertificate::parse(rcgen::CertificateParams::new(names).unwrap().self_signed(key).unwrap().der())
    };
    let key = Key::generate().unwrap();
    let name = peer(&authority(), Role::Worker, "a").to_string();
    assert!(parse(&[&name], key.pair()).is_ok());
    assert_eq!(parse(&[], key.pair()), Err(IdentityError::Names));
    assert_eq!(parse(&[&name, "example.org"], key.pair()), Err(IdentityError::Names));
    assert!(matches!(parse(&["example.org"], key.pair()), Err(IdentityError::Name(_))));
    assert!(matches!(parse(&[&format!("*.{name}")], key.pair()), Err(IdentityError::Name(_))));
    assert_eq!(parse(&[&name], &rcgen::KeyPair::generate().unwrap()), Err(IdentityError::KeyKind));
    let long = vec![0x30; CERTIFICATE_BYTES_MAX + 1];
    assert_eq!(HostCertificate::parse(&long), Err(IdentityError::TooLong { found: long.len() }));
}

#[test]
fn no_bit_of_a_certificate_can_be_changed() {
    let authority = authority();
    let certificate = host(&authority, Role::Worker, "a").certificate().der().to_vec();
    for bit in 0..8 * certificate.len() {
        let mut changed = certificate.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let taken = HostCertificate::parse(&changed)
            .and_then(|changed| authority.certificate().verify(&changed, UnixTime::now()));
        assert!(taken.is_err(), "bit {bit}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_certificate_or_an_error(bytes: Vec<u8>) {
        prop_assert!(HostCertificate::parse(&bytes).is_err());
        prop_assert!(CaCertificate::parse(&bytes).is_err());
        let _ = der::validity(&bytes);
    }

    #[test]
    fn broken_certificates_are_read_or_refused(at: prop::sample::Index, byte: u8, length: prop::sample::Index) {
        let mut bytes = EXAMPLE.with(|example| example.to_vec());
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = (HostCertificate::parse(&bytes), CaCertificate::parse(&bytes), der::validity(&bytes));
        bytes.truncate(length.index(bytes.len()));
        prop_assert!(HostCertificate::parse(&bytes).is_err());
        let _ = der::validity(&bytes);
    }

    #[test]
    fn any_text_is_a_name_or_an_error(text: String) {
        let _ = (text.parse::<PeerName>(), text.parse::<Address>(), text.parse::<ClusterId>());
        if let Ok(name) = text.parse::<Name>() {
            prop_assert_eq!(name.as_str(), text);
        }
    }
}

thread_local! {
    static EXAMPLE: CertificateDer<'static> = host(&authority(), Role::Worker, "a").certificate().der().clone();
}
