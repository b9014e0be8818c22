//! Workers and heads that vanish: killed, stopped, started again.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::processes::{Cluster, Machine, Running, Worker};
use crate::support::data;

/// Three layers.
const MODEL: &str = "tiny/llama-linear-rope";
const LINES: usize = 48;

fn model() -> String {
    data(MODEL).to_str().expect("a path in UTF-8").to_owned()
}

/// A file of requests with seeds of their own, and where the answers go.
pub struct Work {
    folder: tempfile::TempDir,
    model: String,
    split: &'static str,
}

impl Work {
    /// 48 lines.
    pub fn new() -> Work {
        Work::of(MODEL, "1,1,1")
    }

    /// For a model of tests/data, cut so.
    pub fn of(model: &str, split: &'static str) -> Work {
        let folder = tempfile::tempdir().unwrap();
        let line = |i: usize| {
            format!(
                "{{\"id\": {i}, \"prompt\": \"Of run {i} is a stage\", \"raw\": true, \"max_tokens\": 96, \"temperature\": 0.9, \"seed\": {i}, \"logprobs\": true}}\n"
            )
        };
        std::fs::write(folder.path().join("in.jsonl"), (0..LINES).map(line).collect::<String>()).unwrap();
        Work { folder, model: data(model).to_str().expect("a path in UTF-8").to_owned(), split }
    }

    /// A file of it.
    pub fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// `batch` over three stages.
    pub fn batch(&self, head: &Machine, out: &str, more: &[&str]) -> std::process::Command {
        let (input, out, model) = (self.path("in.jsonl"), self.path(out), &self.model);
        let usual = ["batch", &input, "-o", &out, "-m", model, "--device", "reference", "--split", self.split];
        head.program(&[&usual[..], &["--ctx", "128", "--max-sequences", "8", "--activations", "f32"], more].concat())
    }

    /// What was answered, by line: tokens and log-probabilities.
    pub fn answers(&self, out: &str) -> Vec<Option<(Value, Value)>> {
        let mut answers = vec![None; LINES];
        for line in std::fs::read_to_string(self.path(out)).unwrap_or_default().lines() {
            // The last one may be half written.
            let Ok(answer) = serde_json::from_str::<Value>(line) else { continue };
            assert!(answer.get("error").is_none(), "{answer}");
            let number = answer["line"].as_u64().unwrap() as usize;
            answers[number - 1] = Some((answer["tokens"].clone(), answer["logprobs"].clone()));
        }
        answers
    }

    /// Until so many are answered.
    pub fn wait_for(&self, out: &str, count: usize) {
        let until = Instant::now() + Duration::from_secs(120);
        while self.answers(out).iter().flatten().count() < count {
            assert!(Instant::now() < until, "only {:?}", self.answers(out));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn again(machine: &Machine, name: &str, listen: &str) -> Worker {
    machine.worker(name, Some(listen), &[], &[])
}

/// A worker that is killed, and one that is stopped for a while, in mid-work: the head says who and why within the time
/// that is promised, goes on when the worker is back, and every answer is the one that an undisturbed run gives.
#[test]
fn a_batch_goes_on_when_a_worker_comes_back() {
    let mut cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let work = Work::new();
    let alone = work.batch(&cluster.head, "alone.jsonl", &[]).output().unwrap();
    assert!(alone.status.success(), "{alone:?}");
    let expected = work.answers("alone.jsonl");
    assert!(expected.iter().all(Option::is_some));

    let address = cluster.head.address_of("rig3");
    let mut head = Running::start(&mut work.batch(&cluster.head, "killed.jsonl", &["--workers", "rig2,rig3"]));
    work.wait_for("killed.jsonl", 2);
    let (machine, worker) = cluster.workers.pop().unwrap();
    worker.0.signal("KILL");
    let since = Instant::now();
    let told = head.says("looking for another pipeline");
    let took = since.elapsed();
    assert!(told.contains("stage 2 on rig3") && told.contains("rig3 is lost: it was silent for"), "{told}");
    assert!(took < Duration::from_secs(4), "a vanished worker is noticed within 2 s, was after {took:?}");
    let mut worker = again(&machine, "rig3", &address);
    worker.ready();
    let (code, said) = head.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(work.answers("killed.jsonl"), expected);

    let mut head = Running::start(&mut work.batch(&cluster.head, "stopped.jsonl", &["--workers", "rig2,rig3"]));
    work.wait_for("stopped.jsonl", 2);
    let rig2 = &cluster.workers[0].1;
    rig2.0.signal("STOP");
    let since = Instant::now();
    let told = head.says("looking for another pipeline");
    assert!(told.contains("stage 1 on rig2") && told.contains("rig2 is lost"), "{told}");
    assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
    rig2.0.signal("CONT");
    let (code, said) = head.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(work.answers("stopped.jsonl"), expected);
}

/// A head that is killed frees its workers; another one, or the same started again, has them within the lease.
#[test]
fn workers_outlive_their_head() {
    let cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let work = Work::new();
    let head = Running::start(&mut work.batch(&cluster.head, "cut.jsonl", &["--workers", "rig2,rig3"]));
    work.wait_for("cut.jsonl", 2);
    head.signal("KILL");
    drop(head);
    let since = Instant::now();
    let freed = loop {
        let status = cluster.head.object(&["cluster", "status", "--no-bandwidth"]);
        if status["members"].as_array().unwrap().iter().all(|member| member["state"] == "ready") {
            break since.elapsed();
        }
        assert!(since.elapsed() < Duration::from_secs(30), "{status}");
    };
    assert!(freed < Duration::from_secs(8), "workers are free within the lease, were after {freed:?}");
    // What was answered stays; the rest follows.
    let (code, said) = Running::start(&mut work.batch(&cluster.head, "cut.jsonl", &["--workers", "rig2,rig3"])).end();
    assert_eq!(code, Some(0), "{said}");
    assert!(work.answers("cut.jsonl").iter().all(Option::is_some));
}

/// The worker dies in the middle: an error that names stage, worker and cause, no panic, no hang.
#[test]
fn a_run_that_loses_its_worker_ends_with_the_reason() {
    let mut cluster = Cluster::of(&["rig2"], MODEL);
    let m = model();
    let endless =
        ["bench", "-m", &m, "--workers", "rig2", "--device", "reference", "--reps", "100000", "--no-roofline"];
    let mut head = Running::start(&mut cluster.head.program(&endless));
    let held = || {
        let status = cluster.head.object(&["cluster", "status", "--no-bandwidth"]);
        status["members"][0]["stages"][0].is_object()
    };
    while !held() {
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(500));
    cluster.workers.remove(0).1.0.signal("KILL");
    let told = head.says("rig2 is lost");
    assert!(told.contains("stage 1 on rig2"), "{told}");
    let (code, said) = head.end();
    assert_eq!(code, Some(1), "{said}");
    assert!(!said.contains("panicked"), "{said}");
}

/// Strangers on the port, silent ones and loud ones, cost a worker nothing.
#[test]
fn strangers_cost_a_worker_nothing() {
    let cluster = Cluster::of(&["rig2"], MODEL);
    let address = cluster.head.address_of("rig2");
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    // What looks like the first packet of a connection of version 1, and no more comes; and what looks like nothing.
    let mut initial = vec![0u8; 1200];
    initial[..6].copy_from_slice(&[0xc3, 0, 0, 0, 1, 8]);
    for i in 0..2000u32 {
        initial[6..10].copy_from_slice(&i.to_le_bytes());
        socket.send_to(&initial, &address).unwrap();
        socket.send_to(&i.to_le_bytes(), &address).unwrap();
    }
    let m = model();
    let run = ["-m", &m, "--raw", "-n", "4", "--workers", "rig2", "--device", "reference", "Of run"];
    cluster.head.object(&run);
}
