//! Whole models from workers.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::processes::{Cluster, Machine, Running, Worker};
use super::weights::{large, until};
use crate::disk::Disk;
use crate::support::data;

const FOLDER: &str = "tiny/llama-sharded";
const GGUF: &str = "tiny-gguf/mixed-k-qwen2.gguf";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Names and contents of the files in a folder.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let read = |path: PathBuf| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    };
    let mut found: Vec<_> = entries.map(|entry| read(entry.expect("an entry").path())).collect();
    found.sort();
    found
}

fn path(pulled: &Value) -> PathBuf {
    PathBuf::from(pulled["path"].as_str().unwrap_or_else(|| panic!("{pulled}")))
}

fn asked(model: &str) -> Vec<&str> {
    vec!["-m", model, "--raw", "-n", "4", "--activations", "f32", "--device", "reference", "Of run is a stage"]
}

/// A model that lies in the hub's cache of a machine, as Hugging Face's programs put it there.
fn put_into_hub(machine: &Machine, repo: &str, files: &[(&str, PathBuf)]) -> PathBuf {
    let repo = machine.home().join("cache/huggingface/hub").join(format!("models--{}", repo.replace('/', "--")));
    let snapshot = repo.join("snapshots").join(COMMIT);
    for folder in [&repo.join("refs"), &repo.join("blobs"), &snapshot] {
        std::fs::create_dir_all(folder).expect("room");
    }
    std::fs::write(repo.join("refs/main"), COMMIT).expect("room");
    for (at, (name, file)) in files.iter().enumerate() {
        std::fs::copy(file, repo.join(format!("blobs/{at:040x}"))).expect("room");
        let pointer = snapshot.join(name);
        std::fs::create_dir_all(pointer.parent().expect("a folder")).expect("room");
        let up = "../".repeat(2 + name.matches('/').count());
        std::os::unix::fs::symlink(format!("{up}blobs/{at:040x}"), pointer).expect("room");
    }
    snapshot
}

#[test]
fn a_head_gets_models_whole_from_a_worker_and_keeps_them() {
    let cluster = Cluster::without_model(&["rig2", "rig3"], &[]);
    let (head, rig3) = (&cluster.head, &cluster.workers[1].0);
    rig3.take_model(FOLDER, "folder");
    rig3.take_model(GGUF, "one.gguf");
    std::fs::copy(data(GGUF), head.models().join("in-the-way.gguf")).expect("room");

    let pulled = head.object(&["pull", "folder", "--from", "rig3"]);
    assert_eq!((&pulled["from"], path(&pulled)), (&"rig3".into(), head.models().join("folder")));
    assert_eq!(pulled["downloaded_bytes"], pulled["bytes"]);
    let original: Vec<_> = contents(&data(FOLDER));
    let found = contents(&head.models().join("folder"));
    assert!(found.len() > 3 && found.iter().all(|file| original.contains(file)), "just what the model is made of");
    assert_eq!(head.object(&asked("folder"))["tokens"], head.object(&asked(data(FOLDER).to_str().unwrap()))["tokens"]);
    // Without --from the first that has it gives it; what is here under another name is not got again.
    let again = head.object(&["pull", "folder"]);
    assert_eq!((&again["downloaded_bytes"], &again["from"]), (&0.into(), &Value::Null));
    assert_eq!(path(&again), head.models().join("folder"));
    // Of a copy that misses something just that comes.
    let missed = head.models().join("folder/tokenizer.json");
    let bytes = std::fs::read(&missed).expect("it has come");
    std::fs::remove_file(&missed).expect("it is there");
    let mended = head.object(&["pull", "folder"]);
    assert_eq!((&mended["downloaded_bytes"], &mended["from"]), (&bytes.len().into(), &"rig3".into()));
    assert_eq!(std::fs::read(&missed).unwrap(), bytes);
    let known = head.object(&["pull", "one"]);
    assert_eq!((path(&known), &known["downloaded_bytes"]), (head.models().join("in-the-way.gguf"), &0.into()));
    std::fs::remove_file(head.models().join("in-the-way.gguf")).expect("it is there");
    let one = head.object(&["pull", "one"]);
    assert_eq!((&one["from"], path(&one)), (&"rig3".into(), head.models().join("one.gguf")));
    assert_eq!(std::fs::read(path(&one)).unwrap(), std::fs::read(data(GGUF)).unwrap());

    // Something else of that name stays as it is.
    std::fs::write(head.models().join("one.gguf"), "mine").expect("room");
    let told = head.refused(&["pull", "one", "--from", "rig3"], 2);
    assert!(told.contains("one.gguf is there already and is something else than rig3 has"), "{told}");
    assert_eq!(std::fs::read(head.models().join("one.gguf")).unwrap(), b"mine");
    let mut left: Vec<String> = std::fs::read_dir(head.models()).unwrap().map(|entry| name(&entry.unwrap())).collect();
    left.sort();
    assert_eq!(left, ["folder", "one.gguf"], "nothing unfinished is left");

    let told = head.refused(&["pull", "nothing"], 2);
    assert!(told.contains("worker rig2 has none of that name; worker rig3 has none"), "{told}");
    let told = head.refused(&["pull", "folder", "--from", "rig2"], 4);
    assert!(told.contains("`folder`: worker rig2 has none of that name"), "{told}");
    let told = head.refused(&["pull", "folder", "--from", "rig9"], 2);
    assert!(told.contains("there is no worker rig9"), "{told}");
}

fn name(entry: &std::fs::DirEntry) -> String {
    entry.file_name().to_string_lossy().into_owned()
}

/// A worker gives models of its folders for models, and nothing else that it could read.
#[test]
fn names_that_lead_elsewhere_are_not_given() {
    let cluster = Cluster::without_model(&["rig2"], &[]);
    let (head, rig2) = (&cluster.head, &cluster.workers[0].0);
    std::fs::copy(data(GGUF), rig2.home().join("data/pp-run/private.gguf")).expect("room");
    let outside = rig2.home().join("data/pp-run/private.gguf");
    let outside = outside.to_str().expect("a path in UTF-8");
    for name in ["../private", "../private.gguf", outside, "..", ".", "", "a/../../private.gguf", "/etc/passwd"] {
        let told = head.refused(&["pull", name, "--from", "rig2"], 4);
        assert!(told.contains("has none of that name"), "{name:?}: {told}");
    }
    // A file of a model that leads out of its folder is no file of the model.
    let folder = rig2.models().join("sly");
    std::fs::create_dir(&folder).expect("room");
    for (name, bytes) in contents(&data(FOLDER)) {
        std::fs::write(folder.join(name), bytes).expect("room");
    }
    let secret = rig2.home().join("secret.json");
    std::fs::write(&secret, "{}").expect("room");
    std::fs::remove_file(folder.join("tokenizer_config.json")).expect("it is there");
    std::os::unix::fs::symlink(&secret, folder.join("tokenizer_config.json")).expect("room");
    let told = head.refused(&["pull", "sly", "--from", "rig2"], 5);
    assert!(told.contains("tokenizer_config.json leads out of the folders for models"), "{told}");
    assert_eq!(std::fs::read_dir(head.models()).unwrap().count(), 0);
}

/// What the hub does not give comes from a worker's cache of the hub, into the head's; and stages find it there too.
#[test]
fn the_hubs_cache_of_a_worker_is_looked_at() {
    let cluster = Cluster::without_model(&["rig2", "rig3"], &[]);
    let (head, rig2, rig3) = (&cluster.head, &cluster.workers[0].0, &cluster.workers[1].0);
    let names =
        ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    let folder = data("tiny/llama-linear-rope");
    let files: Vec<(&str, PathBuf)> = names.iter().map(|name| (*name, folder.join(name))).collect();
    let files: Vec<(&str, PathBuf)> = files.into_iter().filter(|(_, file)| file.is_file()).collect();
    put_into_hub(rig2, "tiny/llama", &files);
    put_into_hub(rig3, "tiny/gguf", &[("README.md", data("README.md")), ("q4/m-Q4_K_M.gguf", data(GGUF))]);

    let mut offline = head.program(&["pull", "tiny/llama", "--json"]);
    let pulled = offline.env("HF_HUB_OFFLINE", "1").output().expect("it starts");
    let pulled: Value = serde_json::from_slice(&pulled.stdout).expect("JSON");
    let hub = head.home().join("cache/huggingface/hub");
    let snapshot = hub.join("models--tiny--llama/snapshots").join(COMMIT);
    assert_eq!((&pulled["from"], path(&pulled)), (&"rig2".into(), snapshot.clone()));
    assert_eq!(
        contents(&snapshot),
        contents(&rig2.home().join("cache/huggingface/hub/models--tiny--llama/snapshots").join(COMMIT))
    );
    // Nobody listens there: as good as no network.
    let mut unreachable = head.program(&["pull", "tiny/gguf", "--json"]);
    let pulled = unreachable.env("HF_ENDPOINT", "http://127.0.0.1:9").output().expect("it starts");
    let pulled: Value = serde_json::from_slice(&pulled.stdout).expect("JSON");
    let file = hub.join("models--tiny--gguf/snapshots").join(COMMIT).join("q4/m-Q4_K_M.gguf");
    assert_eq!((&pulled["from"], path(&pulled)), (&"rig3".into(), file.clone()));
    assert_eq!(std::fs::read(&file).unwrap(), std::fs::read(data(GGUF)).unwrap());
    let mut nobody = head.program(&["pull", "tiny/other", "--json"]);
    let told = nobody.env("HF_HUB_OFFLINE", "1").output().expect("it starts");
    assert_eq!(told.status.code(), Some(4));
    let told = String::from_utf8_lossy(&told.stderr);
    assert!(told.contains("HF_HUB_OFFLINE") && told.contains("no worker has it: worker rig2 has none"), "{told}");

    // Its worker finds both in its cache of the hub, by what is in them: nothing crosses the network.
    for (name, worker) in [("tiny/llama", "rig2"), ("tiny/gguf", "rig3")] {
        let alone = head.object(&asked(name));
        let spread =
            [&asked(name)[..2], &["--workers", worker, "--raw", "-n", "4", "--activations", "f32"], &asked(name)[9..]]
                .concat();
        let found = head.object(&spread);
        assert_eq!(found["tokens"], alone["tokens"]);
        let stage = &found["stages"][0];
        assert_eq!((&stage["network_bytes"], &stage["cache_bytes"]), (&0.into(), &0.into()), "{stage}");
        assert!(stage["file_bytes"].as_u64() > Some(0), "{stage}");
    }
}

/// Bytes of a model's largest file that have come.
fn part(machine: &Machine) -> u64 {
    let entries = std::fs::read_dir(machine.models().join(".pp-run-pull")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).max().unwrap_or(0)
}

/// Ctrl-C, and a worker that is killed, each in mid-transfer: what came stays and is gone on with, and nothing has its name
/// before all of it is there.
#[test]
fn a_model_that_breaks_off_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    large(folder.path());
    let is_seen = (0..10).any(|_| break_off_twice(folder.path()).is_some());
    assert!(is_seen, "no transfer of ten was slow enough to be broken off");
}

/// Nothing where a transfer was too fast.
fn break_off_twice(model: &Path) -> Option<()> {
    let mut cluster = Cluster::without_model(&["rig2"], &[]);
    std::os::unix::fs::symlink(model, cluster.workers[0].0.models().join("large")).unwrap();
    let whole = std::fs::metadata(model.join("model.safetensors")).expect("weights").len();
    let address = cluster.head.address_of("rig2");
    let is_whole = |head: &Machine| part(head) == whole || head.models().join("large").exists();
    let comes = |head: &Machine, before: u64| {
        until("a part", || (is_whole(head) || part(head) > before + (1 << 20)).then_some(()));
        (!is_whole(head)).then_some(())
    };
    let arguments = ["pull", "large", "--from", "rig2", "--json"];

    let head = Running::start(&mut cluster.head.program(&arguments));
    comes(&cluster.head, 0)?;
    head.signal("INT");
    let (code, said) = head.end();
    if is_whole(&cluster.head) {
        return None;
    }
    assert_eq!(code, Some(130), "{said}");
    let first = part(&cluster.head);

    let head = Running::start(&mut cluster.head.program(&arguments));
    comes(&cluster.head, first)?;
    let (machine, worker) = cluster.workers.pop().expect("rig2");
    worker.0.signal("KILL");
    drop(worker);
    let (code, said) = head.end();
    if is_whole(&cluster.head) {
        return None;
    }
    assert!(code == Some(5) && said.contains("rig2") && said.contains("what has come is kept"), "{said}");
    let second = part(&cluster.head);
    assert!(second > first && second < whole, "{first} {second} {whole}");

    let mut worker = machine.worker("rig2", Some(&address), &[], &[]);
    worker.ready();
    let mut last = cluster.head.program(&arguments);
    let last = Running::start(last.env("PP_LOG", "pp_cli=info").env("NO_COLOR", "1"));
    let (code, said) = last.end();
    assert_eq!(code, Some(0), "{said}");
    let sides =
        std::fs::read_dir(model).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>() - whole;
    let received = said.split("received=").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    let received = received.unwrap_or_else(|| panic!("{said}"));
    assert!(
        (whole - second..=whole - second + sides).contains(&received),
        "{received} of {whole}, {second} were there"
    );
    let found = std::fs::read(cluster.head.models().join("large/model.safetensors")).expect("it has come");
    assert!(found == std::fs::read(model.join("model.safetensors")).unwrap());
    Some(())
}

/// A disk that fills up: what came is kept under no name that it is not, and gone on with once there is room.
#[test]
fn a_full_disk_is_told_and_gone_on_with_once_there_is_room() {
    let cluster = Cluster::without_model(&["rig2"], &[]);
    let (head, rig2) = (&cluster.head, &cluster.workers[0].0);
    rig2.take_model(FOLDER, "model");
    let files: Vec<(String, Vec<u8>)> =
        contents(&data(FOLDER)).into_iter().filter(|(name, _)| !name.starts_with("golden")).collect();
    let whole: u64 = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
    let blocks: u64 = files.iter().map(|(_, bytes)| (bytes.len() as u64).next_multiple_of(BLOCK)).sum();
    // Its bytes fit, and the blocks that they take do not.
    let size = whole.next_multiple_of(BLOCK);
    assert!(size < blocks, "{size} {blocks}");
    let Some(disk) = Disk::new(&head.models(), size, "a_full_disk_is_told_and_gone_on_with_once_there_is_room") else {
        return;
    };
    let pull = |more: &[&str]| {
        let mut command = head.program(&[&["pull", "model", "--json"], more].concat());
        disk.enter(command.env("PP_LOG", "pp_cli=info").env("NO_COLOR", "1")).output().expect("it starts")
    };
    let output = pull(&[]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("no room for ") && told.contains(".pp-run-pull has "), "{told}");
    let there = unfinished(&disk.folder().join(".pp-run-pull"));
    assert!(there > 0 && there < whole, "{there} of {whole}");
    let needed = format!("more are needed ({} bytes)", whole - there);
    assert!(told.contains(&needed), "{needed}: {told}");
    assert!(!disk.folder().join("model").exists());

    disk.resize(2 * blocks);
    let output = pull(&[]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    assert!(told.contains(&format!("received={} ", whole - there)), "{} of {whole}: {told}", whole - there);
    assert_eq!(contents(&disk.folder().join("model")), files);
    assert!(!disk.folder().join(".pp-run-pull").exists());
}

/// Blocks of a tmpfs.
const BLOCK: u64 = 4096;

/// Bytes in a folder of files that are called by their digests: those without the ending of what is not whole are what
/// their names say.
fn unfinished(folder: &Path) -> u64 {
    let found = contents(folder);
    for (name, bytes) in found.iter().filter(|(name, _)| !name.ends_with(".part")) {
        assert_eq!(blake3::hash(bytes).to_string(), *name);
    }
    found.iter().map(|(_, bytes)| bytes.len() as u64).sum()
}

/// Bytes of the blocks that the files of a folder take.
fn blocks(folder: &Path) -> u64 {
    contents(folder).iter().map(|(_, bytes)| (bytes.len() as u64).next_multiple_of(BLOCK)).sum()
}

/// The same for the tensors of a worker's stages.
#[test]
fn a_full_disk_of_a_worker_is_told_with_the_split_that_would_fit() {
    let test = "a_full_disk_of_a_worker_is_told_with_the_split_that_would_fit";
    let (head, machine) = (Machine::new(), Machine::new());
    let m = data("tiny/llama-linear-rope").to_str().expect("a path in UTF-8").to_owned();
    let usual = ["-m", &m, "--device", "reference", "--workers", "rig2"];
    let Some(disk) = Disk::new(&machine.tensors(), 1 << 20, test) else { return };
    head.object(&["cluster", "init"]);
    let arguments = ["worker", "--json", "--name", "rig2", "--listen", "127.0.0.1:0", "--device", "reference"];
    let mut worker = Worker(Running::start(&mut disk.enter(&machine.program(&arguments))));
    let invitation = worker.invitation();
    head.object(&invitation.iter().map(String::as_str).collect::<Vec<_>>());
    worker.ready();
    let bytes = |split: &str, key: &str, verb: &[&str]| {
        let found = head.object(&[verb, &usual[..], &["--split", split]].concat());
        found["stages"][1][key].as_u64().unwrap_or_else(|| panic!("{key}: {found}"))
    };
    let wanted = bytes("1,2", "file_bytes", &["plan"]);
    let run = |split| [&usual[..], &["--split", split, "--raw", "-n", "2", "Of run"]].concat();

    disk.resize((wanted - 1) / BLOCK * BLOCK);
    let told = head.refused(&run("1,2"), 5);
    assert!(told.contains("what would fit: --split 2,1; or"), "{told}");
    assert!(
        told.contains(&format!("({wanted} bytes), and its tensor cache at {}", machine.tensors().display())),
        "{told}"
    );

    // Now the bytes fit, and their blocks do not: the disk is full in the midst of it.
    disk.resize(wanted.next_multiple_of(BLOCK));
    let told = head.refused(&run("1,2"), 5);
    let there = unfinished(&disk.folder());
    assert!(there > 0 && there < wanted, "{there} of {wanted}");
    assert!(told.contains("not enough room on rig2") && told.contains(&format!("({wanted} bytes)")), "{told}");
    let free = wanted.next_multiple_of(BLOCK) - blocks(&disk.folder());
    assert!(told.contains(&format!("({} bytes)", there + free)), "{there} {free}: {told}");
    assert!(told.contains("what would fit: --split 2,1; or"), "{told}");

    disk.resize(1 << 20);
    let found = head.object(&run("1,2"));
    let stage = &found["stages"][1];
    assert_eq!(stage["network_bytes"], wanted - there, "{stage}");
    assert_eq!(stage["cache_bytes"], there, "{stage}");
}
