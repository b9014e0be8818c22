//! Ports over a byte stream that blocks: plain TCP, and TCP with TLS 1.3 by the certificates of a cluster. Only for
//! comparison: such a port survives no lost connection and bounds only the size of a frame.

use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{ClientConnection, ServerConnection, StreamOwned};
use rustls_pki_types::ServerName;
use thiserror::Error;

use crate::frame::{Frame, FrameError, PAYLOAD_BYTES_MAX};
use crate::identity::{Identity, PeerName};
use crate::link::{Decoder, Message};
use crate::port::{Arrival, Port, PortError};
use crate::tls::{self, TlsError};

/// Bytes that are read ahead: a header with a small payload behind it. Larger payloads go past this buffer.
const AHEAD: usize = 4096;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why there is no port.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum StreamError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("TLS over TCP: {0}")]
    Rustls(#[from] rustls::Error),
    #[error("{0} cannot be a name in TLS")]
    Name(String),
}

/// An end of a stream that carries frames as a link over QUIC does: a header of 40 bytes, then the payload.
pub struct StreamPort<S> {
    stream: BufReader<S>,
    /// The socket below, for its timeouts.
    socket: TcpStream,
    patience: Option<Duration>,
    decoder: Decoder,
    sequence: u64,
}

/// A port over plain TCP, without Nagle's delay.
///
/// # Errors
/// [`StreamError::Io`].
pub fn plain(socket: TcpStream, payload_bytes: usize) -> Result<StreamPort<TcpStream>, StreamError> {
    let stream = socket.try_clone()?;
    StreamPort::new(stream, socket, payload_bytes)
}

/// A port over TLS 1.3 at the end that dialled; the other one must be `peer`, of the same cluster.
///
/// # Errors
/// [`StreamError`]: also when the handshake fails.
pub fn dialled(
    socket: TcpStream,
    identity: &Identity,
    peer: &PeerName,
    payload_bytes: usize,
) -> Result<StreamPort<StreamOwned<ClientConnection, TcpStream>>, StreamError> {
    let name = ServerName::try_from(peer.to_string()).map_err(|_| StreamError::Name(peer.to_string()))?;
    let connection = ClientConnection::new(Arc::new(tls::rustls_client(identity)?), name)?;
    let mut stream = StreamOwned::new(connection, socket.try_clone()?);
    prepare(&socket)?;
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    StreamPort::new(stream, socket, payload_bytes)
}

/// A port over TLS 1.3 at the end that listened; the other one must be of the same cluster.
///
/// # Errors
/// [`StreamError`]: also when the handshake fails.
pub fn accepted(
    socket: TcpStream,
    identity: &Identity,
    payload_bytes: usize,
) -> Result<StreamPort<StreamOwned<ServerConnection, TcpStream>>, StreamError> {
    let connection = ServerConnection::new(Arc::new(tls::rustls_server(identity)?))?;
    let mut stream = StreamOwned::new(connection, socket.try_clone()?);
    prepare(&socket)?;
    while stream.conn.is_handshaking() {
        stream.conn.complete_io(&mut stream.sock)?;
    }
    StreamPort::new(stream, socket, payload_bytes)
}

fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(HANDSHAKE))
}

impl<S: Read + Write> StreamPort<S> {
    fn new(stream: S, socket: TcpStream, payload_bytes: usize) -> Result<StreamPort<S>, StreamError> {
        prepare(&socket)?;
        let (stream, decoder) = (BufReader::with_capacity(AHEAD, stream), Decoder::new(payload_bytes));
        Ok(StreamPort { stream, socket, patience: None, decoder, sequence: 0 })
    }

    /// Header and payload at once, as far as the stream takes them.
    fn write(&mut self, header: &[u8], payload: &[u8]) -> io::Result<()> {
        let stream = self.stream.get_mut();
        let mut written = 0;
        while written < header.len() {
            let rest = [IoSlice::new(&header[written..]), IoSlice::new(payload)];
            match stream.write_vectored(&rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        stream.write_all(&payload[written - header.len()..])?;
        stream.flush()
    }
}

impl<S: Read + Write + Send> Port for StreamPort<S> {
    fn send(&mut self, frame: Frame) -> Result<(), PortError> {
        let found = frame.payload.len();
        if found > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLarge { found, limit: PAYLOAD_BYTES_MAX }.into());
        }
        self.sequence += 1;
        let message = Message::Frame { sequence: self.sequence, frame };
        self.write(&message.header(), &message.payload()).map_err(|_| PortError::Closed)
    }

    /// The system has buffers of its own, of which it is not known how full they are.
    fn has_room(&self) -> bool {
        true
    }

    /// The time counts from the last bytes that came.
    fn receive(&mut self, timeout: Duration) -> Result<Arrival, PortError> {
        if self.patience != Some(timeout) {
            let least = timeout.max(Duration::from_millis(1));
            self.socket.set_read_timeout(Some(least)).map_err(|_| PortError::Closed)?;
            self.patience = Some(timeout);
        }
        loop {
            match self.stream.read(self.decoder.space()) {
                Ok(0) => return Err(PortError::Closed),
                Ok(count) => {
                    if let Some(Message::Frame { frame, .. }) = self.decoder.advance(count)? {
                        return Ok(Arrival { frame, at: Instant::now() });
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(PortError::Timeout { timeout });
                }
                Err(_) => return Err(PortError::Closed),
            }
        }
    }
}
