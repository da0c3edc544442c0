//! Builds and runs the parts of nvshare together: the real library, the real scheduler, real programs, on the
//! simulated driver or on a real one.

mod artifacts;
mod executable;
mod group;
mod guest;
mod killed;
mod played;
mod program;
mod scheduler;
mod scratch;
mod terminal;
mod world;

pub use artifacts::Artifacts;
pub use executable::executable;
pub use group::{ControlGroup, MemoryGroup};
pub use guest::guest;
pub use killed::Killed;
pub use played::PlayedScheduler;
pub use program::{Finished, Outcome, Program, Running};
pub use scheduler::{Scheduler, Status};
pub use terminal::Terminal;
pub use world::{Moved, Ran, World};

use std::time::{Duration, Instant};

/// How long a program, or a condition that a test waits for, may take: five minutes, or `NVSHARE_TEST_PATIENCE` in seconds.
#[must_use]
pub fn patience() -> Duration {
    let seconds =
        std::env::var("NVSHARE_TEST_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(300);
    Duration::from_secs(seconds)
}

/// Waits until a condition of a test is true, checking again and again. It has the same patience as all tests: the speed of
/// a machine decides how long a test takes, and not its result.
///
/// # Panics
/// When the condition does not become true; `what` names it.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < patience(), "waited {:?} in vain: {what}", patience());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Tests of programs whose memory moves, one for each way in which the library moves memory: functions that are given the
/// value of `NVSHARE_MEMORY`.
#[macro_export]
macro_rules! with_both_memories {
    ($($test:ident)*) => {
        mod managed {
            $( #[test] fn $test() { super::$test("managed") } )*
        }

        mod swap {
            $( #[test] fn $test() { super::$test("swap") } )*
        }
    };
}
