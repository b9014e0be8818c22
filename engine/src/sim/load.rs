//! Requests for a simulated pipeline, and what became of them.

use std::collections::{BTreeMap, VecDeque};

use super::Source;
use crate::random::{Random, mix};
use crate::schedule::cost::attended;
use crate::schedule::{Choice, Job, Limits, Next, Refused, RequestId, Scheduler};
use crate::trace::Nanos;

/// A request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// When it comes.
    pub at: Nanos,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// Answers wanted; 0 is 1.
    pub choices: u32,
    /// Tokens of each answer.
    pub output: usize,
    /// When its user gives up.
    pub cancel: Option<Nanos>,
    /// When it is given up for it.
    pub deadline: Option<Nanos>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// With all its answers.
    Finished,
    /// Its user gave up.
    Cancelled,
    /// At its deadline.
    Expired,
    /// It was not taken.
    Refused(Refused),
}

/// What became of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The tokens of each answer.
    pub answers: Vec<Vec<u32>>,
    /// When its first token came.
    pub first: Option<Nanos>,
    /// When its last token came.
    pub last: Option<Nanos>,
    /// How it ended; nothing while it has not.
    pub end: Option<End>,
}

/// Requests on their way through a scheduler.
pub struct Load {
    scheduler: Scheduler,
    requests: Vec<Request>,
    /// Requests to come, earliest last.
    to_come: Vec<usize>,
    cancels: BTreeMap<Nanos, Vec<usize>>,
    ids: BTreeMap<RequestId, usize>,
    outcomes: Vec<Outcome>,
    /// (tokens, attended) of the micro-batches in flight.
    in_flight: VecDeque<(usize, f64)>,
    vocab: u32,
    /// One draw in so many is undecided at first; 0: none.
    pub undecided: u64,
    draws: u64,
    /// Longest time from arrival to admission, or to now.
    pub longest_wait: Nanos,
}

impl Load {
    /// `requests` before a scheduler of these limits; answers are of tokens below `vocab`.
    pub fn new(limits: Limits, requests: Vec<Request>, vocab: u32) -> Load {
        let mut to_come: Vec<usize> = (0..requests.len()).collect();
        to_come.sort_by_key(|i| std::cmp::Reverse((requests[*i].at, *i)));
        let mut cancels: BTreeMap<Nanos, Vec<usize>> = BTreeMap::new();
        for (i, request) in requests.iter().enumerate() {
            if let Some(at) = request.cancel {
                cancels.entry(at.max(request.at)).or_default().push(i);
            }
        }
        // Whoever wants more answers than there are sequences is refused.
        let outcome = |request: &Request| Outcome {
            answers: vec![Vec::new(); (request.choices.max(1) as usize).min(limits.sequences)],
            ..Outcome::default()
        };
        Load {
            scheduler: Scheduler::new(limits),
            outcomes: requests.iter().map(outcome).collect(),
            requests,
            to_come,
            cancels,
            ids: BTreeMap::new(),
            in_flight: VecDeque::new(),
            vocab,
            undecided: 0,
            draws: 0,
            longest_wait: 0,
        }
    }

    /// What became of each request.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// The requests.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    fn id_of(&self, index: usize) -> Option<RequestId> {
        self.ids.iter().find(|(_, i)| **i == index).map(|(id, _)| *id)
    }

    fn drawn(&mut self, choice: Choice, result: u64, now: Nanos) {
        let Some(index) = self.ids.get(&choice.request).copied() else { return };
        self.draws += 1;
        if self.undecided > 0 && mix(self.draws).is_multiple_of(self.undecided) {
            return self.scheduler.needs_row(choice);
        }
        let token = (result % u64::from(self.vocab)) as u32;
        let outcome = &mut self.outcomes[index];
        let answer = &mut outcome.answers[choice.index as usize];
        answer.push(token);
        outcome.first.get_or_insert(now);
        outcome.last = Some(now);
        self.scheduler.drawn(choice, token, answer.len() >= self.requests[index].output);
        if !self.scheduler.knows(choice.request) {
            outcome.end = Some(End::Finished);
            self.ids.remove(&choice.request);
        }
    }
}

impl Source for Load {
    fn due(&self) -> Option<Nanos> {
        let arrival = self.to_come.last().map(|i| self.requests[*i].at);
        let cancel = self.cancels.keys().next().copied();
        [arrival, cancel, self.scheduler.next_deadline()].into_iter().flatten().min()
    }

    fn wake(&mut self, now: Nanos) {
        while let Some(index) = self.to_come.pop_if(|i| self.requests[*i].at <= now) {
            let request = &self.requests[index];
            let job = Job { prompt: request.prompt.clone(), choices: request.choices, deadline: request.deadline };
            match self.scheduler.submit(job, now) {
                Ok(id) => {
                    self.ids.insert(id, index);
                }
                Err(refused) => self.outcomes[index].end = Some(End::Refused(refused)),
            }
        }
        while let Some(entry) = self.cancels.first_entry() {
            if *entry.key() > now {
                break;
            }
            for index in entry.remove() {
                if let Some(id) = self.id_of(index) {
                    self.scheduler.cancel(id);
                    self.ids.remove(&id);
                    self.outcomes[index].end = Some(End::Cancelled);
                }
            }
        }
        for id in self.scheduler.expire(now) {
            if let Some(index) = self.ids.remove(&id) {
                self.outcomes[index].end = Some(End::Expired);
            }
        }
    }

    fn next(&mut self, now: Nanos) -> Next {
        let next = self.scheduler.next(now);
        if let Next::Send(batch) = &next {
            let tokens = batch.parts.iter().map(|part| part.ids.len()).sum();
            let seen = batch.parts.iter().map(|part| attended(part.start, part.ids.len())).sum();
            self.in_flight.push_back((tokens, seen));
            for part in &batch.parts {
                if let Some(index) = self.ids.get(&part.choice.request) {
                    let waited = now.saturating_sub(self.requests[*index].at);
                    if self.outcomes[*index].first.is_none() && part.start == 0 {
                        self.longest_wait = self.longest_wait.max(waited);
                    }
                }
            }
        }
        next
    }

    fn answered(&mut self, now: Nanos, results: &[u64], seconds: &[f64]) {
        let (tokens, seen) = self.in_flight.pop_front().expect("a micro-batch was sent");
        self.scheduler.measured(tokens, seen, seconds, 0.0);
        let choices = self.scheduler.answered();
        assert_eq!(choices.len(), results.len(), "a result for every draw");
        for (choice, result) in choices.into_iter().zip(results) {
            if let Some(choice) = choice {
                self.drawn(choice, *result, now);
            }
        }
    }
}

/// A random load.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    /// Requests.
    pub requests: usize,
    /// Requests a second; 0: all at once.
    pub rate: f64,
    /// Tokens of a prompt, smallest and largest.
    pub prompt: (usize, usize),
    /// Tokens of an answer, smallest and largest.
    pub output: (usize, usize),
    /// Share of requests that begin with one of a few common prefixes.
    pub shared: f64,
    /// Share of requests that are cancelled, at a random time after they come (seconds at most).
    pub cancelled: (f64, f64),
    /// Share of requests that want several answers.
    pub several: f64,
}

impl Distribution {
    /// The requests of a seed: Poisson arrivals, lengths uniform in their logarithm.
    pub fn requests(&self, seed: u64, vocab: u32) -> Vec<Request> {
        let mut random = Random::new(seed);
        let mut at = 0.0;
        let length = |random: &mut Random, (low, high): (usize, usize)| {
            let (low, high) = (low.max(1) as f64, high.max(1) as f64);
            (low * (high / low).powf(random.unit())).round() as usize
        };
        let request = |_| {
            if self.rate > 0.0 {
                at += random.exponential(1.0 / self.rate);
            }
            let tokens = length(&mut random, self.prompt);
            let common = if random.unit() < self.shared { random.between(1, 4) as u64 } else { 0 };
            let shared = if common > 0 { tokens * random.between(1, 3) / 4 } else { 0 };
            let prompt = (0..tokens).map(|i| {
                let bits = if i < shared { mix(common << 32 | i as u64) } else { random.bits() };
                (bits % u64::from(vocab)) as u32
            });
            let prompt = prompt.collect();
            let cancelled = random.unit() < self.cancelled.0;
            let cancel = cancelled.then(|| ((at + self.cancelled.1 * random.unit()) * 1e9) as Nanos);
            let choices = if random.unit() < self.several { random.between(2, 4) as u32 } else { 1 };
            let output = length(&mut random, self.output);
            Request { at: (at * 1e9) as Nanos, prompt, choices, output, cancel, deadline: None }
        };
        (0..self.requests).map(request).collect()
    }
}
