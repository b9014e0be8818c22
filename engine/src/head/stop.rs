//! Finds stop strings in text that comes in pieces.

/// Holds back what may be the beginning of a stop string.
pub(super) struct StopScanner {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

impl StopScanner {
    /// Empty stop strings never match.
    pub fn new(stops: &[String]) -> StopScanner {
        StopScanner {
            stops: stops.iter().filter(|stop| !stop.is_empty()).cloned().collect(),
            held: String::new(),
            stopped: false,
        }
    }

    /// The text that has become certain, and whether a stop string came; nothing is certain after that.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        if self.stopped {
            return (String::new(), true);
        }
        self.held.push_str(piece);
        // The one that is complete first, so that pieces make no difference.
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop.len())));
        if let Some((begin, _)) = found.min_by_key(|(begin, length)| (begin + length, *begin)) {
            self.stopped = true;
            self.held.truncate(begin);
            return (std::mem::take(&mut self.held), true);
        }
        let starts = |tail: &str| self.stops.iter().any(|stop| stop.starts_with(tail));
        let keep =
            self.held.char_indices().map(|(at, _)| at).find(|at| starts(&self.held[*at..])).unwrap_or(self.held.len());
        let rest = self.held.split_off(keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut scanner = StopScanner::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let (certain, stopped) = scanner.push(piece);
            text += &certain;
            if stopped {
                return (text, true);
            }
        }
        (text + &scanner.finish(), false)
    }

    #[test]
    fn a_stop_string_ends_the_text_even_across_pieces() {
        assert_eq!(run(&["END"], &["one E", "N", "D two"]), ("one ".to_owned(), true));
        assert_eq!(run(&["END"], &["one E", "N", "two"]), ("one ENtwo".to_owned(), false));
        assert_eq!(run(&["aab"], &["aa", "ab"]), ("a".to_owned(), true));
        assert_eq!(run(&["\n\n", "x"], &["a\n", "x"]), ("a\n".to_owned(), true));
        assert_eq!(run(&[""], &["a"]), ("a".to_owned(), false));
        assert_eq!(run(&["abc", "b"], &["abc"]), ("a".to_owned(), true), "what is complete first");
        assert_eq!(run(&["abc", "b"], &["a", "b", "c"]), ("a".to_owned(), true));
        assert_eq!(run(&["bc", "abc"], &["xabc"]), ("x".to_owned(), true), "the longer of two that end together");
        assert_eq!(run(&["é!"], &["caf", "é", "?"]), ("café?".to_owned(), false));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in "[abé]{0,12}", one in "[abé]{1,3}", two in "[abé]{1,3}", cut in 0usize..12) {
            let cut = text.char_indices().map(|(at, _)| at).nth(cut).unwrap_or(text.len());
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            let whole = run(&[&one, &two], &[&text]);
            prop_assert_eq!(run(&[&one, &two], &[&text[..cut], &text[cut..]]), whole.clone());
            prop_assert_eq!(run(&[&one, &two], &letters), whole);
        }
    }
}
