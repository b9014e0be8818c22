//! Log lines of the libraries and of the server, to stderr.

use std::io;

use tracing_subscriber::EnvFilter;

use crate::args::{Cli, LogFormat, Verb};

/// Begins to log what `$PP_LOG` says: warnings and errors unless told otherwise; of a server also what it was asked.
pub fn install(cli: &Cli) {
    let (quiet, format) = match &cli.verb {
        Some(Verb::Serve(args)) => ("warn,pp_cli::api=info,wgpu_hal=error,wgpu_core=error", args.log_format),
        _ => ("warn,wgpu_hal=error,wgpu_core=error", LogFormat::Text),
    };
    let filter = match std::env::var("PP_LOG") {
        Ok(filter) if !filter.is_empty() => EnvFilter::try_new(&filter).unwrap_or_else(|_| EnvFilter::new(quiet)),
        _ => EnvFilter::new(quiet),
    };
    // What cannot be written is lost: to say so on stderr would end the thread that has something to say, as where logs are on
    // a disk that is full.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    // Fails only where a logger was installed before, as in tests.
    let _ = match format {
        LogFormat::Json => builder.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init(),
        LogFormat::Text => builder.with_target(false).without_time().try_init(),
    };
}
