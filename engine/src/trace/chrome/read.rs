//! Reading a trace back. The file is untrusted: what is kept is bounded, and nothing in it causes a panic.

use std::fmt;
use std::io::{self, BufReader, Read};

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use thiserror::Error;

use super::super::{RING, StageTrace};
use super::{Category, FORMAT, HeadInterval, HeadSpan, HeadState, Header, StageSpan, Trace, VERSION};

/// Bytes of a file that are read.
const BYTES_MAX: u64 = 4 << 30;
/// Stages of a pipeline.
const STAGES_MAX: usize = 256;

/// Why a file is no trace.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum ReadError {
    #[error("cannot be read: {0}")]
    Io(io::Error),
    #[error("is not the JSON of a trace: line {line}, column {column}: {what}")]
    Json { line: usize, column: usize, what: String },
    #[error("is not a trace that pp-run wrote: {why}")]
    NotOurs { why: String },
    #[error("is a trace of version {found}, and this program reads version {VERSION}")]
    Version { found: u64 },
    #[error("event {event} of `traceEvents`, counted from 1, {what}")]
    Event { event: usize, what: String },
    #[error("has more than {limit} {what}")]
    TooMany { what: &'static str, limit: usize },
    #[error("is larger than {limit} bytes")]
    TooLarge { limit: u64 },
}

/// Reads what [`write`](super::write) wrote.
///
/// # Errors
/// [`ReadError`].
pub fn read(file: impl Read) -> Result<Trace, ReadError> {
    let mut file = file.take(BYTES_MAX);
    let mut reader = Reader::default();
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(&mut file));
    let result = reader.file(&mut json).and_then(|()| json.end());
    drop(json);
    match result {
        Ok(()) if reader.header => Ok(reader.trace),
        Ok(()) => Err(ReadError::NotOurs { why: "it has no `otherData`".to_owned() }),
        Err(_) if file.limit() == 0 => Err(ReadError::TooLarge { limit: BYTES_MAX }),
        Err(error) => Err(reader.why(error)),
    }
}

/// What was wrong, before the place is known.
#[derive(Debug)]
enum Fault {
    NotOurs(String),
    Version(u64),
    Event(String),
    TooMany(&'static str, usize),
}

#[derive(Debug, Default)]
struct Reader {
    trace: Trace,
    header: bool,
    events: usize,
    fault: Option<Fault>,
}

/// An event, as far as it is a record.
#[derive(Debug, Deserialize)]
struct Event {
    cat: Option<Category>,
    args: Option<Args>,
}

#[derive(Debug, Default, Deserialize)]
struct Args {
    stage: Option<usize>,
    step: Option<u64>,
    group: Option<u32>,
    tokens: Option<u32>,
    sequences: Option<u32>,
    arrived: Option<u64>,
    taken: Option<u64>,
    started: Option<u64>,
    finished: Option<u64>,
    send_started: Option<u64>,
    sent: Option<u64>,
    prefill_tokens: Option<u32>,
    decode_tokens: Option<u32>,
    formed: Option<u64>,
    answered: Option<u64>,
    sampled: Option<u64>,
    state: Option<HeadState>,
    from: Option<u64>,
    to: Option<u64>,
}

fn need<T>(value: Option<T>, name: &str) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::Event(format!("has no `args.{name}`")))
}

impl Args {
    fn stage_span(&self) -> Result<StageSpan, Fault> {
        Ok(StageSpan {
            step: need(self.step, "step")?,
            group: need(self.group, "group")?,
            tokens: need(self.tokens, "tokens")?,
            sequences: need(self.sequences, "sequences")?,
            arrived: need(self.arrived, "arrived")?,
            taken: need(self.taken, "taken")?,
            started: need(self.started, "started")?,
            finished: need(self.finished, "finished")?,
            send_started: need(self.send_started, "send_started")?,
            sent: need(self.sent, "sent")?,
        })
    }

    fn head_span(&self) -> Result<HeadSpan, Fault> {
        Ok(HeadSpan {
            step: need(self.step, "step")?,
            group: need(self.group, "group")?,
            prefill_tokens: need(self.prefill_tokens, "prefill_tokens")?,
            decode_tokens: need(self.decode_tokens, "decode_tokens")?,
            formed: need(self.formed, "formed")?,
            sent: need(self.sent, "sent")?,
            answered: need(self.answered, "answered")?,
            sampled: need(self.sampled, "sampled")?,
        })
    }

    fn interval(&self) -> Result<HeadInterval, Fault> {
        Ok(HeadInterval { state: need(self.state, "state")?, from: need(self.from, "from")?, to: need(self.to, "to")? })
    }
}

fn push<T>(list: &mut Vec<T>, item: T, what: &'static str) -> Result<(), Fault> {
    if list.len() == RING {
        return Err(Fault::TooMany(what, RING));
    }
    list.push(item);
    Ok(())
}

impl Reader {
    fn file<'de, D: Deserializer<'de>>(&mut self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(FileVisitor(self))
    }

    fn header(&mut self, header: Header) -> Result<(), Fault> {
        if header.format != FORMAT {
            return Err(Fault::NotOurs(format!("`otherData.format` is not `{FORMAT}`")));
        }
        if header.version != VERSION {
            return Err(Fault::Version(header.version));
        }
        if header.stages.len() > STAGES_MAX {
            return Err(Fault::TooMany("stages", STAGES_MAX));
        }
        let stage = |super::StageHeader { device, layers, timestamps }| StageTrace {
            device,
            layers,
            timestamps,
            spans: Vec::new(),
        };
        self.trace.stages = header.stages.into_iter().map(stage).collect();
        if header.shares.len() > STAGES_MAX || !header.shares.iter().all(|share| share.is_of(self.trace.stages.len())) {
            return Err(Fault::NotOurs("`otherData.shares` is not about its stages".to_owned()));
        }
        self.trace.shares = header.shares;
        self.trace.dropped = header.dropped;
        self.header = true;
        Ok(())
    }

    fn event(&mut self, event: &Event) -> Result<(), Fault> {
        self.events += 1;
        let none = Args::default();
        let args = event.args.as_ref().unwrap_or(&none);
        match event.cat {
            Some(Category::Stage) => {
                let (index, span) = (need(args.stage, "stage")?, args.stage_span()?);
                let stages = self.trace.stages.len();
                let stage = self.trace.stages.get_mut(index);
                let stage =
                    stage.ok_or_else(|| Fault::Event(format!("is of stage {index}, and there are {stages} stages")))?;
                push(&mut stage.spans, span, "micro-batches of one stage")
            }
            Some(Category::Head) => push(&mut self.trace.head, args.head_span()?, "micro-batches of the head"),
            Some(Category::State) => push(&mut self.trace.states, args.interval()?, "states of the head"),
            Some(Category::Draw | Category::Idle | Category::Hop) | None => Ok(()),
        }
    }

    /// Keeps what was wrong, for [`Reader::why`].
    fn check<E: serde::de::Error>(&mut self, result: Result<(), Fault>) -> Result<(), E> {
        result.map_err(|fault| {
            self.fault = Some(fault);
            E::custom("it is refused")
        })
    }

    fn why(self, error: serde_json::Error) -> ReadError {
        let (line, column, event) = (error.line(), error.column(), self.events);
        match self.fault {
            Some(Fault::NotOurs(why)) => return ReadError::NotOurs { why },
            Some(Fault::Version(found)) => return ReadError::Version { found },
            Some(Fault::Event(what)) => return ReadError::Event { event, what },
            Some(Fault::TooMany(what, limit)) => return ReadError::TooMany { what, limit },
            None => {}
        }
        let text = error.to_string();
        let place = format!(" at line {line} column {column}");
        let what = text.strip_suffix(&place).unwrap_or(&text).to_owned();
        match error.classify() {
            serde_json::error::Category::Io => ReadError::Io(error.into()),
            serde_json::error::Category::Data if !self.header => ReadError::NotOurs { why: what },
            _ => ReadError::Json { line, column, what },
        }
    }
}

/// The whole file.
struct FileVisitor<'a>(&'a mut Reader);

impl<'de> Visitor<'de> for FileVisitor<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with `otherData` and `traceEvents`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "otherData" if !self.0.header => {
                    let header = map.next_value::<Header>()?;
                    let result = self.0.header(header);
                    self.0.check(result)?;
                }
                "traceEvents" if self.0.header => map.next_value_seed(Events(self.0))?,
                "traceEvents" => {
                    let why = "`traceEvents` comes without `otherData` before it".to_owned();
                    self.0.check(Err(Fault::NotOurs(why)))?;
                }
                "otherData" => return Err(A::Error::custom("`otherData` is there twice")),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(())
    }
}

/// `traceEvents`, one by one.
struct Events<'a>(&'a mut Reader);

impl<'de> DeserializeSeed<'de> for Events<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Events<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of events")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<(), A::Error> {
        while let Some(event) = events.next_element::<Event>()? {
            let result = self.0.event(&event);
            self.0.check(result)?;
        }
        Ok(())
    }
}
