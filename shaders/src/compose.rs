//! Joins WGSL files: `#import name` is replaced by the text of that file, once; numbers fixed for a pipeline are
//! `const` lines before it all (naga wants constants, not overrides, for the sizes of function-local arrays).

use std::collections::HashSet;

/// WGSL files by the name they are imported under.
const FILES: &[(&str, &str)] = &[
    ("shared/segments", include_str!("../wgsl/shared/segments.wgsl")),
    ("shared/block_sum", include_str!("../wgsl/shared/block_sum.wgsl")),
    ("shared/block_sum_halves", include_str!("../wgsl/shared/block_sum_halves.wgsl")),
    ("shared/chain", include_str!("../wgsl/shared/chain.wgsl")),
    ("shared/bytes", include_str!("../wgsl/shared/bytes.wgsl")),
    ("shared/words_as_values", include_str!("../wgsl/shared/words_as_values.wgsl")),
    ("shared/attention", include_str!("../wgsl/shared/attention.wgsl")),
    ("shared/attend", include_str!("../wgsl/shared/attend.wgsl")),
    ("shared/product_swiglu", include_str!("../wgsl/shared/product_swiglu.wgsl")),
    ("shared/product_store", include_str!("../wgsl/shared/product_store.wgsl")),
    ("lanes/apart", include_str!("../wgsl/lanes/apart.wgsl")),
    ("lanes/shared", include_str!("../wgsl/lanes/shared.wgsl")),
    ("load/quad_u32", include_str!("../wgsl/load/quad_u32.wgsl")),
    ("load/quad_u64", include_str!("../wgsl/load/quad_u64.wgsl")),
    ("quant/f32", include_str!("../wgsl/quant/f32.wgsl")),
    ("quant/f16", include_str!("../wgsl/quant/f16.wgsl")),
    ("quant/bf16", include_str!("../wgsl/quant/bf16.wgsl")),
    ("quant/q8_0", include_str!("../wgsl/quant/q8_0.wgsl")),
    ("quant/q8_m", include_str!("../wgsl/quant/q8_m.wgsl")),
    ("quant/q4_0", include_str!("../wgsl/quant/q4_0.wgsl")),
    ("quant/q4_1", include_str!("../wgsl/quant/q4_1.wgsl")),
    ("quant/q4_k", include_str!("../wgsl/quant/q4_k.wgsl")),
    ("quant/q6_k", include_str!("../wgsl/quant/q6_k.wgsl")),
    ("act/f32_store", include_str!("../wgsl/act/f32_store.wgsl")),
    ("act/q8_store", include_str!("../wgsl/act/q8_store.wgsl")),
    ("kv/f32", include_str!("../wgsl/kv/f32.wgsl")),
    ("kv/f16", include_str!("../wgsl/kv/f16.wgsl")),
    ("kv/f32_wide", include_str!("../wgsl/kv/f32_wide.wgsl")),
    ("kv/f16_wide", include_str!("../wgsl/kv/f16_wide.wgsl")),
];

/// The text of every file that kernels import.
pub(crate) fn texts() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|(_, text)| *text)
}

/// The kernel's text with its imports resolved. `choices` says which file stands behind an import name that is
/// not a file of `shared` (such as `quant`).
///
/// # Panics
/// When an import names nothing: the files are part of the program.
pub fn compose(kernel: &str, choices: &[(&str, &str)], constants: &[(&str, u32)]) -> String {
    let mut text = String::with_capacity(kernel.len() * 3);
    for (name, value) in constants {
        text.push_str(&format!("const {name} = {value}u;\n"));
    }
    paste(kernel, choices, &mut HashSet::new(), &mut text);
    text
}

fn paste(source: &str, choices: &[(&str, &str)], seen: &mut HashSet<String>, text: &mut String) {
    for line in source.lines() {
        let Some(name) = line.strip_prefix("#import ") else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        let file = match choices.iter().find(|(import, _)| *import == name) {
            Some((_, file)) => (*file).to_owned(),
            None => format!("shared/{name}"),
        };
        if seen.insert(file.clone()) {
            let (_, import) = FILES.iter().find(|(f, _)| *f == file).unwrap_or_else(|| panic!("no WGSL file {file}"));
            paste(import, choices, seen, text);
        }
    }
}
