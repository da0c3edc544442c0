//! `nvshare-ctl install`, `install-library`, `uninstall`
//!
//! Every file is written beside its place and renamed into it, so that a running program keeps the file that it has
//! open. A copy over a library would kill the programs that have loaded it, and a copy over a running program fails.

use std::env;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::library::{self, Library};
use crate::output::{Done, print};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Folder for bin/nvshare-scheduler, bin/nvshare-ctl, lib/nvshare/libnvshare.so, manual pages and completions
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

/// Manual pages and completions for shells, under `share` as in a distribution, where man and the shells look for
/// them below any prefix.
#[must_use]
pub fn papers() -> Vec<String> {
    let all = crate::command();
    let commands = all.get_subcommands().filter(|command| !command.is_hide_set());
    let pages = commands.map(|command| format!("share/man/man1/nvshare-ctl-{}.1", command.get_name()));
    let mut papers: Vec<String> = pages.collect();
    papers.extend(["share/man/man1/nvshare-ctl.1", "share/man/man8/nvshare-scheduler.8"].map(str::to_owned));
    for program in ["nvshare-ctl", "nvshare-scheduler"] {
        papers.extend([
            format!("share/bash-completion/completions/{program}"),
            format!("share/zsh/site-functions/_{program}"),
            format!("share/fish/vendor_completions.d/{program}.fish"),
        ]);
    }
    papers
}

/// A file and its destination.
struct Copy {
    from: PathBuf,
    to: PathBuf,
    mode: u32,
}

impl Copy {
    /// The name under which the file is written before it is renamed. A file that a killed install has left there is
    /// overwritten.
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
    // A folder that contains only a build has no papers.
    let distribution = own.parent().and_then(Path::parent).unwrap_or(Path::new("/")).to_owned();
    let papers = papers().into_iter().map(|paper| (paper.clone(), distribution.join(paper), 0o644));
    let papers = papers.filter(|(_, from, _)| from.is_file());
    let programs = [(LIBRARY, library), (PROGRAMS[0], scheduler), (PROGRAMS[1], own)];
    let copies: Vec<Copy> = programs
        .into_iter()
        .map(|(to, from)| (to.to_owned(), from, 0o755))
        .chain(papers)
        .map(|(to, from, mode)| Copy { from, to: options.prefix.join(to), mode })
        .collect();
    if let Some(why) = library::unnameable(&copies[0].to) {
        return Err(why.into());
    }
    let is_first = !copies[0].to.exists();
    put_in_place(&copies)?;
    let next =
        if is_first { first_steps(&options.prefix.join("bin"), is_root()?) } else { UPGRADED.to_owned() };
    print(&(list("installed", copies.iter().map(|copy| &copy.to)) + &next))
}

const UPGRADED: &str = "A running scheduler stays the old version until you restart it. Running programs keep the old library.\n";

/// Whether root runs this command.
pub(crate) fn is_root() -> Result<bool, String> {
    fs::metadata("/proc/self").map(|own| own.uid() == 0).map_err(|error| format!("/proc/self: {error}"))
}

/// The steps after a first install into `programs`. Root's scheduler serves all users.
fn first_steps(programs: &Path, is_root: bool) -> String {
    let places = env::var_os("PATH").unwrap_or_default();
    let is_found = env::split_paths(&places).any(|place| place == programs);
    let path = if is_found { String::new() } else { format!("export PATH={}:$PATH\n", programs.display()) };
    let scheduler = if is_root {
        format!("sudo -b {}/nvshare-scheduler", programs.display())
    } else {
        "nvshare-scheduler &".to_owned()
    };
    format!("Next:\n{path}{scheduler}\nnvshare-ctl doctor\nnvshare-ctl run -- PROGRAM\n")
}

pub(crate) fn install_library(options: &LibraryOptions) -> Done {
    let from = options.library.find()?;
    let copy = Copy { from, to: options.directory.join("libnvshare.so"), mode: 0o755 };
    put_in_place(std::slice::from_ref(&copy))?;
    print(&list("installed", [&copy.to].into_iter()))
}

pub(crate) fn uninstall(options: &Options) -> Done {
    let mut removed = Vec::new();
    let papers = papers();
    let files = PROGRAMS.into_iter().chain([LIBRARY]).chain(papers.iter().map(String::as_str));
    for file in files.map(|file| options.prefix.join(file)) {
        match fs::remove_file(&file) {
            Ok(()) => removed.push(file),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(explain(&file, &error).into()),
        }
    }
    // Only if the folder contains nothing else.
    let _ = fs::remove_dir(options.prefix.join("lib/nvshare"));
    if removed.is_empty() {
        return Err(format!("nothing is installed under {}", options.prefix.display()).into());
    }
    print(&list("removed", removed.iter()))
}

fn list<'a>(what: &str, files: impl Iterator<Item = &'a PathBuf>) -> String {
    files.map(|file| format!("{what} {}\n", file.display())).collect()
}

/// Writes all files, and only then renames them: if one cannot be written, nothing has changed.
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
    // The process's umask must not decide who may use the file.
    to.set_permissions(Permissions::from_mode(copy.mode))?;
    to.sync_all()
}

fn explain(path: &Path, error: &io::Error) -> String {
    let hint = match error.kind() {
        ErrorKind::PermissionDenied => "; run it with sudo, or name a place that this user may write",
        _ => "",
    };
    format!("{}: {error}{hint}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_scheduler_is_for_all_users_if_root_installs() {
        let programs = Path::new("/opt/nvshare/bin");
        let of_root = first_steps(programs, true);
        assert!(of_root.contains("\nsudo -b /opt/nvshare/bin/nvshare-scheduler\n"), "{of_root}");
        let of_a_user = first_steps(programs, false);
        assert!(of_a_user.contains("\nnvshare-scheduler &\n"), "{of_a_user}");
        assert!(of_a_user.contains("\nexport PATH=/opt/nvshare/bin:$PATH\n"), "{of_a_user}");
    }
}
