//! The log: lines on standard error.
//!
//! A line is formatted on the stack and written by one `write`, without an allocation or a lock. So a closed or full standard
//! error does no harm. Nothing is written to standard output. The program may have closed its standard error, and opened a file of its
//! data under its number. That file gets no lines.

use std::ffi::c_int;
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::process::descriptor::{Descriptor, status};

/// How much is logged. Each level includes the levels before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

/// The standard error that lines go to.
static STANDARD_ERROR: Descriptor = Descriptor::none();
/// The standard error that the program was started with.
static AT_START: Descriptor = Descriptor::none();

/// Looks at the standard error when the library is loaded.
// SAFETY: the loader calls what this section points to, before `main`. The function needs nothing that is set up later.
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn look() {
        AT_START.set(libc::STDERR_FILENO);
    }
    look
};

/// Remembers the program's standard error. Only the first call has an effect. Until then the program may have replaced it, by a log for
/// example. A file under its number that is not for appending may be data of a program that had closed it, and gets no lines.
pub(crate) fn remember_standard_error() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if ONCE.swap(true, Ordering::SeqCst) {
        return;
    }
    let appends = || {
        // SAFETY: no pointers.
        let flags = unsafe { libc::fcntl(libc::STDERR_FILENO, libc::F_GETFL) };
        flags >= 0 && flags & libc::O_APPEND != 0
    };
    if AT_START.get().is_some() || appends() || !is_regular(libc::STDERR_FILENO) {
        STANDARD_ERROR.set(libc::STDERR_FILENO);
    }
}

fn is_regular(number: c_int) -> bool {
    status(number).is_some_and(|status| status.st_mode & libc::S_IFMT == libc::S_IFREG)
}

/// Whether a write of this length would exceed the limit of a file's size. Such a write raises a signal that ends the program (setrlimit(2)).
fn exceeds_limit(number: c_int, bytes: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the answer.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    if is_known && limit.rlim_cur == libc::RLIM_INFINITY || !is_regular(number) {
        return false;
    }
    // SAFETY: no pointers; the place in the file stays.
    let at = unsafe { libc::lseek(number, 0, libc::SEEK_CUR) }.max(0).cast_unsigned();
    let size = status(number).map_or(u64::MAX, |status| status.st_size.max(0).cast_unsigned());
    at.max(size).saturating_add(bytes as u64) > limit.rlim_cur
}

static LEVEL: AtomicU8 = AtomicU8::new(Level::Warn as u8);

pub(crate) fn set_level(level: Level) {
    LEVEL.store(level as u8, Ordering::Relaxed);
}

pub(crate) fn error(text: fmt::Arguments<'_>) {
    line(Level::Error, "ERROR", text);
}

pub(crate) fn warn(text: fmt::Arguments<'_>) {
    line(Level::Warn, "WARN", text);
}

pub(crate) fn info(text: fmt::Arguments<'_>) {
    line(Level::Info, "INFO", text);
}

pub(crate) fn debug(text: fmt::Arguments<'_>) {
    line(Level::Debug, "DEBUG", text);
}

fn line(level: Level, name: &str, text: fmt::Arguments<'_>) {
    if (level as u8) > LEVEL.load(Ordering::Relaxed) {
        return;
    }
    let mut line = Line { bytes: [0; 512], used: 0 };
    let _ = write!(line, "[NVSHARE][{name}]: {text}");
    line.finish();
}

/// A line of bounded length. Text that does not fit is cut off.
struct Line {
    bytes: [u8; 512],
    used: usize,
}

impl Line {
    fn finish(mut self) {
        self.used = self.used.min(self.bytes.len() - 1);
        if let Some(end) = self.bytes.get_mut(self.used) {
            *end = b'\n';
        }
        remember_standard_error();
        let Some(number) = STANDARD_ERROR.get() else { return };
        let mut ready = libc::pollfd { fd: number, events: libc::POLLOUT, revents: 0 };
        // A full pipe would block the thread, and a pipe without a reader would raise a signal. The line is dropped then.
        // SAFETY: one valid entry.
        if unsafe { libc::poll(&raw mut ready, 1, 0) } != 1 || ready.revents != libc::POLLOUT {
            return;
        }
        if exceeds_limit(number, self.used + 1) {
            return;
        }
        // SAFETY: `used + 1` bytes of the buffer are initialised. A failed write loses the line and nothing else.
        unsafe { libc::write(number, self.bytes.as_ptr().cast(), self.used + 1) };
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - 1 - self.used;
        let text = text.as_bytes();
        let taken = text.len().min(room);
        if let (Some(to), Some(from)) = (self.bytes.get_mut(self.used..self.used + taken), text.get(..taken))
        {
            to.copy_from_slice(from);
        }
        self.used += taken;
        Ok(())
    }
}
