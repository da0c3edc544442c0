//! Lines on standard error, when the user wants them.
//!
//! A line is formatted on the stack and written by one `write`: no allocation, no lock, nothing to go wrong in a
//! host that has closed or filled its standard error. Standard output is the host's alone.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, Ordering};

/// How much is logged; each level includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
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

/// A line of bounded length; what does not fit is cut off.
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
        // SAFETY: `used + 1` bytes of the buffer are initialised. A failed write loses the line and nothing else.
        unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.used + 1) };
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
