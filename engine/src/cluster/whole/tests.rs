use pp_transport::local::{LocalPort, pair};

use super::*;
use crate::cluster::weights::decode_ask;

fn bytes(seed: u8, size: usize) -> Vec<u8> {
    (0..size).map(|at| (at as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

fn inventory(files: &[(&str, Vec<u8>)]) -> Inventory {
    let item = |(name, bytes): &(&str, Vec<u8>)| Item {
        name: (*name).to_owned(),
        bytes: bytes.len() as u64,
        digest: blake3::hash(bytes).into(),
    };
    let files: Vec<Item> = files.iter().map(item).collect();
    Inventory::new(None, String::new(), files)
}

fn model() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("config.json", bytes(1, 700)),
        ("empty.json", Vec::new()),
        ("model.safetensors", bytes(2, 3 * PIECE_BYTES_MAX + 5)),
        ("same.json", bytes(1, 700)),
    ]
}

/// What a source does.
#[derive(Clone, Copy, PartialEq)]
enum Habit {
    Honest,
    /// Is gone after so many pieces.
    Leaves(usize),
    /// Sends a wrong byte.
    Lies,
}

fn source(files: Vec<(&'static str, Vec<u8>)>, habit: Habit) -> LocalPort {
    let (here, mut there) = pair(CREDITS as usize);
    std::thread::spawn(move || {
        let mut pieces = 0;
        while let Ok(arrival) = there.receive(Duration::from_secs(60)) {
            if habit == Habit::Leaves(pieces) {
                return;
            }
            let ask = decode_ask(&arrival.frame).unwrap();
            let mut bytes = files[ask.tensor as usize].1[ask.offset as usize..][..ask.bytes as usize].to_vec();
            if habit == Habit::Lies {
                bytes[0] ^= 1;
            }
            pieces += 1;
            if there.send(encode_reply(&Reply::Piece(ask), &bytes)).is_err() {
                return;
            }
        }
    });
    here
}

struct Place {
    _dir: tempfile::TempDir,
    folder: TensorCache,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    let folder = TensorCache::new(dir.path().join("staging"), u64::MAX);
    Place { _dir: dir, folder }
}

fn get(place: &Place, habit: Habit) -> Result<u64, FetchError> {
    fetch(&inventory(&model()), &mut source(model(), habit), &place.folder, &HashSet::new(), &mut |_| true)
}

#[test]
fn a_model_comes_whole_and_the_same_file_once() {
    let (place, mut last) = (place(), 0);
    let (wanted, mut port) = (inventory(&model()), source(model(), Habit::Honest));
    let mut told = |at| {
        assert!(at >= last, "it never falls");
        last = at;
        true
    };
    let came = fetch(&wanted, &mut port, &place.folder, &HashSet::new(), &mut told).unwrap();
    assert_eq!((came, last), (3 * PIECE_BYTES_MAX as u64 + 705, wanted.bytes()));
    for (item, (name, bytes)) in wanted.files.iter().zip(model()) {
        assert_eq!(std::fs::read(place.folder.path(&item.digest)).unwrap(), bytes, "{name}");
    }
    assert_eq!(get(&place, Habit::Leaves(0)).unwrap(), 0, "a second time nothing is asked for");
}

#[test]
fn what_breaks_off_goes_on_where_it_was() {
    let place = place();
    let error = get(&place, Habit::Leaves(3)).unwrap_err().to_string();
    assert!(error.starts_with("model.safetensors does not come"), "{error}");
    let large = &inventory(&model()).files[2];
    let there = place.folder.there_bytes(&large.digest);
    assert_eq!(there, 2 * PIECE_BYTES_MAX as u64, "of three pieces the first was another file's");
    assert!(!place.folder.has(&large.digest, large.bytes), "it has no name yet");
    assert_eq!(get(&place, Habit::Honest).unwrap(), large.bytes - there);
}

#[test]
fn what_is_not_what_was_announced_gets_no_name() {
    let place = place();
    let error = get(&place, Habit::Lies).unwrap_err();
    assert!(matches!(&error, FetchError::Damaged { file } if file == "config.json"), "{error}");
    assert_eq!(std::fs::read_dir(place.folder.folder()).unwrap().count(), 0);
    // What lay there is nobody's fault: it comes again, whole.
    let large = &inventory(&model()).files[2];
    let wrong = place.folder.folder().join(format!("{}.part", large.digest));
    std::fs::write(&wrong, bytes(9, 1000)).unwrap();
    let came = get(&place, Habit::Honest).unwrap();
    assert_eq!(came, 700 + (large.bytes - 1000) + large.bytes);
}

#[test]
fn what_is_in_its_place_already_does_not_come() {
    let (place, wanted) = (place(), inventory(&model()));
    let there = HashSet::from([wanted.files[2].digest]);
    let mut at = 0;
    let mut told = |bytes| {
        at = bytes;
        true
    };
    let came = fetch(&wanted, &mut source(model(), Habit::Honest), &place.folder, &there, &mut told).unwrap();
    assert_eq!((came, at), (700, wanted.bytes()));
    assert!(!place.folder.has(&wanted.files[2].digest, wanted.files[2].bytes));
}

#[test]
fn whoever_does_not_want_it_any_more_is_heard() {
    let (place, wanted) = (place(), inventory(&model()));
    let stop = fetch(&wanted, &mut source(model(), Habit::Honest), &place.folder, &HashSet::new(), &mut |at| at < 1000);
    assert!(matches!(stop, Err(FetchError::Cancelled)));
}

#[test]
fn a_disk_that_is_too_small_is_known_before_anything_comes() {
    let place = place();
    let mut wanted = inventory(&model());
    wanted.files[2].bytes = 1 << 60;
    let error = fetch(&wanted, &mut source(model(), Habit::Leaves(0)), &place.folder, &HashSet::new(), &mut |_| true)
        .unwrap_err();
    let FetchError::NoRoom { file, needed, free, .. } = error else { panic!("{error}") };
    assert_eq!((file.as_str(), needed), ("config.json", (1 << 60) + 700));
    assert!(free > 0 && free < needed);
}

#[test]
fn names_that_lead_elsewhere_and_other_models_are_refused() {
    let refused = |change: &dyn Fn(&mut Inventory), word: &str| {
        let mut wanted = inventory(&model());
        assert_eq!(wanted.check(), Ok(()));
        change(&mut wanted);
        if word != "do not make" {
            wanted.model = wanted.digest();
        }
        let error = wanted.check().unwrap_err();
        assert!(error.contains(word), "{error}");
    };
    for name in ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\\b", "a\0b"] {
        refused(&|wanted| wanted.files[0].name = name.to_owned(), "is no name");
        refused(&|wanted| wanted.commit = Some(name.to_owned()), "is no name");
        if !["", "a/b"].contains(&name) {
            refused(&|wanted| wanted.folder = name.to_owned(), "is no name");
        }
    }
    refused(&|wanted| wanted.files[1].name = "config.json".to_owned(), "same name");
    refused(&|wanted| wanted.files.clear(), "0 files");
    refused(&|wanted| wanted.files = vec![wanted.files[0].clone(); FILES_MAX + 1], "513 files");
    refused(&|wanted| wanted.files[0].digest = Digest([0; 32]), "do not make");
}

#[test]
fn only_pieces_of_the_files_are_given() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, bytes(3, 100)).unwrap();
    let files = [(File::open(&path).unwrap(), 100)];
    let ask = |tensor, offset, bytes| decode_reply(&piece(&files, Ask { tensor, offset, bytes })).unwrap();
    let (reply, found) = ask(0, 60, 40);
    assert_eq!((reply, &found[..]), (Reply::Piece(Ask { tensor: 0, offset: 60, bytes: 40 }), &bytes(3, 100)[60..]));
    for (tensor, offset, bytes) in
        [(1, 0, 1), (0, 60, 41), (0, 100, 1), (0, u64::MAX, 1), (0, 0, 0), (0, 0, u32::MAX), (0, 1 << 63, 8)]
    {
        assert_eq!(ask(tensor, offset, bytes).0, Reply::Lacks(tensor));
    }
    std::fs::write(&path, "short").unwrap();
    assert_eq!(ask(0, 60, 40).0, Reply::Lacks(0), "it was cut");
}
