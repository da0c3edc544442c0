//! The fence between a thread's mark and its look at the gate, at the closer's expense.
//!
//! A thread marks itself and looks at the gate with every launch, and the gate closes once in a turn. So the closer has
//! the kernel run a full fence on every thread of the process (`membarrier`, Linux 4.14 and newer), and the thread only
//! keeps the compiler from changing the order: either its mark was there before that fence, and the closer sees it, or its
//! look comes after it, and sees the gate closed. Where the kernel has no such call, or a sandbox forbids it, each thread
//! fences for itself.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, compiler_fence};
use std::time::Duration;

use crate::process::threads;

/// The closer fences for everybody.
static FOR_ALL: AtomicBool = AtomicBool::new(false);

fn membarrier(command: i32) -> bool {
    // SAFETY: the call reads nothing but its arguments.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

/// Agrees with the kernel on it. Before that, and if it declines, threads fence for themselves.
pub(super) fn prepare() {
    if membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) {
        FOR_ALL.store(true, Ordering::SeqCst);
    }
}

/// Sets a mark, so that who looks at something after it, and who changes that and then calls [`everywhere`] before it
/// reads the mark, do not miss each other.
#[inline(always)]
pub(super) fn mark(place: &AtomicU32) {
    if FOR_ALL.load(Ordering::Relaxed) {
        place.store(1, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    } else {
        place.swap(1, Ordering::SeqCst);
    }
}

/// Runs a full fence on every thread.
pub(super) fn everywhere() {
    /// No processor keeps a store to itself for so long.
    const LONG: Duration = Duration::from_millis(1);
    if FOR_ALL.load(Ordering::SeqCst) && !membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED) {
        // The program has locked itself in since.
        FOR_ALL.store(false, Ordering::SeqCst);
        threads::sleep(LONG);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until a count is reached, closely: the two sides are to meet in the same nanoseconds.
    fn reach(count: &AtomicU32, value: u32) {
        for spins in 1u32.. {
            if count.load(Ordering::SeqCst) >= value {
                return;
            }
            if spins.is_multiple_of(1 << 12) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn of_a_thread_and_a_closer_at_least_one_sees_the_other() {
        const ROUNDS: u32 = 500_000;
        prepare();
        let [inside, closed, saw_closed, begun, done] = [const { AtomicU32::new(0) }; 5];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    reach(&begun, round);
                    mark(&inside);
                    saw_closed.store(closed.load(Ordering::SeqCst), Ordering::Relaxed);
                    done.store(round, Ordering::SeqCst);
                }
            });
            for round in 1..=ROUNDS {
                inside.store(0, Ordering::SeqCst);
                closed.store(0, Ordering::SeqCst);
                begun.store(round, Ordering::SeqCst);
                // The other side takes a while to see that, not always the same.
                (0..round % 64).for_each(|_| std::hint::spin_loop());
                closed.store(1, Ordering::SeqCst);
                everywhere();
                let saw_inside = inside.load(Ordering::SeqCst);
                reach(&done, round);
                assert_ne!((saw_closed.load(Ordering::Relaxed), saw_inside), (0, 0), "round {round}");
            }
        });
    }
}
