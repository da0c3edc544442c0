//! A moment in which none of the program's work runs. A call of the program needs it that has to change what work may use. So does
//! a call of ours in which the driver would wait for that work.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::drain::Drain;
use super::gate;
use super::submitted::Submitted;
use crate::process::lock::lock;
use crate::process::{lifecycle, threads};

/// How long a call of ours waits for a moment without work that comes by itself.
const REST_COMES: Duration = Duration::from_millis(500);
/// Between two looks for it.
const LOOK: Duration = Duration::from_millis(5);
/// An event behind complete work is complete after this time at most: each try waits for that, though a thread is kept out.
const EVENT_COMES: Duration = Duration::from_millis(1);

/// Held by the thread that has shut the gate.
static SHUTS: Mutex<()> = Mutex::new(());

/// How long work is waited for while a thread is kept out, at each try: the work may depend on that thread.
const PATIENCE: [Duration; 4] =
    [Duration::from_millis(100), Duration::from_millis(500), Duration::from_secs(2), Duration::from_secs(5)];
/// Between two tries, threads get on.
const PAUSE: Duration = Duration::from_millis(20);
/// How long work is waited for in all: it may depend on the thread that waits.
const MAX_PATIENCE: Duration = Duration::from_secs(60);

/// How long a try may still wait.
#[derive(Debug)]
struct Patience {
    /// The time for which threads may still be kept out.
    left: Duration,
    looked: Instant,
    until: Instant,
}

impl Patience {
    /// Whether it lasts, after a wait since the last look in which a thread was kept out or not.
    fn lasts(&mut self, now: Instant, is_anybody_kept_out: bool) -> bool {
        if is_anybody_kept_out {
            self.left = self.left.saturating_sub(now.saturating_duration_since(self.looked));
        }
        self.looked = now;
        !self.left.is_zero() && now < self.until
    }
}

/// Shuts the gate while this lives.
struct Shut;

impl Drop for Shut {
    fn drop(&mut self) {
        gate::reopen();
    }
}

/// Makes a call while nothing of the program's runs on a device, and no thread submits anything. The calling thread has to be
/// inside the gate, so that the lock is not given back meanwhile. One thread at a time. `None`: work does not come to an end.
pub(crate) fn make<T>(call: impl FnOnce() -> T) -> Option<T> {
    let until = Instant::now() + MAX_PATIENCE;
    for (tried, left) in PATIENCE.into_iter().enumerate() {
        if tried > 0 {
            threads::sleep(PAUSE);
        }
        let _alone = lock(&SHUTS);
        gate::shut();
        let _shut = Shut;
        if is_quiet_within(Patience { left, looked: Instant::now(), until }) {
            return Some(call());
        }
    }
    None
}

/// Makes a call of ours in which the driver would wait for the program's work, while none runs and no thread submits any. It waits
/// for such a moment: for [`REST_COMES`] without keeping a thread out, then keeping threads out for at most `keeps_out`. `None`: work
/// runs.
pub(crate) fn make_at_rest<T>(keeps_out: Duration, call: impl FnOnce() -> T) -> Option<T> {
    let until = Instant::now() + REST_COMES;
    loop {
        wait_for_submitted_work(until);
        let now = Instant::now();
        let is_last = now >= until || lifecycle::is_exiting();
        let left = if is_last { keeps_out.max(EVENT_COMES) } else { EVENT_COMES };
        if let Ok(_alone) = SHUTS.try_lock() {
            gate::shut();
            let _shut = Shut;
            if is_quiet_within(Patience { left, looked: now, until: now + left }) {
                return Some(call());
            }
        }
        if is_last {
            return None;
        }
        threads::sleep(LOOK);
    }
}

/// Waits while the work runs that is submitted by now, at most until then.
fn wait_for_submitted_work(until: Instant) {
    let mut submitted = Submitted::by_now();
    while submitted.as_mut().is_some_and(|work| !work.forget_complete())
        && Instant::now() < until
        && !lifecycle::is_exiting()
    {
        threads::sleep(LOOK);
    }
}

fn is_quiet_within(mut patience: Patience) -> bool {
    let mut waits = || patience.lasts(Instant::now(), gate::keeps_anybody_out()) && !lifecycle::is_exiting();
    while !gate::nobody_else_inside() {
        if !waits() {
            return false;
        }
        threads::pause();
    }
    let mut work = Drain::begin();
    while work.poll() > 0 {
        if !waits() {
            return false;
        }
        threads::pause();
    }
    !lifecycle::is_exiting()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_counts_in_which_threads_are_kept_out() {
        let begin = Instant::now();
        let at = |ms| begin + Duration::from_millis(ms);
        let mut patience = Patience { left: PATIENCE[0], looked: begin, until: begin + MAX_PATIENCE };
        assert!(patience.lasts(at(20_000), false));
        assert!(patience.lasts(at(20_060), true));
        assert!(patience.lasts(at(50_000), false));
        assert!(!patience.lasts(at(50_040), true));
        let mut patience = Patience { left: PATIENCE[0], looked: begin, until: begin + MAX_PATIENCE };
        assert!(patience.lasts(at(59_999), false) && !patience.lasts(at(60_000), false));
    }
}
