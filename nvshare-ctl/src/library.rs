//! The library that is preloaded: its path, and a check of the file.

use std::env;
use std::path::{self, Path, PathBuf};

use clap::Args;
use nvshare_proto::env::{self as names, LIBRARY};

use crate::elf;

/// The path of the library.
#[derive(Debug, Default, Args)]
pub(crate) struct Library {
    /// The library to preload [variable: NVSHARE_LIBRARY] [default: beside this
    /// program, or in ../lib/nvshare]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
}

impl Library {
    /// The library's absolute path.
    ///
    /// # Errors
    /// There is no file where the library should be, or the file there is something else.
    pub(crate) fn find(&self) -> Result<PathBuf, String> {
        if let Some(named) = self.library.clone().or_else(|| names::path(LIBRARY)) {
            if !named.is_file() {
                return Err(format!("{}: no such library", named.display()));
            }
            check(&named)?;
            return path::absolute(&named).map_err(|error| format!("{}: {error}", named.display()));
        }
        let here = env::current_exe().map_err(|error| error.to_string())?;
        let here = here.parent().unwrap_or(Path::new("/"));
        let places = [here.join("libnvshare.so"), here.join("../lib/nvshare/libnvshare.so")];
        let found = places.iter().find(|place| place.is_file()).ok_or_else(|| {
            format!(
                "libnvshare.so is neither in {} nor in ../lib/nvshare; name it by --library or {LIBRARY}",
                here.display()
            )
        })?;
        check(found)?;
        found.canonicalize().map_err(|error| format!("{}: {error}", found.display()))
    }
}

/// Whether a file is the library: it alone exports both the driver's first function and `dlsym`.
fn check(path: &Path) -> Result<(), String> {
    let exports = elf::exports(path)?;
    if exports.contains("cuInit") && exports.contains("dlsym") {
        Ok(())
    } else {
        Err(format!(
            "{} is not nvshare's library: it does not export what libnvshare.so does",
            path.display()
        ))
    }
}

/// The reason why LD_PRELOAD cannot name a path, if so: it separates by blanks and colons, and knows no way to escape them.
pub(crate) fn unnameable(path: &Path) -> Option<String> {
    let text = path.to_string_lossy();
    let culprit = [(' ', "a blank"), (':', "a colon"), ('$', "a dollar sign")];
    let (_, name) = culprit.into_iter().find(|&(character, _)| text.contains(character))?;
    Some(format!(
        "{}: LD_PRELOAD cannot name a path with {name}; install the library elsewhere, or name a link to it by --library",
        path.display()
    ))
}
