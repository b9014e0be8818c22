//! A file read back is the trace that was written; other files are errors that say what and where.

use proptest::prelude::*;
use serde_json::Value;

use super::super::simulated::{Setup, ring, sample};
use super::super::{RING, StageTrace};
use super::*;

fn small() -> Trace {
    let mut setup = Setup::equal(3, 1_234_567);
    setup.hops = vec![500, 70_001, 90_002, 10_003];
    setup.head = (1_500, 40_000);
    let mut trace = setup.run(&ring(2, 4, 3));
    trace.stages[1].device = "a \"card\" <&> ☃".to_owned();
    trace.dropped = 7;
    trace.shares = vec![Share { capacity: 2.0, stages: vec![(0, 1.5), (2, 0.1)] }];
    trace
}

fn written(trace: &Trace) -> Vec<u8> {
    let mut bytes = Vec::new();
    write(trace, &mut bytes).expect("room in memory");
    bytes
}

fn events(trace: &Trace) -> Vec<Value> {
    let file: Value = serde_json::from_slice(&written(trace)).expect("JSON");
    file["traceEvents"].as_array().expect("a list").clone()
}

#[test]
fn a_file_read_back_is_the_trace() {
    for trace in [small(), Trace::default(), Trace { stages: vec![StageTrace::default(); 2], ..Trace::default() }] {
        assert_eq!(read(&written(&trace)[..]).expect("ours"), trace);
    }
}

/// With `PP_WRITE_SAMPLE` set it makes the file.
#[test]
fn the_sample_is_what_the_simulation_gives() {
    let path = format!("{}/../tests/data/trace/four-stages.json", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("PP_WRITE_SAMPLE").is_some() {
        std::fs::write(&path, written(&sample())).expect("writable");
    }
    let file = std::fs::read(&path).expect("it is there");
    assert_eq!(read(&file[..]).expect("ours"), sample());
    assert!(file == written(&sample()), "PP_WRITE_SAMPLE=1 cargo test -p pp-engine sample makes it again");
}

#[test]
fn viewers_find_tracks_bars_and_arrows() {
    let events = events(&small());
    let of = |ph: &str, cat: Option<&str>| -> Vec<&Value> {
        let wanted = |event: &&Value| event["ph"] == ph && cat.is_none_or(|cat| event["cat"] == cat);
        events.iter().filter(wanted).collect()
    };
    let tracks: Vec<&str> = of("M", None).iter().filter_map(|event| event["args"]["name"].as_str()).collect();
    assert_eq!(tracks.len(), 1 + 2 + 6);
    assert!(tracks.contains(&"stage 1  layers 8-15  a \"card\" <&> ☃") && tracks.contains(&"stage 2 idle"));
    let bars = of("X", Some("stage"));
    assert_eq!(bars.len(), 3 * 8);
    assert_eq!((&bars[0]["dur"], &bars[0]["ts"]), (&1234.567.into(), &2.0.into()), "microseconds");
    assert!(of("X", Some("idle")).iter().any(|event| event["name"] == "starved"));
    assert_eq!(of("X", Some("draw")).len(), 8);
    let (begins, ends) = (of("s", Some("hop")), of("f", Some("hop")));
    assert_eq!((begins.len(), ends.len()), (8 * 4, 8 * 4), "every hop, the one to the head among them");
    let inside = |event: &Value| {
        let at = event["ts"].as_f64().expect("a time");
        let around = |bar: &&Value| {
            let (from, long) = (bar["ts"].as_f64().expect("a time"), bar["dur"].as_f64().expect("a time"));
            bar["tid"] == event["tid"] && from <= at && at <= from + long
        };
        of("X", None).iter().any(around)
    };
    for (begin, end) in begins.iter().zip(&ends) {
        assert_eq!(begin["id"], end["id"]);
        assert_eq!(end["bp"], "e");
        assert!(begin["ts"].as_f64() <= end["ts"].as_f64());
        assert!(inside(begin) && inside(end), "{begin} {end}");
    }
    let mut ids: Vec<u64> = begins.iter().filter_map(|event| event["id"].as_u64()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), begins.len());
}

#[test]
fn arrows_leave_out_what_was_forgotten() {
    let mut trace = small();
    trace.stages[1].spans.remove(3);
    trace.head.remove(0);
    let arrows = events(&trace).iter().filter(|event| event["ph"] == "s").count();
    assert_eq!(arrows, 7 * 4 - 2);
}

#[track_caller]
fn check(file: &str, expected: &str) {
    let error = read(file.as_bytes()).expect_err("refused").to_string();
    assert_eq!(error, expected, "{file}");
}

#[test]
fn other_files_are_refused_with_what_and_where() {
    check("", "is not the JSON of a trace: line 1, column 0: EOF while parsing a value");
    check("\u{1}\u{2}binary", "is not the JSON of a trace: line 1, column 1: expected value");
    check(
        "3",
        "is not a trace that pp-run wrote: invalid type: integer `3`, expected an object with `otherData` and `traceEvents`",
    );
    check(
        "[{\"ph\":\"X\"}]",
        "is not a trace that pp-run wrote: invalid type: sequence, expected an object with `otherData` and `traceEvents`",
    );
    check("{}", "is not a trace that pp-run wrote: it has no `otherData`");
    check(
        "{\"traceEvents\":[]}",
        "is not a trace that pp-run wrote: `traceEvents` comes without `otherData` before it",
    );
    check(
        "{\"otherData\":{\"version\":\"x\"}}",
        "is not a trace that pp-run wrote: invalid type: string \"x\", expected u64",
    );
    check("{\"otherData\":{}}", "is not a trace that pp-run wrote: missing field `format`");
    let header = |format: &str, version: u64, stages: usize| {
        let stages = vec![r#"{"device":"","layers":[0,1]}"#; stages].join(",");
        format!(
            r#"{{"otherData":{{"format":"{format}","version":{version},"dropped":0,"stages":[{stages}]}},"traceEvents":["#
        )
    };
    let file = |events: &str| format!("{}\n{events}\n]}}", header(FORMAT, 1, 2));
    check(&header("other", 1, 1), "is not a trace that pp-run wrote: `otherData.format` is not `pp-run trace`");
    check(&header(FORMAT, 2, 1), "is a trace of version 2, and this program reads version 1");
    check(&header(FORMAT, 1, 257), "has more than 256 stages");
    check(&header(FORMAT, 1, 2), "is not the JSON of a trace: line 1, column 147: EOF while parsing a list");
    for share in
        [r#"{"capacity":2,"stages":[[2,1]]}"#, r#"{"capacity":0,"stages":[]}"#, r#"{"capacity":1,"stages":[[0,-1]]}"#]
    {
        let header = header(FORMAT, 1, 2).replace("},\"traceEvents", &format!(",\"shares\":[{share}]}},\"traceEvents"));
        check(&header, "is not a trace that pp-run wrote: `otherData.shares` is not about its stages");
    }
    check(
        &file(r#"{"cat":"stage","args":{"stage":0,"step":1}}"#),
        "event 1 of `traceEvents`, counted from 1, has no `args.group`",
    );
    check(&file("{},\n{\"cat\":\"head\"}"), "event 2 of `traceEvents`, counted from 1, has no `args.step`");
    let full = r#"{"cat":"stage","args":{"stage":2,"step":1,"group":0,"tokens":1,"sequences":1,"arrived":1,"taken":1,"started":1,"finished":1,"send_started":1,"sent":1}}"#;
    check(&file(full), "event 1 of `traceEvents`, counted from 1, is of stage 2, and there are 2 stages");
    check(
        &file(&full.replace("\"sent\":1", "\"sent\":-1")),
        "is not the JSON of a trace: line 2, column 151: invalid value: integer `-1`, expected u64",
    );
    check(&format!("{} x", file("")), "is not the JSON of a trace: line 3, column 4: trailing characters");
}

#[test]
fn more_than_a_ring_holds_is_refused() {
    let mut trace = Trace { stages: vec![StageTrace::default()], ..Trace::default() };
    trace.stages[0].spans = vec![StageSpan::default(); RING];
    assert_eq!(read(&written(&trace)[..]).expect("as many as a ring holds").stages[0].spans.len(), RING);
    trace.stages[0].spans.push(StageSpan::default());
    let error = read(&written(&trace)[..]).expect_err("refused").to_string();
    assert!(error.ends_with("has more than 65536 micro-batches of one stage"), "{error}");
}

#[test]
fn a_reader_that_fails_says_so() {
    struct Broken;
    impl io::Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is gone"))
        }
    }
    let error = read(Broken).expect_err("refused").to_string();
    assert_eq!(error, "cannot be read: the disk is gone");
}

proptest! {
    #[test]
    fn any_records_come_back(
        stamps in prop::collection::vec(prop::array::uniform6(any::<u64>()), 0..20), step in any::<u64>(), group in any::<u32>(),
        device in ".{0,20}", layers in any::<(usize, usize)>(), dropped in any::<u64>(), state in 0usize..4, own_clock in any::<bool>(),
    ) {
        use HeadState::*;
        let span = |[arrived, taken, started, finished, send_started, sent]: [u64; 6]| StageSpan {
            step, group, tokens: group, sequences: 1, arrived, taken, started, finished, send_started, sent,
        };
        let head = |[formed, sent, answered, sampled, ..]: [u64; 6]| HeadSpan { step, group, prefill_tokens: 1, decode_tokens: group, formed, sent, answered, sampled };
        let interval = |[from, to, ..]: [u64; 6]| HeadInterval { state: [Working, Waiting, KvWait, Idle][state], from, to };
        let timestamps = if own_clock { Timestamps::Device } else { Timestamps::Host };
        let trace = Trace {
            stages: vec![StageTrace { device, layers, timestamps, spans: stamps.iter().copied().map(span).collect() }],
            head: stamps.iter().copied().map(head).collect(),
            states: stamps.iter().copied().map(interval).collect(),
            dropped,
            shares: Vec::new(),
        };
        prop_assert_eq!(read(&written(&trace)[..]).expect("ours"), trace);
    }

    #[test]
    fn changed_bytes_are_a_trace_or_an_error(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0usize..3), 1..5), cut in any::<Option<prop::sample::Index>>(),
    ) {
        let mut bytes = written(&small());
        for (at, byte, how) in changes {
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                _ => { bytes.remove(at); }
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(trace) = read(&bytes[..]) {
            causes(&trace);
        }
    }

    #[test]
    fn any_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes[..]).is_err());
    }
}
