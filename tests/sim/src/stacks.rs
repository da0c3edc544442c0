//! The memory of kernels' stacks: a context has it for as many threads as its card can run at once, whether kernels use it or not. It
//! follows the limit at once (measured on an H200: 264 MiB for each KiB of the limit; `probes/stack_limit_probe.cu`).

use std::ffi::c_int;

use crate::process::{Failure, Process, UNSUPPORTED_LIMIT};

/// `CU_LIMIT_STACK_SIZE`: the one limit that is simulated.
const STACK_SIZE: c_int = 0;

/// The limit of a context at first, in bytes.
pub(crate) const AT_FIRST: usize = 1024;

/// The stacks of a context: their limit, and where their memory is.
#[derive(Debug)]
pub(crate) struct Stacks {
    limit: usize,
    memory: Option<u64>,
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
        let old = tables.stacks.insert(context, Stacks { limit, memory }).and_then(|old| old.memory);
        let gone = old.and_then(|base| tables.memory.remove(&base));
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
