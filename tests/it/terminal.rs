//! The program on a terminal: a pseudo-terminal, and what one would see on its screen.

use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use portable_pty::{Child, CommandBuilder, MasterPty, PtySize, native_pty_system};

/// How long anything may take that is waited for: much, as tests share few cores.
const PATIENCE: Duration = Duration::from_secs(120);
/// Lines that are remembered when they have left the screen.
const SCROLLBACK: usize = 10_000;

pub const ENTER: &str = "\r";
pub const ALT_ENTER: &str = "\x1b\r";
pub const CTRL_C: &str = "\x03";
pub const CTRL_D: &str = "\x04";
pub const UP: &str = "\x1b[A";
pub const TAB: &str = "\t";

/// A terminal with a program on it.
pub struct Terminal {
    master: Box<dyn MasterPty + Send>,
    keys: Keys,
    child: Process,
    shown: Arc<Shown>,
    reader: JoinHandle<()>,
}

type Keys = Arc<Mutex<Box<dyn Write + Send>>>;

/// A program; it is killed when this goes.
pub struct Process(Box<dyn Child + Send + Sync>);

#[derive(Default)]
struct Shown {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    parser: vt100::Parser,
    /// Whether nobody reads any more, …
    closed: bool,
    /// … or is to.
    leaving: bool,
}

impl Default for State {
    fn default() -> State {
        State { parser: parser(40, 120), closed: false, leaving: false }
    }
}

fn nonzero(size: u16) -> NonZeroU16 {
    NonZeroU16::new(size).expect("a terminal has rows and columns")
}

fn parser(rows: u16, columns: u16) -> vt100::Parser {
    vt100::Parser::new(nonzero(rows), nonzero(columns), SCROLLBACK)
}

fn size(rows: u16, columns: u16) -> PtySize {
    PtySize { rows, cols: columns, pixel_width: 0, pixel_height: 0 }
}

impl Terminal {
    /// Starts the program with `arguments` on a terminal of 40 lines and 120 columns, with `home` as its home.
    pub fn start(arguments: &[&str], home: &Path, environment: &[(&str, &str)]) -> Terminal {
        Terminal::open(arguments, home, environment, true)
    }

    /// The same; `controlling`: whether the kernel tells the program with a signal that the terminal is gone.
    pub fn open(arguments: &[&str], home: &Path, environment: &[(&str, &str)], controlling: bool) -> Terminal {
        let pair = native_pty_system().openpty(size(40, 120)).expect("a pseudo-terminal");
        let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_pp-run"));
        command.args(arguments);
        command.cwd(home);
        command.set_controlling_tty(controlling);
        for name in ["PP_MODEL", "PP_LOG", "PP_CHECKED", "VISUAL", "EDITOR", "NO_COLOR", "XDG_STATE_HOME"] {
            command.env_remove(name);
        }
        command.env("TERM", "xterm-256color");
        command.env("HOME", home);
        command.env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"));
        environment.iter().for_each(|(name, value)| command.env(name, value));
        let child = pair.slave.spawn_command(command).expect("the program starts");
        drop(pair.slave);
        let keys = Arc::new(Mutex::new(pair.master.take_writer().expect("a writer")));
        let shown = Arc::new(Shown::default());
        let reader = pair.master.try_clone_reader().expect("a reader");
        let (of, answers) = (shown.clone(), keys.clone());
        let reader = std::thread::spawn(move || read(reader, &of, &answers));
        Terminal { master: pair.master, keys, child: Process(child), shown, reader }
    }

    /// Types.
    pub fn keys(&self, keys: &str) {
        let mut writer = self.keys.lock().expect("nobody panicked");
        writer.write_all(keys.as_bytes()).and_then(|()| writer.flush()).expect("the terminal takes keys");
    }

    /// Types a line and Enter.
    pub fn line(&self, line: &str) {
        self.keys(line);
        self.keys(ENTER);
    }

    /// Pastes, as terminals do it where the program asked them to: lines end as with Enter.
    pub fn paste(&self, text: &str) {
        self.keys(&format!("\x1b[200~{}\x1b[201~", text.replace('\n', ENTER)));
    }

    /// What was on the screen and has left it, and what is on it.
    pub fn text(&self) -> String {
        self.shown.text()
    }

    /// Waits until the text satisfies `wanted`; returns it then.
    #[track_caller]
    pub fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let until = Instant::now() + PATIENCE;
        let mut state = self.shown.state.lock().expect("nobody panicked");
        loop {
            let text = all_text(&mut state.parser);
            if wanted(&text) {
                return text;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero() && !state.closed, "{what} is not there:\n{text}");
            state =
                self.shown.changed.wait_timeout(state, left.min(Duration::from_secs(1))).expect("nobody panicked").0;
        }
    }

    /// Waits until something stands there so many times.
    #[track_caller]
    pub fn see(&self, wanted: &str, times: usize) -> String {
        self.until(&format!("{wanted:?} × {times}"), |text| text.matches(wanted).count() >= times)
    }

    /// Waits for an empty prompt at the end of the text.
    #[track_caller]
    pub fn prompt(&self) -> String {
        self.until("an empty prompt", |text| text.ends_with("\n>") || text == ">")
    }

    /// How the terminal treats keys, as a text to compare.
    pub fn modes(&self) -> String {
        format!("{:?}", self.master.get_termios().expect("it is a terminal"))
    }

    /// Makes it another size.
    pub fn resize(&self, rows: u16, columns: u16) {
        let mut state = self.shown.state.lock().expect("nobody panicked");
        state.parser.set_size(nonzero(rows), nonzero(columns));
        self.master.resize(size(rows, columns)).expect("a pseudo-terminal can be resized");
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.0.process_id().expect("it runs")
    }

    /// Waits until the program ends by itself; its exit code, and the text.
    #[track_caller]
    pub fn ended(&mut self) -> (u32, String) {
        let shown = self.shown.clone();
        let code = self.child.code(|| shown.text());
        (code, self.until_closed())
    }

    /// As [`Terminal::ended`], when nothing else is wanted of it.
    #[track_caller]
    pub fn end(mut self) -> (u32, String) {
        self.ended()
    }

    /// Takes the terminal away from the program, as closing a window or losing a connection does.
    pub fn hang_up(self) -> Process {
        self.shown.state.lock().expect("nobody panicked").leaving = true;
        // Whatever the program or the terminal shows of it wakes the reader, which then goes.
        while !self.reader.is_finished() {
            self.keys("x");
            std::thread::sleep(Duration::from_millis(20));
        }
        self.child
    }

    fn until_closed(&self) -> String {
        let mut state = self.shown.state.lock().expect("nobody panicked");
        let until = Instant::now() + Duration::from_secs(5);
        while !state.closed && Instant::now() < until {
            state = self.shown.changed.wait_timeout(state, Duration::from_millis(100)).expect("nobody panicked").0;
        }
        all_text(&mut state.parser)
    }
}

impl Shown {
    fn text(&self) -> String {
        let mut state = self.state.lock().expect("nobody panicked");
        all_text(&mut state.parser)
    }
}

impl Process {
    /// Its exit code, once it ends by itself; `shown` says what there was to see if it does not.
    #[track_caller]
    pub fn code(&mut self, shown: impl Fn() -> String) -> u32 {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().expect("it can be waited for") {
                return status.exit_code();
            }
            assert!(Instant::now() < until, "it does not end:\n{}", shown());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// What has left the screen, then the screen; what was wrapped is one line again.
fn all_text(parser: &mut vt100::Parser) -> String {
    let screen = parser.screen_mut();
    let (rows, columns) = screen.size();
    let (height, width) = (usize::from(rows.get()), columns.get());
    let mut text = String::new();
    let mut above = screen.scrollback_len();
    loop {
        screen.set_scrollback(above);
        let count = if above == 0 { height } else { above.min(height) };
        for (index, row) in screen.rows(0, width).take(count).enumerate() {
            text.push_str(&row);
            // What was filled up with blanks, as bars are, was no line of text that was wrapped.
            if !screen.row_wrapped(index as u16) || row.ends_with(' ') {
                text.push('\n');
            }
        }
        if above == 0 {
            return text.trim_end().to_owned();
        }
        above -= count;
    }
}

/// Shows what comes, and answers what a terminal answers: where its cursor is.
fn read(mut reader: Box<dyn Read + Send>, shown: &Shown, answers: &Mutex<Box<dyn Write + Send>>) {
    const WHERE: &[u8] = b"\x1b[6n";
    let mut buffer = [0; 4096];
    let mut question = 0;
    loop {
        let count = reader.read(&mut buffer).unwrap_or(0);
        // A test that failed while it held it fails only once.
        let Ok(mut state) = shown.state.lock() else { return };
        if count == 0 || state.leaving {
            state.closed = true;
            shown.changed.notify_all();
            return;
        }
        for byte in &buffer[..count] {
            state.parser.process(&[*byte]);
            question = match (*byte == WHERE[question], *byte == WHERE[0]) {
                (true, _) => question + 1,
                (false, begins) => usize::from(begins),
            };
            if question == WHERE.len() {
                question = 0;
                let (row, column) = state.parser.screen().cursor_position();
                let answer = format!("\x1b[{};{}R", row + 1, column + 1);
                // The program may have ended.
                let _ = answers.lock().expect("nobody panicked").write_all(answer.as_bytes());
            }
        }
        shown.changed.notify_all();
    }
}
