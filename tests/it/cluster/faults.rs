//! What goes wrong is told: who, where, why. Nothing hangs, and the next pipeline works.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pp_engine::Profile;
use pp_engine::backend::paced::Pace;
use pp_engine::cluster::control::{Purpose, ToWorker};
use pp_engine::cluster::remote::{LeaseError, RemoteDevice, Worker};
use pp_engine::head::{Event, FinishReason, Head, HeadError, HeadOptions};
use pp_engine::layout::StageOptions;
use pp_engine::pipeline::{Device, PipelineError};
use pp_transport::members::SignedMembers;

use super::local::{Cluster, Place};
use crate::paced::plain;
use crate::support::{checkpoint, exact, tokenizer, twins};

const SOON: Duration = Duration::from_secs(3);

fn within(patience: Duration, what: impl Fn() -> bool) -> bool {
    let until = Instant::now() + patience;
    while Instant::now() < until {
        if what() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    false
}

/// Turns the head until it fails; what its requests ended with.
fn until_failure(head: &mut Head) -> (HeadError, Vec<FinishReason>) {
    let mut reasons = Vec::new();
    loop {
        let mut hear = |event| {
            if let Event::Done { answer, .. } = event {
                reasons.push(answer.finish_reason);
            }
        };
        if let Err(error) = head.turn(Duration::from_millis(50), &AtomicBool::new(false), &mut hear) {
            return (error, reasons);
        }
    }
}

#[test]
fn a_wedged_stage_is_named_and_the_head_goes_on_with_another_pipeline() {
    let checkpoint = checkpoint("tiny/llama-33");
    let hold = Arc::new(AtomicBool::new(false));
    let (alpha, beta) = (Duration::from_millis(4), Duration::ZERO);
    let pace = Pace { alpha, beta, ..Pace::default() };
    let there = Device::Paced { pace, profile: Profile::CARD, hold: hold.clone(), brake: Default::default() };
    let cluster = Cluster::new(&checkpoint, vec![vec![there]]);
    let places = [Place::Here(Device::paced(alpha, beta, Profile::CARD)), Place::There(0)];
    let options = StageOptions { sequences: 4, kv_tokens: 4 * 192, ..exact(192) };
    let open = || cluster.pipeline(&checkpoint, &[16, 17], options, &places).unwrap();
    let mut head = Head::new(open(), tokenizer(&checkpoint), HeadOptions::default());
    // Enough for the costs to be known.
    head.generate_all(vec![plain(4, 40)], &AtomicBool::new(false)).unwrap();
    // A pipe that was empty for long is none that hangs.
    std::thread::sleep(Duration::from_secs(6));
    head.generate_all(vec![plain(4, 40)], &AtomicBool::new(false)).unwrap();
    hold.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        head.submit(plain(4, 40)).unwrap();
    }
    let since = Instant::now();
    let (error, reasons) = until_failure(&mut head);
    let took = since.elapsed();
    let HeadError::Pipeline(PipelineError::Wedged { stage, seconds }) = &error else { panic!("{error}") };
    assert_eq!((stage.index, stage.worker.as_deref()), (1, Some("w0")));
    assert!(*seconds >= 5 && took < Duration::from_secs(15), "{took:?}");
    assert_eq!(reasons, [FinishReason::Failed; 3], "every request ends, once");
    assert!(error.to_string().contains("stage 1 on w0"), "{error}");
    let refused = head.submit(plain(4, 4)).unwrap_err();
    assert!(matches!(&refused, HeadError::Down { reason } if *reason == error.to_string()), "{refused}");
    hold.store(false, Ordering::Relaxed);
    let again = within(Duration::from_secs(15), || cluster.workers[0].server.holder().is_some());
    assert!(again, "the failed pipeline still has the worker");
    drop(head);
    assert!(within(SOON, || cluster.workers[0].server.holder().is_none()));
    let mut head = Head::new(open(), tokenizer(&checkpoint), HeadOptions::default());
    head.generate_all(vec![plain(4, 4)], &AtomicBool::new(false)).unwrap();
}

#[test]
fn a_second_head_hears_who_has_the_worker() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cluster = Cluster::new(&checkpoint, vec![vec![twins()]]);
    let first = cluster.lease(0);
    let member = cluster.members.get(&"w0".parse().unwrap()).unwrap();
    let second = |purpose| Worker::connect(&cluster.head, member, "another", purpose, SOON);
    let error = second(Purpose::Lease).err().expect("it is held");
    assert!(matches!(&error, LeaseError::Busy { holder, .. } if holder.head == "test"), "{error}");
    assert!(error.to_string().starts_with("worker w0 is busy: held by test since "), "{error}");
    // To look is allowed, and tells the same.
    let look = second(Purpose::Look).unwrap();
    assert_eq!(look.welcome().holder.as_ref().map(|holder| holder.head.as_str()), Some("test"));
    drop(first);
    assert!(within(SOON, || cluster.workers[0].server.holder().is_none()));
    second(Purpose::Lease).unwrap();
}

#[test]
fn a_removed_worker_is_refused_by_its_neighbours_at_once() {
    let checkpoint = checkpoint("tiny/llama-33");
    let mut cluster = Cluster::new(&checkpoint, vec![vec![twins()]; 3]);
    let options = StageOptions { sequences: 1, ..exact(192) };
    let places = [Place::There(0), Place::There(1)];
    let pipeline = cluster.pipeline(&checkpoint, &[16, 17], options, &places).unwrap();
    let mut head = Head::new(pipeline, tokenizer(&checkpoint), HeadOptions::default());
    head.generate_all(vec![plain(4, 4)], &AtomicBool::new(false)).unwrap();
    // w1 is removed; the list is pushed to w0 only, whose live link to w1 is cut.
    let mut members = cluster.members.clone();
    members.remove(&"w1".parse().unwrap()).unwrap();
    let signed = SignedMembers::sign(&members, &cluster.authority).unwrap();
    let w0 = cluster.members.get(&"w0".parse().unwrap()).unwrap().clone();
    let look = Worker::connect(&cluster.head, &w0, "test", Purpose::Look, SOON).unwrap();
    look.tell(&ToWorker::Members(signed.as_bytes().to_vec())).unwrap();
    head.submit(plain(4, 100)).unwrap();
    let since = Instant::now();
    let (error, _) = until_failure(&mut head);
    assert!(since.elapsed() < Duration::from_secs(10), "{error}");
    drop(head);
    assert!(within(SOON, || cluster.workers[0].server.holder().is_none()));
    assert!(within(SOON, || cluster.workers[1].server.holder().is_none()));
    // And it is not dialled again.
    let error = cluster.pipeline(&checkpoint, &[16, 17], options, &places).err().expect("w1 is no member");
    assert!(error.to_string().contains("w1, which is next, is not in the member list"), "{error}");
    // An older list is refused.
    let old = SignedMembers::sign(&cluster.members, &cluster.authority).unwrap();
    let refused = look.tell(&ToWorker::Members(old.as_bytes().to_vec())).unwrap_err();
    assert!(matches!(refused, LeaseError::Refused { .. }), "{refused}");
    cluster.members = members;
}

#[test]
fn a_drained_worker_finishes_what_it_has() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cluster = Cluster::new(&checkpoint, vec![vec![twins()]]);
    let places = [Place::Here(twins()), Place::There(0)];
    let pipeline = cluster.pipeline(&checkpoint, &[16, 17], exact(192), &places).unwrap();
    let mut head = Head::new(pipeline, tokenizer(&checkpoint), HeadOptions::default());
    let member = cluster.members.get(&"w0".parse().unwrap()).unwrap();
    let look = Worker::connect(&cluster.head, member, "test", Purpose::Look, SOON).unwrap();
    look.tell(&ToWorker::Drain(true)).unwrap();
    let answers = head.generate_all(vec![plain(4, 8)], &AtomicBool::new(false)).unwrap();
    assert_eq!(answers[0][0].tokens.len(), 8);
    drop(head);
    let lease = || Worker::connect(&cluster.head, member, "test", Purpose::Lease, SOON);
    assert!(matches!(lease(), Err(LeaseError::Draining { .. })));
    look.tell(&ToWorker::Drain(false)).unwrap();
    assert!(within(SOON, || cluster.workers[0].server.holder().is_none()));
    lease().unwrap();
}

/// R38: both sides of what differs are told, before anything is loaded.
#[test]
fn another_model_is_refused_with_both_sides() {
    let (here, there) = (checkpoint("tiny/llama-33"), checkpoint("tiny/qwen2-untied"));
    let cluster = Cluster::new(&there, vec![vec![twins()]]);
    let places = [Place::Here(twins()), Place::There(0)];
    let error = cluster.pipeline(&here, &[16, 17], exact(192), &places).err().expect("they differ");
    let text = error.to_string();
    assert!(text.contains("worker w0 does not agree"), "{text}");
    assert!(
        text.contains("architecture: llama here, qwen2 there") || text.contains("llama") && text.contains("qwen2"),
        "{text}"
    );
    // The worker is of use afterwards.
    assert!(within(SOON, || cluster.workers[0].server.holder().is_none()));
    let pipeline = cluster.pipeline(&there, &[1, 1], exact(128), &places);
    pipeline.unwrap();
}

#[test]
fn a_worker_without_the_device_says_which_it_has() {
    let checkpoint = checkpoint("tiny/llama-33");
    let cluster = Cluster::new(&checkpoint, vec![vec![twins()]]);
    let error = RemoteDevice::of(&cluster.lease(0), Some("gpu7")).expect_err("there is none");
    assert!(error.to_string().contains("no device \"gpu7\"; it has reference"), "{error}");
}
