//! Who computes what next: continuous batching over a pipeline. Pure: no I/O, no clock, no device; times come in.
//!
//! Each running sequence is in the pipe at most once when it decodes. Sequences whose last token is known wait in line,
//! and every micro-batch takes its share of them: running sequences over `groups`, rounded up. So they fall into
//! `groups` decode groups that follow each other through the pipe, as many as the stages keep busy. Prompts are cut in
//! chunks that ride along under a token budget (Agrawal et al. 2024, arXiv:2403.02310), sized so that micro-batches take
//! equal times; a chunk that is not the last waits for nothing.
//!
//! Every stage works through its micro-batches in the order in which the head sent them. So a page may be shared as
//! soon as the micro-batch that fills it was sent, and given to another sequence as soon as the last one that needs
//! it was.

pub mod cost;
mod job;
pub mod pages;
mod recovery;
mod straggler;

use std::collections::{BTreeMap, VecDeque};

use pp_shaders::PAGE;

use crate::law::Share;
use crate::trace::Nanos;
use cost::{Costs, Fits};
pub use job::{Batch, Choice, Job, Limits, Next, Part, Refused, RequestId, Status};
use pages::{Pages, Table};
use recovery::Recovery;
pub use recovery::{Kept, Rebuild};
pub use straggler::Straggler;
use straggler::Watches;

#[derive(Debug)]
struct Sequence {
    /// Prompt and answer so far.
    tokens: Vec<u32>,
    /// Tokens sent down the pipe since it was admitted.
    sent: usize,
    /// Pages told to the stages.
    told: usize,
    /// Parts in the pipe.
    in_flight: usize,
    admitted: Option<(u64, Table)>,
    whole_row: bool,
    deadline: Option<Nanos>,
    spared: usize,
    preempted: bool,
}

impl Sequence {
    fn left(&self) -> usize {
        self.tokens.len() - self.sent
    }
}

#[derive(Debug)]
struct Flight {
    group: u32,
    /// The latest contents of pages before it.
    known: u64,
    parts: Vec<Sent>,
    decodes: bool,
    /// Tokens of it that only restore what was lost.
    restores: usize,
}

/// A part of a micro-batch that was sent.
#[derive(Debug)]
struct Sent {
    choice: Choice,
    draws: bool,
    /// Position of its first token.
    start: usize,
}

/// The scheduler.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pages: Pages,
    sequences: BTreeMap<Choice, Sequence>,
    /// In order of arrival; older ones first, also when they come back.
    waiting: VecDeque<Choice>,
    /// Admitted, with prompt left to send.
    prefilling: Vec<Choice>,
    /// Admitted, the last token known and not sent, longest first.
    ready: VecDeque<Choice>,
    in_flight: VecDeque<Flight>,
    released: Vec<u64>,
    recovery: Recovery,
    /// What the stages of the next pipeline should cost, where that is another than those of this one.
    expected: Option<cost::Costs>,
    requests: u64,
    names: u64,
    running: usize,
    fits: Fits,
    watches: Watches,
    /// Tokens of a prompt's chunk at its start, and what chunks are sized after.
    chunk: usize,
    preemptions: u64,
    spared: u64,
    /// Requests that ended since the pipe was last empty, and when that was: for the retry hint.
    ended: u64,
    began: Nanos,
    now: Nanos,
}

impl Scheduler {
    /// A scheduler for a pipeline with nothing in it.
    ///
    /// # Panics
    /// When a limit other than the queue is zero.
    pub fn new(limits: Limits) -> Scheduler {
        let all = [limits.stages, limits.sequences, limits.batch_tokens, limits.outputs, limits.pages, limits.context];
        assert!(all.iter().all(|limit| *limit > 0) && limits.in_flight > 0, "limits are positive: {limits:?}");
        Scheduler {
            pages: Pages::new(limits.pages, limits.prefix_cache),
            fits: Fits::new(limits.stages, Vec::new(), limits.tile),
            watches: Watches::new(limits.stages),
            chunk: limits.batch_tokens,
            limits,
            sequences: BTreeMap::new(),
            waiting: VecDeque::new(),
            prefilling: Vec::new(),
            ready: VecDeque::new(),
            in_flight: VecDeque::new(),
            released: Vec::new(),
            recovery: Recovery::default(),
            expected: None,
            requests: 0,
            names: 0,
            running: 0,
            preemptions: 0,
            spared: 0,
            ended: 0,
            began: 0,
            now: 0,
        }
    }

    /// The bounds.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes a request.
    ///
    /// # Errors
    /// [`Refused`]: it can never run, or too many wait.
    pub fn submit(&mut self, job: Job, now: Nanos) -> Result<RequestId, Refused> {
        self.now = now;
        let tokens = job.prompt.len();
        let choices = job.choices.max(1);
        if tokens == 0 {
            return Err(Refused::EmptyPrompt);
        }
        if tokens > self.limits.context {
            return Err(Refused::PromptTooLong { tokens, context: self.limits.context });
        }
        if tokens > self.limits.capacity() {
            return Err(Refused::NeverFits { tokens, capacity: self.limits.capacity() });
        }
        if choices as usize > self.limits.sequences {
            return Err(Refused::TooManyChoices { choices: choices as usize, limit: self.limits.sequences });
        }
        if self.sequences.is_empty() {
            (self.began, self.ended) = (now, 0);
        }
        // Those that have a place wait for the next micro-batch only.
        let all = self.running + self.waiting.len();
        if all >= self.limits.sequences.saturating_add(self.limits.queue) {
            let (queued, retry_seconds) = (all - self.limits.sequences, self.retry_seconds());
            return Err(Refused::Busy { queued, limit: self.limits.queue, retry_seconds });
        }
        self.requests += 1;
        let request = RequestId(self.requests);
        for index in 0..choices {
            let sequence = Sequence {
                tokens: job.prompt.clone(),
                sent: 0,
                told: 0,
                in_flight: 0,
                admitted: None,
                whole_row: false,
                deadline: job.deadline,
                spared: 0,
                preempted: false,
            };
            self.sequences.insert(Choice { request, index }, sequence);
            self.waiting.push_back(Choice { request, index });
        }
        Ok(request)
    }

    /// Seconds that a request takes to end on average, of those since the pipe was last empty: after as long there will
    /// probably be a place.
    fn retry_seconds(&self) -> f64 {
        let seconds = self.now.saturating_sub(self.began) as f64 * 1e-9;
        (seconds / self.ended.max(1) as f64).max(1.0)
    }

    /// Decode groups: as many micro-batches with decoding sequences are in the pipe at once, at most.
    pub fn groups(&self) -> usize {
        self.groups_for(self.decoding().max(1))
    }

    /// Decode groups for so many decoding sequences.
    pub fn groups_for(&self, decoding: usize) -> usize {
        let wanted = match (self.limits.groups, self.fits.costs()) {
            (Some(groups), _) => groups,
            (None, Some(costs)) => costs.best_groups(decoding),
            (None, None) => self.limits.stages,
        };
        wanted.clamp(1, decoding.clamp(1, self.limits.in_flight))
    }

    /// Admitted sequences whose prompt has been sent.
    fn decoding(&self) -> usize {
        self.running - self.prefilling.len()
    }

    /// Numbers for people.
    pub fn status(&self) -> Status {
        Status {
            waiting: self.waiting.len(),
            running: self.running,
            decoding: self.decoding(),
            groups: self.groups(),
            in_flight: self.in_flight.len(),
            held_pages: self.pages.total() - self.pages.available(),
            idle_pages: self.pages.idle(),
            pages: self.pages.total(),
            preemptions: self.preemptions,
            spared_tokens: self.spared,
        }
    }

    /// Seconds that the slowest stage should take for such a micro-batch ([`Fits::expected`]).
    pub fn expected(&self, tokens: usize, attended: f64) -> Option<f64> {
        self.fits.expected(tokens, attended)
    }

    /// What the stages are measured to cost, once they were.
    pub fn costs(&self) -> Option<&Costs> {
        self.fits.costs()
    }

    /// Whether any answer of a request is still to come.
    pub fn knows(&self, request: RequestId) -> bool {
        let first = Choice { request, index: 0 };
        self.sequences.range(first..).next().is_some_and(|(choice, _)| choice.request == request)
    }

    /// Prompt tokens of an answer that the prefix cache spared; none for one that has ended.
    pub fn spared(&self, choice: Choice) -> usize {
        self.sequences.get(&choice).map_or(0, |sequence| sequence.spared)
    }

    /// The next micro-batch, if there is one to send.
    pub fn next(&mut self, now: Nanos) -> Next {
        self.now = now;
        if self.is_restoring() {
            return self.next_restoring();
        }
        let short_of_pages = self.admit();
        let known = self.pages.latest();
        let mut batch = Batch { group: self.free_group(), ..Batch::default() };
        let decode_flights = self.in_flight.iter().filter(|flight| flight.decodes).count();
        if self.in_flight.len() < self.limits.in_flight {
            let groups = self.groups();
            // Where prompts wait, one place in the pipe is not for decode.
            let for_decode = match self.prefilling.is_empty() {
                true => groups,
                false => groups.min((self.limits.in_flight - 1).max(1)),
            };
            if decode_flights < for_decode {
                self.take_ready(&mut batch, groups);
            }
            // Chunks of prompts go ahead of answers, so one more than the stages can keep each of them busy.
            let most = groups.max(self.limits.stages) + 1;
            if !batch.parts.is_empty() || self.in_flight.len() < most {
                self.take_prompts(&mut batch);
            }
        }
        if batch.parts.is_empty() && (self.released.is_empty() || self.in_flight.len() >= self.limits.in_flight) {
            let idle = self.in_flight.is_empty() && self.sequences.is_empty();
            return if idle { Next::Idle } else { Next::Wait { for_pages: short_of_pages } };
        }
        batch.released = std::mem::take(&mut self.released);
        let sent = |part: &Part| Sent { choice: part.choice, draws: part.draws, start: part.start };
        self.in_flight.push_back(Flight {
            group: batch.group,
            known,
            parts: batch.parts.iter().map(sent).collect(),
            decodes: batch.decode_tokens > 0,
            restores: 0,
        });
        Next::Send(batch)
    }

    fn free_group(&self) -> u32 {
        let used = |group: &u32| self.in_flight.iter().any(|flight| flight.group == *group);
        (0..).find(|group| !used(group)).unwrap_or(0)
    }

    /// Gives pages to those who wait, in order; true where the first found too few.
    fn admit(&mut self) -> bool {
        let mut at = 0;
        let mut admitted = false;
        let mut short = false;
        while self.running < self.limits.sequences && at < self.waiting.len() {
            let choice = self.waiting[at];
            let sequence = &self.sequences[&choice];
            // What was in the pipe when it lost its pages comes back first. An answer waits until another one of
            // the same prompt has filled the pages that they share.
            if sequence.in_flight > 0 || self.shares_with_one_in_prefill(choice) {
                at += 1;
                continue;
            }
            let positions = sequence.tokens.len();
            // One page is left for each that runs already, so that admission is not undone in the next step.
            let reserve = self.running;
            if self.pages.cost(&sequence.tokens, positions) + reserve > self.pages.available() && self.running > 0 {
                short = true;
                break;
            }
            self.waiting.remove(at);
            self.names += 1;
            let sequence = self.sequences.get_mut(&choice).expect("waiting sequences exist");
            let (mut table, spared) = self.pages.begin(&sequence.tokens);
            let grown = self.pages.grow(&mut table, positions);
            assert!(grown, "a sequence alone always fits: it was refused otherwise");
            if !sequence.preempted {
                sequence.spared = spared;
                self.spared += spared as u64;
            }
            (sequence.sent, sequence.told) = (spared, 0);
            sequence.admitted = Some((self.names, table));
            self.prefilling.push(choice);
            self.running += 1;
            admitted = true;
        }
        if admitted {
            self.prefilling.sort_unstable();
            self.size_chunks();
        }
        short
    }

    fn shares_with_one_in_prefill(&self, choice: Choice) -> bool {
        self.limits.prefix_cache
            && choice.index > 0
            && self.prefilling.iter().any(|other| other.request == choice.request)
    }

    /// Chunks for the prompts there are now: few enough to be worth their weights, enough to fill the pipe.
    fn size_chunks(&mut self) {
        let left: usize = self.prefilling.iter().map(|choice| self.sequences[choice].left()).sum();
        let most = self.limits.batch_tokens;
        let chunk = self.fits.first_chunk(left, most);
        self.chunk = chunk.clamp(self.limits.least_chunk().min(most), most);
    }

    /// A group's share of the sequences that wait in line.
    fn take_ready(&mut self, batch: &mut Batch, groups: usize) {
        // Prompts get on, however many decode.
        let for_prompts = if self.prefilling.is_empty() { 0 } else { PAGE.min(self.limits.batch_tokens / 2) };
        let most = (self.limits.batch_tokens - for_prompts).min(self.limits.outputs).max(1);
        let share = self.decoding().div_ceil(groups).min(most);
        let mut taken: Vec<Choice> = Vec::new();
        while taken.len() < share {
            let Some(choice) = self.ready.pop_front() else { break };
            if self.make_room(choice, &mut taken) {
                taken.push(choice);
            }
        }
        for choice in taken {
            let part = self.part(choice, 1);
            batch.parts.push(part);
            batch.decode_tokens += 1;
        }
    }

    /// Makes room for a sequence's next token, at the cost of younger ones, those in `taken` among them; false where it
    /// was itself the youngest.
    fn make_room(&mut self, choice: Choice, taken: &mut Vec<Choice>) -> bool {
        loop {
            let sequence = self.sequences.get_mut(&choice).expect("running sequences exist");
            let (_, table) = sequence.admitted.as_mut().expect("running sequences have a table");
            if self.pages.grow(table, sequence.tokens.len()) {
                return true;
            }
            let running = self.sequences.iter().filter(|(_, s)| s.admitted.is_some());
            let youngest = running.map(|(choice, _)| *choice).next_back().expect("this one runs");
            taken.retain(|other| *other != youngest);
            self.preempt(youngest);
            if youngest == choice {
                return false;
            }
        }
    }

    /// Takes a sequence's pages; it will begin again.
    fn preempt(&mut self, choice: Choice) {
        self.preemptions += 1;
        self.take_pages(choice);
        let sequence = self.sequences.get_mut(&choice).expect("running sequences exist");
        (sequence.sent, sequence.told, sequence.preempted) = (0, 0, true);
        let at = self.waiting.partition_point(|other| *other < choice);
        self.waiting.insert(at, choice);
    }

    fn take_pages(&mut self, choice: Choice) {
        let Some(sequence) = self.sequences.get_mut(&choice) else { return };
        let Some((name, table)) = sequence.admitted.take() else { return };
        self.pages.release(table, &sequence.tokens[..sequence.sent]);
        if sequence.told > 0 {
            self.released.push(name);
        }
        self.prefilling.retain(|other| *other != choice);
        self.ready.retain(|other| *other != choice);
        self.running -= 1;
    }

    /// Chunks of prompts up to the budget: half of it to the oldest, so that it gets through, the rest to whoever has
    /// least left, so that short ones do not wait for long ones.
    fn take_prompts(&mut self, batch: &mut Batch) {
        let decode = batch.decode_tokens;
        let (least, left_over) = (self.limits.least_chunk(), self.limits.left_over());
        let budget = self.chunk.saturating_sub(decode).max(least);
        let all: usize = self.prefilling.iter().map(|choice| self.sequences[choice].left()).sum();
        // A few tokens that would be left over go along.
        let room = self.limits.batch_tokens - decode;
        let budget = if all <= budget + left_over { all.min(room) } else { self.whole_tiles(decode, budget, room) };
        let Some(oldest) = self.prefilling.first().copied() else { return };
        let mut others: Vec<Choice> = self.prefilling[1..].to_vec();
        others.sort_by_key(|choice| (self.sequences[choice].left(), *choice));
        let of_others: usize = others.iter().map(|choice| self.sequences[choice].left()).sum();
        let first_share = budget.saturating_sub(of_others).max(budget.div_ceil(2));
        let mut left = budget;
        for (choice, share) in std::iter::once((oldest, first_share)).chain(others.into_iter().map(|c| (c, budget))) {
            if left == 0 || batch.parts.len() >= self.limits.outputs.min(self.limits.sequences) {
                break;
            }
            let sequence = &self.sequences[&choice];
            let size = match self.fits.costs() {
                Some(costs) => costs.chunk_at(self.chunk, sequence.sent).max(least),
                None => self.chunk,
            };
            let size = if sequence.left() <= size + left_over { sequence.left() } else { size };
            let count = size.min(share).min(left);
            let before = decode + batch.prefill_tokens;
            let count = if count < sequence.left() {
                self.whole_tiles(before, count, left.min(sequence.left()))
            } else {
                count
            };
            let part = self.part(choice, count);
            left -= count;
            batch.prefill_tokens += count;
            batch.parts.push(part);
        }
    }

    /// About `count` tokens of a prompt, at most `most`, that fill whole tiles with `before` other tokens; `count` where
    /// there are none.
    fn whole_tiles(&self, before: usize, count: usize, most: usize) -> usize {
        let tile = self.limits.tile.max(1);
        let nearest = (before + count + tile / 2) / tile * tile;
        let above = (before + (self.limits.least_chunk() / 2).min(count)).next_multiple_of(tile);
        let most_whole = (before + most) / tile * tile;
        match nearest.max(above).min(most_whole).checked_sub(before) {
            None | Some(0) => count.min(most),
            Some(whole) => whole,
        }
    }

    fn part(&mut self, choice: Choice, count: usize) -> Part {
        let sequence = self.sequences.get_mut(&choice).expect("running sequences exist");
        let (name, table) = sequence.admitted.as_mut().expect("running sequences have a table");
        let start = sequence.sent;
        let ids = sequence.tokens[start..start + count].to_vec();
        let new_pages = table.pages[sequence.told..].to_vec();
        sequence.told = table.pages.len();
        sequence.sent += count;
        sequence.in_flight += 1;
        self.pages.fill(table, &sequence.tokens[..sequence.sent]);
        let draws = sequence.sent == sequence.tokens.len();
        let whole_row = draws && std::mem::take(&mut sequence.whole_row);
        let sequence_name = *name;
        if draws {
            self.prefilling.retain(|other| *other != choice);
        }
        Part { choice, sequence: sequence_name, start, ids, new_pages, draws, whole_row }
    }

    /// The tail has answered the oldest micro-batch in flight: for each output in it, whose it is; nothing where that
    /// one is not wanted any more. Each must then be given to [`Scheduler::drawn`] or [`Scheduler::needs_row`].
    ///
    /// # Panics
    /// When nothing is in flight.
    pub fn answered(&mut self) -> Vec<Option<Choice>> {
        let flight = self.in_flight.pop_front().expect("a micro-batch is in flight");
        let mut drawn = Vec::new();
        self.restored(flight.restores);
        for Sent { choice, draws, .. } in flight.parts {
            let sequence = self.sequences.get_mut(&choice);
            if let Some(sequence) = sequence {
                sequence.in_flight -= 1;
                if draws {
                    drawn.push(Some(choice));
                }
            } else if draws {
                drawn.push(None);
            }
        }
        drawn
    }

    /// A token was drawn; `last` ends the answer, and so does the end of what a sequence can hold.
    pub fn drawn(&mut self, choice: Choice, token: u32, last: bool) {
        let capacity = self.limits.capacity();
        let Some(sequence) = self.sequences.get_mut(&choice) else { return };
        if last || sequence.tokens.len() >= capacity {
            self.end(choice);
            return;
        }
        sequence.tokens.push(token);
        if sequence.admitted.is_some() {
            self.ready.push_back(choice);
        }
    }

    /// The candidates did not decide: the last token is computed once more, with all its logits.
    pub fn needs_row(&mut self, choice: Choice) {
        let Some(sequence) = self.sequences.get_mut(&choice) else { return };
        sequence.whole_row = true;
        if sequence.admitted.is_some() {
            sequence.sent -= 1;
            self.ready.push_back(choice);
        }
    }

    fn end(&mut self, choice: Choice) {
        self.take_pages(choice);
        self.waiting.retain(|other| *other != choice);
        self.sequences.remove(&choice);
        if !self.knows(choice.request) {
            self.ended += 1;
        }
    }

    /// Ends a request wherever it is; its pages are free at once.
    pub fn cancel(&mut self, request: RequestId) {
        let choices: Vec<Choice> = self.sequences.keys().filter(|c| c.request == request).copied().collect();
        choices.into_iter().for_each(|choice| self.end(choice));
    }

    /// Ends the requests whose deadline has passed, and names them.
    pub fn expire(&mut self, now: Nanos) -> Vec<RequestId> {
        let late = |sequence: &Sequence| sequence.deadline.is_some_and(|deadline| deadline <= now);
        let mut expired: Vec<_> = self.sequences.iter().filter(|(_, s)| late(s)).map(|(c, _)| c.request).collect();
        expired.dedup();
        expired.iter().for_each(|request| self.cancel(*request));
        expired
    }

    /// The earliest deadline.
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.sequences.values().filter_map(|sequence| sequence.deadline).min()
    }

    /// The same for a pipeline whose stages take from each other what they compute on.
    pub fn with_shares(mut self, shares: Vec<Share>) -> Scheduler {
        self.fits = Fits::new(self.limits.stages, shares, self.limits.tile);
        self
    }

    /// A micro-batch of `tokens` tokens took `seconds` on each stage, had it been alone; `overhead` seconds beyond them until the next
    /// could be formed.
    pub fn measured(&mut self, tokens: usize, attended: f64, seconds: &[f64], overhead: f64) {
        let learns = self.watches.look(&self.fits, tokens, attended, seconds);
        self.fits.learn(tokens, attended, seconds, overhead, &learns);
    }

    /// Stages that take much longer than they used to.
    pub fn stragglers(&self) -> Vec<Straggler> {
        self.watches.stragglers()
    }

    /// Gives the page space up for a use outside the scheduler: nothing runs, nothing is remembered.
    ///
    /// # Panics
    /// When anything is running.
    pub fn reset(&mut self) {
        assert!(self.sequences.is_empty() && self.in_flight.is_empty(), "requests are running");
        self.pages.forget_idle();
    }

    /// A name for a sequence of a use outside the scheduler.
    pub fn foreign(&mut self) -> u64 {
        self.names += 1;
        self.names
    }

    /// The names that the stages may forget, for a micro-batch outside the scheduler.
    pub fn take_released(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.released)
    }

    /// Says that the stages may forget a name.
    pub fn release(&mut self, name: u64) {
        self.released.push(name);
    }

    /// Everything in flight was given up, and the stages have forgotten every sequence, but not their pages: all that
    /// runs begins again, from what is remembered of it.
    pub fn restart(&mut self) {
        let known = self.in_flight.front().map_or(self.pages.latest(), |flight| flight.known);
        self.in_flight.clear();
        let running: Vec<Choice> =
            self.sequences.iter().filter(|(_, s)| s.admitted.is_some()).map(|(c, _)| *c).collect();
        for choice in running.into_iter().rev() {
            // Not all that was sent was computed.
            self.sequences.get_mut(&choice).expect("running sequences exist").sent = 0;
            self.preempt(choice);
        }
        self.sequences.values_mut().for_each(|sequence| sequence.in_flight = 0);
        self.pages.forget_after(known);
        self.stop_restoring();
        self.released.clear();
    }
}

#[cfg(test)]
mod tests;
