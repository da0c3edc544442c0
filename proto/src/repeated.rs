//! Lines of a log that would be written again and again for one cause.
//!
//! The first line is written at once. The same cause is not written again for [`SILENCE`]; the first line after that says how
//! many were left out. So a cause that lasts is seen, and cannot fill a log.

use std::fmt;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

/// One cause is written once in this time at most.
pub const SILENCE: Duration = Duration::from_secs(60);

/// How often a cause was written, and when.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Repeated {
    written: Option<Duration>,
    left_out: u64,
}

/// How many lines were left out since the last one, as the end of the next one: nothing if there were none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftOut(u64);

impl Repeated {
    /// Nothing was written yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { written: None, left_out: 0 }
    }

    /// The cause is there again at `now`, by any clock that does not go back. Returns how many lines were left out if one is to
    /// be written; else none, and one more is left out.
    pub fn again(&mut self, now: Duration) -> Option<LeftOut> {
        if self.written.is_some_and(|written| now.saturating_sub(written) < SILENCE) {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.written = Some(now);
        Some(LeftOut(std::mem::take(&mut self.left_out)))
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => f.write_str(" (and once more since the last such line)"),
            times => write!(f, " (and {times} times more since the last such line)"),
        }
    }
}

/// A place in a program that would write the same line again and again.
#[derive(Debug)]
pub struct ThrottledLine {
    write: fn(fmt::Arguments<'_>),
    state: Mutex<Option<(Instant, Repeated)>>,
}

impl ThrottledLine {
    /// A place whose lines `write` writes.
    #[must_use]
    pub const fn new(write: fn(fmt::Arguments<'_>)) -> Self {
        Self { write, state: Mutex::new(None) }
    }

    /// Writes a line, unless one was written a short time ago.
    pub fn say(&self, text: fmt::Arguments<'_>) {
        if let Some(left_out) = self.again(Instant::now()) {
            (self.write)(format_args!("{text}{left_out}"));
        }
    }

    fn again(&self, now: Instant) -> Option<LeftOut> {
        // Another thread is about to write the same; or it was when the process was forked, and nobody unlocks this.
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let (first, repeated) = state.get_or_insert((now, Repeated::new()));
        repeated.again(now.saturating_duration_since(*first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_cause_is_written_once_a_minute_with_how_often_it_was_left_out() {
        let mut cause = Repeated::new();
        let mut lines = Vec::new();
        for at in (0..=130_000).step_by(100) {
            lines.extend(cause.again(MS(at)).map(|left_out| (at, format!("x{left_out}"))));
        }
        let more = "x (and 599 times more since the last such line)".to_owned();
        assert_eq!(lines, [(0, "x".to_owned()), (60_000, more.clone()), (120_000, more)]);
    }

    #[test]
    fn rare_lines_are_written_each_time() {
        let mut cause = Repeated::new();
        for minute in 1..5 {
            let said = cause.again(SILENCE * minute).map(|left_out| left_out.to_string());
            assert_eq!(said.as_deref(), Some(""), "minute {minute}");
        }
        assert_eq!(cause.again(MS(240_001)), None);
        let said = cause.again(MS(300_000)).map(|left_out| left_out.to_string());
        assert_eq!(said.as_deref(), Some(" (and once more since the last such line)"));
    }

    #[test]
    fn a_failure_at_each_turn_writes_two_lines_in_a_minute_and_a_half() {
        let (seldom, begin) = (ThrottledLine::new(|_| ()), Instant::now());
        let written = (0..900).filter_map(|n| seldom.again(begin + MS(100) * n));
        let written: Vec<String> = written.map(|left_out| left_out.to_string()).collect();
        assert_eq!(written, ["", " (and 599 times more since the last such line)"]);
    }

    #[test]
    fn a_line_that_another_thread_writes_is_not_waited_for() {
        let seldom = ThrottledLine::new(|_| ());
        let held = seldom.state.lock().unwrap();
        assert_eq!(seldom.again(Instant::now()), None);
        drop(held);
        assert!(seldom.again(Instant::now()).is_some());
    }
}
