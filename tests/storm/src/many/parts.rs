//! The built parts: given by name, shipped beside this program, or built here.

use std::path::{Path, PathBuf};

use nvshare_harness::Artifacts;

/// Paths of the parts.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    pub(crate) library: PathBuf,
    pub(crate) scheduler: PathBuf,
    pub(crate) ctl: PathBuf,
    /// The simulated driver; `None`: the machine's own.
    pub(crate) simulator: Option<PathBuf>,
    /// This program.
    pub(crate) storm: PathBuf,
}

/// Options that name the parts.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PartsOptions {
    /// libnvshare.so; without it, the parts of `dist/` if this program is there, or else everything is built by cargo
    #[arg(long, env = "STORM_LIBRARY")]
    library: Option<PathBuf>,
    /// nvshare-scheduler
    #[arg(long, env = "STORM_SCHEDULER")]
    scheduler: Option<PathBuf>,
    /// nvshare-ctl
    #[arg(long, env = "STORM_CTL")]
    ctl: Option<PathBuf>,
    /// The simulated driver, for what is not built by cargo
    #[arg(long, env = "STORM_SIMULATOR")]
    simulator: Option<PathBuf>,
    /// The machine's own driver and card
    #[arg(long, conflicts_with = "simulator")]
    pub(crate) real: bool,
}

impl Parts {
    /// The parts that the options name, or those of the `dist/` that this program is in, or else those that cargo builds.
    pub(crate) fn find(options: &PartsOptions) -> Result<Self, String> {
        let storm = std::env::current_exe().map_err(|error| error.to_string())?;
        let given = [&options.library, &options.scheduler, &options.ctl];
        if given.iter().all(|part| part.is_none()) {
            if let Some(shipped) = Self::shipped(&storm) {
                return Ok(Self { simulator: shipped.simulator.filter(|_| !options.real), ..shipped });
            }
            let built = Artifacts::get();
            return Ok(Self {
                library: built.library.clone(),
                scheduler: built.scheduler.clone(),
                ctl: built.ctl.clone(),
                simulator: (!options.real).then(|| built.simulator.clone()),
                storm,
            });
        }
        let need = |part: &Option<PathBuf>, name: &str| {
            let path = part.as_ref().ok_or_else(|| format!("--{name} is missing"))?;
            Path::canonicalize(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        Ok(Self {
            library: need(&options.library, "library")?,
            scheduler: need(&options.scheduler, "scheduler")?,
            ctl: need(&options.ctl, "ctl")?,
            simulator: if options.real { None } else { Some(need(&options.simulator, "simulator")?) },
            storm,
        })
    }

    /// The parts in `dist/`, if this program is at its place there: no cargo is needed then.
    fn shipped(storm: &Path) -> Option<Self> {
        let dist = storm.parent().filter(|folder| folder.ends_with("libexec"))?.parent()?;
        let parts = Self {
            library: dist.join("lib/nvshare/libnvshare.so"),
            scheduler: dist.join("bin/nvshare-scheduler"),
            ctl: dist.join("bin/nvshare-ctl"),
            simulator: Some(dist.join("libexec/simulated/libcuda.so.1")),
            storm: storm.to_owned(),
        };
        parts.library.is_file().then_some(parts)
    }
}
