//! Times of libraries that the scheduler counts on.

use std::time::Duration;

/// How often a library looks for a scheduler.
pub const RECONNECT_EVERY: Duration = Duration::from_secs(1);

/// Time without a submission, since all work was complete, after which a library says that its program is idle. A shorter time would
/// count a program as idle between its steps if it waits for each of them.
pub const IDLE_AFTER: Duration = Duration::from_millis(25);

/// The same of a program whose last spells of work were short and had no pauses of half of this length. Most of them are requests, or
/// cells of a notebook, and the GPU stands still until the library says that they are over.
pub const LEARNED_IDLE_AFTER: Duration = Duration::from_millis(4);
