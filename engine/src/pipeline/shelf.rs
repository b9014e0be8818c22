//! Stages that outlive their pipeline: when another stage is lost, they wait here, with their weights and pages, for the
//! pipeline in its place.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pp_shaders::Profile;

use super::{Device, StageReport};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::supplied::Origins;
use crate::digest::Digest;
use crate::layout::{StageLayout, StageOptions, StageSpec};
use crate::stage::Stage;

/// What a stage must be to take another one's place.
#[derive(Clone)]
pub struct Key {
    model: (Arc<Checkpoint>, Option<Digest>),
    spec: StageSpec,
    options: StageOptions,
    device: String,
    profile: Profile,
}

impl Key {
    /// Of a stage of a model, which has that digest where it is known, on a device.
    pub fn new(checkpoint: &Arc<Checkpoint>, digest: Option<Digest>, layout: &StageLayout, device: &Device) -> Key {
        Key {
            model: (checkpoint.clone(), digest),
            spec: layout.spec.clone(),
            options: layout.options,
            device: device.id(),
            profile: *device.profile(),
        }
    }

    fn is_same(&self, other: &Key) -> bool {
        let same_model =
            Arc::ptr_eq(&self.model.0, &other.model.0) || (self.model.1.is_some() && self.model.1 == other.model.1);
        let rest = |key: &Key| (key.spec.clone(), key.options, key.device.clone(), key.profile);
        same_model && rest(self) == rest(other)
    }
}

/// A stage that is loaded.
pub struct Kept {
    /// The stage; it knows no sequence.
    pub stage: Stage,
    /// What it says when it is ready.
    pub report: StageReport,
    /// The epoch in which it last worked: it has the keys and values of that pipeline.
    pub pages_of: Option<u64>,
}

/// See above. Dropping it closes what is on it.
#[derive(Default)]
pub struct Shelf {
    kept: Mutex<Vec<(Key, Kept)>>,
}

impl fmt::Debug for Shelf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shelf").field("stages", &self.kept().len()).finish()
    }
}

impl Shelf {
    fn kept(&self) -> MutexGuard<'_, Vec<(Key, Kept)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a stage away; what its device still has of sequences is known by its pages only.
    pub fn put(&self, key: Key, mut kept: Kept) {
        kept.stage.forget_sequences();
        self.kept().push((key, kept));
    }

    /// The stage that can be taken for that one, if there is one, for a pipeline that goes on behind that epoch of another.
    pub fn take(&self, key: &Key, after: Option<u64>) -> Option<Kept> {
        let mut all = self.kept();
        let at = all.iter().position(|(other, _)| other.is_same(key))?;
        let (_, mut kept) = all.swap_remove(at);
        let has_pages = after.is_some() && kept.pages_of == after;
        let report = StageReport { kept: has_pages, load_seconds: 0.0, read_bytes: 0, ..kept.report };
        kept.report = StageReport { origins: Origins::default(), ..report };
        Some(kept)
    }

    /// Closes the stage of that place, as if it had been lost; says whether there was one.
    pub fn lose(&self, stage: usize) -> bool {
        let lost: Vec<_> = self.kept().extract_if(.., |(key, _)| key.spec.index == stage).collect();
        !lost.is_empty()
    }

    /// Closes all that none of these wants: its memory is wanted by those that are loaded.
    pub fn keep_only(&self, wanted: &[Key]) {
        let is_wanted = |(key, _): &(Key, Kept)| wanted.iter().any(|other| other.is_same(key));
        let unwanted: Vec<_> = self.kept().extract_if(.., |kept| !is_wanted(kept)).collect();
        drop(unwanted);
    }
}
