//! What an answer must look like: a grammar over the tokens of a vocabulary.
//!
//! Owns the bounds of what strangers may ask for (`bounds`), and how a tokenizer is shown to llguidance, which compiles grammars
//! and says after each token which ones may follow. A state is a function of the tokens that it was given, so whatever
//! happens to a sequence in the pipe changes nothing.

mod bounds;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded as bounded_channel};
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use thiserror::Error;

use crate::token_set::TokenSet;
use crate::tokenizer::{Encode, Tokenizer};
pub use bounds::{SCHEMA_BYTES_MAX, TEXT_BYTES_MAX};

/// Stack of a compiler, which calls itself for every property of an object, every reference in a chain of them, and so on:
/// as many as there are in a grammar of the longest kind. Only what is used of it is memory.
const STACK_BYTES: usize = 64 << 20;
/// How long a grammar may be compiled; within the bounds it takes a small part of that.
const PATIENCE: Duration = Duration::from_secs(10);
/// Compilers that nobody waits for any more, at most; no others begin then.
const LATE_MAX: usize = 2;
/// Longest token that can be part of an answer under a constraint, in bytes; the trie recurses.
const TOKEN_BYTES_MAX: usize = 1000;
/// White space at one place of a JSON text: enough to indent deeply, and no way to go on for ever.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// Why there is no constraint, or no next token under it.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ConstraintError {
    /// The grammar is larger than what is accepted.
    #[error("{what} has {found} {unit}; at most {max} are accepted")]
    TooLarge {
        /// Kind of grammar.
        what: &'static str,
        /// Its size.
        found: usize,
        /// Of what.
        unit: &'static str,
        /// What is accepted.
        max: usize,
    },
    /// The grammar contradicts itself or its format, has what is not supported, or takes too much to compile.
    #[error("{what}: {message}")]
    Invalid {
        /// Kind of grammar.
        what: &'static str,
        /// What is wrong.
        message: String,
    },
    /// The vocabulary cannot spell what a grammar asks for.
    #[error("the tokenizer cannot be constrained: {message}")]
    Tokenizer {
        /// What is wrong.
        message: String,
    },
    /// What may come next takes too much to find out.
    #[error("the grammar is too complex to go on after {tokens} tokens: {message}")]
    TooComplex {
        /// Tokens of the answer so far.
        tokens: usize,
        /// Which bound was met.
        message: String,
    },
}

/// What an answer may be.
#[derive(Clone, Debug, PartialEq)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that a JSON Schema describes (draft 2020-12, without what llguidance does not know, which is an error).
    JsonSchema(Value),
    /// Text that a regular expression matches as a whole (the `regex` crate's syntax, without look-around).
    Regex(String),
    /// Text of a context-free grammar in llguidance's variant of Lark's syntax.
    Lark(String),
    /// The same, made by this program of what was looked at: see [`crate::tools::grammar`].
    Made(String),
}

impl Grammar {
    fn what(&self) -> &'static str {
        match self {
            Grammar::JsonObject | Grammar::JsonSchema(_) => "the JSON schema",
            Grammar::Regex(_) => "the regular expression",
            Grammar::Lark(_) | Grammar::Made(_) => "the grammar",
        }
    }

    fn for_compiler(&self) -> Result<TopLevelGrammar, ConstraintError> {
        Ok(match self {
            Grammar::JsonObject => TopLevelGrammar::from_json_schema(bounded(&json!({"type": "object"}))?),
            Grammar::JsonSchema(schema) => TopLevelGrammar::from_json_schema(bounded(schema)?),
            Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
            Grammar::Lark(text) | Grammar::Made(text) => TopLevelGrammar::from_lark(text.clone()),
        })
    }
}

/// A schema as the compiler takes it: with bounds on white space.
///
/// # Errors
/// [`ConstraintError::Invalid`] where it is no schema at all, and [`ConstraintError::TooLarge`].
pub fn bounded(schema: &Value) -> Result<Value, ConstraintError> {
    bounds::check_schema(schema)?;
    let mut map = match schema {
        Value::Object(map) => map.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        other => {
            let message = format!("a schema is an object, this is {}", kind(other));
            return Err(ConstraintError::Invalid { what: "the JSON schema", message });
        }
    };
    map.insert("x-guidance".into(), json!({"whitespace_pattern": WHITESPACE}));
    Ok(Value::Object(map))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "`false`, which nothing matches",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Compiles grammars over one vocabulary.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    vocab: usize,
    /// Compilers that took too long and are still at it.
    late: Arc<AtomicUsize>,
}

impl Grammars {
    /// Over the first `vocab` ids of a tokenizer: those that the model has logits for. Takes some 100 ms.
    ///
    /// # Errors
    /// [`ConstraintError::Tokenizer`].
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize) -> Result<Grammars, ConstraintError> {
        // The trie asserts its own bounds.
        let factory = catch_unwind(AssertUnwindSafe(|| {
            let env: TokEnv = Arc::new(Vocabulary::new(tokenizer, vocab));
            ParserFactory::new_simple(&env)
        }));
        let mut factory =
            factory.map_err(|error| ConstraintError::Tokenizer { message: first_line(&error.to_string()) })?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits {
            // Each is one or two kilobytes.
            initial_lexer_fuel: 200_000,
            // Twice what the most properties of an object come to.
            max_items_in_row: 8000,
            max_lexer_states: 20_000,
            // Prints of the parser's insides are for its makers.
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(Grammars { factory: Arc::new(factory), vocab, late: Arc::default() })
    }

    /// A constraint at its start.
    ///
    /// # Errors
    /// [`ConstraintError`] says what of the grammar is wrong, that it is too large, or takes too long.
    pub fn compile(&self, grammar: &Grammar) -> Result<Constraint, ConstraintError> {
        bounds::check(grammar)?;
        let refused = |message: String| ConstraintError::Invalid { what: grammar.what(), message };
        if self.late.load(Ordering::Relaxed) >= LATE_MAX {
            return Err(refused("grammars that take too long are still being compiled; none can be now".into()));
        }
        let (sender, compiled) = bounded_channel(0);
        let (factory, vocab, own, late) = (self.factory.clone(), self.vocab, grammar.clone(), self.late.clone());
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn(move || {
            let found = compile(&factory, &own, vocab);
            if sender.send(found).is_err() {
                late.fetch_sub(1, Ordering::Relaxed);
            }
        });
        thread.map_err(|error| refused(format!("it cannot be compiled now: {error}")))?;
        match compiled.recv_timeout(PATIENCE) {
            Ok(found) => found,
            Err(RecvTimeoutError::Disconnected) => Err(refused("the compiler failed".into())),
            Err(RecvTimeoutError::Timeout) => {
                // Taken back by the compiler, which finds nobody at the channel.
                self.late.fetch_add(1, Ordering::Relaxed);
                Err(refused(format!("it takes more than {} s to compile", PATIENCE.as_secs())))
            }
        }
    }
}

fn compile(factory: &ParserFactory, grammar: &Grammar, vocab: usize) -> Result<Constraint, ConstraintError> {
    let invalid = |message: String| ConstraintError::Invalid { what: grammar.what(), message: first_line(&message) };
    let parser = factory.create_parser(grammar.for_compiler()?).map_err(|error| invalid(error.to_string()))?;
    let matcher = Matcher::new(Ok(parser));
    let mut start = Progress { matcher, allowed: TokenSet::from_iter([]), vocab, tokens: 0 };
    // A grammar that nothing can begin is found here, not in the middle of a batch.
    start.find_allowed().map_err(|error| match error {
        ConstraintError::TooComplex { message, .. } => invalid(message),
        other => other,
    })?;
    Ok(Constraint { start: Arc::new(start) })
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammars").field("vocab", &self.vocab).finish_non_exhaustive()
    }
}

/// What an answer must look like, compiled. Cheap to clone.
#[derive(Clone)]
pub struct Constraint {
    start: Arc<Progress>,
}

impl Constraint {
    /// Where an answer begins.
    pub fn begin(&self) -> Progress {
        let Progress { matcher, allowed, vocab, tokens } = &*self.start;
        // A plain clone would share what was found out of the lexer, and with it the bounds that are on it: what an answer
        // comes to would depend on others.
        Progress { matcher: matcher.deep_clone(), allowed: allowed.clone(), vocab: *vocab, tokens: *tokens }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

/// How far an answer under a constraint is.
pub struct Progress {
    matcher: Matcher,
    allowed: TokenSet,
    vocab: usize,
    tokens: usize,
}

impl Progress {
    /// The tokens that may come next: never none. Tokens that end an answer are among them where it may end.
    pub fn allowed(&self) -> &TokenSet {
        &self.allowed
    }

    /// Goes on with an allowed token. Returns whether the answer is complete, so that nothing can follow.
    ///
    /// # Errors
    /// [`ConstraintError::TooComplex`].
    pub fn take(&mut self, id: u32) -> Result<bool, ConstraintError> {
        self.tokens += 1;
        self.matcher.consume_token(id).map_err(|error| self.too_complex(&error.to_string()))?;
        if self.matcher.is_stopped() {
            return Ok(true);
        }
        self.find_allowed()?;
        Ok(false)
    }

    fn find_allowed(&mut self) -> Result<(), ConstraintError> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|error| self.too_complex(&error.to_string()))?;
        self.allowed = TokenSet::from_words(mask.as_slice(), self.vocab);
        if self.allowed.is_empty() {
            return Err(self.too_complex("no token of the vocabulary can follow"));
        }
        Ok(())
    }

    fn too_complex(&self, message: &str) -> ConstraintError {
        ConstraintError::TooComplex { tokens: self.tokens, message: first_line(message) }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("tokens", &self.tokens).field("allowed", &self.allowed).finish_non_exhaustive()
    }
}

/// What people can use of an error of the compiler: it appends its own state in tags.
fn first_line(message: &str) -> String {
    let end = ["\n<state>", "\n<non-verbose/>", "\n<backtrace>"].iter().filter_map(|tag| message.find(tag)).min();
    let words: Vec<&str> = message[..end.unwrap_or(message.len())].split_whitespace().collect();
    let mut text = words.join(" ");
    if let Some((at, _)) = text.char_indices().nth(600) {
        text.truncate(at);
        text.push('…');
    }
    text
}

/// A tokenizer as llguidance sees it.
struct Vocabulary {
    tokenizer: Arc<Tokenizer>,
    trie: TokTrie,
    canonical: bool,
}

impl Vocabulary {
    fn new(tokenizer: Arc<Tokenizer>, vocab: usize) -> Vocabulary {
        let eos: Vec<u32> = tokenizer.eos_ids().iter().copied().filter(|id| (*id as usize) < vocab).collect();
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id);
            if bytes.len() > TOKEN_BYTES_MAX {
                return Vec::new();
            }
            // A token that ends an answer is no text, whatever the tokenizer says.
            if tokenizer.is_special(id) || eos.contains(&id) {
                [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat()
            } else {
                bytes
            }
        };
        let words: Vec<Vec<u8>> = (0..vocab as u32).map(word).collect();
        let first = eos.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(vocab as u32, first), &words);
        if eos.len() > 1 {
            trie = trie.with_eos_tokens(&eos);
        }
        let canonical = spells_fragments(&tokenizer);
        Vocabulary { tokenizer, trie, canonical }
    }
}

/// Whether a piece from the middle of a text is encoded as what it is: some tokenizers put a space in front.
fn spells_fragments(tokenizer: &Tokenizer) -> bool {
    ["a", " a", "{\"name\": \"", "\n  \"b\": [1, 2.5]}", "é"].iter().all(|text| {
        let ids = tokenizer.encode(text, Encode::default()).unwrap_or_default();
        ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect::<Vec<u8>>() == text.as_bytes()
    })
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            let ids = self.tokenizer.encode(text, Encode::default());
            ids.unwrap_or_else(|_| self.trie.greedy_tokenize(text.as_bytes()))
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}

#[cfg(test)]
mod tests;
