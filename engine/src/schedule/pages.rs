//! KV pages: one space of page ids for all stages, and the prefix cache in it.
//!
//! A page is free, held by one or more sequences, or idle: nobody holds it, but its contents are remembered and may be
//! taken up again until the page is needed. Full pages are remembered by their tokens and by the page before them, so a
//! chain of pages is found from its start, as in vLLM's prefix caching. They are shared and never written again. The
//! last page of a sequence that has ended is not full: the next sequence that continues it takes it for itself.

use std::collections::{BTreeMap, HashMap};

use pp_shaders::PAGE;

/// The chain that ends nowhere: what the first page of a sequence follows.
const ROOT: u64 = 0;

/// What is remembered of a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Content {
    /// The page before it, by its serial number.
    after: u64,
    /// Its tokens: all of a full page, fewer of a tail.
    tokens: Box<[u32]>,
}

#[derive(Debug, Default)]
struct Page {
    holders: u32,
    /// Number of the contents, unique for ever; `ROOT` where nothing is remembered.
    serial: u64,
    content: Option<Content>,
    /// When it became idle; the key in `idle`.
    idle_since: u64,
}

/// The pages of one sequence, in order of its positions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Page of each 32 positions.
    pub pages: Vec<u32>,
    /// Pages from the start whose contents have been remembered or taken over, and the last one's serial.
    full: usize,
    serial: u64,
}

impl Table {
    /// What was remembered of its pages is forgotten.
    pub fn forget(&mut self) {
        (self.full, self.serial) = (0, ROOT);
    }
}

/// The head's page ids: which are free, who holds which, and what idle ones contain.
#[derive(Debug)]
pub struct Pages {
    pages: Vec<Page>,
    free: Vec<u32>,
    full: HashMap<Content, u32>,
    tails: HashMap<u64, Vec<u32>>,
    idle: BTreeMap<u64, u32>,
    clock: u64,
    serials: u64,
    remember: bool,
}

impl Pages {
    /// A space of pages 0 .. `total`; `remember` says whether there is a prefix cache.
    pub fn new(total: usize, remember: bool) -> Pages {
        Pages {
            pages: (0..total).map(|_| Page::default()).collect(),
            free: (0..total as u32).rev().collect(),
            full: HashMap::new(),
            tails: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            serials: ROOT,
            remember,
        }
    }

    /// All pages.
    pub fn total(&self) -> usize {
        self.pages.len()
    }

    /// Pages that nobody holds: free ones, and idle ones that may be forgotten.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Pages that nobody holds but whose contents are remembered.
    pub fn idle(&self) -> usize {
        self.idle.len()
    }

    /// Where a sequence of these tokens could begin: full pages, and the tail with the tokens it spares.
    fn find(&self, tokens: &[u32]) -> (Vec<u32>, u64, Option<(u32, usize)>) {
        // The last token is always computed: its logits are wanted.
        let usable = &tokens[..tokens.len().saturating_sub(1)];
        let mut serial = ROOT;
        let mut found = Vec::new();
        for page_tokens in usable.chunks_exact(PAGE) {
            let Some(page) = self.full.get(&Content { after: serial, tokens: page_tokens.into() }) else { break };
            found.push(*page);
            serial = self.pages[*page as usize].serial;
        }
        let rest = &usable[found.len() * PAGE..];
        let shared = |page: &u32| {
            let content = self.pages[*page as usize].content.as_ref();
            content.map_or(0, |c| c.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count())
        };
        let tails = self.tails.get(&serial).into_iter().flatten();
        let tail = tails.map(|page| (*page, shared(page))).max_by_key(|(_, n)| *n).filter(|(_, n)| *n > 0);
        (found, serial, tail)
    }

    /// How many pages beyond those that are available after it `begin` with these tokens would need for `positions`
    /// positions, and how many it would take out of the available ones.
    pub fn cost(&self, tokens: &[u32], positions: usize) -> usize {
        let (found, _, tail) = self.find(tokens);
        let idle = found.iter().filter(|page| self.pages[**page as usize].holders == 0).count();
        let reused = found.len() + usize::from(tail.is_some());
        idle + usize::from(tail.is_some()) + positions.div_ceil(PAGE).saturating_sub(reused)
    }

    /// A table that begins with what is remembered of `tokens`, and the number of tokens that it spares.
    pub fn begin(&mut self, tokens: &[u32]) -> (Table, usize) {
        let (found, serial, tail) = self.find(tokens);
        for page in &found {
            self.hold(*page);
        }
        let mut spared = found.len() * PAGE;
        let mut table = Table { full: found.len(), pages: found, serial };
        if let Some((page, tokens)) = tail {
            self.hold(page);
            self.forget(page);
            table.pages.push(page);
            spared += tokens;
        }
        (table, spared)
    }

    /// Makes room for positions 0 .. `positions`; false, and nothing taken, where pages are missing.
    pub fn grow(&mut self, table: &mut Table, positions: usize) -> bool {
        let wanted = positions.div_ceil(PAGE).saturating_sub(table.pages.len());
        if wanted > self.available() {
            return false;
        }
        for _ in 0..wanted {
            let page = self.free.pop().unwrap_or_else(|| self.evict());
            self.pages[page as usize].holders = 1;
            table.pages.push(page);
        }
        true
    }

    /// Remembers the pages that `tokens`, all tokens computed so far, have filled.
    pub fn fill(&mut self, table: &mut Table, tokens: &[u32]) {
        if !self.remember {
            return;
        }
        for (i, page_tokens) in tokens.chunks_exact(PAGE).enumerate().skip(table.full) {
            let page = table.pages[i];
            let content = Content { after: table.serial, tokens: page_tokens.into() };
            table.serial = match self.full.get(&content) {
                // The same was computed twice: the first stays, the second goes with its sequence.
                Some(twin) => self.pages[*twin as usize].serial,
                None => {
                    self.full.insert(content.clone(), page);
                    self.name(page, content)
                }
            };
            table.full = i + 1;
        }
    }

    /// Lets go of a sequence's pages; `tokens` are those computed. What is remembered stays, idle, and so does the tail.
    pub fn release(&mut self, mut table: Table, tokens: &[u32]) {
        self.fill(&mut table, tokens);
        let tail = &tokens[tokens.len() / PAGE * PAGE..];
        if self.remember && !tail.is_empty() && table.full == tokens.len() / PAGE {
            let page = table.pages[table.full];
            if self.pages[page as usize].holders == 1 {
                self.name(page, Content { after: table.serial, tokens: tail.into() });
                self.tails.entry(table.serial).or_default().push(page);
            }
        }
        // The last page first: a chain is forgotten from its end.
        for page in table.pages.into_iter().rev() {
            let p = &mut self.pages[page as usize];
            p.holders -= 1;
            if p.holders > 0 {
                continue;
            }
            if p.content.is_some() {
                self.clock += 1;
                p.idle_since = self.clock;
                self.idle.insert(self.clock, page);
            } else {
                self.free.push(page);
            }
        }
    }

    /// Forgets the contents of all idle pages: their devices have forgotten them, or another use is made of them.
    pub fn forget_idle(&mut self) {
        while !self.idle.is_empty() {
            let page = self.evict();
            self.free.push(page);
        }
    }

    /// Forgets all contents, also of pages that are held: some stage does not have them any more.
    pub fn forget_all(&mut self) {
        self.forget_idle();
        (0..self.pages.len() as u32).for_each(|page| self.forget(page));
    }

    /// Positions of a sequence up to which its pages were named no later than `serial`, or not at all: what others were
    /// to fill later may never have been computed.
    pub fn certain(&self, table: &Table, serial: u64) -> usize {
        let is_later = |page: &u32| self.pages[*page as usize].serial > serial;
        PAGE * table.pages.iter().position(is_later).unwrap_or(table.pages.len())
    }

    /// The number of the latest contents; later ones have larger numbers.
    pub fn latest(&self) -> u64 {
        self.serials
    }

    /// Forgets the contents that were named after `serial`: they were never computed.
    pub fn forget_after(&mut self, serial: u64) {
        for page in 0..self.pages.len() as u32 {
            let p = &self.pages[page as usize];
            if p.content.is_none() || p.serial <= serial {
                continue;
            }
            self.forget(page);
            let p = &self.pages[page as usize];
            if p.holders == 0 {
                self.idle.remove(&p.idle_since);
                self.free.push(page);
            }
        }
    }

    fn name(&mut self, page: u32, content: Content) -> u64 {
        // What it was called before, where the page in front of it has another name now.
        self.forget(page);
        self.serials += 1;
        let p = &mut self.pages[page as usize];
        p.serial = self.serials;
        p.content = Some(content);
        self.serials
    }

    fn hold(&mut self, page: u32) {
        let p = &mut self.pages[page as usize];
        if p.holders == 0 {
            self.idle.remove(&p.idle_since);
        }
        p.holders += 1;
    }

    /// Drops what is remembered of a page.
    fn forget(&mut self, page: u32) {
        let Some(content) = self.pages[page as usize].content.take() else { return };
        if self.full.get(&content) == Some(&page) {
            self.full.remove(&content);
        } else if let Some(tails) = self.tails.get_mut(&content.after) {
            tails.retain(|tail| *tail != page);
            if tails.is_empty() {
                self.tails.remove(&content.after);
            }
        }
    }

    /// The page that has been idle longest, forgotten.
    fn evict(&mut self) -> u32 {
        let (_, page) = self.idle.pop_first().expect("there is an available page");
        self.forget(page);
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tokens(n: usize) -> Vec<u32> {
        (0..n as u32).collect()
    }

    fn run(pages: &mut Pages, tokens: &[u32]) -> (Table, usize) {
        let (mut table, spared) = pages.begin(tokens);
        assert!(pages.grow(&mut table, tokens.len()));
        pages.fill(&mut table, tokens);
        (table, spared)
    }

    #[test]
    fn pages_come_as_positions_need_them() {
        let mut pages = Pages::new(3, true);
        let mut table = Table::default();
        assert!(pages.grow(&mut table, 1) && table.pages == [0]);
        assert!(pages.grow(&mut table, 32) && table.pages == [0]);
        assert!(pages.grow(&mut table, 33) && table.pages == [0, 1]);
        assert!(!pages.grow(&mut table, 97) && table.pages == [0, 1]);
        assert_eq!(pages.available(), 1);
    }

    #[test]
    fn a_common_prefix_is_shared_while_it_is_held_and_after() {
        let mut pages = Pages::new(8, true);
        let (first, spared) = run(&mut pages, &tokens(70));
        assert_eq!(spared, 0);
        let mut other = tokens(70);
        other[65] = 999;
        // Two full pages; the third is not full and is held.
        assert_eq!(pages.cost(&other, 70), 1);
        let (second, spared) = run(&mut pages, &other);
        assert_eq!((spared, &second.pages[..2]), (64, &first.pages[..2]));
        assert_ne!(second.pages[2], first.pages[2]);
        pages.release(first, &tokens(70));
        pages.release(second, &other);
        assert_eq!((pages.available(), pages.idle()), (8, 4));
        // A prompt that is remembered whole computes its last token again.
        let (third, spared) = pages.begin(&tokens(64));
        assert_eq!(spared, 32);
        pages.release(third, &tokens(32));
    }

    #[test]
    fn a_conversation_goes_on_in_its_last_page() {
        let mut pages = Pages::new(8, true);
        let (first, _) = run(&mut pages, &tokens(40));
        let last = first.pages[1];
        pages.release(first, &tokens(40));
        let (next, spared) = run(&mut pages, &tokens(50));
        assert_eq!((spared, next.pages[1]), (40, last));
        // Only one can go on there.
        let (other, spared) = run(&mut pages, &tokens(50));
        assert_eq!(spared, 32);
        pages.release(next, &tokens(50));
        pages.release(other, &tokens(50));
        // What differs in the last page is computed again, in place.
        let mut edited = tokens(50);
        edited[45] = 7;
        let (edited_table, spared) = pages.begin(&edited);
        assert_eq!(spared, 45);
        pages.release(edited_table, &edited[..45]);
    }

    #[test]
    fn what_has_been_idle_longest_is_forgotten_first_and_chains_from_their_ends() {
        let mut pages = Pages::new(4, true);
        let (a, _) = run(&mut pages, &tokens(64));
        pages.release(a, &tokens(64));
        let others: Vec<u32> = (1000..1064).collect();
        let (b, _) = run(&mut pages, &others);
        pages.release(b, &others);
        let (c, _) = run(&mut pages, &[5]);
        pages.release(c, &[5]);
        assert_eq!(pages.begin(&tokens(65)).1, 32);
        assert_eq!(pages.available(), 3);
    }

    #[test]
    fn what_was_never_computed_is_forgotten() {
        let mut pages = Pages::new(8, true);
        let (a, _) = run(&mut pages, &tokens(64));
        let known = pages.latest();
        let others: Vec<u32> = (1000..1064).collect();
        let (b, _) = run(&mut pages, &others);
        pages.release(b, &others);
        pages.forget_after(known);
        assert_eq!((pages.begin(&others).1, pages.available()), (0, 6));
        pages.release(a, &tokens(64));
        assert_eq!(pages.begin(&tokens(65)).1, 64);
    }

    #[test]
    fn without_a_cache_nothing_is_remembered() {
        let mut pages = Pages::new(4, false);
        let (a, _) = run(&mut pages, &tokens(64));
        pages.release(a, &tokens(64));
        assert_eq!((pages.idle(), pages.begin(&tokens(64)).1), (0, 0));
    }

    proptest! {
        #[test]
        fn every_page_is_in_one_place_and_all_come_back(
            steps in prop::collection::vec((0usize..6, 1usize..200, 0u32..3, any::<bool>()), 1..80),
        ) {
            let mut pages = Pages::new(24, true);
            let mut live: Vec<Option<(Table, Vec<u32>)>> = (0..6).map(|_| None).collect();
            for (slot, length, salt, end) in steps {
                match live[slot].take() {
                    Some((table, tokens)) if end => pages.release(table, &tokens),
                    Some((mut table, mut tokens)) => {
                        let more: Vec<u32> = (tokens.len()..tokens.len() + length % 40).map(|i| i as u32).collect();
                        if pages.grow(&mut table, tokens.len() + more.len()) {
                            tokens.extend(more);
                            pages.fill(&mut table, &tokens);
                        }
                        live[slot] = Some((table, tokens));
                    }
                    None => {
                        let tokens: Vec<u32> = (0..length as u32).map(|i| if i > 40 { i + salt } else { i }).collect();
                        if pages.cost(&tokens, length) <= pages.available() {
                            let before = pages.available();
                            let cost = pages.cost(&tokens, length);
                            let (mut table, spared) = pages.begin(&tokens);
                            prop_assert!(spared < length);
                            prop_assert!(pages.grow(&mut table, length));
                            prop_assert_eq!(before - pages.available(), cost);
                            pages.fill(&mut table, &tokens);
                            live[slot] = Some((table, tokens));
                        }
                    }
                }
                let mut places = [0u32; 24];
                pages.free.iter().chain(pages.idle.values()).for_each(|page| places[*page as usize] += 1);
                for (page, place) in places.iter_mut().enumerate() {
                    let held = live.iter().flatten().filter(|(t, _)| t.pages.contains(&(page as u32))).count() as u32;
                    prop_assert_eq!(pages.pages[page].holders, held);
                    *place += u32::from(held > 0);
                }
                prop_assert!(places.iter().all(|place| *place == 1));
            }
            live.into_iter().flatten().for_each(|(table, tokens)| pages.release(table, &tokens));
            prop_assert_eq!(pages.available(), 24);
            pages.forget_idle();
            prop_assert_eq!((pages.free.len(), pages.full.len(), pages.tails.len()), (24, 0, 0));
        }
    }
}
