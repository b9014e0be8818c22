//! Pictures of traces made by hand.

use pp_engine::trace::{HeadInterval, HeadSpan, HeadState, StageSpan, StageTrace};

use super::picture::Fill;
use super::*;

const MS: Nanos = 1_000_000;

/// Two stages of 10 ms a micro-batch and 5 ms between them; `rounds` tokens of two groups that wait for each other.
fn trace(rounds: u64) -> Trace {
    let mut trace = Trace { stages: vec![StageTrace::default(); 2], ..Trace::default() };
    for (stage, device) in ["a <card> & \"more\" \u{1}\u{1b}[31m", "b"].into_iter().enumerate() {
        (trace.stages[stage].device, trace.stages[stage].layers) = (device.to_owned(), (4 * stage, 4 * stage + 4));
    }
    for step in 0..2 * rounds {
        let (round, group) = (step / 2, step % 2);
        let mut at = (3 + 25 * round + 10 * group) * MS;
        let formed = at;
        for stage in &mut trace.stages {
            stage.spans.push(StageSpan {
                step,
                group: group as u32,
                tokens: 1,
                sequences: 1,
                arrived: at,
                taken: at,
                started: at,
                finished: at + 10 * MS,
                send_started: at + 10 * MS,
                sent: at + 10 * MS,
            });
            at += 15 * MS;
        }
        let answered = at - 5 * MS;
        let group = group as u32;
        let span = HeadSpan {
            step,
            group,
            prefill_tokens: 0,
            decode_tokens: 1,
            formed,
            sent: formed,
            answered,
            sampled: answered,
        };
        trace.head.push(span);
    }
    trace.states = vec![HeadInterval { state: HeadState::Waiting, from: 3 * MS, to: 25 * rounds * MS + 50 * MS }];
    trace
}

fn picture(trace: &Trace) -> Picture<'_> {
    let whole = Window::of(trace);
    Picture::new(trace, whole, whole.from)
}

fn signs(picture: &Picture, stage: usize, columns: usize) -> String {
    picture.row(stage, columns).into_iter().map(Fill::symbol).collect()
}

#[test]
fn cells_show_what_fills_most_of_them() {
    let trace = trace(2);
    let picture = picture(&trace);
    assert_eq!(picture.window.nanos(), 60 * MS);
    assert_eq!(signs(&picture, 0, 12), "0011h0011···");
    assert_eq!(signs(&picture, 1, 12), "···0011h0011");
    assert_eq!(signs(&picture, 0, 4), "0#1·", "the second cell: 5 ms of group 1, 5 idle, 5 of group 0");
    assert_eq!(signs(&picture, 0, 1), "#");
    let part = Picture::new(&trace, Window { from: 23 * MS, to: 29 * MS }, 3 * MS);
    assert_eq!(signs(&part, 0, 3), "hh0");
}

#[test]
fn every_nanosecond_is_in_a_cell() {
    let trace = trace(2);
    for nanos in 1..40 {
        let part = Picture::new(&trace, Window { from: 5 * MS, to: 5 * MS + nanos }, 3 * MS);
        for columns in 1..=nanos as usize {
            assert_eq!(signs(&part, 0, columns), "0".repeat(columns), "{nanos} ns in {columns} cells");
        }
    }
}

#[test]
fn groups_have_36_signs() {
    let signs = [0, 9, 10, 35, 36].map(|group| Fill::Group(group).symbol());
    assert_eq!(signs, ['0', '9', 'A', 'Z', '0']);
}

#[test]
fn a_picture_in_characters() {
    let trace = trace(2);
    let found = gantt::draw(&picture(&trace), Canvas { columns: 70, colours: false });
    let rows = [
        "stage 0 │00000000001111111111hhhhh00000000001111111111···············│",
        "stage 1 │···············00000000001111111111hhhhh00000000001111111111│",
        "        └┬───────────────────┬───────────────────┬───────────────────┘",
        "         0 ms                20 ms               40 ms",
    ];
    assert_eq!(found.lines().take(4).collect::<Vec<_>>(), rows);
    assert!(found.contains("0-9 A-Z busy with a micro-batch of that group   · fill/drain   h hop"), "{found}");
    assert!(found.contains("0 ms") && found.contains("20 ms") && !found.contains('\u{1b}'), "{found}");
}

#[test]
fn colours_change_nothing_else() {
    let trace = trace(3);
    let plain = gantt::draw(&picture(&trace), Canvas { columns: 80, colours: false });
    let coloured = gantt::draw(&picture(&trace), Canvas { columns: 80, colours: true });
    assert!(coloured.contains("\u{1b}["));
    let mut stripped = String::new();
    for part in coloured.split('\u{1b}') {
        stripped.push_str(part.strip_prefix('[').map_or(part, |part| part.split_once('m').expect("an end").1));
    }
    assert_eq!(stripped, plain);
}

#[test]
fn axes_have_round_times() {
    let trace = trace(40);
    let labels = |from: Nanos, to: Nanos, most| {
        let picture = Picture::new(&trace, Window { from: from + 3 * MS, to: to + 3 * MS }, 3 * MS);
        picture.ticks(most).into_iter().map(|(_, label)| label).collect::<Vec<_>>()
    };
    assert_eq!(labels(0, 60 * MS, 5), ["0 ms", "20 ms", "40 ms", "60 ms"]);
    assert_eq!(labels(17 * MS, 18 * MS, 4), ["17.0 ms", "17.5 ms", "18.0 ms"]);
    assert_eq!(labels(0, 3000 * MS, 8), ["0.0 s", "0.5 s", "1.0 s", "1.5 s", "2.0 s", "2.5 s", "3.0 s"]);
    assert_eq!(labels(0, 900, 3), ["0 ns", "500 ns"]);
    assert!(labels(5, 6, 0).len() <= 2);
}

fn drawn(trace: &Trace) -> String {
    svg::draw(&picture(trace), &Summary::of(trace, Options::default()))
}

#[test]
fn a_picture_is_well_formed_and_says_what_is_what() {
    let trace = trace(2);
    let text = drawn(&trace);
    let document = roxmltree::Document::parse(&text).expect("well-formed");
    let titles: Vec<&str> = document
        .descendants()
        .filter(|n| n.has_tag_name(("http://www.w3.org/2000/svg", "title")))
        .filter_map(|n| n.text())
        .collect();
    assert!(titles.contains(&"step 3, group 1: 1 token, 1 sequence; 10.0 ms from 0.035000 s"), "{titles:?}");
    assert!(titles.contains(&"hop: 5.00 ms from 0.020000 s"), "{titles:?}");
    assert!(
        titles.iter().any(
            |title| title.starts_with("stage 0, layers 0-3, a <card> & \"more\" \u{fffd}\u{fffd}[31m: busy 66.7 %")
        ),
        "{titles:?}"
    );
    assert!(text.contains("prefers-color-scheme:dark") && text.contains("role=\"img\""));
    for outside in ["<script", "href", "http://", "https://", "@import", "url("] {
        let allowed = match outside {
            "http://" => "http://www.w3.org/2000/svg",
            "url(" => "url(#stripes)",
            _ => "",
        };
        assert!(
            text.match_indices(outside).all(|(at, _)| !allowed.is_empty() && text[at..].starts_with(allowed)),
            "{outside}"
        );
    }
}

#[test]
fn long_traces_make_no_longer_pictures() {
    let trace = trace(20_000);
    let text = drawn(&trace);
    assert!(text.len() < 2_000_000, "{} bytes", text.len());
    roxmltree::Document::parse(&text).expect("well-formed");
    let tiny = Picture::new(&trace, Window { from: 3 * MS, to: 3 * MS + 3 }, 3 * MS);
    assert_eq!(gantt::draw(&tiny, Canvas::PLAIN).lines().next(), Some("stage 0 │000│"));
}

#[test]
fn records_that_make_no_sense_are_drawn_all_the_same() {
    let mut trace = trace(3);
    trace.stages[0].spans[1].finished = Nanos::MAX;
    trace.stages[1].spans[2].started = 0;
    trace.stages[1].layers = (usize::MAX, 0);
    trace.head[4].answered = Nanos::MAX;
    trace.head[2].sent = 0;
    assert!(drawn(&trace).ends_with("</svg>\n"));
    assert!(gantt::draw(&picture(&trace), Canvas::PLAIN).contains("stage 1"));
}
