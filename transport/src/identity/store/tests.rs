use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::identity::tests::{authority, host, member};

const PATIENCE: Duration = Duration::from_secs(20);

fn head() -> Head {
    let authority = authority();
    let identity = host(&authority, Role::Head, "desk");
    let members = Members::founding(authority.cluster(), member(&identity));
    Head { authority, identity, members }
}

fn store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new(folder.path().join("a/cluster"));
    (folder, store)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn files(store: &Store) -> Vec<String> {
    let entries = fs::read_dir(store.folder()).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn same(a: &Identity, b: &Identity) -> bool {
    (a.certificate(), a.authority(), a.key().to_pem()) == (b.certificate(), b.authority(), b.key().to_pem())
}

/// A worker's key in the store and its identity, not stored.
fn worker(store: &Store, authority: &Authority) -> Identity {
    let identity = host(authority, Role::Worker, "rig1");
    store.lock(PATIENCE).unwrap().put_worker_key(identity.key()).unwrap();
    identity
}

#[test]
fn a_head_is_loaded_as_it_was_stored() {
    let (_folder, store) = store();
    assert!(store.head().unwrap().is_none() && store.worker().unwrap().is_none());
    let head = head();
    store.lock(PATIENCE).unwrap().put_head(&head).unwrap();
    let loaded = store.head().unwrap().unwrap();
    assert!(same(&loaded.identity, &head.identity));
    assert_eq!(loaded.authority.key().to_pem(), head.authority.key().to_pem());
    assert_eq!((loaded.authority.certificate(), loaded.members), (head.authority.certificate(), head.members.clone()));

    assert_eq!(files(&store), ["ca.key", "ca.pem", "head.key", "head.pem", "lock", "members"]);
    assert_eq!(mode(store.folder()), 0o700);
    for file in files(&store) {
        assert_eq!(mode(&store.path(&file)), 0o600, "{file}");
    }
    let again = store.lock(PATIENCE).unwrap().put_head(&head);
    assert!(matches!(again, Err(StoreError::Exists { path }) if path.ends_with("ca.key")));
    let renewed = head.authority.renew(head.identity.certificate(), rustls_pki_types::UnixTime::now()).unwrap();
    let renewed = Identity::new(head.identity.key().clone(), renewed, head.authority.certificate().clone()).unwrap();
    store.lock(PATIENCE).unwrap().put_certificate(&renewed).unwrap();
    assert!(same(&store.head().unwrap().unwrap().identity, &renewed));
}

#[test]
fn a_worker_has_first_a_key_and_then_a_cluster() {
    let (_folder, store) = store();
    let head = head();
    let identity = worker(&store, &head.authority);
    assert_eq!(store.worker_key().unwrap().unwrap().to_pem(), identity.key().to_pem());
    assert!(store.worker().unwrap().is_none());
    let lock = store.lock(PATIENCE).unwrap();
    assert!(matches!(lock.put_worker_key(identity.key()), Err(StoreError::Exists { .. })));
    let signed = SignedMembers::sign(&head.members, &head.authority).unwrap();
    lock.put_worker(&identity, &signed).unwrap();
    let loaded = store.worker().unwrap().unwrap();
    assert!(same(&loaded.identity, &identity));
    assert_eq!(loaded.members, head.members);
    assert_eq!(files(&store), ["ca.pem", "lock", "members", "worker.key", "worker.pem"]);
}

#[test]
fn a_worker_beside_its_head_leaves_the_heads_list_alone() {
    let (_folder, store) = store();
    let mut head = head();
    store.lock(PATIENCE).unwrap().put_head(&head).unwrap();
    let founding = SignedMembers::sign(&head.members, &head.authority).unwrap();
    let identity = worker(&store, &head.authority);
    head.members.add(member(&identity)).unwrap();
    let lock = store.lock(PATIENCE).unwrap();
    lock.put_members(&head.members, &head.authority).unwrap();
    lock.put_worker(&identity, &founding).unwrap();
    assert_eq!(store.worker().unwrap().unwrap().members, head.members);
    assert_eq!(store.head().unwrap().unwrap().members, head.members);
    // A list that was not read under the lock takes nobody's place.
    let mut stale = Members::founding(head.authority.cluster(), head.members.members()[0].clone());
    stale.add(member(&host(&head.authority, Role::Worker, "rig9"))).unwrap();
    let put = lock.put_members(&stale, &head.authority);
    assert!(matches!(put, Err(StoreError::Members { source: MembersError::SameVersion { .. }, .. })));
    let older = lock.put_signed_members(&founding, head.authority.certificate());
    assert!(matches!(older, Err(StoreError::Members { source: MembersError::Older { .. }, .. })));

    let other = self::head();
    let stranger = host(&other.authority, Role::Worker, "rig1");
    let signed = SignedMembers::sign(&other.members, &other.authority).unwrap();
    assert!(matches!(lock.put_worker(&stranger, &signed), Err(StoreError::OtherCluster { .. })));
    assert!(same(&store.worker().unwrap().unwrap().identity, &identity));
}

#[test]
fn keys_that_others_can_read_are_refused() {
    let (_folder, store) = store();
    store.lock(PATIENCE).unwrap().put_head(&head()).unwrap();
    for (file, wide) in [("ca.key", 0o640), ("head.key", 0o604)] {
        let path = store.path(file);
        set_mode(&path, wide);
        let error = store.head().unwrap_err();
        assert!(matches!(&error, StoreError::Readable { mode, .. } if *mode == wide));
        assert!(error.to_string().contains(&format!("chmod 600 '{}'", path.display())), "{error}");
        set_mode(&path, 0o600);
    }
    set_mode(store.folder(), 0o770);
    assert!(matches!(store.head(), Err(StoreError::Writable { .. })));
    assert!(matches!(store.lock(PATIENCE), Err(StoreError::Writable { .. })));
    set_mode(store.folder(), 0o755);
    assert!(store.head().unwrap().is_some());
}

#[test]
fn what_is_missing_or_damaged_is_named() {
    let damage: [(&str, Option<&[u8]>); 8] = [
        ("ca.pem", None),
        ("head.key", None),
        ("head.pem", None),
        ("members", None),
        ("ca.key", Some(b"\xff\xfe")),
        ("head.pem", Some(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")),
        ("ca.pem", Some(&[b'x'; PEM_BYTES_MAX + 1])),
        ("members", Some(b"not a list")),
    ];
    let (_folder, store) = store();
    store.lock(PATIENCE).unwrap().put_head(&head()).unwrap();
    for (file, contents) in damage {
        let path = store.path(file);
        let whole = fs::read(&path).unwrap();
        match contents {
            Some(contents) => fs::write(&path, contents).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let error = store.head().unwrap_err().to_string();
        assert!(error.contains(&path.display().to_string()), "{error}");
        fs::write(&path, whole).unwrap();
        set_mode(&path, 0o600);
    }
    // Another authority in the place of the pinned one.
    fs::write(store.path("ca.pem"), certificate_pem(authority().certificate().der())).unwrap();
    assert!(matches!(store.head(), Err(StoreError::Identity { source: IdentityError::OtherKey, .. })));
}

#[test]
fn two_additions_at_once_lose_no_member() {
    let (_folder, store) = store();
    let head = head();
    store.lock(PATIENCE).unwrap().put_head(&head).unwrap();
    std::thread::scope(|scope| {
        for i in 0..8 {
            let (store, authority) = (&store, &head.authority);
            scope.spawn(move || {
                let lock = store.lock(PATIENCE).unwrap();
                let mut members = lock.store().head().unwrap().unwrap().members;
                members.add(member(&host(authority, Role::Worker, &format!("rig{i}")))).unwrap();
                lock.put_members(&members, authority).unwrap();
            });
        }
    });
    let members = store.head().unwrap().unwrap().members;
    assert_eq!((members.version(), members.members().len()), (8, 9));
}

#[test]
fn a_lock_is_waited_for_and_then_given_up() {
    let (_folder, store) = store();
    let held = store.lock(PATIENCE).unwrap();
    let patience = Duration::from_millis(30);
    assert!(matches!(store.lock(patience), Err(StoreError::Locked { .. })));
    drop(held);
    store.lock(Duration::ZERO).unwrap();
}

#[test]
fn a_file_is_whole_while_it_is_replaced() {
    let (_folder, store) = store();
    let mut head = head();
    store.lock(PATIENCE).unwrap().put_head(&head).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for i in 0..20 {
                head.members.add(member(&host(&head.authority, Role::Worker, &format!("rig{i}")))).unwrap();
                store.lock(PATIENCE).unwrap().put_members(&head.members, &head.authority).unwrap();
            }
        });
        let mut version = 0;
        while !writer.is_finished() {
            let now = store.head().unwrap().unwrap().members.version();
            assert!(now >= version);
            version = now;
        }
        writer.join().unwrap();
    });
    // A write that fails leaves the old file, and nothing of the new one.
    fs::create_dir(store.path("head.pem.d")).unwrap();
    let lock = store.lock(PATIENCE).unwrap();
    assert!(lock.write("head.pem.d", b"new").is_err());
    assert!(files(&store).iter().all(|file| !file.starts_with(".new")), "{:?}", files(&store));
}
