//! Workers that die in mid-answer: others take their layers, and every answer is the one that an undisturbed run gives.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pp_engine::checkpoint::Checkpoint;
use pp_engine::random::Random;
use serde_json::Value;

use super::killed::Work;
use super::processes::{Cluster, Machine, Running, Worker};
use crate::smollm2;
use crate::support::data;

/// Three layers.
const MODEL: &str = "tiny/llama-linear-rope";

/// A member of the cluster that nobody has takes the place of one that was killed; when none is left, those that are there
/// divide the layers, down to the head alone.
#[test]
fn other_members_and_then_those_that_are_left_take_the_layers() {
    let mut cluster = Cluster::of(&["rig2", "rig3", "rig4"], MODEL);
    let work = Work::new();
    assert!(work.batch(&cluster.head, "alone.jsonl", &[]).output().unwrap().status.success());
    let expected = work.answers("alone.jsonl");
    let more = ["--workers", "rig2,rig3", "--recover-wait", "2"];
    let mut head = Running::start(&mut work.batch(&cluster.head, "killed.jsonl", &more));

    let mut names = vec!["rig2", "rig3", "rig4"];
    let mut lose = |name: &str, answered: usize, told: &str| {
        work.wait_for("killed.jsonl", answered);
        let at = names.iter().position(|there| *there == name).unwrap();
        names.remove(at);
        cluster.workers.remove(at).1.0.signal("KILL");
        head.says(told)
    };
    let said = lose("rig3", 2, "rig4 in the place of rig3");
    assert!(said.contains("on the stages up to 2"), "only what came before the lost stage computes again: {said}");
    let said = lose("rig2", 12, "without rig2, split 2,1");
    assert!(said.contains("rebuilding"), "{said}");
    lose("rig4", 22, "without rig4, split 3");
    let (code, said) = head.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(work.answers("killed.jsonl"), expected);
}

/// A worker that is drained is rid of its stages at once, where others can take them; what runs goes on.
#[test]
fn a_worker_that_is_drained_hands_its_layers_over() {
    let cluster = Cluster::of(&["rig2", "rig3"], "tiny/llama-33");
    let work = Work::of("tiny/llama-33", "11,11,11");
    assert!(work.batch(&cluster.head, "alone.jsonl", &[]).output().unwrap().status.success());
    let mut head = Running::start(&mut work.batch(&cluster.head, "drained.jsonl", &["--workers", "local,rig2,local"]));
    let mut drain = |name: &str, answered: usize, told: &str| {
        work.wait_for("drained.jsonl", answered);
        cluster.head.object(&["cluster", "drain", name]);
        head.says(told)
    };
    drain("rig2", 2, "rig3 in the place of rig2");
    let status = cluster.head.object(&["cluster", "status", "--no-bandwidth"]);
    let rig2 = status["members"].as_array().unwrap().iter().find(|member| member["name"] == "rig2").unwrap();
    assert_eq!((&rig2["state"], &rig2["stages"]), (&"draining".into(), &Value::Array(Vec::new())), "{rig2}");
    drain("rig3", 20, "without rig3, split ");
    let (code, said) = head.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(work.answers("drained.jsonl"), work.answers("alone.jsonl"));
}

/// Where another member can take the layers of a worker that is drained, it has loaded them before anything stops.
#[test]
fn what_is_drained_is_loaded_elsewhere_first() {
    let cluster = Cluster::without_model(&["rig2", "rig3"], &[]);
    let work = Work::of("tiny/llama-33", "11,11,11");
    assert!(work.batch(&cluster.head, "alone.jsonl", &[]).output().unwrap().status.success());
    let more = ["--workers", "local,rig2,local", "--json"];
    let mut head = Running::start(&mut work.batch(&cluster.head, "drained.jsonl", &more));
    work.wait_for("drained.jsonl", 2);
    cluster.head.object(&["cluster", "drain", "rig2"]);
    head.says("rig2 is to be drained: rig3 loads its layers first");
    head.says("rig3 in the place of rig2");
    let report: Value = serde_json::from_str(&head.prints("\"stages\"")).unwrap();
    assert_eq!(head.end().0, Some(0));
    let stage = &report["stages"][1];
    let bytes = [&stage["file_bytes"], &stage["cache_bytes"], &stage["network_bytes"]];
    assert_eq!((&stage["worker"], bytes), (&"rig3".into(), [&0.into(); 3]), "nothing was left to load: {stage}");
    assert_eq!(report["recoveries"].as_array().unwrap().len(), 1, "{report}");
    assert_eq!(work.answers("drained.jsonl"), work.answers("alone.jsonl"));
}

/// Another split, while answers go on: what moves is loaded where it goes, and computed again from the tokens.
#[test]
fn layers_are_divided_otherwise_while_answers_go_on() {
    let cluster = Cluster::without_model(&["rig2", "rig3"], &[]);
    let work = Work::of("tiny/llama-33", "11,11,11");
    assert!(work.batch(&cluster.head, "alone.jsonl", &[]).output().unwrap().status.success());
    let rebalance = |split: &'static str| ["cluster", "rebalance", "--split", split];
    let refused = cluster.head.refused(&rebalance("11,10,12"), 5);
    assert!(
        refused.contains("no worker of this cluster") && refused.contains("there is nothing to divide"),
        "{refused}"
    );
    let refused = cluster.head.refused(&[&rebalance("11,10,12")[..], &["rig2"]].concat(), 5);
    assert!(refused.contains("rig2 runs no stage"), "{refused}");
    let more = ["--workers", "local,rig2,rig3", "--json"];
    let mut head = Running::start(&mut work.batch(&cluster.head, "moved.jsonl", &more));
    work.wait_for("moved.jsonl", 2);
    for (split, why) in [
        ("11,22", "3 stages run"),
        ("11,11,12", "33 layers"),
        ("0,11,22", "at least one for each stage"),
        ("4294967295,4294967295,35", "33 layers"),
    ] {
        let refused = cluster.head.refused(&rebalance(split), 5);
        assert!(refused.contains(why), "{split}: {refused}");
    }
    let answer = cluster.head.object(&rebalance("11,10,12"));
    assert_eq!(answer["split"], serde_json::json!([11, 10, 12]), "{answer}");
    let again = cluster.head.object(&rebalance("11,10,12"));
    assert!(again["outcome"].as_str().unwrap().contains("divided so"), "{again}");
    let report: Value = serde_json::from_str(&head.prints("\"stages\"")).unwrap();
    assert_eq!(head.end().0, Some(0));
    assert_eq!(work.answers("moved.jsonl"), work.answers("alone.jsonl"));

    let model = Checkpoint::open(&data("tiny/llama-33")).unwrap();
    let moved: usize = model.tensors().filter(|t| t.name.starts_with("blk.21.")).map(|tensor| tensor.bytes()).sum();
    let bytes = |stage: usize, of: &str| report["stages"][stage][of].as_u64().unwrap();
    let received: Vec<u64> = (0..3).map(|stage| bytes(stage, "network_bytes") + bytes(stage, "cache_bytes")).collect();
    assert_eq!(received, [0, 0, moved as u64], "{report}");
    let recovery = &report["recoveries"][0];
    let tokens = recovery["tokens"].as_u64().unwrap();
    assert_eq!(recovery["layer_tokens"], serde_json::json!([11 * tokens, 10 * tokens, tokens]), "{recovery}");
    assert_eq!(report["recoveries"].as_array().unwrap().len(), 1);
}

/// The same worker, killed and started again, or stopped and let go on, again and again in one run.
#[test]
fn workers_that_come_back_go_on() {
    let mut cluster = Cluster::of(&["rig2", "rig3"], MODEL);
    let work = Work::new();
    assert!(work.batch(&cluster.head, "alone.jsonl", &[]).output().unwrap().status.success());
    let expected = work.answers("alone.jsonl");
    let trace = work.path("trace.json");
    let more = ["--workers", "rig2,rig3", "--recover-wait", "60", "--trace", &trace];
    let addresses = ["rig2", "rig3"].map(|name| cluster.head.address_of(name));
    let mut head = Running::start(&mut work.batch(&cluster.head, "back.jsonl", &more));
    let mut times = 0;
    for (answered, at, signal) in [(2, 0, "KILL"), (12, 1, "STOP"), (22, 1, "KILL"), (32, 0, "STOP")] {
        work.wait_for("back.jsonl", answered);
        let (machine, mut worker) = cluster.workers.remove(at);
        worker.0.signal(signal);
        times += 1;
        head.says_times("looking for another pipeline", times);
        if signal == "STOP" {
            worker.0.signal("CONT");
        } else {
            drop(worker);
            worker = machine.worker(["rig2", "rig3"][at], Some(&addresses[at]), &[], &[]);
            worker.ready();
        }
        cluster.workers.insert(at, (machine, worker));
        head.says_times(" is back after", times);
    }
    let (code, said) = head.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(work.answers("back.jsonl"), expected);
    // The trace goes through all pipelines.
    let text = String::from_utf8(cluster.head.run(&["trace", &trace]).stdout).unwrap();
    assert!(text.contains("outage"), "{text}");
}

/// A real model on the machine's adapter, eight answers at once, its workers killed and stopped at random moments: five times
/// in every run of the tests, `PP_SOAK=100` times by hand.
#[test]
fn a_real_model_goes_on_whoever_dies() {
    let times: usize = std::env::var("PP_SOAK").ok().and_then(|times| times.parse().ok()).unwrap_or(5);
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        format!(
            "{{\"id\": {i}, \"prompt\": \"Name {i} things that float.\", \"max_tokens\": {}, \"temperature\": 0.8, \"seed\": {i}}}\n",
            16 + 2 * (i % 9)
        )
    };
    std::fs::write(folder.path().join("in.jsonl"), (0..8 + 2 * times).map(line).collect::<String>()).unwrap();
    let model = smollm2::file();
    let cluster = Cluster::on_devices(&["rig2", "rig3"], &smollm2::file());
    let batch = |out: &str, more: &[&str]| {
        let (input, out) = (folder.path().join("in.jsonl"), folder.path().join(out));
        let paths = [input.to_str().unwrap(), "-o", out.to_str().unwrap(), "-m", model.to_str().unwrap()];
        let usual = ["batch", "--split", "10,10,10", "--ctx", "256", "--max-sequences", "8"];
        cluster.head.program(&[&usual[..], &paths, more].concat())
    };
    let answers = |out: &str| -> BTreeMap<u64, Value> {
        let text = std::fs::read_to_string(folder.path().join(out)).unwrap_or_default();
        let whole = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        whole.map(|answer| (answer["line"].as_u64().unwrap(), answer["tokens"].clone())).collect()
    };
    assert!(batch("alone.jsonl", &[]).output().unwrap().status.success());
    let expected = answers("alone.jsonl");
    assert_eq!(expected.len(), 8 + 2 * times);

    let addresses = ["rig2", "rig3"].map(|name| cluster.head.address_of(name));
    let mut workers: Vec<(Machine, Worker)> = cluster.workers;
    let mut head = Running::start(&mut batch("killed.jsonl", &["--workers", "rig2,rig3", "--recover-wait", "60"]));
    let mut random = Random::new(std::process::id().into());
    for time in 0..times {
        let until = Instant::now() + Duration::from_secs(120);
        while answers("killed.jsonl").len() <= 2 * time {
            assert!(Instant::now() < until, "{}", head.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(random.between(0, 700) as u64));
        let at = time % 2;
        let (machine, mut worker) = workers.remove(at);
        let is_killed = random.between(0, 1) == 0;
        worker.0.signal(if is_killed { "KILL" } else { "STOP" });
        head.says_times("looking for another pipeline", time + 1);
        if is_killed {
            worker = machine.worker_on_device(["rig2", "rig3"][at], Some(&addresses[at]));
            worker.ready();
        } else {
            worker.0.signal("CONT");
        }
        workers.insert(at, (machine, worker));
        head.says_times(" is back after", time + 1);
    }
    let (code, said) = head.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(answers("killed.jsonl"), expected, "{said}");
}
