//! The log: lines on standard error.
//!
//! A line is formatted on the stack and written by one `write`, without an allocation or a lock, so a closed or full
//! standard error does no harm. Nothing is written to standard output. If the program has closed the standard error that it
//! was started with, and opened a file under the same number, that file gets no lines.

use std::fmt::{self, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, TryLockError};
use std::time::Instant;

use nvshare_proto::{LeftOut, Repeated};

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

/// A place in the program that would write the same warning again and again. It writes one a minute at most, with how often it
/// was left out.
#[derive(Debug)]
pub(crate) struct Seldom(Mutex<Option<(Instant, Repeated)>>);

impl Seldom {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub(crate) fn warn(&self, text: fmt::Arguments<'_>) {
        if let Some(left_out) = self.again(Instant::now()) {
            warn(format_args!("{text}{left_out}"));
        }
    }

    fn again(&self, now: Instant) -> Option<LeftOut> {
        // Another thread is about to write the same; or it was when the process was forked, and nobody unlocks this.
        let mut state = match self.0.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let (first, repeated) = state.get_or_insert((now, Repeated::new()));
        repeated.again(now.saturating_duration_since(*first))
    }
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_failure_at_each_turn_writes_two_lines_in_a_minute_and_a_half() {
        let (seldom, begin) = (Seldom::new(), Instant::now());
        let written = (0..900).filter_map(|n| seldom.again(begin + Duration::from_millis(100) * n));
        let written: Vec<String> = written.map(|left_out| left_out.to_string()).collect();
        assert_eq!(written, ["", " (and 599 times more since the last such line)"]);
    }

    #[test]
    fn a_line_that_another_thread_writes_is_not_waited_for() {
        let seldom = Seldom::new();
        let held = seldom.0.lock().unwrap();
        assert_eq!(seldom.again(Instant::now()), None);
        drop(held);
        assert!(seldom.again(Instant::now()).is_some());
    }
}
