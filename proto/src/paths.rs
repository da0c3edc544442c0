//! Paths of the sockets.

use std::path::PathBuf;

use crate::env;

/// Clients' socket of a scheduler that runs as root. Its directory may be mounted into containers.
pub const SYSTEM_SOCKET: &str = "/var/run/nvshare/scheduler.sock";
/// Administrators' socket of a scheduler that runs as root.
pub const SYSTEM_ADMIN_SOCKET: &str = "/var/run/nvshare-admin/admin.sock";

/// The folder of the seats' folders: `NAME/scheduler.sock`, and the seat's limits beside it. Each is mounted into one container, where the
/// folder of [`SYSTEM_SOCKET`] is. It is no folder below that one, since containers that have the common one would see all seats.
pub const SEATS: &str = "/var/run/nvshare-seats";
/// The name of a seat's socket in its folder.
pub const SEAT_SOCKET: &str = "scheduler.sock";
/// The name of the file with a seat's limits, in its folder: a line `VARIABLE=VALUE` for each, as in a program's environment.
pub const SEAT_LIMITS: &str = "limits";

/// The clients' socket: `$NVSHARE_SOCKET`, else that of a scheduler of root, else `$XDG_RUNTIME_DIR/nvshare/scheduler.sock`.
///
/// `prefer_system` asks for root's: the process is root, or root's socket exists.
#[must_use]
pub fn clients_socket(prefer_system: bool) -> PathBuf {
    socket(env::SOCKET, SYSTEM_SOCKET, "scheduler.sock", prefer_system)
}

/// The administrators' socket: `$NVSHARE_ADMIN_SOCKET`, else that of a scheduler of root, else
/// `$XDG_RUNTIME_DIR/nvshare/admin.sock`.
#[must_use]
pub fn admin_socket(prefer_system: bool) -> PathBuf {
    socket(env::ADMIN_SOCKET, SYSTEM_ADMIN_SOCKET, "admin.sock", prefer_system)
}

/// The directory of the sockets of a user's own scheduler: `$XDG_RUNTIME_DIR/nvshare`, if that is set.
#[must_use]
pub fn own_directory() -> Option<PathBuf> {
    Some(env::path("XDG_RUNTIME_DIR")?.join("nvshare"))
}

fn socket(variable: &str, system: &str, name: &str, prefer_system: bool) -> PathBuf {
    match (env::path(variable), own_directory()) {
        (Some(path), _) => path,
        (_, Some(own)) if !prefer_system => own.join(name),
        _ => PathBuf::from(system),
    }
}
