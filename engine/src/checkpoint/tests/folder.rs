//! Hugging Face folders and safetensors files.

use ::safetensors::{Dtype, serialize, tensor::TensorView};

use super::*;

pub(super) const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
    "num_hidden_layers": 1, "max_position_embeddings": 64, "vocab_size": 8, "eos_token_id": 3, "bos_token_id": 1}"#;

fn tensors(list: &[(&str, Dtype, &[usize])]) -> Vec<u8> {
    let data = vec![5; 1 << 16];
    let views = list.iter().map(|(name, dtype, shape)| {
        let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (*name, TensorView::new(*dtype, shape.to_vec(), &data[..bytes]).unwrap())
    });
    serialize(views, None).unwrap()
}

pub(super) fn small_safetensors() -> Vec<u8> {
    tensors(&[
        ("model.embed_tokens.weight", Dtype::BF16, &[8, 32]),
        ("model.norm.weight", Dtype::F32, &[32]),
        ("model.layers.0.self_attn.q_proj.bias", Dtype::F16, &[32]),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", Dtype::F32, &[8]),
        ("model.layers.0.mlp.up_proj.weight", Dtype::F8_E4M3, &[64, 32]),
        ("score", Dtype::F32, &[1]),
    ])
}

/// A file with this header and this many bytes of data.
fn raw_safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn folder_opens() {
    let folder = Folder::new();
    folder.write("config.json", CONFIG);
    folder.write("model.safetensors", small_safetensors());
    folder.write(
        "generation_config.json",
        r#"{"eos_token_id": [3, 4], "temperature": 0.7, "top_k": 20, "do_sample": true}"#,
    );
    folder.write("tokenizer_config.json", r#"{"chat_template": [{"name": "default", "template": "from config"}]}"#);
    let checkpoint = folder.open().unwrap();
    assert_eq!((checkpoint.container, checkpoint.config.arch.as_str()), (Container::Safetensors, "qwen2"));
    assert!(!checkpoint.rope_interleaved());
    let names: Vec<_> = checkpoint.tensors().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["blk.0.attn_q.bias", "output_norm.weight", "score", "token_embd.weight"]);
    let embedding = checkpoint.require("token_embd.weight", &[8, 32]).unwrap();
    assert_eq!((embedding.dtype, embedding.source_name.as_str()), (DType::BF16, "model.embed_tokens.weight"));
    assert_eq!(checkpoint.data(embedding), [5; 8 * 32 * 2]);
    assert_eq!(checkpoint.unsupported(), [("blk.0.ffn_up.weight".into(), "F8_E4M3".into())]);
    let generation = &checkpoint.generation;
    assert_eq!((generation.temperature, generation.top_k, generation.do_sample), (Some(0.7), Some(20), Some(true)));
    assert_eq!((generation.eos_ids.as_slice(), generation.bos_id), ([3, 4].as_slice(), Some(1)));
    assert_eq!(checkpoint.chat_template().unwrap().as_deref(), Some("from config"));
    folder.write("chat_template.jinja", "from file");
    assert_eq!(checkpoint.chat_template().unwrap().as_deref(), Some("from file"));
    let missing = checkpoint.tokenizer().unwrap_err().to_string();
    assert!(missing.contains("tokenizer.json (it holds chat_template.jinja, config.json"), "{missing}");
    let by_file = Checkpoint::open(&folder.0.path().join("model.safetensors")).unwrap();
    assert_eq!(by_file.tensors().count(), 4);
}

#[test]
fn folder_of_shards() {
    let folder = Folder::new();
    folder.write("config.json", CONFIG);
    let index = |map: &str| folder.write("model.safetensors.index.json", format!(r#"{{"weight_map": {{{map}}}}}"#));
    let says = |says: &str| {
        let message = folder.open().unwrap_err().to_string();
        assert!(message.contains(says), "{message:?} does not say {says:?}");
    };
    let map = r#""model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors""#;
    folder.write("a.safetensors", tensors(&[("model.norm.weight", Dtype::F32, &[32])]));
    index(map);
    says("names the shard b.safetensors, which is not there");
    let b = folder.write("b.safetensors", tensors(&[("lm_head.weight", Dtype::F32, &[8, 32])]));
    let checkpoint = folder.open().unwrap();
    assert_eq!((checkpoint.files().len(), checkpoint.tensors().count()), (2, 2));
    assert_eq!(Checkpoint::open(&b).unwrap().files().len(), 2);
    folder.write("b.safetensors", tensors(&[("other.weight", Dtype::F32, &[8, 32])]));
    says("says tensor `lm_head.weight` is in b.safetensors, but no shard has it");
    let doubled = [("lm_head.weight", Dtype::F32, &[8, 32][..]), ("norm.weight", Dtype::F32, &[32])];
    folder.write("b.safetensors", tensors(&doubled));
    says("tensor `output_norm.weight` is in ");
    for shard in ["../a.safetensors", "/etc/passwd", "..", "", "c:\\\\x"] {
        index(&format!(r#""model.norm.weight": "{shard}""#));
        says("a shard is a file in the same folder");
    }
    fs::remove_file(folder.0.path().join("model.safetensors.index.json")).unwrap();
    says("several safetensors files but no model.safetensors.index.json");
}

#[test]
fn folders_that_are_no_model() {
    let folder = Folder::new();
    let says = |says: &str| {
        let message = folder.open().unwrap_err().to_string();
        assert!(message.contains(says), "{message:?} does not say {says:?}");
    };
    says("a folder without config.json (it is empty)");
    folder.write("config.json", CONFIG);
    folder.write("pytorch_model.bin", "");
    says("no safetensors weights (it holds config.json, pytorch_model.bin)");
    let other = folder.write("notes.txt", "hello");
    assert!(matches!(Checkpoint::open(&other), Err(CheckpointError::NotAModel { .. })));
    assert!(matches!(Checkpoint::open(&folder.0.path().join("absent")), Err(CheckpointError::Io { .. })));
}

#[test]
fn safetensors_that_is_broken() {
    let tensor = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype": "{dtype}", "shape": {shape}, "data_offsets": {offsets}}}"#)
    };
    let one = |dtype: &str, shape: &str, offsets: &str| format!(r#"{{"t": {}}}"#, tensor(dtype, shape, offsets));
    let good = tensor("F32", "[2]", "[0, 8]");
    for (bytes, says) in [
        (vec![1, 2, 3], "while reading the length of the safetensors header"),
        (u64::MAX.to_le_bytes().to_vec(), "at most 100000000 are accepted"),
        (100_u64.to_le_bytes().to_vec(), "while reading the safetensors header at byte 8"),
        (raw_safetensors("{", 0), "line 1 column 1"),
        (raw_safetensors(&one("F32", "[2]", "[0, 4]"), 8), "it has 4 bytes, which is not what F32 of shape [2] takes"),
        (raw_safetensors(&one("F32", "[2]", "[8, 0]"), 8), "its data_offsets are 8 and 0"),
        (raw_safetensors(&one("F32", "[2]", "[8, 16]"), 8), "tensor `t` ends at byte"),
        (raw_safetensors(&one("F32", "[9223372036854775807, 9]", "[0, 8]"), 8), "overflows"),
        (raw_safetensors(&one("F32", "[-2]", "[0, 8]"), 8), "invalid value"),
        (raw_safetensors(&format!(r#"{{"t": {good}, "t": {good}}}"#), 8), "tensor `t` is there twice"),
        (raw_safetensors(&format!(r#"{{"t": {good}, "u": {good}}}"#), 8), "tensors `t` and `u` overlap"),
    ] {
        let folder = Folder::new();
        folder.write("config.json", CONFIG);
        folder.write("model.safetensors", bytes);
        let message = folder.open().unwrap_err().to_string();
        assert!(message.contains(says), "{message:?} does not say {says:?}");
    }
    let folder = Folder::new();
    folder.write("config.json", CONFIG);
    folder.write("model.safetensors", raw_safetensors(&one("Q9", "[2]", "[0, 3]"), 3));
    assert_eq!(folder.open().unwrap().unsupported(), [("t".into(), "Q9".into())]);
}
