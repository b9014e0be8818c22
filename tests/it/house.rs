//! What ARCHITECTURE.md says of the house, checked.

use std::path::Path;

fn manifest(package: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(package).join("Cargo.toml");
    std::fs::read_to_string(path).unwrap()
}

/// The dependencies of a package that it is built with, tests apart.
fn dependencies(package: &str) -> Vec<String> {
    let text = manifest(package);
    let section = text.split("\n[").find(|section| section.starts_with("dependencies]")).unwrap_or_default();
    let lines = section.lines().skip(1).filter(|line| line.contains('='));
    lines.map(|line| line.split(['.', ' ', '=']).next().unwrap().to_owned()).collect()
}

#[test]
fn packages_know_only_those_below_them() {
    let own = |package: &str| {
        let mut own: Vec<String> = dependencies(package).into_iter().filter(|name| name.starts_with("pp-")).collect();
        own.sort();
        own
    };
    assert_eq!(own("shaders"), Vec::<String>::new(), "shaders is a leaf");
    assert_eq!(own("transport"), Vec::<String>::new(), "transport is a leaf");
    assert_eq!(own("engine"), ["pp-shaders", "pp-transport"], "engine knows shaders and transport");
    assert!(own("cli").iter().all(|name| name != "pp-shaders"), "cli reaches shaders through engine");
    assert_eq!(own("."), ["pp-cli"], "the program is cli's");
}

#[test]
fn leaves_know_neither_devices_nor_the_command_line() {
    for package in ["shaders", "transport"] {
        for name in ["wgpu", "clap", "indicatif"] {
            assert!(!dependencies(package).iter().any(|d| d == name), "{package} must not depend on {name}");
        }
    }
    assert!(!dependencies("shaders").iter().any(|d| d == "tokio"), "shaders must not depend on tokio");
    for name in ["clap", "tokio", "quinn", "indicatif", "comfy-table"] {
        assert!(!dependencies("engine").iter().any(|d| d == name), "engine must not depend on {name}");
    }
}

fn sources(folder: &Path, ending: &str, found: &mut Vec<(String, String)>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, ending, found);
        } else if path.extension().is_some_and(|e| e == ending) {
            found.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
        }
    }
}

#[test]
fn the_engine_is_synchronous_and_silent() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("engine/src"), "rs", &mut files);
    assert!(files.len() > 20, "the sources were found");
    for (path, text) in files {
        for word in ["async fn ", "println!(", "eprintln!("] {
            assert!(!text.contains(word), "{path} has {word}");
        }
    }
}

#[test]
fn kernels_are_files_without_conditional_text() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    sources(&root.join("shaders/wgsl"), "wgsl", &mut files);
    assert!(files.len() > 20, "the sources were found");
    for (path, text) in files {
        assert!(text.starts_with("//"), "{path} opens with what it computes");
        assert!(!text.contains("#if"), "{path}: what varies is another file behind an import, or a constant");
    }
}
