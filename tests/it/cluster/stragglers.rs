//! A worker whose device becomes slow is named, and its layers go to another one where that is wanted and there is one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use pp_engine::Profile;
use pp_engine::backend::paced::Pace;
use pp_engine::cluster::remote::RemoteDevice;
use pp_engine::digest::Digest;
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadError, HeadOptions};
use pp_engine::layout::StageSpec;
use pp_engine::pipeline::{Device, Model, Past, Pipeline, PipelineError, PipelineOptions};

use super::local::Cluster;
use crate::paced::plain;
use crate::support::{checkpoint, exact, tokenizer};

const ANSWER: usize = 110;

/// Turns the head until its answer is there, or it fails.
fn turn(head: &mut Head) -> Result<Answer, HeadError> {
    let mut answer = None;
    loop {
        let mut hear = |event| {
            if let Event::Done { answer: done, .. } = event {
                answer = Some(done);
            }
        };
        head.turn(Duration::from_millis(50), &AtomicBool::new(false), &mut hear)?;
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
}

/// Stages on w0 and w1, whose device becomes slow in the middle of an answer; what the answer says then, and who is slow at
/// its end, where the stages go to `places`.
fn slowed(places: [usize; 2]) -> (Vec<u32>, usize) {
    let checkpoint = checkpoint("tiny/llama-33");
    let brake = Arc::new(AtomicU32::new(0));
    let device = |brake: &Arc<AtomicU32>| {
        let pace = Pace { alpha: Duration::from_millis(4), ..Pace::default() };
        Device::Paced { pace, profile: Profile::CARD, hold: Arc::default(), brake: brake.clone() }
    };
    let devices = [Arc::default(), brake.clone(), Arc::default()].map(|brake| vec![device(&brake)]);
    let cluster = Cluster::new(&checkpoint, devices.into());
    let leased = [0, 1, 2].map(|at| Device::Remote(RemoteDevice::of(&cluster.lease(at), None).unwrap()));
    let open = |places: [usize; 2], past: Option<Past>| {
        let model = Model { digest: Digest([0; 32]), bytes: 0, name: "test".to_owned(), manifests: None };
        let between = PipelineOptions { model: Some(model), past, ..PipelineOptions::default() };
        let devices = places.map(|at| leased[at].clone());
        let specs = StageSpec::pipeline(&[16, 17]);
        let go_on = AtomicBool::new(false);
        Pipeline::open_with(&checkpoint, &specs, exact(192), &between, &devices, &mut |_, _| {}, &go_on).unwrap()
    };
    let options = HeadOptions { recovers: true, replaces_stragglers: true, ..HeadOptions::default() };
    let mut head = Head::new(open([0, 1], None), tokenizer(&checkpoint), options);
    head.submit(plain(4, 60)).unwrap();
    assert_eq!(turn(&mut head).unwrap().tokens.len(), 60);
    assert_eq!(head.stragglers(), []);

    brake.store(9, Ordering::Relaxed);
    head.submit(plain(4, ANSWER)).unwrap();
    let error = turn(&mut head).unwrap_err();
    let HeadError::Pipeline(PipelineError::Straggler { stage, times, steps }) = &error else { panic!("{error}") };
    assert_eq!((stage.index, stage.worker.as_deref()), (1, Some("w1")), "{error}");
    // Workers tell of their steps a few at a time.
    assert!((32..48).contains(steps), "{error}");
    assert!((8.0..12.0).contains(times) && error.may_be_recovered(), "{error}");
    let past = head.suspend();
    head.recover(open(places, Some(past)), &mut |_| {});
    // Where nobody else has taken its place it goes on there, and is told of and not tried again.
    let answer = turn(&mut head).unwrap();
    assert_eq!((answer.tokens.len(), answer.finish_reason), (ANSWER, FinishReason::Length));
    (answer.tokens.iter().map(|token| token.id).collect(), head.stragglers().len())
}

#[test]
fn a_straggler_is_replaced_where_somebody_can_and_else_goes_on() {
    let (elsewhere, slow) = slowed([0, 2]);
    assert_eq!(slow, 0);
    let (there, slow) = slowed([0, 1]);
    assert_eq!((there, slow), (elsewhere, 1));
}
