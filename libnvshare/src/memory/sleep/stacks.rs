//! The card's memory for the stacks of kernels, which a process gives back before it leaves its cards.
//!
//! A context has it for as many threads as its card can run at once. On an H200 that is 264 MiB for each KiB of the limit, which is
//! one KiB at first. The limit grows with the kernel that needs most. The driver's checkpoint would copy this memory. A limit of
//! zero gives it back in some 0.5 ms. With 4 KiB, the checkpoint then takes 0.23 s instead of 0.75 s (measured;
//! `tests/gpu/probes/stack_limit_probe.cu`).
//!
//! The driver may wait for a context's work when its limit changes (not measured). So all work has to be complete before, and no call of
//! the program may be under way, as it would find the other limit.
//!
//! The first kernel that is launched after a change waits for all work of the context (measured; `tests/gpu/probes/wake_window_probe.py`).
//! If that work is a function of the host that waits for the kernel, neither ends. So the library launches its own kernel first. A context
//! where it has none keeps its stacks. So does each one beside a green context, where this was not measured.

use std::sync::Arc;

use super::several_times;
use crate::driver;
use crate::driver::types::CUresult;
use crate::memory::backing::swap;
use crate::process::log;
use crate::work::contexts::{self, Context};

/// The contexts that have given the memory back, and their limits before, in bytes.
#[derive(Debug)]
pub(super) struct Stacks(Vec<(Arc<Context>, usize)>);

impl Stacks {
    /// No context has given anything back.
    pub(super) const fn none() -> Self {
        Self(Vec::new())
    }

    /// Gives the memory of contexts back. One that refuses keeps it.
    pub(super) fn give_back() -> Self {
        let all = contexts::all();
        if all.iter().any(|context| context.is_green()) {
            return Self::none();
        }
        let give_back = |context: Arc<Context>| {
            let limit = context.with(driver::stack_limit).ok()?.ok().filter(|limit| *limit > 0)?;
            context.with(|| driver::set_stack_limit(0)).ok()?.ok()?;
            Some((context, limit))
        };
        Self(all.into_iter().filter(swap::has_kernel).filter_map(give_back).collect())
    }

    /// Sets the limits as they were.
    pub(super) fn take_again(self) {
        for (context, limit) in self.0 {
            let set =
                || context.with(|| driver::set_stack_limit(limit)).unwrap_or(Err(CUresult::DEINITIALIZED));
            if let Err(error) = several_times(set) {
                log::warn(format_args!(
                    "the stacks of kernels had {limit} bytes a thread before the program slept, and cannot have them now: {error:?}"
                ));
            }
            if let Err(why) = swap::launch_kernel(&context) {
                log::debug(format_args!("the program's next kernel may wait for its other work: {why}"));
            }
        }
    }
}
