//! The kernel's facts about a client's process, shown to administrators and to the client's own user.

use std::fs::{self, File};
use std::io::Read;
use std::sync::Arc;

use nvshare_proto::ProcessInfo;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use super::control_groups::Groups;

/// Longest command that is shown, in characters.
const MAX_COMMAND: usize = 160;

/// A process, as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Described {
    /// The part that is shown.
    pub(crate) info: ProcessInfo,
    /// The control group of the process's container: the whole path, since anybody can make one with the same ending.
    pub(crate) container: Option<String>,
}

/// Whether a character is shown: not if it controls a terminal or the direction of text.
pub(crate) fn is_harmless(c: char) -> bool {
    c.is_ascii_graphic() || c == ' ' || c.is_alphanumeric()
}

/// Describes a process by its number from the kernel; none if the process is gone already. Nothing here waits for the process. To read
/// its command would, so its name stands for that until a look beside the scheduler has found it.
#[must_use]
pub(crate) fn describe(pid: u32, user: u32, groups: &Groups) -> Option<Described> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    let info = ProcessInfo {
        user,
        command: harmless(&format!("[{}]", String::from_utf8_lossy(&name).trim())),
        container: groups.container_id().map(str::to_owned),
        pod: groups.pod(),
        job: groups.job().map(|job| job.to_string()),
    };
    Some(Described { info, container: groups.container().map(str::to_owned) })
}

/// Looks at processes beside the scheduler's thread. The kernel reads a process's arguments from its memory, under a lock that the
/// process can hold for as long as it likes.
#[derive(Debug, Clone)]
pub(crate) struct Looks {
    places: Arc<Semaphore>,
    read: fn(u32) -> Option<Vec<u8>>,
}

/// Looks under way at a time: each takes a thread.
const MAX_LOOKS: usize = 4;

impl Default for Looks {
    fn default() -> Self {
        let read = |pid| fs::read(format!("/proc/{pid}/cmdline")).ok();
        Self { places: Arc::new(Semaphore::new(MAX_LOOKS)), read }
    }
}

impl Looks {
    /// The command of a process, if the kernel has a number for it and it has arguments. The number may be another process's by then.
    pub(crate) async fn command(self, pid: Option<u32>) -> Option<String> {
        let (pid, read) = (pid?, self.read);
        let place = self.places.acquire_owned().await.ok()?;
        let look = move || {
            // The client may be gone before the thread is free again.
            let _place = place;
            read(pid)
        };
        command(&spawn_blocking(look).await.ok()??)
    }
}

/// Those of the processes that are stopped by a signal, as by Ctrl-Z; each has a number. To read this waits for no process.
pub(crate) fn stopped<T>(of: impl IntoIterator<Item = (T, u32)>) -> impl Iterator<Item = (T, bool)> {
    of.into_iter().filter_map(|(which, pid)| {
        // For the `stat` of the process the kernel goes through all its threads. The state is in the first bytes, behind a name of 16.
        let mut stat = [0; 128];
        let length = File::open(format!("/proc/{pid}/task/{pid}/stat")).ok()?.read(&mut stat).ok()?;
        Some((which, is_stopped(&stat[..length])))
    })
}

/// Whether `/proc/PID/stat` says that the process is stopped. A program's name may have any characters, and ends with the last
/// parenthesis.
fn is_stopped(stat: &[u8]) -> bool {
    let end = stat.iter().rposition(|&byte| byte == b')');
    end.is_some_and(|end| stat[end + 1..].starts_with(b" T"))
}

/// Where the kernel has put the code and the stack of the program that a process runs. Linux chooses these places anew for
/// another program (ASLR); without that, another one looks the same. A process can move them itself (`PR_SET_MM_MAP`): so it
/// hides memory from the scheduler as any program without the library does. The kernel shows them to root and to the process's
/// user alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Image([u64; 2]);

impl Image {
    #[cfg(test)]
    pub(crate) fn for_test(number: u64) -> Self {
        Self([number; 2])
    }

    /// That of the process that has this number now; none where this process may not see it. To read this waits for no process.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        Self::said_by(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// As `/proc/PID/stat` says: fields 26 and 28, of which the state is the third. A process that is hidden, or ends, has a stack of 0.
    fn said_by(stat: &[u8]) -> Option<Self> {
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let text = String::from_utf8_lossy(&stat[end + 1..]);
        let field = |number: usize| text.split_whitespace().nth(number - 3)?.parse().ok();
        let places: [u64; 2] = [field(26)?, field(28)?];
        (places[1] != 0).then_some(Self(places))
    }
}

/// The program and its arguments as `ps` shows them, shortened; none, if there are none.
fn command(arguments: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(arguments);
    let words: Vec<&str> = text.split('\0').filter(|word| !word.is_empty()).collect();
    (!words.is_empty()).then(|| harmless(&words.join(" ")))
}

/// A line, shortened. A process chooses its arguments itself, and a terminal obeys control characters.
fn harmless(line: &str) -> String {
    let line: String = line.chars().map(|c| if is_shown(c) { c } else { ' ' }).collect();
    match line.char_indices().nth(MAX_COMMAND) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// Arguments may be in any script: only characters that are known to do harm are left out.
fn is_shown(c: char) -> bool {
    let turns_round =
        matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    !c.is_control() && !turns_round
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;

    #[test]
    fn commands_are_one_harmless_line() {
        for (arguments, expected) in [
            (&b"python3\0train.py\0--lr=1\0"[..], Some("python3 train.py --lr=1".to_owned())),
            (b"", None),
            (b"a\x1b[31m\0b\nc\0", Some("a [31m b c".to_owned())),
            ("x\u{202e}fdp.sh\0\u{e4}\u{2066}".as_bytes(), Some("x fdp.sh \u{e4} ".to_owned())),
            (&[b'x'; 500], Some("x".repeat(MAX_COMMAND) + "…")),
        ] {
            assert_eq!(command(arguments), expected);
        }
    }

    /// The process holds the lock of its memory until others have gone on.
    #[test]
    fn nobody_waits_for_a_process_that_is_looked_at() {
        static GOES_ON: Mutex<Option<Receiver<()>>> = Mutex::new(None);
        let read = |_| {
            let goes_on = GOES_ON.lock().unwrap().take()?;
            goes_on.recv_timeout(Duration::from_secs(10)).is_ok().then(|| b"late".to_vec())
        };
        let (go, goes_on) = channel();
        *GOES_ON.lock().unwrap() = Some(goes_on);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let found = runtime.block_on(async {
            let look = tokio::spawn(Looks { read, ..Looks::default() }.command(Some(1)));
            tokio::task::yield_now().await;
            go.send(()).unwrap();
            look.await.unwrap()
        });
        assert_eq!(found.as_deref(), Some("late"), "others went on meanwhile");
    }

    /// The look of a client that has ended may wait for its process all the same, and has a thread.
    #[test]
    fn few_looks_take_a_thread_though_nobody_waits_for_them() {
        static BEGUN: AtomicUsize = AtomicUsize::new(0);
        static GO_ON: AtomicBool = AtomicBool::new(false);
        let read = |_| {
            BEGUN.fetch_add(1, Ordering::Relaxed);
            while !GO_ON.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        };
        let looks = Looks { read, ..Looks::default() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            for _ in 0..4 * MAX_LOOKS {
                let look = tokio::time::timeout(Duration::from_millis(10), looks.clone().command(Some(1)));
                assert!(look.await.is_err());
            }
        });
        let begun = BEGUN.load(Ordering::Relaxed);
        GO_ON.store(true, Ordering::Relaxed);
        assert!(begun <= MAX_LOOKS, "{begun}");
    }

    #[test]
    fn stopped_processes_are_told_from_others() {
        for (stat, stopped) in [
            (&b"7 (a) T 1 7"[..], true),
            (b"7 (a) S 1 7", false),
            (b"7 (a) t 1 7", false),
            (b"7 (a) T 1) S 1 7", false),
            (b"7 (b) S) T 1 7", true),
            (b"", false),
        ] {
            assert_eq!(is_stopped(stat), stopped, "{}", String::from_utf8_lossy(stat));
        }
        let own = [("own", std::process::id()), ("none", u32::MAX)];
        assert_eq!(stopped(own).collect::<Vec<_>>(), [("own", false)]);
    }

    #[test]
    fn another_program_of_a_process_is_elsewhere() {
        let stat = |code: u64, stack: u64| {
            format!("7 (a) b) S 1 7 7 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 9 99 9 1 {code} 2 {stack} 0 0")
        };
        let said = |code, stack| Image::said_by(stat(code, stack).as_bytes());
        assert_eq!(said(4096, 77), Some(Image([4096, 77])));
        assert_eq!((said(1, 0), said(0, 0)), (None, None));
        assert_eq!((Image::said_by(b"7 (a) S 1"), Image::said_by(b"")), (None, None));
        let own = Image::of(std::process::id());
        assert!(own.is_some() && own == Image::of(std::process::id()));
        assert_eq!(Image::of(u32::MAX), None);
    }

    #[test]
    fn this_process_is_described() {
        let own = describe(std::process::id(), 7, &Groups::default()).expect("this process");
        assert!(own.info.user == 7 && !own.info.command.is_empty(), "{own:?}");
        assert_eq!(describe(u32::MAX, 7, &Groups::default()), None);
    }
}
