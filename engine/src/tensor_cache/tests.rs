use std::time::Duration;

use super::*;

const CAP: u64 = 1 << 30;

fn cache() -> (tempfile::TempDir, TensorCache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = TensorCache::new(folder.path().join("tensors"), CAP);
    (folder, cache)
}

/// Bytes that are told from others by `seed`, with their digest.
fn tensor(seed: u8, bytes: usize) -> (Digest, Vec<u8>) {
    let bytes: Vec<u8> = (0..bytes).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    (blake3::hash(&bytes).into(), bytes)
}

fn put(cache: &TensorCache, (digest, bytes): &(Digest, Vec<u8>)) {
    let mut part = cache.part(digest, bytes.len() as u64).unwrap();
    part.write(bytes).unwrap();
    assert!(part.finish().unwrap());
}

fn wanted<'a>(tensors: impl IntoIterator<Item = &'a (Digest, Vec<u8>)>) -> HashMap<Digest, u64> {
    tensors.into_iter().map(|(digest, bytes)| (*digest, bytes.len() as u64)).collect()
}

fn names(cache: &TensorCache) -> Vec<String> {
    let entries = std::fs::read_dir(cache.folder()).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_is_written_whole_is_found_again() {
    let (_folder, cache) = cache();
    let one = tensor(1, 3000);
    assert!(!cache.has(&one.0, 3000) && cache.verified(&one.0, 3000).is_none());
    put(&cache, &one);
    assert!(cache.has(&one.0, 3000) && !cache.has(&one.0, 2999));
    assert_eq!(cache.verified(&one.0, 3000).unwrap()[..], one.1);
    assert_eq!(cache.unverified(&one.0, 3000).unwrap()[..], one.1);
    assert_eq!(names(&cache), [one.0.to_string()], "nothing else is left");
}

#[test]
fn a_file_that_is_damaged_is_deleted_and_never_used() {
    let (_folder, cache) = cache();
    let one = tensor(1, 3000);
    let path = cache.folder().join(one.0.to_string());
    for damage in [&one.1[..2999], &[&one.1[..2999], &[0]].concat(), &[&one.1[..], &[0]].concat(), &[]] {
        put(&cache, &one);
        std::fs::write(&path, damage).unwrap();
        assert!(cache.verified(&one.0, 3000).is_none());
        assert!(!path.exists());
    }
}

#[test]
fn a_part_goes_on_where_it_was() {
    let (_folder, cache) = cache();
    let (digest, bytes) = tensor(1, 3000);
    let mut part = cache.part(&digest, 3000).unwrap();
    assert_eq!((part.at(), part.is_resumed()), (0, false));
    part.write(&bytes[..1000]).unwrap();
    drop(part);
    let mut part = cache.part(&digest, 3000).unwrap();
    assert_eq!((part.at(), part.is_resumed()), (1000, true));
    part.write(&bytes[1000..]).unwrap();
    assert_eq!(part.write(&[0]).unwrap_err().kind(), ErrorKind::InvalidInput, "it has all");
    assert!(part.finish().unwrap());
    assert_eq!(cache.verified(&digest, 3000).unwrap()[..], bytes);
    // Of one that nothing was written to nothing is left.
    drop(cache.part(&tensor(2, 10).0, 10).unwrap());
    assert_eq!(names(&cache), [digest.to_string()]);
}

#[test]
fn a_part_that_turns_out_wrong_is_deleted() {
    let (_folder, cache) = cache();
    let (digest, bytes) = tensor(1, 3000);
    let mut part = cache.part(&digest, 3000).unwrap();
    part.write(&bytes[1..]).unwrap();
    part.write(&[0]).unwrap();
    assert!(!part.finish().unwrap());
    assert!(names(&cache).is_empty());
    // What is longer than the tensor is none of it.
    std::fs::write(cache.folder().join(format!("{digest}.part")), vec![0; 4000]).unwrap();
    assert_eq!(cache.part(&digest, 3000).unwrap().at(), 0);
}

#[test]
fn two_who_write_the_same_tensor_do_not_disturb_each_other() {
    let (_folder, cache) = cache();
    let (digest, bytes) = tensor(1, 3000);
    let mut first = cache.part(&digest, 3000).unwrap();
    first.write(&bytes[..500]).unwrap();
    let mut second = cache.part(&digest, 3000).unwrap();
    assert_eq!(second.at(), 0, "the other's is the other's");
    second.write(&bytes).unwrap();
    assert!(second.finish().unwrap());
    first.write(&bytes[500..]).unwrap();
    assert!(first.finish().unwrap());
    assert_eq!(cache.verified(&digest, 3000).unwrap()[..], bytes);
    assert_eq!(names(&cache), [digest.to_string()]);
    let mut third = cache.part(&digest, 3000).unwrap();
    third.write(&bytes[..500]).unwrap();
    let mut fourth = cache.part(&digest, 3000).unwrap();
    fourth.write(&bytes[..700]).unwrap();
    drop((third, fourth));
    assert_eq!(names(&cache), [digest.to_string(), format!("{digest}.part")], "one is gone on with, the other is not");
}

/// The oldest go first; what is wanted, what somebody writes, and what is not the cache's stays.
#[test]
fn room_is_made_of_what_was_used_longest_ago() {
    let (_folder, cache) = cache();
    let all: Vec<(Digest, Vec<u8>)> = (0..5).map(|seed| tensor(seed, 1000)).collect();
    all.iter().for_each(|one| put(&cache, one));
    let path = |at: usize| cache.folder().join(all[at].0.to_string());
    let start = SystemTime::now() - Duration::from_secs(1000);
    for (at, age) in [(0, 10), (1, 0), (2, 30), (3, 20), (4, 40)] {
        File::options().append(true).open(path(at)).unwrap().set_modified(start + Duration::from_secs(age)).unwrap();
    }
    std::fs::write(cache.folder().join("notes.txt"), vec![0; 5000]).unwrap();
    let (written, _) = tensor(20, 1000);
    let mut part = cache.part(&written, 1000).unwrap();
    part.write(&[0; 100]).unwrap();
    // Seven in all would fit, of which one is only begun: the two oldest of those that are not wanted go.
    let small = TensorCache::new(cache.folder().to_owned(), 5100);
    let new = [tensor(10, 1000), tensor(11, 1000)];
    let wants = wanted(new.iter().chain([&all[1]]));
    small.make_room(&wants).unwrap();
    let left: Vec<bool> = (0..5).map(|at| path(at).exists()).collect();
    assert_eq!(left, [false, true, true, false, true]);
    assert!(cache.folder().join("notes.txt").exists() && part.path.exists());
    // Used again, it is the youngest.
    drop(small.unverified(&all[2].0, 1000).unwrap());
    drop(part);
    let smaller = TensorCache::new(cache.folder().to_owned(), 5050);
    smaller.make_room(&wanted(new.iter().chain([&all[1], &tensor(12, 1000)]))).unwrap();
    assert!(path(2).exists() && !path(4).exists());
    assert!(!cache.folder().join(format!("{written}.part")).exists(), "nobody writes it any more");
}

#[test]
fn what_cannot_fit_is_told_with_both_numbers() {
    let (_folder, cache) = cache();
    let one = tensor(1, 3000);
    put(&cache, &one);
    let small = TensorCache::new(cache.folder().to_owned(), 2999);
    let error = small.make_room(&wanted([&one])).unwrap_err();
    assert!(matches!(error, CacheError::Room { needed: 3000, room: 2999, bound: Bound::Cap }), "{error}");
    let endless = TensorCache::new(cache.folder().to_owned(), u64::MAX);
    let (digest, _) = tensor(2, 1);
    let error = endless.make_room(&HashMap::from([(digest, 1 << 60)])).unwrap_err();
    let CacheError::Room { needed, room, bound: Bound::Disk } = error else { panic!("{error}") };
    assert!(needed == 1 << 60 && room > 0 && room < needed);
}
