//! Text to token ids and back.
//!
//! Owns the choice of what in a text may become a special token: never what a user wrote, unless the caller asks for
//! it. The merging itself is the `tokenizers` crate's. Decoding works on the bytes of single tokens, so that a stream
//! costs the same for every token.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use serde_json::Value;
use tokenizers::tokenizer::Tokenizer as Inner;

use crate::chat_template::{ChatTemplateError, Rendered};
use crate::checkpoint::hf;

mod gguf_vocab;
mod pieces;
mod special;
mod stream;
#[cfg(test)]
mod tests;

pub use gguf_vocab::GgufVocab;
pub use stream::TokenStream;

use pieces::{Pieces, Spelling};
use special::{Placeholders, Special, Specials};

/// Longest `tokenizer.json` accepted, in bytes; the largest real ones have some 35 MiB.
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Ids are below this, so that a wild one in a file cannot ask for a huge table.
const IDS_MAX: usize = crate::config::VOCAB_MAX;

/// How a text is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Encode {
    /// Put around the text what the model's tokenizer puts around raw text, mostly a BOS in front; never a second BOS.
    pub add_bos: bool,
    /// Turn the text of special tokens into their ids. Without it, `<|im_end|>` is ten characters like any others.
    pub parse_special: bool,
}

/// Why a tokenizer cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model has no vocabulary, or lacks a part of it.
    #[error("{} has no tokenizer: {what} is missing", origin.display())]
    Missing {
        /// File or folder.
        origin: PathBuf,
        /// What is missing, and what to do.
        what: String,
    },
    /// The vocabulary contradicts itself or its format.
    #[error("{}: malformed tokenizer: {what}", origin.display())]
    Malformed {
        /// File or folder.
        origin: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The vocabulary is of a kind that is not known here.
    #[error("{}: tokenizer {key} {found:?} is not known; known: {known}", origin.display())]
    Unknown {
        /// File or folder.
        origin: PathBuf,
        /// Which property.
        key: String,
        /// What the file says.
        found: String,
        /// What is known.
        known: String,
    },
    /// A text could not be encoded.
    #[error("cannot encode the text: {what}")]
    Encode {
        /// What the tokenizer said.
        what: String,
    },
    /// A chat template failed when its messages were rendered again with their special tokens hidden.
    #[error(transparent)]
    Template(#[from] ChatTemplateError),
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: Inner,
    /// The same without special tokens; most sessions never need it.
    plain: OnceLock<Result<Plain, String>>,
    pieces: Arc<Pieces>,
    specials: Specials,
    /// Ids put before and after raw text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    eos_ids: Vec<u32>,
    unk: Option<u32>,
    /// Special texts are matched after normalisation, so that a search in the raw text could miss one.
    normalized_specials: bool,
}

/// A copy of the tokenizer in which the text of special tokens is ordinary, and placeholders stand for them.
#[derive(Debug)]
struct Plain {
    inner: Inner,
    placeholders: Placeholders,
    /// The copy's id of a placeholder → the special id it stands for.
    real: HashMap<u32, u32>,
}

/// What both kinds of file are reduced to before a [`Tokenizer`] is made of them.
struct Parts {
    origin: PathBuf,
    inner: Inner,
    pieces: Pieces,
    bos: Option<u32>,
    /// The one token called EOS.
    eos: Option<u32>,
    /// Every token that ends a reply.
    eos_ids: Vec<u32>,
    /// What raw text begins with; `None` leaves it to `inner`'s post-processor.
    add_bos: Option<bool>,
    /// Raw text also ends with EOS.
    add_eos: bool,
}

impl Tokenizer {
    /// Reads `tokenizer.json` in a Hugging Face folder; `tokenizer_config.json`, `generation_config.json` and
    /// `config.json` add BOS and EOS.
    ///
    /// # Errors
    /// [`TokenizerError`] when the file is missing, malformed, or decodes in a way that is not known here.
    pub fn from_hf_dir(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        if !path.is_file() {
            let what = format!(
                "tokenizer.json ({}); download it, or write one with transformers' \
                 AutoTokenizer.from_pretrained(…).save_pretrained(…)",
                hf::listing(dir)
            );
            return Err(TokenizerError::Missing { origin: dir.into(), what });
        }
        let mut inner = parse(&read(&path)?, &path)?;
        // Batching options of training scripts: a prompt is neither cut nor padded.
        inner.with_truncation(None).map_err(|e| malformed(&path, e.to_string()))?.with_padding(None);
        let vocab = inner.get_vocab(true);
        let spelling = Spelling::of_decoder(&inner).map_err(|found| TokenizerError::Unknown {
            origin: path.clone(),
            key: "decoder".into(),
            found,
            known: "ByteLevel, Metaspace, and a Sequence of Replace, ByteFallback, Fuse and Strip".into(),
        })?;
        let added = inner.get_added_tokens_decoder();
        let count = vocab.values().chain(added.keys()).max().map_or(0, |id| *id as usize + 1);
        if count > IDS_MAX {
            return Err(malformed(&path, format!("an id is {}; ids are below {IDS_MAX}", count - 1)));
        }
        let mut texts = vec![("", false); count];
        vocab.iter().for_each(|(text, id)| texts[*id as usize] = (text, false));
        added.iter().for_each(|(id, token)| texts[*id as usize] = (&token.content, true));
        let pieces = Pieces::new(spelling, texts.into_iter(), |id| added.get(&id).is_some_and(|token| token.special));
        let config = side_file(&dir.join("tokenizer_config.json"))?;
        let id_of = |key: &str| {
            let token = &config[key];
            inner.token_to_id(token.as_str().or(token["content"].as_str())?)
        };
        let mut eos_ids = declared_eos(dir)?;
        eos_ids.extend(id_of("eos_token").filter(|id| !eos_ids.contains(id)));
        // As in transformers, only these classes take the flags over the post-processor of the file.
        let class = config["tokenizer_class"].as_str().unwrap_or_default();
        let flags = class.starts_with("Llama") || class.starts_with("CodeLlama") || class.starts_with("Gemma");
        let (bos, eos) = (id_of("bos_token"), id_of("eos_token"));
        let parts = Parts {
            origin: path,
            add_bos: config["add_bos_token"].as_bool().filter(|_| flags),
            add_eos: flags && config["add_eos_token"] == Value::Bool(true),
            inner,
            pieces,
            bos,
            eos,
            eos_ids,
        };
        Self::assemble(parts)
    }

    /// Makes a tokenizer of the vocabulary in a GGUF file.
    ///
    /// # Errors
    /// [`TokenizerError`] when its model or pre-tokenizer is not known, or its parts contradict each other.
    pub fn from_gguf(vocab: GgufVocab) -> Result<Self, TokenizerError> {
        Self::assemble(vocab.parts()?)
    }

    fn assemble(parts: Parts) -> Result<Self, TokenizerError> {
        let Parts { origin, inner, pieces, bos, eos, eos_ids, add_bos, add_eos } = parts;
        let mut specials: Vec<_> = inner
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, token)| token.special)
            .map(|(id, token)| Special { id, token })
            .collect();
        specials.sort_by_key(|special| special.id);
        let (mut prefix, mut suffix) = around(&inner).map_err(|what| malformed(&origin, what))?;
        match (add_bos, bos) {
            (Some(true), Some(bos)) if prefix.first() != Some(&bos) => prefix.insert(0, bos),
            (Some(false), Some(bos)) => prefix.retain(|id| *id != bos),
            _ => {}
        }
        if let Some(eos) = eos.filter(|_| add_eos)
            && suffix.last() != Some(&eos)
        {
            suffix.push(eos);
        }
        let unk = match inner.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => bpe.unk_token.as_deref().and_then(|unk| inner.token_to_id(unk)),
            _ => None,
        };
        Ok(Self {
            normalized_specials: inner.get_normalizer().is_some() && specials.iter().any(|s| s.token.normalized),
            specials: Specials::new(specials),
            plain: OnceLock::new(),
            pieces: Arc::new(pieces),
            inner,
            prefix,
            suffix,
            bos,
            eos,
            eos_ids,
            unk,
        })
    }

    /// The ids of a text.
    ///
    /// With `parse_special` the result is that of Hugging Face's tokenizer. Without it, tokens that are added but not
    /// special are still found, as there.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] when the tokenizer has no way to spell the text.
    pub fn encode(&self, text: &str, how: Encode) -> Result<Vec<u32>, TokenizerError> {
        let ids = if how.parse_special {
            encode(&self.inner, text)?
        } else if self.specials.occur_in(text) || self.normalized_specials {
            self.encode_plain(text)?
        } else {
            self.respell(encode(&self.inner, text)?)?
        };
        Ok(if how.add_bos { self.surround(ids) } else { ids })
    }

    /// The ids of a rendered chat.
    ///
    /// Special tokens the template wrote become special, the same text inside a message does not. As in
    /// transformers' `apply_chat_template` nothing is put around the text: BOS is the template's business. While no
    /// message holds the text of a special token, nor what becomes one by normalisation, the result is that of encoding
    /// the whole text.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], or [`TokenizerError::Template`] when rendering again with hidden texts fails.
    pub fn encode_chat(&self, rendered: &Rendered) -> Result<Vec<u32>, TokenizerError> {
        if !self.normalized_specials && !rendered.contents().any(|content| self.specials.occur_in(content)) {
            return encode(&self.inner, rendered.text());
        }
        let plain = self.plain()?;
        let hidden = rendered.again(|content| self.specials.replace(content, |k| plain.placeholders.user(k)))?;
        let marked = self.specials.replace(&hidden, |k| plain.placeholders.template(k));
        let text = plain.placeholders.restore_user(&marked, |k| self.specials.text(k));
        self.encode_plain(&text)
    }

    /// Encodes with special texts as ordinary ones and placeholders as special tokens.
    fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let plain = self.plain()?;
        let ids = self.respell(encode(&plain.inner, text)?)?;
        Ok(ids.into_iter().map(|id| plain.real.get(&id).copied().unwrap_or(id)).collect())
    }

    /// Spells out special ids that merging arrived at, which happens where a vocabulary can merge up to their text.
    fn respell(&self, ids: Vec<u32>) -> Result<Vec<u32>, TokenizerError> {
        let forged = |id: u32| self.is_special(id) && Some(id) != self.unk;
        if !ids.iter().any(|id| forged(*id)) {
            return Ok(ids);
        }
        let mut out = Vec::with_capacity(ids.len());
        for id in ids {
            match self.specials.by_id(id) {
                Some(text) if forged(id) => {
                    for letter in text.chars() {
                        let letter = encode(&self.plain()?.inner, letter.encode_utf8(&mut [0; 4]))?;
                        out.extend(letter.into_iter().filter(|id| !forged(*id)));
                    }
                }
                _ => out.push(id),
            }
        }
        Ok(out)
    }

    fn surround(&self, ids: Vec<u32>) -> Vec<u32> {
        let doubled = self.bos.is_some() && self.prefix.last() == self.bos.as_ref() && ids.first() == self.bos.as_ref();
        let prefix = &self.prefix[..self.prefix.len() - usize::from(doubled)];
        [prefix, &ids, &self.suffix].concat()
    }

    fn plain(&self) -> Result<&Plain, TokenizerError> {
        let plain = self.plain.get_or_init(|| Plain::new(&self.inner, &self.specials));
        plain.as_ref().map_err(|what| TokenizerError::Encode { what: what.clone() })
    }

    /// The text of ids; bytes that are no UTF-8 become U+FFFD. With `skip_special`, special tokens leave no trace.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut stream = self.stream();
        if !skip_special {
            stream = stream.keep_special();
        }
        let mut text: String = ids.iter().filter_map(|id| stream.push(*id)).collect();
        text.push_str(&stream.finish_lossy());
        text
    }

    /// An incremental [`Self::decode`] of ids from the start of a text, without special tokens.
    pub fn stream(&self) -> TokenStream {
        TokenStream::new(self.pieces.clone(), true)
    }

    /// An incremental decode of ids that follow a prompt: a space in front of the first word is kept.
    pub fn stream_continuing(&self) -> TokenStream {
        TokenStream::new(self.pieces.clone(), false)
    }

    /// The bytes a token stands for; they may be part of a character. Empty for an id that has no token.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        self.pieces.bytes(id).to_vec()
    }

    /// One more than the largest id; the model's embedding table may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.pieces.count()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Every token that ends a reply: declared ones, and for GGUF also the usual end-of-turn tokens of its vocabulary.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// Text of [`Self::bos`], which chat templates print as `bos_token`.
    pub fn bos_text(&self) -> Option<String> {
        self.bos.map(|id| String::from_utf8_lossy(self.pieces.bytes(id)).into_owned())
    }

    /// Text of the token the model calls EOS, which chat templates print as `eos_token`.
    pub fn eos_text(&self) -> Option<String> {
        let eos = self.eos.or(self.eos_ids.first().copied());
        eos.map(|id| String::from_utf8_lossy(self.pieces.bytes(id)).into_owned())
    }

    /// Whether a token is special: it controls the model and is no part of a text.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// The id of a token by its spelling in the vocabulary.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        self.inner.token_to_id(text)
    }
}

impl Plain {
    fn new(inner: &Inner, specials: &Specials) -> Result<Self, String> {
        let placeholders = Placeholders::new();
        let mut inner = inner.clone();
        inner.set_encode_special_tokens(true);
        let tokens = specials.iter().enumerate().map(|(k, special)| {
            let mut token = special.token.clone();
            token.content = placeholders.template(k);
            token.special = false;
            token
        });
        inner.add_tokens(tokens.collect::<Vec<_>>()).map_err(|e| e.to_string())?;
        let real = specials.iter().enumerate();
        let real = real.filter_map(|(k, special)| Some((inner.token_to_id(&placeholders.template(k))?, special.id)));
        Ok(Self { real: real.collect(), inner, placeholders })
    }
}

fn encode(inner: &Inner, text: &str) -> Result<Vec<u32>, TokenizerError> {
    let encoding = inner.encode_fast(text, false).map_err(|e| TokenizerError::Encode { what: e.to_string() })?;
    Ok(encoding.get_ids().to_vec())
}

/// What the post-processor puts before and after a text, seen on a probe.
fn around(inner: &Inner) -> Result<(Vec<u32>, Vec<u32>), String> {
    let probe = |special| inner.encode_fast("a", special).map(|encoding| encoding.get_ids().to_vec());
    let (bare, full) = (probe(false).map_err(|e| e.to_string())?, probe(true).map_err(|e| e.to_string())?);
    let start = full.windows(bare.len().max(1)).position(|window| window == bare);
    let start = start.ok_or("its post-processor changes the tokens of a text")?;
    Ok((full[..start].to_vec(), full[start + bare.len()..].to_vec()))
}

/// Parses with the `tokenizers` crate, which in places panics on contradictory files (merges longer than every token).
fn parse(bytes: &[u8], path: &Path) -> Result<Inner, TokenizerError> {
    match std::panic::catch_unwind(|| Inner::from_bytes(bytes)) {
        Ok(Ok(inner)) => Ok(inner),
        Ok(Err(e)) => Err(malformed(path, e.to_string())),
        Err(_) => Err(malformed(path, "its parts contradict each other".into())),
    }
}

fn malformed(origin: &Path, what: String) -> TokenizerError {
    TokenizerError::Malformed { origin: origin.into(), what }
}

/// End-of-text ids of `generation_config.json`, else of `config.json`.
fn declared_eos(dir: &Path) -> Result<Vec<u32>, TokenizerError> {
    let mut eos_ids = hf::ids(&side_file(&dir.join("generation_config.json"))?["eos_token_id"]);
    if eos_ids.is_empty() {
        eos_ids = hf::ids(&side_file(&dir.join("config.json"))?["eos_token_id"]);
    }
    Ok(eos_ids)
}

/// A JSON file that may be absent, which then counts as `null`.
fn side_file(path: &Path) -> Result<Value, TokenizerError> {
    if !path.is_file() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&read(path)?).map_err(|e| malformed(path, format!("not valid JSON: {e}")))
}

fn read(path: &Path) -> Result<Vec<u8>, TokenizerError> {
    let io = |source| TokenizerError::Io { path: path.into(), source };
    let bytes = std::fs::metadata(path).map_err(io)?.len();
    if bytes > FILE_BYTES_MAX {
        return Err(malformed(path, format!("it has {bytes} bytes; at most {FILE_BYTES_MAX} are accepted")));
    }
    std::fs::read(path).map_err(io)
}
