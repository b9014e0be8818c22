//! Finds calls in an answer that comes in pieces.

use super::ToolFormat;

/// Longest text in front of a call's arguments.
const HEAD_BYTES_MAX: usize = 1024;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Text for people.
    Text(String),
    /// A call begins.
    Call {
        /// Which one, from 0.
        index: usize,
        /// What is called.
        name: String,
    },
    /// More of a call's arguments, as the model wrote them: JSON, when all have come.
    Arguments {
        /// Of which call.
        index: usize,
        /// The characters.
        text: String,
    },
}

/// Where the parser is.
enum State {
    /// In text; in front of the first letter where nothing but white space has come.
    Text { begun: bool },
    /// Behind a marker: in front of the `[` of a list of calls.
    List,
    /// In front of a call's arguments.
    Head,
    /// In a call's arguments.
    Arguments(Json),
    /// Behind a call's arguments.
    Tail,
    /// Behind a call's object, in a list of them.
    Next,
    /// Behind the only call that there may be.
    End,
}

/// Splits the text of an answer into text and calls. Holds back what may be the beginning of a call.
///
/// What looks like a call and is none is text.
pub struct ToolParser {
    format: ToolFormat,
    state: State,
    held: String,
    /// What was taken for the beginning of a call, and is text if it is none.
    opened: String,
    calls: usize,
}

impl ToolParser {
    /// At the beginning of an answer.
    pub fn new(format: ToolFormat) -> ToolParser {
        let state = State::Text { begun: false };
        ToolParser { format, state, held: String::new(), opened: String::new(), calls: 0 }
    }

    /// Calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Whether tools are to be called: there are calls, and the arguments of the last are whole.
    pub fn has_called(&self) -> bool {
        self.calls > 0 && !matches!(self.state, State::Arguments(_))
    }

    /// Takes more of the answer; gives what has become certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.step(&mut pieces) {}
        merged(pieces)
    }

    /// What was held back, when no more comes.
    pub fn finish(&mut self) -> Vec<Piece> {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Text { .. } => {}
            // No call has begun.
            State::Head | State::List if self.calls == 0 => self.opened.push_str(&held),
            _ => return Vec::new(),
        }
        let text = match self.state {
            State::Text { .. } => held,
            _ => std::mem::take(&mut self.opened),
        };
        // White space between and behind calls is theirs.
        let is_text = !text.is_empty() && (self.calls == 0 || !text.trim().is_empty());
        if is_text { vec![Piece::Text(text)] } else { Vec::new() }
    }

    /// Goes on by one state; false where more has to come.
    fn step(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match &mut self.state {
            State::Text { begun } => {
                let begun = *begun;
                self.text(begun, pieces)
            }
            State::List => self.list(pieces),
            State::Head => self.head(pieces),
            State::Arguments(json) => {
                let rest = self.held.split_off(json.take(&self.held));
                let text = std::mem::replace(&mut self.held, rest);
                let is_whole = json.is_whole;
                if !text.is_empty() {
                    pieces.push(Piece::Arguments { index: self.calls - 1, text });
                }
                if is_whole {
                    self.state = State::Tail;
                }
                is_whole
            }
            State::Tail => self.behind("}", |parser| match parser.format {
                ToolFormat::Llama => State::End,
                ToolFormat::Hermes | ToolFormat::Mistral => State::Next,
            }),
            State::Next => match self.format {
                ToolFormat::Hermes => self.behind("</tool_call>", |_| State::Text { begun: false }),
                _ if self.held.trim_start().starts_with(',') => self.behind(",", |_| State::Head),
                _ => self.behind("]", |_| State::Text { begun: false }),
            },
            State::End => {
                self.held.clear();
                false
            }
        }
    }

    /// Up to where a call may begin.
    fn text(&mut self, begun: bool, pieces: &mut Vec<Piece>) -> bool {
        if self.calls > 0 && self.held.trim().is_empty() {
            return false;
        }
        let Some((open, _)) = self.format.markers() else {
            return self.first_letter(begun, pieces);
        };
        let at = self.held.find(open);
        let end = at.unwrap_or_else(|| self.held.len() - overlap(&self.held, open));
        let is_blank = self.calls > 0 && self.held[..end].trim().is_empty();
        if end > 0 && !is_blank {
            pieces.push(Piece::Text(self.held[..end].to_owned()));
        }
        if at.is_none() {
            if !is_blank {
                self.held.drain(..end);
            }
            return false;
        }
        self.held.drain(..end + open.len());
        open.clone_into(&mut self.opened);
        self.state = if self.format == ToolFormat::Mistral { State::List } else { State::Head };
        true
    }

    /// Where a call is the whole answer, its first letter tells.
    fn first_letter(&mut self, begun: bool, pieces: &mut Vec<Piece>) -> bool {
        if !begun && self.held.trim().is_empty() {
            return false;
        }
        if !begun && self.held.trim_start().starts_with('{') {
            self.state = State::Head;
            return true;
        }
        if !self.held.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut self.held)));
        }
        self.state = State::Text { begun: true };
        false
    }

    fn list(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let blank = self.held.len() - self.held.trim_start().len();
        match self.held[blank..].chars().next() {
            None => false,
            Some('[') => {
                self.opened.extend(self.held.drain(..=blank));
                self.state = State::Head;
                true
            }
            Some(_) => self.no_call(pieces),
        }
    }

    fn head(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match head(&self.held, self.format.arguments_key()) {
            Head::Begun if self.held.len() <= HEAD_BYTES_MAX => false,
            Head::Begun | Head::None => self.no_call(pieces),
            Head::Whole { name, bytes } => {
                self.held.drain(..bytes);
                self.opened.clear();
                pieces.push(Piece::Call { index: self.calls, name });
                self.calls += 1;
                self.state = State::Arguments(Json::default());
                true
            }
        }
    }

    /// What was taken for the beginning of a call is text.
    fn no_call(&mut self, pieces: &mut Vec<Piece>) -> bool {
        pieces.push(Piece::Text(std::mem::take(&mut self.opened)));
        self.state = State::Text { begun: true };
        true
    }

    /// Passes over what comes up to `text`, which should be white space, and over `text`.
    fn behind(&mut self, text: &str, next: impl Fn(&ToolParser) -> State) -> bool {
        let Some(at) = self.held.find(text) else {
            self.held.drain(..self.held.len() - overlap(&self.held, text));
            return false;
        };
        self.held.drain(..at + text.len());
        self.state = next(self);
        true
    }
}

/// Bytes at the end of `text` that `marker` begins with.
fn overlap(text: &str, marker: &str) -> usize {
    (1..marker.len()).rev().find(|len| text.ends_with(&marker[..*len])).unwrap_or(0)
}

/// Neighbours of one kind as one, without empty ones.
fn merged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match (out.last_mut(), piece) {
            (Some(Piece::Text(before)), Piece::Text(text)) => before.push_str(&text),
            (_, Piece::Text(text)) if text.is_empty() => {}
            (_, piece) => out.push(piece),
        }
    }
    out
}

/// What a text is that should begin like a call.
enum Head {
    /// The beginning of a beginning.
    Begun,
    /// Something else.
    None,
    /// A call, with so many bytes in front of its arguments.
    Whole { name: String, bytes: usize },
}

/// Looks for `{"name": "…", "arguments": ` with any white space.
fn head(text: &str, arguments: &str) -> Head {
    let mut rest = text;
    for wanted in ["{", "\"name\"", ":"] {
        match after(rest, wanted) {
            Ok(behind) => rest = behind,
            Err(none) => return none,
        }
    }
    rest = rest.trim_start();
    let Some(name) = string(rest) else {
        return if rest.is_empty() || rest.starts_with('"') { Head::Begun } else { Head::None };
    };
    let Ok(spelt) = serde_json::from_str(name) else { return Head::None };
    rest = &rest[name.len()..];
    for wanted in [",", &format!("\"{arguments}\""), ":"] {
        match after(rest, wanted) {
            Ok(behind) => rest = behind,
            Err(none) => return none,
        }
    }
    rest = rest.trim_start();
    // White space in front of the arguments is not theirs: the first letter has to be there.
    if rest.is_empty() { Head::Begun } else { Head::Whole { name: spelt, bytes: text.len() - rest.len() } }
}

/// What follows `wanted`, in front of which there may be white space.
fn after<'a>(text: &'a str, wanted: &str) -> Result<&'a str, Head> {
    let text = text.trim_start();
    match text.strip_prefix(wanted) {
        Some(rest) => Ok(rest),
        None if wanted.starts_with(text) => Err(Head::Begun),
        None => Err(Head::None),
    }
}

/// The JSON string at the beginning of a text, with its quotes, once all of it is there.
fn string(text: &str) -> Option<&str> {
    let mut escaped = false;
    let ends = |(_, byte): &(usize, u8)| {
        let ends = *byte == b'"' && !escaped;
        escaped = *byte == b'\\' && !escaped;
        ends
    };
    let (at, _) = text.strip_prefix('"')?.bytes().enumerate().find(ends)?;
    Some(&text[..at + 2])
}

/// Follows a JSON value to its end.
#[derive(Default)]
struct Json {
    depth: usize,
    in_string: bool,
    escaped: bool,
    is_whole: bool,
}

impl Json {
    /// How many bytes of `text` belong to the value.
    fn take(&mut self, text: &str) -> usize {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                self.in_string = byte != b'"' || self.escaped;
                self.escaped = byte == b'\\' && !self.escaped;
                self.is_whole = !self.in_string && self.depth == 0;
            } else {
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => self.depth += 1,
                    // The end of a number or a word, which is not part of it.
                    b'}' | b']' | b',' if self.depth == 0 => {
                        self.is_whole = true;
                        return at;
                    }
                    b'}' | b']' => {
                        self.depth -= 1;
                        self.is_whole = self.depth == 0;
                    }
                    _ => {}
                }
            }
            if self.is_whole {
                return at + 1;
            }
        }
        text.len()
    }
}
