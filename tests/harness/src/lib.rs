//! Builds and runs the parts of nvshare together: the real library, the real scheduler, real programs, on the
//! simulated driver or on a real one.

mod artifacts;
mod guest;
mod program;
mod scheduler;
mod world;

pub use artifacts::Artifacts;
pub use guest::guest;
pub use program::{Finished, Outcome, Program, Running};
pub use scheduler::{Scheduler, Status};
pub use world::{Moved, Ran, World};

use std::time::{Duration, Instant};

/// How long a program may take: two minutes, or `NVSHARE_TEST_PATIENCE` in seconds.
pub(crate) fn patience() -> Duration {
    let seconds =
        std::env::var("NVSHARE_TEST_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(120);
    Duration::from_secs(seconds)
}

/// Looks again and again until it sees what it waits for.
///
/// # Panics
/// When that takes longer than `patience`; `what` says what was waited for.
pub fn wait_until<T>(what: &str, patience: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(begin.elapsed() < patience, "waited {patience:?} in vain: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
