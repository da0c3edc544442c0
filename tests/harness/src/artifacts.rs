//! The built parts. `cargo test` builds no other package's libraries and programs, so this module has cargo build them.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The paths of the built parts.
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
    /// `nvshare-storm`, if it was asked for: it builds the others itself.
    pub storm: PathBuf,
    /// `nvshare-device-plugin`, if it was asked for: only the image has it.
    pub device_plugin: PathBuf,
}

impl Artifacts {
    /// The packages of the parts that the tests run.
    pub const PACKAGES: [&str; 5] =
        ["libnvshare", "nvshare-sim", "nvshare-scheduler", "nvshare-ctl", "nvshare-workload"];

    /// Builds the parts that the tests run, once a process, in the profile of this program.
    ///
    /// # Panics
    /// When cargo fails or does not name the path of a part.
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
        let mut artifacts = Self::default();
        for (name, path) in cargo_build(&Self::PACKAGES, release) {
            let place = match name.as_str() {
                "nvshare" => &mut artifacts.library,
                "cuda" => &mut artifacts.simulator,
                "nvshare-scheduler" => &mut artifacts.scheduler,
                "nvshare-ctl" => &mut artifacts.ctl,
                "nvshare-workload" => &mut artifacts.workload,
                _ => continue,
            };
            *place = path;
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

    /// Builds the random programs, in release mode. Returns the path of their binary.
    ///
    /// # Panics
    /// As [`Artifacts::get`].
    #[must_use]
    pub fn storm() -> PathBuf {
        let built = cargo_build(&["nvshare-storm"], true);
        built.into_iter().find(|(name, _)| name == "nvshare-storm").expect("cargo says where it is").1
    }

    /// Builds the device plugin, in release mode. Returns its path.
    ///
    /// # Panics
    /// As [`Artifacts::get`].
    #[must_use]
    pub fn device_plugin() -> PathBuf {
        let built = cargo_build(&["nvshare-device-plugin"], true);
        built.into_iter().find(|(name, _)| name == "nvshare-device-plugin").expect("cargo says where it is").1
    }

    /// Builds the driver that does nothing, in release mode. Returns its path.
    ///
    /// # Panics
    /// As [`Artifacts::get`].
    #[must_use]
    pub fn stub() -> PathBuf {
        let built = cargo_build(&["nvshare-stub"], true);
        built.into_iter().find(|(name, _)| name == "stubcuda").expect("cargo says where the stub is").1
    }
}

/// Builds packages. Returns their shared libraries and programs, by target name.
fn cargo_build(packages: &[&str], release: bool) -> Vec<(String, PathBuf)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--message-format=json-render-diagnostics", "--quiet"]);
    packages.iter().for_each(|package| {
        command.args(["-p", package]);
    });
    if release {
        command.arg("--release");
    }
    // Variables that cargo sets for this program's own build must not look like changes to the builds here.
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CARGO_PKG_") || name == "CARGO_MANIFEST_DIR" {
            command.env_remove(name);
        }
    }
    let workspace = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let output = command.current_dir(workspace).stderr(Stdio::inherit()).output().expect("cargo runs");
    assert!(output.status.success(), "cargo build failed");
    let artifact = |line: &str| {
        let message = serde_json::from_str::<serde_json::Value>(line).ok()?;
        if message["reason"] != "compiler-artifact" {
            return None;
        }
        let files = message["filenames"].as_array()?.iter().filter_map(|file| file.as_str());
        let path = message["executable"]
            .as_str()
            .or_else(|| files.into_iter().find(|file| file.ends_with(".so")))?;
        Some((message["target"]["name"].as_str()?.to_owned(), PathBuf::from(path)))
    };
    String::from_utf8_lossy(&output.stdout).lines().filter_map(artifact).collect()
}
