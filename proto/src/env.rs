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
/// `1`: the same as `NVSHARE_LOG=debug`.
pub const DEBUG: &str = "NVSHARE_DEBUG";
/// `1`: one program may allocate more than the GPU has.
pub const ENABLE_SINGLE_OVERSUB: &str = "NVSHARE_ENABLE_SINGLE_OVERSUB";
/// `0`: evicted memory comes back by page faults instead of in bulk. For measurements.
pub const RESTORE: &str = "NVSHARE_RESTORE";
/// The library to preload, for `nvshare-ctl run`.
pub const LIBRARY: &str = "NVSHARE_LIBRARY";
