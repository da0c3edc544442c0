//! `nvshare-ctl run -- CMD`

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{self, Path, PathBuf};
use std::process::{self, Command};

use clap::Args;
use nvshare_admin::{Error, Scheduler};
use nvshare_proto::env as variables;
use nvshare_proto::env::{
    ADMIN_SOCKET, COMPUTE_LIMIT, GANG, HAMI_POLICY, MEM_LIMIT, PRIORITY, RUN, SOCKET, WEIGHT,
    is_compute_limit, is_memory_limit,
};
use nvshare_proto::{AdminRequest, DEFAULT_WEIGHT, Enforcement, GangName, Priority, TenantSettings, units};

use crate::elf::{self, Start};
use crate::library::{self, Library};
use crate::output::{Done, Failure, complain};

/// Exit code if the command itself failed, as with `env` and `timeout`.
const FAILED: u8 = 125;
/// Exit code if the program exists and cannot be run.
const CANNOT_RUN: u8 = 126;
/// Exit code if the program does not exist.
const NOT_FOUND: u8 = 127;

/// Why a user who is no administrator gets no more than the usual share. The program itself must not run as root.
const OF_A_USER: &str = "only an administrator may give more than the usual share";
/// Why a run of a gang gets no more than the usual share by itself.
const OF_A_GANG: &str = "the programs of a gang share the time as one, and a run gives more to its own alone";

/// The kernel's error for a file that is no program; the standard library has no name for it.
const ENOEXEC: i32 = 8;

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    library: Library,

    /// Memory limit on each GPU for all processes of the program together: 4g, 512MiB. Replaces all memory limits of the environment
    #[arg(long, value_name = "SIZE", value_parser = units::parse_limit, allow_hyphen_values = true)]
    limit: Option<u64>,

    /// Weight against others: 1 to 10000, where 100 is usual; only an administrator may give more than 100
    #[arg(long, value_name = "N", value_parser = units::parse_weight, allow_negative_numbers = true)]
    weight: Option<u32>,

    /// Compute limit, in per cent of each GPU's time, of all the program's processes together. Replaces those of the environment
    #[arg(long, value_name = "PERCENT", value_parser = units::parse_percent, allow_hyphen_values = true)]
    compute_limit: Option<u8>,

    /// How the compute limit is enforced: default (while others want the GPU), force (always) or disable
    #[arg(long, value_name = "POLICY", value_parser = units::parse_enforcement, allow_negative_numbers = true)]
    compute_policy: Option<Enforcement>,

    /// low, normal or high; only an administrator may give high
    #[arg(long, value_parser = units::parse_priority, allow_negative_numbers = true)]
    priority: Option<Priority>,

    /// Programs that name the same gang hold their GPUs together or not at all; NAME:N says how many processes there are
    #[arg(long, value_name = "NAME", value_parser = units::parse_gang, allow_negative_numbers = true)]
    gang: Option<GangName>,

    /// The program and its arguments; options of `run` come before it
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Becomes the program, which keeps its own signals, exit code and terminal.
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
    let run = unique();
    command.args(arguments).env("LD_PRELOAD", preload).env(RUN, run.to_string());
    options.share(&mut command);
    if let Some(given) = options.needs() {
        // A gang's job is no single run's: nobody would get what is given to this run.
        if options.gang.is_some() || env::var_os(GANG).is_some_and(|gang| !gang.is_empty()) {
            return Err(failed(options.later(OF_A_GANG)));
        }
        // Another scheduler would be told of a program that joins this one.
        if socket.is_some() && variables::path(ADMIN_SOCKET).is_none() {
            return Err(failed(format!(
                "--socket names no administrators' socket: {ADMIN_SOCKET} has to name it"
            )));
        }
        let user = fs::metadata("/proc/self").map_err(|error| failed(format!("/proc/self: {error}")))?.uid();
        let request = AdminRequest::SetRunTerms { user, run, given };
        Scheduler::usual().change(request).map_err(|error| match error {
            Error::NotAnAdministrator { tried, .. } if tried.error.kind() == ErrorKind::PermissionDenied => {
                failed(options.later(OF_A_USER))
            }
            other => Failure::from(other).coded(FAILED),
        })?;
    }
    if let Some(limit) = options.limit {
        forget(&mut command, is_memory_limit);
        command.env(MEM_LIMIT, limit.to_string());
    }
    if let Some(socket) = socket {
        let socket =
            path::absolute(socket).map_err(|error| failed(format!("{}: {error}", socket.display())))?;
        command.env(SOCKET, socket);
    }
    let error = command.exec();
    let (code, why) = if is_no_program(program, &error) {
        (CANNOT_RUN, "is not executable".to_owned())
    } else if let Some(interpreter) = find(program).and_then(|file| lost_interpreter(&file)) {
        (CANNOT_RUN, format!("its interpreter {} is not there", interpreter.display()))
    } else if error.kind() == ErrorKind::NotFound {
        (NOT_FOUND, error.to_string())
    } else {
        (CANNOT_RUN, error.to_string())
    };
    let named = Path::new(program).display().to_string();
    let named = if named.is_empty() { "\"\"" } else { &named };
    Err(Failure::with_code(code, format!("{named}: {why}")))
}

/// The interpreter of a script that is there, if the interpreter is not.
fn lost_interpreter(file: &Path) -> Option<PathBuf> {
    match elf::start(file) {
        Start::Script(interpreter) if !interpreter.exists() => Some(interpreter),
        _ => None,
    }
}

/// Whether the kernel refused a file because it is no program, or nobody may execute it.
fn is_no_program(program: &OsStr, error: &io::Error) -> bool {
    let nobody_may =
        || fs::metadata(program).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 == 0);
    error.raw_os_error() == Some(ENOEXEC) || error.kind() == ErrorKind::PermissionDenied && nobody_may()
}

impl Options {
    /// Sets the variables for the share that the program may ask for itself.
    fn share(&self, command: &mut Command) {
        if let Some(weight) = self.weight {
            command.env(WEIGHT, weight.to_string());
        }
        if let Some(percent) = self.compute_limit {
            forget(command, is_compute_limit);
            command.env(COMPUTE_LIMIT, percent.to_string());
        }
        if let Some(enforcement) = self.compute_policy {
            command.env(HAMI_POLICY, enforcement.name());
        }
        if let Some(priority) = self.priority {
            command.env(PRIORITY, priority.name());
        }
        if let Some(GangName { name, size }) = &self.gang {
            let gang = if *size > 0 { format!("{name}:{size}") } else { name.clone() };
            command.env(GANG, gang);
        }
    }

    fn high_weight(&self) -> Option<u32> {
        self.weight.filter(|&weight| weight > DEFAULT_WEIGHT)
    }

    fn high_priority(&self) -> Option<Priority> {
        self.priority.filter(|&priority| priority > Priority::Normal)
    }

    /// Why the program cannot get these settings at its start, and how an administrator gives them later.
    fn later(&self, why: &str) -> String {
        let weight = self.high_weight().map(|weight| ("--weight", format!("set-weight CLIENT {weight}")));
        let priority = self.high_priority().map(|_| ("--priority", "set-priority CLIENT high".to_owned()));
        let both = || [&weight, &priority].into_iter().flatten();
        let options: Vec<&str> = both().map(|(option, _)| *option).collect();
        let commands: Vec<String> =
            both().map(|(_, command)| format!("`sudo nvshare-ctl {command}`")).collect();
        format!("{why}: start without {}, then {}", options.join(" and "), commands.join(" and "))
    }

    /// The settings that an administrator has to give.
    fn needs(&self) -> Option<TenantSettings> {
        let (weight, priority) = (self.high_weight(), self.high_priority());
        (weight.is_some() || priority.is_some()).then_some(TenantSettings {
            weight,
            priority,
            ..TenantSettings::default()
        })
    }
}

/// Takes inherited variables from the program. A limit has several names, of which the library follows the most particular one: it would
/// stand above the limit of an option.
fn forget(command: &mut Command, is_one: fn(&str) -> bool) {
    let inherited = env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| name.to_str().is_some_and(is_one)) {
        command.env_remove(name);
    }
}

/// A number that no other run of this user has: the processes of the run share one limit.
fn unique() -> u64 {
    RandomState::new().hash_one(process::id())
}

/// The file of a program's name.
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

/// The reason why the loader will not preload the library into a program, if there is one.
fn cannot_preload(file: &Path) -> Option<String> {
    let name = file.display();
    let metadata = fs::metadata(file).ok()?;
    // The file's own setuid and setgid bits have no effect if it is a script.
    let start = elf::start(file);
    if let Start::Script(interpreter) = start {
        // The kernel follows a few interpreters in a row; in practice there is one.
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
    // The loader ignores preloads where a program gets rights that its user has not (`AT_SECURE`).
    if own.uid() != 0 && rustix::fs::getxattr(file, "security.capability", &mut [0; 64]).is_ok() {
        return Some(format!(
            "{name} has capabilities of its own (setcap): nothing can be preloaded, it runs unshared"
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Parser, error::ErrorKind};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn parse(line: &str) -> Result<Options, clap::Error> {
        Line::try_parse_from(line.split(' ')).map(|line| line.options)
    }

    #[test]
    fn an_unknown_option_is_no_program() {
        let wrong = parse("run --limt 8g -- true").unwrap_err();
        assert_eq!((wrong.kind(), wrong.exit_code()), (ErrorKind::UnknownArgument, 2));
        let wrong = parse("run --weight -1 -- true").unwrap_err().to_string();
        assert!(wrong.contains("\"-1\" is not a weight"), "{wrong}");
        for (line, command) in [
            ("run --limit 8g true --limt -x", &["true", "--limt", "-x"][..]),
            ("run true -- --limit 8g", &["true", "--", "--limit", "8g"]),
            ("run -- -true --x", &["-true", "--x"]),
        ] {
            assert_eq!(parse(line).unwrap().command, command, "{line}");
        }
    }

    #[test]
    fn a_user_is_told_who_gives_a_larger_share() {
        for (line, said) in [
            ("run --weight 200 x", "start without --weight, then `sudo nvshare-ctl set-weight CLIENT 200`"),
            (
                "run --weight 20 --priority high x",
                "start without --priority, then `sudo nvshare-ctl set-priority CLIENT high`",
            ),
            (
                "run --weight 200 --priority high x",
                "start without --weight and --priority, then `sudo nvshare-ctl set-weight CLIENT 200` and \
                 `sudo nvshare-ctl set-priority CLIENT high`",
            ),
        ] {
            assert_eq!(parse(line).unwrap().later("why"), format!("why: {said}"));
        }
    }
}
