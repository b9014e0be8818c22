//! An answer as it comes, on stdout.

use std::io;

use anstyle::Style;

use super::thoughts::{Kind, Thoughts};
use crate::args::ThoughtsArg;
use crate::output::markdown::Markdown;
use crate::output::{Canvas, Out};

/// Thoughts.
const DIM: Style = Style::new().dimmed();

/// Shows an answer, styled where stdout is a terminal with colours.
pub struct Display {
    out: Out,
    how: ThoughtsArg,
    styled: bool,
    thoughts: Thoughts,
    markdown: Markdown,
    /// Whether anything was said, …
    said: bool,
    /// … or thought.
    thought: bool,
    /// Whether the line is not ended yet.
    open_line: bool,
    /// Why stdout takes no more.
    broken: Option<io::Error>,
}

impl Display {
    /// `open`: the answer begins within thoughts.
    pub fn new(out: Out, how: ThoughtsArg, open: bool) -> Display {
        let styled = Canvas::stdout().colours;
        Display {
            out,
            how,
            styled,
            thoughts: Thoughts::new(open),
            markdown: Markdown::new(styled),
            said: false,
            thought: false,
            open_line: true,
            broken: None,
        }
    }

    /// More of it. False when nobody reads any more.
    pub fn push(&mut self, text: &str) -> bool {
        for (kind, part) in self.thoughts.push(text) {
            self.show(kind, &part);
        }
        self.broken.is_none()
    }

    /// The end of it: what comes next begins on a line of its own.
    ///
    /// # Errors
    /// When stdout took no more.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some((kind, part)) = self.thoughts.finish() {
            self.show(kind, &part);
        }
        let rest = self.markdown.finish();
        self.write(&rest);
        if self.open_line {
            self.write("\n");
        }
        self.broken.map_or(Ok(()), Err)
    }

    fn show(&mut self, kind: Kind, text: &str) {
        match (kind, self.how) {
            (Kind::Thought, ThoughtsArg::Hide) => {
                if !std::mem::replace(&mut self.thought, true) {
                    self.out.aside("(thinking)");
                }
            }
            (Kind::Thought, ThoughtsArg::Dim) if self.styled => {
                self.end_with(text);
                let shown = crate::output::shown(text);
                self.write(&format!("{DIM}{shown}{DIM:#}"));
            }
            (Kind::Thought, _) => {
                self.end_with(text);
                self.plain(text);
            }
            (Kind::Said, how) => {
                // Behind thoughts that are not shown their blank lines mean nothing.
                let hidden = how == ThoughtsArg::Hide && self.thought && !self.said;
                let text = if hidden { text.trim_start() } else { text };
                if text.is_empty() {
                    return;
                }
                self.said = true;
                self.end_with(text);
                if self.styled {
                    let styled = self.markdown.push(text);
                    self.write(&styled);
                } else {
                    self.plain(text);
                }
            }
        }
    }

    fn end_with(&mut self, text: &str) {
        self.open_line = !text.ends_with('\n');
    }

    fn plain(&mut self, text: &str) {
        if self.broken.is_none() {
            self.broken = self.out.stream(text).err();
        }
    }

    fn write(&mut self, styled: &str) {
        if self.broken.is_none() && !styled.is_empty() {
            self.broken = self.out.stream_styled(styled).err();
        }
    }
}
