//! The folder in which a host keeps its identity.
//!
//! ```text
//! head     ca.key  ca.pem  head.key  head.pem  members
//! worker   ca.pem  worker.key  worker.pem  members
//! both     lock
//! ```
//!
//! Files are replaced whole: a temporary file is written, brought to the disk, and renamed. A certificate is written
//! after all that it needs, so a host that has one has everything. Whoever writes holds the [`Lock`], which takes the
//! programs of the host in turn. Private keys are refused when others could read them. A folder can serve a head and a
//! worker of the same cluster.

#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use thiserror::Error;

use super::{Authority, CaCertificate, HostCertificate, Identity, IdentityError, Key, Role};
use crate::members::{Members, MembersError, SIGNED_BYTES_MAX, SignedMembers};

const CA_KEY: &str = "ca.key";
const CA_CERTIFICATE: &str = "ca.pem";
const MEMBERS: &str = "members";
const LOCK: &str = "lock";

/// Longest key or certificate in PEM that is read.
const PEM_BYTES_MAX: usize = 8192;
/// How often a lock that another program holds is tried again. Locks are held for a few writes.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A folder of identity files, which need not be there yet.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

/// What a head has.
#[derive(Clone, Debug)]
pub struct Head {
    /// The cluster's authority.
    pub authority: Authority,
    /// The head's own identity.
    pub identity: Identity,
    /// The cluster's members, the head among them.
    pub members: Members,
}

/// What an enrolled worker has.
#[derive(Clone, Debug)]
pub struct Worker {
    /// The worker's identity.
    pub identity: Identity,
    /// The latest member list that it was sent.
    pub members: Members,
}

impl Store {
    /// The store in that folder.
    pub fn new(folder: impl Into<PathBuf>) -> Store {
        Store { folder: folder.into() }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes the folder where there is none and takes the lock, waiting for `patience`. It is held until the [`Lock`]
    /// is dropped; what is to be changed is to be read under it.
    ///
    /// # Errors
    /// [`StoreError`]: the folder cannot be written, or another program holds the lock for longer.
    pub fn lock(&self, patience: Duration) -> Result<Lock<'_>, StoreError> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder).map_err(|e| self.io(LOCK, "create", e))?;
        self.check_folder()?;
        let path = self.path(LOCK);
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let file = file.map_err(|e| self.io(LOCK, "open", e))?;
        let deadline = Instant::now() + patience;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Lock { store: self, _file: file }),
                Err(fs::TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
                Err(fs::TryLockError::WouldBlock) => return Err(StoreError::Locked { path, patience }),
                Err(fs::TryLockError::Error(e)) => return Err(self.io(LOCK, "lock", e)),
            }
        }
    }

    /// The head's part; none where no cluster was begun here.
    ///
    /// # Errors
    /// [`StoreError`]: which file is missing or damaged, and what to do.
    pub fn head(&self) -> Result<Option<Head>, StoreError> {
        let Some(ca_key) = self.key(CA_KEY)? else { return Ok(None) };
        let authority = self.authority()?;
        let authority = Authority::new(ca_key, authority).map_err(|e| self.wrong(CA_KEY, e))?;
        let identity = self.identity(Role::Head)?;
        let members = self.members(authority.certificate())?;
        Ok(Some(Head { authority, identity, members }))
    }

    /// The worker's key; none on its first start.
    ///
    /// # Errors
    /// [`StoreError`]: the file is damaged, or others can read it.
    pub fn worker_key(&self) -> Result<Option<Key>, StoreError> {
        self.key(&key_file(Role::Worker))
    }

    /// The worker's part; none where it is not enrolled.
    ///
    /// # Errors
    /// [`StoreError`]: which file is missing or damaged, and what to do.
    pub fn worker(&self) -> Result<Option<Worker>, StoreError> {
        if !self.has(&certificate_file(Role::Worker))? {
            return Ok(None);
        }
        let identity = self.identity(Role::Worker)?;
        let members = self.members(identity.authority())?;
        Ok(Some(Worker { identity, members }))
    }

    fn identity(&self, role: Role) -> Result<Identity, StoreError> {
        let (key_file, certificate_file) = (key_file(role), certificate_file(role));
        let key = self.key(&key_file)?.ok_or_else(|| self.missing(&key_file))?;
        let certificate = self.certificate(&certificate_file)?.ok_or_else(|| self.missing(&certificate_file))?;
        let certificate = HostCertificate::parse(&certificate).map_err(|e| self.wrong(&certificate_file, e))?;
        if certificate.name().role != role {
            return Err(StoreError::Role { path: self.path(&certificate_file), found: certificate.name().role });
        }
        Identity::new(key, certificate, self.authority()?).map_err(|e| self.wrong(&certificate_file, e))
    }

    fn authority(&self) -> Result<CaCertificate, StoreError> {
        let certificate = self.certificate(CA_CERTIFICATE)?.ok_or_else(|| self.missing(CA_CERTIFICATE))?;
        CaCertificate::parse(&certificate).map_err(|e| self.wrong(CA_CERTIFICATE, e))
    }

    fn members(&self, authority: &CaCertificate) -> Result<Members, StoreError> {
        let bytes = self.read(MEMBERS, SIGNED_BYTES_MAX, false)?.ok_or_else(|| self.missing(MEMBERS))?;
        let members = SignedMembers::from_bytes(bytes).and_then(|signed| signed.verify(authority));
        members.map_err(|source| StoreError::Members { path: self.path(MEMBERS), source })
    }

    fn key(&self, file: &str) -> Result<Option<Key>, StoreError> {
        let Some(pem) = self.read(file, PEM_BYTES_MAX, true)? else { return Ok(None) };
        let key = std::str::from_utf8(&pem).map_err(|_| IdentityError::Key).and_then(Key::from_pem);
        key.map(Some).map_err(|e| self.wrong(file, e))
    }

    fn certificate(&self, file: &str) -> Result<Option<CertificateDer<'static>>, StoreError> {
        let Some(pem) = self.read(file, PEM_BYTES_MAX, false)? else { return Ok(None) };
        CertificateDer::from_pem_slice(&pem).map(Some).map_err(|_| StoreError::Pem { path: self.path(file) })
    }

    fn has(&self, file: &str) -> Result<bool, StoreError> {
        self.path(file).try_exists().map_err(|e| self.io(file, "look for", e))
    }

    /// A file that is not longer than `most`; none where there is none.
    fn read(&self, file: &str, most: usize, is_private: bool) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path(file);
        let opened = match File::open(&path) {
            Ok(opened) => opened,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(self.io(file, "open", e)),
        };
        self.check_folder()?;
        if is_private {
            // Of the file that was opened, whatever is renamed meanwhile.
            let mode = opened.metadata().map_err(|e| self.io(file, "look at", e))?.mode() & 0o777;
            if mode & 0o077 != 0 {
                return Err(StoreError::Readable { path, mode });
            }
        }
        let mut bytes = Vec::new();
        opened.take(most as u64 + 1).read_to_end(&mut bytes).map_err(|e| self.io(file, "read", e))?;
        if bytes.len() > most { Err(StoreError::TooLong { path, most }) } else { Ok(Some(bytes)) }
    }

    /// Whoever can write the folder can put another authority there.
    fn check_folder(&self) -> Result<(), StoreError> {
        let mode = fs::metadata(&self.folder).map_err(|e| self.io("", "look at", e))?.mode() & 0o777;
        if mode & 0o022 != 0 { Err(StoreError::Writable { path: self.folder.clone(), mode }) } else { Ok(()) }
    }

    fn path(&self, file: &str) -> PathBuf {
        if file.is_empty() { self.folder.clone() } else { self.folder.join(file) }
    }

    fn io(&self, file: &str, action: &'static str, source: io::Error) -> StoreError {
        StoreError::Io { action, path: self.path(file), source }
    }

    fn wrong(&self, file: &str, source: IdentityError) -> StoreError {
        StoreError::Identity { path: self.path(file), source }
    }

    fn missing(&self, file: &str) -> StoreError {
        StoreError::Missing { path: self.path(file) }
    }
}

/// The right to write a store, of one program at a time.
#[derive(Debug)]
pub struct Lock<'a> {
    store: &'a Store,
    _file: File,
}

impl Lock<'_> {
    /// The store, to be read under the lock.
    pub fn store(&self) -> &Store {
        self.store
    }

    /// Begins a cluster here.
    ///
    /// # Errors
    /// [`StoreError`]: there is one already, or a worker of another, or a file cannot be written.
    pub fn put_head(&self, head: &Head) -> Result<(), StoreError> {
        let store = self.store;
        for file in [CA_KEY, CA_CERTIFICATE] {
            if store.has(file)? {
                return Err(StoreError::Exists { path: store.path(file) });
            }
        }
        let signed = self.sign(&head.members, &head.authority)?;
        // The authority's key comes last: whether it is there is whether there is a head.
        self.write(MEMBERS, signed.as_bytes())?;
        self.put_key(&key_file(Role::Head), head.identity.key())?;
        self.put_certificate_file(&certificate_file(Role::Head), head.identity.certificate().der())?;
        self.put_certificate_file(CA_CERTIFICATE, head.authority.certificate().der())?;
        self.put_key(CA_KEY, head.authority.key())
    }

    /// Signs and stores the head's member list, which was read under this lock.
    ///
    /// # Errors
    /// [`StoreError`]: the stored list is newer, or another of this version, or the file cannot be written.
    pub fn put_members(&self, members: &Members, authority: &Authority) -> Result<SignedMembers, StoreError> {
        let signed = self.sign(members, authority)?;
        self.put_signed_members(&signed, authority.certificate())?;
        Ok(signed)
    }

    /// Stores a list that was sent, unless the stored one is newer.
    ///
    /// # Errors
    /// [`StoreError`]: the list is not this authority's, the stored one is newer, or the file cannot be written.
    pub fn put_signed_members(&self, signed: &SignedMembers, authority: &CaCertificate) -> Result<(), StoreError> {
        let refused = |source| StoreError::Members { path: self.store.path(MEMBERS), source };
        signed.verify(authority).map_err(refused)?;
        // A damaged list is replaced, and one of another cluster, which ca.pem belies.
        if let Ok(mut old) = self.store.members(authority) {
            old.accept(signed, authority).map_err(refused)?;
        }
        self.write(MEMBERS, signed.as_bytes())
    }

    /// Stores a new worker's key, which then is the worker's for ever.
    ///
    /// # Errors
    /// [`StoreError`]: there is one already, or the file cannot be written.
    pub fn put_worker_key(&self, key: &Key) -> Result<(), StoreError> {
        let file = key_file(Role::Worker);
        if self.store.has(&file)? {
            return Err(StoreError::Exists { path: self.store.path(&file) });
        }
        self.put_key(&file, key)
    }

    /// Stores what enrolment gave a worker whose key is stored.
    ///
    /// # Errors
    /// [`StoreError`]: the folder belongs to another cluster, or a file cannot be written.
    pub fn put_worker(&self, identity: &Identity, members: &SignedMembers) -> Result<(), StoreError> {
        let store = self.store;
        if store.has(CA_CERTIFICATE)? {
            let (found, new) = (store.authority()?.cluster(), identity.authority().cluster());
            if found != new {
                let path = store.path(CA_CERTIFICATE);
                return Err(StoreError::OtherCluster { path, found: found.to_string(), new: new.to_string() });
            }
        }
        match self.put_signed_members(members, identity.authority()) {
            // The head of the same cluster lives here, and has a newer list than the one it began with.
            Err(StoreError::Members { source: MembersError::Older { .. }, .. }) => {}
            put => put?,
        }
        self.put_certificate_file(CA_CERTIFICATE, identity.authority().der())?;
        self.put_certificate(identity)
    }

    /// Stores an identity's certificate in the place of the one before it.
    ///
    /// # Errors
    /// [`StoreError`]: the file cannot be written.
    pub fn put_certificate(&self, identity: &Identity) -> Result<(), StoreError> {
        self.put_certificate_file(&certificate_file(identity.name().role), identity.certificate().der())
    }

    fn sign(&self, members: &Members, authority: &Authority) -> Result<SignedMembers, StoreError> {
        let path = || self.store.path(MEMBERS);
        SignedMembers::sign(members, authority).map_err(|source| StoreError::Members { path: path(), source })
    }

    fn put_key(&self, file: &str, key: &Key) -> Result<(), StoreError> {
        self.write(file, key.to_pem().as_bytes())
    }

    fn put_certificate_file(&self, file: &str, certificate: &[u8]) -> Result<(), StoreError> {
        self.write(file, certificate_pem(certificate).as_bytes())
    }

    /// Replaces a file: the old one or the new one is there at any time, whole.
    fn write(&self, file: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let (path, folder) = (self.store.path(file), &self.store.folder);
        let write = || -> io::Result<()> {
            // Made with 0600, and removed when it is not renamed.
            let mut temporary = tempfile::Builder::new().prefix(".new-").tempfile_in(folder)?;
            temporary.write_all(bytes)?;
            temporary.as_file().sync_all()?;
            temporary.persist(&path)?;
            // The name as well is on the disk then.
            File::open(folder)?.sync_all()
        };
        write().map_err(|e| self.store.io(file, "write", e))
    }
}

fn key_file(role: Role) -> String {
    format!("{role}.key")
}

fn certificate_file(role: Role) -> String {
    format!("{role}.pem")
}

fn certificate_pem(der: &[u8]) -> String {
    let base64 = data_encoding::BASE64.encode(der);
    let lines: Vec<_> = base64.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// What is wrong with the folder, and what to do.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StoreError {
    #[error("could not {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
    #[error("{} is locked by another pp-run for more than {} s", path.display(), patience.as_secs())]
    Locked { path: PathBuf, patience: Duration },
    #[error("{} is a private key that others can read (mode {mode:04o}): run `chmod 600 '{}'`, and make a new \
        one if somebody may have", path.display(), path.display())]
    Readable { path: PathBuf, mode: u32 },
    #[error("{} can be written by others (mode {mode:04o}): run `chmod 700 '{}'`", path.display(), path.display())]
    Writable { path: PathBuf, mode: u32 },
    #[error("{} is longer than {most} bytes: it is not a file of this program", path.display())]
    TooLong { path: PathBuf, most: usize },
    #[error("{} is missing although others of its folder are there: restore it from a backup; on a worker, \
        remove the folder and enrol again", path.display())]
    Missing { path: PathBuf },
    #[error("{} is not a certificate in PEM: restore it from a backup; on a worker, remove the folder and enrol \
        again", path.display())]
    Pem { path: PathBuf },
    #[error("{}: {source}; restore it from a backup, or on a worker remove the folder and enrol again", path.display())]
    Identity { path: PathBuf, source: IdentityError },
    #[error("{} is the certificate of a {found}", path.display())]
    Role { path: PathBuf, found: Role },
    #[error("{}: {source}", path.display())]
    Members { path: PathBuf, source: MembersError },
    #[error("{} is there already and is not overwritten: a cluster that is given up is removed with its \
        folder", path.display())]
    Exists { path: PathBuf },
    #[error("{} is of cluster {found}, the worker was enrolled in {new}: give the worker a folder of its own, \
        or remove this one", path.display())]
    OtherCluster { path: PathBuf, found: String, new: String },
}
