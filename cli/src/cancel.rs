//! Ctrl-C. The first asks the work to end, so that what was answered so far is kept; the second ends the program.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::errors::Exit;
use crate::output;

static CANCEL: AtomicBool = AtomicBool::new(false);

/// Set when the user wants it to end.
pub fn flag() -> &'static AtomicBool {
    &CANCEL
}

/// Begins to listen.
pub fn install() {
    let heard = || {
        if CANCEL.swap(true, Ordering::Relaxed) {
            std::process::exit(Exit::Cancelled as i32);
        }
        output::stopping();
    };
    // It fails only where a handler was installed before, and none was.
    let _ = ctrlc::set_handler(heard);
}
