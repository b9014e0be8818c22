//! Keys of hosts. All are Ed25519: one algorithm, small certificates, signatures without randomness.

use std::fmt;
use std::sync::Arc;

use rcgen::{KeyPair, PKCS_ED25519, PublicKeyData, SigningKey};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};

use super::{IdentityError, text};

/// What stands before the 32 bytes of an Ed25519 key in its SubjectPublicKeyInfo (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// BLAKE3 of a key's SubjectPublicKeyInfo: the same for all certificates of the key. As text it is cut to 80 bits,
/// which is what a code holds of it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 32]);

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&text::encode(&self.0[..10]))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// An Ed25519 public key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// The key in a SubjectPublicKeyInfo; none if that holds another kind of key.
    pub fn from_spki(der: &[u8]) -> Option<PublicKey> {
        der.strip_prefix(&SPKI_PREFIX)?.try_into().ok().map(PublicKey)
    }

    /// The key as a SubjectPublicKeyInfo in DER.
    pub fn spki(&self) -> Vec<u8> {
        [&SPKI_PREFIX[..], &self.0].concat()
    }

    /// What the key is known by.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint(*blake3::hash(&self.spki()).as_bytes())
    }

    /// Whether `signature` is this key's for `bytes`.
    pub(crate) fn has_signed(&self, bytes: &[u8], signature: &[u8]) -> bool {
        ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, self.0).verify(bytes, signature).is_ok()
    }
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &PKCS_ED25519
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.fingerprint())
    }
}

/// The private key of a host. It is made on its host and never leaves it: only [`super::store`] and the TLS
/// configuration see its bytes.
#[derive(Clone)]
pub struct Key {
    pair: Arc<KeyPair>,
    public: PublicKey,
}

impl Key {
    /// A new key, from the system's randomness.
    ///
    /// # Errors
    /// [`IdentityError::Random`]: the system has none.
    pub fn generate() -> Result<Key, IdentityError> {
        Key::of(KeyPair::generate_for(&PKCS_ED25519).map_err(|_| IdentityError::Random)?)
    }

    /// The key's public half.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// What the key is known by.
    pub fn fingerprint(&self) -> Fingerprint {
        self.public.fingerprint()
    }

    /// The key as PKCS #8 in PEM.
    pub(crate) fn to_pem(&self) -> String {
        self.pair.serialize_pem()
    }

    /// The key in a PEM text of [`Key::to_pem`].
    pub(crate) fn from_pem(pem: &str) -> Result<Key, IdentityError> {
        Key::of(KeyPair::from_pkcs8_pem_and_sign_algo(pem, &PKCS_ED25519).map_err(|_| IdentityError::Key)?)
    }

    /// The key for rustls.
    pub(crate) fn der(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.pair.serialized_der().to_vec()).into()
    }

    /// What certificates are signed with.
    pub(crate) fn pair(&self) -> &KeyPair {
        &self.pair
    }

    /// The key's signature of `bytes`.
    pub(crate) fn sign(&self, bytes: &[u8]) -> Result<[u8; 64], IdentityError> {
        let signature = self.pair.sign(bytes).map_err(|_| IdentityError::Sign)?;
        signature.try_into().map_err(|_| IdentityError::Sign)
    }

    fn of(pair: KeyPair) -> Result<Key, IdentityError> {
        let public = pair.der_bytes().try_into().map(PublicKey).map_err(|_| IdentityError::Key)?;
        Ok(Key { pair: Arc::new(pair), public })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}, private half not shown)", self.fingerprint())
    }
}
