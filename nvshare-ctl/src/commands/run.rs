//! `nvshare-ctl run -- CMD`

use std::env;
use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use clap::Args;
use nvshare_proto::env::{LIBRARY, RUN};

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    library: Library,

    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Becomes the program: its signals, its exit code and its terminal are its own.
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let library = options.library.find()?;
    let mut preload = OsString::from(&library);
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let (program, arguments) = options.command.split_first().ok_or("no program is named")?;
    let error = Command::new(program).args(arguments).env("LD_PRELOAD", preload).env(RUN, unique()).exec();
    Err(format!("{}: {error}", Path::new(program).display()))
}

/// What no other run of this user has: what it starts shares one limit.
fn unique() -> String {
    RandomState::new().hash_one(process::id()).to_string()
}

/// Where the library is.
#[derive(Debug, Args)]
pub(super) struct Library {
    /// The library to preload [default: beside this program, or in ../lib/nvshare]
    #[arg(long, value_name = "PATH", env = LIBRARY)]
    library: Option<PathBuf>,
}

impl Library {
    /// # Errors
    /// When there is none where it should be.
    pub(super) fn find(&self) -> Result<PathBuf, String> {
        if let Some(named) = &self.library {
            let is_there = named.is_file().then(|| named.clone());
            return is_there.ok_or_else(|| format!("{}: no such library", named.display()));
        }
        let here = env::current_exe().map_err(|error| error.to_string())?;
        let here = here.parent().unwrap_or(Path::new("/"));
        let places = [here.join("libnvshare.so"), here.join("../lib/nvshare/libnvshare.so")];
        places.iter().find(|place| place.is_file()).cloned().ok_or_else(|| {
            format!(
                "libnvshare.so is neither in {} nor in ../lib/nvshare; name it by --library or {LIBRARY}",
                here.display()
            )
        })
    }
}
