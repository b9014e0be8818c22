//! A disk that is as small as a test wants: a tmpfs that only programs see which are told to.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The disk; it goes with this.
pub struct Disk {
    /// A process that does nothing but be where the disk is mounted.
    holder: Child,
    folder: PathBuf,
}

impl Disk {
    /// Of so many bytes, mounted on `folder`; nothing where that is not allowed, which is said in the name of `test`.
    pub fn new(folder: &Path, bytes: u64, test: &str) -> Option<Disk> {
        std::fs::create_dir_all(folder).expect("room");
        let mount = "mount -t tmpfs -o size=$1 pp-run \"$2\" && echo mounted && exec sleep 3600";
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", mount, "sh", &bytes.to_string()]).arg(folder);
        let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let reason = match started {
            Ok(mut holder) => {
                let mut word = [0; 8];
                let mut told = holder.stdout.take().expect("piped");
                if told.read_exact(&mut word).is_ok() {
                    return Some(Disk { holder, folder: folder.to_owned() });
                }
                let output = holder.wait_with_output().expect("it ends");
                String::from_utf8_lossy(&output.stderr).trim().to_owned()
            }
            Err(error) => error.to_string(),
        };
        let said = format!("{test} was skipped: no disk can be mounted here ({reason})\n");
        std::io::stderr().write_all(said.as_bytes()).expect("stderr is there");
        None
    }

    /// The same program where the disk is.
    pub fn enter(&self, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.args(["-t", &self.holder.id().to_string(), "-m"]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside.stdin(Stdio::null());
        inside
    }

    /// The disk as this process sees it.
    pub fn folder(&self) -> PathBuf {
        let inside = self.folder.strip_prefix("/").expect("an absolute path");
        Path::new("/proc").join(self.holder.id().to_string()).join("root").join(inside)
    }

    /// It has so many bytes from now on.
    pub fn resize(&self, bytes: u64) {
        let mut mount = Command::new("mount");
        mount.args(["-o", &format!("remount,size={bytes}")]).arg(&self.folder);
        assert!(self.enter(&mount).status().expect("it starts").success());
    }

    /// Takes all of it that is free.
    pub fn fill(&self) {
        let mut filler = std::fs::File::create(self.folder().join("filler")).expect("a name is free");
        while filler.write_all(&[0; 4096]).is_ok() {}
    }

    /// Gives back what was taken.
    pub fn free(&self) {
        std::fs::remove_file(self.folder().join("filler")).expect("it is there");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
