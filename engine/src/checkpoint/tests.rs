use std::fs;

use tempfile::TempDir;

use super::gguf_writer::GgufWriter;
use super::*;
use crate::config::RopeScaling;

mod damage;
mod folder;

const HIDDEN: usize = 32;

/// Metadata of a model with one layer of width 32, two heads and a byte-level vocabulary.
fn metadata(arch: &str) -> GgufWriter {
    let mut writer = GgufWriter::new();
    let key = |name: &str| format!("{arch}.{name}");
    writer
        .set_str("general.architecture", arch)
        .set_str("general.name", "tiny")
        .set_u32(&key("block_count"), 1)
        .set_u32(&key("context_length"), 64)
        .set_u32(&key("embedding_length"), HIDDEN as u32)
        .set_u32(&key("feed_forward_length"), 64)
        .set_u32(&key("attention.head_count"), 2)
        .set_u32(&key("attention.head_count_kv"), 1)
        .set_f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .set_f32(&key("rope.freq_base"), 5000.0);
    let mut tokens: Vec<String> =
        tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet().into_iter().map(String::from).collect();
    tokens.sort();
    tokens.extend(["Ġa".into(), "<|im_end|>".into()]);
    let mut types = vec![1; tokens.len()];
    types[257] = 3;
    writer
        .set_str("tokenizer.ggml.model", "gpt2")
        .set_str("tokenizer.ggml.pre", "smollm")
        .set_strs("tokenizer.ggml.tokens", &tokens)
        .set_i32s("tokenizer.ggml.token_type", &types)
        .set_strs("tokenizer.ggml.merges", &["Ġ a"])
        .set_u32("tokenizer.ggml.eos_token_id", 257)
        .set_str("tokenizer.chat_template", "{{ messages }}");
    writer
}

/// A whole small file: an embedding in Q8_0, a norm in F32, and a matrix in a format that cannot be loaded.
fn tiny_gguf() -> Vec<u8> {
    let mut writer = metadata("llama");
    writer
        .add_tensor("token_embd.weight", DType::Q8_0, &[258, HIDDEN], &vec![7; 258 * 34])
        .add_tensor("output_norm.weight", DType::F32, &[HIDDEN], &[1; HIDDEN * 4])
        .add_raw_tensor("blk.0.ffn_up.weight", 20, &[64, HIDDEN], &vec![3; 64 * 18]);
    writer.to_bytes()
}

struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(self.0.path())
    }
}

fn open_bytes(bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    let folder = Folder::new();
    Checkpoint::open(&folder.write("tiny.gguf", bytes))
}

#[track_caller]
fn refused(bytes: &[u8], says: &str) {
    let message = open_bytes(bytes).expect_err("must be refused").to_string();
    assert!(message.contains(says), "{message:?} does not say {says:?}");
}

#[test]
fn gguf_opens() {
    let folder = Folder::new();
    let checkpoint = Checkpoint::open(&folder.write("tiny.gguf", tiny_gguf())).unwrap();
    let config = &checkpoint.config;
    assert_eq!((config.arch.as_str(), config.name.as_deref()), ("llama", Some("tiny")));
    assert_eq!((config.layers, config.hidden, config.vocab, config.context), (1, HIDDEN, 258, 64));
    assert_eq!((config.heads, config.kv_heads, config.head_dim, config.intermediate), (2, 1, 16, 64));
    assert_eq!((config.rope.theta, config.rope.dims), (5000.0, 16));
    assert!(config.tie_embeddings && checkpoint.rope_interleaved());
    assert_eq!(checkpoint.container, Container::Gguf);
    assert_eq!(checkpoint.generation.eos_ids, [257]);
    let names: Vec<_> = checkpoint.tensors().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["output_norm.weight", "token_embd.weight"]);
    let embedding = checkpoint.require("token_embd.weight", &[258, HIDDEN]).unwrap();
    assert_eq!((embedding.dtype, embedding.row_bytes(), embedding.elements()), (DType::Q8_0, 34, 258 * HIDDEN));
    assert_eq!(checkpoint.data(embedding), vec![7; 258 * 34]);
    let norm = checkpoint.tensor("output_norm.weight").unwrap();
    assert_eq!(checkpoint.data(norm), [1; HIDDEN * 4]);
    assert_eq!(checkpoint.chat_template().unwrap().as_deref(), Some("{{ messages }}"));
    assert_eq!(checkpoint.unsupported(), [("blk.0.ffn_up.weight".into(), "IQ4_NL".into())]);
    assert_eq!(checkpoint.files()[0].1, tiny_gguf().len() as u64);
    assert_eq!(checkpoint.tokenizer().unwrap().vocab_size(), 258);
}

#[test]
fn requirements_say_what_is_wrong() {
    let checkpoint = open_bytes(&tiny_gguf()).unwrap();
    let says = |name: &str, shape: &[usize], says: &str| {
        let message = checkpoint.require(name, shape).unwrap_err().to_string();
        assert!(message.ends_with(says), "{message}");
    };
    says("output.weight", &[258, 32], "has no tensor `output.weight` (expected with shape [258, 32])");
    let shapes = "tensor `output_norm.weight` has shape [32], but the configuration asks for [33]";
    says("output_norm.weight", &[33], shapes);
    let supported = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K";
    says("blk.0.ffn_up.weight", &[64, 32], &format!("is stored as IQ4_NL; supported: {supported}"));
}

#[test]
fn ggml_knows_every_dtype_alike() {
    for dtype in DType::ALL {
        let row = gguf::GGML_TYPES.iter().find(|(id, ..)| *id == gguf::type_id(dtype)).unwrap();
        assert_eq!((row.1, row.2, row.3), (dtype.name(), dtype.block_elements(), dtype.block_bytes()));
    }
}

#[test]
fn gguf_of_other_architectures_and_scalings() {
    let mut writer = metadata("qwen2");
    writer.set_u32("qwen2.attention.key_length", 8).set_str("qwen2.rope.scaling.type", "linear");
    writer.set_f32("qwen2.rope.scaling.factor", 4.0);
    let checkpoint = open_bytes(&writer.to_bytes()).unwrap();
    assert!(!checkpoint.rope_interleaved());
    assert_eq!((checkpoint.config.head_dim, checkpoint.config.vocab), (8, 258));
    assert_eq!(checkpoint.config.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let factors: Vec<u8> = (1..=8).flat_map(|n| (n as f32).to_le_bytes()).collect();
    let mut writer = metadata("llama");
    writer.add_tensor("rope_freqs.weight", DType::F32, &[8], &factors);
    let scaling = open_bytes(&writer.to_bytes()).unwrap().config.rope.scaling;
    assert_eq!(scaling, RopeScaling::Factors((1..=8).map(|n| n as f32).collect()));
    let mut writer = metadata("llama");
    writer.add_tensor("rope_freqs.weight", DType::F32, &[4], &factors[..16]);
    refused(&writer.to_bytes(), "4 values; expected 8 values");
    let mut writer = metadata("llama");
    writer.set_str("llama.rope.scaling.type", "yarn");
    refused(&writer.to_bytes(), "`llama.rope.scaling.type` is \"yarn\", which is not supported");
    let mut writer = metadata("llama");
    writer.set_u32("llama.expert_count", 8);
    refused(&writer.to_bytes(), "mixture of experts");
}

#[test]
fn gguf_that_is_broken() {
    let good = tiny_gguf();
    refused(b"GGML....", "not with \"GGUF\"");
    refused(b"", "an empty file");
    let with = |at: usize, bytes: &[u8]| {
        let mut copy = good.clone();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        copy
    };
    refused(&with(4, &3_u32.to_be_bytes()), "big-endian");
    refused(&with(4, &1_u32.to_le_bytes()), "version 1");
    refused(&with(8, &u64::MAX.to_le_bytes()), "18446744073709551615 tensors cannot fit");
    refused(&with(16, &(1_u64 << 40).to_le_bytes()), "metadata keys cannot fit");
    refused(&with(24, &(1_u64 << 60).to_le_bytes()), "a string of 1152921504606846976 bytes");
    refused(&good[..40], "cannot fit");
    refused(&good[..1000], "258 items cannot fit in the 437 bytes that are left of the file");
    let mut short = GgufWriter::new();
    short.set_str("general.name", "a long name");
    let short = short.to_bytes();
    refused(&short[..short.len() - 1], "while reading metadata `general.name` at byte 56: it is truncated");
    refused(&good[..good.len() - 1], "tensor `blk.0.ffn_up.weight` ends at byte");
    let mut twice = metadata("llama");
    twice.set_u32("llama.block_count", 1);
    refused(&twice.to_bytes(), "`llama.block_count`: the key is there twice");
    let mut twice = metadata("llama");
    twice.add_tensor("a", DType::F32, &[1], &[0; 4]).add_tensor("a", DType::F32, &[1], &[0; 4]);
    refused(&twice.to_bytes(), "tensor `a`: is listed twice");
    for (shape, says) in [
        (&[1, 31][..], "its rows of 31 elements are no whole number of Q8_0 blocks of 32"),
        (&[1, 1, 1, 1, 32], "it has 5 extents"),
        (&[], "it has 0 extents"),
        (&[0, 32], "an extent is 0"),
        (&[usize::MAX, 1 << 40], "overflow"),
        (&[1 << 40, 32], "it is truncated"),
    ] {
        let mut writer = metadata("llama");
        writer.add_tensor("t", DType::Q8_0, shape, &[0; 34]);
        refused(&writer.to_bytes(), says);
    }
    let mut nested = metadata("llama");
    let mut value: Vec<u8> = [4_u32.to_le_bytes().as_slice(), &0_u64.to_le_bytes()].concat();
    for _ in 0..5 {
        value = [9_u32.to_le_bytes().as_slice(), &1_u64.to_le_bytes(), &value].concat();
    }
    nested.set_raw("deep", 9, &value);
    refused(&nested.to_bytes(), "`deep`: arrays nest deeper than 4");
    let mut writer = metadata("llama");
    writer.set_u32("general.alignment", 33);
    refused(&writer.to_bytes(), "power of two");
}

#[test]
fn gguf_tensors_that_overlap() {
    let mut writer = metadata("llama");
    writer.add_tensor("first", DType::F32, &[16], &[0; 64]).add_tensor("second", DType::F32, &[16], &[0; 64]);
    let mut bytes = writer.to_bytes();
    // The second tensor's offset is the last number of the directory.
    let name = bytes.windows(6).rposition(|window| window == b"second").unwrap();
    let offset = name + 6 + 4 + 8 + 4;
    assert_eq!(bytes[offset], 64);
    bytes[offset] = 32;
    refused(&bytes, "tensors `first` and `second` overlap at byte");
    bytes[offset] = 33;
    refused(&bytes, "its offset 33 is no multiple of the alignment, 32");
}

#[test]
fn gguf_in_parts() {
    let folder = Folder::new();
    let split = |writer: &mut GgufWriter, number: u32| {
        writer.set_raw("split.no", 2, &(number as u16).to_le_bytes());
        writer.set_raw("split.count", 2, &2_u16.to_le_bytes());
        writer.set_raw("split.tensors.count", 5, &2_i32.to_le_bytes());
    };
    let mut first = metadata("llama");
    split(&mut first, 0);
    first.add_tensor("token_embd.weight", DType::F16, &[258, HIDDEN], &vec![1; 258 * HIDDEN * 2]);
    let mut second = GgufWriter::new();
    split(&mut second, 1);
    second.add_tensor("output_norm.weight", DType::F32, &[HIDDEN], &[2; HIDDEN * 4]);
    let first_path = folder.write("m-00001-of-00002.gguf", first.to_bytes());
    let message = Checkpoint::open(&first_path).unwrap_err().to_string();
    assert!(message.contains("m-00002-of-00002.gguf: part 2 of 2 is missing"), "{message}");
    let second_path = folder.write("m-00002-of-00002.gguf", second.to_bytes());
    for path in [&first_path, &second_path] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!((checkpoint.path.as_path(), checkpoint.files().len()), (first_path.as_path(), 2));
        let norm = checkpoint.tensor("output_norm.weight").unwrap();
        assert_eq!((norm.file(), checkpoint.data(norm)), (1, [2; HIDDEN * 4].as_slice()));
    }
    let renamed = folder.write("renamed.gguf", first.to_bytes());
    let message = Checkpoint::open(&renamed).unwrap_err().to_string();
    assert!(message.contains("is one of 2 parts"), "{message}");
    folder.write("m-00002-of-00002.gguf", first.to_bytes());
    let message = Checkpoint::open(&first_path).unwrap_err().to_string();
    assert!(message.contains("does not say part 2 of 2"), "{message}");
}

/// Every model of the test data: shapes agree with its configuration, and its text gives the recorded ids.
#[test]
fn recorded_models_open() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data");
    let listed = |folder: &str| fs::read_dir(data.join(folder)).unwrap().map(|entry| entry.unwrap().path());
    let folders = listed("tiny").map(|path| (path.join("golden.json"), path));
    let gguf = listed("tiny-gguf").filter(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    let gguf = gguf.map(|path| {
        let name = path.file_stem().unwrap().to_str().unwrap();
        let name = name.split_once("-0000").map_or(name, |(stem, _)| stem);
        (path.with_file_name(format!("{name}.golden.json")), path)
    });
    let mut count = 0;
    for (golden, path) in folders.chain(gguf) {
        let checkpoint = Checkpoint::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let config = &checkpoint.config;
        let kv = config.kv_heads * config.head_dim;
        checkpoint.require("token_embd.weight", &[config.vocab, config.hidden]).unwrap();
        checkpoint.require("output_norm.weight", &[config.hidden]).unwrap();
        for layer in 0..config.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            let heads = config.heads * config.head_dim;
            checkpoint.require(&name("attn_q"), &[heads, config.hidden]).unwrap();
            checkpoint.require(&name("attn_k"), &[kv, config.hidden]).unwrap();
            checkpoint.require(&name("attn_v"), &[kv, config.hidden]).unwrap();
            checkpoint.require(&name("attn_output"), &[config.hidden, heads]).unwrap();
            checkpoint.require(&name("ffn_gate"), &[config.intermediate, config.hidden]).unwrap();
            checkpoint.require(&name("ffn_down"), &[config.hidden, config.intermediate]).unwrap();
        }
        assert_eq!(config.tie_embeddings, checkpoint.tensor("output.weight").is_none(), "{}", path.display());
        assert_eq!(checkpoint.unsupported(), []);
        let known = |name: &str| name.starts_with("blk.") || name.starts_with("output") || !name.starts_with("model.");
        assert!(checkpoint.tensors().all(|tensor| known(&tensor.name)));
        let golden: serde_json::Value = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
        let ids: Vec<u32> = serde_json::from_value(golden["cases"][0]["ids"].clone()).unwrap();
        let text = golden["cases"][0]["text"].as_str().unwrap();
        let tokenizer = checkpoint.tokenizer().unwrap();
        let how = crate::tokenizer::Encode { add_bos: true, parse_special: true };
        assert_eq!(tokenizer.encode(text, how).unwrap(), ids, "{}", path.display());
        count += 1;
    }
    assert!(count >= 20, "only {count} models were found");
}
