use super::*;
use crate::identity::tests::{authority, host, member, peer};

fn name(name: &str) -> Name {
    name.parse().unwrap()
}

/// An authority, and a list of a head and two workers.
fn cluster() -> (Authority, Members) {
    let authority = authority();
    let mut members = Members::founding(authority.cluster(), member(&host(&authority, Role::Head, "desk")));
    for name in ["rig1", "rig2"] {
        members.add(member(&host(&authority, Role::Worker, name))).unwrap();
    }
    (authority, members)
}

#[test]
fn the_list_allows_its_members_and_nobody_else() {
    let (mine, mut members) = cluster();
    let rig1 = members.get(&name("rig1")).unwrap().clone();
    let as_worker = peer(&mine, Role::Worker, "rig1");
    assert_eq!(members.allows(&as_worker, &rig1.fingerprint), Ok(()));
    let refused = |peer: &PeerName, key| members.allows(peer, key).unwrap_err();
    assert!(matches!(refused(&peer(&mine, Role::Head, "rig1"), &rig1.fingerprint), Refusal::OtherRole { .. }));
    assert!(matches!(refused(&peer(&mine, Role::Worker, "rig3"), &rig1.fingerprint), Refusal::NotMember { .. }));
    assert!(matches!(refused(&as_worker, &Fingerprint([7; 32])), Refusal::OtherKey { .. }));
    let elsewhere = peer(&authority(), Role::Worker, "rig1");
    assert!(matches!(refused(&elsewhere, &rig1.fingerprint), Refusal::OtherCluster { .. }));

    assert_eq!(members.remove(&name("rig1")).unwrap(), rig1);
    let refusal = members.allows(&as_worker, &rig1.fingerprint);
    assert_eq!(refusal, Err(Refusal::NotMember { name: name("rig1"), version: 3 }));
}

#[test]
fn every_change_raises_the_version() {
    let (authority, mut members) = cluster();
    assert_eq!(members.version(), 2);
    let other = |name: &str| member(&host(&authority, Role::Worker, name));
    let rig1 = members.get(&name("rig1")).unwrap().clone();

    let moved = Member { address: Some("rig1:7711".parse().unwrap()), ..rig1.clone() };
    members.add(moved.clone()).unwrap();
    assert_eq!((members.version(), members.get(&rig1.name)), (3, Some(&moved)));
    assert_eq!(members.add(other("rig1")), Err(MembersError::NameTaken { name: name("rig1") }));
    let twice = Member { name: name("rig9"), ..rig1.clone() };
    assert_eq!(members.add(twice), Err(MembersError::KeyTaken { name: name("rig9"), other: name("rig1") }));
    let as_head = Member { role: Role::Head, ..rig1.clone() };
    assert!(members.add(as_head.clone()).is_err() && members.replace(as_head).is_err());
    assert_eq!(members.version(), 3, "what was refused changes nothing");

    let again = other("rig1");
    assert_eq!(members.replace(again.clone()), Ok(moved));
    let stolen = Member { fingerprint: again.fingerprint, ..members.get(&name("rig2")).unwrap().clone() };
    assert!(matches!(members.replace(stolen), Err(MembersError::KeyTaken { .. })));
    assert_eq!((members.version(), members.get(&rig1.name)), (4, Some(&again)));
    assert_eq!(members.remove(&name("rig9")), Err(MembersError::NoSuch { name: name("rig9") }));
    assert_eq!(members.remove(&name("desk")), Err(MembersError::LastHead { name: name("desk") }));
    assert_eq!(members.version(), 4);
}

#[test]
fn lists_are_taken_in_order_and_from_the_authority_only() {
    let (mine, mut members) = cluster();
    let ca = mine.certificate();
    let old = SignedMembers::sign(&members, &mine).unwrap();
    let mut worker = Members::founding(mine.cluster(), members.members()[0].clone());
    assert_eq!(worker.accept(&old, ca), Ok(Accepted::Changed));
    assert_eq!(worker, members);
    assert_eq!(worker.accept(&old, ca), Ok(Accepted::Unchanged));

    members.remove(&name("rig1")).unwrap();
    let new = SignedMembers::sign(&members, &mine).unwrap();
    assert_eq!(worker.accept(&new, ca), Ok(Accepted::Changed));
    assert_eq!(worker.accept(&old, ca), Err(MembersError::Older { found: 2, mine: 3 }));
    assert_eq!(worker, members, "what was refused changes nothing");

    let mut fork = old.verify(ca).unwrap();
    fork.remove(&name("rig2")).unwrap();
    let fork = SignedMembers::sign(&fork, &mine).unwrap();
    assert_eq!(worker.accept(&fork, ca), Err(MembersError::SameVersion { version: 3 }));

    let (other, others) = cluster();
    let foreign = SignedMembers::sign(&others, &other).unwrap();
    assert_eq!(worker.accept(&foreign, ca), Err(MembersError::Signature { cluster: mine.cluster() }));
    assert!(matches!(worker.accept(&foreign, other.certificate()), Err(MembersError::OtherCluster { .. })));
    assert!(matches!(SignedMembers::sign(&others, &mine), Err(MembersError::OtherCluster { .. })));
}

#[test]
fn no_bit_of_a_signed_list_can_be_changed() {
    let (authority, members) = cluster();
    let signed = SignedMembers::sign(&members, &authority).unwrap().as_bytes().to_vec();
    for bit in 0..8 * signed.len() {
        let mut changed = signed.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let changed = SignedMembers::from_bytes(changed).unwrap();
        assert!(changed.verify(authority.certificate()).is_err(), "bit {bit}");
    }
    for length in 0..signed.len() {
        let cut = SignedMembers::from_bytes(signed[..length].to_vec()).unwrap();
        assert!(cut.verify(authority.certificate()).is_err(), "{length} bytes");
    }
}

#[test]
fn lists_that_were_signed_wrongly_are_refused_too() {
    let (authority, members) = cluster();
    let sign = |list: &[u8]| {
        let signature = authority.sign(&[SIGNED_AS, list].concat()).unwrap();
        SignedMembers::from_bytes([&signature[..], list].concat()).unwrap().verify(authority.certificate())
    };
    let list = postcard::to_stdvec(&members).unwrap();
    assert_eq!(sign(&list).as_ref(), Ok(&members));
    assert_eq!(sign(&[&list[..], &[0]].concat()), Err(MembersError::Form));
    let mut twice = members.clone();
    twice.members.push(members.members[1].clone());
    let refused = sign(&postcard::to_stdvec(&twice).unwrap());
    assert_eq!(refused, Err(MembersError::NameTaken { name: name("rig1") }));
    // A count that the bytes belie is not believed.
    let mut counted = postcard::to_stdvec(&Members { members: vec![], ..members }).unwrap();
    assert_eq!(counted.pop(), Some(0));
    counted.extend([0xff, 0xff, 0xff, 0xff, 0x0f]);
    assert_eq!(sign(&counted), Err(MembersError::Form));
    // What the authority signs elsewhere is no list.
    let bare = [&authority.sign(&list).unwrap()[..], &list].concat();
    let bare = SignedMembers::from_bytes(bare).unwrap().verify(authority.certificate());
    assert_eq!(bare, Err(MembersError::Signature { cluster: authority.cluster() }));
}

#[test]
fn lists_are_bounded_and_the_longest_fits() {
    let (authority, mut members) = cluster();
    let address = format!("{}:65535", "x".repeat(253));
    for i in members.members().len()..MEMBERS_MAX {
        let mut fingerprint = [0xff; 32];
        fingerprint[..8].copy_from_slice(&(i as u64).to_le_bytes());
        let long = Member {
            name: name(&format!("{i:040}")),
            role: Role::Worker,
            fingerprint: Fingerprint(fingerprint),
            address: Some(address.parse().unwrap()),
            added: u64::MAX,
        };
        members.add(long).unwrap();
    }
    let more = member(&host(&authority, Role::Worker, "more"));
    assert_eq!(members.add(more.clone()), Err(MembersError::Full));
    let signed = SignedMembers::sign(&members, &authority).unwrap();
    assert!(signed.as_bytes().len() <= SIGNED_BYTES_MAX / 2, "{}", signed.as_bytes().len());
    assert_eq!(signed.verify(authority.certificate()), Ok(members.clone()));
    members.members.push(more);
    assert_eq!(SignedMembers::sign(&members, &authority), Err(MembersError::Full));
    let found = SIGNED_BYTES_MAX + 1;
    assert_eq!(SignedMembers::from_bytes(vec![0; found]), Err(MembersError::TooLong { found }));
}
