//! Going on behind a loss: what stages have forgotten is computed again from the tokens, and nothing else.
//!
//! When a stage is lost, the others still have the keys and values of every token whose micro-batch was answered. So the
//! sequences keep their pages, and what the lost stage knew is computed again by sending their tokens through the
//! stages up to it. Those before it write what they have once more, the same bits; those behind it are not asked. A stage that
//! got some layers of another has lost those only: it computes up to the last one that is lost. Each
//! page is restored once, whoever shares it. What follows is sent behind that, as every stage keeps the order.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::ops::Range;

use pp_shaders::PAGE;

use super::cost::{Costs, Fits, attended};
use super::straggler::Watches;
use super::{Batch, Choice, Flight, Limits, Next, Pages, Part, RequestId, Scheduler};
use crate::law::Share;

/// What a recovery has to compute again, and how far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rebuild {
    /// Sequences that go on.
    pub sequences: usize,
    /// Layers of the model that are computed again, from the first one on; those behind have all they had.
    pub until: usize,
    /// The stage that has the last of them.
    pub stage: usize,
    /// Tokens that each of the stages up to that one computes again.
    pub tokens: usize,
    /// Those of which the stage before the first lost one has kept what it handed on: …
    pub logged: usize,
    /// … the stages up to that one need not compute them.
    pub from: Option<usize>,
    /// Those that are done.
    pub done: usize,
    /// Seconds that it should take by what the stages are measured to cost.
    pub seconds: Option<f64>,
}

impl fmt::Display for Rebuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.tokens == 0 {
            return f.write_str("nothing is computed again");
        }
        let (tokens, sequences, stage) = (self.tokens, self.sequences, self.stage);
        write!(f, "rebuilding {tokens} tokens of {sequences} sequence(s) on the stages up to {stage}")?;
        if let Some(from) = self.from.filter(|_| self.logged > 0) {
            write!(f, ", {} of them from the log of stage {from}", self.logged)?;
        }
        self.seconds.map_or(Ok(()), |seconds| write!(f, ", about {seconds:.1} s"))
    }
}

impl Rebuild {
    /// Tokens that a stage computes again.
    pub fn of(&self, stage: usize) -> usize {
        let is_spared = self.from.is_some_and(|from| stage <= from);
        if stage > self.stage { 0 } else { self.tokens - if is_spared { self.logged } else { 0 } }
    }

    /// The same times the layers, of a stage that has these, in which it computes them.
    pub fn layer_tokens(&self, stage: usize, layers: &Range<usize>) -> usize {
        self.of(stage) * layers.end.min(self.until).saturating_sub(layers.start)
    }

    /// Whether there is nothing left to do.
    pub fn is_over(&self) -> bool {
        self.done >= self.tokens
    }
}

/// What is still to be restored.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Not all sent.
    waiting: VecDeque<Replay>,
    rebuild: Rebuild,
    /// Layers of the model that do not have what they should until all is restored.
    without: Vec<bool>,
    /// The part of its layers that the last stage computes.
    last_share: f64,
    /// Tokens of a micro-batch.
    chunk: usize,
}

/// Pages of a sequence that are to be computed again, under a name of their own.
#[derive(Debug)]
struct Replay {
    choice: Choice,
    name: u64,
    pages: Vec<u32>,
    tokens: Vec<u32>,
    /// Tokens sent, or not to be sent.
    at: usize,
    told: usize,
    /// Whether the stage before the first lost one has all its rows.
    is_logged: bool,
}

/// What a stage has of the pipeline before.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// Its layers.
    pub layers: Range<usize>,
    /// Those of which it has the pages, as they were.
    pub pages: Range<usize>,
    /// What it has handed on: pages, with a bit for each row.
    pub boundary: Vec<(u32, u32)>,
}

impl Scheduler {
    /// Everything in flight was given up, and another pipeline is there that has forgotten every sequence. Of its stages
    /// some have `kept` what they, or others, had. What runs goes on behind the last token whose micro-batch
    /// was answered; idle pages are forgotten if any stage has lost them. Where the page space is another one, everything
    /// begins again.
    pub fn recover(&mut self, limits: Limits, shares: Vec<Share>, kept: &[Kept]) -> Rebuild {
        let space = |limits: &Limits| (limits.pages, limits.context, limits.sequences, limits.prefix_cache);
        let is_same_space = space(&limits) == space(&self.limits);
        if (limits.stages, limits.tile) != (self.limits.stages, self.limits.tile) || shares != self.fits.shares() {
            self.fits = Fits::new(limits.stages, shares, limits.tile);
            self.watches = Watches::new(limits.stages);
        }
        self.watches.forget();
        let without = std::mem::take(&mut self.recovery).without;
        let expected = self.expected.take();
        let has = |layer: &usize| !without.get(*layer).copied().unwrap_or(false);
        let lacks = |stage: &Kept, layer: usize| !(stage.pages.contains(&layer) && has(&layer));
        let without: Vec<bool> =
            kept.iter().flat_map(|stage| stage.layers.clone().map(|layer| lacks(stage, layer))).collect();
        let stage_of = |layer: usize| kept.iter().position(|stage| stage.layers.contains(&layer)).unwrap_or(0);
        self.limits = limits;
        self.chunk = self.chunk.min(limits.batch_tokens);
        if !is_same_space || without.iter().all(|without| *without) {
            let running = || self.sequences.values().filter(|sequence| sequence.admitted.is_some());
            let (sequences, tokens) = (running().count(), running().map(|sequence| sequence.sent).sum());
            self.restart();
            self.pages = Pages::new(limits.pages, limits.prefix_cache);
            let (until, stage) = (without.len(), limits.stages - 1);
            self.recovery.rebuild = Rebuild { sequences, until, stage, tokens, done: tokens, ..Rebuild::default() };
            return self.recovery.rebuild;
        }
        let known = self.rewind();
        let last = without.iter().rposition(|without| *without);
        if last.is_some() {
            self.pages.forget_all();
        } else {
            self.pages.forget_after(known);
        }
        let first = without.iter().position(|without| *without);
        let from = first.and_then(|first| stage_of(first).checked_sub(1));
        let log: HashMap<u32, u32> =
            from.map_or_else(HashMap::new, |from| kept[from].boundary.iter().copied().collect());
        let mut restored = HashSet::new();
        let running: Vec<Choice> =
            self.sequences.iter().filter(|(_, s)| s.admitted.is_some()).map(|(choice, _)| *choice).collect();
        for choice in &running {
            self.resume(*choice);
            if last.is_some() {
                self.restore(*choice, &mut restored, &log);
            }
        }
        let tokens = self.recovery.waiting.iter().map(|replay| replay.tokens.len() - replay.at).sum();
        let (until, stage) = last.map_or((0, 0), |last| (last + 1, stage_of(last)));
        let logged = self.recovery.waiting.iter().filter(|replay| replay.is_logged);
        let logged = logged.map(|replay| replay.tokens.len() - replay.at).sum();
        self.recovery.without = if tokens > 0 { without } else { Vec::new() };
        let chunk = self.fits.first_chunk(tokens, limits.batch_tokens).clamp(1, limits.batch_tokens);
        self.recovery.chunk = self.whole_tiles(0, chunk, limits.batch_tokens);
        let layers = &kept[stage].layers;
        self.recovery.last_share = until.saturating_sub(layers.start) as f64 / layers.len().max(1) as f64;
        self.recovery.rebuild =
            Rebuild { sequences: running.len(), until, stage, tokens, from, logged, done: 0, seconds: None };
        self.recovery.rebuild.seconds =
            self.fits.costs().or(expected.as_ref()).and_then(|costs| self.restoring_seconds(costs));
        self.size_chunks();
        self.recovery.rebuild
    }

    /// Requests that the pages no longer have room for, even alone.
    pub fn too_long(&self) -> Vec<RequestId> {
        let capacity = self.limits.capacity();
        let mut found: Vec<RequestId> =
            self.sequences.iter().filter(|(_, s)| s.tokens.len() > capacity).map(|(c, _)| c.request).collect();
        found.dedup();
        found
    }

    /// What stages take is not what it was: they are on other devices, or have other layers. What is `expected` of them is
    /// for the prediction of the recovery that follows.
    pub fn forget_costs(&mut self, expected: Option<Costs>) {
        self.fits = Fits::new(self.limits.stages, self.fits.shares().to_vec(), self.limits.tile);
        self.expected = expected;
        self.watches = Watches::new(self.limits.stages);
    }

    /// What the latest recovery computes again.
    pub fn rebuild(&self) -> Rebuild {
        self.recovery.rebuild
    }

    /// Takes back what was sent and not answered; returns the number of the latest contents of pages that were computed.
    fn rewind(&mut self) -> u64 {
        let known = self.in_flight.front().map_or(self.pages.latest(), |flight| flight.known);
        for sent in std::mem::take(&mut self.in_flight).into_iter().flat_map(|flight| flight.parts) {
            if let Some(sequence) = self.sequences.get_mut(&sent.choice)
                && sequence.admitted.is_some()
            {
                sequence.sent = sequence.sent.min(sent.start);
            }
        }
        for sequence in self.sequences.values_mut() {
            sequence.in_flight = 0;
            // It may share, or have taken over, pages that another one was to fill.
            if let Some((_, table)) = &sequence.admitted {
                sequence.sent = sequence.sent.min(self.pages.certain(table, known));
                // What was answered and not drawn from, as the answer made no sense.
                sequence.sent = sequence.sent.min(sequence.tokens.len() - 1);
            }
        }
        self.released.clear();
        self.ready.clear();
        self.prefilling.clear();
        known
    }

    /// Puts a running sequence where it goes on, under another name.
    fn resume(&mut self, choice: Choice) {
        self.names += 1;
        let sequence = self.sequences.get_mut(&choice).expect("running sequences exist");
        let (name, table) = sequence.admitted.as_mut().expect("running sequences have a table");
        (*name, sequence.told) = (self.names, 0);
        table.forget();
        self.pages.fill(table, &sequence.tokens[..sequence.sent]);
        if sequence.left() == 1 {
            self.ready.push_back(choice);
        } else {
            self.prefilling.push(choice);
        }
    }

    /// Has a sequence's pages restored, but for those at its start that are in `restored` already.
    fn restore(&mut self, choice: Choice, restored: &mut HashSet<u32>, log: &HashMap<u32, u32>) {
        let sequence = &self.sequences[&choice];
        let (_, table) = sequence.admitted.as_ref().expect("running sequences have a table");
        let tokens = &sequence.tokens[..sequence.sent];
        let full = &table.pages[..tokens.len() / PAGE];
        let shared = full.iter().take_while(|page| restored.contains(page)).count();
        if tokens.len() == shared * PAGE {
            return;
        }
        restored.extend(full);
        let is_there = |position: usize| {
            let rows = table.pages.get(position / PAGE).and_then(|page| log.get(page));
            rows.is_some_and(|rows| rows >> (position % PAGE) & 1 == 1)
        };
        let is_logged = (shared * PAGE..tokens.len()).all(is_there);
        self.names += 1;
        self.recovery.waiting.push_back(Replay {
            choice,
            name: self.names,
            pages: table.pages[..tokens.len().div_ceil(PAGE)].to_vec(),
            tokens: tokens.to_vec(),
            at: shared * PAGE,
            told: 0,
            is_logged,
        });
    }

    /// Seconds until all is restored: the slowest stage for every micro-batch, and the others once.
    fn restoring_seconds(&self, costs: &Costs) -> Option<f64> {
        let stages = costs.prompts.get(..=self.recovery.rebuild.stage)?;
        let first = self.recovery.rebuild.from.map_or(0, |from| from + 1);
        let mut batches: Vec<(usize, f64, bool)> = Vec::new();
        for replay in &self.recovery.waiting {
            let mut at = replay.at;
            while at < replay.tokens.len() {
                let is_full = |(tokens, _, logged): &(usize, f64, bool)| {
                    *tokens >= self.recovery.chunk || *logged != replay.is_logged
                };
                if batches.last().is_none_or(is_full) {
                    batches.push((0, 0.0, replay.is_logged));
                }
                let (tokens, seen, _) = batches.last_mut()?;
                let count = (replay.tokens.len() - at).min(self.recovery.chunk - *tokens);
                *seen += attended(at, count);
                *tokens += count;
                at += count;
            }
        }
        let seconds = |batch: &(usize, f64, bool)| -> Vec<f64> {
            let (tokens, seen, is_logged) = *batch;
            let computing = &stages[if is_logged { first } else { 0 }..];
            let mut seconds: Vec<f64> =
                computing.iter().map(|stage| stage.step(tokens as f64) + stage.attention * seen).collect();
            seconds.iter_mut().next_back().into_iter().for_each(|last| *last *= self.recovery.last_share);
            seconds
        };
        let Some((begin, rest)) = batches.split_first() else { return Some(0.0) };
        // What several compute on is busy with the work of all of them.
        let shared = |times: &[f64]| {
            let skipped = stages.len() - times.len();
            let time = |stage: usize| stage.checked_sub(skipped).and_then(|at| times.get(at)).copied().unwrap_or(0.0);
            let busy = |share: &Share| share.seconds(time);
            costs.shares.iter().map(busy).fold(0.0, f64::max)
        };
        let slowest = |batch| {
            let times = seconds(batch);
            times.iter().copied().fold(shared(&times), f64::max)
        };
        Some(costs.overhead + seconds(begin).iter().sum::<f64>() + rest.iter().map(slowest).sum::<f64>())
    }

    /// What is being restored is given up with all that was under way: of no page it is known what is in it.
    pub(super) fn stop_restoring(&mut self) {
        if self.is_restoring() || !self.recovery.rebuild.is_over() {
            self.pages.forget_all();
            let rebuild = Rebuild { done: self.recovery.rebuild.tokens, ..self.recovery.rebuild };
            self.recovery = Recovery { rebuild, ..Recovery::default() };
        }
    }

    /// Whether something is still to be sent that restores.
    pub(super) fn is_restoring(&self) -> bool {
        !self.recovery.waiting.is_empty()
    }

    /// The next micro-batch that restores.
    pub(super) fn next_restoring(&mut self) -> Next {
        if self.in_flight.len() >= self.limits.in_flight.min(self.limits.stages + 1) {
            return Next::Wait { for_pages: false };
        }
        let until = Some(self.recovery.rebuild.until);
        let released = std::mem::take(&mut self.released);
        let mut batch = Batch { group: self.free_group(), released, until, ..Batch::default() };
        let parts_max = self.limits.outputs.min(self.limits.sequences);
        let is_logged = self.recovery.waiting.front().is_some_and(|replay| replay.is_logged);
        batch.from = self.recovery.rebuild.from.filter(|_| is_logged);
        while batch.prefill_tokens < self.recovery.chunk && batch.parts.len() < parts_max {
            // In order: one may build upon pages of the one before.
            let Some(replay) = self.recovery.waiting.front_mut().filter(|replay| replay.is_logged == is_logged) else {
                break;
            };
            let part = replay.part(self.recovery.chunk - batch.prefill_tokens);
            batch.prefill_tokens += part.ids.len();
            batch.parts.push(part);
            if replay.at == replay.tokens.len() {
                self.released.push(replay.name);
                self.recovery.waiting.pop_front();
            }
        }
        self.in_flight.push_back(Flight {
            group: batch.group,
            known: self.pages.latest(),
            parts: Vec::new(),
            decodes: false,
            restores: batch.prefill_tokens,
        });
        Next::Send(batch)
    }

    /// A micro-batch came back that restored so many tokens.
    pub(super) fn restored(&mut self, tokens: usize) {
        self.recovery.rebuild.done += tokens;
        if self.recovery.rebuild.is_over() {
            self.recovery.without.clear();
        }
    }
}

impl Replay {
    /// Its next tokens, at most so many.
    fn part(&mut self, most: usize) -> Part {
        let end = self.tokens.len().min(self.at + most);
        let pages = end.div_ceil(PAGE);
        let part = Part {
            choice: self.choice,
            sequence: self.name,
            start: self.at,
            ids: self.tokens[self.at..end].to_vec(),
            new_pages: self.pages[self.told..pages].to_vec(),
            draws: false,
            whole_row: false,
        };
        (self.at, self.told) = (end, pages);
        part
    }
}

#[cfg(test)]
mod tests;
