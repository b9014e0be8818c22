//! The vocabulary in a GGUF file, turned into a tokenizer.
//!
//! Byte-level BPE (`gpt2`) takes its pre-tokenizer from a name llama.cpp gave it; SentencePiece (`llama`) becomes BPE
//! with the merges that its scores imply, as transformers converts it.

use std::collections::HashMap;
use std::path::PathBuf;

use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::{SplitDelimiterBehavior, Tokenizer as Inner};

use super::pieces::{Pieces, Spelling, byte_token};
use super::{IDS_MAX, Parts, TokenizerError};

/// Longest SentencePiece token that is looked at for merges, in bytes. Real ones have at most some 150.
const PIECE_BYTES_MAX: usize = 1024;

/// `tokenizer.ggml.token_type`.
mod token_type {
    pub const NORMAL: i64 = 1;
    pub const UNKNOWN: i64 = 2;
    pub const CONTROL: i64 = 3;
    pub const USER_DEFINED: i64 = 4;
}

/// Control tokens that end a turn whatever the metadata says; llama.cpp knows them by their text too.
const END_OF_TURN: &[&str] = &["<|im_end|>", "<|eot_id|>", "<end_of_turn>"];

/// The keys `tokenizer.ggml.*` of a GGUF file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocab {
    /// The file, for messages.
    pub origin: PathBuf,
    /// `gpt2` or `llama`.
    pub model: String,
    /// Name of the pre-tokenizer, with `gpt2`.
    pub pre: Option<String>,
    /// Tokens by id.
    pub tokens: Vec<String>,
    /// Scores by id, with `llama`.
    pub scores: Vec<f32>,
    /// Token types by id: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte. Empty means all normal.
    pub types: Vec<i64>,
    /// Pairs separated by a space, most frequent first, with `gpt2`.
    pub merges: Vec<String>,
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Ends a turn.
    pub eot: Option<u32>,
    /// Ends a message.
    pub eom: Option<u32>,
    /// Stands for what has no token.
    pub unk: Option<u32>,
    /// Whether raw text begins with BOS; `None` leaves it to the kind of vocabulary.
    pub add_bos: Option<bool>,
    /// Whether raw text ends with EOS.
    pub add_eos: Option<bool>,
    /// Whether a space is put in front of a text, with `llama`; `None` means yes.
    pub add_space_prefix: Option<bool>,
}

/// A pre-tokenizer by llama.cpp's name for it.
struct Pre {
    names: &'static [&'static str],
    cut: Cut,
    /// Normalise to NFC first.
    nfc: bool,
    /// A word that is a token is taken whole, merges or not.
    ignore_merges: bool,
    /// llama.cpp adds BOS for these unless told otherwise.
    add_bos: bool,
}

/// How a text is cut into words before merging.
enum Cut {
    /// GPT-2's expression.
    Gpt2,
    /// Every digit alone, then GPT-2's expression.
    DigitsGpt2,
    /// An expression of its own.
    Regex(&'static str),
}

const LLAMA3_REGEX: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_REGEX: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN_REGEX: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PRE: &[Pre] = &[
    Pre { names: &["gpt-2", "gpt2", "default"], cut: Cut::Gpt2, nfc: false, ignore_merges: false, add_bos: false },
    Pre { names: &["smollm"], cut: Cut::DigitsGpt2, nfc: false, ignore_merges: false, add_bos: false },
    Pre {
        names: &["llama-bpe", "llama3", "llama-v3"],
        cut: Cut::Regex(LLAMA3_REGEX),
        nfc: false,
        ignore_merges: true,
        add_bos: true,
    },
    Pre {
        names: &["qwen2", "deepseek-r1-qwen"],
        cut: Cut::Regex(QWEN2_REGEX),
        nfc: true,
        ignore_merges: false,
        add_bos: false,
    },
    Pre { names: &["tekken"], cut: Cut::Regex(TEKKEN_REGEX), nfc: false, ignore_merges: true, add_bos: false },
];

impl GgufVocab {
    pub(super) fn parts(self) -> Result<Parts, TokenizerError> {
        self.check()?;
        let (mut inner, spelling, add_bos) = match self.model.as_str() {
            "gpt2" => self.byte_level()?,
            "llama" => self.sentencepiece()?,
            other => {
                return Err(self.unknown("model", other, "gpt2 (byte-level BPE), llama (SentencePiece)".into()));
            }
        };
        let is_special = |id: u32| matches!(self.type_of(id as usize), token_type::CONTROL | token_type::UNKNOWN);
        let is_added = |id: u32| is_special(id) || self.type_of(id as usize) == token_type::USER_DEFINED;
        let added = (0..).zip(&self.tokens).filter(|(id, text)| {
            // A user-defined run of `▁` is found by merging, after spaces have become `▁`.
            is_added(*id) && !text.is_empty() && (spelling == Spelling::ByteLevel || !text.contains('▁'))
        });
        let added = added.map(|(id, text)| AddedToken::from(text.clone(), is_special(id)).normalized(false));
        inner.add_tokens(added.collect::<Vec<_>>()).map_err(|e| self.malformed(e.to_string()))?;
        let texts = (0..).zip(&self.tokens).map(|(id, text)| (text.as_str(), is_added(id)));
        let pieces = Pieces::new(spelling, texts, is_special);
        let mut eos_ids: Vec<u32> = Vec::new();
        let well_known = END_OF_TURN.iter().filter_map(|text| inner.token_to_id(text)).filter(|id| is_special(*id));
        for id in [self.eos, self.eot, self.eom].into_iter().flatten().chain(well_known) {
            if !eos_ids.contains(&id) {
                eos_ids.push(id);
            }
        }
        Ok(Parts {
            inner,
            pieces,
            bos: self.bos,
            eos: self.eos,
            eos_ids,
            add_bos: Some(self.add_bos.unwrap_or(add_bos)),
            add_eos: self.add_eos == Some(true),
            origin: self.origin,
        })
    }

    fn check(&self) -> Result<(), TokenizerError> {
        let count = self.tokens.len();
        if count == 0 || count > IDS_MAX {
            return Err(self.malformed(format!("it has {count} tokens; from 1 to {IDS_MAX} are accepted")));
        }
        if !self.types.is_empty() && self.types.len() != count {
            return Err(self.malformed(format!("it has {count} tokens and {} token types", self.types.len())));
        }
        let ids = [("bos", self.bos), ("eos", self.eos), ("eot", self.eot), ("eom", self.eom), ("unknown", self.unk)];
        for (name, id) in ids {
            if let Some(id) = id.filter(|id| *id as usize >= count) {
                return Err(
                    self.malformed(format!("tokenizer.ggml.{name}_token_id is {id}, but it has {count} tokens"))
                );
            }
        }
        Ok(())
    }

    fn byte_level(&self) -> Result<(Inner, Spelling, bool), TokenizerError> {
        let name = self.pre.as_deref().unwrap_or("default");
        let Some(pre) = PRE.iter().find(|pre| pre.names.contains(&name)) else {
            let known = PRE.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ");
            return Err(self.unknown("pre-tokenizer", name, known));
        };
        let vocab = self.vocab();
        let mut merges = Merges::with_capacity(self.merges.len());
        for (rank, merge) in self.merges.iter().enumerate() {
            let pair = merge.split_once(' ').filter(|(a, b)| {
                vocab.contains_key(*a) && vocab.contains_key(*b) && vocab.contains_key(&format!("{a}{b}"))
            });
            let Some((a, b)) = pair else {
                return Err(self.malformed(format!("merge {rank}, {merge:?}, is no pair of tokens that makes a token")));
            };
            merges.push((a.to_owned(), b.to_owned()));
        }
        let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges).build();
        let mut inner = Inner::new(model.map_err(|e| self.malformed(e.to_string()))?);
        let failed = |e: tokenizers::Error| self.malformed(e.to_string());
        if pre.nfc {
            inner.with_normalizer(Some(NFC)).map_err(failed)?;
        }
        inner.with_pre_tokenizer(Some(pre.cut.pre_tokenizer().map_err(failed)?));
        Ok((inner, Spelling::ByteLevel, pre.add_bos))
    }

    fn sentencepiece(&self) -> Result<(Inner, Spelling, bool), TokenizerError> {
        if self.scores.len() != self.tokens.len() {
            let (tokens, scores) = (self.tokens.len(), self.scores.len());
            return Err(self.malformed(format!("it has {tokens} tokens and {scores} scores")));
        }
        let unk = self
            .unk
            .map(|id| id as usize)
            .or_else(|| (0..self.tokens.len()).find(|id| self.type_of(*id) == token_type::UNKNOWN));
        let mut model = BPE::builder()
            .vocab_and_merges(self.vocab(), self.implied_merges())
            .byte_fallback(self.has_all_bytes())
            .fuse_unk(true);
        if let Some(unk) = unk {
            model = model.unk_token(self.tokens[unk].clone());
        }
        let mut inner = Inner::new(model.build().map_err(|e| self.malformed(e.to_string()))?);
        let prefix = self.add_space_prefix.unwrap_or(true);
        let failed = |e: tokenizers::Error| self.malformed(e.to_string());
        let mut steps: Vec<NormalizerWrapper> = Vec::new();
        if prefix {
            steps.push(Prepend::new("▁".into()).into());
        }
        steps.push(Replace::new(" ", "▁").map_err(failed)?.into());
        inner.with_normalizer(Some(Normalizers::new(steps))).map_err(failed)?;
        Ok((inner, Spelling::Spaced { strip: prefix }, true))
    }

    fn vocab(&self) -> Vocab {
        (0..).zip(&self.tokens).map(|(id, text)| (text.clone(), id)).collect()
    }

    fn has_all_bytes(&self) -> bool {
        let bytes = self.tokens.iter().filter_map(|text| byte_token(text));
        bytes.collect::<std::collections::HashSet<_>>().len() == 256
    }

    /// Every pair of tokens that makes a token, best score first, as transformers' `generate_merges`.
    ///
    /// Control, unknown and byte tokens are left out: no text may merge up to one.
    fn implied_merges(&self) -> Merges {
        let usable = |id: usize| matches!(self.type_of(id), token_type::NORMAL | token_type::USER_DEFINED);
        let ids: HashMap<&str, usize> = self
            .tokens
            .iter()
            .enumerate()
            .filter(|(id, _)| usable(*id))
            .map(|(id, text)| (text.as_str(), id))
            .collect();
        let mut merges = Vec::new();
        for (id, text) in self.tokens.iter().enumerate() {
            if !usable(id) || text.len() > PIECE_BYTES_MAX {
                continue;
            }
            let cuts = text.char_indices().skip(1).map(|(cut, _)| text.split_at(cut));
            let pairs = cuts.filter_map(|(a, b)| Some((*ids.get(a)?, *ids.get(b)?, a, b)));
            let mut pairs: Vec<_> = pairs.collect();
            pairs.sort_by_key(|(a, b, ..)| (*a, *b));
            merges.extend(pairs.into_iter().map(|(_, _, a, b)| (self.scores[id], a, b)));
        }
        let rank = |(score, a, b): &(f32, &str, &str)| (*score, a.chars().count(), b.chars().count());
        // Stable, so that equal ranks keep the order of ids.
        merges.sort_by(|x, y| {
            let ((score_x, a_x, b_x), (score_y, a_y, b_y)) = (rank(x), rank(y));
            score_y.total_cmp(&score_x).then((a_y, b_y).cmp(&(a_x, b_x)))
        });
        merges.into_iter().map(|(_, a, b)| (a.to_owned(), b.to_owned())).collect()
    }

    fn type_of(&self, id: usize) -> i64 {
        self.types.get(id).copied().unwrap_or(token_type::NORMAL)
    }

    fn malformed(&self, what: String) -> TokenizerError {
        TokenizerError::Malformed { origin: self.origin.clone(), what }
    }

    fn unknown(&self, key: &str, found: &str, known: String) -> TokenizerError {
        TokenizerError::Unknown { origin: self.origin.clone(), key: key.into(), found: found.into(), known }
    }
}

impl Cut {
    fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper, tokenizers::Error> {
        let byte_level = |use_regex| ByteLevel::new(false, true, use_regex);
        let steps: Vec<PreTokenizerWrapper> = match self {
            Self::Gpt2 => return Ok(byte_level(true).into()),
            Self::DigitsGpt2 => vec![Digits::new(true).into(), byte_level(true).into()],
            Self::Regex(regex) => {
                let pattern = SplitPattern::Regex((*regex).into());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?;
                vec![split.into(), byte_level(false).into()]
            }
        };
        Ok(PreTokenizers::new(steps).into())
    }
}
