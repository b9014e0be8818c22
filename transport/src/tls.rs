//! TLS for QUIC: which configurations there are, and who is at the other end.
//!
//! Two protocols, told apart by ALPN. [`ALPN`] is the cluster's: both ends show certificates of the cluster's
//! authority. [`ENROL_ALPN`] is what a worker without one speaks, with a head that holds its code. An endpoint serves
//! one of them at a time, or none: `quinn::Endpoint::set_server_config` goes from one to the other and leaves live
//! connections alone. So no connection without a client's certificate can reach an enrolled worker. With none it does
//! not answer at all, and who dials it runs into its own timeout.
//!
//! TLS 1.3 only, with *ring*, whatever the process has installed. No session is resumed and there is no 0-RTT: every
//! connection shows certificates, and nothing can be replayed. After a handshake the caller still has to ask the member
//! list about [`peer_of`].

#[cfg(test)]
pub(crate) mod tests;

use std::sync::Arc;
use std::time::Duration;

use quinn::crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig};
use quinn::{Connection, IdleTimeout, TransportConfig, VarInt};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use rustls::{CertificateError, CipherSuite, DigitallySignedStruct, RootCertStore, SignatureScheme, version::TLS13};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use thiserror::Error;
use webpki::EndEntityCert;

use crate::identity::{CaCertificate, HostCertificate, Identity, IdentityError, Key, PeerName, PublicKey, Role};

/// The protocol between members of a cluster.
pub const ALPN: &[u8] = b"pp-run/1";
/// The protocol by which a worker becomes a member.
pub const ENROL_ALPN: &[u8] = b"pp-run-enrol/1";
/// The name to dial when enrolling: QUIC wants one, and nobody looks at it.
pub const ENROL_SERVER_NAME: &str = "enrol.pp-run";

/// An enrolment that says nothing for so long is over.
const ENROL_IDLE: Duration = Duration::from_secs(10);

/// What an enrolled worker listens with: [`ALPN`], and only members' certificates. Make it again when the identity's
/// certificate is replaced.
///
/// # Errors
/// [`TlsError`]: the identity is a head's, which never listens, or rustls refuses its certificates.
pub fn server_config(identity: &Identity) -> Result<quinn::ServerConfig, TlsError> {
    quic_server(rustls_server(identity)?)
}

/// The same without QUIC.
pub(crate) fn rustls_server(identity: &Identity) -> Result<rustls::ServerConfig, TlsError> {
    if identity.name().role != Role::Worker {
        return Err(TlsError::HeadListens { name: Box::new(identity.name().clone()) });
    }
    let clients = WebPkiClientVerifier::builder_with_provider(roots(identity.authority())?, provider()).build()?;
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(clients)
        .with_single_cert(vec![identity.certificate().der().clone()], identity.key().der())?;
    Ok(serving(config, ALPN))
}

/// What a member dials with: [`ALPN`], its own certificate, and only a server of the same cluster. Which one is the
/// name that is dialled: `endpoint.connect_with(config, address, &peer.to_string())`.
///
/// # Errors
/// [`TlsError`]: rustls refuses the certificates.
pub fn client_config(identity: &Identity) -> Result<quinn::ClientConfig, TlsError> {
    quic_client(rustls_client(identity)?)
}

/// The same without QUIC.
pub(crate) fn rustls_client(identity: &Identity) -> Result<rustls::ClientConfig, TlsError> {
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots(identity.authority())?)
        .with_client_auth_cert(vec![identity.certificate().der().clone()], identity.key().der())?;
    Ok(dialling(config, ALPN))
}

/// What a worker that is in no cluster listens with: [`ENROL_ALPN`], and a certificate that it has signed itself. The
/// other end may open no stream and has ten seconds.
///
/// # Errors
/// [`TlsError`]: the certificate cannot be made.
pub fn enrol_server_config(key: &Key) -> Result<quinn::ServerConfig, TlsError> {
    let params = rcgen::CertificateParams::new([ENROL_SERVER_NAME.to_owned()]).map_err(IdentityError::Issue)?;
    let certificate = params.self_signed(key.pair()).map_err(IdentityError::Issue)?;
    let config = rustls::ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key.der())?;
    let mut config = served(config, ENROL_ALPN)?;
    config.transport_config(enrol_transport(0));
    Ok(config)
}

/// What a head dials an unenrolled worker with: [`ENROL_ALPN`]. Any key is taken that the other end proves to have;
/// whose it is, the code says.
///
/// # Errors
/// [`TlsError`]: rustls refuses the configuration.
pub fn enrol_client_config() -> Result<quinn::ClientConfig, TlsError> {
    let config = rustls::ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyKey(provider())))
        .with_no_client_auth();
    let mut config = dialled(config, ENROL_ALPN)?;
    config.transport_config(enrol_transport(1));
    Ok(config)
}

/// Who is at the other end of a member's connection: the certificate that TLS has verified. Its role says what it may
/// send; whether it is still a member is for [`crate::members::Members::allows`].
///
/// # Errors
/// [`TlsError`]: the connection is not of [`ALPN`], or its certificate does not name a host.
pub fn peer_of(connection: &Connection) -> Result<HostCertificate, TlsError> {
    check_alpn(connection, ALPN)?;
    Ok(HostCertificate::parse(&certificate_of(connection)?)?)
}

/// The key that the other end of an enrolment has proved to have.
///
/// # Errors
/// [`TlsError`]: the connection is not of [`ENROL_ALPN`], or its key is not Ed25519.
pub fn enrolling_key_of(connection: &Connection) -> Result<PublicKey, TlsError> {
    check_alpn(connection, ENROL_ALPN)?;
    Ok(key_in(&certificate_of(connection)?)?)
}

/// That the connection speaks this protocol.
///
/// # Errors
/// [`TlsError::Alpn`]: it does not.
pub(crate) fn check_alpn(connection: &Connection, expected: &'static [u8]) -> Result<(), TlsError> {
    let data = connection.handshake_data().and_then(|data| data.downcast::<HandshakeData>().ok());
    match data.and_then(|data| data.protocol) {
        Some(protocol) if protocol == expected => Ok(()),
        _ => Err(TlsError::Alpn { expected: String::from_utf8_lossy(expected).into_owned() }),
    }
}

fn certificate_of(connection: &Connection) -> Result<CertificateDer<'static>, TlsError> {
    let chain = connection.peer_identity().and_then(|chain| chain.downcast::<Vec<CertificateDer<'static>>>().ok());
    chain.and_then(|chain| chain.into_iter().next()).ok_or(TlsError::NoCertificate)
}

fn key_in(certificate: &CertificateDer<'_>) -> Result<PublicKey, IdentityError> {
    let parsed = EndEntityCert::try_from(certificate)?;
    PublicKey::from_spki(&parsed.subject_public_key_info()).ok_or(IdentityError::KeyKind)
}

fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    // The cheapest that is as good as any: a frame of 64 KiB there and back takes a tenth less time than with AES-256.
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn roots(authority: &CaCertificate) -> Result<Arc<RootCertStore>, TlsError> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone())?;
    Ok(Arc::new(roots))
}

fn serving(mut config: rustls::ServerConfig, alpn: &[u8]) -> rustls::ServerConfig {
    config.alpn_protocols = vec![alpn.to_vec()];
    config.max_early_data_size = 0;
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config
}

fn served(config: rustls::ServerConfig, alpn: &[u8]) -> Result<quinn::ServerConfig, TlsError> {
    quic_server(serving(config, alpn))
}

fn quic_server(config: rustls::ServerConfig) -> Result<quinn::ServerConfig, TlsError> {
    let config = QuicServerConfig::try_from(config).map_err(|_| TlsError::Suite)?;
    Ok(quinn::ServerConfig::with_crypto(Arc::new(config)))
}

fn dialling(mut config: rustls::ClientConfig, alpn: &[u8]) -> rustls::ClientConfig {
    config.alpn_protocols = vec![alpn.to_vec()];
    config.enable_early_data = false;
    config.resumption = Resumption::disabled();
    // A worker has one certificate, and the name of the cluster is nobody's business on the way.
    config.enable_sni = false;
    config
}

fn dialled(config: rustls::ClientConfig, alpn: &[u8]) -> Result<quinn::ClientConfig, TlsError> {
    quic_client(dialling(config, alpn))
}

fn quic_client(config: rustls::ClientConfig) -> Result<quinn::ClientConfig, TlsError> {
    let config = QuicClientConfig::try_from(config).map_err(|_| TlsError::Suite)?;
    Ok(quinn::ClientConfig::new(Arc::new(config)))
}

/// One small message each way on a stream that the worker opens: nothing else is to be held for a stranger.
fn enrol_transport(streams: u32) -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport
        .max_concurrent_bidi_streams(VarInt::from_u32(streams))
        .max_concurrent_uni_streams(VarInt::from_u32(0))
        .datagram_receive_buffer_size(None)
        .receive_window(VarInt::from_u32(2 * crate::enrol::GRANT_BYTES as u32))
        .max_idle_timeout(IdleTimeout::try_from(ENROL_IDLE).ok());
    Arc::new(transport)
}

/// Takes any certificate whose key signs the handshake. The signature is checked as for any other: what this leaves out
/// is only whose key it is.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let wrong = |_| rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        key_in(certificate).map(|_| ServerCertVerified::assertion()).map_err(wrong)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls13RequiredForQuic.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}

/// Why there is no configuration, or no peer that it would take.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum TlsError {
    #[error("{name} is a head, which dials and never listens")]
    HeadListens { name: Box<PeerName> },
    #[error("TLS refuses the configuration: {0}")]
    Rustls(#[from] rustls::Error),
    #[error("TLS refuses the cluster's certificate: {0}")]
    Verifier(#[from] VerifierBuilderError),
    #[error("the cryptography lacks TLS13_AES_128_GCM_SHA256, with which QUIC begins")]
    Suite,
    #[error("the connection does not speak {expected}")]
    Alpn { expected: String },
    #[error("the peer has shown no certificate")]
    NoCertificate,
    #[error(transparent)]
    Identity(#[from] IdentityError),
}
