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

/// Alone on its cache line: a store to it leaves the processor late. A load of a line that was read before returns at once.
#[repr(align(128))]
struct Apart<T>(T);

/// Rounds in which the two sides met, and saw each other. Without the fence, a hundred rounds and more go wrong before this
/// many have met (measured).
const MEETINGS: u32 = 20_000;
/// Rounds at most: on a busy machine the two sides rarely run at the same time.
const ROUNDS: u32 = 500_000;

#[test]
fn on_this_machine_at_least_one_of_a_thread_and_a_closer_sees_the_other() {
    let fence = Fence { for_all: AtomicBool::new(false) };
    fence.prepare();
    let marks = Apart(Marks { inside: AtomicU32::new(0), owner: AtomicI32::new(1) });
    let words = [const { Apart(AtomicU32::new(0)) }; 4];
    let [closed, saw_closed, begun, done] = words.each_ref().map(|apart| &apart.0);
    let over = AtomicBool::new(false);
    let (mut meetings, mut rounds) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                reach(begun, round);
                if over.load(Ordering::SeqCst) {
                    break;
                }
                // The gate's state is in this processor's cache when the thread steps in.
                std::hint::black_box(closed.load(Ordering::SeqCst));
                (0..round / 32 % 32).for_each(|_| std::hint::spin_loop());
                marks.0.step_in(&fence);
                saw_closed.store(closed.load(Ordering::SeqCst), Ordering::Relaxed);
                done.store(round, Ordering::SeqCst);
            }
        });
        while meetings < MEETINGS && rounds < ROUNDS {
            rounds += 1;
            marks.0.step_out();
            closed.store(0, Ordering::SeqCst);
            begun.store(rounds, Ordering::SeqCst);
            // The other side takes a while to see that, and not always the same time.
            (0..rounds % 32).for_each(|_| std::hint::spin_loop());
            closed.store(1, Ordering::SeqCst);
            fence.before_look();
            let is_vacant = marks.0.is_vacant(|_| false);
            reach(done, rounds);
            let seen = (saw_closed.load(Ordering::Relaxed), is_vacant);
            meetings += u32::from(seen == (1, false));
            if seen == (0, true) {
                over.store(true, Ordering::SeqCst);
                begun.store(ROUNDS, Ordering::SeqCst);
            }
            assert_ne!(seen, (0, true), "round {rounds}, after {meetings} meetings");
        }
        over.store(true, Ordering::SeqCst);
        begun.store(ROUNDS, Ordering::SeqCst);
    });
}
