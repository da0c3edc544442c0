//! Kernels on the cards, and the counts of the memory that moved beside them.

use std::sync::atomic::Ordering;

use super::{BLOCK, Here, Leaving, Ran, TRACE, World, now_ns};

impl World {
    /// Runs a kernel: one at a time on each card, whatever process launches it.
    pub(crate) fn run_kernel(&self, gpu: usize, body: impl FnOnce()) {
        let held = self.hold(gpu, true);
        let here = self.here(gpu);
        here.running.store(true, Ordering::SeqCst);
        if here.leaving.load(Ordering::SeqCst) > 0 {
            // SAFETY: the card's field, which is atomic.
            unsafe { &(*self.gpu(gpu)).moved.evicted_in_use }.fetch_add(BLOCK, Ordering::Relaxed);
        }
        let begin_ns = now_ns();
        body();
        here.running.store(false, Ordering::SeqCst);
        let ran = Ran { process: std::process::id(), gpu: self.card(gpu) as u32, begin_ns, end_ns: now_ns() };
        // SAFETY: the trace's slot is this kernel's alone, once a round.
        unsafe {
            let at = (*self.header).ran.fetch_add(1, Ordering::SeqCst) as usize % TRACE;
            (*self.header).trace[at] = ran;
        }
        drop(held);
        // A process that waits for the card comes next: the lock is not fair, and this process may have another kernel.
        std::thread::yield_now();
    }

    pub(super) fn here(&self, gpu: usize) -> &Here {
        &self.here[gpu]
    }

    /// Bytes that this process's kernels and copies were the first to touch, on all cards.
    pub(crate) fn touched_here(&self) -> u64 {
        self.here.iter().map(|here| here.touched.load(Ordering::Relaxed)).sum()
    }

    /// A call moves memory of a card to the host as long as the returned value lives.
    pub(crate) fn begin_leaving(&self, gpu: usize) -> Leaving<'_> {
        let leaving = &self.here(gpu).leaving;
        leaving.fetch_add(1, Ordering::SeqCst);
        Leaving(leaving)
    }

    /// Bytes free on a card.
    pub(crate) fn free_bytes(&self, gpu: usize) -> u64 {
        let _held = self.hold(gpu, false);
        self.free_undescribed(gpu);
        let at = self.gpu(gpu);
        // SAFETY: the card's fields, under its lock.
        u64::from(unsafe { (*at).free_frames - (*at).kept_frames }) * BLOCK
    }

    /// Bytes moved on a card so far: faulted, touched, pushed out, restored, evicted, and evicted in use; and the calls that took frames back.
    pub(crate) fn moved(&self, gpu: usize) -> [u64; 7] {
        // SAFETY: the card's fields, which are atomic.
        let moved = unsafe { &(*self.gpu(gpu)).moved };
        let all = [
            &moved.faulted,
            &moved.touched,
            &moved.pushed_out,
            &moved.restored,
            &moved.evicted,
            &moved.evicted_in_use,
            &moved.taken_back,
        ];
        all.map(|counter| counter.load(Ordering::Relaxed))
    }

    /// The kernels that ran, oldest first, as far as they are kept.
    pub(crate) fn trace(&self) -> Vec<Ran> {
        let mut all: Vec<Ran> = self.latest(TRACE).collect();
        all.reverse();
        all
    }

    /// The kernels that ran last, `most` of them at most, newest first.
    fn latest(&self, most: usize) -> impl Iterator<Item = Ran> {
        // SAFETY: an atomic field.
        let ran = unsafe { &(*self.header).ran }.load(Ordering::SeqCst) as usize;
        // SAFETY: a copy of plain data; a slot that is being written may be torn, which only the newest is.
        (ran - ran.min(most)..ran).rev().map(|i| unsafe { (*self.header).trace[i % TRACE] })
    }
}
