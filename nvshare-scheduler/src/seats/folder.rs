//! The folders of seats: each is mounted into a container, which may change what is in it.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use nvshare_proto::paths::{SEAT_LIMITS, SEAT_SOCKET};
use nvshare_proto::{SeatName, TenantSettings, env};
use rustix::fs::OFlags;

use crate::lock::lock;
use crate::sockets::{Bound, Error, Guard, bind_from, guard};

/// The folder of all seats' folders. One scheduler has it at a time, and no other changes anything in it.
#[derive(Debug)]
pub(super) struct Root {
    path: PathBuf,
    guard: Mutex<Option<Guard>>,
}

impl Root {
    /// The folder at this path, which need not be there.
    pub(super) fn at(path: PathBuf) -> Self {
        Self { path, guard: Mutex::default() }
    }

    /// The folder's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of a seat.
    pub(super) fn folder(&self, name: SeatName) -> PathBuf {
        self.path.join(name.to_string())
    }

    /// Files are made here and moved to their places: a container that may change its seat's folder could put links there.
    fn workshop(&self) -> PathBuf {
        self.path.join(".new")
    }

    /// Makes the folder, if it is not there, and takes it, unless this scheduler has it already.
    ///
    /// # Errors
    /// Another scheduler has it, or the system refuses.
    pub(super) fn take(&self) -> Result<(), Error> {
        let mut taken = lock(&self.guard);
        if !taken.as_ref().is_some_and(Guard::is_there) {
            // Nobody but the owner passes here: who reaches a seat's socket is its tenant.
            make_folder(&self.path, 0o700)?;
            *taken = Some(guard(&self.path, &self.path)?);
        }
        Ok(())
    }

    /// Takes the folder, if it is there: one that is not is nobody's.
    ///
    /// # Errors
    /// As for [`Root::take`].
    pub(super) fn take_if_there(&self) -> Result<(), Error> {
        if self.path.exists() { self.take() } else { Ok(()) }
    }

    /// Makes a seat's folder, if it is not there, and what is in it. A folder that was made goes again if that fails; one that was
    /// there may be a running container's.
    ///
    /// # Errors
    /// The system refuses, or another scheduler serves the socket.
    pub(super) fn make(&self, name: SeatName, given: &TenantSettings) -> Result<Bound, Error> {
        let folder = self.folder(name);
        self.take()?;
        make_folder(&self.workshop(), 0o700)?;
        let is_new = make_folder(&folder, 0o755)?;
        // A program that finds the socket finds the limits as well.
        let made = self
            .write_limits(name, given)
            .and_then(|()| bind_from(&self.workshop(), &folder.join(SEAT_SOCKET), 0o666));
        if made.is_err() && is_new {
            let _ = fs::remove_dir_all(&folder);
        }
        made
    }

    /// Writes a seat's limits, as variables of its programs.
    ///
    /// # Errors
    /// The system refuses, or another scheduler has the folder.
    pub(super) fn write_limits(&self, name: SeatName, given: &TenantSettings) -> Result<(), Error> {
        self.take()?;
        let path = self.folder(name).join(SEAT_LIMITS);
        let new = self.workshop().join(SEAT_LIMITS);
        let written = (|| -> io::Result<()> {
            let _ = fs::remove_file(&new);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o444).open(&new)?;
            // The process's umask must not decide who may read it.
            file.set_permissions(Permissions::from_mode(0o444))?;
            file.write_all(variables(given).as_bytes())?;
            fs::rename(&new, &path)
        })();
        written.map_err(|error| Error::Io { path, error })
    }

    /// Whether programs find these limits of a seat.
    pub(super) fn has_limits(&self, name: SeatName, given: &TenantSettings) -> bool {
        let wanted = variables(given);
        let path = self.folder(name).join(SEAT_LIMITS);
        // The container may have put anything there: a link, a device, a file without end. It may be another thing a moment later.
        if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
            return false;
        }
        let mut options = OpenOptions::new();
        options.read(true).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        let file = options.open(path);
        let is_file = |file: &File| file.metadata().is_ok_and(|of| of.is_file());
        let Some(file) = file.ok().filter(is_file) else { return false };
        let mut found = String::new();
        let read = file.take(wanted.len() as u64 + 1).read_to_string(&mut found);
        read.is_ok() && found == wanted
    }

    /// Removes a seat's folder, if there is one.
    ///
    /// # Errors
    /// The system refuses, or another scheduler has the folder.
    pub(super) fn remove(&self, name: SeatName) -> Result<(), String> {
        self.take_if_there().map_err(|error| error.to_string())?;
        let folder = self.folder(name);
        match fs::remove_dir_all(&folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(format!("{}: {error}", folder.display()))
            }
            _ => Ok(()),
        }
    }
}

/// Makes a folder with this mode, or gives it to the one that is there. Returns whether it was made.
fn make_folder(path: &Path, mode: u32) -> Result<bool, Error> {
    let is_there = path.is_dir();
    let made = DirBuilder::new().recursive(true).mode(mode).create(path);
    // Neither the process's umask must decide who may come in, nor the kubelet, which may have made the folder for a mount.
    made.and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .map_err(|error| Error::Io { path: path.to_owned(), error })?;
    Ok(!is_there)
}

/// A line for each limit.
fn variables(given: &TenantSettings) -> String {
    let TenantSettings { weight, priority, compute, enforcement, memory, paused: _ } = *given;
    let lines = [
        memory.filter(|&bytes| bytes > 0).map(|bytes| format!("{}={bytes}\n", env::MEM_LIMIT)),
        compute.filter(|&percent| percent > 0).map(|percent| format!("{}={percent}\n", env::COMPUTE_LIMIT)),
        enforcement.map(|how| format!("{}={}\n", env::HAMI_POLICY, how.name())),
        weight.map(|weight| format!("{}={weight}\n", env::WEIGHT)),
        priority.map(|priority| format!("{}={}\n", env::PRIORITY, priority.name())),
    ];
    lines.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvshare_proto::{Enforcement, Priority};
    use rustix::fs::{CWD, Mode, mkfifoat};

    #[test]
    fn limits_are_written_as_variables() {
        let all = TenantSettings {
            weight: Some(50),
            priority: Some(Priority::Low),
            compute: Some(25),
            enforcement: Some(Enforcement::Force),
            memory: Some(1 << 30),
            paused: None,
        };
        assert_eq!(
            variables(&all),
            "NVSHARE_MEM_LIMIT=1073741824\nNVSHARE_COMPUTE_LIMIT=25\nGPU_CORE_UTILIZATION_POLICY=force\n\
             NVSHARE_WEIGHT=50\nNVSHARE_PRIORITY=low\n"
        );
        assert_eq!(
            variables(&TenantSettings { memory: Some(0), compute: Some(0), ..TenantSettings::default() }),
            ""
        );
    }

    #[tokio::test]
    async fn a_folder_that_was_there_is_nobody_elses_and_stays() {
        let dir = std::env::temp_dir().join(format!("nvshare-folder-there-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let (root, name) = (Root::at(dir.join("seats")), "00000000000000ab".parse().unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        // As the kubelet makes the folder of a volume.
        fs::create_dir_all(&root.path).unwrap();
        fs::set_permissions(&root.path, Permissions::from_mode(0o755)).unwrap();
        let socket = root.folder(name).join(SEAT_SOCKET);
        fs::create_dir_all(&socket).unwrap();
        assert!(matches!(root.make(name, &TenantSettings::default()), Err(Error::InTheWay { .. })));
        assert!(socket.exists(), "a container may have it mounted");
        fs::remove_dir(&socket).unwrap();
        let _bound = root.make(name, &TenantSettings::default()).unwrap();
        assert_eq!((mode(&root.path), mode(&root.folder(name))), (0o700, 0o755));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[tokio::test]
    async fn of_two_schedulers_one_has_the_folder_and_the_other_changes_nothing() {
        let dir = std::env::temp_dir().join(format!("nvshare-folder-two-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let [first, second] = [(); 2].map(|()| Root::at(dir.join("seats")));
        let [one, other] = ["00000000000000ac", "00000000000000ad"].map(|name| name.parse().unwrap());
        let given = |weight| TenantSettings { weight: Some(weight), ..TenantSettings::default() };
        let bound = first.make(one, &given(7)).unwrap();
        // The first one makes a socket anew that somebody removed: nobody else may come between.
        fs::remove_file(first.folder(one).join(SEAT_SOCKET)).unwrap();
        for name in [one, other] {
            assert!(matches!(second.make(name, &given(9)), Err(Error::Taken { .. })));
            assert!(matches!(second.write_limits(name, &given(9)), Err(Error::Taken { .. })));
            second.remove(name).unwrap_err();
        }
        assert!(first.has_limits(one, &given(7)) && !first.folder(other).exists());
        // A folder that is made anew may be taken by whoever comes first.
        fs::remove_dir_all(first.path()).unwrap();
        let _bound = second.make(other, &given(9)).unwrap();
        assert!(matches!(first.make(one, &given(7)), Err(Error::Taken { .. })));
        drop(bound);
        drop(second);
        first.make(one, &given(7)).unwrap();
        fs::remove_dir_all(&dir).unwrap();
    }

    #[tokio::test]
    async fn what_a_container_puts_into_its_folder_harms_nobody_else() {
        let dir = std::env::temp_dir().join(format!("nvshare-folder-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let (root, name) = (Root::at(dir.join("seats")), "00000000000000aa".parse().unwrap());
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777;
        let bound = root.make(name, &TenantSettings::default()).unwrap();
        let [socket, limits] = [SEAT_SOCKET, SEAT_LIMITS].map(|file| root.folder(name).join(file));
        let modes =
            [&root.path, &root.workshop(), &root.folder(name), &socket, &limits].map(|path| mode(path));
        assert_eq!(modes, [0o700, 0o700, 0o755, 0o666, 0o444]);
        assert_eq!(fs::read_dir(root.workshop()).unwrap().count(), 0, "nothing is left behind");
        let secret = dir.join("secret");
        fs::write(&secret, "secret").unwrap();
        fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        for path in [&socket, &limits] {
            fs::remove_file(path).unwrap();
            std::os::unix::fs::symlink(&secret, path).unwrap();
        }
        assert!(!bound.is_there() && !root.has_limits(name, &TenantSettings::default()));
        assert!(matches!(root.make(name, &TenantSettings::default()), Err(Error::InTheWay { .. })));
        root.write_limits(name, &TenantSettings { weight: Some(7), ..TenantSettings::default() }).unwrap();
        assert_eq!(fs::read_to_string(&limits).unwrap(), "NVSHARE_WEIGHT=7\n");
        assert!(!root.has_limits(name, &TenantSettings::default()), "those are others");
        assert_eq!((fs::read_to_string(&secret).unwrap().as_str(), mode(&secret)), ("secret", 0o600));
        fs::remove_file(&limits).unwrap();
        mkfifoat(CWD, &limits, Mode::RUSR).unwrap();
        assert!(!root.has_limits(name, &TenantSettings::default()), "nobody waits for its other end");
        root.remove(name).unwrap();
        root.remove(name).unwrap();
        assert!(!root.folder(name).exists() && secret.exists());
        fs::remove_dir_all(&dir).unwrap();
    }
}
