use std::path::PathBuf;

use super::*;
use crate::checkpoint::supplied::Bound;
use crate::cluster::control::{Beat, CONTROL_VERSION, Fellow, Greeting, Holder, Purpose, Source};
use crate::cluster::weights::{Ask, Reply, encode_ask, encode_reply};
use crate::cluster::whole::{Inventory, Item};
use crate::contract::Build;
use crate::digest::Digest;
use crate::message::{Candidate, LogitEdit, Output, OutputRequest, Outputs, Span, Step};
use crate::trace::StageSpan;
use crate::weights::LoadError;

/// Puts what must be there for a fuzzer to begin with into the corpus, where `PP_FUZZ_SEEDS` is set; else all that is
/// there goes through the target.
fn check(target: &str, body: fn(&[u8]), seeds: &[Vec<u8>]) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    if std::env::var_os("PP_FUZZ_SEEDS").is_some() {
        std::fs::create_dir_all(&folder).unwrap();
        for (at, seed) in seeds.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{at}")), seed).unwrap();
        }
    }
    seeds.iter().for_each(|seed| body(seed));
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        body(&std::fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count >= seeds.len(), "{count} files in {}, at least {} are made here", folder.display(), seeds.len());
}

#[test]
fn the_corpus_of_control_is_borne() {
    let said = |frame: Frame| frame.payload.to_vec();
    let head = "user@desk".to_owned();
    let greeting = Greeting { build: Build::this(), head: head.clone(), purpose: Purpose::Lease };
    let fellow = Fellow { place: 2, name: "rig3".to_owned() };
    let to_worker = [
        ToWorker::Greeting(greeting),
        ToWorker::Start,
        ToWorker::Epoch(3),
        ToWorker::Release,
        ToWorker::Ping(1 << 40),
        ToWorker::Echo(vec![7; 20]),
        ToWorker::Members(vec![1; 30]),
        ToWorker::Certificate(vec![0x30; 30]),
        ToWorker::Drain(true),
        ToWorker::Manifest { manifest: vec![1; 20], takers: vec![fellow.clone()] },
        ToWorker::Fetch(vec![Source { fellow, holds: vec![0xff, 1] }]),
        ToWorker::Whole(1 << 40, "big.gguf".to_owned()),
        ToWorker::Rebalance(vec![12, 18]),
        ToWorker::Rebalanced(3),
        ToWorker::Outcome(3, Err("it has not the memory".to_owned())),
    ];
    let item = Item { name: "big.gguf".to_owned(), bytes: 1 << 40, digest: Digest([7; 32]) };
    let commit = Some("0123abcd".to_owned());
    let whole = Inventory { model: Digest([7; 32]), commit, folder: "q8".to_owned(), files: vec![item; 2] };
    let spans = vec![StageSpan { step: 4, arrived: 10, sent: 1 << 33, ..StageSpan::default() }; 2];
    let to_head = [
        ToHead::Busy(Holder { head, since: 1_900_000_000, stages: vec![(0, (0, 8), "0".to_owned())] }),
        ToHead::Draining,
        ToHead::Serving,
        ToHead::Linked(1),
        ToHead::Spans(1, spans),
        ToHead::Beats(vec![Beat { stage: 1, begun: 300, ..Beat::default() }]),
        ToHead::Pong(1, 1 << 50),
        ToHead::Echo(vec![9; 20]),
        ToHead::Done(Ok(())),
        ToHead::Done(Err("it does not".to_owned())),
        ToHead::HasModel(false),
        ToHead::Holds(vec![0x0f; 9]),
        ToHead::LoadFailed(
            1,
            LoadError::NoRoom { folder: "/cache".to_owned(), needed: 1 << 40, room: 7, bound: Bound::Disk },
        ),
        ToHead::Whole(Ok(Some(Box::new(whole)))),
        ToHead::Whole(Err("it leads elsewhere".to_owned())),
        ToHead::Rebalance(3, vec![12, 18]),
        ToHead::Rebalanced(Some(Ok("split 12,18".to_owned()))),
    ];
    let mut seeds: Vec<Vec<u8>> = to_worker.iter().map(|message| said(control::encode(message))).collect();
    seeds.extend(to_head.iter().map(|message| said(control::encode(message))));
    // Every kind, to be gone on with.
    seeds.extend((0..20).map(|kind| [&CONTROL_VERSION.to_le_bytes()[..], &[kind], &[1; 40]].concat()));
    check("control", super::control, &seeds);
}

#[test]
fn the_corpus_of_weights_is_borne() {
    let ask = Ask { tensor: 3, offset: 1 << 33, bytes: 6 };
    let tiny = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-gguf/llama3-rope-factors.gguf");
    let tiny = Checkpoint::open(&tiny).unwrap();
    let manifest = Manifest::of(&tiny, Digest([3; 32]), &mut |_, _| true).unwrap();
    let kind = |kind: u8, bytes: &[u8]| [&[kind][..], bytes].concat();
    let seeds = [
        kind(0, &encode_ask(&ask).payload),
        kind(1, &encode_reply(&Reply::Piece(ask), &[1, 2, 3, 4, 5, 6]).payload),
        kind(1, &encode_reply(&Reply::Lacks(3), &[]).payload),
        kind(2, &manifest.encode()),
    ];
    check("weights", super::weights, &seeds);
}

#[test]
fn the_corpus_of_payloads_is_borne() {
    let request = OutputRequest {
        row: 1,
        target: 7,
        top_k: 4,
        inverse_temperature: 1.25,
        whole_row: false,
        edits: vec![LogitEdit::new(4, f32::NEG_INFINITY, 1.0, 0.0), LogitEdit::new(99, 0.5, 1.25, -2.0)],
    };
    let spans = vec![
        Span { request: 0, sequence: 1, start: 31, count: 2, new_pages: vec![0, 3] },
        Span { request: 0, sequence: 2, start: 255, count: 1, new_pages: vec![] },
    ];
    let first =
        Step { released: vec![7], spans, ids: vec![5, 6, 99], outputs: vec![request], until: Some(2), from: None };
    let inner = Step { ids: vec![], ..first.clone() };
    let hidden: Vec<f32> = (0..3 * LIMITS.hidden).map(|at| at as f32 * 0.25 - 9.0).collect();
    let mut seeds = vec![[&[1][..], &encode_step(&first, &[], &LIMITS)].concat()];
    for (kind, wire) in [(0, Wire::F32), (4, Wire::F16), (2, Wire::Q8)] {
        assert_eq!(Wire::ALL[kind as usize % 3], wire);
        seeds.push([&[kind][..], &encode_step(&inner, &hidden, &MessageLimits { wire, ..LIMITS })].concat());
    }
    let candidate = |id| Candidate { id, logit: 2.5, raw: 3.5 };
    let output = Output {
        lse: 9.0,
        lse_processed: 7.0,
        target_logit: 1.0,
        best: vec![candidate(4), candidate(9)],
        beside: vec![candidate(99)],
        row: Some(vec![0.5; LIMITS.vocab]),
    };
    let short = Output { row: None, ..output.clone() };
    for outputs in [vec![output], vec![short.clone(), short], vec![]] {
        seeds.push([&[0][..], &encode_outputs(&Outputs { outputs })].concat());
    }
    check("payload", super::payload, &seeds);
}
