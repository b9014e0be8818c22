//! What can be checked without a device: every variant is valid WGSL, every `Params` mirrors its block.

use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::registry::{Access, KERNELS, Kernel, Variant};
use crate::{Act, Format, KvType, Profile, SEGMENTS, block_position};

/// The variants that a model may ask for under a profile.
pub(crate) fn variants(profile: &Profile) -> Vec<Variant> {
    let mut all = Vec::new();
    let flat = [("WORKGROUP", profile.flat)];
    for format in Format::ALL {
        all.push(Variant::new(Kernel::Embed, Some(format), None, None, &flat));
        for cols in [1, 2, 4, 8] {
            let sizes = [("GROUPS", profile.matvec_groups), ("ROWS", profile.matvec_rows), ("COLS", cols)];
            all.push(Variant::new(Kernel::MatvecF32, Some(format), None, None, &sizes));
            if format.is_quantised() {
                all.push(Variant::new(Kernel::MatvecQ8, Some(format), None, None, &sizes));
            }
        }
        let sizes = [("LANES", profile.matmul_lanes), ("COLS", profile.matmul_cols), ("ROWS", profile.matmul_rows)];
        all.push(Variant::new(Kernel::MatmulF32, Some(format), None, None, &sizes));
        if format.is_quantised() {
            all.push(Variant::new(Kernel::MatmulQ8, Some(format), None, None, &sizes));
            all.push(Variant::new(Kernel::MatmulTileQ8, Some(format), None, None, &[("TILE", 64), ("SIDE", 4)]));
        }
    }
    for act in [Act::F32, Act::Q8] {
        all.push(Variant::new(Kernel::RmsNorm, None, Some(act), None, &[("WORKGROUP", profile.norm)]));
        all.push(Variant::new(Kernel::ToAct, None, Some(act), None, &flat));
        all.push(Variant::new(Kernel::SwiGlu, None, Some(act), None, &flat));
        for dim in [64, 80, 96, 128, 256] {
            all.push(Variant::new(
                Kernel::AttnReduce,
                None,
                Some(act),
                None,
                &[("WORKGROUP", profile.flat), ("HEAD_DIM", dim)],
            ));
        }
    }
    for kv in [KvType::F32, KvType::F16] {
        for dim in [64, 80, 96, 128, 256] {
            let dims = [("WORKGROUP", profile.flat), ("HEAD_DIM", dim)];
            all.push(Variant::new(Kernel::RopeKv, None, None, Some(kv), &dims));
            for heads in [1, 3, 8] {
                let sizes = [
                    ("WORKGROUP", profile.decode_threads),
                    ("KEY_LANES", profile.key_lanes),
                    ("HEAD_DIM", dim),
                    ("HEADS", heads),
                ];
                all.push(Variant::new(Kernel::AttnDecode, None, None, Some(kv), &sizes));
            }
            let sizes = [("TILE", profile.prefill_tile), ("ROW_LANES", profile.row_lanes), ("HEAD_DIM", dim)];
            all.push(Variant::new(Kernel::AttnPrefill, None, None, Some(kv), &sizes));
        }
    }
    for kernel in [Kernel::TopkChunk, Kernel::TopkMerge] {
        all.push(Variant::new(kernel, None, None, None, &[("WORKGROUP", profile.topk), ("CHUNK", 4096), ("K", 64)]));
    }
    all
}

fn module(variant: &Variant) -> (naga::Module, naga::valid::ModuleInfo) {
    let source = variant.source();
    let module =
        naga::front::wgsl::parse_str(&source).unwrap_or_else(|e| panic!("{variant:?}:\n{}", e.emit_to_string(&source)));
    let info = Validator::new(ValidationFlags::all(), Capabilities::all())
        .validate(&module)
        .unwrap_or_else(|e| panic!("{variant:?}:\n{}", e.emit_to_string(&source)));
    (module, info)
}

#[test]
fn every_variant_is_valid_and_binds_what_the_registry_says() {
    let mut kernels = std::collections::HashSet::new();
    for variant in Profile::ALL.iter().flat_map(variants) {
        kernels.insert(variant.kernel);
        let (module, _) = module(&variant);
        let mut found: Vec<(u32, Access)> = module
            .global_variables
            .iter()
            .filter_map(|(_, var)| {
                let access = match var.space {
                    naga::AddressSpace::Storage { access } if access.contains(naga::StorageAccess::STORE) => {
                        Access::Write
                    }
                    _ => Access::Read,
                };
                var.binding.map(|binding| (binding.binding, access))
            })
            .collect();
        found.sort_by_key(|(binding, _)| *binding);
        assert_eq!(found, variant.bindings(), "{variant:?}");
    }
    assert_eq!(kernels.len(), KERNELS.len(), "the variants above go through every kernel");
}

#[test]
fn params_mirror_their_blocks() {
    let variants = variants(&Profile::CARD);
    for entry in KERNELS {
        let variant = variants.iter().find(|v| v.kernel == entry.kernel).expect("a variant of every kernel");
        let (module, _) = module(variant);
        let block = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some("Params")).expect("a Params block").1;
        let naga::TypeInner::Struct { members, .. } = &block.inner else { panic!("Params is a struct") };
        let found: Vec<(&str, usize)> =
            members.iter().map(|m| (m.name.as_deref().unwrap_or(""), m.offset as usize)).collect();
        assert_eq!(found, (entry.fields)(), "{}", entry.name);
        assert_eq!(found[0], ("tokens", 0), "{}", entry.name);
    }
}

#[test]
fn block_positions_are_a_permutation_that_interleaves_segments() {
    for blocks in 1..100 {
        let mut seen = vec![false; blocks];
        let mut block = 0;
        for segment in 0..SEGMENTS {
            let length = blocks / SEGMENTS + usize::from(segment < blocks % SEGMENTS);
            for j in 0..length {
                let position = block_position(blocks, block);
                assert_eq!(position, j * SEGMENTS + segment, "block {block} of {blocks}");
                assert!(!std::mem::replace(&mut seen[position], true));
                block += 1;
            }
        }
        assert_eq!(block, blocks);
    }
}
