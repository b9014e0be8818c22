//! Certificates read: what is in them, and whether the cluster's authority signed them.

use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, ExtendedKeyUsageValidator, KeyUsage};

use super::der::{self, Validity};
use super::{ClusterId, Fingerprint, IdentityError, PeerName, PublicKey, Role};

/// Longest certificate that is looked at. Those of hosts have about 500 bytes.
pub const CERTIFICATE_BYTES_MAX: usize = 2048;
/// A certificate is renewed when less than this part of its life is left. A third of 90 days is a month, in which a
/// head that runs once a week renews.
const RENEWAL_PART: u64 = 3;

/// The certificate of a host: whose it is, for which key, until when. Read, not verified: see
/// [`CaCertificate::verify`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCertificate {
    der: CertificateDer<'static>,
    name: PeerName,
    key: PublicKey,
    validity: Validity,
}

impl HostCertificate {
    /// Reads a certificate.
    ///
    /// # Errors
    /// [`IdentityError`]: it is longer than [`CERTIFICATE_BYTES_MAX`], no certificate, for another kind of key, or does
    /// not have exactly one name, a [`PeerName`].
    pub fn parse(bytes: &[u8]) -> Result<HostCertificate, IdentityError> {
        let der = bounded(bytes)?;
        let parsed = EndEntityCert::try_from(&der)?;
        let key = PublicKey::from_spki(&parsed.subject_public_key_info()).ok_or(IdentityError::KeyKind)?;
        let names: Vec<&str> = parsed.valid_dns_names().take(2).collect();
        let [name] = names[..] else { return Err(IdentityError::Names) };
        let name = name.parse()?;
        let validity = der::validity(&der).ok_or(IdentityError::Validity)?;
        Ok(HostCertificate { name, key, validity, der })
    }

    /// The certificate as it is sent.
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Whose it is.
    pub fn name(&self) -> &PeerName {
        &self.name
    }

    /// The key that it is for.
    pub fn key(&self) -> &PublicKey {
        &self.key
    }

    /// What its key is known by.
    pub fn fingerprint(&self) -> Fingerprint {
        self.key.fingerprint()
    }

    /// The last second in which it is valid.
    pub fn not_after(&self) -> UnixTime {
        self.validity.not_after
    }

    /// Whether it is no longer valid: a connection that it was shown on should end.
    pub fn has_expired(&self, now: UnixTime) -> bool {
        now.as_secs() > self.validity.not_after.as_secs()
    }

    /// Whether less than a third of its life is left.
    pub fn renewal_due(&self, now: UnixTime) -> bool {
        let Validity { not_before, not_after } = self.validity;
        let life = not_after.as_secs().saturating_sub(not_before.as_secs());
        not_after.as_secs().saturating_sub(now.as_secs()) < life / RENEWAL_PART
    }
}

/// The certificate of the cluster's authority, which its hosts pin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaCertificate {
    der: CertificateDer<'static>,
    anchor: TrustAnchor<'static>,
    key: PublicKey,
    validity: Validity,
}

impl CaCertificate {
    /// Reads a certificate that is trusted from here on.
    ///
    /// # Errors
    /// [`IdentityError`]: it is longer than [`CERTIFICATE_BYTES_MAX`], no certificate, or for another kind of key.
    pub fn parse(bytes: &[u8]) -> Result<CaCertificate, IdentityError> {
        let der = bounded(bytes)?;
        let anchor = webpki::anchor_from_trusted_cert(&der)?.to_owned();
        let key = PublicKey::from_spki(&webpki::spki_for_anchor(&anchor)).ok_or(IdentityError::KeyKind)?;
        let validity = der::validity(&der).ok_or(IdentityError::Validity)?;
        Ok(CaCertificate { der, anchor, key, validity })
    }

    /// The certificate as it is sent.
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// The cluster whose authority it is.
    pub fn cluster(&self) -> ClusterId {
        ClusterId::of(&self.key)
    }

    /// The authority's key.
    pub fn key(&self) -> &PublicKey {
        &self.key
    }

    /// The last second in which certificates of this authority may be valid.
    pub fn not_after(&self) -> UnixTime {
        self.validity.not_after
    }

    /// That this authority signed `certificate`, for its own cluster and for what its role does on a connection, and
    /// that it is valid at `now`.
    ///
    /// # Errors
    /// [`IdentityError`]: which of these is not so.
    pub fn verify(&self, certificate: &HostCertificate, now: UnixTime) -> Result<(), IdentityError> {
        let (mine, found) = (self.cluster(), certificate.name.cluster);
        if found != mine {
            return Err(IdentityError::OtherCluster { found, mine });
        }
        // Both roles dial; that a worker may listen as well, its role says.
        for_usage(self, certificate, now, KeyUsage::client_auth())?;
        match certificate.name.role {
            Role::Head => Ok(()),
            Role::Worker => for_usage(self, certificate, now, KeyUsage::server_auth()),
        }
    }
}

pub(super) fn for_usage(
    authority: &CaCertificate,
    certificate: &HostCertificate,
    now: UnixTime,
    usage: impl ExtendedKeyUsageValidator,
) -> Result<(), IdentityError> {
    let parsed = EndEntityCert::try_from(&certificate.der)?;
    let anchors = std::slice::from_ref(&authority.anchor);
    parsed.verify_for_usage(&[webpki::ring::ED25519], anchors, &[], now, usage, None, None)?;
    Ok(())
}

fn bounded(bytes: &[u8]) -> Result<CertificateDer<'static>, IdentityError> {
    if bytes.len() > CERTIFICATE_BYTES_MAX {
        return Err(IdentityError::TooLong { found: bytes.len() });
    }
    Ok(CertificateDer::from(bytes.to_vec()))
}
