//! A real model, SmolLM2-135M-Instruct as a Q4_1 GGUF, against outputs of Hugging Face transformers.
//!
//! The file is fetched by scripts/test.sh. In the exact mode ids and text must be the reference's wherever its own margin
//! is over float32's rounding; with q8 activations and halves in the cache, wherever it is over theirs.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use pp_engine::chat_template::{ChatTemplate, Message, RenderOptions};
use pp_engine::checkpoint::Checkpoint;
use pp_engine::head::{Head, Request};
use pp_engine::layout::{StageLayout, StageOptions, StageSpec};
use pp_engine::message::{OutputRequest, Span, Step};
use pp_engine::pipeline::Device;
use pp_engine::sampler::Sampling;
use pp_engine::stage::{Stage, StageOutput};
use pp_engine::tokenizer::Encode;
use pp_shaders::{Act, KvType, PAGE, Profile};

use crate::support::{adapter, data, exact, floats, head, ids, json};

/// Where the scripts put it: in the models folder.
pub fn file() -> PathBuf {
    let data_home = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from);
    let data_home =
        data_home.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".local/share"));
    let models = std::env::var_os("PP_MODELS").map_or(data_home.join("pp-run/models"), PathBuf::from);
    models.join("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// The model in the models folder.
fn model() -> Arc<Checkpoint> {
    static MODEL: OnceLock<Arc<Checkpoint>> = OnceLock::new();
    let open = || {
        let path = file();
        Arc::new(Checkpoint::open(&path).unwrap_or_else(|e| panic!("{e}; scripts/test.sh fetches it")))
    };
    MODEL.get_or_init(open).clone()
}

/// The tests' adapter as a user would run it: without bounds checks, which cost a third of the time here.
fn device(profile: Profile) -> Device {
    Device::Gpu { adapter: adapter(), profile, checked: false }
}

fn fast(context: usize) -> StageOptions {
    StageOptions { activations: Act::Q8, kv: KvType::F16, ..exact(context) }
}

struct Golden {
    prompt: Vec<u32>,
    nll: f64,
    top8: Vec<(u32, f64)>,
    greedy: Vec<u32>,
    margins: Vec<f64>,
}

fn goldens() -> Vec<Golden> {
    let file = json("smollm2/golden.json");
    let cases = file["cases"].as_array().unwrap().iter();
    cases
        .map(|case| Golden {
            prompt: ids(&case["prompt_ids"]),
            nll: case["prompt_nll"].as_f64().unwrap(),
            top8: case["first_top8"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| (p[0].as_u64().unwrap() as u32, p[1].as_f64().unwrap()))
                .collect(),
            greedy: ids(&case["greedy_ids"]),
            margins: floats(&case["margins"]),
        })
        .collect()
}

fn greedy(head: &mut Head, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let request = Request {
        prompt: prompt.to_vec(),
        max_tokens,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_at_eos: true,
        choices: 1,
        deadline: None,
        ..Request::default()
    };
    let answer = head.generate(request, &AtomicBool::new(false), &mut |_| {}).unwrap();
    answer.tokens.iter().map(|token| token.id).collect()
}

/// Equal up to the first step whose margin is not over `margin`.
fn check_greedy(found: &[u32], golden: &Golden, margin: f64) {
    let sure = golden.margins.iter().take_while(|m| **m > margin).count();
    assert!(found.len() >= sure, "{} tokens for {sure} that are sure", found.len());
    assert_eq!(found[..sure], golden.greedy[..sure], "the first {sure} tokens");
}

#[test]
fn prompts_become_the_ids_of_the_reference() {
    let checkpoint = model();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let template = ChatTemplate::new(&checkpoint.chat_template().unwrap().unwrap(), "model").unwrap();
    let options = RenderOptions {
        add_generation_prompt: true,
        bos_token: tokenizer.bos_text(),
        eos_token: tokenizer.eos_text(),
        ..RenderOptions::default()
    };
    for case in json("smollm2/golden.json")["cases"].as_array().unwrap() {
        let expected = ids(&case["prompt_ids"]);
        let found = if case["kind"] == "raw" {
            tokenizer.encode(case["text"].as_str().unwrap(), Encode { add_bos: true, parse_special: false }).unwrap()
        } else {
            let messages = case["text"].as_array().unwrap().iter();
            let messages: Vec<Message> =
                messages.map(|m| Message::new(m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect();
            let rendered = template.render(&messages, &options).unwrap();
            assert_eq!(rendered.text(), case["rendered"].as_str().unwrap());
            tokenizer.encode_chat(&rendered).unwrap()
        };
        assert_eq!(found, expected, "{}", case["text"]);
    }
}

#[test]
fn the_exact_mode_says_what_the_reference_says() {
    let checkpoint = model();
    let mut head = head(&checkpoint, &[30], exact(256), &device(Profile::SOFTWARE));
    for golden in goldens() {
        let score = head.score(&golden.prompt, 128, 8, &AtomicBool::new(false), &mut |_| {}).unwrap();
        assert!((score.nll() - golden.nll).abs() <= 1e-3 * golden.nll, "nll {} for {}", score.nll(), golden.nll);
        for ((id, expected), (found_id, found)) in golden.top8.iter().zip(&score.top) {
            assert_eq!(id, found_id);
            assert!((expected - f64::from(*found)).abs() <= 2e-3, "log-probability {found} for {expected}");
        }
        let found = greedy(&mut head, &golden.prompt, golden.greedy.len());
        check_greedy(&found, &golden, 0.01);
    }
}

#[test]
fn four_stages_say_what_one_says() {
    let checkpoint = model();
    let golden = &goldens()[6];
    let mut tokens = Vec::new();
    for split in [vec![30], vec![8, 8, 7, 7], vec![27, 1, 1, 1]] {
        let mut head = head(&checkpoint, &split, exact(256), &device(Profile::SOFTWARE));
        tokens.push(greedy(&mut head, &golden.prompt, 12));
        check_greedy(&tokens[0], golden, 0.01);
    }
    assert!(tokens.iter().all(|t| *t == tokens[0]), "{tokens:?}");
}

/// Many chunks of top-k, and a distribution with a head and a tail.
#[test]
fn penalties_at_the_tail_give_the_tokens_of_whole_rows() {
    let samplings = crate::sampling::samplings();
    crate::sampling::check(&model(), &device(Profile::SOFTWARE), &[samplings[0].clone(), samplings[3].clone()]);
}

#[test]
fn long_texts_score_as_the_reference() {
    let checkpoint = model();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let text = std::fs::read_to_string(data("smollm2/long.txt")).unwrap();
    let ids = tokenizer.encode(&text, Encode { add_bos: true, parse_special: false }).unwrap();
    let expected = &json("smollm2/golden.json")["long"]["nll_of_first"];
    let mut head = head(&checkpoint, &[30], exact(1024), &device(Profile::SOFTWARE));
    let score = head.score(&ids[..1024], 128, 1, &AtomicBool::new(false), &mut |_| {}).unwrap();
    for tokens in [128usize, 512, 1024] {
        let expected = expected[tokens.to_string()].as_f64().unwrap();
        let found = -score.token_logprobs[..tokens - 1].iter().map(|p| f64::from(*p)).sum::<f64>();
        assert!((found - expected).abs() <= 1e-3 * expected, "{tokens} tokens: nll {found} for {expected}");
    }
}

#[test]
fn q8_activations_stay_close_on_both_profiles() {
    let checkpoint = model();
    for profile in [Profile::SOFTWARE, Profile::CARD] {
        let mut head = head(&checkpoint, &[15, 15], fast(256), &device(profile));
        let (mut sum, mut expected_sum) = (0.0, 0.0);
        for golden in goldens() {
            let score = head.score(&golden.prompt, 128, 8, &AtomicBool::new(false), &mut |_| {}).unwrap();
            assert!(
                (score.nll() - golden.nll).abs() <= 0.1 * golden.nll,
                "{}: nll {} for {}",
                profile.name,
                score.nll(),
                golden.nll
            );
            sum += score.nll();
            expected_sum += golden.nll;
            let found = greedy(&mut head, &golden.prompt, golden.greedy.len().min(16));
            let golden = Golden { margins: golden.margins[..found.len()].to_vec(), ..golden };
            check_greedy(&found, &golden, 0.5);
        }
        assert!((sum - expected_sum).abs() <= 0.01 * expected_sum, "{}: nll {sum} for {expected_sum}", profile.name);
    }
}

/// What a chain of stages computed: rows of logits, and the bits of every layer's keys and values.
#[derive(PartialEq)]
struct Bits {
    logits: Vec<Vec<u32>>,
    kv: Vec<Vec<u8>>,
}

/// Runs `ids` through stages in this thread, in micro-batches of the given sizes.
fn run_in_chunks(
    checkpoint: &Checkpoint,
    split: &[usize],
    options: StageOptions,
    profile: Profile,
    ids: &[u32],
    chunks: &[usize],
) -> Bits {
    let adapter = adapter();
    let open = |spec: StageSpec| {
        let gpu = Box::new(pp_engine::backend::gpu::Gpu::open(&adapter, profile, false).unwrap());
        let limits = pp_engine::backend::Backend::limits(gpu.as_ref());
        let layout = StageLayout::new(checkpoint, spec, options, &profile, limits).unwrap();
        Stage::open(checkpoint, layout, gpu, &mut |_| true).unwrap()
    };
    let mut stages: Vec<Stage> = StageSpec::pipeline(split).into_iter().map(open).collect();
    let mut logits = Vec::new();
    let mut start = 0;
    for chunk in chunks {
        let new_pages = if start == 0 { (0..options.pages() as u32).rev().collect() } else { Vec::new() };
        let outputs = (0..*chunk as u32).map(|row| OutputRequest {
            row,
            target: 0,
            top_k: 1,
            inverse_temperature: 1.0,
            whole_row: true,
            edits: Vec::new(),
        });
        let mut step = Step {
            spans: vec![Span { request: 0, sequence: 1, start: start as u32, count: *chunk as u32, new_pages }],
            ids: ids[start..start + chunk].to_vec(),
            outputs: outputs.collect(),
            ..Step::default()
        };
        let mut hidden = Vec::new();
        for stage in &mut stages {
            match stage.step(&step, &hidden).unwrap() {
                StageOutput::Hidden(next) => hidden = next,
                StageOutput::Outputs(outputs) => {
                    logits.extend(
                        outputs.outputs.into_iter().map(|o| o.row.unwrap().iter().map(|l| l.to_bits()).collect()),
                    );
                }
            }
            step.ids.clear();
        }
        start += chunk;
    }
    assert_eq!(start, ids.len());
    let layers = checkpoint.config.layers;
    let mut kv = Vec::new();
    for stage in &mut stages {
        let held: Vec<usize> = stage.layout().spec.layers.clone().collect();
        for buffer in held.into_iter().flat_map(|layer| stage.kv_bytes(layer).unwrap()) {
            // Pages were handed out from the last one on; the free ones, and the one behind that no sequence gets, hold
            // whatever they held.
            let (pages, page) = (options.pages(), buffer.len() / (options.pages() + 1));
            kv.push(buffer[(pages - start.div_ceil(PAGE)) * page..pages * page].to_vec());
        }
    }
    assert_eq!(kv.len(), 2 * layers, "keys and values of every layer");
    Bits { logits, kv }
}

/// A row's bits depend on its own inputs and position only: not on the split, the size of micro-batches, the kernel
/// (matvec or matmul, decode or prefill attention), or the company.
#[test]
fn bits_do_not_depend_on_how_the_work_is_cut() {
    let checkpoint = model();
    let golden = &goldens()[4];
    // More than one split of attention would be 256 positions; pages and tiles end within.
    let ids: Vec<u32> = golden.prompt.iter().chain(&golden.greedy).copied().take(75).collect();
    for (options, profile) in
        [(exact(128), Profile::SOFTWARE), (fast(128), Profile::SOFTWARE), (fast(128), Profile::CARD)]
    {
        let one = vec![1; ids.len()];
        let reference = run_in_chunks(&checkpoint, &[30], options, profile, &ids, &[75]);
        let same = |split: &[usize], chunks: &[usize]| {
            let found = run_in_chunks(&checkpoint, split, options, profile, &ids, chunks);
            let equal = (0..reference.logits.len()).filter(|i| reference.logits[*i] == found.logits[*i]).count();
            assert!(
                found == reference,
                "{} {options:?}: split {split:?} in {} chunks: {equal} of {} rows equal",
                profile.name,
                chunks.len(),
                ids.len()
            );
        };
        same(&[30], &one);
        same(&[30], &[9, 1, 8, 2, 3, 16, 4, 7, 17, 8]);
        same(&[15, 15], &[64, 11]);
        if options.activations == Act::Q8 && profile == Profile::SOFTWARE {
            same(&[1; 30], &[75]);
            same(&[27, 1, 1, 1], &[75]);
            same(&[1, 27, 1, 1], &[40, 35]);
        }
    }
}

/// The same across a split of attention, at 256 positions.
#[test]
fn bits_do_not_depend_on_the_kernel_beyond_a_split() {
    let checkpoint = model();
    let text = std::fs::read_to_string(data("smollm2/long.txt")).unwrap();
    let ids = checkpoint.tokenizer().unwrap().encode(&text, Encode::default()).unwrap()[..280].to_vec();
    for profile in [Profile::SOFTWARE, Profile::CARD] {
        let options = StageOptions { chunk: 512, ..fast(512) };
        let reference = run_in_chunks(&checkpoint, &[30], options, profile, &ids, &[280 - 128, 128]);
        let mut chunks = vec![100, 100, 50];
        chunks.extend([1; 14]);
        chunks.extend([8, 8]);
        assert!(run_in_chunks(&checkpoint, &[30], options, profile, &ids, &chunks) == reference, "{}", profile.name);
    }
}
