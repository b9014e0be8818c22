//! The text of programs: what a layer of each architecture does, verb by verb.

use pp_engine::backend::Backend;
use pp_engine::backend::reference::Reference;
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::stage::Stage;
use pp_shaders::{Act, KvType, Profile};

use crate::support::{checkpoint, exact};

/// The texts of a stage's programs, with `tokens` tokens in a context of `start + tokens`.
fn programs(model: &str, profile: Profile, activations: Act, start: usize, tokens: usize) -> Vec<String> {
    let checkpoint = checkpoint(model);
    let options = StageOptions { activations, kv: KvType::F32, chunk: 64, ..exact(512) };
    let backend = Box::new(Reference::new(profile, 1 << 30));
    let spec = StageSpec::pipeline(&[checkpoint.config.layers]).remove(0);
    let layout = StageLayout::new(&checkpoint, spec, options, &profile, backend.limits()).unwrap();
    let mut stage = Stage::open(&checkpoint, layout, backend, &mut |_| true).unwrap();
    let programs = stage.programs(start, tokens, 1).unwrap();
    programs.into_iter().map(|(id, _)| stage.program(id).to_string()).collect()
}

/// The lines that `wanted` wants, each without what makes columns of it.
fn lines(text: &str, wanted: impl Fn(&str) -> bool) -> String {
    let lines = text.lines().filter(|line| wanted(line));
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>().join("\n")
}

/// The text of the first layer's part of a stage's program.
fn layer(model: &str, profile: Profile, activations: Act, start: usize, tokens: usize) -> String {
    lines(&programs(model, profile, activations, start, tokens)[0], |line| line.contains("blk.0"))
}

#[track_caller]
fn check(found: &str, expected: &str) {
    let expected: Vec<&str> = expected.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn logits_without_edits_take_four_dispatches() {
    let programs = programs("tiny-gguf/llama-q4_0.gguf", Profile::SOFTWARE, Act::Q8, 10, 1);
    check(
        &lines(&programs[1], |_| true),
        "rmsnorm q8 output_norm
         matvec_q8 Q4_0 output
         topk_chunk top-k of chunks
         topk_merge top-k",
    );
}

#[test]
fn llama_decodes_in_eight_dispatches_a_layer() {
    let found = layer("tiny-gguf/llama-q4_0.gguf", Profile::SOFTWARE, Act::Q8, 10, 1);
    check(
        &found,
        "rmsnorm q8 blk.0 attn_norm
         matvec_q8 Q4_0 blk.0 blk.0.attn_q+blk.0.attn_k+blk.0.attn_v
         rope_kv blk.0 rope, write kv
         attn_short q8 blk.0 attention
         matvec_q8 Q4_0 blk.0 blk.0.attn_output
         rmsnorm q8 blk.0 ffn_norm
         matvec_swiglu_q8 Q4_0 q8 blk.0 blk.0.ffn_gate+blk.0.ffn_up
         matvec_q8 Q4_0 blk.0 blk.0.ffn_down",
    );
}

#[test]
fn llama_decodes_in_ten_on_a_card_with_a_long_context() {
    let found = layer("tiny-gguf/llama-q4_0.gguf", Profile::CARD, Act::Q8, 300, 1);
    check(
        &found,
        "rmsnorm q8 blk.0 attn_norm
         matvec_q8 Q4_0 blk.0 blk.0.attn_q+blk.0.attn_k+blk.0.attn_v
         rope_kv blk.0 rope, write kv
         attn_decode blk.0 attention
         attn_reduce q8 blk.0 merge splits
         matvec_q8 Q4_0 blk.0 blk.0.attn_output
         rmsnorm q8 blk.0 ffn_norm
         matvec_q8 Q4_0 blk.0 blk.0.ffn_gate+blk.0.ffn_up
         swiglu q8 blk.0 silu(gate) * up
         matvec_q8 Q4_0 blk.0 blk.0.ffn_down",
    );
}

#[test]
fn qwen3_prefills_a_card_in_tiles() {
    let found = layer("tiny-gguf/qwen3-q8.gguf", Profile::CARD, Act::Q8, 0, 30);
    check(
        &found,
        "rmsnorm q8 blk.0 attn_norm
         matmul_tile_q8 Q8_0 blk.0 blk.0.attn_q+blk.0.attn_k+blk.0.attn_v
         rope_kv blk.0 rope, write kv
         attn_prefill blk.0 attention
         to_act q8 blk.0 to activations
         matmul_tile_q8 Q8_0 blk.0 blk.0.attn_output
         rmsnorm q8 blk.0 ffn_norm
         matmul_tile_q8 Q8_0 blk.0 blk.0.ffn_gate+blk.0.ffn_up
         swiglu q8 blk.0 silu(gate) * up
         matmul_tile_q8 Q8_0 blk.0 blk.0.ffn_down",
    );
}

#[test]
fn a_mixed_file_takes_a_dispatch_for_each_format() {
    let found = layer("tiny-gguf/mixed-k-qwen2.gguf", Profile::SOFTWARE, Act::Q8, 0, 1);
    assert!(
        found.contains("matvec_q8 Q4_K blk.0 blk.0.attn_q+blk.0.attn_k\nmatvec_q8 Q6_K blk.0 blk.0.attn_v"),
        "{found}"
    );
}
