//! Ctrl-C. While a pipeline loads or runs, the first asks it to end, so that what was answered so far is kept, and the
//! second ends the program; at any other time the first does. In a conversation on a terminal it only ever ends answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGTERM};

use crate::errors::Exit;
use crate::output;

static CANCEL: AtomicBool = AtomicBool::new(false);
static HEEDED: AtomicBool = AtomicBool::new(false);
static SPARED: AtomicBool = AtomicBool::new(false);

/// Set when the user wants it to end. From now on somebody looks at it.
pub fn flag() -> &'static AtomicBool {
    HEEDED.store(true, Ordering::Relaxed);
    &CANCEL
}

/// What was to end has ended: the flag waits for the next time. Until then nobody looks at it.
pub fn rearm() {
    CANCEL.store(false, Ordering::Relaxed);
    HEEDED.store(false, Ordering::Relaxed);
}

/// From now on Ctrl-C ends what is under way and never the program. What asks a program to end (SIGTERM, and SIGHUP of
/// a terminal that goes) also sets what is returned; whoever has it then sees to it.
///
/// # Errors
/// When the system does not take the handlers.
pub fn spare_the_program() -> std::io::Result<Arc<AtomicBool>> {
    let ending = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGHUP] {
        // The handler that is there already is called as well.
        signal_hook::flag::register(signal, ending.clone())?;
    }
    SPARED.store(true, Ordering::Relaxed);
    Ok(ending)
}

/// Begins to listen.
pub fn install() {
    let heard = || {
        let again = CANCEL.swap(true, Ordering::Relaxed);
        if SPARED.load(Ordering::Relaxed) {
            return;
        }
        if again || !HEEDED.load(Ordering::Relaxed) {
            output::live::restore();
            std::process::exit(Exit::Cancelled as i32);
        }
        output::stopping();
    };
    // It fails only where a handler was installed before, and none was.
    let _ = ctrlc::set_handler(heard);
}
