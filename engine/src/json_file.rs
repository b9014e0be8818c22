//! Files of JSON that any number of programs may share.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// What a file holds, of which at most `bytes_max` bytes are read; nothing where it is not there or not whole.
pub fn read<T: DeserializeOwned>(file: &Path, bytes_max: u64) -> Option<T> {
    let mut bytes = Vec::new();
    File::open(file).and_then(|file| file.take(bytes_max).read_to_end(&mut bytes)).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Writes all of it or nothing: under a name of its own first.
///
/// # Errors
/// Those of the system.
pub fn write<T: Serialize>(file: &Path, content: &T) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let unfinished = file.with_extension(format!("{}.tmp", std::process::id()));
    let mut to = File::create(&unfinished)?;
    let written = to.write_all(&serde_json::to_vec(content)?).and_then(|()| std::fs::rename(&unfinished, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}
