//! Workers without a copy of the model: they get the tensors of their layers, and keep them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::processes::{Cluster, Machine, Running};
use crate::support::data;

/// Three layers, in a folder of safetensors, embedding and LM head tied.
const MODEL: &str = "tiny/llama-linear-rope";
const PROMPT: &str = "Of run is a stage";

fn run<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let usual = ["-m", model, "--raw", "-n", "8", "--logprobs", "2", "--activations", "f32", "--device", "reference"];
    [&usual[..], more, &[PROMPT]].concat()
}

fn text(path: &std::path::Path) -> String {
    path.to_str().expect("a path in UTF-8").to_owned()
}

/// `key` of every stage.
fn of_stages(found: &Value, key: &str) -> Vec<u64> {
    let stages = found["stages"].as_array().expect("stages");
    stages.iter().map(|stage| stage[key].as_u64().unwrap_or_else(|| panic!("{key}: {stage}"))).collect()
}

fn same_words(found: &Value, alone: &Value) {
    assert_eq!((&found["tokens"], &found["logprobs"]), (&alone["tokens"], &alone["logprobs"]));
}

fn cached(machine: &Machine) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(machine.tensors()).into_iter().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    files
}

fn sizes(files: &[PathBuf]) -> u64 {
    files.iter().map(|file| std::fs::metadata(file).expect("a file").len()).sum()
}

/// Bytes received are the tensors of its layers; a second start receives none, and says so; a file of the cache that is
/// damaged is received again, and no other.
fn gets_just_its_tensors(model: &str) {
    let cluster = Cluster::without_model(&["rig2", "rig3"], &[]);
    let (head, m) = (&cluster.head, text(&data(model)));
    let alone = head.object(&run(&m, &[]));
    let layers = alone["stages"][0]["layer_count"].as_u64().expect("layers");
    let split = format!("1,{}", layers - 1);
    let spread = run_there(&m, &["--workers", "rig2,rig3", "--split", &split]);
    let plan = head.object(&["plan", "-m", &m, "--workers", "rig2,rig3", "--split", &split]);
    let wanted = of_stages(&plan, "file_bytes");

    let first = head.object(&spread);
    same_words(&first, &alone);
    assert_eq!(of_stages(&first, "network_bytes"), wanted);
    assert_eq!(of_stages(&first, "file_bytes"), [0; 2]);
    assert_eq!(of_stages(&first, "cache_bytes"), [0; 2]);
    for ((machine, _), wanted) in cluster.workers.iter().zip(&wanted) {
        assert_eq!(sizes(&cached(machine)), *wanted, "weights are kept, and nothing else");
    }

    let second = head.object(&spread);
    same_words(&second, &alone);
    assert_eq!(of_stages(&second, "network_bytes"), [0; 2]);
    assert_eq!(of_stages(&second, "cache_bytes"), wanted);

    let files = cached(&cluster.workers[0].0);
    let damaged = files.iter().max_by_key(|file| std::fs::metadata(file).expect("a file").len()).expect("a tensor");
    let whole = std::fs::read(damaged).expect("a file");
    let mut bytes = whole.clone();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(damaged, &bytes).expect("room");
    let third = head.object(&spread);
    same_words(&third, &alone);
    assert_eq!(of_stages(&third, "network_bytes"), [whole.len() as u64, 0]);
    assert_eq!(std::fs::read(damaged).expect("a file"), whole);
}

/// As [`run`], with no stage on the head.
fn run_there<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = run(model, more);
    let at = arguments.iter().position(|argument| *argument == "--device").expect("it names a device");
    arguments.drain(at..at + 2);
    arguments
}

#[test]
fn workers_without_a_folder_of_safetensors_get_just_their_tensors() {
    gets_just_its_tensors("tiny/llama-sharded");
}

#[test]
fn workers_without_a_gguf_file_get_just_their_tensors() {
    gets_just_its_tensors("tiny-gguf/mixed-k-qwen2.gguf");
}

#[test]
fn workers_without_a_gguf_in_parts_get_just_their_tensors() {
    gets_just_its_tensors("tiny-gguf/split-00001-of-00002.gguf");
}

/// The closing table says where weights came from, and what two stages of a worker share is received once.
#[test]
fn what_two_stages_of_a_worker_share_is_received_once() {
    let cluster = Cluster::without_model(&["rig2"], &[]);
    let m = text(&data("tiny/llama-33"));
    let spread = run(&m, &["--workers", "rig2,local,rig2", "--split", "11,11,11"]);
    let plan = cluster.head.object(&spread_plan(&m));
    let (wanted, first) = (of_stages(&plan, "file_bytes"), cluster.head.object(&spread));
    let (network, cache) = (of_stages(&first, "network_bytes"), of_stages(&first, "cache_bytes"));
    assert!(cache[2] > 0, "its LM head is the embedding of the first: {first}");
    assert_eq!([network[0] + cache[0], network[2] + cache[2]], [wanted[0], wanted[2]]);
    assert_eq!(sizes(&cached(&cluster.workers[0].0)), network[0] + network[2]);
    let shown: Vec<&str> = spread.iter().copied().filter(|argument| !["--logprobs", "2"].contains(argument)).collect();
    let table = cluster.head.run(&shown);
    let told = String::from_utf8_lossy(&table.stderr).into_owned();
    assert!(told.contains("weights from") && told.contains("cache ") && !told.contains("network "), "{told}");
}

fn spread_plan(model: &str) -> Vec<&str> {
    vec!["plan", "-m", model, "--device", "reference", "--workers", "rig2,local,rig2", "--split", "11,11,11"]
}

#[test]
fn a_cache_that_is_too_small_says_which_split_would_fit() {
    let alone = Machine::new();
    let m = text(&data(MODEL));
    let plan = alone.object(&["plan", "-m", &m, "--device", "reference", "--split", "1,2"]);
    let cap = format!("{}B", of_stages(&plan, "file_bytes")[1] - 1);
    let cluster = Cluster::without_model(&["rig2"], &["--cache-size", &cap]);
    let told = cluster.head.refused(&run(&m, &["--json", "--workers", "rig2", "--split", "1,2"]), 5);
    assert!(told.contains("not enough room on rig2") && told.contains("--cache-size"), "{told}");
    assert!(told.contains("what would fit: --split 2,1; or"), "{told}");
    cluster.head.object(&run(&m, &["--workers", "rig2", "--split", "2,1"]));
}

/// Bytes that only the LM head of [`large`] has more of.
const LARGE: u64 = 50_000_000;
/// No other tensor has more.
const SMALL: u64 = 1 << 20;

/// A model of 103 MB, nearly all of it the LM head: long enough on its way to be broken off.
pub fn large(folder: &std::path::Path) -> String {
    const VOCAB: usize = 800_000;
    let tiny = data(MODEL);
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        let _ = std::fs::copy(tiny.join(name), folder.join(name));
    }
    let config = std::fs::read(tiny.join("config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["vocab_size"] = VOCAB.into();
    std::fs::write(folder.join("config.json"), config.to_string()).expect("room");
    let file = std::fs::read(tiny.join("model.safetensors")).expect("weights");
    let header_bytes = u64::from_le_bytes(file[..8].try_into().expect("eight")) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..8 + header_bytes]).expect("JSON");
    let data = &file[8 + header_bytes..];
    let mut out = Vec::new();
    for (name, tensor) in header.as_object_mut().expect("an object") {
        if name == "__metadata__" {
            continue;
        }
        let offsets: Vec<usize> = serde_json::from_value(tensor["data_offsets"].clone()).expect("offsets");
        let from = out.len();
        out.extend_from_slice(&data[offsets[0]..offsets[1]]);
        if name == "lm_head.weight" || name == "model.embed_tokens.weight" {
            // Rows of tokens that no text has.
            let hidden = tensor["shape"][1].as_u64().expect("a width") as usize;
            tensor["shape"][0] = VOCAB.into();
            let fill = |at: usize| [(at % 251) as u8, if name == "lm_head.weight" { 0x20 } else { 0x21 }];
            out.extend((out.len() - from..VOCAB * hidden * 2).step_by(2).flat_map(|at| fill(at / 2)));
        }
        tensor["data_offsets"] = serde_json::json!([from, out.len()]);
    }
    let header = header.to_string();
    let whole = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &out].concat();
    std::fs::write(folder.join("model.safetensors"), whole).expect("room");
    text(folder)
}

pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes of the LM head that have come, once they are more than `before`; nothing where it is whole already.
fn part(machine: &Machine, before: u64) -> Option<u64> {
    until("a part", || {
        let files = cached(machine);
        let is_part = |file: &&PathBuf| file.extension().is_some_and(|end| end == "part");
        let bytes = |file: &PathBuf| std::fs::metadata(file).map_or(0, |meta| meta.len());
        let is_whole = files.iter().any(|file| !is_part(&file) && bytes(file) > before.max(LARGE));
        let found = files.iter().filter(is_part).map(bytes).find(|bytes| *bytes > before.max(SMALL));
        (is_whole || found.is_some()).then_some(found)
    })
}

fn until_free(head: &Machine) {
    until("a free worker", || {
        let status = head.object(&["cluster", "status", "--no-bandwidth"]);
        (status["members"][0]["state"] == "ready").then_some(())
    });
}

/// Ctrl-C on the head, a head that is killed, a worker that is killed, each in mid-transfer: what was received stays, the
/// worker is free, and the next start receives the rest and nothing twice.
#[test]
fn a_transfer_that_breaks_off_is_gone_on_with() {
    let folder = tempfile::tempdir().unwrap();
    let m = large(folder.path());
    // A transfer may be over before it is broken off.
    let is_seen = (0..10).any(|_| break_off_three_times(&m).is_some());
    assert!(is_seen, "no transfer of ten was slow enough to be broken off");
}

/// Nothing where a transfer was too fast.
fn break_off_three_times(m: &str) -> Option<()> {
    let mut cluster = Cluster::without_model(&["rig2"], &[]);
    let spread = [&run(m, &["--workers", "rig2", "--split", "2,1"])[..], &["--ctx", "64"]].concat();
    let plan = ["plan", "-m", m, "--device", "reference", "--workers", "rig2", "--split", "2,1", "--ctx", "64"];
    let wanted = of_stages(&cluster.head.object(&plan), "file_bytes")[1];
    let started = [&spread[..], &["--json"]].concat();

    let head = Running::start(&mut cluster.head.program(&started));
    part(&cluster.workers[0].0, 0)?;
    head.signal("INT");
    let (code, said) = head.end();
    let first = part(&cluster.workers[0].0, 0)?;
    assert_eq!(code, Some(130), "{said}");
    until_free(&cluster.head);

    let head = Running::start(&mut cluster.head.program(&started));
    part(&cluster.workers[0].0, first + (1 << 20))?;
    head.signal("KILL");
    drop(head);
    until_free(&cluster.head);
    let second = part(&cluster.workers[0].0, 0)?;

    let address = cluster.head.address_of("rig2");
    let head = Running::start(&mut cluster.head.program(&started));
    part(&cluster.workers[0].0, second + (1 << 20))?;
    let (machine, worker) = cluster.workers.pop().expect("rig2");
    worker.0.signal("KILL");
    drop(worker);
    let (code, said) = head.end();
    let there = part(&machine, 0)?;
    assert!(code == Some(1) && said.contains("rig2"), "{said}");

    assert!(there > second && there < wanted, "{there} of {wanted}");
    let whole = sizes(&cached(&machine));
    let mut worker = machine.worker("rig2", Some(&address), &[], &[]);
    worker.ready();
    let found = cluster.head.object(&spread);
    assert_eq!(of_stages(&found, "network_bytes")[1], wanted - whole);
    assert_eq!(of_stages(&found, "cache_bytes")[1], whole);
    assert_eq!(sizes(&cached(&machine)), wanted, "no part is left");
    same_words(&found, &cluster.head.object(&[&run(m, &[])[..], &["--ctx", "64"]].concat()));
    Some(())
}

/// Where another worker has the model, it gives a part of what is wanted.
#[test]
fn a_worker_that_has_the_model_gives_of_it_too() {
    let folder = tempfile::tempdir().unwrap();
    let m = large(folder.path());
    let mut cluster = Cluster::logging(&["rig2", "rig3"], "pp_engine=info");
    std::os::unix::fs::symlink(folder.path(), cluster.workers[0].0.models().join("renamed")).unwrap();
    let spread = [&run_there(&m, &["--workers", "rig3,rig2", "--split", "2,1"])[..], &["--ctx", "64"]].concat();
    let found = cluster.head.object(&spread);
    let (network, file) = (of_stages(&found, "network_bytes"), of_stages(&found, "file_bytes"));
    assert!(network[0] > 0 && file[0] == 0 && network[1] == 0 && file[1] > 0, "{found}");
    let rig3 = &mut cluster.workers[1].1;
    for source in ["source=\"head\"", "source=\"rig2\""] {
        let told = rig3.0.says(source);
        assert!(told.contains("no more weights are asked for") && !told.contains("bytes=0"), "{told}");
    }
}
