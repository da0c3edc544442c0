//! Which threads of this process are blocked in a system call, as the kernel says.

use std::collections::BTreeSet;
use std::fs;
use std::io;

/// Threads that have not been seen blocked in a system call.
#[derive(Debug)]
pub(crate) struct Unseen {
    left: BTreeSet<libc::pid_t>,
    /// Those that need no further look.
    seen: BTreeSet<libc::pid_t>,
}

impl Unseen {
    /// All threads but the calling one.
    ///
    /// # Errors
    /// The kernel does not list the threads.
    pub(crate) fn others() -> io::Result<Self> {
        // SAFETY: it takes nothing and cannot fail.
        let me = unsafe { libc::gettid() };
        let mut unseen = Self { left: BTreeSet::new(), seen: BTreeSet::from([me]) };
        unseen.list()?;
        Ok(unseen)
    }

    /// Looks at the threads that have not been seen, and lists them again. Returns whether all have been seen. Threads that ended need
    /// not be.
    ///
    /// # Errors
    /// The kernel does not say what threads do.
    pub(crate) fn look(&mut self) -> io::Result<bool> {
        for thread in std::mem::take(&mut self.left) {
            let into = if is_blocked(thread)? { &mut self.seen } else { &mut self.left };
            into.insert(thread);
        }
        // The kernel may leave threads out of a list while others end.
        if self.left.is_empty() {
            self.list()?;
        }
        Ok(self.left.is_empty())
    }

    /// Enters the threads that are not known yet.
    fn list(&mut self) -> io::Result<()> {
        for task in fs::read_dir("/proc/self/task")? {
            let number = task?.file_name().to_str().and_then(|name| name.parse().ok());
            self.left.extend(number.filter(|thread| !self.seen.contains(thread)));
        }
        Ok(())
    }
}

/// Whether a thread is blocked in a system call, or has ended.
fn is_blocked(thread: libc::pid_t) -> io::Result<bool> {
    match fs::read_to_string(format!("/proc/self/task/{thread}/syscall")) {
        Ok(text) => Ok(says_blocked(&text)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => {
            // Without the thread's folder, the thread has ended. Without the file alone, this kernel does not say.
            if fs::exists(format!("/proc/self/task/{thread}"))? { Err(error) } else { Ok(true) }
        }
        Err(error) => Err(error),
    }
}

/// Whether the kernel's line is that of a blocked thread: the number of the system call comes first. It is -1 for a thread that is stopped
/// elsewhere, and `running` for one that runs. In `sigsuspend`, a handler of a signal may wait that has interrupted anything. A first thread
/// that has ended stays in the list as long as others run, without a stack and code.
fn says_blocked(line: &str) -> bool {
    if line.trim_end() == "-1 0x0 0x0" {
        return true;
    }
    let number = line.split_ascii_whitespace().next().and_then(|word| word.parse::<i64>().ok());
    number.is_some_and(|number| number >= 0 && number != libc::SYS_rt_sigsuspend)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::process::threads;

    #[test]
    fn the_kernels_line_is_read() {
        for (line, is) in [
            ("202 0x7f 0x0 0x1 0x7ffe 0x7f\n", true),
            ("0 0x3 0x7f\n", true),
            ("running\n", false),
            ("-1 0x7ffe 0x7f\n", false),
            ("-1 0x0 0x0\n", true),
            ("", false),
            (&format!("{} 0x1\n", libc::SYS_rt_sigsuspend), false),
        ] {
            assert_eq!(says_blocked(line), is, "{line:?}");
        }
    }

    #[test]
    fn a_thread_that_computes_is_not_blocked_until_it_sleeps() {
        let (thread, is_over) = (AtomicI32::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // SAFETY: it takes nothing and cannot fail.
                thread.store(unsafe { libc::gettid() }, Ordering::SeqCst);
                while !is_over.load(Ordering::SeqCst) {
                    std::hint::spin_loop();
                }
                threads::sleep(Duration::from_millis(400));
            });
            while thread.load(Ordering::SeqCst) == 0 {
                threads::pause();
            }
            let busy = thread.load(Ordering::SeqCst);
            for _ in 0..100 {
                assert!(!is_blocked(busy).unwrap());
            }
            is_over.store(true, Ordering::SeqCst);
            let mut looks = 0;
            while !is_blocked(busy).unwrap() {
                looks += 1;
                assert!(looks < 300, "it sleeps");
                threads::sleep(Duration::from_millis(1));
            }
        });
        // It ends a moment later, and then there is nothing to look at.
        while !is_blocked(thread.load(Ordering::SeqCst)).unwrap() {
            threads::pause();
        }
    }
}
