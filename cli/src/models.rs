//! Where models are looked for, and where their digests are remembered.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::Result;
use pp_engine::checkpoint::Checkpoint;
use pp_engine::digest::{Digest, DigestError, Digests};

use crate::hub::{self, HubName};
use crate::output::Out;
use crate::output::progress::Steps;
use crate::{cancel, errors};

/// File name of the model that `scripts/demo.sh` fetches.
pub const DEMO: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The parts of the environment that say where models are.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// `$PP_MODEL`
    pub model: Option<String>,
    /// The models folder, if there can be one.
    pub folder: Option<PathBuf>,
    /// The cache of the Hugging Face hub, if there can be one.
    pub hub: Option<PathBuf>,
    /// Where digests of models are remembered, if that can be.
    pub digests: Option<PathBuf>,
    /// Where tensors are kept that came from other machines, if that can be.
    pub tensors: Option<PathBuf>,
    /// Where the tensors of models are listed by content, if that can be.
    pub manifests: Option<PathBuf>,
    /// Where it is kept what devices were measured to take, if that can be.
    pub calibrations: Option<PathBuf>,
    /// Where it is kept which files of the hub are what the hub says, if that can be.
    pub pulled: Option<PathBuf>,
}

impl Places {
    /// As the environment says.
    pub fn from_env() -> Places {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let model = var("PP_MODEL").map(|value| value.to_string_lossy().into_owned());
        let place = |xdg: &str, in_home: &str, name: &str| {
            let home = || var("HOME").map(|home| PathBuf::from(home).join(in_home));
            var(xdg).map(PathBuf::from).or_else(home).map(|place| place.join("pp-run").join(name))
        };
        let folder = var("PP_MODELS").map(PathBuf::from).or_else(|| place("XDG_DATA_HOME", ".local/share", "models"));
        let cache = |name: &str| place("XDG_CACHE_HOME", ".cache", name);
        Places {
            model,
            folder,
            hub: hub(&var),
            digests: cache("digests.json"),
            tensors: cache("tensors"),
            manifests: cache("manifests"),
            calibrations: cache("calibration.json"),
            pulled: cache("pulled.json"),
        }
    }

    /// The path of the model called `name`: an existing path, else a name in the models folder. Without a name:
    /// `$PP_MODEL`, else the demo model if it is there.
    ///
    /// # Errors
    /// When there is no such model; says what there is and how to get one.
    pub fn find(&self, name: Option<&str>) -> Result<PathBuf> {
        if let Some(name) = name.or(self.model.as_deref()) {
            return self.named(name)?.ok_or_else(|| {
                let path =
                    if name.contains('/') || name.ends_with(".gguf") { "no such file or folder, and " } else { "" };
                let pull = HubName::parse(name).map_or(String::new(), |_| format!("; get it with pp-run pull {name}"));
                errors::model(format!("model `{name}`: {path}no model of that name{pull}\n{}", self.what_there_is()))
            });
        }
        let demo = self.folder.as_ref().map(|folder| folder.join(DEMO)).filter(|path| path.is_file());
        demo.ok_or_else(|| errors::usage(format!("no model was given with -m\n{}", self.what_there_is())))
    }

    /// The folders in which a model is looked for by its content.
    pub fn searched(&self) -> Vec<PathBuf> {
        self.folder.iter().cloned().chain(self.hub.iter().flat_map(|hub| hub::folders(hub))).collect()
    }

    /// The model called `name` in the models folder or the hub's cache, and nowhere else.
    ///
    /// # Errors
    /// When several may be meant.
    pub fn kept(&self, name: &str) -> Result<Option<PathBuf>> {
        let is_plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', '\0']);
        let in_folder = |folder: &PathBuf| [folder.join(name), folder.join(format!("{name}.gguf"))];
        let found = self.folder.iter().filter(|_| is_plain).flat_map(in_folder).find(|path| path.exists());
        match (found, &self.hub, HubName::parse(name)) {
            (None, Some(hub), Ok(name)) => hub::cached(hub, &name).map_err(|error| errors::usage(error.to_string())),
            (found, ..) => Ok(found),
        }
    }

    fn named(&self, name: &str) -> Result<Option<PathBuf>> {
        let path = PathBuf::from(name);
        if name.is_empty() || path.exists() {
            return Ok(Some(path).filter(|_| !name.is_empty()));
        }
        let in_folder = |folder: &PathBuf| [folder.join(name), folder.join(format!("{name}.gguf"))];
        let found = self.folder.iter().flat_map(in_folder).find(|path| path.exists());
        match (found, &self.hub, HubName::parse(name)) {
            (None, Some(hub), Ok(name)) => hub::cached(hub, &name).map_err(|error| errors::usage(error.to_string())),
            (found, ..) => Ok(found),
        }
    }

    fn what_there_is(&self) -> String {
        let Some(folder) = &self.folder else {
            return "there is no models folder (set PP_MODELS or HOME); the demo model comes with scripts/demo.sh"
                .to_owned();
        };
        let names = models_in(folder);
        let found = if names.is_empty() { "holds no model".to_owned() } else { format!("holds {}", names.join(", ")) };
        format!("the models folder {} {found}; scripts/demo.sh fetches the demo model", folder.display())
    }
}

/// The cache of the hub, as Hugging Face's own libraries find it.
fn hub(var: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let home = || var("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = || var("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).map(|cache| cache.join("huggingface"));
    let in_home = || var("HF_HOME").map(PathBuf::from).or_else(cache).map(|home| home.join("hub"));
    var("HF_HUB_CACHE").map(PathBuf::from).or_else(in_home)
}

/// The digest of a model; one that was never seen before is read, all of it.
///
/// # Errors
/// When its files cannot be read, or the user wants it to end.
pub fn digest_of(checkpoint: &Checkpoint, out: &Out) -> Result<Digest> {
    const MIB: u64 = 1 << 20;
    let mut steps = Steps::new(out, "digest", "MiB");
    let mut digests = Digests::new(Places::from_env().digests);
    let found = digests.of(checkpoint, &mut |done, total| {
        steps.update((done / MIB) as usize, (total / MIB) as usize);
        !cancel::flag().load(Ordering::Relaxed)
    });
    steps.finish();
    found.map_err(|error| match error {
        DigestError::Cancelled => errors::cancelled(),
        error => errors::model(error.to_string()),
    })
}

/// GGUF files and folders with a config.json.
pub fn models_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| {
            let path = entry.path();
            path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) || path.join("config.json").is_file()
        })
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, Places) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("one.gguf"), "x").unwrap();
        std::fs::create_dir(dir.path().join("two")).unwrap();
        std::fs::write(dir.path().join("two/config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("notes.txt"), "x").unwrap();
        let places = Places { folder: Some(dir.path().to_owned()), ..Places::default() };
        (dir, places)
    }

    #[test]
    fn a_name_is_a_file_a_gguf_or_a_folder_of_the_models_folder() {
        let (dir, places) = folder();
        for (name, found) in [("one", "one.gguf"), ("one.gguf", "one.gguf"), ("two", "two")] {
            assert_eq!(places.find(Some(name)).unwrap(), dir.path().join(found));
        }
        let path = dir.path().join("one.gguf");
        assert_eq!(places.find(path.to_str()).unwrap(), path, "a path is taken as it is");
    }

    #[test]
    fn an_unknown_name_lists_what_there_is() {
        let (_dir, places) = folder();
        let message = places.find(Some("three")).unwrap_err().to_string();
        assert!(message.contains("`three`"), "{message}");
        assert!(message.contains("holds one.gguf, two;"), "{message}");
        assert!(message.contains("scripts/demo.sh"), "{message}");
    }

    #[test]
    fn without_a_name_it_is_the_environments_then_the_demo() {
        let (dir, mut places) = folder();
        let message = places.find(None).unwrap_err().to_string();
        assert!(message.contains("-m") && message.contains("scripts/demo.sh"), "{message}");
        std::fs::write(dir.path().join(DEMO), "x").unwrap();
        assert_eq!(places.find(None).unwrap(), dir.path().join(DEMO));
        places.model = Some("one".into());
        assert_eq!(places.find(None).unwrap(), dir.path().join("one.gguf"));
        assert!(Places::default().find(None).unwrap_err().to_string().contains("PP_MODELS"));
    }
}
