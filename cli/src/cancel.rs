//! What ends things early: Ctrl-C, what asks a program to end (SIGTERM, SIGHUP), and a terminal that is gone.
//!
//! While a pipeline loads or runs, the first asks it to end, so that what was answered so far is kept, and the second
//! ends the program; at any other time the first does. In a conversation Ctrl-C only ever ends answers, and what asks
//! the program to end always does that, soon.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::errors::Exit;
use crate::output;

/// How long a conversation that is to end may take to say goodbye to its pipeline. Whatever it waits for then (a driver,
/// a terminal that takes no more) does not hold it up any longer.
const GRACE: Duration = Duration::from_secs(5);
/// How long a terminal may take to become what it was.
const GOODBYE: Duration = Duration::from_secs(1);

static CANCEL: AtomicBool = AtomicBool::new(false);
static HEEDED: AtomicBool = AtomicBool::new(false);
/// There in a conversation with a person.
static PERSON: OnceLock<Person> = OnceLock::new();

struct Person {
    /// Whether Ctrl-C is a key at the prompt, and no signal.
    with_editor: AtomicBool,
    ending: Arc<AtomicBool>,
    wake: Arc<AtomicBool>,
}

/// What happens while a person types.
#[derive(Clone)]
pub struct Prompted {
    /// Set when the program is to end; whoever has it sees to it.
    pub ending: Arc<AtomicBool>,
    /// Set when an editor should look up: the program is to end, or Ctrl-C came as a signal. It does where the editor had
    /// not yet taken the terminal, or between two of its lines.
    pub wake: Arc<AtomicBool>,
}

/// What somebody wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    /// That what is under way ends.
    Interrupt,
    /// That the program ends.
    End,
    /// Nothing any more: there is nobody who could.
    Gone,
}

/// Set when the user wants it to end. From now on somebody looks at it.
pub fn flag() -> &'static AtomicBool {
    HEEDED.store(true, Ordering::SeqCst);
    &CANCEL
}

/// What was to end has ended: the flag waits for the next time. Until then nobody looks at it. Whether it was set.
pub fn rearm() -> bool {
    // In this order none is lost: what comes from here on wakes the editor, or ends the program.
    if let Some(person) = PERSON.get() {
        person.wake.store(false, Ordering::SeqCst);
    }
    HEEDED.store(false, Ordering::SeqCst);
    CANCEL.swap(false, Ordering::SeqCst)
}

/// From now on Ctrl-C ends what is under way and never the program, unless it comes twice at a prompt without an editor.
/// What asks the program to end sets what is returned, too; so does the end of the terminal on stdin, which need not come
/// with a signal, and which an editor may take for a pause.
pub fn spare_the_program(with_editor: bool) -> Prompted {
    let person = PERSON.get_or_init(|| {
        std::thread::spawn(|| {
            if is_stdin_gone_at_last() {
                wish(Wish::Gone);
            }
        });
        Person { with_editor: AtomicBool::new(with_editor), ending: Arc::default(), wake: Arc::default() }
    });
    person.with_editor.store(with_editor, Ordering::SeqCst);
    Prompted { ending: person.ending.clone(), wake: person.wake.clone() }
}

/// Waits until nobody can type any more. False where that cannot be found out.
fn is_stdin_gone_at_last() -> bool {
    let stdin = std::io::stdin();
    // Nothing is asked for, so only what is always told wakes it: the other end is gone.
    let mut terminal = [PollFd::new(&stdin, PollFlags::empty())];
    loop {
        match poll(&mut terminal, None) {
            Ok(0) | Err(Errno::INTR) => {}
            told => return told.is_ok(),
        }
    }
}

/// Begins to listen.
pub fn install() {
    let wanted = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP));
    // It fails only for signals that nobody may catch.
    let Ok(mut signals) = Signals::new(wanted) else { return };
    std::thread::spawn(move || {
        for signal in signals.forever() {
            wish(match signal {
                SIGINT => Wish::Interrupt,
                SIGHUP => Wish::Gone,
                _ => Wish::End,
            });
        }
    });
}

/// Whether whoever started the program wants it not to hear a signal, as `nohup` does.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn wish(wish: Wish) {
    match PERSON.get() {
        None => wish_of_anybody(),
        Some(person) if wish == Wish::Interrupt => interrupt(person),
        Some(person) => end(person, wish),
    }
}

fn wish_of_anybody() {
    let again = CANCEL.swap(true, Ordering::SeqCst);
    if again || !HEEDED.load(Ordering::SeqCst) {
        leave();
    }
    output::stopping();
}

fn interrupt(person: &Person) {
    let again = CANCEL.swap(true, Ordering::SeqCst);
    if HEEDED.load(Ordering::SeqCst) {
        return;
    }
    if person.with_editor.load(Ordering::SeqCst) {
        person.wake.store(true, Ordering::SeqCst);
        return;
    }
    if again {
        leave();
    }
    output::ask_again();
}

fn end(person: &Person, wish: Wish) {
    // Before the other flags are looked at: whoever waits for the next line looks at them in the other order.
    let again = person.ending.swap(true, Ordering::SeqCst);
    let at_prompt = !HEEDED.load(Ordering::SeqCst);
    CANCEL.store(true, Ordering::SeqCst);
    person.wake.store(true, Ordering::SeqCst);
    // Neither an editor that has lost its terminal nor a line that is waited for can be woken.
    if at_prompt && (wish == Wish::Gone || !person.with_editor.load(Ordering::SeqCst)) {
        leave();
    }
    match wish {
        // A terminal that goes is told of twice: by a signal, and by itself.
        Wish::End if again => leave(),
        _ if again => {}
        _ => drop(std::thread::spawn(|| {
            std::thread::sleep(GRACE);
            leave();
        })),
    }
}

fn leave() -> ! {
    let (restored, wait) = mpsc::channel();
    // A terminal that takes nothing at the moment must not hold it up.
    std::thread::spawn(move || {
        output::live::restore();
        if output::terminal::restore() {
            output::end_prompt();
        }
        let _ = restored.send(());
    });
    let _ = wait.recv_timeout(GOODBYE);
    std::process::exit(Exit::Cancelled as i32);
}
