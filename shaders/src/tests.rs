//! What can be checked without a device: every variant is valid WGSL, every `Params` mirrors its block.

use naga::valid::{Capabilities, ValidationFlags, Validator};

use crate::registry::{Access, KERNELS, Variant};
use crate::{Arrangement, Profile};

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
    let narrow = Profile { wide: false, shared: false, ..Profile::SOFTWARE };
    for variant in [Profile::CARD, Profile::SOFTWARE, narrow].iter().flat_map(Profile::variants) {
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
    let variants: Vec<Variant> = [Profile::CARD, Profile::SOFTWARE].iter().flat_map(Profile::variants).collect();
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
    for (segments, blocks) in [1, 2, 8].into_iter().flat_map(|segments| (1..100).map(move |blocks| (segments, blocks)))
    {
        let arrangement = Arrangement { blocks, segments, interleave: 1 };
        let mut seen = vec![false; blocks];
        let mut block = 0;
        for segment in 0..segments {
            let length = blocks / segments + usize::from(segment < blocks % segments);
            for j in 0..length {
                let position = arrangement.position(block);
                assert_eq!(position, j * segments + segment, "block {block} of {blocks}");
                assert!(!std::mem::replace(&mut seen[position], true));
                block += 1;
            }
        }
        assert_eq!(block, blocks);
    }
}

#[test]
fn rows_stand_side_by_side() {
    let arrangement = Arrangement { blocks: 16, segments: 2, interleave: 8 };
    let mut seen = vec![false; 16 * 24];
    for (row, block) in (0..24).flat_map(|row| (0..16).map(move |block| (row, block))) {
        let index = arrangement.index(row, block);
        assert_eq!(index % 8, row % 8);
        assert!(!std::mem::replace(&mut seen[index], true));
    }
    assert_eq!((0..8).map(|row| arrangement.super_index(8 + row, 1)).collect::<Vec<_>>(), (24..32).collect::<Vec<_>>());
}
