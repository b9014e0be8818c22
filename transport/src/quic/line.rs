//! A connection with a member, and how it ends.

use std::fmt::Display;
use std::sync::OnceLock;

use quinn::{Connection, ConnectionError, TransportErrorCode, VarInt};

use crate::identity::{Fingerprint, PeerName};

/// Longest reason that a connection is closed with, and that is shown of the other end's.
const REASON_BYTES: usize = 300;

/// Why a connection is closed, for the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Close {
    /// Nothing is left to do, or the process ends.
    Done = 0,
    /// The other end is not a member, or not any more.
    NotMember = 1,
    /// The other end broke the protocol.
    Protocol = 2,
    /// The other end has as many connections as it may.
    Busy = 3,
}

impl Close {
    pub(super) fn code(self) -> VarInt {
        VarInt::from_u32(self as u32)
    }
}

/// A connection whose other end TLS has verified and the member list knows.
pub(super) struct Line {
    pub(super) connection: Connection,
    pub(super) peer: PeerName,
    pub(super) fingerprint: Fingerprint,
    /// Why this end has closed it.
    why: OnceLock<String>,
}

impl Line {
    pub(super) fn new(connection: Connection, peer: PeerName, fingerprint: Fingerprint) -> Line {
        Line { connection, peer, fingerprint, why: OnceLock::new() }
    }

    /// Closes it for what the other end did or is. Whoever comes first says why.
    pub(super) fn cut(&self, close: Close, why: &dyn Display) {
        let why = shown(&why.to_string());
        if self.connection.close_reason().is_none() && self.why.set(why.clone()).is_ok() {
            tracing::warn!(peer = %self.peer, why, "closed a connection");
            self.connection.close(close.code(), why.as_bytes());
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.connection.close_reason().is_some()
    }

    /// Whether it is closed and links on it have no other to hope for: an end wanted it so.
    pub(super) fn is_over(&self) -> bool {
        self.connection.close_reason().is_some_and(|why| is_final(&why))
    }

    /// Why it is closed, if it is: in the words of the end that did it.
    pub(super) fn why_closed(&self) -> Option<String> {
        let found = self.connection.close_reason()?;
        Some(self.why.get().cloned().unwrap_or_else(|| words(&found)))
    }
}

/// Whether dialling again would change nothing. Only what the network does passes; an end that refuses, ends or
/// breaks the protocol does so again.
pub(super) fn is_final(why: &ConnectionError) -> bool {
    match why {
        ConnectionError::TimedOut | ConnectionError::Reset => false,
        ConnectionError::ConnectionClosed(close) => close.error_code != TransportErrorCode::CONNECTION_REFUSED,
        ConnectionError::ApplicationClosed(close) => close.error_code != Close::Busy.code(),
        _ => true,
    }
}

/// TLS's alerts that mean something here, from the end that refuses the other's certificate.
const ALERTS: [(u64, &str); 6] = [
    (42, "it says that our certificate is broken"),
    (44, "it says that our certificate is revoked"),
    (45, "it says that our certificate has expired: renew it, or set the clock of either host"),
    (46, "it does not take our certificate, which is expired, not valid yet, or not for this use"),
    (48, "it does not know the authority of our certificate: the two hosts are in different clusters"),
    (120, "it speaks another protocol: it is not enrolled, or runs another release"),
];

/// QUIC's codes for alerts begin here.
const CRYPTO: u64 = 0x100;

/// Why a connection ended, or did not come about, for people.
pub(super) fn words(why: &ConnectionError) -> String {
    match why {
        ConnectionError::ApplicationClosed(close) => {
            let reason = String::from_utf8_lossy(&close.reason);
            format!("it closed the connection: {}", shown(&reason))
        }
        ConnectionError::ConnectionClosed(close) => {
            let code = u64::from(close.error_code);
            let alert = ALERTS.iter().find(|(alert, _)| code == CRYPTO + alert);
            alert.map_or_else(|| shown(&why.to_string()), |(_, text)| (*text).to_owned())
        }
        ConnectionError::TransportError(error) => shown(&error.to_string()),
        ConnectionError::TimedOut => "nothing was heard of it for too long".to_owned(),
        ConnectionError::Reset => "it does not know the connection any more: it was started again".to_owned(),
        ConnectionError::LocallyClosed => "this end has closed the connection".to_owned(),
        other => other.to_string(),
    }
}

/// Text that the other end may have chosen, for a terminal and in bounds.
fn shown(text: &str) -> String {
    let mut shown: String = text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect();
    while shown.len() > REASON_BYTES {
        shown.pop();
    }
    shown
}
