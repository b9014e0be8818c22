use std::path::Path;

use proptest::prelude::*;

use super::*;

fn data(path: &str) -> Checkpoint {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data");
    Checkpoint::open(&data.join(path)).unwrap()
}

const MODEL: Digest = Digest([7; 32]);

fn made(checkpoint: &Checkpoint) -> Manifest {
    Manifest::of(checkpoint, MODEL, &mut |_, _| true).unwrap()
}

/// Against the digests of what the files hold, tensor by tensor, in every kind of container.
#[test]
fn a_manifest_lists_every_tensor_with_the_digest_of_its_bytes() {
    for path in ["tiny/llama-sharded", "tiny-gguf/split-00001-of-00002.gguf", "tiny-gguf/mixed-k-qwen2.gguf"] {
        let checkpoint = data(path);
        let manifest = made(&checkpoint);
        assert_eq!(manifest.tensors.len(), checkpoint.tensors().count());
        for (at, tensor) in checkpoint.tensors().enumerate() {
            let entry = &manifest.tensors[at];
            assert_eq!(manifest.position(&tensor.name), Some(at));
            assert_eq!((entry.bytes(), entry.dtype, &entry.shape), (tensor.bytes(), tensor.dtype, &tensor.shape));
            let file = std::fs::read(&checkpoint.files()[tensor.file()].0).unwrap();
            let bytes = &file[tensor.offset()..][..tensor.bytes()];
            assert_eq!(entry.digest, Digest::from(blake3::hash(bytes)), "{path}: {}", tensor.name);
        }
        assert_eq!(Manifest::decode(&manifest.encode()).unwrap(), manifest);
    }
}

#[test]
fn hashing_tells_how_far_it_is_and_can_be_ended() {
    let checkpoint = data("tiny/llama-tied");
    let total: u64 = checkpoint.tensors().map(|tensor| tensor.bytes() as u64).sum();
    let mut last = (0, 0);
    Manifest::of(&checkpoint, MODEL, &mut |done, all| {
        last = (done, all);
        true
    })
    .unwrap();
    assert_eq!(last, (total, total));
    let error = Manifest::of(&checkpoint, MODEL, &mut |_, _| false).unwrap_err();
    assert!(matches!(error, ManifestError::Cancelled));
}

#[test]
fn a_model_is_read_once_and_a_damaged_memory_is_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = data("tiny/llama-tied");
    let read = |model| {
        let mut hashed = 0;
        let mut count = |done, _| {
            hashed = done;
            true
        };
        let found = Manifest::remembered(Some(folder.path()), &checkpoint, model, &mut count).unwrap();
        (found, hashed)
    };
    let (first, hashed) = read(MODEL);
    assert!(hashed > 0);
    assert_eq!(read(MODEL), (first.clone(), 0));
    let file = folder.path().join(MODEL.to_string());
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(read(MODEL), (first.clone(), hashed));
    assert_eq!(read(MODEL), (first, 0), "it was written anew");
    // What has the name of one model and is of another is none.
    let other = Digest([8; 32]);
    std::fs::copy(&file, folder.path().join(other.to_string())).unwrap();
    assert_eq!(read(other).1, hashed);
}

#[test]
fn manifests_that_make_no_sense_are_refused() {
    let good = made(&data("tiny/llama-tied"));
    let refused = |change: &dyn Fn(&mut Manifest), word: &str| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = Manifest::decode(&bad.encode()).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(&|bad| bad.tensors[1].name = bad.tensors[0].name.clone(), "there twice");
    refused(&|bad| bad.tensors[1].name = "x".repeat(2000), "too long");
    refused(&|bad| bad.tensors[0].shape = vec![usize::MAX, 2], "no such shape");
    refused(&|bad| bad.tensors[0].shape = vec![1; 9], "no such shape");
    refused(&|bad| (bad.tensors[0].dtype, bad.tensors[0].shape) = (DType::Q4_K, vec![2, 255]), "no such shape");
    refused(
        &|bad| {
            (bad.tensors[0].shape, bad.tensors[1].shape) = (vec![usize::MAX / 8], vec![usize::MAX / 8]);
            (bad.tensors[0].dtype, bad.tensors[1].dtype) = (DType::F32, DType::F32);
            bad.tensors[2].shape = vec![usize::MAX / 8];
        },
        "no such shape",
    );
    refused(&|bad| bad.config.heads = 0, "malformed");
    refused(&|bad| bad.unsupported = vec![("x".repeat(1 << 20), String::new())], "over the limit");
    let mut bytes = good.encode();
    bytes.push(0);
    assert!(Manifest::decode(&bytes).unwrap_err().to_string().contains("1 bytes too many"));
    bytes[0] = 9;
    assert!(matches!(Manifest::decode(&bytes), Err(ManifestError::Version { found: 9 })));
}

proptest! {
    #[test]
    fn any_bytes_are_a_manifest_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Manifest::decode(&[&MANIFEST_VERSION.to_le_bytes()[..], &bytes].concat());
    }

    #[test]
    fn changed_bytes_are_a_manifest_or_an_error(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = made(&data("tiny/llama-tied")).encode();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = Manifest::decode(&bytes);
    }
}
