//! The driver: its library and its kernel module.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::report::Finding;
use crate::elf;

/// The findings about the driver's library.
#[derive(Debug, Default)]
pub(super) struct Driver {
    pub(super) path: Option<PathBuf>,
    pub(super) exports: usize,
    pub(super) unknown: Vec<String>,
}

/// The page that is generated from the library's table.
const PAGE: &str = include_str!("../../../../docs/entry-points.md");
/// The version that the kernel module writes.
const MODULE: &str = "/proc/driver/nvidia/version";

/// Every entry point that the library knows: the first column of the page.
fn known() -> BTreeSet<&'static str> {
    let first = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    first.filter(|name| is_entry_point(name)).collect()
}

/// Whether a name is an entry point: `cuInit` is, `cudbgMain` is not, since debuggers use that.
fn is_entry_point(name: &str) -> bool {
    name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
}

/// Looks at a driver that was named, or that the loader has found.
pub(super) fn look(named: Option<&Path>, findings: &mut Vec<Finding>) -> Driver {
    module(findings);
    let Some(path) = named.map(Path::to_owned).or_else(find) else {
        findings.push(Finding::error(
            "driver",
            "libcuda.so.1 is not found",
            "install NVIDIA's driver; in a container, start it with the GPU (--gpus all, or NVIDIA_VISIBLE_DEVICES)",
        ));
        return Driver::default();
    };
    let exports: BTreeSet<String> = match elf::exports(&path) {
        Ok(exports) => exports.into_iter().filter(|name| is_entry_point(name)).collect(),
        Err(error) => {
            findings.push(Finding::error("driver", error, "name the driver's libcuda.so.1 by --driver"));
            return Driver { path: Some(path), ..Driver::default() };
        }
    };
    let known = known();
    let unknown: Vec<String> =
        exports.iter().filter(|name| !known.contains(name.as_str())).cloned().collect();
    let seen = format!("{} ({} entry points)", path.display(), exports.len());
    findings.push(if exports.is_empty() {
        Finding::error(
            "driver",
            format!("{} has no entry points of a driver", path.display()),
            "name the driver's libcuda.so.1 by --driver",
        )
    } else if unknown.is_empty() {
        Finding::ok("driver", seen)
    } else {
        Finding::error(
            "driver",
            format!(
                "{seen}, {} of them unknown: NVSHARE_MEMORY=swap refuses those, and otherwise work submitted through them is not held back",
                unknown.len()
            ),
            "programs that do not use the new functions are safe; upgrade nvshare for the others",
        )
    });
    Driver { path: Some(path), exports: exports.len(), unknown }
}

/// The kernel module, and the devices that programs open.
fn module(findings: &mut Vec<Finding>) {
    let Ok(version) = fs::read_to_string(MODULE) else {
        findings.push(Finding::warning(
            "kernel",
            format!(
                "there is no {MODULE}: the driver's kernel module is not loaded, or not to be seen from here"
            ),
            "sudo modprobe nvidia; after an upgrade of the kernel or the driver, restart the machine",
        ));
        return;
    };
    let version =
        version.lines().next().unwrap_or_default().trim_start_matches("NVRM version:").trim().to_owned();
    findings.push(Finding::ok("kernel", version));
    for (device, advice) in [
        ("/dev/nvidiactl", "sudo nvidia-modprobe"),
        ("/dev/nvidia-uvm", "managed memory needs it: sudo nvidia-modprobe --unified-memory"),
    ] {
        match OpenOptions::new().read(true).write(true).open(device) {
            Ok(_) => findings.push(Finding::ok("kernel", format!("{device} opens"))),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => findings.push(Finding::error(
                "kernel",
                format!("{device}: this user may not open it"),
                "add the user to the group that owns it (ls -l shows it)",
            )),
            Err(error) => findings.push(Finding::error("kernel", format!("{device}: {error}"), advice)),
        }
    }
}

/// Looks for a driver that the loader does not load, or that does not answer: what is wrong with it can be said then.
fn find() -> Option<PathBuf> {
    const LIBRARY_NAMES: [&str; 6] = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/nvidia/lib64",
        "/usr/lib/wsl/lib",
    ];
    let asked = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    env::split_paths(&asked)
        .chain(LIBRARY_NAMES.map(PathBuf::from))
        .map(|directory| directory.join("libcuda.so.1"))
        .find(|path| path.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_entry_points() {
        let known = known();
        assert!(known.len() > 600, "{}", known.len());
        assert!(known.contains("cuLaunchKernel") && known.contains("cuTexRefSetArray"));
    }

    #[test]
    fn functions_for_debuggers_are_no_entry_points() {
        for (name, expected) in [("cuInit", true), ("cudbgMain", false), ("cudaMalloc", false), ("cu", false)]
        {
            assert_eq!(is_entry_point(name), expected, "{name}");
        }
    }
}
