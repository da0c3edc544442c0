//! The options: each is declared once, for the command line and for the configuration file, which takes the same names.
//!
//! The README lists them as well, and a test sees to it that it lists all.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Parser;
use nvshare_core::Exchange;
use nvshare_proto::{GpuUuid, env as names};

use super::values::{Grace, HowTogether, Level, Memory, Size, Tq, path, text};
use crate::gpus;
use crate::metrics::Address;

/// Declares options, and how one set of them goes over another.
macro_rules! options {
    ($(#[$about:meta])* pub struct $name:ident { $($(#[$on:meta])* $option:ident: $kind:ty,)* }) => {
        $(#[$about])*
        pub struct $name {
            $($(#[$on])* pub(super) $option: $kind,)*
        }

        impl $name {
            /// Returns these options, and those of `below` that are not given here.
            pub(super) fn over(self, below: Self) -> Self {
                Self { $($option: self.$option.or_below(below.$option),)* }
            }
        }
    };
}

options! {
    /// Lets programs share GPUs: grants each GPU's lock in time quanta, and has memory moved where it does not all fit.
    // Those that a file cannot have are skipped there.
    #[derive(Debug, Clone, Default, Parser, serde::Deserialize)]
    #[command(name = "nvshare-scheduler", version, max_term_width = 100)]
    #[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
    pub struct Options {
        /// Clients' socket [variable: NVSHARE_SOCKET] [default: /var/run/nvshare/scheduler.sock as root, else under
        /// $XDG_RUNTIME_DIR]
        #[serde(deserialize_with = "path")]
        #[arg(long, value_name = "PATH")]
        socket: Option<PathBuf>,

        /// Administrators' socket [variable: NVSHARE_ADMIN_SOCKET] [default: /var/run/nvshare-admin/admin.sock as root,
        /// else under $XDG_RUNTIME_DIR]
        #[serde(deserialize_with = "path")]
        #[arg(long, value_name = "PATH")]
        admin_socket: Option<PathBuf>,

        /// Folder of the seats of containers, each with a socket; it is made with the first seat [default: beside the folder of the
        /// clients' socket, with "-seats" behind its name: /var/run/nvshare-seats as root]
        #[serde(deserialize_with = "path")]
        #[arg(long, value_name = "PATH")]
        seats: Option<PathBuf>,

        /// Configuration file; options and variables overrule it, SIGHUP reads it again [variable: NVSHARE_CONFIG]
        /// [default: /etc/nvshare/config.toml as root, else $XDG_CONFIG_HOME/nvshare/config.toml, if it exists]
        #[serde(skip)]
        #[arg(long, value_name = "PATH")]
        config: Option<PathBuf>,

        /// File for what administrators set at run time. `nvshare-ctl reset` removes the quanta and whether scheduling is on from it
        /// [default: beside the administrators' socket if that option is given, else /var/lib/nvshare/state.toml as root,
        /// else $XDG_STATE_HOME/nvshare/state.toml]
        #[serde(skip)]
        #[arg(long, value_name = "PATH")]
        state: Option<PathBuf>,

        /// Memory that all clients together may fill on each GPU; excludes --reserve [default: the GPU's memory, less the
        /// reserve]
        #[arg(long, value_name = "SIZE", conflicts_with = "reserve")]
        gpu_memory: Option<Memory>,

        /// Memory of each GPU that is left to the driver, contexts and modules [default: 1536MiB, at most an eighth of the
        /// GPU]
        #[arg(long, value_name = "SIZE")]
        reserve: Option<Size>,

        /// Memory of the host that clients' memory is moved to, which the scheduler makes and hands out, for all clients together
        /// [default: none: each client makes its own]
        #[arg(long, value_name = "SIZE")]
        host_memory: Option<Memory>,

        /// The part of --host-memory that one tenant may have [default: all of it]
        #[arg(long, value_name = "SIZE")]
        host_memory_each: Option<Memory>,

        /// Quantum: how long a client keeps a GPU while another waits, in seconds. "auto" is "auto 5% 30": long enough that
        /// hand-overs cost at most 5 % of the time, but no client waits longer than 30 s [default: 30]
        #[arg(long, value_name = "SECONDS")]
        tq: Option<Tq>,

        /// Run one client at a time on each GPU, even if the memory of several fits
        #[arg(long)]
        exclusive: bool,

        /// Whether jobs whose memory fits run side by side. "always": they do. "measure": they take turns if trials show that they
        /// get more done that way [default: always]
        #[arg(long, value_name = "HOW")]
        together: Option<HowTogether>,

        /// Report a client as stuck when it does not answer for this long, in seconds [default: 10]
        #[arg(long, value_name = "SECONDS")]
        grace: Option<Grace>,

        /// Level of the log: error, warn, info, debug or trace [default: info]
        #[arg(long, value_name = "LEVEL")]
        log: Option<Level>,

        /// Where Prometheus may read metrics: an address such as 127.0.0.1:9464, or the path of a Unix socket
        /// [default: nowhere]
        #[serde(deserialize_with = "text")]
        #[arg(long, value_name = "ADDR")]
        metrics: Option<Address>,

        /// Clients that restore memory while others still evict: nobody, swap (clients with NVSHARE_MEMORY=swap) or all
        /// [default: swap]
        #[serde(skip)]
        #[arg(long, value_name = "WHOSE", hide = true)]
        exchange: Option<Exchange>,

        /// Folder in which the kernel module describes the GPUs
        #[serde(skip)]
        #[arg(long, value_name = "PATH", default_value = gpus::DESCRIPTIONS, hide = true)]
        gpu_descriptions: PathBuf,

        /// What a file says of single GPUs.
        #[arg(skip)]
        gpu: BTreeMap<GpuUuid, OfGpu>,
    }
}

/// What a file says of one GPU.
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
        Self {
            socket: or(self.socket, names::SOCKET),
            admin_socket: or(self.admin_socket, names::ADMIN_SOCKET),
            config: or(self.config, names::CONFIG),
            ..self
        }
    }
}

/// A value that may be given in several places.
trait OrBelow {
    /// Returns this value, or else the one that it overrules.
    fn or_below(self, below: Self) -> Self;
}

impl<T> OrBelow for Option<T> {
    fn or_below(self, below: Self) -> Self {
        self.or(below)
    }
}

impl OrBelow for bool {
    fn or_below(self, below: Self) -> Self {
        self || below
    }
}

/// Only a command line has it.
impl OrBelow for PathBuf {
    fn or_below(self, _: Self) -> Self {
        self
    }
}

/// Only a file has it.
impl<K, V> OrBelow for BTreeMap<K, V> {
    fn or_below(self, below: Self) -> Self {
        below
    }
}
