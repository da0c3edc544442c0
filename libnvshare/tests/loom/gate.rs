//! The gate: a thread marks itself, then looks at the gate; a closer closes the gate, then looks at the marks.

#[path = "../../src/work/gate/fence.rs"]
mod fence;
#[path = "../../src/work/gate/marks.rs"]
mod marks;

/// In the place of `work/gate/atomics.rs`.
mod atomics {
    use std::cell::Cell;

    pub(super) use loom::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

    /// A fence that is left out.
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub(super) enum Missing {
        Nothing,
        OfTheThread,
        OfTheCloser,
    }

    thread_local! {
        /// Loom runs all threads of a model on the thread of its test.
        pub(super) static MISSING: Cell<Missing> = const { Cell::new(Missing::Nothing) };
        /// The kernel runs fences on all threads, when it is asked to.
        pub(super) static KERNEL_HELPS: Cell<bool> = const { Cell::new(true) };
        /// The closer asks it to.
        pub(super) static CLOSER_ASKS: Cell<bool> = const { Cell::new(false) };
    }

    fn fence_unless(missing: Missing) {
        if MISSING.get() != missing {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    /// The thread's side of `membarrier`.
    pub(super) fn compiler_fence(_: Ordering) {
        if CLOSER_ASKS.get() {
            fence_unless(Missing::OfTheThread);
        }
    }

    /// The thread's own fence where the kernel does not help, and the closer's.
    pub(super) fn fence(_: Ordering) {
        let side = if IS_CLOSER.get() { Missing::OfTheCloser } else { Missing::OfTheThread };
        fence_unless(side);
    }

    loom::thread_local! {
        pub(super) static CLOSES: Cell<bool> = Cell::new(false);
    }

    pub(super) struct IsCloser;

    impl IsCloser {
        pub(super) fn get(&self) -> bool {
            CLOSES.with(Cell::get)
        }
    }

    pub(super) static IS_CLOSER: IsCloser = IsCloser;

    pub(super) fn can_fence_all_threads() -> bool {
        KERNEL_HELPS.get()
    }

    /// The closer's side of `membarrier`.
    pub(super) fn fence_all_threads() -> bool {
        CLOSER_ASKS.set(true);
        fence_unless(Missing::OfTheCloser);
        true
    }

    pub(super) fn outwait_stores() {
        unreachable!("the kernel fences whenever it has agreed to");
    }
}

use std::cell::Cell;

use loom::sync::Arc;
use loom::thread;

use atomics::{
    AtomicBool, AtomicI32, AtomicU32, CLOSER_ASKS, CLOSES, KERNEL_HELPS, MISSING, Missing, Ordering,
};
use fence::Fence;
use marks::Marks;

const OPEN: u32 = 0;
const CLOSED: u32 = 2;

struct Gate {
    state: AtomicU32,
    fence: Fence,
    marks: Marks,
    /// Something was submitted.
    submitted: AtomicU32,
}

impl Gate {
    fn new(owner: i32) -> Self {
        let fence = Fence { for_all: AtomicBool::new(false) };
        fence.prepare();
        Self {
            state: AtomicU32::new(OPEN),
            fence,
            marks: Marks { inside: AtomicU32::new(0), owner: AtomicI32::new(owner) },
            submitted: AtomicU32::new(0),
        }
    }

    /// A launch: `gate::enter`, the driver's call, `gate::leave`.
    fn launch(&self) {
        assert!(self.marks.is_outside());
        self.marks.step_in(&self.fence);
        if self.state.load(Ordering::SeqCst) == OPEN {
            self.submitted.store(1, Ordering::Relaxed);
        }
        self.marks.step_out();
    }

    /// The session's part: `gate::close`, `gate::nobody_inside`. True: nothing is submitted from now on, and what was
    /// is known.
    fn close(&self) -> bool {
        CLOSES.with(|closes| closes.set(true));
        self.state.store(CLOSED, Ordering::SeqCst);
        self.fence.before_look();
        self.marks.is_vacant(|_| false)
    }
}

/// Sets what the models take for granted. Whether the closer asks the kernel for its fence is seen from a closer that is alone.
fn suppose(kernel_helps: bool, missing: Missing) {
    KERNEL_HELPS.set(kernel_helps);
    MISSING.set(missing);
    CLOSER_ASKS.set(false);
    loom::model(|| {
        Gate::new(1).close();
    });
}

/// In every order: of a thread that launches and a closer, at least one sees the other.
fn meet(kernel_helps: bool, missing: Missing) {
    suppose(kernel_helps, missing);
    loom::model(|| {
        let gate = Arc::new(Gate::new(1));
        let thread = thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.launch()
        });
        if gate.close() {
            let before = gate.submitted.load(Ordering::Relaxed);
            thread.join().unwrap();
            let after = gate.submitted.load(Ordering::Relaxed);
            assert_eq!(before, after, "something was submitted behind the closed gate");
        } else {
            thread.join().unwrap();
        }
    });
}

#[test]
fn of_a_thread_and_a_closer_at_least_one_sees_the_other() {
    meet(true, Missing::Nothing);
}

#[test]
fn so_it_is_where_threads_fence_for_themselves() {
    meet(false, Missing::Nothing);
}

#[test]
#[should_panic(expected = "behind the closed gate")]
fn without_the_thread_s_fence_it_is_missed() {
    meet(true, Missing::OfTheThread);
}

#[test]
#[should_panic(expected = "behind the closed gate")]
fn without_the_closer_s_fence_it_is_missed() {
    meet(true, Missing::OfTheCloser);
}

#[test]
#[should_panic(expected = "behind the closed gate")]
fn without_the_thread_s_own_fence_it_is_missed() {
    meet(false, Missing::OfTheThread);
}

#[test]
#[should_panic(expected = "behind the closed gate")]
fn without_the_closer_s_own_fence_it_is_missed() {
    meet(false, Missing::OfTheCloser);
}

/// A slot that one thread gives back is another's at once; the closer takes neither for nobody.
#[test]
fn a_slot_that_changes_hands_hides_nobody() {
    suppose(true, Missing::Nothing);
    loom::model(|| {
        let gate = Arc::new(Gate::new(1));
        let ends = thread::spawn({
            let gate = Arc::clone(&gate);
            move || {
                gate.launch();
                gate.marks.give_back();
            }
        });
        let begins = thread::spawn({
            let gate = Arc::clone(&gate);
            move || {
                if gate.marks.take(2) {
                    gate.launch();
                }
            }
        });
        let is_closed = gate.close();
        let before = gate.submitted.load(Ordering::Relaxed);
        ends.join().unwrap();
        begins.join().unwrap();
        let after = gate.submitted.load(Ordering::Relaxed);
        assert!(!is_closed || before == after, "something was submitted behind the closed gate");
    });
}

/// The mark of a thread that is gone counts for nothing.
#[test]
fn a_thread_that_died_inside_keeps_no_gate_from_closing() {
    loom::model(|| {
        let gate = Gate::new(1);
        gate.marks.step_in(&gate.fence);
        CLOSES.with(|closes: &Cell<bool>| closes.set(true));
        assert!(!gate.marks.is_vacant(|_| false));
        assert!(gate.marks.is_vacant(|owner| owner == 1));
    });
}
