//! QUIC's settings for networks of workstations. Each says what it was measured to do (`benches/LOG.md`, "QUIC between
//! stages").

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use quinn::{
    AckFrequencyConfig, EndpointConfig, IdleTimeout, MtuDiscoveryConfig, ServerConfig, TransportConfig, VarInt,
};
use socket2::{Domain, Protocol, Socket, Type};

use super::congestion::Tolerant;

/// A neighbour that was silent for so long is lost: what is given up then is what it holds. A rival takes 41 s.
pub const SILENCE: Duration = Duration::from_millis(1800);
/// A connection that is silent for so long is given up and dialled again; what was on it is sent again. Shorter than
/// [`SILENCE`], so that there is time for it.
const IDLE: Duration = Duration::from_millis(1000);
/// How often a connection without links says that it is alive.
const KEEP_ALIVE: Duration = Duration::from_millis(300);
/// Largest payload that path discovery looks for. Ten datagrams go to the system as one message, of at most 65507 bytes;
/// longer ones are dropped without a word and come again one by one. With 9000 a frame of 1 MiB takes 284 ms there and
/// back, with 6500 2.3 ms, with 1452 7.3 ms.
const MTU_MAX: u16 = 6500;
const _: () = assert!(10 * MTU_MAX as usize <= 65_507);
/// An outage looks as if large datagrams did not pass any more; after so long they are tried again.
const MTU_AGAIN: Duration = Duration::from_secs(5);
/// Streams of data that a peer may have opened at once: a link has one.
const STREAMS: u32 = 256;
/// Streams of control that a peer may have opened at once: a head has one a session.
const CONTROLS: u32 = 16;
/// Bytes in flight before the first acknowledgement: a token's activations, and what 10 Gbit/s carry in a tenth of a
/// millisecond. 14 KiB and 1 MiB are no slower and no faster between processes; a larger one only fills the buffers of a
/// switch.
pub(super) const INITIAL_WINDOW: u64 = 128 << 10;
/// Bytes that a peer may send on a stream before they are read. Readers always read on, so little of it is ever held;
/// who sends what nobody can read makes this end hold so much. As fast as four times as much.
const STREAM_WINDOW: u32 = 4 << 20;
/// Bytes that a peer may send on all streams of a connection before they are read: 1 Gbit/s for 60 ms.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// What the socket is asked to hold, each way, where the system allows it: what comes on 1 Gbit/s while the I/O thread
/// waits 16 ms for a processor. Of datagrams between processes 0.03 % are lost, with 208 KiB, Linux's default, 0.8 %.
const SOCKET_BUFFER: usize = 2 << 20;
/// Handshakes that wait for their turn, each with a datagram or two; more get no answer and come again.
const INCOMING: usize = 256;
/// Bytes that are kept of one of them.
const INCOMING_BYTES: u64 = 16 << 10;
/// Datagrams that are received before one is sent to say so, where no other goes back: a few frames' worth. Fewer than a
/// window has after losses, so that a sender does not wait for it.
const UNACKNOWLEDGED: u32 = 4;
/// What a receiver may wait before it says so all the same.
const ACK_DELAY: Duration = Duration::from_millis(5);
/// What the round trip is taken for before it is measured: a lost first datagram is sent again after three times as
/// long. With QUIC's 333 ms, two of them would be all that fits into [`SILENCE`].
const FIRST_RTT: Duration = Duration::from_millis(50);

/// The socket of an endpoint. That of an IPv6 address takes IPv4 as well.
///
/// # Errors
/// The system's.
pub fn socket(listen: SocketAddr) -> std::io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(listen), Type::DGRAM, Some(Protocol::UDP))?;
    if listen.is_ipv6() {
        // Where the system cannot, IPv4 is not reached.
        let _ = socket.set_only_v6(false);
    }
    // As much as there is.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.bind(&listen.into())?;
    Ok(socket.into())
}

/// What the system does for sockets as [`socket`] makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketFacts {
    /// Datagrams that are sent by one call; 1 where the system takes no more (GSO).
    pub segments_sent: usize,
    /// Datagrams that are received as one (GRO).
    pub segments_received: usize,
    /// Bytes that wait to be received.
    pub receive_bytes: usize,
    /// Bytes that wait to be sent.
    pub send_bytes: usize,
    /// What was asked for, of either.
    pub wanted_bytes: usize,
}

/// Makes a socket and looks.
///
/// # Errors
/// The system's.
pub fn facts() -> std::io::Result<SocketFacts> {
    let socket = Socket::from(socket((std::net::Ipv4Addr::UNSPECIFIED, 0).into())?);
    // Linux counts its own bookkeeping, and so says twice of what it was asked for.
    let (receive, send) = (socket.recv_buffer_size()? / 2, socket.send_buffer_size()? / 2);
    let state = quinn::udp::UdpSocketState::new((&socket).into())?;
    Ok(SocketFacts {
        segments_sent: state.max_gso_segments(),
        segments_received: state.gro_segments(),
        receive_bytes: receive,
        send_bytes: send,
        wanted_bytes: SOCKET_BUFFER,
    })
}

/// Settings of who listens.
pub fn listening(config: &mut ServerConfig) {
    config
        .transport_config(members())
        .max_incoming(INCOMING)
        .incoming_buffer_size(INCOMING_BYTES)
        .incoming_buffer_size_total(INCOMING_BYTES * INCOMING as u64);
}

/// Settings of the endpoint.
pub fn endpoint() -> EndpointConfig {
    let mut config = EndpointConfig::default();
    config.max_udp_payload_size(MTU_MAX).expect("a UDP payload");
    config
}

/// Settings of connections between members.
pub fn members() -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    let mut mtu = MtuDiscoveryConfig::default();
    mtu.upper_bound(MTU_MAX).black_hole_cooldown(MTU_AGAIN);
    let congestion = Tolerant { initial: INITIAL_WINDOW, most: CONNECTION_WINDOW.into() };
    // Every datagram costs both ends their way through the system: a frame of 8 KiB there and back takes a fifth less
    // processor time with these and fewer messages of the link.
    let mut acks = AckFrequencyConfig::default();
    acks.ack_eliciting_threshold(VarInt::from_u32(UNACKNOWLEDGED)).max_ack_delay(Some(ACK_DELAY));
    config
        .max_concurrent_bidi_streams(VarInt::from_u32(CONTROLS))
        .max_concurrent_uni_streams(VarInt::from_u32(STREAMS))
        .stream_receive_window(VarInt::from_u32(STREAM_WINDOW))
        .receive_window(VarInt::from_u32(CONNECTION_WINDOW))
        .send_window(u64::from(CONNECTION_WINDOW))
        .initial_rtt(FIRST_RTT)
        .max_idle_timeout(IdleTimeout::try_from(IDLE).ok())
        .keep_alive_interval(Some(KEEP_ALIVE))
        .mtu_discovery_config(Some(mtu))
        .ack_frequency_config(Some(acks))
        .congestion_controller_factory(Arc::new(congestion))
        .datagram_receive_buffer_size(None);
    Arc::new(config)
}
