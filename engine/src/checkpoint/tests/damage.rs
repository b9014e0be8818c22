//! Files damaged at random are opened or refused, and nothing else happens.

use proptest::prelude::*;

use super::folder::{CONFIG, small_safetensors};
use super::*;

/// One way to damage a file; positions are taken modulo its length.
#[derive(Clone, Debug)]
enum Damage {
    Flip(usize, u8),
    Cut(usize),
    Number(usize, u64),
}

fn damage() -> impl Strategy<Value = Vec<Damage>> {
    // Most structure is near the start, so half of the positions are there.
    let position = || prop_oneof![0..600_usize, any::<usize>()];
    let number = prop_oneof![any::<u64>(), 0..64_u64, Just(u64::MAX), Just(1 << 31), Just(1 << 40), Just(1 << 63)];
    let one = prop_oneof![
        (position(), 1..=255_u8).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        position().prop_map(Damage::Cut),
        (position(), number).prop_map(|(at, number)| Damage::Number(at, number)),
    ];
    proptest::collection::vec(one, 1..4)
}

fn damaged(good: &[u8], damages: &[Damage]) -> Vec<u8> {
    let mut bytes = good.to_vec();
    for damage in damages {
        let len = bytes.len().max(1);
        match damage {
            Damage::Flip(at, mask) => bytes.get_mut(at % len).into_iter().for_each(|byte| *byte ^= mask),
            Damage::Cut(at) => bytes.truncate(at % len),
            Damage::Number(at, number) => {
                bytes.iter_mut().skip(at % len).zip(number.to_le_bytes()).for_each(|(byte, new)| *byte = new);
            }
        }
    }
    bytes
}

/// Whatever could be opened can also be read.
fn read_all(opened: Result<Checkpoint, CheckpointError>) {
    let Ok(checkpoint) = opened else { return };
    for tensor in checkpoint.tensors() {
        assert_eq!(checkpoint.data(tensor).len(), tensor.bytes());
    }
    let _ = checkpoint.tokenizer().map(|tokenizer| tokenizer.encode(" a <|im_end|>", Default::default()));
    let _ = checkpoint.chat_template();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_gguf_never_panics(damages in damage()) {
        read_all(open_bytes(&damaged(&tiny_gguf(), &damages)));
    }

    #[test]
    fn damaged_folder_never_panics(weights in damage(), config in damage(), which in 0..3) {
        let folder = Folder::new();
        let keep = |part: i32, good: &[u8], damages| if which == part { good.to_vec() } else { damaged(good, damages) };
        folder.write("config.json", keep(0, CONFIG.as_bytes(), &config));
        folder.write("model.safetensors", keep(1, &small_safetensors(), &weights));
        read_all(folder.open());
    }
}
