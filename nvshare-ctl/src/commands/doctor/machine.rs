//! The machine around the GPUs: memory for evicted memory, the C library, and other software that shares GPUs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nvshare_proto::units::Bytes;

use super::probe::Gpu;
use super::report::Finding;

pub(super) fn look(gpus: &[Gpu], findings: &mut Vec<Finding>) {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    findings.extend(memory(total(&meminfo), limit(&groups), gpus));
    let libc = Command::new("getconf").arg("GNU_LIBC_VERSION").stdin(Stdio::null()).output();
    if let Some(version) = libc.ok().filter(|output| output.status.success()) {
        findings.push(Finding::ok("glibc", String::from_utf8_lossy(&version.stdout).trim()));
    }
    if mps_runs() {
        findings.push(Finding::warning(
            "mps",
            "NVIDIA's MPS is running: its clients' kernels run at the same time, whoever holds the lock",
            "stop it for programs that share by nvshare: echo quit | nvidia-cuda-mps-control",
        ));
    }
}

/// Evicted memory goes to the host's memory, and is charged to the program's control group.
fn memory(host: Option<u64>, group: Option<u64>, gpus: &[Gpu]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let all = gpus.iter().map(|gpu| gpu.bytes).fold(0, u64::saturating_add);
    let largest = gpus.iter().map(|gpu| gpu.bytes).max().unwrap_or(0);
    if let Some(host) = host.filter(|_| all > 0) {
        let seen = format!("the host has {}, its GPUs {}", Bytes(host), Bytes(all));
        findings.push(if host >= all {
            Finding::ok("memory", seen)
        } else {
            let advice = "programs that take turns are moved as far as the host has memory; those that do not fit wait longer";
            Finding::warning("memory", seen, advice)
        });
    }
    if let Some(group) = group.filter(|&group| group < largest) {
        findings.push(Finding::warning(
            "memory",
            format!("this control group may have {}, a GPU has {}", Bytes(group), Bytes(largest)),
            "a program started here is not moved beyond that; raise the group's memory limit (memory.max, the pod's limit)",
        ));
    }
    findings
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// The smallest limit from this process's control group to the root.
fn limit(groups: &str) -> Option<u64> {
    let of = |root: &'static str, path: &str, file: &str| {
        let path = PathBuf::from(root).join(path.trim_start_matches('/'));
        let limits = path
            .ancestors()
            .take_while(|folder| folder.starts_with(root))
            .filter_map(|folder| read(&folder.join(file)));
        limits.min()
    };
    groups
        .lines()
        .filter_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            match controllers {
                "" => of("/sys/fs/cgroup", path, "memory.max"),
                _ if controllers.split(',').any(|controller| controller == "memory") => {
                    of("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
                }
                _ => None,
            }
        })
        .min()
}

/// A number; none for "max".
fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn mps_runs() -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    // The kernel keeps fifteen characters of a name.
    processes
        .filter_map(|process| fs::read_to_string(process.path().join("comm")).ok())
        .any(|name| name.starts_with("nvidia-cuda-mps"))
}

#[cfg(test)]
mod tests {
    use super::super::report::Level;
    use super::*;
    use nvshare_proto::units::GIB;

    #[test]
    fn memory_of_host_and_group_against_the_gpus() {
        let gpus: Vec<Gpu> = serde_json::from_str(&format!(
            r#"[{{"name":"A","bytes":{},"concurrent_managed_access":true}}]"#,
            16 * GIB
        ))
        .unwrap();
        for (host, group, expected) in [
            (Some(64 * GIB), None, &[Level::Ok][..]),
            (Some(8 * GIB), None, &[Level::Warning]),
            (Some(64 * GIB), Some(8 * GIB), &[Level::Ok, Level::Warning]),
            (Some(64 * GIB), Some(32 * GIB), &[Level::Ok]),
            (None, None, &[]),
        ] {
            let levels: Vec<Level> = memory(host, group, &gpus).iter().map(|finding| finding.level).collect();
            assert_eq!(levels, expected, "{host:?} {group:?}");
        }
    }

    #[test]
    fn without_gpus_there_is_nothing_to_compare() {
        assert!(memory(Some(GIB), Some(GIB), &[]).is_empty());
    }

    #[test]
    fn figures_of_the_kernel() {
        assert_eq!(total("MemFree: 1 kB\nMemTotal:       65536 kB\n"), Some(64 << 20));
        assert_eq!(total(""), None);
        assert_eq!(limit("no such line"), None);
    }
}
