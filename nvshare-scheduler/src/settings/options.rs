//! The command line, and the settings that follow from it and the configuration file.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use nvshare_proto::{QuantumRule, env as names, paths, units};

use super::file::{self, File};
use crate::gpus;
use crate::host_memory::{self, Budget, Descriptions};
use crate::metrics::Address;
use nvshare_core::{Config, Exchange, GpuConfig, Rule, Together};

/// Lets programs share GPUs: grants each GPU's lock in time quanta, and has memory moved where it does not all fit.
#[derive(Debug, Clone, Parser)]
#[command(name = "nvshare-scheduler", version, max_term_width = 100)]
pub struct Options {
    /// Clients' socket [variable: NVSHARE_SOCKET] [default: /var/run/nvshare/scheduler.sock as root, else under
    /// $XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Administrators' socket [variable: NVSHARE_ADMIN_SOCKET] [default: /var/run/nvshare-admin/admin.sock as root,
    /// else under $XDG_RUNTIME_DIR]
    #[arg(long, value_name = "PATH")]
    admin_socket: Option<PathBuf>,

    /// Folder of the seats of containers, each with a socket; it is made with the first seat [default: beside the folder of the
    /// clients' socket, with "-seats" behind its name: /var/run/nvshare-seats as root]
    #[arg(long, value_name = "PATH")]
    seats: Option<PathBuf>,

    /// Configuration file; options and variables overrule it, SIGHUP reads it again [variable: NVSHARE_CONFIG]
    /// [default: /etc/nvshare/config.toml as root, else $XDG_CONFIG_HOME/nvshare/config.toml, if it exists]
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,

    /// File for settings that administrators change at run time (`nvshare-ctl reset` removes them) [default: beside the
    /// administrators' socket if that option is given, else /var/lib/nvshare/state.toml as root, else
    /// $XDG_STATE_HOME/nvshare/state.toml]
    #[arg(long, value_name = "PATH")]
    state: Option<PathBuf>,

    /// Memory that all clients together may fill on each GPU; excludes --reserve [default: the GPU's memory, less the
    /// reserve]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_limit, conflicts_with = "reserve")]
    gpu_memory: Option<u64>,

    /// Memory of each GPU that is left to the driver, contexts and modules [default: 1536MiB, at most an eighth of the
    /// GPU]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    reserve: Option<u64>,

    /// Memory of the host that clients' memory is moved to, which the scheduler makes and hands out, for all clients together
    /// [default: none: each client makes its own]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_limit)]
    host_memory: Option<u64>,

    /// The part of --host-memory that one tenant may have [default: all of it]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_limit)]
    host_memory_each: Option<u64>,

    /// Quantum: how long a client keeps a GPU while another waits, in seconds; or "auto", also "auto 5% 30": long
    /// enough that hand-overs cost at most that part of the time, unless a client would wait longer than that many
    /// seconds [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_rule)]
    tq: Option<QuantumRule>,

    /// Run one client at a time on each GPU, even if the memory of several fits
    #[arg(long)]
    exclusive: bool,

    /// Whether jobs whose memory fits run side by side: "always"; or "measure", unless they get more done by turns, which is
    /// tried now and then [default: always]
    #[arg(long, value_name = "HOW", value_parser = file::together)]
    together: Option<Together>,

    /// Report a client as stuck when it does not answer for this long, in seconds [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = units::parse_grace)]
    grace: Option<Duration>,

    /// Level of the log: error, warn, info, debug or trace [default: info]
    #[arg(long, value_name = "LEVEL", value_parser = file::level)]
    log: Option<tracing::Level>,

    /// Where Prometheus may read metrics: an address such as 127.0.0.1:9464, or the path of a Unix socket
    /// [default: nowhere]
    #[arg(long, value_name = "ADDR")]
    metrics: Option<Address>,

    /// Whose memory comes to the card while that of others leaves: nobody, swap (clients with NVSHARE_MEMORY=swap) or all
    /// [default: swap]
    #[arg(long, value_name = "WHOSE", hide = true)]
    exchange: Option<Exchange>,

    /// Folder in which the kernel module describes the GPUs
    #[arg(long, value_name = "PATH", default_value = gpus::DESCRIPTIONS, hide = true)]
    gpu_descriptions: PathBuf,

    /// Folder in which the kernel describes devices
    #[arg(long, value_name = "PATH", default_value = host_memory::SYSFS, hide = true)]
    sysfs: PathBuf,
}

/// The settings that are in force.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Clients' socket.
    pub clients: PathBuf,
    /// Administrators' socket.
    pub admin: PathBuf,
    /// The folder of the seats of containers.
    pub seats: PathBuf,
    /// The configuration file, if there is one.
    pub file: Option<PathBuf>,
    /// File for settings made at run time; none, if there is no place for it.
    pub state: Option<PathBuf>,
    /// The folders in which the machine describes its GPUs.
    pub descriptions: Descriptions,
    /// The address at which metrics are read, if they are.
    pub metrics: Option<Address>,
    /// The host's memory that clients may have, if any.
    pub host_memory: Option<Budget>,
    /// The level of the log.
    pub log: tracing::Level,
    /// The core's configuration. The caller sets the number of this run of the scheduler.
    pub config: Config,
}

/// The configuration cannot be followed.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct Error {
    /// The file.
    path: PathBuf,
    /// The line and the error there, or the reason why the file cannot be read.
    reason: String,
}

impl Options {
    /// Reads the configuration file and merges it with the options.
    ///
    /// # Errors
    /// The file cannot be read, was named and is not there, or contains values that cannot be followed.
    pub fn settle(&self, root: bool) -> Result<Settings, Error> {
        let named = self.config.clone().or_else(|| names::path(names::CONFIG));
        let is_named = named.is_some();
        let (file, path) = match named.or_else(|| default_file(root)) {
            Some(path) => match read(&path, is_named)? {
                Some(file) => (file, Some(path)),
                None => (File::default(), None),
            },
            None => (File::default(), None),
        };
        let settings = self.merge(file, path, root);
        if settings.clients == settings.admin {
            let reason = "clients and administrators need a socket each".to_owned();
            return Err(Error { path: settings.admin, reason });
        }
        if is_below(&settings.seats, folder_of(&settings.clients)) {
            let reason = "the folder of seats is in the folder of the clients' socket, with which each container would have all \
                          seats"
                .to_owned();
            return Err(Error { path: settings.seats, reason });
        }
        Ok(settings)
    }

    fn merge(&self, file: File, path: Option<PathBuf>, root: bool) -> Settings {
        let named = |option: &Option<PathBuf>, variable, file| {
            option.clone().or_else(|| names::path(variable)).or(file)
        };
        let named_admin = named(&self.admin_socket, names::ADMIN_SOCKET, file.admin_socket);
        let state = self.state.clone().or_else(|| match &named_admin {
            Some(admin) => Some(admin.parent()?.join("nvshare-state.toml")),
            None => default_state(root),
        });
        // Each of the two makes the other void, so an option overrules both settings of the file.
        let (gpu_memory, reserve) = match (self.gpu_memory, self.reserve) {
            (None, None) => (file.gpu_memory.map(|size| size.0), file.reserve.map(|size| size.0)),
            chosen => chosen,
        };
        let own = |(gpu, own): (_, file::Gpu)| {
            let (quantum, auto) = match own.tq.map(|tq| Rule::from(tq.0)) {
                Some(Rule::Fixed(quantum)) => (Some(quantum), None),
                Some(Rule::Auto(auto)) => (None, Some(auto)),
                None => (None, None),
            };
            let gpu_memory = own.gpu_memory.map(|size| size.0);
            let own = GpuConfig { quantum, auto, gpu_memory, reserve: own.reserve.map(|size| size.0) };
            (gpu, own)
        };
        let mut config = Config {
            gpu_memory,
            reserve,
            exclusive: self.exclusive || file.exclusive.unwrap_or(false),
            together: self.together.or(file.together.map(|how| how.0)).unwrap_or_default(),
            exchange: self.exchange.unwrap_or_default(),
            ..Config::default()
        };
        config.grace = self.grace.or(file.grace.map(|grace| grace.0)).unwrap_or(config.grace);
        if let Some(rule) = self.tq.or(file.tq.map(|tq| tq.0)) {
            config.set_rule(None, rule.into());
        }
        config.gpus = file.gpu.into_iter().map(own).collect();
        let all = self.host_memory.or(file.host_memory.map(|size| size.0));
        let each = self.host_memory_each.or(file.host_memory_each.map(|size| size.0));
        let host_memory = all.map(|all| Budget { all, each: each.unwrap_or(all) });
        let clients =
            named(&self.socket, names::SOCKET, file.socket).unwrap_or_else(|| paths::clients_socket(root));
        let seats = self.seats.clone().or(file.seats).unwrap_or_else(|| seats_beside(&clients));
        Settings {
            clients,
            seats,
            admin: named_admin.unwrap_or_else(|| paths::admin_socket(root)),
            file: path,
            state,
            descriptions: Descriptions { gpus: self.gpu_descriptions.clone(), sysfs: self.sysfs.clone() },
            metrics: self.metrics.clone().or(file.metrics.map(|address| address.0)),
            host_memory,
            log: self.log.or(file.log.map(|level| level.0)).unwrap_or(tracing::Level::INFO),
            config,
        }
    }
}

/// The folder of a socket.
fn folder_of(socket: &Path) -> &Path {
    socket.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The usual folder of seats: [`paths::SEATS`] where the clients' socket is root's.
fn seats_beside(clients: &Path) -> PathBuf {
    let folder = real(folder_of(clients));
    let mut name = folder.file_name().unwrap_or("nvshare".as_ref()).to_owned();
    name.push("-seats");
    folder.with_file_name(name)
}

/// Whether a path is a folder or in it. Everything is in the root folder, which no container is given.
fn is_below(path: &Path, folder: &Path) -> bool {
    let folder = real(folder);
    folder != Path::new("/") && real(path).starts_with(folder)
}

/// A path without links and without what is relative, as far as it is there.
fn real(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, real)) = there else { return path };
    path.strip_prefix(above).map_or_else(|_| path.clone(), |rest| real.join(rest))
}

/// Reads the file at a path; none if there is no file and none was named.
fn read(path: &Path, named: bool) -> Result<Option<File>, Error> {
    let error = |reason: String| Error { path: path.to_owned(), reason };
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(missing) if missing.kind() == ErrorKind::NotFound && !named => return Ok(None),
        Err(why) => return Err(error(why.to_string())),
    };
    let file: File = file::parse(&text).map_err(error)?;
    let both = |memory: bool, reserve: bool| memory && reserve;
    if both(file.gpu_memory.is_some(), file.reserve.is_some())
        || file.gpu.values().any(|gpu| both(gpu.gpu_memory.is_some(), gpu.reserve.is_some()))
    {
        return Err(error(
            "gpu-memory and reserve exclude each other: there is no reserve with gpu-memory".to_owned(),
        ));
    }
    Ok(Some(file))
}

fn default_file(root: bool) -> Option<PathBuf> {
    if root {
        Some("/etc/nvshare/config.toml".into())
    } else {
        own("XDG_CONFIG_HOME", ".config", "config.toml")
    }
}

fn default_state(root: bool) -> Option<PathBuf> {
    if root {
        Some("/var/lib/nvshare/state.toml".into())
    } else {
        own("XDG_STATE_HOME", ".local/state", "state.toml")
    }
}

/// A path in the user's own folder: that of a variable, or else the usual one.
fn own(variable: &str, usual: &str, name: &str) -> Option<PathBuf> {
    let folder = names::path(variable).or_else(|| Some(names::path("HOME")?.join(usual)))?;
    Some(folder.join("nvshare").join(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::units::GIB;

    fn settings(arguments: &[&str], text: &str) -> Settings {
        let options =
            Options::try_parse_from(["nvshare-scheduler"].iter().chain(arguments)).expect("options");
        options.merge(file::parse(text).expect("a file"), None, true)
    }

    #[test]
    fn options_overrule_the_file() {
        let text = "tq = 5\nreserve = \"1g\"\ngrace = 3\nlog = \"warn\"\nsocket = \"/a\"";
        let (plain, chosen) =
            (settings(&[], text), settings(&["--tq", "7", "--socket", "/b", "--log", "debug"], text));
        assert_eq!(
            (plain.config.quantum, chosen.config.quantum),
            (Duration::from_secs(5), Duration::from_secs(7))
        );
        assert_eq!((plain.clients, chosen.clients), ("/a".into(), "/b".into()));
        assert_eq!((plain.log, chosen.log), (tracing::Level::WARN, tracing::Level::DEBUG));
        assert_eq!(chosen.config.grace, Duration::from_secs(3));
        assert_eq!(settings(&["--gpu-memory", "8g"], text).config.reserve, None, "an option makes it void");
        let config = settings(&["--reserve", "1g"], "gpu-memory = \"8g\"").config;
        assert_eq!((config.gpu_memory, config.reserve), (None, Some(GIB)));
        let together = |arguments: &[&str], text| settings(arguments, text).config.together;
        assert_eq!(together(&[], ""), Together::Always);
        assert_eq!(together(&[], "together = \"measure\""), Together::Measure);
        assert_eq!(together(&["--together", "always"], "together = \"measure\""), Together::Always);
    }

    #[test]
    fn the_state_is_kept_beside_a_socket_of_ones_own() {
        assert_eq!(
            settings(&["--admin-socket", "/x/admin.sock"], "").state,
            Some("/x/nvshare-state.toml".into())
        );
        assert_eq!(settings(&["--state", "/s"], "admin-socket = \"/x/admin.sock\"").state, Some("/s".into()));
    }

    #[test]
    fn seats_are_beside_the_clients_sockets_folder_and_never_in_it() {
        let seats = |arguments: &[&str], text| settings(arguments, text).seats;
        assert_eq!(seats(&["--socket", "/x/nvshare/s"], ""), Path::new("/x/nvshare-seats"));
        assert_eq!(seats_beside(paths::SYSTEM_SOCKET.as_ref()), real(paths::SEATS.as_ref()));
        assert_eq!(seats(&["--seats", "/b"], "seats = \"/a\""), Path::new("/b"));
        assert_eq!(seats(&[], "seats = \"/a\""), Path::new("/a"));
        for (path, folder, expected) in [
            ("/x/nvshare/seats", "/x/nvshare", true),
            ("/x/nvshare", "/x/nvshare", true),
            ("/x/nvshare-seats", "/x/nvshare", false),
            ("/x", "/", false),
        ] {
            assert_eq!(is_below(path.as_ref(), folder.as_ref()), expected, "{path} {folder}");
        }
    }

    #[test]
    fn options_that_exclude_each_other_or_mean_nothing_are_refused() {
        for arguments in [
            &["--gpu-memory", "8g", "--reserve", "1g"][..],
            &["--gpu-memory", "0"],
            &["--gpu-memory", "4"],
            &["--grace", "0"],
            &["--tq", "0"],
            &["--tq", "auto 5"],
            &["--tq", "auto 95% 30"],
            &["--tq", "automatic"],
            &["--reserve", "-1"],
            &["--log", "loud"],
            &["--together", "sometimes"],
            &["--exchange", "some"],
            &["--tq"],
            &["x"],
        ] {
            assert!(Options::try_parse_from(["x"].iter().chain(arguments)).is_err(), "{arguments:?}");
        }
    }
}
