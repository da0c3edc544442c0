//! The scheduler's daemon.

use std::env;
use std::io::{self, ErrorKind, IsTerminal};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Parser;
use nvshare_core::Config;
use nvshare_proto::pace::RECONNECT_EVERY;
use nvshare_proto::units::Bytes;
use nvshare_proto::{VERSION, paths};
use nvshare_scheduler::host_memory::Budget;
use nvshare_scheduler::log::Log;
use nvshare_scheduler::seats::Opened;
use nvshare_scheduler::settings::{Options, Settings, Store};
use nvshare_scheduler::{notify, server, sockets};
use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tracing::level_filters::LevelFilter;
use tracing::{error, info, warn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

/// The time in which clients of an earlier scheduler find this one.
const SETTLE: Duration = RECONNECT_EVERY.saturating_add(Duration::from_millis(300));

/// The time that the scheduler's thread has to end everything when it is told to; and the time for a line that says that it has not.
const TIME_TO_END: Duration = Duration::from_millis(800);
const LAST_WORD: Duration = Duration::from_millis(50);

/// How long the last lines of the log are waited for.
const LAST_LINES: Duration = Duration::from_millis(500);

type Error = Box<dyn std::error::Error>;
type LevelHandle = reload::Handle<LevelFilter, Registry>;

/// The number of tasks that run before sockets are looked at again: a client's message is seen soon, however many connections have
/// something to say.
const LOOK_AT_SOCKETS_EVERY: u32 = 8;

fn main() -> ExitCode {
    let options = Options::parse();
    let (log, level) = match start_log() {
        Ok(started) => started,
        Err(error) => {
            eprintln!("no thread for the log: {error}");
            return ExitCode::FAILURE;
        }
    };
    let told_to_end = match end_when_told() {
        Ok(told) => told,
        Err(error) => {
            error!("no thread for signals: {error}");
            log.finish(LAST_LINES);
            return ExitCode::FAILURE;
        }
    };
    let runtime = Builder::new_current_thread().enable_all().event_interval(LOOK_AT_SOCKETS_EVERY).build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            error!("sockets cannot be watched: {error}");
            log.finish(LAST_LINES);
            return ExitCode::FAILURE;
        }
    };
    let code = match runtime.block_on(run(options, level, told_to_end)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            error!("{error}");
            ExitCode::FAILURE
        }
    };
    // A thread may wait for the kernel module for as long as a GPU does not answer; nobody needs what it would say.
    runtime.shutdown_background();
    log.finish(LAST_LINES);
    code
}

/// Waits on a thread of its own for SIGTERM and SIGINT, so that the program ends soon after them, whatever the scheduler's thread
/// does. That thread is told, and has [`TIME_TO_END`] to end everything in order.
///
/// # Errors
/// There is no thread, or no signal can be waited for.
fn end_when_told() -> io::Result<oneshot::Receiver<()>> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let within = runtime.enter();
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    drop(within);
    let (tell, told) = oneshot::channel();
    let wait = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = tell.send(());
        tokio::time::sleep(TIME_TO_END).await;
        warn!("the scheduler is busy, and is ended as it is");
        tokio::time::sleep(LAST_WORD).await;
        std::process::exit(0);
    };
    thread::Builder::new().name("nvshare-signals".to_owned()).spawn(move || runtime.block_on(wait))?;
    Ok(told)
}

/// Logs to standard error. The level can be changed.
fn start_log() -> io::Result<(Log, LevelHandle)> {
    let log = Log::start(io::stderr())?;
    let (filter, handle) = reload::Layer::new(LevelFilter::INFO);
    let lines = fmt::layer().with_target(false).with_ansi(has_colours()).with_writer(log.clone());
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok((log, handle))
}

/// Whether standard error is a terminal that shows colours, and its user has not switched them off
/// (<https://no-color.org>).
fn has_colours() -> bool {
    let set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    io::stderr().is_terminal() && !set("NO_COLOR") && env::var_os("TERM").is_none_or(|term| term != "dumb")
}

async fn run(options: Options, level: LevelHandle, told_to_end: oneshot::Receiver<()>) -> Result<(), Error> {
    let root = sockets::is_root();
    let settings = options.settle(root)?;
    level.reload(LevelFilter::from(settings.log))?;
    let sockets =
        sockets::Sockets::bind(&settings.clients, &settings.admin).map_err(|error| explain(&error, root))?;
    let (store, warning) = Store::open(settings.state.clone());
    announce(&settings, &store);
    let (seats, warnings) = Opened::open(settings.seats.clone(), settings.state.as_deref());
    for warning in warning.into_iter().chain(warnings) {
        warn!("{warning}");
    }
    let config = Config {
        boot: sockets::random()?,
        settle: SETTLE,
        restarted: sockets.replaced(),
        ..settings.config.clone()
    };
    let (configurations, changes) = mpsc::channel(1);
    let setup = server::Setup {
        config,
        changes,
        store,
        seats,
        descriptions: settings.descriptions.clone(),
        metrics: settings.metrics.clone(),
        host_memory: settings.host_memory,
    };
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::spawn(async move {
        while hang_up.recv().await.is_some() {
            match options.settle(root) {
                Ok(new) => {
                    follow(&settings, &new, &level);
                    let _ = configurations.send(new.config).await;
                }
                Err(error) => error!("{error}; the configuration stays as it was"),
            }
        }
    });
    let shutdown = async move {
        let _ = told_to_end.await;
    };
    // The sockets listen: from now on, everyone who connects is served.
    if let Err(error) = notify::tell("READY=1") {
        warn!("systemd cannot be told that the scheduler is ready: {error}");
    }
    server::run(sockets, setup, shutdown).await?;
    info!("stopped");
    Ok(())
}

/// Adds advice for an ordinary user without a place for the sockets.
fn explain(error: &sockets::Error, root: bool) -> String {
    let denied =
        matches!(error, sockets::Error::Io { error, .. } if error.kind() == ErrorKind::PermissionDenied);
    if denied && !root && paths::own_directory().is_none() {
        format!("{error}; without root, set XDG_RUNTIME_DIR, or name --socket and --admin-socket")
    } else {
        error.to_string()
    }
}

/// Logs that the configuration was read again, and which settings need a restart.
fn follow(first: &Settings, new: &Settings, level: &LevelHandle) {
    match &new.file {
        Some(file) => info!("{} is read again", file.display()),
        None => info!("there is no configuration file"),
    }
    if (&first.clients, &first.admin, &first.seats) != (&new.clients, &new.admin, &new.seats) {
        warn!("the sockets stay where they are until the scheduler is started again");
    }
    if first.host_memory != new.host_memory {
        warn!("the host's memory for clients stays as it is until the scheduler is started again");
    }
    if first.metrics != new.metrics {
        warn!("metrics stay where they are until the scheduler is started again");
    }
    if let Err(error) = level.reload(LevelFilter::from(new.log)) {
        warn!("the level of the log cannot be changed: {error}");
    }
}

fn announce(settings: &Settings, store: &Store) {
    let quantum = store.over(&settings.config).quantum;
    let set = if quantum == settings.config.quantum { "" } else { ", set at run time" };
    let quantum = quantum.as_secs_f64();
    info!("nvshare-scheduler {} (protocol {VERSION}), TQ {quantum} s{set}", env!("CARGO_PKG_VERSION"));
    if let Some(file) = &settings.file {
        info!("configured by {}", file.display());
    }
    if let Some(bytes) = settings.config.gpu_memory {
        info!("clients may fill {} of each GPU", Bytes(bytes));
    }
    if let Some(Budget { all, each }) = settings.host_memory {
        info!("clients may have {} of the host's memory, each tenant {}", Bytes(all), Bytes(each));
    }
    info!("clients at {}, administrators at {}", settings.clients.display(), settings.admin.display());
}
