//! How long the core waits for what it asked for, and when it asks again.

use std::time::Duration;

/// A deferred drain is tried again after this many times the patience that it used up, and a little more. So
/// a client loses at most a fifth of its time to drains that fail.
pub(crate) const DRAIN_RETRY_FACTOR: u32 = 4;

/// A client that deferred this many drains in a row counts as one that does not leave, until the next drain
/// is tried. At a pause the scheduler can take the lock from it at once: there is nothing to drain then.
pub(crate) const STUBBORN_AFTER: u32 = 3;

/// Returns how long a drain may make no progress: 200 ms, doubled by each deferral in a row. So a kernel of
/// any length gets time to complete.
pub(crate) fn drain_patience(deferrals: u32) -> Duration {
    Duration::from_millis(200) * 2u32.pow(deferrals.min(8))
}

/// Returns how long the answer to DROP_LOCK may take that says that the drain was given up. The client counts its patience from when it has
/// read the message, and looks at its work now and then.
pub(crate) fn answers_within(patience: Duration) -> Duration {
    patience + patience / 4
}

/// Returns how long after its deferral a drain is tried again. The wait is stretched by up to one patience,
/// by an amount derived from the current time. Otherwise a program that cannot drain at one point of its
/// cycle could be asked at that same point each time.
pub(crate) fn retry_after(deferrals: u32, now: Duration) -> Duration {
    /// 2⁶⁴ divided by the golden ratio: every digit of a factor changes the upper digits of the product.
    const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
    let part = (now.as_micros() as u64).wrapping_mul(SPREAD) >> 56;
    drain_patience(deferrals) * (DRAIN_RETRY_FACTOR * 256 + part as u32) / 256
}

/// How long until EVICT is sent again to a client that did not answer, or that kept failing to give memory
/// back.
pub(crate) const EVICT_RETRY: Duration = Duration::from_secs(10);

/// Returns how long the next eviction waits after `failures` in a row that left memory where it was. The
/// reason of the first may be over soon: memory whose context is being ended, a piece that the program is
/// just using.
pub(crate) fn evict_again_after(failures: u32) -> Duration {
    (Duration::from_millis(125) * 2u32.pow(failures.min(8))).min(EVICT_RETRY)
}

/// A process that has left a GPU and is there after this time lives on: others wait no longer for its end. A
/// process may write a large core file, or give much memory back.
pub(crate) const ENDS_WITHIN: Duration = Duration::from_secs(60);

/// How long room is kept for the allocation that waited for it.
pub(crate) const PROMISE_LASTS: Duration = Duration::from_millis(500);

/// The longest time, beyond the grace, that a restore may take, whatever its client says is absent.
pub(crate) const MAX_RESTORE: Duration = Duration::from_secs(120);
