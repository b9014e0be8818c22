//! One head for many callers: company changes nothing, who goes is forgotten, what fails is told and replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pp_engine::Profile;
use pp_engine::backend::paced::Pace;
use pp_engine::head::service::{NotReopened, Notice, Notices, Probe, Reopen, Service, ServiceError, Standing};
use pp_engine::head::{Answer, Event, FinishReason, Head, HeadOptions, Request};
use pp_engine::layout::{StageOptions, StageSpec};
use pp_engine::pipeline::{Device, Pipeline, PipelineOptions};
use pp_engine::sampler::Sampling;
use pp_engine::schedule::Refused;
use pp_transport::relay::Delay;

use crate::support::{checkpoint, exact, head_with, tokenizer, twins};

const SOON: Duration = Duration::from_secs(20);

fn request(start: u32, prompt: usize, max_tokens: usize) -> Request {
    Request {
        prompt: (0..prompt as u32).map(|i| (start + i * 37) % 250).collect(),
        max_tokens,
        sampling: Sampling { temperature: 0.7, seed: u64::from(start), ..Sampling::default() },
        stop: Vec::new(),
        stop_at_eos: false,
        choices: 1,
        deadline: None,
        ..Request::default()
    }
}

fn options() -> StageOptions {
    StageOptions { sequences: 4, kv_tokens: 4 * 192, ..exact(192) }
}

fn head(options_of_head: HeadOptions) -> Head {
    head_with(&checkpoint("tiny/llama-33"), &[17, 16], options(), &twins(), options_of_head)
}

fn service() -> Service {
    Service::start(head(HeadOptions::default()), None).unwrap()
}

/// Two stages that only take time; the second one stops while `hold` is set.
fn held(hold: &Arc<AtomicBool>, between: &PipelineOptions) -> Head {
    let pipeline = held_pipeline(hold, between);
    Head::new(pipeline, tokenizer(&checkpoint("tiny/llama-33")), HeadOptions::default())
}

fn held_pipeline(hold: &Arc<AtomicBool>, between: &PipelineOptions) -> Pipeline {
    pipeline_held_at(1, hold, between)
}

fn pipeline_held_at(stage: usize, hold: &Arc<AtomicBool>, between: &PipelineOptions) -> Pipeline {
    let checkpoint = checkpoint("tiny/llama-33");
    let (alpha, beta) = (Duration::from_millis(3), Duration::ZERO);
    let pace = Pace { alpha, beta, ..Pace::default() };
    let mut devices = [Device::paced(alpha, beta, Profile::CARD), Device::paced(alpha, beta, Profile::CARD)];
    devices[stage] = Device::Paced { pace, profile: Profile::CARD, hold: hold.clone(), brake: Arc::default() };
    let specs = StageSpec::pipeline(&[17, 16]);
    let go_on = AtomicBool::new(false);
    Pipeline::open_with(&checkpoint, &specs, options(), between, &devices, &mut |_, _| {}, &go_on).unwrap()
}

/// The answers of a request, or why there are none.
fn answers(notices: Notices) -> Result<Vec<Answer>, ServiceError> {
    let mut answers = Vec::new();
    for notice in notices {
        match notice {
            Notice::Event(Event::Done { answer, .. }) => answers.push(answer),
            Notice::Refused(error) => return Err(error),
            Notice::Failed(failure) => return Err(failure.into()),
            Notice::Taken(_) | Notice::Event(_) | Notice::Paused(_) | Notice::Resumed(_) => {}
        }
    }
    Ok(answers)
}

fn ids(answer: &Answer) -> Vec<u32> {
    answer.tokens.iter().map(|token| token.id).collect()
}

#[track_caller]
fn eventually(service: &Service, what: &str, is_so: impl Fn(&Standing) -> bool) {
    let until = Instant::now() + SOON;
    while !is_so(&service.standing()) {
        assert!(Instant::now() < until, "{what}: {:?}", service.standing());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn probe(service: &Service, within: Duration) -> Result<Probe, ServiceError> {
    let (sender, heard) = mpsc::channel();
    service.probe(within, move |found| sender.send(found).unwrap());
    heard.recv_timeout(SOON).expect("every probe is told of")
}

#[test]
fn callers_at_once_hear_what_each_would_hear_alone() {
    let mut alone = head(HeadOptions::default());
    let alone: Vec<Vec<u32>> = (0..8)
        .map(|i| ids(&alone.generate(request(i, 20 + i as usize, 12), &AtomicBool::new(false), &mut |_| {}).unwrap()))
        .collect();
    let service = service();
    std::thread::scope(|scope| {
        for (i, expected) in alone.iter().enumerate() {
            let service = &service;
            scope.spawn(move || {
                let notices = service.notices(request(i as u32, 20 + i, 12));
                let (mut tokens, mut text) = (Vec::new(), String::new());
                let mut answer = None;
                for notice in notices {
                    match notice {
                        Notice::Event(Event::Token { token, .. }) => tokens.push(token.id),
                        Notice::Event(Event::Text { text: more, .. }) => text += &more,
                        Notice::Event(Event::Done { answer: done, .. }) => answer = Some(done),
                        _ => {}
                    }
                }
                let answer = answer.expect("it is answered");
                assert_eq!((&tokens, ids(&answer)), (expected, expected.clone()), "request {i}");
                assert_eq!(text, answer.text);
            });
        }
    });
    eventually(&service, "nothing is left", |standing| standing.requests == 0 && standing.schedule.held_pages == 0);
}

#[test]
fn who_goes_is_forgotten_at_once_and_the_others_hear_nothing_of_it() {
    let service = service();
    let expected = ids(&answers(service.notices(request(7, 40, 20))).unwrap()[0]);
    for _ in 0..3 {
        let goes = service.notices(request(1, 60, 120));
        let stays = service.notices(request(7, 40, 20));
        assert!(goes.within(SOON).is_some(), "it is taken");
        drop(goes);
        assert_eq!(ids(&answers(stays).unwrap()[0]), expected);
    }
    let never_heard = service.submit(request(2, 60, 120), |_| {});
    drop(never_heard);
    eventually(&service, "nothing is left", |standing| standing.requests == 0 && standing.schedule.held_pages == 0);
    eventually(&service, "nothing is in the pipe", |standing| standing.schedule.in_flight == 0);
}

#[test]
fn what_is_too_much_is_refused_and_what_was_taken_goes_on() {
    let service = Service::start(head(HeadOptions { sequences: 1, queue: 2, ..HeadOptions::default() }), None).unwrap();
    let all: Vec<Notices> = (0..6).map(|i| service.notices(request(i, 40, 30))).collect();
    let ends: Vec<_> = all.into_iter().map(answers).collect();
    let refused = |end: &&Result<_, _>| matches!(end, Err(ServiceError::Refused(Refused::Busy { limit: 2, .. })));
    assert_eq!(ends.iter().filter(refused).count(), 3, "one runs, two wait: {ends:?}");
    assert_eq!(ends.iter().filter(|end| end.is_ok()).count(), 3);
    let too_long = answers(service.notices(request(0, 200, 1)));
    assert!(matches!(too_long, Err(ServiceError::Refused(Refused::PromptTooLong { .. }))), "{too_long:?}");
    let no_token = answers(service.notices(Request { prompt: vec![9999], ..request(0, 1, 1) }));
    assert!(matches!(no_token, Err(ServiceError::NoSuchToken { id: 9999, .. })), "{no_token:?}");
}

#[test]
fn a_drained_service_finishes_what_it_has() {
    let service = service();
    let running = service.notices(request(3, 40, 60));
    assert!(matches!(running.within(SOON), Some(Notice::Taken(_))));
    service.drain();
    let late = answers(service.notices(request(4, 10, 5)));
    assert!(matches!(late, Err(ServiceError::Draining)), "{late:?}");
    let finished = answers(running).unwrap();
    assert_eq!((finished[0].tokens.len(), finished[0].finish_reason), (60, FinishReason::Length));
    assert!(service.standing().is_draining);
    // One that is ended tells those that run, and whoever comes later.
    let service = self::service();
    let running = service.notices(request(3, 40, 140));
    assert!(matches!(running.within(SOON), Some(Notice::Taken(_))));
    service.end();
    assert_eq!(answers(running).unwrap()[0].finish_reason, FinishReason::Cancelled);
}

#[test]
fn a_probe_crosses_every_stage_idle_and_busy() {
    let service = service();
    let steps = |service: &Service| -> Vec<u64> {
        service.pipe().counters.iter().map(|counters| counters.steps.load(Ordering::Relaxed)).collect()
    };
    let before = steps(&service);
    let found = probe(&service, SOON).unwrap();
    assert!(matches!(found, Probe::Crossed(_)), "{found:?}");
    let after = steps(&service);
    assert!(after.iter().zip(&before).all(|(after, before)| after > before), "{before:?} {after:?}");
    let tokens = service.pipe().counters[0].tokens.load(Ordering::Relaxed);
    assert_eq!(tokens, 0, "nothing was computed");
    let expected = ids(&answers(service.notices(request(5, 60, 40))).unwrap()[0]);
    let running = service.notices(request(5, 60, 40));
    for _ in 0..5 {
        assert!(matches!(probe(&service, SOON), Ok(Probe::Crossed(_))));
    }
    assert_eq!(ids(&answers(running).unwrap()[0]), expected, "probes change nothing");
    // Many at once, and with somebody who goes while they are under way.
    let heard = Arc::new(AtomicUsize::new(0));
    for _ in 0..50 {
        let heard = heard.clone();
        service.probe(SOON, move |found| {
            assert!(matches!(found, Ok(Probe::Crossed(_))), "{found:?}");
            heard.fetch_add(1, Ordering::Relaxed);
        });
        drop(service.notices(request(6, 50, 50)));
    }
    eventually(&service, "every probe is told of", |_| heard.load(Ordering::Relaxed) == 50);
}

#[test]
fn a_probe_names_the_stage_that_does_not_answer() {
    let hold = Arc::new(AtomicBool::new(false));
    let service = Service::start(held(&hold, &PipelineOptions::default()), None).unwrap();
    assert!(matches!(probe(&service, SOON), Ok(Probe::Crossed(_))));
    hold.store(true, Ordering::Relaxed);
    let _running = service.notices(request(1, 20, 100));
    let found = probe(&service, Duration::from_millis(300));
    let Err(ServiceError::Silent { stage, .. }) = &found else { panic!("{found:?}") };
    assert_eq!(stage.index, 1, "{found:?}");
    hold.store(false, Ordering::Relaxed);
    assert!(matches!(probe(&service, SOON), Ok(Probe::Crossed(_))));
    // A hop that takes longer than one waits: nobody computes, the stage behind it has nothing.
    let slow = PipelineOptions {
        slow_hops: vec![(1, Delay { latency: Duration::from_secs(2), bytes_per_s: None })],
        ..PipelineOptions::default()
    };
    let service = Service::start(held(&hold, &slow), None).unwrap();
    let found = probe(&service, Duration::from_millis(200));
    assert!(matches!(&found, Err(ServiceError::Silent { stage, .. }) if stage.index == 1), "{found:?}");
}

#[test]
fn a_pipeline_that_fails_is_told_and_replaced() {
    let hold = Arc::new(AtomicBool::new(false));
    let opened = Arc::new(AtomicUsize::new(0));
    let count = opened.clone();
    // The first attempt fails.
    let reopen: Reopen = Box::new(move |_, past| match count.fetch_add(1, Ordering::Relaxed) {
        0 => Err(NotReopened::Failed("the worker is busy".to_owned())),
        _ => {
            let between = PipelineOptions { past: Some(past.clone()), ..PipelineOptions::default() };
            Ok((held_pipeline(&Arc::new(AtomicBool::new(false)), &between), "anew".to_owned()))
        }
    });
    let service = Service::start(held(&hold, &PipelineOptions::default()), Some(reopen)).unwrap();
    // Enough for the costs to be known.
    assert_eq!(answers(service.notices(request(1, 4, 40))).unwrap()[0].tokens.len(), 40);
    hold.store(true, Ordering::Relaxed);
    let running: Vec<Notices> = (0..6).map(|i| service.notices(request(i, 4, 40))).collect();
    for notices in running {
        let (mut failed, mut done) = (None, 0);
        for notice in notices {
            match notice {
                Notice::Failed(failure) => {
                    assert!(service.standing().last_failure.is_some(), "whoever hears of it finds it");
                    failed = Some(failure);
                }
                Notice::Event(Event::Done { answer, .. }) => {
                    assert_eq!(answer.finish_reason, FinishReason::Failed);
                    done += 1;
                }
                _ => {}
            }
        }
        let failure = failed.expect("it is told");
        assert_eq!((failure.stage.map(|stage| stage.index), done), (Some(1), 1), "every request ends once");
        assert!(failure.reason.contains("stage 1") && failure.reason.contains("wedged"), "{}", failure.reason);
    }
    let refused = answers(service.notices(request(9, 4, 4)));
    assert!(matches!(&refused, Err(ServiceError::Down(failure)) if failure.reason.contains("stage 1")), "{refused:?}");
    assert!(matches!(probe(&service, SOON), Err(ServiceError::Down(_))));
    hold.store(false, Ordering::Relaxed);
    eventually(&service, "another one is opened", |standing| standing.down.is_none());
    let standing = service.standing();
    assert_eq!((standing.failures, standing.restarts, standing.pipe.number), (1, 1, 1));
    assert_eq!(opened.load(Ordering::Relaxed), 2);
    assert_eq!(answers(service.notices(request(1, 4, 40))).unwrap()[0].tokens.len(), 40);
}

#[test]
fn a_stage_that_hangs_is_found_though_everybody_gives_up_before_and_asks_again() {
    for stage in [0, 1] {
        let hold = Arc::new(AtomicBool::new(false));
        let pipeline = pipeline_held_at(stage, &hold, &PipelineOptions::default());
        let head = Head::new(pipeline, tokenizer(&checkpoint("tiny/llama-33")), HeadOptions::default());
        let service = Service::start(head, None).unwrap();
        // Enough for the costs to be known.
        assert_eq!(answers(service.notices(request(1, 4, 40))).unwrap()[0].tokens.len(), 40);
        hold.store(true, Ordering::Relaxed);
        let until = Instant::now() + SOON;
        let mut given_up = 0;
        while service.standing().down.is_none() {
            assert!(Instant::now() < until, "stage {stage}: {given_up} requests, {:?}", service.standing());
            let notices = service.notices(request(given_up, 4, 40));
            drop(notices.within(Duration::from_millis(10)));
            std::thread::sleep(Duration::from_millis(10));
            given_up += 1;
        }
        let failure = service.standing().down.expect("it was seen");
        assert_eq!(failure.stage.map(|stage| stage.index), Some(stage), "{}", failure.reason);
        assert!(failure.reason.contains("wedged"), "{}", failure.reason);
        hold.store(false, Ordering::Relaxed);
    }
}

#[test]
fn a_panic_is_told_to_everybody_and_nobody_waits_behind_it() {
    let service = service();
    let running = service.notices(request(1, 40, 120));
    let _panics = service.submit(request(2, 4, 20), |notice| {
        assert!(!matches!(notice, Notice::Event(Event::Token { .. })), "the test's own");
    });
    let is_told = |found: &Result<Vec<Answer>, ServiceError>| matches!(found, Err(ServiceError::Down(failure)) if failure.reason.contains("the test's own"));
    let found = answers(running);
    assert!(is_told(&found), "{found:?}");
    eventually(&service, "it is seen", |standing| standing.down.is_some() && standing.requests == 0);
    let late = answers(service.notices(request(3, 4, 4)));
    assert!(is_told(&late), "{late:?}");
    assert!(matches!(probe(&service, SOON), Err(ServiceError::Down(_))));
    assert!(service.fault().is_some_and(|fault| fault.reason.contains("a fault in pp-run")));
    drop(service);
}
