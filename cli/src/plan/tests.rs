use std::path::Path;

use pp_engine::{Act, KvType, Wire};

use super::*;
use crate::errors::{Exit, exit_of};

#[test]
fn the_largest_context_that_fits_is_found() {
    let largest = |max, bound| largest(512, max, 256, &|context| Ok::<_, ()>(context <= bound)).unwrap();
    assert_eq!(largest(8192, 511), None);
    assert_eq!(largest(8192, 512), Some(512));
    assert_eq!(largest(8192, 4000), Some(3840));
    assert_eq!(largest(8192, 8191), Some(7936));
    assert_eq!(largest(300, 299), None);
    assert_eq!(largest(8000, 7999), Some(7936));
}

/// A small model that declares a context of 8192, on the twins, with so many bytes of memory.
fn fitted(available: u64, context: Option<usize>) -> Result<Plan> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/tiny/llama-tied");
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(source.join(name), dir.path().join(name)).unwrap();
    }
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    let config = config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 8192");
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(dir.path()).unwrap());
    let costs = settings::costs(&checkpoint);
    let pool = Pool { device: "a card".into(), worker: None, host: false, available: Some(available), stages: vec![0] };
    let options = StageOptions {
        activations: Act::F32,
        kv: KvType::F32,
        context: context.unwrap_or(8192),
        sequences: 1,
        kv_tokens: context.unwrap_or(8192),
        chunk: 8,
        wire: Wire::F32,
    };
    let device = Device::Reference { profile: Profile::SOFTWARE };
    fit(
        checkpoint,
        vec![2],
        vec![device],
        vec![pool],
        options,
        Asked { context: context.is_some(), kv_tokens: None, log: 0 },
        &costs,
    )
}

fn bytes_at(context: usize) -> u64 {
    fitted(u64::MAX, Some(context)).unwrap().layouts[0].device_bytes()
}

#[test]
fn a_context_that_nobody_asked_for_is_lowered_to_what_fits() {
    let plan = fitted(u64::MAX, None).unwrap();
    assert_eq!((plan.options.context, plan.notes()), (8192, vec![]));
    let plan = fitted(bytes_at(2048) + 1, None).unwrap();
    assert_eq!((plan.options.context, plan.layouts[0].options.context), (2048, 2048));
    let note = &plan.notes()[0];
    assert!(note.contains("2048 tokens") && note.contains("8192"), "{note}");
}

#[test]
fn a_context_that_was_asked_for_is_refused_when_it_does_not_fit() {
    let error = fitted(bytes_at(2048), Some(4096)).err().unwrap();
    assert_eq!(exit_of(&error), Exit::Device);
    let message = error.to_string();
    assert!(message.contains("at a context of 4096") && message.contains("what would fit: --ctx 2048"), "{message}");
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let error = fitted(bytes_at(512) - 1, None).err().unwrap();
    assert_eq!(exit_of(&error), Exit::Device);
    assert!(error.to_string().starts_with("not enough memory on a card: stage 0 (layers 0-1) takes"), "{error}");
    assert!(fitted(1000, None).err().unwrap().to_string().contains("no split and no quantisation"));
}
