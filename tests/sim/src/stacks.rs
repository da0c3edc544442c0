//! The memory of kernels' stacks: a context has it for as many threads as its card can run at once, whether kernels use it or not. It
//! follows the limit at once (measured on an H200: 264 MiB for each KiB of the limit; `probes/stack_limit_probe.cu`). The first kernel
//! that is launched then waits for the context's work, and later ones do not (measured; `probes/wake_window_probe.py`).

use std::ffi::c_int;

use crate::objects::Stream;
use crate::process::{Failure, Process, UNSUPPORTED_LIMIT};
use crate::stream::Point;
use crate::tables::Tables;

/// `CU_LIMIT_STACK_SIZE`: the one limit that is simulated.
const STACK_SIZE: c_int = 0;

/// The limit of a context at first, in bytes.
pub(crate) const AT_FIRST: usize = 1024;

/// The stacks of a context: their limit, and where their memory is.
#[derive(Debug)]
pub(crate) struct Stacks {
    limit: usize,
    memory: Option<u64>,
    /// No kernel has been launched since the limit changed.
    is_new: bool,
}

/// An error: it is another limit.
pub(crate) fn check(limit: c_int) -> Result<(), Failure> {
    if limit == STACK_SIZE { Ok(()) } else { Err(UNSUPPORTED_LIMIT) }
}

impl Process {
    /// Gives a context's stacks as much memory as a limit takes.
    pub(crate) fn set_stacks(&self, gpu: usize, context: u64, limit: usize) -> Result<(), Failure> {
        let bytes = self.world.config().stacks / AT_FIRST as u64 * limit as u64;
        let memory = self.occupy(gpu, bytes, context)?;
        let mut tables = self.tables();
        let is_new = tables.stacks.get(&context).is_some_and(|old| old.is_new || old.limit != limit);
        let old = tables.stacks.insert(context, Stacks { limit, memory, is_new });
        let gone = old.and_then(|old| tables.memory.remove(&old.memory?));
        drop(tables);
        gone.iter().for_each(|allocation| self.give_back(allocation));
        Ok(())
    }

    /// The limit of the current context.
    pub(crate) fn stack_limit(&self) -> Result<usize, Failure> {
        let tables = self.tables();
        let context = tables.current()?.family;
        Ok(tables.stacks.get(&context).map_or(AT_FIRST, |stacks| stacks.limit))
    }

    /// Sets the limit of the current context. That its work is waited for was not measured.
    pub(crate) fn set_stack_limit(&self, limit: usize) -> Result<(), Failure> {
        self.synchronize_context()?;
        let (gpu, context) = {
            let tables = self.tables();
            let current = tables.current()?;
            (current.gpu, current.family)
        };
        self.set_stacks(gpu, context, limit)
    }
}

impl Tables {
    /// The work that a kernel waits for which is about to be launched on a stream, because its stacks are new.
    pub(crate) fn before_new_stacks(&mut self, stream: &Stream) -> Vec<Point> {
        let is_capturing = self.capture_of(stream).is_some();
        let stacks = self.stacks.get_mut(&stream.family).filter(|_| !is_capturing);
        if stacks.is_some_and(|stacks| std::mem::take(&mut stacks.is_new)) {
            self.ends(|other| other.family == stream.family)
        } else {
            Vec::new()
        }
    }
}
