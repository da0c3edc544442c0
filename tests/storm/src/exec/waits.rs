//! Host functions, and those among them that wait for other threads.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Fault, Run};
use crate::plan::{Id, Region};
use nvshare_test_cuda::cu;

/// Time after which a host function reports that it waits in vain: longer than those wait who run the program.
pub(super) const PATIENCE: Duration = Duration::from_secs(600);

const HELPER_IS_THERE: u32 = 1;
const OPEN: u32 = 2;
const DONE: u32 = 3;

/// The state of each window, and the data of its host function, by the step that opens the window.
#[derive(Debug, Default)]
pub(crate) struct Windows {
    states: Mutex<HashMap<usize, (u32, Option<&'static Waiting>)>>,
    changed: Condvar,
}

impl Windows {
    fn set(&self, window: usize, state: u32, waiting: Option<&'static Waiting>) {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        states.insert(window, (state, waiting));
        self.changed.notify_all();
    }

    fn wait(&self, window: usize, state: u32) -> Option<&'static Waiting> {
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match states.get(&window) {
                Some(&(reached, waiting)) if reached >= state => return waiting,
                _ => states = self.changed.wait(states).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Waits until the helper is at its step: then no earlier step of the helper can wait for the window.
    pub(crate) fn meet(&self, window: usize) {
        let _ = self.wait(window, HELPER_IS_THERE);
    }
}

/// The data of a waiting host function. They are leaked: the driver may run the function at any time.
#[derive(Debug)]
pub(crate) struct Waiting {
    done: AtomicU32,
    seed: u64,
    step: usize,
}

extern "C" fn wait(data: *mut c_void) {
    // SAFETY: a leaked `Waiting`.
    let waiting = unsafe { &*data.cast::<Waiting>() };
    let begin = Instant::now();
    while waiting.done.load(Ordering::SeqCst) == 0 {
        std::thread::sleep(Duration::from_micros(100));
        if begin.elapsed() > PATIENCE {
            println!(
                "storm: seed {} step {}: HANG: the host function waits in vain for the thread of the next step",
                waiting.seed, waiting.step
            );
            // SAFETY: ends the process.
            unsafe { libc::_exit(3) }
        }
    }
}

extern "C" fn count(data: *mut c_void) {
    // SAFETY: the run, which lives for ever.
    unsafe { &*data.cast::<Run>() }.callbacks.fetch_add(1, Ordering::SeqCst);
}

impl Run {
    pub(super) fn callback(&'static self, stream: Id) -> Result<(), Fault> {
        let data = std::ptr::from_ref(self) as usize;
        Ok(cu!(self.driver, "cuLaunchHostFunc", self.stream(stream) => usize,
            count => extern "C" fn(*mut c_void), data => usize)?)
    }

    /// Opens a window, and waits until it is over.
    #[allow(clippy::too_many_arguments, reason = "the fields of one step")]
    pub(super) fn window(
        &'static self,
        index: usize,
        stream: Id,
        region: Region,
        value: u32,
        module: Id,
        hold_ms: u64,
    ) -> Result<(), Fault> {
        let waiting: &'static Waiting =
            Box::leak(Box::new(Waiting { done: AtomicU32::new(0), seed: self.plan.seed, step: index }));
        let data = std::ptr::from_ref(waiting) as usize;
        cu!(self.driver, "cuLaunchHostFunc", self.stream(stream) => usize,
            wait => extern "C" fn(*mut c_void), data => usize)?;
        self.kernel(module, false, region, value, 0, stream)?;
        self.windows.set(index, OPEN, Some(waiting));
        if hold_ms > 0 {
            std::thread::sleep(Duration::from_millis(hold_ms));
            let _ = self.windows.wait(index, DONE);
        }
        // In the other case this thread waits in the driver meanwhile.
        Ok(cu!(self.driver, "cuStreamSynchronize", self.stream(stream) => usize)?)
    }

    /// Does the work that a window waits for.
    #[allow(clippy::too_many_arguments, reason = "the fields of one step")]
    pub(super) fn help(
        &self,
        index: usize,
        stream: Id,
        region: Region,
        values: &[u32],
        module: Id,
        pause_ms: u64,
    ) -> Result<(), Fault> {
        let window = index - 1;
        self.windows.set(window, HELPER_IS_THERE, None);
        let waiting = self.windows.wait(window, OPEN).expect("an open window has one");
        std::thread::sleep(Duration::from_millis(pause_ms));
        for &value in values {
            self.kernel(module, false, region, value, 0, stream)?;
        }
        cu!(self.driver, "cuStreamSynchronize", self.stream(stream) => usize)?;
        waiting.done.store(1, Ordering::SeqCst);
        self.windows.set(window, DONE, None);
        Ok(())
    }
}
