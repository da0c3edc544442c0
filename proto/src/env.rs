//! Names of the environment variables that nvshare reads. Each is documented in README.md.

/// Path of the scheduler's clients' socket.
pub const SOCKET: &str = "NVSHARE_SOCKET";
/// Path of the scheduler's administrators' socket.
pub const ADMIN_SOCKET: &str = "NVSHARE_ADMIN_SOCKET";
/// Memory limit of a process on each GPU; with `_0`, `_1`, … appended, on that device of the process.
pub const MEM_LIMIT: &str = "NVSHARE_MEM_LIMIT";
/// The same in MiB.
pub const MEM_LIMIT_MB: &str = "NVSHARE_MEM_LIMIT_MB";
/// How device memory is handed out: `managed` or `off`.
pub const MEMORY: &str = "NVSHARE_MEMORY";
/// What the library logs to standard error: `off`, `error`, `warn`, `info` or `debug`.
pub const LOG: &str = "NVSHARE_LOG";
/// Device memory that stays the driver's own, so that it can be shared with other processes: `all`, or sizes and
/// ranges of sizes (`2MiB,64MiB-1GiB`).
pub const PLAIN: &str = "NVSHARE_PLAIN";
/// `0`: managed memory that stands for device memory says that it is managed.
pub const DISGUISE: &str = "NVSHARE_DISGUISE";
/// Which `nvshare-ctl run` started the process: set by it, so that what it starts shares one limit.
pub const RUN: &str = "NVSHARE_RUN";
/// `1`: the same as `NVSHARE_LOG=debug`.
pub const DEBUG: &str = "NVSHARE_DEBUG";
/// `1`: one program may allocate more than the GPU has.
pub const ENABLE_SINGLE_OVERSUB: &str = "NVSHARE_ENABLE_SINGLE_OVERSUB";
/// `0`: evicted memory comes back by page faults instead of in bulk. For measurements.
pub const RESTORE: &str = "NVSHARE_RESTORE";
/// The library to preload, for `nvshare-ctl run`.
pub const LIBRARY: &str = "NVSHARE_LIBRARY";
/// The scheduler's configuration file.
pub const CONFIG: &str = "NVSHARE_CONFIG";

/// HAMi's names, accepted from its users: `NVSHARE_MEM_LIMIT`, also with a device's index behind it.
pub const HAMI_MEM_LIMIT: &str = "CUDA_DEVICE_MEMORY_LIMIT";
/// `NVSHARE_LOG` as a number: 0 errors, 1 and 2 warnings, 3 info, 4 debug.
pub const HAMI_LOG_LEVEL: &str = "LIBCUDA_LOG_LEVEL";

/// Whether the library reads a variable of this name.
#[must_use]
pub fn is_of_library(name: &str) -> bool {
    name.starts_with("NVSHARE_") || name.starts_with(HAMI_MEM_LIMIT) || name == HAMI_LOG_LEVEL
}
