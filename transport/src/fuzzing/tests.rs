use std::path::PathBuf;

use super::*;
use crate::frame::FrameHeader;
use crate::identity::Role;
use crate::identity::tests::{host, member, peer};
use crate::link::{Ack, Hello};
use crate::members::Members;

/// Puts what must be there for a fuzzer to begin with into the corpus, where `PP_FUZZ_SEEDS` is set; else all that is
/// there goes through the target.
fn check(target: &str, body: fn(&[u8]), seeds: &[Vec<u8>]) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    if std::env::var_os("PP_FUZZ_SEEDS").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        for (at, seed) in seeds.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{at}")), seed).unwrap();
        }
    }
    seeds.iter().for_each(|seed| body(seed));
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        body(&std::fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count >= seeds.len(), "{count} files in {}, at least {} are made here", folder.display(), seeds.len());
}

#[test]
fn the_corpus_of_enrolment_is_borne() {
    let authority = authority();
    let certificate = host(authority, Role::Worker, "rig2").certificate().der().to_vec();
    let desk = host(authority, Role::Head, "desk");
    let list = SignedMembers::sign(&Members::founding(authority.cluster(), member(&desk)), authority).unwrap();
    let mut grant = vec![1, 4];
    grant.extend(b"rig2");
    for part in [&authority.certificate().der()[..], &certificate, list.as_bytes()] {
        grant.extend((part.len() as u16).to_le_bytes());
        grant.extend(part);
    }
    let offers = [&[1, 0, 0][..], b"\x01\x01\x04rig2", b"\x01\x02\x04rig2", b"\x02\x00\x00", b"\x01\x00\x29x"];
    let mut seeds: Vec<Vec<u8>> = offers.iter().map(|offer| offer.to_vec()).collect();
    seeds.extend([grant.clone(), grant[..300].to_vec()]);
    seeds.push(Code::generate(&key().fingerprint()).unwrap().reveal().into_bytes());
    check("enrolment", enrolment, &seeds);
}

#[test]
fn the_corpus_of_members_is_borne() {
    let authority = authority();
    let desk = host(authority, Role::Head, "desk");
    let mut members = Members::founding(authority.cluster(), member(&desk));
    let founding = SignedMembers::sign(&members, authority).unwrap();
    for name in ["rig1", "rig2"] {
        members.add(member(&host(authority, Role::Worker, name))).unwrap();
    }
    let all = SignedMembers::sign(&members, authority).unwrap();
    let cluster = postcard::to_stdvec(&authority.cluster()).unwrap().len();
    let list = |signed: &SignedMembers| signed.as_bytes()[64 + cluster..].to_vec();
    let seeds = [
        list(&founding),
        list(&all),
        all.as_bytes().to_vec(),
        desk.certificate().der().to_vec(),
        authority.certificate().der().to_vec(),
        b"[2001:db8::1]:7711".to_vec(),
        b"rig-2".to_vec(),
        peer(authority, Role::Worker, "rig2").to_string().into_bytes(),
    ];
    check("members", super::members, &seeds);
}

#[test]
fn the_corpus_of_links_is_borne() {
    let id = LinkId { session: 1, link: 2 };
    let hello = |generation| Message::Hello(Hello { id, generation, ack: Ack { received: 0, granted: 3 } });
    let frame = |sequence| {
        let header = FrameHeader { epoch: 1, step: sequence, micro_batch: 0 };
        Message::Frame { sequence, frame: Frame { header, payload: vec![7; 30 * sequence as usize].into() } }
    };
    let ack = Message::Ack(Ack { received: 1, granted: 4 });
    let written = |script: [u8; 8], messages: &[Message]| {
        let mut bytes = script.to_vec();
        for message in messages {
            bytes.extend(message.header());
            bytes.extend(&message.payload()[..]);
        }
        bytes
    };
    let (forgotten, bye) = (Message::Forgotten { sequence: 2 }, Message::Bye { sequence: 3 });
    let seeds = [
        written([255, 9, 8, 1, 1, 1, 8, 1], &[hello(1), frame(1), frame(2), frame(3), ack.clone()]),
        written([40, 17, 41, 43, 20, 41, 45, 180], &[hello(1), frame(1), forgotten, bye, hello(2)]),
        written([248; 8], &[hello(1), ack.clone(), ack]),
        written([253, 245, 16, 11, 0, 0, 13, 1], &[hello(2), frame(2)]),
        written([24, 0, 1, 4, 196, 5, 5, 5], &[hello(1), Message::Bye { sequence: 1 }]),
    ];
    check("link", link, &seeds);
}
