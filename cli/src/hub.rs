//! Models of the Hugging Face hub: what they are called, which of a repository's files make a model, and where the
//! standard cache has them.
//!
//! The cache is the one that Hugging Face's own libraries use: `models--OWNER--NAME/refs/REVISION` names a commit,
//! `snapshots/COMMIT` has its files.

pub mod content;

use std::path::{Path, PathBuf};

use hf_hub::{Cache, Repo, RepoType};
use thiserror::Error;

/// Of several GGUF files the one with this in its name is taken, where nothing else is asked for.
const USUAL_QUANT: &str = "Q4_K_M";
/// What this program reads of a repository beside weights.
const SIDE_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
];

/// `OWNER/NAME`, with a revision and a choice of file where they are given: `OWNER/NAME@REVISION:Q4_K_M`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubName {
    /// `OWNER/NAME`
    pub repo: String,
    /// A branch, a tag or a commit.
    pub revision: String,
    /// A file, or a part of its name such as `Q4_K_M`.
    pub file: Option<String>,
}

/// Why a name or a repository is of no use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum HubError {
    #[error("`{name}` is no name of a model on the hub: expected OWNER/NAME, OWNER/NAME:Q4_K_M or OWNER/NAME@REVISION")]
    Name { name: String },
    #[error("{repo} has several models: {}; say which, for instance {repo}:{}", .files.join(", "), .files[0])]
    Several { repo: String, files: Vec<String> },
    #[error("{repo} has no file like `{file}`; it has {}", .files.join(", "))]
    NoSuchFile { repo: String, file: String, files: Vec<String> },
    #[error("{repo} has neither GGUF files nor safetensors with a config.json")]
    NoModel { repo: String },
}

impl HubName {
    /// Reads a name.
    ///
    /// # Errors
    /// [`HubError::Name`].
    pub fn parse(text: &str) -> Result<HubName, HubError> {
        let (rest, file) = match text.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (text, None),
        };
        let (repo, revision) = rest.split_once('@').unwrap_or((rest, "main"));
        let is_word = |word: &str| {
            !word.is_empty()
                && !word.starts_with(['.', '-'])
                && !word.contains("--")
                && !word.contains("..")
                && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let is_repo = repo.split_once('/').is_some_and(|(owner, name)| is_word(owner) && is_word(name));
        if is_repo && revision.split('/').all(is_word) && file.is_none_or(is_safe) {
            return Ok(HubName { repo: repo.to_owned(), revision: revision.to_owned(), file: file.map(str::to_owned) });
        }
        Err(HubError::Name { name: text.to_owned() })
    }

    /// As the crate calls it.
    pub fn repo(&self) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, self.revision.clone())
    }

    /// The files of the model among all of the repository's, the one to open first.
    ///
    /// # Errors
    /// [`HubError`], unless there is exactly one model that could be meant.
    pub fn files(&self, all: &[String]) -> Result<Vec<String>, HubError> {
        let mut all: Vec<String> = all.iter().filter(|name| is_safe(name)).cloned().collect();
        all.sort();
        let ggufs: Vec<String> = all.iter().filter(|name| is_gguf_model(name)).cloned().collect();
        if !ggufs.is_empty() {
            return self.gguf(ggufs);
        }
        let here = |name: &&String| !name.contains('/');
        let weights: Vec<String> =
            all.iter().filter(here).filter(|name| name.ends_with(".safetensors")).cloned().collect();
        if weights.is_empty() || !all.iter().any(|name| name == "config.json") {
            return Err(HubError::NoModel { repo: self.repo.clone() });
        }
        if let Some(file) = &self.file {
            return Err(HubError::NoSuchFile { repo: self.repo.clone(), file: file.clone(), files: weights });
        }
        let sides = SIDE_FILES.iter().map(|name| (*name).to_owned()).filter(|name| all.contains(name));
        Ok(sides.chain(weights).collect())
    }

    fn gguf(&self, ggufs: Vec<String>) -> Result<Vec<String>, HubError> {
        let like = |wanted: &str| -> Vec<&String> {
            let exact: Vec<&String> = ggufs.iter().filter(|name| *name == wanted).collect();
            let wanted = wanted.to_lowercase();
            let alike = || ggufs.iter().filter(|name| name.to_lowercase().contains(&wanted)).collect();
            if exact.is_empty() { alike() } else { exact }
        };
        let mut found = match &self.file {
            Some(file) => like(file),
            None => ggufs.iter().collect(),
        };
        if let (true, Some(file)) = (found.is_empty(), &self.file) {
            return Err(HubError::NoSuchFile { repo: self.repo.clone(), file: file.clone(), files: models(&ggufs) });
        }
        let several = |found: &[&String]| found.iter().any(|name| stem(name) != stem(found[0]));
        if several(&found) && self.file.is_none() && !like(USUAL_QUANT).is_empty() {
            found = like(USUAL_QUANT);
        }
        if several(&found) {
            let files: Vec<String> = found.into_iter().cloned().collect();
            return Err(HubError::Several { repo: self.repo.clone(), files: models(&files) });
        }
        // All parts of a file in parts, also where one of them was named.
        let stem_of = stem(found[0]);
        Ok(ggufs.iter().filter(|name| stem(name) == stem_of).cloned().collect())
    }
}

/// Folders in the cache at `hub` that models may lie in, as files or as folders.
pub fn folders(hub: &Path) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    let repos = inside(hub).into_iter().filter(|path| file_name(path).starts_with("models--"));
    for snapshots in repos.map(|repo| repo.join("snapshots")) {
        let commits = inside(&snapshots);
        folders.push(snapshots);
        for commit in commits {
            let within = inside(&commit);
            folders.push(commit);
            folders.extend(within);
        }
    }
    folders
}

/// Has the name of a revision in the cache lead to a commit.
///
/// # Errors
/// The system's; it leads where it did, then.
pub fn refer(reference: &Path, commit: &str) -> std::io::Result<()> {
    std::fs::create_dir_all(reference.parent().unwrap_or(reference))?;
    let unfinished = reference.with_extension(format!("{}.tmp", std::process::id()));
    let written = std::fs::write(&unfinished, commit).and_then(|()| std::fs::rename(&unfinished, reference));
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The folders in a folder, by name.
fn inside(folder: &Path) -> Vec<PathBuf> {
    const FOLDERS_MAX: usize = 10_000;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(FOLDERS_MAX);
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}

/// Whether a name from elsewhere stays in the folder that it is put in.
pub fn is_safe(name: &str) -> bool {
    let parts = || name.split('/');
    !name.contains(['\\', '\0'])
        && name.len() < 512
        && parts().all(|part| !part.is_empty() && part != "." && part != "..")
}

/// GGUF files that are no model of their own are projectors of images.
fn is_gguf_model(name: &str) -> bool {
    name.to_lowercase().ends_with(".gguf") && !name.to_lowercase().contains("mmproj")
}

/// The name without `-00001-of-00003.gguf`.
fn stem(name: &str) -> &str {
    let base = name.get(..name.len().saturating_sub(5)).unwrap_or(name);
    let Some((before, count)) = base.rsplit_once("-of-") else { return base };
    let Some((stem, part)) = before.rsplit_once('-') else { return base };
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    if is_number(count) && is_number(part) { stem } else { base }
}

/// The first file of each model.
fn models(files: &[String]) -> Vec<String> {
    let mut firsts: Vec<String> = Vec::new();
    for file in files {
        if firsts.iter().all(|first| stem(first) != stem(file)) {
            firsts.push(file.clone());
        }
    }
    firsts
}

/// What of a model is opened: its first GGUF file, or the folder of its safetensors.
pub fn entry(snapshot: &Path, files: &[String]) -> PathBuf {
    match files.first() {
        Some(first) if is_gguf_model(first) => snapshot.join(first),
        _ => snapshot.to_owned(),
    }
}

/// The model in the cache at `folder`; nothing where the repository, or what is meant of it, is not there.
///
/// # Errors
/// [`HubError::Several`].
pub fn cached(folder: &Path, name: &HubName) -> Result<Option<PathBuf>, HubError> {
    let cache = Cache::new(folder.to_owned());
    let refs = folder.join(name.repo().folder_name()).join("refs").join(&name.revision);
    let commit = std::fs::read_to_string(refs).ok().map(|commit| commit.trim().to_owned());
    let commit = commit.filter(|commit| is_safe(commit)).unwrap_or_else(|| name.revision.clone());
    let snapshot = cache.repo(name.repo()).pointer_path(&commit);
    let mut all = Vec::new();
    list(&snapshot, "", 0, &mut all);
    match name.files(&all) {
        Ok(files) => Ok(Some(entry(&snapshot, &files))),
        Err(error @ HubError::Several { .. }) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Files of a folder and of those in it, by their names from there.
fn list(folder: &Path, before: &str, depth: usize, all: &mut Vec<String>) {
    const DEPTH_MAX: usize = 4;
    const FILES_MAX: usize = 10_000;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), format!("{before}{}", entry.file_name().to_string_lossy()));
        if path.is_dir() && depth < DEPTH_MAX {
            list(&path, &format!("{name}/"), depth + 1, all);
        } else if path.is_file() && all.len() < FILES_MAX {
            all.push(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn name(text: &str) -> HubName {
        HubName::parse(text).unwrap()
    }

    #[test]
    fn names_are_owner_and_name_with_revision_and_file() {
        let found = name("Qwen/Qwen3-0.6B-GGUF@refs/pr/1:Q8_0");
        assert_eq!((found.repo.as_str(), found.revision.as_str()), ("Qwen/Qwen3-0.6B-GGUF", "refs/pr/1"));
        assert_eq!(found.file.as_deref(), Some("Q8_0"));
        assert_eq!((name("a/b").revision.as_str(), name("a/b").file), ("main", None));
        for text in
            ["", "a", "a/", "/b", "a/b/c", "../b", "a/..", "a/b@", "a/b@../x", "a/b:", "a/b:../x", "a b/c", "a/b@/"]
        {
            assert!(matches!(HubName::parse(text), Err(HubError::Name { .. })), "{text:?}");
        }
    }

    #[test]
    fn of_several_quantisations_the_usual_one_or_the_named_one_is_taken() {
        let all = names(&["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf"]);
        assert_eq!(name("a/b").files(&all).unwrap(), ["m-Q4_K_M.gguf"]);
        assert_eq!(name("a/b:q8_0").files(&all).unwrap(), ["m-Q8_0.gguf"]);
        assert_eq!(name("a/b:m-Q8_0.gguf").files(&all).unwrap(), ["m-Q8_0.gguf"]);
        let error = name("a/b:Q2_K").files(&all).unwrap_err();
        assert_eq!(error.to_string(), "a/b has no file like `Q2_K`; it has m-Q4_K_M.gguf, m-Q8_0.gguf");
        let error = name("a/b").files(&names(&["m-Q5_0.gguf", "m-Q8_0.gguf"])).unwrap_err();
        assert!(
            error.to_string().contains("m-Q5_0.gguf, m-Q8_0.gguf; say which, for instance a/b:m-Q5_0.gguf"),
            "{error}"
        );
        assert_eq!(name("a/b").files(&names(&["only.gguf"])).unwrap(), ["only.gguf"]);
    }

    #[test]
    fn files_in_parts_come_whole() {
        let parts = ["q8/m-Q8_0-00001-of-00002.gguf", "q8/m-Q8_0-00002-of-00002.gguf"];
        let all = names(&[parts[1], parts[0], "m-Q4_0.gguf"]);
        assert_eq!(name("a/b:Q8_0").files(&all).unwrap(), parts);
        assert_eq!(name(&format!("a/b:{}", parts[1])).files(&all).unwrap(), parts);
        assert_eq!(entry(Path::new("/s"), &name("a/b:Q8_0").files(&all).unwrap()), Path::new("/s").join(parts[0]));
    }

    #[test]
    fn a_folder_is_its_configuration_and_its_weights() {
        let all =
            names(&["config.json", "model-00001-of-00001.safetensors", "pytorch_model.bin", "onnx/model.safetensors"]);
        let files = name("a/b").files(&all).unwrap();
        assert_eq!(files, ["config.json", "model-00001-of-00001.safetensors"]);
        assert_eq!(entry(Path::new("/s"), &files), Path::new("/s"));
        assert!(matches!(name("a/b").files(&all[1..]), Err(HubError::NoModel { .. })));
        assert!(matches!(name("a/b:Q8_0").files(&all), Err(HubError::NoSuchFile { .. })));
    }

    #[test]
    fn names_that_lead_elsewhere_are_not_taken() {
        let all = names(&["../m.gguf", "/m.gguf", "a/../../m.gguf", "a\\..\\m.gguf", "", "a//m.gguf"]);
        assert!(matches!(name("a/b").files(&all), Err(HubError::NoModel { .. })));
    }

    #[test]
    fn a_model_is_found_in_the_cache_by_revision_or_commit() {
        let folder = tempfile::tempdir().unwrap();
        let repo = folder.path().join("models--a--b");
        let snapshot = repo.join("snapshots/abc123");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(repo.join("refs")).unwrap();
        std::fs::write(repo.join("refs/main"), "abc123\n").unwrap();
        let find = |text: &str| cached(folder.path(), &name(text));
        assert_eq!(find("a/b"), Ok(None), "no file yet");
        std::fs::write(snapshot.join("m-Q8_0.gguf"), "x").unwrap();
        for text in ["a/b", "a/b@abc123", "a/b:Q8_0"] {
            assert_eq!(find(text), Ok(Some(snapshot.join("m-Q8_0.gguf"))), "{text}");
        }
        assert_eq!([find("a/c"), find("a/b:Q4_0"), find("a/b@other")], [Ok(None), Ok(None), Ok(None)]);
        std::fs::write(snapshot.join("m-Q5_0.gguf"), "x").unwrap();
        assert!(matches!(find("a/b"), Err(HubError::Several { .. })));
        std::fs::write(repo.join("refs/main"), "../../elsewhere").unwrap();
        assert_eq!(find("a/b"), Ok(None));
    }
}
