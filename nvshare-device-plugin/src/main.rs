//! The device plugin's daemon.

use std::io::{self, IsTerminal};
use std::process::ExitCode;

use clap::Parser;
use nvshare_device_plugin::options::Options;
use nvshare_device_plugin::run;
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{Level, error, info};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

/// Threads that wait for the scheduler and the disk.
const MAX_WAITING: usize = 8;

fn main() -> ExitCode {
    let options = Options::parse();
    // The driver itself says what a request to the API server that fails means.
    let heard = Targets::new().with_default(Level::INFO).with_target("kube_client", LevelFilter::OFF);
    let lines = fmt::layer().with_target(false).with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    tracing_subscriber::registry().with(lines.with_filter(heard)).init();
    let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(MAX_WAITING).build();
    let ended = runtime.map_err(|error| error.to_string()).and_then(|runtime| {
        let ended = runtime.block_on(until_told(options));
        // A scheduler that does not answer is not waited for.
        runtime.shutdown_background();
        ended
    });
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Serves until SIGTERM or SIGINT. Specifications, the library and the seats stay: containers have them.
async fn until_told(options: Options) -> Result<(), String> {
    let waits = |kind| signal(kind).map_err(|error| error.to_string());
    let (mut terminate, mut interrupt) = (waits(SignalKind::terminate())?, waits(SignalKind::interrupt())?);
    tokio::select! {
        ended = run::run(options) => ended,
        _ = terminate.recv() => { info!("stopped"); Ok(()) }
        _ = interrupt.recv() => { info!("stopped"); Ok(()) }
    }
}
