//! Stages are lost at every moment of a mixed workload, under seeds: the tokens are those of nobody being lost.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::law::StageCost;
use crate::random::Random;
use crate::schedule::{Job, Status};
use crate::sim::Model;
use crate::sim::toy::Toy;

const VOCAB: u32 = 500;

fn limits(stages: usize, pages: usize, prefix_cache: bool) -> Limits {
    Limits {
        stages,
        sequences: 4,
        batch_tokens: 48,
        tile: 8,
        outputs: 8,
        pages,
        context: 256,
        in_flight: 2 * stages + 1,
        queue: 100,
        prefix_cache,
        groups: None,
    }
}

/// A micro-batch on its way.
struct Moving {
    batch: Batch,
    data: Vec<u64>,
}

/// A scheduler and stages that compute one micro-batch after the other, whichever is asked to.
struct Pipe {
    scheduler: Scheduler,
    /// The stages' layers.
    cut: Vec<Range<usize>>,
    /// A layer each.
    toy: Toy,
    /// In front of each stage, and of the head.
    queues: Vec<VecDeque<Moving>>,
    answers: BTreeMap<Choice, Vec<u32>>,
    wanted: BTreeMap<RequestId, usize>,
    /// Tokens that each layer has computed since the latest loss.
    computed: Vec<usize>,
    /// What a layer is measured to cost, where it is.
    layer: Option<StageCost>,
}

/// A stage for each of so many layers.
fn singles(stages: usize) -> Vec<Range<usize>> {
    (0..stages).map(|stage| stage..stage + 1).collect()
}

impl Pipe {
    fn new(limits: Limits) -> Pipe {
        Pipe::cut(limits, singles(limits.stages))
    }

    fn cut(limits: Limits, cut: Vec<Range<usize>>) -> Pipe {
        let layers = cut[cut.len() - 1].end;
        Pipe {
            cut,
            toy: Toy::new(layers, limits.pages),
            queues: (0..=limits.stages).map(|_| VecDeque::new()).collect(),
            answers: BTreeMap::new(),
            wanted: BTreeMap::new(),
            computed: vec![0; layers],
            layer: None,
            scheduler: Scheduler::new(limits),
        }
    }

    fn ask(&mut self, prompt: Vec<u32>, choices: u32, count: usize) {
        let request = self.scheduler.submit(Job { prompt, choices, deadline: None }, 0).unwrap();
        self.wanted.insert(request, count);
        (0..choices).for_each(|index| drop(self.answers.insert(Choice { request, index }, Vec::new())));
    }

    /// Sends whatever there is to send.
    fn send(&mut self) {
        while let Next::Send(batch) = self.scheduler.next(0) {
            self.queues[0].push_back(Moving { batch, data: Vec::new() });
        }
    }

    /// A stage, or the head, does what came first; false where nothing did.
    fn advance(&mut self, place: usize) -> bool {
        let Some(mut moving) = self.queues[place].pop_front() else { return false };
        if let Some(layers) = self.cut.get(place).cloned() {
            // What a stage hands on is what its last layer does.
            let batch = Batch { from: moving.batch.from.map(|from| self.cut[from].end - 1), ..moving.batch.clone() };
            for layer in layers {
                if batch.from.is_none_or(|from| layer > from) && batch.until.is_none_or(|until| layer < until) {
                    self.computed[layer] += batch.parts.iter().map(|part| part.ids.len()).sum::<usize>();
                }
                moving.data = self.toy.forward(layer, &batch, moving.data);
            }
            self.queues[place + 1].push_back(moving);
            return true;
        }
        if let Some(layer) = self.layer.filter(|_| moving.batch.from.is_none() && moving.batch.until.is_none()) {
            let parts = &moving.batch.parts;
            let tokens = parts.iter().map(|part| part.ids.len()).sum();
            let attended = parts.iter().map(|part| attended(part.start, part.ids.len())).sum();
            let seconds =
                |layers: &Range<usize>| layers.len() as f64 * (layer.step(tokens as f64) + layer.attention * attended);
            let seconds: Vec<f64> = self.cut.iter().map(seconds).collect();
            self.scheduler.measured(tokens, attended, &seconds, 1e-4);
        }
        let choices = self.scheduler.answered();
        assert_eq!(choices.len(), moving.data.len(), "as many results as draws");
        for (choice, value) in choices.into_iter().zip(moving.data) {
            let Some(choice) = choice else { continue };
            let answer = self.answers.get_mut(&choice).unwrap();
            let token = (value % u64::from(VOCAB)) as u32;
            answer.push(token);
            let is_last = answer.len() == self.wanted[&choice.request];
            self.scheduler.drawn(choice, token, is_last);
        }
        true
    }

    /// Stages that know nothing take the places of these, in a pipeline of the same limits; the others have kept what they
    /// handed on of these pages.
    fn lose(&mut self, lost: &[usize], logged: Range<u32>) -> Rebuild {
        let pages = |(stage, layers): (usize, &Range<usize>)| if lost.contains(&stage) { 0..0 } else { layers.clone() };
        let pages: Vec<Range<usize>> = self.cut.iter().enumerate().map(pages).collect();
        self.go_on_with(self.cut.clone(), &pages, logged)
    }

    /// The layers are divided anew; each stage goes on with one before, of which it has the layers that both have, or knows
    /// nothing.
    fn recut(&mut self, cut: Vec<Range<usize>>, before: &[Option<usize>]) -> Rebuild {
        let common = |(layers, before): (&Range<usize>, &Option<usize>)| {
            let had = before.map_or(0..0, |before| self.cut[before].clone());
            let start = layers.start.max(had.start);
            start..layers.end.min(had.end).max(start)
        };
        let pages: Vec<Range<usize>> = cut.iter().zip(before).map(common).collect();
        self.go_on_with(cut, &pages, 0..0)
    }

    fn go_on_with(&mut self, cut: Vec<Range<usize>>, pages: &[Range<usize>], logged: Range<u32>) -> Rebuild {
        self.queues = (0..=cut.len()).map(|_| VecDeque::new()).collect();
        self.toy.forget_sequences();
        let has = |layer: usize| pages.iter().any(|pages| pages.contains(&layer));
        (0..self.computed.len()).filter(|layer| !has(*layer)).for_each(|layer| self.toy.lose(layer));
        self.computed.fill(0);
        let boundary: Vec<(u32, u32)> = logged.map(|page| (page, u32::MAX)).collect();
        let kept = |(layers, pages): (&Range<usize>, &Range<usize>)| Kept {
            layers: layers.clone(),
            pages: pages.clone(),
            boundary: boundary.clone(),
        };
        let kept: Vec<Kept> = cut.iter().zip(pages).map(kept).collect();
        let limits = Limits { stages: cut.len(), in_flight: 2 * cut.len() + 1, ..*self.scheduler.limits() };
        self.cut = cut;
        self.scheduler.recover(limits, Vec::new(), &kept)
    }

    /// Until all is answered, whatever comes first; `moments` many steps at most. Says whether all is.
    fn go_on(&mut self, random: &mut Random, moments: usize) -> bool {
        for _ in 0..moments {
            self.send();
            let first = random.between(0, self.queues.len() - 1);
            let places = self.queues.len();
            if !(0..places).any(|i| self.advance((first + i) % places)) {
                assert!(matches!(self.scheduler.next(0), Next::Idle), "it stands still: {:?}", self.scheduler.status());
                return true;
            }
        }
        false
    }
}

/// Prompts that begin alike, short and long ones, one with two answers: what each is alone.
fn workload(random: &mut Random) -> Vec<(Vec<u32>, u32, usize)> {
    let common: Vec<u32> = (0..70).map(|i| i * 7 % VOCAB).collect();
    (0..6u32)
        .map(|i| {
            let own = random.between(1, 60) as u32;
            let begin = if i % 2 == 0 { &common[..] } else { &[][..] };
            let prompt = begin.iter().copied().chain((0..own).map(|j| (i * 31 + j * 3) % VOCAB)).collect();
            (prompt, 1 + u32::from(i == 3), random.between(1, 40))
        })
        .collect()
}

fn check(pipe: &Pipe, stages: usize, work: &[(Vec<u32>, u32, usize)]) {
    for (choice, answer) in &pipe.answers {
        let (prompt, _, count) = &work[choice.request.0 as usize - 1];
        assert_eq!(*answer, Toy::alone(stages, prompt, *count, VOCAB), "{choice:?}");
    }
    let Status { running, waiting, held_pages, in_flight, .. } = pipe.scheduler.status();
    assert_eq!((running, waiting, held_pages, in_flight), (0, 0, 0, 0), "nothing is left");
}

fn asked(limits: Limits, work: &[(Vec<u32>, u32, usize)]) -> Pipe {
    let mut pipe = Pipe::new(limits);
    work.iter().for_each(|(prompt, choices, count)| pipe.ask(prompt.clone(), *choices, *count));
    pipe
}

/// T11 in the abstract: every stage is lost at every moment.
#[test]
fn t11_a_stage_that_is_lost_at_any_moment_changes_no_token() {
    let stages = 3;
    let work = workload(&mut Random::new(5));
    let mut moments = 0;
    for stage in 0..stages {
        for moment in 0.. {
            let mut random = Random::new(77);
            let mut pipe = asked(limits(stages, 24, true), &work);
            if pipe.go_on(&mut random, moment) {
                break;
            }
            let rebuild = pipe.lose(&[stage], 0..0);
            assert_eq!((rebuild.stage, rebuild.until), (stage, stage + 1));
            while pipe.scheduler.is_restoring() || !pipe.scheduler.rebuild().is_over() {
                assert!(!pipe.go_on(&mut random, 1), "nothing ends before it is restored");
                assert!(pipe.computed[stage + 1..].iter().all(|tokens| *tokens <= pipe.computed[stage]));
            }
            assert!(pipe.go_on(&mut random, 100_000));
            check(&pipe, stages, &work);
            moments += 1;
        }
    }
    assert!(moments > 300, "{moments} moments");
}

/// What was computed behind a lost stage is not computed again, and each page is restored once.
#[test]
fn only_what_was_lost_is_computed_again() {
    let prompt: Vec<u32> = (0..100).collect();
    let mut pipe = asked(limits(4, 64, true), &[]);
    let mut random = Random::new(1);
    for own in 0..3 {
        pipe.ask(prompt.iter().copied().chain([200 + own; 5]).collect(), 1, 30);
        // The first has filled what the others share before they come.
        while pipe.answers.values().all(Vec::is_empty) {
            assert!(!pipe.go_on(&mut random, 1));
        }
    }
    while pipe.answers.values().any(|answer| answer.len() < 8) {
        assert!(!pipe.go_on(&mut random, 1));
    }
    let written: usize = pipe.answers.values().map(|answer| 105 + answer.len() - 1).sum();
    let rebuild = pipe.lose(&[1], 0..0);
    // Three full pages are shared; what was on its way is computed as it would have been.
    assert!(rebuild.tokens <= written - 2 * 96 && rebuild.tokens > written - 2 * 96 - 3, "{rebuild:?}, {written}");
    assert_eq!((rebuild.sequences, rebuild.stage, rebuild.until), (3, 1, 2));
    pipe.send();
    while !pipe.scheduler.rebuild().is_over() {
        for place in 0..5 {
            pipe.advance(place);
        }
        pipe.send();
    }
    let decoded = pipe.computed[3];
    assert!(pipe.computed[2] <= decoded + 3, "{:?}", pipe.computed);
    assert!(pipe.go_on(&mut random, 100_000));
    // Behind the lost stage the rest of the answers was computed, and nothing else.
    let rest: usize = pipe.answers.values().map(|answer| answer.len()).sum::<usize>() + 3 * 105 - 3 - written;
    assert!(pipe.computed[3] >= rest && pipe.computed[3] <= rest + 3, "{:?}, {rest}", pipe.computed);
    assert_eq!(pipe.computed[3], pipe.computed[2]);
    assert_eq!(pipe.computed[0], pipe.computed[1]);
    assert_eq!(pipe.computed[1], pipe.computed[2] + rebuild.tokens);
}

/// Where the stage before the lost one has kept what it handed on, those before compute nothing again.
#[test]
fn what_was_handed_on_need_not_be_computed_again() {
    let mut pipe = asked(limits(4, 64, true), &[]);
    pipe.ask((0..100).collect(), 1, 30);
    let mut random = Random::new(1);
    while pipe.answers.values().any(|answer| answer.len() < 8) {
        assert!(!pipe.go_on(&mut random, 1));
    }
    let rebuild = pipe.lose(&[2], 0..64);
    assert_eq!((rebuild.from, rebuild.logged, rebuild.tokens), (Some(1), 107, 107));
    assert_eq!((0..4).map(|stage| rebuild.of(stage)).collect::<Vec<_>>(), [0, 0, 107, 0]);
    assert!(pipe.go_on(&mut random, 100_000));
    assert_eq!(pipe.computed, [22, 22, 129, 22]);
    check(&pipe, 4, &[((0..100).collect(), 1, 30)]);
}

/// Whoever goes while what was lost is restored leaves nothing behind that another one would take for restored.
#[test]
fn a_recovery_that_nobody_waits_for_any_more_leaves_nothing_behind() {
    let prompt: Vec<u32> = (0..150).collect();
    for moments in 0..40 {
        let mut pipe = asked(limits(3, 24, true), &[]);
        pipe.ask(prompt.clone(), 1, 60);
        let mut random = Random::new(moments);
        while pipe.answers.values().any(|answer| answer.len() < 5) {
            assert!(!pipe.go_on(&mut random, 1));
        }
        pipe.lose(&[1], 0..0);
        let is_over = pipe.go_on(&mut random, moments as usize);
        assert!(!is_over);
        // The last one that runs is cancelled: the head gives up what is in the pipe, and the stages forget their tables.
        pipe.scheduler.cancel(RequestId(1));
        pipe.scheduler.restart();
        pipe.queues.iter_mut().for_each(VecDeque::clear);
        pipe.toy.forget_sequences();
        pipe.answers.clear();
        pipe.ask(prompt.clone(), 1, 8);
        assert!(pipe.go_on(&mut random, 100_000));
        let choice = Choice { request: RequestId(2), index: 0 };
        assert_eq!(pipe.answers[&choice], Toy::alone(3, &prompt, 8, VOCAB), "after {moments} moments");
    }
}

/// An answer that makes no sense ends a pipeline, too: what it should have told is computed once more.
#[test]
fn what_was_answered_and_not_drawn_from_is_computed_again() {
    let mut pipe = asked(limits(2, 24, true), &[]);
    let work = [((0..40).collect::<Vec<u32>>(), 1, 20)];
    pipe.ask(work[0].0.clone(), 1, 20);
    let mut random = Random::new(9);
    while pipe.answers.values().any(|answer| answer.len() < 5) {
        assert!(!pipe.go_on(&mut random, 1));
    }
    pipe.send();
    while pipe.queues[2].is_empty() {
        assert!(pipe.advance(0) || pipe.advance(1));
    }
    assert_eq!(pipe.scheduler.answered().len(), 1);
    pipe.lose(&[0], 0..0);
    assert!(pipe.go_on(&mut random, 100_000));
    check(&pipe, 2, &work);
}

/// Of layers that change their stage, and of those of a stage that is gone, all are computed again up to the last one; those
/// that stay where they are behind it are not.
#[test]
fn layers_that_change_their_stage_are_computed_again_and_none_behind_them() {
    let asked_and_begun = || {
        let mut pipe = Pipe::cut(limits(3, 64, true), vec![0..3, 3..6, 6..9]);
        pipe.ask((0..100).collect(), 1, 30);
        let mut random = Random::new(1);
        while pipe.answers.values().any(|answer| answer.len() < 8) {
            assert!(!pipe.go_on(&mut random, 1));
        }
        (pipe, random)
    };
    let check =
        |cut: Vec<Range<usize>>, before: &[Option<usize>], until: usize, stage: usize, layer_tokens: &[usize]| {
            let (mut pipe, mut random) = asked_and_begun();
            let rebuild = pipe.recut(cut.clone(), before);
            assert_eq!((rebuild.tokens, rebuild.until, rebuild.stage), (107, until, stage), "{cut:?}");
            let found = cut.iter().enumerate().map(|(stage, layers)| rebuild.layer_tokens(stage, layers));
            assert_eq!(found.collect::<Vec<_>>(), layer_tokens, "{cut:?}");
            assert!(pipe.go_on(&mut random, 100_000));
            let expected: Vec<usize> = (0..9).map(|layer| 22 + if layer < until { 107 } else { 0 }).collect();
            assert_eq!(pipe.computed, expected, "{cut:?}");
            self::check(&pipe, 9, &[((0..100).collect(), 1, 30)]);
        };
    // A layer goes to the stage behind, one to the stage before.
    check(vec![0..2, 2..6, 6..9], &[Some(0), Some(1), Some(2)], 3, 1, &[214, 107, 0]);
    check(vec![0..4, 4..6, 6..9], &[Some(0), Some(1), Some(2)], 4, 0, &[428, 0, 0]);
    // The middle one is gone, and its neighbours have its layers.
    check(vec![0..5, 5..9], &[Some(0), Some(2)], 6, 1, &[535, 107]);
    // Another one takes two layers from the last.
    check(vec![0..3, 3..6, 6..8, 8..9], &[Some(0), Some(1), None, Some(2)], 8, 2, &[321, 321, 214, 0]);
}

/// Where no stage has lost anything, what is remembered of those who have ended stays; else it is forgotten.
#[test]
fn what_is_remembered_stays_where_every_stage_has_it() {
    let prompt: Vec<u32> = (0..100).collect();
    for (lost, spared) in [(&[][..], 99), (&[1], 0)] {
        let mut pipe = asked(limits(3, 64, true), &[]);
        let mut random = Random::new(4);
        pipe.ask(prompt.clone(), 1, 5);
        assert!(pipe.go_on(&mut random, 100_000));
        // One that is cut off in the middle of its prompt: what it was to fill is not remembered.
        pipe.ask(vec![7; 200], 1, 5);
        pipe.send();
        assert!(pipe.advance(0));
        pipe.lose(lost, 0..0);
        pipe.ask(prompt.clone(), 1, 5);
        assert!(pipe.go_on(&mut random, 100_000));
        let work = [(prompt.clone(), 1, 5), (vec![7; 200], 1, 5), (prompt.clone(), 1, 5)];
        assert_eq!(pipe.scheduler.status().spared_tokens, spared, "{lost:?} is lost");
        check(&pipe, 3, &work);
    }
}

#[test]
fn costs_of_a_pipeline_with_other_kernels_are_guessed_anew() {
    let limits = |tile| Limits { tile, batch_tokens: 256, ..limits(2, 64, false) };
    let first = |mut scheduler: Scheduler| {
        scheduler.submit(Job { prompt: vec![7; 200], ..Job::default() }, 0).unwrap();
        match scheduler.next(0) {
            Next::Send(batch) => batch.prefill_tokens,
            other => panic!("{other:?}"),
        }
    };
    let mut moved = Scheduler::new(limits(64));
    let nothing = [0..1, 1..2].map(|layers| Kept { layers, ..Kept::default() });
    moved.recover(limits(8), Vec::new(), &nothing);
    let (card, software) = (first(Scheduler::new(limits(64))), first(Scheduler::new(limits(8))));
    assert!(software < card, "{software} and {card}");
    assert_eq!(first(moved), software);
}

#[test]
fn a_pipeline_with_other_pages_begins_again_and_says_what_does_not_fit() {
    let mut pipe = asked(limits(2, 24, true), &[]);
    pipe.ask((0..90).collect(), 1, 20);
    pipe.ask((0..20).collect(), 1, 20);
    let mut random = Random::new(3);
    assert!(!pipe.go_on(&mut random, 40));
    pipe.queues.iter_mut().for_each(VecDeque::clear);
    let smaller = Limits { stages: 1, in_flight: 3, pages: 2, ..limits(1, 2, true) };
    pipe.scheduler.recover(smaller, Vec::new(), &[Kept { layers: 0..1, ..Kept::default() }]);
    let too_long = pipe.scheduler.too_long();
    assert_eq!(too_long, [RequestId(1)]);
    too_long.into_iter().for_each(|request| pipe.scheduler.cancel(request));
    (pipe.toy, pipe.computed, pipe.cut) = (Toy::new(1, 2), vec![0], singles(1));
    pipe.queues.truncate(2);
    // One stage computes other tokens than two: what is committed stays.
    let before = pipe.answers.clone();
    assert!(pipe.go_on(&mut random, 100_000));
    let choice = Choice { request: RequestId(2), index: 0 };
    assert_eq!(pipe.answers[&choice].len(), 20);
    assert!(pipe.answers[&choice].starts_with(&before[&choice]));
}

/// Of each property; `PP_SOAK` sets it.
fn cases() -> u32 {
    std::env::var("PP_SOAK").ok().and_then(|cases| cases.parse().ok()).unwrap_or(300)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]

    /// The layers are divided anew again and again, while something is restored too, and stages are lost meanwhile.
    #[test]
    fn other_cuts_change_no_token(
        seed in any::<u64>(),
        layers in 4usize..8,
        pages in 12usize..40,
        cuts in prop::collection::vec((1usize..100, any::<u64>()), 1..6),
        cost in prop::option::of((0.0..0.1f64, 1e-6..0.01f64, 0.0..1e-3f64)),
    ) {
        let mut random = Random::new(seed);
        let work = workload(&mut random);
        let divided = |random: &mut Random| {
            let mut ends: Vec<usize> = (0..random.between(0, 3)).map(|_| random.between(1, layers - 1)).collect();
            ends.extend([0, layers]);
            ends.sort_unstable();
            ends.dedup();
            ends.windows(2).map(|ends| ends[0]..ends[1]).collect::<Vec<_>>()
        };
        let first = divided(&mut random);
        let mut pipe = Pipe::cut(limits(first.len(), pages, true), first);
        work.iter().for_each(|(prompt, choices, count)| pipe.ask(prompt.clone(), *choices, *count));
        pipe.layer = cost.map(|(alpha, beta, attention)| StageCost { alpha, beta, attention });
        for (moments, how) in cuts {
            pipe.go_on(&mut random, moments);
            let mut how = Random::new(how);
            let cut = divided(&mut how);
            let mut left: Vec<usize> = (0..pipe.cut.len()).collect();
            let mut before = |_| (!left.is_empty() && how.between(0, 3) > 0).then(|| left.swap_remove(how.between(0, left.len() - 1)));
            let before: Vec<Option<usize>> = (0..cut.len()).map(&mut before).collect();
            let rebuild = pipe.recut(cut, &before);
            prop_assert!(rebuild.until <= layers);
        }
        prop_assert!(pipe.go_on(&mut random, 1_000_000));
        check(&pipe, layers, &work);
    }

    /// Several losses, of several stages, also while what an earlier one took is restored; short of pages or not; with
    /// cancellation in between.
    #[test]
    fn losses_upon_losses_change_no_token(
        seed in any::<u64>(),
        stages in 1usize..5,
        pages in 8usize..40,
        prefix_cache in any::<bool>(),
        losses in prop::collection::vec((1usize..120, prop::collection::vec(0usize..5, 0..3)), 1..6),
        cancelled in prop::option::of(1u64..7),
        logged in 0u32..40,
        cost in prop::option::of((0.0..0.1f64, 1e-6..0.01f64, 0.0..1e-3f64)),
    ) {
        let mut random = Random::new(seed);
        let work = workload(&mut random);
        let mut pipe = asked(limits(stages, pages, prefix_cache), &work);
        pipe.layer = cost.map(|(alpha, beta, attention)| StageCost { alpha, beta, attention });
        for (at, (moments, lost)) in losses.iter().enumerate() {
            let ended = pipe.go_on(&mut random, *moments);
            if at == 1 && let Some(request) = cancelled {
                pipe.scheduler.cancel(RequestId(request));
                pipe.answers.retain(|choice, answer| {
                    choice.request != RequestId(request) || answer.len() == pipe.wanted[&choice.request]
                });
            }
            let lost: Vec<usize> = lost.iter().map(|stage| stage % stages).collect();
            let rebuild = pipe.lose(&lost, logged..40);
            prop_assert!(!ended || rebuild.tokens == 0);
        }
        prop_assert!(pipe.go_on(&mut random, 1_000_000));
        check(&pipe, stages, &work);
    }
}
