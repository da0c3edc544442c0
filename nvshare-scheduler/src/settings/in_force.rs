//! The settings that are in force: what is given, by options, variables and the configuration file, and the
//! defaults.

use std::path::{Path, PathBuf};

use nvshare_core::{Config, GpuConfig, Rule};
use nvshare_proto::paths;

use super::file::{self, Error, own_folder};
use super::options::{OfGpu, Options, Shared};
use crate::host_memory::Budget;
use crate::metrics::Address;

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
    /// The folder in which the machine describes its GPUs.
    pub descriptions: PathBuf,
    /// The address at which metrics are read, if they are.
    pub metrics: Option<Address>,
    /// The host's memory that clients may have, if any.
    pub host_memory: Option<Budget>,
    /// The level of the log.
    pub log: tracing::Level,
    /// The core's configuration. The caller sets the number of this run of the scheduler.
    pub config: Config,
}

impl Options {
    /// Reads the configuration file and merges it with the options.
    ///
    /// # Errors
    /// The file cannot be read, was named and is not there, or contains values that cannot be followed.
    pub fn settle(&self, root: bool) -> Result<Settings, Error> {
        let given = self.clone().with_variables();
        let (file, path) = file::read(given.config.as_deref(), root)?;
        let settings = given.above(file).in_force(path, root);
        if settings.clients == settings.admin {
            let reason = "clients and administrators need a socket each".to_owned();
            return Err(Error { path: settings.admin, reason });
        }
        if is_below(&settings.seats, folder_of(&settings.clients)) {
            let reason = "--seats must not be inside the folder of --socket: containers mount that folder and would see all seats"
                .to_owned();
            return Err(Error { path: settings.seats, reason });
        }
        Ok(settings)
    }

    /// Returns these options, with those of a file that they do not overrule.
    fn above(self, mut file: Shared) -> Self {
        // Each of the two makes the other void, so an option overrules both settings of the file.
        if self.shared.gpu_memory.is_some() || self.shared.reserve.is_some() {
            (file.gpu_memory, file.reserve) = (None, None);
        }
        Self { shared: self.shared.over(file), ..self }
    }

    /// Returns the settings that follow from what is given, by a file at `path` as well; the rest has its
    /// default.
    fn in_force(self, path: Option<PathBuf>, root: bool) -> Settings {
        let shared = self.shared;
        let state = self.state.or_else(|| match &shared.admin_socket {
            Some(admin) => Some(admin.parent()?.join("nvshare-state.toml")),
            None => default_state(root),
        });
        let mut config = Config {
            gpu_memory: shared.gpu_memory.map(|size| size.0),
            reserve: shared.reserve.map(|size| size.0),
            exclusive: shared.exclusive,
            exchange: self.exchange.unwrap_or_default(),
            gpus: shared.gpu.into_iter().map(|(gpu, own)| (gpu, own.into())).collect(),
            ..Config::default()
        };
        config.sleep_after = shared.sleep_after.map(|time| time.0);
        config.wake_elsewhere = shared.wake_elsewhere;
        config.grace = shared.grace.map_or(config.grace, |grace| grace.0);
        if let Some(rule) = shared.tq {
            config.set_general_rule(rule.0.into());
        }
        let host_memory = shared
            .host_memory
            .map(|all| Budget { all: all.0, each: shared.host_memory_each.unwrap_or(all).0 });
        let clients = shared.socket.unwrap_or_else(|| paths::clients_socket(root));
        Settings {
            seats: shared.seats.unwrap_or_else(|| seats_beside(&clients)),
            clients,
            admin: shared.admin_socket.unwrap_or_else(|| paths::admin_socket(root)),
            file: path,
            state,
            descriptions: self.gpu_descriptions,
            metrics: shared.metrics,
            host_memory,
            log: shared.log.map_or(tracing::Level::INFO, |level| level.0),
            config,
        }
    }
}

impl From<OfGpu> for GpuConfig {
    fn from(own: OfGpu) -> Self {
        let (quantum, auto) = match own.tq.map(|tq| Rule::from(tq.0)) {
            Some(Rule::Fixed(quantum)) => (Some(quantum), None),
            Some(Rule::Auto(auto)) => (None, Some(auto)),
            None => (None, None),
        };
        let [gpu_memory, reserve] = [own.gpu_memory.map(|size| size.0), own.reserve.map(|size| size.0)];
        Self { quantum, auto, gpu_memory, reserve }
    }
}

/// Returns the folder of a socket.
fn folder_of(socket: &Path) -> &Path {
    socket.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the usual folder of seats: [`paths::SEATS`] where the clients' socket is root's.
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

/// Returns a path without links and without what is relative, as far as it is there.
fn real(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, real)) = there else { return path };
    path.strip_prefix(above).map_or_else(|_| path.clone(), |rest| real.join(rest))
}

fn default_state(root: bool) -> Option<PathBuf> {
    if root {
        Some("/var/lib/nvshare/state.toml".into())
    } else {
        own_folder("XDG_STATE_HOME", ".local/state", "state.toml")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;
    use nvshare_proto::units::GIB;

    use super::*;

    fn settings(arguments: &[&str], text: &str) -> Settings {
        let options =
            Options::try_parse_from(["nvshare-scheduler"].iter().chain(arguments)).expect("options");
        options.with_variables().above(file::parse(text).expect("a file")).in_force(None, true)
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
        let sleep_after = |arguments: &[&str], text| settings(arguments, text).config.sleep_after;
        assert_eq!(sleep_after(&[], ""), None);
        assert_eq!(sleep_after(&[], "sleep-after = 600"), Some(Duration::from_secs(600)));
        let overruled = sleep_after(&["--sleep-after", "1.5"], "sleep-after = 600");
        assert_eq!(overruled, Some(Duration::from_millis(1500)));
        assert_eq!(settings(&["--gpu-memory", "8g"], text).config.reserve, None, "an option makes it void");
        let config = settings(&["--reserve", "1g"], "gpu-memory = \"8g\"").config;
        assert_eq!((config.gpu_memory, config.reserve), (None, Some(GIB)));
    }

    #[test]
    fn a_gpu_keeps_its_own_quantum_beside_a_general_one() {
        let name = "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0";
        let (own, other) = (name.parse().unwrap(), nvshare_proto::GpuUuid([1; 16]));
        let text = format!("tq = 20\n[gpu.{name}]\ntq = 5");
        let fixed = |seconds| Rule::Fixed(Duration::from_secs(seconds));
        for (arguments, general) in [(&[][..], 20), (&["--tq", "7"], 7)] {
            let config = settings(arguments, &text).config;
            assert_eq!((config.rule(own), config.rule(other)), (fixed(5), fixed(general)), "{arguments:?}");
        }
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
            &["--sleep-after", "0"],
            &["--sleep-after", "-5"],
            &["--sleep-after", "0.5"],
            &["--sleep-after", "1 hour"],
            &["--tq", "0"],
            &["--tq", "auto 5"],
            &["--tq", "auto 95% 30"],
            &["--tq", "automatic"],
            &["--reserve", "-1"],
            &["--log", "loud"],
            &["--exchange", "some"],
            &["--tq"],
            &["x"],
        ] {
            assert!(Options::try_parse_from(["x"].iter().chain(arguments)).is_err(), "{arguments:?}");
        }
    }
}
