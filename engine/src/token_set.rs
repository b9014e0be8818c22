//! A set of token ids, one bit each.

/// Tokens that may come next.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenSet {
    /// Bit `id % 32` of word `id / 32`.
    words: Vec<u32>,
    len: usize,
}

impl TokenSet {
    /// Of words of 32 ids each, the lowest in the lowest bit; bits at `vocab` and beyond are left out.
    pub fn from_words(words: &[u32], vocab: usize) -> TokenSet {
        let mut words: Vec<u32> = words[..words.len().min(vocab.div_ceil(32))].to_vec();
        if let Some(last) = words.get_mut(vocab / 32) {
            *last &= (1u32 << (vocab % 32)) - 1;
        }
        let len = words.iter().map(|word| word.count_ones() as usize).sum();
        TokenSet { words, len }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `id` is among them.
    pub fn contains(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// All of them, by rising id.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        let bits = |(at, word): (usize, &u32)| {
            let word = *word;
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u32 * 32 + bit)
        };
        self.words.iter().enumerate().filter(|(_, word)| **word != 0).flat_map(bits)
    }

    /// The one token, where there is one only.
    pub fn only(&self) -> Option<u32> {
        self.iter().next().filter(|_| self.len == 1)
    }
}

/// How many; thousands of ids tell nobody anything.
impl std::fmt::Debug for TokenSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenSet of {}", self.len)
    }
}

/// Of any ids.
impl FromIterator<u32> for TokenSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> TokenSet {
        let mut words = Vec::new();
        for id in ids {
            let at = id as usize / 32;
            if words.len() <= at {
                words.resize(at + 1, 0u32);
            }
            words[at] |= 1 << (id % 32);
        }
        let vocab = words.len() * 32;
        TokenSet::from_words(&words, vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_is_a_set(ids in prop::collection::btree_set(0u32..300, 0..40), vocab in 0usize..320) {
            let set: TokenSet = ids.iter().copied().collect();
            prop_assert_eq!(set.iter().collect::<BTreeSet<_>>(), ids.clone());
            prop_assert_eq!((set.len(), set.is_empty()), (ids.len(), ids.is_empty()));
            prop_assert!((0..400).all(|id| set.contains(id) == ids.contains(&id)));
            prop_assert_eq!(set.only(), ids.first().copied().filter(|_| ids.len() == 1));
            let inside: BTreeSet<u32> = ids.into_iter().filter(|id| (*id as usize) < vocab).collect();
            let cut = TokenSet::from_words(&set.words, vocab);
            prop_assert_eq!(cut.len(), inside.len());
            prop_assert_eq!(cut.iter().collect::<BTreeSet<_>>(), inside);
        }
    }
}
