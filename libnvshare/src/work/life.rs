//! The life of a handle of the program: how long the library may use it.
//!
//! When a handle has ended, the driver does not return an error: it reads freed memory, and the process crashes (measured). So
//! the library makes each of its own calls with a handle of the program between [`Life::enter`] and the end of the [`Use`]. The
//! hook of the function that ends the handle calls [`Life::end`] first. No use begins after that, and the hook waits for uses
//! that have begun. Each use is one driver call, so the program waits for at most one call.
//!
//! A call that a hook adds to the program's own call with the same handle needs no use. The program promises the driver that
//! the handle lives as long as its call.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::process::threads;

/// The handle may be used.
const ALIVE: u32 = 0;
/// The program is ending the handle. It may not be used any more, but its work may still run.
const ENDING: u32 = 1;
/// The handle has ended, or does not exist yet.
const OVER: u32 = 2;

/// Why a handle may not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gone {
    /// The program is ending the handle, and the driver has not returned yet.
    Ending,
    /// The handle has ended.
    Over,
}

/// The life of one handle.
#[derive(Debug)]
pub(crate) struct Life {
    state: AtomicU32,
    uses: AtomicU32,
}

/// The handle lives at least as long as this.
#[derive(Debug)]
#[must_use = "the handle may end when this is dropped"]
pub(crate) struct Use<'a>(&'a Life);

impl Life {
    /// The life of a handle that was just created.
    pub(crate) const fn begun() -> Self {
        Self { state: AtomicU32::new(ALIVE), uses: AtomicU32::new(0) }
    }

    /// The life of a handle that does not exist yet. [`begin`](Self::begin) begins it.
    pub(crate) const fn none() -> Self {
        Self { state: AtomicU32::new(OVER), uses: AtomicU32::new(0) }
    }

    /// Keeps the handle alive for one driver call.
    pub(crate) fn enter(&self) -> Result<Use<'_>, Gone> {
        // This side announces the use and then reads the state; `end` writes the state and then reads the uses. At least one
        // of them sees the other.
        self.uses.fetch_add(1, Ordering::SeqCst);
        let held = Use(self);
        match self.state.load(Ordering::SeqCst) {
            ALIVE => Ok(held),
            ENDING => Err(Gone::Ending),
            _ => Err(Gone::Over),
        }
    }

    /// Whether the handle lives now. It may end at any moment.
    pub(crate) fn is_alive(&self) -> bool {
        self.state.load(Ordering::SeqCst) == ALIVE
    }

    /// Notes that the program is about to end the handle, and waits until the library does not use it any more.
    pub(crate) fn end(&self) {
        self.state.store(ENDING, Ordering::SeqCst);
        while self.uses.load(Ordering::SeqCst) > 0 {
            threads::pause();
        }
    }

    /// Notes that the driver has ended the handle.
    pub(crate) fn over(&self) {
        self.state.store(OVER, Ordering::SeqCst);
    }

    /// Whether the handle has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.state.load(Ordering::SeqCst) == OVER
    }

    /// Notes that the handle lives: it is new, or the driver did not end it.
    pub(crate) fn begin(&self) {
        self.state.store(ALIVE, Ordering::SeqCst);
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.uses.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    #[test]
    fn no_use_begins_after_the_end_and_the_end_waits_for_those_that_have_begun() {
        let (life, ended) = (&Life::begun(), &AtomicBool::new(false));
        let held = life.enter().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                life.end();
                ended.store(true, Ordering::SeqCst);
            });
            while life.is_alive() {
                std::thread::yield_now();
            }
            assert_eq!(life.enter().err(), Some(Gone::Ending));
            std::thread::sleep(Duration::from_millis(5));
            assert!(!ended.load(Ordering::SeqCst), "a use was not waited for");
            drop(held);
        });
        assert!(ended.load(Ordering::SeqCst));
        life.over();
        assert_eq!(life.enter().err(), Some(Gone::Over));
        life.begin();
        assert!(life.enter().is_ok());
    }

    #[test]
    fn of_many_uses_none_overlaps_the_time_after_the_end() {
        let (life, freed, wrong) = (&Life::none(), &AtomicBool::new(true), &AtomicBool::new(false));
        let stop = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        if let Ok(_held) = life.enter()
                            && freed.load(Ordering::SeqCst)
                        {
                            wrong.store(true, Ordering::SeqCst);
                        }
                    }
                });
            }
            for _ in 0..2_000 {
                freed.store(false, Ordering::SeqCst);
                life.begin();
                std::thread::yield_now();
                life.end();
                freed.store(true, Ordering::SeqCst);
                life.over();
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert!(!wrong.load(Ordering::SeqCst));
    }
}
