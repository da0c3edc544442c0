//! The shell around the core: connections become events, outputs become frames.
//!
//! One task owns the core and is the only one that touches it. Each connection has a task of its own
//! (`connection/`), which reads frames into events and writes the core's messages. A connection that does not read
//! is cut off; no client can delay the others, whatever it does or does not do.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_core::Config;
use nvshare_proto::ThrottledLine;
use tokio::sync::mpsc;
use tracing::{error, warn};

use crate::bucket::Rate;
use crate::connection::{self, Bounds, Shared};
use crate::core_task::{Command, CoreTask};
use crate::descriptors;
use crate::events::{Journal, Recorder};
use crate::gpus::NvmlThread;
use crate::host_memory::{Budget, HostMemory};
use crate::identity::see_others;
use crate::log;
use crate::metrics::{self, Address, Counted, Counters};
use crate::seats::Inside;
pub use crate::setup::Setup;
use crate::sockets::{self, Pace, Sockets};

/// Commands that wait for the core's task. A connection's command waits for this many of others at most, and for one of each
/// connection that waits for a place among them.
const COMMANDS: usize = 32;
/// The rate at which clients' connections are accepted.
const CONNECTIONS: Rate = Rate { burst: 4000, each_second: 4000 };
/// How often the scheduler looks whether its sockets' files are there.
const LOOK_AFTER_SOCKETS: Duration = Duration::from_secs(1);
/// Tried again every few milliseconds.
static NOT_ACCEPTED: ThrottledLine = ThrottledLine::new(log::warn);
/// Tried again each second.
static NOT_MADE: ThrottledLine = ThrottledLine::new(log::warn);

/// The socket at which somebody has connected.
enum At {
    Clients,
    Admin,
    Seat(Inside),
}

/// Serves until `shutdown` is done.
///
/// # Errors
/// See [`Stopped`].
pub async fn run(
    mut sockets: Sockets,
    mut setup: Setup,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Stopped> {
    if let Err(hidden) = see_others() {
        warn!("{hidden}");
    }
    let (commands, received) = mpsc::channel(COMMANDS);
    let answers = commands.clone();
    let nvml = NvmlThread::start(move |gpu, seen| {
        let _ = answers.blocking_send(Command::Looked { gpu, seen });
    });
    let (_, none) = mpsc::channel(1);
    let mut changes = std::mem::replace(&mut setup.changes, none);
    let configured = commands.clone();
    tokio::spawn(async move {
        while let Some(config) = changes.recv().await {
            let _ = configured.send(Command::Configure(config)).await;
        }
    });
    // Clients of an earlier scheduler come back in time, whoever else connects.
    let mut pace = Pace::new(CONNECTIONS, Instant::now() + settle(&setup.config));
    let descriptions = setup.descriptions.clone();
    let journal = Journal::new(setup.config.boot);
    let places = descriptors::places(setup.host_memory.is_some());
    let host = setup.host_memory.and_then(|budget| hand_out(budget, places.segments, &setup));
    let counted = count(setup.metrics.take(), &commands);
    let recorder = Recorder::new(journal.clone(), counted);
    let (_, none) = mpsc::channel(1);
    let mut arrivals = std::mem::replace(&mut setup.seats.arrivals, none);
    tokio::spawn(setup.seats.seats.clone().look_after());
    let core_task = CoreTask::new(setup, nvml, recorder, host.clone(), commands.clone());
    let mut core_task = tokio::spawn(core_task.run(received));
    // Clients' descriptors must leave some for administrators.
    let bounds = Bounds::new(places.clients, descriptions);
    let clients = Shared::new(commands, Some(Arc::clone(&bounds)), journal, host);
    let admins = Shared { bounds: None, ..clients.clone() };
    tokio::pin!(shutdown);
    let mut look_after = tokio::time::interval(LOOK_AFTER_SOCKETS);
    loop {
        let (accepted, at) = tokio::select! {
            accepted = pace.accept(sockets.clients()) => (accepted, At::Clients),
            accepted = sockets.admin().accept() => (accepted.map(|(stream, _)| stream), At::Admin),
            Some((stream, inside)) = arrivals.recv() => (Ok(stream), At::Seat(inside)),
            _ = look_after.tick() => {
                look_after_sockets(&mut sockets)?;
                continue;
            }
            () = &mut shutdown => break,
            _ = &mut core_task => {
                // Its clients run on.
                sockets.leave_to_next();
                return Err(Stopped::Core);
            }
        };
        match accepted {
            Ok(stream) => {
                if !connection::is_over(&stream) {
                    let shared = if matches!(at, At::Admin) { admins.clone() } else { clients.clone() };
                    let seat = if let At::Seat(inside) = at { Some(inside) } else { None };
                    tokio::spawn(connection::serve(stream, seat, shared));
                }
                // A process that connects without end gets one turn among all others.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                // The process may be out of descriptors: that passes, and must not become a busy loop.
                NOT_ACCEPTED.say(format_args!("a connection cannot be accepted: {error}"));
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    core_task.abort();
    if bounds.has_any_taken() {
        sockets.leave_to_next();
    }
    Ok(())
}

/// Makes sockets' files anew that are gone. If that is not possible, those who are connected are served.
fn look_after_sockets(sockets: &mut Sockets) -> Result<(), sockets::Error> {
    match sockets.look_after() {
        Ok(false) => {}
        Ok(true) => warn!("the sockets' files were removed; they are made anew"),
        Err(taken @ sockets::Error::Taken { .. }) => return Err(taken),
        Err(error) => {
            NOT_MADE.say(format_args!("the sockets' files were removed and cannot be made anew: {error}"))
        }
    }
    Ok(())
}

/// For how long clients of an earlier scheduler may come back before anything is granted.
fn settle(config: &Config) -> Duration {
    if config.restarted { config.settle } else { Duration::ZERO }
}

/// Starts handing out memory of the host. Without it clients use their own.
fn hand_out(budget: Budget, most: usize, setup: &Setup) -> Option<HostMemory> {
    let config = &setup.config;
    HostMemory::start(budget, most, config.boot, settle(config))
        .inspect_err(|error| error!("no memory of the host for clients, for want of a thread: {error}"))
        .ok()
}

/// Starts serving metrics, if an address is set. Without metrics the scheduler runs on.
fn count(address: Option<Address>, commands: &mpsc::Sender<Command>) -> Option<Counted> {
    let mut registry = prometheus_client::registry::Registry::with_prefix("nvshare");
    let counters = Arc::new(Counters::new(&mut registry));
    let (ask, mut questions) = mpsc::channel(1);
    if let Err(error) = metrics::serve(address?, registry, Arc::clone(&counters), ask) {
        error!("no metrics, for want of a thread: {error}");
        return None;
    }
    let commands = commands.clone();
    tokio::spawn(async move {
        while let Some(question) = questions.recv().await {
            let _ = commands.send(Command::Ask(question)).await;
        }
    });
    Some(Counted::new(counters))
}

/// Why a scheduler has ended that was not told to.
#[derive(Debug, thiserror::Error)]
pub enum Stopped {
    /// The core's task has ended: a restart is better than connections that nothing serves.
    #[error("the scheduler's core has stopped; this is a defect")]
    Core,
    /// The files of the sockets were removed, and another scheduler has come.
    #[error("{0}; this one ends, since two would grant one GPU twice")]
    Replaced(#[from] sockets::Error),
}
