//! What is said, appended to a file as readable text while it goes on.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::errors::usage;
use crate::output::Out;

/// A file that grows; readable by its owner only, where it is made.
pub struct Transcript {
    file: File,
    path: PathBuf,
    broken: bool,
}

impl Transcript {
    /// Appends to a file; says first with which model.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn open(path: &Path, model: &str) -> Result<Transcript> {
        let open = || -> io::Result<File> {
            let mut file = OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
            writeln!(file, "# {model}\n")?;
            Ok(file)
        };
        let file = open().map_err(|error| usage(format!("--transcript {}: {error}", path.display())))?;
        Ok(Transcript { file, path: path.to_owned(), broken: false })
    }

    /// Appends what somebody said. When that fails, says so once.
    pub fn said(&mut self, who: &str, text: &str, out: &Out) {
        self.append(&format!("## {who}\n\n{text}\n\n"), out);
    }

    /// Appends something that happened.
    pub fn note(&mut self, text: &str, out: &Out) {
        self.append(&format!("({text})\n\n"), out);
    }

    fn append(&mut self, text: &str, out: &Out) {
        if let Err(error) = self.file.write_all(text.as_bytes())
            && !std::mem::replace(&mut self.broken, true)
        {
            out.tell(&format!("the transcript {} is not written any more: {error}", self.path.display()));
        }
    }
}
