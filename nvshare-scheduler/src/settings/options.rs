//! The options: each is declared once, for the command line and for the configuration file, which takes the same names.
//!
//! `docs/reference.md` lists them as well, and a test sees to it that it lists all.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, Parser};
use nvshare_core::Exchange;
use nvshare_proto::{GpuUuid, env as names};

use super::values::{Grace, Level, Memory, Size, SleepAfter, Tq, path, text};
use crate::gpus;
use crate::metrics::Address;

/// Lets programs share GPUs: grants each GPU's lock in time quanta, and has memory moved where it does not all fit.
#[derive(Debug, Clone, Parser)]
#[command(name = "nvshare-scheduler", version, max_term_width = 100)]
pub struct Options {
    #[command(flatten)]
    pub(super) shared: Shared,

    /// Configuration file; options and variables overrule it, SIGHUP reads it again [variable: NVSHARE_CONFIG]
    /// [default: /etc/nvshare/config.toml as root, else $XDG_CONFIG_HOME/nvshare/config.toml, if it exists]
    #[arg(long, value_name = "PATH")]
    pub(super) config: Option<PathBuf>,

    /// File for what administrators set at run time. `nvshare-ctl reset` removes the quanta and whether scheduling is on from it
    /// [default: beside the administrators' socket if that option is given, else /var/lib/nvshare/state.toml as root,
    /// else $XDG_STATE_HOME/nvshare/state.toml]
    #[arg(long, value_name = "PATH")]
    pub(super) state: Option<PathBuf>,

    /// Clients that restore memory while others still evict: nobody, swap (clients with NVSHARE_MEMORY=swap) or all
    /// [default: swap]
    #[arg(long, value_name = "WHOSE", hide = true)]
    pub(super) exchange: Option<Exchange>,

    /// Folder in which the kernel module describes the GPUs
    #[arg(long, value_name = "PATH", default_value = gpus::DESCRIPTIONS, hide = true)]
    pub(super) gpu_descriptions: PathBuf,
}

/// The options that a file has as well, by the same names.
#[derive(Debug, Clone, Default, Args, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Shared {
    /// Clients' socket [variable: NVSHARE_SOCKET] [default: /var/run/nvshare/scheduler.sock as root, else under
    /// $XDG_RUNTIME_DIR]
    #[serde(deserialize_with = "path")]
    #[arg(long, value_name = "PATH")]
    pub(super) socket: Option<PathBuf>,

    /// Administrators' socket [variable: NVSHARE_ADMIN_SOCKET] [default: /var/run/nvshare-admin/admin.sock as root,
    /// else under $XDG_RUNTIME_DIR]
    #[serde(deserialize_with = "path")]
    #[arg(long, value_name = "PATH")]
    pub(super) admin_socket: Option<PathBuf>,

    /// Folder of the seats of containers, each with a socket; it is made with the first seat [default: beside the folder of the
    /// clients' socket, with "-seats" behind its name: /var/run/nvshare-seats as root]
    #[serde(deserialize_with = "path")]
    #[arg(long, value_name = "PATH")]
    pub(super) seats: Option<PathBuf>,

    /// Memory that all clients together may fill on each GPU; excludes --reserve [default: the GPU's memory, less the
    /// reserve]
    #[arg(long, value_name = "SIZE", conflicts_with = "reserve")]
    pub(super) gpu_memory: Option<Memory>,

    /// Memory of each GPU that is left to the driver, contexts and modules [default: 1536MiB, at most an eighth of the
    /// GPU]
    #[arg(long, value_name = "SIZE")]
    pub(super) reserve: Option<Size>,

    /// Memory of the host that clients' memory is moved to, which the scheduler makes and hands out, for all clients together
    /// [default: none: each client makes its own]
    #[arg(long, value_name = "SIZE")]
    pub(super) host_memory: Option<Memory>,

    /// The part of --host-memory that one tenant may have [default: all of it]
    #[arg(long, value_name = "SIZE")]
    pub(super) host_memory_each: Option<Memory>,

    /// Quantum: how long a client keeps a GPU while another waits, in seconds. "auto" is "auto 5% 30": long enough that
    /// hand-overs cost at most 5 % of the time, but no client waits longer than 30 s [default: 30]
    #[arg(long, value_name = "SECONDS")]
    pub(super) tq: Option<Tq>,

    /// Run one client at a time on each GPU, even if the memory of several fits
    #[arg(long)]
    pub(super) exclusive: bool,

    /// Report a client as stuck when it does not answer for this long, in seconds [default: 10]
    #[arg(long, value_name = "SECONDS")]
    pub(super) grace: Option<Grace>,

    /// A program with NVSHARE_SLEEP=1 that has had no work for this long, in seconds, goes off the GPU by itself where others lack
    /// memory [default: none does]
    #[arg(long, value_name = "SECONDS")]
    pub(super) sleep_after: Option<SleepAfter>,

    /// A program that waits to come back from its sleep, and sees several GPUs that are alike, comes back to another one where there is
    /// room
    #[arg(long)]
    pub(super) wake_elsewhere: bool,

    /// Level of the log: error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    pub(super) log: Option<Level>,

    /// Where Prometheus may read metrics: an address such as 127.0.0.1:9464, or the path of a Unix socket
    /// [default: nowhere]
    #[serde(deserialize_with = "text")]
    #[arg(long, value_name = "ADDR")]
    pub(super) metrics: Option<Address>,

    /// Settings of single GPUs, which a file alone has.
    #[arg(skip)]
    pub(super) gpu: BTreeMap<GpuUuid, OfGpu>,
}

impl Shared {
    /// Returns these options of a command line, and those of a file that are not given here.
    pub(super) fn over(self, below: Self) -> Self {
        Self {
            socket: self.socket.or(below.socket),
            admin_socket: self.admin_socket.or(below.admin_socket),
            seats: self.seats.or(below.seats),
            gpu_memory: self.gpu_memory.or(below.gpu_memory),
            reserve: self.reserve.or(below.reserve),
            host_memory: self.host_memory.or(below.host_memory),
            host_memory_each: self.host_memory_each.or(below.host_memory_each),
            tq: self.tq.or(below.tq),
            // A command line can only switch it on.
            exclusive: self.exclusive || below.exclusive,
            grace: self.grace.or(below.grace),
            sleep_after: self.sleep_after.or(below.sleep_after),
            wake_elsewhere: self.wake_elsewhere || below.wake_elsewhere,
            log: self.log.or(below.log),
            metrics: self.metrics.or(below.metrics),
            // Only a file has it.
            gpu: below.gpu,
        }
    }
}

/// The settings of one GPU in a file.
#[derive(Debug, Clone, Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfGpu {
    pub(super) tq: Option<Tq>,
    pub(super) gpu_memory: Option<Memory>,
    pub(super) reserve: Option<Size>,
}

impl Options {
    /// Returns the options of a command line, with those that the environment gives.
    pub(super) fn with_variables(self) -> Self {
        let or = |option: Option<PathBuf>, variable| option.or_else(|| names::path(variable));
        let shared = Shared {
            socket: or(self.shared.socket, names::SOCKET),
            admin_socket: or(self.shared.admin_socket, names::ADMIN_SOCKET),
            ..self.shared
        };
        Self { config: or(self.config, names::CONFIG), shared, ..self }
    }
}
