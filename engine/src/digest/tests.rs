use std::fs::FileTimes;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use super::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap()
}

/// A copy of a model of the test data.
fn copy(name: &str, to: &Path) {
    let from = data(name);
    if !from.is_dir() {
        std::fs::copy(from, to).unwrap();
        return;
    }
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn digest(digests: &mut Digests, path: &Path) -> Digest {
    digests.of(&open(path), &mut |_, _| true).unwrap()
}

/// Replaces a file's last byte, and sets its time.
fn change(path: &Path, time: SystemTime) {
    let mut bytes = std::fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
    File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache/digests.json");
    (folder, cache)
}

#[test]
fn a_file_is_its_bytes_and_several_files_are_their_list() {
    let mut digests = Digests::new(None);
    let path = data("tiny-gguf/llama-q4_0.gguf");
    assert_eq!(digest(&mut digests, &path), blake3::hash(&std::fs::read(&path).unwrap()).into());
    let path = data("tiny/llama-sharded");
    let mut names: Vec<String> = std::fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| SIDE_FILES.contains(&name.as_str()) || name.ends_with(".safetensors"))
        .collect();
    names.sort();
    assert!(names.len() >= 6, "{names:?}");
    let line = |name: &String| {
        let hash = blake3::hash(&std::fs::read(path.join(name)).unwrap());
        format!("{}  {name}\n", hash.to_hex())
    };
    let list: String = names.iter().map(line).collect();
    assert_eq!(digest(&mut digests, &path), blake3::hash(list.as_bytes()).into());
}

#[test]
fn nothing_is_read_twice_until_it_changes() {
    let (folder, cache) = folder();
    let model = folder.path().join("model");
    copy("tiny/llama-tied", &model);
    let bytes = bytes(&open(&model)).unwrap();
    let mut digests = Digests::new(Some(cache.clone()));
    let first = digest(&mut digests, &model);
    assert_eq!(digests.hashed_bytes(), bytes);
    assert_eq!(digest(&mut digests, &model), first);
    assert_eq!(digests.hashed_bytes(), bytes, "remembered");
    let mut later = Digests::new(Some(cache.clone()));
    assert_eq!(digest(&mut later, &model), first);
    assert_eq!(later.hashed_bytes(), 0, "remembered by the next program");
    // Same size, other content: the time tells.
    let weights = model.join("model.safetensors");
    change(&weights, SystemTime::now() + Duration::from_nanos(10));
    let changed = digest(&mut later, &model);
    assert_ne!(changed, first);
    assert_eq!(later.hashed_bytes(), std::fs::metadata(&weights).unwrap().len(), "only what changed");
    assert_eq!(digest(&mut Digests::new(None), &model), changed);
}

#[test]
fn a_cache_that_is_damaged_is_written_anew() {
    let (folder, cache) = folder();
    let model = folder.path().join("model.gguf");
    copy("tiny-gguf/llama-q4_0.gguf", &model);
    let right = digest(&mut Digests::new(Some(cache.clone())), &model);
    let whole = std::fs::read(&cache).unwrap();
    let digits = format!("{right}");
    let damages: [Vec<u8>; 5] = [
        vec![],
        b"no JSON \xff".to_vec(),
        whole[..whole.len() / 2].to_vec(),
        String::from_utf8(whole.clone()).unwrap().replace("\"version\":1", "\"version\":2").into(),
        String::from_utf8(whole.clone()).unwrap().replace(&digits, &digits[1..]).into(),
    ];
    for damaged in damages {
        assert_ne!(damaged, whole);
        std::fs::write(&cache, &damaged).unwrap();
        let mut digests = Digests::new(Some(cache.clone()));
        assert_eq!(digest(&mut digests, &model), right);
        assert!(digests.hashed_bytes() > 0, "{}", String::from_utf8_lossy(&damaged));
        assert_eq!(std::fs::read(&cache).unwrap(), whole);
    }
    let left: Vec<_> = std::fs::read_dir(cache.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["digests.json"], "nothing unfinished is left");
    // Where it cannot be written the answer is the same.
    let mut nowhere = Digests::new(Some(model.join("digests.json")));
    assert_eq!(digest(&mut nowhere, &model), right);
}

#[test]
fn the_cache_is_bounded_and_shared() {
    let (folder, file) = folder();
    let path = |i: usize| folder.path().join(format!("{i}"));
    let state = State { bytes: 1, modified_ns: 1 };
    // Written at once, in place of ENTRIES_MAX times.
    let entry =
        |i: usize| format!(r#"{{"path":{:?},"bytes":1,"modified_ns":1,"digest":"{}"}}"#, path(i), Digest([0; 32]));
    let entries: Vec<String> = (0..cache::ENTRIES_MAX).map(entry).collect();
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, format!(r#"{{"version":1,"files":[{}]}}"#, entries.join(","))).unwrap();
    let (mut one, mut two) = (Cache::new(Some(file.clone())), Cache::new(Some(file.clone())));
    one.put(&path(cache::ENTRIES_MAX), state, Digest([1; 32]));
    two.put(&path(cache::ENTRIES_MAX + 1), state, Digest([2; 32]));
    let all = Cache::new(Some(file));
    assert_eq!(all.get(&path(cache::ENTRIES_MAX), state), Some(Digest([1; 32])), "what another wrote is kept");
    assert_eq!(all.get(&path(cache::ENTRIES_MAX + 1), state), Some(Digest([2; 32])));
    assert_eq!((all.get(&path(1), state), all.get(&path(2), state)), (None, Some(Digest([0; 32]))), "the oldest go");
    assert_eq!(all.get(&path(2), State { modified_ns: 2, ..state }), None);
    assert_eq!(all.get(&path(2), State { bytes: 2, ..state }), None);
}

#[test]
fn a_model_is_found_by_its_digest_and_only_its_size_is_read() {
    let (folder, _) = folder();
    let models = folder.path().join("models");
    std::fs::create_dir(&models).unwrap();
    copy("tiny-gguf/llama-q4_0.gguf", &models.join("a.gguf"));
    change(&models.join("a.gguf"), SystemTime::now());
    copy("tiny-gguf/llama-q4_0.gguf", &models.join("b.gguf"));
    copy("tiny-gguf/llama-q8_0.gguf", &models.join("c.gguf"));
    copy("tiny-gguf/split-00001-of-00002.gguf", &models.join("split-00001-of-00002.gguf"));
    copy("tiny-gguf/split-00002-of-00002.gguf", &models.join("split-00002-of-00002.gguf"));
    copy("tiny/qwen3", &models.join("qwen"));
    std::fs::write(models.join("broken.gguf"), "GGUF").unwrap();
    for (name, found) in [
        ("tiny-gguf/llama-q4_0.gguf", "b.gguf"),
        ("tiny-gguf/split-00002-of-00002.gguf", "split-00001-of-00002.gguf"),
        ("tiny/qwen3", "qwen"),
    ] {
        let model = open(&data(name));
        let (wanted, bytes) = (digest(&mut Digests::new(None), &data(name)), bytes(&model).unwrap());
        let mut digests = Digests::new(None);
        let folders = [folder.path().join("absent"), models.clone()];
        let mut find = |digest, bytes| digests.find(digest, bytes, &folders, &mut |_, _| true).unwrap();
        assert_eq!(find(wanted, bytes), Some(models.join(found)));
        let same_size = if found == "b.gguf" { 2 } else { 1 };
        assert_eq!(find(wanted, bytes + 1), None);
        assert_eq!(digests.hashed_bytes(), same_size * bytes, "{name}: nothing else was read");
        assert_eq!(digests.find(Digest([0; 32]), bytes, &folders, &mut |_, _| true).unwrap(), None);
    }
}

#[test]
fn hashing_can_be_stopped() {
    let model = open(&data("tiny/llama-tied"));
    let mut seen = (0, 0);
    let all = Digests::new(None).of(&model, &mut |done, total| {
        seen = (done, total);
        true
    });
    assert!(all.is_ok() && seen.0 == seen.1 && seen.1 == bytes(&model).unwrap(), "{seen:?}");
    let stopped = Digests::new(None).of(&model, &mut |_, _| false);
    assert!(matches!(stopped, Err(DigestError::Cancelled)));
}

#[test]
fn digests_are_read_as_they_are_written() {
    let one = Digest(std::array::from_fn(|i| i as u8));
    assert_eq!(one.to_string().parse(), Ok(one));
    assert_eq!(one.short(), "000102030405");
    assert_eq!(serde_json::from_str::<Digest>(&serde_json::to_string(&one).unwrap()).unwrap(), one);
    let bytes = postcard::to_stdvec(&one).unwrap();
    assert_eq!((bytes.len(), postcard::from_bytes::<Digest>(&bytes)), (32, Ok(one)));
    for text in ["", "00", &"g".repeat(64), &"ä".repeat(64)] {
        assert!(text.parse::<Digest>().unwrap_err().to_string().contains("64 hexadecimal digits"));
    }
}
