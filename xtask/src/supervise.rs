//! Runs a task in a process group and a temporary folder of its own: when the task ends for any reason, Ctrl-C included,
//! none of its processes runs on, and nothing of it stays on the disk.

use std::ffi::c_int;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// Set in the process that does the task.
const SUPERVISED: &str = "NVSHARE_XTASK_SUPERVISED";
/// The beginning of the folders' names; the supervisor's process id follows.
const PREFIX: &str = "nvshare-demo-";

/// The signal that ended us, or zero.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn remember(signal: c_int) {
    SIGNAL.store(signal, Ordering::SeqCst);
}

/// Whether this is the process that does the task.
pub(crate) fn is_supervised() -> bool {
    std::env::var_os(SUPERVISED).is_some()
}

/// Runs the same task, with the same arguments, in a supervised process.
///
/// # Errors
/// When the process cannot be started.
pub(crate) fn supervise() -> Result<ExitCode, String> {
    sweep(&std::env::temp_dir());
    let folder = std::env::temp_dir().join(format!("{PREFIX}{}", process::id()));
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
        // SAFETY: the handler stores a number and nothing else.
        unsafe { libc::signal(signal, remember as extern "C" fn(c_int) as libc::sighandler_t) };
    }
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let child = Command::new(own)
        .args(std::env::args_os().skip(1))
        .env(SUPERVISED, "1")
        .env("TMPDIR", &folder)
        .process_group(0)
        .spawn();
    let ended = child.map_err(|error| error.to_string()).map(|mut child| {
        let group = child.id().cast_signed();
        loop {
            let signal = SIGNAL.load(Ordering::SeqCst);
            if signal != 0 {
                kill(group);
                let _ = child.wait();
                return Err(signal);
            }
            match child.try_wait() {
                // Processes that the task has started and not ended are ended with it.
                Ok(Some(status)) => {
                    kill(group);
                    return Ok(status);
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(20)),
                Err(_) => return Err(0),
            }
        }
    });
    remove(&folder);
    Ok(code(ended?))
}

fn code(ended: Result<ExitStatus, c_int>) -> ExitCode {
    match ended {
        Ok(status) => ExitCode::from(status.code().and_then(|code| code.try_into().ok()).unwrap_or(1)),
        Err(signal) => ExitCode::from(128u8.saturating_add(signal.try_into().unwrap_or(0))),
    }
}

/// Ends everything in a group.
fn kill(group: c_int) {
    // SAFETY: the group is the one that our child made, which was not waited for or has just ended.
    unsafe { libc::kill(-group, libc::SIGKILL) };
}

/// Removes a folder, to which processes that are just ending may still write.
fn remove(folder: &Path) {
    for _ in 0..50 {
        match fs::remove_dir_all(folder) {
            Ok(()) => return,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Removes folders of supervisors that were killed.
fn sweep(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().filter_map(Result::ok) {
        let name = entry.file_name();
        let Some(process) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok())
        else {
            continue;
        };
        if !PathBuf::from(format!("/proc/{process}")).exists() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_killed_supervisors_are_removed() {
        let place = std::env::temp_dir().join(format!("nvshare-sweep-{}", process::id()));
        let names =
            [format!("{PREFIX}{}", u32::MAX), format!("{PREFIX}{}", process::id()), format!("{PREFIX}x")];
        for name in &names {
            fs::create_dir_all(place.join(name)).unwrap();
        }
        sweep(&place);
        let left = names.map(|name| place.join(name).exists());
        fs::remove_dir_all(place).unwrap();
        assert_eq!(left, [false, true, true]);
    }
}
