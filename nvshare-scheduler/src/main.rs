//! The scheduler's daemon.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use nvshare_core::Config;
use nvshare_proto::units::{self, Bytes};
use nvshare_proto::{VERSION, paths};
use nvshare_scheduler::{server, sockets};
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

/// Clients of an earlier scheduler look for a new one once a second.
const SETTLE: Duration = Duration::from_millis(1300);

/// Grants each GPU's lock to the programs that share it, in memory-aware time quanta.
#[derive(Debug, Parser)]
#[command(name = "nvshare-scheduler", version)]
struct Options {
    /// Clients' socket [default: /var/run/nvshare/scheduler.sock as root, else under $XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH", env = "NVSHARE_SOCKET")]
    socket: Option<PathBuf>,

    /// Administrators' socket [default: /var/run/nvshare-admin/admin.sock as root, else under $XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH", env = "NVSHARE_ADMIN_SOCKET")]
    admin_socket: Option<PathBuf>,

    /// Memory that clients may fill on each GPU together; there is no reserve then [default: what the GPU has, less
    /// the reserve]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    gpu_memory: Option<u64>,

    /// Memory of each GPU that is left to contexts, modules and the driver [default: 1536MiB, and of a small
    /// GPU an eighth at most]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    reserve: Option<u64>,

    /// Quantum: how long a client keeps a GPU while another waits, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_quantum, default_value = "30")]
    tq: Duration,

    /// One client at a time on each GPU, even where memory fits
    #[arg(long)]
    exclusive: bool,

    /// Report a client as stuck when it does not answer for this long, in seconds
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_quantum, default_value = "10")]
    grace: Duration,

    /// What is logged: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log: tracing::Level,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let options = Options::parse();
    tracing_subscriber::fmt()
        .with_max_level(options.log)
        .with_target(false)
        .with_writer(std::io::stderr)
        .init();
    match run(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), Box<dyn std::error::Error>> {
    let root = sockets::is_root();
    let clients = options.socket.unwrap_or_else(|| paths::clients_socket(root));
    let admin = options.admin_socket.unwrap_or_else(|| paths::admin_socket(root));
    let sockets = sockets::Sockets::bind(&clients, &admin)?;
    announce(&clients, &admin, options.gpu_memory, options.tq);
    let config = Config {
        boot: sockets::random()?,
        quantum: options.tq,
        gpu_memory: options.gpu_memory,
        reserve: options.reserve,
        exclusive: options.exclusive,
        grace: options.grace,
        settle: SETTLE,
    };
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    server::run(sockets, config, shutdown).await?;
    info!("stopped");
    Ok(())
}

fn announce(clients: &Path, admin: &Path, gpu_memory: Option<u64>, tq: Duration) {
    info!("nvshare-scheduler {} (protocol {VERSION}), TQ {} s", env!("CARGO_PKG_VERSION"), tq.as_secs_f64());
    if let Some(bytes) = gpu_memory {
        info!("clients may fill {} of each GPU", Bytes(bytes));
    }
    info!("clients at {}, administrators at {}", clients.display(), admin.display());
}
