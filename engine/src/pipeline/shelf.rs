//! Stages that outlive their pipeline: when another stage is lost, they wait here, with their weights and pages, for the
//! pipeline in its place.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pp_shaders::Profile;

use super::{Device, StageReport};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::supplied::Origins;
use crate::digest::Digest;
use crate::layout::{Held, StageLayout, StageOptions, StageSpec};
use crate::stage::Stage;

/// What a stage must be to take another one's place.
#[derive(Clone)]
pub struct Key {
    model: (Arc<Checkpoint>, Option<Digest>),
    spec: StageSpec,
    options: StageOptions,
    device: String,
    is_software: bool,
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
            is_software: device.is_software(),
            profile: *device.profile(),
        }
    }

    /// Whether a stage of the one is, or may become, a stage of the other: on the same device, of the same model, with the
    /// same options.
    fn is_alike(&self, other: &Key) -> bool {
        let same_model =
            Arc::ptr_eq(&self.model.0, &other.model.0) || (self.model.1.is_some() && self.model.1 == other.model.1);
        let rest = |key: &Key| (key.options, key.device.clone(), key.profile);
        same_model && rest(self) == rest(other)
    }

    /// How good a stage of `self` is for one of `other`: layers that both have; more where it is the very one.
    fn worth(&self, other: &Key) -> Option<usize> {
        let layers = self.spec.overlap(&other.spec).len();
        let is_it = self.spec == other.spec;
        (layers > 0 && self.is_alike(other)).then_some(if is_it { usize::MAX } else { layers })
    }
}

/// A stage that is loaded.
pub struct Kept {
    /// The stage; it knows no sequence.
    pub stage: Stage,
    /// What it says when it is ready.
    pub report: StageReport,
    /// The epoch of the pipeline whose keys and values it has, …
    pub pages_of: Option<u64>,
    /// … and the layers that it has them of.
    pub pages: Range<usize>,
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

    /// Takes a stage for each of `wanted`, where there is one: the very one, or one that has some of its layers and is to
    /// become it ([`Stage::recut`]). All others are closed: their memory is wanted. The pipeline goes on behind the epoch
    /// `after` of another, if that is given; of layers whose keys and values are not of then, none are there.
    pub fn assign(&self, wanted: &[Key], after: Option<u64>) -> Vec<Option<Kept>> {
        let pairs = pairs(&self.kept(), wanted);
        let mut all: Vec<Option<(Key, Kept)>> = std::mem::take(&mut *self.kept()).into_iter().map(Some).collect();
        let mut take = |(at, key): (usize, &Key)| {
            let (_, mut kept) = all[at].take().expect("a stage is taken once");
            if after.is_none() || kept.pages_of != after {
                kept.pages = 0..0;
            }
            let pages = key.spec.common(&kept.pages);
            kept.pages = pages.clone();
            kept.report = StageReport { kept: pages, load_seconds: 0.0, read_bytes: 0, ..kept.report };
            kept.report.origins = Origins::default();
            kept
        };
        let taken = pairs.into_iter().zip(wanted).map(|(at, key)| at.map(|at| take((at, key)))).collect();
        // Before anything is loaded.
        drop(all);
        taken
    }

    /// What [`Shelf::assign`] would take for each: what is there of its weights.
    pub fn held(&self, wanted: &[(&Key, &StageLayout)]) -> Vec<Held> {
        let all = self.kept();
        let keys: Vec<Key> = wanted.iter().map(|(key, _)| (*key).clone()).collect();
        let held = |(at, (_, layout)): (Option<usize>, &(&Key, &StageLayout))| {
            at.map_or_else(Held::default, |at| layout.held_by(all[at].1.stage.layout()))
        };
        pairs(&all, &keys).into_iter().zip(wanted).map(held).collect()
    }

    /// Bytes of the host's memory that its stages take: those of software devices, and logs of what they have handed on.
    pub fn host_bytes(&self) -> u64 {
        let bytes = |(key, kept): &(Key, Kept)| {
            kept.stage.boundary_bytes() + if key.is_software { kept.stage.backend().allocated_bytes() } else { 0 }
        };
        self.kept().iter().map(bytes).sum()
    }

    /// Closes the stage of that place, as if it had been lost; says whether there was one.
    pub fn lose(&self, stage: usize) -> bool {
        let lost: Vec<_> = self.kept().extract_if(.., |(key, _)| key.spec.index == stage).collect();
        !lost.is_empty()
    }

    /// Closes everything.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.kept());
        drop(all);
    }
}

/// The place on the shelf of what is best for each that is wanted: none is taken twice, and the best pairs come first.
fn pairs(all: &[(Key, Kept)], wanted: &[Key]) -> Vec<Option<usize>> {
    let mut worths: Vec<(usize, usize, usize)> = Vec::new();
    for (at, (key, _)) in all.iter().enumerate() {
        let worth = |(place, other): (usize, &Key)| key.worth(other).map(|worth| (worth, at, place));
        worths.extend(wanted.iter().enumerate().filter_map(worth));
    }
    worths.sort_by(|a, b| b.cmp(a));
    let (mut found, mut taken) = (vec![None; wanted.len()], vec![false; all.len()]);
    for (_, at, place) in worths {
        if found[place].is_none() && !taken[at] {
            (found[place], taken[at]) = (Some(at), true);
        }
    }
    found
}
