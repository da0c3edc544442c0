//! The built parts. `cargo test` builds no other package's libraries and programs, so they are asked for here.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Where the built parts are.
#[derive(Debug, Clone, Default)]
pub struct Artifacts {
    /// `libnvshare.so`
    pub library: PathBuf,
    /// The simulated `libcuda.so.1`, by its build name.
    pub simulator: PathBuf,
    /// `nvshare-scheduler`
    pub scheduler: PathBuf,
    /// `nvshare-ctl`
    pub ctl: PathBuf,
    /// `nvshare-workload`
    pub workload: PathBuf,
}

const PACKAGES: [&str; 5] = ["libnvshare", "nvshare-sim", "nvshare-scheduler", "nvshare-ctl", "nvshare-workload"];

impl Artifacts {
    /// Builds what the tests run, once a process, in the profile of this program.
    ///
    /// # Panics
    /// When cargo fails or does not say where something is.
    pub fn get() -> &'static Self {
        static ARTIFACTS: OnceLock<Artifacts> = OnceLock::new();
        ARTIFACTS.get_or_init(|| Self::build(!cfg!(debug_assertions)))
    }

    /// Builds in release mode or not.
    ///
    /// # Panics
    /// As [`Artifacts::get`].
    #[must_use]
    pub fn build(release: bool) -> Self {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(["build", "--message-format=json-render-diagnostics", "--quiet"]);
        PACKAGES.iter().for_each(|package| {
            command.args(["-p", package]);
        });
        if release {
            command.arg("--release");
        }
        // What cargo sets for this program's own build must not look like a change to theirs.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" {
                command.env_remove(name);
            }
        }
        let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        let output = command.current_dir(workspace).stderr(Stdio::inherit()).output().expect("cargo runs");
        assert!(output.status.success(), "cargo build failed");
        let mut artifacts = Self::default();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            if message["reason"] != "compiler-artifact" {
                continue;
            }
            let executable = message["executable"].as_str();
            let shared = message["filenames"]
                .as_array()
                .and_then(|files| files.iter().filter_map(|f| f.as_str()).find(|f| f.ends_with(".so")));
            let place = match message["target"]["name"].as_str() {
                Some("nvshare") => (&mut artifacts.library, shared),
                Some("cuda") => (&mut artifacts.simulator, shared),
                Some("nvshare-scheduler") => (&mut artifacts.scheduler, executable),
                Some("nvshare-ctl") => (&mut artifacts.ctl, executable),
                Some("nvshare-workload") => (&mut artifacts.workload, executable),
                _ => continue,
            };
            if let (place, Some(path)) = place {
                *place = PathBuf::from(path);
            }
        }
        for (what, path) in [
            ("library", &artifacts.library),
            ("simulator", &artifacts.simulator),
            ("scheduler", &artifacts.scheduler),
            ("ctl", &artifacts.ctl),
            ("workload", &artifacts.workload),
        ] {
            assert!(path.is_file(), "cargo did not say where the {what} is");
        }
        artifacts
    }
}
