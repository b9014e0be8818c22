//! Markdown as it streams, kept readable: nothing is taken away or moved, only headings, code and bold words are styled.
//!
//! What came is shown at once but for the few characters that may begin a mark: at most those of a fence with its
//! indentation at the start of a line, and one or two stars within.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};

const HEADING: Style = Style::new().bold().underline();
const CODE: Style = AnsiColor::Cyan.on_default();
const FENCE: Style = Style::new().dimmed();
const BOLD: Style = Style::new().bold();
/// Spaces before which a mark still opens a line.
const INDENT: usize = 3;

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// Not known yet: it has only just begun.
    Open,
    Text,
    Heading,
    Fence,
    Code,
}

/// An answer on its way to a terminal.
#[derive(Debug)]
pub struct Markdown {
    styled: bool,
    /// The fence that a block of code opened with, while there is one.
    fence: Option<char>,
    line: Line,
    bold: bool,
    code: bool,
    /// Characters that may be a mark, or the beginning of one.
    held: String,
    /// Of the latest character that was written.
    style: Style,
    out: String,
}

impl Markdown {
    /// From the beginning of a line; without styles, `styled` false, texts stay what they are.
    pub fn new(styled: bool) -> Markdown {
        Markdown {
            styled,
            fence: None,
            line: Line::Open,
            bold: false,
            code: false,
            held: String::new(),
            style: Style::new(),
            out: String::new(),
        }
    }

    /// What can be shown with `piece`.
    pub fn push(&mut self, piece: &str) -> String {
        if !self.styled {
            return piece.to_owned();
        }
        super::shown(piece).chars().for_each(|c| self.take(c));
        self.hand_out()
    }

    /// What was held back, when no more comes; styles end.
    pub fn finish(&mut self) -> String {
        if self.line == Line::Open {
            self.open();
        }
        self.settle(None);
        self.wear(Style::new());
        self.hand_out()
    }

    fn hand_out(&mut self) -> String {
        std::mem::take(&mut self.out)
    }

    fn take(&mut self, c: char) {
        if c == '\n' {
            return self.end_line();
        }
        if self.line != Line::Open {
            return self.within(c);
        }
        self.held.push(c);
        if !may_be_mark(&self.held) {
            self.open();
        }
    }

    /// Decides what the line is that begins with what is held.
    fn open(&mut self) {
        let held = std::mem::take(&mut self.held);
        let mark = held.trim_start_matches(' ');
        let indented = held.len() - mark.len() > INDENT;
        let fence = ['`', '~'].into_iter().find(|c| mark.chars().take_while(|m| m == c).count() >= 3);
        self.line = match (self.fence, fence) {
            (Some(open), Some(fence)) if open == fence && !indented => Line::Fence,
            (Some(_), _) => Line::Code,
            (None, Some(_)) if !indented => Line::Fence,
            _ if !indented && is_heading(mark) => Line::Heading,
            _ => Line::Text,
        };
        if self.line == Line::Fence {
            self.fence = if self.fence.is_some() { None } else { fence };
        }
        held.chars().for_each(|c| self.within(c));
    }

    fn end_line(&mut self) {
        if self.line == Line::Open {
            self.open();
        }
        self.settle(None);
        self.wear(Style::new());
        self.out.push('\n');
        (self.line, self.bold, self.code) = (Line::Open, false, false);
    }

    /// A character of a line that is known.
    fn within(&mut self, c: char) {
        match self.line {
            Line::Heading => self.write(HEADING, c),
            Line::Fence => self.write(FENCE, c),
            Line::Code => self.write(CODE, c),
            Line::Open | Line::Text => self.text(c),
        }
    }

    fn text(&mut self, c: char) {
        if c == '*' && !self.code && self.held.len() < 2 {
            return self.held.push(c);
        }
        self.settle(Some(c));
        if c == '`' {
            let ends = self.code;
            self.code = true;
            self.write(CODE, c);
            self.code = !ends;
        } else {
            self.write(self.style_of_text(), c);
        }
    }

    /// What stars that were held mean, before `next`.
    fn settle(&mut self, next: Option<char>) {
        let stars = std::mem::take(&mut self.held);
        let opens = stars.len() == 2 && !self.bold && next.is_some_and(|c| !c.is_whitespace());
        let closes = stars.len() == 2 && self.bold;
        self.bold |= opens;
        let style = self.style_of_text();
        stars.chars().for_each(|c| self.write(style, c));
        self.bold &= !closes;
    }

    fn style_of_text(&self) -> Style {
        match (self.code, self.bold) {
            (true, _) => CODE,
            (false, true) => BOLD,
            (false, false) => Style::new(),
        }
    }

    fn write(&mut self, style: Style, c: char) {
        self.wear(style);
        self.out.push(c);
    }

    fn wear(&mut self, style: Style) {
        if style != self.style {
            // A text takes any.
            let _ = write!(self.out, "{:#}{style}", self.style);
            self.style = style;
        }
    }
}

/// Whether a line that begins so may still turn out to be a heading or a fence.
fn may_be_mark(begin: &str) -> bool {
    let mark = begin.trim_start_matches(' ');
    let of = |c: char, most: usize| mark.len() <= most && mark.chars().all(|m| m == c);
    begin.len() - mark.len() <= INDENT && (mark.is_empty() || of('#', 6) || of('`', 2) || of('~', 2))
}

fn is_heading(mark: &str) -> bool {
    let hashes = mark.chars().take_while(|c| *c == '#').count();
    (1..=6).contains(&hashes) && mark[hashes..].starts_with(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `[h]`, `[c]`, `[f]` and `[b]` for styles that begin, `[/]` for their end.
    fn marked(pieces: &[&str]) -> String {
        let mut markdown = Markdown::new(true);
        let mut text: String = pieces.iter().map(|piece| markdown.push(piece)).collect();
        text += &markdown.finish();
        for (style, name) in [(HEADING, "[h]"), (CODE, "[c]"), (FENCE, "[f]"), (BOLD, "[b]")] {
            text = text.replace(&style.to_string(), name);
        }
        text.replace("\u{1b}[0m", "[/]")
    }

    #[test]
    fn marks_are_styled_and_stay() {
        let check = |text: &str, expected: &str| assert_eq!(marked(&[text]), expected);
        check("# One\ntwo", "[h]# One[/]\ntwo");
        check("#hash ####### x", "#hash ####### x");
        check("a **b c** d", "a [b]**b c**[/] d");
        check("2 ** 3 * 4 *x*", "2 ** 3 * 4 *x*");
        check("run `ls **` now", "run [c]`ls **`[/] now");
        check("```sh\nls # **x**\n```\n**y**", "[f]```sh[/]\n[c]ls # **x**[/]\n[f]```[/]\n[b]**y**[/]");
        check("~~~\n```\n~~~\nz", "[f]~~~[/]\n[c]```[/]\n[f]~~~[/]\nz");
        check("`open\nnext **open\nnext", "[c]`open[/]\nnext [b]**open[/]\nnext");
        check("    # code", "    # code");
        check("** ", "** ");
        check("###", "###");
    }

    #[test]
    fn pieces_do_not_matter_and_little_is_held() {
        let text = "# A **b**\n``x`` é ```\n  ```rs\n  let x = \"**\";\n```\n\n* a **b**c* `d`\n#### e";
        let whole = marked(&[text]);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
        assert_eq!(marked(&letters), whole);
        let plain: String = ["[h]", "[c]", "[f]", "[b]", "[/]"].iter().fold(whole, |t, name| t.replace(name, ""));
        assert_eq!(plain, text, "nothing is taken away");
        let mut markdown = Markdown::new(true);
        assert_eq!(markdown.push("word"), "word");
        assert_eq!(markdown.push(" *"), " ");
    }

    #[test]
    fn without_styles_a_text_is_what_it_was() {
        let mut markdown = Markdown::new(false);
        let text = "# a\u{1b}[1m **b**\n```";
        assert_eq!(markdown.push(text) + &markdown.finish(), text);
        assert!(marked(&["\u{1b}]0;x\u{7}"]).starts_with("\u{fffd}]0;x\u{fffd}"), "answers do nothing to a terminal");
    }
}
