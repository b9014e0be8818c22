//! A model whose weights come from elsewhere, tensor by tensor, as they are wanted.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::{AddAssign, Deref};
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::{Checkpoint, GenerationDefaults, Source, TensorInfo};
use crate::manifest::Manifest;

/// Where the bytes of a stage's weights were, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origins {
    /// In the model's own files.
    pub file_bytes: u64,
    /// In the tensor cache.
    pub cache_bytes: u64,
    /// On other hosts: all that was received.
    pub network_bytes: u64,
}

impl Origins {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.file_bytes + self.cache_bytes + self.network_bytes
    }
}

impl AddAssign for Origins {
    fn add_assign(&mut self, other: Origins) {
        self.file_bytes += other.file_bytes;
        self.cache_bytes += other.cache_bytes;
        self.network_bytes += other.network_bytes;
    }
}

/// What bounds a tensor cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Bound {
    /// What it may hold.
    Cap,
    /// What the disk holds.
    Disk,
}

/// Why a tensor does not come.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum SupplyError {
    #[error("loading was cancelled")]
    Cancelled,
    #[error("the stages' tensors take {needed} bytes, and the tensor cache at {folder} has room for {room}")]
    NoRoom { folder: String, needed: u64, room: u64, bound: Bound },
    #[error("{message}")]
    Failed { message: String },
}

/// Brings tensors.
pub trait Supplier: Debug + Send + Sync {
    /// The bytes of a tensor, which are what the manifest says. Waits for them, and asks `go_on` now and then with what
    /// has come so far.
    ///
    /// # Errors
    /// [`SupplyError`], [`SupplyError::Cancelled`] when `go_on` says no.
    fn tensor(&self, tensor: &TensorInfo, go_on: &mut dyn FnMut(Origins) -> bool) -> Result<Mmap, SupplyError>;

    /// Where what was brought so far came from.
    fn origins(&self) -> Origins;
}

/// The bytes of a tensor, for as long as somebody holds them.
#[derive(Debug)]
pub enum TensorBytes<'a> {
    /// In the model's files.
    Mapped(&'a [u8]),
    /// In a file of its own.
    Held(Mmap),
}

impl Deref for TensorBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            TensorBytes::Mapped(bytes) => bytes,
            TensorBytes::Held(map) => map,
        }
    }
}

impl Checkpoint {
    /// The model that `manifest` describes, called `name` in messages. It has neither files nor a tokenizer, and without a
    /// supplier no weights.
    pub fn supplied(manifest: &Manifest, name: &str, supplier: Option<Arc<dyn Supplier>>) -> Checkpoint {
        let infos = manifest.tensors.iter().map(|entry| {
            let info = TensorInfo {
                name: entry.name.clone(),
                source_name: entry.name.clone(),
                dtype: entry.dtype,
                shape: entry.shape.clone(),
                file: 0,
                offset: 0,
                bytes: entry.bytes(),
            };
            (entry.name.clone(), info)
        });
        Checkpoint {
            config: manifest.config.clone(),
            container: manifest.container,
            path: Path::new(name).to_owned(),
            generation: GenerationDefaults::default(),
            files: Vec::new(),
            tensors: infos.collect::<BTreeMap<_, _>>(),
            unsupported: manifest.unsupported.clone(),
            source: Source::Supplied(supplier),
        }
    }

    /// The bytes of a tensor ([`Checkpoint::data`]), waited for where they come from elsewhere.
    ///
    /// # Errors
    /// As [`Supplier::tensor`].
    pub fn read(
        &self,
        tensor: &TensorInfo,
        go_on: &mut dyn FnMut(Origins) -> bool,
    ) -> Result<TensorBytes<'_>, SupplyError> {
        match &self.source {
            Source::Supplied(Some(supplier)) => supplier.tensor(tensor, go_on).map(TensorBytes::Held),
            Source::Supplied(None) => {
                let message = format!("nobody brings the weights of {}", self.path.display());
                Err(SupplyError::Failed { message })
            }
            _ => Ok(TensorBytes::Mapped(self.data(tensor))),
        }
    }

    /// Where the weights were of which a reader has had `read_bytes`.
    pub fn origins(&self, read_bytes: u64) -> Origins {
        match &self.source {
            Source::Supplied(Some(supplier)) => supplier.origins(),
            Source::Supplied(None) => Origins::default(),
            _ => Origins { file_bytes: read_bytes, ..Origins::default() },
        }
    }
}
