//! A cluster as a user has it.

use std::time::{Duration, Instant};

use pp_transport::identity::{Authority, HOST_VALIDITY, Identity, Key, PeerName, Store, UnixTime};

use super::processes::{Cluster, Machine, Running, mode};
use crate::support::{data, ids};

/// Three layers.
const MODEL: &str = "tiny/llama-linear-rope";
const PROMPT: &str = "Of run is a stage";

fn model() -> String {
    data(MODEL).to_str().expect("a path in UTF-8").to_owned()
}

fn strs(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

/// A run on the twins, in the exact mode.
fn run<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let usual = ["-m", model, "--raw", "-n", "8", "--logprobs", "2", "--activations", "f32", "--device", "reference"];
    [&usual[..], more, &[PROMPT]].concat()
}

#[test]
fn a_cluster_answers_as_one_process_does() {
    let cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let (head, m) = (&cluster.head, model());
    let one = head.object(&run(&m, &[]));
    assert_eq!(ids(&one["tokens"]).len(), 8);

    let status = head.object(&["cluster", "status"]);
    let members = status["members"].as_array().expect("an array");
    assert_eq!(members.len(), 2);
    for (member, name) in members.iter().zip(["rig2", "rig3"]) {
        assert_eq!((&member["name"], &member["state"]), (&name.into(), &"ready".into()), "{member}");
        assert_eq!(member["devices"][0]["id"], "reference", "{member}");
        assert_eq!(member["members_version"], status["members_version"], "{member}");
        for key in ["rtt_ms", "mtu", "bandwidth_bytes_per_s", "memory_bytes", "memory_free_bytes"] {
            assert!(member[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {member}");
        }
        assert!(member["certificate_days"].as_u64().is_some_and(|days| (80..=90).contains(&days)), "{member}");
    }

    // One name fewer than stages: the first is here.
    let found = head.object(&run(&m, &["--workers", "rig2,rig3", "--split", "1,1,1"]));
    assert_eq!(found["tokens"], one["tokens"]);
    assert_eq!(found["logprobs"], one["logprobs"]);
    let at = |found: &serde_json::Value| -> Vec<serde_json::Value> {
        found["stages"].as_array().expect("an array").iter().map(|stage| stage["worker"].clone()).collect()
    };
    assert_eq!(at(&found), [serde_json::Value::Null, "rig2".into(), "rig3".into()]);
    assert!(found["stages"].as_array().unwrap().iter().all(|stage| stage["steps"].as_u64() > Some(0)), "{found}");

    // A name for each: exactly those, in that order, more than once, with a device.
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "workers = ['rig3:reference', 'local', 'rig3:0']\nsplit = '1,1,1'\n").unwrap();
    let found = head.object(&run(&m, &["--cluster", file.path().to_str().unwrap()]));
    assert_eq!(found["tokens"], one["tokens"]);
    assert_eq!(at(&found), ["rig3".into(), serde_json::Value::Null, "rig3".into()]);

    // No stage is here.
    let elsewhere = ["perplexity", "-m", &m, "--activations", "f32", "--text-file"];
    let text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(text.path(), "Of run is a stage that runs on a rig of its own.").unwrap();
    let elsewhere = [&elsewhere[..], &[text.path().to_str().unwrap()]].concat();
    let alone = head.object(&[&elsewhere[..], &["--device", "reference"]].concat());
    let found = head.object(&[&elsewhere[..], &["--workers", "rig3,rig2", "--stages", "2"]].concat());
    assert_eq!((&found["nll"], &found["token_logprobs"]), (&alone["nll"], &alone["token_logprobs"]));

    let plan = head.object(&["plan", "-m", &m, "--workers", "rig2", "--device", "reference"]);
    assert_eq!(at(&plan), [serde_json::Value::Null, "rig2".into()]);
    assert_eq!(plan["memory"][1]["worker"], "rig2");
}

#[test]
fn keys_are_their_owners_and_a_cluster_is_begun_once() {
    let head = Machine::new();
    let begun = head.object(&["cluster", "init", "--name", "desk"]);
    assert_eq!(begun["head"], "desk");
    let folder = head.cluster();
    assert_eq!(mode(&folder), 0o700);
    for file in ["ca.key", "head.key"] {
        assert_eq!(mode(&folder.join(file)), 0o600, "{file}");
    }
    let before = std::fs::read(folder.join("ca.pem")).unwrap();
    let told = head.refused(&["cluster", "init"], 1);
    assert!(told.contains("is there already"), "{told}");
    assert_eq!(std::fs::read(folder.join("ca.pem")).unwrap(), before);

    let other = Machine::new();
    let told = other.refused(&["cluster", "status"], 2);
    assert!(told.contains("pp-run cluster init"), "{told}");

    let machine = Machine::new();
    let mut worker = machine.worker("rig2", None, &[], &[]);
    worker.invitation();
    assert_eq!(mode(&machine.cluster().join("worker.key")), 0o600);
    // Another worker with the same keys, and one on the same port.
    let told = machine.refused(&["worker", "--device", "reference", "--listen", "127.0.0.1:0"], 1);
    assert!(told.contains("runs already"), "{told}");
    worker.0.signal("TERM");
    assert_eq!(worker.0.end().0, Some(0));

    // A key that others can read is none.
    let key = folder.join("ca.key");
    std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    let told = head.refused(&["cluster", "status"], 1);
    assert!(told.contains("chmod 600"), "{told}");
}

#[test]
fn codes_are_good_once_and_for_one() {
    let head = Machine::new();
    head.object(&["cluster", "init"]);
    let (here, there) = (Machine::new(), Machine::new());
    let mut worker = here.worker("rig2", None, &[], &[]);
    let mut other = there.worker("rig3", None, &[], &[]);
    let (good, wrong) = (worker.invitation(), other.invitation());
    let (address, code) = (good[3].clone(), wrong[5].clone());

    let told = head.refused(&["cluster", "add", "rig2", &address, "--code", &code], 5);
    assert!(told.contains("the code is for another"), "{told}");
    let told = head.refused(&["cluster", "add", "rig2", &address, "--code", "6F2K-6F2K"], 2);
    assert!(told.contains("--code"), "{told}");
    let told = head.refused(&["cluster", "add", "rig2", &address], 2);
    assert!(told.contains("--code CODE"), "{told}");
    let told = head.refused(&["cluster", "add", "local", &address, "--code", &code], 2);
    assert!(told.contains("another name"), "{told}");

    let added = head.object(&strs(&good));
    assert_eq!(added["devices"][0], "reference reference (twins on the CPU)");
    assert_eq!(worker.ready()["name"], "rig2");
    // It is used up, and the worker speaks with members only.
    let told = head.refused(&strs(&good), 5);
    assert!(told.contains("is in a cluster already"), "{told}");

    // A name is somebody's.
    let taken: Vec<&str> = strs(&wrong).into_iter().map(|word| if word == "rig3" { "rig2" } else { word }).collect();
    let told = head.refused(&taken, 2);
    assert!(told.contains("there is a member rig2 already"), "{told}");
}

#[test]
fn a_preset_code_enrols_without_a_person() {
    let code = ("PP_JOIN_CODE", "73bd9d7a0f0d4c2f9a1c5b7e");
    let head = Machine::new();
    head.object(&["cluster", "init"]);
    let machine = Machine::new();
    let mut worker = machine.worker("rig2", None, &[], &[code]);
    let invitation = worker.invitation();
    assert!(!worker.0.said().contains(code.1) && !invitation.contains(&"--code".to_owned()));
    let told = head.program(&strs(&invitation)).env("PP_JOIN_CODE", "00000c000d4c2f9a1c5b7e12").output().unwrap();
    assert_eq!(told.status.code(), Some(5), "{told:?}");
    assert!(String::from_utf8_lossy(&told.stderr).contains("does not have this code"), "{told:?}");
    // The next proof is looked at a second later.
    std::thread::sleep(Duration::from_millis(1100));
    let told = head.program(&strs(&invitation)).env(code.0, code.1).output().unwrap();
    assert!(told.status.success(), "{told:?}");
    worker.ready();

    // A second start just serves.
    worker.0.signal("TERM");
    let (ended, said) = worker.0.end();
    assert_eq!(ended, Some(0), "{said}");
    let mut worker = machine.worker("rig2", Some(&invitation[3]), &[], &[]);
    assert_eq!(worker.ready()["listen"], invitation[3].as_str());
    head.object(&["cluster", "status", "--no-bandwidth"]);
}

#[test]
fn who_is_not_to_be_had_is_told() {
    let mut cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let (head, m) = (&cluster.head, model());
    let refused = |more: &[&str], code: i32, wanted: &str| {
        let told = head.refused(&run_plainly(&m, more), code);
        assert!(told.contains(wanted), "{wanted:?} in {told}");
    };
    refused(&["--workers", "rig9", "--stages", "2"], 2, "there is no worker rig9 in this cluster; it has rig2, rig3");
    refused(&["--workers", "rig2,rig3,rig2", "--stages", "2"], 2, "--workers names 3 for 2 stages");
    refused(&["--workers", "rig2:9", "--stages", "2"], 2, "rig2 has no device `9`");
    refused(&["--workers", "local,rig2", "--stages", "3"], 2, "one for each");

    // Another head has it.
    let busy = ["bench", "-m", &m, "--workers", "rig2", "--stages", "1", "--reps", "1000000", "--no-roofline"];
    let holder = Running::start(&mut head.program(&busy));
    let is_held = |name: &str| {
        let status = head.object(&["cluster", "status", "--no-bandwidth"]);
        let members = status["members"].as_array().unwrap().clone();
        members.into_iter().find(|member| member["name"] == name).filter(|member| member["stages"][0].is_object())
    };
    let until = Instant::now() + Duration::from_secs(60);
    let held = loop {
        if let Some(held) = is_held("rig2") {
            break held;
        }
        assert!(Instant::now() < until, "rig2 is not held:\n{}", holder.said());
    };
    assert_eq!((&held["state"], &held["stages"][0]["layers"]), (&"held".into(), &serde_json::json!([0, 3])), "{held}");
    assert!(held["held_by"].as_str().is_some_and(|by| by.contains(&holder.id().to_string())), "{held}");
    refused(&["--workers", "rig2", "--stages", "2", "--wait", "1"], 5, "rig2 is busy: held by head");
    head.object(&["plan", "-m", &m, "--workers", "rig2", "--device", "reference"]);
    drop(holder);
    // It is free again when its holder is gone, which a run waits for.
    head.object(&run(&m, &["--workers", "rig2", "--stages", "2"]));

    // Drained, it takes nothing.
    assert_eq!(head.object(&["cluster", "drain", "rig2"])["draining"], true);
    refused(&["--workers", "rig2", "--stages", "2"], 5, "drained");
    head.object(&["cluster", "drain", "rig2", "--undo"]);
    head.object(&run(&m, &["--workers", "rig2", "--stages", "2"]));

    // It is not there.
    let (machine, worker) = cluster.workers.remove(0);
    worker.0.signal("TERM");
    assert_eq!(worker.0.end().0, Some(0));
    refused(&["--workers", "rig2", "--stages", "2", "--wait", "0"], 5, "rig2.worker");
    let told = head.refused(&["cluster", "status"], 5);
    assert!(told.is_empty(), "the table says it: {told}");
    drop(machine);
}

/// A run whose words do not matter.
fn run_plainly<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["-m", model, "--raw", "-n", "2", "--device", "reference"][..], more, &[PROMPT]].concat()
}

#[test]
fn who_is_removed_is_refused_until_it_is_added_again() {
    let mut cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let (head, m) = (&cluster.head, model());
    let with_rig2 = run_plainly(&m, &["--workers", "rig2", "--stages", "2"]);
    let removed = head.object(&["cluster", "remove", "rig2"]);
    assert_eq!(removed["not_told"], serde_json::json!([]));
    let told = head.refused(&with_rig2, 2);
    assert!(told.contains("there is no worker rig2"), "{told}");
    let told = head.refused(&["cluster", "remove", "rig2"], 2);
    assert!(told.contains("it has rig3"), "{told}");
    // The others know, and still serve.
    let status = head.object(&["cluster", "status", "--no-bandwidth"]);
    assert_eq!(status["members"][0]["members_version"], status["members_version"]);

    // It ends, and started again it is enrolled again.
    let (machine, worker) = cluster.workers.remove(0);
    let (code, said) = worker.0.end();
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("has removed rig2"), "{said}");
    let mut worker = machine.worker("rig2", None, &[], &[]);
    let invitation = worker.invitation();
    head.object(&strs(&invitation));
    worker.ready();
    head.object(&[&with_rig2[..], &["--quiet"]].concat());
}

/// The identity as it is 70 days after enrolment.
fn aged(authority: &Authority, key: Key, name: &PeerName) -> Identity {
    let then = UnixTime::now().as_secs() - 70 * 24 * 3600;
    let then = UnixTime::since_unix_epoch(Duration::from_secs(then));
    let certificate = authority.issue(key.public(), name, then, HOST_VALIDITY).unwrap();
    Identity::new(key, certificate, authority.certificate().clone()).unwrap()
}

#[test]
fn certificates_are_renewed_in_time() {
    let mut cluster = Cluster::of(&["rig2"], MODEL);
    let (machine, mut worker) = cluster.workers.remove(0);
    let listen = head_address(&cluster.head, "rig2");
    worker.0.signal("TERM");
    worker.0.end();
    let authority = Store::new(cluster.head.cluster()).head().unwrap().expect("a head").authority;
    let store = Store::new(machine.cluster());
    let key = || store.worker_key().unwrap().expect("a key");
    let name = store.worker().unwrap().expect("enrolled").identity.name().clone();
    let old = aged(&authority, key(), &name);
    store.lock(Duration::from_secs(5)).unwrap().put_certificate(&old).unwrap();

    worker = machine.worker("rig2", Some(&listen), &[], &[]);
    worker.ready();
    for _ in 0..2 {
        let status = cluster.head.object(&["cluster", "status", "--no-bandwidth"]);
        assert!(status["members"][0]["certificate_days"].as_u64() >= Some(88), "{status}");
    }
    let renewed = store.worker().unwrap().expect("enrolled").identity;
    assert!(renewed.certificate().not_after() > old.certificate().not_after());
    assert_eq!(renewed.fingerprint(), old.fingerprint());

    // One that nobody has renewed is worth nothing: its worker waits to be enrolled again.
    drop(worker);
    let then = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs() - 100 * 24 * 3600));
    let expired = authority.issue(key().public(), &name, then, HOST_VALIDITY).unwrap();
    let expired = Identity::new(key(), expired, authority.certificate().clone()).unwrap();
    store.lock(Duration::from_secs(5)).unwrap().put_certificate(&expired).unwrap();
    let mut worker = machine.worker("rig2", Some(&listen), &[], &[]);
    worker.0.says("has expired");
    let invitation = worker.invitation();
    cluster.head.object(&strs(&invitation));
    worker.ready();
}

/// Where the head's list has a worker.
fn head_address(head: &Machine, name: &str) -> String {
    let status = head.object(&["cluster", "status", "--no-bandwidth"]);
    let members = status["members"].as_array().expect("an array");
    let member = members.iter().find(|member| member["name"] == name).expect("a member");
    member["address"].as_str().expect("a text").to_owned()
}
