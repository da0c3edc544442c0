//! `nvshare-ctl install`, `install-library`, `uninstall`
//!
//! Every file is written beside its place and renamed into it: what runs keeps the file that it has open, where a copy
//! over a library would kill the programs that have loaded it, and one over a running program fails.

use std::env;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::library::{self, Library};
use crate::output::{Done, print};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Folder for bin/nvshare-scheduler, bin/nvshare-ctl and lib/nvshare/libnvshare.so
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct LibraryOptions {
    #[command(flatten)]
    library: Library,

    /// The folder; created if it does not exist
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

const LIBRARY: &str = "lib/nvshare/libnvshare.so";
const PROGRAMS: [&str; 2] = ["bin/nvshare-scheduler", "bin/nvshare-ctl"];

/// A file and where it goes.
struct Copy {
    from: PathBuf,
    to: PathBuf,
}

impl Copy {
    /// Where it is written before it is renamed. What an install that was killed has left there is written anew.
    fn new_file(&self) -> PathBuf {
        let name = self.to.file_name().unwrap_or_default().to_string_lossy();
        self.to.with_file_name(format!(".{name}.new"))
    }

    fn is_in_place(&self) -> bool {
        matches!((self.from.canonicalize(), self.to.canonicalize()), (Ok(from), Ok(to)) if from == to)
    }
}

pub(crate) fn install(options: &Options) -> Done {
    let own = env::current_exe().map_err(|error| error.to_string())?;
    let scheduler = own.with_file_name("nvshare-scheduler");
    if !scheduler.is_file() {
        return Err(format!(
            "{} is not there: a distribution has it beside nvshare-ctl",
            scheduler.display()
        )
        .into());
    }
    let library = Library::default().find()?;
    let sources = [library, scheduler, own];
    let copies: Vec<Copy> = [LIBRARY, PROGRAMS[0], PROGRAMS[1]]
        .iter()
        .zip(sources)
        .map(|(to, from)| Copy { from, to: options.prefix.join(to) })
        .collect();
    if let Some(why) = library::unnameable(&copies[0].to) {
        return Err(why.into());
    }
    put_in_place(&copies)?;
    print(&format!(
        "{}A running scheduler stays the old version until you restart it. Running programs keep the old library.\n",
        list("installed", copies.iter().map(|copy| &copy.to))
    ))
}

pub(crate) fn install_library(options: &LibraryOptions) -> Done {
    let from = options.library.find()?;
    let copy = Copy { from, to: options.directory.join("libnvshare.so") };
    put_in_place(std::slice::from_ref(&copy))?;
    print(&list("installed", [&copy.to].into_iter()))
}

pub(crate) fn uninstall(options: &Options) -> Done {
    let mut removed = Vec::new();
    for file in PROGRAMS.iter().chain([&LIBRARY]).map(|file| options.prefix.join(file)) {
        match fs::remove_file(&file) {
            Ok(()) => removed.push(file),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(explain(&file, &error).into()),
        }
    }
    // Only if nothing of somebody else's is in it.
    let _ = fs::remove_dir(options.prefix.join("lib/nvshare"));
    if removed.is_empty() {
        return Err(format!("nothing is installed under {}", options.prefix.display()).into());
    }
    print(&list("removed", removed.iter()))
}

fn list<'a>(what: &str, files: impl Iterator<Item = &'a PathBuf>) -> String {
    files.map(|file| format!("{what} {}\n", file.display())).collect()
}

/// Writes all files, and only then renames any: when one cannot be written, nothing has changed.
fn put_in_place(copies: &[Copy]) -> Result<(), String> {
    if let Some(copy) = copies.iter().find(|copy| copy.is_in_place()) {
        return Err(format!(
            "{} is the file to install itself; run `install` of the new distribution",
            copy.to.display()
        ));
    }
    if let Some(copy) = copies.iter().find(|copy| copy.to.is_dir()) {
        return Err(format!("{}: it is a folder", copy.to.display()));
    }
    let written = copies.iter().try_for_each(|copy| write(copy).map_err(|error| explain(&copy.to, &error)));
    let renamed = written.and_then(|()| {
        copies.iter().try_for_each(|copy| {
            fs::rename(copy.new_file(), &copy.to).map_err(|error| explain(&copy.to, &error))
        })
    });
    renamed.inspect_err(|_| {
        for copy in copies {
            let _ = fs::remove_file(copy.new_file());
        }
    })
}

fn write(copy: &Copy) -> io::Result<()> {
    if let Some(folder) = copy.to.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = copy.new_file();
    let _ = fs::remove_file(&new);
    let mut from = File::open(&copy.from)?;
    let mut to = OpenOptions::new().write(true).create_new(true).open(&new)?;
    io::copy(&mut from, &mut to)?;
    // The process's umask does not decide who may use it.
    to.set_permissions(Permissions::from_mode(0o755))?;
    to.sync_all()
}

fn explain(path: &Path, error: &io::Error) -> String {
    let hint = match error.kind() {
        ErrorKind::PermissionDenied => "; run it with sudo, or name a place that this user may write",
        _ => "",
    };
    format!("{}: {error}{hint}", path.display())
}
