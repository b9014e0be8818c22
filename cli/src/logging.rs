//! Log lines of the libraries, to stderr.

use std::io;

use tracing_subscriber::EnvFilter;

/// Begins to log what `$PP_LOG` says: warnings and errors unless told otherwise.
pub fn install() {
    let quiet = "warn,wgpu_hal=error,wgpu_core=error";
    let filter = match std::env::var("PP_LOG") {
        Ok(filter) if !filter.is_empty() => EnvFilter::try_new(&filter).unwrap_or_else(|_| EnvFilter::new(quiet)),
        _ => EnvFilter::new(quiet),
    };
    // Fails only where a logger was installed before, as in tests.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_target(false)
        .without_time()
        .try_init();
}
