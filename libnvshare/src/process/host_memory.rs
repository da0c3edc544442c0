//! How much evicted memory the machine can take for this process. The kernel charges evicted memory to the cgroup of the
//! process, and kills the process when the cgroup exceeds its limit.
//!
//! Evicting the same bytes again needs no new host memory: the driver keeps the host's pages until the memory is freed
//! (measured). The mover counts bytes that need new pages.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that stay free for the program itself.
const MARGIN: u64 = 256 << 20;

/// Bytes that the machine and the cgroups can still take.
pub(crate) fn room() -> u64 {
    let available = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    let cgroup = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    cgroup_rooms(&cgroup).chain(available).min().map_or(u64::MAX, |room| room.saturating_sub(MARGIN))
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Bytes that each cgroup has left, from the process's own to the root.
fn cgroup_rooms(cgroups: &str) -> impl Iterator<Item = u64> {
    let v2 = cgroups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned);
    let v1 = cgroups.lines().find_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        controllers.split(',').any(|controller| controller == "memory").then(|| path.to_owned())
    });
    let up = |root: &'static str, path: String| {
        let path = PathBuf::from(root).join(path.trim_start_matches('/'));
        path.ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_owned).collect::<Vec<_>>()
    };
    let v2 = v2.into_iter().flat_map(move |path| up("/sys/fs/cgroup", path));
    let v1 = v1.into_iter().flat_map(move |path| up("/sys/fs/cgroup/memory", path));
    v2.filter_map(|dir| left(&dir, "memory.max", "memory.current"))
        .chain(v1.filter_map(|dir| left(&dir, "memory.limit_in_bytes", "memory.usage_in_bytes")))
}

fn left(dir: &Path, limit: &str, usage: &str) -> Option<u64> {
    // Without a limit the file says "max", which is no number.
    let limit: u64 = fs::read_to_string(dir.join(limit)).ok()?.trim().parse().ok()?;
    let usage: u64 = fs::read_to_string(dir.join(usage)).ok()?.trim().parse().ok()?;
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable(&stat))))
}

/// Bytes of a cgroup that the kernel drops when it needs memory, from `memory.stat`. A program that reads files fills its
/// cgroup with their pages, but those pages can go. Pages in active use count half, as in `MemAvailable`.
fn reclaimable(stat: &str) -> u64 {
    // In version 1 the bare names count the cgroup alone, and `total_` names count its children too.
    let field = |name: &str| {
        let of = |prefix: &str| {
            let value =
                |line: &str| line.strip_prefix(prefix)?.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
            stat.lines().find_map(value)
        };
        of("total_").or_else(|| of("")).unwrap_or(0u64)
    };
    let unwritten = field("file_dirty") + field("file_writeback") + field("dirty") + field("writeback");
    (field("inactive_file") + field("active_file") / 2).saturating_sub(unwritten)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_writes() {
        assert_eq!(mem_available("MemTotal:       10 kB\nMemAvailable:    2048 kB\n"), Some(2 << 20));
        assert_eq!(mem_available("MemTotal:       10 kB\n"), None);
    }

    #[test]
    fn pages_of_files_are_no_obstacle() {
        assert_eq!(reclaimable("inactive_file 100\nactive_file 50\n"), 125);
        assert_eq!(reclaimable("inactive_file 1\ntotal_inactive_file 100\ntotal_dirty 20\n"), 80);
        assert_eq!(reclaimable("file_dirty 7\n"), 0);
        assert_eq!(reclaimable(""), 0);
    }

    #[test]
    fn a_limit_is_read_and_its_absence_is_none() {
        let dir = std::env::temp_dir().join(format!("nvshare-hostmem-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("memory.current"), "100\n").unwrap();
        fs::write(dir.join("memory.max"), "max\n").unwrap();
        assert_eq!(left(&dir, "memory.max", "memory.current"), None);
        fs::write(dir.join("memory.max"), "300\n").unwrap();
        assert_eq!(left(&dir, "memory.max", "memory.current"), Some(200));
        fs::write(dir.join("memory.stat"), "anon 20\ninactive_file 30\nactive_file 40\nfile_dirty 5\n")
            .unwrap();
        assert_eq!(left(&dir, "memory.max", "memory.current"), Some(245));
        fs::write(dir.join("memory.current"), "10\n").unwrap();
        assert_eq!(left(&dir, "memory.max", "memory.current"), Some(300));
        fs::remove_dir_all(dir).unwrap();
    }
}
