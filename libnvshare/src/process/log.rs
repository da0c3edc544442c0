//! The log: lines on standard error.
//!
//! A line is formatted on the stack and written by one `write`, without an allocation or a lock. So a closed or full standard
//! error does no harm. Nothing is written to standard output. The program may have closed the standard error that it was
//! started with, and opened a file under its number. That file gets no lines.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use crate::process::descriptor::Descriptor;

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

/// The standard error that the program was started with.
static STANDARD_ERROR: Descriptor = Descriptor::none();

/// Remembers the program's standard error. Only the first call has an effect.
pub(crate) fn remember_standard_error() {
    static ONCE: AtomicBool = AtomicBool::new(false);
    if !ONCE.swap(true, Ordering::SeqCst) {
        STANDARD_ERROR.set(libc::STDERR_FILENO);
    }
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
