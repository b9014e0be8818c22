//! What a hop costs, measured by the program: few round trips, so only whether they were made counts here.

use std::io::Write;
use std::process::Command;

use serde_json::Value;

use super::processes::{Cluster, Machine, Running};

const LITTLE: [&str; 5] = ["net-bench", "--reps", "3", "--seconds", "0.01"];

fn rows(machine: &Machine, more: &[&str]) -> Vec<Value> {
    let found = machine.object(&[&LITTLE[..], more].concat());
    found["rows"].as_array().expect("an array").clone()
}

/// That a row was measured.
#[track_caller]
fn check_measured(row: &Value) {
    let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key}: {row}"));
    assert!(number("median_us") > 0.0 && number("p95_us") >= number("median_us"), "{row}");
    assert!(number("one_way_bytes_per_s") > 0.0 && number("trips") >= 3.0, "{row}");
    assert_eq!(row["mtu"].is_u64(), row["transport"] == "quic", "{row}");
}

/// Network namespaces of this machine.
fn namespaces() -> Option<String> {
    let output = Command::new("ip").args(["netns", "list"]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether they can be made; says so where they cannot.
fn are_possible(test: &str) -> bool {
    let name = format!("pp-probe-{}", std::process::id());
    let ip = |verb: &str| Command::new("ip").args(["netns", verb, &name]).output().is_ok_and(|o| o.status.success());
    if ip("add") && ip("delete") {
        return true;
    }
    let said = format!("{test} was skipped: no network namespaces here\n");
    std::io::stderr().write_all(said.as_bytes()).unwrap();
    false
}

#[test]
fn all_transports_are_measured_on_the_loopback() {
    let machine = Machine::new();
    let found = rows(&machine, &["--networks", "loopback", "--sizes", "64,8K,64"]);
    let which: Vec<(&str, u64)> = found
        .iter()
        .map(|row| (row["transport"].as_str().expect("a text"), row["bytes"].as_u64().expect("a number")))
        .collect();
    let wanted: Vec<(&str, u64)> =
        ["local", "quic", "tcp", "tls"].into_iter().flat_map(|name| [(name, 64), (name, 8192)]).collect();
    assert_eq!(which, wanted);
    found.iter().for_each(check_measured);
    let output = machine.run(&[&LITTLE[..], &["--networks", "loopback", "--sizes", "8K"]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("loopback\nframe") && text.contains("\n8K "), "{text}");
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let wrong = [
        ("--sizes", "0"),
        ("--sizes", "64M"),
        ("--losses", "101"),
        ("--networks", "moon"),
        ("--patience", "x"),
        ("--delays", "20000"),
    ];
    for (option, value) in wrong {
        let told = Machine::new().refused(&["net-bench", option, value], 2);
        assert!(told.contains(option), "{told}");
    }
}

#[test]
fn cables_and_relays_are_measured_and_leave_nothing_behind() {
    if !are_possible("cables_and_relays_are_measured_and_leave_nothing_behind") {
        let found = rows(&Machine::new(), &["--networks", "veth", "--sizes", "64"]);
        assert!(found.iter().all(|row| row["not_measured"].is_string() && row["median_us"].is_null()), "{found:?}");
        return;
    }
    let machine = Machine::new();
    let found = rows(&machine, &["--networks", "veth", "--sizes", "64K"]);
    assert_eq!(found.len(), 3);
    found.iter().for_each(check_measured);
    assert!(found[0]["mtu"].as_u64().is_some_and(|mtu| mtu <= 1472), "{}", found[0]);

    let relay = ["--networks", "relay", "--sizes", "8K", "--delays", "5", "--losses", "0,1"];
    let found = rows(&machine, &relay);
    assert_eq!(found.len(), 6);
    if !std::path::Path::new("/dev/net/tun").exists() {
        assert!(found.iter().all(|row| row["not_measured"].is_string()), "{found:?}");
    } else {
        found.iter().for_each(check_measured);
        assert!(found.iter().all(|row| row["median_us"].as_f64() >= Some(10_000.0)), "5 ms each way: {found:?}");
    }
}

#[test]
fn ctrl_c_removes_the_namespaces() {
    if !are_possible("ctrl_c_removes_the_namespaces") {
        return;
    }
    let machine = Machine::new();
    let endless = ["net-bench", "--networks", "veth", "--sizes", "64", "--seconds", "600", "--reps", "1000000000"];
    let running = Running::start(&mut machine.program(&endless));
    let own = format!("pp{}n", running.id());
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !namespaces().is_some_and(|names| names.contains(&own)) {
        assert!(std::time::Instant::now() < until, "no namespaces: {}", running.said());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    running.signal("INT");
    let (code, said) = running.end();
    assert_eq!(code, Some(130), "{said}");
    assert!(!namespaces().is_some_and(|names| names.contains(&own)), "{:?}", namespaces());
}

#[test]
fn the_way_to_a_worker_is_measured() {
    let cluster = Cluster::of(&["rig2"], "tiny/llama-linear-rope");
    let found = rows(&cluster.head, &["--worker", "rig2", "--sizes", "64,8K,1M"]);
    assert_eq!(found.len(), 3);
    found.iter().for_each(check_measured);
    assert!(found.iter().all(|row| row["network"] == "to rig2"), "{found:?}");
    let told = cluster.head.refused(&["net-bench", "--worker", "rig9"], 2);
    assert!(told.contains("it has rig2"), "{told}");
    Machine::new().refused(&["net-bench", "--worker", "rig2"], 2);
}
