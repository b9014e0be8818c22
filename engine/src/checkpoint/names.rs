//! Tensor names: one table from Hugging Face's spelling to the canonical one, which is GGUF's.

/// What a source name stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// A tensor of the model, by its canonical name.
    Canonical(String),
    /// Something older exporters wrote that is computed instead of loaded.
    Ignored,
    /// A name the table does not know; it is kept as it is.
    Unknown,
}

/// Hugging Face stem → canonical stem. `.weight` and `.bias` follow on both sides.
pub const MODEL: &[(&str, &str)] = &[("embed_tokens", "token_embd"), ("norm", "output_norm"), ("lm_head", "output")];

/// The same inside `layers.N.` → `blk.N.`.
pub const LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Endings of names that are buffers, not weights: they are recomputed from the configuration.
pub const IGNORED: &[&str] =
    &["rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.masked_bias"];

/// Looks up a Hugging Face tensor name; `model.` in front may be missing or doubled.
pub fn canonical(source: &str) -> Name {
    if IGNORED.iter().any(|ending| source.ends_with(ending)) {
        return Name::Ignored;
    }
    let mut rest = source;
    while let Some(stripped) = rest.strip_prefix("model.") {
        rest = stripped;
    }
    let Some((stem, kind)) = rest.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias")) else {
        return Name::Unknown;
    };
    let found = match stem.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, part)) if is_index(layer) => find(LAYER, part).map(|to| format!("blk.{layer}.{to}.{kind}")),
        Some(_) => None,
        None => find(MODEL, stem).map(|to| format!("{to}.{kind}")),
    };
    found.map_or(Name::Unknown, Name::Canonical)
}

fn find(table: &[(&str, &'static str)], stem: &str) -> Option<&'static str> {
    table.iter().find(|(from, _)| *from == stem).map(|(_, to)| *to)
}

/// A number as it is printed, so that no two source names can mean the same layer.
fn is_index(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_digit()) && !text.is_empty() && (text == "0" || !text.starts_with('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, expected: &str) {
        assert_eq!(canonical(source), Name::Canonical(expected.into()), "{source}");
    }

    #[test]
    fn names_of_the_whole_model() {
        check("model.embed_tokens.weight", "token_embd.weight");
        check("embed_tokens.weight", "token_embd.weight");
        check("model.model.embed_tokens.weight", "token_embd.weight");
        check("model.norm.weight", "output_norm.weight");
        check("lm_head.weight", "output.weight");
        check("lm_head.bias", "output.bias");
    }

    #[test]
    fn names_inside_a_layer() {
        for (from, to) in LAYER {
            check(&format!("model.layers.17.{from}.weight"), &format!("blk.17.{to}.weight"));
            check(&format!("layers.0.{from}.bias"), &format!("blk.0.{to}.bias"));
        }
    }

    #[test]
    fn canonical_names_are_distinct() {
        let mut names: Vec<_> = MODEL.iter().chain(LAYER).map(|(_, to)| *to).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MODEL.len() + LAYER.len());
    }

    #[test]
    fn buffers_are_ignored_and_the_rest_is_unknown() {
        assert_eq!(canonical("model.layers.3.self_attn.rotary_emb.inv_freq"), Name::Ignored);
        for source in ["model.layers.03.mlp.up_proj.weight", "model.layers.x.mlp.up_proj.weight", "norm", "", "model."]
        {
            assert_eq!(canonical(source), Name::Unknown, "{source}");
        }
        assert_eq!(canonical("model.layers.0.mlp.experts.0.up_proj.weight"), Name::Unknown);
    }
}
