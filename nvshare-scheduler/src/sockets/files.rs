//! The sockets' files: how they are made, guarded and removed.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, listen, socket_with};
use tokio::net::{UnixListener, UnixStream};

/// A socket cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another scheduler uses the path.
    #[error("another scheduler serves {path} (pid {pid}); one serves all GPUs: stop that one first")]
    Taken {
        /// The socket.
        path: PathBuf,
        /// The other scheduler's process, as it says itself.
        pid: String,
    },
    /// The path exists and is not a socket.
    #[error("{path} is {what}, not a socket; not touched")]
    InTheWay {
        /// The path.
        path: PathBuf,
        /// The kind of file there.
        what: &'static str,
    },
    /// The kernel takes only shorter paths.
    #[error("{path}: too long for a socket; a path of 90 bytes or less will do")]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// The system refuses.
    #[error("{path}: {error}")]
    Io {
        /// The path concerned.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
}

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Bound {
    listener: UnixListener,
    path: PathBuf,
    /// The permissions of the socket's file.
    mode: u32,
    /// Device and inode of the socket's file.
    file: (u64, u64),
    /// The file of a scheduler that is gone was in the socket's place.
    replaced: bool,
    /// The file outlives this.
    stays: bool,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // Another scheduler may have put its own file there meanwhile.
        if !self.stays && self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Bound {
    /// Whether clients still find the socket's file.
    pub(crate) fn is_there(&self) -> bool {
        file_at(&self.path).is_ok_and(|file| file == self.file)
    }

    /// Returns the socket at which clients connect.
    pub(crate) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

/// Returns the device and inode of a file, which no other file has.
fn file_at(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// The scheduler's two sockets.
#[derive(Debug)]
pub struct Sockets {
    clients: Bound,
    admin: Bound,
    guard: Guard,
}

/// A file that is locked for as long as this scheduler lives; the kernel releases the lock in any case.
#[derive(Debug)]
pub(crate) struct Guard {
    path: PathBuf,
    locked: File,
}

impl Guard {
    /// Whether other schedulers still find the locked file.
    pub(crate) fn is_there(&self) -> bool {
        let locked = self.locked.metadata().map(|locked| (locked.dev(), locked.ino()));
        matches!((file_at(&self.path), locked), (Ok(found), Ok(locked)) if found == locked)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // The file is still locked: a scheduler that opened it meanwhile sees that it is removed (`guard`).
        if self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Sockets {
    /// Binds both sockets. Every user may use the clients' socket, only the owner the administrators'.
    ///
    /// # Errors
    /// Another scheduler serves a path, another file is there, or the system refuses.
    pub fn bind(clients: &Path, admin: &Path) -> Result<Self, Error> {
        let guard = guard(&prepare(admin, 0o700)?, admin)?;
        prepare(clients, 0o755)?;
        Ok(Self { clients: bind(clients, 0o666)?, admin: bind(admin, 0o600)?, guard })
    }

    /// Makes files anew that were removed, as a clean-up of `/run` does. Without them no client would find
    /// this scheduler, and another one could start beside it. Returns whether there were any.
    ///
    /// # Errors
    /// Another scheduler serves a path by now, or the system refuses.
    pub fn look_after(&mut self) -> Result<bool, Error> {
        let mut made = false;
        if !self.guard.is_there() {
            self.guard = guard(&prepare(&self.admin.path, 0o700)?, &self.admin.path)?;
            made = true;
        }
        for (socket, folder) in [(&mut self.clients, 0o755), (&mut self.admin, 0o700)] {
            if !socket.is_there() {
                prepare(&socket.path, folder)?;
                *socket = bind(&socket.path, socket.mode)?;
                made = true;
            }
        }
        Ok(made)
    }

    /// Whether an earlier scheduler ended under its clients, which are about to come back: its socket's file was still there.
    #[must_use]
    pub fn replaced(&self) -> bool {
        self.clients.replaced
    }

    /// Leaves the clients' socket's file behind at the end, for the next scheduler's [`Self::replaced`].
    pub(crate) fn leave_to_next(&mut self) {
        self.clients.stays = true;
    }

    /// Returns the socket at which clients connect.
    #[must_use]
    pub fn clients(&self) -> &UnixListener {
        &self.clients.listener
    }

    /// Returns the socket at which administrators connect.
    #[must_use]
    pub fn admin(&self) -> &UnixListener {
        &self.admin.listener
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |error| Error::Io { path, error }
}

/// Makes a socket's folder if it is not there.
fn prepare(socket: &Path, mode: u32) -> Result<PathBuf, Error> {
    let directory = socket.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !directory.exists() {
        DirBuilder::new().recursive(true).mode(mode).create(directory).map_err(at(directory))?;
        // The process's umask must not decide who may connect.
        fs::set_permissions(directory, Permissions::from_mode(mode)).map_err(at(directory))?;
    }
    Ok(directory.to_owned())
}

/// The most connections that wait to be accepted; the process of a further one waits in its call. A longer
/// queue would fill with the connections of a process that connects without end, and a newcomer would wait
/// for all of them.
const QUEUE: i32 = 128;

/// Bytes of the longest path to which a socket can be bound (`sun_path`, less the byte that ends it).
const MAX_PATH: usize = 107;

/// Binds a socket; see [`bind_from`].
fn bind(path: &Path, mode: u32) -> Result<Bound, Error> {
    let folder = path.parent().unwrap_or(Path::new(""));
    bind_from(folder, path, mode)
}

/// Binds a socket under a temporary name in `workshop`, a folder of the same file system, and links it to its
/// path when it listens. A client that finds it there can connect, and one of several schedulers that start
/// at the same moment gets the path.
///
/// # Errors
/// Another scheduler serves the path, another file is there, or the system refuses.
pub(crate) fn bind_from(workshop: &Path, path: &Path, mode: u32) -> Result<Bound, Error> {
    // The temporary name may be short enough where the path is not: nobody could connect there.
    if path.as_os_str().len() > MAX_PATH {
        return Err(Error::TooLong { path: path.to_owned() });
    }
    let temporary = |what: &str| workshop.join(format!(".{what}{}", std::process::id()));
    let (fresh, stale) = (temporary("n"), temporary("o"));
    let _ = fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput => Error::TooLong { path: path.to_owned() },
        _ => at(path)(error),
    })?;
    // A second call sets the length of the queue (listen(2)).
    listen(&listener, QUEUE).map_err(|error| at(path)(error.into()))?;
    let linked = fs::set_permissions(&fresh, Permissions::from_mode(mode))
        .and_then(|()| file_at(&fresh))
        .map_err(at(path))
        .and_then(|file| link(&fresh, &stale, path).map(|replaced| (file, replaced)));
    let _ = fs::remove_file(&fresh);
    let (file, replaced) = linked?;
    Ok(Bound { listener, path: path.to_owned(), mode, file, replaced, stays: false })
}

/// Attempts at a path that other schedulers use at the same moment.
const MAX_ATTEMPTS: usize = 16;

/// Links `fresh` to `path`; returns whether the socket of a scheduler that is gone was removed for it.
fn link(fresh: &Path, stale: &Path, path: &Path) -> Result<bool, Error> {
    let mut replaced = false;
    for _ in 0..MAX_ATTEMPTS {
        match fs::hard_link(fresh, path) {
            Ok(()) => return Ok(replaced),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(at(path)(error)),
        }
        let found = match fs::symlink_metadata(path) {
            Ok(found) => found,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(at(path)(error)),
        };
        if !found.file_type().is_socket() {
            let what = if found.is_dir() { "a directory" } else { "a file" };
            return Err(Error::InTheWay { path: path.to_owned(), what });
        }
        // A socket's file outlives its scheduler; only a connection tells whether a scheduler listens.
        if let Some(pid) = listener_at(path) {
            return Err(Error::Taken { path: path.to_owned(), pid });
        }
        if fs::rename(path, stale).is_ok() {
            let is_it = file_at(stale).is_ok_and(|file| file == (found.dev(), found.ino()));
            if is_it {
                replaced = true;
            } else {
                // Another scheduler had put its own file there meanwhile.
                let _ = fs::hard_link(stale, path);
            }
            let _ = fs::remove_file(stale);
        }
    }
    Err(at(path)(io::ErrorKind::AlreadyExists.into()))
}

/// Returns the process that listens at a socket, as far as it is known; `None`: there is none. It does not wait: whoever listens
/// may accept nothing, and have a full queue.
fn listener_at(path: &Path) -> Option<String> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    let pid = match connect(&socket, &SocketAddrUnix::new(path).ok()?) {
        Ok(()) => UnixStream::from_std(socket.into()).ok().and_then(|stream| stream.peer_cred().ok()?.pid()),
        Err(Errno::AGAIN) => None,
        Err(_) => return None,
    };
    // A process of another namespace has the number 0.
    let known = pid.filter(|&pid| pid > 0).map(|pid| pid.to_string());
    Some(known.unwrap_or_else(|| "unknown".to_owned()))
}

/// Locks the file in a folder that names the scheduler's process: of two schedulers that start at the same
/// moment, one gets it. Only the owner can open the file, so no other user can keep a scheduler from
/// starting.
///
/// # Errors
/// Another scheduler serves `guarded`, or the system refuses.
pub(crate) fn guard(folder: &Path, guarded: &Path) -> Result<Guard, Error> {
    let path = folder.join("nvshare-scheduler.lock");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    for _ in 0..MAX_ATTEMPTS {
        let mut file = options.open(&path).map_err(at(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                return Err(Error::Taken { path: guarded.to_owned(), pid: pid.trim().to_owned() });
            }
            Err(TryLockError::Error(error)) => return Err(at(&path)(error)),
        }
        let mut guard = Guard { path: path.clone(), locked: file };
        // A scheduler that ended between the opening and the lock has removed the file that is locked now.
        if guard.is_there() {
            let file = &mut guard.locked;
            let written = file
                .set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| writeln!(file, "{}", std::process::id()));
            written.map_err(at(&path))?;
            return Ok(guard);
        }
    }
    Err(at(&path)(io::ErrorKind::ResourceBusy.into()))
}

/// Whether this process is root.
#[must_use]
pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|me| std::os::unix::fs::MetadataExt::uid(&me) == 0)
}

/// Returns a random number, which no earlier run of the scheduler had.
///
/// # Errors
/// The system has no randomness.
pub fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdStream;

    use super::*;

    /// A folder that goes when the test is over.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("nvshare-{name}-{}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[tokio::test]
    async fn an_exit_leaves_anothers_socket_alone() {
        let folder = Folder::new("exit");
        let path = folder.0.join("s");
        let first = bind(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        let second = bind(&path, 0o600).unwrap();
        drop(first);
        assert!(StdStream::connect(&path).is_ok());
        drop(second);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_socket_that_is_left_over_is_replaced_and_said_so() {
        let folder = Folder::new("stale");
        let path = folder.0.join("s");
        assert!(!bind(&path, 0o600).unwrap().replaced, "there was none");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let bound = bind(&path, 0o600).unwrap();
        assert!(bound.replaced);
        assert!(matches!(bind(&path, 0o600), Err(Error::Taken { .. })));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1, "nothing else is left");
    }

    /// A container can put such a socket into its folder.
    #[tokio::test]
    async fn a_socket_with_a_full_queue_is_taken_and_waited_for_by_nobody() {
        let folder = Folder::new("full");
        let path = folder.0.join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        listen(&listener, 0).unwrap();
        let _in_queue = StdStream::connect(&path).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || tell.send(listener_at(&path)));
        let told = told.recv_timeout(std::time::Duration::from_secs(60));
        assert_eq!(told.unwrap().as_deref(), Some("unknown"));
    }

    #[tokio::test]
    async fn an_end_leaves_nothing_behind_and_of_two_one_starts() {
        let folder = Folder::new("guard");
        let (clients, admin) = (folder.0.join("s"), folder.0.join("a"));
        let first = Sockets::bind(&clients, &admin).unwrap();
        assert!(matches!(Sockets::bind(&clients, &admin), Err(Error::Taken { .. })));
        drop(first);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
        // A file that was removed under the lock of an earlier scheduler guards nothing.
        let stale = File::create(folder.0.join("nvshare-scheduler.lock")).unwrap();
        stale.lock().unwrap();
        fs::remove_file(folder.0.join("nvshare-scheduler.lock")).unwrap();
        drop(Sockets::bind(&clients, &admin).unwrap());
    }

    #[tokio::test]
    async fn files_that_are_removed_come_back_unless_another_scheduler_has_come() {
        let folder = Folder::new("swept");
        let (clients, admin) = (folder.0.join("run/s"), folder.0.join("run/admin/a"));
        let mut first = Sockets::bind(&clients, &admin).unwrap();
        assert!(!first.look_after().unwrap(), "all are there");
        fs::remove_dir_all(folder.0.join("run")).unwrap();
        assert!(first.look_after().unwrap() && !first.look_after().unwrap());
        assert!(StdStream::connect(&clients).is_ok() && StdStream::connect(&admin).is_ok());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!([&clients, &admin].map(|path| mode(path)), [0o666, 0o600]);
        assert!(matches!(Sockets::bind(&clients, &admin), Err(Error::Taken { .. })));

        fs::remove_dir_all(folder.0.join("run")).unwrap();
        let second = Sockets::bind(&clients, &admin).unwrap();
        assert!(matches!(first.look_after(), Err(Error::Taken { .. })));
        drop(first);
        assert!(StdStream::connect(&clients).is_ok(), "the end of the first removes nothing of the second");
        assert!(matches!(Sockets::bind(&clients, &admin), Err(Error::Taken { .. })));
        drop(second);
        // Of two that serve other administrators, one has the clients' socket.
        let mut other = Sockets::bind(&clients, &folder.0.join("b")).unwrap();
        fs::remove_file(&clients).unwrap();
        let _third = Sockets::bind(&clients, &admin).unwrap();
        assert!(matches!(other.look_after(), Err(Error::Taken { .. })));
    }

    #[tokio::test]
    async fn a_path_that_is_too_long_is_called_that() {
        let folder = Folder::new("long");
        // For names where the temporary one is short enough, and where it is not.
        for path in [folder.0.join("x".repeat(120)), folder.0.join("x".repeat(90)).join("s")] {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            assert!(matches!(bind(&path, 0o600), Err(Error::TooLong { .. })), "{}", path.display());
        }
    }
}
