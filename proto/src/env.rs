//! Names of the environment variables that nvshare reads. Each is documented in docs/reference.md.

use std::env;
use std::path::PathBuf;

/// Path of the scheduler's clients' socket.
pub const SOCKET: &str = "NVSHARE_SOCKET";
/// Path of the scheduler's administrators' socket.
pub const ADMIN_SOCKET: &str = "NVSHARE_ADMIN_SOCKET";
/// Memory limit of a process on each GPU; with `_0`, `_1`, … appended, on that device of the process.
pub const MEM_LIMIT: &str = "NVSHARE_MEM_LIMIT";
/// The same limit in MiB.
pub const MEM_LIMIT_MB: &str = "NVSHARE_MEM_LIMIT_MB";
/// How device memory is handed out: `managed`, `swap` or `off`.
pub const MEMORY: &str = "NVSHARE_MEMORY";
/// Which pieces of memory are not copied in mode `swap`: `hashes`, `zeros`, `off`, or `check` for tests.
pub const CONTENT: &str = "NVSHARE_CONTENT";
/// Weight of the process's share of its GPUs' time: 1 to 10000.
pub const WEIGHT: &str = "NVSHARE_WEIGHT";
/// Per cent of a GPU's time that the process may have; with `_0`, `_1`, … appended, on that device of the process.
pub const COMPUTE_LIMIT: &str = "NVSHARE_COMPUTE_LIMIT";
/// `low`, `normal` or `high`.
pub const PRIORITY: &str = "NVSHARE_PRIORITY";
/// Processes with the same name here hold their GPUs together or not at all; `name:4` says how many there are.
pub const GANG: &str = "NVSHARE_GANG";
/// How much the library logs to standard error: `off`, `error`, `warn`, `info` or `debug`.
pub const LOG: &str = "NVSHARE_LOG";
/// Device memory that stays the driver's own, so that it can be shared with other processes: `all`, or sizes and
/// ranges of sizes (`2MiB,64MiB-1GiB`).
pub const PLAIN: &str = "NVSHARE_PLAIN";
/// `0`: managed memory that stands for device memory says that it is managed.
pub const DISGUISE: &str = "NVSHARE_DISGUISE";
/// The number of the `nvshare-ctl run` that started the process. That command sets it, so that all processes of one
/// run share one limit.
pub const RUN: &str = "NVSHARE_RUN";
/// `1`: the same as `NVSHARE_LOG=debug`.
pub const DEBUG: &str = "NVSHARE_DEBUG";
/// `1`: one program may allocate more than the GPU has.
pub const ENABLE_SINGLE_OVERSUB: &str = "NVSHARE_ENABLE_SINGLE_OVERSUB";
/// `0`: evicted memory comes back by page faults instead of in bulk. For measurements.
pub const RESTORE: &str = "NVSHARE_RESTORE";
/// `1`: the process may go off the card while its program is idle.
pub const SLEEP: &str = "NVSHARE_SLEEP";
/// The library to preload, for `nvshare-ctl run`.
pub const LIBRARY: &str = "NVSHARE_LIBRARY";
/// The scheduler's configuration file.
pub const CONFIG: &str = "NVSHARE_CONFIG";

/// HAMi's name of `NVSHARE_MEM_LIMIT`, also with a device's index behind it.
pub const HAMI_MEM_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";
/// HAMi's name of `NVSHARE_COMPUTE_LIMIT`, also with a device's index behind it.
pub const HAMI_SM_LIMIT: &str = "CUDA_DEVICE_SM_LIMIT";
/// How compute limits are enforced: `default`, `force` or `disable`.
pub const HAMI_POLICY: &str = "GPU_CORE_UTILIZATION_POLICY";
/// HAMi's `NVSHARE_LOG`, as a number: 0 errors, 1 and 2 warnings, 3 info, 4 debug.
pub const HAMI_LOG_LEVEL: &str = "LIBCUDA_LOG_LEVEL";

/// The path that a variable holds. An empty variable counts as one that is not set, as in a container's settings.
#[must_use]
pub fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Whether the library reads a variable of this name.
#[must_use]
pub fn is_of_library(name: &str) -> bool {
    name.starts_with("NVSHARE_")
        || name.starts_with(HAMI_MEM_LIMIT)
        || name.starts_with(HAMI_SM_LIMIT)
        || [HAMI_POLICY, HAMI_LOG_LEVEL].contains(&name)
}

/// Whether a variable of this name is a memory limit: on all devices or on one, by nvshare's name or HAMi's.
#[must_use]
pub fn is_memory_limit(name: &str) -> bool {
    name == MEM_LIMIT_MB || is_indexed(name, MEM_LIMIT) || is_indexed(name, HAMI_MEM_LIMIT)
}

/// Whether a variable of this name is a compute limit: on all devices or on one, by nvshare's name or HAMi's.
#[must_use]
pub fn is_compute_limit(name: &str) -> bool {
    is_indexed(name, COMPUTE_LIMIT) || is_indexed(name, HAMI_SM_LIMIT)
}

/// All variables of nvshare, for the library, the scheduler and the command line.
pub const KNOWN: [&str; 21] = [
    SOCKET,
    ADMIN_SOCKET,
    MEM_LIMIT,
    MEM_LIMIT_MB,
    MEMORY,
    CONTENT,
    WEIGHT,
    COMPUTE_LIMIT,
    PRIORITY,
    GANG,
    LOG,
    PLAIN,
    DISGUISE,
    RUN,
    DEBUG,
    ENABLE_SINGLE_OVERSUB,
    RESTORE,
    SLEEP,
    LIBRARY,
    CONFIG,
    BENCH_INSIDE,
];
/// The benchmarks' own.
const BENCH_INSIDE: &str = "NVSHARE_BENCH_INSIDE";

/// HAMi's variables for features that nvshare does not have; each also with a device's index behind it.
const UNSUPPORTED: [&str; 2] = ["CUDA_TASK_PRIORITY", "CUDA_OVERSUBSCRIBE"];

/// The complaint about a variable of this name, if there is one: the name looks like nvshare's and is not read, or
/// HAMi reads it and nvshare does not.
#[must_use]
pub fn complaint(name: &str) -> Option<String> {
    if UNSUPPORTED.iter().any(|unsupported| is_indexed(name, unsupported)) {
        return Some(format!(
            "{name} is HAMi's and has no effect: NVSHARE_PRIORITY, and memory that moves, are what there is instead"
        ));
    }
    let rest = name.strip_prefix("NVSHARE_")?;
    // Kubernetes sets these in every pod beside a service that is called nvshare, or nvshare-something.
    let of_a_service = rest.contains("SERVICE_") || format!("_{rest}_").contains("_PORT_");
    if KNOWN.contains(&name) || is_memory_limit(name) || is_compute_limit(name) || of_a_service {
        return None;
    }
    let nearest = KNOWN.iter().map(|known| (distance(name, known), known)).min()?;
    Some(match nearest {
        (letters, known) if letters <= MAX_MISTYPED.min(rest.len() / 2) => {
            format!("{name} is not a variable of nvshare and has no effect; did you mean {known}?")
        }
        _ => format!("{name} is not a variable of nvshare and has no effect"),
    })
}

/// Letters that a mistyped name may differ by, unless it is shorter than twice that.
const MAX_MISTYPED: usize = 7;

/// Whether a name is another, or that with `_` and a device's index behind it.
fn is_indexed(name: &str, of: &str) -> bool {
    name.strip_prefix(of).is_some_and(|rest| {
        rest.is_empty() || rest.strip_prefix('_').is_some_and(|index| index.parse::<u32>().is_ok())
    })
}

/// Letters to insert, to leave out or to replace, to make one name of another.
fn distance(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = i;
        let mut left = i + 1;
        for (cell, b) in row.iter_mut().skip(1).zip(other.bytes()) {
            let best = (diagonal + usize::from(a != b)).min(left + 1).min(*cell + 1);
            diagonal = std::mem::replace(cell, best);
            left = best;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_name_is_told_the_variable_that_was_meant() {
        for (name, meant) in [
            ("NVSHARE_MEMLIMIT", Some(MEM_LIMIT)),
            ("NVSHARE_MEM_LIMT", Some(MEM_LIMIT)),
            ("NVSHARE_MEMORY_LIMIT", Some(MEM_LIMIT)),
            ("NVSHARE_MEM_LIMIT_X", Some(MEM_LIMIT)),
            ("NVSHARE_SOKET", Some(SOCKET)),
            ("NVSHARE_ENABLE_OVERSUB", Some(ENABLE_SINGLE_OVERSUB)),
        ] {
            let text = complaint(name).unwrap_or_else(|| panic!("{name}"));
            assert!(meant.is_none_or(|meant| text.ends_with(&format!("did you mean {meant}?"))), "{text}");
        }
        assert!(complaint("NVSHARE_SOMETHING_ELSE_ENTIRELY").unwrap().ends_with("has no effect"));
        assert!(complaint("CUDA_TASK_PRIORITY").unwrap().contains("HAMi"));
    }

    #[test]
    fn names_that_are_right_or_not_ours() {
        for name in KNOWN {
            assert_eq!(complaint(name), None);
        }
        for name in [
            "NVSHARE_MEM_LIMIT_0",
            "NVSHARE_MEM_LIMIT_15",
            "NVSHARE_SERVICE_HOST",
            "NVSHARE_PORT_443_TCP",
            "NVSHARE_METRICS_PORT_9464_TCP_ADDR",
            "NVSHARE_SCHEDULER_PORT",
            "CUDA_DEVICE_MEMORY_LIMIT_1",
            "CUDA_DEVICE_SM_LIMIT_0",
            "GPU_CORE_UTILIZATION_POLICY",
            "NVSHARE_COMPUTE_LIMIT_1",
            "CUDA_VISIBLE_DEVICES",
            "PATH",
        ] {
            assert_eq!(complaint(name), None);
        }
    }

    #[test]
    fn limits_have_several_names() {
        for name in [
            "NVSHARE_MEM_LIMIT",
            "NVSHARE_MEM_LIMIT_0",
            "NVSHARE_MEM_LIMIT_MB",
            "CUDA_DEVICE_MEMORY_LIMIT_15",
        ] {
            assert!(is_memory_limit(name) && !is_compute_limit(name), "{name}");
        }
        for name in [
            "NVSHARE_COMPUTE_LIMIT",
            "NVSHARE_COMPUTE_LIMIT_1",
            "CUDA_DEVICE_SM_LIMIT",
            "CUDA_DEVICE_SM_LIMIT_0",
        ] {
            assert!(is_compute_limit(name) && !is_memory_limit(name), "{name}");
        }
        for name in ["NVSHARE_MEMORY", "NVSHARE_MEM_LIMIT_X", "GPU_CORE_UTILIZATION_POLICY", "NVSHARE_WEIGHT"]
        {
            assert!(!is_memory_limit(name) && !is_compute_limit(name), "{name}");
        }
    }

    #[test]
    fn distances() {
        for (one, other, expected) in
            [("", "", 0), ("", "ab", 2), ("ab", "", 2), ("kitten", "sitting", 3), ("abc", "abc", 0)]
        {
            assert_eq!(distance(one, other), expected);
        }
    }
}
