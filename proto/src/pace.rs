//! Times of libraries that the scheduler counts on.

use std::time::Duration;

/// How often a library looks for a scheduler.
pub const RECONNECT_EVERY: Duration = Duration::from_secs(1);

/// Time without a submission, since all work was complete, after which a library says that its program is idle. A shorter time would
/// count a program as idle between its steps if it waits for each of them.
pub const IDLE_AFTER: Duration = Duration::from_millis(25);
