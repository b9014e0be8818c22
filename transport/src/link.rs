//! One end of a link between two hosts, as a value: what it writes, what it makes of what it reads, and when. It does
//! no I/O and reads no clock; a shell moves the bytes and says what time it is.
//!
//! A link outlives its connections. Frames are numbered, kept until the other end has acknowledged them, and after a
//! reconnection sent again from where the other end stands: every frame that [`Link::send`] accepts is taken once and
//! in order, or the link is [`LinkState::Lost`]. A receiver grants credits, so frames lie at its end but never more
//! than [`LinkLimits::credits`].
//!
//! A shell, for every connection:
//!
//! - The side that dials calls [`Link::connected`] with [`Link::next_generation`]. The side that accepts reads the
//!   [`Hello`], finds the link that it names, and calls [`Link::connected`] with the generation in it, then
//!   [`Link::handle`]. Of two connections the later generation is the link; what still comes on the other is ignored.
//! - What was read goes through a [`Decoder`] of its own to [`Link::handle`], pieces of a message that is not whole yet
//!   to [`Link::heard`]: the shell always reads on, credits bound what comes.
//! - Whenever the connection takes bytes: [`Link::poll_transmit`].
//! - When [`Link::poll_timeout`] has passed, and all that had come by then was handled: [`Link::handle_timeout`]. A
//!   shell that was kept from the processor for a while so takes nobody for dead who has spoken.
//! - When the connection is gone, or an error made it of no use: [`Link::disconnected`].
//!
//! Memory: an end holds at most `credits` payloads that it may have to send again, and as many that nobody took. So it
//! is `2 · credits · payload_bytes`, and one payload more in the decoder.

mod wire;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use thiserror::Error;

pub use wire::{Ack, Decoder, Hello, Message};

use crate::frame::{Frame, PAYLOAD_BYTES_MAX};
use crate::port::Arrival;

/// Signs of life in the time after which silence means death: some may be late, and one lost connection may be
/// replaced, before a neighbour is taken for dead.
const BEATS: u32 = 6;
/// Credits that a receiver gives back at once at most: a message for every frame costs both ends, and what is not
/// acknowledged is kept.
const OWED_MAX: u64 = 4;

/// A neighbour needs some time to speak; and any moment with a silence behind it is one that a clock can tell.
const SILENCES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(86_400);

/// Which link it is. Both ends must name the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LinkId {
    /// The pipeline's lease, as the head has drawn it.
    pub session: u64,
    /// The link within the pipeline.
    pub link: u32,
}

/// What a link may hold and how long it waits. Both ends should have the same; if they differ, the smaller number of
/// credits counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkLimits {
    /// Frames that lie at an end untaken, each way; at least 1. Also the frames that a sender keeps to send them again.
    pub credits: u64,
    /// Bytes of the largest payload; at most [`PAYLOAD_BYTES_MAX`].
    pub payload_bytes: usize,
    /// How long nothing is heard until the neighbour is lost, connected or not; a millisecond to a day. Signs of life
    /// come six times as often.
    pub silence: Duration,
}

/// How a link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkState {
    /// Connected, and the neighbour has said hello.
    Up,
    /// Not connected, or not greeted yet.
    Down {
        /// From when on.
        since: Instant,
    },
    /// Nothing was heard for [`LinkLimits::silence`]. What was not acknowledged is given up. Final.
    Lost {
        /// How long nothing had been heard when it was noticed.
        silent: Duration,
    },
    /// Both ends have said bye and all frames have arrived. Final. What [`Link::poll_transmit`] still has is to be
    /// written, and the link is best kept for another [`LinkLimits::silence`], connected if need be: an end that lost
    /// its connection before it heard of the other's farewell asks again.
    Closed,
}

/// Why a frame was not accepted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum SendError {
    #[error("frame {sequence} has to wait, the neighbour takes frames up to {granted}")]
    Full { sequence: u64, granted: u64 },
    #[error("frame has a payload of {found} bytes, the link's limit is {limit}")]
    TooLarge { found: usize, limit: usize },
    #[error("the link is closed")]
    Closed,
    #[error("the neighbour is lost, it was silent for {} ms", silent.as_millis())]
    Lost { silent: Duration },
}

/// How a neighbour breaks the protocol.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum LinkError {
    #[error("neighbour speaks of session {:#018x} link {}, this is session {:#018x} link {}", found.session, found.link, expected.session, expected.link)]
    OtherLink { expected: LinkId, found: LinkId },
    #[error("neighbour speaks of generation {found}, the connection is generation {expected}")]
    OtherGeneration { expected: u64, found: u64 },
    #[error("neighbour did not say hello first on the connection of generation {generation}")]
    NoHello { generation: u64 },
    #[error("neighbour said hello twice on the connection of generation {generation}")]
    SecondHello { generation: u64 },
    #[error("neighbour sent number {found}, {expected} was next")]
    Gap { expected: u64, found: u64 },
    #[error("neighbour sent number {found}, it has credits up to {granted}")]
    BeyondCredits { granted: u64, found: u64 },
    #[error("neighbour sent a payload of {found} bytes, the link's limit is {limit}")]
    TooLarge { limit: usize, found: usize },
    #[error("neighbour sent number {found} after it had said bye with number {bye}")]
    AfterBye { bye: u64, found: u64 },
    #[error("neighbour acknowledges up to {found}, {sent} is the last that was sent")]
    AckOfUnsent { sent: u64, found: u64 },
    #[error("neighbour acknowledges up to {found}, before it was {before}")]
    AckGoesBack { before: u64, found: u64 },
    #[error("neighbour grants up to {found}, before it was {before}")]
    GrantGoesBack { before: u64, found: u64 },
}

/// One end of a link.
pub struct Link {
    id: LinkId,
    limits: LinkLimits,
    connection: Option<Connection>,
    /// Of the latest connection there was.
    generation: u64,
    outgoing: Outgoing,
    incoming: Incoming,
    /// No frame is accepted any more.
    is_closing: bool,
    /// Since when there was no connection that was greeted on.
    down: Instant,
    heard: Instant,
    wrote: Instant,
    ack_is_due: bool,
    /// How it ended when silence ended it.
    over: Option<LinkState>,
}

/// The connection that is the link at present.
struct Connection {
    said_hello: bool,
    heard_hello: bool,
}

/// The way out. Numbers of frames; 0 is none.
#[derive(Default)]
struct Outgoing {
    /// Accepted from the engine.
    accepted: u64,
    /// The next to write on this connection.
    next: u64,
    /// Written on any connection.
    written: u64,
    acknowledged: u64,
    granted: u64,
    /// Those behind `acknowledged`, up to `accepted`; nothing in the place of one that was forgotten.
    kept: VecDeque<Option<Frame>>,
}

/// The way in. Numbers of frames; 0 is none.
#[derive(Default)]
struct Incoming {
    received: u64,
    /// Granted in what was written.
    granted: u64,
    untaken: VecDeque<Arrival>,
    /// The neighbour has said bye, with the number `received`.
    has_ended: bool,
}

impl Link {
    /// An end that is not connected; `silence` counts from now.
    ///
    /// # Panics
    /// When the limits allow no frame, or a number in them is out of the range that it says.
    pub fn new(id: LinkId, limits: LinkLimits, now: Instant) -> Link {
        assert!(limits.credits > 0, "a link holds at least one frame");
        assert!(
            limits.payload_bytes <= PAYLOAD_BYTES_MAX,
            "link takes payloads of {} bytes, frames have at most {PAYLOAD_BYTES_MAX}",
            limits.payload_bytes
        );
        assert!(SILENCES.contains(&limits.silence), "silence of {:?} is not in {SILENCES:?}", limits.silence);
        Link {
            id,
            limits,
            connection: None,
            generation: 0,
            outgoing: Outgoing::default(),
            incoming: Incoming::default(),
            is_closing: false,
            down: now,
            heard: now,
            wrote: now,
            ack_is_due: false,
            over: None,
        }
    }

    /// Which link it is.
    pub fn id(&self) -> LinkId {
        self.id
    }

    /// What it may hold.
    pub fn limits(&self) -> LinkLimits {
        self.limits
    }

    /// What the dialling side calls its next connection.
    pub fn next_generation(&self) -> u64 {
        self.generation.saturating_add(1)
    }

    /// The connection that [`Link::poll_transmit`] writes to, if there is one.
    pub fn generation(&self) -> Option<u64> {
        self.connection.as_ref().map(|_| self.generation)
    }

    /// Fresh streams are there, those of generation 1 or a later one. Replaces the connection before. False if there
    /// has been one of this generation or a later one, or the link is lost: the new one is to be dropped. That a
    /// connection comes about is no sign of life; a host accepts them for a neighbour that has given up the link.
    pub fn connected(&mut self, now: Instant, generation: u64) -> bool {
        if generation <= self.generation || self.is_lost() {
            return false;
        }
        if self.state() == LinkState::Up {
            self.down = now;
        }
        self.generation = generation;
        self.connection = Some(Connection { said_hello: false, heard_hello: false });
        true
    }

    /// The connection of that generation is gone. Nothing, if another one has replaced it.
    pub fn disconnected(&mut self, now: Instant, generation: u64) {
        if self.is_current(generation) {
            if self.state() == LinkState::Up {
                self.down = now;
            }
            self.connection = None;
        }
    }

    /// How the link is, so far as it was told.
    pub fn state(&self) -> LinkState {
        if let Some(over) = self.over {
            return over;
        }
        if self.incoming.has_ended && self.outgoing.acknowledged > self.outgoing.accepted {
            return LinkState::Closed;
        }
        let is_up = self.connection.as_ref().is_some_and(|connection| connection.heard_hello);
        if is_up { LinkState::Up } else { LinkState::Down { since: self.down } }
    }

    /// Whether [`Link::send`] accepts a frame now.
    pub fn can_send(&self) -> bool {
        !self.is_closing && !self.is_lost() && self.outgoing.accepted < self.window()
    }

    /// Accepts a frame and keeps it until it has arrived. Connected or not: only what has a credit is accepted, so it
    /// can always be sent.
    ///
    /// # Errors
    /// [`SendError::Full`] when the neighbour has granted no more: it has to take some first.
    /// [`SendError::TooLarge`] for a payload over the link's limit; [`SendError::Closed`] after a bye from here or from
    /// there; [`SendError::Lost`].
    pub fn send(&mut self, frame: Frame) -> Result<(), SendError> {
        if let Some(LinkState::Lost { silent }) = self.over {
            return Err(SendError::Lost { silent });
        }
        if self.is_closing {
            return Err(SendError::Closed);
        }
        if frame.payload.len() > self.limits.payload_bytes {
            return Err(SendError::TooLarge { found: frame.payload.len(), limit: self.limits.payload_bytes });
        }
        let sequence = self.outgoing.accepted + 1;
        if sequence > self.window() {
            return Err(SendError::Full { sequence, granted: self.window() });
        }
        self.outgoing.accepted = sequence;
        self.outgoing.kept.push_back(Some(frame));
        Ok(())
    }

    /// Frames of epochs before this one that have not arrived need not any more: their payloads are let go of, and
    /// what was not written yet is not delivered. Those that were written may still be.
    pub fn forget_before(&mut self, epoch: u64) {
        for kept in &mut self.outgoing.kept {
            if kept.as_ref().is_some_and(|frame| frame.header.epoch < epoch) {
                *kept = None;
            }
        }
    }

    /// Accepts no more frames. What has been accepted arrives first, each way, then the link is
    /// [`LinkState::Closed`]; the neighbour's end does the same when it hears of it.
    pub fn close(&mut self) {
        self.is_closing = true;
    }

    /// The next message to write on the current connection, whole and in this order. It counts as written: should the
    /// connection be lost before, the next one makes good for it.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Message> {
        let (stands, owed) = (self.stands(), self.owed());
        let connection = self.connection.as_mut()?;
        let out = &mut self.outgoing;
        let message = if !connection.said_hello {
            connection.said_hello = true;
            Message::Hello(Hello { id: self.id, generation: self.generation, ack: stands })
        } else if self.ack_is_due {
            Message::Ack(stands)
        } else if !connection.heard_hello {
            // Only the neighbour's hello says where to go on.
            return None;
        } else if out.next <= out.accepted && owed > 0 {
            // With the frame that follows it costs nothing.
            Message::Ack(stands)
        } else if out.next <= out.accepted {
            let sequence = out.next;
            out.next += 1;
            match &out.kept[(sequence - out.acknowledged - 1) as usize] {
                Some(frame) => Message::Frame { sequence, frame: frame.clone() },
                None => Message::Forgotten { sequence },
            }
        } else if self.is_closing && out.next == out.accepted + 1 {
            out.next += 1;
            Message::Bye { sequence: out.accepted + 1 }
        } else {
            return None;
        };
        out.written = out.written.max(out.next.saturating_sub(1));
        if matches!(message, Message::Hello(_) | Message::Ack(_)) {
            self.incoming.granted = stands.granted;
            self.ack_is_due = false;
        }
        self.wrote = now;
        Some(message)
    }

    /// A message that came on the connection of that generation. Nothing, if another has replaced it or the link is
    /// lost.
    ///
    /// # Errors
    /// [`LinkError`]: the neighbour breaks the protocol. Nothing has changed, and the connection is of no use.
    pub fn handle(&mut self, now: Instant, generation: u64, message: Message) -> Result<(), LinkError> {
        if !self.is_current(generation) {
            return Ok(());
        }
        let was_greeted = self.connection.as_ref().is_some_and(|connection| connection.heard_hello);
        match message {
            Message::Hello(_) if was_greeted => return Err(LinkError::SecondHello { generation }),
            Message::Hello(hello) => self.greeted(hello)?,
            _ if !was_greeted => return Err(LinkError::NoHello { generation }),
            Message::Ack(ack) => {
                // Of those written on an earlier connection, the hello has said whether they arrived.
                self.check(ack, self.outgoing.next - 1)?;
                self.outgoing.acknowledge(ack);
            }
            Message::Frame { sequence, frame } => {
                self.incoming.check(sequence)?;
                self.incoming.check_credit(sequence)?;
                let (found, limit) = (frame.payload.len(), self.limits.payload_bytes);
                if found > limit {
                    return Err(LinkError::TooLarge { limit, found });
                }
                self.incoming.received = sequence;
                self.incoming.untaken.push_back(Arrival { frame, at: now });
            }
            Message::Forgotten { sequence } => {
                self.incoming.check(sequence)?;
                self.incoming.check_credit(sequence)?;
                self.incoming.received = sequence;
                self.ack_is_due = true;
            }
            Message::Bye { sequence } => {
                self.incoming.check(sequence)?;
                self.incoming.received = sequence;
                self.incoming.has_ended = true;
                self.is_closing = true;
                self.ack_is_due = true;
            }
        }
        self.heard = self.heard.max(now);
        Ok(())
    }

    /// Bytes came on the connection of that generation that complete no message yet: who sends a large frame is alive.
    pub fn heard(&mut self, now: Instant, generation: u64) {
        if self.is_current(generation) {
            self.heard = self.heard.max(now);
        }
    }

    /// The next frame that has arrived, and when. Gives its credit back; the neighbour hears of it with the next frame
    /// from here, or when there are some ([`Link::has_ack_due`]), or with a sign of life.
    pub fn take(&mut self) -> Option<Arrival> {
        let arrival = self.incoming.untaken.pop_front()?;
        self.ack_is_due |= !self.incoming.has_ended && self.owed() >= self.owed_most();
        Some(arrival)
    }

    /// Whether the neighbour is to hear where this end stands: [`Link::poll_transmit`] has something to say.
    pub fn has_ack_due(&self) -> bool {
        self.ack_is_due
    }

    /// Whether [`Link::take`] has nothing and never will: the neighbour has said bye or is lost, and what came was
    /// taken.
    pub fn has_ended(&self) -> bool {
        self.incoming.untaken.is_empty() && (self.incoming.has_ended || self.over.is_some())
    }

    /// When [`Link::handle_timeout`] is wanted.
    pub fn poll_timeout(&self) -> Option<Instant> {
        if matches!(self.state(), LinkState::Lost { .. } | LinkState::Closed) {
            return None;
        }
        Some(self.beat().map_or(self.deadline(), |beat| beat.min(self.deadline())))
    }

    /// Time has passed: a sign of life becomes due, or the neighbour is lost. To be called when all that came before
    /// `now` was handled.
    pub fn handle_timeout(&mut self, now: Instant) {
        if matches!(self.state(), LinkState::Lost { .. } | LinkState::Closed) {
            return;
        }
        self.ack_is_due |= self.beat().is_some_and(|beat| now >= beat);
        if now >= self.deadline() {
            let out = &mut self.outgoing;
            // All frames have arrived, each way. Only the word that the bye has, too, was lost with the neighbour.
            let is_closed = self.incoming.has_ended && out.acknowledged == out.accepted;
            let silent = now.saturating_duration_since(self.heard);
            self.over = Some(if is_closed { LinkState::Closed } else { LinkState::Lost { silent } });
            out.kept.clear();
            self.connection = None;
        }
    }

    /// When a sign of life is due, unless one waits to be written.
    fn beat(&self) -> Option<Instant> {
        let speaks = self.connection.as_ref().is_some_and(|connection| connection.said_hello) && !self.ack_is_due;
        speaks.then(|| self.wrote + self.limits.silence / BEATS)
    }

    /// When the neighbour is lost unless it is heard.
    fn deadline(&self) -> Instant {
        self.heard + self.limits.silence
    }

    /// Takes the other end's hello, and goes on behind what it has.
    fn greeted(&mut self, hello: Hello) -> Result<(), LinkError> {
        if hello.id != self.id {
            return Err(LinkError::OtherLink { expected: self.id, found: hello.id });
        }
        if hello.generation != self.generation {
            return Err(LinkError::OtherGeneration { expected: self.generation, found: hello.generation });
        }
        self.check(hello.ack, self.outgoing.written)?;
        self.outgoing.acknowledge(hello.ack);
        self.outgoing.next = hello.ack.received + 1;
        if let Some(connection) = &mut self.connection {
            connection.heard_hello = true;
        }
        Ok(())
    }

    /// An acknowledgement of what `sent` is the last of.
    fn check(&self, ack: Ack, sent: u64) -> Result<(), LinkError> {
        let Ack { received, granted } = ack;
        if received > sent {
            return Err(LinkError::AckOfUnsent { sent, found: received });
        }
        if received < self.outgoing.acknowledged {
            return Err(LinkError::AckGoesBack { before: self.outgoing.acknowledged, found: received });
        }
        if granted < self.outgoing.granted {
            return Err(LinkError::GrantGoesBack { before: self.outgoing.granted, found: granted });
        }
        Ok(())
    }

    /// Credits that the neighbour has back and has not heard of.
    fn owed(&self) -> u64 {
        self.stands().granted - self.incoming.granted
    }

    /// So many are told without a frame to tell them with: a neighbour always has one to go on with.
    fn owed_most(&self) -> u64 {
        self.limits.credits.div_ceil(2).min(OWED_MAX)
    }

    /// Where this end stands as a receiver.
    fn stands(&self) -> Ack {
        let Incoming { received, untaken, .. } = &self.incoming;
        let granted = (received - untaken.len() as u64).saturating_add(self.limits.credits);
        Ack { received: *received, granted }
    }

    fn is_lost(&self) -> bool {
        matches!(self.over, Some(LinkState::Lost { .. }))
    }

    fn is_current(&self, generation: u64) -> bool {
        self.connection.is_some() && generation == self.generation
    }

    /// The last number that may be sent. Whatever a neighbour grants, no more than `credits` are kept.
    fn window(&self) -> u64 {
        self.outgoing.granted.min(self.outgoing.acknowledged.saturating_add(self.limits.credits))
    }
}

impl Outgoing {
    /// Lets go of what has arrived.
    fn acknowledge(&mut self, ack: Ack) {
        // The bye has a number and is not kept.
        let arrived = (ack.received - self.acknowledged).min(self.kept.len() as u64);
        self.kept.drain(..arrived as usize);
        (self.acknowledged, self.granted) = (ack.received, ack.granted);
    }
}

impl Incoming {
    /// The number of a frame, or of what counts as one.
    fn check(&self, found: u64) -> Result<(), LinkError> {
        if self.has_ended {
            return Err(LinkError::AfterBye { bye: self.received, found });
        }
        let expected = self.received + 1;
        if found == expected { Ok(()) } else { Err(LinkError::Gap { expected, found }) }
    }

    fn check_credit(&self, found: u64) -> Result<(), LinkError> {
        let granted = self.granted;
        if found <= granted { Ok(()) } else { Err(LinkError::BeyondCredits { granted, found }) }
    }
}
