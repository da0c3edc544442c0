//! The handshake on the machine's own processors: the assumptions of the loom tests about `membarrier` hold.

use super::atomics::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use super::fence::Fence;
use super::marks::Marks;

/// Waits in a tight loop until a count is reached: the two sides have to meet in the same nanoseconds.
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
fn on_this_machine_at_least_one_of_a_thread_and_a_closer_sees_the_other() {
    const ROUNDS: u32 = 500_000;
    let fence = Fence { for_all: AtomicBool::new(false) };
    fence.prepare();
    let marks = Marks { inside: AtomicU32::new(0), owner: AtomicI32::new(1) };
    let [closed, saw_closed, begun, done] = [const { AtomicU32::new(0) }; 4];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                reach(&begun, round);
                marks.step_in(&fence);
                saw_closed.store(closed.load(Ordering::SeqCst), Ordering::Relaxed);
                done.store(round, Ordering::SeqCst);
            }
        });
        for round in 1..=ROUNDS {
            marks.step_out();
            closed.store(0, Ordering::SeqCst);
            begun.store(round, Ordering::SeqCst);
            // The other side takes a while to see that, and not always the same time.
            (0..round % 64).for_each(|_| std::hint::spin_loop());
            closed.store(1, Ordering::SeqCst);
            fence.before_look();
            let is_vacant = marks.is_vacant(|_| false);
            reach(&done, round);
            assert_ne!((saw_closed.load(Ordering::Relaxed), is_vacant), (0, true), "round {round}");
        }
    });
}
