//! What `fuzz/` feeds with arbitrary bytes, one function a target. The corpus goes through the same functions in
//! `cargo test`.
//!
//! Each panics when something is wrong: that is what a fuzzer looks for.

#[cfg(test)]
mod tests;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustls_pki_types::UnixTime;

use crate::enrol::{Code, GRANT_BYTES, Grant, OFFER_BYTES, Offer, Secret, granted, proved_grant, proved_offer};
use crate::frame::{Frame, HEADER_BYTES};
use crate::identity::{Address, Authority, CaCertificate, HostCertificate, Key, Name, PeerName};
use crate::link::{Decoder, Link, LinkId, LinkLimits, LinkState, Message};
use crate::members::SignedMembers;

const SECRET: Secret = Secret([3; 32]);
const EXPORTER: [u8; 32] = [5; 32];
/// What a proof takes of a message.
const PROOF_BYTES: usize = 32;

fn authority() -> &'static Authority {
    static AUTHORITY: OnceLock<Authority> = OnceLock::new();
    AUTHORITY.get_or_init(|| Authority::create(UnixTime::now()).expect("an authority"))
}

fn key() -> &'static Key {
    static KEY: OnceLock<Key> = OnceLock::new();
    KEY.get_or_init(|| Key::generate().expect("a key"))
}

/// Offers, grants and codes, as anybody may send them and as somebody who has the code may.
pub fn enrolment(bytes: &[u8]) {
    let offered = &bytes[..bytes.len().min(OFFER_BYTES - PROOF_BYTES)];
    let offer = proved_offer(offered, &SECRET, &EXPORTER);
    if let Ok(found) = Offer::decode(&offer, &SECRET, &EXPORTER) {
        assert_eq!(found.encode(&SECRET, &EXPORTER), offer, "an offer has one spelling");
    }
    let mut unproved = [0; OFFER_BYTES];
    unproved[..offered.len()].copy_from_slice(offered);
    assert!(Offer::decode(&unproved, &SECRET, &EXPORTER).is_err());

    let bytes = &bytes[..bytes.len().min(GRANT_BYTES - PROOF_BYTES)];
    let grant = proved_grant(bytes, &SECRET, &EXPORTER);
    assert!(Grant::is_proved(&grant, &SECRET, &EXPORTER));
    if let Ok(found) = Grant::decode(&grant) {
        assert_eq!(found.encode(&SECRET, &EXPORTER), Ok(grant), "a grant has one spelling");
        let taken = granted(&found, key(), UnixTime::now());
        assert!(taken.is_err(), "nobody has signed this host's key");
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = text.parse::<Code>();
    }
}

/// Member lists, signed and not; certificates and names, of which they are made.
pub fn members(bytes: &[u8]) {
    let _ = (CaCertificate::parse(bytes), HostCertificate::parse(bytes));
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = (text.parse::<Address>(), text.parse::<PeerName>());
        if let Ok(name) = text.parse::<Name>() {
            assert_eq!(name.as_str(), text);
        }
    }
    let authority = authority();
    if let Ok(signed) = SignedMembers::from_bytes(bytes.to_vec()) {
        let _ = signed.verify(authority.certificate());
    }
    // The cluster is the authority's, which no corpus can know.
    let list = [&postcard::to_stdvec(&authority.cluster()).expect("a number"), bytes].concat();
    let signed = SignedMembers::sign_bytes(&list, authority).expect("a signature");
    if let Ok(found) = signed.verify(authority.certificate()) {
        let again = SignedMembers::sign(&found, authority).expect("what was taken can be said again");
        assert_eq!(again.verify(authority.certificate()), Ok(found));
    }
}

/// An end of a link and its decoder, whatever comes and whatever happens meanwhile.
pub fn link(bytes: &[u8]) {
    const LIMITS: LinkLimits = LinkLimits { credits: 3, payload_bytes: 100, silence: Duration::from_secs(2) };
    let Some((script, mut bytes)) = bytes.split_first_chunk::<8>() else { return };
    let mut now = Instant::now();
    let mut link = Link::new(LinkId { session: 1, link: 2 }, LIMITS, now);
    let mut generation = 1;
    assert!(link.connected(now, generation));
    let mut decoder = Decoder::new(LIMITS.payload_bytes);
    let mut taken = 0u64;
    for step in (0..8).cycle().take(64) {
        let what = script[step];
        now += Duration::from_millis(u64::from(what >> 4) * 20);
        let pieces = &mut &bytes[..bytes.len().min(1 + usize::from(what) * 2)];
        bytes = &bytes[pieces.len()..];
        loop {
            match decoder.feed(pieces) {
                Ok(Some(message)) => {
                    check_spelling(&message);
                    let before = link.state();
                    if link.handle(now, generation, message).is_err() {
                        assert_eq!(link.state(), before, "an error changes nothing");
                        link.disconnected(now, generation);
                    }
                }
                Ok(None) => break,
                Err(_) => {
                    link.disconnected(now, generation);
                    break;
                }
            }
        }
        match what % 8 {
            0 => drop(link.send(Frame { payload: vec![what; usize::from(what)].into(), ..Frame::default() })),
            1 => taken += u64::from(link.take().is_some()),
            2 => link.forget_before(u64::from(what)),
            3 => {
                generation += 1;
                decoder = Decoder::new(LIMITS.payload_bytes);
                link.connected(now, generation);
            }
            4 if what > 128 => link.close(),
            5 if link.poll_timeout().is_some_and(|at| at <= now) => link.handle_timeout(now),
            _ => {}
        }
        while let Some(message) = link.poll_transmit(now) {
            check_spelling(&message);
        }
        if matches!(link.state(), LinkState::Lost { .. }) {
            assert!(link.poll_timeout().is_none());
        }
    }
    let left = (0..).take_while(|_| link.take().is_some()).count() as u64;
    assert!(left <= LIMITS.credits, "{left} frames were kept of {}", LIMITS.credits);
    assert!(taken <= 64);
}

/// What was read is written as it came.
fn check_spelling(message: &Message) {
    let payload = message.payload();
    let bytes = [&message.header()[..], &payload].concat();
    assert!(bytes.len() >= HEADER_BYTES);
    let found = Decoder::new(payload.len()).feed(&mut &bytes[..]);
    assert_eq!(found.as_ref(), Ok(&Some(message.clone())), "a message has one spelling");
}
