use std::os::unix::fs::PermissionsExt;
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;

use super::file::JournalFile;
use super::*;

const SOON: Duration = Duration::from_secs(20);

fn asked(name: &str, choices: u32, tokens_max: u64, candidates: Option<u32>) -> Asked {
    Asked {
        name: name.to_owned(),
        body: format!("what {name} wants").into_bytes(),
        model: Digest([7; 32]),
        conditions: "f32".to_owned(),
        prompts: vec![vec![1, 2, 300], vec![70_000]],
        choices,
        tokens_max,
        candidates,
    }
}

fn token(id: u32) -> Token {
    Token { id, logprob: None, candidates: Vec::new() }
}

fn scored(id: u32) -> Token {
    Token { id, logprob: Some(-(id as f32) / 3.0), candidates: vec![(id, -0.25), (9, f32::MIN_POSITIVE)] }
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("journal")
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.path()).unwrap()
    }

    fn open(&self) -> (Journal, Contents) {
        Journal::open(&self.path(), BYTES_MIN).unwrap()
    }
}

/// Asks, and waits until that is on the disk.
fn ask(journal: &Journal, asked: Asked) -> Number {
    let (sender, durable) = mpsc::channel();
    let number = journal.ask(asked, move || sender.send(()).unwrap()).unwrap();
    durable.recv_timeout(SOON).expect("it is written");
    number
}

fn one_by_one() -> Vec<Vec<Record>> {
    let (a, b) = (Number(1), Number(2));
    vec![
        vec![Record::Asked(a, asked("a", 2, 9, None))],
        vec![Record::tokens(a, 0, 0, &[token(5), token(70_000)], false), Record::Asked(b, asked("b", 1, 9, Some(2)))],
        vec![Record::tokens(a, 3, 0, &[token(6)], false)],
        vec![Record::tokens(b, 0, 0, &[scored(7), scored(8)], true), Record::tokens(a, 0, 2, &[token(1)], false)],
        vec![Record::Forgotten(a), Record::Complete(b)],
    ]
}

/// A file with those commits, where each ends, and what is known then.
fn written(place: &Place) -> (Vec<u64>, Vec<BTreeMap<Number, Found>>) {
    let (mut file, _) = file::open(&place.path()).unwrap();
    let mut known = BTreeMap::new();
    let (mut ends, mut states) = (vec![file.bytes()], vec![known.clone()]);
    for commit in one_by_one() {
        let mut bytes = Vec::new();
        for record in commit {
            record.write(&mut bytes);
            assert!(record.apply(&mut known));
        }
        JournalFile::append(&mut file, &bytes).unwrap();
        ends.push(file.bytes());
        states.push(known.clone());
    }
    (ends, states)
}

/// Wherever the program died: what is there are the commits up to then.
#[test]
fn a_journal_that_is_cut_anywhere_is_a_beginning_of_it() {
    let place = Place::new();
    let (ends, states) = written(&place);
    let whole = place.bytes();
    assert_eq!(*ends.last().unwrap(), whole.len() as u64);
    for cut in ends[0] as usize..=whole.len() {
        std::fs::write(place.path(), &whole[..cut]).unwrap();
        let commits = ends.iter().rposition(|end| *end <= cut as u64).unwrap();
        let contents = read(&place.path()).unwrap();
        assert_eq!(contents.requests, states[commits], "cut at {cut}");
        assert_eq!((contents.bytes, contents.torn_bytes), (ends[commits], cut as u64 - ends[commits]));
        // The disk may have made the file longer, and not have written into it.
        let mut unwritten = whole[..cut].to_vec();
        unwritten.resize(whole.len() + 50, 0);
        std::fs::write(place.path(), &unwritten).unwrap();
        // Zeros may be what was to be written.
        let commits = ends.iter().rposition(|end| unwritten[..*end as usize] == whole[..*end as usize]).unwrap();
        let (journal, contents) = place.open();
        assert_eq!((contents.requests, contents.torn_bytes > 0), (states[commits].clone(), true), "cut at {cut}");
        drop(journal);
        assert_eq!(read(&place.path()).unwrap().requests, states[commits], "written anew");
    }
    for cut in 1..ends[0] as usize {
        std::fs::write(place.path(), &whole[..cut]).unwrap();
        assert!(matches!(read(&place.path()), Err(JournalError::NoJournal { .. })), "cut at {cut}");
    }
}

/// A commit that is broken is the last one, or an error that says where; the file stays as it is.
#[test]
fn damage_in_the_middle_is_told_and_at_the_end_it_is_torn() {
    let place = Place::new();
    let (ends, states) = written(&place);
    let whole = place.bytes();
    for at in ends[0] as usize..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        std::fs::write(place.path(), &damaged).unwrap();
        let broken = ends.iter().rposition(|end| *end <= at as u64).unwrap();
        let found = Journal::open(&place.path(), BYTES_MIN).map(|(_, contents)| contents);
        match found {
            Ok(contents) => {
                assert_eq!(broken, ends.len() - 2, "only the last one: byte {at}");
                assert_eq!(contents.requests, states[broken]);
            }
            Err(JournalError::Damaged { offset, next, .. }) => {
                assert_eq!((offset, next), (ends[broken], ends[broken + 1]), "byte {at}");
                assert_eq!(place.bytes(), damaged, "it is left as it is");
            }
            Err(other) => panic!("byte {at}: {other}"),
        }
    }
}

#[test]
fn other_files_are_left_alone() {
    let place = Place::new();
    for (content, is_version) in
        [(&b"{\"line\": 1}\n"[..], false), (b"pp-run journal\n\x02\0\0\0................????????", true)]
    {
        std::fs::write(place.path(), content).unwrap();
        let error = Journal::open(&place.path(), BYTES_MIN).unwrap_err();
        assert_eq!(matches!(error, JournalError::Version { found: 2, known: 1, .. }), is_version, "{error}");
        assert!(is_version || matches!(error, JournalError::NoJournal { .. }), "{error}");
        assert_eq!(place.bytes(), content);
    }
    let folder = Journal::open(place.0.path(), BYTES_MIN).unwrap_err();
    assert!(matches!(folder, JournalError::Io { what: "open", .. }), "{folder}");
    assert!(matches!(Journal::open(Path::new("/dev/null"), BYTES_MIN), Err(JournalError::NoJournal { .. })));
}

#[test]
fn one_program_at_a_time_has_it_and_only_its_owner_reads_it() {
    let place = Place::new();
    let (journal, contents) = place.open();
    assert_eq!(contents, Contents::default());
    assert!(matches!(Journal::open(&place.path(), BYTES_MIN), Err(JournalError::InUse { .. })));
    assert_eq!(std::fs::metadata(place.path()).unwrap().permissions().mode() & 0o777, 0o600);
    drop(journal);
    place.open();
}

/// Through a link the file that it leads to is written anew.
#[test]
fn a_link_stays_one() {
    let place = Place::new();
    let (real, link) = (place.0.path().join("real"), place.path());
    std::fs::write(&real, "").unwrap();
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let (journal, _) = place.open();
    ask(&journal, asked("a", 1, 1, None));
    drop(journal);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(read(&real).unwrap().requests.len(), 1);
}

#[test]
fn what_was_written_is_found_and_what_was_forgotten_is_gone() {
    let place = Place::new();
    let (journal, _) = place.open();
    let a = ask(&journal, asked("a", 2, 10, None));
    let b = ask(&journal, asked("b", 1, 10, Some(2)));
    let c = ask(&journal, asked("c", 1, 10, None));
    journal.tokens(a, 1, 0, &[scored(4)]);
    journal.tokens(b, 0, 0, &[scored(5)]);
    journal.tokens(c, 0, 0, &[token(6)]);
    journal.tokens(b, 0, 1, &[scored(7), scored(8)]);
    journal.complete(b);
    journal.forget(c);
    // What was still under way.
    journal.tokens(c, 0, 1, &[token(6)]);
    journal.forget(c);
    assert_eq!(journal.standing().requests, 2);
    drop(journal);
    let long = place.bytes().len();
    let (journal, contents) = place.open();
    assert!(place.bytes().len() < long, "what was forgotten takes no place");
    let found: Vec<Number> = contents.requests.keys().copied().collect();
    assert_eq!(found, [a, b]);
    let (a, b) = (&contents.requests[&a], &contents.requests[&b]);
    assert_eq!((&a.asked, a.is_complete), (&asked("a", 2, 10, None), false));
    assert_eq!(a.begun(0, 2), [vec![], vec![token(4)]], "scores that nobody asked for are not kept");
    assert_eq!((b.begun(0, 1), b.is_complete), (vec![vec![scored(5), scored(7), scored(8)]], true));
    assert_eq!(ask(&journal, asked("d", 1, 1, None)), c, "numbers go on behind those that are known");
    let again = place.open_again(journal);
    assert_eq!(again.requests.len(), 3);
    assert_eq!(&again.requests[&Number(2)], b, "written anew, it says the same");
}

impl Place {
    fn open_again(&self, journal: Journal) -> Contents {
        drop(journal);
        self.open().1
    }
}

/// Whatever is asked and forgotten: the file keeps to its bound, and loses nothing.
#[test]
fn the_file_is_bounded_and_what_would_not_fit_is_refused() {
    let place = Place::new();
    let (journal, _) = place.open();
    let stays = ask(&journal, asked("stays", 1, 20_000, None));
    let mut told = 0;
    for round in 0..60 {
        let body = vec![b'x'; 60_000];
        let number = ask(&journal, Asked { body, ..asked(&format!("{round}"), 1, 10, None) });
        for _ in 0..100 {
            journal.tokens(stays, 0, told, &[token(70_000 + told as u32)]);
            told += 1;
        }
        journal.forget(number);
        assert!(journal.standing().bytes <= BYTES_MIN);
    }
    let large = asked("large", 1, 100_000, None);
    let refused = journal.ask(large, || panic!("it is not written")).unwrap_err();
    assert!(matches!(refused, Refusal::Full { needed, free, limit } if needed > free && free < limit), "{refused}");
    assert!(matches!(journal.ask(asked("m", u32::MAX, u64::MAX, None), || ()), Err(Refusal::Full { .. })));
    let fits = asked("fits", 1, 40_000, None);
    assert!(matches!(journal.room(&fits), Err(Refusal::Full { .. })));
    journal.complete(stays);
    ask(&journal, fits);
    let contents = place.open_again(journal);
    let expected: Vec<Token> = (0..told).map(|i| token(70_000 + i as u32)).collect();
    assert_eq!(contents.requests[&stays].begun(0, 1), [expected]);
    assert_eq!(contents.requests.len(), 2);
}

#[test]
fn tokens_are_gathered() {
    let place = Place::new();
    let (journal, _) = place.open();
    let number = ask(&journal, asked("a", 1, 2000, None));
    (0..2000).for_each(|i| journal.tokens(number, 0, i, &[token(i as u32)]));
    ask(&journal, asked("b", 1, 1, None));
    assert!(journal.standing().commits < 1000, "{:?}", journal.standing());
    let contents = place.open_again(journal);
    assert_eq!(contents.requests[&number].begun(0, 1)[0].len(), 2000);
}

fn contents_of(bytes: &[u8]) -> Result<Contents, JournalError> {
    let place = Place::new();
    std::fs::write(place.path(), bytes).unwrap();
    read(&place.path())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_are_records_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Some(records) = Record::all(&bytes) {
            let mut known = BTreeMap::new();
            let _ = records.into_iter().all(|record| record.apply(&mut known));
        }
        // Behind a good header they are a commit that is torn, unless they are none at all.
        let place = Place::new();
        place.open();
        let header = place.bytes();
        let contents = contents_of(&[&header[..], &bytes].concat()).unwrap();
        prop_assert_eq!((contents.bytes, contents.torn_bytes), (header.len() as u64, bytes.len() as u64));
        prop_assert!(contents_of(&bytes).is_err() || bytes.is_empty());
    }

    #[test]
    fn records_become_bytes_and_back(
        ids in proptest::collection::vec(any::<u32>(), 0..20),
        logprobs in proptest::collection::vec(proptest::option::of(any::<f32>()), 20),
        name in ".{0,20}",
        body in proptest::collection::vec(any::<u8>(), 0..50),
        number in any::<u64>(),
    ) {
        let tokens: Vec<Token> = ids.iter().zip(&logprobs).map(|(id, logprob)| {
            Token { id: *id, logprob: *logprob, candidates: logprob.iter().map(|p| (*id, *p)).collect() }
        }).collect();
        let number = Number(number);
        let asked = Asked { name, body, prompts: vec![ids], ..Asked::default() };
        let records = [
            Record::Asked(number, asked),
            Record::tokens(number, 3, 4, &tokens, true),
            Record::tokens(number, 3, 4, &tokens, false),
            Record::Complete(number),
            Record::Forgotten(number),
        ];
        let mut bytes = Vec::new();
        records.iter().for_each(|record| record.write(&mut bytes));
        let read = Record::all(&bytes).unwrap();
        // NaN is not itself, but its bytes are.
        let mut again = Vec::new();
        read.iter().for_each(|record| record.write(&mut again));
        prop_assert_eq!(read.len(), records.len());
        prop_assert_eq!(again, bytes);
    }
}
