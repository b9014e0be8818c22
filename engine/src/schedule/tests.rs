use std::collections::HashMap;

use proptest::prelude::*;

use super::cost::attended;
use super::*;
use crate::law::StageCost;
use crate::random::Random;

fn limits() -> Limits {
    Limits {
        stages: 2,
        sequences: 4,
        batch_tokens: 64,
        tile: 1,
        outputs: 64,
        pages: 16,
        context: 512,
        in_flight: 8,
        queue: 2,
        prefix_cache: false,
        groups: None,
    }
}

fn job(tokens: usize) -> Job {
    Job { prompt: vec![7; tokens], ..Job::default() }
}

fn sent(scheduler: &mut Scheduler) -> Batch {
    match scheduler.next(0) {
        Next::Send(batch) => batch,
        other => panic!("{other:?} in place of a micro-batch"),
    }
}

/// Answers the oldest micro-batch; every draw is `token`.
fn answer(scheduler: &mut Scheduler, token: u32) -> Vec<Option<Choice>> {
    let choices = scheduler.answered();
    choices.iter().flatten().for_each(|choice| scheduler.drawn(*choice, token, false));
    choices
}

#[test]
fn what_can_never_run_is_refused_with_the_reason() {
    let mut scheduler = Scheduler::new(Limits { pages: 4, ..limits() });
    assert_eq!(scheduler.submit(job(0), 0), Err(Refused::EmptyPrompt));
    assert_eq!(scheduler.submit(job(513), 0), Err(Refused::PromptTooLong { tokens: 513, context: 512 }));
    assert_eq!(scheduler.submit(job(129), 0), Err(Refused::NeverFits { tokens: 129, capacity: 128 }));
    let many = Job { choices: 5, ..job(4) };
    assert_eq!(scheduler.submit(many, 0), Err(Refused::TooManyChoices { choices: 5, limit: 4 }));
    assert!(scheduler.submit(job(128), 0).is_ok());
}

#[test]
fn a_full_queue_is_busy_and_says_when_to_come_again() {
    let mut scheduler = Scheduler::new(Limits { sequences: 1, ..limits() });
    scheduler.submit(job(4), 0).unwrap();
    sent(&mut scheduler);
    scheduler.submit(job(4), 0).unwrap();
    scheduler.submit(job(4), 0).unwrap();
    let refused = scheduler.submit(job(4), 3_000_000_000);
    assert_eq!(refused, Err(Refused::Busy { queued: 2, limit: 2, retry_seconds: 3.0 }));
}

#[test]
fn requests_that_have_a_place_are_not_counted_as_waiting() {
    // All at once, before the first micro-batch: four have a place, two may wait.
    let mut scheduler = Scheduler::new(limits());
    (0..6).for_each(|_| assert!(scheduler.submit(job(4), 0).is_ok()));
    let refused = scheduler.submit(job(4), 0);
    assert_eq!(refused, Err(Refused::Busy { queued: 2, limit: 2, retry_seconds: 1.0 }));
    // Without a queue a place is still a place.
    let mut scheduler = Scheduler::new(Limits { queue: 0, sequences: 1, ..limits() });
    assert!(scheduler.submit(job(4), 0).is_ok());
    assert!(matches!(scheduler.submit(job(4), 0), Err(Refused::Busy { queued: 0, .. })));
}

#[test]
fn the_hint_counts_from_when_the_pipe_was_last_empty() {
    let mut scheduler = Scheduler::new(Limits { sequences: 1, queue: 0, ..limits() });
    let first = scheduler.submit(job(4), 0).unwrap();
    scheduler.cancel(first);
    let hour = 3_600_000_000_000;
    scheduler.submit(job(4), hour).unwrap();
    let refused = scheduler.submit(job(4), hour + 5_000_000_000);
    assert_eq!(refused, Err(Refused::Busy { queued: 0, limit: 0, retry_seconds: 5.0 }));
}

/// T16: a cancelled sequence's pages are free at once, and the stages hear of it with the next micro-batch, which is made
/// for it if there is no other.
#[test]
fn t16_cancel_frees_everything_within_one_micro_batch() {
    let mut scheduler = Scheduler::new(limits());
    let huge = scheduler.submit(job(200), 0).unwrap();
    let first = sent(&mut scheduler);
    assert!(!first.parts[0].draws, "in the middle of its prompt");
    scheduler.cancel(huge);
    assert_eq!(scheduler.status().held_pages, 0);
    let next = sent(&mut scheduler);
    assert_eq!((next.released, next.parts.len()), (vec![first.parts[0].sequence], 0));
    assert_eq!(scheduler.answered(), vec![]);
    assert_eq!(scheduler.answered(), vec![]);
    assert_eq!(scheduler.next(0), Next::Idle);
    // With others running it rides along.
    let stays = scheduler.submit(job(4), 0).unwrap();
    let goes = scheduler.submit(job(4), 0).unwrap();
    let both = sent(&mut scheduler);
    let name = both.parts.iter().find(|part| part.choice.request == goes).unwrap().sequence;
    scheduler.cancel(goes);
    answer(&mut scheduler, 1);
    let next = sent(&mut scheduler);
    assert_eq!((next.released, next.parts.len()), (vec![name], 1));
    assert_eq!(next.parts[0].choice.request, stays);
}

#[test]
fn an_answer_of_a_cancelled_request_belongs_to_nobody() {
    let mut scheduler = Scheduler::new(limits());
    let request = scheduler.submit(job(4), 0).unwrap();
    sent(&mut scheduler);
    scheduler.cancel(request);
    assert_eq!(scheduler.answered(), vec![None]);
}

#[test]
fn the_youngest_gives_way_and_begins_again() {
    let mut scheduler = Scheduler::new(Limits { pages: 4, sequences: 2, ..limits() });
    let old = scheduler.submit(job(31), 0).unwrap();
    let young = scheduler.submit(job(31), 0).unwrap();
    let mut tokens = [31usize; 2];
    let mut preempted = false;
    for _ in 0..400 {
        match scheduler.next(0) {
            Next::Send(batch) => {
                for part in &batch.parts {
                    let at = usize::from(part.choice.request == young);
                    assert!(part.start + part.ids.len() <= tokens[at]);
                    preempted |= part.choice.request == young && part.start == 0 && tokens[at] > 31;
                }
            }
            Next::Wait { .. } => {
                for choice in scheduler.answered().into_iter().flatten() {
                    tokens[usize::from(choice.request == young)] += 1;
                    let last = tokens[usize::from(choice.request == young)] == 100;
                    scheduler.drawn(choice, 3, last);
                }
            }
            Next::Idle => break,
        }
    }
    assert_eq!(tokens, [100, 100], "both ended");
    assert!(preempted && scheduler.status().preemptions >= 1);
    assert!(!scheduler.knows(old) && !scheduler.knows(young));
    assert_eq!(scheduler.status().held_pages, 0);
}

#[test]
fn an_answer_ends_where_the_cache_does() {
    let mut scheduler = Scheduler::new(Limits { pages: 2, ..limits() });
    let request = scheduler.submit(job(60), 0).unwrap();
    let mut drawn = 0;
    while scheduler.knows(request) {
        match scheduler.next(0) {
            Next::Send(_) => {}
            _ => drawn += answer(&mut scheduler, 1).len(),
        }
    }
    // 64 positions: 60 of the prompt, 4 of tokens that are fed again, and one more is drawn after the last.
    assert_eq!(drawn, 5);
}

#[test]
fn what_is_late_is_given_up() {
    let mut scheduler = Scheduler::new(limits());
    let late = scheduler.submit(Job { deadline: Some(10), ..job(4) }, 0).unwrap();
    scheduler.submit(Job { deadline: Some(30), ..job(4) }, 0).unwrap();
    assert_eq!((scheduler.next_deadline(), scheduler.expire(9)), (Some(10), vec![]));
    assert_eq!(scheduler.expire(10), vec![late]);
    assert_eq!(scheduler.next_deadline(), Some(30));
}

#[test]
fn decode_groups_follow_each_other_and_none_is_in_flight_twice() {
    let mut scheduler = Scheduler::new(Limits { sequences: 8, batch_tokens: 128, pages: 64, ..limits() });
    (0..8).for_each(|_| assert!(scheduler.submit(job(4), 0).is_ok()));
    sent(&mut scheduler);
    answer(&mut scheduler, 1);
    // Two stages, so two groups of four.
    let (a, b) = (sent(&mut scheduler), sent(&mut scheduler));
    assert_eq!((a.parts.len(), b.parts.len(), a.group, b.group), (4, 4, 0, 1));
    assert_eq!(scheduler.next(0), Next::Wait { for_pages: false });
    for _ in 0..4 {
        answer(&mut scheduler, 1);
        let again = sent(&mut scheduler);
        assert_eq!((again.parts.len(), again.group), (4, 0));
        answer(&mut scheduler, 1);
        assert_eq!(sent(&mut scheduler).group, 1);
    }
}

#[test]
fn prompts_ride_along_under_the_budget() {
    let mut scheduler = Scheduler::new(limits());
    scheduler.submit(job(4), 0).unwrap();
    sent(&mut scheduler);
    answer(&mut scheduler, 1);
    scheduler.submit(job(100), 0).unwrap();
    let mixed = sent(&mut scheduler);
    // Three chunks of 33 tokens, by the guess at the cost; one token less beside the one that decodes.
    assert_eq!((mixed.decode_tokens, mixed.prefill_tokens, mixed.parts.len()), (1, 32, 2));
    assert!(mixed.parts[0].draws && !mixed.parts[1].draws);
    let second = sent(&mut scheduler);
    assert_eq!((second.decode_tokens, second.prefill_tokens), (0, 33));
    answer(&mut scheduler, 1);
    // Two tokens would be left over: they go along.
    let rest = sent(&mut scheduler);
    assert_eq!((rest.decode_tokens, rest.prefill_tokens), (1, 35));
    assert!(rest.parts.iter().all(|part| part.draws));
}

#[test]
fn chunks_fill_whole_tiles_with_what_decodes() {
    let mut scheduler = Scheduler::new(Limits { tile: 8, ..limits() });
    scheduler.submit(job(4), 0).unwrap();
    sent(&mut scheduler);
    answer(&mut scheduler, 1);
    // About 25 tokens each: as many chunks as pages, since weights are guessed to take as long as two tokens.
    scheduler.submit(job(100), 0).unwrap();
    let sizes: Vec<(usize, usize)> = (0..4)
        .map(|_| {
            let batch = sent(&mut scheduler);
            answer(&mut scheduler, 1);
            (batch.decode_tokens, batch.prefill_tokens)
        })
        .collect();
    assert_eq!(sizes, [(1, 23), (1, 23), (1, 23), (1, 31)], "the last is as large as it is");
    // A tile that is larger than what is wanted is filled, one that is larger than all that fits is not looked at.
    for (tile, first) in [(16, 32), (64, 64), (128, 45)] {
        let mut scheduler = Scheduler::new(Limits { tile, ..limits() });
        scheduler.submit(job(136), 0).unwrap();
        assert_eq!(sent(&mut scheduler).prefill_tokens, first, "tiles of {tile}");
    }
}

#[test]
fn prompts_get_on_where_groups_would_take_every_place() {
    let mut scheduler = Scheduler::new(Limits { batch_tokens: 1, in_flight: 3, groups: Some(3), ..limits() });
    for _ in 0..3 {
        scheduler.submit(job(1), 0).unwrap();
        sent(&mut scheduler);
    }
    let last = scheduler.submit(job(2), 0).unwrap();
    let is_its = |batch: &Batch| batch.parts.iter().any(|part| part.choice.request == last);
    let mut tokens = 0;
    for _ in 0..12 {
        answer(&mut scheduler, 1);
        tokens += usize::from(is_its(&sent(&mut scheduler)));
    }
    assert!(tokens >= 2, "{tokens} of twelve");
}

#[test]
fn a_draw_that_is_not_decided_computes_the_token_again() {
    let mut scheduler = Scheduler::new(limits());
    scheduler.submit(job(40), 0).unwrap();
    assert!(sent(&mut scheduler).parts[0].draws, "the few that would be left over go along");
    let choice = scheduler.answered()[0].unwrap();
    scheduler.needs_row(choice);
    let again = sent(&mut scheduler);
    let part = &again.parts[0];
    assert_eq!((part.start, part.ids.len(), part.draws, part.whole_row), (39, 1, true, true));
    scheduler.answered();
    scheduler.drawn(choice, 5, false);
    let on = sent(&mut scheduler);
    assert_eq!((on.parts[0].start, on.parts[0].ids[0], on.parts[0].whole_row), (40, 5, false));
}

#[test]
fn a_broken_pipe_begins_again_with_what_is_known() {
    let mut scheduler = Scheduler::new(limits());
    scheduler.submit(job(4), 0).unwrap();
    sent(&mut scheduler);
    answer(&mut scheduler, 9);
    sent(&mut scheduler);
    scheduler.restart();
    let again = sent(&mut scheduler);
    assert_eq!((again.parts[0].start, &again.parts[0].ids), (0, &vec![7, 7, 7, 7, 9]));
}

/// What a scheduler sends, checked part by part, and answered as stages of these costs would.
struct Checked {
    scheduler: Scheduler,
    stages: Vec<StageCost>,
    /// Tokens of each sequence so far, and how many are wanted.
    known: HashMap<Choice, (Vec<u32>, usize)>,
    /// Positions sent of each name.
    sent: HashMap<u64, usize>,
    moving: VecDeque<Batch>,
}

impl Checked {
    /// Sends the next micro-batch, where there is one.
    fn send(&mut self) -> bool {
        let limits = *self.scheduler.limits();
        let Next::Send(batch) = self.scheduler.next(0) else { return false };
        let tokens: usize = batch.parts.iter().map(|part| part.ids.len()).sum();
        assert_eq!(tokens, batch.decode_tokens + batch.prefill_tokens);
        assert!(tokens <= limits.batch_tokens, "{tokens} tokens");
        assert!(batch.parts.len() <= limits.outputs.min(limits.sequences), "{} parts", batch.parts.len());
        for part in &batch.parts {
            let (known, _) = &self.known[&part.choice];
            let sent = self.sent.entry(part.sequence).or_default();
            let end = part.start + part.ids.len();
            assert_eq!((part.start, &part.ids[..]), (*sent, &known[*sent..end]), "each token once, in order");
            assert!(!part.ids.is_empty(), "{part:?}");
            assert_eq!(part.draws, end == known.len());
            *sent = end;
        }
        self.moving.push_back(batch);
        true
    }

    /// Answers the oldest micro-batch, where there is one.
    fn answer(&mut self) -> bool {
        let Some(batch) = self.moving.pop_front() else { return false };
        let tokens = batch.decode_tokens + batch.prefill_tokens;
        let attended = batch.parts.iter().map(|part| attended(part.start, part.ids.len())).sum();
        let seconds = |stage: &StageCost| stage.alpha + stage.beta * tokens as f64 + stage.attention * attended;
        let seconds: Vec<f64> = self.stages.iter().map(seconds).collect();
        self.scheduler.measured(tokens, attended, &seconds, 1e-4);
        for choice in self.scheduler.answered().into_iter().flatten() {
            let (known, wanted) = self.known.get_mut(&choice).expect("it was asked for");
            let token = known.len() as u32;
            known.push(token);
            let is_last = known.len() == *wanted;
            self.scheduler.drawn(choice, token, is_last);
        }
        true
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Whatever the bounds are, and whatever stages are measured to cost.
    #[test]
    fn every_token_is_sent_once_and_in_order(
        seed in any::<u64>(),
        sequences in 1usize..10,
        batch_tokens in 1usize..300,
        tile in 0usize..40,
        pages in 16usize..60,
        costs in prop::collection::vec((0.0..0.1f64, 1e-6..0.01f64, 0.0..1e-4f64), 1..5),
        jobs in prop::collection::vec((1usize..400, 1usize..40), 1..24),
    ) {
        let limits = Limits { stages: costs.len(), sequences, batch_tokens, tile, pages, queue: 100, ..limits() };
        let stages = costs.iter().map(|&(alpha, beta, attention)| StageCost { alpha, beta, attention }).collect();
        let (known, sent, moving) = (HashMap::new(), HashMap::new(), VecDeque::new());
        let mut pipe = Checked { scheduler: Scheduler::new(limits), stages, known, sent, moving };
        let mut random = Random::new(seed);
        let mut jobs = jobs.into_iter().peekable();
        loop {
            if let Some((tokens, answer)) = jobs.next_if(|_| random.between(0, 5) == 0 || pipe.moving.is_empty()) {
                let prompt: Vec<u32> = (0..tokens as u32).map(|i| i * 7).collect();
                let job = Job { prompt: prompt.clone(), ..Job::default() };
                let request = pipe.scheduler.submit(job, 0).unwrap();
                pipe.known.insert(Choice { request, index: 0 }, (prompt, tokens + answer));
            }
            let mut moves: [fn(&mut Checked) -> bool; 2] = [Checked::send, Checked::answer];
            if random.between(0, 1) == 0 {
                moves.reverse();
            }
            let went_on = moves.iter().any(|go_on| go_on(&mut pipe));
            if !went_on && jobs.peek().is_none() {
                break;
            }
        }
        prop_assert!(matches!(pipe.scheduler.next(0), Next::Idle));
        for (known, wanted) in pipe.known.values() {
            prop_assert_eq!(known.len(), *wanted);
        }
        prop_assert_eq!(pipe.scheduler.status().held_pages, 0);
    }
}
