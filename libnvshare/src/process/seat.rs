//! The limits of the seat, if the process is in a container that has one: a file that the scheduler keeps beside the seat's socket.
//!
//! The file is read without the scheduler, so limits hold while that is away. A file that is there and cannot be followed is an
//! error, and so is a seat without one: limits fail closed.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nvshare_proto::SeatName;
use nvshare_proto::env as names;
use nvshare_proto::paths::{SEAT_LIMITS, SEAT_SOCKET, SEATS, SYSTEM_SOCKET};

/// Longest file that is read, in bytes.
const MAX_FILE: u64 = 4096;
/// The variables that a seat's file may set.
const LIMITS: [&str; 5] =
    [names::MEM_LIMIT, names::COMPUTE_LIMIT, names::HAMI_POLICY, names::WEIGHT, names::PRIORITY];

/// The kernel's list of what is mounted where, as the process sees it. It is read in the thread's own folder: that of the process has none where
/// the first thread has ended, as by `pthread_exit` in `main`.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// A seat's limits as variables and values.
pub(crate) type Limits = Vec<(String, String)>;

/// The limits of the seat: those in the folder where containers find the scheduler, and those beside `socket`. None: there is no seat.
///
/// # Errors
/// The file's path, and the reason why it cannot be followed.
pub(crate) fn limits(socket: &Path) -> Result<Option<Limits>, (String, String)> {
    limits_where(&Path::new(SYSTEM_SOCKET).with_file_name(SEAT_LIMITS), socket, &mounts())
}

/// The same, with the file in the folder where containers find the scheduler, and the kernel's list of mounts.
fn limits_where(fixed: &Path, socket: &Path, mounts: &str) -> Result<Option<Limits>, (String, String)> {
    let beside = socket.with_file_name(SEAT_LIMITS);
    let failed = |path: &Path, reason: String| (path.display().to_string(), reason);
    let follow = |path: &Path| {
        let text = read(path).map_err(|error| failed(path, error.to_string()))?;
        parse(&text).map(Some).map_err(|reason| failed(path, reason))
    };
    let is_there = |path: &Path| fs::symlink_metadata(path).is_ok();
    match mounted(mounts).as_slice() {
        // One of them hides the other where containers find the scheduler, and each has a path of its own.
        [(first, at), (second, also_at), ..] => {
            let also_at = also_at.display();
            Err(failed(
                at,
                format!(
                    "this container has two seats, {first} here and {second} at {also_at}: one is enough"
                ),
            ))
        }
        // A program may name another socket, and stays within the limits of its seat.
        _ if is_there(fixed) => follow(fixed),
        [] if is_there(&beside) => follow(&beside),
        [] => Ok(None),
        [(seat, folder)] => {
            let path = folder.join(SEAT_LIMITS);
            if is_there(&path) {
                return follow(&path);
            }
            let reason =
                format!("this container has seat {seat}, and no scheduler has written its limits yet");
            Err(failed(&path, reason))
        }
    }
}

/// The socket of the container's seat, if it has one seat: no variable names another.
pub(crate) fn socket() -> Option<PathBuf> {
    let fixed = Path::new(SYSTEM_SOCKET);
    let is_there = fs::symlink_metadata(fixed.with_file_name(SEAT_LIMITS)).is_ok();
    if is_there { Some(fixed.to_owned()) } else { socket_where(&mounts()) }
}

/// The kernel's list of mounts. Without `/proc` it is not known whether there is a seat. A path of another mount may be no UTF-8.
fn mounts() -> String {
    fs::read(MOUNTS).map(|list| String::from_utf8_lossy(&list).into_owned()).unwrap_or_default()
}

fn socket_where(mounts: &str) -> Option<PathBuf> {
    let seats = mounted(mounts);
    let [(_, folder)] = seats.as_slice() else { return None };
    Some(folder.join(SEAT_SOCKET))
}

/// The seats whose folders are mounted, and where, by the kernel's list. A mount's fourth field says which folder of its file system is
/// mounted, and the fifth where (`proc_pid_mountinfo(5)`). Neither a variable nor an empty folder hides that. A node may keep its seats in
/// a folder of another name. Then the path in the container names the seat: each is mounted at its own path as well.
fn mounted(list: &str) -> Vec<(SeatName, PathBuf)> {
    let of_seats = Path::new(SEATS).file_name();
    let name_of = |folder: &Path| -> Option<SeatName> {
        let name = folder.file_name()?.to_str()?.parse().ok()?;
        (folder.parent()?.file_name() == of_seats).then_some(name)
    };
    let mut seats: Vec<(SeatName, PathBuf)> = Vec::new();
    for line in list.lines() {
        let mut fields = line.split(' ').skip(3);
        let (Some(root), Some(at)) = (fields.next(), fields.next()) else { continue };
        // The kernel writes this behind a folder that was removed.
        let root = Path::new(root.strip_suffix("//deleted").unwrap_or(root));
        // A file of the folder may be mounted alone.
        if let Some(name) = root.ancestors().chain(Path::new(at).ancestors()).find_map(name_of)
            && seats.iter().all(|(known, _)| *known != name)
        {
            seats.push((name, at.into()));
        }
    }
    seats
}

fn read(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE { Err(io::ErrorKind::FileTooLarge.into()) } else { Ok(text) }
}

/// A line `VARIABLE=VALUE` for each limit.
fn parse(text: &str) -> Result<Limits, String> {
    let limit = |line: &str| match line.split_once('=') {
        Some((name, value)) if LIMITS.contains(&name) && !value.is_empty() => {
            Ok((name.to_owned(), value.to_owned()))
        }
        _ => Err(format!("{line:?} is no limit of a seat")),
    };
    text.lines().map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_a_limit() {
        let limits = parse("NVSHARE_MEM_LIMIT=8589934592\nNVSHARE_COMPUTE_LIMIT=50\n").unwrap();
        assert_eq!(limits.len(), 2);
        assert_eq!(parse("").unwrap(), Limits::new());
        for wrong in ["\n", "NVSHARE_MEM_LIMIT", "NVSHARE_MEM_LIMIT=", "NVSHARE_MEMORY=off", "LD_PRELOAD=x"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn the_kernel_says_that_a_folder_is_that_of_a_seat() {
        let name = "dabc7573cefc8f50";
        let mount = |root: &str| format!("621 598 0:26 {root} /run/nvshare ro,nosuid,nodev - tmpfs tmpfs rw");
        let list = |root: &str| format!("598 1 0:55 / / rw - overlay overlay rw\n{}\n", mount(root));
        let there = PathBuf::from("/run/nvshare");
        for root in ["/nvshare-seats", "/run/nvshare-seats", "/@/var/run/nvshare-seats"] {
            let seat = vec![(name.parse().unwrap(), there.clone())];
            assert_eq!(mounted(&list(&format!("{root}/{name}"))), seat);
            assert_eq!(mounted(&list(&format!("{root}/{name}//deleted"))), seat);
            assert_eq!(mounted(&list(&format!("{root}/{name}/scheduler.sock"))), seat, "a file alone");
        }
        for root in [
            "/nvshare-seats",
            "/nvshare",
            "/nvshare-seats/.new",
            "/other/dabc7573cefc8f50",
            "/nvshare-seats/dabc/x",
        ] {
            assert_eq!(mounted(&list(root)), [], "{root}");
        }
        assert_eq!((mounted(""), mounted("\n36 35\n")), (vec![], vec![]));

        // Its socket is there, whatever a variable says.
        let seat = list(&format!("/nvshare-seats/{name}"));
        assert_eq!(socket_where(&seat), Some(PathBuf::from("/run/nvshare/scheduler.sock")));
        assert_eq!((socket_where(&list("/nvshare")), socket_where("")), (None, None));

        // A container that started before the scheduler: its folder is empty.
        let (fixed, socket) = (Path::new("/nowhere/limits"), Path::new("/nowhere/scheduler.sock"));
        let seats = list(&format!("/nvshare-seats/{name}"));
        let (path, why) = limits_where(fixed, socket, &seats).unwrap_err();
        assert_eq!(path, "/run/nvshare/limits");
        assert!(why.starts_with(&format!("this container has seat {name}, and no scheduler")), "{why}");
        assert_eq!(limits_where(fixed, socket, &list("/nvshare")), Ok(None));

        // A program cannot say that its limits are elsewhere.
        let folder = std::env::temp_dir().join(format!("nvshare-no-seat-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(SEAT_LIMITS), "").unwrap();
        let socket = folder.join("scheduler.sock");
        assert!(limits_where(fixed, &socket, &seats).is_err());
        assert_eq!(limits_where(fixed, &socket, ""), Ok(Some(vec![])));

        // Two seats are refused with both names, whether one has limits where programs look or not. One seat has two paths as well.
        let own = |name: &str| mount(&format!("/nvshare-seats/{name}")).replace("/run/nvshare ", "/own ");
        let (twice, two) = (seats.clone() + &own(name), seats + &own("a1d92207a4be77e2"));
        let there = folder.join(SEAT_LIMITS);
        assert_eq!(limits_where(&there, &socket, &twice), Ok(Some(vec![])));
        for fixed in [fixed, &there] {
            let (_, why) = limits_where(fixed, &socket, &two).unwrap_err();
            assert!(why.contains("two seats, dabc7573cefc8f50 here and a1d92207a4be77e2 at /own"), "{why}");
        }

        // The folder has another name on the node.
        let own = format!("/var/run/nvshare-seats/{name}");
        let list = list("/data/seats/1").replace("/run/nvshare ", &format!("{own} "));
        assert_eq!(mounted(&list), [(name.parse().unwrap(), own.into())]);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_there_is_followed_or_refused() {
        let folder = std::env::temp_dir().join(format!("nvshare-seat-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (socket, file) = (folder.join("scheduler.sock"), folder.join(SEAT_LIMITS));
        assert_eq!(limits(&socket), Ok(None));
        fs::write(&file, "NVSHARE_WEIGHT=7\n").unwrap();
        assert_eq!(limits(&socket), Ok(Some(vec![("NVSHARE_WEIGHT".to_owned(), "7".to_owned())])));
        for text in ["half of it", &"NVSHARE_WEIGHT=7\n".repeat(1000)] {
            fs::write(&file, text).unwrap();
            let (path, _) = limits(&socket).unwrap_err();
            assert_eq!(path, file.display().to_string());
        }
        fs::write(&file, [0xff, 0xfe]).unwrap();
        assert!(limits(&socket).is_err(), "it is no text");
        fs::remove_file(&file).unwrap();
        fs::create_dir(&file).unwrap();
        assert!(limits(&socket).is_err(), "it is no file");
        fs::remove_dir_all(&folder).unwrap();
    }
}
