//! Whether the kernel hides other users' processes from the scheduler, as where `/proc` is mounted with `hidepid`.

use std::fs;
use std::path::Path;

/// The effect, and the remedy.
const HIDDEN: &str = "processes of other users are hidden from the scheduler (/proc has hidepid): \
    their Slurm jobs and containers are not known, and limits of these do not hold; \
    give the service SupplementaryGroups= with the group of /proc's gid=, or mount /proc without hidepid";

/// Looks whether processes of other users can be seen. `/proc` may be mounted anew at any time.
///
/// # Errors
/// They are hidden: the effect, and the remedy.
pub(crate) fn see_others() -> Result<(), String> {
    if has_hidden(Path::new("/proc")) { Err(HIDDEN.to_owned()) } else { Ok(()) }
}

/// Whether other users' processes are hidden in a folder of processes. The first process is root's. A process always sees itself, with
/// its control groups where the kernel has any.
fn has_hidden(processes: &Path) -> bool {
    let is_seen = |process: &str| fs::read(processes.join(process).join("cgroup")).is_ok();
    is_seen("self") && !is_seen("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_are_hidden_where_the_first_one_is() {
        let folder = std::env::temp_dir().join(format!("nvshare-hidden-{}", std::process::id()));
        let make = |path: &str| {
            fs::create_dir_all(folder.join(path)).unwrap();
            has_hidden(&folder)
        };
        let write = |path: &str| {
            fs::write(folder.join(path), "0::/\n").unwrap();
            has_hidden(&folder)
        };
        assert!(!make("self"), "there are no control groups");
        assert!(write("self/cgroup"), "the first process is not there: hidepid=2");
        assert!(make("1"), "it is, and cannot be read: hidepid=1");
        assert!(!write("1/cgroup"), "it is seen");
        fs::remove_dir_all(&folder).unwrap();
    }
}
