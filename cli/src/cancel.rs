//! Ctrl-C. While a pipeline loads or runs, the first asks it to end, so that what was answered so far is kept, and the
//! second ends the program; at any other time the first does.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::errors::Exit;
use crate::output;

static CANCEL: AtomicBool = AtomicBool::new(false);
static HEEDED: AtomicBool = AtomicBool::new(false);

/// Set when the user wants it to end. From now on somebody looks at it.
pub fn flag() -> &'static AtomicBool {
    HEEDED.store(true, Ordering::Relaxed);
    &CANCEL
}

/// Begins to listen.
pub fn install() {
    let heard = || {
        if CANCEL.swap(true, Ordering::Relaxed) || !HEEDED.load(Ordering::Relaxed) {
            output::live::restore();
            std::process::exit(Exit::Cancelled as i32);
        }
        output::stopping();
    };
    // It fails only where a handler was installed before, and none was.
    let _ = ctrlc::set_handler(heard);
}
