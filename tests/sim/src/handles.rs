//! Handles and their lifetimes.
//!
//! The driver does not check whether a handle that it is given has ended: it reads freed memory. Here such a call stops the
//! process with a line that names the call and the handle. A value that was never a handle gives an error code.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::checkpoint;
use crate::config::Config;
use crate::exit;
use crate::process::{self, Failure, INVALID_CONTEXT, INVALID_HANDLE, NOT_PERMITTED};

static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
static REUSES: AtomicBool = AtomicBool::new(false);
static ENTRY_US: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The entry point that this thread has called.
    static CALL: Cell<&'static str> = const { Cell::new("the driver") };
    /// This thread runs a function of the host.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Takes the settings of handles from the configuration.
pub(crate) fn configure(config: &Config) {
    REUSES.store(config.reuse_handles, Ordering::Relaxed);
    ENTRY_US.store(config.entry_us as usize, Ordering::Relaxed);
}

/// Whether ended handles are handed out again.
pub(crate) fn reuses() -> bool {
    REUSES.load(Ordering::Relaxed)
}

/// A call that is under way, as those see it who wait for it.
#[derive(Debug)]
pub(crate) struct Call {
    _at_exit: exit::Call,
    _at_checkpoint: checkpoint::Call,
}

/// An entry point is called. An error: it may not be called from here, or not any more, or its card is lost.
pub(crate) fn enter(call: &'static str) -> Result<Call, Failure> {
    CALL.with(|current| current.set(call));
    if IN_HOST_FUNCTION.with(Cell::get) {
        return Err(NOT_PERMITTED);
    }
    let at_checkpoint = checkpoint::begin(call)?;
    let at_exit = exit::hold_off(call)?;
    process::look_at_card(call)?;
    Ok(Call { _at_exit: at_exit, _at_checkpoint: at_checkpoint })
}

/// Runs a function of the host, from which the driver may not be called.
pub(crate) fn as_host_function(body: impl FnOnce()) {
    IN_HOST_FUNCTION.with(|inside| inside.set(true));
    body();
    IN_HOST_FUNCTION.with(|inside| inside.set(false));
}

/// A call with a handle has begun and has not read the handle yet: in this time another thread may end it.
pub(crate) fn before_looking() {
    let micros = ENTRY_US.load(Ordering::Relaxed);
    if micros > 0 {
        std::thread::sleep(Duration::from_micros(micros as u64));
    }
}

/// A handle that was never used before and is not used again.
pub(crate) fn fresh() -> usize {
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// Stops the process: it made a call with an ended handle.
fn stop(what: &str, handle: usize) -> ! {
    let call = CALL.with(Cell::get);
    stop_with(&format!("nvsim: {call} was called with {what} {handle:#x}, which has ended\n"))
}

/// Stops the process with a line.
pub(crate) fn stop_with(line: &str) -> ! {
    let mut line = line.to_owned();
    if std::env::var_os("NVSIM_BACKTRACE").is_some() {
        line.push_str(&std::backtrace::Backtrace::force_capture().to_string());
    }
    // SAFETY: the line lives through the call; one write, so that lines of several threads stay whole.
    unsafe {
        libc::write(2, line.as_ptr().cast(), line.len());
        libc::abort()
    }
}

/// The handles of one kind.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    what: &'static str,
    live: HashMap<usize, T>,
    ended: HashSet<usize>,
    /// Ended handles, to be handed out again: the last first.
    free: Vec<usize>,
}

impl<T> Handles<T> {
    pub(crate) fn of(what: &'static str) -> Self {
        Self { what, live: HashMap::new(), ended: HashSet::new(), free: Vec::new() }
    }

    /// A new handle.
    pub(crate) fn add(&mut self, value: T) -> usize {
        self.add_with(|_| value)
    }

    /// A new handle, for a value that has to know it.
    pub(crate) fn add_with(&mut self, make: impl FnOnce(usize) -> T) -> usize {
        let handle = self.free.pop().unwrap_or_else(fresh);
        self.ended.remove(&handle);
        self.live.insert(handle, make(handle));
        handle
    }

    pub(crate) fn get(&self, handle: usize) -> Result<&T, Failure> {
        self.live.get(&handle).ok_or_else(|| self.absent(handle))
    }

    pub(crate) fn get_mut(&mut self, handle: usize) -> Result<&mut T, Failure> {
        if !self.live.contains_key(&handle) {
            return Err(self.absent(handle));
        }
        self.live.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// Ends a handle.
    pub(crate) fn end(&mut self, handle: usize) -> Result<T, Failure> {
        let value = self.live.remove(&handle).ok_or_else(|| self.absent(handle))?;
        self.ended.insert(handle);
        if reuses() {
            self.free.push(handle);
        }
        Ok(value)
    }

    /// Ends the handles of objects whose owner ends.
    pub(crate) fn end_those(&mut self, which: impl Fn(&T) -> bool) -> Vec<T> {
        let gone: Vec<usize> =
            self.live.iter().filter(|(_, value)| which(value)).map(|(&handle, _)| handle).collect();
        gone.into_iter().filter_map(|handle| self.end(handle).ok()).collect()
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.live.values()
    }

    /// The object of a handle, if it lives.
    pub(crate) fn find_value(&self, handle: usize) -> Option<&T> {
        self.live.get(&handle)
    }

    pub(crate) fn find(&self, which: impl Fn(&T) -> bool) -> Option<usize> {
        self.live.iter().find(|(_, value)| which(value)).map(|(&handle, _)| handle)
    }

    /// Stops the process: a handle lives and leads to an object that has ended.
    pub(crate) fn lost(&self, handle: usize) -> ! {
        stop(self.what, handle)
    }

    fn absent(&self, handle: usize) -> Failure {
        if self.ended.contains(&handle) {
            stop(self.what, handle);
        }
        if self.what == "context" { INVALID_CONTEXT } else { INVALID_HANDLE }
    }
}
