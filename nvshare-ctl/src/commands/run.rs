//! `nvshare-ctl run -- CMD`

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command};

use clap::Args;
use nvshare_proto::env::{MEM_LIMIT, RUN, SOCKET};
use nvshare_proto::units;

use crate::elf::{self, Start};
use crate::library::{self, Library};
use crate::output::{Done, Failure, complain};

/// The command itself failed, as with `env` and `timeout`.
const FAILED: u8 = 125;
/// The program is there and cannot be run.
const CANNOT_RUN: u8 = 126;
/// There is no such program.
const NOT_FOUND: u8 = 127;

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    library: Library,

    /// Memory limit on each GPU for all processes of the program together: 4g, 512MiB
    #[arg(long, value_name = "SIZE", value_parser = units::parse_limit)]
    limit: Option<u64>,

    /// The program and its arguments; options of `run` come before it
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Becomes the program: its signals, its exit code and its terminal are its own.
pub(crate) fn run(options: &Options, socket: Option<&Path>) -> Done {
    let failed = |text| Failure::with_code(FAILED, text);
    let library = options.library.find().map_err(failed)?;
    if let Some(why) = library::unnameable(&library) {
        return Err(failed(why));
    }
    let mut preload = OsString::from(&library);
    if let Some(others) = env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let (program, arguments) =
        options.command.split_first().ok_or_else(|| failed("no program is named".to_owned()))?;
    if let Some(file) = find(program)
        && let Some(why) = cannot_preload(&file)
    {
        complain(&why);
    }
    let mut command = Command::new(program);
    command.args(arguments).env("LD_PRELOAD", preload).env(RUN, unique());
    if let Some(limit) = options.limit {
        command.env(MEM_LIMIT, limit.to_string());
    }
    if let Some(socket) = socket {
        let socket =
            path::absolute(socket).map_err(|error| failed(format!("{}: {error}", socket.display())))?;
        command.env(SOCKET, socket);
    }
    let error = command.exec();
    let code = if error.kind() == ErrorKind::NotFound { NOT_FOUND } else { CANNOT_RUN };
    let named = Path::new(program).display().to_string();
    let named = if named.is_empty() { "\"\"" } else { &named };
    Err(Failure::with_code(code, format!("{named}: {error}")))
}

/// What no other run of this user has: what it starts shares one limit.
fn unique() -> String {
    RandomState::new().hash_one(process::id()).to_string()
}

/// The file that a program's name stands for.
fn find(program: &OsStr) -> Option<PathBuf> {
    if Path::new(program).components().count() > 1 || Path::new(program).is_absolute() {
        return Some(program.into());
    }
    let places = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let runs = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    env::split_paths(&places).map(|place| place.join(program)).find(runs)
}

/// Why the loader will not preload the library into a program, if so.
fn cannot_preload(file: &Path) -> Option<String> {
    let name = file.display();
    let metadata = fs::metadata(file).ok()?;
    // A script's own bits mean nothing.
    let start = elf::start(file);
    if let Start::Script(interpreter) = start {
        // The kernel follows a few of these; one is what there is in practice.
        return if matches!(elf::start(&interpreter), Start::Script(_)) {
            None
        } else {
            cannot_preload(&interpreter)
        };
    }
    let own = fs::metadata("/proc/self").ok()?;
    let becomes_another = (metadata.mode() & 0o4000 != 0 && metadata.uid() != own.uid())
        || (metadata.mode() & 0o2000 != 0 && metadata.gid() != own.gid());
    if becomes_another {
        return Some(format!(
            "{name} runs as another user or group (setuid, setgid): nothing can be preloaded, it runs unshared"
        ));
    }
    match start {
        Start::Static => Some(format!(
            "{name} is statically linked: nothing can be preloaded, it runs unshared; programs that it starts share"
        )),
        Start::Foreign => {
            Some(format!("{name} is a 32-bit program, or for another machine: it cannot load the library"))
        }
        Start::Dynamic | Start::Script(_) | Start::Unknown => None,
    }
}
