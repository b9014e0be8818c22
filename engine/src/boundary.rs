//! What a stage has handed on, kept for the stage behind it: where that one is lost, its keys and values can be computed
//! from here, and the stages before need not compute anything again.
//!
//! Rows are kept by page and place in it, as the stage's keys and values are, so whoever knows where a token's keys are
//! knows where its row is. Of a page that is given to another sequence the rows are overwritten as its tokens come. The
//! pages that were written longest ago go first. Pure.

use std::collections::{BTreeMap, HashMap};

use pp_shaders::PAGE;

/// Rows of a page.
#[derive(Debug)]
struct Rows {
    values: Box<[f32]>,
    /// Which are there, a bit each.
    there: u32,
    /// When one was last written; the key in `order`.
    written: u64,
}

/// See above.
#[derive(Debug)]
pub struct BoundaryLog {
    hidden: usize,
    bytes_max: u64,
    pages_max: usize,
    pages: HashMap<u32, Rows>,
    order: BTreeMap<u64, u32>,
    clock: u64,
}

impl BoundaryLog {
    /// A log of rows of `hidden` values that takes at most `bytes` bytes; fewer than a page of them keep nothing.
    pub fn new(hidden: usize, bytes: u64) -> BoundaryLog {
        let pages_max = bytes / (4 * PAGE * hidden).max(1) as u64;
        BoundaryLog {
            hidden,
            bytes_max: bytes,
            pages_max: usize::try_from(pages_max).unwrap_or(usize::MAX),
            pages: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Bytes that it may take.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Bytes of rows that it holds.
    pub fn bytes(&self) -> u64 {
        (self.pages.len() * 4 * PAGE * self.hidden) as u64
    }

    /// Keeps the row of a position whose page is `page`; where there is no room, at the cost of another page if it
    /// `evicts`.
    pub fn write(&mut self, page: u32, position: usize, row: &[f32], evicts: bool) {
        if self.pages_max == 0 {
            return;
        }
        if !self.pages.contains_key(&page) && self.pages.len() == self.pages_max {
            if !evicts {
                return;
            }
            let oldest = self.order.pop_first().map(|(_, page)| page);
            oldest.and_then(|page| self.pages.remove(&page));
        }
        let empty = || Rows { values: vec![0.0; PAGE * self.hidden].into(), there: 0, written: 0 };
        let rows = self.pages.entry(page).or_insert_with(empty);
        self.order.remove(&rows.written);
        self.clock += 1;
        rows.written = self.clock;
        self.order.insert(self.clock, page);
        let place = position % PAGE;
        rows.values[place * self.hidden..][..self.hidden].copy_from_slice(row);
        rows.there |= 1 << place;
    }

    /// The row of a position whose page is `page`, if it is there.
    pub fn read(&self, page: u32, position: usize) -> Option<&[f32]> {
        let (rows, place) = (self.pages.get(&page)?, position % PAGE);
        (rows.there >> place & 1 == 1).then(|| &rows.values[place * self.hidden..][..self.hidden])
    }

    /// The pages of which there are rows, with a bit for each row.
    pub fn pages(&self) -> Vec<(u32, u32)> {
        let mut pages: Vec<(u32, u32)> = self.pages.iter().map(|(page, rows)| (*page, rows.there)).collect();
        pages.sort_unstable();
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever is written, what is read is the latest, nothing is invented, the bound holds, and what was written last
        /// is there.
        #[test]
        fn it_reads_what_was_written_within_its_bound(
            bytes in 0u64..4000,
            writes in prop::collection::vec((0u32..6, 0usize..200, -1.0f32..1.0, any::<bool>()), 1..300),
        ) {
            let mut log = BoundaryLog::new(3, bytes);
            let mut all = HashMap::new();
            for (page, position, value, evicts) in writes {
                let row = [value, 2.0 * value, page as f32];
                let before: Vec<u32> = log.pages().iter().map(|(page, _)| *page).collect();
                log.write(page, position, &row, evicts);
                let is_kept = log.pages().iter().any(|(known, _)| *known == page);
                let is_gone = |page: &u32| log.pages().iter().all(|(known, _)| known != page);
                prop_assert!(evicts || !before.iter().any(is_gone), "nothing goes for it");
                prop_assert!(is_kept || !evicts || bytes < 384);
                prop_assert!(log.bytes() <= bytes);
                if is_kept {
                    all.insert((page, position % PAGE), row);
                    prop_assert_eq!(log.read(page, position), Some(&row[..]));
                }
            }
            for page in 0..6 {
                let there = log.pages().iter().find(|(known, _)| *known == page).map_or(0, |(_, there)| *there);
                for place in 0..PAGE {
                    let found = log.read(page, place);
                    prop_assert_eq!(found.is_some(), there >> place & 1 == 1);
                    if let Some(found) = found {
                        prop_assert_eq!(found, &all[&(page, place)][..]);
                    }
                }
            }
        }
    }
}
