use std::path::Path;
use std::sync::atomic::AtomicUsize;

use pp_transport::local::{LocalPort, pair};

use super::*;
use crate::checkpoint::{Checkpoint, DType};
use crate::cluster::weights::{CREDITS, PIECE_BYTES_MAX, Reply, bits, decode_ask, encode_reply};
use crate::manifest::Entry;

const PIECE: usize = PIECE_BYTES_MAX;

/// Tensors of so many bytes, and the manifest that lists them as `t0`, `t1`, …
fn model(sizes: &[usize]) -> (Arc<Manifest>, Vec<Vec<u8>>) {
    let tensor = |(seed, size): (usize, &usize)| -> Vec<u8> {
        (0..*size).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed as u8).collect()
    };
    let tensors: Vec<Vec<u8>> = sizes.iter().enumerate().map(tensor).collect();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny/llama-tied");
    let tiny = Checkpoint::open(&data).unwrap();
    let entry = |(at, bytes): (usize, &Vec<u8>)| Entry {
        name: format!("t{at}"),
        dtype: DType::F32,
        shape: vec![bytes.len() / 4],
        digest: blake3::hash(bytes).into(),
    };
    let manifest = Manifest {
        model: Digest([1; 32]),
        container: tiny.container,
        config: tiny.config.clone(),
        tensors: tensors.iter().enumerate().map(entry).collect(),
        unsupported: Vec::new(),
    };
    (Arc::new(manifest), tensors)
}

/// What a source does wrong.
#[derive(Clone, Copy, PartialEq)]
enum Habit {
    Honest,
    /// Goes away after so many pieces.
    Leaves(usize),
    /// Sends a wrong byte in the last piece of a tensor.
    Lies,
    /// Has nothing.
    Lacks,
    /// Answers something else.
    Confused,
}

/// A source in a thread of its own: its end for the fetcher, and how many bytes it has sent.
fn source(tensors: &[Vec<u8>], habit: Habit) -> (LocalPort, Arc<AtomicUsize>) {
    let (here, mut there) = pair(CREDITS as usize);
    let (tensors, sent) = (tensors.to_vec(), Arc::new(AtomicUsize::new(0)));
    let counts = sent.clone();
    std::thread::spawn(move || {
        let mut pieces = 0;
        while let Ok(arrival) = there.receive(Duration::from_secs(60)) {
            let ask = decode_ask(&arrival.frame).unwrap();
            let tensor = &tensors[ask.tensor as usize];
            let mut bytes = tensor[ask.offset as usize..][..ask.bytes as usize].to_vec();
            let is_last = ask.offset as usize + bytes.len() == tensor.len();
            let reply = match habit {
                Habit::Leaves(after) if pieces == after => return,
                Habit::Lacks => encode_reply(&Reply::Lacks(ask.tensor), &[]),
                Habit::Confused => encode_reply(&Reply::Lacks(ask.tensor + 1), &[]),
                _ => {
                    if habit == Habit::Lies && is_last {
                        *bytes.last_mut().unwrap() ^= 1;
                    }
                    pieces += 1;
                    counts.fetch_add(bytes.len(), Ordering::Relaxed);
                    encode_reply(&Reply::Piece(ask), &bytes)
                }
            };
            if there.send(reply).is_err() {
                return;
            }
        }
    });
    (here, sent)
}

fn offer(name: &str, port: LocalPort, holds: Option<Vec<u8>>) -> Offer {
    Offer { name: name.to_owned(), port: Box::new(port), holds }
}

struct Place {
    _folder: tempfile::TempDir,
    cache: TensorCache,
}

fn place() -> Place {
    let folder = tempfile::tempdir().unwrap();
    let cache = TensorCache::new(folder.path().join("tensors"), 1 << 30);
    Place { _folder: folder, cache }
}

/// Gets all tensors of each stage; where they came from.
fn get(
    place: &Place,
    (manifest, tensors): &(Arc<Manifest>, Vec<Vec<u8>>),
    stages: &[Vec<usize>],
    offers: Vec<Offer>,
) -> Result<Vec<Origins>, SupplyError> {
    let fetcher = Fetcher::new(manifest.clone(), place.cache.clone(), stages)?;
    let threads = fetcher.start(offers).unwrap();
    let outline = Checkpoint::supplied(manifest, "test", None);
    let read = |(stage, wanted): (usize, &Vec<usize>)| {
        let supplier = fetcher.for_stage(stage);
        for at in wanted {
            let info = outline.tensor(&format!("t{at}")).unwrap();
            let map = supplier.tensor(info, &mut |_| true)?;
            assert_eq!(map[..], tensors[*at], "tensor {at}");
        }
        Ok(supplier.origins())
    };
    let found = stages.iter().enumerate().map(read).collect();
    fetcher.stop();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    found
}

fn network(bytes: usize) -> Origins {
    Origins { network_bytes: bytes as u64, ..Origins::default() }
}

fn cached(bytes: usize) -> Origins {
    Origins { cache_bytes: bytes as u64, ..Origins::default() }
}

#[test]
fn what_is_wanted_comes_once_and_then_never_again() {
    let (place, model) = (place(), model(&[400, 3 * PIECE + 40, 800, 1200, 4]));
    // The second stage shares one tensor with the first, and nobody wants the last.
    let stages = [vec![0, 1, 2], vec![3, 1]];
    let (port, sent) = source(&model.1, Habit::Honest);
    let found = get(&place, &model, &stages, vec![offer("head", port, None)]).unwrap();
    let shared = 3 * PIECE + 40;
    assert_eq!(found, [network(1200 + shared), Origins { network_bytes: 1200, ..cached(shared) }]);
    assert_eq!(sent.load(Ordering::Relaxed), 2400 + shared);
    let (port, sent) = source(&model.1, Habit::Honest);
    let found = get(&place, &model, &stages, vec![offer("head", port, None)]).unwrap();
    assert_eq!(found, [cached(1200 + shared), cached(1200 + shared)]);
    assert_eq!(sent.load(Ordering::Relaxed), 0);
    // Nobody need be there for it.
    get(&place, &model, &stages, Vec::new()).unwrap();
}

#[test]
fn tensors_of_equal_content_are_one() {
    let (place, (_, mut tensors)) = (place(), model(&[400, 400]));
    tensors[1] = tensors[0].clone();
    let (manifest, _) = model(&[400, 400]);
    let mut manifest = (*manifest).clone();
    manifest.tensors[1].digest = manifest.tensors[0].digest;
    let (port, sent) = source(&tensors, Habit::Honest);
    let model = (Arc::new(manifest), tensors);
    let found = get(&place, &model, &[vec![0, 1]], vec![offer("head", port, None)]).unwrap();
    assert_eq!(sent.load(Ordering::Relaxed), 400);
    assert_eq!(found[0].network_bytes, 400);
}

#[test]
fn a_damaged_file_of_the_cache_is_fetched_again_and_no_other() {
    let (place, model) = (place(), model(&[400, 2 * PIECE, 800]));
    let stages = [vec![0, 1, 2]];
    get(&place, &model, &stages, vec![offer("head", source(&model.1, Habit::Honest).0, None)]).unwrap();
    let path = place.cache.folder().join(model.0.tensors[1].digest.to_string());
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[PIECE] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let (port, sent) = source(&model.1, Habit::Honest);
    let found = get(&place, &model, &stages, vec![offer("head", port, None)]).unwrap();
    assert_eq!(sent.load(Ordering::Relaxed), 2 * PIECE);
    assert_eq!(found[0], Origins { network_bytes: 2 * PIECE as u64, ..cached(1200) });
}

/// What was received before a source went is not received again, in the same load from another source, and in the next.
#[test]
fn a_transfer_that_breaks_off_goes_on_where_it_was() {
    let model = model(&[9 * PIECE + 4]);
    let all = 9 * PIECE + 4;
    let broken = place();
    let (port, _) = source(&model.1, Habit::Leaves(3));
    let error = get(&broken, &model, &[vec![0]], vec![offer("head", port, None)]).unwrap_err();
    let SupplyError::Failed { message } = &error else { panic!("{error}") };
    assert!(message.contains("t0") && message.contains("head: the neighbour has closed the link"), "{message}");
    let (port, sent) = source(&model.1, Habit::Honest);
    let found = get(&broken, &model, &[vec![0]], vec![offer("head", port, None)]).unwrap();
    assert_eq!(sent.load(Ordering::Relaxed), all - 3 * PIECE);
    assert_eq!(found[0], Origins { network_bytes: (all - 3 * PIECE) as u64, ..cached(3 * PIECE) });

    let (leaves, sent_first) = source(&model.1, Habit::Leaves(3));
    let (stays, sent_then) = source(&model.1, Habit::Honest);
    let found = get(&place(), &model, &[vec![0]], vec![offer("rig2", leaves, None), offer("head", stays, None)]);
    assert_eq!(found.unwrap()[0], network(all));
    let (first, then) = (sent_first.load(Ordering::Relaxed), sent_then.load(Ordering::Relaxed));
    assert_eq!(first + then, all);
}

#[test]
fn a_source_that_lies_is_found_out_and_left_out() {
    let model = model(&[PIECE + 4, 400, 800]);
    let stages = [vec![0, 1, 2]];
    for habit in [Habit::Lies, Habit::Confused] {
        let (bad, good) = (source(&model.1, habit).0, source(&model.1, Habit::Honest).0);
        get(&place(), &model, &stages, vec![offer("rig2", bad, None), offer("head", good, None)]).unwrap();
    }
    let place = place();
    let error = get(&place, &model, &stages, vec![offer("head", source(&model.1, Habit::Lies).0, None)]).unwrap_err();
    let SupplyError::Failed { message } = &error else { panic!("{error}") };
    assert!(message.contains("at last from head") && message.contains("came 2 times"), "{message}");
    assert_eq!(std::fs::read_dir(place.cache.folder()).unwrap().count(), 0, "nothing of it is kept");
}

#[test]
fn a_part_that_was_wrong_before_is_nobodys_fault() {
    let (place, model) = (place(), model(&[2 * PIECE]));
    let mut part = place.cache.part(&model.0.tensors[0].digest, 2 * PIECE as u64).unwrap();
    part.write(&vec![9; PIECE]).unwrap();
    drop(part);
    let (port, sent) = source(&model.1, Habit::Honest);
    get(&place, &model, &[vec![0]], vec![offer("head", port, None)]).unwrap();
    assert_eq!(sent.load(Ordering::Relaxed), 3 * PIECE, "the other half, and then all of it");
}

#[test]
fn several_sources_are_asked_for_what_they_have() {
    let model = model(&[4 * PIECE, 400, 800, 4 * PIECE]);
    let holds = |has: [bool; 4]| Some(bits(has.into_iter()));
    let (first, sent_first) = source(&model.1, Habit::Honest);
    let (second, sent_second) = source(&model.1, Habit::Honest);
    let offers = vec![
        offer("rig2", first, holds([true, true, false, false])),
        offer("head", second, holds([false, false, true, true])),
    ];
    get(&place(), &model, &[vec![0, 1, 2, 3]], offers).unwrap();
    assert_eq!(sent_first.load(Ordering::Relaxed), 4 * PIECE + 400);
    assert_eq!(sent_second.load(Ordering::Relaxed), 4 * PIECE + 800);
    // What one turns out not to have is had of another, or of nobody.
    let (lacks, has) = (source(&model.1, Habit::Lacks).0, source(&model.1, Habit::Honest).0);
    get(&place(), &model, &[vec![0, 1]], vec![offer("rig2", lacks, None), offer("head", has, None)]).unwrap();
    let lacks = source(&model.1, Habit::Lacks).0;
    let error = get(&place(), &model, &[vec![0, 1]], vec![offer("rig2", lacks, None)]).unwrap_err();
    assert!(matches!(&error, SupplyError::Failed { message } if message.contains("nobody")), "{error}");
}

#[test]
fn two_who_share_a_cache_do_not_disturb_each_other() {
    let (place, model) = (place(), model(&[5 * PIECE, 400, 3 * PIECE]));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let port = source(&model.1, Habit::Honest).0;
                get(&place, &model, &[vec![0, 1, 2]], vec![offer("head", port, None)]).unwrap();
            });
        }
    });
    let files = std::fs::read_dir(place.cache.folder()).unwrap();
    assert_eq!(files.count(), 3, "whole tensors, and nothing else");
}

#[test]
fn a_cache_that_cannot_hold_it_says_how_much_was_needed() {
    let (place, model) = (place(), model(&[400, 800]));
    let small = TensorCache::new(place.cache.folder().to_owned(), 1199);
    let error = Fetcher::new(model.0, small, &[vec![0], vec![0, 1]]).unwrap_err();
    let folder = place.cache.folder().display().to_string();
    assert_eq!(error, SupplyError::NoRoom { folder, needed: 1200, room: 1199, bound: Bound::Cap });
}

#[test]
fn whoever_waits_is_let_go() {
    let (place, model) = (place(), model(&[400]));
    let (port, _silent) = pair(CREDITS as usize);
    let fetcher = Fetcher::new(model.0.clone(), place.cache.clone(), &[vec![0]]).unwrap();
    let threads = fetcher.start(vec![offer("head", port, None)]).unwrap();
    let outline = Checkpoint::supplied(&model.0, "test", None);
    let info = outline.tensor("t0").unwrap();
    let supplier = fetcher.for_stage(0);
    let asked = supplier.tensor(info, &mut |_| false).unwrap_err();
    assert_eq!(asked, SupplyError::Cancelled);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| supplier.tensor(info, &mut |_| true).unwrap_err());
        fetcher.stop();
        assert_eq!(waits.join().unwrap(), SupplyError::Cancelled);
    });
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
