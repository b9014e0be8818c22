use pp_shaders::{Act, KvType};
use proptest::prelude::*;

use super::*;
use crate::wire::Wire;

fn contract() -> Contract {
    let model = ModelFacts {
        digest: Digest([1; 32]),
        arch: "llama".into(),
        layers: 30,
        hidden: 576,
        intermediate: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocab: 49152,
        rms_eps: 1e-5,
        rope: Rope { theta: 10000.0, dims: 64, scaling: RopeScaling::None },
        formats: vec![("F32".into(), 61), ("Q4_1".into(), 210)],
        tensors: Digest([2; 32]),
    };
    let options = StageOptions {
        activations: Act::Q8,
        kv: KvType::F16,
        context: 2048,
        sequences: 16,
        kv_tokens: 32768,
        chunk: 512,
        wire: Wire::F32,
    };
    Contract::new(model, &StageSpec::pipeline(&[8, 8, 7, 7]), options, &[Profile::CARD; 4])
}

#[test]
fn equal_contracts_differ_in_nothing() {
    assert_eq!(contract().differences(&contract()), []);
    assert_eq!(contract().digest(), contract().digest());
    assert_eq!(contract().check().unwrap(), StageSpec::pipeline(&[8, 8, 7, 7]));
}

#[test]
fn every_field_is_told_by_name_with_both_values() {
    #[track_caller]
    fn check(change: impl FnOnce(&mut Contract), expected: &str) {
        let (ours, mut theirs) = (contract(), contract());
        change(&mut theirs);
        let found: Vec<String> = ours.differences(&theirs).iter().map(Difference::to_string).collect();
        assert_eq!(found, [expected]);
        assert_ne!(ours.digest(), theirs.digest());
        let back: Vec<String> = theirs.differences(&ours).iter().map(|d| d.what.clone()).collect();
        assert_eq!(back, [expected.split(": ").next().unwrap()]);
        assert_eq!(Contract::decode(&theirs.encode().unwrap()).unwrap(), theirs);
    }
    let theirs = |kernel_order| {
        format!("order of additions in kernels, version: {KERNEL_ORDER_VERSION} here, {kernel_order} there")
    };
    check(|c| c.kernel_order += 1, &theirs(KERNEL_ORDER_VERSION + 1));
    check(|c| c.message_version = 77, &format!("messages, version: {MESSAGE_VERSION} here, 77 there"));
    let digests = (Digest([1; 32]), Digest([9; 32]));
    check(|c| c.model.digest = digests.1, &format!("model digest: {} here, {} there", digests.0, digests.1));
    check(|c| c.model.arch = "qwen2".into(), "architecture: llama here, qwen2 there");
    check(
        |c| {
            c.model.layers = 31;
        },
        "layers: 30 here, 31 there",
    );
    check(|c| c.model.hidden = 640, "hidden size: 576 here, 640 there");
    check(|c| c.model.intermediate = 8, "intermediate size: 1536 here, 8 there");
    check(|c| c.model.heads = 18, "heads: 9 here, 18 there");
    check(|c| c.model.kv_heads = 9, "KV heads: 3 here, 9 there");
    check(|c| c.model.head_dim = 128, "head size: 64 here, 128 there");
    check(|c| c.model.vocab = 5, "vocabulary: 49152 here, 5 there");
    check(|c| c.model.rms_eps = 1e-6, "epsilon of norms: 1e-5 here, 1e-6 there");
    let rope = "rotation: theta 10000, 64 dimensions, no scaling here,";
    check(|c| c.model.rope.theta = 5e5, &format!("{rope} theta 500000, 64 dimensions, no scaling there"));
    check(|c| c.model.rope.dims = 32, &format!("{rope} theta 10000, 32 dimensions, no scaling there"));
    check(
        |c| c.model.rope.scaling = RopeScaling::Linear { factor: 2.0 },
        &format!("{rope} theta 10000, 64 dimensions, linear scaling by 2 there"),
    );
    check(
        |c| {
            c.model.rope.scaling =
                RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 }
        },
        &format!("{rope} theta 10000, 64 dimensions, llama3 scaling by 8 between 1 and 4 of 8192 positions there"),
    );
    check(|c| c.model.formats[1].1 = 209, "tensor formats: 61 F32, 210 Q4_1 here, 61 F32, 209 Q4_1 there");
    check(
        |c| c.model.tensors = Digest([3; 32]),
        &format!("names, shapes and formats of tensors: {} here, {} there", Digest([2; 32]), Digest([3; 32])),
    );
    check(|c| c.options.activations = Act::F32, "--activations: q8 here, f32 there");
    check(|c| c.options.kv = KvType::F32, "--kv: f16 here, f32 there");
    check(|c| c.options.context = 1024, "--ctx: 2048 here, 1024 there");
    check(|c| c.options.sequences = 8, "--max-sequences: 16 here, 8 there");
    check(|c| c.options.kv_tokens = 4096, "--kv-tokens: 32768 here, 4096 there");
    check(|c| c.options.chunk = 128, "--max-batch-tokens: 512 here, 128 there");
    check(|c| c.options.wire = Wire::Q8, "--wire: f32 here, q8 there");
    check(
        |c| c.stages[1].layers = 8..15,
        "split: layers 0-7, 8-15, 16-22, 23-29 here, layers 0-7, 8-14, 16-22, 23-29 there",
    );
    check(|c| c.stages[2].plan.profile = "tuned".into(), "profile of stage 2: card here, tuned there");
    check(|c| c.stages[0].plan.segments = 1, "segments of K of stage 0: 8 here, 1 there");
    check(|c| c.stages[0].plan.norm = 8, "threads of a norm of stage 0: 128 here, 8 there");
    check(|c| c.stages[3].plan.topk = 8, "threads of top-k of stage 3: 128 here, 8 there");
    check(|c| c.stages[3].plan.wide = true, "64-bit loads of stage 3: false here, true there");
    check(|c| c.stages[3].plan.shared = true, "loads shared by lanes of stage 3: false here, true there");
}

#[test]
fn factors_of_the_rotation_are_compared_one_by_one() {
    let factors = |last: f32| {
        let mut contract = contract();
        contract.model.rope.scaling = RopeScaling::Factors(vec![1.0, 2.0, last]);
        contract
    };
    assert_eq!(factors(3.0).differences(&factors(3.0)), []);
    let found = factors(3.0).differences(&factors(4.0));
    assert!(found.len() == 1 && found[0].what == "rotation" && found[0].ours.contains("3 factors"), "{found:?}");
}

#[test]
fn words_that_are_alike_do_not_hide_a_difference() {
    let formats = |list: &[(&str, usize)]| {
        let mut contract = contract();
        contract.model.formats = list.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        contract
    };
    let found = formats(&[("F32", 1), ("F16", 2)]).differences(&formats(&[("F32, 2 F16", 1)]));
    assert!(found.len() == 1 && found[0].what == "contract digest", "{found:?}");
}

#[test]
fn a_stage_answers_with_what_it_has_itself() {
    let head = contract();
    assert_eq!(head.seen_by(1, head.model.clone(), &Profile::CARD).unwrap(), head);
    let other = ModelFacts { digest: Digest([5; 32]), ..head.model.clone() };
    let seen = head.seen_by(1, other, &Profile::SOFTWARE).unwrap();
    let found: Vec<String> = head.differences(&seen).into_iter().map(|difference| difference.what).collect();
    let plan = ["profile", "segments of K", "threads of a norm", "threads of top-k", "64-bit loads"];
    let mut expected = vec!["model digest".to_owned()];
    expected.extend(plan.iter().chain(&["loads shared by lanes"]).map(|what| format!("{what} of stage 1")));
    assert_eq!(found, expected);
    let error = head.seen_by(4, head.model.clone(), &Profile::CARD).unwrap_err().to_string();
    assert_eq!(error, "the contract has no stage 4, only 4");
}

#[test]
fn contracts_that_make_no_sense_are_refused() {
    #[track_caller]
    fn refused(change: impl FnOnce(&mut Contract), expected: &str) {
        let mut contract = contract();
        change(&mut contract);
        let error = contract.check().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    refused(|c| c.stages[1].layers = 9..16, "stage 1 holds layers 9..16 where layer 8 of 30 is next");
    refused(|c| c.stages[1].layers = 7..16, "stage 1 holds layers 7..16 where layer 8 of 30 is next");
    #[expect(clippy::reversed_empty_ranges, reason = "it is what is tested")]
    let backwards = 8..3;
    refused(|c| c.stages[1].layers = backwards, "stage 1 holds layers 8..3");
    refused(|c| drop(c.stages.pop()), "where layer 23 of 30 is next");
    refused(|c| c.stages.clear(), "where layer 0 of 30 is next");
    refused(|c| c.model.layers = 29, "of 29 is next");
    refused(|c| c.options.context = 0, "the contract's --ctx 0 is not within 1 and 268435456");
    refused(|c| c.options.sequences = 1025, "--max-sequences 1025 is not within 1 and 1024");
    refused(|c| c.options.kv_tokens = usize::MAX, "--kv-tokens 18446744073709551615");
    refused(|c| c.options.chunk = 8193, "--max-batch-tokens 8193");
}

#[test]
fn encodings_are_bounded_and_have_a_version() {
    let bytes = contract().encode().unwrap();
    assert!(bytes.len() < 400, "{}", bytes.len());
    let mut longest = contract();
    longest.stages = StageSpec::pipeline(&[1; crate::config::LAYERS_MAX])
        .into_iter()
        .map(|spec| StageTerms { layers: spec.layers, plan: KernelPlan::of(&Profile::SOFTWARE) })
        .collect();
    longest.model.rope.scaling = RopeScaling::Factors(vec![1.5; crate::config::HEAD_DIM_MAX / 2]);
    assert!(longest.encode().unwrap().len() <= CONTRACT_BYTES_MAX);
    longest.model.arch = "x".repeat(CONTRACT_BYTES_MAX);
    assert!(matches!(longest.encode(), Err(ContractError::TooLarge { .. })));
    assert!(matches!(Contract::decode(&[0; CONTRACT_BYTES_MAX + 1]), Err(ContractError::TooLarge { .. })));
    let mut newer = bytes.clone();
    newer[0] += 1;
    let error = Contract::decode(&newer).unwrap_err().to_string();
    assert!(error.contains("version 2") && error.contains("same release"), "{error}");
    let longer = [bytes.as_slice(), &[0]].concat();
    assert_eq!(Contract::decode(&longer).unwrap_err().to_string(), "the contract is malformed: 1 bytes too many");
    for length in 0..bytes.len() {
        assert!(Contract::decode(&bytes[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn another_build_is_told_and_no_difference() {
    let this = Build::this();
    assert!(!this.warn_if_different(&this.clone(), "host-1"));
    assert!(this.warn_if_different(&Build { version: "9.9".into(), ..this.clone() }, "host-1"));
    assert!(this.to_string().starts_with(env!("CARGO_PKG_VERSION")));
}

#[test]
fn a_model_of_the_test_data_is_described() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny-gguf");
    let facts = |name: &str| ModelFacts::of(&Checkpoint::open(&folder.join(name)).unwrap(), Digest([0; 32]));
    let one = facts("llama-q4_0.gguf");
    assert_eq!(one, facts("llama-q4_0.gguf"));
    assert_ne!(one.tensors, facts("llama-q4_1.gguf").tensors);
    assert!(one.formats.iter().any(|(format, _)| format == "Q4_0"), "{:?}", one.formats);
}

proptest! {
    #[test]
    fn any_bytes_are_a_contract_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let versioned = [&CONTRACT_VERSION.to_le_bytes()[..], &bytes].concat();
        for bytes in [&bytes, &versioned] {
            if let Ok(contract) = Contract::decode(bytes) {
                let _ = (contract.check(), contract.differences(&super::tests::contract()), contract.digest());
            }
        }
    }

    #[test]
    fn changed_bytes_are_a_contract_or_an_error(at in 0usize..400, value: u8) {
        let mut bytes = contract().encode().unwrap();
        let at = at % bytes.len();
        bytes[at] = value;
        if let Ok(changed) = Contract::decode(&bytes) {
            let _ = changed.check();
            // What cannot be told apart is the same.
            prop_assert_eq!(contract().differences(&changed).is_empty(), changed.digest() == contract().digest());
        }
    }
}
