//! The terminal of a conversation with a line editor.
//!
//! Between two prompts nothing that is typed is shown amid an answer, and keys wait for the next prompt as what they are:
//! a terminal that edits lines itself would make another character of Ctrl-D. Ctrl-C and Ctrl-Z stay signals.

use std::io::stdin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::getpgrp;
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetpgrp, tcsetattr,
};

use super::say;

/// As the terminal was.
static BEFORE: OnceLock<Termios> = OnceLock::new();
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal, taken; it is given back when this is dropped.
#[must_use]
pub struct Taken(());

/// Takes the terminal on stdin.
pub fn take() -> Taken {
    if let Ok(modes) = tcgetattr(stdin()) {
        let mut quiet = BEFORE.get_or_init(|| modes).clone();
        quiet.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ECHONL;
        quiet.input_modes -= InputModes::ICRNL | InputModes::INLCR | InputModes::IGNCR;
        quiet.special_codes[SpecialCodeIndex::VMIN] = 1;
        quiet.special_codes[SpecialCodeIndex::VTIME] = 0;
        TAKEN.store(true, Ordering::SeqCst);
        // What cannot be set is no worse than it was.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &quiet);
    }
    Taken(())
}

impl Drop for Taken {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back, where it was taken: its modes, pastes as any keys, its cursor. For ends that drop nothing.
/// Whether it was.
pub fn restore() -> bool {
    let Some(modes) = BEFORE.get().filter(|_| TAKEN.swap(false, Ordering::SeqCst)) else { return false };
    // Whoever is not in front would be stopped for it.
    if tcgetpgrp(stdin()).is_ok_and(|front| front == getpgrp()) {
        let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
        say("\x1b[?2004l\x1b[?25h");
    }
    true
}
