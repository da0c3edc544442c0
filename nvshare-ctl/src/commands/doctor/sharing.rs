//! The parts of nvshare: the library, the scheduler, and the environment's variables.

use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nvshare_admin::{Error, Scheduler, Told, Tried};
use nvshare_proto::{EventKind, WatchFrom, env as names, paths};

use super::report::Finding;
use crate::library::{self, Library};
use crate::show;

/// Most programs that one finding names.
const MOST_NAMED: usize = 5;

/// Finds the library; returns its path.
pub(super) fn library(library: &Library, findings: &mut Vec<Finding>) -> Option<PathBuf> {
    let advice = "nvshare-ctl install puts it in its place";
    match library.find() {
        Err(error) => {
            findings.push(Finding::error("library", error, advice));
            None
        }
        Ok(path) => {
            findings.push(match library::unnameable(&path) {
                Some(why) => Finding::error("library", why, advice),
                None => Finding::ok("library", path.display().to_string()),
            });
            Some(path)
        }
    }
}

/// Asks the scheduler that answers; returns its version.
pub(super) fn scheduler(scheduler: &Scheduler, findings: &mut Vec<Finding>) -> Option<String> {
    let status = match scheduler.status() {
        Ok(status) => status,
        Err(error) => {
            let clients = names::path(names::SOCKET).unwrap_or_else(|| paths::SYSTEM_SOCKET.into());
            let advice = advice(&error, &clients);
            findings.push(Finding::error("scheduler", error.to_string(), advice));
            return None;
        }
    };
    let about = &status.scheduler;
    let rights = if about.restricted { "; this user may look, and not change anything" } else { "" };
    let seen = format!("version {}, pid {}{rights}", about.version, about.pid);
    findings.push(if about.version == env!("CARGO_PKG_VERSION") {
        Finding::ok("scheduler", seen)
    } else {
        let text = format!("{seen}; this is version {}", env!("CARGO_PKG_VERSION"));
        Finding::warning("scheduler", text, "restart the scheduler after an upgrade")
    });
    if !about.scheduling {
        findings.push(Finding::warning(
            "scheduler",
            "scheduling is off: all programs run at the same time",
            "nvshare-ctl on",
        ));
    }
    findings.extend(
        show::mixed(&status).into_iter().map(|seen| {
            Finding::warning("memory", seen, "set NVSHARE_MEMORY=swap for all programs of the GPU")
        }),
    );
    findings.extend(rights_of(Path::new(paths::SYSTEM_SOCKET)));
    Some(status.scheduler.version)
}

/// How to reach a scheduler that could not be asked. The clients' socket is to be open to every user, and the administrators' one is not.
fn advice(error: &Error, clients: &Path) -> String {
    let is_denied = |tried: &Tried| tried.error.kind() == ErrorKind::PermissionDenied;
    match error {
        Error::Silent { .. } => "if it is stopped, sudo pkill -CONT -x nvshare-schedul lets it go on; \
                                 otherwise sudo systemctl restart nvshare-scheduler"
            .to_owned(),
        Error::NotFound(tried) if tried.iter().any(|tried| is_denied(tried) && tried.path == clients) => {
            let folder = clients.parent().unwrap_or(clients);
            format!(
                "open it, without that programs run as if alone: sudo chmod a+rx {}; sudo chmod a+rw {}",
                folder.display(),
                clients.display()
            )
        }
        Error::NotFound(tried) if tried.iter().all(is_denied) => {
            "ask as the user who started the scheduler (for root's, with sudo)".to_owned()
        }
        _ => "start one: sudo nvshare-scheduler, or systemctl start nvshare-scheduler; without, programs run as if alone".to_owned(),
    }
}

/// Programs that were refused to share memory, of those that the scheduler's events still name. This user may not be allowed to read them.
pub(super) fn refused(scheduler: &Scheduler) -> Option<Finding> {
    let mut watch = scheduler.watch(WatchFrom::Kept, false).ok()?;
    let mut programs: Vec<String> = Vec::new();
    while let Ok(Some(told)) = watch.wait() {
        if let Told::Event(event, _) = told
            && event.event == EventKind::CannotShare
        {
            let pid = event.pid.map_or_else(String::new, |pid| format!(" (pid {pid})"));
            let program = format!("{}{pid}", event.name.unwrap_or_default());
            programs.retain(|known| *known != program);
            programs.push(program);
        }
    }
    let last = programs.split_off(programs.len().saturating_sub(MOST_NAMED));
    (!last.is_empty()).then(|| {
        Finding::warning(
            "sharing",
            format!("managed memory cannot be shared with other processes: {}", last.join(", ")),
            "start them with NVSHARE_MEMORY=swap",
        )
    })
}

/// Whether programs of every user may connect to root's scheduler.
fn rights_of(socket: &Path) -> Option<Finding> {
    let mode = |path: &Path| fs::metadata(path).ok().map(|metadata| metadata.permissions().mode() & 0o7777);
    let (socket_mode, folder) = (mode(socket)?, socket.parent()?);
    let folder_mode = mode(folder)?;
    (socket_mode & 0o002 == 0 || folder_mode & 0o001 == 0).then(|| {
        Finding::warning(
            "sockets",
            format!(
                "{} (mode {socket_mode:o}, its folder {folder_mode:o}) is not open to every user",
                socket.display()
            ),
            format!(
                "programs of other users run as if alone: chmod a+rx {}; chmod a+rw {}",
                folder.display(),
                socket.display()
            ),
        )
    })
}

/// Variables without effect, and other preloaded libraries between the program and the driver.
pub(super) fn environment(findings: &mut Vec<Finding>) {
    let variables = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for complaint in variables.filter_map(|name| names::complaint(&name)) {
        findings.push(Finding::warning("environment", complaint, "correct it or remove it"));
    }
    let preloads = [
        ("LD_PRELOAD", env::var("LD_PRELOAD").unwrap_or_default()),
        ("/etc/ld.so.preload", fs::read_to_string("/etc/ld.so.preload").unwrap_or_default()),
    ];
    for (place, preload) in preloads {
        if preload.contains("libvgpu.so") {
            findings.push(Finding::error(
                "environment",
                format!("{place} has HAMi's library preloaded: both would stand before the driver"),
                "remove libvgpu.so from it",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    #[test]
    fn the_advice_is_for_the_reason_why_no_scheduler_answers() {
        let tried = |path: &str, kind: ErrorKind| Tried { path: path.into(), error: kind.into() };
        let (denied, none) = (ErrorKind::PermissionDenied, ErrorKind::NotFound);
        for (error, advised) in [
            (Error::NotFound(vec![tried("/n/admin", none), tried("/n/clients", none)]), "start one: "),
            (Error::NotFound(vec![tried("/n/admin", denied), tried("/n/clients", none)]), "start one: "),
            (
                Error::NotFound(vec![tried("/n/admin", denied), tried("/n/clients", denied)]),
                "sudo chmod a+rx /n; sudo chmod a+rw /n/clients",
            ),
            (Error::NotFound(vec![tried("/n/admin", denied)]), "ask as the user who started"),
            (Error::Silent { socket: "/n/clients".into(), seconds: 5 }, "pkill -CONT -x nvshare-schedul"),
        ] {
            let said = advice(&error, Path::new("/n/clients"));
            assert!(said.contains(advised), "{error}: {said}");
        }
    }

    #[test]
    fn sockets_that_are_not_open_to_everybody() {
        let folder = env::temp_dir().join(format!("nvshare-rights-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("s");
        let _listener = UnixListener::bind(&socket).unwrap();
        for (folder_mode, socket_mode, complains) in
            [(0o755, 0o666, false), (0o700, 0o666, true), (0o755, 0o600, true)]
        {
            fs::set_permissions(&folder, fs::Permissions::from_mode(folder_mode)).unwrap();
            fs::set_permissions(&socket, fs::Permissions::from_mode(socket_mode)).unwrap();
            assert_eq!(rights_of(&socket).is_some(), complains, "{folder_mode:o} {socket_mode:o}");
        }
        assert!(rights_of(&folder.join("none")).is_none());
        fs::remove_dir_all(folder).unwrap();
    }
}
