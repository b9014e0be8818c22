//! An end of a link for threads: a [`Link`] behind a lock, moved by the node's tasks.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn::{RecvStream, SendStream, VarInt, WriteError};
use tokio::sync::Notify;

use super::drive::Drive;
use super::line::{Close, Line};
use super::node::{CONTROL, Inner};
use super::peer::Dialled;
use super::tuning;
use crate::frame::{Frame, FrameError};
use crate::identity::PeerName;
use crate::link::{Decoder, Hello, Link, LinkError, LinkId, LinkLimits, LinkState, Message, SendError};
use crate::port::{Arrival, Port, PortError};

/// How long a link whose port was dropped may take to bring the neighbour what it still has.
pub(super) const LINGER: Duration = Duration::from_secs(2);
/// A timer that is as late as this says that whoever does the node's work was kept from it.
const LATE: Duration = Duration::from_millis(10);
/// What it then needs to read what has come in the meantime.
const CATCH_UP: Duration = Duration::from_millis(20);

/// Payloads over this are left to the I/O thread; a connection sends so much before anything is acknowledged.
const MUCH: usize = tuning::INITIAL_WINDOW as usize;

/// An end of a link to another host. Clones are the same end; the last one that is dropped closes it.
#[derive(Clone)]
pub struct LinkPort(Arc<Held>);

/// Closes the link with the last clone of its port.
struct Held {
    shared: Arc<Shared>,
    /// The connection is kept for those who have a link on it.
    _dialled: Option<Arc<Dialled>>,
}

/// What threads and tasks share of a link's end.
pub(super) struct Shared {
    pub(super) id: LinkId,
    pub(super) limits: LinkLimits,
    pub(super) peer: PeerName,
    /// Whether this end opens the streams.
    pub(super) dials: bool,
    drive: Arc<Drive>,
    state: Mutex<State>,
    /// Something has changed, for threads.
    changed: Condvar,
    /// The same for tasks that wait for an end: of a connection, of the port, of the link.
    ends: Notify,
    /// The timeout may be earlier.
    timer: Notify,
}

#[derive(Default)]
struct State {
    /// Nothing before the neighbour has come, at the end that waits for it.
    link: Option<Link>,
    /// No connection will carry it any more: an end went, refused the other, or this node is closed.
    is_ended: bool,
    /// The port was dropped.
    is_left: bool,
    /// Wakes the writer of the latest connection. Each has its own, so none takes another's call.
    writer: Arc<Notify>,
    writers: usize,
    /// The latest connection.
    line: Weak<Line>,
    /// Whether somebody reads it.
    has_reader: bool,
    /// Until when the timer sleeps.
    planned: Option<Instant>,
    /// Threads that wait while another does the node's work.
    waiting: usize,
    /// How often they were woken.
    woken: u64,
    /// Wakes the one that does it and waits.
    waker: Option<Waker>,
    /// One of them waits for credits.
    wants_credit: bool,
    /// The latest frame, either way, was large.
    has_much: bool,
}

/// A connection's turn to be the link.
pub(super) struct Turn {
    pub(super) generation: u64,
    call: Arc<Notify>,
}

impl LinkPort {
    pub(super) fn new(shared: Arc<Shared>, dialled: Option<Arc<Dialled>>, node: Arc<Inner>) -> LinkPort {
        let held = Held { shared: shared.clone(), _dialled: dialled };
        if node.is_closed() {
            shared.end();
        }
        LinkPort(Arc::new(held))
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &PeerName {
        &self.0.shared.peer
    }

    /// How the link is; nothing while it waits for the neighbour to come for the first time.
    pub fn state(&self) -> Option<LinkState> {
        self.0.shared.lock().link.as_ref().map(Link::state)
    }

    /// Frames of older epochs need not arrive any more ([`Link::forget_before`]).
    pub fn forget_before(&self, epoch: u64) {
        if let Some(link) = self.0.shared.lock().link.as_mut() {
            link.forget_before(epoch);
        }
    }

    /// As [`Port::send`], by any clone.
    ///
    /// # Errors
    /// As [`Port::send`].
    pub fn send_frame(&self, frame: Frame) -> Result<(), PortError> {
        let shared = &self.0.shared;
        let sent = shared.wait_for(None, true, |state| state.send(&frame));
        sent.unwrap_or(Err(PortError::Closed))?;
        shared.write_out(frame.payload.len());
        Ok(())
    }

    /// As [`Port::receive`], by any clone.
    ///
    /// # Errors
    /// As [`Port::receive`].
    pub fn receive_frame(&self, timeout: Duration) -> Result<Arrival, PortError> {
        let shared = &self.0.shared;
        let until = Instant::now().checked_add(timeout);
        let (arrival, is_ack_due) =
            shared.wait_for(until, false, State::take).ok_or(PortError::Timeout { timeout })??;
        if is_ack_due {
            shared.write_out(arrival.frame.payload.len());
        }
        Ok(arrival)
    }
}

impl Port for LinkPort {
    fn send(&mut self, frame: Frame) -> Result<(), PortError> {
        self.send_frame(frame)
    }

    fn has_room(&self) -> bool {
        let state = self.0.shared.lock();
        state.is_over() || state.link.as_ref().is_some_and(Link::can_send)
    }

    fn receive(&mut self, timeout: Duration) -> Result<Arrival, PortError> {
        self.receive_frame(timeout)
    }
}

impl Drop for Held {
    /// What was sent still arrives, if the neighbour takes it soon.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_left = true;
        match state.link.as_mut() {
            Some(link) => link.close(),
            // Nobody has come, and nobody is waited for any more.
            None => state.is_ended = true,
        }
        state.writer.notify_one();
        drop(state);
        self.shared.timer.notify_one();
        self.shared.ends.notify_waiters();
    }
}

impl Shared {
    pub(super) fn new(id: LinkId, limits: LinkLimits, peer: PeerName, dials: bool, node: &Inner) -> Arc<Shared> {
        let link = dials.then(|| Link::new(id, limits, Instant::now()));
        let state = Mutex::new(State { link, ..State::default() });
        let (changed, ends, timer) = (Condvar::new(), Notify::new(), Notify::new());
        let drive = node.drive.clone();
        Arc::new(Shared { id, limits, peer, dials, drive, state, changed, ends, timer })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `look` finds something; nothing if that is not before `until`. A thread that waits for data does the
    /// node's work meanwhile, if it is the only one. Time that passes changes something, too: [`Shared::keep_time`].
    fn wait_for<T>(
        &self,
        until: Option<Instant>,
        wants_credit: bool,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return None;
            }
            state.wants_credit |= wants_credit;
            let shift = if self.is_control() { None } else { self.drive.shift_or_wait(!state.has_much) };
            let Some(mut shift) = shift else {
                state = self.sleep(state, left);
                continue;
            };
            drop(state);
            let found = std::future::poll_fn(|cx| {
                let mut state = self.lock();
                if let Some(found) = look(&mut state) {
                    return Poll::Ready(found);
                }
                state.wants_credit |= wants_credit;
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            });
            return shift.run(async {
                match until {
                    None => Some(found.await),
                    Some(until) => tokio::time::timeout_at(until.into(), found).await.ok(),
                }
            });
        }
    }

    /// Until something has changed, while another thread does the node's work, or for so long.
    fn sleep<'a>(&self, mut state: MutexGuard<'a, State>, left: Option<Duration>) -> MutexGuard<'a, State> {
        state.waiting += 1;
        let woken = state.woken;
        let mut state = match left {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        };
        if state.woken == woken {
            state.waiting -= 1;
            if !self.is_control() {
                self.drive.served(1, false);
            }
        }
        state
    }

    /// Something has changed for threads that wait, maybe what they wait for is there.
    fn tell(&self, mut state: MutexGuard<'_, State>, is_there: bool) {
        state.woken += 1;
        state.wants_credit = false;
        let (waiting, waker) = (std::mem::take(&mut state.waiting), state.waker.take());
        if waiting > 0 && !self.is_control() {
            self.drive.served(waiting, is_there);
        }
        drop(state);
        if waiting > 0 {
            self.changed.notify_all();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// There is something to write, with a payload of so many bytes: this thread does it, if no other does the node's
    /// work.
    fn write_out(&self, bytes: usize) {
        let writer = {
            let mut state = self.lock();
            state.has_much = bytes > MUCH;
            state.writer.clone()
        };
        if bytes > MUCH {
            writer.notify_one();
            return self.drive.call();
        }
        let Some(mut shift) = self.drive.shift() else { return writer.notify_one() };
        shift.run(async {
            writer.notify_one();
            // Behind what is to be done now.
            tokio::task::yield_now().await;
        });
    }

    fn is_control(&self) -> bool {
        self.id.link == CONTROL
    }

    /// Whether no frame will cross it any more.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_over()
    }

    /// Whether it is over, and the neighbour has been told so or cannot be.
    fn is_settled(&self) -> bool {
        let state = self.lock();
        state.is_over() && (state.writers == 0 || state.is_ended)
    }

    /// Whether the port was dropped and the neighbour may still be told something.
    pub(super) fn is_leaving(&self) -> bool {
        self.lock().is_left && !self.is_settled()
    }

    /// When nothing is left to do for it.
    pub(super) async fn settled(&self) {
        self.when(|shared| shared.is_settled()).await;
    }

    async fn when(&self, is_so: impl Fn(&Shared) -> bool) {
        loop {
            let told = self.ends.notified();
            tokio::pin!(told);
            // Before the look, so that no change falls between the two.
            told.as_mut().enable();
            if is_so(self) {
                return;
            }
            told.await;
        }
    }

    /// The life of the link, until it is forgotten: it learns what time it is, and goes some time after its port.
    pub(super) async fn live(self: Arc<Shared>, node: Arc<Inner>) {
        let leave = async {
            self.when(|shared| shared.lock().is_left).await;
            let _ = tokio::time::timeout(LINGER, self.settled()).await;
        };
        let time = async {
            self.keep_time().await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = leave => {}
            () = time => {}
        }
        node.forget(&self);
        self.end();
    }

    /// Nothing will carry it any more: whoever waits hears so, when what has come was taken.
    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.is_ended = true;
        state.writer.notify_one();
        self.tell(state, false);
        self.ends.notify_waiters();
        self.timer.notify_one();
    }

    /// Fresh streams are there, of a connection that `generation` counts; nothing where the link has no use for them.
    pub(super) fn connected(&self, generation: u64, line: &Arc<Line>) -> Option<Turn> {
        let now = Instant::now();
        let mut state = self.lock();
        if state.is_ended {
            return None;
        }
        let link = state.link.get_or_insert_with(|| Link::new(self.id, self.limits, now));
        if !link.connected(now, generation) {
            return None;
        }
        let call = Arc::new(Notify::new());
        // The writer before finds that it has been replaced.
        std::mem::replace(&mut state.writer, call.clone()).notify_one();
        (state.line, state.has_reader) = (Arc::downgrade(line), false);
        self.tell(state, false);
        self.ends.notify_waiters();
        self.timer.notify_one();
        Some(Turn { generation, call })
    }

    /// The connection of that generation is of no use to the link any more.
    pub(super) fn disconnected(&self, generation: u64, line: &Line) {
        let is_over = line.is_over();
        let mut state = self.lock();
        let is_current = state.is_current(generation);
        if let Some(link) = state.link.as_mut() {
            link.disconnected(Instant::now(), generation);
        }
        state.writer.notify_one();
        self.tell(state, false);
        if is_current && is_over {
            self.end();
        }
        self.ends.notify_waiters();
    }

    /// The connection is closed. Where it was the link and an end wanted it so, the link is over, too; whoever still
    /// reads what has come says so.
    pub(super) fn line_closed(&self, line: &Line) {
        let is_its = {
            let state = self.lock();
            !state.has_reader && std::ptr::eq(state.line.as_ptr(), line)
        };
        if is_its && line.is_over() {
            self.end();
        }
    }

    /// Lets the link know what time it is, until it is over.
    async fn keep_time(&self) {
        loop {
            let next = {
                let mut state = self.lock();
                let next = state.link.as_ref().map(Link::poll_timeout);
                if state.is_ended || next == Some(None) {
                    return;
                }
                state.planned = next.flatten();
                state.planned
            };
            let Some(next) = next else {
                self.timer.notified().await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = self.timer.notified() => continue,
            }
            // A thread that did not run for a while has not heard what was said: nobody is lost for that.
            if next.elapsed() > LATE {
                tokio::time::sleep(CATCH_UP).await;
            }
            let mut state = self.lock();
            let now = Instant::now();
            if let Some(link) = state.link.as_mut().filter(|link| link.poll_timeout().is_some_and(|at| at <= now)) {
                link.handle_timeout(now);
                let is_over = state.is_over();
                state.writer.notify_one();
                if is_over {
                    self.tell(state, false);
                    self.ends.notify_waiters();
                }
            }
        }
    }

    /// Writes what the link has to say on a connection, until it is replaced or lost.
    pub(super) async fn write(self: Arc<Shared>, line: Arc<Line>, stream: SendStream, turn: Turn) {
        self.lock().writers += 1;
        let written = self.write_on(stream, &turn).await;
        let has_reader = {
            let mut state = self.lock();
            state.writers -= 1;
            state.is_current(turn.generation) && state.has_reader
        };
        // What came before the connection was lost is still to be read; who reads it then says that it is gone.
        let is_read = has_reader && matches!(written, Err(WriteError::ConnectionLost(_)));
        if !is_read {
            self.disconnected(turn.generation, &line);
        }
        self.ends.notify_waiters();
    }

    async fn write_on(&self, mut stream: SendStream, turn: &Turn) -> Result<(), WriteError> {
        loop {
            let message = {
                let mut state = self.lock();
                if state.is_ended || !state.is_current(turn.generation) {
                    break;
                }
                let message = state.link.as_mut().and_then(|link| link.poll_transmit(Instant::now()));
                // With what was written the next sign of life has a time.
                let next = state.link.as_ref().and_then(Link::poll_timeout);
                if message.is_some() && next < state.planned {
                    self.timer.notify_one();
                }
                message
            };
            match message {
                Some(message) => {
                    let mut chunks = [Bytes::copy_from_slice(&message.header()), message.payload()];
                    let count = if chunks[1].is_empty() { 1 } else { 2 };
                    tokio::select! {
                        written = stream.write_all_chunks(&mut chunks[..count]) => written?,
                        // The other end may take nothing for ever; the link may be on another connection by now.
                        () = self.replaced(turn) => break,
                    }
                }
                None if self.is_over() => {
                    // The last word gets there before the stream ends.
                    let _ = stream.finish();
                    tokio::select! {
                        _ = stream.stopped() => {}
                        () = self.replaced(turn) => {}
                    }
                    return Ok(());
                }
                None => turn.call.notified().await,
            }
        }
        // Of a message that is half written no end comes.
        let _ = stream.reset(VarInt::from_u32(0));
        Ok(())
    }

    /// When another connection is the link, or none will be.
    async fn replaced(&self, turn: &Turn) {
        loop {
            turn.call.notified().await;
            let state = self.lock();
            if state.is_ended || !state.is_current(turn.generation) {
                return;
            }
        }
    }

    /// Reads what the neighbour says on a connection, from behind `hello`. What breaks the protocol costs the
    /// connection.
    pub(super) async fn read(
        self: Arc<Shared>,
        line: Arc<Line>,
        mut stream: RecvStream,
        generation: u64,
        hello: Option<Hello>,
    ) {
        {
            let mut state = self.lock();
            if !state.is_current(generation) {
                return;
            }
            state.has_reader = true;
        }
        if let Err(error) = self.read_on(&mut stream, generation, hello.map(Message::Hello)).await {
            line.cut(Close::Protocol, &error);
        }
        self.disconnected(generation, &line);
        let mut state = self.lock();
        state.has_reader &= !std::ptr::eq(state.line.as_ptr(), &*line);
        drop(state);
        // It may have been closed since.
        if line.is_closed() {
            self.line_closed(&line);
        }
    }

    async fn read_on(
        &self,
        stream: &mut RecvStream,
        generation: u64,
        mut message: Option<Message>,
    ) -> Result<(), Broken> {
        let mut decoder = Decoder::new(self.limits.payload_bytes);
        // Nothing is held for a connection that is not the link any more, whatever it has announced.
        let replaced = self.when(|shared| !shared.lock().is_current(generation));
        tokio::pin!(replaced);
        loop {
            if let Some(message) = message.take() {
                self.handle(generation, message)?;
            }
            let read = tokio::select! {
                biased;
                read = stream.read(decoder.space()) => read,
                () = &mut replaced => return Ok(()),
            };
            let Ok(Some(count)) = read else { return Ok(()) };
            message = decoder.advance(count)?;
            let mut state = self.lock();
            if state.is_ended || !state.is_current(generation) {
                return Ok(());
            }
            if let (None, Some(link)) = (&message, state.link.as_mut()) {
                link.heard(Instant::now(), generation);
            }
        }
    }

    fn handle(&self, generation: u64, message: Message) -> Result<(), LinkError> {
        // What else comes asks for nothing to be written.
        let is_answered = matches!(message, Message::Hello(_) | Message::Forgotten { .. } | Message::Bye { .. });
        let is_ack = matches!(message, Message::Ack(_));
        let frame = if let Message::Frame { frame, .. } = &message { Some(frame.payload.len()) } else { None };
        let mut state = self.lock();
        state.has_much = frame.map_or(state.has_much, |bytes| bytes > MUCH);
        if let Some(link) = state.link.as_mut() {
            link.handle(Instant::now(), generation, message)?;
        }
        let is_over = state.is_over();
        if is_answered || is_over {
            state.writer.notify_one();
        }
        // A frame is for who receives, an acknowledgement for who wants to send.
        if is_over || !is_ack || state.wants_credit {
            let is_there = (frame.is_some() || is_ack) && !state.has_much;
            self.tell(state, is_there);
        }
        if is_over {
            self.ends.notify_waiters();
        }
        Ok(())
    }
}

impl State {
    /// Gives a frame to the link; nothing as long as there is no credit for it.
    fn send(&mut self, frame: &Frame) -> Option<Result<(), PortError>> {
        if self.is_ended {
            return Some(Err(PortError::Closed));
        }
        match self.link.as_mut()?.send(frame.clone()) {
            Ok(()) => Some(Ok(())),
            Err(SendError::Full { .. }) => None,
            Err(SendError::TooLarge { found, limit }) => Some(Err(FrameError::TooLarge { found, limit }.into())),
            Err(SendError::Closed) => Some(Err(PortError::Closed)),
            Err(SendError::Lost { silent }) => Some(Err(PortError::Lost { silent })),
        }
    }

    /// The next frame, and whether the neighbour is to hear that it was taken.
    fn take(&mut self) -> Option<Result<(Arrival, bool), PortError>> {
        if let Some(link) = self.link.as_mut() {
            if let Some(arrival) = link.take() {
                return Some(Ok((arrival, link.has_ack_due())));
            }
            if link.has_ended() {
                return Some(Err(match link.state() {
                    LinkState::Lost { silent } => PortError::Lost { silent },
                    _ => PortError::Closed,
                }));
            }
        }
        self.is_ended.then_some(Err(PortError::Closed))
    }

    fn is_over(&self) -> bool {
        let is_final = |link: &Link| matches!(link.state(), LinkState::Lost { .. } | LinkState::Closed);
        self.is_ended || self.link.as_ref().is_some_and(is_final)
    }

    fn is_current(&self, generation: u64) -> bool {
        self.link.as_ref().is_some_and(|link| link.generation() == Some(generation))
    }
}

/// What a neighbour says that no end of a link would.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Link(#[from] LinkError),
}
