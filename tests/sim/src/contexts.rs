//! Contexts that begin and end.

use std::sync::Arc;

use crate::handles;
use crate::memory::Allocation;
use crate::objects::Context;
use crate::process::{self, Bound, Failure, INVALID_CONTEXT, INVALID_VALUE, Process};
use crate::stacks;
use crate::stream::Point;
use crate::tables::{Primary, Tables};
use crate::world::Sort;

impl Tables {
    /// Adds a context under a handle of its own. Returns the handle.
    fn add_context(&mut self, gpu: usize, family: Option<u64>) -> Result<usize, Failure> {
        let handle = self.contexts.add_with(|handle| Context::new(handle, gpu, family));
        let legacy = Arc::clone(&self.contexts.get(handle)?.legacy);
        self.meet(&legacy);
        Ok(handle)
    }
}

impl Process {
    pub(crate) fn retain_primary(&self, device: i32) -> Result<usize, Failure> {
        let gpu = self.gpu_of(device)?;
        let mut tables = self.tables();
        let new = || Primary { handle: handles::fresh(), retained: 0, context: None };
        let primary = tables.primary.entry(gpu).or_insert_with(new);
        primary.retained += 1;
        let handle = primary.handle;
        let began = primary.context.is_none();
        let context = primary.context.get_or_insert_with(|| Context::new(handle, gpu, None));
        let legacy = Arc::clone(&context.legacy);
        let id = context.id;
        if began {
            tables.meet(&legacy);
            drop(tables);
            if let Err(failure) = self.furnish(gpu, id) {
                self.release_primary(device)?;
                return Err(failure);
            }
        }
        Ok(handle)
    }

    /// Whether a device's primary context is active.
    pub(crate) fn primary_is_active(&self, device: i32) -> Result<bool, Failure> {
        let gpu = self.gpu_of(device)?;
        Ok(self.tables().primary.get(&gpu).is_some_and(|primary| primary.context.is_some()))
    }

    pub(crate) fn release_primary(&self, device: i32) -> Result<(), Failure> {
        let gpu = self.gpu_of(device)?;
        let mut tables = self.tables();
        let primary = tables.primary.get_mut(&gpu).filter(|p| p.retained > 0).ok_or(INVALID_CONTEXT)?;
        primary.retained -= 1;
        let last = primary.retained == 0;
        drop(tables);
        if last { self.end_primary(gpu) } else { Ok(()) }
    }

    /// Resets a primary context: whoever retains it, all that was in it is gone. It begins anew when it is retained again.
    pub(crate) fn reset_primary(&self, device: i32) -> Result<(), Failure> {
        self.end_primary(self.gpu_of(device)?)
    }

    fn end_primary(&self, gpu: usize) -> Result<(), Failure> {
        let tables = self.tables();
        let Some(context) = tables.primary.get(&gpu).and_then(|primary| primary.context.as_ref()) else {
            return Ok(());
        };
        let (id, points) = (context.id, tables.ends(|stream| context.sees(stream)));
        drop(tables);
        points.iter().for_each(Point::wait);
        self.see_frees_in(id);
        let mut tables = self.tables();
        let Some(context) = tables.primary.get_mut(&gpu).and_then(|primary| primary.context.take()) else {
            return Ok(());
        };
        let mut gone = tables.end_context(&context);
        // The green contexts of the primary context are parts of it.
        for green in tables.contexts.end_those(|other| other.family == context.id) {
            tables.green.end_those(|&handle| handle == green.handle);
            gone.extend(tables.end_context(&green));
        }
        drop(tables);
        self.give_all_back(&gone);
        Ok(())
    }

    /// A context takes its memory: what it always has, and that of its kernels' stacks.
    fn furnish(&self, gpu: usize, context: u64) -> Result<(), Failure> {
        self.occupy(gpu, self.world.config().context, context)?;
        self.set_stacks(gpu, context, stacks::AT_FIRST)
    }

    /// A context, or a module in it, takes memory of its card, as long as it lives. Returns where; `None`: it takes none.
    pub(crate) fn occupy(&self, gpu: usize, bytes: u64, context: u64) -> Result<Option<u64>, Failure> {
        if bytes == 0 {
            return Ok(None);
        }
        self.allocate_on(gpu, bytes, Sort::Plain, Some(context)).map(Some)
    }

    fn give_all_back(&self, gone: &[Arc<Allocation>]) {
        gone.iter().for_each(|allocation| self.give_back(allocation));
    }

    pub(crate) fn create_context(&self, device: i32) -> Result<usize, Failure> {
        let gpu = self.gpu_of(device)?;
        let mut tables = self.tables();
        let handle = tables.add_context(gpu, None)?;
        let bound = tables.bind(handle)?;
        drop(tables);
        if let Err(failure) = self.furnish(gpu, bound.context) {
            self.end_own(handle)?;
            return Err(failure);
        }
        process::push(bound);
        Ok(handle)
    }

    /// Waits for the context's work, and ends what it has with it.
    pub(crate) fn destroy_context(&self, handle: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        if tables.primary.values().any(|primary| primary.handle == handle)
            || tables.green.values().any(|&green| green == handle)
        {
            return Err(INVALID_CONTEXT);
        }
        let context = tables.contexts.get(handle)?;
        let (id, family) = (context.id, context.family);
        // From now on no call is made on the context, and its captures end with it.
        let _ = tables.look_at_context(id, family);
        let points = tables.ends(|stream| stream.context == id);
        drop(tables);
        points.iter().for_each(Point::wait);
        self.see_frees_in(id);
        self.end_own(handle)?;
        if process::bound().is_some_and(|bound| bound.context == id) {
            process::pop();
        }
        Ok(())
    }

    fn end_own(&self, handle: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        let context = tables.contexts.end(handle)?;
        let gone = tables.end_context(&context);
        drop(tables);
        self.give_all_back(&gone);
        Ok(())
    }

    /// Adds a use of the current context, which is not a primary one.
    pub(crate) fn attach(&self) -> Result<usize, Failure> {
        let mut tables = self.tables();
        let handle = tables.current()?.handle;
        tables.contexts.get_mut(handle)?.usage += 1;
        Ok(handle)
    }

    /// Takes a use away; the last one ends the context.
    pub(crate) fn detach(&self, handle: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        let context = tables.contexts.get_mut(handle)?;
        if context.usage > 1 {
            context.usage -= 1;
            return Ok(());
        }
        drop(tables);
        self.destroy_context(handle)
    }

    pub(crate) fn set_current(&self, handle: usize) -> Result<(), Failure> {
        let bound = if handle == 0 { None } else { Some(self.tables().bind(handle)?) };
        process::pop();
        bound.into_iter().for_each(process::push);
        Ok(())
    }

    /// Makes a green context: a part of a device, which keeps the primary context.
    pub(crate) fn create_green(&self, device: i32) -> Result<usize, Failure> {
        let primary = self.retain_primary(device)?;
        let gpu = self.gpu_of(device)?;
        let mut tables = self.tables();
        let family = tables.context(primary)?.id;
        let context = tables.add_context(gpu, Some(family))?;
        Ok(tables.green.add(context))
    }

    /// Ends a green context and its streams; their work goes on.
    pub(crate) fn destroy_green(&self, green: usize) -> Result<(), Failure> {
        let mut tables = self.tables();
        let handle = tables.green.end(green)?;
        let gpu = tables.contexts.get(handle)?.gpu;
        drop(tables);
        self.end_own(handle)?;
        let device = self.ordinal_of(gpu);
        // The primary context may have been reset meanwhile.
        self.release_primary(device).or(Ok(()))
    }

    /// The handle of a green context's context.
    pub(crate) fn of_green(&self, green: usize) -> Result<usize, Failure> {
        if green == 0 { Err(INVALID_VALUE) } else { self.tables().green.get(green).copied() }
    }

    /// The handle of the context that is current in the calling thread, whether it lives or not.
    pub(crate) fn current_handle(&self) -> usize {
        process::bound().map_or(0, |bound: Bound| bound.handle)
    }
}
