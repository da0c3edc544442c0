//! Prints the position of each thread of a program on request: a program that hangs is asked before it is ended. Prints how far
//! a slow program is as long as it gets on, so that it is not held for one that hangs.

use std::sync::{Mutex, PoisonError};

use crate::exec::Run;

/// The signal that asks for the positions.
pub(crate) const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Seconds between two looks whether a program gets on.
const PERIOD: libc::time_t = 5;

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
    let answer = move || {
        let mut before = (0, 0);
        loop {
            let period = libc::timespec { tv_sec: PERIOD, tv_nsec: 0 };
            // SAFETY: a set of blocked signals, and a valid time.
            let signal =
                unsafe { libc::sigtimedwait(&raw const signals, std::ptr::null_mut(), &raw const period) };
            let Some(run) = current() else { continue };
            if signal == SIGNAL {
                run.whereabouts();
                continue;
            }
            let now = (run.plan.seed, run.steps_over());
            if now.0 == before.0 && now.1 > before.1 {
                println!("storm: seed {}: {} of {} steps are over", now.0, now.1, run.plan.steps.len());
            }
            before = now;
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
