//! Prints the position of each thread of a program on request: a program that hangs is asked before it is ended.

use std::sync::{Mutex, PoisonError};

use crate::exec::Run;

/// The signal that asks for the positions.
pub(crate) const SIGNAL: libc::c_int = libc::SIGUSR1;

/// The program that runs.
static CURRENT: Mutex<Option<&'static Run>> = Mutex::new(None);

/// Answers from now on. No other thread may run yet, since the signal must not interrupt one.
pub(crate) fn begin() {
    // SAFETY: a set of signals, all zeros, which the next calls fill.
    let mut signals: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives; the mask of this thread is that of all that it starts.
    unsafe {
        libc::sigemptyset(&raw mut signals);
        libc::sigaddset(&raw mut signals, SIGNAL);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
    }
    let answer = move || loop {
        let mut signal = 0;
        // SAFETY: a set of blocked signals and a place for the one that came.
        if unsafe { libc::sigwait(&raw const signals, &raw mut signal) } == 0 {
            current().into_iter().for_each(Run::whereabouts);
        }
    };
    std::thread::Builder::new().name("storm-watch".to_owned()).spawn(answer).expect("a thread");
}

fn current() -> Option<&'static Run> {
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that a program begins.
pub(crate) fn begins(run: &'static Run) {
    println!("storm: seed {} begins", run.plan.seed);
    *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Some(run);
}
