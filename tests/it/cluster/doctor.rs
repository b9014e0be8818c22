//! What is wrong on purpose, and what the doctor says of it.

use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use pp_transport::identity::{HOST_VALIDITY, Identity, Store, UnixTime};
use serde_json::Value;

use super::processes::{Cluster, Machine};

const MODEL: &str = "tiny/llama-linear-rope";
/// A port that is free, and no test of devices.
const QUICKLY: [&str; 4] = ["doctor", "--no-selftest", "--listen", "127.0.0.1:0"];

/// What it finds; its exit code is as bad as the worst.
#[track_caller]
fn doctor(machine: &Machine, arguments: &[&str], environment: &[(&str, &str)]) -> Value {
    let mut command = machine.program(&[arguments, &["--json"]].concat());
    let output = command.envs(environment.iter().copied()).output().expect("the program starts");
    let found: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr)));
    let code = match found["worst"].as_str().expect("a word") {
        "error" => 1,
        "warning" => 6,
        _ => 0,
    };
    assert_eq!(output.status.code(), Some(code), "{found}");
    for finding in found["findings"].as_array().expect("an array") {
        assert_eq!(finding["advice"].is_null(), finding["severity"] == "ok", "what is not well has advice: {finding}");
    }
    found
}

/// The finding about `subject`, of a worker or of this machine.
#[track_caller]
fn about<'a>(found: &'a Value, host: Option<&str>, subject: &str) -> &'a Value {
    let findings = found["findings"].as_array().expect("an array");
    let is_it = |finding: &&Value| finding["host"].as_str() == host && finding["subject"] == subject;
    findings.iter().find(is_it).unwrap_or_else(|| panic!("nothing about {subject} of {host:?} in {found}"))
}

#[track_caller]
fn check(finding: &Value, severity: &str, words: &[&str]) {
    assert_eq!(finding["severity"], severity, "{finding}");
    for word in words {
        assert!(finding.to_string().contains(word), "{word:?} in {finding}");
    }
}

#[test]
fn a_machine_that_is_well_is_told_so() {
    let machine = Machine::new();
    machine.take_model(MODEL, "tiny");
    let found = doctor(&machine, &["doctor", "--listen", "127.0.0.1:0"], &[]);
    for subject in ["Vulkan loader", "port", "keys"] {
        check(about(&found, None, subject), "ok", &[]);
    }
    let devices: Vec<&Value> = found["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| finding["subject"].as_str().is_some_and(|subject| subject.starts_with("device ")))
        .collect();
    assert!(!devices.is_empty(), "{found}");
    devices.iter().for_each(|device| check(device, "ok", &["as their twins"]));
    check(about(&found, None, "model tiny"), "note", &["pp-run inspect tiny"]);
    machine.object(&["inspect", "tiny"]);
    check(about(&doctor(&machine, &QUICKLY, &[]), None, "model tiny"), "ok", &["digest "]);
    let text = String::from_utf8(machine.run(&QUICKLY).stdout).unwrap();
    assert!(text.contains("\nok       here  port") && text.contains(" errors, "), "{text}");
}

#[test]
fn no_driver_is_an_error_that_names_the_variable() {
    let machine = Machine::new();
    let nowhere = [("VK_DRIVER_FILES", "/nonexistent"), ("VK_ADD_DRIVER_FILES", ""), ("VK_ICD_FILENAMES", "")];
    let found = doctor(&machine, &QUICKLY, &nowhere);
    check(about(&found, None, "drivers"), "error", &["unset VK_DRIVER_FILES"]);
}

#[test]
fn a_port_that_is_taken_is_a_warning_and_one_of_ours_is_not() {
    let machine = Machine::new();
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let at = taken.local_addr().unwrap().to_string();
    let arguments = ["doctor", "--no-selftest", "--listen", &at];
    check(about(&doctor(&machine, &arguments, &[]), None, "port"), "warning", &["another program", "--listen"]);
    drop(taken);
    let mut worker = machine.worker("rig2", Some(&at), &[], &[]);
    worker.invitation();
    check(about(&doctor(&machine, &arguments, &[]), None, "port"), "ok", &["worker runs"]);
    check(
        about(&doctor(&machine, &["doctor", "--no-selftest", "--listen", "192.0.2.77:1"], &[]), None, "port"),
        "error",
        &[],
    );
    machine.refused(&["doctor", "--listen", "rig2"], 2);
}

#[test]
fn keys_that_others_can_read_are_an_error() {
    let machine = Machine::new();
    machine.object(&["cluster", "init"]);
    let found = doctor(&machine, &QUICKLY, &[]);
    for subject in ["authority", "head's certificate", "members"] {
        check(about(&found, None, subject), "ok", &[]);
    }
    let change = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let key = machine.cluster().join("head.key");
    change(&key, 0o644);
    let told = doctor(&machine, &QUICKLY, &[]);
    check(about(&told, None, "head's keys"), "error", &["mode 0644", "chmod 600", "head.key"]);
    change(&key, 0o600);
    change(&machine.cluster(), 0o777);
    let told = doctor(&machine, &QUICKLY, &[]);
    check(about(&told, None, "head's keys"), "error", &["mode 0777", "chmod 700"]);
    change(&machine.cluster(), 0o700);
    std::fs::write(&key, "no key").unwrap();
    check(about(&doctor(&machine, &QUICKLY, &[]), None, "head's keys"), "error", &["backup"]);
}

#[test]
fn models_that_are_broken_are_an_error() {
    let machine = Machine::new();
    check(about(&doctor(&machine, &QUICKLY, &[]), None, "models"), "note", &["scripts/demo.sh"]);
    std::fs::write(machine.models().join("broken.gguf"), b"GGUF and no more").unwrap();
    machine.take_model(MODEL, "tiny");
    let found = doctor(&machine, &QUICKLY, &[]);
    check(about(&found, None, "model broken.gguf"), "error", &["fetch it again"]);
    check(about(&found, None, "model tiny"), "note", &[]);
    let elsewhere = [("PP_MODELS", "/nonexistent/models")];
    check(about(&doctor(&machine, &QUICKLY, &elsewhere), None, "models"), "note", &["not there yet"]);
    let file = machine.models().join("broken.gguf");
    let elsewhere = [("PP_MODELS", file.to_str().unwrap())];
    check(about(&doctor(&machine, &QUICKLY, &elsewhere), None, "models"), "error", &["cannot be read"]);
}

#[test]
fn workers_are_looked_at_and_one_that_is_gone_is_an_error() {
    let mut cluster = Cluster::of(&["rig2"], MODEL);
    let head = &cluster.head;
    head.take_model(MODEL, "tiny");
    head.object(&["inspect", "tiny"]);
    let all = [&QUICKLY[..], &["--cluster", "--no-bandwidth"]].concat();
    let found = doctor(head, &all, &[]);
    for subject in ["version", "certificate", "clock"] {
        check(about(&found, Some("rig2"), subject), "ok", &[]);
    }
    for subject in ["round trip", "MTU", "memory", "socket buffers", "worker's certificate", "disk of models"] {
        about(&found, Some("rig2"), subject);
    }
    // It has the file, and has not read it for anybody yet.
    check(about(&found, Some("rig2"), "model tiny"), "note", &["never read whole"]);
    let machine = &cluster.workers[0].0;
    machine.object(&["inspect", "renamed"]);
    check(about(&doctor(head, &all, &[]), Some("rig2"), "model tiny"), "ok", &["renamed"]);
    std::fs::remove_file(machine.models().join("renamed")).unwrap();
    check(about(&doctor(head, &all, &[]), Some("rig2"), "model tiny"), "note", &["no copy", "copy it"]);

    let (machine, worker) = cluster.workers.remove(0);
    worker.0.signal("TERM");
    worker.0.end();
    let found = doctor(&cluster.head, &all, &[]);
    check(about(&found, Some("rig2"), "reach"), "error", &["firewall", "does not answer"]);

    // Its certificate has ended, which nobody has renewed.
    let authority = Store::new(cluster.head.cluster()).head().unwrap().expect("a head").authority;
    let store = Store::new(machine.cluster());
    let name = store.worker().unwrap().expect("enrolled").identity.name().clone();
    let key = store.worker_key().unwrap().expect("a key");
    let then = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs() - 100 * 24 * 3600));
    let expired = authority.issue(key.public(), &name, then, HOST_VALIDITY).unwrap();
    let expired = Identity::new(key, expired, authority.certificate().clone()).unwrap();
    store.lock(Duration::from_secs(5)).unwrap().put_certificate(&expired).unwrap();
    let found = doctor(&machine, &QUICKLY, &[]);
    check(about(&found, None, "worker's certificate"), "error", &["has expired", "start the worker"]);
}

#[test]
fn only_a_head_has_a_cluster_to_look_at() {
    let machine = Machine::new();
    let all = [&QUICKLY[..], &["--cluster"]].concat();
    check(about(&doctor(&machine, &all, &[]), None, "cluster"), "error", &["pp-run cluster init"]);
    machine.object(&["cluster", "init"]);
    check(about(&doctor(&machine, &all, &[]), None, "cluster"), "note", &["pp-run worker"]);
}
