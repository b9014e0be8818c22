//! A model that is nothing but its KV cache: every value depends on all that a transformer's would depend on, so
//! a page that was given away too early, shared wrongly or not written shows in the tokens.

use std::collections::HashMap;

use pp_shaders::PAGE;

use super::Model;
use crate::random::mix;
use crate::schedule::Batch;

#[derive(Default)]
struct Stage {
    pages: Vec<[u64; PAGE]>,
    tables: HashMap<u64, Vec<u32>>,
}

/// The stages' caches.
pub struct Toy {
    stages: Vec<Stage>,
}

impl Toy {
    /// `stages` stages of `pages` pages.
    pub fn new(stages: usize, pages: usize) -> Toy {
        Toy { stages: (0..stages).map(|_| Stage { pages: vec![[0; PAGE]; pages], tables: HashMap::new() }).collect() }
    }

    /// Sequences that each stage knows.
    pub fn tables(&self) -> impl Iterator<Item = usize> {
        self.stages.iter().map(|stage| stage.tables.len())
    }

    /// The pages of a sequence that a stage knows; none of any other.
    pub fn table(&self, stage: usize, sequence: u64) -> &[u32] {
        self.stages[stage].tables.get(&sequence).map_or(&[], Vec::as_slice)
    }

    /// A stage that knows nothing takes the place of one.
    pub fn lose(&mut self, stage: usize) {
        let pages = self.stages[stage].pages.len();
        self.stages[stage] = Stage { pages: vec![[u64::MAX; PAGE]; pages], tables: HashMap::new() };
    }

    /// All stages forget every sequence, and keep their pages.
    pub fn forget_sequences(&mut self) {
        self.stages.iter_mut().for_each(|stage| stage.tables.clear());
    }

    /// The `count` tokens that follow `prompt` when nothing else runs.
    pub fn alone(stages: usize, prompt: &[u32], count: usize, vocab: u32) -> Vec<u32> {
        let pages = (prompt.len() + count).div_ceil(PAGE);
        let mut toy = Toy::new(stages, pages);
        let table: Vec<u32> = (0..pages as u32).collect();
        let mut tokens = prompt.to_vec();
        let mut sent = 0;
        for stage in &mut toy.stages {
            stage.tables.insert(0, table.clone());
        }
        while tokens.len() < prompt.len() + count {
            let mut from: Vec<u64> = Vec::new();
            for stage in 0..stages {
                from = toy.stages[stage].tokens(stage, 0, sent, &tokens[sent..], &from);
            }
            sent = tokens.len();
            tokens.push((from.last().expect("tokens were computed") % u64::from(vocab)) as u32);
        }
        tokens.split_off(prompt.len())
    }
}

impl Stage {
    fn kept(&self, sequence: u64, start: usize, count: usize) -> Vec<u64> {
        let table = &self.tables[&sequence];
        (start..start + count).map(|position| self.pages[table[position / PAGE] as usize][position % PAGE]).collect()
    }

    fn tokens(&mut self, stage: usize, sequence: u64, start: usize, ids: &[u32], from: &[u64]) -> Vec<u64> {
        let table = &self.tables[&sequence];
        let place = |position: usize| (table[position / PAGE] as usize, position % PAGE);
        let mut values = Vec::with_capacity(ids.len());
        for (i, id) in ids.iter().enumerate() {
            let position = start + i;
            let mut value = mix(from.get(i).copied().unwrap_or(u64::from(*id)) ^ (stage as u64) << 56);
            // The position before, and the last of every page before: a sample of what attention reads.
            let before = (0..position / PAGE).map(|page| page * PAGE + PAGE - 1).chain(position.checked_sub(1));
            for other in before {
                let (page, offset) = place(other);
                value = mix(value ^ self.pages[page][offset].rotate_left(17));
            }
            let (page, offset) = place(position);
            self.pages[page][offset] = value;
            values.push(value);
        }
        values
    }
}

impl Model for Toy {
    fn forward(&mut self, stage: usize, batch: &Batch, from: Vec<u64>) -> Vec<u64> {
        let last = stage + 1 == self.stages.len();
        let s = &mut self.stages[stage];
        for name in &batch.released {
            s.tables.remove(name);
        }
        let mut values = Vec::new();
        let mut at = 0;
        let is_asked = batch.until.is_none_or(|until| stage < until) && batch.from.is_none_or(|from| stage >= from);
        for part in batch.parts.iter().filter(|_| is_asked) {
            s.tables.entry(part.sequence).or_default().extend(&part.new_pages);
            let given = if from.is_empty() { &[][..] } else { &from[at..at + part.ids.len()] };
            at += part.ids.len();
            let found = if batch.from == Some(stage) {
                // What it has handed on is what it has in its pages.
                s.kept(part.sequence, part.start, part.ids.len())
            } else {
                s.tokens(stage, part.sequence, part.start, &part.ids, given)
            };
            if !last {
                values.extend(found);
            } else if part.draws {
                values.extend(found.last());
            }
        }
        values
    }
}
