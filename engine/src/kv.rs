//! KV pages: one space of page ids, owned by the head; stages mirror the tables of the sequences they serve.

use std::collections::HashMap;

use pp_shaders::PAGE;
use thiserror::Error;

/// Name of a sequence, unique while a pipeline runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

/// There is no free page.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("all {pages} KV pages are in use ({} tokens)", pages * PAGE)]
pub struct OutOfPages {
    pages: usize,
}

/// The head's page ids: which are free, and which sequence holds which.
pub struct PagePool {
    pages: usize,
    free: Vec<u32>,
    held: HashMap<SequenceId, Vec<u32>>,
}

impl PagePool {
    /// A pool of pages 0 .. `pages`.
    pub fn new(pages: usize) -> PagePool {
        PagePool { pages, free: (0..pages as u32).rev().collect(), held: HashMap::new() }
    }

    /// Makes room for positions 0 .. `tokens` of a sequence; returns the pages added, in order.
    ///
    /// # Errors
    /// [`OutOfPages`]; nothing was taken then.
    pub fn grow(&mut self, sequence: SequenceId, tokens: usize) -> Result<Vec<u32>, OutOfPages> {
        let held = self.held.get(&sequence).map_or(0, Vec::len);
        let wanted = tokens.div_ceil(PAGE).saturating_sub(held);
        if wanted > self.free.len() {
            return Err(OutOfPages { pages: self.pages });
        }
        let added: Vec<u32> = (0..wanted).filter_map(|_| self.free.pop()).collect();
        self.held.entry(sequence).or_default().extend(&added);
        Ok(added)
    }

    /// Takes a sequence's pages back.
    pub fn release(&mut self, sequence: SequenceId) {
        self.free.extend(self.held.remove(&sequence).unwrap_or_default().into_iter().rev());
    }

    /// Whether a sequence has pages.
    pub fn holds(&self, sequence: SequenceId) -> bool {
        self.held.contains_key(&sequence)
    }

    /// Pages that nobody holds.
    pub fn free(&self) -> usize {
        self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_page_is_held_twice_and_all_come_back(steps in prop::collection::vec((0u64..5, 0usize..400, any::<bool>()), 1..60)) {
            let mut pool = PagePool::new(16);
            for (sequence, tokens, release) in steps {
                let sequence = SequenceId(sequence);
                let before = pool.free();
                if release {
                    pool.release(sequence);
                } else if pool.grow(sequence, tokens).is_err() {
                    prop_assert_eq!(pool.free(), before);
                }
                let mut all: Vec<u32> = pool.held.values().flatten().chain(&pool.free).copied().collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..16).collect::<Vec<u32>>());
            }
            (0..5).for_each(|sequence| pool.release(SequenceId(sequence)));
            prop_assert_eq!(pool.free(), 16);
        }
    }

    #[test]
    fn pages_come_as_positions_need_them() {
        let mut pool = PagePool::new(3);
        assert_eq!(pool.grow(SequenceId(1), 1), Ok(vec![0]));
        assert_eq!(pool.grow(SequenceId(1), 32), Ok(vec![]));
        assert_eq!(pool.grow(SequenceId(1), 33), Ok(vec![1]));
        assert_eq!(pool.grow(SequenceId(2), 65), Err(OutOfPages { pages: 3 }));
        assert_eq!(pool.free(), 1);
    }
}
