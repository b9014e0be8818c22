//! The cluster's certificate authority: it lives on the head and signs hosts and member lists.

use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyUsagePurpose, SerialNumber,
};
use ring::rand::{SecureRandom, SystemRandom};
use rustls_pki_types::UnixTime;
use time::OffsetDateTime;

use super::{CaCertificate, ClusterId, HostCertificate, IdentityError, Key, PeerName, PublicKey, Role};

/// How long a host's certificate is valid: a removed host that nobody told of it is locked out within a season, and a
/// cluster that rests for two months still works.
pub const HOST_VALIDITY: Duration = Duration::from_secs(90 * DAY);
/// How long the authority's certificate is valid: longer than the hosts are used. Another one is another cluster.
pub const AUTHORITY_VALIDITY: Duration = Duration::from_secs(3653 * DAY);
/// Certificates are valid from so long before they are made, for hosts whose clocks are behind.
pub const CLOCK_SKEW: Duration = Duration::from_secs(3600);

const DAY: u64 = 24 * 3600;

/// The authority of a cluster: its private key and its certificate.
#[derive(Clone, Debug)]
pub struct Authority {
    key: Key,
    certificate: CaCertificate,
}

impl Authority {
    /// A new authority, hence a new cluster.
    ///
    /// # Errors
    /// [`IdentityError::Random`]: the system has no randomness.
    pub fn create(now: UnixTime) -> Result<Authority, IdentityError> {
        let key = Key::generate()?;
        let mut params = issuer(key.public());
        params.not_before = date(now.as_secs().saturating_sub(CLOCK_SKEW.as_secs()))?;
        params.not_after = date(now.as_secs().saturating_add(AUTHORITY_VALIDITY.as_secs()))?;
        params.serial_number = Some(serial()?);
        let certificate = params.self_signed(key.pair()).map_err(IdentityError::Issue)?;
        let certificate = CaCertificate::parse(certificate.der())?;
        Ok(Authority { key, certificate })
    }

    /// The authority with this key and certificate, as [`super::Store`] keeps them.
    ///
    /// # Errors
    /// [`IdentityError::OtherKey`]: the certificate is for another key.
    pub fn new(key: Key, certificate: CaCertificate) -> Result<Authority, IdentityError> {
        if key.public() != certificate.key() {
            return Err(IdentityError::OtherKey);
        }
        Ok(Authority { key, certificate })
    }

    /// What its hosts pin.
    pub fn certificate(&self) -> &CaCertificate {
        &self.certificate
    }

    /// The cluster.
    pub fn cluster(&self) -> ClusterId {
        self.certificate.cluster()
    }

    /// A certificate for a host of this cluster, valid for `validity` (usually [`HOST_VALIDITY`]) after `not_before`,
    /// but never longer than the authority's own.
    ///
    /// # Errors
    /// [`IdentityError`]: the name is of another cluster, or there is no randomness.
    pub fn issue(
        &self,
        key: &PublicKey,
        name: &PeerName,
        not_before: UnixTime,
        validity: Duration,
    ) -> Result<HostCertificate, IdentityError> {
        let (mine, found) = (self.cluster(), name.cluster);
        if found != mine {
            return Err(IdentityError::OtherCluster { found, mine });
        }
        let not_after = not_before.as_secs().saturating_add(validity.as_secs());
        let mut params = CertificateParams::new([name.to_string()]).map_err(IdentityError::Issue)?;
        params.not_before = date(not_before.as_secs())?;
        params.not_after = date(not_after.min(self.certificate.not_after().as_secs()))?;
        params.serial_number = Some(serial()?);
        params.distinguished_name = common_name(name.name.as_str());
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages(name.role);
        params.use_authority_key_identifier_extension = true;
        let issuer = Issuer::new(issuer(self.key.public()), self.key.pair());
        let certificate = params.signed_by(key, &issuer).map_err(IdentityError::Issue)?;
        HostCertificate::parse(certificate.der())
    }

    /// A certificate that is valid from about now for [`HOST_VALIDITY`].
    ///
    /// # Errors
    /// As [`Authority::issue`].
    pub fn issue_now(&self, key: &PublicKey, name: &PeerName, now: UnixTime) -> Result<HostCertificate, IdentityError> {
        let not_before = Duration::from_secs(now.as_secs()).saturating_sub(CLOCK_SKEW);
        self.issue(key, name, UnixTime::since_unix_epoch(not_before), HOST_VALIDITY + CLOCK_SKEW)
    }

    /// A new certificate for the key and the name of one that is still valid.
    ///
    /// # Errors
    /// [`IdentityError`]: it is not valid, or not of this authority. Whether the host is still a member is the caller's
    /// to ask.
    pub fn renew(&self, certificate: &HostCertificate, now: UnixTime) -> Result<HostCertificate, IdentityError> {
        self.certificate.verify(certificate, now)?;
        self.issue_now(certificate.key(), certificate.name(), now)
    }

    /// The authority's signature of `bytes`. What is signed begins with a text that says what it is; a certificate
    /// begins with 0x30, so that neither is ever taken for the other.
    pub(crate) fn sign(&self, bytes: &[u8]) -> Result<[u8; 64], IdentityError> {
        self.key.sign(bytes)
    }

    /// The private key, for the store.
    pub(crate) fn key(&self) -> &Key {
        &self.key
    }
}

/// What a host may do on a connection. A head never listens: its certificate is none of a server.
fn usages(role: Role) -> Vec<ExtendedKeyUsagePurpose> {
    match role {
        Role::Head => vec![ExtendedKeyUsagePurpose::ClientAuth],
        Role::Worker => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
    }
}

/// The part of the authority's certificate that the certificates it issues refer to: a function of its key.
pub(super) fn issuer(key: &PublicKey) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = common_name(&format!("pp-run cluster {}", ClusterId::of(key)));
    // It signs hosts only: no other authority below it.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn common_name(text: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, text);
    name
}

fn date(unix_s: u64) -> Result<OffsetDateTime, IdentityError> {
    let seconds = i64::try_from(unix_s).ok();
    seconds.and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok()).ok_or(IdentityError::Validity)
}

/// 127 random bits: two certificates of one host differ in it.
fn serial() -> Result<SerialNumber, IdentityError> {
    let mut serial = [0; 16];
    SystemRandom::new().fill(&mut serial).map_err(|_| IdentityError::Random)?;
    // DER integers are signed, and rcgen takes the bytes as they are.
    serial[0] = serial[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&serial))
}
