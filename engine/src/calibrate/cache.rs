//! Calibrations of before, in a file of JSON that any number of programs may share.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use pp_shaders::{Profile, registry};
use serde::{Deserialize, Serialize};

use super::{Calibration, Shape, cores, driver_threads};
use crate::json_file;
use crate::pipeline::Device;

/// Version of the file's layout.
const VERSION: u32 = 1;
/// Most calibrations that are kept; the oldest are forgotten first.
pub(super) const ENTRIES_MAX: usize = 256;
/// Largest file that is read.
const BYTES_MAX: u64 = 4 << 20;

/// What a calibration is of, and what would make it another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Key {
    /// With the worker that has it, if one has.
    device: String,
    /// Name and version of the driver.
    driver: String,
    /// Of the kernels.
    profile: String,
    /// Threads of a software driver, and cores.
    threads: String,
    /// Digest of the shape.
    shape: String,
    /// Version of this program.
    program: String,
}

impl Key {
    pub(super) fn of(device: &Device, shape: &Shape) -> Key {
        let (driver, checked) = match device {
            Device::Gpu { adapter, checked, .. } => {
                let info = adapter.info();
                (format!("{} {} {}", info.name, info.driver, info.driver_info), *checked)
            }
            Device::Paced { pace, .. } => (format!("{pace:?}"), false),
            Device::Reference { .. } | Device::Remote(_) => (String::new(), false),
        };
        let threads = if device.is_software() { format!("{} of {}", driver_threads(), cores()) } else { String::new() };
        let profile = format!("{}{}", device.profile().name, if checked { ", checked" } else { "" });
        Key::new(device.id(), driver, profile, threads, shape)
    }

    /// What a worker says has its driver and threads in it: it looks whether they are others now.
    pub(super) fn of_worker(worker: &str, device: &Device, shape: &Shape) -> Key {
        let profile = device.profile().name.to_owned();
        Key::new(format!("{worker}: {}", device.id()), String::new(), profile, String::new(), shape)
    }

    fn new(device: String, driver: String, profile: String, threads: String, shape: &Shape) -> Key {
        let bytes = postcard::to_stdvec(shape).expect("plain data always has an encoding");
        let shape = blake3::hash(&bytes).to_hex()[..32].to_owned();
        Key { device, driver, profile, threads, shape, program: program().to_owned() }
    }
}

/// The program's version, and a digest of its kernels and their sizes: other kernels take other times.
fn program() -> &'static str {
    static PROGRAM: OnceLock<String> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let mut hasher = blake3::Hasher::new();
        for text in registry::texts() {
            hasher.update(text.as_bytes()).update(&[0]);
        }
        hasher.update(format!("{:?}", Profile::ALL).as_bytes());
        format!("{} {}", env!("CARGO_PKG_VERSION"), &hasher.finalize().to_hex()[..32])
    })
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Content {
    version: u32,
    /// Oldest first.
    calibrations: Vec<Entry>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Entry {
    key: Key,
    calibration: Calibration,
}

#[derive(Debug)]
pub(super) struct Cache {
    file: Option<PathBuf>,
    known: Vec<Entry>,
}

impl Cache {
    pub(super) fn new(file: Option<PathBuf>) -> Cache {
        let known = file.as_deref().map(read).unwrap_or_default();
        Cache { file, known }
    }

    #[cfg(test)]
    pub(super) fn write_to(&mut self, file: PathBuf) {
        self.file = Some(file);
    }

    pub(super) fn get(&self, key: &Key) -> Option<Calibration> {
        self.known.iter().rev().find(|entry| entry.key == *key).map(|entry| entry.calibration.clone())
    }

    /// Keeps it, and writes it down if it can.
    pub(super) fn put(&mut self, key: Key, calibration: Calibration) {
        // Others may have written meanwhile.
        if let Some(file) = &self.file {
            let others = read(file);
            self.known.retain(|entry| others.iter().all(|other| other.key != entry.key));
            self.known.extend(others);
        }
        self.known.retain(|entry| entry.key != key);
        self.known.push(Entry { key, calibration });
        self.known.drain(..self.known.len().saturating_sub(ENTRIES_MAX));
        if let Some(file) = &self.file
            && let Err(error) = self.write(file)
        {
            tracing::debug!(%error, file = %file.display(), "calibrations were not written down");
        }
    }

    fn write(&self, file: &Path) -> std::io::Result<()> {
        json_file::write(file, &Content { version: VERSION, calibrations: self.known.clone() })
    }
}

/// What a file holds; nothing where it is not there, not whole, or not of this version.
fn read(file: &Path) -> Vec<Entry> {
    let content: Content = json_file::read(file, BYTES_MAX).unwrap_or_default();
    if content.version == VERSION { content.calibrations } else { Vec::new() }
}
