//! The sockets' files: made, guarded and removed.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// Why a socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another scheduler has it.
    #[error("another scheduler serves {path} (pid {pid})")]
    Taken {
        /// The socket.
        path: PathBuf,
        /// Who has it, as it says itself.
        pid: String,
    },
    /// Something else is there.
    #[error("{path} is {what}, not a socket; not touched")]
    InTheWay {
        /// The path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
    /// The system says no.
    #[error("{path}: {error}")]
    Io {
        /// What was touched.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
}

/// A listening socket and its guard.
#[derive(Debug)]
struct Bound {
    listener: UnixListener,
    path: PathBuf,
    /// Locked for as long as this scheduler serves the path; released by the kernel whatever happens.
    _guard: File,
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The scheduler's two sockets.
#[derive(Debug)]
pub struct Sockets {
    clients: Bound,
    admin: Bound,
}

impl Sockets {
    /// Binds both. The clients' may be used by everybody, the administrators' by the owner alone.
    ///
    /// # Errors
    /// When another scheduler serves a path, something else is there, or the system refuses.
    pub fn bind(clients: &Path, admin: &Path) -> Result<Self, Error> {
        Ok(Self { clients: bind(clients, 0o755, 0o666)?, admin: bind(admin, 0o700, 0o600)? })
    }

    /// Where clients connect.
    #[must_use]
    pub fn clients(&self) -> &UnixListener {
        &self.clients.listener
    }

    /// Where administrators connect.
    #[must_use]
    pub fn admin(&self) -> &UnixListener {
        &self.admin.listener
    }
}

fn bind(path: &Path, directory_mode: u32, mode: u32) -> Result<Bound, Error> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::Io { path, error }
    };
    let directory = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !directory.exists() {
        DirBuilder::new().recursive(true).mode(directory_mode).create(directory).map_err(at(directory))?;
        // The process's umask does not decide who may connect.
        fs::set_permissions(directory, Permissions::from_mode(directory_mode)).map_err(at(directory))?;
    }
    let guard = guard(path)?;
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path).map_err(at(path))?,
        Ok(found) => {
            let what = if found.is_dir() { "a directory" } else { "a file" };
            return Err(Error::InTheWay { path: path.to_owned(), what });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at(path)(error)),
    }
    let listener = UnixListener::bind(path).map_err(at(path))?;
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(at(path))?;
    Ok(Bound { listener, path: path.to_owned(), _guard: guard })
}

/// Locks the file beside a socket that says whose the socket is. A socket's file alone cannot tell whether anybody
/// listens.
fn guard(path: &Path) -> Result<File, Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = PathBuf::from(name);
    let io = |error| Error::Io { path: lock.clone(), error };
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&lock).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            return Err(Error::Taken { path: path.to_owned(), pid: pid.trim().to_owned() });
        }
        Err(TryLockError::Error(error)) => return Err(io(error)),
    }
    file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id())).map_err(io)?;
    Ok(file)
}

/// Whether this process is root.
#[must_use]
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}

/// A number that nobody had before.
///
/// # Errors
/// When the system has no randomness.
pub fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
