use super::*;

const LLAMA: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "vocab_size": 128256
}"#;

fn parse(json: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_hf_json(json.to_string().as_bytes(), Path::new("config.json"))
}

fn llama() -> Value {
    serde_json::from_str(LLAMA).unwrap()
}

/// `LLAMA` with some keys set, or removed where the value is null.
fn edited(edits: &[(&str, Value)]) -> Result<ModelConfig, ConfigError> {
    let mut json = llama();
    for (key, value) in edits {
        json[*key] = value.clone();
        if value.is_null() {
            json.as_object_mut().unwrap().remove(*key);
        }
    }
    parse(&json)
}

#[test]
fn llama_3_2() {
    let config = parse(&llama()).unwrap();
    let expected = ModelConfig {
        arch: "llama".into(),
        name: None,
        layers: 16,
        hidden: 2048,
        intermediate: 8192,
        heads: 32,
        kv_heads: 8,
        head_dim: 64,
        vocab: 128_256,
        context: 131_072,
        rms_eps: 1e-5,
        rope: Rope {
            theta: 500_000.0,
            dims: 64,
            scaling: RopeScaling::Llama3 {
                factor: 32.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 8192,
            },
        },
        tie_embeddings: true,
    };
    assert_eq!(config, expected);
}

#[test]
fn absent_keys_have_the_defaults_of_transformers() {
    let null = Value::Null;
    let keys = ["head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "rms_norm_eps", "tie_word_embeddings"];
    let config = edited(&keys.map(|key| (key, null.clone()))).unwrap();
    assert_eq!((config.head_dim, config.kv_heads, config.rms_eps), (64, 32, 1e-6));
    assert_eq!(config.rope, Rope { theta: 10_000.0, dims: 64, scaling: RopeScaling::None });
    assert!(!config.tie_embeddings);
}

#[test]
fn both_spellings_of_the_rotary_embedding() {
    let new =
        serde_json::json!({"rope_theta": 1e6, "rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5});
    let config =
        edited(&[("rope_parameters", new), ("rope_scaling", Value::Null), ("rope_theta", Value::Null)]).unwrap();
    let expected = Rope { theta: 1e6, dims: 32, scaling: RopeScaling::Linear { factor: 4.0 } };
    assert_eq!(config.rope, expected);
    let old = serde_json::json!({"type": "linear", "factor": 4.0});
    let config = edited(&[("rope_scaling", old), ("rope_theta", 1e6.into()), ("partial_rotary_factor", 0.5.into())]);
    assert_eq!(config.unwrap().rope, expected);
    let default = serde_json::json!({"rope_theta": 1e6, "rope_type": "default"});
    let config = edited(&[("rope_parameters", default), ("rope_scaling", Value::Null)]).unwrap();
    assert_eq!(config.rope, Rope { theta: 1e6, dims: 64, scaling: RopeScaling::None });
}

#[test]
fn names_of_architectures() {
    let arch = |class: Value, model_type: Value| edited(&[("architectures", class), ("model_type", model_type)]);
    let list = |class: &str| serde_json::json!([class]);
    assert_eq!(arch(list("Qwen3ForCausalLM"), "qwen3".into()).unwrap().arch, "qwen3");
    assert_eq!(arch(list("Qwen2ForCausalLM"), Value::Null).unwrap().arch, "qwen2");
    assert_eq!(arch(Value::Null, "gemma3".into()).unwrap().arch, "gemma3");
    let classifier = "Qwen2ForSequenceClassification";
    assert_eq!(arch(list(classifier), "qwen2".into()).unwrap().arch, classifier);
    assert!(matches!(arch(Value::Null, Value::Null), Err(ConfigError::Missing { key, .. }) if key == "model_type"));
}

#[test]
fn what_is_not_computed_is_refused() {
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    for (key, value, named) in [
        ("hidden_act", json("\"gelu\""), "hidden_act"),
        ("use_sliding_window", json("true"), "use_sliding_window"),
        ("layer_types", json("[\"full_attention\", \"sliding_attention\"]"), "layer_types"),
        ("mlp_bias", json("true"), "mlp_bias"),
        ("num_experts", json("64"), "num_experts"),
        ("quantization_config", json("{\"quant_method\": \"awq\"}"), "quantization_config"),
        ("rope_scaling", json("{\"rope_type\": \"yarn\", \"factor\": 4.0}"), "rope_scaling.rope_type"),
        ("rope_scaling", json("{\"type\": \"dynamic\", \"factor\": 4.0}"), "rope_scaling.type"),
        ("rope_parameters", json("{\"full_attention\": {\"rope_theta\": 1.0}}"), "rope_parameters.full_attention"),
    ] {
        match edited(&[(key, value)]) {
            Err(ConfigError::Unsupported { key, .. }) => assert_eq!(key, named),
            other => panic!("{key}: {other:?}"),
        }
    }
    let message = edited(&[("rope_scaling", json("{\"rope_type\": \"yarn\"}"))]).unwrap_err().to_string();
    let expected = "config.json: `rope_scaling.rope_type` is \"yarn\", which is not supported; \
                    supported: default, linear or llama3";
    assert_eq!(message, expected);
}

#[test]
fn bounds() {
    for (key, value) in [
        ("num_hidden_layers", serde_json::json!(0)),
        ("num_hidden_layers", serde_json::json!(4097)),
        ("hidden_size", serde_json::json!(1 << 21)),
        ("intermediate_size", serde_json::json!(-1)),
        ("vocab_size", serde_json::json!(1_u64 << 40)),
        ("num_attention_heads", serde_json::json!(0)),
        ("num_key_value_heads", serde_json::json!(7)),
        ("num_key_value_heads", serde_json::json!(0)),
        ("head_dim", serde_json::json!(63)),
        ("head_dim", serde_json::json!(1 << 19)),
        ("max_position_embeddings", serde_json::json!("many")),
        ("rms_norm_eps", serde_json::json!(0.0)),
        ("rope_theta", serde_json::json!(-1.0)),
        ("partial_rotary_factor", serde_json::json!(0.001)),
        ("tie_word_embeddings", serde_json::json!(1)),
        ("rope_scaling", serde_json::json!("linear")),
        ("rope_scaling", serde_json::json!({"rope_type": "linear", "factor": 0})),
    ] {
        let found = edited(&[(key, value.clone())]);
        assert!(matches!(found, Err(ConfigError::Invalid { .. })), "{key} = {value}: {found:?}");
    }
    for key in ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"] {
        let found = edited(&[(key, Value::Null)]);
        assert!(matches!(&found, Err(ConfigError::Missing { key: named, .. }) if named == key), "{found:?}");
    }
    let file = Path::new("config.json");
    assert!(matches!(ModelConfig::from_hf_json(b"{", file), Err(ConfigError::Json { .. })));
    assert!(matches!(ModelConfig::from_hf_json(b"[]", file), Err(ConfigError::Invalid { .. })));
}

/// By hand, after `modeling_rope_utils`.
#[test]
fn frequencies() {
    let close = |found: &[f32], expected: &[f32]| {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= expected * 2e-7, "{found} is not {expected}");
        }
    };
    let rope = |scaling| Rope { theta: 10_000.0, dims: 8, scaling };
    close(&rope(RopeScaling::None).inv_freq(), &[1.0, 0.1, 0.01, 0.001]);
    close(&rope(RopeScaling::Linear { factor: 4.0 }).inv_freq(), &[0.25, 0.025, 0.0025, 0.000_25]);
    let factors = RopeScaling::Factors(vec![1.0, 2.0, 4.0, 8.0]);
    close(&rope(factors).inv_freq(), &[1.0, 0.05, 0.0025, 0.000_125]);
    // Wavelengths 6.28, 62.8, 628 and 6283 tokens: kept below 256, divided above 1024, blended between.
    let scaling =
        RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 1024 };
    let smooth = (1024.0 / (2.0 * std::f32::consts::PI / 0.01) - 1.0) / 3.0;
    let blended = (1.0 - smooth) * 0.01 / 8.0 + smooth * 0.01;
    close(&rope(scaling).inv_freq(), &[1.0, 0.1, blended, 0.000_125]);
}
