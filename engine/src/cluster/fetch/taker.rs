//! The thread that asks one source.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_transport::{Port, PortError};

use super::{Fetcher, LOOK};
use crate::cluster::weights::{Ask, CREDITS, PIECE_BYTES_MAX, Reply, decode_reply, encode_ask};
use crate::tensor_cache::Part;

/// How long a source may take to answer a question.
const PATIENCE: Duration = Duration::from_secs(30);

/// Asks a source for tensors and writes what it answers.
pub(super) struct Taker {
    fetcher: Arc<Fetcher>,
    source: usize,
    port: Box<dyn Port>,
    /// Questions that have no answer yet, with the place of what they are for among the wants.
    window: VecDeque<(usize, Ask)>,
    /// The tensor of which not all was asked for, by its place among the wants, and from where on.
    asking: Option<(usize, u64)>,
    /// Tensors that are being written.
    open: HashMap<usize, Part>,
    /// When the source last answered, or had nothing to answer.
    heard: Instant,
}

impl Taker {
    pub(super) fn new(fetcher: Arc<Fetcher>, source: usize, port: Box<dyn Port>) -> Taker {
        let (window, open) = (VecDeque::new(), HashMap::new());
        Taker { fetcher, source, port, window, asking: None, open, heard: Instant::now() }
    }

    /// Until it is stopped, or the source is of no use.
    pub(super) fn run(mut self) {
        if let Err(why) = self.take_all()
            && !self.fetcher.is_stopped()
        {
            // What was received stays where it is, unlocked before anybody may go on with it.
            let wants = self.open.drain().map(|(want, _)| want).collect();
            self.fetcher.leave_out(self.source, wants, &why);
        }
        let state = self.fetcher.lock();
        let source = &state.sources[self.source];
        tracing::info!(source = source.name, bytes = source.sent, "no more weights are asked for");
    }

    /// The error says what is wrong with the source.
    fn take_all(&mut self) -> Result<(), String> {
        while !self.fetcher.is_stopped() && self.fetcher.lock().failed.is_none() {
            self.ask()?;
            if self.window.is_empty() {
                drop(self.fetcher.wait(self.fetcher.lock()));
                self.heard = Instant::now();
            } else {
                self.hear()?;
            }
        }
        Ok(())
    }

    /// Asks for as much as may be on its way.
    fn ask(&mut self) -> Result<(), String> {
        while self.window.len() < CREDITS as usize {
            if self.asking.is_none() {
                self.asking = self.begin();
            }
            let Some((want, offset)) = self.asking else { break };
            let (tensor, whole) = (self.fetcher.lock().wants[want].tensor as u32, self.open[&want].bytes());
            let bytes = (whole - offset).min(PIECE_BYTES_MAX as u64);
            let ask = Ask { tensor, offset, bytes: bytes as u32 };
            self.port.send(encode_ask(&ask)).map_err(|error| error.to_string())?;
            self.window.push_back((want, ask));
            self.asking = (offset + bytes < whole).then_some((want, offset + bytes));
        }
        Ok(())
    }

    /// The next tensor, to be written from the offset on at which it was left.
    fn begin(&mut self) -> Option<(usize, u64)> {
        loop {
            let (want, digest, bytes) = self.fetcher.next(self.source)?;
            match self.fetcher.cache.part(&digest, bytes) {
                Ok(part) if part.at() < bytes => {
                    let at = part.at();
                    self.open.insert(want, part);
                    return Some((want, at));
                }
                Ok(part) => self.fetcher.finish(self.source, want, part),
                Err(error) => {
                    self.fetcher.cannot_keep(error);
                    return None;
                }
            }
        }
    }

    /// Takes an answer, if one comes.
    fn hear(&mut self) -> Result<(), String> {
        let arrival = match self.port.receive(LOOK) {
            Ok(arrival) => arrival,
            Err(PortError::Timeout { .. }) if self.heard.elapsed() < PATIENCE => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        self.heard = Instant::now();
        let (want, asked) = self.window.pop_front().expect("something was asked");
        let (reply, bytes) = decode_reply(&arrival.frame).map_err(|error| error.to_string())?;
        match reply {
            Reply::Piece(ask) if ask == asked => self.write(want, &bytes),
            Reply::Lacks(tensor) if tensor == asked.tensor => {
                self.asking = self.asking.filter(|(other, _)| *other != want);
                // Its part is unlocked first. Of the questions that follow all have the same answer.
                if self.open.remove(&want).is_some() {
                    self.fetcher.lacks(self.source, want);
                }
                Ok(())
            }
            _ => Err("it answers what was not asked".to_owned()),
        }
    }

    /// A piece has come.
    fn write(&mut self, want: usize, bytes: &[u8]) -> Result<(), String> {
        // Of a tensor that the source turned out not to have the rest is not wanted.
        let Some(part) = self.open.get_mut(&want) else { return Ok(()) };
        if let Err(error) = part.write(bytes) {
            self.fetcher.cannot_write(error);
            return Ok(());
        }
        self.fetcher.received(self.source, want, bytes.len() as u64);
        if part.at() == part.bytes()
            && let Some(part) = self.open.remove(&want)
        {
            self.fetcher.finish(self.source, want, part);
        }
        let is_there = self.fetcher.lock().sources[self.source].is_there;
        if is_there { Ok(()) } else { Err("what it sent is not what was asked for".to_owned()) }
    }
}
