//! Who a host is, and how others know: names, keys, certificates, and the cluster's authority that signs them.
//!
//! A cluster has one authority, on the head's host. Each host makes its own key, which never leaves it, and has one
//! certificate by the authority for that key, its name and its role. All else that a host may do is in the
//! [member list](crate::members). No clock is read here, and only [`store`] touches files.

mod authority;
mod certificate;
mod der;
mod key;
mod names;
pub mod store;
pub(crate) mod text;

#[cfg(test)]
pub(crate) mod tests;

use thiserror::Error;

pub use authority::{AUTHORITY_VALIDITY, Authority, CLOCK_SKEW, HOST_VALIDITY};
pub use certificate::{CERTIFICATE_BYTES_MAX, CaCertificate, HostCertificate};
pub use key::{Fingerprint, Key, PublicKey};
pub use names::{
    ADDRESS_BYTES_MAX, Address, CLUSTER_ID_BYTES, ClusterId, NAME_BYTES_MAX, Name, NameError, PeerName, Role,
};
pub use rustls_pki_types::UnixTime;
pub use store::Store;

/// What a host proves itself with: its key, its certificate, and the authority that it trusts.
#[derive(Clone, Debug)]
pub struct Identity {
    key: Key,
    certificate: HostCertificate,
    authority: CaCertificate,
}

impl Identity {
    /// An identity whose certificate is for `key` and by `authority`. An expired one is taken, so that a host can say
    /// that it has expired; nobody will connect to it.
    ///
    /// # Errors
    /// [`IdentityError`]: the certificate is for another key, or not by this authority.
    pub fn new(key: Key, certificate: HostCertificate, authority: CaCertificate) -> Result<Identity, IdentityError> {
        if certificate.key() != key.public() {
            return Err(IdentityError::OtherKey);
        }
        authority.verify(&certificate, certificate.not_after())?;
        Ok(Identity { key, certificate, authority })
    }

    /// The host.
    pub fn name(&self) -> &PeerName {
        self.certificate.name()
    }

    /// What its key is known by.
    pub fn fingerprint(&self) -> Fingerprint {
        self.certificate.fingerprint()
    }

    /// The host's certificate.
    pub fn certificate(&self) -> &HostCertificate {
        &self.certificate
    }

    /// The certificate of the cluster's authority.
    pub fn authority(&self) -> &CaCertificate {
        &self.authority
    }

    /// Whether less than a third of its certificate's life is left.
    pub fn renewal_due(&self, now: UnixTime) -> bool {
        self.certificate.renewal_due(now)
    }

    /// Takes a new certificate: for the same key, name and role, by the same authority, valid now and for longer than
    /// the present one. Configurations made before keep the old one; make them again.
    ///
    /// # Errors
    /// [`IdentityError`]: which of these is not so. The identity is then as it was.
    pub fn replace_certificate(&mut self, certificate: HostCertificate, now: UnixTime) -> Result<(), IdentityError> {
        if certificate.key() != self.key.public() {
            return Err(IdentityError::OtherKey);
        }
        if certificate.name() != self.name() {
            let (found, mine) = (certificate.name().clone(), self.name().clone());
            return Err(IdentityError::OtherName { found: Box::new(found), mine: Box::new(mine) });
        }
        self.authority.verify(&certificate, now)?;
        let (found, mine) = (certificate.not_after().as_secs(), self.certificate.not_after().as_secs());
        if found <= mine {
            return Err(IdentityError::NotLater { found, mine });
        }
        self.certificate = certificate;
        Ok(())
    }

    /// The private key, for TLS and the store.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }
}

impl From<webpki::Error> for IdentityError {
    fn from(error: webpki::Error) -> IdentityError {
        match error {
            webpki::Error::CertExpired { time, not_after } => {
                IdentityError::Expired { not_after: not_after.as_secs(), now: time.as_secs() }
            }
            webpki::Error::CertNotValidYet { time, not_before } => {
                IdentityError::NotYet { not_before: not_before.as_secs(), now: time.as_secs() }
            }
            error => IdentityError::Certificate(error),
        }
    }
}

/// What is wrong with a key or a certificate.
#[derive(Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum IdentityError {
    #[error("the system gives no random bytes, without which there are no keys")]
    Random,
    #[error("private key is not an Ed25519 key in PKCS #8")]
    Key,
    #[error("private key does not sign")]
    Sign,
    #[error("certificate of {found} bytes, the limit is {CERTIFICATE_BYTES_MAX}")]
    TooLong { found: usize },
    #[error(
        "certificate expired at {not_after}, and it is {now} (Unix seconds): enrol the host again, or set its clock"
    )]
    Expired { not_after: u64, now: u64 },
    #[error("certificate is valid from {not_before}, and it is {now} (Unix seconds): set the clock of this host")]
    NotYet { not_before: u64, now: u64 },
    #[error("certificate is not valid: {0}")]
    Certificate(webpki::Error),
    #[error("certificate is for a key that is not Ed25519")]
    KeyKind,
    #[error("certificate does not have exactly one name")]
    Names,
    #[error(transparent)]
    Name(#[from] NameError),
    #[error("certificate does not say from when to when it is valid, or in years that do not exist")]
    Validity,
    #[error("certificate could not be made: {0}")]
    Issue(rcgen::Error),
    #[error("certificate is for another key than this host's")]
    OtherKey,
    #[error("certificate is for {found}, this host is {mine}")]
    OtherName { found: Box<PeerName>, mine: Box<PeerName> },
    #[error("certificate is for cluster {found}, this is cluster {mine}")]
    OtherCluster { found: ClusterId, mine: ClusterId },
    #[error("new certificate ends at {found} (Unix seconds), not later than the present one at {mine}")]
    NotLater { found: u64, mine: u64 },
}
